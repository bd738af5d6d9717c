"""Ape-X DQN: many environments, each with an exploration of its own, fill one prioritized replay.

Horgan et al. 2018, https://arxiv.org/abs/1803.00933      Docs: docs/algorithms/apex_dqn.md

    Q(s, a) = V(s) + A(s, a) - mean_a' A(s, a')                    value
    G_t  = Σ_{k<n} γᵏ r_{t+k} + γⁿ (1 - terminated) Q(s', a*; θ⁻)  td_target, td_error
    a*   = argmax_a Q(s', a; θ),  s' = s_{t+n}                     td_target, td_error
    L(θ) = E[w ½ (G_t - Q(s_t, a_t; θ))²]                          loss_fn
    p    = |δ_t| + 10⁻⁶,  δ_t = G_t - Q(s_t, a_t; θ)               collect_trajectory, _run_train
    P(i) = p_i^α / Σ_k p_k^α,  w_i = (M P(i))^-β / max_j w_j       _run_train
    θ⁻   = τ θ + (1 - τ) θ⁻                                        sync_target
    ε_i  = ε^(1 + α i / (N - 1)),  of environment i                spread_exploration
    a    = argmax_a Q(s, a; θ), or uniform with probability ε_i    epsilon_greedy
"""

from collections.abc import Generator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from gymnasium import spaces
from jax import Array, lax

from common.action_masks import action_mask, mask_actions
from common.envs import EnvBackend, EnvState, make_env, require_action_space
from common.exploration import random_action
from common.networks import MLP, Encoder
from common.ranges import Fraction, NonNegative, Positive
from common.replay import Batch, Replay, ReplayState, Transition
from common.rollout import Trajectory, collect_rollout
from common.schedules import count_events
from common.targets import n_step_return

from common.run.config import check_config, check_replay, check_rollout
from common.run.evaluator import Evaluator
from common.run.logger import log_intervals, log_points
from common.run.runner import run


@dataclass(frozen=True)
class Config:
    """Hyper-parameters; for CartPole-v1, and in `atari` nearly those of the paper."""

    env_id: str = "CartPole-v1"  # an envpool or Gymnasium id, or gymnax/ID or pgx/ID
    env_backend: EnvBackend = "auto"  # auto: envpool where it knows the id, else Gymnasium
    env_module: str | None = None  # module to import first, to register your environment
    env_kwargs: tuple[str, ...] = ()  # options of the environment, as KEY=VALUE KEY=VALUE ...
    num_envs: Positive[int] = 8  # environments stepped in parallel
    env_workers: NonNegative[int] = 0  # processes that step Gymnasium environments; 0: this one
    seed: NonNegative[int] = 1  # seed of networks, exploration, sampling and environments
    total_timesteps: Positive[int] = 500_000  # env steps over all envs; a multiple of num_envs
    log_frequency: Positive[int] = 10_000  # env steps between log points, rounded up to rollouts
    learning_rate: Positive[float] = 1e-3  # step size of RMSProp
    rmsprop_epsilon: Positive[float] = 0.01  # what RMSProp adds to the variance of gradients
    max_grad_norm: Positive[float] = 40.0  # longest gradient; longer ones are scaled down to it
    num_steps: Positive[int] = 50  # steps of each environment in a trajectory
    buffer_size: Positive[int] = 10_000  # transitions in the replay buffer, over all environments
    gamma: Fraction = 0.99  # discount of one step
    priority_exponent: Positive[float] = 0.6  # α: how much priorities count
    importance_exponent: Fraction = 0.4  # β, the correction of the bias
    n_step: Positive[int] = 3  # n: steps of reward in a target before it bootstraps
    frame_stack: Positive[int] = 1  # frames in an observation; the buffer stores single ones
    tau: Fraction = 1.0  # share of θ in a target update; 1 copies it, as in the paper
    target_network_frequency: Positive[int] = 2_000  # env steps between two target updates
    batch_size: Positive[int] = 128  # transitions in a minibatch
    base_epsilon: Fraction = 0.1  # ε, that of the first environment; 0.4 in the paper
    epsilon_exponent: NonNegative[float] = 1.0  # α: the last one's is ε^(1 + α); 7 in the paper
    evaluation_epsilon: Fraction = 0.0  # ε in evaluation
    learning_starts: NonNegative[int] = 10_000  # env steps before the first update
    train_frequency: Positive[int] = 10  # env steps between two updates

    def __post_init__(self) -> None:
        check_config(self)
        check_replay(self)
        check_rollout(self)


