"""envpool: C++ environments, stepped by XLA itself wherever their dtypes allow it."""

import functools
import importlib
import math
import os
import subprocess
import sys
from typing import Any

import envpool
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from jax import Array

from common.envs.env import BackendStep
from common.envs.host import HostStep
from common.envs.wide_fields import wide_xla
from common.errors import UserError, one_line
from common.ranges import Range, accepted, fits

CHEAP_FAMILIES = ("classic_control", "toy_text", "box2d", "minigrid")


def make_pool(env_id: str, seeds: list[int], kwargs: dict[str, Any], training: bool) -> Any:
    """Make a pool with `seeds[i]` for environment i and the Atari preset where it applies.

    Atari trains on one life an episode and rewards clipped to their sign, and is evaluated on full
    games and raw rewards (Mnih et al. 2015); `kwargs` win over the preset.

    Raises:
        UserError: if envpool refuses the options, several players share the environment, or it is
            not the task of its name.
    """
    if env_id in _WITHOUT_CONTACT:
        raise UserError(
            f"envpool steps {env_id} with MuJoCo 3, where the arm passes through the object; give "
            "--env-id Pusher-v5, or Pusher-v4 with --env-backend gymnasium and, on Python 3.11, "
            "pip install 'gymnasium[mujoco]' 'mujoco<3'"
        )
    defaults: dict[str, Any] = {"num_threads": _num_threads(env_id, len(seeds))}
    if is_atari(env_id) and training:
        defaults |= {"episodic_life": True, "reward_clip": True}
    options = defaults | kwargs
    try:
        _check_options(env_id, kwargs)
        pool = envpool.make(
            env_id, env_type="gymnasium", num_envs=len(seeds), seed=seeds, **options
        )
    except UserError:
        raise
    except Exception as error:
        raise UserError(_refusal(env_id, kwargs, error)) from error
    if pool.config["max_num_players"] > 1:
        raise UserError(f"{env_id} has several players; use a single-agent environment")
    return pool


# https://github.com/Farama-Foundation/Gymnasium/issues/950, for which Gymnasium refuses it as well.
_WITHOUT_CONTACT = ("Pusher-v2", "Pusher-v4")
_OURS = {
    *("num_envs", "batch_size", "max_num_players", "seed", "env_seed"),
    *("base_path", "gym_reset_return_info"),
}
_LIMITS = {
    "max_episode_steps": Range(at_least=1),
    "frame_skip": Range(at_least=1),
    "num_threads": Range(at_least=0, at_most=1024),  # more than the system grants end the process
}
_REHEARSAL = """
import ast, sys, envpool
options = ast.literal_eval(sys.argv[2])
envpool.make(sys.argv[1], env_type="gymnasium", num_envs=1, seed=1, **options).reset()
"""


def _defaults(env_id: str) -> dict[str, Any]:
    """Return the options of an environment that a user may set."""
    module, name, _ = envpool.registration.registry.specs[env_id]
    spec = getattr(importlib.import_module(module), name)
    pairs = zip(spec._config_keys, spec._default_config_values, strict=True)
    return {key: value for key, value in pairs if key not in _OURS}


def _check_options(env_id: str, kwargs: dict[str, Any]) -> None:
    """Refuse options that envpool takes without a word, or that end the process.

    Raises:
        TypeError: the option follows from num_envs and seed.
        UserError: the value has the wrong type, is out of range, or is more than envpool bears.
    """
    if not _OURS.isdisjoint(kwargs):
        raise TypeError("options that follow from num_envs and seed")
    defaults, unsure = _defaults(env_id), {}
    for name in filter(defaults.__contains__, kwargs):
        value, kind = kwargs[name], type(defaults[name])
        option = f"{env_id} was given --env-kwargs {name}={value}"
        if kind in (int, float, bool, str) and not fits(value, kind):
            raise UserError(f"{option}; give {accepted(kind)}")
        if kind is float and not math.isfinite(value):
            raise UserError(f"{option}; give a finite number")
        if name in _LIMITS and not _LIMITS[name].holds(value):
            raise UserError(f"{option}; give a number {_LIMITS[name]}")
        if kind not in (float, bool) and name not in _LIMITS:
            unsure[name] = value
    if unsure:
        _rehearse(env_id, repr(unsure))


@functools.cache
def _rehearse(env_id: str, options: str) -> None:
    """Make and reset an environment in another process: some options end theirs by a signal."""
    command = [sys.executable, "-c", _REHEARSAL, env_id, options]
    subprocess.run(command, capture_output=True, timeout=60, check=True, start_new_session=True)


