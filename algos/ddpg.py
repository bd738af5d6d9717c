"""Deep Deterministic Policy Gradient: Q-learning for continuous actions, with a learned maximiser.

Lillicrap et al. 2016, https://arxiv.org/abs/1509.02971      Docs: docs/algorithms/ddpg.md

    y    = r + γ (1 - terminated) Q(s', μ(s'; φ⁻); θ⁻)          td_target
    L_Q  = E[(y - Q(s, a; θ))²]                                 critic_loss
    L_μ  = -E[Q(s, μ(s; φ); θ)]                                 actor_loss
    θ⁻   = τ θ + (1 - τ) θ⁻,  φ⁻ = τ φ + (1 - τ) φ⁻             sync_target
    a    = clip(μ(s; φ) + σ ε, ±1)                              sample
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

from common.envs import EnvBackend, EnvState, make_env, require_bounded_actions, scale_action
from common.exploration import next_noise, uniform_action
from common.networks import Network
from common.normalize import Normalizer, NormalizerState
from common.optimize import Trained, descend
from common.ranges import Fraction, NonNegative, Positive, ProperFraction
from common.replay import Batch, Replay, ReplayState, Transition
from common.schedules import updates_until

from common.run.config import check_config, check_replay, check_updates
from common.run.evaluator import Evaluator
from common.run.logger import log_intervals, log_points
from common.run.runner import run


@dataclass(frozen=True)
class Config:
    """Hyper-parameters; the defaults are those of TD3's authors for MuJoCo."""

    env_id: str = "HalfCheetah-v4"  # an envpool or Gymnasium id, or gymnax/ID
    env_backend: EnvBackend = "auto"  # auto: envpool where it knows the id, else Gymnasium
    env_module: str | None = None  # module to import first, to register your environment
    env_kwargs: tuple[str, ...] = ()  # options of the environment, as KEY=VALUE KEY=VALUE ...
    num_envs: Positive[int] = 1  # environments stepped in parallel
    env_workers: NonNegative[int] = 0  # processes that step Gymnasium environments; 0: this one
    seed: NonNegative[int] = 1  # seed of networks, exploration, sampling and environments
    total_timesteps: Positive[int] = 1_000_000  # env steps over all envs; a multiple of num_envs
    log_frequency: Positive[int] = 1_000  # env steps between two log points
    learning_rate: Positive[float] = 3e-4  # step size of Adam, for policy and critics
    buffer_size: Positive[int] = 1_000_000  # transitions in the replay buffer, over all envs
    gamma: Fraction = 0.99  # discount of one step
    n_step: Positive[int] = 1  # steps of reward in a target before it bootstraps; 1 is the paper's
    tau: Fraction = 0.005  # τ: share of θ in a target update
    batch_size: Positive[int] = 256  # transitions in a minibatch
    learning_starts: NonNegative[int] = 25_000  # env steps of uniformly random actions at first
    updates_per_step: Positive[float] = 1.0  # updates an env step, above or below 1
    policy_frequency: Positive[int] = 1  # updates of the critic for one of policy and targets
    exploration_noise: NonNegative[float] = 0.1  # σ: deviation of the noise, of half the range
    noise_correlation: ProperFraction = 0.0  # of ε from one step to the next; 0: white noise
    normalize_obs: bool = False  # shift and scale observations by running statistics

    def __post_init__(self) -> None:
        check_config(self)
        check_replay(self)
        check_updates(self.updates_per_step, self.total_timesteps)


PRESETS: dict[str, dict[str, Any]] = {"mujoco": {}}


class Model(nnx.Module):
    """A policy and a Q-network, with two hidden layers of 256 each."""

    def __init__(self, obs_space: spaces.Space, action_space: spaces.Space, rngs: nnx.Rngs):
        num_actions = math.prod(action_space.shape or ())
        self.actor = Network(obs_space, 0, num_actions, rngs, hidden=(256, 256))
        self.critic = Network(obs_space, num_actions, 1, rngs, hidden=(256, 256))

    def action(self, obs: Any) -> Array:
        """[B, *obs] -> action [B, A], between -1 and 1."""
        return jnp.tanh(self.actor(obs))

    def value(self, obs: Any, action: Array) -> Array:
        """[B, *obs], [B, A] -> q_value [B]."""
        return self.critic(obs, action)[:, 0]


