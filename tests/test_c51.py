"""C51: targets, loss and gradients by hand and against rlax, masks, checks, and learning."""

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import rlax
from gymnasium import spaces
from run_helpers import run_here

from algos.c51 import PRESETS, Algorithm, Config, LearnerState, Trainer
from common.errors import UserError
from common.replay import Batch

# p(s, a) on the atoms 0, 1 and 2: rows are states, then two actions. The greedy actions are 1 and 0
PROBS = jnp.array(
    [
        [[0.5, 0.25, 0.25], [0.25, 0.25, 0.5]],  # Q = 0.75, 1.25
        [[0.25, 0.5, 0.25], [0.5, 0.25, 0.25]],  # Q = 1, 0.75
    ]
)
STATES = jnp.eye(2)


class Logits:
    """A network whose logits are the observation times a matrix."""

    def __init__(self, params: Any) -> None:
        self.matrix = params["w"]

    def value(self, obs: Any) -> Any:
        obs = obs["observation"] if isinstance(obs, dict) else obs
        return jnp.tensordot(obs, self.matrix, 1)  # [B, A, M]


def linear_algorithm() -> Algorithm:
    algorithm = object.__new__(Algorithm)
    algorithm.config = Config(num_atoms=3, v_min=0.0, v_max=2.0)
    algorithm.support = jnp.array([0.0, 1.0, 2.0])
    algorithm.model = Logits
    algorithm.optimizer = optax.sgd(1.0, momentum=0.5)  # its first step is that of SGD
    return algorithm


PARAMS = {"w": jnp.log(PROBS)}
# The rows: a step, a termination between two atoms, two steps at once, and beyond the last atom
HAND_BATCH = Batch(
    obs=STATES[jnp.array([0, 0, 1, 1])],
    action=jnp.array([0, 1, 0, 1]),
    reward=jnp.array([0.5, 1.5, 1.0, 9.0]),
    discount=jnp.array([0.5, 0.0, 0.25, 0.5]),
    next_obs=STATES[jnp.array([0, 1, 1, 0])],
    weight=jnp.ones(4),
    extras=(),
)
HAND_TARGET = np.array(
    [
        [0.125, 0.125 + 0.25 + 0.25, 0.25],  # 0.25, 0.25, 0.5 on 0.5, 1, 1.5
        [0, 0.5, 0.5],
        [0, 0.25 + 0.5 * 0.75 + 0.25 * 0.5, 0.5 * 0.25 + 0.25 * 0.5],  # on 1, 1.25, 1.5
        [0, 0, 1],
    ]
)
# -log p is log 2 or log 4: 1, 2, 2 of log 2 in the rows 0 and 3, 2, 2, 1 and 2, 1, 2 in 1 and 2
HAND_LOSS = math.log(2) * np.array([0.125 + 2 * 0.875, 1.5, 0.75 + 2 * 0.25, 2])


def test_q_values_are_means():
    q_values = linear_algorithm().predict(PARAMS, STATES)
    np.testing.assert_allclose(q_values, [[0.75, 1.25], [1, 0.75]], rtol=1e-6)


def test_td_target_by_hand():
    target = linear_algorithm().td_target(PARAMS, HAND_BATCH)
    np.testing.assert_allclose(target, HAND_TARGET, atol=1e-6)


def test_loss_by_hand():
    loss, metrics = linear_algorithm().loss_fn(PARAMS, HAND_BATCH, jnp.float32(HAND_TARGET))
    np.testing.assert_allclose(loss, HAND_LOSS.mean(), rtol=1e-6)
    np.testing.assert_allclose(metrics["td_loss"], HAND_LOSS.mean(), rtol=1e-6)
    np.testing.assert_allclose(metrics["q_values"], (0.75 + 1.25 + 1 + 0.75) / 4, rtol=1e-6)


def test_gradient_step_by_hand():
    # dL/dlogits(s_i, a_i) = (p - m_i) / B, and each row has a state and action of its own
    algorithm = linear_algorithm()
    state = LearnerState(PARAMS, PARAMS, algorithm.optimizer.init(PARAMS))
    new_state, _ = algorithm.learn(state, HAND_BATCH)
    moved = new_state.params["w"] - PARAMS["w"]  # [states, A, M]
    target = HAND_TARGET.reshape(2, 2, 3)
    np.testing.assert_allclose(moved, (target - PROBS) / 4, atol=1e-6)
    np.testing.assert_allclose(new_state.opt_state[0].trace["w"], -moved, atol=1e-6)
    np.testing.assert_array_equal(new_state.target_params["w"], PARAMS["w"])


def test_rows_of_weight_0_do_not_matter():
    algorithm = linear_algorithm()
    weight = jnp.array([2.0, 0.0, 2.0, 0.0])
    target = jnp.float32(HAND_TARGET)
    loss, metrics = algorithm.loss_fn(PARAMS, HAND_BATCH._replace(weight=weight), target)
    np.testing.assert_allclose(loss, HAND_LOSS[[0, 2]].mean(), rtol=1e-6)
    np.testing.assert_allclose(metrics["q_values"], (0.75 + 1) / 2, rtol=1e-6)


