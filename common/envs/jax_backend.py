"""Environments written in JAX: gymnax and pgx, vmapped inside the compiled program."""

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from jax import Array

from common.action_masks import MASK_KEY
from common.envs.env import BackendStep
from common.errors import UserError, one_line
from common.ranges import LARGEST, accepted, fits


class JaxStep(NamedTuple):
    """One step of one environment, without autoreset."""

    state: Any
    obs: Any
    reward: Array
    terminated: Array
    truncated: Array


class JaxEnv(Protocol):
    """One environment as pure functions, without autoreset."""

    observation_space: spaces.Space
    action_space: spaces.Space

    def reset(self, key: Array) -> tuple[Any, Any]:
        """key -> (state, obs)."""

    def step(self, key: Array, state: Any, action: Any) -> JaxStep:
        """Step once."""


class JaxInner(NamedTuple):
    """What the JAX backend carries from step to step."""

    key: Array  # [N] keys
    state: Any  # [N, ...]
    ended: Array  # [N] bool


class JaxBackend:
    """N copies of a `JaxEnv` with NEXT_STEP autoreset."""

    restorable = True
    failure = None

    def __init__(self, env: JaxEnv, num_envs: int, stream: int = 0) -> None:
        self.env = env
        self.num_envs = num_envs
        self.stream = stream  # keeps apart two backends that are reset with the same key
        self.observation_space = env.observation_space
        self.action_space = env.action_space

    def reset(self, key: Array) -> tuple[Any, Any]:
        """Start N episodes; traceable, so that seeds can be batched."""
        key = jax.random.fold_in(key, self.stream)
        env_keys = jax.random.split(key, (self.num_envs, 2))  # [N, 2]
        state, obs = jax.vmap(self.env.reset)(env_keys[:, 0])
        # Copies, because an environment may hold one array in two fields (as last and current
        # position, say), and one buffer cannot be donated twice; of strong types, because a weak
        # one that the first step makes strong would cost a second compilation.
        state, obs = jax.tree.map(lambda x: jnp.array(x, x.dtype), (state, obs))
        inner = JaxInner(env_keys[:, 1], state, jnp.zeros(self.num_envs, bool))
        return inner, jax.tree.map(_as_32_bit, obs)

    def step(self, inner: JaxInner, action: Any) -> tuple[JaxInner, BackendStep]:
        """Step the running copies and reset those whose previous step ended the episode."""
        step = jax.vmap(self._step_or_reset)(*inner, action)
        key, result = step
        ended = result.terminated | result.truncated
        no = jnp.zeros((), bool)
        backend_step = BackendStep(
            jax.tree.map(_as_32_bit, result.obs),
            result.reward,
            result.terminated,
            result.truncated,
            result.reward,
            ended,
            no,
        )
        return JaxInner(key, result.state, ended), backend_step

    def _step_or_reset(
        self, key: Array, state: Any, ended: Array, action: Any
    ) -> tuple[Array, JaxStep]:
        key, step_key, reset_key = jax.random.split(key, 3)
        stepped = self.env.step(step_key, state, action)
        reset_state, reset_obs = self.env.reset(reset_key)
        zero, no = jnp.zeros((), jnp.float32), jnp.zeros((), bool)
        reset = JaxStep(reset_state, reset_obs, zero, no, no)
        return key, jax.tree.map(lambda a, b: jnp.where(ended, a, b), reset, stepped)

    def render(self, inner: Any) -> np.ndarray:
        """Raise: these environments have no common way to render."""
        raise UserError("JAX environments cannot be rendered; use an envpool or Gymnasium id")

    def close(self) -> None:
        """Nothing to free."""


def _as_32_bit(x: Array) -> Array:
    return x.astype(jnp.uint8) if x.dtype == bool else x