class LearnerState(NamedTuple):
    """Every array that learning changes."""

    actor: Trained
    critic: Trained
    target_actor: Any
    target_critic: Any
    normalizer: NormalizerState


class Algorithm:
    """Targets, losses and optimizer as pure functions of `LearnerState`."""

    def __init__(self, config: Config, obs_space: spaces.Space, action_space: spaces.Space):
        self.config = config
        self.make_model = partial(Model, obs_space, action_space)
        self.graph = nnx.graphdef(self.make_model(nnx.Rngs(0)))
        self.normalizer = Normalizer(config.normalize_obs, False, config.gamma)
        self.optimizer = optax.adam(config.learning_rate)
        self.descend = partial(descend, self.optimizer)

    def init(self, key: Array, obs: Any) -> LearnerState:
        """Draw new parameters; the targets start as copies; observations [N, *obs] give shapes."""
        params = nnx.to_pure_dict(nnx.state(self.make_model(nnx.Rngs(key))))
        return LearnerState(
            actor=Trained(params["actor"], self.optimizer.init(params["actor"])),
            critic=Trained(params["critic"], self.optimizer.init(params["critic"])),
            target_actor=jax.tree.map(jnp.copy, params["actor"]),
            target_critic=jax.tree.map(jnp.copy, params["critic"]),
            normalizer=self.normalizer.init(obs),
        )

    def model(self, actor: Any, critic: Any) -> Model:
        """Return the networks with these parameters."""
        return nnx.merge(self.graph, {"actor": actor, "critic": critic})

    def predict(self, state: LearnerState, obs: Any) -> Array:
        """[B, *obs] -> action [B, A], between -1 and 1."""
        return self.model(state.actor.params, state.critic.params).action(obs)

    def td_target(self, state: LearnerState, batch: Batch) -> Array:
        """r + γ (1 - terminated) Q(s', μ(s'; φ⁻); θ⁻), over n steps where n_step > 1."""
        target = self.model(state.target_actor, state.target_critic)
        next_action = target.action(batch.next_obs)  # [B, A]
        next_value = target.value(batch.next_obs, next_action)  # [B]
        return batch.reward + batch.discount * next_value  # [B], discount = γ^m (1 - terminated)

    def critic_loss(
        self, critic: Any, state: LearnerState, batch: Batch, td_target: Array
    ) -> tuple[Array, dict[str, Array]]:
        """E[(y - Q(s, a))²] over the valid rows of the batch."""
        model = self.model(state.actor.params, critic)
        q_value = model.value(batch.obs, batch.action)  # [B]
        chex.assert_equal_shape([q_value, td_target, batch.weight])
        loss = (batch.weight * (td_target - q_value) ** 2).mean()
        return loss, {"critic_loss": loss, "q_values": (batch.weight * q_value).mean()}

    def actor_loss(
        self, actor: Any, state: LearnerState, batch: Batch
    ) -> tuple[Array, dict[str, Array]]:
        """-E[Q(s, μ(s))], whose gradient is the deterministic policy gradient (eq. 6)."""
        model = self.model(actor, state.critic.params)
        q_value = model.value(batch.obs, model.action(batch.obs))  # [B]
        chex.assert_equal_shape([q_value, batch.weight])
        loss = -(batch.weight * q_value).mean()
        return loss, {"actor_loss": loss}

    def learn(
        self, state: LearnerState, batch: Batch, update: Array
    ) -> tuple[LearnerState, dict[str, Array]]:
        """A gradient step of the critic and, each policy_frequency updates, of the policy."""
        td_target = self.td_target(state, batch)  # [B]
        critic, metrics = self.descend(self.critic_loss, state.critic, state, batch, td_target)
        state = state._replace(critic=critic)
        is_due = update % self.config.policy_frequency == 0
        state, actor_metrics = lax.cond(is_due, self.learn_actor, self.skip_actor, state, batch)
        return state, metrics | actor_metrics

    def learn_actor(
        self, state: LearnerState, batch: Batch
    ) -> tuple[LearnerState, dict[str, Array]]:
        """A gradient step of the policy, then a step of the targets."""
        actor, metrics = self.descend(self.actor_loss, state.actor, state, batch)
        state = self.sync_target(state._replace(actor=actor))
        return state, metrics | {"charts/actor_updates": jnp.ones(())}

    def skip_actor(
        self, state: LearnerState, batch: Batch
    ) -> tuple[LearnerState, dict[str, Array]]:
        """Leave policy and targets as they are."""
        _, metrics = jax.eval_shape(self.learn_actor, state, batch)
        return state, optax.tree.zeros_like(metrics)

    def sync_target(self, state: LearnerState) -> LearnerState:
        """θ⁻ = τ θ + (1 - τ) θ⁻, φ⁻ = τ φ + (1 - τ) φ⁻."""
        tau = self.config.tau
        actor = optax.incremental_update(state.actor.params, state.target_actor, tau)
        critic = optax.incremental_update(state.critic.params, state.target_critic, tau)
        return state._replace(target_actor=actor, target_critic=critic)


