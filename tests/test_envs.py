"""The environment contract on the Gymnasium, JAX and (numpy) envpool backends."""

import importlib
import itertools
import re
import sys
import warnings
from functools import partial
from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from toy_envs import (
    BOTH,
    GO_ON,
    LOSE_LIFE,
    TERMINATE,
    TRUNCATE,
    CountEnv,
    CountJaxEnv,
    CountPool,
    EchoEnv,
    LengthEnv,
    env_config,
    play,
)

import common.envs
from algos import ppo
from common.envs import (
    Env,
    config_backend,
    make_env,
    require_action_space,
    require_bounded_actions,
    resolve_backend,
    scale_action,
)
from common.envs.env import EnvState
from common.envs.envpool_backend import PoolStepper
from common.envs.host import HostBackend
from common.envs.jax_backend import JaxBackend
from common.errors import UserError

from common.run import cli

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
F, T = False, True

# --- boundaries -----------------------------------------------------------------------------------

COLUMNS = [
    *("action", "obs", "reward", "terminated", "truncated"),
    *("valid", "finished", "finished_return", "finished_length"),
]
TABLE: dict[str, list[tuple]] = {
    "termination": [
        (GO_ON, [1, 0], 10, F, F, T, F, 0, 0),
        (TERMINATE, [2, 1], 21, T, F, T, T, 31, 2),
        (TERMINATE, [0, -1], 0, F, F, F, F, 31, 2),
        (GO_ON, [1, 0], 10, F, F, T, F, 31, 2),
        (GO_ON, [2, 0], 20, F, F, T, F, 31, 2),
        (TERMINATE, [3, 1], 31, T, F, T, T, 61, 3),
    ],
    "truncation": [
        (GO_ON, [1, 0], 10, F, F, T, F, 0, 0),
        (GO_ON, [2, 0], 20, F, F, T, F, 0, 0),
        (TRUNCATE, [3, 2], 32, F, T, T, T, 62, 3),
        (TRUNCATE, [0, -1], 0, F, F, F, F, 62, 3),
        (GO_ON, [1, 0], 10, F, F, T, F, 62, 3),
        (GO_ON, [2, 0], 20, F, F, T, F, 62, 3),
    ],
    "both on one step": [
        (GO_ON, [1, 0], 10, F, F, T, F, 0, 0),
        (BOTH, [2, 3], 23, T, T, T, T, 33, 2),
        (GO_ON, [0, -1], 0, F, F, F, F, 33, 2),
        (BOTH, [1, 3], 13, T, T, T, T, 13, 1),
        (BOTH, [0, -1], 0, F, F, F, F, 13, 1),
        (GO_ON, [1, 0], 10, F, F, T, F, 13, 1),
    ],
    "two short episodes in a row": [
        (GO_ON, [1, 0], 10, F, F, T, F, 0, 0),
        (TERMINATE, [2, 1], 21, T, F, T, T, 31, 2),
        (GO_ON, [0, -1], 0, F, F, F, F, 31, 2),
        (GO_ON, [1, 0], 10, F, F, T, F, 31, 2),
        (TRUNCATE, [2, 2], 22, F, T, T, T, 32, 2),
        (GO_ON, [0, -1], 0, F, F, F, F, 32, 2),
    ],
    "one-step episodes in a row": [
        (TERMINATE, [1, 1], 11, T, F, T, T, 11, 1),
        (TERMINATE, [0, -1], 0, F, F, F, F, 11, 1),
        (TRUNCATE, [1, 2], 12, F, T, T, T, 12, 1),
        (TRUNCATE, [0, -1], 0, F, F, F, F, 12, 1),
        (TERMINATE, [1, 1], 11, T, F, T, T, 11, 1),
        (TERMINATE, [0, -1], 0, F, F, F, F, 11, 1),
    ],
    "no end": [
        (GO_ON, [1, 0], 10, F, F, T, F, 0, 0),
        (GO_ON, [2, 0], 20, F, F, T, F, 0, 0),
        (GO_ON, [3, 0], 30, F, F, T, F, 0, 0),
        (GO_ON, [4, 0], 40, F, F, T, F, 0, 0),
        (GO_ON, [5, 0], 50, F, F, T, F, 0, 0),
        (GO_ON, [6, 0], 60, F, F, T, F, 0, 0),
    ],
}
# Only envpool has lives: the lost life ends the learner's episode, the game goes on.
LIFE_LOSS = [
    (GO_ON, [1, 0], 10, F, F, T, F, 0, 0),
    (LOSE_LIFE, [2, 4], 24, T, F, T, F, 0, 0),
    (TERMINATE, [2, -1], 0, F, F, F, F, 0, 0),
    (GO_ON, [3, 0], 30, F, F, T, F, 0, 0),
    (TERMINATE, [4, 1], 41, T, F, T, T, 105, 4),
    (LOSE_LIFE, [0, -1], 0, F, F, F, F, 105, 4),
]
BACKENDS = ("gymnasium", "jax", "envpool", "envpool, clipped rewards")


def toy_env(backend: str, num_envs: int) -> Env:
    if backend == "gymnasium":
        return make_env(env_config("ToyCount-v0", num_envs=num_envs))
    if backend == "jax":
        return Env("toy", JaxBackend(CountJaxEnv(), num_envs))
    pool = CountPool(num_envs, clip="clipped" in backend)
    return Env("toy", HostBackend(PoolStepper(pool)))


@pytest.fixture(scope="module", params=BACKENDS)
def played(request: pytest.FixtureRequest) -> Any:
    """Every case of the table side by side, one lane each."""
    cases = dict(TABLE)
    if "envpool" in request.param:
        cases["life loss"] = LIFE_LOSS
    actions = np.array([[row[0] for row in case] for case in cases.values()]).T  # [T, N]
    state, rows = play(toy_env(request.param, len(cases)), jnp.int32(actions))
    return request.param, list(cases), state, rows


