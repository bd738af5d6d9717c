"""Discrete Soft Actor-Critic: the expectation over actions is a sum instead of a sample.

Christodoulou 2019, https://arxiv.org/abs/1910.07207      Docs: docs/algorithms/sac_discrete.md

    V(s) = Σ_a π(a|s) (min_i Q_i(s, a; θ⁻) - α log π(a|s))                  td_target
    y    = r + γ (1 - terminated) V(s')                                     td_target
    L_Q  = ½ Σ_i E[(y - Q_i(s, a; θ))²]                                     critic_loss
    L_π  = E[Σ_a π(a|s; φ) (α log π(a|s; φ) - min_i Q_i(s, a; θ))]          actor_loss
    L_α  = -α E[Σ_a π(a|s) log π(a|s) + H̄],  H̄ = target_entropy · log A     alpha_loss
    θ⁻   = τ θ + (1 - τ) θ⁻                                                 sync_target
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

from common.action_masks import action_mask, mask_actions
from common.distributions import Categorical
from common.envs import EnvBackend, EnvState, make_env, require_action_space
from common.networks import Network
from common.normalize import Normalizer, NormalizerState
from common.optimize import Trained, descend
from common.ranges import Fraction, NonNegative, Positive
from common.replay import Batch, Replay, ReplayState, Transition
from common.schedules import updates_until

from common.run.config import check_config, check_replay, check_updates
from common.run.evaluator import Evaluator
from common.run.logger import log_intervals, log_points
from common.run.runner import run


@dataclass(frozen=True)
class Config:
    """Hyper-parameters; the defaults are ours for CartPole-v1."""

    env_id: str = "CartPole-v1"  # an envpool or Gymnasium id, or gymnax/ID or pgx/ID
    env_backend: EnvBackend = "auto"  # auto: envpool where it knows the id, else Gymnasium
    env_module: str | None = None  # module to import first, to register your environment
    env_kwargs: tuple[str, ...] = ()  # options of the environment, as KEY=VALUE KEY=VALUE ...
    num_envs: Positive[int] = 8  # environments stepped in parallel
    env_workers: NonNegative[int] = 0  # processes that step Gymnasium environments; 0: this one
    seed: NonNegative[int] = 1  # seed of networks, exploration, sampling and environments
    total_timesteps: Positive[int] = 200_000  # env steps over all envs; a multiple of num_envs
    log_frequency: Positive[int] = 2_000  # env steps between two log points
    learning_rate: Positive[float] = 3e-4  # step size of Adam, for policy, critics and temperature
    buffer_size: Positive[int] = 100_000  # transitions in the replay buffer, over all environments
    gamma: Fraction = 0.99  # discount of one step
    n_step: Positive[int] = 1  # steps of reward in a target before it bootstraps; 1 is the paper's
    frame_stack: Positive[int] = 1  # frames in an observation; the buffer stores single ones
    tau: Fraction = 0.005  # τ: share of θ in a target update
    batch_size: Positive[int] = 128  # transitions in a minibatch
    learning_starts: NonNegative[int] = 5_000  # env steps of uniformly random actions at first
    updates_per_step: Positive[float] = 0.25  # updates an env step, above or below 1
    alpha: Positive[float] | None = None  # α, the weight of the entropy; learned if not given
    target_entropy: Fraction = 0.3  # H̄ as a share of log A; 0.98 in the paper
    normalize_obs: bool = False  # shift and scale observations by running statistics
    eval_stochastic: bool = False  # draw evaluation actions from the policy instead of its mode

    def __post_init__(self) -> None:
        check_config(self)
        check_replay(self)
        check_updates(self.updates_per_step, self.total_timesteps)


PRESETS: dict[str, dict[str, Any]] = {
    "classic": {},
    "atari": {
        "total_timesteps": 10_000_000,
        "buffer_size": 1_000_000,
        "frame_stack": 4,
        "batch_size": 64,
        "learning_starts": 20_000,
        "target_entropy": 0.98,
    },
}


class Model(nnx.Module):
    """A policy and two Q-networks, with two hidden layers of 256 each."""

    def __init__(self, obs_space: spaces.Space, action_space: Any, rngs: nnx.Rngs):
        num_actions = int(action_space.n)
        self.actor = Network(obs_space, 0, num_actions, rngs, hidden=(256, 256))
        self.critic = nnx.List(
            [Network(obs_space, 0, num_actions, rngs, hidden=(256, 256)) for _ in range(2)]
        )

    def action(self, obs: Any) -> Categorical:
        """[B, *obs] -> distribution over actions [B]."""
        return Categorical(mask_actions(self.actor(obs), action_mask(obs)))

    def value(self, obs: Any) -> Array:
        """[B, *obs] -> q_values [2, B, A]."""
        return jnp.stack([critic(obs) for critic in self.critic])


class LearnerState(NamedTuple):
    """Every array that learning changes."""

    actor: Trained
    critic: Trained
    target_critic: Any
    log_alpha: Trained  # []
    normalizer: NormalizerState


class Algorithm:
    """Targets, losses and optimizer as pure functions of `LearnerState`."""

    def __init__(self, config: Config, obs_space: spaces.Space, action_space: Any):
        self.config = config
        self.make_model = partial(Model, obs_space, action_space)
        self.graph = nnx.graphdef(self.make_model(nnx.Rngs(0)))
        self.num_actions = int(action_space.n)
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

    def predict(self, state: LearnerState, obs: Any) -> Categorical:
        """[B, *obs] -> distribution over actions [B]."""
        return self.model(state.actor.params, state.critic.params).action(obs)

    def value(self, state: LearnerState, critic: Any, obs: Any) -> Array:
        """[B, *obs] -> q_values [2, B, A] of the critics θ or θ⁻."""
        return self.model(state.actor.params, critic).value(obs)

    def td_target(self, state: LearnerState, batch: Batch) -> Array:
        """r + γ (1 - terminated) Σ_a π(a|s') (min_i Q_i(s', a; θ⁻) - α log π(a|s')) (eq. 10)."""
        next_policy = self.predict(state, batch.next_obs)
        next_q_values = self.value(state, state.target_critic, batch.next_obs).min(axis=0)  # [B, A]
        log_probs = next_policy.log_probs()  # [B, A]
        soft_q_values = next_q_values - jnp.exp(state.log_alpha.params) * log_probs  # [B, A]
        next_value = (next_policy.probs() * soft_q_values).sum(axis=-1)  # [B]
        return batch.reward + batch.discount * next_value  # [B], discount = γ^m (1 - terminated)

    def critic_loss(
        self, critic: Any, state: LearnerState, batch: Batch, td_target: Array
    ) -> tuple[Array, dict[str, Array]]:
        """½ Σ_i E[(y - Q_i(s, a))²] over the valid rows of the batch."""
        q_values = self.value(state, critic, batch.obs)  # [2, B, A]
        q_values = jnp.take_along_axis(q_values, batch.action[None, :, None], -1)[..., 0]  # [2, B]
        chex.assert_equal_shape([*q_values, td_target, batch.weight])
        loss = 0.5 * (batch.weight * (td_target - q_values) ** 2).mean(axis=1).sum()
        return loss, {"critic_loss": loss, "q_values": (batch.weight * q_values).mean()}

    def actor_loss(
        self, actor: Any, state: LearnerState, batch: Batch
    ) -> tuple[Array, tuple[Array, dict[str, Array]]]:
        """E[Σ_a π(a|s) (α log π(a|s) - min_i Q_i(s, a))] (eq. 12); and the entropy of π."""
        model = self.model(actor, state.critic.params)
        policy = model.action(batch.obs)
        q_values = model.value(batch.obs).min(axis=0)  # [B, A]
        alpha = jnp.exp(state.log_alpha.params)
        chex.assert_equal_shape([policy.logits, q_values])
        error = (policy.probs() * (alpha * policy.log_probs() - q_values)).sum(axis=-1)  # [B]
        loss = (batch.weight * error).mean()
        entropy = (batch.weight * policy.entropy()).mean()
        return loss, (entropy, {"actor_loss": loss, "entropy": entropy, "alpha": alpha})

    def target_entropy(self, batch: Batch) -> Any:
        """H̄: a share of log A, or of the mean log of those actions that a mask leaves."""
        share, mask = self.config.target_entropy, action_mask(batch.obs)
        if mask is None:
            return share * math.log(self.num_actions)
        num_left = jnp.where(mask.any(axis=-1), mask.sum(axis=-1), self.num_actions)  # [B]
        return share * (batch.weight * jnp.log(num_left)).mean()

    def alpha_loss(
        self, log_alpha: Array, entropy: Array, target_entropy: Any
    ) -> tuple[Array, dict[str, Array]]:
        """-α E[Σ_a π(a|s) log π(a|s) + H̄], with α = exp(log_alpha) (eq. 11)."""
        return jnp.exp(log_alpha) * (entropy - target_entropy), {}

    def learn(self, state: LearnerState, batch: Batch) -> tuple[LearnerState, dict[str, Array]]:
        """A gradient step of critics, policy and temperature, then a step of the targets."""
        td_target = self.td_target(state, batch)  # [B]
        critic, metrics = self.descend(self.critic_loss, state.critic, state, batch, td_target)
        state = state._replace(critic=critic)
        actor, (entropy, actor_metrics) = self.descend(self.actor_loss, state.actor, state, batch)
        state = state._replace(actor=actor)
        if self.config.alpha is None:
            target_entropy = self.target_entropy(batch)
            log_alpha, _ = self.descend(self.alpha_loss, state.log_alpha, entropy, target_entropy)
            state = state._replace(log_alpha=log_alpha)
        return self.sync_target(state), metrics | actor_metrics

    def sync_target(self, state: LearnerState) -> LearnerState:
        """θ⁻ = τ θ + (1 - τ) θ⁻."""
        target = optax.incremental_update(state.critic.params, state.target_critic, self.config.tau)
        return state._replace(target_critic=target)


class Agent:
    """Exploration, normalisation, and the way from environment to algorithm."""

    def __init__(self, config: Config, algorithm: Algorithm):
        self.config = config
        self.algorithm = algorithm
        self.observe = algorithm.normalizer.observe

    def predict(self, state: LearnerState, obs: Any, key: Array) -> Array:
        """Action [N] to evaluate with: the most likely one, or a drawn one."""
        obs = self.observe(state.normalizer, obs)  # [N, *obs]
        distribution = self.algorithm.predict(state, obs)
        return distribution.sample(key) if self.config.eval_stochastic else distribution.mode()

    def sample(self, state: LearnerState, obs: Any, step: Array, key: Array) -> Array:
        """Action [N] to train with: a sample of the policy, at first a uniform one."""
        obs = self.observe(state.normalizer, obs)  # [N, *obs]
        logits = self.algorithm.predict(state, obs).logits  # [N, A]
        is_random = step < self.config.learning_starts
        logits = mask_actions(jnp.where(is_random, 0.0, logits), action_mask(obs))  # [N, A]
        return Categorical(logits).sample(key)

    def learn(self, state: LearnerState, batch: Batch) -> tuple[LearnerState, dict[str, Array]]:
        """One update on a batch."""
        obs = self.observe(state.normalizer, batch.obs)
        next_obs = self.observe(state.normalizer, batch.next_obs)
        return self.algorithm.learn(state, batch._replace(obs=obs, next_obs=next_obs))


class TrainState(NamedTuple):
    """The whole training process: what a checkpoint holds."""

    learner: LearnerState
    env: EnvState
    replay: ReplayState
    key: Array
    step: Array  # [] int32, env steps done over all environments


class Trainer:
    """The training process: collect, store, sample and learn in one compiled program."""

    def __init__(self, config: Config = Config()):
        self.config = config
        self.env = make_env(config)
        require_action_space("sac_discrete", self.env, spaces.Discrete)
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
                yield from log_points(self.env, self.state, start, {}, metrics)
        finally:
            self.env.close()

    def evaluate(self, num_episodes: int = 20) -> dict:
        """Play full episodes in environments of their own; log_data of their raw returns."""
        return self.evaluator(self.state.learner, int(self.state.step), num_episodes)

    def init_state(self, key: Array) -> TrainState:
        """New parameters, new episodes and an empty buffer."""
        learner_key, env_key, key = jax.random.split(key, 3)
        env = self.env.reset(env_key)
        learner = self.algorithm.init(learner_key, env.obs)
        step = jnp.zeros((), jnp.int32)
        action = jax.eval_shape(self.agent.sample, learner, env.obs, step, key)
        replay = self.replay.init(env.obs, action)
        return TrainState(learner, env, replay, key, step)

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
        normalizer, _ = self.algorithm.normalizer.update(state.learner.normalizer, transition)
        learner = state.learner._replace(normalizer=normalizer)
        step = state.step + self.config.num_envs
        return TrainState(learner, env, replay, key, step)

    def _run_train(self, state: TrainState) -> tuple[TrainState, dict[str, Array]]:
        """One update on a batch from replay."""
        key, sample_key = jax.random.split(state.key)
        batch = self.replay.sample(state.replay, sample_key, self.config.batch_size)
        learner, metrics = self.agent.learn(state.learner, batch)
        metrics |= {"charts/updates": jnp.ones(())}
        return state._replace(learner=learner, key=key), metrics


if __name__ == "__main__":
    # Layers of 256 units: two threads can share them.
    run(Trainer, Config, PRESETS, num_cores=2)
