"""Evaluation: which episodes count, with which rewards, and what it leaves alone."""

from types import SimpleNamespace
from typing import Any

import envpool
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from toy_envs import GO_ON, TERMINATE, LengthEnv, env_config

from common.envs import make_env
from common.errors import UserError
from common.networks import Memory

import common.run.evaluator
from common.run.evaluator import Evaluator, episodes, evaluator, shown_return, still_running

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def first_action(learner: Any, obs: Any, key: Any) -> Any:
    return jnp.zeros(len(obs), jnp.int32)


@pytest.fixture
def lengths(monkeypatch: pytest.MonkeyPatch) -> Evaluator:
    """Up to three environments; the i-th has episodes of i steps, the j-th returns 100 j + i."""
    monkeypatch.setattr(common.run.evaluator, "MAX_ENVS", 3)
    monkeypatch.setattr(LengthEnv, "made", 0)
    return Evaluator(env_config("ToyLength-v0"), first_action)


def results(log_data: dict) -> list[float]:
    return [log_data["logs"][f"charts/evaluation_{name}"] for name in ("return", "std", "length")]


@pytest.mark.parametrize(
    ("num_episodes", "returns", "lengths_played"),
    [
        (1, [101], [1]),
        (2, [101, 102], [1, 2]),
        (3, [101, 102, 103], [1, 2, 3]),
        (4, [101, 102, 103, 201], [1, 2, 3, 1]),
        (5, [101, 102, 103, 201, 202], [1, 2, 3, 1, 2]),
        (6, [101, 102, 103, 201, 202, 203], [1, 2, 3, 1, 2, 3]),
    ],
)
def test_every_environment_plays_as_many_episodes(
    num_episodes: int, returns: list, lengths_played: list, lengths: Evaluator
) -> None:
    log_data = lengths({}, 70, num_episodes)
    assert (log_data["log_type"], log_data["sample_step"]) == ("evaluate", 70)
    expected = [np.mean(returns), np.std(returns), np.mean(lengths_played)]
    assert results(log_data) == pytest.approx(expected, rel=1e-6)


def test_environments_are_kept_while_their_number_stays(lengths: Evaluator) -> None:
    lengths({}, 0, 3)
    lengths({}, 10, 5)
    assert LengthEnv.made == 3
    LengthEnv.made = 0
    assert results(lengths({}, 20, 2))[0] == pytest.approx(101.5)
    assert LengthEnv.made == 2
    LengthEnv.made = 0
    assert results(lengths({}, 30, 3))[0] == pytest.approx(102)
    lengths.close()
    lengths.close()
    LengthEnv.made = 0
    assert results(lengths({}, 40, 3))[0] == pytest.approx(102)


def test_a_new_pool_of_the_same_size_gets_a_new_program() -> None:
    traced = []

    def predict(learner: Any, obs: Any, key: Any) -> Any:
        traced.append(obs.shape)
        return first_action(learner, obs, key)

    play = Evaluator(env_config("Catch-v0"), predict)
    before = results(play({}, 0, 4))
    assert before[2] == 9
    assert results(play({}, 0, 4))[2] == 9 and len(traced) == 1
    play.close()
    assert results(play({}, 0, 4)) == before and len(traced) == 2


def test_the_learner_decides_and_is_left_alone() -> None:
    def predict(learner: Any, obs: Any, key: Any) -> Any:
        return jnp.where(obs[:, 0] + 1 >= learner["length"], TERMINATE, GO_ON)

    play = Evaluator(env_config("ToyCount-v0"), predict)
    learner = {"length": jnp.float32(2)}
    # 10 + 21, then 10 + 20 + 31
    assert results(play(learner, 0, 4)) == [31, 0, 2]
    assert results(play(learner, 0, 4)) == [31, 0, 2]
    assert results(play({"length": jnp.float32(3)}, 0, 4)) == [61, 0, 3]
    assert float(learner["length"]) == 2


def test_a_recurrent_policy_remembers_the_steps_of_its_own_episode() -> None:
    def predict(learner: Any, obs: Any, key: Any, memory: Any) -> Any:
        (steps,), valid = memory
        steps = steps + 1
        action = jnp.where(steps >= learner["length"] + jnp.arange(len(obs)), TERMINATE, GO_ON)
        return action, (jnp.where(valid, steps, 0),)

    def initial_core(num_envs: int) -> Any:
        return (jnp.zeros(num_envs, jnp.int32),)

    play = Evaluator(env_config("ToyCount-v0"), predict, initial_core)
    # Environment i plays episodes of 2 + i steps: 10 + 21, 10 + 20 + 31, 10 + 20 + 30 + 41.
    learner = {"length": jnp.int32(2)}
    assert results(play(learner, 0, 3)) == pytest.approx([(31 + 61 + 101) / 3, 28.674, 3], rel=1e-4)
    lengths = np.arange(2, 22)
    returns = 10 * lengths * (lengths + 1) / 2 + 1
    expected = [returns.mean(), returns.std(), lengths.mean()]
    assert results(play(learner, 0, 40)) == pytest.approx(expected, rel=1e-5)
    assert results(play({"length": jnp.int32(3)}, 0, 1)) == [61, 0, 3]


