"""Toy environments whose every row is known, for each backend, and helpers to step them."""

from types import SimpleNamespace
from typing import Any, ClassVar

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

from common.envs import Env
from common.envs.jax_backend import JaxBackend, JaxStep

GO_ON, TERMINATE, TRUNCATE, BOTH, LOSE_LIFE = range(5)


def env_config(env_id: str, **changes: Any) -> Any:
    """The fields of a Config that make_env reads."""
    fields = dict(env_backend="auto", env_module=None, env_kwargs=(), num_envs=2, seed=1)
    fields |= dict(env_workers=0)
    return SimpleNamespace(**{"env_id": env_id, **fields, **changes})


class CountEnv(gym.Env):
    """The action decides how the episode goes on.

    obs = [steps in the episode, last action or -1], reward = 10 * steps + action.
    """

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-1, 1000, (2,), np.float32)
        self.action_space = spaces.Discrete(4)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.steps = 0
        return np.array([0, -1], np.float32), {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict]:
        self.steps += 1
        obs = np.array([self.steps, action], np.float32)
        terminated, truncated = action in (TERMINATE, BOTH), action in (TRUNCATE, BOTH)
        return obs, float(10 * self.steps + action), bool(terminated), bool(truncated), {}


class CountJaxEnv:
    """`CountEnv` as pure functions."""

    observation_space = spaces.Box(-1, 1000, (2,), np.float32)
    action_space = spaces.Discrete(4)

    def reset(self, key: Any) -> tuple[Any, Any]:
        return jnp.int32(0), jnp.float32([0, -1])

    def step(self, key: Any, state: Any, action: Any) -> JaxStep:
        steps = state + 1
        terminated = (action == TERMINATE) | (action == BOTH)
        truncated = (action == TRUNCATE) | (action == BOTH)
        obs = jnp.stack([steps, action]).astype(jnp.float32)
        return JaxStep(steps, obs, jnp.float32(10 * steps + action), terminated, truncated)


class CountPool:
    """`CountEnv` with envpool's numpy API, 64-bit fields, and lives as envpool's Atari has them.

    LOSE_LIFE terminates, but the game goes on: the next row is a reset row that keeps the steps.
    A reset row pays something, as envpool's DMC does.
    """

    def __init__(self, num_envs: int, clip: bool = False) -> None:
        self.num_envs, self.clip = num_envs, clip
        self.observation_space = spaces.Box(-1, 1000, (2,), np.float64)
        self.action_space = spaces.Discrete(5)

    def reset(self) -> tuple[Any, dict]:
        self.steps = np.zeros(self.num_envs, np.int64)
        self.ended = np.zeros(self.num_envs, bool)
        self.game_over = np.zeros(self.num_envs, bool)
        self.lives = np.full(self.num_envs, 3)
        return np.stack([self.steps, self.steps - 1], axis=1).astype(np.float64), {}

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict]:
        new_game = self.ended & self.game_over
        self.steps = np.where(new_game, 0, self.steps + ~self.ended)
        self.lives = np.where(new_game, 3, self.lives - (~self.ended & (action == LOSE_LIFE)))
        action = np.where(self.ended, -1, action)
        raw = np.where(self.ended, 7.0, 10.0 * self.steps + action)
        truncated = (action == TRUNCATE) | (action == BOTH)
        terminated = (action == TERMINATE) | (action == BOTH) | (action == LOSE_LIFE)
        self.ended = terminated | truncated
        self.game_over = self.ended & (action != LOSE_LIFE)
        lost = self.game_over & terminated
        info = {"lives": self.lives, "reward": raw, "terminated": lost.astype(np.int32)}
        obs = np.stack([self.steps, action], axis=1).astype(np.float64)
        return obs, np.sign(raw) if self.clip else raw, terminated, truncated, info

    def close(self) -> None:
        pass


class EchoEnv(gym.Env):
    """Random observations of any space; keeps what it returned and which actions it was given."""

    observations: ClassVar[list] = []
    actions: ClassVar[list] = []

    def __init__(self, observation_space: spaces.Space, action_space: spaces.Space) -> None:
        self.observation_space, self.action_space = observation_space, action_space

    def _observe(self) -> Any:
        obs = self.observation_space.sample()
        EchoEnv.observations.append(obs)
        return obs

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict]:
        assert self.action_space.contains(action), (action, self.action_space)
        EchoEnv.actions.append(action)
        return self._observe(), 1.0, False, False, {}


class FaultyEnv(gym.Env):
    """Behaves until step `at`, where it returns or raises what `fault` names."""

    FAULTS: ClassVar[dict] = {
        "": {},
        "nan_obs": dict(obs=np.array([0, np.nan], np.float32)),
        "nan_reward": dict(reward=float("nan")),
        "infinite_reward": dict(reward=float("inf")),
        "obs_dtype": dict(obs=np.array([0, 1j], np.complex64)),
        "obs_shape": dict(obs=np.zeros(3, np.float32)),
        "obs_none": dict(obs=None),
        "reward_text": dict(reward="1"),
        "reward_none": dict(reward=None),
        "reward_array": dict(reward=np.zeros(2)),
        "terminated_int": dict(terminated=1),
        "truncated_none": dict(truncated=None),
    }

    def __init__(self, fault: str = "", at: int = 3) -> None:
        self.fault, self.at, self.steps = fault, at, 0
        self.observation_space = spaces.Box(-1, 1, (2,), np.float32)
        self.action_space = spaces.Discrete(2)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        row = dict(obs=np.zeros(2, np.float32))
        if self.at == 0:
            row |= self._fault()
        return row["obs"], {}

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict]:
        self.steps += 1
        row = dict(obs=np.zeros(2, np.float32), reward=1.0, terminated=False, truncated=False)
        if self.steps == self.at:
            row |= self._fault()
        return row["obs"], row["reward"], row["terminated"], row["truncated"], {}

    def _fault(self) -> dict:
        if self.fault == "raise":
            raise ZeroDivisionError("the motor\nbroke")
        return self.FAULTS[self.fault]