@pytest.mark.parametrize("case", [*TABLE, "life loss"])
def test_boundary_rows(played: Any, case: str) -> None:
    backend, cases, _, rows = played
    if case not in cases:
        pytest.skip("only envpool has lives")
    columns = zip(*{**TABLE, "life loss": LIFE_LOSS}[case], strict=True)
    expected = dict(zip(COLUMNS, columns, strict=True))
    if "clipped" in backend:
        expected["reward"] = [min(reward, 1) for reward in expected["reward"]]
    lane = cases.index(case)
    np.testing.assert_array_equal(rows["first_obs"][lane], [0, -1])
    for name in COLUMNS[1:]:
        np.testing.assert_array_equal(rows[name][:, lane], expected[name], err_msg=name)


def test_row_dtypes(played: Any) -> None:
    _, _, state, rows = played
    floats, flags = ("obs", "reward", "finished_return"), ("terminated", "truncated", "valid")
    assert all(rows[name].dtype == np.float32 for name in floats)
    assert all(rows[name].dtype == np.bool_ for name in flags)
    assert state.running_length.dtype == np.int32 and state.fault.dtype == np.int32


def test_summary_adds_up_finished_games(played: Any) -> None:
    backend, cases, state, _ = played
    lost = "life loss" in cases
    # 31 + 61, 62, 33 + 13, 31 + 32, 11 + 12 + 11; and 105 of the game with a lost life
    assert int(state.summary.episodes) == 10 + lost
    assert float(state.summary.return_sum) == 297 + 105 * lost
    assert float(state.summary.length_sum) == 18 + 4 * lost
    cleared = toy_env(backend, len(cases)).reset_summary(state).summary
    assert [float(x) for x in cleared] == [0, 0, 0]


def test_steps_outside_a_scan_give_the_same_rows() -> None:
    env = toy_env("gymnasium", 1)
    state, step = env.reset(jax.random.key(0)), jax.jit(env.step)
    for action, obs, reward, terminated, *_ in TABLE["termination"]:
        state, time_step = step(state, jnp.int32([action]))
        np.testing.assert_array_equal(time_step.obs, [obs])
        assert (float(time_step.reward[0]), bool(time_step.terminated[0])) == (reward, terminated)


# --- Gymnasium ------------------------------------------------------------------------------------


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_gymnasium_equals_a_plain_sync_vector_env(env_id: str) -> None:
    env = make_env(env_config(env_id, env_backend="gymnasium", num_envs=3))
    twin = SyncVectorEnv([lambda: gym.make(env_id)] * 3, autoreset_mode=AutoresetMode.NEXT_STEP)
    twin.action_space.seed(0)
    actions = [twin.action_space.sample() for _ in range(300)]
    _, rows = play(env, jnp.asarray(np.stack(actions)))
    first, _ = twin.reset(seed=env.backend.stepper.seeds)
    np.testing.assert_array_equal(rows["first_obs"], first)
    for t, action in enumerate(actions):
        obs, reward, terminated, truncated, _ = twin.step(action)
        np.testing.assert_array_equal(rows["obs"][t], obs)
        np.testing.assert_array_equal(rows["reward"][t], np.float32(reward))
        np.testing.assert_array_equal(rows["terminated"][t], terminated)
        np.testing.assert_array_equal(rows["truncated"][t], truncated)
    assert rows["finished"].sum() >= 3


SPACES = {
    "vector": spaces.Box(-2, 2, (3,), np.float32),
    "scalar": spaces.Box(-2, 2, (), np.float32),
    "float64": spaces.Box(-0.1, 0.1, (2,), np.float64),
    "image": spaces.Box(0, 255, (5, 4, 3), np.uint8),
    "integers": spaces.Box(-7, 9, (2,), np.int64),
    "discrete": spaces.Discrete(4),
    "discrete from 5": spaces.Discrete(3, start=5),
    "discrete from -2": spaces.Discrete(3, start=-2),
    "multi-discrete": spaces.MultiDiscrete([3, 2, 4]),
    "multi-discrete from [1, -3]": spaces.MultiDiscrete([3, 2], start=[1, -3]),
    "multi-binary": spaces.MultiBinary(4),
    "multi-binary matrix": spaces.MultiBinary([2, 3]),
    "dict": spaces.Dict(b=spaces.Discrete(3, start=1), a=spaces.Box(-1, 1, (2,), np.float32)),
    "tuple": spaces.Tuple((spaces.MultiDiscrete([2, 3]), spaces.Box(0, 1, (1,), np.float32))),
    "nested": spaces.Dict(
        x=spaces.Tuple((spaces.Discrete(2, start=7), spaces.Dict(y=spaces.Discrete(5)))),
        z=spaces.Box(0, 255, (2, 2, 1), np.uint8),
    ),
}


def learner_action(space: spaces.Space, action: Any) -> Any:
    """What a learner gives to make the environment receive `action`."""
    if isinstance(space, spaces.Dict):
        return {k: learner_action(s, action[k]) for k, s in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(learner_action(s, a) for s, a in zip(space.spaces, action, strict=True))
    if isinstance(space, spaces.Box) and space.dtype in (np.float32, np.float64):
        return np.float32(action)
    return np.int32(action - getattr(space, "start", 0))


@pytest.mark.parametrize("name", SPACES)
def test_spaces_as_observation_and_as_action(name: str) -> None:
    space, (steps, n) = SPACES[name], (4, 2)
    env_id = f"ToyEcho{list(SPACES).index(name)}-v0"
    gym.register(env_id, lambda: EchoEnv(space, space))
    env = make_env(env_config(env_id, num_envs=n))
    assert (env.observation_space, env.action_space) == (space, space)
    space.seed(3)
    wanted = [space.sample() for _ in range(steps * n)]
    EchoEnv.observations, EchoEnv.actions = [], []
    actions = jax.tree.map(
        lambda *x: jnp.stack(x).reshape(steps, n, *np.shape(x[0])),
        *[learner_action(space, action) for action in wanted],
    )
    state, rows = play(env, actions)
    env.check(state)
    tree = jax.tree.map(lambda x: np.asarray(x).reshape(steps * n, *x.shape[2:]), rows["obs"])
    for i in range(steps * n):
        assert_near(jax.tree.map(lambda x, i=i: x[i], tree), EchoEnv.observations[n + i])
        assert_near(EchoEnv.actions[i], wanted[i])
        assert space.contains(EchoEnv.actions[i])


def assert_near(got: Any, wanted: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), got, wanted)


