"""R2D2: recurrent Q-learning from prioritized sequences that begin at a stored memory.

Kapturowski et al. 2019, https://openreview.net/forum?id=r1lyTjAqYX   Docs: docs/algorithms/r2d2.md

    h_t = core(h_{t-1}, s_t), h_{t-1} = 0 at an episode's start    networks.RecurrentCore
    y_t = h(Σ_{k<n} γᵏ r_{t+k} + γⁿ h⁻¹(Q(s_{t+n}, a*; θ⁻)))       td_target
    a*  = argmax_a Q(s_{t+n}, a; θ)                                td_target
    h(x) = sign(x) (√(|x| + 1) - 1) + 10⁻³ x                       targets.n_step_rescaled_return
    L(θ) = E[w δ_t²],  δ_t = y_t - Q(s_t, a_t; θ)                  loss_fn
    p    = η max_t |δ_t| + (1 - η) mean_t |δ_t|                    priority
    θ⁻   = τ θ + (1 - τ) θ⁻                                        sync_target
    ε_i  = ε^(1 + α i / (N - 1)),  of environment i                spread_exploration
    a    = argmax_a Q(s, a; θ), or uniform with probability ε_i    epsilon_greedy
"""

from collections.abc import Generator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from gymnasium import spaces
from jax import Array, lax

from common.action_masks import action_mask, mask_actions
from common.envs import EnvBackend, EnvState, make_env, require_action_space
from common.errors import UserError
from common.exploration import random_action
from common.networks import MLP, Encoder, Memory, RecurrentCore, initial_core
from common.ranges import Fraction, NonNegative, Positive
from common.replay import Replay, ReplayState, Sequences, Transition, interrupt
from common.rollout import Trajectory, collect_rollout
from common.schedules import count_events
from common.targets import n_step_rescaled_return, value_unrescale

from common.run.config import check_config, check_replay
from common.run.evaluator import Evaluator
from common.run.logger import log_intervals, log_points
from common.run.runner import run


@dataclass(frozen=True)
class Config:
    """Hyper-parameters; the defaults are small ones for CartPole-v1."""

    env_id: str = "CartPole-v1"  # an envpool or Gymnasium id, or gymnax/ID or pgx/ID
    env_backend: EnvBackend = "auto"  # auto: envpool where it knows the id, else Gymnasium
    env_module: str | None = None  # module to import first, to register your environment
    env_kwargs: tuple[str, ...] = ()  # options of the environment, as KEY=VALUE KEY=VALUE ...
    num_envs: Positive[int] = 8  # environments stepped in parallel
    env_workers: NonNegative[int] = 0  # processes that step Gymnasium environments; 0: this one
    seed: NonNegative[int] = 1  # seed of networks, exploration, sampling and environments
    total_timesteps: Positive[int] = 500_000  # env steps over all envs; a multiple of num_envs
    log_frequency: Positive[int] = 10_000  # env steps between two log points
    learning_rate: Positive[float] = 5e-4  # step size of Adam; 1e-4 in the paper
    buffer_size: Positive[int] = 10_000  # transitions in the replay buffer, over all environments
    gamma: Fraction = 0.99  # discount of one step
    n_step: Positive[int] = 5  # n, steps of reward in a target before it bootstraps
    frame_stack: Positive[int] = 1  # frames in an observation; the buffer stores single ones
    tau: Fraction = 1.0  # share of θ in a target update; 1 copies it, as in the paper
    target_network_frequency: Positive[int] = 500  # env steps between two target updates
    batch_size: Positive[int] = 32  # sequences in a minibatch; 64 in the paper
    sequence_length: Positive[int] = 20  # steps of a sequence that are learned; 80 in the paper
    sequence_period: Positive[int] = 10  # steps from the start of one to the next; 40 there
    burn_in: NonNegative[int] = 10  # steps before them that only warm up the memory; 40 there
    core: Literal["lstm", "gru"] = "lstm"  # recurrent core
    core_size: Positive[int] = 128  # units of the core and of both streams; 512 in the paper
    priority_exponent: Positive[float] = 0.9  # how much priorities count
    importance_exponent: Fraction = 0.6  # β, the correction of the bias
    priority_eta: Fraction = 0.9  # η, weight of a sequence's largest error in its priority
    base_epsilon: Fraction = 0.1  # ε, that of the first environment; 0.4 in the paper
    epsilon_exponent: NonNegative[float] = 7.0  # α: the last environment explores with ε^(1 + α)
    evaluation_epsilon: Fraction = 0.0  # ε in evaluation
    learning_starts: NonNegative[int] = 10_000  # env steps before the first update
    train_frequency: Positive[int] = 40  # env steps between two updates
    num_steps: Positive[int] = 40  # steps of each environment that an Explorer sends at once

    def __post_init__(self) -> None:
        check_config(self)
        check_replay(self)
        if self.sequence_period > self.sequence_length:
            raise UserError(
                f"--sequence-period {self.sequence_period} is more than --sequence-length "
                f"{self.sequence_length}, so that rows between are never learned; lower the period"
            )
        rows = self.burn_in + self.sequence_length + self.n_step
        if self.learning_starts < rows * self.num_envs:
            raise UserError(
                f"--learning-starts {self.learning_starts} comes before the buffer holds a "
                f"complete sequence; with --num-envs {self.num_envs} and sequences of {rows} steps "
                f"use at least {rows * self.num_envs}"
            )


