"""IMPALA: an actor-critic whose updates correct for a policy that has moved on since it acted.

Espeholt et al. 2018, https://arxiv.org/abs/1802.01561      Docs: docs/algorithms/impala.md

    h_t = core(h_{t-1}, s_t), h_{t-1} = 0 at an episode's start        networks.RecurrentCore
    ρ_t = min(ρ̄, π(a|s) / μ(a|s)), c_t = min(c̄, π(a|s) / μ(a|s))       targets.vtrace
    δ_t = ρ_t (r_t + γ (1 - terminated_t) V(s_{t+1}) - V(s_t))         targets.vtrace
    v_t = V(s_t) + δ_t + γ (1 - ended_t) c_t (v_{t+1} - V(s_{t+1}))    targets.vtrace
    Â_t = ρ_t (r_t + γ (1 - terminated_t) v_{t+1} - V(s_t))            targets.vtrace
    G_t = r_t + γ G_{t+1}, or r_t + γ V(s_{t+1}) before a worse step   targets.upgo_return
    L_π = -E[log π(a|s; θ) (Â + c_U ρ (G - V))]                        policy_loss
    L_V = ½ E[(v - V(s; θ))²]                                          value_loss
    L   = L_π + c_V L_V - β E[H(π)]                                    loss_fn
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
from common.ranges import Finite, Fraction, NonNegative, Positive
from common.replay import Transition
from common.rollout import Trajectory, collect_rollout, empty_rollout
from common.targets import upgo_return, vtrace

from common.run.config import check_config, check_rollout
from common.run.evaluator import Evaluator
from common.run.logger import log_intervals, log_points
from common.run.runner import run


@dataclass(frozen=True)
class Config:
    """Hyper-parameters; for CartPole-v1, and in `atari` those of the paper's table G.1."""

    env_id: str = "CartPole-v1"  # an envpool or Gymnasium id, or gymnax/ID or pgx/ID
    env_backend: EnvBackend = "auto"  # auto: envpool where it knows the id, else Gymnasium
    env_module: str | None = None  # module to import first, to register your environment
    env_kwargs: tuple[str, ...] = ()  # options of the environment, as KEY=VALUE KEY=VALUE ...
    num_envs: Positive[int] = 8  # environments stepped in parallel
    env_workers: NonNegative[int] = 0  # processes that step Gymnasium environments; 0: this one
    seed: NonNegative[int] = 1  # seed of networks, exploration and environments
    total_timesteps: Positive[int] = 500_000  # env steps over all envs; a multiple of num_envs
    log_frequency: Positive[int] = 10_000  # env steps between log points, rounded up to rollouts
    learning_rate: Positive[float] = 3e-3  # step size of RMSProp at the start
    rmsprop_epsilon: Positive[float] = 0.01  # what RMSProp adds to the mean of squared gradients
    anneal_lr: bool = True  # let the step size fall linearly to 0 over the run
    num_steps: Positive[int] = 20  # n: steps of each environment in a trajectory
    gamma: Fraction = 0.98  # discount of one step
    rho_bar: Positive[float] = 1.0  # ρ̄: largest weight of a step; it fixes what V is the value of
    c_bar: Positive[float] = 1.0  # c̄: largest weight of a trace
    vtrace: bool = True  # correct for the policy that acted; else take its steps for the policy's
    upgo_coef: NonNegative[float] = 0.0  # c_U: weight of the upgoing advantages; 0 is the paper's
    entropy_coef: NonNegative[float] = 3e-4  # β: weight of the entropy bonus
    value_coef: NonNegative[float] = 2.0  # c_V: weight of the value loss
    max_grad_norm: Positive[float] = 40.0  # longest gradient; longer ones are scaled down to it
    core: Literal["none", "lstm", "gru"] = "none"  # recurrent core
    core_size: Positive[int] = 256  # units of the core
    log_std_init: Finite[float] = 0.0  # log of the deviation of a continuous action at the start
    eval_stochastic: bool = False  # draw evaluation actions from the policy instead of its mode

    def __post_init__(self) -> None:
        check_config(self)
        check_rollout(self)


PRESETS: dict[str, dict[str, Any]] = {
    "classic": {},
    "atari": {
        "num_envs": 32,
        "total_timesteps": 10_000_000,
        "learning_rate": 6e-4,
        "gamma": 0.99,
        "entropy_coef": 0.01,
        "value_coef": 0.5,
    },
}