def test_rounded_bounds_of_a_float64_action_stay_inside_the_space() -> None:
    gym.register("ToyBounds-v0", lambda: EchoEnv(spaces.Discrete(2), SPACES["float64"]))
    env = make_env(env_config("ToyBounds-v0", num_envs=1))
    EchoEnv.actions = []
    state, _ = play(env, jnp.full((2, 1, 2), jnp.float32([-0.1, 0.1])))
    env.check(state)
    np.testing.assert_array_equal(EchoEnv.actions, [[-0.1, 0.1]] * 2)


def test_integer_observations_that_do_not_fit_are_refused() -> None:
    wide = spaces.Box(2**40, 2**41, (2,), np.int64)
    gym.register("ToyWide-v0", lambda: EchoEnv(wide, spaces.Discrete(2)))
    with pytest.raises(UserError, match=r"do not fit into 32 bits"):
        make_env(env_config("ToyWide-v0")).reset(jax.random.key(0))


def test_unsigned_64_bit_observations() -> None:
    wide = spaces.Box(0, 2**20, (2,), np.uint64)
    gym.register("ToyUnsigned-v0", lambda: EchoEnv(wide, spaces.Discrete(2)))
    EchoEnv.observations = []
    _, rows = play(make_env(env_config("ToyUnsigned-v0", num_envs=1)), jnp.zeros((3, 1), jnp.int32))
    np.testing.assert_array_equal(rows["obs"][:, 0], EchoEnv.observations[1:])


# --- make_env -------------------------------------------------------------------------------------


def refusal(**changes: Any) -> str:
    with pytest.raises(UserError) as caught:
        make_env(env_config(**changes))
    assert isinstance(caught.value, ValueError)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("env_id", ["CartPole-v11", "CartPole", "Cartpole-v1"])
def test_unknown_id_names_near_matches(env_id: str) -> None:
    text = refusal(env_id=env_id)
    assert repr(env_id) in text and "CartPole-v1" in text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(env_id="zzz"), ["'zzz'", "any backend"]),
        (dict(env_id=""), ["''"]),
        (dict(env_id="gymnax/CartPole-v9"), ["did you mean gymnax/CartPole-v1"]),
        (dict(env_id="pgx/minatar-break"), ["did you mean pgx/minatar-breakout"]),
        (dict(env_id="CartPole-v1", env_backend="jax"), ["backend jax"]),
        (dict(env_id="Pong-v5", env_backend="gymnasium"), ["backend gymnasium"]),
        (dict(env_id="nowhere:Toy-v0"), ["nowhere:Toy-v0", "No module named 'nowhere'"]),
        (dict(env_id="CartPole-v1", env_backend="torch"), ["'torch'", "envpool, gymnasium, jax"]),
        (dict(env_id="ToyCount-v0", env_module="no_such"), ["'no_such'", "PYTHONPATH"]),
        (dict(env_id="pgx/tic_tac_toe"), ["2 players"]),
        (dict(env_id="Go9x9-v1"), ["several players"]),
        (dict(env_id="IntersectionMultiAgent-v0"), ["several players"]),
        (dict(env_id="VizdoomCustom-v1"), ["VizdoomCustom-v1", ".cfg"]),
    ],
)
def test_make_env_refuses(changes: dict, words: list[str]) -> None:
    text = refusal(**changes)
    assert all(word in text for word in words), text


@pytest.mark.parametrize("pair", ["frame_skip", "=4", "a b=4", "4=4", ""])
def test_env_kwargs_that_are_no_pairs(pair: str) -> None:
    assert repr(pair) in refusal(env_id="CartPole-v1", env_kwargs=(pair,))


OWN_OPTIONS = ("num_envs=4", "seed=4", "env_seed=4", "batch_size=1", "gym_reset_return_info=True")


@pytest.mark.parametrize(
    ("env_id", "pair", "accepted"),
    [
        *(("CartPole-v1", pair, "max_episode_steps") for pair in OWN_OPTIONS),
        ("CartPole-v1", "gravity=9", "max_episode_steps"),
        ("CartPole-v1", "max_episode_steps=many", "max_episode_steps"),
        ("ToyFaulty-v0", "nofault=1", "unexpected keyword argument 'nofault'"),
        ("gymnax/CartPole-v1", "gravitas=9", "gravity"),
        ("gymnax/CartPole-v1", "max_steps_in_episode=many", "max_steps_in_episode"),
        ("pgx/2048", "size=5", "size"),
    ],
)
def test_env_kwargs_that_the_environment_refuses(env_id: str, pair: str, accepted: str) -> None:
    text = refusal(env_id=env_id, env_kwargs=(pair,))
    assert pair.split("=")[0] in text and accepted in text


def test_a_dataset_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    import gymnax

    def no_network(*args: Any, **kwargs: Any) -> Any:
        raise OSError("no network")

    monkeypatch.setattr(gymnax, "make", no_network)
    assert "no network" in refusal(env_id="gymnax/MNISTBandit-bsuite")


