"""Recurrent Proximal Policy Optimization: PPO with a memory that is reset with each episode.

Schulman et al. 2017, https://arxiv.org/abs/1707.06347      Docs: docs/algorithms/ppo_rnn.md

    h_t = core(h_{t-1}, s_t), h_{t-1} = 0 at an episode's start    RecurrentCore
    δ_t = r_t + γ (1 - terminated_t) V(s_{t+1}) - V(s_t)           targets.gae
    Â_t = δ_t + γ λ (1 - ended_t) Â_{t+1},  R_t = Â_t + V(s_t)     targets
    ρ   = π(a|s; θ) / π(a|s; θ_old)                                policy_loss
    L_π = -E[min(ρ Â, clip(ρ, 1 - ε, 1 + ε) Â)]                    policy_loss
    L_V = ½ E[max((V - R)², (V_old + clip(V - V_old, ±ε) - R)²)]   value_loss
    L   = L_π + c_V L_V - c_H E[H(π)]                              loss_fn
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

from common.config import check_config
from common.distributions import Distribution, PolicyHead
from common.envs import EnvBackend, EnvState, make_env, require_action_space, scale_action
from common.evaluator import Evaluator
from common.logger import log_intervals, log_points
from common.networks import MLP, Encoder, RecurrentCore, initial_core
from common.normalize import Normalizer, NormalizerState, standardize
from common.replay import Transition
from common.rollout import Batch, collect_rollout, learn_minibatches, shuffled_rows
from common.runner import run
from common.schedules import annealed_learning_rate
from common.targets import gae


@dataclass(frozen=True)
class Config:
    """Hyper-parameters; the defaults are CleanRL's for CartPole-v1."""

    env_id: str = "CartPole-v1"  # an envpool or Gymnasium id, or gymnax/ID or pgx/ID
    env_backend: EnvBackend = "auto"  # auto: envpool where it knows the id, else Gymnasium
    env_module: str | None = None  # module to import first, to register your environment
    env_kwargs: tuple[str, ...] = ()  # options of the environment, as KEY=VALUE KEY=VALUE ...
    num_envs: int = 8  # environments stepped in parallel
    seed: int = 1  # seed of networks, exploration, minibatches and environments
    total_timesteps: int = 500_000  # env steps over all environments; a multiple of num_envs
    log_frequency: int = 10_000  # env steps between two log points, rounded up to whole rollouts
    learning_rate: float = 2.5e-4  # step size of Adam at the start
    anneal_lr: bool = True  # let the step size fall linearly to 0 over the run
    num_steps: int = 128  # steps of each environment in a rollout
    gamma: float = 0.99  # discount of one step
    gae_lambda: float = 0.95  # λ: 0 trusts the next value, 1 the rewards of the episode
    update_epochs: int = 4  # passes over a rollout
    num_minibatches: int = 4  # minibatches in a pass
    normalize_advantages: bool = True  # give the advantages of a minibatch mean 0 and deviation 1
    clip_coef: float = 0.2  # ε: how far the probability ratio may move before its gradient stops
    clip_value_loss: bool = True  # clip the value likewise, which the paper does not do
    entropy_coef: float = 0.01  # c_H: weight of the entropy bonus
    value_coef: float = 0.5  # c_V: weight of the value loss
    max_grad_norm: float = 0.5  # longest gradient; longer ones are scaled down to it
    target_kl: float | None = None  # leave a rollout once a minibatch shows a larger KL divergence
    core: Literal["lstm", "gru"] = "lstm"  # recurrent core
    core_size: int = 128  # units of the core
    normalize_obs: bool = False  # shift and scale observations by running statistics
    normalize_reward: bool = False  # divide rewards by the running deviation of returns


PRESETS: dict[str, dict[str, Any]] = {
    "classic": {},
    "atari": dict(num_envs=8, total_timesteps=10_000_000, clip_coef=0.1),
}
LOSSES = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction")


