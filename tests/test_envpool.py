"""Real envpool pools: values, boundaries, seeds and the Atari preset."""

from typing import Any

import envpool
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from toy_envs import env_config, play

from common.envs import Env, make_env
from common.envs.envpool_backend import XlaPoolBackend, is_atari, wide_dtypes
from common.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def pool_of(env: Env) -> Any:
    return env.backend.pool if isinstance(env.backend, XlaPoolBackend) else env.backend.stepper.pool


def twin_of(env: Env, **options: Any) -> Any:
    """Another pool with the same seeds, to be stepped with numpy."""
    seeds = [int(seed) for seed in pool_of(env).config["env_seed"]]
    assert len(seeds) == env.num_envs
    return envpool.make(
        env.env_id, env_type="gymnasium", num_envs=env.num_envs, seed=seeds, **options
    )


def random_actions(env: Env, steps: int) -> np.ndarray:
    space, rng = env.action_space, np.random.default_rng(0)
    shape = (steps, env.num_envs, *space.shape)
    if isinstance(space, spaces.Discrete):
        return rng.integers(0, space.n, shape, np.int32)
    if np.issubdtype(space.dtype, np.integer):
        return rng.integers(space.low, space.high + 1, shape, np.int32)
    return rng.uniform(space.low, space.high, shape).astype(np.float32)


def assert_same(got: Any, wanted: Any) -> None:
    """Compare two pytrees value by value; 64 bits of `wanted` are rounded to 32."""
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, np.asarray(y, x.dtype)), got, wanted)


# --- scanned steps against plain numpy steps ------------------------------------------------------

DTYPE_CLASSES = [
    ("CartPole-v1", {}, XlaPoolBackend),  # float32 observations, int32 actions
    ("Pendulum-v1", {}, XlaPoolBackend),  # float32 actions
    ("Pong-v5", {"max_episode_steps": 99}, XlaPoolBackend),  # uint8 images
    ("Taxi-v3", {}, XlaPoolBackend),  # int32 observations
    ("FrozenLake-v1", {}, XlaPoolBackend),
    ("MiniGrid-MemoryS7-v0", {"max_episode_steps": 99}, XlaPoolBackend),  # Dict
    ("RubiksCube-partly-scrambled-v0", {}, XlaPoolBackend),  # int8 in a Dict, int32 Box actions
    ("HalfCheetah-v4", {"max_episode_steps": 99}, XlaPoolBackend),  # float64 both ways
    ("CheetahRun-v1", {"max_episode_steps": 99}, XlaPoolBackend),  # Dict of float64
]


@pytest.mark.parametrize(("env_id", "options", "backend"), DTYPE_CLASSES)
def test_scanned_steps_equal_numpy_steps(env_id: str, options: dict, backend: type) -> None:
    pairs = tuple(f"{name}={value}" for name, value in options.items())
    env = make_env(env_config(env_id, env_kwargs=pairs), "evaluate")
    assert isinstance(env.backend, backend)
    twin, actions = twin_of(env, **options), random_actions(env, 300)
    state = env.reset(jax.random.key(0))
    assert_same(jax.tree.map(np.array, state.obs), twin.reset()[0])
    compiled = jax.jit(lambda s, a: jax.lax.scan(env.step, s, a), donate_argnums=0)
    parts = []
    for half in np.split(actions, 2):  # two calls of one program, as between two log points
        state, rows = compiled(state, half)
        parts.append(jax.tree.map(np.asarray, rows))
    rows = jax.tree.map(lambda *x: np.concatenate(x), *parts)
    env.check(state)
    dtype = twin.spec.action_array_spec[twin._action_keys[-1]].dtype
    for t, action in enumerate(actions):
        row = twin.step(action.astype(dtype))
        assert_same(jax.tree.map(lambda x, t=t: x[t], tuple(rows)), row[:4])
    assert (rows.terminated | rows.truncated).any()
    dtypes = {str(x.dtype) for x in jax.tree.leaves(rows)}
    assert dtypes <= {"float32", "int32", "int8", "uint8", "bool"}


@pytest.mark.parametrize(
    ("env_id", "wide"),
    [("CartPole-v1", ""), ("Pong-v5", ""), ("HalfCheetah-v4", "d"), ("CheetahRun-v1", "d")],
)
def test_64_bit_pools_are_recognised(env_id: str, wide: str) -> None:
    pool = envpool.make(env_id, env_type="gymnasium", num_envs=1)
    assert wide_dtypes(pool) == set(map(np.dtype, wide))


