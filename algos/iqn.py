"""IQN: learn the quantile function of the return at sampled fractions, and act on its mean.

Dabney et al. 2018, https://arxiv.org/abs/1806.06923      Docs: docs/algorithms/iqn.md

    Z_τ(s, a) = f(ψ(s) ⊙ φ(τ))_a,  φ(τ) = ReLU(W cos(π i τ)_i<64 + b)  (eq. 4)  value
    Q(s, a) = 1/K Σ_k Z_τk(s, a),  τ ~ U(0, 1)                predict
    y_j  = r + γ (1 - terminated) Z_τj'(s', argmax_a' Q(s', a'; θ⁻); θ⁻)  td_target
    L(θ) = E[Σ_i E_j[ρ_τi(y_j - Z_τi(s, a; θ))]] (eq. 3)      loss_fn
    θ⁻   = τ θ + (1 - τ) θ⁻                                   sync_target
    a    = argmax_a Q(s, a; θ), or uniform with probability ε  epsilon_greedy
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
from common.schedules import count_events
from common.targets import quantile_huber_loss

from common.run.config import check_config, check_replay
from common.run.evaluator import Evaluator
from common.run.logger import log_intervals, log_points
from common.run.runner import run


@dataclass(frozen=True)
class Config:
    """Hyper-parameters; the defaults are those of CleanRL's DQN for CartPole-v1."""

    env_id: str = "CartPole-v1"  # an envpool or Gymnasium id, or gymnax/ID or pgx/ID
    env_backend: EnvBackend = "auto"  # auto: envpool where it knows the id, else Gymnasium
    env_module: str | None = None  # module to import first, to register your environment
    env_kwargs: tuple[str, ...] = ()  # options of the environment, as KEY=VALUE KEY=VALUE ...
    num_envs: Positive[int] = 8  # environments stepped in parallel
    env_workers: NonNegative[int] = 0  # processes that step Gymnasium environments; 0: this one
    seed: NonNegative[int] = 1  # seed of networks, exploration, sampling and environments
    total_timesteps: Positive[int] = 500_000  # env steps over all envs; a multiple of num_envs
    log_frequency: Positive[int] = 10_000  # env steps between two log points
    learning_rate: Positive[float] = 2.5e-4  # step size of Adam
    buffer_size: Positive[int] = 10_000  # transitions in the replay buffer, over all environments
    gamma: Fraction = 0.99  # discount of one step
    num_tau: Positive[int] = 8  # N, fractions τ of the estimate; 64 in the paper
    num_target_tau: Positive[int] = 8  # N', fractions τ' of the target; 64 in the paper
    num_policy_tau: Positive[int] = 8  # K, fractions whose mean is a Q-value; 32 in the paper
    kappa: Positive[float] = 10.0  # κ, error where the Huber loss turns linear; 1 in the paper
    n_step: Positive[int] = 1  # steps of reward in a target before it bootstraps; 1 is the paper's
    frame_stack: Positive[int] = 1  # frames in an observation; the buffer stores single ones
    tau: Fraction = 1.0  # share of θ in a target update; 1 copies it, as in the paper
    target_network_frequency: Positive[int] = 500  # env steps between two target updates
    batch_size: Positive[int] = 128  # transitions in a minibatch
    start_epsilon: Fraction = 1.0  # ε, the exploration rate, at the first step
    end_epsilon: Fraction = 0.05  # ε after exploration_fraction of the run
    exploration_fraction: Fraction = 0.5  # share of the run over which ε falls linearly
    evaluation_epsilon: Fraction = 0.0  # ε in evaluation; DQN's paper uses 0.05
    learning_starts: NonNegative[int] = 10_000  # env steps before the first update
    train_frequency: Positive[int] = 10  # env steps between two updates

    def __post_init__(self) -> None:
        check_config(self)
        check_replay(self)


PRESETS: dict[str, dict[str, Any]] = {
    "classic": {},
    "minatar": {
        "total_timesteps": 2_000_000,
        "log_frequency": 20_000,
        "learning_rate": 2.5e-4,
        "buffer_size": 100_000,
        "target_network_frequency": 1_000,
        "kappa": 1.0,
        "batch_size": 32,
        "end_epsilon": 0.01,
        "exploration_fraction": 0.1,
        "learning_starts": 5_000,
        "train_frequency": 4,
    },
    "atari": {
        "total_timesteps": 10_000_000,
        "log_frequency": 2_000,
        "learning_rate": 5e-5,
        "buffer_size": 1_000_000,
        "frame_stack": 4,
        "target_network_frequency": 1_000,
        "num_tau": 64,
        "num_target_tau": 64,
        "num_policy_tau": 32,
        "kappa": 1.0,
        "batch_size": 32,
        "end_epsilon": 0.01,
        "exploration_fraction": 0.1,
        "evaluation_epsilon": 0.05,
        "learning_starts": 80_000,
        "train_frequency": 4,
    },
}