@pytest.mark.parametrize(
    ("observation_space", "action_space", "named"),
    [
        (spaces.Text(5), spaces.Discrete(2), "observation space Text"),
        (spaces.Discrete(2), spaces.Text(5), "action space Text"),
        (spaces.Dict(a=spaces.Text(5)), spaces.Discrete(2), "observation space Text"),
        (spaces.Discrete(2), spaces.Tuple((spaces.Text(5),)), "action space Text"),
    ],
)
def test_unsupported_spaces(observation_space: Any, action_space: Any, named: str) -> None:
    env_id = "ToyUnsupported-v0"
    gym.registry.pop(env_id, None)
    gym.register(env_id, lambda: EchoEnv(observation_space, action_space))
    assert named in refusal(env_id=env_id)


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-1, 1, (0,), np.float32),
        spaces.Box(-1, 1, (3, 0), np.float32),
        spaces.MultiDiscrete([]),
        spaces.Dict(a=spaces.Discrete(2), b=spaces.Box(-1, 1, (0,), np.float32)),
        spaces.Dict({}),
        spaces.Tuple(()),
    ],
)
def test_empty_spaces(space: Any) -> None:
    env_id, full = "ToyEmpty-v0", spaces.Discrete(2)
    for what, both in {"observation": (space, full), "action": (full, space)}.items():
        gym.registry.pop(env_id, None)
        gym.register(env_id, partial(EchoEnv, *both))
        text = refusal(env_id=env_id).lower()
        assert "empty" in text and f"{what} space" in text


@pytest.mark.parametrize("space", [spaces.Discrete(10**12), spaces.MultiDiscrete([2, 10**10])])
def test_spaces_of_more_values_than_a_network_can_have(space: Any) -> None:
    env_id, small = "ToyVast-v0", spaces.Discrete(2)
    for what, both in {"observation": (space, small), "action": (small, space)}.items():
        gym.registry.pop(env_id, None)
        gym.register(env_id, partial(EchoEnv, *both))
        assert f"{what} space {space}" in refusal(env_id=env_id)


def test_env_module_registers_an_environment(tmp_path: Any, monkeypatch: Any) -> None:
    code = "import gymnasium, toy_envs\ngymnasium.register('ToyOwn-v0', toy_envs.CountEnv)\n"
    (tmp_path / "own_envs.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    env = make_env(env_config("ToyOwn-v0", env_module="own_envs"))
    assert env.action_space == spaces.Discrete(4)
    (tmp_path / "broken_envs.py").write_text("raise KeyError('two\\nlines')")
    assert "broken_envs" in refusal(env_id="ToyOwn-v0", env_module="broken_envs")
    sys.modules.pop("own_envs")


def test_env_kwargs_are_parsed_as_python_literals() -> None:
    pairs = ("fault=nan_obs", "at=2")
    stepper = make_env(env_config("ToyFaulty-v0", env_kwargs=pairs)).backend.stepper
    assert stepper.envs.get_attr("fault") == ("nan_obs",) * 2
    assert stepper.envs.get_attr("at") == (2, 2)


def test_environments_without_a_render_mode_argument() -> None:
    assert make_env(env_config("ToyCount-v0", num_envs=1)).num_envs == 1
    assert "render_mode" in refusal_of_video("ToyCount-v0")


def refusal_of_video(env_id: str) -> str:
    with pytest.raises(UserError) as caught:
        make_env(env_config(env_id), "video")
    return str(caught.value)


@pytest.mark.parametrize(
    ("env_id", "backend"),
    [
        ("CartPole-v1", "envpool"),
        ("ToyCount-v0", "gymnasium"),
        ("some.module:Thing-v0", "gymnasium"),
        ("gymnax/CartPole-v1", "jax"),
        ("pgx/2048", "jax"),
    ],
)
def test_auto_backend(env_id: str, backend: str) -> None:
    assert resolve_backend(env_id) == backend


def test_require_action_space() -> None:
    env = make_env(env_config("ToyCount-v0"))
    require_action_space("dqn", env, spaces.Discrete)
    with pytest.raises(UserError, match=r"sac needs a Box action space, ToyCount-v0 has Discrete"):
        require_action_space("sac", env, spaces.Box)


class ClosingEnv:
    env_id = "Thing-v0"

    def __init__(self, action_space):
        self.action_space, self.closed = action_space, False

    def close(self):
        self.closed = True


@pytest.mark.parametrize(
    ("space", "kinds", "accepted"),
    [
        (spaces.Discrete(2), (spaces.Box,), "a Box action space"),
        (spaces.Discrete(2), (spaces.MultiDiscrete, spaces.Box), "a MultiDiscrete or Box action"),
        (
            spaces.Dict(a=spaces.Discrete(2)),
            (spaces.Discrete, spaces.MultiDiscrete, spaces.Box),
            "a Discrete, MultiDiscrete or Box action space",
        ),
        (
            spaces.Box(0, 3, (2,), np.int32),
            (spaces.Discrete, spaces.Box),
            "a Discrete or floating Box action space",
        ),
    ],
)
def test_require_action_space_names_all_that_it_takes(space, kinds, accepted):
    env = ClosingEnv(space)
    with pytest.raises(UserError) as refused:
        require_action_space("ppo", env, *kinds)
    text = str(refused.value)
    assert text.startswith(f"ppo needs {accepted}") and f"Thing-v0 has {space};" in text
    assert env.closed


@pytest.mark.parametrize(
    "space", [spaces.Discrete(2), spaces.MultiDiscrete([2, 3]), spaces.Box(-1, 1, (2,))]
)
def test_require_action_space_takes_any_of_several(space):
    env = ClosingEnv(space)
    require_action_space("ppo", env, spaces.Discrete, spaces.MultiDiscrete, spaces.Box)
    assert not env.closed


# --- scale_action ---------------------------------------------------------------------------------


def box(low, high, dtype=np.float32):
    return spaces.Box(np.array(low, dtype), np.array(high, dtype), dtype=dtype)


def scaled(space, action):
    return np.asarray(jax.jit(lambda action: scale_action(space, action))(np.float32(action)))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_actions_of_a_box_span_its_bounds(dtype):
    space = box([-2, 0, 10], [2, 1, 50], dtype)
    action = scaled(space, [[-1, -1, -1], [1, 1, 1], [0, 0, 0], [0.5, -0.5, 0.25]])
    assert action.dtype == np.float32
    expected = [[-2, 0, 10], [2, 1, 50], [0, 0.5, 30], [1, 0.25, 35]]
    np.testing.assert_allclose(action, expected, rtol=1e-6)
    np.testing.assert_allclose(scaled(space, [[-1.5, -7, -1e9], [1.01, 2, np.inf]]), expected[:2])


def test_dimensions_without_two_finite_bounds_are_only_clipped():
    space = box([-np.inf, -np.inf, 1, -4], [np.inf, 3, np.inf, 4])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        action = scaled(space, [[0.5, 0.5, 2.5, 0.5], [-70, -70, 0, -70], [70, 70, 70, 70]])
    assert action.tolist() == [[0.5, 0.5, 2.5, 2], [-70, -70, 1, -4], [70, 3, 70, 4]]


@pytest.mark.parametrize("largest", [1e308, np.inf])
def test_bounds_must_be_finite_in_float32(largest):
    env = ClosingEnv(spaces.Box(-largest, largest, (2,), np.float64))
    with pytest.raises(UserError, match="float32"):
        require_bounded_actions("sac", env)
    assert env.closed
    widest = float(np.finfo(np.float32).max)
    require_bounded_actions("sac", ClosingEnv(spaces.Box(-widest, widest, (2,), np.float64)))


def test_the_widest_bounds_do_not_overflow():
    limit = np.finfo(np.float32).max
    action = scaled(box([-limit, limit / 2], [limit, limit]), [[0, 0], [1, 1], [-1, -1]])
    expected = np.array([[0, 0.75], [1, 1], [-1, 0.5]]) * np.float64(limit)
    np.testing.assert_allclose(action, expected, rtol=1e-6)


def test_rounding_never_leaves_the_bounds():
    rng = np.random.default_rng(0)
    low = (rng.normal(size=5000) * 10.0 ** rng.integers(-3, 4, 5000)).astype(np.float32)
    high = low + (rng.random(5000) * 10.0 ** rng.integers(-6, 4, 5000)).astype(np.float32)
    space = box(low, high)
    center, half = (low + high) / 2, (high - low) / 2
    assert (center + half > high).any() and (center - half < low).any(), "rounding does leave them"
    edges = np.float32([1, -1, np.nextafter(np.float32(1), np.float32(0)), 1e30])
    action = scaled(space, np.tile(edges[:, None], 5000))
    assert (action >= low).all() and (action <= high).all()
    np.testing.assert_allclose(action[0], high, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(), (1,), (2, 3)])
