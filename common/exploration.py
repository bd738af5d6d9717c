"""Exploration: uniform discrete actions, and noise of continuous ones, perhaps correlated."""

import math

import jax
import jax.numpy as jnp
from jax import Array

from common.action_masks import mask_actions


def next_noise(key: Array, noise: Array, correlation: float) -> Array:
    """Return ε_t = ρ ε_{t-1} + √(1 - ρ²) ξ, ξ ~ N(0, 1), after `noise` [N, A].

    Each ε_t alone is standard normal; ρ = 0 makes them independent. This is the discretised
    Ornstein-Uhlenbeck process of Lillicrap et al. 2016 (θ = 0.15 in section 7 is ρ = 0.85) with its
    stationary deviation scaled to 1; it goes on across the ends of episodes.
    """
    fresh = jax.random.normal(key, noise.shape)
    return correlation * noise + math.sqrt(1 - correlation**2) * fresh


def uniform_action(noise: Array) -> Array:
    """Return actions uniform in [-1, 1] made of standard normal noise, as correlated as it is."""
    return jax.scipy.special.erf(noise / jnp.sqrt(2.0))


def random_action(key: Array, shape: tuple[int, ...], mask: Array | None) -> Array:
    """Return actions [N] drawn uniformly from A discrete ones that a mask [N, A] leaves.

    Args:
        key: of the draw.
        shape: (N, A).
        mask: what is available; None where everything is.
    """
    if mask is None:
        return jax.random.randint(key, shape[:1], 0, shape[1])
    return jax.random.categorical(key, mask_actions(jnp.zeros(shape), mask))
