"""The environment contract: N parallel environments with Gymnasium's NEXT_STEP autoreset.

A backend steps environments; `Env` adds what every algorithm needs on top of any backend: the
validity of each row, the raw episode returns, and checks of actions, observations and rewards.

    row            t        t + 1             t + 2 (next episode)
    obs            s_t      s_{t+1} (final)   s_0
    action         a_t      ignored           a_0
    reward         r_t      0                 r_0
    valid          1        0                 1

The step that ends an episode returns the final observation; the following step ignores its action
and returns the first observation of the next episode. So `obs` of row t + 1 is always the true
next observation of row t, and `valid = ~ended` marks the rows that hold no transition.
"""

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from jax import Array, lax

from common.env_worker import sub_spaces
from common.errors import UserError, describe_failure, failures

ACTION_OUT_OF_RANGE, NOT_FINITE, HOST_FAILURE = 1, 2, 3


class TimeStep(NamedTuple):
    """What one vector step returns to the learner."""

    obs: Any  # [N, *obs], the final observation where the episode ended
    reward: Array  # [N] float32, as the learner trains on it (clipped where the preset clips)
    terminated: Array  # [N] bool, the MDP ended: the value of `obs` is zero
    truncated: Array  # [N] bool, a time limit cut the episode: `obs` still has a value


class BackendStep(NamedTuple):
    """What one vector step of a backend returns to `Env`: JAX arrays, or numpy on the host."""

    obs: Any  # [N, *obs]
    reward: Any  # [N]
    terminated: Any  # [N]
    truncated: Any  # [N]
    raw_reward: Any  # [N] reward before clipping
    game_over: Any  # [N] the whole game ended, not only a life
    failed: Any  # [] bool, the environment raised; `Backend.failure` says why


class Backend(Protocol):
    """What `Env` needs of a way to step N environments."""

    num_envs: int
    observation_space: spaces.Space
    action_space: spaces.Space
    restorable: bool  # a saved `inner` continues the very same episodes
    failure: BaseException | None  # why `failed` was set

    def reset(self, key: Array) -> tuple[Any, Any]:
        """Start N episodes: a key -> (inner state, obs [N, *obs])."""

    def step(self, inner: Any, action: Any) -> tuple[Any, BackendStep]:
        """Step all N environments once; traceable."""

    def render(self, inner: Any) -> np.ndarray:
        """Return an RGB frame [H, W, 3] uint8 of the first environment."""

    def close(self) -> None:
        """Free the environments."""


class EpisodeSummary(NamedTuple):
    """Games finished since the last `reset_summary`, with raw (unclipped) returns."""

    episodes: Array  # [] int32
    return_sum: Array  # [] float32
    length_sum: Array  # [] float32, in steps of one environment


class EnvState(NamedTuple):
    """Everything that changes while N environments run."""

    inner: Any  # owned by the backend
    obs: Any  # [N, *obs] the current observation
    ended: Array  # [N] bool, the previous step ended the episode: the next row is invalid
    running_return: Array  # [N] float32, raw return of the game so far
    running_length: Array  # [N] int32, steps of the game so far
    finished: Array  # [N] bool, the last step finished a game
    finished_return: Array  # [N] float32, raw return of the last finished game
    finished_length: Array  # [N] int32
    summary: EpisodeSummary
    fault: Array  # [] int32, 0 or the first thing that went wrong