class Agent:
    """Exploration, normalisation, and the way from environment to algorithm."""

    def __init__(self, config: Config, algorithm: Algorithm, action_space: spaces.Space):
        self.config = config
        self.algorithm = algorithm
        self.env_action = partial(scale_action, action_space)
        self.observe = algorithm.normalizer.observe

    def predict(self, state: LearnerState, obs: Any, key: Array) -> Array:
        """Action [N] of the environment to evaluate with: μ(s)."""
        obs = self.observe(state.normalizer, obs)  # [N, *obs]
        return self.env_action(self.algorithm.predict(state, obs))

    def sample(self, state: LearnerState, obs: Any, step: Array, noise: Array) -> Array:
        """Action [N, A] to train with, for `env_action`: μ(s) + σ ε, at first a uniform one."""
        obs = self.observe(state.normalizer, obs)  # [N, *obs]
        action = self.algorithm.predict(state, obs)  # [N, A]
        action = jnp.clip(action + self.config.exploration_noise * noise, -1.0, 1.0)
        is_random = step < self.config.learning_starts
        return jnp.where(is_random, uniform_action(noise), action)

    def learn(
        self, state: LearnerState, batch: Batch, update: Array
    ) -> tuple[LearnerState, dict[str, Array]]:
        """One update on a batch."""
        obs = self.observe(state.normalizer, batch.obs)
        next_obs = self.observe(state.normalizer, batch.next_obs)
        batch = batch._replace(obs=obs, next_obs=next_obs)
        return self.algorithm.learn(state, batch, update)


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
        require_bounded_actions("ddpg", self.env)
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
                divisors = {"actor_loss": "charts/actor_updates"}
                yield from log_points(self.env, self.state, start, {}, metrics, divisors)
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

        def train(update: Array, carry: tuple) -> tuple:
            state, metrics = carry
            state, new_metrics = self._run_train(state, update)
            return state, jax.tree.map(jnp.add, metrics, new_metrics)

        def iterate(carry: tuple) -> tuple:
            iteration, state, metrics = carry
            first_update = due(state.step)
            state = self._run_collect(state)
            end = due(state.step)
            state, metrics = lax.fori_loop(first_update, end, train, (state, metrics))
            return iteration + 1, state, metrics

        state = state._replace(env=self.env.reset_summary(state.env))
        _, metrics = jax.eval_shape(self._run_train, state, 0)
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

    def _run_train(self, state: TrainState, update: Array) -> tuple[TrainState, dict[str, Array]]:
        """One update on a batch from replay; `update` counts those before it."""
        key, sample_key = jax.random.split(state.key)
        batch = self.replay.sample(state.replay, sample_key, self.config.batch_size)
        learner, metrics = self.agent.learn(state.learner, batch, update)
        metrics |= {"charts/updates": jnp.ones(())}
        return state._replace(learner=learner, key=key), metrics


if __name__ == "__main__":
    # Layers of 256 units: two threads can share them.
    run(Trainer, Config, PRESETS, num_cores=2)
