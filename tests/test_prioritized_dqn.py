"""Prioritized DQN: weights, TD errors and priorities by hand and in a run; and learning."""

import contextlib
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from q_learning import PARAMS, TARGET, hand_batch, linear_algorithm, return_after_cartpole

from algos import prioritized_dqn
from algos.prioritized_dqn import PRESETS, Agent, Config, LearnerState, Trainer, TrainState
from common import load, save

SMALL = Config(
    env_id="gymnax/CartPole-v1",
    num_envs=4,
    buffer_size=400,
    batch_size=16,
    learning_starts=100,
    log_frequency=200,
    total_timesteps=600,
)
TD_TARGET = jnp.array([3.5, 2.0, 4.0])  # against Q(s, a) = 1, -1, 1


@pytest.fixture(scope="module")
def compiled():
    """A trainer, to be compiled once for several tests, and its first state."""
    trainer = Trainer(SMALL)
    return trainer, copy(trainer.state)


@pytest.fixture
def trainer(compiled):
    trainer, first = compiled
    trainer.state = copy(first)
    return trainer


def copy(state: TrainState) -> TrainState:
    """The compiled function takes the arrays of the state that it is given."""
    return jax.tree.map(jnp.copy, state)


def leaves_of(trainer: Trainer) -> np.ndarray:
    """p^α of all rows of the buffer."""
    size = trainer.replay.num_rows * trainer.replay.num_envs
    return np.array(trainer.state.replay.priorities.tree[0])[:size]


def test_weights_multiply_each_row_of_the_loss():
    batch = hand_batch(weight=(1.0, 0.25, 0.5))
    loss, (td_error, metrics) = linear_algorithm(prioritized_dqn).loss_fn(PARAMS, batch, TD_TARGET)
    assert td_error.tolist() == [2.5, 3, 3]  # without weights
    np.testing.assert_allclose(loss, (6.25 + 0.25 * 9 + 0.5 * 9) / 3)
    np.testing.assert_allclose(metrics["q_values"], (1 - 1 + 1) / 3, rtol=1e-6)
    assert metrics["td_loss"] == loss


def test_gradient_step_by_hand():
    # -2 w_i δ_i / B: row 0 moves w[0, 0], rows 1 and 2 move column 1.
    algorithm = linear_algorithm(prioritized_dqn)
    state = LearnerState(PARAMS, TARGET, algorithm.optimizer.init(PARAMS))
    new_state, td_error, _ = algorithm.learn(state, hand_batch(weight=(1.0, 0.25, 0.5)))
    gradient = -2 / 3 * np.array([[2.5, 0.5 * 3.0], [0.0, 0.25 * 3.0 + 0.5 * 3.0]])
    np.testing.assert_allclose(new_state.params["w"], PARAMS["w"] - gradient, rtol=1e-6)
    np.testing.assert_allclose(new_state.opt_state[0].trace["w"], gradient, rtol=1e-5)
    assert td_error.tolist() == [2.5, 3, 3]  # of the parameters before the step


def test_beta_rises_linearly_to_1_at_the_end_of_the_run():
    agent = Agent(Config(total_timesteps=1_000, importance_exponent=0.4), None)
    for step, beta in ((0, 0.4), (500, 0.7), (1_000, 1.0), (2_000, 1.0)):
        np.testing.assert_allclose(agent.beta(step), beta, rtol=1e-6)


