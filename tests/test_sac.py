"""SAC: targets, losses and temperature by hand, exploration, and learning."""

import math
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

from algos.sac import Agent, Algorithm, Config, LearnerState, Trainer
from common.distributions import TanhNormal
from common.optimize import Trained


class HandModel(NamedTuple):
    """A policy tanh(s @ mean + exp(log_std) ε), and critics that are linear."""

    actor: Any
    critic: Any

    def action(self, obs):
        return TanhNormal(obs @ self.actor["mean"], self.actor["log_std"])

    def value(self, obs, action):
        return hand_values(self.critic, obs, action)


# With mean 0 and deviation 1 the action of noise U is 1/2, and its density that of U over 1 - 1/4.
U = math.atanh(0.5)
NOISE = jnp.full((5, 1), U)
LOG_PROB = stats.norm.logpdf(U) - math.log(3 / 4)
ALPHA = 0.2
ACTOR = {"mean": jnp.zeros((2, 1)), "log_std": jnp.zeros(1)}


def hand_algorithm(**options) -> tuple[Algorithm, LearnerState]:
    """An Algorithm of `HandModel` that descends with step size 1, and its state."""
    params = ACTOR, CRITIC, jnp.log(jnp.float32(ALPHA))
    algorithm, trained = bare_algorithm(Algorithm, Config(**options), HandModel, *params)
    algorithm.target_entropy = -1
    actor, critic, log_alpha = trained
    return algorithm, LearnerState(actor, critic, TARGET_CRITIC, log_alpha, ())


@pytest.fixture(scope="module")
def algorithm():
    return Algorithm(Config(learning_starts=100), OBS_SPACE, ACTION_SPACE)


@pytest.fixture(scope="module")
def state(algorithm):
    state = algorithm.init(jax.random.key(0), jnp.zeros((1, 3)))
    other = algorithm.init(jax.random.key(1), jnp.zeros((1, 3)))
    log_alpha = state.log_alpha._replace(params=jnp.log(jnp.float32(0.3)))
    return state._replace(target_critic=other.critic.params, log_alpha=log_alpha)


def reference(state, obs, noise):
    """Actions and log-probabilities of the policy in float64."""
    mean, log_std = np.split(relu_network(state.actor.params, obs), 2, axis=-1)
    u = mean + np.exp(log_std) * noise
    log_prob = stats.norm.logpdf(u, mean, np.exp(log_std)) - np.log(1 - np.tanh(u) ** 2)
    return np.tanh(u), log_prob.sum(axis=-1)


def smallest_value(critic, obs, action):
    return np.minimum(*(relu_network(critic[i], obs, action)[:, 0] for i in range(2)))


# --- targets and losses ---------------------------------------------------------------------------


def test_td_target_by_hand():
    # min_i Q⁻_i with a = 1/2: min(2.5, 4.5), -, min(4.5, -5.5), min(0.5, 4.5)
    algorithm, state = hand_algorithm()
    entropy = -ALPHA * LOG_PROB
    target = algorithm.td_target(state, HAND_BATCH, NOISE)[:4]
    expected = [1 + 0.5 * (2.5 + entropy), 2, 3 + 0.5 * (-5.5 + entropy), 4 + (0.5 + entropy) / 4]
    np.testing.assert_allclose(target, expected, rtol=1e-5)


def test_critic_loss_by_hand():
    algorithm, state = hand_algorithm()
    loss, metrics = algorithm.critic_loss(CRITIC, state, HAND_BATCH, HAND_TARGET)
    np.testing.assert_allclose(loss, 0.5 * ((1 + 1 + 0 + 9) + (0 + 1 + 1 + 4)) / 4)
    np.testing.assert_allclose(metrics["q_values"], ((3 + 0 + 3 + 3) + (2 + 0 + 2 + 2)) / 8)
    assert metrics["critic_loss"] == loss


def actor_loss_by_hand(slopes):
    """Gradient of the actor loss where ∂Q/∂a of the smaller critic is `slopes`."""
    # ∂log π/∂u = 2 tanh(u) = 1 and ∂a/∂u = 3/4; ∂log π/∂log σ = ε ∂log π/∂u - 1
    by_u = ALPHA - 3 / 4 * np.array(slopes)
    obs = np.array(HAND_BATCH.obs[:4])
    return {"mean": by_u[:, None] * obs / 4, "log_std": (by_u * U - ALPHA)[:, None] / 4}


def test_actor_loss_by_hand():
    # a = 1/2: Q_1 = 3, 4, 5, 1 and Q_2 = 2, -2, 1, 3
    algorithm, state = hand_algorithm()
    grads = jax.grad(algorithm.actor_loss, has_aux=True)
    grad, (entropy, metrics) = grads(ACTOR, state, HAND_BATCH, NOISE)
    np.testing.assert_allclose(metrics["actor_loss"], ALPHA * LOG_PROB - (2 - 2 + 1 + 1) / 4)
    np.testing.assert_allclose([entropy, metrics["entropy"]], -LOG_PROB, rtol=1e-5)
    np.testing.assert_allclose(metrics["alpha"], ALPHA, rtol=1e-6)
    rows = actor_loss_by_hand([-2, -2, -2, 4])
    np.testing.assert_allclose(grad["mean"][:, 0], rows["mean"].sum(axis=0), rtol=1e-5)
    np.testing.assert_allclose(grad["log_std"], rows["log_std"].sum(axis=0), rtol=1e-5)


