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
from common.envs.wide_fields import float32_of_words, float64_words
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
    ended = np.zeros(env.num_envs, bool)
    for t, action in enumerate(actions):
        obs, reward, *ends, _ = twin.step(action.astype(dtype))
        reward[ended] = 0  # DMC pays for the first observation
        assert_same(jax.tree.map(lambda x, t=t: x[t], tuple(rows)), (obs, reward, *ends))
        ended = np.logical_or(*ends)
    assert (rows.terminated | rows.truncated).any()
    dtypes = {str(x.dtype) for x in jax.tree.leaves(rows)}
    assert dtypes <= {"float32", "int32", "int8", "uint8", "bool"}


def test_the_first_observation_of_an_episode_earns_nothing() -> None:
    """DMC pays for it, so that CartpoleBalance-v1 would have returns above its length."""
    env = make_env(env_config("CartpoleBalance-v1", env_kwargs=("max_episode_steps=4",)))
    twin, actions = twin_of(env, max_episode_steps=4), np.zeros((10, env.num_envs, 1), np.float32)
    state, rows = play(env, jnp.asarray(actions))
    twin.reset()
    paid = np.array([twin.step(action.astype(np.float64))[1] for action in actions])  # [T, N]
    assert (~rows["valid"]).sum() == 2 * env.num_envs
    assert (paid[~rows["valid"]] > 0).all() and (rows["reward"][~rows["valid"]] == 0).all()
    returns = paid[:4].sum(0), paid[5:9].sum(0)
    np.testing.assert_allclose(rows["finished_return"][[3, 8]], returns, rtol=1e-6)
    np.testing.assert_allclose(state.summary.return_sum, np.sum(returns), rtol=1e-6)


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


# --- float64 as words ---


def words_of(x: np.ndarray) -> np.ndarray:
    """float64 [...] -> uint32 [..., 2], lower word first."""
    return x.view(np.uint32).reshape(*x.shape, 2)


TINY = np.float64(np.finfo(np.float32).tiny)
LARGEST = np.float64(np.finfo(np.float32).max)
STEP = 2.0**-23  # between 1 and the next float32
SPECIAL = np.array(
    [
        *(0.0, 1.0, np.inf, np.nan, 5e-324, np.finfo(np.float64).max, 1e-39, TINY, 2 * TINY),
        # Ties go to the even neighbour; a bit more or less decides.
        *(1 + STEP / 2, 1 + 3 * STEP / 2, 1 + STEP / 2 + 2**-52, 1 + STEP / 2 - 2**-52),
        *(2 - STEP / 4, 2 - STEP / 2, np.pi, 1 / 3),
        # The largest float32, and what rounds to it or to infinity
        *(LARGEST, LARGEST * (1 + 2**-26), LARGEST * (1 + 2**-25), LARGEST * (1 + 2**-24), 4e38),
    ]
)


def test_float32_of_words_rounds_as_numpy_does() -> None:
    rng = np.random.default_rng(0)
    anything = rng.integers(0, 2**64, 50_000, np.uint64).view(np.float64)
    # Most random exponents are out of range: half of the numbers are within it.
    usual = rng.normal(size=25_000) * 10.0 ** rng.uniform(-44, 39, 25_000)
    # 29 bits are dropped: of a tie only the first of them is set.
    mantissa = rng.integers(0, 2**23, 25_000, np.uint64) << np.uint64(29) | np.uint64(1 << 28)
    exponent = rng.integers(890, 1155, 25_000, np.uint64) << np.uint64(52)
    ties = (mantissa | exponent).view(np.float64)
    wide = np.concatenate([anything, usual, ties, SPECIAL, -SPECIAL])
    got = np.asarray(jax.jit(float32_of_words)(words_of(wide)))
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        expected = wide.astype(np.float32)
    # Numbers below 1.2e-38 become 0, before they are rounded.
    expected = np.where(np.abs(wide) < TINY, np.copysign(np.float32(0), expected), expected)
    is_nan = np.isnan(wide)
    assert is_nan.any() and np.isinf(expected).any() and (expected == 0).any()
    assert np.isnan(got[is_nan]).all()
    np.testing.assert_array_equal(got[~is_nan].view(np.uint32), expected[~is_nan].view(np.uint32))


def test_float64_words_are_exact() -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 2**32, 100_000, np.uint32).view(np.float32)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        x = np.concatenate([x, np.float32(SPECIAL), np.float32(-SPECIAL)])
        expected = np.where(np.abs(x) < TINY, np.copysign(0.0, x), np.float64(x))
    words = np.asarray(jax.jit(float64_words)(x))
    got = words.view(np.float64)[..., 0]
    is_nan = np.isnan(x)
    assert np.isnan(got[is_nan]).all()
    np.testing.assert_array_equal(got[~is_nan], expected[~is_nan])
    back = np.asarray(jax.jit(float32_of_words)(words))
    np.testing.assert_array_equal(back[~is_nan], np.float32(expected[~is_nan]))


def test_eight_wide_environments_and_two_pools_at_once() -> None:
    """Pools in turn, in one process, each with its twin: neither sees the actions of the other."""
    envs = [make_env(env_config("HalfCheetah-v4", num_envs=n, seed=n), "evaluate") for n in (8, 2)]
    twins = [twin_of(env) for env in envs]
    actions = [random_actions(env, 300) for env in envs]
    states, steps = [env.reset(jax.random.key(0)) for env in envs], [jax.jit(e.step) for e in envs]
    for twin in twins:
        twin.reset()
    for t in range(300):
        for i, (step, twin) in enumerate(zip(steps, twins, strict=True)):
            states[i], row = step(states[i], actions[i][t])
            assert_same(tuple(row), twin.step(np.float64(actions[i][t]))[:4])
    assert not np.array_equal(states[0].obs[:2], states[1].obs)
    for env, state in zip(envs, states, strict=True):
        env.check(state)


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


@pytest.mark.parametrize(("env_id", "moves"), [("Pusher-v4", False), ("Pusher-v5", True)])
def test_the_arm_of_pusher_v4_passes_through_the_object(env_id: str, moves: bool) -> None:
    """Which is why it is refused. Torques that are alike from step to step swing the arm far."""
    pool = envpool.make_gymnasium(env_id, num_envs=200, seed=1)
    start = pool.reset()[0][:, 17:20].copy()  # [200, 3], where the object is
    rng, torque, moved = np.random.default_rng(0), np.zeros((200, 7)), False
    for _ in range(99):
        torque = 0.95 * torque + 0.5 * rng.normal(size=torque.shape)
        obs, *_ = pool.step(np.clip(torque, -2, 2))
        moved |= bool((np.abs(obs[:, 17:20] - start) > 1e-3).any())
    assert moved == moves


def test_render() -> None:
    env = make_env(env_config("Pong-v5"), "video", num_envs=1)
    frame = env.render(env.reset(jax.random.key(0)))
    assert frame.ndim == 3 and frame.shape[2] == 3 and frame.dtype == np.uint8
    env = make_env(env_config("CartPole-v1"))
    with pytest.raises(UserError, match="cannot render"):
        env.render(env.reset(jax.random.key(0)))