def test_actions_take_the_shape_of_the_box(shape):
    low = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    space = box(low, low + 10)
    action = scaled(space, np.full((4, low.size), 0.5))
    assert action.shape == (4, *shape)
    np.testing.assert_allclose(action, np.tile(low + 7.5, (4, *(1 for _ in shape))), rtol=1e-6)
    assert all(row in space for row in action)


@pytest.mark.parametrize(
    ("space", "action", "expected"),
    [
        (spaces.Discrete(3), [0, 2, 1], [0, 2, 1]),
        (spaces.Discrete(3, start=5), [0, 2, 1], [0, 2, 1]),
        (spaces.MultiDiscrete([2, 9]), [[1, 8], [0, 3]], [[1, 8], [0, 3]]),
        (spaces.MultiDiscrete([[2], [9]]), [[1, 8], [0, 3]], [[[1], [8]], [[0], [3]]]),
        (spaces.MultiBinary([2, 1]), [[1, 0], [0, 1]], [[[1], [0]], [[0], [1]]]),
    ],
)
def test_discrete_actions_only_change_their_shape(space, action, expected):
    action = scale_action(space, jnp.array(action, jnp.int32))
    assert action.dtype == jnp.int32 and action.tolist() == expected


# --- seeds ----------------------------------------------------------------------------------------


def test_no_two_environments_share_a_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[list[int]] = []

    def record(env_id: str, backend: str, seeds: list[int], *rest: Any) -> Any:
        made.append(seeds)
        return JaxBackend(CountJaxEnv(), len(seeds))

    monkeypatch.setattr(common.envs, "_make_backend", record)
    purposes = ("train", "evaluate", "video")
    for seed, purpose, first_step in itertools.product(range(20), purposes, (0, 1000)):
        make_env(env_config("ToyCount-v0", seed=seed, num_envs=32), purpose, first_step=first_step)
    flat = [seed for seeds in made for seed in seeds]
    assert len(flat) == 20 * 3 * 2 * 32
    assert len(set(flat)) == len(flat)
    assert all(0 <= seed < 2**31 for seed in flat)


FIRST_OBS = [
    ("CartPole-v1", "envpool"),
    ("CheetahRun-v1", "envpool"),
    ("CartPole-v1", "gymnasium"),
    ("gymnax/CartPole-v1", "jax"),
]


@pytest.mark.parametrize(("env_id", "backend"), FIRST_OBS)
def test_seeds_decide_the_first_observation(env_id: str, backend: str) -> None:
    def first_obs(seed: int, *args: Any, **kwargs: Any) -> np.ndarray:
        env = make_env(env_config(env_id, env_backend=backend, seed=seed), *args, **kwargs)
        leaves = jax.tree.leaves(env.reset(jax.random.key(seed)).obs)
        return np.concatenate([np.asarray(x).reshape(2, -1) for x in leaves], axis=1)

    same = [first_obs(1), first_obs(1)]
    np.testing.assert_array_equal(*same)
    others = [first_obs(2), first_obs(1, "evaluate"), first_obs(1, first_step=64)]
    rows = [tuple(row) for obs in (same[0], *others) for row in obs]
    # JAX environments go on where they were, so that first_step changes nothing for them.
    assert len(set(rows)) == (6 if backend == "jax" else 8)


# --- faults ---------------------------------------------------------------------------------------


