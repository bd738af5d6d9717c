"""Double DQN: which network chooses the next action and which one values it, and learning."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rlax
from q_learning import PARAMS, TARGET, hand_batch, linear_algorithm, return_after_cartpole

from algos import double_dqn
from algos.double_dqn import Algorithm, LearnerState
from common.replay import Batch


def test_td_target_by_hand():
    # Row 0: Q = 4, 1 chooses 0, Q⁻ = 2, 5 values it 2. Row 2: Q = -1, 5 chooses 1, Q⁻ = 4, -5.
    state = LearnerState(PARAMS, TARGET, ())
    target = linear_algorithm(double_dqn).td_target(state, hand_batch())
    assert target.tolist() == [1 + 0.5 * 2, 2, 3 + 0.25 * -5]


def test_the_target_is_that_of_dqn_while_both_networks_are_equal():
    state = LearnerState(TARGET, TARGET, ())
    target = linear_algorithm(double_dqn).td_target(state, hand_batch())
    assert target.tolist() == [1 + 0.5 * 5, 2, 3 + 0.25 * 4]


def test_gradient_step_by_hand():
    # Q(s, a) = 1, -1, 1 against the targets 2, 2, 1.75 from above, which are constants.
    algorithm = linear_algorithm(double_dqn)
    state = LearnerState(PARAMS, TARGET, algorithm.optimizer.init(PARAMS))
    new_state, metrics = algorithm.learn(state, hand_batch())
    gradient = -2 / 3 * np.array([[1.0, 0.75], [0.0, 3.0 + 0.75]])
    np.testing.assert_allclose(new_state.params["w"], PARAMS["w"] - gradient, rtol=1e-6)
    np.testing.assert_allclose(new_state.opt_state[0].trace["w"], gradient, rtol=1e-5)
    np.testing.assert_allclose(metrics["td_loss"], (1 + 9 + 0.75**2) / 3, rtol=1e-6)


def test_loss_equals_rlax():
    keys = jax.random.split(jax.random.key(0), 3)
    params, target_params = ({"w": w} for w in jax.random.normal(keys[0], (2, 4, 3)))
    obs, next_obs = jax.random.normal(keys[1], (2, 32, 4))
    reward, discount = jax.random.uniform(keys[2], (2, 32))
    action = jnp.arange(32) % 3
    batch = Batch(obs, action, reward, discount, next_obs, jnp.ones(32), ())
    q_values, selector = obs @ params["w"], next_obs @ params["w"]
    next_q_values = next_obs @ target_params["w"]
    assert (selector.argmax(axis=-1) != next_q_values.argmax(axis=-1)).any()
    td_error = jax.vmap(rlax.double_q_learning)(
        q_values, action, reward, discount, next_q_values, selector
    )
    algorithm = linear_algorithm(double_dqn)
    td_target = algorithm.td_target(LearnerState(params, target_params, ()), batch)
    loss, _ = algorithm.loss_fn(params, batch, td_target)
    np.testing.assert_allclose(loss, (td_error**2).mean(), rtol=1e-5)


class LinearModel(NamedTuple):
    """A network whose Q-values are linear in one part of the observation."""

    w: Any

    def value(self, obs):
        return obs["observation"] @ self.w


def test_no_unavailable_action_is_chosen():
    # Q = 1, 2, 9, the last of them unavailable, so that Q⁻ = 5, 6, 7 values action 1.
    algorithm = object.__new__(Algorithm)
    algorithm.model = LinearModel
    obs = {"action_mask": jnp.array([[1, 1, 0]]), "observation": jnp.ones((1, 1))}
    params, target_params = jnp.array([[1.0, 2.0, 9.0]]), jnp.array([[5.0, 6.0, 7.0]])
    one = jnp.ones(1)
    batch = Batch(obs, jnp.array([0]), one, 0.5 * one, obs, one, ())
    target = algorithm.td_target(LearnerState(params, target_params, ()), batch)
    assert target.tolist() == [1 + 0.5 * 6]


@pytest.mark.learning
@pytest.mark.slow
def test_learns_cartpole():
    # 8 seeds gave 181 to 500; no bootstrap, and a wrong sign before it, gave 10 to 88. With argmin
    # for argmax two seeds gave 156 and 480: CartPole does not tell, the targets by hand above do.
    assert return_after_cartpole(double_dqn, 1) >= 100
