"""An environment whose steps take a millisecond of waiting: a simulator, or a robot."""

import time
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

STEP_SECONDS = 0.001


class Sleeping(gym.Env):
    """Four numbers, two actions, 100 steps an episode."""

    observation_space = spaces.Box(-1, 1, (4,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        """Start an episode."""
        super().reset(seed=seed)
        self._left = 100
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        """Wait."""
        time.sleep(STEP_SECONDS)
        self._left -= 1
        return np.zeros(4, np.float32), 1.0, self._left == 0, False, {}


gym.register("Sleeping-v0", entry_point=Sleeping)
