"""Rollouts: what happened in N environments during T steps, and minibatches of their rows."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from common.envs import Env
from common.replay import Transition

LARGEST_PACKED = 4096


class Batch(NamedTuple):
    """Rows of a rollout and what the losses of an actor-critic compare them with."""

    obs: Any  # [B, *obs], normalised
    action: Array  # [B, *action]
    log_prob: Array  # [B] log π(a|s; θ_old)
    value: Array  # [B] V(s; θ_old)
    advantages: Array  # [B]
    returns: Array  # [B]
    weight: Array  # [B] 0 where the environment ignored the action, with mean 1


def collect_rollout(
    env: Env,
    run_step: Callable[[Any], tuple[Any, Transition]],
    state: Any,
    num_steps: int,
    steps_left: Array,
) -> tuple[Any, Transition, Array]:
    """Call `run_step(state) -> (state, row [N, ...])` num_steps times and stack the rows.

    Stops early after `steps_left` steps, or as soon as an environment of `state.env` fails; the
    rows from there on are zeros.

    Returns:
        the state, the rows [num_steps, N, ...], and whether all of them are there.
    """
    row = jax.eval_shape(run_step, state)[1]
    rollout = jax.tree.map(lambda x: jnp.zeros((num_steps, *x.shape), x.dtype), row)
    length = jnp.minimum(num_steps, steps_left)

    def goes_on(carry: tuple) -> Array:
        return (carry[0] < length) & env.is_sound(carry[1].env)

    def step(carry: tuple) -> tuple:
        t, state, rollout = carry
        state, row = run_step(state)
        store = partial(lax.dynamic_update_index_in_dim, index=t, axis=0)
        return t + 1, state, jax.tree.map(store, rollout, row)

    t, state, rollout = lax.while_loop(goes_on, step, (0, state, rollout))
    return state, rollout, (t == num_steps) & env.is_sound(state.env)


def shuffled_rows(key: Array, num_passes: int, num_minibatches: int, size: int) -> Array:
    """Return the rows of each minibatch [num_passes * num_minibatches, size / num_minibatches].

    Every pass is a random permutation of `size` rows. Up to 4,096 rows, random bits and the row's
    number share one word, whose sort takes a fifth of the time of `jax.random.permutation`; equal
    bits, of which 4,096 rows have 8 pairs, leave their two rows in order.
    """
    if size > LARGEST_PACKED:
        keys = jax.random.split(key, num_passes)
        rows = jax.vmap(partial(jax.random.permutation, x=size))(keys)  # [passes, size]
    else:
        mask = jnp.uint32((1 << (size - 1).bit_length()) - 1)
        bits = jax.random.bits(key, (num_passes, size), jnp.uint32)
        packed = jnp.sort((bits & ~mask) | jnp.arange(size, dtype=jnp.uint32), axis=-1)
        rows = (packed & mask).astype(jnp.int32)  # [passes, size]
    return rows.reshape(num_passes * num_minibatches, -1)