PRESETS: dict[str, dict[str, Any]] = {
    "classic": {},
    "atari": {
        "env_kwargs": ("episodic_life=False", "reward_clip=False"),
        "num_envs": 64,
        "total_timesteps": 10_000_000,
        "log_frequency": 20_480,
        "learning_rate": 1e-4,
        "buffer_size": 1_000_000,
        "gamma": 0.997,
        "frame_stack": 4,
        "target_network_frequency": 40_000,
        "batch_size": 64,
        "sequence_length": 80,
        "sequence_period": 40,
        "burn_in": 40,
        "core_size": 512,
        "base_epsilon": 0.4,
        "evaluation_epsilon": 0.001,
        "learning_starts": 80_000,
        "train_frequency": 1_280,
    },
}


class Model(nnx.Module):
    """Recurrent Q-network: encoder, a hidden layer for vectors, core, and two dueling streams."""

    def __init__(self, config: Config, obs_space: spaces.Space, action_space: Any, rngs: nnx.Rngs):
        self.encoder = Encoder(obs_space, rngs)
        hidden = () if self.encoder.has_cnn else (120,)
        size = config.core_size
        self.torso = MLP((self.encoder.num_features, *hidden), rngs)
        self.core = RecurrentCore(config.core, self.torso.num_features, size, rngs)
        self.value_torso = MLP((size, size), rngs)
        self.advantage_torso = MLP((size, size), rngs)
        self.value_head = nnx.Linear(size, 1, rngs=rngs)
        self.advantage_head = nnx.Linear(size, int(action_space.n), rngs=rngs)

    def unroll(self, obs: Any, core: Any, valid: Array) -> tuple[Array, Any]:
        """[B, T, *obs], state [B, ...], valid [B, T] -> q_values [B, T, A], new state."""
        flat_obs = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), obs)  # [B * T, *obs]
        features = self.torso(self.encoder(flat_obs)).reshape(*valid.shape, -1)  # [B, T, F]
        output, core = self.core(core, features, valid)  # [B, T, H]
        value = self.value_head(self.value_torso(output))  # [B, T, 1]
        advantages = self.advantage_head(self.advantage_torso(output))  # [B, T, A]
        return value + advantages - advantages.mean(axis=-1, keepdims=True), core


class LearnerState(NamedTuple):
    """Every array that learning changes."""

    params: Any
    target_params: Any
    opt_state: Any


