"""Gymnasium environments for the tests of worker processes; importing this imports no JAX."""

import copy
import multiprocessing
import os
import signal
import sys
import time
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

BOX = spaces.Box(-1, 1, (3,), np.float64)
WHOLE = spaces.MultiDiscrete([3, 2], start=[1, -3])
SPACES: dict[str, tuple[spaces.Space, spaces.Space]] = {
    "box": (BOX, spaces.Discrete(3, start=2)),
    "image": (spaces.Box(0, 255, (5, 4, 3), np.uint8), BOX),
    "scalar": (spaces.Box(-2, 2, (), np.float32), spaces.Discrete(2)),
    "discrete": (spaces.Discrete(4, start=1), WHOLE),
    "multi-discrete": (WHOLE, WHOLE),
    "dict": (spaces.Dict(b=spaces.Discrete(3), a=BOX), spaces.Dict(x=spaces.Discrete(2), y=BOX)),
    "tuple": (spaces.Tuple((WHOLE, spaces.Dict(c=BOX))), spaces.Tuple((BOX, WHOLE))),
}


class RandomEnv(gym.Env):
    """Random rows and random ends of episodes, all of them drawn from the environment's seed."""

    def __init__(self, space: str) -> None:
        # Copies: a space that several environments share draws from one generator.
        self.observation_space, self.action_space = copy.deepcopy(SPACES[space])

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict]:
        assert self.action_space.contains(action), (action, self.action_space)
        ended, cut = self.np_random.random(2) < 0.05
        return self.observation_space.sample(), self.np_random.normal(), ended, cut, {"a": 1}


class ProcessEnv(gym.Env):
    """The observation says what its process is like; `fault` says what happens at step `at`."""

    def __init__(self, fault: str = "none", at: int = 1, delay: float = 0.0) -> None:
        self.fault, self.at, self.delay = fault, at, delay
        self.observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.steps, self.started = 0, False
        if fault == "construct" and multiprocessing.parent_process():
            raise RuntimeError("no such\nmaze")

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.started = True
        return self._obs(), {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict]:
        self.steps += 1
        time.sleep(self.delay)
        if self.steps == self.at:
            self._fail()
        return self._obs(), 1.0, self.steps % 20 == 0, False, {}

    def _fail(self) -> None:
        if self.fault == "raise":
            raise UnpicklableError(1, "the maze\nfell down")
        if self.fault == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "exit":
            sys.exit(7)

    def close(self) -> None:
        if self.fault == "hang" and self.started:
            time.sleep(1000)

    def _obs(self) -> np.ndarray:
        blocked = signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, set())
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
        return np.float32([os.getpid(), "jax" in sys.modules, blocked, cores])


class UnpicklableError(Exception):
    """Neither can it be pickled, nor made from its text."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(text)
        self.held = lambda: number


gym.register("ToyRandom-v0", RandomEnv)
gym.register("ToyProcess-v0", ProcessEnv)
