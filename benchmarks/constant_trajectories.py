"""A Trainer whose trajectories are zeros, to measure what carries them."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from common.envs import EpisodeSummary
from common.rollout import Trajectory


@dataclass(frozen=True)
class Config:
    """20 steps of 8 environments with Atari's observations: 4.5 MB a trajectory."""

    seed: int = 1
    num_envs: int = 8
    num_steps: int = 20
    total_timesteps: int = 2**30
    log_frequency: int = 16_000
    obs_shape: tuple[int, ...] = (4, 84, 84)


class EnvState(NamedTuple):
    """What a logging interval counts."""

    summary: EpisodeSummary


class LearnerState(NamedTuple):
    """No parameters."""

    params: Any
    opt_state: Any


class TrainState(NamedTuple):
    """Nothing but the step."""

    learner: LearnerState
    env: EnvState
    step: Array


class Trainer:
    """Collects zeros, and adds them up."""

    pace = "asynchronous"

    def __init__(self, config: Config):
        self.config = config
        env = EnvState(EpisodeSummary(*(jnp.zeros(()) for _ in EpisodeSummary._fields)))
        self.env = SimpleNamespace(reset_summary=lambda state: state, check=lambda state: None)
        self.agent = None
        self.state = TrainState(LearnerState((), ()), env, jnp.zeros((), jnp.int32))

    def zero_metrics(self, state: TrainState) -> dict[str, Array]:
        """The sum that shows that the trajectories were read."""
        return {"sum": jnp.zeros(())}

    def collect_trajectory(self, state: TrainState) -> tuple[TrainState, Trajectory, Array]:
        """Zeros."""
        config = self.config
        shape = config.num_steps, config.num_envs, *config.obs_shape
        step = state.step + config.num_steps * config.num_envs
        obs = jnp.zeros(shape, jnp.uint8)
        return state._replace(step=step), Trajectory(obs, ()), jnp.ones((), bool)

    def learn_trajectory(
        self, state: TrainState, metrics: dict[str, Array], trajectory: Trajectory
    ) -> tuple[TrainState, dict[str, Array]]:
        """Read every byte, and learn nothing."""
        return state, {"sum": metrics["sum"] + trajectory.rollout.sum(dtype=jnp.float32)}
