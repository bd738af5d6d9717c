"""TD3: targets with noise, two critics, and a policy that learns half as often."""

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
from scipy import stats

from algos.td3 import Algorithm, Config, LearnerState
from common.optimize import Trained

KEY = jax.random.key(0)


class HandModel(NamedTuple):
    """A policy μ(s) = s @ mean, and critics that are linear."""

    actor: Any
    critics: Any

    def action(self, obs):
        return obs @ self.actor["mean"]

    def value(self, obs, action):
        return hand_values(self.critics, obs, action)

    @property
    def critic(self):
        return [lambda *x, i=i: self.value(*x)[i][:, None] for i in range(2)]


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
    # a' = s'_0 / 2 = 1/2, 1 (clipped), 1, 0 and min_i Q⁻_i = min(2.5, 4.5), -, min(5, -6), 0
    algorithm, state = hand_algorithm(policy_noise=0.0)
    target = algorithm.td_target(state, HAND_BATCH, KEY)[:4]
    np.testing.assert_allclose(target, [1 + 0.5 * 2.5, 2, 3 + 0.5 * -6, 4 + 0.25 * 0])


def test_the_noise_of_the_target_reaches_both_critics():
    algorithm, state = hand_algorithm(policy_noise=0.3)
    next_action = algorithm.smooth_action(HAND_BATCH.next_obs @ TARGET_ACTOR["mean"], KEY)
    assert len(np.unique(next_action - HAND_BATCH.next_obs @ TARGET_ACTOR["mean"])) == 5
    values = hand_values(TARGET_CRITIC, HAND_BATCH.next_obs, next_action).min(axis=0)
    expected = HAND_BATCH.reward + HAND_BATCH.discount * values
    np.testing.assert_allclose(algorithm.td_target(state, HAND_BATCH, KEY), expected)


def test_target_noise_is_clipped_and_drawn_for_each_number():
    algorithm, _ = hand_algorithm(policy_noise=0.2, noise_clip=0.3)
    noise = np.asarray(algorithm.smooth_action(jnp.zeros((4_000, 2)), KEY))
    assert np.abs(noise).max() == np.float32(0.3)
    inside = np.abs(noise) < 0.3
    share = stats.norm.cdf(1.5) - stats.norm.cdf(-1.5)
    np.testing.assert_allclose(inside.mean(axis=0), share, atol=0.02)
    for i in range(2):
        cut = stats.truncnorm(-1.5, 1.5, scale=0.2)
        assert stats.kstest(noise[inside[:, i], i], cut.cdf).pvalue > 1e-3
    assert stats.pearsonr(*noise.T).pvalue > 1e-3
    assert stats.pearsonr(noise[1:, 0], noise[:-1, 0]).pvalue > 1e-3
    assert not np.array_equal(
        noise, algorithm.smooth_action(jnp.zeros((4_000, 2)), jax.random.key(1))
    )


def test_target_actions_stay_in_range():
    algorithm, _ = hand_algorithm(policy_noise=0.2, noise_clip=0.5)
    action = jnp.tile(jnp.array([0.9, -0.9]), (1_000, 1))
    smooth = np.asarray(algorithm.smooth_action(action, KEY))
    assert smooth[:, 0].max() == 1 and smooth[:, 1].min() == -1
    np.testing.assert_allclose(smooth[:, 0].min(), 0.4, rtol=1e-5)  # -c from the action


def test_critic_loss_by_hand():
    algorithm, state = hand_algorithm()
    loss, metrics = algorithm.critic_loss(CRITIC, state, HAND_BATCH, HAND_TARGET)
    np.testing.assert_allclose(loss, ((1 + 1 + 0 + 9) + (0 + 1 + 1 + 4)) / 4)
    np.testing.assert_allclose(metrics["q_values"], ((3 + 0 + 3 + 3) + (2 + 0 + 2 + 2)) / 8)
    assert metrics["critic_loss"] == loss


def test_actor_loss_by_hand():
    # a = 0.1, 0.2, 0.3, -0.1 and Q_1 = 1.4, 2.8, 4.2, -1.4; Q_2 = 2.8 and so on does not count.
    algorithm, state = hand_algorithm()
    grad, metrics = jax.grad(algorithm.actor_loss, has_aux=True)(ACTOR, state, HAND_BATCH)
    np.testing.assert_allclose(metrics["actor_loss"], -(1.4 + 2.8 + 4.2 - 1.4) / 4, rtol=1e-6)
    # -∂Q_1/∂a Σ s / 4 = -4 (3, 1) / 4
    np.testing.assert_allclose(grad["mean"], [[-3], [-1]], rtol=1e-6)


