"""Recurrent Proximal Policy Optimization: PPO with a memory that is reset with each episode.

Schulman et al. 2017, https://arxiv.org/abs/1707.06347      Docs: docs/algorithms/ppo_rnn.md

    h_t = core(h_{t-1}, s_t), h_{t-1} = 0 at an episode's start    networks.RecurrentCore
    δ_t = r_t + γ (1 - terminated_t) V(s_{t+1}) - V(s_t)           targets.gae
    Â_t = δ_t + γ λ (1 - ended_t) Â_{t+1}                          targets.gae
    R_t = Â_t + V(s_t)                                             targets
    ρ   = π(a|s; θ) / π(a|s; θ_old)                                loss_fn
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

from common.action_masks import action_mask
from common.distributions import Distribution, PolicyHead
from common.envs import EnvBackend, EnvState, make_env, require_action_space, scale_action
from common.networks import MLP, Encoder, Memory, RecurrentCore, initial_core
from common.normalize import Normalizer, NormalizerState, standardize
from common.ranges import Finite, Fraction, NonNegative, Positive
from common.replay import Transition
from common.rollout import (
    RolloutBatch,
    Trajectory,
    collect_rollout,
    empty_rollout,
    shuffled_rows,
    take_minibatch,
)
from common.targets import gae

from common.run.config import check_config, check_minibatches, check_rollout
from common.run.evaluator import Evaluator
from common.run.logger import log_intervals, log_points
from common.run.runner import run


@dataclass(frozen=True)
class Config:
    """Hyper-parameters; the defaults are near CleanRL's for CartPole-v1."""

    env_id: str = "CartPole-v1"  # an envpool or Gymnasium id, or gymnax/ID or pgx/ID
    env_backend: EnvBackend = "auto"  # auto: envpool where it knows the id, else Gymnasium
    env_module: str | None = None  # module to import first, to register your environment
    env_kwargs: tuple[str, ...] = ()  # options of the environment, as KEY=VALUE KEY=VALUE ...
    num_envs: Positive[int] = 8  # environments stepped in parallel
    env_workers: NonNegative[int] = 0  # processes that step Gymnasium environments; 0: this one
    seed: NonNegative[int] = 1  # seed of networks, exploration, minibatches and environments
    total_timesteps: Positive[int] = 500_000  # env steps over all envs; a multiple of num_envs
    log_frequency: Positive[int] = 10_000  # env steps between log points, rounded up to rollouts
    learning_rate: Positive[float] = 2.5e-4  # step size of Adam at the start
    anneal_lr: bool = True  # let the step size fall linearly to 0 over the run
    num_steps: Positive[int] = 128  # steps of each environment in a rollout
    gamma: Fraction = 0.99  # discount of one step
    gae_lambda: Fraction = 0.95  # λ: 0 trusts the next value, 1 the rewards of the episode
    terminate_truncated: bool = False  # take truncated episodes for terminated ones, as CleanRL
    update_epochs: Positive[int] = 4  # passes over a rollout
    num_minibatches: Positive[int] = 4  # minibatches in a pass
    normalize_advantages: bool = True  # give the advantages of a minibatch mean 0 and deviation 1
    clip_coef: Positive[float] = 0.2  # ε: how far ρ may move before its gradient stops
    clip_value_loss: bool = True  # clip the value likewise, which the paper does not do
    entropy_coef: NonNegative[float] = 0.01  # c_H: weight of the entropy bonus
    value_coef: NonNegative[float] = 0.5  # c_V: weight of the value loss
    max_grad_norm: Positive[float] = 0.5  # longest gradient; longer ones are scaled down to it
    target_kl: Positive[float] | None = None  # leave a rollout at a larger KL divergence
    core: Literal["lstm", "gru"] = "lstm"  # recurrent core
    core_size: Positive[int] = 128  # units of the core
    log_std_init: Finite[float] = 0.0  # log of the deviation of a continuous action at the start
    normalize_obs: bool = False  # shift and scale observations by running statistics
    normalize_reward: bool = True  # divide rewards by the running deviation of returns
    eval_stochastic: bool = False  # draw evaluation actions from the policy instead of its mode

    def __post_init__(self) -> None:
        check_config(self)
        check_rollout(self, self.update_epochs * self.num_minibatches)
        what = f"--num-envs {self.num_envs}, whose sequences stay whole"
        check_minibatches(self.num_minibatches, self.num_envs, what)


