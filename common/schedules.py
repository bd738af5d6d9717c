"""What falls due between two counts of env steps, and step sizes that fall over a run."""

from fractions import Fraction
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


def updates_until(step: Array, start: int, updates_per_step: float) -> Array:
    """Return how many updates are due after `step` env steps if the first `start` have none.

    The ratio is taken as a fraction with a denominator up to 1,000, so that the count is exact.
    """
    ratio = Fraction(updates_per_step).limit_denominator(1_000)
    steps = jnp.maximum(step - start, 0)
    # In two parts, or the product would overflow.
    whole, rest = steps // ratio.denominator, steps % ratio.denominator
    return whole * ratio.numerator + rest * ratio.numerator // ratio.denominator


def annealed_learning_rate(config: Any, updates_per_rollout: int) -> optax.Schedule:
    """Return `learning_rate`, falling linearly to 0 over the run's updates with `anneal_lr`."""
    num_rollouts = config.total_timesteps // (config.num_envs * config.num_steps)
    end = 0.0 if config.anneal_lr else config.learning_rate
    return optax.linear_schedule(config.learning_rate, end, num_rollouts * updates_per_rollout)
