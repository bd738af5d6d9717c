"""Discrete SAC: sums over the actions against loops and by hand, temperature, and exploration."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from off_policy import (
    OBS_SPACE,
    bare_algorithm,
    leaves_differ,
    leaves_equal,
    random_batch,
    relu_network,
    with_nonsense,
)
from scipy import special, stats

from algos.sac_discrete import PRESETS, Agent, Algorithm, Config, LearnerState, Trainer
from common.distributions import Categorical
from common.optimize import Trained
from common.replay import Batch

ALPHA = 0.2
# π = [3/4, 1/4] in every state
ACTOR = {"logits": jnp.array([math.log(3), 0.0])}
ENTROPY = math.log(4) - 3 / 4 * math.log(3)
# Q_i(s) = s @ critic[i], for two actions
CRITIC = jnp.array([[[1.0, 2.0], [3.0, -1.0]], [[2.0, 0.0], [0.0, 1.0]]])
TARGET_CRITIC = jnp.array([[[2.0, 0.0], [0.0, 5.0]], [[4.0, -4.0], [4.0, 4.0]]])
HAND_BATCH = Batch(
    obs=jnp.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [1.0, -1.0], [5.0, 5.0]]),
    action=jnp.array([0, 1, 1, 0, 1]),
    reward=jnp.array([1.0, 2.0, 3.0, 4.0, 50.0]),
    discount=jnp.array([0.5, 0.0, 0.5, 0.25, 0.5]),  # terminal, truncated, of two steps, invalid
    next_obs=jnp.array([[1.0, 0.0], [9.0, 9.0], [0.0, 1.0], [1.0, 1.0], [7.0, 7.0]]),
    weight=jnp.array([1.25, 1.25, 1.25, 1.25, 0.0]),
    extras=(),
)
HAND_TARGET = jnp.array([2.0, 1.0, 3.0, 0.0, 9.0])


class HandModel(NamedTuple):
    """A policy that is the same everywhere, and linear critics."""

    actor: Any
    critic: Any

    def action(self, obs):
        return Categorical(jnp.broadcast_to(self.actor["logits"], (len(obs), 2)))

    def value(self, obs):
        return obs @ self.critic


def hand_algorithm(**options) -> tuple[Algorithm, LearnerState]:
    """An Algorithm of `HandModel` that descends with step size 1, and its state."""
    params = ACTOR, CRITIC, jnp.log(jnp.float32(ALPHA))
    algorithm, trained = bare_algorithm(Algorithm, Config(**options), HandModel, *params)
    algorithm.target_entropy = lambda batch: 0.5 * math.log(2)
    actor, critic, log_alpha = trained
    return algorithm, LearnerState(actor, critic, TARGET_CRITIC, log_alpha, ())


# --- targets and losses ---------------------------------------------------------------------------


def test_td_target_by_hand():
    # min_i Q⁻_i = [2, -4], -, [0, 4], [2, 0], and V = 3/4 of the first + 1/4 of the second + α H
    algorithm, state = hand_algorithm()
    target = algorithm.td_target(state, HAND_BATCH)[:4]
    bonus = ALPHA * ENTROPY
    expected = [1 + 0.5 * (0.5 + bonus), 2, 3 + 0.5 * (1 + bonus), 4 + 0.25 * (1.5 + bonus)]
    np.testing.assert_allclose(target, expected, rtol=1e-5)


# Of the actions taken Q_1 = 1, -1, 1, -2 and Q_2 = 2, 1, 1, 2, off the targets by
ERRORS = np.array([[1, 2, 2, 2], [0, 0, 2, -2]])


def test_critic_loss_by_hand():
    algorithm, state = hand_algorithm()
    grad = jax.grad(algorithm.critic_loss, has_aux=True)
    gradient, metrics = grad(CRITIC, state, HAND_BATCH, HAND_TARGET)
    np.testing.assert_allclose(metrics["critic_loss"], 0.5 * ((1 + 4 + 4 + 4) + (4 + 4)) / 4)
    np.testing.assert_allclose(metrics["q_values"], ((1 - 1 + 1 - 2) + (2 + 1 + 1 + 2)) / 8)
    expected = np.zeros((2, 2, 2))
    for i in range(2):
        for row in range(4):
            action = HAND_BATCH.action[row]
            expected[i, :, action] -= ERRORS[i, row] * np.array(HAND_BATCH.obs[row]) / 4
    np.testing.assert_allclose(gradient, expected, rtol=1e-6)


def test_actor_loss_by_hand():
    # min_i Q_i = [1, 0], [0, -1], [2, 1], [-2, -1]
    algorithm, state = hand_algorithm()
    grad = jax.grad(algorithm.actor_loss, has_aux=True)
    gradient, (entropy, metrics) = grad(ACTOR, state, HAND_BATCH)
    value = (0.75 - 0.25 + 1.75 - 1.75) / 4
    np.testing.assert_allclose(metrics["actor_loss"], -ALPHA * ENTROPY - value, rtol=1e-5)
    np.testing.assert_allclose([entropy, metrics["entropy"]], ENTROPY, rtol=1e-5)
    np.testing.assert_allclose(metrics["alpha"], ALPHA, rtol=1e-6)
    # ∂L/∂l_a = π(a) (α (log π(a) + H) - (Q(a) - V)); the mean Q is [1/4, -1/4], and V 1/8
    probs = np.array([0.75, 0.25])
    expected = probs * (ALPHA * (np.log(probs) + ENTROPY) - (np.array([0.25, -0.25]) - 0.125))
    np.testing.assert_allclose(gradient["logits"], expected, rtol=1e-5)


@pytest.mark.parametrize(("entropy", "rises"), [(0.1, True), (0.6, False)])
def test_alpha_loss_by_hand(entropy, rises):
    # H̄ = 0.347: an entropy below it must raise α.
    algorithm, _ = hand_algorithm()
    target = 0.5 * math.log(2)
    log_alpha = jnp.log(jnp.float32(0.4))
    loss, gradient = jax.value_and_grad(lambda x: algorithm.alpha_loss(x, entropy, target)[0])(
        log_alpha
    )
    expected = 0.4 * (entropy - target)
    np.testing.assert_allclose([loss, gradient], expected, rtol=1e-6)
    trained = Trained(log_alpha, algorithm.optimizer.init(log_alpha))
    moved, _ = algorithm.descend(algorithm.alpha_loss, trained, jnp.float32(entropy), target)
    assert (moved.params > log_alpha) == rises


@pytest.mark.parametrize("alpha", [None, 0.2])
def test_a_whole_update_by_hand(alpha):
    # All rows terminate, so that the targets are the rewards.
    algorithm, state = hand_algorithm(tau=0.25, alpha=alpha)
    batch = HAND_BATCH._replace(reward=HAND_TARGET, discount=jnp.zeros(5))
    new, metrics = algorithm.learn(state, batch)
    gradient, _ = jax.grad(algorithm.critic_loss, has_aux=True)(CRITIC, state, batch, HAND_TARGET)
    critic = CRITIC - gradient
    np.testing.assert_allclose(new.critic.params, critic, rtol=1e-6)
    target = 0.25 * critic + 0.75 * TARGET_CRITIC
    np.testing.assert_allclose(new.target_critic, target, rtol=1e-6)
    after = state._replace(critic=new.critic)  # the policy climbs the new critics
    gradient, _ = jax.grad(algorithm.actor_loss, has_aux=True)(ACTOR, after, batch)
    logits = ACTOR["logits"] - gradient["logits"]
    np.testing.assert_allclose(new.actor.params["logits"], logits, rtol=1e-6)
    log_alpha = math.log(ALPHA) - (alpha is None) * ALPHA * (ENTROPY - 0.5 * math.log(2))
    np.testing.assert_allclose(new.log_alpha.params, log_alpha, rtol=1e-5)
    assert set(metrics) == {"critic_loss", "q_values", "actor_loss", "entropy", "alpha"}


def test_a_row_of_weight_0_has_no_influence():
    algorithm, state = hand_algorithm()
    learn = jax.jit(algorithm.learn)
    results = [learn(state, x) for x in (HAND_BATCH, with_nonsense(HAND_BATCH))]
    leaves_equal(*results)
    assert leaves_differ(results[0][0].critic.params, CRITIC)


@pytest.fixture(scope="module")
def algorithm():
    config = Config(learning_starts=100, target_entropy=0.4, alpha=0.3)
    return Algorithm(config, OBS_SPACE, spaces.Discrete(4))


@pytest.fixture(scope="module")
def state(algorithm):
    state, other = (algorithm.init(jax.random.key(i), jnp.zeros((1, 3))) for i in range(2))
    leaves_equal(state.critic.params, state.target_critic)
    np.testing.assert_allclose(state.log_alpha.params, math.log(0.3), rtol=1e-6)
    return state._replace(target_critic=other.critic.params)


def expectation(critic, actor, obs):
    """Σ_a π(a) (min_i Q_i(a) - α log π(a)) and the entropy of each row, in a loop."""
    values, entropies = [], []
    q_values = [relu_network(critic[i], obs) for i in range(2)]
    log_probs = special.log_softmax(relu_network(actor, obs), axis=-1)
    for row in range(len(obs)):
        value = entropy = 0.0
        for action in range(4):
            log_prob = log_probs[row, action]
            smaller = min(q_values[0][row, action], q_values[1][row, action])
            value += math.exp(log_prob) * (smaller - 0.3 * log_prob)
            entropy -= math.exp(log_prob) * log_prob
        values.append(value)
        entropies.append(entropy)
    return np.array(values), np.array(entropies)


def test_networks_against_a_loop_over_actions(algorithm, state):
    batch = random_batch(0)._replace(action=jnp.arange(12) % 4)
    value, _ = expectation(state.target_critic, state.actor.params, batch.next_obs)
    expected = batch.reward + batch.discount * value
    td_target = jax.jit(algorithm.td_target)(state, batch)
    np.testing.assert_allclose(td_target, expected, rtol=1e-4, atol=1e-5)
    loss, _ = jax.jit(algorithm.critic_loss)(state.critic.params, state, batch, td_target)
    total = 0.0
    for i in range(2):
        q_values = relu_network(state.critic.params[i], batch.obs)
        for row in range(12):
            total += batch.weight[row] * (expected[row] - q_values[row, row % 4]) ** 2
    np.testing.assert_allclose(loss, total / 12 / 2, rtol=1e-4)
    loss, (mean_entropy, _) = jax.jit(algorithm.actor_loss)(state.actor.params, state, batch)
    value, entropy = expectation(state.critic.params, state.actor.params, batch.obs)
    np.testing.assert_allclose(loss, -(batch.weight * value).mean(), rtol=1e-4)
    np.testing.assert_allclose(mean_entropy, (batch.weight * entropy).mean(), rtol=1e-4)


def test_the_target_entropy_is_a_share_of_the_largest(algorithm):
    np.testing.assert_allclose(algorithm.target_entropy(HAND_BATCH), 0.4 * math.log(4))
    paper = Algorithm(Config(**PRESETS["atari"]), OBS_SPACE, spaces.Discrete(6))
    np.testing.assert_allclose(paper.target_entropy(HAND_BATCH), 0.98 * math.log(6))


# --- exploration ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("step", "is_random"), [(0, True), (99, True), (100, False)])
def test_actions_are_uniform_at_first_and_the_policys_later(algorithm, state, step, is_random):
    agent = Agent(algorithm.config, algorithm)
    obs = 4 * np.ones((4_000, 3), np.float32)
    action = np.asarray(agent.sample(state, obs, step, jax.random.key(0)))
    probs = special.softmax(relu_network(state.actor.params, obs[0]))
    assert probs.max() - probs.min() > 0.1
    expected = np.full(4, 0.25) if is_random else probs
    assert stats.chisquare(np.bincount(action, minlength=4), 4_000 * expected).pvalue > 1e-3


def test_evaluation_plays_the_most_likely_action(algorithm, state):
    agent = Agent(algorithm.config, algorithm)
    obs = np.random.default_rng(2).normal(size=(64, 3)).astype(np.float32)
    expected = relu_network(state.actor.params, obs).argmax(axis=-1)
    for key in range(2):
        np.testing.assert_array_equal(agent.predict(state, obs, jax.random.key(key)), expected)


def test_the_atari_preset_stores_single_frames(monkeypatch):
    # Without its state: images and their networks take long.
    monkeypatch.setattr(Trainer, "init_state", lambda self, key: None)
    trainer = Trainer(Config(env_id="Pong-v5", **PRESETS["atari"]))
    assert trainer.replay.frame_stack == trainer.env.observation_space.shape[0] == 4
    frames = trainer.env.reset(jax.random.key(0)).obs
    stored = jax.eval_shape(trainer.replay.init, frames, jnp.zeros(8, jnp.int32)).storage
    assert stored.obs.shape == (125_000, 8, 84, 84)
    trainer.env.close()
