"""Rollouts: what happened in N environments during T steps, and minibatches of their rows."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from common.envs import Env, EnvState
from common.replay import Transition
from common.sharding import shard_rows

LARGEST_PACKED = 4096


class HasEnv(Protocol):
    """A TrainState, of which only the environments matter here."""

    @property
    def env(self) -> EnvState:
        """What changes while the environments run."""


State = TypeVar("State", bound=HasEnv)


class RolloutBatch(NamedTuple):
    """Rows of a rollout and what the losses of an actor-critic compare them with."""

    obs: Any  # [B, *obs], normalised
    action: Array  # [B, *action]
    log_prob: Array  # [B] log π(a|s; θ_old)
    value: Array  # [B] V(s; θ_old)
    advantages: Array  # [B]
    returns: Array  # [B]
    weight: Array  # [B] 0 where the environment ignored the action, with mean 1
    core: Any = ()  # [B, ...] recurrent state before the first row of each sequence


class Trajectory(NamedTuple):
    """What collecting hands to learning: steps of a policy, whole, and what is around them."""

    rollout: Transition  # [T, N, ...], extras being what the policy that acted says of its actions
    last_obs: Any  # [N, *obs] after the last row
    last: Any = ()  # networks.Memory behind the last row, for a policy that has one
    core: Any = ()  # [N, ...] recurrent state before the first row
    is_new: Any = ()  # [N] of an Explorer: False where the rows go on from its last trajectory


class TargetBatch(NamedTuple):
    """Rows of a rollout and the targets of their action values."""

    obs: Any  # [B, *obs]
    action: Array  # [B]
    td_target: Array  # [B]
    weight: Array  # [B] 0 where the environment ignored the action, with mean 1


Rows = TypeVar("Rows", RolloutBatch, TargetBatch)


def collect_rollout(
    env: Env,
    collect: Callable[[State], tuple[State, Transition]],
    state: State,
    num_steps: int,
    steps_left: Array,
) -> tuple[State, Transition, Array]:
    """Call `collect(state) -> (state, row [N, ...])` num_steps times and stack the rows.

    Stops early after `steps_left` calls, or as soon as an environment fails; the rows from there on
    are zeros.

    Args:
        env: what `collect` steps.
        collect: makes one vector step.
        state: the TrainState before the first.
        num_steps: rows T of a rollout.
        steps_left: vector steps left until the end of the run [].

    Returns:
        the state, the rows [T, N, ...], and whether all of them are there.
    """
    rollout = empty_rollout(collect, state, num_steps)
    length = jnp.minimum(num_steps, steps_left)

    def goes_on(carry: tuple[Array, State, Transition]) -> Array:
        t, state, _ = carry
        return (t < length) & env.is_sound(state.env)

    def step(carry: tuple[Array, State, Transition]) -> tuple[Array, State, Transition]:
        t, state, rollout = carry
        state, row = collect(state)
        store = partial(lax.dynamic_update_index_in_dim, index=t, axis=0)
        return t + 1, state, jax.tree.map(store, rollout, row)

    t, state, rollout = lax.while_loop(goes_on, step, (jnp.zeros((), jnp.int32), state, rollout))
    return state, rollout, (t == num_steps) & env.is_sound(state.env)


def empty_rollout(
    collect: Callable[[State], tuple[State, Transition]], state: State, num_steps: int
) -> Transition:
    """Return the zeros [T, N, ...] that `collect_rollout` writes its rows over."""
    _, row = jax.eval_shape(collect, state)
    return jax.tree.map(lambda x: jnp.zeros((num_steps, *x.shape), x.dtype), row)


def take_minibatch(batch: Rows, rows: Array) -> Rows:
    """Return some rows of a batch, with weights whose mean is 1 again."""
    minibatch = shard_rows(jax.tree.map(lambda x: x[rows], batch))
    weight = minibatch.weight / jnp.maximum(minibatch.weight.mean(), 1e-8)  # [B]
    return minibatch._replace(weight=weight)


def shuffled_rows(key: Array, num_epochs: int, num_minibatches: int, size: int) -> Array:
    """Return the rows of each minibatch [num_epochs, num_minibatches, size / num_minibatches].

    Every epoch is a random permutation of `size` rows. Up to 4,096 rows, random bits and the row's
    number share one word, whose sort takes a fifth of the time of `jax.random.permutation`; equal
    bits, of which 4,096 rows have 8 pairs, leave their two rows in order.
    """
    if size > LARGEST_PACKED:
        keys = jax.random.split(key, num_epochs)
        rows = jax.vmap(partial(jax.random.permutation, x=size))(keys)  # [epochs, size]
    else:
        mask = jnp.uint32((1 << (size - 1).bit_length()) - 1)
        bits = jax.random.bits(key, (num_epochs, size), jnp.uint32)
        packed = jnp.sort((bits & ~mask) | jnp.arange(size, dtype=jnp.uint32), axis=-1)
        rows = (packed & mask).astype(jnp.int32)  # [epochs, size]
    return rows.reshape(num_epochs, num_minibatches, -1)
