"""Collect rollouts of an actor-critic's Trainer outside its training loop."""

from collections.abc import Callable
from typing import Any

import jax

from common.rollout import collect_rollout


def rollout_collector(trainer: Any) -> Callable[[Any], tuple]:
    """state -> (state, rollout [T, N, ...], whether it is complete), compiled."""
    config = trainer.config

    def collect(state: Any) -> tuple:
        steps_left = (config.total_timesteps - state.step) // config.num_envs
        args = trainer.env, trainer._run_collect, state, config.num_steps, steps_left
        return collect_rollout(*args)

    return jax.jit(collect)
