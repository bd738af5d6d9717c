"""Event counts against a loop over single env steps; step sizes by hand."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from common.schedules import annealed_learning_rate, count_events


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
