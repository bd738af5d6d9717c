"""Arithmetic of env steps: what falls due between two counts of them."""

import jax.numpy as jnp
from jax import Array


def count_events(previous: Array, step: Array, start: int, frequency: int) -> Array:
    """Return how many multiples of `frequency` lie in (previous, step] and above `start`.

    With N environments the count of env steps advances by N; every event that falls due in between
    happens, so that updates a step do not depend on N.
    """
    return jnp.maximum(step, start) // frequency - jnp.maximum(previous, start) // frequency
