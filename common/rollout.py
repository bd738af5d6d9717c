"""Rollouts: what happened in N environments during T steps, and minibatches of their rows."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from common.devices import shard_rows
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
    core: Any = ()  # [B, ...] recurrent state before the first row of each sequence


def collect_rollout(trainer: Any, state: Any) -> tuple[Any, Transition, Array]:
    """Call `trainer._run_collect(state) -> (state, row [N, ...])` num_steps times; stack the rows.

    Stops early at total_timesteps, or as soon as an environment fails; the rows from there on are
    zeros.

    Returns:
        the state, the rows [T, N, ...], and whether all of them are there.
    """
    config, env = trainer.config, trainer.env
    row = jax.eval_shape(trainer._run_collect, state)[1]
    rollout = jax.tree.map(lambda x: jnp.zeros((config.num_steps, *x.shape), x.dtype), row)
    steps_left = (config.total_timesteps - state.step) // config.num_envs
    length = jnp.minimum(config.num_steps, steps_left)

    def goes_on(carry: tuple) -> Array:
        return (carry[0] < length) & env.is_sound(carry[1].env)

    def step(carry: tuple) -> tuple:
        t, state, rollout = carry
        state, row = trainer._run_collect(state)
        store = partial(lax.dynamic_update_index_in_dim, index=t, axis=0)
        return t + 1, state, jax.tree.map(store, rollout, row)

    t, state, rollout = lax.while_loop(goes_on, step, (0, state, rollout))
    return state, rollout, (t == config.num_steps) & env.is_sound(state.env)


def learn_minibatches(
    trainer: Any, learner: Any, metrics: dict, batch: Batch, rows: Array
) -> tuple[Any, dict]:
    """Call `trainer.agent.learn(learner, minibatch)` once for each line of rows [U, B].

    The metrics and the number of "updates" are added to `metrics`. With `target_kl`, stop after the
    first minibatch whose "approx_kl" is larger.
    """
    target_kl = trainer.config.target_kl or jnp.inf

    def goes_on(carry: tuple) -> Array:
        update, _, _, approx_kl = carry
        # Not <=: a NaN must reach the metrics instead of ending the updates in silence.
        return (update < len(rows)) & ~(approx_kl > target_kl)

    def step(carry: tuple) -> tuple:
        update, learner, sums, _ = carry
        learner, new = trainer.agent.learn(learner, take_minibatch(batch, rows[update]))
        sums = jax.tree.map(jnp.add, sums, new | {"updates": 1.0})
        return update + 1, learner, sums, new["approx_kl"]

    _, learner, metrics, _ = lax.while_loop(goes_on, step, (0, learner, metrics, jnp.zeros(())))
    return learner, metrics


def take_minibatch(batch: Batch, rows: Array) -> Batch:
    """Return some rows of a batch, with weights whose mean is 1 again."""
    minibatch = shard_rows(jax.tree.map(lambda x: x[rows], batch))
    weight = minibatch.weight / jnp.maximum(minibatch.weight.mean(), 1e-8)  # [B]
    return minibatch._replace(weight=weight)


def shuffled_rows(key: Array, config: Any, size: int) -> Array:
    """Return the rows of each minibatch [update_epochs * num_minibatches, size / num_minibatches].

    Every epoch is a random permutation of `size` rows. Up to 4,096 rows, random bits and the row's
    number share one word, whose sort takes a fifth of the time of `jax.random.permutation`; equal
    bits, of which 4,096 rows have 8 pairs, leave their two rows in order.
    """
    if size > LARGEST_PACKED:
        keys = jax.random.split(key, config.update_epochs)
        rows = jax.vmap(partial(jax.random.permutation, x=size))(keys)  # [epochs, size]
    else:
        mask = jnp.uint32((1 << (size - 1).bit_length()) - 1)
        bits = jax.random.bits(key, (config.update_epochs, size), jnp.uint32)
        packed = jnp.sort((bits & ~mask) | jnp.arange(size, dtype=jnp.uint32), axis=-1)
        rows = (packed & mask).astype(jnp.int32)  # [epochs, size]
    return rows.reshape(config.update_epochs * config.num_minibatches, -1)