def test_spaces_hold_what_the_environment_returns() -> None:
    space = make_env(env_config("HalfCheetah-v4")).observation_space
    assert space.dtype == np.float32 and space.shape == (17,)
    assert (space.low == -np.inf).all() and (space.high == np.inf).all()
    space = make_env(env_config("CheetahRun-v1")).observation_space
    assert isinstance(space, spaces.Dict)
    assert all((part.low == -np.inf).all() for part in space.values())
    space = make_env(env_config("Pendulum-v1")).action_space
    assert (space.low, space.high, space.dtype) == (-2, 2, np.float32)


# --- boundaries -----------------------------------------------------------------------------------


def test_catch_ends_at_its_ninth_step() -> None:
    env = make_env(env_config("Catch-v0", num_envs=8))
    _, rows = play(env, random_actions(env, 25))
    ends, resets = [8, 18], [9, 19]
    assert np.flatnonzero(rows["terminated"].all(axis=1)).tolist() == ends
    assert rows["terminated"].sum() == 2 * 8 and not rows["truncated"].any()
    assert np.flatnonzero((~rows["valid"]).all(axis=1)).tolist() == resets
    assert (~rows["valid"]).sum() == 2 * 8
    assert np.unique(np.abs(rows["reward"][ends])).tolist() == [1]
    assert (np.delete(rows["reward"], ends, axis=0) == 0).all()
    np.testing.assert_array_equal(rows["finished_return"][8:18], [rows["reward"][8]] * 10)
    assert (rows["finished_length"][8:] == 9).all() and (rows["finished_length"][:8] == 0).all()
    # The ball is in the last row of the final observation, and in the first one of the next game.
    assert (rows["obs"][8, :, -1].sum(axis=-1) >= 1).all()
    assert (rows["obs"][9, :, 0].sum(axis=-1) == 1).all()
    assert (rows["first_obs"][:, 0].sum(axis=-1) == 1).all()


def test_a_time_limit_truncates() -> None:
    env = make_env(env_config("CartPole-v1", env_kwargs=("max_episode_steps=5",)))
    _, rows = play(env, jnp.tile(jnp.int32([[0, 1], [1, 0]]), (6, 1)))
    assert not rows["terminated"].any()
    assert np.flatnonzero(rows["truncated"][:, 0]).tolist() == [4, 10]
    assert np.flatnonzero(~rows["valid"][:, 1]).tolist() == [5, 11]
    assert rows["reward"][:, 0].tolist() == [1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 0]
    assert rows["finished_return"][-1].tolist() == [5, 5]
    assert rows["finished_length"][-1].tolist() == [5, 5]
    final, first = rows["obs"][4], rows["obs"][5]
    assert (np.abs(final).max(axis=-1) > 0.05).all() and (np.abs(first) <= 0.05).all()


def first_end(max_episode_steps: int) -> tuple[int, bool, bool]:
    """Push one cart to the left: the length of its first episode, and how it ended."""
    pairs = (f"max_episode_steps={max_episode_steps}",)
    env = make_env(env_config("CartPole-v1", num_envs=1, env_kwargs=pairs))
    _, rows = play(env, jnp.zeros((15, 1), jnp.int32))
    terminated, truncated = rows["terminated"][:, 0], rows["truncated"][:, 0]
    end = int(np.argmax(terminated | truncated))
    return end + 1, bool(terminated[end]), bool(truncated[end])


def test_a_fall_on_the_last_step_of_the_time_limit_is_a_truncation() -> None:
    """What envpool does: a termination on the very step of the limit reports truncation alone."""
    length, terminated, truncated = first_end(500)
    assert (terminated, truncated) == (True, False) and 5 < length < 15
    assert first_end(length) == (length, False, True)
    assert first_end(length + 1) == (length, True, False)


# --- Atari ----------------------------------------------------------------------------------------


def test_a_lost_life_ends_the_episode_but_not_the_game() -> None:
    env = make_env(env_config("Breakout-v5"))
    twin, actions = twin_of(env, episodic_life=True, reward_clip=True), random_actions(env, 450)
    _, rows = play(env, actions)
    twin.reset()
    infos = [twin.step(action)[4] for action in actions]
    lives, over, elapsed = (
        np.stack([info[name] for info in infos]) for name in ("lives", "terminated", "elapsed_step")
    )
    lost = rows["terminated"] & (over == 0)
    assert lost.sum(axis=0).min() >= 4 and over.sum(axis=0).min() >= 1
    for t, lane in zip(*np.nonzero(lost[:-1]), strict=True):
        assert not rows["finished"][t, lane] and lives[t, lane] > 0
        assert not rows["valid"][t + 1, lane]
        assert rows["reward"][t + 1, lane] == 0 and not rows["terminated"][t + 1, lane]
        assert elapsed[t + 1, lane] == elapsed[t, lane], "the game goes on"
        assert lives[t + 1, lane] == lives[t, lane]
    np.testing.assert_array_equal(rows["finished"], over == 1)
    for t, lane in zip(*np.nonzero(over == 1), strict=True):
        assert rows["finished_length"][t, lane] == elapsed[t, lane]
        assert rows["terminated"][t, lane] and lives[t, lane] == 0


