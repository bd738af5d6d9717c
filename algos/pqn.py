"""Parallelised Q-Network: Q(λ) on the rollouts of many environments, without replay or target.

Gallici et al. 2024, https://arxiv.org/abs/2407.04811      Docs: docs/algorithms/pqn.md

    G_t  = r_t + γ (1 - terminated_t) ((1 - λ_t) max_a' Q(s_{t+1}, a') + λ_t G_{t+1})   targets
    λ_t  = λ (1 - ended_t)                                     targets.td_lambda_return
    L(θ) = E[(G - Q(s, a; θ))²]                                loss_fn
    Q    = head(f(f(s))),  f(x) = ReLU(LayerNorm(W x + b))     value
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
from common.replay import Transition
from common.rollout import (
    TargetBatch,
    Trajectory,
    collect_rollout,
    empty_rollout,
    shuffled_rows,
    take_minibatch,
)
from common.targets import td_lambda_return

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
    learning_rate: Positive[float] = 1e-3  # step size of RAdam at the start
    anneal_lr: bool = True  # let the step size fall linearly to 0 over the run
    num_steps: Positive[int] = 128  # steps of each environment in a rollout
    gamma: Fraction = 0.99  # discount of one step
    q_lambda: Fraction = 0.65  # λ: 0 trusts the next Q-value, 1 the rewards of the rollout
    update_epochs: Positive[int] = 4  # passes over a rollout
    num_minibatches: Positive[int] = 4  # minibatches in a pass
    start_epsilon: Fraction = 1.0  # ε, the exploration rate, at the first step
    end_epsilon: Fraction = 0.05  # ε after exploration_fraction of the run
    exploration_fraction: Fraction = 0.5  # share of the run over which ε falls linearly
    evaluation_epsilon: Fraction = 0.0  # ε in evaluation
    max_grad_norm: Positive[float] = 10.0  # longest gradient; longer ones are scaled down to it

    def __post_init__(self) -> None:
        check_config(self)
        check_rollout(self, self.update_epochs * self.num_minibatches)
        size = self.num_envs * self.num_steps
        what = (
            f"a rollout of --num-envs {self.num_envs} times --num-steps {self.num_steps} = {size}"
        )
        check_minibatches(self.num_minibatches, size, what)


PRESETS: dict[str, dict[str, Any]] = {
    "classic": {},
    "minatar": {
        "num_envs": 32,
        "total_timesteps": 2_000_000,
        "num_steps": 32,
        "update_epochs": 2,
        "num_minibatches": 32,
        "end_epsilon": 0.01,
        "exploration_fraction": 0.1,
    },
    "atari": {
        "num_envs": 128,
        "total_timesteps": 10_000_000,
        "log_frequency": 20_480,
        "learning_rate": 2.5e-4,
        "anneal_lr": False,
        "num_steps": 32,
        "update_epochs": 2,
        "num_minibatches": 32,
        "end_epsilon": 0.001,
        "exploration_fraction": 0.1,
    },
}


class Model(nnx.Module):
    """Q-network with LayerNorm: an encoder, two hidden layers for vectors, a head."""

    def __init__(self, obs_space: spaces.Space, action_space: Any, rngs: nnx.Rngs):
        init = nnx.initializers.he_normal()
        self.encoder = Encoder(obs_space, rngs, init, layer_norm=True)
        hidden = () if self.encoder.has_cnn else (120, 84)
        sizes = (self.encoder.num_features, *hidden)
        self.torso = MLP(sizes, rngs, kernel_init=init, layer_norm=True)
        self.head = nnx.Linear(self.torso.num_features, int(action_space.n), rngs=rngs)

    def value(self, obs: Any) -> Array:
        """[B, *obs] -> q_values [B, A]."""
        return self.head(self.torso(self.encoder(obs)))  # [B, A]


class LearnerState(NamedTuple):
    """Every array that learning changes."""

    params: Any
    opt_state: Any


class Algorithm:
    """Targets, loss and optimizer as pure functions of `LearnerState`."""

    def __init__(self, config: Config, obs_space: spaces.Space, action_space: spaces.Space):
        self.config = config
        self.make_model = partial(Model, obs_space, action_space)
        self.model = partial(nnx.merge, nnx.graphdef(self.make_model(nnx.Rngs(0))))
        num_rollouts = config.total_timesteps // (config.num_envs * config.num_steps)
        num_updates = num_rollouts * config.update_epochs * config.num_minibatches
        end = 0.0 if config.anneal_lr else config.learning_rate
        step_size = optax.linear_schedule(config.learning_rate, end, num_updates)
        clip = optax.clip_by_global_norm(config.max_grad_norm)
        self.optimizer = optax.flatten(optax.chain(clip, optax.radam(step_size)))

    def init(self, key: Array) -> LearnerState:
        """Draw new parameters."""
        params = nnx.to_pure_dict(nnx.state(self.make_model(nnx.Rngs(key))))
        return LearnerState(params, self.optimizer.init(params))

    def predict(self, params: Any, obs: Any) -> Array:
        """[B, *obs] -> q_values [B, A]."""
        return mask_actions(self.model(params).value(obs), action_mask(obs))

    def targets(self, rollout: Transition, last_value: Array) -> TargetBatch:
        """Rollout [T, N] and max_a Q(s, a) [N] of what follows -> the rows with their targets G.

        This is Peng's Q(λ): the trace is not cut where an action was drawn at random.
        """
        value = rollout.extras  # [T, N] max_a Q(s, a; θ) when acting
        td_target = td_lambda_return(
            reward=rollout.reward,
            terminated=rollout.terminated,
            truncated=rollout.truncated,
            value=jnp.concatenate([value, last_value[None]]),  # [T + 1, N]
            gamma=self.config.gamma,
            lambda_=self.config.q_lambda,
        )  # [T, N]
        return TargetBatch(
            obs=rollout.obs,
            action=rollout.action,
            td_target=td_target,
            weight=rollout.valid / jnp.maximum(rollout.valid.mean(), 1e-8),
        )

    def loss_fn(self, params: Any, batch: TargetBatch) -> tuple[Array, dict[str, Array]]:
        """E[(G - Q(s, a; θ))²] over the valid rows of the batch."""
        q_values = self.predict(params, batch.obs)  # [B, A]
        q_value = jnp.take_along_axis(q_values, batch.action[:, None], axis=-1)[:, 0]  # [B]
        chex.assert_equal_shape([q_value, batch.td_target, batch.weight])
        loss = (batch.weight * (batch.td_target - q_value) ** 2).mean()
        return loss, {"td_loss": loss, "q_values": (batch.weight * q_value).mean()}

    def learn(
        self, state: LearnerState, batch: TargetBatch
    ) -> tuple[LearnerState, dict[str, Array]]:
        """One gradient step on a batch."""
        grads, metrics = jax.grad(self.loss_fn, has_aux=True)(state.params, batch)
        updates, opt_state = self.optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return state._replace(params=params, opt_state=opt_state), metrics


class Agent:
    """Exploration, and the way from environment to algorithm."""

    def __init__(self, config: Config, algorithm: Algorithm):
        self.config = config
        self.algorithm = algorithm
        decay_steps = max(1, int(config.exploration_fraction * config.total_timesteps))
        self.epsilon = optax.linear_schedule(config.start_epsilon, config.end_epsilon, decay_steps)

    def predict(self, state: LearnerState, obs: Any, key: Array) -> Array:
        """Action [N] to evaluate with."""
        q_values = self.algorithm.predict(state.params, obs)  # [N, A]
        return self.epsilon_greedy(q_values, obs, self.config.evaluation_epsilon, key)

    def sample(self, state: LearnerState, obs: Any, step: Array, key: Array) -> tuple[Array, Array]:
        """Action [N] to train with, and the largest Q-value [N]."""
        q_values = self.algorithm.predict(state.params, obs)  # [N, A]
        action = self.epsilon_greedy(q_values, obs, self.epsilon(step), key)  # [N]
        return action, q_values.max(axis=-1)

    def prepare(self, state: LearnerState, rollout: Transition, last_obs: Any) -> TargetBatch:
        """Rollout [T, N] and the obs [N] after it -> its batch [T * N]."""
        last_value = self.algorithm.predict(state.params, last_obs).max(axis=-1)  # [N]
        batch = self.algorithm.targets(rollout, last_value)
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)  # [T * N, ...]

    def learn(
        self, state: LearnerState, batch: TargetBatch
    ) -> tuple[LearnerState, dict[str, Array]]:
        """One gradient step on a batch."""
        return self.algorithm.learn(state, batch)

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
    key: Array
    step: Array  # [] int32, env steps done over all environments


class Trainer:
    """The training process: collect rollouts and learn from them in one compiled program."""

    pace = "synchronous"  # of Explorers: every rollout is of the newest policy

    def __init__(self, config: Config = Config()):
        self.config = config
        self.env = make_env(config)
        require_action_space("pqn", self.env, spaces.Discrete)
        self.algorithm = Algorithm(config, self.env.observation_space, self.env.action_space)
        self.agent = Agent(config, self.algorithm)
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
                logs = {"charts/epsilon": self.agent.epsilon(self.state.step)}
                yield from log_points(self.env, self.state, start, logs, metrics)
        finally:
            self.env.close()

    def evaluate(self, num_episodes: int = 20) -> dict:
        """Play full episodes in environments of their own; log_data of their raw returns."""
        return self.evaluator(self.state.learner, int(self.state.step), num_episodes)

    def init_state(self, key: Array) -> TrainState:
        """New parameters and new episodes."""
        learner_key, env_key, key = jax.random.split(key, 3)
        learner = self.algorithm.init(learner_key)
        env = self.env.reset(env_key)
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
        batch = jax.eval_shape(self.agent.prepare, state.learner, rollout, state.env.obs)
        _, metrics = jax.eval_shape(self.agent.learn, state.learner, batch)
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
        env, timestep = self.env.step(state.env, action)
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
        """The epochs on a rollout (Algorithm 1)."""
        config = self.config
        key, shuffle_key = jax.random.split(state.key)
        batch = self.agent.prepare(state.learner, trajectory.rollout, trajectory.last_obs)
        size = len(batch.weight)
        rows = shuffled_rows(shuffle_key, config.update_epochs, config.num_minibatches, size)

        def learn_epoch(epoch: Array, carry: tuple) -> tuple:
            learner, metrics = carry
            return self._run_epoch(learner, metrics, batch, rows[epoch])

        carry = state.learner, metrics
        learner, metrics = lax.fori_loop(0, config.update_epochs, learn_epoch, carry)
        return state._replace(learner=learner, key=key), metrics

    def _run_epoch(
        self, learner: LearnerState, metrics: dict[str, Array], batch: TargetBatch, rows: Array
    ) -> tuple[LearnerState, dict[str, Array]]:
        """One pass over a rollout in minibatches, rows [M, B]; their metrics are added up."""

        def learn_minibatch(index: Array, carry: tuple) -> tuple:
            learner, metrics = carry
            learner, new_metrics = self.agent.learn(learner, take_minibatch(batch, rows[index]))
            new_metrics |= {"charts/updates": jnp.ones(())}
            return learner, jax.tree.map(jnp.add, metrics, new_metrics)

        return lax.fori_loop(0, self.config.num_minibatches, learn_minibatch, (learner, metrics))


if __name__ == "__main__":
    run(Trainer, Config, PRESETS)