PRESETS: dict[str, dict[str, Any]] = {
    "classic": {},
    "mujoco": {
        "num_envs": 16,
        "total_timesteps": 1_000_000,
        "learning_rate": 3e-4,
        "update_epochs": 10,
        "num_minibatches": 16,
        "entropy_coef": 0.0,
        "normalize_obs": True,
    },
    "atari": {
        "num_envs": 8,
        "total_timesteps": 10_000_000,
        "clip_coef": 0.1,
        "normalize_reward": False,
    },
}


class Model(nnx.Module):
    """Encoder, a hidden layer for vectors, recurrent core, policy and value."""

    def __init__(self, config: Config, obs_space: spaces.Space, action_space: Any, rngs: nnx.Rngs):
        init = nnx.initializers.orthogonal
        self.encoder = Encoder(obs_space, rngs, init(2**0.5))
        hidden = () if self.encoder.has_cnn else (64,)
        sizes = (self.encoder.num_features, *hidden)
        self.torso = MLP(sizes, rngs, nnx.tanh, init(2**0.5))
        self.core = RecurrentCore(config.core, sizes[-1], config.core_size, rngs)
        self.policy_head = PolicyHead(
            config.core_size, action_space, rngs, scale=0.01, log_std_init=config.log_std_init
        )
        self.value_head = nnx.Linear(config.core_size, 1, kernel_init=init(1.0), rngs=rngs)

    def unroll(self, obs: Any, core: Any, valid: Array) -> tuple[Distribution, Array, Any]:
        """[B, T, *obs], state [B, ...], valid [B, T] -> distribution, value [B, T], new state."""
        flat_obs = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), obs)  # [B * T, *obs]
        features = self.torso(self.encoder(flat_obs)).reshape(*valid.shape, -1)  # [B, T, F]
        output, core = self.core(core, features, valid)  # [B, T, H]
        policy = self.policy_head(output, action_mask(obs))
        return policy, self.value_head(output)[..., 0], core


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
        num_rollouts = config.total_timesteps // (config.num_envs * config.num_steps)
        num_updates = num_rollouts * config.update_epochs * config.num_minibatches
        end = 0.0 if config.anneal_lr else config.learning_rate
        step_size = optax.linear_schedule(config.learning_rate, end, num_updates)
        clip = optax.clip_by_global_norm(config.max_grad_norm)
        self.optimizer = optax.flatten(optax.chain(clip, optax.adam(step_size, eps=1e-5)))

    def init(self, key: Array, obs: Any) -> LearnerState:
        """Draw new parameters; observations [N, *obs] give shapes."""
        params = nnx.to_pure_dict(nnx.state(self.make_model(nnx.Rngs(key))))
        return LearnerState(
            params=params,
            opt_state=self.optimizer.init(params),
            normalizer=self.normalizer.init(obs),
        )

    def predict(
        self, params: Any, obs: Any, core: Any, valid: Array
    ) -> tuple[Distribution, Array, Any]:
        """[B, T, *obs] -> distribution over actions, value [B, T], and recurrent state [B, ...]."""
        return self.model(params).unroll(obs, core, valid)

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

    def policy_loss(self, ratio: Array, batch: RolloutBatch) -> Array:
        """-E[min(ρ Â, clip(ρ, 1 - ε, 1 + ε) Â)] (eq. 7)."""
        advantages = batch.advantages
        epsilon = self.config.clip_coef
        if self.config.normalize_advantages:
            advantages = standardize(advantages, batch.weight)
        clipped_ratio = jnp.clip(ratio, 1 - epsilon, 1 + epsilon)  # [B]
        gain = jnp.minimum(ratio * advantages, clipped_ratio * advantages)  # [B]
        return -(batch.weight * gain).mean()

    def value_loss(self, value: Array, batch: RolloutBatch) -> Array:
        """½ E[(V - R)²], or the larger of this and the same of a clipped V."""
        error = (value - batch.returns) ** 2  # [B]
        if self.config.clip_value_loss:
            move = jnp.clip(value - batch.value, -self.config.clip_coef, self.config.clip_coef)
            error = jnp.maximum(error, (batch.value + move - batch.returns) ** 2)  # [B]
        return 0.5 * (batch.weight * error).mean()

    def loss_fn(
        self, params: Any, batch: RolloutBatch
    ) -> tuple[Array, tuple[Array, dict[str, Array]]]:
        """L_π + c_V L_V - c_H E[H(π)] over the valid rows of the batch (eq. 9)."""
        config = self.config
        weight = batch.weight
        distribution, value, _ = self.predict(params, batch.obs, batch.core, weight > 0)
        log_ratio = distribution.log_prob(batch.action) - batch.log_prob  # [B, T]
        ratio = jnp.exp(log_ratio)  # [B, T]
        chex.assert_equal_shape(
            [ratio, value, batch.value, batch.advantages, batch.returns, batch.weight]
        )
        policy_loss = self.policy_loss(ratio, batch)
        value_loss = self.value_loss(value, batch)
        entropy = (weight * distribution.entropy()).mean()
        loss = policy_loss + config.value_coef * value_loss - config.entropy_coef * entropy
        approx_kl = (weight * (ratio - 1 - log_ratio)).mean()
        metrics = {
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy": entropy,
            "approx_kl": approx_kl,
            "clip_fraction": (weight * (jnp.abs(ratio - 1) > config.clip_coef)).mean(),
        }
        return loss, (approx_kl, metrics)

    def learn(
        self, state: LearnerState, batch: RolloutBatch
    ) -> tuple[LearnerState, Array, dict[str, Array]]:
        """One gradient step on a batch; the KL divergence from the policy that collected it."""
        grads, (approx_kl, metrics) = jax.grad(self.loss_fn, has_aux=True)(state.params, batch)
        updates, opt_state = self.optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return state._replace(params=params, opt_state=opt_state), approx_kl, metrics


