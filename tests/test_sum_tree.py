"""The sum tree against a float64 recomputation of its leaves, and against numpy's searchsorted."""

from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from scipy import stats

from common import sum_tree


def assert_exact(tree: sum_tree.SumTree) -> None:
    """Every node is the float32 sum of its children, and within rounding that of its leaves."""
    leaves = np.asarray(tree[0], np.float64)
    for depth, (below, level) in enumerate(pairwise(tree), 1):
        children = np.asarray(below).reshape(-1, sum_tree.CHILDREN)
        sums = np.zeros(len(level))
        sums[: len(children)] = children.astype(np.float64).sum(axis=1)
        np.testing.assert_allclose(level, sums, rtol=4e-7)
        of_leaves = np.add.reduceat(leaves, np.arange(0, len(leaves), sum_tree.CHILDREN**depth))
        np.testing.assert_allclose(level[: len(of_leaves)], of_leaves, rtol=4e-7 * depth)


@pytest.mark.parametrize("num_leaves", [1, 2, 7, 8, 9, 64, 65, 1_000])
def test_levels(num_leaves):
    tree = sum_tree.init(num_leaves)
    assert len(tree[0]) >= num_leaves and len(tree[-1]) == 1
    values = jnp.arange(1.0, num_leaves + 1)
    tree = sum_tree.update(tree, jnp.arange(num_leaves), values)
    assert_exact(tree)
    np.testing.assert_array_equal(tree[0][:num_leaves], values)
    assert sum_tree.total(tree) == num_leaves * (num_leaves + 1) / 2


@pytest.mark.parametrize(("num_leaves", "length"), [(1, 1), (5, 3), (65, 9), (1_000, 90)])
def test_a_range_is_updated_as_its_leaves_are(num_leaves, length):
    rng = np.random.default_rng(num_leaves)
    one = other = sum_tree.init(num_leaves)
    update, update_range = jax.jit(sum_tree.update), jax.jit(sum_tree.update_range)
    starts = [0, num_leaves - length, *rng.integers(num_leaves - length + 1, size=20)]
    for start in starts:
        values = np.float32(rng.random(length))
        one = update(one, start + np.arange(length), values)
        other = update_range(other, start, values)
        jax.tree.map(np.testing.assert_array_equal, one, other)


def test_no_rounding_adds_up_over_a_million_updates():
    """Values over 8 orders of magnitude: differences added to the nodes would be far off by now."""
    num_leaves, batch = 5_000, 100

    def step(_: int, carry: tuple) -> tuple:
        tree, key = carry
        key, index_key, value_key = jax.random.split(key, 3)
        index = jax.random.randint(index_key, (batch,), 0, num_leaves)
        value = 10 ** jax.random.uniform(value_key, (batch,), minval=-4, maxval=4)
        return sum_tree.update(tree, index, value), key

    run = jax.jit(partial(lax.fori_loop, 0, 10_000, step))
    tree, _ = run((sum_tree.init(num_leaves), jax.random.key(0)))
    assert_exact(tree)
    small = sum_tree.update(tree, jnp.arange(num_leaves), jnp.full(num_leaves, 1e-4))
    np.testing.assert_allclose(sum_tree.total(small), 0.5, rtol=1e-6)


@pytest.mark.parametrize("num_leaves", [1, 5, 8, 300])
def test_draws_are_those_of_the_running_sum(num_leaves):
    rng = np.random.default_rng(num_leaves)
    values = rng.integers(0, 4, num_leaves).astype(np.float32)
    values[0] = 1
    tree = sum_tree.update(sum_tree.init(num_leaves), jnp.arange(num_leaves), jnp.array(values))
    # Whole numbers are summed without rounding, and halves fall between them.
    points = np.arange(values.sum()) + 0.5
    drawn = sum_tree.draw(tree, jnp.array(points / values.sum(), jnp.float32))
    np.testing.assert_array_equal(drawn, np.searchsorted(np.cumsum(values), points, side="right"))


def test_frequencies_are_proportional():
    values = np.random.default_rng(0).gamma(0.5, size=200).astype(np.float32)
    tree = sum_tree.update(sum_tree.init(200), jnp.arange(200), jnp.array(values))
    drawn = sum_tree.draw(tree, jax.random.uniform(jax.random.key(0), (200_000,)))
    counts, expected = np.bincount(drawn, minlength=200), values / values.sum(dtype=np.float64)
    often = expected > 1e-4
    shares = np.append(expected[often], expected[~often].sum())
    seen = np.append(counts[often], counts[~often].sum())
    assert stats.chisquare(seen, shares / shares.sum() * 200_000).pvalue > 1e-3


def test_a_leaf_of_zero_is_not_drawn_beside_the_border_of_a_node():
    """Where two orders of adding its children differ, what is left of the sum may be below 0."""
    values = np.random.default_rng(1).random(64).astype(np.float32)
    values[::8] = 0
    tree = sum_tree.update(sum_tree.init(64), jnp.arange(64), jnp.array(values))
    borders = np.cumsum(values.astype(np.float64))[7::8] / values.sum(dtype=np.float64)
    nearby = borders[:-1].astype(np.float32).view(np.int32)[:, None] + np.arange(-6, 7)
    drawn = sum_tree.draw(tree, jnp.array(nearby.ravel().astype(np.int32).view(np.float32)))
    assert (values[np.asarray(drawn)] > 0).all()


def test_a_leaf_of_zero_is_not_drawn_within_a_node():
    """Sums up to it and past it are added in other orders, and may differ although it is 0."""
    rng = np.random.default_rng(0)
    draw = jax.jit(sum_tree.draw)
    for _ in range(100):
        values = rng.random(64).astype(np.float32) * (rng.random(64) > 0.2)
        tree = sum_tree.update(sum_tree.init(64), jnp.arange(64), jnp.array(values))
        borders = np.cumsum(values.astype(np.float64))[:-1] / values.sum(dtype=np.float64)
        nearby = borders.astype(np.float32).view(np.int32)[:, None] + np.arange(-3, 4)
        drawn = draw(tree, jnp.array(nearby.ravel().astype(np.int32).view(np.float32)))
        assert (values[np.asarray(drawn)] > 0).all()


@pytest.mark.parametrize("fraction", [0.0, 0.5, 0.99999994, 1.0])
def test_a_leaf_of_zero_is_never_drawn(fraction):
    """Not at the very ends either, where rounding could fall on one."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        values = rng.random(100).astype(np.float32) ** 8 * (rng.random(100) < 0.2)
        values[rng.integers(100)] = 1e-6
        tree = sum_tree.update(sum_tree.init(100), jnp.arange(100), jnp.array(values))
        index = int(sum_tree.draw(tree, jnp.array([fraction]))[0])
        assert values[index] > 0


def test_an_index_that_comes_twice():
    tree = sum_tree.update(sum_tree.init(10), jnp.array([3, 3, 4]), jnp.array([1.0, 2.0, 5.0]))
    assert tree[0][3] in (1, 2)
    assert_exact(tree)
