"""Rainbow: six improvements of DQN in one agent, each behind a flag that takes it out.

Hessel et al. 2018, https://arxiv.org/abs/1710.02298      Docs: docs/algorithms/rainbow.md

    noisy           y_l = (μ_w + σ_w ⊙ ε_w) x + μ_b + σ_b ⊙ ε_b,  θ = (μ, σ)  networks.NoisyMLP
    dueling         l_i(s, a) = V_i(s) + A_i(s, a) - mean_a' A_i(s, a')  value
    distributional  Q(s, a) = Σ_i z_i p_i(s, a),  p = softmax_i l        mean
    double          a* = argmax_a' Q(s', a', ε''; θ)                     td_target
    n-step          R = Σ_k<n γᵏ r_k, and s' is n steps after s          replay.Replay
    prioritized     P(i) = p_i^α / Σ_k p_k^α,  p_i = D_i + 10⁻⁶          _run_train
                    w_i = (M P(i))^-β / max_j w_j                        _run_train

    m    = Φ(R + γⁿ (1 - terminated) Z(s', a*, ε'; θ⁻))       td_target
    L(θ) = E[w D],  D = Σ_i m_i log(m_i / p_i(s, a, ε; θ))    loss_fn
    θ⁻   = τ θ + (1 - τ) θ⁻                                   sync_target
    a    = argmax_a Q(s, a, ε; θ)                             sample
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
from common.errors import UserError
from common.exploration import random_action
from common.networks import MLP, Encoder, NoisyMLP
from common.ranges import Finite, Fraction, NonNegative, Positive
from common.replay import Batch, Replay, ReplayState, Transition
from common.schedules import count_events
from common.targets import categorical_projection

from common.run.config import check_config, check_replay
from common.run.evaluator import Evaluator
from common.run.logger import log_intervals, log_points
from common.run.runner import run


@dataclass(frozen=True)
class Config:
    """Hyper-parameters; for CartPole-v1, and in `atari` those of the paper's table 1."""

    env_id: str = "CartPole-v1"  # an envpool or Gymnasium id, or gymnax/ID or pgx/ID
    env_backend: EnvBackend = "auto"  # auto: envpool where it knows the id, else Gymnasium
    env_module: str | None = None  # module to import first, to register your environment
    env_kwargs: tuple[str, ...] = ()  # options of the environment, as KEY=VALUE KEY=VALUE ...
    num_envs: Positive[int] = 8  # environments stepped in parallel
    env_workers: NonNegative[int] = 0  # processes that step Gymnasium environments; 0: this one
    seed: NonNegative[int] = 1  # seed of networks, exploration, sampling and environments
    total_timesteps: Positive[int] = 500_000  # env steps over all envs; a multiple of num_envs
    log_frequency: Positive[int] = 10_000  # env steps between two log points
    double: bool = True  # θ chooses the next action and θ⁻ values it; else θ⁻ does both
    dueling: bool = True  # a stream for the value and one for the advantages; else one for all
    prioritized: bool = True  # draw rows by their loss, with weights; else uniformly
    noisy: bool = True  # explore by noise in the weights; else by ε
    distributional: bool = True  # learn the distribution of returns; else Q, by the squared error
    n_step: Positive[int] = 3  # steps of reward in a target before it bootstraps
    learning_rate: Positive[float] = 2.5e-4  # step size of Adam
    adam_epsilon: Positive[float] = 1.5e-4  # what Adam adds to the root of its second moment
    buffer_size: Positive[int] = 10_000  # transitions in the replay buffer, over all environments
    gamma: Fraction = 0.99  # discount of one step
    priority_exponent: Positive[float] = 0.5  # α: how much priorities count
    importance_exponent: Fraction = 0.4  # β, the correction of the bias, at first; 1 at the end
    num_atoms: Positive[int] = 101  # M, atoms of the distribution; 51 in the paper
    v_min: Finite[float] = -100.0  # return of the first atom; -10 in the paper
    v_max: Finite[float] = 100.0  # return of the last atom; 10 in the paper
    sigma: Positive[float] = 0.1  # σ_0: at first, each σ is σ_0 / √inputs; 0.5 in the paper
    frame_stack: Positive[int] = 1  # frames in an observation; the buffer stores single ones
    tau: Fraction = 1.0  # share of θ in a target update; 1 copies it, as in the paper
    target_network_frequency: Positive[int] = 500  # env steps between two target updates
    batch_size: Positive[int] = 128  # transitions in a minibatch
    start_epsilon: Fraction = 1.0  # ε, the exploration rate, at the first step
    end_epsilon: Fraction = 0.05  # ε after exploration_fraction of the run
    exploration_fraction: Fraction = 0.5  # share of the run over which ε falls linearly
    evaluation_epsilon: Fraction = 0.0  # ε in evaluation, with noisy layers too
    learning_starts: NonNegative[int] = 10_000  # env steps before the first update
    train_frequency: Positive[int] = 10  # env steps between two updates

    def __post_init__(self) -> None:
        check_config(self)
        check_replay(self)
        if self.num_atoms < 2 or self.v_min >= self.v_max:
            raise UserError(
                f"--num-atoms {self.num_atoms} between --v-min {self.v_min} and --v-max "
                f"{self.v_max}: use at least 2, and a --v-max above --v-min"
            )