def step_until_fault(env: Env, action: Any, limit: int = 9) -> tuple[EnvState, int]:
    """Step as an algorithm's loop does; the last state and the number of steps."""
    first = env.reset(jax.random.key(0))

    def goes_on(carry: Any) -> Any:
        return (carry[1] < limit) & (carry[0].fault == 0)

    def step(carry: Any) -> Any:
        return env.step(carry[0], action)[0], carry[1] + 1

    state, count = jax.jit(lambda s: jax.lax.while_loop(goes_on, step, (s, 0)))(first)
    return state, int(count)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("raise", "the environment raised ZeroDivisionError: the motor broke"),
        ("nan_obs", "not finite"),
        ("nan_reward", "not finite"),
        ("infinite_reward", "not finite"),
        ("obs_dtype", "obs has dtype complex64"),
        ("obs_shape", "obs has shape (3,)"),
        ("obs_none", "obs has shape ()"),
        ("reward_text", "the reward '1'"),
        ("reward_none", "the reward None"),
        ("reward_array", "the reward array"),
        ("terminated_int", "terminated=1"),
        ("truncated_none", "truncated=None"),
    ],
)
def test_a_faulty_environment_stops_the_loop_at_that_step(fault: str, words: str) -> None:
    env = make_env(env_config("ToyFaulty-v0", env_kwargs=(f"fault={fault}", "at=3")))
    state, count = step_until_fault(env, jnp.zeros(2, jnp.int32))
    assert count == 3
    with pytest.raises(UserError, match=re.escape(words)) as caught:
        env.check(state)
    assert str(caught.value).startswith("ToyFaulty-v0")
    assert "\n" not in str(caught.value)


def test_an_observation_outside_a_discrete_space_stops_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Outside(CountEnv):
        def __init__(self) -> None:
            super().__init__()
            self.observation_space = spaces.Tuple(
                (spaces.Discrete(3, start=1), spaces.MultiDiscrete([2, 9]))
            )

        def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict]:
            super().reset(seed=seed)
            return (1, np.array([0, 0])), {}

        def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict]:
            _, reward, *ended, info = super().step(action)
            return (min(1 + self.steps, 3), np.array([0, 2 * self.steps])), reward, *ended, info

    monkeypatch.setitem(gym.registry, "Outside-v0", gym.spec("ToyCount-v0"))
    monkeypatch.setattr(gym.registry["Outside-v0"], "entry_point", Outside)
    env = make_env(env_config("Outside-v0"))
    state, count = step_until_fault(env, jnp.zeros(2, jnp.int32))
    assert count == 5  # 10 is the first value above 8
    with pytest.raises(UserError, match=re.escape("obs[1] is [ 0 10], outside its space Multi")):
        env.check(state)


