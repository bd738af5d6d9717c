"""What falls due between two counts of env steps."""

from fractions import Fraction

import jax.numpy as jnp
from jax import Array


def count_events(previous: Array, step: Array, start: int, frequency: int) -> Array:
    """Return how many multiples of `frequency` lie in (previous, step] and above `start`.

    With N environments the count of env steps advances by N; every event that falls due in between
    happens, so that updates a step do not depend on N.
    """
    return jnp.maximum(step, start) // frequency - jnp.maximum(previous, start) // frequency


def updates_until(step: Array, start: int, updates_per_step: float) -> Array:
    """Return how many updates are due after `step` env steps if the first `start` have none.

    The ratio is taken as a fraction with a denominator up to 1,000, so that the count is exact.
    """
    ratio = Fraction(updates_per_step).limit_denominator(1_000)
    steps = jnp.maximum(step - start, 0)
    # In parts, or the product would overflow.
    each, more = divmod(ratio.numerator, ratio.denominator)
    whole, rest = steps // ratio.denominator, steps % ratio.denominator
    return steps * each + whole * more + rest * more // ratio.denominator
