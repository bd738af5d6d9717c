"""DDPG: targets, losses and both target networks by hand."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from off_policy import (
    ACTION_SPACE,
    CRITIC,
    ERRORS_TIMES_SLOPES,
    HAND_BATCH,
    HAND_TARGET,
    OBS_SPACE,
    TARGET_CRITIC,
    bare_algorithm,
    hand_values,
    leaves_differ,
    leaves_equal,
    random_batch,
    relu_network,
    with_nonsense,
)

from algos.ddpg import Algorithm, Config, LearnerState


class HandModel(NamedTuple):
    """A policy μ(s) = s @ mean, and Q_1."""

    actor: Any
    critic: Any

    def action(self, obs):
        return obs @ self.actor["mean"]

    def value(self, obs, action):
        return hand_values(self.critic, obs, action)[0]


ACTOR = {"mean": jnp.array([[0.1], [0.2]])}
TARGET_ACTOR = {"mean": jnp.array([[0.5], [0.0]])}


def hand_algorithm(**options) -> tuple[Algorithm, LearnerState]:
    """An Algorithm of `HandModel` that descends with step size 1, and its state."""
    algorithm, trained = bare_algorithm(Algorithm, Config(**options), HandModel, ACTOR, CRITIC)
    return algorithm, LearnerState(*trained, TARGET_ACTOR, TARGET_CRITIC, ())


@pytest.fixture(scope="module")
def algorithm():
    return Algorithm(Config(learning_starts=100), OBS_SPACE, ACTION_SPACE)


@pytest.fixture(scope="module")
def state(algorithm):
    state, other = (algorithm.init(jax.random.key(i), jnp.zeros((1, 3))) for i in range(2))
    return state._replace(target_actor=other.actor.params, target_critic=other.critic.params)


# --- targets and losses ---------------------------------------------------------------------------


def test_td_target_by_hand():
    # a' = s'_0 / 2 = 1/2, -, 1, 0 and Q⁻ = 2 s'_0 + a' = 2.5, -, 5, 0
    algorithm, state = hand_algorithm()
    target = algorithm.td_target(state, HAND_BATCH)[:4]
    np.testing.assert_allclose(target, [1 + 0.5 * 2.5, 2, 3 + 0.5 * 5, 4 + 0.25 * 0])


def test_critic_loss_by_hand():
    # Q = 3, 0, 3, 3
    algorithm, state = hand_algorithm()
    loss, metrics = algorithm.critic_loss(CRITIC, state, HAND_BATCH, HAND_TARGET)
    np.testing.assert_allclose(loss, (1 + 1 + 0 + 9) / 4)
    np.testing.assert_allclose(metrics["q_values"], (3 + 0 + 3 + 3) / 4)
    assert metrics["critic_loss"] == loss


def test_actor_loss_by_hand():
    # a = 0.1, 0.2, 0.3, -0.1 and Q = 1.4, 2.8, 4.2, -1.4
    algorithm, state = hand_algorithm()
    grad, metrics = jax.grad(algorithm.actor_loss, has_aux=True)(ACTOR, state, HAND_BATCH)
    np.testing.assert_allclose(metrics["actor_loss"], -(1.4 + 2.8 + 4.2 - 1.4) / 4, rtol=1e-6)
    # -∂Q/∂a Σ s / 4 = -4 (3, 1) / 4
    np.testing.assert_allclose(grad["mean"], [[-3], [-1]], rtol=1e-6)


def test_a_whole_update_by_hand():
    # All rows terminate, so that the targets are the rewards.
    algorithm, state = hand_algorithm(tau=0.25)
    batch = HAND_BATCH._replace(reward=HAND_TARGET, discount=jnp.zeros(5))
    new, metrics = algorithm.learn(state, batch, 0)
    for name in CRITIC:
        critic = np.array(CRITIC[name])
        critic[0] += 2 * ERRORS_TIMES_SLOPES[name][0] / 4
        np.testing.assert_allclose(new.critic.params[name], critic, rtol=1e-6)
        target = 0.25 * critic + 0.75 * TARGET_CRITIC[name]
        np.testing.assert_allclose(new.target_critic[name], target, rtol=1e-6)
    # The policy climbs the new Q, whose slope is 4 - 2 * 4 / 4 = 2.
    mean = np.array([[0.1 + 2 * 3 / 4], [0.2 + 2 * 1 / 4]])
    np.testing.assert_allclose(new.actor.params["mean"], mean, rtol=1e-6)
    target = 0.25 * mean + 0.75 * TARGET_ACTOR["mean"]
    np.testing.assert_allclose(new.target_actor["mean"], target, rtol=1e-6)
    assert metrics["charts/actor_updates"] == 1
    assert set(metrics) == {"critic_loss", "q_values", "actor_loss", "charts/actor_updates"}


def test_policy_and_targets_rest_between_updates_of_policy_frequency():
    algorithm, state = hand_algorithm(policy_frequency=2)
    new, metrics = algorithm.learn(state, HAND_BATCH, 1)
    due, _ = algorithm.learn(state, HAND_BATCH, 2)
    leaves_equal(new.critic, due.critic)
    assert leaves_differ(new.critic.params, CRITIC)
    leaves_equal(new._replace(critic=state.critic), state)
    assert metrics["charts/actor_updates"] == metrics["actor_loss"] == 0
    for name in ("actor", "target_actor", "target_critic"):
        assert leaves_differ(getattr(due, name), getattr(state, name))


def test_networks_against_numpy(algorithm, state):
    batch = random_batch(0)

    def policy(params, obs):
        return np.tanh(relu_network(params, obs))

    def value(critic, obs, action):
        return relu_network(critic, obs, action)[:, 0]

    next_action = policy(state.target_actor, batch.next_obs)
    next_value = value(state.target_critic, batch.next_obs, next_action)
    expected = batch.reward + batch.discount * next_value
    td_target = jax.jit(algorithm.td_target)(state, batch)
    np.testing.assert_allclose(td_target, expected, rtol=1e-4, atol=1e-5)
    loss, _ = jax.jit(algorithm.critic_loss)(state.critic.params, state, batch, td_target)
    errors = expected - value(state.critic.params, batch.obs, batch.action)
    np.testing.assert_allclose(loss, (batch.weight * errors**2).mean(), rtol=1e-4)
    loss, _ = jax.jit(algorithm.actor_loss)(state.actor.params, state, batch)
    q_value = value(state.critic.params, batch.obs, policy(state.actor.params, batch.obs))
    np.testing.assert_allclose(loss, -(batch.weight * q_value).mean(), rtol=1e-4)


def test_a_row_of_weight_0_has_no_influence():
    algorithm, state = hand_algorithm()
    learn = jax.jit(algorithm.learn)
    results = [learn(state, x, 0) for x in (HAND_BATCH, with_nonsense(HAND_BATCH))]
    leaves_equal(*results)
    assert leaves_differ(results[0][0].actor.params, ACTOR)


def test_targets_start_as_copies(algorithm):
    start = algorithm.init(jax.random.key(0), jnp.zeros((1, 3)))
    leaves_equal(start.critic.params, start.target_critic)
    leaves_equal(start.actor.params, start.target_actor)