def test_priorities_are_the_errors_of_the_rows_just_learned(trainer):
    learner = copy(trainer.state).learner
    trainer.state, metrics = trainer.compiled_run(trainer.state, 112 // 4)
    assert metrics["charts/updates"] == 1
    leaves, state = leaves_of(trainer), trainer.state.replay
    places = np.arange(400)
    batch = trainer.replay.gather(state, places // 4, places % 4)
    complete = (places < (28 - 1) * 4) & (batch.weight > 0)
    assert not leaves[~complete].any()
    learned = complete & (leaves != 1)
    assert 8 <= learned.sum() <= 16 and complete.sum() > 80
    td_target = trainer.algorithm.td_target(learner.params, batch)
    _, (td_error, _) = trainer.algorithm.loss_fn(learner.params, batch, td_target)
    expected = (np.abs(td_error) + 1e-6) ** 0.6
    np.testing.assert_allclose(leaves[learned], expected[learned], rtol=1e-4)
    np.testing.assert_allclose(state.priorities.largest, max(1, leaves.max()))


@pytest.mark.slow
def test_weights_of_an_update_have_the_beta_of_its_step(trainer, monkeypatch):
    learn, batches = trainer.agent.learn, []

    def learn_and_keep(state, batch):
        batches.append(batch)
        return learn(state, batch)

    trainer.state, _ = trainer.compiled_run(trainer.state, 300 // 4)
    monkeypatch.setattr(trainer.agent, "learn", learn_and_keep)
    before = leaves_of(trainer)
    assert len(np.unique(before)) > 20
    trainer.state, _ = trainer._run_train(trainer.state)
    (batch,) = batches
    weight = (1 / before[batch.index]) ** 0.7  # β half way from 0.4 to 1
    np.testing.assert_allclose(batch.weight, weight / weight.max(), rtol=1e-4)
    assert not np.array_equal(leaves_of(trainer)[batch.index], before[batch.index])


def test_runs_with_n_step_returns_on_other_environments():
    config = replace(SMALL, env_id="CartPole-v1", n_step=3, total_timesteps=400)
    trainer = Trainer(config)
    logs = {k: v for log_data in trainer() for k, v in log_data["logs"].items()}
    assert np.isfinite(list(logs.values())).all() and logs["losses/td_loss"] > 0
    leaves = leaves_of(trainer).reshape(100, 4)
    assert not leaves[-3:].any()  # the newest three rows are not complete
    storage = trainer.state.replay.storage
    np.testing.assert_array_equal(leaves[:-3] > 0, storage.valid[:-3])


def test_runs_on_atari_with_the_preset():
    preset = PRESETS["atari"] | {"buffer_size": 200, "learning_starts": 200}
    config = Config(env_id="Breakout-v5", **preset)
    config = replace(config, num_envs=2, total_timesteps=240, log_frequency=240, batch_size=4)
    trainer = Trainer(config)
    logs = {k: v for log_data in trainer() for k, v in log_data["logs"].items()}
    assert logs["charts/updates"] == 10 and np.isfinite(logs["losses/td_loss"])
    expected = np.array(trainer.state.replay.storage.valid)
    expected[19:23] = False  # row 20 is written next: 19 waits for it, 20 to 22 have lost frames
    np.testing.assert_array_equal(leaves_of(trainer).reshape(100, 2) > 0, expected)


def test_an_interrupted_run_ends_as_if_nothing_had_happened(trainer, tmp_path):
    with contextlib.closing(trainer()) as training:
        for log_data in training:
            if log_data["sample_step"] == 400 and log_data["log_type"] == "train":
                save(trainer, tmp_path / "run")
    loaded = load(tmp_path / "run").trainer
    assert len(np.unique(leaves_of(loaded))) > 20
    assert [log_data["sample_step"] for log_data in loaded()] == [600, 600]
    pairs = zip(jax.tree.leaves(loaded.state), jax.tree.leaves(trainer.state), strict=True)
    assert all(bool((x == y).all()) for x, y in pairs)


@pytest.mark.learning
@pytest.mark.slow
def test_learns_cartpole():
    # 8 seeds gave 149 to 500; no bootstrap gave 35 and 15, and δ for δ² in the loss 9. Priorities
    # 1 / |δ| gave 198 and 149, no weights 458 and 500: CartPole does not tell, the priorities and
    # losses by hand above do.
    assert return_after_cartpole(prioritized_dqn, 1) >= 100