@pytest.mark.parametrize(("entropy", "rises"), [(-1.5, True), (-1.0, None), (2.0, False)])
def test_alpha_loss_by_hand(entropy, rises):
    # H̄ = -1: an entropy below it must raise α.
    algorithm, _ = hand_algorithm()
    log_alpha = jnp.log(jnp.float32(0.4))
    loss, gradient = jax.value_and_grad(lambda x: algorithm.alpha_loss(x, entropy)[0])(log_alpha)
    np.testing.assert_allclose([loss, gradient], 0.4 * (entropy + 1), rtol=1e-6)
    trained = Trained(log_alpha, algorithm.optimizer.init(log_alpha))
    moved, _ = algorithm.descend(algorithm.alpha_loss, trained, jnp.float32(entropy))
    assert moved.params == log_alpha if rises is None else (moved.params > log_alpha) == rises


def test_each_update_draws_from_its_own_key(algorithm, state):
    batch, learn, losses = random_batch(0), jax.jit(algorithm.learn), []
    for key in jax.random.split(jax.random.key(0)):
        losses.append(learn(state, batch, key)[1]["critic_loss"])
    assert losses[0] != losses[1]  # of targets that are drawn


def test_a_whole_update_by_hand(monkeypatch):
    # All rows terminate, so that the targets are the rewards.
    monkeypatch.setattr(jax.random, "normal", lambda key, shape: jnp.full(shape, U))
    algorithm, state = hand_algorithm(tau=0.25)
    batch = HAND_BATCH._replace(reward=HAND_TARGET, discount=jnp.zeros(5))
    new, metrics = algorithm.learn(state, batch, jax.random.key(0))
    for name in CRITIC:  # ½ Σ (y - Q)² over 4 rows
        critic = CRITIC[name] + ERRORS_TIMES_SLOPES[name] / 4
        np.testing.assert_allclose(new.critic.params[name], critic, rtol=1e-6)
        target = 0.25 * critic + 0.75 * TARGET_CRITIC[name]
        np.testing.assert_allclose(new.target_critic[name], target, rtol=1e-6)
    # The policy climbs the new critics: Q_1 = 1.5, 4.5, 4.5, -1.5, Q_2 = 1.44, -1.3, 1.44, 1.44
    rows = actor_loss_by_hand([-2.625, -2.625, -2.625, 3.0])
    for name in ACTOR:
        expected = -rows[name].sum(axis=0).reshape(ACTOR[name].shape)
        np.testing.assert_allclose(new.actor.params[name], expected, rtol=1e-5)
    log_alpha = math.log(ALPHA) - ALPHA * (-LOG_PROB + 1)
    np.testing.assert_allclose(new.log_alpha.params, log_alpha, rtol=1e-5)
    assert set(metrics) == {"critic_loss", "q_values", "actor_loss", "entropy", "alpha"}


def test_noise_is_drawn_for_each_row_twice(monkeypatch):
    algorithm, state = hand_algorithm()
    drawn = []
    monkeypatch.setattr(algorithm, "td_target", lambda *x: drawn.append(x[2]) or HAND_TARGET)
    loss = algorithm.actor_loss
    monkeypatch.setattr(algorithm, "actor_loss", lambda *x: drawn.append(x[3]) or loss(*x))
    many = jax.tree.map(lambda x: jnp.repeat(x, 400, axis=0), HAND_BATCH)
    monkeypatch.setattr(
        algorithm, "critic_loss", lambda critic, *_: (0.0 * critic["obs"].sum(), {})
    )
    algorithm.learn(state, many._replace(action=jnp.zeros((2000, 1))), jax.random.key(0))
    first, second = (np.asarray(x)[:, 0] for x in drawn)
    for noise in (first, second):
        assert stats.kstest(noise, "norm").pvalue > 1e-3 and len(np.unique(noise)) > 1990
    assert stats.pearsonr(first, second).pvalue > 1e-3


def test_a_fixed_alpha_stays():
    algorithm, state = hand_algorithm(alpha=0.2)
    new, metrics = algorithm.learn(state, HAND_BATCH, jax.random.key(0))
    assert new.log_alpha.params == state.log_alpha.params
    np.testing.assert_allclose(metrics["alpha"], 0.2, rtol=1e-6)
    fixed = Algorithm(Config(alpha=0.25), OBS_SPACE, ACTION_SPACE)
    assert fixed.init(jax.random.key(0), jnp.zeros((1, 3))).log_alpha.params == math.log(0.25)


def test_alpha_starts_at_1_and_aims_at_minus_the_number_of_actions(algorithm):
    start = algorithm.init(jax.random.key(0), jnp.zeros((1, 3)))
    assert start.log_alpha.params == 0
    assert algorithm.target_entropy == -2
    given = Algorithm(Config(target_entropy=-3.5), OBS_SPACE, ACTION_SPACE)
    assert given.target_entropy == -3.5
    leaves_equal(start.critic.params, start.target_critic)
    assert leaves_differ(
        start.critic.params[0]["head"]["kernel"], start.critic.params[1]["head"]["kernel"]
    )