PRESETS: dict[str, dict[str, Any]] = {
    "classic": {},
    "atari": {
        "num_envs": 64,
        "total_timesteps": 10_000_000,
        "log_frequency": 32_000,
        "learning_rate": 2.5e-4 / 4,
        "rmsprop_epsilon": 1.5e-7,
        "buffer_size": 1_000_000,
        "frame_stack": 4,
        "target_network_frequency": 160_000,
        "batch_size": 512,
        "base_epsilon": 0.4,
        "epsilon_exponent": 7.0,
        "evaluation_epsilon": 0.001,
        "learning_starts": 50_000,
        "train_frequency": 64,
    },
}


class Model(nnx.Module):
    """Q-network of two streams, each with hidden layers of its own behind a shared encoder."""

    def __init__(self, obs_space: spaces.Space, action_space: Any, rngs: nnx.Rngs):
        self.encoder = Encoder(obs_space, rngs, cnn_dense=False)
        hidden = (self.encoder.num_units,) if self.encoder.has_cnn else (120, 84)
        self.value_torso = MLP((self.encoder.num_features, *hidden), rngs)
        self.advantage_torso = MLP((self.encoder.num_features, *hidden), rngs)
        self.value_head = nnx.Linear(hidden[-1], 1, rngs=rngs)
        self.advantage_head = nnx.Linear(hidden[-1], int(action_space.n), rngs=rngs)

    def value(self, obs: Any) -> Array:
        """V(s) + A(s, a) - mean_a' A(s, a') (eq. 9): [B, *obs] -> q_values [B, A]."""
        features = self.encoder(obs)  # [B, F]
        value = self.value_head(self.value_torso(features))  # [B, 1]
        advantages = self.advantage_head(self.advantage_torso(features))  # [B, A]
        return value + advantages - advantages.mean(axis=-1, keepdims=True)  # [B, A]


class LearnerState(NamedTuple):
    """Every array that learning changes."""

    params: Any
    target_params: Any
    opt_state: Any


