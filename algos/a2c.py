"""Advantage Actor-Critic: one policy-gradient step on each short rollout.

Mnih et al. 2016, https://arxiv.org/abs/1602.01783      Docs: docs/algorithms/a2c.md

    δ_t = r_t + γ (1 - terminated_t) V(s_{t+1}) - V(s_t)           targets.gae
    Â_t = δ_t + γ λ (1 - ended_t) Â_{t+1}                          targets.gae
    R_t = Â_t + V(s_t)                                             targets
    L_π = -E[log π(a|s; θ) Â]                                      policy_loss
    L_V = ½ E[(V - R)²]                                            value_loss
    L   = L_π + c_V L_V - β E[H(π)]                                loss_fn
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

from common.action_masks import action_mask
from common.distributions import Distribution, PolicyHead
from common.envs import EnvBackend, EnvState, make_env, require_action_space, scale_action
from common.networks import MLP, Encoder
from common.normalize import Normalizer, NormalizerState, standardize
from common.ranges import Finite, Fraction, NonNegative, Positive
from common.replay import Transition
from common.rollout import RolloutBatch, Trajectory, collect_rollout, empty_rollout
from common.targets import gae

from common.run.config import check_config, check_rollout
from common.run.evaluator import Evaluator
from common.run.logger import log_intervals, log_points
from common.run.runner import run


@dataclass(frozen=True)
class Config:
    """Hyper-parameters; step size, c_V and gradient norm are those of OpenAI Baselines."""

    env_id: str = "CartPole-v1"  # an envpool or Gymnasium id, or gymnax/ID or pgx/ID
    env_backend: EnvBackend = "auto"  # auto: envpool where it knows the id, else Gymnasium
    env_module: str | None = None  # module to import first, to register your environment
    env_kwargs: tuple[str, ...] = ()  # options of the environment, as KEY=VALUE KEY=VALUE ...
    num_envs: Positive[int] = 8  # environments stepped in parallel
    env_workers: NonNegative[int] = 0  # processes that step Gymnasium environments; 0: this one
    seed: NonNegative[int] = 1  # seed of networks, exploration and environments
    total_timesteps: Positive[int] = 500_000  # env steps over all envs; a multiple of num_envs
    log_frequency: Positive[int] = 10_000  # env steps between log points, rounded up to rollouts
    learning_rate: Positive[float] = 7e-4  # step size of RMSProp at the start
    anneal_lr: bool = True  # let the step size fall linearly to 0 over the run
    num_steps: Positive[int] = 5  # t_max: steps of each environment in a rollout
    gamma: Fraction = 0.99  # discount of one step
    gae_lambda: Fraction = 1.0  # λ: 0 trusts the next value, 1 the rewards, as in the paper
    terminate_truncated: bool = False  # take truncated episodes for terminated ones
    normalize_advantages: bool = False  # give the advantages of a rollout mean 0 and deviation 1
    entropy_coef: NonNegative[float] = 0.01  # β: weight of the entropy bonus
    value_coef: NonNegative[float] = 0.5  # c_V: weight of the value loss
    max_grad_norm: Positive[float] = 0.5  # longest gradient; longer ones are scaled down to it
    log_std_init: Finite[float] = 0.0  # log of the deviation of a continuous action at the start
    normalize_obs: bool = False  # shift and scale observations by running statistics
    normalize_reward: bool = False  # divide rewards by the running deviation of returns
    eval_stochastic: bool = False  # draw evaluation actions from the policy instead of its mode

    def __post_init__(self) -> None:
        check_config(self)
        check_rollout(self)


PRESETS: dict[str, dict[str, Any]] = {
    "classic": {},
    "mujoco": {
        "total_timesteps": 1_000_000,
        "gae_lambda": 0.95,
        "entropy_coef": 0.0,
        "normalize_obs": True,
        "normalize_reward": True,
    },
    "atari": {
        "num_envs": 16,
        "total_timesteps": 10_000_000,
    },
}


class Model(nnx.Module):
    """Policy and value: two hidden layers each for vectors, one shared encoder for images."""

    def __init__(self, config: Config, obs_space: spaces.Space, action_space: Any, rngs: nnx.Rngs):
        init = nnx.initializers.orthogonal
        self.encoder = Encoder(obs_space, rngs, init(2**0.5))
        hidden = () if self.encoder.has_cnn else (64, 64)
        sizes = (self.encoder.num_features, *hidden)
        self.actor = MLP(sizes, rngs, nnx.tanh, init(2**0.5))
        self.critic = MLP(sizes, rngs, nnx.tanh, init(2**0.5))
        self.policy_head = PolicyHead(
            sizes[-1], action_space, rngs, scale=0.01, log_std_init=config.log_std_init
        )
        self.value_head = nnx.Linear(sizes[-1], 1, kernel_init=init(1.0), rngs=rngs)

    def action_and_value(self, obs: Any) -> tuple[Distribution, Array]:
        """[B, *obs] -> distribution over actions, and value [B]."""
        features = self.encoder(obs)  # [B, F]
        value = self.value_head(self.critic(features))[:, 0]  # [B]
        return self.policy_head(self.actor(features), action_mask(obs)), value


class LearnerState(NamedTuple):
    """Every array that learning changes."""

    params: Any
    opt_state: Any
    normalizer: NormalizerState


class Algorithm:
    """Targets, losses and optimizer as pure functions of `LearnerState`."""

    def __init__(self, config: Config, obs_space: spaces.Space, action_space: spaces.Space):
        self.config = config
        self.make_model = partial(Model, config, obs_space, action_space)
        self.model = partial(nnx.merge, nnx.graphdef(self.make_model(nnx.Rngs(0))))
        self.normalizer = Normalizer(config.normalize_obs, config.normalize_reward, config.gamma)
        num_updates = config.total_timesteps // (config.num_envs * config.num_steps)
        end = 0.0 if config.anneal_lr else config.learning_rate
        step_size = optax.linear_schedule(config.learning_rate, end, num_updates)
        clip = optax.clip_by_global_norm(config.max_grad_norm)
        rmsprop = optax.rmsprop(step_size, decay=0.99, eps=1e-5)
        self.optimizer = optax.flatten(optax.chain(clip, rmsprop))

    def init(self, key: Array, obs: Any) -> LearnerState:
        """Draw new parameters; observations [N, *obs] give shapes."""
        params = nnx.to_pure_dict(nnx.state(self.make_model(nnx.Rngs(key))))
        return LearnerState(
            params=params,
            opt_state=self.optimizer.init(params),
            normalizer=self.normalizer.init(obs),
        )

    def predict(self, params: Any, obs: Any) -> tuple[Distribution, Array]:
        """[B, *obs] -> distribution over actions, and value [B]."""
        return self.model(params).action_and_value(obs)

    def targets(self, rollout: Transition, last_value: Array) -> RolloutBatch:
        """Rollout [T, N] and the value [N] of what follows -> the same with Â and R = Â + V."""
        log_prob, value = rollout.extras
        advantages = gae(
            reward=rollout.reward,
            terminated=rollout.terminated | (rollout.truncated & self.config.terminate_truncated),
            truncated=rollout.truncated,
            value=jnp.concatenate([value, last_value[None]]),  # [T + 1, N]
            gamma=self.config.gamma,
            lambda_=self.config.gae_lambda,
        )  # [T, N]
        return RolloutBatch(
            obs=rollout.obs,
            action=rollout.action,
            log_prob=log_prob,
            value=value,
            advantages=advantages,
            returns=advantages + value,
            weight=rollout.valid / jnp.maximum(rollout.valid.mean(), 1e-8),
        )

    def policy_loss(self, log_prob: Array, batch: RolloutBatch) -> Array:
        """-E[log π(a|s) Â]."""
        advantages = batch.advantages
        if self.config.normalize_advantages:
            advantages = standardize(advantages, batch.weight)
        return -(batch.weight * log_prob * advantages).mean()

    def value_loss(self, value: Array, batch: RolloutBatch) -> Array:
        """½ E[(V - R)²]."""
        return 0.5 * (batch.weight * (value - batch.returns) ** 2).mean()

    def loss_fn(self, params: Any, batch: RolloutBatch) -> tuple[Array, dict[str, Array]]:
        """L_π + c_V L_V - β E[H(π)] over the valid rows of the batch."""
        distribution, value = self.predict(params, batch.obs)
        log_prob = distribution.log_prob(batch.action)  # [B]
        chex.assert_equal_shape([log_prob, value, batch.advantages, batch.returns, batch.weight])
        policy_loss = self.policy_loss(log_prob, batch)
        value_loss = self.value_loss(value, batch)
        entropy = (batch.weight * distribution.entropy()).mean()
        loss = policy_loss + self.config.value_coef * value_loss
        loss -= self.config.entropy_coef * entropy
        return loss, {
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy": entropy,
        }

    def learn(
        self, state: LearnerState, batch: RolloutBatch
    ) -> tuple[LearnerState, dict[str, Array]]:
        """One gradient step on a batch."""
        grads, metrics = jax.grad(self.loss_fn, has_aux=True)(state.params, batch)
        updates, opt_state = self.optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return state._replace(params=params, opt_state=opt_state), metrics


class Agent:
    """Exploration, normalisation, and the way from environment to algorithm."""

    def __init__(self, config: Config, algorithm: Algorithm, action_space: spaces.Space):
        self.config = config
        self.algorithm = algorithm
        self.env_action = partial(scale_action, action_space)
        self.observe = algorithm.normalizer.observe

    def predict(self, state: LearnerState, obs: Any, key: Array) -> Array:
        """Action [N] of the environment to evaluate with: the most likely one, or a drawn one."""
        obs = self.observe(state.normalizer, obs)  # [N, *obs]
        distribution, _ = self.algorithm.predict(state.params, obs)
        is_drawn = self.config.eval_stochastic
        return self.env_action(distribution.sample(key) if is_drawn else distribution.mode())

    def sample(
        self, state: LearnerState, obs: Any, step: Array, key: Array
    ) -> tuple[Array, tuple[Array, Array]]:
        """Action [N] to train with, for `env_action`; its log_prob [N] and the value [N]."""
        obs = self.observe(state.normalizer, obs)  # [N, *obs]
        distribution, value = self.algorithm.predict(state.params, obs)
        action = distribution.sample(key)  # [N, *action]
        return action, (distribution.log_prob(action), value)

    def prepare(
        self, state: LearnerState, rollout: Transition, last_obs: Any
    ) -> tuple[LearnerState, RolloutBatch]:
        """Rollout [T, N] and the obs [N] after it -> new statistics, and its batch [T * N]."""
        obs = self.observe(state.normalizer, rollout.obs)  # [T, N, *obs]
        last_obs = self.observe(state.normalizer, last_obs)  # [N, *obs]
        stats, reward = self.algorithm.normalizer.update(state.normalizer, rollout)
        _, last_value = self.algorithm.predict(state.params, last_obs)
        batch = self.algorithm.targets(rollout._replace(obs=obs, reward=reward), last_value)
        batch = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)  # [T * N, ...]
        return state._replace(normalizer=stats), batch

    def learn(
        self, state: LearnerState, batch: RolloutBatch
    ) -> tuple[LearnerState, dict[str, Array]]:
        """One gradient step on a batch."""
        return self.algorithm.learn(state, batch)


class TrainState(NamedTuple):
    """The whole training process: what a checkpoint holds."""

    learner: LearnerState
    env: EnvState
    key: Array
    step: Array  # [] int32, env steps done over all environments


class Trainer:
    """The training process: collect rollouts and learn from them in one compiled program."""

    pace = "synchronous"  # of Explorers: every rollout is of the newest policy

    def __init__(self, config: Config = Config()):
        self.config = config
        self.env = make_env(config)
        require_action_space("a2c", self.env, *PolicyHead.action_spaces)
        self.algorithm = Algorithm(config, self.env.observation_space, self.env.action_space)
        self.agent = Agent(config, self.algorithm, self.env.action_space)
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
        """New parameters and new episodes."""
        learner_key, env_key, key = jax.random.split(key, 3)
        env = self.env.reset(env_key)
        learner = self.algorithm.init(learner_key, env.obs)
        return TrainState(learner, env, key, jnp.zeros((), jnp.int32))

    def run_iterations(
        self, state: TrainState, num_iterations: int
    ) -> tuple[TrainState, dict[str, Array]]:
        """(collect, learn) × num_iterations; total_timesteps or a failure may cut the last one."""

        def iterate(_: Array, carry: tuple) -> tuple:
            state, metrics = carry
            state, trajectory, is_complete = self.collect_trajectory(state)
            return lax.cond(is_complete, self.learn_trajectory, skip, state, metrics, trajectory)

        def skip(state: TrainState, metrics: dict, _: Trajectory) -> tuple[TrainState, dict]:
            return state, metrics

        state = state._replace(env=self.env.reset_summary(state.env))
        return lax.fori_loop(0, num_iterations, iterate, (state, self.zero_metrics(state)))

    def zero_metrics(self, state: TrainState) -> dict[str, Array]:
        """The zeros that metrics are added to, derived from what `learn` returns."""
        rollout = empty_rollout(self._run_collect, state, self.config.num_steps)
        learner, batch = jax.eval_shape(self.agent.prepare, state.learner, rollout, state.env.obs)
        *_, metrics = jax.eval_shape(self.agent.learn, learner, batch)
        return optax.tree.zeros_like(metrics | {"charts/updates": jnp.zeros(())})

    def collect_trajectory(self, state: TrainState) -> tuple[TrainState, Trajectory, Array]:
        """A rollout and what is behind it, and whether all of its steps were made."""
        steps_left = (self.config.total_timesteps - state.step) // self.config.num_envs
        state, rollout, is_complete = collect_rollout(
            self.env, self._run_collect, state, self.config.num_steps, steps_left
        )
        return state, Trajectory(rollout, state.env.obs), is_complete

    def _run_collect(self, state: TrainState) -> tuple[TrainState, Transition]:
        """One vector step: act, step the environments."""
        key, action_key = jax.random.split(state.key)
        obs = state.env.obs  # [N, *obs]
        action, extras = self.agent.sample(state.learner, obs, state.step, action_key)  # [N]
        env, timestep = self.env.step(state.env, self.agent.env_action(action))
        transition = Transition(
            obs=obs,
            action=action,
            reward=timestep.reward,
            terminated=timestep.terminated,
            truncated=timestep.truncated,
            valid=~state.env.ended,
            extras=extras,
        )
        step = state.step + self.config.num_envs
        return state._replace(env=env, key=key, step=step), transition

    def learn_trajectory(
        self, state: TrainState, metrics: dict[str, Array], trajectory: Trajectory
    ) -> tuple[TrainState, dict[str, Array]]:
        """One step on a rollout; its metrics are added up."""
        learner, batch = self.agent.prepare(state.learner, trajectory.rollout, trajectory.last_obs)
        learner, new_metrics = self.agent.learn(learner, batch)
        new_metrics |= {"charts/updates": jnp.ones(())}
        return state._replace(learner=learner), jax.tree.map(jnp.add, metrics, new_metrics)


if __name__ == "__main__":
    run(Trainer, Config, PRESETS)