def test_networks_against_numpy(algorithm, state):
    batch = random_batch(0)
    noise, other_noise = np.random.default_rng(1).normal(size=(2, 12, 2)).astype(np.float32)
    action, log_prob = reference(state, batch.next_obs, noise)
    next_value = smallest_value(state.target_critic, batch.next_obs, action) - 0.3 * log_prob
    expected = batch.reward + batch.discount * next_value
    td_target = jax.jit(algorithm.td_target)(state, batch, noise)
    np.testing.assert_allclose(td_target, expected, rtol=1e-4, atol=1e-5)
    q_values = [relu_network(state.critic.params[i], batch.obs, batch.action)[:, 0] for i in (0, 1)]
    loss, _ = jax.jit(algorithm.critic_loss)(state.critic.params, state, batch, td_target)
    errors = sum((expected - q_value) ** 2 for q_value in q_values)
    np.testing.assert_allclose(loss, (batch.weight * errors).mean() / 2, rtol=1e-4)
    action, log_prob = reference(state, batch.obs, other_noise)
    value = smallest_value(state.critic.params, batch.obs, action)
    loss, (entropy, _) = jax.jit(algorithm.actor_loss)(
        state.actor.params, state, batch, other_noise
    )
    np.testing.assert_allclose(loss, (batch.weight * (0.3 * log_prob - value)).mean(), rtol=1e-4)
    np.testing.assert_allclose(entropy, -(batch.weight * log_prob).mean(), rtol=1e-4)


def test_a_row_of_weight_0_has_no_influence():
    algorithm, state = hand_algorithm()
    learn = jax.jit(algorithm.learn)
    results = [learn(state, x, jax.random.key(0)) for x in (HAND_BATCH, with_nonsense(HAND_BATCH))]
    leaves_equal(*results)
    assert leaves_differ(results[0][0].critic.params, CRITIC)


def test_the_edge_of_the_range_is_finite(algorithm, state):
    # The policy says ±20: tanh rounds to ±1, where 1 - tanh² would be 0.
    actor = jax.tree.map(jnp.zeros_like, state.actor.params)
    actor["head"]["bias"] = jnp.float32([20, -20, 0, 0])
    edge = state._replace(actor=state.actor._replace(params=actor))
    batch, noise = random_batch(0), np.random.default_rng(1).normal(size=(12, 2)).astype(np.float32)
    u = np.float64([20, -20]) + noise
    log_slope = 2 * (np.log(2) - np.abs(u) - np.log1p(np.exp(-2 * np.abs(u))))
    log_prob = (stats.norm.logpdf(noise) - log_slope).sum(axis=-1)
    action = np.sign(u)
    loss = jax.jit(jax.grad(algorithm.actor_loss, has_aux=True))
    gradient, (_, metrics) = loss(actor, edge, batch, noise)
    value = smallest_value(state.critic.params, batch.obs, action)
    expected = (batch.weight * (0.3 * log_prob - value)).mean()
    np.testing.assert_allclose(metrics["actor_loss"], expected, rtol=1e-5)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradient))
    # ∂L/∂bias = α 2 tanh(u) through log π alone: it pulls back to the middle.
    np.testing.assert_allclose(gradient["head"]["bias"][:2], [0.6, -0.6], rtol=1e-4)
    next_value = smallest_value(state.target_critic, batch.next_obs, action) - 0.3 * log_prob
    td_target = jax.jit(algorithm.td_target)(edge, batch, noise)
    expected = batch.reward + batch.discount * next_value
    np.testing.assert_allclose(td_target, expected, rtol=1e-5)


def test_deviations_are_bounded(algorithm, state):
    actor = jax.tree.map(jnp.zeros_like, state.actor.params)
    actor["head"]["bias"] = jnp.float32([0, 0, 50, -50])
    policy = algorithm.model(actor, state.critic.params).action(jnp.ones((1, 3)))
    assert policy.log_std.tolist() == [[2, -20]]


# --- exploration ----------------------------------------------------------------------------------


def test_actions_follow_the_policy_and_the_noise_later(algorithm, state):
    agent = Agent(algorithm.config, algorithm, ACTION_SPACE)
    obs, noise = np.random.default_rng(2).normal(size=(2, 64, 3)).astype(np.float32)
    action = agent.sample(state, obs, 100, noise[:, :2])
    expected, _ = reference(state, obs, noise[:, :2])
    np.testing.assert_allclose(action, expected, atol=1e-5)


@pytest.mark.learning
@pytest.mark.slow
def test_learns_pendulum():
    config = Config(
        env_id="Pendulum-v1",
        total_timesteps=8_000,
        log_frequency=8_000,
        learning_starts=1_000,
        learning_rate=1e-3,
        batch_size=64,
    )
    trainer = Trainer(config)
    for _ in trainer():
        pass
    assert trainer.evaluate(20)["logs"]["charts/evaluation_return"] >= -300
