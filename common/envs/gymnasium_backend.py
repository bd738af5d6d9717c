"""Any Gymnasium environment: N copies stepped in numpy, in this process or in K workers."""

import atexit
import contextlib
import functools
import multiprocessing
import signal
import sys
import time
import types
from collections.abc import Generator
from multiprocessing import resource_tracker
from typing import Any

import gymnasium as gym
import jax
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode

from common import env_worker
from common.envs.env import to_space
from common.envs.host import HostStep
from common.errors import UserError, failures, one_line

SECONDS_TO_CLOSE = 5


class GymnasiumStepper:
    """N copies of a registered Gymnasium environment, `seeds[i]` for copy i."""

    def __init__(self, env_id: str, seeds: list[int], kwargs: dict[str, Any], render: bool) -> None:
        # Only where it is needed: not every environment has a render_mode.
        options = kwargs | ({"render_mode": "rgb_array"} if render else {})
        with _making(env_id, kwargs):
            self.envs = env_worker.make_vector_env(env_id, options, len(seeds))
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
        if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3:
            raise UserError(
                f"the environment rendered {frame.dtype} {frame.shape}, not an RGB array of uint8"
            )
        return frame

    def close(self) -> None:
        """Free the environments."""
        self.envs.close()


class _Workers(AsyncVectorEnv):
    """Processes that end whatever they do, also if one of them could not make its environments."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.parent_pipes, self.processes = [], []
        try:
            super().__init__(*args, **kwargs)
        except BaseException:
            self.close()
            raise

    def close_extras(
        self, timeout: float | None = None, terminate: bool = False, **kwargs: Any
    ) -> None:
        """Do what Gymnasium's own way, which waits for a worker for ever, does in a few seconds."""
        for pipe in self.parent_pipes:
            with contextlib.suppress(OSError):
                pipe.send(("close", None))
        end, late = time.monotonic() + SECONDS_TO_CLOSE, 0
        for process in self.processes:
            process.join(max(0, end - time.monotonic()))
            late += process.is_alive()
            process.kill()
            process.join()
        if late:
            print(
                f"warning: {late} of {len(self.processes)} environment workers did not close "
                f"within {SECONDS_TO_CLOSE} s and were killed",
                file=sys.stderr,
            )


class WorkerStepper:
    """The same copies in K processes of N / K copies each; `module` registers the environment."""

    def __init__(
        self,
        env_id: str,
        seeds: list[int],
        kwargs: dict[str, Any],
        workers: int,
        module: str | None,
    ) -> None:
        self.seeds, self.num_envs, self.size = seeds, len(seeds), len(seeds) // workers
        # The entry itself: a worker need not know what registered it.
        env = gym.registry.get(env_id, env_id)
        shares = [seeds[i : i + self.size] for i in range(0, self.num_envs, self.size)]
        with _making(env_id, kwargs), _clean_start():
            self.envs = _Workers(
                [functools.partial(env_worker.Group, env, kwargs, s, module) for s in shares],
                context="forkserver",
                worker=functools.partial(env_worker.work, env_worker.cores_before_pinning),
                autoreset_mode=AutoresetMode.DISABLED,
            )
        # Python would wait at its end for processes that are deaf to its SIGTERM.
        atexit.register(self.close)
        self.observation_space, self.action_space = self.envs.get_attr("single_spaces")[0]

    def reset(self) -> Any:
        """Start N episodes and return obs [N, *obs]."""
        with self._all_alive():
            first: tuple = self.envs.reset()
        _raise_failure(first[-1])
        return self._joined(first[0])

    def step(self, action: Any) -> HostStep:
        """Step all environments once; a copy that ended is reset instead."""
        action = to_space(self.action_space, action)
        with self._all_alive():
            row: tuple = self.envs.step(jax.tree.map(self._shared_out, action))
        _raise_failure(row[-1])
        obs, reward, terminated, truncated = map(self._joined, row[:-1])
        return HostStep(obs, reward, terminated, truncated, reward, terminated | truncated)

    def render(self) -> np.ndarray:
        """Refuse: frames cross no border of a process."""
        raise UserError("environments in worker processes cannot render; use --env-workers 0")

    def close(self) -> None:
        """Free the environments, and end the processes whatever they do."""
        atexit.unregister(self.close)
        self.envs.close()

    def _shared_out(self, x: np.ndarray) -> np.ndarray:
        return x.reshape(-1, self.size, *x.shape[1:])  # [K, N / K, ...]

    def _joined(self, tree: Any) -> Any:
        return jax.tree.map(lambda x: x.reshape(self.num_envs, *x.shape[2:]), tree)  # [N, ...]

    @contextlib.contextmanager
    def _all_alive(self) -> Generator[None, None, None]:
        try:
            yield
        except (EOFError, OSError) as error:
            processes = self.envs.processes
            for process in processes:
                process.join(0.1)  # the exit code may come a little later than the end of the pipe
            codes = {i: p.exitcode for i, p in enumerate(processes) if p.exitcode is not None}
            raise UserError(
                f"environment workers ended, with the exit codes {codes}; -9 may be the system's "
                "for lack of memory; lower --env-workers, or see what ends them by --env-workers 0"
            ) from error


def _raise_failure(info: dict[str, Any]) -> None:
    """Raise the first failure of a worker, with the traceback that it had there."""
    found = [failure for failure in info.get("failure", ()) if failure is not None]
    if found:
        text, trace = found[0]
        error = UserError(text)
        error.add_note(trace)
        raise error


@contextlib.contextmanager
def _making(env_id: str, kwargs: dict[str, Any]) -> Generator[None, None, None]:
    """Turn whatever an environment raises when it is made into a UserError."""
    try:
        yield
    except failures() as error:
        raise UserError(
            f"could not make {env_id} with the options {kwargs or 'none'}: "
            f"{type(error).__name__}: {one_line(error)}; "
            "check --env-kwargs and what the environment needs installed"
        ) from error


@contextlib.contextmanager
def _clean_start() -> Generator[None, None, None]:
    """Start processes that are deaf to signals and do not run the program's file, with its JAX.

    A fork of this process, with the threads of JAX, could hang; the fork server has none.
    """
    multiprocessing.set_forkserver_preload(["gymnasium.vector"])
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        resource_tracker.ensure_running()  # first, because starting it undoes the next mask
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        sys.modules["__main__"] = main
