"""Soft Actor-Critic: learn a stochastic policy that maximises return plus entropy, off policy.

Haarnoja et al. 2018, https://arxiv.org/abs/1812.05905      Docs: docs/algorithms/sac.md

    y    = r + γ (1 - terminated) (min_i Q_i(s', a'; θ⁻) - α log π(a'|s')),  a' ~ π(s')  td_target
    L_Q  = ½ Σ_i E[(y - Q_i(s, a; θ))²]                                         critic_loss
    L_π  = E[α log π(ã|s; φ) - min_i Q_i(s, ã; θ)],  ã ~ π(s; φ)                actor_loss
    L_α  = -α E[log π(ã|s) + H̄]                                                 alpha_loss
    θ⁻   = τ θ + (1 - τ) θ⁻                                                     sync_target
"""

import math
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

from common.distributions import TanhNormal, standard_normals
from common.envs import EnvBackend, EnvState, make_env, require_bounded_actions, scale_action
from common.exploration import next_noise, uniform_action
from common.networks import Network
from common.normalize import Normalizer, NormalizerState
from common.optimize import Trained, descend
from common.ranges import Finite, Fraction, NonNegative, Positive, ProperFraction
from common.replay import Batch, Replay, ReplayState, Transition
from common.schedules import updates_until

from common.run.config import check_config, check_replay, check_updates
from common.run.evaluator import Evaluator
from common.run.logger import log_intervals, log_points
from common.run.runner import run


@dataclass(frozen=True)
class Config:
    """Hyper-parameters; the defaults are the paper's for MuJoCo, the warm-up is CleanRL's."""

    env_id: str = "HalfCheetah-v4"  # an envpool or Gymnasium id, or gymnax/ID
    env_backend: EnvBackend = "auto"  # auto: envpool where it knows the id, else Gymnasium
    env_module: str | None = None  # module to import first, to register your environment
    env_kwargs: tuple[str, ...] = ()  # options of the environment, as KEY=VALUE KEY=VALUE ...
    num_envs: Positive[int] = 1  # environments stepped in parallel
    env_workers: NonNegative[int] = 0  # processes that step Gymnasium environments; 0: this one
    seed: NonNegative[int] = 1  # seed of networks, exploration, sampling and environments
    total_timesteps: Positive[int] = 1_000_000  # env steps over all envs; a multiple of num_envs
    log_frequency: Positive[int] = 1_000  # env steps between two log points
    learning_rate: Positive[float] = 3e-4  # step size of Adam, for policy, critics and temperature
    buffer_size: Positive[int] = 1_000_000  # transitions in the replay buffer, over all envs
    gamma: Fraction = 0.99  # discount of one step
    n_step: Positive[int] = 1  # steps of reward in a target before it bootstraps; 1 is the paper's
    tau: Fraction = 0.005  # τ: share of θ in a target update
    batch_size: Positive[int] = 256  # transitions in a minibatch
    learning_starts: NonNegative[int] = 5_000  # env steps of uniformly random actions at first
    updates_per_step: Positive[float] = 1.0  # updates an env step, above or below 1
    alpha: Positive[float] | None = None  # α, the weight of the entropy; learned if not given
    target_entropy: Finite[float] | None = None  # H̄, for actions in [-1, 1]; -dim(A) if none
    noise_correlation: ProperFraction = 0.0  # of ε from one step to the next; 0: white noise
    normalize_obs: bool = False  # shift and scale observations by running statistics
    eval_stochastic: bool = False  # draw evaluation actions from the policy instead of its mode

    def __post_init__(self) -> None:
        check_config(self)
        check_replay(self)
        check_updates(self.updates_per_step, self.total_timesteps)


PRESETS: dict[str, dict[str, Any]] = {"mujoco": {}}
MIN_LOG_STD, MAX_LOG_STD = -20.0, 2.0  # bounds of log σ, those of the authors' code