@pytest.mark.parametrize(
    ("mean", "deviation", "shown"),
    [
        (500.0, 0.0, "500.0 ± 0.0"),
        (-143.26, 70.7, "-143.3 ± 70.7"),
        (0.955, 0.2, "0.955 ± 0.200"),
        (0.5, 12.0, "0.5 ± 12.0"),
        (-9.999, 0.0, "-9.999 ± 0.000"),
    ],
)
def test_returns_are_shown_with_the_digits_that_they_carry(mean, deviation, shown) -> None:
    assert shown_return(mean, deviation) == shown


def test_numbers_of_episodes() -> None:
    assert [episodes(n) for n in (1, 2, 20)] == ["1 episode", "2 episodes", "20 episodes"]


@pytest.mark.parametrize("remembers", [True, False])
def test_act(remembers: bool) -> None:
    def predict(learner: Any, obs: Any, key: Any, memory: Any = None) -> Any:
        if memory is None:
            return obs + learner
        core, valid = memory
        return obs + learner + core, jnp.where(valid, core + 1, 0)

    initial_core = jnp.zeros if remembers else None
    play = Evaluator(env_config("ToyCount-v0"), predict, initial_core)
    core = jnp.array([4.0, 5.0]) if remembers else ()
    obs, valid = jnp.array([10.0, 20.0]), jnp.array([True, False])
    action, core = play.act(jnp.float32(100), obs, jax.random.key(0), Memory(core, valid))
    if remembers:
        assert action.tolist() == [114, 125] and core.tolist() == [5, 0]
    else:
        assert action.tolist() == [110, 120] and core == ()


@pytest.mark.parametrize("env_id", ["CartPole-v1", "gymnax/CartPole-v1"])
def test_evaluation_does_not_change_training(env_id: str) -> None:
    def train(evaluate: bool) -> np.ndarray:
        config = env_config(env_id)
        env, play = make_env(config), Evaluator(config, first_action)
        step, state, seen = jax.jit(env.step), env.reset(jax.random.key(0)), []
        for t in range(30):
            if evaluate and t % 10 == 0:
                play({}, t, 3)
            state, time_step = step(state, jnp.int32([t % 2, 1]))
            seen.append(np.asarray(time_step.obs))
        return np.stack(seen)

    np.testing.assert_array_equal(train(evaluate=True), train(evaluate=False))


def test_keys_follow_from_seed_and_step_alone() -> None:
    def random_action(learner: Any, obs: Any, key: Any) -> Any:
        return jax.random.randint(key, (len(obs),), 0, 2)

    play = Evaluator(env_config("gymnax/CartPole-v1", seed=1), random_action)
    again = Evaluator(env_config("gymnax/CartPole-v1", seed=1), random_action)
    other = Evaluator(env_config("gymnax/CartPole-v1", seed=2), random_action)
    first = results(play({}, 100, 8))
    assert results(play({}, 200, 8)) != first
    assert results(play({}, 100, 8)) == first == results(again({}, 100, 8))
    assert results(other({}, 100, 8)) != first


def test_evaluation_plays_full_atari_games_for_raw_rewards() -> None:
    def predict(learner: Any, obs: Any, key: Any) -> Any:
        return obs.reshape(len(obs), -1).astype(jnp.int32).sum(axis=-1) % 6

    config = env_config("Qbert-v5", env_kwargs=("max_episode_steps=500",))
    play = Evaluator(config, predict)
    log_data = play({}, 0, 2)
    assert play._env is not None
    seeds = play._env.backend.pool.config["env_seed"]
    pool = envpool.make(
        "Qbert-v5", env_type="gymnasium", num_envs=2, seed=list(seeds), max_episode_steps=500
    )
    obs, returns, running = pool.reset()[0], np.zeros(2), np.ones(2, bool)
    most_lives = 0
    while running.any():
        action = obs.reshape(2, -1).astype(np.int32).sum(axis=-1) % 6
        obs, reward, terminated, truncated, info = pool.step(action.astype(np.int32))
        returns += running * reward
        most_lives = max(most_lives, int(info["lives"].max()))
        running &= ~(terminated | truncated)
    assert results(log_data)[0] == returns.mean() and returns.mean() >= 25
    assert most_lives > int(info["lives"].min()), "lives were lost on the way"


class StepCounter(gym.Env):
    """Never ends; reward 1 a step; `steps` counts those of all copies."""

    steps = 0
    observation_space, action_space = spaces.Box(0, 1, (1,), np.float32), spaces.Discrete(2)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict]:
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict]:
        StepCounter.steps += 1
        return np.zeros(1, np.float32), 1.0, False, False, {}


gym.register("ToyEndless-v0", StepCounter)


