"""Gymnasium environments in numpy alone, and the processes that step them.

Nothing here may import JAX, which would cost each process about a second and 200 MB.
"""

import importlib
import multiprocessing
import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.vector.async_vector_env import _async_worker
from gymnasium.vector.utils import create_empty_array

from common.errors import UserError, describe_failure

# The cores of this process before it was pinned to some of them, if it was.
cores_before_pinning: set[int] = set()


class _Checked(gym.Wrapper):
    """Refuses what a vector environment would cast or broadcast without a word.

    It drops `info`, which no one reads: a vector environment would stack it, and fails where its
    shapes or types change from step to step.
    """

    def reset(self, **kwargs: Any) -> tuple[Any, dict]:
        obs, _ = self.env.reset(**kwargs)
        _check_obs(self.observation_space, obs)
        return obs, {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict]:
        obs, reward, terminated, truncated, _ = self.env.step(action)
        _check_obs(self.observation_space, obs)
        if not isinstance(reward, float):  # as nearly all are, those of numpy too
            value = np.asarray(reward)
            if value.shape != () or not np.issubdtype(value.dtype, np.number):
                raise UserError(f"step returned the reward {reward!r}; return a number")
        for name, flag in (("terminated", terminated), ("truncated", truncated)):
            if not isinstance(flag, bool | np.bool_):
                raise UserError(f"step returned {name}={flag!r}; return a bool")
        return obs, reward, terminated, truncated, {}


def _check_obs(space: spaces.Space, obs: Any, name: str = "obs") -> None:
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = sub_spaces(space)
        if len(obs) != len(parts):
            raise UserError(f"{name} has {len(obs)} parts, its space {space} has {len(parts)}")
        for key, part in parts.items():
            _check_obs(part, obs[key], f"{name}[{key!r}]")
        return
    # All that follows takes a fifth of a vector step of small environments.
    exact = isinstance(obs, np.ndarray) and (obs.shape, obs.dtype) == (space.shape, space.dtype)
    if exact and isinstance(space, spaces.Box):
        return
    array, dtype = np.asarray(obs), space.dtype or np.dtype(np.float32)
    if array.shape != (space.shape or ()):
        raise UserError(f"{name} has shape {array.shape}, its space {space} has {space.shape}")
    if not np.can_cast(array.dtype, dtype, "same_kind"):
        raise UserError(
            f"{name} has dtype {array.dtype}, its space {space} has {dtype}; "
            "return observations of the space's dtype"
        )
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        count: Any = space.n if isinstance(space, spaces.Discrete) else space.nvec
        start: Any = space.start
        if ((array < start) | (array >= start + count)).any():
            raise UserError(f"{name} is {array}, outside its space {space}")


def sub_spaces(space: spaces.Dict | spaces.Tuple) -> dict[Any, spaces.Space]:
    """Return the parts of a Dict or Tuple space by key or index."""
    if isinstance(space, spaces.Dict):
        return dict(space.spaces)
    return dict(enumerate(space.spaces))


def make_vector_env(env: str | EnvSpec, options: dict[str, Any], count: int) -> SyncVectorEnv:
    """Make `count` checked copies of an environment, stepped one after the other."""

    def make_one() -> gym.Env:
        return _Checked(gym.make(env, **options))

    return SyncVectorEnv([make_one] * count, autoreset_mode=AutoresetMode.NEXT_STEP)


class Group(gym.Env):
    """The environments of one worker as a single one, every value of which is [len(seeds), ...].

    What goes wrong is returned under "failure" in the info: not every exception can be pickled.
    """

    def __init__(
        self, env: str | EnvSpec, options: dict[str, Any], seeds: list[int], module: str | None
    ) -> None:
        if module:
            importlib.import_module(module)
        self.seeds = seeds
        self.envs = make_vector_env(env, options, len(seeds))
        self.single_spaces = self.envs.single_observation_space, self.envs.single_action_space
        self.observation_space, self.action_space = (
            self.envs.observation_space,
            self.envs.action_space,
        )
        self.metadata: dict[str, Any] = {}

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict]:
        """Start the episodes, each with its own seed."""
        try:
            return self.envs.reset(seed=list(self.seeds))[0], {}
        except BaseException as error:
            return self._no_obs(), _failure(error)

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict]:
        """Step each environment once; one that ended is reset instead."""
        try:
            row: tuple = self.envs.step(action)
            return *row[:4], {}
        except BaseException as error:
            zero = np.zeros(len(self.seeds))
            return self._no_obs(), zero, zero > 0, zero > 0, _failure(error)

    def close(self) -> None:
        """Free the environments."""
        self.envs.close()

    def _no_obs(self) -> Any:
        return create_empty_array(self.envs.single_observation_space, len(self.seeds))


def _failure(error: BaseException) -> dict[str, Any]:
    return {"failure": (describe_failure(error), traceback.format_exc())}


def work(cores: set[int], index: int, make_env: Callable[[], gym.Env], *rest: Any) -> None:
    """Be a worker of an `AsyncVectorEnv`, for as long as the process that made it lives."""
    if cores:
        os.sched_setaffinity(0, cores)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        _async_worker(index, make_env, *rest)
    except (EOFError, OSError):
        os._exit(1)  # the other end of the pipe is gone
    except Exception as error:
        print(f"environment worker {index}: {describe_failure(error)}", file=sys.stderr)
        os._exit(1)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
