"""Exploration noise of continuous actions: normal, and perhaps correlated in time."""

import math

import jax
import jax.numpy as jnp
from jax import Array


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