def test_the_actor_loss_sees_the_first_critic_alone(algorithm, state):
    def loss(critic):
        of_critic = state._replace(critic=Trained(critic, ()))
        return algorithm.actor_loss(state.actor.params, of_critic, random_batch(0))[0]

    gradient = jax.jit(jax.grad(loss))(state.critic.params)
    assert not any(np.any(x) for x in jax.tree.leaves(gradient[1]))
    assert all(np.any(x) for x in jax.tree.leaves(gradient[0]))


def test_each_update_draws_from_its_own_key(algorithm, state):
    batch, learn, losses = random_batch(0), jax.jit(algorithm.learn), []
    for key in jax.random.split(KEY):
        losses.append(learn(state, batch, key, 0)[1]["critic_loss"])
    assert losses[0] != losses[1]  # of targets that are drawn


def test_a_whole_update_by_hand():
    # All rows terminate, so that the targets are the rewards.
    algorithm, state = hand_algorithm(tau=0.25)
    batch = HAND_BATCH._replace(reward=HAND_TARGET, discount=jnp.zeros(5))
    new, metrics = algorithm.learn(state, batch, KEY, 0)
    for name in CRITIC:
        critic = CRITIC[name] + 2 * ERRORS_TIMES_SLOPES[name] / 4
        np.testing.assert_allclose(new.critic.params[name], critic, rtol=1e-6)
        target = 0.25 * critic + 0.75 * TARGET_CRITIC[name]
        np.testing.assert_allclose(new.target_critic[name], target, rtol=1e-6)
    # The policy climbs the new Q_1, whose slope is 4 - 2 * 4 / 4 = 2.
    mean = np.array([[0.1 + 2 * 3 / 4], [0.2 + 2 * 1 / 4]])
    np.testing.assert_allclose(new.actor.params["mean"], mean, rtol=1e-6)
    target = 0.25 * mean + 0.75 * TARGET_ACTOR["mean"]
    np.testing.assert_allclose(new.target_actor["mean"], target, rtol=1e-6)
    assert metrics["charts/actor_updates"] == 1
    assert set(metrics) == {"critic_loss", "q_values", "actor_loss", "charts/actor_updates"}


@pytest.mark.parametrize("policy_frequency", [1, 2, 3])
def test_policy_and_targets_move_at_each_policy_frequency_th_update(policy_frequency):
    algorithm, state = hand_algorithm(policy_frequency=policy_frequency)
    learn = jax.jit(algorithm.learn)
    for update in range(7):
        new, metrics = learn(state, HAND_BATCH, jax.random.key(update), update)
        assert leaves_differ(new.critic.params, state.critic.params)
        slow = [(x.actor, x.target_actor, x.target_critic) for x in (state, new)]
        is_due = update % policy_frequency == 0
        assert leaves_differ(*slow) if is_due else leaves_equal(*slow) is None
        assert metrics["charts/actor_updates"] == is_due
        assert (metrics["actor_loss"] != 0) == is_due
        state = new


def test_networks_against_numpy(algorithm, state):
    algorithm = Algorithm(Config(policy_noise=0.0), OBS_SPACE, ACTION_SPACE)
    batch = random_batch(0)

    def policy(params, obs):
        return np.tanh(relu_network(params, obs))

    def value(critic, obs, action):
        return np.stack([relu_network(critic[i], obs, action)[:, 0] for i in range(2)])

    next_action = policy(state.target_actor, batch.next_obs)
    next_value = value(state.target_critic, batch.next_obs, next_action).min(axis=0)
    expected = batch.reward + batch.discount * next_value
    td_target = jax.jit(algorithm.td_target)(state, batch, KEY)
    np.testing.assert_allclose(td_target, expected, rtol=1e-4, atol=1e-5)
    loss, _ = jax.jit(algorithm.critic_loss)(state.critic.params, state, batch, td_target)
    errors = expected - value(state.critic.params, batch.obs, batch.action)
    np.testing.assert_allclose(loss, (batch.weight * errors**2).sum() / 12, rtol=1e-4)
    loss, _ = jax.jit(algorithm.actor_loss)(state.actor.params, state, batch)
    q_value = value(state.critic.params, batch.obs, policy(state.actor.params, batch.obs))[0]
    np.testing.assert_allclose(loss, -(batch.weight * q_value).mean(), rtol=1e-4)


def test_a_row_of_weight_0_has_no_influence():
    algorithm, state = hand_algorithm()
    learn = jax.jit(algorithm.learn)
    results = [learn(state, x, KEY, 0) for x in (HAND_BATCH, with_nonsense(HAND_BATCH))]
    leaves_equal(*results)
    assert leaves_differ(results[0][0].critic.params, CRITIC)


def test_targets_start_as_copies_of_networks_that_differ(algorithm):
    start = algorithm.init(KEY, jnp.zeros((1, 3)))
    leaves_equal(start.critic.params, start.target_critic)
    leaves_equal(start.actor.params, start.target_actor)
    first, second = (start.critic.params[i]["head"]["kernel"] for i in range(2))
    assert not np.array_equal(first, second)
