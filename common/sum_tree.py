"""A tree of sums: draw among many numbers in proportion to them, and change some of them.

Schaul et al. 2016, https://arxiv.org/abs/1511.05952, appendix B.2.1. Every node is the sum of its
eight children, made again from them when one of them changes: differences that are added to a node
would drift away from its leaves. A million leaves take seven levels.
"""

import jax.numpy as jnp
from jax import Array, lax

CHILDREN = 8

SumTree = tuple[Array, ...]  # the leaves first, the root [1] last; all levels padded with zeros


def init(num_leaves: int) -> SumTree:
    """Return a tree whose leaves are all 0."""
    sizes = [num_leaves]
    while sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // CHILDREN))
    padded = [size * CHILDREN for size in sizes[1:]]
    return tuple(jnp.zeros(size) for size in [*padded, 1])


def update(tree: SumTree, index: Array, value: Array) -> SumTree:
    """Set the leaves index [B] to value [B]; of an index that comes twice, one value stays."""
    levels = [tree[0].at[index].set(value, mode="promise_in_bounds")]
    for level in tree[1:]:
        index = index // CHILDREN
        children = _children(levels[-1], index)  # [B, 8]
        levels.append(level.at[index].set(children.sum(axis=1), mode="promise_in_bounds"))
    return tuple(levels)


def update_range(tree: SumTree, start: Array, value: Array) -> SumTree:
    """Set the leaves start, start + 1, ... to value [B], which must not reach beyond the last.

    Slices of memory take a fraction of the time of as many single leaves.
    """
    levels = [lax.dynamic_update_slice_in_dim(tree[0], value, start, 0)]
    most = len(value)
    for level in tree[1:]:
        num_nodes = len(levels[-1]) // CHILDREN
        # As many nodes as the range may touch; one that it does not is made again as it was.
        most = min((most + CHILDREN - 2) // CHILDREN + 1, num_nodes)
        start = jnp.minimum(start // CHILDREN, num_nodes - most)
        children = lax.dynamic_slice_in_dim(levels[-1], start * CHILDREN, most * CHILDREN)
        sums = children.reshape(-1, CHILDREN).sum(axis=1)  # [most]
        levels.append(lax.dynamic_update_slice_in_dim(level, sums, start, 0))
    return tuple(levels)


def draw(tree: SumTree, fraction: Array) -> Array:
    """Return the leaf [B] at which the running sum passes a fraction [B] in [0, 1) of the total.

    A leaf of 0 is never returned, unless all are 0.
    """
    node = jnp.zeros(fraction.shape, jnp.int32)  # [B]
    rest = fraction * total(tree)  # [B]
    for level in tree[-2::-1]:
        children = _children(level, node)  # [B, 8]
        places = jnp.arange(CHILDREN)
        passed = (rest[:, None] >= _running_sum(children)).sum(axis=1)  # [B]
        # Where rounding leads to a child of 0, the next above 0 is meant, or else the last.
        is_next = (children > 0) & (places >= passed[:, None])  # [B, 8]
        last = jnp.where(children > 0, places, 0).max(axis=1)  # [B]
        chosen = jnp.minimum(jnp.where(is_next, places, CHILDREN).min(axis=1), last)  # [B]
        # Not below 0, as two orders of adding may differ: the first child above 0 is meant then.
        below = jnp.where(places < chosen[:, None], children, 0).sum(axis=1)  # [B]
        rest = jnp.maximum(rest - below, 0.0)  # [B]
        node = node * CHILDREN + chosen
    return node


def total(tree: SumTree) -> Array:
    """Return the sum of all leaves []."""
    return tree[-1][0]


def _children(level: Array, parent: Array) -> Array:
    return level.reshape(-1, CHILDREN).at[parent].get(mode="promise_in_bounds")


def _running_sum(x: Array) -> Array:
    """Sums up to each column of [B, 2^k]; jnp.cumsum takes twice as long on a CPU."""
    shift = 1
    while shift < x.shape[1]:
        x += jnp.pad(x[:, :-shift], ((0, 0), (shift, 0)))
        shift *= 2
    return x
