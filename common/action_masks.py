"""Masks of actions that an observation rules out: the key `action_mask` of a Dict observation.

The convention of PettingZoo, Tianshou and RLlib: 1 or True for each action that is available now.
A mask without any, as at the end of an episode, rules out nothing.
"""

from typing import Any

import jax.numpy as jnp
from gymnasium import spaces
from jax import Array

MASK_KEY = "action_mask"
# Finite, because an infinite value times a discount or a weight of 0 would be NaN; its exp is 0.
UNAVAILABLE = -1e9


def action_mask(obs: Any) -> Array | None:
    """Return the mask [..., A] that observations [..., *obs] hold, None where they hold none."""
    return obs[MASK_KEY] != 0 if isinstance(obs, dict) and MASK_KEY in obs else None


def mask_actions(values: Array, mask: Array | None) -> Array:
    """Return q_values or logits [..., A], -1e9 for the actions that a mask [..., A] rules out."""
    if mask is None:
        return values
    return jnp.where(mask | ~mask.any(axis=-1, keepdims=True), values, UNAVAILABLE)


def without_mask(space: spaces.Space) -> spaces.Space:
    """Return the part of an observation space that says something about the state."""
    if isinstance(space, spaces.Dict) and MASK_KEY in space.spaces:
        return spaces.Dict({key: part for key, part in space.spaces.items() if key != MASK_KEY})
    return space
