"""Event counts against a loop over single env steps; step sizes by hand."""

from fractions import Fraction
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from common.schedules import annealed_learning_rate, count_events, updates_until


@pytest.mark.parametrize("num_envs", [1, 3, 8, 64])
@pytest.mark.parametrize("frequency", [1, 4, 10, 500])
@pytest.mark.parametrize("start", [0, 7, 100])
def test_counts_every_due_step_once(num_envs, frequency, start):
    for previous in range(0, 20 * num_envs, num_envs):
        steps = range(previous + 1, previous + num_envs + 1)
        due = sum(step > start and step % frequency == 0 for step in steps)
        counted = count_events(jnp.array(previous), jnp.array(steps[-1]), start, frequency)
        assert int(counted) == due


def schedule(anneal_lr, total_timesteps=1000):
    """Of 10 rollouts of 100 env steps with 6 updates each."""
    fields = dict(num_envs=4, num_steps=25, learning_rate=0.3, anneal_lr=anneal_lr)
    return annealed_learning_rate(SimpleNamespace(total_timesteps=total_timesteps, **fields), 6)


def test_annealed_learning_rate():
    updates = np.array([0, 15, 30, 59, 60, 1000])
    expected = [0.3, 0.225, 0.15, 0.005, 0, 0]
    np.testing.assert_allclose([schedule(True)(i) for i in updates], expected, atol=1e-7)


def test_a_cut_rollout_has_no_updates():
    for steps in (1000, 1004, 1096):
        np.testing.assert_allclose(schedule(True, steps)(30), 0.15, rtol=1e-6)
        assert schedule(True, steps)(60) == 0


def test_without_anneal_lr_the_step_size_stays():
    np.testing.assert_allclose([schedule(False)(i) for i in (0, 30, 60, 1000)], 0.3, rtol=1e-6)


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
