"""Event counts against a loop over single env steps."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from common.schedules import count_events, updates_until


@pytest.mark.parametrize("num_envs", [1, 3, 8, 64])
@pytest.mark.parametrize("frequency", [1, 4, 10, 500])
@pytest.mark.parametrize("start", [0, 7, 100])
def test_counts_every_due_step_once(num_envs, frequency, start):
    for previous in range(0, 20 * num_envs, num_envs):
        steps = range(previous + 1, previous + num_envs + 1)
        due = sum(step > start and step % frequency == 0 for step in steps)
        counted = count_events(jnp.array(previous), jnp.array(steps[-1]), start, frequency)
        assert int(counted) == due


@pytest.mark.parametrize(
    ("text", "ratio"),
    [
        *(("0.001", (1, 1000)), ("0.1", (1, 10)), ("0.25", (1, 4)), ("1/3", (1, 3))),
        *(("0.997", (997, 1000)), ("1", (1, 1)), ("2.5", (5, 2)), ("16", (16, 1))),
    ],
)
@pytest.mark.parametrize("num_envs", [1, 3, 64])
def test_updates_until_is_exact(text, ratio, num_envs):
    start, steps = 100, np.arange(0, 4_000 * num_envs, num_envs)
    due = jax.jit(updates_until, static_argnums=(1, 2))(steps, start, float(Fraction(text)))
    expected = [max(int(step) - start, 0) * ratio[0] // ratio[1] for step in steps]
    np.testing.assert_array_equal(due, expected)
    assert not due[steps <= start].any()


@pytest.mark.parametrize(("ratio", "updates"), [(0.001, 2), (0.1, 200), (0.999, 1_998), (1, 2_000)])
def test_updates_until_does_not_overflow(ratio, updates):
    steps = jnp.array([2_000_000_000, 2_000_001_000], jnp.int32)
    due = updates_until(steps, 1_000, ratio)
    assert due.tolist() == [(updates * 10**6) - updates // 2, updates * 10**6]


def test_updates_until_takes_a_ratio_of_large_parts():
    # 999 * 3,000.001 is 2,997,000.999.
    assert int(updates_until(jnp.int32(999), 0, 3000.001)) == 2_997_000