class Model(nnx.Module):
    """A policy and two Q-networks, with two hidden layers of 256 each."""

    def __init__(self, obs_space: spaces.Space, action_space: spaces.Space, rngs: nnx.Rngs):
        num_actions = math.prod(action_space.shape or ())
        self.actor = Network(obs_space, 0, 2 * num_actions, rngs, hidden=(256, 256))
        self.critic = nnx.List(
            [Network(obs_space, num_actions, 1, rngs, hidden=(256, 256)) for _ in range(2)]
        )

    def action(self, obs: Any) -> TanhNormal:
        """[B, *obs] -> distribution over actions [B, A], between -1 and 1."""
        mean, log_std = jnp.split(self.actor(obs), 2, axis=-1)  # [B, A]
        return TanhNormal(mean, jnp.clip(log_std, MIN_LOG_STD, MAX_LOG_STD))

    def value(self, obs: Any, action: Array) -> Array:
        """[B, *obs], [B, A] -> q_values [2, B]."""
        return jnp.stack([critic(obs, action)[:, 0] for critic in self.critic])


class LearnerState(NamedTuple):
    """Every array that learning changes."""

    actor: Trained
    critic: Trained
    target_critic: Any
    log_alpha: Trained  # []
    normalizer: NormalizerState


class Algorithm:
    """Targets, losses and optimizer as pure functions of `LearnerState`."""

    def __init__(self, config: Config, obs_space: spaces.Space, action_space: spaces.Space):
        self.config = config
        self.make_model = partial(Model, obs_space, action_space)
        self.graph = nnx.graphdef(self.make_model(nnx.Rngs(0)))
        given = config.target_entropy
        self.target_entropy = -math.prod(action_space.shape or ()) if given is None else given
        self.normalizer = Normalizer(config.normalize_obs, False, config.gamma)
        self.optimizer = optax.adam(config.learning_rate)
        self.descend = partial(descend, self.optimizer)

    def init(self, key: Array, obs: Any) -> LearnerState:
        """Draw new parameters; the targets start as copies; observations [N, *obs] give shapes."""
        params = nnx.to_pure_dict(nnx.state(self.make_model(nnx.Rngs(key))))
        log_alpha = jnp.log(jnp.float32(self.config.alpha or 1.0))
        return LearnerState(
            actor=Trained(params["actor"], self.optimizer.init(params["actor"])),
            critic=Trained(params["critic"], self.optimizer.init(params["critic"])),
            target_critic=jax.tree.map(jnp.copy, params["critic"]),
            log_alpha=Trained(log_alpha, self.optimizer.init(log_alpha)),
            normalizer=self.normalizer.init(obs),
        )

    def model(self, actor: Any, critic: Any) -> Model:
        """Return the networks with these parameters."""
        return nnx.merge(self.graph, {"actor": actor, "critic": critic})

    def predict(self, state: LearnerState, obs: Any) -> TanhNormal:
        """[B, *obs] -> distribution over actions [B, A], between -1 and 1."""
        return self.model(state.actor.params, state.critic.params).action(obs)

    def value(self, state: LearnerState, critic: Any, obs: Any, action: Array) -> Array:
        """[B, *obs], [B, A] -> q_values [2, B] of the critics θ or θ⁻."""
        return self.model(state.actor.params, critic).value(obs, action)

    def td_target(self, state: LearnerState, batch: Batch, noise: Array) -> Array:
        """r + γ (1 - terminated) (min_i Q_i(s', a'; θ⁻) - α log π(a'|s')) (eq. 3, 5)."""
        next_action, log_prob = self.predict(state, batch.next_obs).of_noise(noise)  # [B, A], [B]
        next_q_values = self.value(state, state.target_critic, batch.next_obs, next_action)
        next_q_value = next_q_values.min(axis=0)  # [B]
        next_value = next_q_value - jnp.exp(state.log_alpha.params) * log_prob  # [B]
        return batch.reward + batch.discount * next_value  # [B], discount = γ^m (1 - terminated)

    def critic_loss(
        self, critic: Any, state: LearnerState, batch: Batch, td_target: Array
    ) -> tuple[Array, dict[str, Array]]:
        """½ Σ_i E[(y - Q_i(s, a))²] over the valid rows of the batch (eq. 5)."""
        q_values = self.value(state, critic, batch.obs, batch.action)  # [2, B]
        chex.assert_equal_shape([*q_values, td_target, batch.weight])
        loss = 0.5 * (batch.weight * (td_target - q_values) ** 2).mean(axis=1).sum()
        return loss, {"critic_loss": loss, "q_values": (batch.weight * q_values).mean()}

    def actor_loss(
        self, actor: Any, state: LearnerState, batch: Batch, noise: Array
    ) -> tuple[Array, tuple[Array, dict[str, Array]]]:
        """E[α log π(ã|s) - min_i Q_i(s, ã)], ã ~ π(s) (eq. 7); and the entropy -E[log π(ã|s)]."""
        model = self.model(actor, state.critic.params)
        alpha = jnp.exp(state.log_alpha.params)
        action, log_prob = model.action(batch.obs).of_noise(noise)  # [B, A], [B]
        q_value = model.value(batch.obs, action).min(axis=0)  # [B]
        chex.assert_equal_shape([q_value, log_prob, batch.weight])
        loss = (batch.weight * (alpha * log_prob - q_value)).mean()
        entropy = -(batch.weight * log_prob).mean()
        return loss, (entropy, {"actor_loss": loss, "entropy": entropy, "alpha": alpha})

    def alpha_loss(self, log_alpha: Array, entropy: Array) -> tuple[Array, dict[str, Array]]:
        """-α E[log π(ã|s) + H̄], with α = exp(log_alpha) (eq. 18)."""
        return jnp.exp(log_alpha) * (entropy - self.target_entropy), {}

    def learn(
        self, state: LearnerState, batch: Batch, key: Array
    ) -> tuple[LearnerState, dict[str, Array]]:
        """A gradient step of critics, policy and temperature, then a step of the targets."""
        target_noise, actor_noise = standard_normals(key, 2, batch.action.shape)  # [B, A]
        td_target = self.td_target(state, batch, target_noise)  # [B]
        critic, metrics = self.descend(self.critic_loss, state.critic, state, batch, td_target)
        state = state._replace(critic=critic)
        actor, (entropy, actor_metrics) = self.descend(
            self.actor_loss, state.actor, state, batch, actor_noise
        )
        state = state._replace(actor=actor)
        if self.config.alpha is None:
            log_alpha, _ = self.descend(self.alpha_loss, state.log_alpha, entropy)
            state = state._replace(log_alpha=log_alpha)
        return self.sync_target(state), metrics | actor_metrics

    def sync_target(self, state: LearnerState) -> LearnerState:
        """θ⁻ = τ θ + (1 - τ) θ⁻."""
        target = optax.incremental_update(state.critic.params, state.target_critic, self.config.tau)
        return state._replace(target_critic=target)