class GymnaxEnv:
    """A gymnax environment; `kwargs` set fields of its parameters, else constructor options."""

    def __init__(self, env_id: str, kwargs: dict[str, Any]) -> None:
        import gymnax
        from gymnax.environments import spaces as gymnax_spaces

        names: set[str] = set()
        try:
            names |= set(gymnax.make(env_id)[1].__dataclass_fields__)
            options = {k: v for k, v in kwargs.items() if k not in names}
            self.env, params = gymnax.make(env_id, **options)
            kinds = {name: field.type for name, field in params.__dataclass_fields__.items()}
            given = {k: _number(k, kwargs[k], kinds[k]) for k in names & set(kwargs)}
            self.params = params.replace(**given)
        except Exception as error:
            raise UserError(
                f"gymnax could not make {env_id} with the options {kwargs or 'none'}: "
                f"{one_line(error)}; "
                f"--env-kwargs accepts {', '.join(sorted(names)) or 'none'}"
            ) from error
        to_gym = gymnax_spaces.gymnax_space_to_gym_space
        self.observation_space = to_gym(self.env.observation_space(self.params))
        self.action_space = to_gym(self.env.action_space(self.params))

    def reset(self, key: Array) -> tuple[Any, Any]:
        """key -> (state, obs)."""
        obs, state = self.env.reset_env(key, self.params)
        return state, obs

    def step(self, key: Array, state: Any, action: Any) -> JaxStep:
        """Step once; a time limit is a truncation unless the task itself ended too."""
        obs, state, reward, terminated, _ = self.env.step_env(key, state, action, self.params)
        truncated = self.env.is_truncated(state, self.params)
        return JaxStep(state, obs, jnp.float32(reward), jnp.bool_(terminated), jnp.bool_(truncated))


def _number(name: str, value: Any, kind: Any) -> Any:
    """Return a parameter's value, which must be a number of 32 bits of its kind."""
    kind = kind if kind in (int, bool) else float
    if not fits(value, kind):
        raise TypeError(f"{name} must be {accepted(kind)}, got {value!r}")
    least = 1 if name == "max_steps_in_episode" else -LARGEST[kind]
    if not least <= value <= LARGEST[kind]:
        raise ValueError(f"{name} must be between {least:g} and {LARGEST[kind]:g}, got {value}")
    return kind(value)


class PgxEnv:
    """A single-player pgx environment; in MinAtar no action is ever illegal, so without a mask."""

    def __init__(self, env_id: str, kwargs: dict[str, Any]) -> None:
        import pgx

        try:
            self.env = pgx.make(env_id, **kwargs)
        except Exception as error:
            raise UserError(
                f"pgx refused the options {kwargs or 'none'} for {env_id} ({one_line(error)}); "
                "give --env-kwargs that it takes, or leave them out"
            ) from error
        if self.env.num_players > 1:
            raise UserError(
                f"pgx/{env_id} has {self.env.num_players} players; single-player ids are pgx/2048 "
                "and pgx/minatar-*"
            )
        num_actions, shape = self.env.num_actions, self.env.observation_shape
        observation = spaces.Box(0, 1, shape, np.float32)
        masked = spaces.Dict(
            {"observation": observation, MASK_KEY: spaces.MultiBinary(num_actions)}
        )
        self.has_mask = not env_id.startswith("minatar-")
        self.observation_space: spaces.Space = masked if self.has_mask else observation
        self.action_space: spaces.Space = spaces.Discrete(num_actions)

    def reset(self, key: Array) -> tuple[Any, Any]:
        """key -> (state, obs)."""
        state = self.env.init(key)
        return state, self._obs(state)

    def step(self, key: Array, state: Any, action: Any) -> JaxStep:
        """Step once; pgx counts an illegal action as a loss."""
        state = self.env.step(state, action, key)
        obs, reward = self._obs(state), jnp.float32(state.rewards[0])
        return JaxStep(state, obs, reward, state.terminated, state.truncated)

    def _obs(self, state: Any) -> Any:
        observation = state.observation.astype(jnp.float32)
        mask = state.legal_action_mask.astype(jnp.int8)  # [A]
        return {"observation": observation, MASK_KEY: mask} if self.has_mask else observation
