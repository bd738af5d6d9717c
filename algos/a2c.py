"""Advantage Actor-Critic: one policy-gradient step on each short rollout.

Mnih et al. 2016, https://arxiv.org/abs/1602.01783      Docs: docs/algorithms/a2c.md

    δ_t = r_t + γ (1 - terminated_t) V(s_{t+1}) - V(s_t)           targets.gae
    Â_t = δ_t + γ λ (1 - ended_t) Â_{t+1},  R_t = Â_t + V(s_t)     targets
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

from common.config import check_config
from common.distributions import Distribution, PolicyHead
from common.envs import EnvBackend, EnvState, make_env, require_action_space, scale_action
from common.evaluator import Evaluator
from common.logger import log_intervals, log_points
from common.networks import MLP, Encoder
from common.normalize import Normalizer, NormalizerState, standardize
from common.replay import Transition
from common.rollout import Batch, collect_rollout
from common.runner import run
from common.schedules import annealed_learning_rate
from common.targets import gae


@dataclass(frozen=True)
class Config:
    """Hyper-parameters; step size, c_V and gradient norm are those of OpenAI Baselines."""

    env_id: str = "CartPole-v1"  # an envpool or Gymnasium id, or gymnax/ID or pgx/ID
    env_backend: EnvBackend = "auto"  # auto: envpool where it knows the id, else Gymnasium
    env_module: str | None = None  # module to import first, to register your environment
    env_kwargs: tuple[str, ...] = ()  # options of the environment, as KEY=VALUE KEY=VALUE ...
    num_envs: int = 8  # environments stepped in parallel
    seed: int = 1  # seed of networks, exploration and environments
    total_timesteps: int = 500_000  # env steps over all environments; a multiple of num_envs
    log_frequency: int = 10_000  # env steps between two log points, rounded up to whole rollouts
    learning_rate: float = 7e-4  # step size of RMSProp at the start
    anneal_lr: bool = True  # let the step size fall linearly to 0 over the run
    num_steps: int = 5  # t_max: steps of each environment in a rollout
    gamma: float = 0.99  # discount of one step
    gae_lambda: float = 1.0  # λ: 0 trusts the next value, 1 the rewards, as in the paper
    normalize_advantages: bool = False  # give the advantages of a rollout mean 0 and deviation 1
    entropy_coef: float = 0.01  # β: weight of the entropy bonus
    value_coef: float = 0.5  # c_V: weight of the value loss
    max_grad_norm: float = 0.5  # longest gradient; longer ones are scaled down to it
    normalize_obs: bool = False  # shift and scale observations by running statistics
    normalize_reward: bool = False  # divide rewards by the running deviation of returns


PRESETS: dict[str, dict[str, Any]] = {
    "classic": {},
    "mujoco": dict(total_timesteps=1_000_000, gae_lambda=0.95, entropy_coef=0.0)
    | dict(normalize_obs=True, normalize_reward=True),
    "atari": dict(num_envs=16, total_timesteps=10_000_000),
}
LOSSES = ("policy_loss", "value_loss", "entropy")


class Model(nnx.Module):
    """Policy and value: two hidden layers each for vectors, one shared encoder for images."""

    def __init__(self, obs_space: spaces.Space, action_space: spaces.Space, rngs: nnx.Rngs):
        init = nnx.initializers.orthogonal
        self.encoder = Encoder(obs_space, rngs, init(2**0.5))
        sizes = (self.encoder.num_features, *(() if self.encoder.has_cnn else (64, 64)))
        self.actor = MLP(sizes, rngs, nnx.tanh, init(2**0.5))
        self.critic = MLP(sizes, rngs, nnx.tanh, init(2**0.5))
        self.policy_head = PolicyHead(sizes[-1], action_space, rngs, scale=0.01)
        self.value_head = nnx.Linear(sizes[-1], 1, kernel_init=init(1.0), rngs=rngs)

    def action_and_value(self, obs: Any) -> tuple[Distribution, Array]:
        """[B, *obs] -> distribution over actions, and value [B]."""
        features = self.encoder(obs)  # [B, F]
        value = self.value_head(self.critic(features))[:, 0]  # [B]
        return self.policy_head(self.actor(features)), value


class LearnerState(NamedTuple):
    """Every array that learning changes."""

    params: Any
    opt_state: Any
    normalizer: NormalizerState


class Algorithm:
    """Targets, losses and optimizer as pure functions of `LearnerState`."""

    def __init__(self, config: Config, obs_space: spaces.Space, action_space: spaces.Space):
        self.config = config
        self.make_model = partial(Model, obs_space, action_space)
        self.model = partial(nnx.merge, nnx.graphdef(self.make_model(nnx.Rngs(0))))
        self.normalizer = Normalizer(config.normalize_obs, config.normalize_reward, config.gamma)
        step_size = annealed_learning_rate(config, updates_per_rollout=1)
        clip = optax.clip_by_global_norm(config.max_grad_norm)
        rmsprop = optax.rmsprop(step_size, decay=0.99, eps=1e-5)
        self.optimizer = optax.flatten(optax.chain(clip, rmsprop))

    def init(self, key: Array, obs: Any) -> LearnerState:
        """Draw new parameters; observations [N, *obs] give shapes."""
        params = nnx.to_pure_dict(nnx.state(self.make_model(nnx.Rngs(key))))
        return LearnerState(params, self.optimizer.init(params), self.normalizer.init(obs))

    def predict(self, params: Any, obs: Any) -> tuple[Distribution, Array]:
        """[B, *obs] -> distribution over actions, and value [B]."""
        return self.model(params).action_and_value(obs)

    def targets(self, rollout: Transition, last_value: Array) -> Batch:
        """Rollout [T, N] and the value [N] of what follows -> the same with Â and R = Â + V."""
        log_prob, value = rollout.extras
        steps = rollout.reward, rollout.terminated, rollout.truncated
        values = jnp.concatenate([value, last_value[None]])  # [T + 1, N]
        advantages = gae(*steps, values, self.config.gamma, self.config.gae_lambda)  # [T, N]
        weight = rollout.valid / jnp.maximum(rollout.valid.mean(), 1e-8)  # [T, N]
        targets = advantages, advantages + value, weight
        return Batch(rollout.obs, rollout.action, log_prob, value, *targets)

    def policy_loss(self, log_prob: Array, batch: Batch) -> Array:
        """-E[log π(a|s) Â]."""
        advantages = batch.advantages
        if self.config.normalize_advantages:
            advantages = standardize(advantages, batch.weight)
        return -(batch.weight * log_prob * advantages).mean()

    def value_loss(self, value: Array, batch: Batch) -> Array:
        """½ E[(V - R)²]."""
        return 0.5 * (batch.weight * (value - batch.returns) ** 2).mean()

    def loss_fn(self, params: Any, batch: Batch) -> tuple[Array, dict]:
        """L_π + c_V L_V - β E[H(π)] over the valid rows of the batch."""
        config, weight = self.config, batch.weight
        distribution, value = self.predict(params, batch.obs)
        log_prob = distribution.log_prob(batch.action)  # [B]
        chex.assert_equal_shape([log_prob, value, *batch[2:7]])
        losses = {
            "policy_loss": self.policy_loss(log_prob, batch),
            "value_loss": self.value_loss(value, batch),
            "entropy": (weight * distribution.entropy()).mean(),
        }
        loss = losses["policy_loss"] + config.value_coef * losses["value_loss"]
        return loss - config.entropy_coef * losses["entropy"], losses

    def learn(self, state: LearnerState, batch: Batch) -> tuple[LearnerState, dict]:
        """One gradient step on a batch."""
        grads, metrics = jax.grad(self.loss_fn, has_aux=True)(state.params, batch)
        updates, opt_state = self.optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return state._replace(params=params, opt_state=opt_state), metrics


class Agent:
    """Exploration, normalisation, and the way from environment to algorithm."""

    def __init__(self, config: Config, algorithm: Algorithm, action_space: spaces.Space):
        self.config, self.algorithm = config, algorithm
        self.env_action = partial(scale_action, action_space)
        self.observe = algorithm.normalizer.observe

    def predict(self, state: LearnerState, obs: Any, key: Array) -> Array:
        """Action [N] of the environment to evaluate with: the most likely one."""
        obs = self.observe(state.normalizer, obs)  # [N, *obs]
        return self.env_action(self.algorithm.predict(state.params, obs)[0].mode())

    def sample(self, state: LearnerState, obs: Any, step: Array, key: Array) -> tuple[Array, tuple]:
        """Action [N] to train with, for `env_action`; its log_prob [N] and the value [N]."""
        obs = self.observe(state.normalizer, obs)  # [N, *obs]
        distribution, value = self.algorithm.predict(state.params, obs)
        action = distribution.sample(key)  # [N, *action]
        return action, (distribution.log_prob(action), value)

    def prepare(self, state: LearnerState, rollout: Transition, last_obs: Any) -> tuple:
        """Rollout [T, N] and the obs [N] after it -> its batch [T * N], and new statistics."""
        obs, last_obs = (self.observe(state.normalizer, x) for x in (rollout.obs, last_obs))
        stats, reward = self.algorithm.normalizer.update(state.normalizer, rollout)
        _, last_value = self.algorithm.predict(state.params, last_obs)
        batch = self.algorithm.targets(rollout._replace(obs=obs, reward=reward), last_value)
        batch = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)
        return state._replace(normalizer=stats), batch

    def learn(self, state: LearnerState, batch: Batch) -> tuple[LearnerState, dict]:
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

    def __init__(self, config: Config = Config()):
        check_config(config)
        self.config, self.env = config, make_env(config)
        obs_space, action_space = self.env.observation_space, self.env.action_space
        require_action_space("a2c", self.env, spaces.Discrete, spaces.MultiDiscrete, spaces.Box)
        self.algorithm = Algorithm(config, obs_space, action_space)
        self.agent = Agent(config, self.algorithm, action_space)
        self.evaluator = Evaluator(config, self.agent.predict)
        self.state = self._init_state(jax.random.key(config.seed))
        self._run = jax.jit(self._run_iterations, donate_argnums=0)

    def __call__(self) -> Generator[dict, None, None]:
        """Train to total_timesteps; yield log_data at each log point."""
        rollout_size = self.config.num_envs * self.config.num_steps
        try:
            for start, num_steps in log_intervals(self):
                self.state, metrics = self._run(self.state, -(-num_steps // rollout_size))
                yield from log_points(self.env, self.state, start, {}, metrics)
        finally:
            self.env.close()

    def _run_evaluate(self, num_episodes: int) -> dict:
        """Play full episodes in environments of their own; log_data of their raw returns."""
        return self.evaluator(self.state.learner, int(self.state.step), num_episodes)

    def _init_state(self, key: Array) -> TrainState:
        learner_key, env_key, key = jax.random.split(key, 3)
        env = self.env.reset(env_key)
        learner = self.algorithm.init(learner_key, env.obs)
        return TrainState(learner, env, key, jnp.zeros((), jnp.int32))

    def _run_iterations(self, state: TrainState, num_iterations: int) -> tuple[TrainState, dict]:
        """(collect, learn) × num_iterations; total_timesteps or a failure may cut the last one."""

        def iterate(_: Array, carry: tuple) -> tuple:
            state, metrics = carry
            state, rollout, is_complete = collect_rollout(self, state)
            return lax.cond(is_complete, self._run_train, lambda *x: x[:2], state, metrics, rollout)

        metrics = dict.fromkeys((*LOSSES, "updates"), jnp.zeros(()))
        state = state._replace(env=self.env.reset_summary(state.env))
        return lax.fori_loop(0, num_iterations, iterate, (state, metrics))

    def _run_collect(self, state: TrainState) -> tuple[TrainState, Transition]:
        """One vector step: act, step the environments."""
        key, action_key = jax.random.split(state.key)
        obs, valid = state.env.obs, ~state.env.ended  # [N, *obs], [N]
        action, extras = self.agent.sample(state.learner, obs, state.step, action_key)  # [N]
        env, timestep = self.env.step(state.env, self.agent.env_action(action))
        transition = Transition(obs, action, *timestep[1:], valid, extras)
        step = state.step + self.config.num_envs
        return state._replace(env=env, key=key, step=step), transition

    def _run_train(self, state: TrainState, metrics: dict, rollout: Transition) -> tuple:
        """One step on a rollout; its metrics are added up."""
        learner, batch = self.agent.prepare(state.learner, rollout, state.env.obs)
        learner, new = self.agent.learn(learner, batch)
        metrics = jax.tree.map(jnp.add, metrics, new | {"updates": 1.0})
        return state._replace(learner=learner), metrics


if __name__ == "__main__":
    run(Trainer, Config, PRESETS)