class Agent:
    """Exploration, normalisation, and the way from environment to algorithm."""

    def __init__(self, config: Config, algorithm: Algorithm, action_space: spaces.Space):
        self.config = config
        self.algorithm = algorithm
        self.env_action = partial(scale_action, action_space)
        self.observe = algorithm.normalizer.observe

    def predict(self, state: LearnerState, obs: Any, key: Array) -> Array:
        """Action [N] of the environment to evaluate with: tanh(μ), or drawn tanh(μ + σ ε)."""
        obs = self.observe(state.normalizer, obs)  # [N, *obs]
        distribution = self.algorithm.predict(state, obs)
        is_drawn = self.config.eval_stochastic
        return self.env_action(distribution.sample(key) if is_drawn else distribution.mode())

    def sample(self, state: LearnerState, obs: Any, step: Array, noise: Array) -> Array:
        """Action [N, A] to train with, for `env_action`: tanh(μ + σ ε), at first a uniform one."""
        obs = self.observe(state.normalizer, obs)  # [N, *obs]
        mean, log_std = self.algorithm.predict(state, obs)  # [N, A]
        action = jnp.tanh(mean + jnp.exp(log_std) * noise)  # [N, A]
        is_random = step < self.config.learning_starts
        return jnp.where(is_random, uniform_action(noise), action)

    def learn(
        self, state: LearnerState, batch: Batch, key: Array
    ) -> tuple[LearnerState, dict[str, Array]]:
        """One update on a batch."""
        obs = self.observe(state.normalizer, batch.obs)
        next_obs = self.observe(state.normalizer, batch.next_obs)
        return self.algorithm.learn(state, batch._replace(obs=obs, next_obs=next_obs), key)