class Env:
    """N environments of one backend behind the contract of this module."""

    def __init__(self, env_id: str, backend: Backend) -> None:
        self.env_id = env_id
        self.backend = backend
        self.num_envs = backend.num_envs
        self.observation_space = backend.observation_space
        self.action_space = backend.action_space
        self.restorable = backend.restorable
        self.seeds_axis: str | None = None  # the axis of `vmap` over seeds, if there is one

    def reset(self, key: Array) -> EnvState:
        """Start N episodes. Call once, before the loop."""
        inner, obs = self.backend.reset(key)
        n = self.num_envs
        return EnvState(
            inner=inner,
            obs=obs,
            ended=jnp.zeros(n, bool),
            running_return=jnp.zeros(n),
            running_length=jnp.zeros(n, jnp.int32),
            finished=jnp.zeros(n, bool),
            finished_return=jnp.zeros(n),
            finished_length=jnp.zeros(n, jnp.int32),
            summary=_empty_summary(),
            fault=jnp.where(_all_finite(obs), 0, NOT_FINITE).astype(jnp.int32),
        )

    def step(self, state: EnvState, action: Any) -> tuple[EnvState, TimeStep]:
        """Step all environments once; the action [N, *action] of an invalid row is ignored.

        Raises:
            UserError: while tracing, if shape or dtype of the action does not fit the space.
        """
        action, in_range = _check_action(self.env_id, self.action_space, action, self.num_envs)
        inner, raw = self.backend.step(state.inner, action)
        # What DMC and MetaWorld of envpool pay for the first observation of an episode is no one's.
        reward = jnp.where(state.ended, 0, raw.reward)  # [N]
        running_return = state.running_return + jnp.where(state.ended, 0, raw.raw_reward)  # [N]
        running_length = state.running_length + ~state.ended  # [N]
        finished = raw.game_over  # [N]
        summary = EpisodeSummary(
            episodes=state.summary.episodes + finished.sum(),
            return_sum=state.summary.return_sum + (finished * running_return).sum(),
            length_sum=state.summary.length_sum + (finished * running_length).sum(),
        )
        finite = _all_finite((raw.obs, raw.reward))
        fault = jnp.where(raw.failed, HOST_FAILURE, jnp.where(finite, 0, NOT_FINITE))
        fault = jnp.where((in_range | state.ended).all(), fault, ACTION_OUT_OF_RANGE)
        new_state = EnvState(
            inner=inner,
            obs=raw.obs,
            ended=raw.terminated | raw.truncated,
            running_return=jnp.where(finished, 0.0, running_return),
            running_length=jnp.where(finished, 0, running_length),
            finished=finished,
            finished_return=jnp.where(finished, running_return, state.finished_return),
            finished_length=jnp.where(finished, running_length, state.finished_length),
            summary=summary,
            fault=jnp.where(state.fault == 0, fault, state.fault).astype(jnp.int32),
        )
        return new_state, TimeStep(raw.obs, reward, raw.terminated, raw.truncated)

    def reset_summary(self, state: EnvState) -> EnvState:
        """Start a new logging interval."""
        return state._replace(summary=_empty_summary())

    def is_sound(self, state: EnvState) -> Array:
        """Return whether nothing went wrong so far: a condition for loops inside the program."""
        # One answer for all seeds: a condition of each would make the loops select, seed by seed.
        fault = lax.pmax(state.fault, self.seeds_axis) if self.seeds_axis else state.fault
        return fault == 0

    def check(self, state: EnvState) -> None:
        """Raise what went wrong inside the compiled loop.

        Raises:
            UserError: the environment raised, or gave a value that is not finite, or was given an
                action outside its space.
            KeyboardInterrupt: Ctrl-C, where it raises that.
        """
        fault = int(state.fault.max())
        if fault == HOST_FAILURE:
            failure = self.backend.failure or RuntimeError("unknown failure")
            if not isinstance(failure, failures()):
                raise failure
            raise UserError(f"{self.env_id}: {describe_failure(failure)}") from failure
        if fault == NOT_FINITE:
            raise UserError(
                f"{self.env_id} returned a reward or an observation that is not finite; learning "
                "was stopped at that step; mend the environment, or clip it in a wrapper"
            )
        if fault == ACTION_OUT_OF_RANGE:
            raise UserError(
                f"{self.env_id} was given an action outside {self.action_space}; scale or clip it "
                "in Agent.sample and Agent.predict"
            )

    def render(self, state: EnvState) -> np.ndarray:
        """Return an RGB frame [H, W, 3] uint8 of the first environment.

        Raises:
            UserError: if the environment was not made with rendering, or cannot render.
        """
        return self.backend.render(state.inner)

    def close(self) -> None:
        """Free the environments; the compiled program must not be called any more."""
        self.backend.close()


