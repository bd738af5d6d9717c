"""Running mean and variance of observations and returns, as arrays in the train state.

On-policy files merge statistics once a rollout, over valid rows only, so that a policy learns from
what it saw while it acted. Off-policy files merge every vector step, and see what they replay
through the statistics of the moment. Evaluation changes nothing.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from common.action_masks import MASK_KEY, action_mask
from common.replay import Transition

EPSILON = 1e-8
MAX_DEVIATIONS = 10.0


class RunningStats(NamedTuple):
    """Mean and variance of everything seen so far; 0 and 1 before that."""

    num_rows: Array  # [] float32
    mean: Any  # [*x]
    variance: Any  # [*x], population variance


def init_stats(like: Any) -> RunningStats:
    """Return the statistics of nothing, for rows of a shape and dtype such as `like` [N, *x]."""
    mean = jax.tree.map(lambda x: jnp.zeros(x.shape[1:]), like)
    return RunningStats(jnp.zeros(()), mean, jax.tree.map(jnp.ones_like, mean))


def update_stats(stats: RunningStats, x: Any, valid: Array) -> RunningStats:
    """Merge rows x [..., *x] where `valid` [...] (Chan et al. 1979, the pairwise update)."""
    rows = valid.sum()
    num_rows = stats.num_rows + rows
    share = rows / jnp.maximum(num_rows, 1.0)

    def merge(mean: Array, variance: Array, x: Array) -> tuple[Array, Array]:
        axes = tuple(range(valid.ndim))
        weight = valid.reshape(valid.shape + (1,) * (x.ndim - valid.ndim))
        weight = weight / jnp.maximum(rows, 1.0)
        new_mean = (weight * x).sum(axes)
        new_variance = (weight * (x - new_mean) ** 2).sum(axes)
        delta = new_mean - mean
        merged = variance + share * (new_variance - variance) + share * (1 - share) * delta**2
        # With no row yet to merge with, the variance 1 of nothing must not enter.
        return mean + share * delta, jnp.where(stats.num_rows > 0, merged, new_variance)

    merged = jax.tree.map(merge, stats.mean, stats.variance, x)
    mean, variance = jax.tree.transpose(jax.tree.structure(x), jax.tree.structure((0, 0)), merged)
    new = RunningStats(num_rows, mean, variance)
    return jax.tree.map(lambda a, b: jnp.where(rows > 0, a, b), new, stats)


def normalize(stats: RunningStats, x: Any) -> Any:
    """(x - mean) / std of rows [..., *x], within ±10; integers and masks pass unchanged."""

    def normalized(mean: Array, variance: Array, x: Array) -> Array:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        scaled = (x - mean) * lax.rsqrt(variance + EPSILON)
        return jnp.clip(scaled, -MAX_DEVIATIONS, MAX_DEVIATIONS)

    scaled = jax.tree.map(normalized, stats.mean, stats.variance, x)
    return scaled if action_mask(x) is None else scaled | {MASK_KEY: x[MASK_KEY]}


def standardize(x: Array, weight: Array) -> Array:
    """Give x [B] mean 0 and deviation 1 over its rows, which count by weights [B] of mean 1."""
    mean = (weight * x).mean()
    variance = (weight * (x - mean) ** 2).mean()
    return (x - mean) / (jnp.sqrt(variance) + EPSILON)


class NormalizerState(NamedTuple):
    """Statistics of observations and returns; () where they are not wanted."""

    obs: Any  # RunningStats of [*obs]
    returns: Any  # RunningStats of []
    running_return: Any  # [N] Σ_k γᵏ r_{t-k} of the episode so far


@dataclass(frozen=True)
class Normalizer:
    """What is normalised, and the pure functions that do it.

    Attributes:
        obs: scale observations to mean 0 and deviation 1.
        reward: scale rewards so that discounted returns have deviation 1.
        gamma: discount of one step.
    """

    obs: bool
    reward: bool
    gamma: float

    def init(self, obs: Any) -> NormalizerState:
        """Return the statistics of nothing, for observations such as these [N, *obs]."""
        running_return = jnp.zeros(len(jax.tree.leaves(obs)[0])) if self.reward else ()
        return NormalizerState(
            obs=init_stats(obs) if self.obs else (),
            returns=init_stats(running_return) if self.reward else (),
            running_return=running_return,
        )

    def observe(self, state: NormalizerState, obs: Any) -> Any:
        """Return observations [..., *obs] as the networks see them."""
        return normalize(state.obs, obs) if self.obs else obs

    def update(self, state: NormalizerState, rollout: Transition) -> tuple[NormalizerState, Array]:
        """Merge a rollout [T, N] into the statistics; return its rewards over their deviation.

        Where rewards are not normalised, it may be one vector step [N].

        R_t = r_t + γ R_{t-1} within an episode; r_t / std(R), within ±10.
        """
        if self.obs:
            state = state._replace(obs=update_stats(state.obs, rollout.obs, rollout.valid))
        if not self.reward:
            return state, rollout.reward

        def step(running_return: Array, row: tuple[Array, Array]) -> tuple[Array, Array]:
            reward, ended = row
            running_return = reward + self.gamma * running_return  # [N]
            return jnp.where(ended, 0.0, running_return), running_return

        rows = rollout.reward, rollout.terminated | rollout.truncated
        running_return, returns = lax.scan(step, state.running_return, rows)  # [N], [T, N]
        stats = update_stats(state.returns, returns, rollout.valid)
        scaled = rollout.reward * lax.rsqrt(stats.variance + EPSILON)  # [T, N]
        scaled = jnp.clip(scaled, -MAX_DEVIATIONS, MAX_DEVIATIONS)
        return state._replace(returns=stats, running_return=running_return), scaled