class Model(nnx.Module):
    """Quantile function: features of the observation times an embedding of τ, a layer, a head."""

    def __init__(self, obs_space: spaces.Space, action_space: Any, rngs: nnx.Rngs):
        self.encoder = Encoder(obs_space, rngs, cnn_dense=False)
        hidden = () if self.encoder.has_cnn else (120,)
        self.torso = MLP((self.encoder.num_features, *hidden), rngs)
        self.embedding = MLP((64, self.torso.num_features), rngs)
        self.hidden = MLP((self.torso.num_features, self.encoder.num_units or 84), rngs)
        self.head = nnx.Linear(self.hidden.num_features, int(action_space.n), rngs=rngs)

    def value(self, obs: Any, tau: Array) -> Array:
        """[B, *obs], fractions [B, N] -> values Z_τ [B, N, A]."""
        psi = jnp.repeat(self.torso(self.encoder(obs)), tau.shape[1], axis=0)  # [B N, F]
        phi = self.embedding(jnp.cos(jnp.pi * jnp.arange(64) * tau.reshape(-1, 1)))  # [B N, F]
        return self.head(self.hidden(psi * phi)).reshape(*tau.shape, -1)  # [B, N, A]


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
        self.optimizer = optax.flatten(optax.adam(config.learning_rate, eps=0.01 / 32))

    def init(self, key: Array) -> LearnerState:
        """Draw new parameters; the target network starts as a copy."""
        params = nnx.to_pure_dict(nnx.state(self.make_model(nnx.Rngs(key))))
        target_params = jax.tree.map(jnp.copy, params)
        return LearnerState(params, target_params, self.optimizer.init(params))

    def values(self, params: Any, obs: Any, num_tau: int, key: Array) -> tuple[Array, Array]:
        """[B, *obs] -> fractions τ ~ U(0, 1) [B, N], and values Z_τ there [B, N, A]."""
        tau = jax.random.uniform(key, (jax.tree.leaves(obs)[0].shape[0], num_tau))  # [B, N]
        return tau, self.model(params).value(obs, tau)

    def predict(self, params: Any, obs: Any, key: Array) -> Array:
        """[B, *obs] -> q_values [B, A], means over K fractions."""
        _, values = self.values(params, obs, self.config.num_policy_tau, key)  # [B, K, A]
        return mask_actions(values.mean(axis=1), action_mask(obs))

    def td_target(self, target_params: Any, batch: Batch, key: Array) -> Array:
        """Samples y [B, N'] of r + γ (1 - terminated) Z(s', a'; θ⁻), over n steps if n_step > 1."""
        action_key, tau_key = jax.random.split(key)
        next_action = self.predict(target_params, batch.next_obs, action_key).argmax(axis=-1)
        _, values = self.values(target_params, batch.next_obs, self.config.num_target_tau, tau_key)
        next_value = jnp.take_along_axis(values, next_action[:, None, None], axis=2)[..., 0]
        return batch.reward[:, None] + batch.discount[:, None] * next_value  # [B, N']

    def loss_fn(
        self, params: Any, batch: Batch, td_target: Array, key: Array
    ) -> tuple[Array, dict[str, Array]]:
        """E[Σ_i E_j[ρ_τi(y_j - Z_τi(s, a; θ))]] over the valid rows of the batch (eq. 3)."""
        tau, values = self.values(params, batch.obs, self.config.num_tau, key)  # [B, N, A]
        quantiles = jnp.take_along_axis(values, batch.action[:, None, None], axis=2)[..., 0]
        error = quantile_huber_loss(quantiles, tau, td_target, self.config.kappa)  # [B]
        chex.assert_equal_shape([error, batch.weight])
        loss = (batch.weight * error).mean()
        return loss, {"td_loss": loss, "q_values": (batch.weight * quantiles.mean(axis=-1)).mean()}

    def learn(
        self, state: LearnerState, batch: Batch, key: Array
    ) -> tuple[LearnerState, dict[str, Array]]:
        """One gradient step on a batch."""
        target_key, key = jax.random.split(key)
        td_target = self.td_target(state.target_params, batch, target_key)  # [B, N']
        grads, metrics = jax.grad(self.loss_fn, has_aux=True)(state.params, batch, td_target, key)
        updates, opt_state = self.optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return state._replace(params=params, opt_state=opt_state), metrics

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

    def predict(self, state: LearnerState, obs: Any, key: Array) -> Array:
        """Action [N] to evaluate with."""
        tau_key, key = jax.random.split(key)
        q_values = self.algorithm.predict(state.params, obs, tau_key)  # [N, A]
        return self.epsilon_greedy(q_values, obs, self.config.evaluation_epsilon, key)

    def sample(self, state: LearnerState, obs: Any, step: Array, key: Array) -> Array:
        """Action [N] to train with."""
        tau_key, key = jax.random.split(key)
        q_values = self.algorithm.predict(state.params, obs, tau_key)  # [N, A]
        return self.epsilon_greedy(q_values, obs, self.epsilon(step), key)

    def learn(
        self, state: LearnerState, batch: Batch, key: Array
    ) -> tuple[LearnerState, dict[str, Array]]:
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
        require_action_space("iqn", self.env, spaces.Discrete)
        self.algorithm = Algorithm(config, self.env.observation_space, self.env.action_space)
        self.agent = Agent(config, self.algorithm)
        self.replay = Replay(
            config.buffer_size, config.num_envs, config.gamma, config.n_step, config.frame_stack
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
                logs = {"charts/epsilon": self.agent.epsilon(self.state.step)}
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
        batch = self.replay.sample(state.replay, sample_key, self.config.batch_size)
        learner, metrics = self.agent.learn(state.learner, batch, learn_key)
        counts = {"charts/updates": jnp.ones(()), "charts/target_updates": jnp.zeros(())}
        return state._replace(learner=learner, key=key), metrics | counts

    def _run_sync(self, _: Array, state: TrainState) -> TrainState:
        return state._replace(learner=self.algorithm.sync_target(state.learner))


if __name__ == "__main__":
    run(Trainer, Config, PRESETS)