def _empty_summary() -> EpisodeSummary:
    return EpisodeSummary(jnp.zeros((), jnp.int32), jnp.zeros(()), jnp.zeros(()))


def _all_finite(tree: Any) -> Array:
    floats = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.array([jnp.isfinite(x).all() for x in floats], bool).all()


def _check_action(env_id: str, space: spaces.Space, action: Any, n: int) -> tuple[Any, Array]:
    """Return the action clipped into the space's range, and whether it was in range [N]."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = sub_spaces(space)
        checked = {k: _check_action(env_id, part, action[k], n) for k, part in parts.items()}
        values = {k: value for k, (value, _) in checked.items()}
        in_range = jnp.array([ok for _, ok in checked.values()]).all(axis=0)  # [N]
        return (values if isinstance(space, spaces.Dict) else tuple(values.values())), in_range
    shape = (n, *(space.shape or ()))
    kind = jnp.floating if np.issubdtype(space.dtype, np.floating) else jnp.integer
    if action.shape != shape or not jnp.issubdtype(action.dtype, kind):
        raise UserError(
            f"{env_id} needs actions of shape {shape} and {kind.__name__} dtype for {space}, got "
            f"{action.shape} {action.dtype}; fix what Agent.sample and Agent.predict return"
        )
    low, high = action_bounds(space)
    clipped = jnp.clip(jnp.nan_to_num(action) if kind is jnp.floating else action, low, high)
    return clipped, (action == clipped).reshape(n, -1).all(axis=1)  # [N]


def action_bounds(space: spaces.Space) -> tuple[Any, Any]:
    """Return the smallest and largest action of a space without parts.

    Discrete actions are counted from 0 here whatever the space's `start`; the backend shifts them.
    """
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        return space.low.astype(np.float32), space.high.astype(np.float32)
    if isinstance(space, spaces.Box):
        limits = np.iinfo(np.int32)
        bounds = np.array([space.low, space.high], np.float64)
        low, high = np.clip(bounds, limits.min, limits.max).astype(np.int32)
        return low, high
    if isinstance(space, spaces.Discrete):
        return np.int32(0), np.int32(int(space.n) - 1)
    if isinstance(space, spaces.MultiBinary):
        return np.int32(0), np.int32(1)
    assert isinstance(space, spaces.MultiDiscrete)
    return np.zeros(space.shape, np.int32), space.nvec.astype(np.int32) - np.int32(1)


def scale_action(space: Any, action: Array) -> Array:
    """Turn what a policy returns [N, actions] into actions of the environment [N, *action].

    In a Box, -1 and 1 stand for the bounds, and beyond them the action is clipped; a dimension
    without two finite bounds is left as it is. Discrete actions only change their shape.
    """
    action = action.reshape(action.shape[0], *(space.shape or ()))  # [N, *action]
    if not isinstance(space, spaces.Box):
        return action
    low, high = action_bounds(space)
    bounded = np.isfinite(low) & np.isfinite(high)
    # Halved before they are added: the widest bounds would overflow.
    low_half, high_half = np.where(bounded, low, -1.0) / 2, np.where(bounded, high, 1.0) / 2
    center, half = jnp.float32(high_half + low_half), jnp.float32(high_half - low_half)
    return jnp.clip(center + half * action, low, high)


def to_space(space: spaces.Space, action: Any) -> Any:
    """Return 32-bit actions [..., *action] in the space's own dtype, bounds and count.

    Discrete actions are counted from the space's `start`; the learner counts from 0. A bound of a
    float64 Box, rounded to float32, can lie outside the Box.
    """
    if isinstance(space, spaces.Dict):
        return {k: to_space(space[k], action[k]) for k in space.spaces}
    if isinstance(space, spaces.Tuple):
        return tuple(to_space(s, a) for s, a in zip(space.spaces, action, strict=True))
    if isinstance(space, spaces.Box):
        return np.clip(action.astype(space.dtype), space.low, space.high)
    if isinstance(space, spaces.MultiBinary):
        return action.astype(space.dtype)
    assert isinstance(space, spaces.Discrete | spaces.MultiDiscrete)
    return action + space.start
