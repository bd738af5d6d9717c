"""Ape-X DQN: targets, first priorities and stored blocks by hand, exact counts, and learning."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from q_learning import PARAMS, TARGET, hand_batch, linear_algorithm

from algos import apex_dqn
from algos.apex_dqn import PRESETS, Agent, Algorithm, Config, LearnerState, Trainer
from common.errors import UserError
from common.replay import Transition
from common.rollout import Trajectory

SMALL = Config(
    env_id="gymnax/CartPole-v1",
    env_kwargs=("max_steps_in_episode=9",),
    num_envs=4,
    num_steps=12,
    buffer_size=220,
    batch_size=16,
    learning_starts=340,
    target_network_frequency=96,
    total_timesteps=500,
    log_frequency=96,
)
ENDS = "terminated", "truncated"
PAPER: dict[str, Any] = dict(base_epsilon=0.4, epsilon_exponent=7.0)
HAND = LearnerState(PARAMS, TARGET, ())


def hand_trajectory(ended_by: str) -> Trajectory:
    """Three rows of one environment; the episode may end with the second."""
    flags = {name: jnp.array([[False], [name == ended_by], [False]]) for name in ENDS}
    obs = jnp.array([[[1.0, 0.0]], [[0.0, 1.0]], [[1.0, 1.0]]])
    rollout = Transition(
        obs=obs,
        action=jnp.array([[0], [1], [0]]),
        reward=jnp.array([[1.0], [2.0], [3.0]]),
        valid=jnp.array([[True], [True], [ended_by == ""]]),
        extras=obs @ PARAMS["w"],  # Q = [1, 2], [3, -1], [4, 1]
        **flags,
    )
    return Trajectory(rollout, jnp.array([[2.0, 1.0]]))


@pytest.mark.parametrize(
    ("ended_by", "returns"),
    [
        # θ chooses action 0 everywhere; Q⁻ of it is 0, 2 and, behind the last row, 4.
        ("", [1 + 2 / 2 + 2 / 4, 2 + 3 / 2 + 4 / 4, 3 + 4 / 2]),
        ("terminated", [1 + 2 / 2, 2, None]),
        ("truncated", [1 + 2 / 2 + 2 / 4, 2 + 2 / 2, None]),
    ],
)
def test_first_priorities_by_hand(ended_by, returns):
    algorithm = linear_algorithm(apex_dqn, gamma=0.5, n_step=2)
    td_error = algorithm.td_error(HAND, hand_trajectory(ended_by))
    assert td_error.shape == (3, 1)
    for found, expected, q_value in zip(td_error[:, 0], returns, (1, -1, 4), strict=True):
        assert expected is None or found == expected - q_value


def test_target_and_loss_by_hand():
    algorithm = linear_algorithm(apex_dqn)
    batch = hand_batch(weight=(1.0, 0.25, 0.5))
    td_target = algorithm.td_target(HAND, batch)
    # θ chooses 0, 0 and 1 of (4, 1), (18, 9), (-1, 5); θ⁻ values it: 2, 18 and -5.
    assert td_target.tolist() == [1 + 0.5 * 2, 2, 3 + 0.25 * -5]
    loss, (td_error, metrics) = algorithm.loss_fn(PARAMS, batch, td_target)
    assert td_error.tolist() == [1, 3, 0.75]  # against Q(s, a) = 1, -1, 1, without weights
    np.testing.assert_allclose(loss, (1 + 0.25 * 9 + 0.5 * 0.75**2) / 3 / 2)
    np.testing.assert_allclose(metrics["q_values"], 1 / 3, rtol=1e-6)
    # -w_i δ_i / B: row 0 moves w[0, 0], rows 1 and 2 move column 1.
    state = HAND._replace(opt_state=algorithm.optimizer.init(PARAMS))
    state, td_error, _ = algorithm.learn(state, batch)
    gradient = -1 / 3 * np.array([[1, 0.5 * 0.75], [0, 0.25 * 3 + 0.5 * 0.75]])
    np.testing.assert_allclose(state.params["w"], PARAMS["w"] - gradient, rtol=1e-6)
    np.testing.assert_allclose(state.opt_state[0].trace["w"], gradient, rtol=1e-6)
    assert td_error.tolist() == [1, 3, 0.75]


def test_a_step_of_the_optimizer_by_hand():
    """The gradient scaled down to length 40, over the root of its variance at decay 0.95."""
    config = Config(learning_rate=0.5, rmsprop_epsilon=0.1)
    algorithm = Algorithm(config, spaces.Box(-1, 1, (2,)), spaces.Discrete(2))
    params = {"w": jnp.zeros(2)}
    steps = jnp.array([[300.0, 400.0], [0.3, -0.4]])
    mean, square, state = np.zeros(2), np.zeros(2), algorithm.optimizer.init(params)
    for gradient, clipped in zip(steps, ([24.0, 32.0], [0.3, -0.4]), strict=True):
        update, state = algorithm.optimizer.update({"w": gradient}, state, params)
        clipped = np.array(clipped)
        mean, square = 0.95 * mean + 0.05 * clipped, 0.95 * square + 0.05 * clipped**2
        expected = -0.5 * clipped / np.sqrt(square - mean**2 + 0.1)
        np.testing.assert_allclose(update["w"], expected, rtol=1e-5)


def test_each_environment_explores_with_its_own_epsilon():
    agent = Agent(Config(num_envs=3, total_timesteps=600, **PAPER), None)  # type: ignore
    np.testing.assert_allclose(agent.epsilon, [0.4, 0.4**4.5, 0.4**8], rtol=1e-5)
    agent.spread_exploration(3, 6)
    np.testing.assert_allclose(agent.epsilon, 0.4 ** (1 + 7 * np.array([3, 4, 5]) / 5), rtol=1e-5)
    agent.spread_exploration(0, 1)
    assert float(agent.epsilon[0]) == np.float32(0.4)


def test_actions_follow_that_epsilon():
    config = replace(SMALL, num_envs=2, base_epsilon=0.8, epsilon_exponent=99.0)
    agent = Agent(config, linear_algorithm(apex_dqn))
    sample = jax.vmap(agent.sample, in_axes=(None, None, 0))
    obs, keys = jnp.array([[1.0, 0.0], [0.0, 1.0]]), jax.random.split(jax.random.key(0), 4_000)
    action, q_values = sample(HAND, obs, keys)
    np.testing.assert_array_equal(q_values[0], [[1, 2], [3, -1]])
    # Half of the uniform actions are the greedy one.
    np.testing.assert_allclose((action != jnp.array([1, 0])).mean(0), [0.4, 0], atol=0.03)


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    return Trainer(SMALL)


@pytest.fixture(scope="module")
def halves(trainer) -> tuple:
    """A state with a full buffer, and the two compiled halves of an iteration."""
    first = jax.tree.map(jnp.copy, trainer.state)  # the compiled function takes what it is given
    state, _ = trainer.compiled_run(first, 6)
    return state, jax.jit(trainer.collect_trajectory), jax.jit(trainer.learn_trajectory)


def test_the_actor_needs_neither_replay_nor_optimizer(halves):
    state, collect, _ = halves
    _, expected, _ = collect(state)
    learner = state.learner._replace(opt_state=())
    alone, trajectory, is_complete = collect(state._replace(learner=learner, replay=()))
    assert is_complete and int(alone.step) == int(state.step) + 48
    jax.tree.map(np.testing.assert_array_equal, trajectory, expected)


def test_a_stored_block_is_its_trajectory(trainer, halves):
    state, collect, learn = halves
    before = state.replay
    state, trajectory, _ = collect(state)
    state, metrics = learn(state, trainer.zero_metrics(state), trajectory)
    assert not any(metrics.values())
    # 6 trajectories of 12 + 1 rows went into 4 places before.
    first, rollout = 2 * 13, trajectory.rollout
    assert int(before.position) == first and trainer.replay.num_rows == 4 * 13
    stored = jax.tree.map(lambda x: x[first : first + 13], state.replay.storage)
    np.testing.assert_array_equal(stored.obs[-1], trajectory.last_obs)
    ended = rollout.truncated.at[-1].set(~rollout.terminated[-1])
    rows = rollout._replace(extras=(), truncated=ended)
    jax.tree.map(lambda x, row: np.testing.assert_array_equal(x[:-1], row), stored, rows)
    assert not stored.valid[-1].any() and (~rollout.valid).sum() > 3
    leaves = np.asarray(state.replay.priorities.tree[0])[: 52 * 4].reshape(52, 4)
    expected = (rollout.extras + 1e-6) ** 0.6 * rollout.valid
    np.testing.assert_allclose(leaves[first : first + 12], expected, rtol=1e-5)
    assert not leaves[first + 12].any()
    kept = np.asarray(before.priorities.tree[0])[: 52 * 4].reshape(52, 4)
    np.testing.assert_array_equal(
        np.delete(leaves, range(26, 39), 0), kept[[*range(26), *range(39, 52)]]
    )


def with_another_target(learner: Any) -> Any:
    return learner._replace(target_params=jax.tree.map(lambda x: -x, learner.target_params))


def test_first_priorities_are_the_errors_that_the_learner_finds(trainer, halves):
    """Of the same parameters: n-step returns from replay, over the ends of episodes too."""
    state, collect, learn = halves
    # So that it matters which network chooses and which one values.
    learner = with_another_target(state.learner)
    state, trajectory, _ = collect(state._replace(learner=learner))
    state, _ = learn(state, trainer.zero_metrics(state), trajectory)
    time, env = np.divmod(np.arange(12 * 4), 4)

    def errors_in_replay(state):
        batch = trainer.replay.gather(state.replay, time + 26, env)
        td_target = trainer.algorithm.td_target(learner, batch)
        _, (td_error, _) = trainer.algorithm.loss_fn(learner.params, batch, td_target)
        return batch.weight > 0, td_error

    is_valid, td_error = jax.jit(errors_in_replay)(state)
    assert 30 < is_valid.sum() < 48 and np.ptp(td_error) > 0.1
    first = trajectory.rollout.extras.ravel()
    np.testing.assert_allclose(first[is_valid], jnp.abs(td_error)[is_valid], rtol=1e-4, atol=1e-6)


def test_an_update_sets_the_priorities_of_its_rows(trainer, halves):
    state, *_ = halves
    # Of the network that collected, an update finds the priorities that are there already.
    state = state._replace(learner=with_another_target(state.learner))
    before = np.asarray(state.replay.priorities.tree[0])

    def update_and_parts(state):
        _, sample_key = jax.random.split(state.key)
        batch = trainer.replay.sample(state.replay, sample_key, 16, 0.4)
        _, td_error, _ = trainer.algorithm.learn(state.learner, batch)
        return trainer._run_train(state), batch, td_error

    (new_state, metrics), batch, td_error = jax.jit(update_and_parts)(state)
    leaves = np.asarray(new_state.replay.priorities.tree[0])
    weight = (1 / before[batch.index]) ** 0.4  # β stays what it is
    np.testing.assert_allclose(batch.weight, weight / weight.max(), rtol=1e-4)
    expected = before.copy()
    expected[batch.index] = (np.abs(td_error) + 1e-6) ** 0.6
    np.testing.assert_allclose(leaves, expected, rtol=1e-3)
    assert metrics["charts/updates"] == 1 and (leaves != before).sum() > 5


def test_updates_and_target_updates_are_counted_and_the_rest_is_dropped(trainer, halves):
    logs: list[Any] = [row["logs"] for row in trainer() if row["log_type"] == "train"]
    # Multiples of 10 and of 96 in (340, 480]; the last 20 env steps are no whole trajectory.
    assert sum(row["charts/updates"] for row in logs) == 14
    assert sum(row["charts/target_updates"] for row in logs) == 2
    assert logs[0]["charts/updates"] == 0
    assert int(trainer.state.step) == 500
    assert int(trainer.state.replay.position) == 10 * 13 % 52


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"buffer_size": 51}, "--buffer-size 51 is too small.*blocks of 13 rows.*least 52"),
        ({"num_steps": 126}, "less than a rollout"),
        ({"base_epsilon": 1.1}, "--base-epsilon"),
    ],
)
def test_bad_options(options, said):
    with pytest.raises(UserError, match=said):
        Trainer(replace(SMALL, **options))


@pytest.mark.slow
def test_runs_on_atari_with_the_preset():
    small: dict[str, Any] = dict(num_envs=2, num_steps=5, total_timesteps=120, log_frequency=120)
    small |= dict(buffer_size=200, batch_size=4, learning_starts=40, train_frequency=4)
    trainer = Trainer(Config(env_id="Pong-v5", **PRESETS["atari"] | small))
    logs = {k: v for log_data in trainer() for k, v in log_data["logs"].items()}
    assert logs["charts/updates"] == 20 and np.isfinite(logs["losses/td_loss"])


@pytest.mark.learning
@pytest.mark.slow
def test_learns_cartpole():
    options: dict[str, Any] = dict(learning_starts=2_000, train_frequency=5, num_steps=20)
    config = Config(total_timesteps=60_000, target_network_frequency=250, **options)
    trainer = Trainer(config)
    for _ in trainer():
        pass
    # 4 seeds gave 381 to 500. Bootstraps behind terminations gave 9, actions stored a row late 10,
    # a target network that stays as it was 9 and 235. Priorities 1 / |δ|, with 237 and 458, and no
    # exploration, with 467 and 500, are not told; the tests above tell.
    assert trainer.evaluate(20)["logs"]["charts/evaluation_return"] >= 250
