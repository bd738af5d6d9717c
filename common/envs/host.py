"""Environments that live in Python, stepped from inside the compiled program by `io_callback`."""

import sys
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from jax import Array
from jax.experimental import io_callback

from common.envs.env import BackendStep
from common.errors import UserError, describe_failure, failures


class HostStep(NamedTuple):
    """One vector step as numpy arrays; the fields of `BackendStep` without `failed`."""

    obs: Any
    reward: Any
    terminated: Any
    truncated: Any
    raw_reward: Any
    game_over: Any


class Stepper(Protocol):
    """N environments stepped with numpy arrays, with NEXT_STEP autoreset."""

    num_envs: int
    observation_space: spaces.Space
    action_space: spaces.Space

    def reset(self) -> Any:
        """Start N episodes and return obs [N, *obs]."""

    def step(self, action: Any) -> HostStep:
        """Step all N environments once."""

    def render(self) -> np.ndarray:
        """Return an RGB frame of the first environment."""

    def close(self) -> None:
        """Free the environments."""


class HostBackend:
    """Backend around a `Stepper`.

    Only numpy runs inside the callback: JAX calls there can deadlock (jax issue 25861). If the
    environment raises, the callback keeps the error in `failure` and returns the last observation
    with `failed` set, so that the loop stops there and what was learned so far survives.
    """

    restorable = False

    def __init__(self, stepper: Stepper) -> None:
        self.stepper = stepper
        self.num_envs = stepper.num_envs
        self.observation_space = stepper.observation_space
        self.action_space = stepper.action_space
        self.failure: BaseException | None = None
        self._last_obs: Any = None

    def reset(self, key: Array) -> tuple[Any, Any]:
        """Start N episodes; their seeds were given when the environments were made."""
        try:
            self._last_obs = _as_32_bit(self.stepper.reset())
        except failures() as error:
            raise UserError(describe_failure(error)) from error
        return (), jax.tree.map(jnp.asarray, self._last_obs)

    def step(self, inner: Any, action: Any) -> tuple[Any, BackendStep]:
        """Step through an ordered callback."""
        n = self.num_envs
        flags, floats = (jax.ShapeDtypeStruct((n,), d) for d in (np.bool_, np.float32))
        obs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self._last_obs)
        failed = jax.ShapeDtypeStruct((), np.bool_)
        result = BackendStep(obs, floats, flags, flags, floats, flags, failed)
        return inner, io_callback(self._host_step, result, action, ordered=True)

    def _host_step(self, action: Any) -> BackendStep:
        try:
            if self.failure is not None:
                raise self.failure
            step = _as_32_bit(self.stepper.step(jax.tree.map(np.asarray, action)))
            self._last_obs = step.obs
            return BackendStep(**step._asdict(), failed=np.False_)
        # JAX would make a traceback of an exception that leaves a callback, Ctrl-C's too.
        except BaseException as error:
            self.failure = error
        no, zero = np.zeros(self.num_envs, np.bool_), np.zeros(self.num_envs, np.float32)
        return BackendStep(self._last_obs, zero, no, no, zero, no, failed=np.True_)

    def render(self, inner: Any) -> np.ndarray:
        """Return an RGB frame of the first environment."""
        return self.stepper.render()

    def close(self) -> None:
        """Free the environments; one that fails in it changes no result, and is only named."""
        try:
            self.stepper.close()
        except failures() as error:
            print(f"warning: close: {describe_failure(error)}", file=sys.stderr)


_NARROW = {np.dtype(f"{kind}8"): np.dtype(f"{kind}4") for kind in "fiu"}


def _as_32_bit(tree: Any) -> Any:
    def convert(x: Any) -> np.ndarray:
        x = np.asarray(x)
        narrow = x.astype(_NARROW.get(x.dtype, x.dtype), copy=False)
        if narrow.dtype != x.dtype and x.dtype.kind in "iu" and (narrow != x).any():
            raise UserError(
                f"the integers {x.min()} to {x.max()} do not fit into 32 bits; scale them in a "
                "wrapper"
            )
        return narrow

    return jax.tree.map(convert, tree)