def test_what_info_holds_may_change_its_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vector environment would stack it, and no one reads it."""
    step = CountEnv.step

    def told(self: Any, action: Any) -> tuple[Any, Any, bool, bool, dict]:
        return *step(self, action)[:4], {"objects": np.zeros((self.steps, 2))}

    monkeypatch.setattr(CountEnv, "step", told)
    env = make_env(env_config("ToyCount-v0"))
    state, count = step_until_fault(env, jnp.array([GO_ON, TERMINATE]))
    env.check(state)
    assert count == 9


def test_a_sound_environment_passes_the_check() -> None:
    env = make_env(env_config("ToyFaulty-v0"))
    state, count = step_until_fault(env, jnp.zeros(2, jnp.int32))
    env.check(state)
    assert count == 9


@pytest.mark.parametrize("fault", ["raise", "obs_shape", "obs_dtype"])
def test_a_faulty_reset_raises_at_once(fault: str) -> None:
    env = make_env(env_config("ToyFaulty-v0", env_kwargs=(f"fault={fault}", "at=0")))
    with pytest.raises(UserError) as caught:
        env.reset(jax.random.key(0))
    assert "\n" not in str(caught.value)


def test_a_first_observation_that_is_not_finite() -> None:
    env = make_env(env_config("ToyFaulty-v0", env_kwargs=("fault=nan_obs", "at=0")))
    state, count = step_until_fault(env, jnp.zeros(2, jnp.int32))
    assert count == 0
    with pytest.raises(UserError, match="not finite"):
        env.check(state)


def test_the_first_fault_is_the_one_reported() -> None:
    env = make_env(env_config("ToyFaulty-v0", env_kwargs=("fault=raise", "at=3")))
    state, _ = play(env, jnp.int32([[0, 0], [0, 9], [0, 0], [0, 0]]))
    with pytest.raises(UserError, match="an action outside"):
        env.check(state)


TUPLE_SPACE = spaces.Tuple((spaces.Discrete(2), spaces.Box(-1, 1, (1,))))


@pytest.mark.parametrize(
    ("space", "action"),
    [
        (spaces.Discrete(3), jnp.int32([0, 3])),
        (spaces.Discrete(3, start=2), jnp.int32([0, 3])),
        (spaces.Discrete(3), jnp.int32([-1, 0])),
        (spaces.Box(-1, 1, (1,)), jnp.float32([[0], [1.1]])),
        (spaces.Box(-1, 1, (1,)), jnp.float32([[jnp.nan], [0]])),
        (spaces.Box(-np.inf, np.inf, (1,)), jnp.float32([[0], [jnp.inf]])),
        (spaces.Box(0, 5, (1,), np.int32), jnp.int32([[0], [6]])),
        (spaces.MultiDiscrete([2, 3]), jnp.int32([[0, 0], [2, 0]])),
        (spaces.MultiBinary(2), jnp.int32([[0, 1], [2, 0]])),
        (spaces.Dict(a=spaces.Discrete(2)), {"a": jnp.int32([0, 2])}),
        (TUPLE_SPACE, (jnp.int32([0, 0]), jnp.float32([[0], [jnp.nan]]))),
    ],
)
def test_actions_outside_the_space(space: spaces.Space, action: Any) -> None:
    gym.registry.pop("ToyAction-v0", None)
    gym.register("ToyAction-v0", lambda: EchoEnv(spaces.Discrete(2), space))
    env = make_env(env_config("ToyAction-v0"))
    EchoEnv.actions = []
    state, count = step_until_fault(env, action)
    assert count == 1
    assert len(EchoEnv.actions) == 2, "the environment is given the clipped action"
    with pytest.raises(UserError, match=r"ToyAction-v0 was given an action outside"):
        env.check(state)


def test_the_action_of_an_invalid_row_may_be_anything() -> None:
    env = toy_env("jax", 2)
    state, rows = play(env, jnp.int32([[TERMINATE, GO_ON], [99, GO_ON], [GO_ON, GO_ON]]))
    env.check(state)
    np.testing.assert_array_equal(rows["obs"][:, 0], [[1, 1], [0, -1], [1, 0]])
    state, _ = play(env, jnp.int32([[TERMINATE, GO_ON], [GO_ON, 99]]))
    with pytest.raises(UserError, match="an action outside"):
        env.check(state)


@pytest.mark.parametrize(
    ("space", "action"),
    [
        (spaces.Discrete(3), jnp.zeros(2)),
        (spaces.Discrete(3), jnp.zeros((2, 1), jnp.int32)),
        (spaces.Discrete(3), jnp.zeros(3, jnp.int32)),
        (spaces.Box(-1, 1, (1,)), jnp.zeros((2, 1), jnp.int32)),
        (spaces.Box(-1, 1, (1,)), jnp.zeros(2)),
        (spaces.Box(0, 5, (1,), np.int32), jnp.zeros((2, 1))),
        (spaces.Dict(a=spaces.Discrete(2)), {"a": jnp.zeros(2)}),
    ],
)
def test_actions_of_wrong_shape_or_dtype_are_refused_while_tracing(space: Any, action: Any) -> None:
    gym.registry.pop("ToyAction-v0", None)
    gym.register("ToyAction-v0", lambda: EchoEnv(spaces.Discrete(2), space))
    env = make_env(env_config("ToyAction-v0"))
    state = env.reset(jax.random.key(0))
    with pytest.raises(UserError, match=r"ToyAction-v0 needs actions of shape"):
        jax.eval_shape(env.step, state, action)


# --- JAX environments -----------------------------------------------------------------------------


def assert_boundaries(rows: dict) -> None:
    """Check every row of a scan against the contract, by a plain loop over each lane."""
    for lane in range(rows["reward"].shape[1]):
        ended, total, length = False, 0.0, 0
        columns = zip(*(rows[k][:, lane] for k in COLUMNS[2:]), strict=True)
        for reward, terminated, truncated, valid, finished, game, game_length in columns:
            assert valid == (not ended)
            assert valid or not (reward or terminated or truncated)
            total, length = total + reward, length + valid
            ended = bool(terminated or truncated)
            assert finished == ended
            if ended:
                assert (game, game_length) == (pytest.approx(total, rel=1e-5), length)
                total, length = 0.0, 0


def random_actions(env: Env, steps: int) -> Any:
    rng = np.random.default_rng(0)
    return jnp.int32(rng.integers(0, env.action_space.n, (steps, env.num_envs)))


@pytest.mark.parametrize("env_id", ["CartPole-v1", "MountainCar-v0"])
def test_gymnax_steps_as_gymnasium_does(env_id: str) -> None:
    env, twin = make_env(env_config(f"gymnax/{env_id}", num_envs=3)), gym.make(env_id).unwrapped
    assert env.action_space == twin.action_space
    actions = random_actions(env, 60)
    _, rows = play(env, actions)
    assert_boundaries(rows)
    assert rows["obs"].dtype == np.float32
    obs = rows["first_obs"]
    for t in range(60):
        for lane in np.flatnonzero(rows["valid"][t]):
            twin.reset()
            twin.state = np.float64(obs[lane])
            expected, reward, terminated, *_ = twin.step(int(actions[t, lane]))
            np.testing.assert_allclose(rows["obs"][t, lane], expected, atol=1e-5)
            assert (rows["reward"][t, lane], rows["terminated"][t, lane]) == (reward, terminated)
        obs = rows["obs"][t]
    if env_id == "CartPole-v1":
        assert not rows["valid"].all()
        resets = rows["obs"][~rows["valid"]]
        assert (np.abs(resets) <= 0.05).all()
        assert len({tuple(reset) for reset in resets}) == len(resets) >= 3


def test_gymnax_starts_with_the_types_that_steps_keep() -> None:
    # Pendulum's initial time is a Python number; a program would be compiled again without it.
    env = make_env(env_config("gymnax/Pendulum-v1", num_envs=2))
    state = env.reset(jax.random.key(0))
    step = jax.jit(env.step)
    for _ in range(3):
        state, _ = step(state, jnp.zeros((2, 1)))
    assert step._cache_size() == 1


def test_gymnax_parameters_come_from_env_kwargs() -> None:
    config = env_config("gymnax/CartPole-v1", env_kwargs=("max_steps_in_episode=5",))
    _, rows = play(make_env(config), jnp.tile(jnp.int32([[0, 1], [1, 0]]), (6, 1)))
    assert not rows["terminated"].any()
    assert np.flatnonzero(rows["truncated"][:, 0]).tolist() == [4, 10]
    assert np.flatnonzero(~rows["valid"][:, 1]).tolist() == [5, 11]
    assert rows["finished_length"][-1].tolist() == [5, 5]


def test_gymnax_refuses_an_action_outside_the_space() -> None:
    env = make_env(env_config("gymnax/CartPole-v1"))
    state, count = step_until_fault(env, jnp.int32([0, 2]))
    assert count == 1
    with pytest.raises(UserError, match="an action outside"):
        env.check(state)


def test_pgx_minatar_breakout() -> None:
    env = make_env(env_config("pgx/minatar-breakout", num_envs=3))
    _, rows = play(env, random_actions(env, 60))
    assert_boundaries(rows)
    resets = rows["obs"][~rows["valid"]]
    assert len(resets) >= 3
    assert (resets[..., 3].sum(axis=(1, 2)) == 30).all(), "three rows of ten bricks"
    assert set(np.unique(rows["obs"])) == {0, 1} and rows["reward"].sum() > 0


def test_pgx_2048() -> None:
    env = make_env(env_config("pgx/2048", num_envs=3))
    _, rows = play(env, random_actions(env, 60))
    assert_boundaries(rows)
    resets = rows["obs"]["observation"][~rows["valid"]]
    assert len(resets) >= 3
    assert (resets[..., 1:].sum(axis=(1, 2, 3)) == 2).all(), "a game starts with two tiles"


def test_reset_and_step_batch_over_seeds() -> None:
    env = make_env(env_config("gymnax/CartPole-v1"))
    keys, actions = jax.random.split(jax.random.key(7), 3), random_actions(env, 20)

    def run(key: Any) -> Any:
        step = lambda state, action: (lambda s, t: (s, t.obs))(*env.step(state, action))  # noqa: E731
        return jax.lax.scan(step, env.reset(key), actions)[1]  # [T, N, *obs]

    batched, single = jax.jit(jax.vmap(run))(keys), jax.jit(run)  # [K, T, N, *obs]
    for key, obs in zip(keys, batched, strict=True):
        np.testing.assert_allclose(obs, single(key), rtol=1e-5, atol=1e-6)
    assert len({tuple(row) for row in np.asarray(batched[:, 0]).reshape(6, 4)}) == 6


def test_a_batch_of_states_steps_once() -> None:
    env = make_env(env_config("gymnax/MountainCar-v0"))
    states = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(0), 3))
    states, rows = jax.jit(jax.vmap(env.step))(states, jnp.full((3, 2), 2))
    assert rows.obs.shape == (3, 2, 2) and states.fault.tolist() == [0, 0, 0]
    assert rows.reward.tolist() == [[-1, -1]] * 3


# --- render and close -----------------------------------------------------------------------------


def test_render(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CountEnv, "render", lambda self: np.zeros((2, 3, 3), np.uint8))
    env = make_env(env_config("ToyCount-v0"))
    state = env.reset(jax.random.key(0))
    assert env.render(state).shape == (2, 3, 3)
    monkeypatch.setattr(CountEnv, "render", lambda self: None)
    with pytest.raises(UserError, match="rendered NoneType, not an RGB array"):
        env.render(state)
    monkeypatch.setattr(CountEnv, "render", lambda self: np.zeros((2, 3, 3)))
    with pytest.raises(UserError, match=r"rendered float64 \(2, 3, 3\), not an RGB array of uint8"):
        env.render(state)
    monkeypatch.setattr(CountEnv, "render", lambda self: np.zeros((2, 3, 1), np.uint8))
    with pytest.raises(UserError, match=r"rendered uint8 \(2, 3, 1\), not an RGB array of uint8"):
        env.render(state)
    monkeypatch.undo()
    with pytest.raises(UserError, match="cannot render: NotImplementedError"):
        env.render(state)
    jax_env = make_env(env_config("gymnax/CartPole-v1"), "video", num_envs=1)
    with pytest.raises(UserError, match="cannot be rendered"):
        jax_env.render(jax_env.reset(jax.random.key(0)))


def test_close_closes_every_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    monkeypatch.setattr(LengthEnv, "close", lambda self: closed.append(self))
    make_env(env_config("ToyLength-v0", num_envs=3)).close()
    assert len(closed) == 3


def test_what_a_module_registers_is_gymnasiums(tmp_path, monkeypatch):
    """Though envpool knows the id; the module lies in the current folder."""
    code = "import gymnasium\ngymnasium.register('CartPole-v1', 'toy_envs:CountEnv')\n"
    (tmp_path / "my_cart_pole.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.setitem(gym.registry, "CartPole-v1", gym.registry["CartPole-v1"])
    config = env_config("CartPole-v1", env_module="my_cart_pole")
    assert config_backend(config) == "gymnasium"
    assert config_backend(config) == "gymnasium"  # and again, now that it is imported
    env = make_env(config)
    assert env.action_space.n == 4
    env.close()
    assert config_backend(env_config("Acrobot-v1", env_module="my_cart_pole")) == "envpool"
    config = env_config("CartPole-v1", env_module="my_cart_pole", env_backend="envpool")
    assert config_backend(config) == "envpool"


def test_a_module_that_was_imported_before_registers_too(tmp_path, monkeypatch):
    code = "import gymnasium\ngymnasium.register('Acrobot-v1', 'toy_envs:CountEnv')\n"
    (tmp_path / "my_acrobot.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(gym.registry, "Acrobot-v1", gym.registry["Acrobot-v1"])
    importlib.import_module("my_acrobot")
    assert config_backend(env_config("Acrobot-v1", env_module="my_acrobot")) == "gymnasium"
    assert config_backend(env_config("CartPole-v1", env_module="my_acrobot")) == "envpool"


def test_an_id_with_its_module_may_lie_in_the_current_folder(tmp_path, monkeypatch):
    code = "import gymnasium\ngymnasium.register('ToyHere-v0', 'toy_envs:CountEnv')\n"
    (tmp_path / "lies_here.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    assert make_env(env_config("lies_here:ToyHere-v0")).action_space.n == 4


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("gymnax", "needs the package gymnax; pip install"),
        ("six", "needs the package gymnax, which cannot be imported (No module named 'six'); pip"),
    ],
)
def test_a_package_that_cannot_be_imported(missing, words, monkeypatch):
    def fail(name):
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    monkeypatch.setattr("common.envs.importlib.import_module", fail)
    with pytest.raises(UserError) as raised:
        resolve_backend("gymnax/CartPole-v1")
    assert words in str(raised.value)


@pytest.mark.parametrize(
    "use",
    [
        lambda: resolve_backend("CartPole-v1"),
        lambda: cli.parse(ppo.Config, ppo.PRESETS, ["--env-id", "Pendulum-v1"]),
    ],
)
def test_envpool_without_its_system_libraries(use, monkeypatch):
    monkeypatch.setitem(sys.modules, "envpool", None)
    with pytest.raises(UserError, match=r"envpool cannot be imported \(.*apt install libegl1"):
        use()