class TrainState(NamedTuple):
    """The whole training process: what a checkpoint holds."""

    learner: LearnerState
    env: EnvState
    replay: ReplayState
    noise: Array  # [N, A] ε of the last actions
    key: Array
    step: Array  # [] int32, env steps done over all environments


class Trainer:
    """The training process: collect, store, sample and learn in one compiled program."""

    def __init__(self, config: Config = Config()):
        self.config = config
        self.env = make_env(config)
        require_bounded_actions("sac", self.env)
        self.algorithm = Algorithm(config, self.env.observation_space, self.env.action_space)
        self.agent = Agent(config, self.algorithm, self.env.action_space)
        self.replay = Replay(config.buffer_size, config.num_envs, config.gamma, config.n_step)
        self.evaluator = Evaluator(config, self.agent.predict)
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
        learner_key, env_key, noise_key, key = jax.random.split(key, 4)
        env = self.env.reset(env_key)
        learner = self.algorithm.init(learner_key, env.obs)
        num_actions = math.prod(self.env.action_space.shape or ())
        noise = jax.random.normal(noise_key, (self.config.num_envs, num_actions))
        replay = self.replay.init(env.obs, noise)
        return TrainState(learner, env, replay, noise, key, jnp.zeros((), jnp.int32))

    def run_iterations(
        self, state: TrainState, num_iterations: int
    ) -> tuple[TrainState, dict[str, Array]]:
        """(collect, learn) × num_iterations, or until an environment fails."""
        start, ratio = self.config.learning_starts, self.config.updates_per_step
        due = partial(updates_until, start=start, updates_per_step=ratio)

        def goes_on(carry: tuple) -> Array:
            iteration, state, _ = carry
            return (iteration < num_iterations) & self.env.is_sound(state.env)

        def train(_: Array, carry: tuple) -> tuple:
            state, metrics = carry
            state, new_metrics = self._run_train(state)
            return state, jax.tree.map(jnp.add, metrics, new_metrics)

        def iterate(carry: tuple) -> tuple:
            iteration, state, metrics = carry
            first_update = due(state.step)
            state = self._run_collect(state)
            end = due(state.step)
            state, metrics = lax.fori_loop(first_update, end, train, (state, metrics))
            return iteration + 1, state, metrics

        state = state._replace(env=self.env.reset_summary(state.env))
        _, metrics = jax.eval_shape(self._run_train, state)
        carry = 0, state, optax.tree.zeros_like(metrics)
        _, state, metrics = lax.while_loop(goes_on, iterate, carry)
        return state, metrics

    def _run_collect(self, state: TrainState) -> TrainState:
        """One vector step: act, step the environments, store."""
        key, noise_key = jax.random.split(state.key)
        noise = next_noise(noise_key, state.noise, self.config.noise_correlation)  # [N, A]
        obs = state.env.obs  # [N, *obs]
        action = self.agent.sample(state.learner, obs, state.step, noise)  # [N, A]
        env, timestep = self.env.step(state.env, self.agent.env_action(action))
        transition = Transition(
            obs=obs,
            action=action,
            reward=timestep.reward,
            terminated=timestep.terminated,
            truncated=timestep.truncated,
            valid=~state.env.ended,
        )
        replay = self.replay.add(state.replay, transition)
        normalizer, _ = self.algorithm.normalizer.update(state.learner.normalizer, transition)
        learner = state.learner._replace(normalizer=normalizer)
        step = state.step + self.config.num_envs
        return TrainState(learner, env, replay, noise, key, step)

    def _run_train(self, state: TrainState) -> tuple[TrainState, dict[str, Array]]:
        """One update on a batch from replay."""
        key, sample_key, learn_key = jax.random.split(state.key, 3)
        batch = self.replay.sample(state.replay, sample_key, self.config.batch_size)
        learner, metrics = self.agent.learn(state.learner, batch, learn_key)
        metrics |= {"charts/updates": jnp.ones(())}
        return state._replace(learner=learner, key=key), metrics


if __name__ == "__main__":
    # Layers of 256 units: two threads can share them.
    run(Trainer, Config, PRESETS, num_cores=2)