class Model(nnx.Module):
    """Encoder, a hidden layer for vectors, recurrent core, policy and value."""

    def __init__(self, config: Config, obs_space: spaces.Space, action_space: Any, rngs: nnx.Rngs):
        init = nnx.initializers.orthogonal
        self.encoder = Encoder(obs_space, rngs, init(2**0.5))
        sizes = (self.encoder.num_features, *(() if self.encoder.has_cnn else (64,)))
        self.torso = MLP(sizes, rngs, nnx.tanh, init(2**0.5))
        self.core = RecurrentCore(config.core, sizes[-1], config.core_size, rngs)
        self.policy_head = PolicyHead(config.core_size, action_space, rngs, scale=0.01)
        self.value_head = nnx.Linear(config.core_size, 1, kernel_init=init(1.0), rngs=rngs)

    def unroll(self, obs: Any, core: Any, valid: Array) -> tuple[Distribution, Array, Any]:
        """[B, T, *obs], state [B, ...], valid [B, T] -> distribution, value [B, T], new state."""
        flat_obs = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), obs)  # [B * T, *obs]
        features = self.torso(self.encoder(flat_obs)).reshape(*valid.shape, -1)  # [B, T, F]
        output, core = self.core(core, features, valid)  # [B, T, H]
        return self.policy_head(output), self.value_head(output)[..., 0], core


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
        self.initial_core = partial(initial_core, config.core, config.core_size)
        self.normalizer = Normalizer(config.normalize_obs, config.normalize_reward, config.gamma)
        step_size = annealed_learning_rate(config, config.update_epochs * config.num_minibatches)
        clip = optax.clip_by_global_norm(config.max_grad_norm)
        self.optimizer = optax.flatten(optax.chain(clip, optax.adam(step_size, eps=1e-5)))

    def init(self, key: Array, obs: Any) -> LearnerState:
        """Draw new parameters; observations [N, *obs] give shapes."""
        params = nnx.to_pure_dict(nnx.state(self.make_model(nnx.Rngs(key))))
        return LearnerState(params, self.optimizer.init(params), self.normalizer.init(obs))

    def predict(self, params: Any, obs: Any, core: Any, valid: Array) -> tuple:
        """[B, T, *obs] -> distribution over actions, value [B, T], and recurrent state [B, ...]."""
        return self.model(params).unroll(obs, core, valid)

    def targets(self, rollout: Transition, last_value: Array) -> Batch:
        """Rollout [T, N] and the value [N] of what follows -> the same with Â and R = Â + V."""
        log_prob, value = rollout.extras
        steps = rollout.reward, rollout.terminated, rollout.truncated
        values = jnp.concatenate([value, last_value[None]])  # [T + 1, N]
        advantages = gae(*steps, values, self.config.gamma, self.config.gae_lambda)  # [T, N]
        weight = rollout.valid / jnp.maximum(rollout.valid.mean(), 1e-8)  # [T, N]
        targets = advantages, advantages + value, weight
        return Batch(rollout.obs, rollout.action, log_prob, value, *targets)

    def policy_loss(self, ratio: Array, batch: Batch) -> Array:
        """-E[min(ρ Â, clip(ρ, 1 - ε, 1 + ε) Â)] (eq. 7)."""
        advantages, epsilon = batch.advantages, self.config.clip_coef
        if self.config.normalize_advantages:
            advantages = standardize(advantages, batch.weight)
        clipped_ratio = jnp.clip(ratio, 1 - epsilon, 1 + epsilon)  # [B]
        gain = jnp.minimum(ratio * advantages, clipped_ratio * advantages)  # [B]
        return -(batch.weight * gain).mean()

    def value_loss(self, value: Array, batch: Batch) -> Array:
        """½ E[(V - R)²], or the larger of this and the same of a clipped V."""
        error = (value - batch.returns) ** 2  # [B]
        if self.config.clip_value_loss:
            move = jnp.clip(value - batch.value, -self.config.clip_coef, self.config.clip_coef)
            error = jnp.maximum(error, (batch.value + move - batch.returns) ** 2)  # [B]
        return 0.5 * (batch.weight * error).mean()

    def loss_fn(self, params: Any, batch: Batch) -> tuple[Array, dict]:
        """L_π + c_V L_V - c_H E[H(π)] over the valid rows of the batch (eq. 9)."""
        config, weight = self.config, batch.weight
        distribution, value, _ = self.predict(params, batch.obs, batch.core, weight > 0)
        log_ratio = distribution.log_prob(batch.action) - batch.log_prob  # [B, T]
        ratio = jnp.exp(log_ratio)  # [B, T]
        chex.assert_equal_shape([ratio, value, *batch[2:7]])
        losses = {
            "policy_loss": self.policy_loss(ratio, batch),
            "value_loss": self.value_loss(value, batch),
            "entropy": (weight * distribution.entropy()).mean(),
            "approx_kl": (weight * (ratio - 1 - log_ratio)).mean(),
            "clip_fraction": (weight * (jnp.abs(ratio - 1) > config.clip_coef)).mean(),
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

    def predict(self, state: LearnerState, obs: Any, key: Array, memory: tuple) -> tuple:
        """Action [N] of the environment to evaluate with, the most likely one, and the memory."""
        distribution, _, core = self.step(state, obs, *memory)
        return self.env_action(distribution.mode()), core

    def sample(self, state: LearnerState, obs: Any, key: Array, memory: tuple) -> tuple:
        """Action [N] to train with, for `env_action`; log_prob and value [N]; recurrent state."""
        distribution, value, core = self.step(state, obs, *memory)
        action = distribution.sample(key)  # [N, *action]
        return action, (distribution.log_prob(action), value), core

    def step(self, state: LearnerState, obs: Any, core: Any, valid: Array) -> tuple:
        """[N, *obs], recurrent state, valid [N] -> distribution, value [N], new recurrent state."""
        obs = jax.tree.map(lambda x: x[:, None], self.observe(state.normalizer, obs))  # [N, 1, ...]
        distribution, value, core = self.algorithm.predict(state.params, obs, core, valid[:, None])
        return *jax.tree.map(lambda x: x[:, 0], (distribution, value)), core

    def prepare(self, state: LearnerState, rollout: Transition, last: tuple, core: Any) -> tuple:
        """Rollout [T, N], what `step` takes after it, `core` before it -> sequences [N, T]."""
        _, last_value, _ = self.step(state, *last)
        obs = self.observe(state.normalizer, rollout.obs)  # [T, N, *obs]
        stats, reward = self.algorithm.normalizer.update(state.normalizer, rollout)
        batch = self.algorithm.targets(rollout._replace(obs=obs, reward=reward), last_value)
        batch = jax.tree.map(lambda x: x.swapaxes(0, 1), batch)._replace(core=core)
        return state._replace(normalizer=stats), batch

    def learn(self, state: LearnerState, batch: Batch) -> tuple[LearnerState, dict]:
        """One gradient step on a batch."""
        return self.algorithm.learn(state, batch)


class TrainState(NamedTuple):
    """The whole training process: what a checkpoint holds."""

    learner: LearnerState
    env: EnvState
    core: Any  # [N, ...] recurrent state
    key: Array
    step: Array  # [] int32, env steps done over all environments


class Trainer:
    """The training process: collect rollouts and learn from them in one compiled program."""

    def __init__(self, config: Config = Config()):
        check_config(config)
        self.config, self.env = config, make_env(config)
        obs_space, action_space = self.env.observation_space, self.env.action_space
        require_action_space("ppo_rnn", self.env, spaces.Discrete, spaces.MultiDiscrete, spaces.Box)
        self.algorithm = Algorithm(config, obs_space, action_space)
        self.agent = Agent(config, self.algorithm, action_space)
        self.evaluator = Evaluator(config, self.agent.predict, self.algorithm.initial_core)
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
        env, core = self.env.reset(env_key), self.algorithm.initial_core(self.config.num_envs)
        learner = self.algorithm.init(learner_key, env.obs)
        return TrainState(learner, env, core, key, jnp.zeros((), jnp.int32))

    def _run_iterations(self, state: TrainState, num_iterations: int) -> tuple[TrainState, dict]:
        """(collect, learn) × num_iterations; total_timesteps or a failure may cut the last one."""

        def iterate(_: Array, carry: tuple) -> tuple:
            first, metrics = carry
            state, rollout, is_complete = collect_rollout(self, first)
            carry = state, metrics, rollout, first.core
            return lax.cond(is_complete, self._run_train, lambda *x: x[:2], *carry)

        metrics = dict.fromkeys((*LOSSES, "updates"), jnp.zeros(()))
        state = state._replace(env=self.env.reset_summary(state.env))
        return lax.fori_loop(0, num_iterations, iterate, (state, metrics))

    def _run_collect(self, state: TrainState) -> tuple[TrainState, Transition]:
        """One vector step: act, step the environments."""
        key, action_key = jax.random.split(state.key)
        obs, valid = state.env.obs, ~state.env.ended  # [N, *obs], [N]
        memory = state.core, valid
        action, extras, core = self.agent.sample(state.learner, obs, action_key, memory)  # [N]
        env, timestep = self.env.step(state.env, self.agent.env_action(action))
        transition = Transition(obs, action, *timestep[1:], valid, extras)
        step = state.step + self.config.num_envs
        return state._replace(env=env, core=core, key=key, step=step), transition

    def _run_train(self, state: TrainState, metrics: dict, rollout: Transition, core: Any) -> tuple:
        """Several passes over a rollout in minibatches; their metrics are added up."""
        key, shuffle_key = jax.random.split(state.key)
        last = state.env.obs, state.core, ~state.env.ended
        learner, batch = self.agent.prepare(state.learner, rollout, last, core)
        rows = shuffled_rows(shuffle_key, self.config, len(batch.weight))  # [updates, B]
        learner, metrics = learn_minibatches(self, learner, metrics, batch, rows)
        return state._replace(learner=learner, key=key), metrics


if __name__ == "__main__":
    run(Trainer, Config, PRESETS)
