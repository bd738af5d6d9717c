"""Any Gymnasium environment: N copies stepped one after the other in numpy."""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from common.envs.env import failures, sub_spaces, to_space
from common.envs.host import HostStep
from common.errors import UserError, one_line


class _Checked(gym.Wrapper):
    """Refuses what a vector environment would cast or broadcast without a word."""

    def reset(self, **kwargs: Any) -> tuple[Any, dict]:
        obs, info = self.env.reset(**kwargs)
        _check_obs(self.observation_space, obs)
        return obs, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        _check_obs(self.observation_space, obs)
        if np.shape(np.asarray(reward)) != () or not np.issubdtype(
            np.asarray(reward).dtype, np.number
        ):
            raise UserError(f"step returned the reward {reward!r}; return a number")
        for name, flag in (("terminated", terminated), ("truncated", truncated)):
            if not isinstance(flag, bool | np.bool_):
                raise UserError(f"step returned {name}={flag!r}; return a bool")
        return obs, reward, terminated, truncated, info


def _check_obs(space: spaces.Space, obs: Any, name: str = "obs") -> None:
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = sub_spaces(space)
        if len(obs) != len(parts):
            raise UserError(f"{name} has {len(obs)} parts, its space {space} has {len(parts)}")
        for key, part in parts.items():
            _check_obs(part, obs[key], f"{name}[{key!r}]")
        return
    array, dtype = np.asarray(obs), space.dtype or np.dtype(np.float32)
    if array.shape != (space.shape or ()):
        raise UserError(f"{name} has shape {array.shape}, its space {space} has {space.shape}")
    if not np.can_cast(array.dtype, dtype, "same_kind"):
        raise UserError(
            f"{name} has dtype {array.dtype}, its space {space} has {dtype}; "
            "return observations of the space's dtype"
        )


class GymnasiumStepper:
    """N copies of a registered Gymnasium environment, `seeds[i]` for copy i."""

    def __init__(self, env_id: str, seeds: list[int], kwargs: dict[str, Any], render: bool) -> None:
        # Only where it is needed: not every environment has a render_mode.
        options = kwargs | ({"render_mode": "rgb_array"} if render else {})

        def make_one() -> gym.Env:
            return _Checked(gym.make(env_id, **options))

        try:
            self.envs = SyncVectorEnv(
                [make_one] * len(seeds), autoreset_mode=AutoresetMode.NEXT_STEP
            )
        except failures() as error:
            raise UserError(
                f"could not make {env_id} with the options {kwargs or 'none'}: "
                f"{type(error).__name__}: {one_line(error)}; "
                "check --env-kwargs and what the environment needs installed"
            ) from error
        self.seeds = seeds
        self.num_envs = len(seeds)
        self.observation_space = self.envs.single_observation_space
        self.action_space = self.envs.single_action_space

    def reset(self) -> Any:
        """Start N episodes and return obs [N, *obs]."""
        return self.envs.reset(seed=list(self.seeds))[0]

    def step(self, action: Any) -> HostStep:
        """Step all environments once; a copy that ended is reset instead."""
        action = to_space(self.action_space, action)
        result: tuple = self.envs.step(action)
        obs, reward, terminated, truncated, _ = result
        return HostStep(obs, reward, terminated, truncated, reward, terminated | truncated)

    def render(self) -> np.ndarray:
        """Return an RGB frame of the first environment."""
        try:
            frame: Any = self.envs.envs[0].render()
        except failures() as error:
            raise UserError(f"the environment cannot render: {error!r}") from error
        if not isinstance(frame, np.ndarray):
            raise UserError(f"the environment rendered {type(frame).__name__}, not an RGB array")
        return frame

    def close(self) -> None:
        """Free the environments."""
        self.envs.close()
