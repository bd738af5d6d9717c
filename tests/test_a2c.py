"""A2C: losses by hand, one RMSProp step for each rollout, exact counts, and learning."""

import math
from dataclasses import replace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rlax
from toy_envs import NonsenseEnv, TimerJaxEnv, use_env

from algos import a2c
from algos.a2c import Algorithm, Config, Trainer
from common.distributions import Categorical
from common.rollout import RolloutBatch

SMALL = Config(
    env_id="gymnax/CartPole-v1",
    env_kwargs=("max_steps_in_episode=16",),
    num_envs=4,
    num_steps=32,
    total_timesteps=440,
    log_frequency=128,
)


def leaves_equal(left, right) -> None:
    jax.tree.map(np.testing.assert_array_equal, left, right)


def hand_algorithm(**options) -> Algorithm:
    """An Algorithm whose logits are obs @ W and whose values are obs @ v."""
    algorithm = object.__new__(Algorithm)
    algorithm.config = Config(**options)
    algorithm.predict = lambda params, obs: (Categorical(obs @ params["w"]), obs @ params["v"])
    return algorithm


# π = [¾, ¼] and V = 1 where obs = [1, 0]; π = [½, ½] and V = 2 where obs = [0, 1]
PARAMS = {"w": jnp.array([[math.log(3), 0.0], [0.0, 0.0]]), "v": jnp.array([1.0, 2.0])}
HAND_BATCH = RolloutBatch(
    obs=jnp.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]),
    action=jnp.array([0, 1, 1]),
    log_prob=jnp.array([-7.0, -8.0, -9.0]),
    value=jnp.array([70.0, 80.0, 90.0]),
    advantages=jnp.array([2.0, -1.0, 4.0]),
    returns=jnp.array([3.0, 2.5, 6.0]),
    weight=jnp.array([2.0, 1.0, 0.0]),
)
NONSENSE_ROW = HAND_BATCH._replace(
    obs=HAND_BATCH.obs.at[2].set(jnp.array([-70.0, 1e3])),
    action=HAND_BATCH.action.at[2].set(0),
    advantages=HAND_BATCH.advantages.at[2].set(1e6),
    returns=HAND_BATCH.returns.at[2].set(-1e6),
)


def test_loss_and_gradient_by_hand():
    # Nothing depends on the policy and the value of old: the first two rows have none that fit.
    algorithm = hand_algorithm(entropy_coef=0.1, value_coef=0.25)
    learn = jax.jit(jax.value_and_grad(algorithm.loss_fn, has_aux=True))
    (loss, metrics), gradient = learn(PARAMS, HAND_BATCH)
    entropies = -3 / 4 * math.log(3 / 4) - 1 / 4 * math.log(1 / 4), math.log(2)
    expected = {
        "policy_loss": -(2 * math.log(3 / 4) * 2.0 + math.log(1 / 2) * -1.0) / 3,
        "value_loss": (2 * (1 - 3) ** 2 + (2 - 2.5) ** 2) / 3 / 2,
        "entropy": (2 * entropies[0] + entropies[1]) / 3,
    }
    assert set(metrics) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)
    total = expected["policy_loss"] + 0.25 * expected["value_loss"] - 0.1 * expected["entropy"]
    np.testing.assert_allclose(loss, total, rtol=1e-5)
    # d(-log π(a) Â) = -Â (1[a] - π), dH = -π (log π + H), and dL_V = V - R
    probs = np.array([[3 / 4, 1 / 4], [1 / 2, 1 / 2]])
    policy = np.array([[-2.0], [1.0]]) * (np.array([[1, 0], [0, 1]]) - probs)
    entropy = -probs * (np.log(probs) + np.array(entropies)[:, None])
    weight = np.array([[2.0], [1.0]]) / 3
    np.testing.assert_allclose(gradient["w"], weight * (policy - 0.1 * entropy), atol=1e-6)
    np.testing.assert_allclose(gradient["v"], 0.25 * weight[:, 0] * [1 - 3, 2 - 2.5], rtol=1e-5)


def test_policy_loss_equals_rlax():
    keys = jax.random.split(jax.random.key(0), 3)
    logits, advantages = jax.random.normal(keys[0], (64, 5)), jax.random.normal(keys[1], (64,))
    action, weight = jnp.arange(64) % 5, jax.random.uniform(keys[2], (64,))
    batch = RolloutBatch((), action, *[advantages] * 4, weight=weight)
    loss = hand_algorithm().policy_loss(Categorical(logits).log_prob(action), batch)
    expected = rlax.policy_gradient_loss(logits, action, advantages, weight)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