class LengthEnv(gym.Env):
    """The i-th environment made since `made = 0` has episodes of i steps.

    The j-th of its episodes returns 100 * j + i, all of it on the last step.
    """

    made = 0

    def __init__(self) -> None:
        LengthEnv.made += 1
        self.length, self.episode = LengthEnv.made, 0
        self.observation_space = spaces.Box(0, 1000, (1,), np.float32)
        self.action_space = spaces.Discrete(2)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.steps, self.episode = 0, self.episode + 1
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict]:
        self.steps += 1
        ended = self.steps == self.length
        reward = float(ended * (100 * self.episode + self.length))
        return np.full(1, self.steps, np.float32), reward, ended, False, {}


class TimerJaxEnv:
    """Episodes of `length` steps, with reward 1 each; half of them terminate, half are truncated.

    obs = one-hot of the steps left where the episode will terminate; of 0 where it will be
    truncated: nobody can see the time limit coming.
    """

    action_space = spaces.Discrete(2)

    def __init__(self, length: int) -> None:
        self.length = length
        self.observation_space = spaces.Box(0, 1, (length + 1,), np.float32)

    def _observe(self, left: Any, terminates: Any) -> Any:
        return jax.nn.one_hot(jnp.where(terminates, left, 0), self.length + 1)

    def reset(self, key: Any) -> tuple[Any, Any]:
        state = jnp.int32(self.length), jax.random.bernoulli(key)
        return state, self._observe(*state)

    def step(self, key: Any, state: Any, action: Any) -> JaxStep:
        left, terminates = state[0] - 1, state[1]
        ended, reward = left == 0, jnp.float32(1)
        obs = self._observe(left, terminates)
        return JaxStep((left, terminates), obs, reward, ended & terminates, ended & ~terminates)


class ReachJaxEnv:
    """Two actions, between [-1, 0] and [3, 0.5]; obs = [the last actions, steps in the episode].

    Episodes have three steps with reward 1 each; half of them terminate, half are truncated.
    """

    observation_space = spaces.Box(-10, 10, (3,), np.float32)
    action_space = spaces.Box(np.float32([-1, 0]), np.float32([3, 0.5]))

    def reset(self, key: Any) -> tuple[Any, Any]:
        return (jnp.int32(0), jax.random.bernoulli(key)), jnp.zeros(3)

    def step(self, key: Any, state: Any, action: Any) -> JaxStep:
        steps, terminates = state[0] + 1, state[1]
        ended, obs = steps == 3, jnp.append(action, steps.astype(jnp.float32))
        state = steps, terminates
        return JaxStep(state, obs, jnp.float32(1), ended & terminates, ended & ~terminates)


class NonsenseEnv(Env):
    """A JAX environment with `nonsense` wherever a learner must not look.

    That is the observation after a termination, and the reward of rows without a transition.
    """

    nonsense = 0.0

    def step(self, state: Any, action: Any) -> tuple[Any, Any]:
        new_state, row = super().step(state, action)
        obs = jnp.where(row.terminated[:, None], self.nonsense, row.obs)
        reward = jnp.where(state.ended, self.nonsense, row.reward)
        return new_state._replace(obs=obs), row._replace(obs=obs, reward=reward)


gym.register("ToyCount-v0", CountEnv)
gym.register("ToyFaulty-v0", FaultyEnv)
gym.register("ToyLength-v0", LengthEnv)


def use_env(monkeypatch: Any, algorithm: Any, env: Any) -> None:
    """Make the trainers of an algorithm's module play copies of a JAX environment."""

    def make_env(config: Any) -> Env:
        return Env("Toy", JaxBackend(env, config.num_envs))

    monkeypatch.setattr(algorithm, "make_env", make_env)


def play(env: Env, actions: Any, key: int = 0) -> tuple[Any, dict[str, np.ndarray]]:
    """Scan env.step over actions [T, N, *action]: the last state, and the rows [T, N, ...]."""

    def step(state: Any, action: Any) -> tuple[Any, dict]:
        valid = ~state.ended
        state, time_step = env.step(state, action)
        names = ("finished", "finished_return", "finished_length")
        finished = {name: getattr(state, name) for name in names}
        return state, {**time_step._asdict(), "valid": valid, **finished}

    reset = jax.jit(env.reset) if env.restorable else env.reset
    first = reset(jax.random.key(key))
    first_obs = jax.tree.map(jnp.copy, first.obs)
    state, rows = jax.jit(lambda s, a: jax.lax.scan(step, s, a), donate_argnums=0)(first, actions)
    rows["first_obs"] = first_obs
    return state, jax.tree.map(np.asarray, rows)