@pytest.mark.parametrize(("num_episodes", "played"), [(1, 1), (4, 4), (50, 20)])
def test_an_episode_that_never_ends_counts_with_its_return_so_far(
    num_episodes: int, played: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepCounter, "steps", 0)
    play = Evaluator(env_config("ToyEndless-v0"), first_action)
    assert play.max_steps == 100_000
    play.max_steps = 7
    log_data = play({}, 0, num_episodes)
    # The episodes that 20 environments never begin do not count.
    assert results(log_data) == [7, 0, 7]
    assert log_data["logs"]["charts/evaluation_unfinished"] == played
    assert StepCounter.steps == 7 * played
    play.max_steps = 9
    assert results(play({}, 0, num_episodes)) == [9, 0, 9]


def test_an_environment_plays_no_other_episode_after_one_that_was_cut_off(
    lengths: Evaluator,
) -> None:
    lengths.max_steps = 3
    log_data = lengths({}, 0, 6)
    assert results(log_data)[2] == 2 and "charts/evaluation_unfinished" not in log_data["logs"]
    lengths.close()
    LengthEnv.made, lengths.max_steps = 0, 2
    log_data = lengths({}, 0, 6)
    # The third environment, whose episodes have 3 steps, is cut off at 2 with return 0.
    returns = [101, 102, 0, 201, 202]
    expected = [np.mean(returns), np.std(returns), np.mean([1, 2, 2, 1, 2])]
    assert results(log_data) == pytest.approx(expected, rel=1e-6)
    assert log_data["logs"]["charts/evaluation_unfinished"] == 1


@pytest.mark.parametrize("count", [0, -1])
def test_an_evaluation_has_episodes(count: int) -> None:
    play = Evaluator(env_config("gymnax/MountainCar-v0"), lambda learner, obs, key: obs)
    with pytest.raises(UserError, match=f"1 episode or more, got {count}"):
        play({}, 0, count)


def test_seeds_count_their_unfinished_episodes_together() -> None:
    def never(learner: Any, obs: Any, key: Any) -> Any:
        return jnp.full(len(obs), learner, jnp.int32)

    play = Evaluator(env_config("gymnax/MountainCar-v0", seed=5), never)
    play.num_seeds, play.max_steps = 2, 11
    logs = play(jnp.int32([0, 1]), 0, 3)["logs"]
    assert logs["charts/evaluation_unfinished"] == 6
    assert [logs[f"seed_{seed}/evaluation_return"] for seed in (5, 6)] == [-11, -11]


def test_what_was_cut_off_is_said() -> None:
    logs = {"charts/evaluation_unfinished": 2.0}
    line = "2 of 20 episodes still running after 1,000 steps: their returns so far count"
    assert still_running(logs, 20, 1000) == [line]
    (line,) = still_running(logs, 21, 1000)
    assert line.endswith("; episodes that never began do not")
    (line,) = still_running(logs, 20, 1000, num_seeds=3)
    assert line.startswith("2 of 60 episodes")
    assert still_running({}, 20, 1000) == []


def test_a_faulty_environment_is_reported() -> None:
    config = env_config("ToyFaulty-v0", env_kwargs=("fault=raise", "at=3"))
    with pytest.raises(UserError, match="the motor broke"):
        Evaluator(config, first_action)({}, 0, 2)


@pytest.mark.parametrize(
    ("first_step", "frequency", "expected"),
    [
        (0, 250, [100, 200, "e300", 300, 400, "e500", 500, 600]),
        (0, 100, ["e100", 100, "e200", 200, "e300", 300, "e400", 400, "e500", 500, "e600", 600]),
        (0, 10, ["e100", 100, "e200", 200, "e300", 300, "e400", 400, "e500", 500, "e600", 600]),
        (0, 0, [100, 200, 300, 400, 500, 600]),
        (0, 1000, [100, 200, 300, 400, 500, 600]),
        (300, 250, [400, "e500", 500, 600]),
        # The last step of a run is 700.
        (400, 0, [500, 600, "e700", 700]),
        (400, 350, [500, 600, "e700", 700]),
        (400, 300, [500, "e600", 600, "e700", 700]),
    ],
)
def test_evaluator_decorator(first_step: int, frequency: int, expected: list) -> None:
    def call(trainer: Any) -> Any:
        for step in range(first_step + 100, expected[-1] + 1, 100):
            trainer.state.step = step
            yield {"log_type": "collect", "sample_step": step, "logs": {}}
            yield {"log_type": "train", "sample_step": step, "logs": {}}

    def run_evaluate(num_episodes: int) -> dict:
        assert num_episodes == 7
        return {"log_type": "evaluate", "sample_step": trainer.state.step, "logs": {}}

    trainer = SimpleNamespace(
        state=SimpleNamespace(step=first_step),
        evaluate=run_evaluate,
        config=SimpleNamespace(total_timesteps=700),
    )
    seen = [
        f"e{log['sample_step']}" if log["log_type"] == "evaluate" else log["sample_step"]
        for log in evaluator(frequency, 7)(call)(trainer)
        if log["log_type"] != "train"
    ]
    assert seen == expected
