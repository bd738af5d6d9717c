"""Event counts against a loop over single env steps."""

import jax.numpy as jnp
import pytest

from common.schedules import count_events


@pytest.mark.parametrize("num_envs", [1, 3, 8, 64])
@pytest.mark.parametrize("frequency", [1, 4, 10, 500])
@pytest.mark.parametrize("start", [0, 7, 100])
def test_counts_every_due_step_once(num_envs, frequency, start):
    for previous in range(0, 20 * num_envs, num_envs):
        steps = range(previous + 1, previous + num_envs + 1)
        due = sum(step > start and step % frequency == 0 for step in steps)
        counted = count_events(jnp.array(previous), jnp.array(steps[-1]), start, frequency)
        assert int(counted) == due