def test_training_reports_raw_returns_of_full_games() -> None:
    env = make_env(env_config("Qbert-v5"))
    twin, actions = twin_of(env, episodic_life=True, reward_clip=True), random_actions(env, 600)
    state, rows = play(env, actions)
    twin.reset()
    running, games = np.zeros(2), []
    for t, action in enumerate(actions):
        _, reward, terminated, _, info = twin.step(action)
        np.testing.assert_array_equal(rows["reward"][t], reward)
        np.testing.assert_array_equal(rows["terminated"][t], terminated)
        running += info["reward"]
        for lane in np.flatnonzero(info["terminated"]):
            assert rows["finished"][t, lane]
            assert rows["finished_return"][t, lane] == running[lane]
            games.append(running[lane])
            running[lane] = 0
    assert len(games) == rows["finished"].sum() >= 2 and max(games) >= 100
    assert (float(state.summary.return_sum), int(state.summary.episodes)) == (
        sum(games),
        len(games),
    )
    assert set(np.unique(rows["reward"])) == {0, 1}, "rewards are clipped to their sign"
    assert rows["terminated"].sum() > len(games), "lives end episodes"


@pytest.mark.parametrize(
    ("purpose", "pairs", "episodic_life", "reward_clip"),
    [
        ("train", (), True, True),
        ("evaluate", (), False, False),
        ("video", (), False, False),
        ("train", ("episodic_life=False",), False, True),
        ("train", ("reward_clip=False",), True, False),
        ("evaluate", ("episodic_life=True",), True, False),
    ],
)
def test_atari_preset(purpose: Any, pairs: tuple, episodic_life: bool, reward_clip: bool) -> None:
    config = pool_of(make_env(env_config("Breakout-v5", env_kwargs=pairs), purpose)).config
    assert (config["episodic_life"], config["reward_clip"]) == (episodic_life, reward_clip)


def test_only_atari_has_the_preset() -> None:
    assert is_atari("Pong-v5") and not is_atari("CartPole-v1") and not is_atari("HalfCheetah-v4")
    assert "reward_clip" not in pool_of(make_env(env_config("CartPole-v1"))).config


def test_other_options_reach_the_pool() -> None:
    pairs = ("stack_num=1", "img_height=40", "img_width=42", "num_threads=1")
    env = make_env(env_config("Pong-v5", env_kwargs=pairs))
    assert env.observation_space.shape == (1, 40, 42)
    assert pool_of(env).config["num_threads"] == 1


def test_cheap_environments_use_one_thread() -> None:
    for env_id in ("CartPole-v1", "Taxi-v3", "MiniGrid-MemoryS7-v0"):
        assert pool_of(make_env(env_config(env_id, num_envs=8))).config["num_threads"] == 1
    pairs = ("num_threads=2",)
    assert pool_of(make_env(env_config("CartPole-v1", env_kwargs=pairs))).config["num_threads"] == 2


# --- faults and rendering -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env_id", "action"),
    [
        ("CartPole-v1", jnp.int32([0, 2])),
        ("CartPole-v1", jnp.int32([-1, 0])),
        ("Pendulum-v1", jnp.float32([[0], [2.5]])),
        ("Pendulum-v1", jnp.float32([[jnp.nan], [0]])),
        ("HalfCheetah-v4", jnp.full((2, 6), jnp.nan)),
    ],
)
def test_bad_actions_never_reach_the_pool(env_id: str, action: Any) -> None:
    env = make_env(env_config(env_id))
    state, rows = play(env, action[None])
    assert np.isfinite(rows["obs"]).all() and np.isfinite(rows["reward"]).all()
    with pytest.raises(UserError, match=f"{env_id} was given an action outside"):
        env.check(state)


def test_too_few_actions_are_refused_while_tracing() -> None:
    env = make_env(env_config("CartPole-v1", num_envs=3))
    state = env.reset(jax.random.key(0))
    with pytest.raises(UserError, match=r"shape \(3,\)"):
        jax.eval_shape(env.step, state, jnp.zeros(2, jnp.int32))


def test_render() -> None:
    env = make_env(env_config("Pong-v5"), "video", num_envs=1)
    frame = env.render(env.reset(jax.random.key(0)))
    assert frame.ndim == 3 and frame.shape[2] == 3 and frame.dtype == np.uint8
    env = make_env(env_config("CartPole-v1"))
    with pytest.raises(UserError, match="cannot render"):
        env.render(env.reset(jax.random.key(0)))