class Model(nnx.Module):
    """Encoder, maybe a recurrent core, policy and value with two hidden layers each for vectors."""

    def __init__(self, config: Config, obs_space: spaces.Space, action_space: Any, rngs: nnx.Rngs):
        init = nnx.initializers.orthogonal
        self.encoder = Encoder(obs_space, rngs, init(2**0.5))
        size = self.encoder.num_features
        is_recurrent = config.core != "none"
        core_sizes = size, config.core_size
        self.core = RecurrentCore(config.core, *core_sizes, rngs) if is_recurrent else None
        hidden = () if self.encoder.has_cnn else (64, 64)
        sizes = (config.core_size if is_recurrent else size, *hidden)
        self.actor = MLP(sizes, rngs, nnx.tanh, init(2**0.5))
        self.critic = MLP(sizes, rngs, nnx.tanh, init(2**0.5))
        self.policy_head = PolicyHead(
            sizes[-1], action_space, rngs, scale=0.01, log_std_init=config.log_std_init
        )
        self.value_head = nnx.Linear(sizes[-1], 1, kernel_init=init(1.0), rngs=rngs)

    def unroll(self, obs: Any, core: Any, valid: Array) -> tuple[Distribution, Array, Any]:
        """[B, T, *obs], state [B, ...], valid [B, T] -> distribution, value [B, T], new state."""
        flat_obs = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), obs)  # [B * T, *obs]
        features = self.encoder(flat_obs).reshape(*valid.shape, -1)  # [B, T, F]
        if self.core is not None:
            features, core = self.core(core, features, valid)  # [B, T, H]
        policy = self.policy_head(self.actor(features), action_mask(obs))
        return policy, self.value_head(self.critic(features))[..., 0], core


class LearnerState(NamedTuple):
    """Every array that learning changes."""

    params: Any
    opt_state: Any


class Algorithm:
    """Targets, losses and optimizer as pure functions of `LearnerState`."""

    def __init__(self, config: Config, obs_space: spaces.Space, action_space: spaces.Space):
        self.config = config
        self.make_model = partial(Model, config, obs_space, action_space)
        self.model = partial(nnx.merge, nnx.graphdef(self.make_model(nnx.Rngs(0))))
        self.initial_core = partial(initial_core, config.core, config.core_size)
        num_updates = config.total_timesteps // (config.num_envs * config.num_steps)
        end = 0.0 if config.anneal_lr else config.learning_rate
        step_size = optax.linear_schedule(config.learning_rate, end, num_updates)
        clip = optax.clip_by_global_norm(config.max_grad_norm)
        rmsprop = optax.rmsprop(step_size, decay=0.99, eps=config.rmsprop_epsilon)
        self.optimizer = optax.flatten(optax.chain(clip, rmsprop))

    def init(self, key: Array) -> LearnerState:
        """Draw new parameters."""
        params = nnx.to_pure_dict(nnx.state(self.make_model(nnx.Rngs(key))))
        return LearnerState(params, self.optimizer.init(params))

    def predict(
        self, params: Any, obs: Any, core: Any, valid: Array
    ) -> tuple[Distribution, Array, Any]:
        """[B, T, *obs] -> distribution over actions, value [B, T], and recurrent state [B, ...]."""
        return self.model(params).unroll(obs, core, valid)

    def unroll(self, params: Any, trajectory: Trajectory) -> tuple[Distribution, Array]:
        """Distribution of each row [T, N], and value of these and of what follows [T + 1, N]."""
        rollout = trajectory.rollout
        valid = jnp.concatenate([rollout.valid, trajectory.last.valid[None]])  # [T + 1, N]
        obs = jax.tree.map(
            lambda x, last: jnp.concatenate([x, last[None]]).swapaxes(0, 1),
            rollout.obs,
            trajectory.last_obs,
        )  # [N, T + 1, *obs]
        distribution, value, _ = self.predict(params, obs, trajectory.core, valid.T)
        return jax.tree.map(lambda x: x.swapaxes(0, 1)[:-1], distribution), value.T

    def targets(self, rollout: Transition, ratio: Array, value: Array) -> tuple[Array, Array]:
        """π / μ [T, N] and V(s) [T + 1, N] -> v and Â + c_U ρ (G - V), both [T, N]."""
        config = self.config
        if not config.vtrace:
            ratio = jnp.ones_like(ratio)
        steps = rollout.reward, rollout.terminated, rollout.truncated, value, config.gamma
        target, advantages = vtrace(ratio, *steps, rho_bar=config.rho_bar, c_bar=config.c_bar)
        if config.upgo_coef:
            rho = jnp.minimum(config.rho_bar, ratio)  # [T, N]
            advantages += config.upgo_coef * rho * (upgo_return(*steps) - value[:-1])  # [T, N]
        return target, advantages

    def policy_loss(self, log_prob: Array, advantages: Array, weight: Array) -> Array:
        """-E[log π(a|s) Â], of advantages with the upgoing ones."""
        return -(weight * log_prob * advantages).mean()

    def value_loss(self, value: Array, target: Array, weight: Array) -> Array:
        """½ E[(v - V)²]."""
        return 0.5 * (weight * (target - value) ** 2).mean()

    def loss_fn(self, params: Any, trajectory: Trajectory) -> tuple[Array, dict[str, Array]]:
        """L_π + c_V L_V - β E[H(π)] over the valid rows of trajectories, times their number."""
        config, rollout = self.config, trajectory.rollout
        distribution, value = self.unroll(params, trajectory)  # [T, N], [T + 1, N]
        log_prob = distribution.log_prob(rollout.action)  # [T, N]
        log_ratio = log_prob - rollout.extras  # [T, N]
        ratio = jnp.exp(log_ratio)  # [T, N] π / μ
        # Targets are of the same pass over the network as the loss: a second would cost a third.
        target, advantages = self.targets(rollout, *lax.stop_gradient((ratio, value)))
        weight = rollout.valid / jnp.maximum(rollout.valid.mean(), 1e-8)  # [T, N]
        chex.assert_equal_shape([log_prob, value[:-1], target, advantages, weight])
        policy_loss = self.policy_loss(log_prob, advantages, weight)
        value_loss = self.value_loss(value[:-1], target, weight)
        entropy = (weight * distribution.entropy()).mean()
        loss = policy_loss + config.value_coef * value_loss - config.entropy_coef * entropy
        # The paper's sum over rows, to which its gradient norm and the ε of RMSProp belong.
        return loss * rollout.valid.sum(), {
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy": entropy,
            "approx_kl": (weight * (ratio - 1 - log_ratio)).mean(),
            "rho": (weight * jnp.minimum(config.rho_bar, ratio)).mean(),
        }

    def learn(
        self, state: LearnerState, batch: Trajectory
    ) -> tuple[LearnerState, dict[str, Array]]:
        """One gradient step on trajectories."""
        grads, metrics = jax.grad(self.loss_fn, has_aux=True)(state.params, batch)
        updates, opt_state = self.optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return state._replace(params=params, opt_state=opt_state), metrics