def test_normalized_advantages():
    # 1 and 3 have mean 2 and deviation 1, whatever the third says.
    advantages, weight = jnp.array([1.0, 3.0, 50.0]), jnp.array([1.5, 1.5, 0.0])
    batch = HAND_BATCH._replace(advantages=advantages, weight=weight)
    log_prob = jnp.array([-0.5, -2.0, -1.0])
    for normalize, expected in ((True, -(0.5 - 2.0) / 2), (False, (0.5 + 2.0 * 3) / 2)):
        algorithm = hand_algorithm(normalize_advantages=normalize)
        np.testing.assert_allclose(algorithm.policy_loss(log_prob, batch), expected, rtol=1e-5)


@pytest.mark.parametrize("normalize_advantages", [False, True])
def test_a_row_of_weight_0_has_no_influence(normalize_advantages):
    algorithm = hand_algorithm(normalize_advantages=normalize_advantages)
    learn = jax.jit(jax.value_and_grad(algorithm.loss_fn, has_aux=True))
    leaves_equal(learn(PARAMS, HAND_BATCH), learn(PARAMS, NONSENSE_ROW))
    nothing = learn(PARAMS, HAND_BATCH._replace(weight=jnp.zeros(3)))
    assert not any(np.any(x) for x in jax.tree.leaves(nothing))


def flat(tree) -> np.ndarray:
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


@pytest.mark.slow
def test_each_rollout_is_one_rmsprop_step():
    trainer = Trainer(replace(SMALL, max_grad_norm=2.0))
    closed = mock.Mock(wraps=trainer.env.close)
    trainer.env.close = closed
    agent, collect = trainer.agent, jax.jit(trainer.collect_trajectory)
    prepare = jax.jit(agent.prepare)
    gradient_of = jax.jit(jax.grad(trainer.algorithm.loss_fn, has_aux=True))
    training, square, norms = trainer(), 0.0, []
    for rollout_number in range(3):
        state = jax.tree.map(jnp.copy, trainer.state)
        before = flat(state.learner.params)
        _, trajectory, is_complete = collect(state)
        assert is_complete and not trajectory.rollout.valid.all()
        _, batch = prepare(state.learner, trajectory.rollout, trajectory.last_obs)
        gradient, metrics = gradient_of(state.learner.params, batch)
        gradient = flat(gradient)
        norms.append(np.linalg.norm(gradient))
        gradient *= min(1.0, 2.0 / norms[-1])
        square = 0.99 * square + 0.01 * gradient**2
        step_size = 7e-4 * (1 - rollout_number / 3)  # 440 env steps are 3 rollouts and a rest
        next(training)
        logs = next(training)["logs"]
        change = flat(trainer.state.learner.params) - before
        np.testing.assert_allclose(
            change, -step_size * gradient / np.sqrt(square + 1e-5), atol=1e-6
        )
        assert logs["charts/updates"] == 1
        for name in metrics:
            np.testing.assert_allclose(logs[f"losses/{name}"], metrics[name], rtol=1e-4)
    assert max(norms) > 2.0 and np.abs(change).max() > 1e-4
    learner = jax.tree.map(np.array, trainer.state.learner)
    closed.assert_not_called()
    # A rollout that the end of the run cuts is not learned from.
    rest = list(training)
    closed.assert_called_once()
    assert int(trainer.state.step) == 440 and rest[-1]["logs"] == {"charts/updates": 0}
    leaves_equal(learner, trainer.state.learner)


def test_rows_without_a_transition_teach_nothing():
    trainer = Trainer(replace(SMALL, normalize_obs=True, learning_rate=1e-2))
    trainer.env = NonsenseEnv(trainer.env.env_id, trainer.env.backend)

    @jax.jit
    def train(nonsense):
        trainer.env.nonsense = nonsense
        state, metrics = trainer.run_iterations(trainer.state, 3)
        return state.learner, metrics

    leaves_equal(train(1.5), train(-1e4))


@pytest.mark.slow
def test_the_value_goes_on_after_a_time_limit_and_not_after_an_end(monkeypatch):
    # Three steps of reward 1: then nothing, or the value of an endless episode.
    use_env(monkeypatch, a2c, TimerJaxEnv(3))
    config = Config(total_timesteps=40_000, gamma=0.8, log_frequency=40_000, learning_rate=3e-3)
    trainer = Trainer(config)
    list(trainer())
    _, value = trainer.algorithm.predict(trainer.state.learner.params, jnp.eye(4))
    np.testing.assert_allclose(value, [1 / (1 - 0.8), 1, 1.8, 2.44], atol=0.1)


@pytest.mark.learning
@pytest.mark.parametrize("seed", [1, 2])
def test_learns_cartpole(seed):
    config = Config(seed=seed, num_steps=8, total_timesteps=100_000, log_frequency=100_000)
    trainer = Trainer(replace(config, learning_rate=3e-3, gae_lambda=0.95))
    for _ in trainer():
        pass
    assert trainer.evaluate(20)["logs"]["charts/evaluation_return"] >= 200