def _refusal(env_id: str, kwargs: dict[str, Any], error: Exception) -> str:
    if not kwargs or isinstance(error, ImportError):
        return f"envpool could not make {env_id}: {one_line(error)}"
    return (
        f"envpool refused the options {kwargs} for {env_id}; "
        f"--env-kwargs accepts {', '.join(sorted(_defaults(env_id)))}"
    )


def is_atari(env_id: str) -> bool:
    """Return whether an id that envpool knows is an Atari game."""
    return _family(env_id) == "atari"


def _family(env_id: str) -> str:
    return envpool.registration.registry.specs[env_id][0].removeprefix("envpool.").split(".")[0]


def _num_threads(env_id: str, num_envs: int) -> int:
    """One thread for cheap environments: handing work over costs more than their step."""
    if _family(env_id) in CHEAP_FAMILIES:
        return 1
    return min(num_envs, len(os.sched_getaffinity(0)))


def wide_dtypes(pool: Any) -> set[Any]:
    """Return the dtypes of 64 bits among the action and state fields of a pool."""
    fields = {**pool.spec.state_array_spec, **pool.spec.action_array_spec}.values()
    return {np.dtype(field.dtype) for field in fields if np.dtype(field.dtype).itemsize == 8}


def _mended(space: spaces.Space) -> spaces.Space:
    """Replace bounds that envpool reports as the smallest positive float by minus infinity."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict({k: _mended(s) for k, s in space.spaces.items()})
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        limits = np.finfo(space.dtype)
        low = np.where(space.low == limits.tiny, -np.inf, space.low).astype(np.float32)
        high = np.where(space.high == limits.max, np.inf, space.high).astype(np.float32)
        return spaces.Box(low, high, dtype=np.float32)
    return space


class XlaPoolBackend:
    """A pool stepped inside the compiled program.

    `pool.xla()` bakes the pool's address into the program: this object must live as long as the
    program, and another pool needs another program. float64 fields are float32 here; a pool with
    64-bit integers needs a `PoolStepper`.
    """

    restorable = False
    failure = None

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self.num_envs = pool.num_envs
        self.observation_space = _mended(pool.observation_space)
        self.action_space = _mended(pool.action_space)
        if wide_dtypes(pool):
            self._handle, self._step = wide_xla(pool)
        else:
            self._handle, _, _, self._step = pool.xla()

    def reset(self, key: Array) -> tuple[Any, Any]:
        """Start N episodes; their seeds were given when the pool was made."""
        obs, _ = self.pool.reset()
        return jnp.array(self._handle), jax.tree.map(jnp.asarray, obs)

    def step(self, inner: Any, action: Any) -> tuple[Any, BackendStep]:
        """Step through the pool's XLA custom call."""
        dtype = self.pool.spec.action_array_spec[self.pool._action_keys[-1]].dtype
        action = action.astype(jax.dtypes.canonicalize_dtype(dtype))
        inner, (obs, reward, terminated, truncated, info) = self._step(inner, action)
        raw_reward, game_over = _full_game(reward, terminated, truncated, info)
        no = jnp.zeros((), bool)
        return inner, BackendStep(obs, reward, terminated, truncated, raw_reward, game_over, no)

    def render(self, inner: Any) -> np.ndarray:
        """Return an RGB frame of the first environment."""
        return _render(self.pool)

    def close(self) -> None:
        """Free the environments."""
        self.pool.close()


class PoolStepper:
    """A pool stepped with numpy arrays, where the program cannot step it itself."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self.num_envs = pool.num_envs
        self.observation_space = _mended(pool.observation_space)
        self.action_space = _mended(pool.action_space)

    def reset(self) -> Any:
        """Start N episodes and return obs [N, *obs]."""
        return self.pool.reset()[0]

    def step(self, action: Any) -> HostStep:
        """Step all environments once; a copy that ended is reset instead."""
        obs, reward, terminated, truncated, info = self.pool.step(action)
        return HostStep(
            obs, reward, terminated, truncated, *_full_game(reward, terminated, truncated, info)
        )

    def render(self) -> np.ndarray:
        """Return an RGB frame of the first environment."""
        return _render(self.pool)

    def close(self) -> None:
        """Free the environments."""
        self.pool.close()


def _full_game(reward: Any, terminated: Any, truncated: Any, info: dict) -> tuple[Any, Any]:
    """Return the unclipped reward and whether the whole game, not only a life, ended."""
    if "lives" not in info:
        return reward, terminated | truncated
    return info["reward"], (info["terminated"] == 1) | truncated


def _render(pool: Any) -> np.ndarray:
    try:
        return np.asarray(pool.render(env_ids=0)[0])
    except Exception as error:
        raise UserError(f"envpool cannot render this environment: {error}") from error