class Algorithm:
    """Targets, loss and optimizer as pure functions of `LearnerState`."""

    def __init__(self, config: Config, obs_space: spaces.Space, action_space: spaces.Space):
        self.config = config
        self.make_model = partial(Model, config, obs_space, action_space)
        self.model = partial(nnx.merge, nnx.graphdef(self.make_model(nnx.Rngs(0))))
        self.initial_core = partial(initial_core, config.core, config.core_size)
        self.optimizer = optax.flatten(optax.adam(config.learning_rate, eps=1e-3))

    def init(self, key: Array) -> LearnerState:
        """Draw new parameters; the target network starts as a copy."""
        params = nnx.to_pure_dict(nnx.state(self.make_model(nnx.Rngs(key))))
        target_params = jax.tree.map(jnp.copy, params)
        return LearnerState(params, target_params, self.optimizer.init(params))

    def predict(self, params: Any, obs: Any, core: Any, valid: Array) -> tuple[Array, Any]:
        """[B, T, *obs] -> q_values h(Q) [B, T, A], and recurrent state [B, ...] behind them."""
        q_values, core = self.model(params).unroll(obs, core, valid)
        return mask_actions(q_values, action_mask(obs)), core

    def burn_in(self, params: Any, batch: Sequences) -> Sequences:
        """The rows [B, L + n] behind the first ones, with the recurrent state before them."""
        burn_in = self.config.burn_in
        if burn_in == 0:
            return batch
        first = jax.tree.map(lambda x: x[:, :burn_in], batch.rows)  # [B, burn_in, ...]
        rest = jax.tree.map(lambda x: x[:, burn_in:], batch.rows)  # [B, L + n, ...]
        _, core = self.predict(params, first.obs, batch.extras, first.valid)
        return batch._replace(rows=rest, extras=core)

    def td_target(self, q_values: Array, target_q_values: Array, rows: Transition) -> Array:
        """h(Σ_{k<n} γᵏ r_{t+k} + γⁿ h⁻¹(Q(s_{t+n}, argmax_a Q(s_{t+n}, a; θ); θ⁻))) (eq. 1)."""
        # The row before an invalid one is the last of its episode, or where a run was cut off.
        truncated = rows.truncated[:, :-1] | ~rows.valid[:, 1:]  # [B, L + n - 1]
        next_action = q_values.argmax(axis=-1)  # [B, L + n]
        value = jnp.take_along_axis(target_q_values, next_action[..., None], axis=-1)[..., 0]
        returns = n_step_rescaled_return(
            reward=rows.reward[:, :-1].T,
            terminated=rows.terminated[:, :-1].T,
            truncated=truncated.T,
            value=value.T,
            gamma=self.config.gamma,
            n=self.config.n_step,
        )  # [L + n - 1, B]
        return returns[: self.config.sequence_length].T  # [B, L]

    def loss_fn(
        self, params: Any, target_q_values: Array, batch: Sequences
    ) -> tuple[Array, tuple[Array, dict[str, Array]]]:
        """E[w δ²] over the valid rows, and the priorities of the sequences [B]."""
        rows = batch.rows
        q_values, _ = self.predict(params, rows.obs, batch.extras, rows.valid)  # [B, L + n, A]
        # θ only chooses actions here, through which no gradient flows.
        td_target = self.td_target(q_values, target_q_values, rows)  # [B, L]
        length = self.config.sequence_length
        action, valid = rows.action[:, :length], rows.valid[:, :length]
        q_value = jnp.take_along_axis(q_values[:, :length], action[..., None], axis=-1)[..., 0]
        chex.assert_equal_shape([q_value, td_target, valid])
        td_error = td_target - q_value  # [B, L]
        weight = valid / jnp.maximum(valid.mean(), 1e-8)  # [B, L]
        loss = (batch.weight[:, None] * weight * td_error**2).mean()
        metrics = {"td_loss": loss, "q_values": (weight * value_unrescale(q_value)).mean()}
        return loss, (self.priority(td_error, valid), metrics)

    def priority(self, td_error: Array, valid: Array) -> Array:
        """η max_t |δ_t| + (1 - η) mean_t |δ_t| over the valid rows: δ [B, L] -> [B]."""
        size = valid * jnp.abs(td_error)  # [B, L]
        mean = size.sum(axis=1) / jnp.maximum(valid.sum(axis=1), 1)  # [B]
        eta = self.config.priority_eta
        return eta * size.max(axis=1) + (1 - eta) * mean

    def learn(
        self, state: LearnerState, batch: Sequences
    ) -> tuple[LearnerState, Array, dict[str, Array]]:
        """One gradient step on a batch; the priorities [B] from before it."""
        rows, core, *_ = self.burn_in(state.target_params, batch)
        target_q_values, _ = self.predict(state.target_params, rows.obs, core, rows.valid)
        batch = self.burn_in(state.params, batch)
        gradient = jax.grad(self.loss_fn, has_aux=True)
        grads, (priority, metrics) = gradient(state.params, target_q_values, batch)
        updates, opt_state = self.optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return state._replace(params=params, opt_state=opt_state), priority, metrics

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

    def predict(
        self, state: LearnerState, obs: Any, key: Array, memory: Memory
    ) -> tuple[Array, Any]:
        """Action [N] to evaluate with, and recurrent state."""
        q_values, core = self.step(state, obs, memory)
        return self.epsilon_greedy(q_values, obs, self.config.evaluation_epsilon, key), core

    def sample(
        self, state: LearnerState, obs: Any, key: Array, memory: Memory
    ) -> tuple[Array, Any]:
        """Action [N] to train with, and recurrent state."""
        q_values, core = self.step(state, obs, memory)
        return self.epsilon_greedy(q_values, obs, self.epsilon, key), core

    def step(self, state: LearnerState, obs: Any, memory: Memory) -> tuple[Array, Any]:
        """[N, *obs] and what is remembered -> q_values [N, A], new recurrent state."""
        obs = jax.tree.map(lambda x: x[:, None], obs)  # [N, 1, *obs]
        valid = memory.valid[:, None]  # [N, 1]
        q_values, core = self.algorithm.predict(state.params, obs, memory.core, valid)
        return q_values[:, 0], core

    def learn(
        self, state: LearnerState, batch: Sequences
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
    core: Any  # [N, ...] recurrent state
    replay: ReplayState
    key: Array
    step: Array  # [] int32, env steps done over all environments


class Trainer:
    """The training process: collect, store, sample, learn and sync in one compiled program."""

    pace = "in_step"  # of Explorers: each lane of the buffer stays in time order

    def __init__(self, config: Config = Config()):
        self.config = config
        self.env = make_env(config)
        require_action_space("r2d2", self.env, spaces.Discrete)
        self.algorithm = Algorithm(config, self.env.observation_space, self.env.action_space)
        self.agent = Agent(config, self.algorithm)
        self.replay = Replay(
            config.buffer_size,
            config.num_envs,
            config.gamma,
            config.n_step,
            config.frame_stack,
            config.priority_exponent,
            config.burn_in + config.sequence_length,
            config.sequence_period,
        )
        self.evaluator = Evaluator(config, self.agent.predict, self.algorithm.initial_core)
        self.state = self.init_state(jax.random.key(config.seed))
        self.compiled_run = jax.jit(self.run_iterations, donate_argnums=0)

    def __call__(self) -> Generator[dict, None, None]:
        """Train to total_timesteps; yield log_data at each log point."""
        try:
            for start, num_steps in log_intervals(self):
                num_iterations = -(-num_steps // self.config.num_envs)
                self.state, metrics = self.compiled_run(self.state, num_iterations)
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
        core = self.algorithm.initial_core(self.config.num_envs)
        memory = Memory(core, ~env.ended)
        action, _ = jax.eval_shape(self.agent.sample, learner, env.obs, key, memory)
        replay = self.replay.init(env.obs, action, core)
        return TrainState(learner, env, core, replay, key, jnp.zeros((), jnp.int32))

    def run_iterations(
        self, state: TrainState, num_iterations: int
    ) -> tuple[TrainState, dict[str, Array]]:
        """(collect, learn, sync) × num_iterations, or until an environment fails."""

        def goes_on(carry: tuple) -> Array:
            iteration, state, _ = carry
            return (iteration < num_iterations) & self.env.is_sound(state.env)

        def iterate(carry: tuple) -> tuple:
            iteration, state, metrics = carry
            state, transition = self._run_collect(state)
            return iteration + 1, *self._learn_row(state, metrics, transition)

        state = state._replace(env=self.env.reset_summary(state.env))
        carry = 0, state, self.zero_metrics(state)
        _, state, metrics = lax.while_loop(goes_on, iterate, carry)
        return state, metrics

    def zero_metrics(self, state: TrainState) -> dict[str, Array]:
        """The zeros that metrics are added to, derived from what an update returns."""
        _, metrics = jax.eval_shape(self._run_train, state)
        return optax.tree.zeros_like(metrics)

    def collect_trajectory(self, state: TrainState) -> tuple[TrainState, Trajectory, Array]:
        """What an Explorer does for `learn_trajectory`: some rows, and whether all were made."""
        steps_left = (self.config.total_timesteps - state.step) // self.config.num_envs
        state, rollout, is_complete = collect_rollout(
            self.env, self._run_collect, state, self.config.num_steps, steps_left
        )
        return state, Trajectory(rollout, state.env.obs), is_complete

    def learn_trajectory(
        self, state: TrainState, metrics: dict[str, Array], trajectory: Trajectory
    ) -> tuple[TrainState, dict[str, Array]]:
        """Learn from an Explorer's rows [T, N] in turn; `state.step` counts all of them."""
        num_steps, num_envs = trajectory.rollout.valid.shape
        first = state.step - num_steps * num_envs

        def learn_row(t: Array, carry: tuple) -> tuple:
            state, metrics = carry
            row = jax.tree.map(lambda x: x[t], trajectory.rollout)
            state = state._replace(step=first + (t + 1) * num_envs)
            return self._learn_row(state, metrics, row)

        replay = interrupt(state.replay, trajectory.is_new)
        return lax.fori_loop(0, num_steps, learn_row, (state._replace(replay=replay), metrics))

    def _learn_row(
        self, state: TrainState, metrics: dict[str, Array], row: Transition
    ) -> tuple[TrainState, dict[str, Array]]:
        """Store the rows [N] of a vector step; make the updates that are due by then."""
        config = self.config

        def train(_: Array, carry: tuple) -> tuple:
            state, metrics = carry
            state, new_metrics = self._run_train(state)
            return state, jax.tree.map(jnp.add, metrics, new_metrics)

        state = state._replace(replay=self.replay.add(state.replay, row))
        previous = state.step - config.num_envs
        due = partial(count_events, previous, state.step, config.learning_starts)
        num_updates = due(config.train_frequency)
        state, metrics = lax.fori_loop(0, num_updates, train, (state, metrics))
        num_syncs = due(config.target_network_frequency)
        state = lax.fori_loop(0, num_syncs, self._run_sync, state)
        metrics["charts/target_updates"] += num_syncs
        return state, metrics

    def _run_collect(self, state: TrainState) -> tuple[TrainState, Transition]:
        """One vector step: act, step the environments."""
        key, action_key = jax.random.split(state.key)
        obs = state.env.obs  # [N, *obs]
        memory = Memory(state.core, ~state.env.ended)
        action, core = self.agent.sample(state.learner, obs, action_key, memory)  # [N]
        env, timestep = self.env.step(state.env, action)
        transition = Transition(
            obs=obs,
            action=action,
            reward=timestep.reward,
            terminated=timestep.terminated,
            truncated=timestep.truncated,
            valid=memory.valid,
            extras=state.core,
        )
        step = state.step + self.config.num_envs
        return state._replace(env=env, core=core, key=key, step=step), transition

    def _run_train(self, state: TrainState) -> tuple[TrainState, dict[str, Array]]:
        """One update on a batch of sequences from replay."""
        key, sample_key = jax.random.split(state.key)
        batch = self.replay.sample_sequences(
            state.replay, sample_key, self.config.batch_size, self.config.importance_exponent
        )
        learner, priority, metrics = self.agent.learn(state.learner, batch)
        replay = self.replay.update_priorities(state.replay, batch.index, priority)
        counts = {"charts/updates": jnp.ones(()), "charts/target_updates": jnp.zeros(())}
        return state._replace(learner=learner, replay=replay, key=key), metrics | counts

    def _run_sync(self, _: Array, state: TrainState) -> TrainState:
        return state._replace(learner=self.algorithm.sync_target(state.learner))


if __name__ == "__main__":
    run(Trainer, Config, PRESETS)