PRESETS: dict[str, dict[str, Any]] = {
    "classic": {},
    "minatar": {
        "total_timesteps": 2_000_000,
        "log_frequency": 20_000,
        "learning_rate": 2.5e-4,
        "buffer_size": 100_000,
        "target_network_frequency": 1_000,
        "num_atoms": 51,
        "v_min": -25.0,
        "v_max": 25.0,
        "sigma": 0.5,
        "batch_size": 32,
        "end_epsilon": 0.01,
        "exploration_fraction": 0.1,
        "learning_starts": 5_000,
        "train_frequency": 4,
    },
    "atari": {
        "total_timesteps": 10_000_000,
        "log_frequency": 2_000,
        "learning_rate": 6.25e-5,
        "buffer_size": 1_000_000,
        "num_atoms": 51,
        "v_min": -10.0,
        "v_max": 10.0,
        "sigma": 0.5,
        "frame_stack": 4,
        "target_network_frequency": 8_000,
        "batch_size": 32,
        "end_epsilon": 0.01,
        "exploration_fraction": 0.00625,
        "learning_starts": 20_000,
        "train_frequency": 4,
    },
}


class Model(nnx.Module):
    """Network of M outputs an action: the logits of M atoms, or Q alone, which is M = 1."""

    def __init__(self, config: Config, obs_space: Any, action_space: Any, rngs: nnx.Rngs):
        self.noisy = config.noisy
        self.num_outputs = config.num_atoms if config.distributional else 1  # M
        self.encoder = Encoder(obs_space, rngs, cnn_dense=False)
        self.advantage_stream = self._stream(int(action_space.n), config.sigma, rngs)
        self.value_stream = self._stream(1, config.sigma, rngs) if config.dueling else None

    def _stream(self, num_rows: int, sigma: float, rngs: nnx.Rngs) -> Any:
        """Layers from features [B, F] to [B, num_rows * M]; hidden layers as in DQN."""
        hidden = (self.encoder.num_units,) if self.encoder.has_cnn else (120, 84)
        sizes = self.encoder.num_features, *hidden
        num_outputs = num_rows * self.num_outputs
        if self.noisy:
            return NoisyMLP((*sizes, num_outputs), rngs, sigma)
        return nnx.Sequential(MLP(sizes, rngs), nnx.Linear(hidden[-1], num_outputs, rngs=rngs))

    def value(self, obs: Any, key: Array | None = None, num_draws: int = 1) -> Array:
        """[B, *obs] -> logits [B, A, M], under the noise of a key if there is one and it is noisy.

        Each stream has noise of its own. Without `dueling`, the advantages are all there is.
        """
        noises: Any = [(), ()]
        if self.noisy and key is not None:
            noises = [(stream_key, num_draws) for stream_key in jax.random.split(key)]
        value_noise, advantage_noise = noises
        features = self.encoder(obs)  # [B, F]
        advantages = self.advantage_stream(features, *advantage_noise)  # [B, A * M]
        advantages = advantages.reshape(len(advantages), -1, self.num_outputs)  # [B, A, M]
        if self.value_stream is None:
            return advantages
        value = self.value_stream(features, *value_noise)[:, None]  # [B, 1, M]
        return value + advantages - advantages.mean(axis=1, keepdims=True)  # [B, A, M]


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
        self.support = jnp.linspace(config.v_min, config.v_max, config.num_atoms)  # z [M]
        self.model = partial(nnx.merge, nnx.graphdef(self.make_model(nnx.Rngs(0))))
        self.optimizer = optax.adam(config.learning_rate, eps=config.adam_epsilon)

    def init(self, key: Array) -> LearnerState:
        """Draw new parameters; the target network starts as a copy."""
        params = nnx.to_pure_dict(nnx.state(self.make_model(nnx.Rngs(key))))
        target_params = jax.tree.map(jnp.copy, params)
        return LearnerState(params, target_params, self.optimizer.init(params))

    def predict(self, params: Any, obs: Any, *noise: Any) -> Array:
        """[B, *obs] -> q_values [B, A], under the `noise` of a key if there is one."""
        return self.q_values(self.model(params).value(obs, *noise), obs)

    def q_values(self, logits: Array, obs: Any) -> Array:
        """Logits [B, A, M] -> q_values [B, A]."""
        return mask_actions(self.mean(logits), action_mask(obs))

    def mean(self, logits: Array) -> Array:
        """Σ_i z_i p_i, or the only output where there are no atoms: [..., M] -> [...]."""
        if not self.config.distributional:
            return logits[..., 0]
        return jax.nn.softmax(logits) @ self.support

    def td_target(self, state: LearnerState, batch: Batch, key: Array) -> Array:
        """m = Φ(R + γⁿ (1 - terminated) Z(s', a*, ε'; θ⁻)) [B, M]; without atoms y [B]."""
        target_key, online_key = jax.random.split(key)
        next_logits = self.model(state.target_params).value(batch.next_obs, target_key)  # [B, A, M]
        if self.config.double:
            next_q_values = self.predict(state.params, batch.next_obs, online_key)  # [B, A]
        else:
            next_q_values = self.q_values(next_logits, batch.next_obs)  # [B, A]
        next_action = next_q_values.argmax(axis=-1)  # [B]
        next_logits = jnp.take_along_axis(next_logits, next_action[:, None, None], axis=1)[:, 0]
        if not self.config.distributional:
            return batch.reward + batch.discount * next_logits[:, 0]  # [B]
        next_probs = jax.nn.softmax(next_logits)  # [B, M]
        return categorical_projection(batch.reward, batch.discount, next_probs, self.support)

    def loss_fn(
        self, params: Any, batch: Batch, td_target: Array, key: Array
    ) -> tuple[Array, tuple[Array, dict[str, Array]]]:
        """E[w D], D = KL(m || p(s, a, ε; θ)) or (y - Q)², and the priorities [B], D or |y - Q|."""
        logits = self.model(params).value(batch.obs, key)  # [B, A, M]
        logits = jnp.take_along_axis(logits, batch.action[:, None, None], axis=1)[:, 0]  # [B, M]
        q_value = self.mean(logits)  # [B]
        if self.config.distributional:
            row_loss = optax.kl_divergence(jax.nn.log_softmax(logits), td_target)  # [B]
            priority = row_loss
        else:
            priority = jnp.abs(td_target - q_value)  # [B]
            row_loss = priority**2
        chex.assert_equal_shape([row_loss, batch.weight])
        loss = (batch.weight * row_loss).mean()
        share = batch.weight / jnp.maximum(batch.weight.sum(), 1e-30)  # [B]
        return loss, (priority, {"td_loss": loss, "q_values": (share * q_value).sum()})

    def learn(
        self, state: LearnerState, batch: Batch, key: Array
    ) -> tuple[LearnerState, Array, dict[str, Array]]:
        """One gradient step on a batch; the priorities [B] from before it."""
        target_key, key = jax.random.split(key)
        td_target = self.td_target(state, batch, target_key)  # [B, M], or [B]
        gradient = jax.grad(self.loss_fn, has_aux=True)
        grads, (priority, metrics) = gradient(state.params, batch, td_target, key)
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
        decay_steps = max(1, int(config.exploration_fraction * config.total_timesteps))
        self.epsilon = optax.linear_schedule(config.start_epsilon, config.end_epsilon, decay_steps)
        self.beta = optax.linear_schedule(config.importance_exponent, 1.0, config.total_timesteps)

    def predict(self, state: LearnerState, obs: Any, key: Array) -> Array:
        """Action [N] to evaluate with."""
        q_values = self.algorithm.predict(state.params, obs)  # [N, A]
        return self.epsilon_greedy(q_values, obs, self.config.evaluation_epsilon, key)

    def sample(self, state: LearnerState, obs: Any, step: Array, key: Array) -> Array:
        """Action [N] to train with: greedy under noise of each environment, or ε-greedy.

        The first steps, which fill the buffer, are uniform where there is noise.
        """
        if not self.config.noisy:
            q_values = self.algorithm.predict(state.params, obs)  # [N, A]
            return self.epsilon_greedy(q_values, obs, self.epsilon(step), key)
        noise_key, explore_key = jax.random.split(key)
        q_values = self.algorithm.predict(state.params, obs, noise_key, self.config.num_envs)
        epsilon = jnp.where(step < self.config.learning_starts, 1.0, 0.0)
        return self.epsilon_greedy(q_values, obs, epsilon, explore_key)

    def learn(
        self, state: LearnerState, batch: Batch, key: Array
    ) -> tuple[LearnerState, Array, dict[str, Array]]:
        """One gradient step on a batch."""
        return self.algorithm.learn(state, batch, key)

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
    """The training process: collect, store, sample, learn and sync in one compiled program."""

    def __init__(self, config: Config = Config()):
        self.config = config
        self.env = make_env(config)
        require_action_space("rainbow", self.env, spaces.Discrete)
        self.algorithm = Algorithm(config, self.env.observation_space, self.env.action_space)
        self.agent = Agent(config, self.algorithm)
        self.replay = Replay(
            config.buffer_size,
            config.num_envs,
            config.gamma,
            config.n_step,
            config.frame_stack,
            config.priority_exponent if config.prioritized else 0.0,
        )
        self.evaluator = Evaluator(config, self.agent.predict)
        self.state = self.init_state(jax.random.key(config.seed))
        self.compiled_run = jax.jit(self.run_iterations, donate_argnums=0)

    def __call__(self) -> Generator[dict, None, None]:
        """Train to total_timesteps; yield log_data at each log point."""
        try:
            for start, num_steps in log_intervals(self):
                num_iterations = -(-num_steps // self.config.num_envs)
                self.state, metrics = self.compiled_run(self.state, num_iterations)
                epsilon = self.agent.epsilon(self.state.step)
                logs = {} if self.config.noisy else {"charts/epsilon": epsilon}
                yield from log_points(self.env, self.state, start, logs, metrics)
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
        step = jnp.zeros((), jnp.int32)
        action = jax.eval_shape(self.agent.sample, learner, env.obs, step, key)
        replay = self.replay.init(env.obs, action)
        return TrainState(learner, env, replay, key, step)

    def run_iterations(
        self, state: TrainState, num_iterations: int
    ) -> tuple[TrainState, dict[str, Array]]:
        """(collect, learn, sync) × num_iterations, or until an environment fails."""
        config = self.config

        def goes_on(carry: tuple) -> Array:
            iteration, state, _ = carry
            return (iteration < num_iterations) & self.env.is_sound(state.env)

        def train(_: Array, carry: tuple) -> tuple:
            state, metrics = carry
            state, new_metrics = self._run_train(state)
            return state, jax.tree.map(jnp.add, metrics, new_metrics)

        def iterate(carry: tuple) -> tuple:
            iteration, state, metrics = carry
            previous = state.step
            state = self._run_collect(state)
            due = partial(count_events, previous, state.step, config.learning_starts)
            num_updates = due(config.train_frequency)
            state, metrics = lax.fori_loop(0, num_updates, train, (state, metrics))
            num_syncs = due(config.target_network_frequency)
            state = lax.fori_loop(0, num_syncs, self._run_sync, state)
            metrics["charts/target_updates"] += num_syncs
            return iteration + 1, state, metrics

        state = state._replace(env=self.env.reset_summary(state.env))
        _, metrics = jax.eval_shape(self._run_train, state)
        carry = 0, state, optax.tree.zeros_like(metrics)
        _, state, metrics = lax.while_loop(goes_on, iterate, carry)
        return state, metrics

    def _run_collect(self, state: TrainState) -> TrainState:
        """One vector step: act, step the environments, store."""
        key, action_key = jax.random.split(state.key)
        obs = state.env.obs  # [N, *obs]
        action = self.agent.sample(state.learner, obs, state.step, action_key)  # [N]
        env, timestep = self.env.step(state.env, action)
        transition = Transition(
            obs=obs,
            action=action,
            reward=timestep.reward,
            terminated=timestep.terminated,
            truncated=timestep.truncated,
            valid=~state.env.ended,
        )
        replay = self.replay.add(state.replay, transition)
        step = state.step + self.config.num_envs
        return state._replace(env=env, replay=replay, key=key, step=step)

    def _run_train(self, state: TrainState) -> tuple[TrainState, dict[str, Array]]:
        """One update on a batch from replay."""
        key, sample_key, learn_key = jax.random.split(state.key, 3)
        beta = self.agent.beta(state.step)
        batch = self.replay.sample(state.replay, sample_key, self.config.batch_size, beta)
        learner, priority, metrics = self.agent.learn(state.learner, batch, learn_key)
        replay = state.replay
        if self.config.prioritized:
            replay = self.replay.update_priorities(replay, batch.index, priority)
        counts = {"charts/updates": jnp.ones(()), "charts/target_updates": jnp.zeros(())}
        return state._replace(learner=learner, replay=replay, key=key), metrics | counts

    def _run_sync(self, _: Array, state: TrainState) -> TrainState:
        return state._replace(learner=self.algorithm.sync_target(state.learner))


if __name__ == "__main__":
    run(Trainer, Config, PRESETS)