class Algorithm:
    """Targets, loss and optimizer as pure functions of `LearnerState`."""

    def __init__(self, config: Config, obs_space: spaces.Space, action_space: spaces.Space):
        self.config = config
        self.make_model = partial(Model, obs_space, action_space)
        self.model = partial(nnx.merge, nnx.graphdef(self.make_model(nnx.Rngs(0))))
        clip = optax.clip_by_global_norm(config.max_grad_norm)
        rmsprop = optax.rmsprop(
            config.learning_rate, decay=0.95, eps=config.rmsprop_epsilon, centered=True
        )
        self.optimizer = optax.flatten(optax.chain(clip, rmsprop))

    def init(self, key: Array) -> LearnerState:
        """Draw new parameters; the target network starts as a copy."""
        params = nnx.to_pure_dict(nnx.state(self.make_model(nnx.Rngs(key))))
        target_params = jax.tree.map(jnp.copy, params)
        return LearnerState(params, target_params, self.optimizer.init(params))

    def predict(self, params: Any, obs: Any) -> Array:
        """[B, *obs] -> q_values [B, A]."""
        return mask_actions(self.model(params).value(obs), action_mask(obs))

    def td_target(self, state: LearnerState, batch: Batch) -> Array:
        """r + γ (1 - terminated) Q(s', argmax_a' Q(s', a'; θ); θ⁻), over n steps if n_step > 1."""
        next_action = self.predict(state.params, batch.next_obs).argmax(axis=-1)  # [B]
        next_q_values = self.predict(state.target_params, batch.next_obs)  # [B, A]
        next_value = jnp.take_along_axis(next_q_values, next_action[:, None], axis=-1)[:, 0]  # [B]
        return batch.reward + batch.discount * next_value  # [B], discount = γ^m (1 - terminated)

    def td_error(self, state: LearnerState, trajectory: Trajectory) -> Array:
        """δ_t = G_t - Q(s_t, a_t; θ) [T, N], of the Q-values acted on; all G_t end with row T."""
        rollout = trajectory.rollout
        last_q_values = self.predict(state.params, trajectory.last_obs)  # [N, A]
        q_values = jnp.concatenate([rollout.extras, last_q_values[None]])  # [T + 1, N, A]
        obs = jax.tree.map(
            lambda x, last: jnp.concatenate([x, last[None]]), rollout.obs, trajectory.last_obs
        )  # [T + 1, N, *obs]
        flat_obs = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), obs)  # [(T + 1) N, *obs]
        target_q_values = self.predict(state.target_params, flat_obs).reshape(q_values.shape)
        next_action = q_values.argmax(axis=-1, keepdims=True)  # [T + 1, N, 1]
        value = jnp.take_along_axis(target_q_values, next_action, axis=-1)[..., 0]  # [T + 1, N]
        steps = rollout.reward, rollout.terminated, rollout.truncated, value
        returns = n_step_return(*steps, self.config.gamma, self.config.n_step)  # [T, N]
        q_value = jnp.take_along_axis(rollout.extras, rollout.action[..., None], axis=-1)[..., 0]
        return returns - q_value

    def loss_fn(
        self, params: Any, batch: Batch, td_target: Array
    ) -> tuple[Array, tuple[Array, dict[str, Array]]]:
        """E[w ½ (G - Q(s, a; θ))²], and the TD errors δ [B]."""
        q_values = self.predict(params, batch.obs)  # [B, A]
        q_value = jnp.take_along_axis(q_values, batch.action[:, None], axis=-1)[:, 0]  # [B]
        chex.assert_equal_shape([q_value, td_target, batch.weight])
        loss = 0.5 * (batch.weight * (td_target - q_value) ** 2).mean()
        return loss, (td_target - q_value, {"td_loss": loss, "q_values": q_value.mean()})

    def learn(
        self, state: LearnerState, batch: Batch
    ) -> tuple[LearnerState, Array, dict[str, Array]]:
        """One gradient step on a batch; the TD errors [B] from before it."""
        td_target = self.td_target(state, batch)  # [B]
        gradient = jax.grad(self.loss_fn, has_aux=True)
        grads, (td_error, metrics) = gradient(state.params, batch, td_target)
        updates, opt_state = self.optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return state._replace(params=params, opt_state=opt_state), td_error, metrics

    def sync_target(self, state: LearnerState) -> LearnerState:
        """θ⁻ = τ θ + (1 - τ) θ⁻."""
        target = optax.incremental_update(state.params, state.target_params, self.config.tau)
        return state._replace(target_params=target)


class Agent:
    """Exploration, and the way from environment to algorithm."""

    def __init__(self, config: Config, algorithm: Algorithm):
        self.config = config
        self.algorithm = algorithm
        self.spread_exploration(0, config.num_envs)

    def spread_exploration(self, first: int, total: int) -> None:
        """Let the environments be the numbers first, first + 1, ... of `total` (not traceable)."""
        number = first + jnp.arange(self.config.num_envs)  # [N]
        share = number / max(1, total - 1)  # [N] from 0 to 1
        self.epsilon = self.config.base_epsilon ** (1 + self.config.epsilon_exponent * share)  # [N]

    def predict(self, state: LearnerState, obs: Any, key: Array) -> Array:
        """Action [N] to evaluate with."""
        q_values = self.algorithm.predict(state.params, obs)  # [N, A]
        return self.epsilon_greedy(q_values, obs, self.config.evaluation_epsilon, key)

    def sample(self, state: LearnerState, obs: Any, key: Array) -> tuple[Array, Array]:
        """Action [N] to train with, and the Q-values [N, A] that it was chosen by."""
        q_values = self.algorithm.predict(state.params, obs)  # [N, A]
        return self.epsilon_greedy(q_values, obs, self.epsilon, key), q_values

    def learn(
        self, state: LearnerState, batch: Batch
    ) -> tuple[LearnerState, Array, dict[str, Array]]:
        """One gradient step on a batch."""
        return self.algorithm.learn(state, batch)

    def epsilon_greedy(self, q_values: Array, obs: Any, epsilon: Any, key: Array) -> Array:
        """The greedy action, or a uniform one with probability ε, drawn for each environment."""
        explore_key, action_key = jax.random.split(key)
        explore = jax.random.uniform(explore_key, q_values.shape[:1]) < epsilon  # [N]
        uniform = random_action(action_key, q_values.shape, action_mask(obs))  # [N]
        return jnp.where(explore, uniform, q_values.argmax(axis=-1))  # [N]