class Agent:
    """Exploration, and the way from environment to algorithm."""

    def __init__(self, config: Config, algorithm: Algorithm, action_space: spaces.Space):
        self.config = config
        self.algorithm = algorithm
        self.env_action = partial(scale_action, action_space)

    def predict(
        self, state: LearnerState, obs: Any, key: Array, memory: Memory
    ) -> tuple[Array, Any]:
        """Action [N] of the environment to evaluate with, as `eval_stochastic` says; memory."""
        distribution, _, core = self.step(state, obs, memory)
        is_drawn = self.config.eval_stochastic
        return self.env_action(distribution.sample(key) if is_drawn else distribution.mode()), core

    def sample(
        self, state: LearnerState, obs: Any, key: Array, memory: Memory
    ) -> tuple[Array, Array, Any]:
        """Action [N] to train with, for `env_action`; log μ(a|s) [N]; recurrent state."""
        distribution, _, core = self.step(state, obs, memory)
        action = distribution.sample(key)  # [N, *action]
        return action, distribution.log_prob(action), core

    def step(
        self, state: LearnerState, obs: Any, memory: Memory
    ) -> tuple[Distribution, Array, Any]:
        """[N, *obs] and what is remembered -> distribution, value [N], new recurrent state."""
        obs = jax.tree.map(lambda x: x[:, None], obs)  # [N, 1, *obs]
        valid = memory.valid[:, None]  # [N, 1]
        distribution, value, core = self.algorithm.predict(state.params, obs, memory.core, valid)
        distribution = jax.tree.map(lambda x: x[:, 0], distribution)  # [N, ...]
        return distribution, value[:, 0], core

    def learn(
        self, state: LearnerState, batch: Trajectory
    ) -> tuple[LearnerState, dict[str, Array]]:
        """One gradient step on trajectories."""
        return self.algorithm.learn(state, batch)


class TrainState(NamedTuple):
    """The whole training process: what a checkpoint holds."""

    learner: LearnerState
    env: EnvState
    core: Any  # [N, ...] recurrent state, () without a core
    key: Array
    step: Array  # [] int32, env steps done over all environments


class Trainer:
    """The training process: collect trajectories and learn from them in one compiled program."""

    pace = "asynchronous"  # of Explorers: V-trace corrects for a policy that has moved on

    def __init__(self, config: Config = Config()):
        self.config = config
        self.env = make_env(config)
        require_action_space("impala", self.env, *PolicyHead.action_spaces)
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
        learner = self.algorithm.init(learner_key)
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
        _, metrics = jax.eval_shape(self.agent.learn, state.learner, trajectory)
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
        """One step on a trajectory of each environment; its metrics are added up."""
        learner, new_metrics = self.agent.learn(state.learner, trajectory)
        new_metrics |= {"charts/updates": jnp.ones(())}
        return state._replace(learner=learner), jax.tree.map(jnp.add, metrics, new_metrics)


if __name__ == "__main__":
    run(Trainer, Config, PRESETS)
