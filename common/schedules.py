"""What falls due between two counts of env steps, and step sizes that fall over a run."""

from typing import Any

import jax.numpy as jnp
import optax
from jax import Array


def count_events(previous: Array, step: Array, start: int, frequency: int) -> Array:
    """Return how many multiples of `frequency` lie in (previous, step] and above `start`.

    With N environments the count of env steps advances by N; every event that falls due in between
    happens, so that updates a step do not depend on N.
    """
    return jnp.maximum(step, start) // frequency - jnp.maximum(previous, start) // frequency


def annealed_learning_rate(config: Any, updates_per_rollout: int) -> optax.Schedule:
    """Return `learning_rate`, falling linearly to 0 over the run's updates with `anneal_lr`."""
    num_rollouts = config.total_timesteps // (config.num_envs * config.num_steps)
    end = 0.0 if config.anneal_lr else config.learning_rate
    return optax.linear_schedule(config.learning_rate, end, num_rollouts * updates_per_rollout)
