"""Gymnasium environments that fail in one chosen way, for the tests of error messages.

`--env-module failing_envs --env-id Failing-v0 --env-kwargs fault=raise at=100` makes every copy
fail at its step 100. With `once=PATH` a copy fails only if that file does not exist, and makes it.
"""

import sys
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

EPISODE = 20


class Failing(gym.Env):
    """Four numbers, two actions, 20 steps an episode, and one fault."""

    def __init__(
        self, fault: str = "none", at: int = 100, once: str = "", closing: bool = False
    ) -> None:
        self.fault, self.at, self.once, self.closing = fault, at, once, closing
        self.observation_space: spaces.Space = spaces.Box(-1, 1, (4,), np.float32)
        self.action_space: spaces.Space = spaces.Discrete(2)
        if fault == "space":
            self.observation_space = spaces.Text(8)
        if fault == "construct":
            raise RuntimeError("no such\nmaze")
        self.steps = 0
        if at == 0:
            self._leave()

    def _leave(self) -> None:
        if self.fault == "exit":
            sys.exit(0)
        if self.fault == "interrupt":
            raise KeyboardInterrupt

    def close(self) -> None:
        if self.closing:
            sys.exit(0)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        if self.at == 1:
            self._leave()
        if self.fault == "reset":
            raise RuntimeError("the maze is shut")
        if self.fault == "reset_shape":
            return np.zeros(3, np.float32), {}
        self.left = EPISODE
        return self._obs(), {}

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict]:
        self.steps += 1
        self.left -= 1
        obs, reward, terminated = self._obs(), 1.0, self.left == 0
        fault = self.fault if self._is_due() else "none"
        if fault != "none":
            self._leave()
        if fault == "hang":
            time.sleep(3600)
        if fault == "raise":
            raise RuntimeError("the maze fell down")
        if fault == "nan_obs":
            obs = np.full(4, np.nan, np.float32)
        if fault == "dtype":
            obs = obs.astype(np.complex64)
        if fault == "shape":
            obs = np.zeros(3, np.float32)
        special: dict[str, Any] = {
            "nan_reward": np.nan,
            "inf_reward": np.inf,
            "text_reward": "ten",
            "huge_reward": 1e30,
        }
        return obs, special.get(fault, reward), "yes" if fault == "flag" else terminated, False, {}

    def _is_due(self) -> bool:
        if self.steps < self.at or (self.once and Path(self.once).exists()):
            return False
        if self.once:
            Path(self.once).touch()
        return True

    def _obs(self) -> np.ndarray:
        return self.np_random.uniform(-1, 1, 4).astype(np.float32)


gym.register("Failing-v0", entry_point=Failing)