def test_an_unavailable_action_is_not_in_the_target():
    # Without the mask the greedy action of state 0 is 1. A mask of zeros rules out nothing.
    obs = {"action_mask": jnp.array([[1, 0], [0, 0]]), "observation": STATES[jnp.array([0, 0])]}
    batch = jax.tree.map(lambda x: x[:2], HAND_BATCH)
    batch = batch._replace(next_obs=obs, reward=jnp.zeros(2), discount=jnp.ones(2))
    target = linear_algorithm().td_target(PARAMS, batch)
    np.testing.assert_allclose(target, PROBS[0], atol=1e-6)
    q_values = linear_algorithm().predict(PARAMS, obs)
    np.testing.assert_array_equal(q_values.argmax(axis=-1), [0, 1])


@pytest.fixture(scope="module")
def algorithm():
    space = spaces.Box(-1, 1, (4,), np.float32)
    return Algorithm(Config(num_atoms=11, v_min=-2, v_max=3), space, spaces.Discrete(3))


def test_loss_equals_rlax(algorithm):
    keys = jax.random.split(jax.random.key(0), 4)
    state = algorithm.init(keys[0])._replace(target_params=algorithm.init(keys[1]).params)
    obs, next_obs = 3 * jax.random.normal(keys[2], (2, 32, 4))
    reward, discount = jax.random.uniform(keys[3], (2, 32))
    action = jnp.arange(32) % 3
    batch = Batch(obs, action, reward, discount, next_obs, jnp.ones(32), ())
    atoms = jnp.tile(jnp.linspace(-2, 3, 11), (32, 1))
    logits = algorithm.model(state.params).value(obs)
    next_logits = algorithm.model(state.target_params).value(next_obs)
    steps = action, reward, discount
    expected = jax.vmap(rlax.categorical_q_learning)(atoms, logits, *steps, atoms, next_logits)
    target = algorithm.td_target(state.target_params, batch)
    loss, _ = algorithm.loss_fn(state.params, batch, target)
    np.testing.assert_allclose(loss, expected.mean(), rtol=1e-5)
    np.testing.assert_allclose(target.sum(axis=-1), 1, rtol=1e-5)


def test_the_epsilon_of_adam_depends_on_the_batch(algorithm):
    # The first step of Adam is -α g / (|g| + ε), half of α where g is ε = 0.01 / 128
    params = {"w": jnp.zeros(1)}
    optimizer = algorithm.optimizer
    updates, _ = optimizer.update({"w": jnp.array([0.01 / 128])}, optimizer.init(params))
    np.testing.assert_allclose(updates["w"], -2.5e-4 / 2, rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_atoms": 1}, "--num-atoms 1 between .* use at least 2"),
        ({"v_min": 5.0, "v_max": 5.0}, "--v-min 5.0 and --v-max 5.0: .* a --v-max above --v-min"),
        ({"v_min": 1.0, "v_max": -1.0}, "a --v-max above --v-min"),
        ({"v_max": math.inf}, "--v-max must be a finite number, got inf"),
        ({"v_min": math.nan}, "--v-min must be a finite number, got nan"),
    ],
)
def test_atoms_that_cannot_be_are_refused(options, message):
    with pytest.raises(UserError, match=message) as raised:
        Config(**options)
    assert "\n" not in str(raised.value)


def test_a_refusal_is_one_line(capsys, tmp_path):
    runs = tmp_path / "runs"
    ran = run_here(capsys, "--num-atoms", "1", "--runs-dir", runs, module="algos.c51")
    assert ran.code == 2 and not runs.exists()
    assert len(ran.err.strip().splitlines()) == 1 and "--num-atoms 1" in ran.err


@pytest.mark.slow
def test_runs_on_atari_with_the_preset():
    preset = PRESETS["atari"] | {"buffer_size": 1_000, "learning_starts": 200}
    config = replace(Config(env_id="Breakout-v5", **preset), total_timesteps=240, num_envs=2)
    trainer = Trainer(replace(config, log_frequency=240, batch_size=4))
    np.testing.assert_allclose(trainer.algorithm.support, np.linspace(-10, 10, 51), atol=1e-5)
    logs = {k: v for log_data in trainer() for k, v in log_data["logs"].items()}
    assert logs["charts/updates"] == 10
    assert 0 < logs["losses/td_loss"] < 2 * math.log(51)
    assert abs(logs["losses/q_values"]) <= 10


@pytest.mark.learning
@pytest.mark.slow
def test_learns_cartpole():
    config = Config(
        total_timesteps=30_000,
        learning_starts=1_000,
        learning_rate=1e-3,
        exploration_fraction=0.4,
        target_network_frequency=4,
        tau=0.02,
        n_step=3,
        train_frequency=4,
        num_atoms=51,
        v_min=0.0,
    )
    trainer = Trainer(config)
    for _ in trainer():
        pass
    # 8 seeds gave 401 to 500; targets without a bootstrap gave 10 to 113 over 3.
    assert trainer.evaluate(20)["logs"]["charts/evaluation_return"] >= 250