class TrainState(NamedTuple):
    """The whole training process: what a checkpoint holds."""

    learner: LearnerState
    env: EnvState
    replay: ReplayState
    key: Array
    step: Array  # [] int32, env steps done over all environments


class Trainer:
    """The training process: collect trajectories, store them, learn in one compiled program."""

    pace = "asynchronous"  # of Explorers: a block is complete in itself

    def __init__(self, config: Config = Config()):
        self.config = config
        self.env = make_env(config)
        require_action_space("apex_dqn", self.env, spaces.Discrete)
        self.algorithm = Algorithm(config, self.env.observation_space, self.env.action_space)
        self.agent = Agent(config, self.algorithm)
        self.replay = Replay(
            config.buffer_size,
            config.num_envs,
            config.gamma,
            config.n_step,
            config.frame_stack,
            config.priority_exponent,
            block_length=config.num_steps + config.frame_stack,
        )
        self.evaluator = Evaluator(config, self.agent.predict)
        self.state = self.init_state(jax.random.key(config.seed))
        self.compiled_run = jax.jit(self.run_iterations, donate_argnums=0)

    def __call__(self) -> Generator[dict, None, None]:
        """Train to total_timesteps; yield log_data at each log point."""
        rollout_size = self.config.num_envs * self.config.num_steps
        try:
            for start, num_steps in log_intervals(self):
                num_rollouts = -(-num_steps // rollout_size)
                self.state, metrics = self.compiled_run(self.state, num_rollouts)
                yield from log_points(self.env, self.state, start, {}, metrics)
        finally:
            self.env.close()

    def evaluate(self, num_episodes: int = 20) -> dict:
        """Play full episodes in environments of their own; log_data of their raw returns."""
        return self.evaluator(self.state.learner, int(self.state.step), num_episodes)

    def init_state(self, key: Array) -> TrainState:
        """New parameters, new episodes and an empty buffer."""
        learner_key, env_key, key = jax.random.split(key, 3)
        learner = self.algorithm.init(learner_key)
        env = self.env.reset(env_key)
        action, _ = jax.eval_shape(self.agent.sample, learner, env.obs, key)
        replay = self.replay.init(env.obs, action)
        return TrainState(learner, env, replay, key, jnp.zeros((), jnp.int32))

    def run_iterations(
        self, state: TrainState, num_iterations: int
    ) -> tuple[TrainState, dict[str, Array]]:
        """(actor, learner) × num_iterations; total_timesteps or a failure may cut the last one."""

        def iterate(_: Array, carry: tuple) -> tuple:
            state, metrics = carry
            state, trajectory, is_complete = self.collect_trajectory(state)
            return lax.cond(is_complete, self.learn_trajectory, skip, state, metrics, trajectory)

        def skip(state: TrainState, metrics: dict, _: Trajectory) -> tuple[TrainState, dict]:
            return state, metrics

        state = state._replace(env=self.env.reset_summary(state.env))
        return lax.fori_loop(0, num_iterations, iterate, (state, self.zero_metrics(state)))

    def zero_metrics(self, state: TrainState) -> dict[str, Array]:
        """The zeros that metrics are added to, derived from what an update returns."""
        _, metrics = jax.eval_shape(self._run_train, state)
        return optax.tree.zeros_like(metrics)

    def collect_trajectory(self, state: TrainState) -> tuple[TrainState, Trajectory, Array]:
        """The actor (Algorithm 1): num_steps vector steps, and the first |δ| [T, N] of their rows.

        Uses neither the replay buffer nor the optimizer's state. The last result tells whether all
        steps were made; the end of a run or an environment that failed may stop them.
        """
        config = self.config
        steps_left = (config.total_timesteps - state.step) // config.num_envs
        state, rollout, is_complete = collect_rollout(
            self.env, self._run_collect, state, config.num_steps, steps_left
        )
        trajectory = Trajectory(rollout, state.env.obs)
        td_error = self.algorithm.td_error(state.learner, trajectory)  # [T, N]
        rollout = rollout._replace(extras=jnp.abs(td_error))
        return state, trajectory._replace(rollout=rollout), is_complete

    def learn_trajectory(
        self, state: TrainState, metrics: dict[str, Array], trajectory: Trajectory
    ) -> tuple[TrainState, dict[str, Array]]:
        """Store a trajectory, whose steps `state.step` counts; learn what is due (Algorithm 2)."""
        config = self.config

        def train(_: Array, carry: tuple) -> tuple:
            state, metrics = carry
            state, new_metrics = self._run_train(state)
            return state, jax.tree.map(jnp.add, metrics, new_metrics)

        state = state._replace(replay=self._store(state.replay, trajectory))
        previous = state.step - config.num_envs * config.num_steps
        due = partial(count_events, previous, state.step, config.learning_starts)
        num_updates = due(config.train_frequency)
        state, metrics = lax.fori_loop(0, num_updates, train, (state, metrics))
        num_syncs = due(config.target_network_frequency)
        state = lax.fori_loop(0, num_syncs, self._run_sync, state)
        metrics["charts/target_updates"] += num_syncs
        return state, metrics

    def _store(self, replay: ReplayState, trajectory: Trajectory) -> ReplayState:
        """Write a trajectory's rows, and one that holds only the observation behind them."""
        rollout = trajectory.rollout._replace(extras=())
        last = jax.tree.map(lambda x: jnp.zeros_like(x[0]), rollout)
        last = last._replace(obs=trajectory.last_obs)
        block = jax.tree.map(
            lambda x, row: jnp.concatenate([x, row[None]]), rollout, last
        )  # [T + 1, N, ...]
        return self.replay.add_block(replay, block, trajectory.rollout.extras)

    def _run_collect(self, state: TrainState) -> tuple[TrainState, Transition]:
        """One vector step: act, step the environments."""
        key, action_key = jax.random.split(state.key)
        obs = state.env.obs  # [N, *obs]
        action, q_values = self.agent.sample(state.learner, obs, action_key)  # [N], [N, A]
        env, timestep = self.env.step(state.env, action)
        transition = Transition(
            obs=obs,
            action=action,
            reward=timestep.reward,
            terminated=timestep.terminated,
            truncated=timestep.truncated,
            valid=~state.env.ended,
            extras=q_values,
        )
        step = state.step + self.config.num_envs
        return state._replace(env=env, key=key, step=step), transition

    def _run_train(self, state: TrainState) -> tuple[TrainState, dict[str, Array]]:
        """One update on a batch from replay."""
        key, sample_key = jax.random.split(state.key)
        batch = self.replay.sample(
            state.replay, sample_key, self.config.batch_size, self.config.importance_exponent
        )
        learner, td_error, metrics = self.agent.learn(state.learner, batch)
        replay = self.replay.update_priorities(state.replay, batch.index, td_error)
        counts = {"charts/updates": jnp.ones(()), "charts/target_updates": jnp.zeros(())}
        return state._replace(learner=learner, replay=replay, key=key), metrics | counts

    def _run_sync(self, _: Array, state: TrainState) -> TrainState:
        return state._replace(learner=self.algorithm.sync_target(state.learner))


if __name__ == "__main__":
    run(Trainer, Config, PRESETS)