class Agent:
    """Exploration, normalisation, and the way from environment to algorithm."""

    def __init__(self, config: Config, algorithm: Algorithm, action_space: spaces.Space):
        self.config = config
        self.algorithm = algorithm
        self.env_action = partial(scale_action, action_space)
        self.observe = algorithm.normalizer.observe

    def predict(
        self, state: LearnerState, obs: Any, key: Array, memory: Memory
    ) -> tuple[Array, Any]:
        """Action [N] of the environment to evaluate with, as `eval_stochastic` says; memory."""
        distribution, _, core = self.step(state, obs, memory)
        is_drawn = self.config.eval_stochastic
        return self.env_action(distribution.sample(key) if is_drawn else distribution.mode()), core

    def sample(
        self, state: LearnerState, obs: Any, key: Array, memory: Memory
    ) -> tuple[Array, tuple[Array, Array], Any]:
        """Action [N] to train with, for `env_action`; log_prob and value [N]; recurrent state."""
        distribution, value, core = self.step(state, obs, memory)
        action = distribution.sample(key)  # [N, *action]
        return action, (distribution.log_prob(action), value), core

    def step(
        self, state: LearnerState, obs: Any, memory: Memory
    ) -> tuple[Distribution, Array, Any]:
        """[N, *obs] and what is remembered -> distribution, value [N], new recurrent state."""
        obs = self.observe(state.normalizer, obs)  # [N, *obs]
        obs = jax.tree.map(lambda x: x[:, None], obs)  # [N, 1, *obs]
        valid = memory.valid[:, None]  # [N, 1]
        distribution, value, core = self.algorithm.predict(state.params, obs, memory.core, valid)
        distribution = jax.tree.map(lambda x: x[:, 0], distribution)  # [N, ...]
        return distribution, value[:, 0], core

    def prepare(
        self, state: LearnerState, trajectory: Trajectory
    ) -> tuple[LearnerState, RolloutBatch]:
        """Rollout [T, N] and what is around it -> sequences [N, T]."""
        rollout = trajectory.rollout
        _, last_value, _ = self.step(state, trajectory.last_obs, trajectory.last)
        obs = self.observe(state.normalizer, rollout.obs)  # [T, N, *obs]
        stats, reward = self.algorithm.normalizer.update(state.normalizer, rollout)
        batch = self.algorithm.targets(rollout._replace(obs=obs, reward=reward), last_value)
        batch = jax.tree.map(lambda x: x.swapaxes(0, 1), batch)  # [N, T, ...]
        batch = batch._replace(core=trajectory.core)
        return state._replace(normalizer=stats), batch

    def learn(
        self, state: LearnerState, batch: RolloutBatch
    ) -> tuple[LearnerState, Array, dict[str, Array]]:
        """One gradient step on a batch; the KL divergence from the policy that collected it."""
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

    pace = "synchronous"  # of Explorers: every rollout is of the newest policy

    def __init__(self, config: Config = Config()):
        self.config = config
        self.env = make_env(config)
        require_action_space("ppo_rnn", self.env, *PolicyHead.action_spaces)
        self.algorithm = Algorithm(config, self.env.observation_space, self.env.action_space)
        self.agent = Agent(config, self.algorithm, self.env.action_space)
        self.evaluator = Evaluator(config, self.agent.predict, self.algorithm.initial_core)
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
        core = self.algorithm.initial_core(self.config.num_envs)
        learner = self.algorithm.init(learner_key, env.obs)
        return TrainState(learner, env, core, key, jnp.zeros((), jnp.int32))

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
        trajectory = Trajectory(rollout, state.env.obs, self._memory(state), state.core)
        learner, batch = jax.eval_shape(self.agent.prepare, state.learner, trajectory)
        *_, metrics = jax.eval_shape(self.agent.learn, learner, batch)
        return optax.tree.zeros_like(metrics | {"charts/updates": jnp.zeros(())})

    def collect_trajectory(self, state: TrainState) -> tuple[TrainState, Trajectory, Array]:
        """A rollout and what is around it, and whether all of its steps were made."""
        core = state.core
        steps_left = (self.config.total_timesteps - state.step) // self.config.num_envs
        state, rollout, is_complete = collect_rollout(
            self.env, self._run_collect, state, self.config.num_steps, steps_left
        )
        last = self._memory(state)
        return state, Trajectory(rollout, state.env.obs, last, core), is_complete

    def _run_collect(self, state: TrainState) -> tuple[TrainState, Transition]:
        """One vector step: act, step the environments."""
        key, action_key = jax.random.split(state.key)
        obs = state.env.obs  # [N, *obs]
        action, extras, core = self.agent.sample(
            state.learner, obs, action_key, self._memory(state)
        )  # [N]
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
        return state._replace(env=env, core=core, key=key, step=step), transition

    def _memory(self, state: TrainState) -> Memory:
        return Memory(state.core, ~state.env.ended)

    def learn_trajectory(
        self, state: TrainState, metrics: dict[str, Array], trajectory: Trajectory
    ) -> tuple[TrainState, dict[str, Array]]:
        """The epochs on a rollout (Algorithm 1), of which target_kl may leave out the last."""
        config = self.config
        key, shuffle_key = jax.random.split(state.key)
        learner, batch = self.agent.prepare(state.learner, trajectory)
        size = len(batch.weight)
        rows = shuffled_rows(shuffle_key, config.update_epochs, config.num_minibatches, size)

        def goes_on(carry: tuple) -> Array:
            epoch, _, _, approx_kl = carry
            return (epoch < config.update_epochs) & self._is_near(approx_kl)

        def learn_epoch(carry: tuple) -> tuple:
            epoch, learner, metrics, _ = carry
            return epoch + 1, *self._run_epoch(learner, metrics, batch, rows[epoch])

        carry = 0, learner, metrics, jnp.zeros(())
        _, learner, metrics, _ = lax.while_loop(goes_on, learn_epoch, carry)
        return state._replace(learner=learner, key=key), metrics

    def _run_epoch(
        self, learner: LearnerState, metrics: dict[str, Array], batch: RolloutBatch, rows: Array
    ) -> tuple[LearnerState, dict[str, Array], Array]:
        """One pass over a rollout in minibatches, rows [M, B]; their metrics are added up."""

        def goes_on(carry: tuple) -> Array:
            index, _, _, approx_kl = carry
            return (index < self.config.num_minibatches) & self._is_near(approx_kl)

        def learn_minibatch(carry: tuple) -> tuple:
            index, learner, metrics, _ = carry
            minibatch = take_minibatch(batch, rows[index])
            learner, approx_kl, new_metrics = self.agent.learn(learner, minibatch)
            new_metrics |= {"charts/updates": jnp.ones(())}
            return index + 1, learner, jax.tree.map(jnp.add, metrics, new_metrics), approx_kl

        carry = 0, learner, metrics, jnp.zeros(())
        _, learner, metrics, approx_kl = lax.while_loop(goes_on, learn_minibatch, carry)
        return learner, metrics, approx_kl

    def _is_near(self, approx_kl: Array) -> Array:
        """Whether the policy is still within target_kl of the one that collected."""
        target_kl = jnp.inf if self.config.target_kl is None else self.config.target_kl
        # Not <=: a NaN must reach the metrics instead of ending the updates in silence.
        return ~(approx_kl > target_kl)


if __name__ == "__main__":
    run(Trainer, Config, PRESETS)
