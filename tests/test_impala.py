"""IMPALA: losses by hand and against rlax, trajectories, memory, exact counts, and learning."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rlax
from gymnasium import spaces

from algos.impala import PRESETS, Algorithm, Config, Trainer
from common.distributions import Categorical
from common.export import export_policy
from common.networks import Memory
from common.replay import Transition
from common.rollout import Trajectory

from common.run.folder import save
from common.run.load import load

SMALL = Config(
    env_id="gymnax/CartPole-v1",
    env_kwargs=("max_steps_in_episode=9",),
    num_envs=4,
    num_steps=16,
    core_size=8,
    total_timesteps=440,
    log_frequency=64,
)


def hand_algorithm(**options: Any) -> Algorithm:
    """An Algorithm whose logits are obs @ W and whose values are obs @ v."""
    algorithm = object.__new__(Algorithm)
    algorithm.config = Config(**options)

    def predict(params: Any, obs: Any, core: Any, valid: Any) -> Any:
        return Categorical(obs @ params["w"]), obs @ params["v"], core

    algorithm.predict = predict
    return algorithm


# π = [¾, ¼] and V = 1 where obs = [1, 0]; π = [½, ½] and V = 2 where obs = [0, 1]
PARAMS = {"w": jnp.array([[math.log(3), 0.0], [0.0, 0.0]]), "v": jnp.array([1.0, 2.0])}
NEVER = jnp.zeros((2, 1), bool)
# Two steps of one environment. The ratios π / μ are ¾ / ½ = 1.5 and ½ / 1 = 0.5.
HAND_TRAJECTORY = Trajectory(
    rollout=Transition(
        obs=jnp.array([[[1.0, 0.0]], [[0.0, 1.0]]]),
        action=jnp.array([[0], [1]]),
        reward=jnp.array([[1.0], [2.0]]),
        terminated=NEVER,
        truncated=NEVER,
        valid=~NEVER,
        extras=jnp.log(jnp.array([[0.5], [1.0]])),
    ),
    last_obs=jnp.array([[1.0, 1.0]]),  # V = 3
    last=Memory((), jnp.array([True])),
)
ENTROPIES = np.array([-3 / 4 * math.log(3 / 4) - 1 / 4 * math.log(1 / 4), math.log(2)])


def test_steps_of_the_optimizer_by_hand():
    """The gradient scaled down to length 5, over the root of its square at decay 0.99; annealed."""
    options = dict(learning_rate=0.5, max_grad_norm=5.0, rmsprop_epsilon=0.1, anneal_lr=True)
    config = replace(SMALL, total_timesteps=3 * 64, **options)
    algorithm = Algorithm(config, spaces.Box(-1, 1, (2,)), spaces.Discrete(2))
    params = {"w": jnp.zeros(2)}
    square, state = np.zeros(2), algorithm.optimizer.init(params)
    for count, gradient in enumerate(([30.0, 40.0], [0.3, -0.4], [-1.0, 2.0])):
        update, state = algorithm.optimizer.update({"w": jnp.array(gradient)}, state, params)
        clipped = np.array(gradient) * min(1, 5 / np.linalg.norm(gradient))
        square = 0.99 * square + 0.01 * clipped**2
        expected = -0.5 * (1 - count / 3) * clipped / np.sqrt(square + 0.1)
        np.testing.assert_allclose(update["w"], expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "target", "advantages"),
    [
        # δ = 1 + ½ 2 - 1 and ½ (2 + ½ 3 - 2), v = 1 + δ_0 + ½ δ_1 and 2 + δ_1
        ({}, [2.375, 2.75], [1 + 2.75 / 2 - 1, 0.75]),
        # G = 1 + ½ G_1 and 2 + ½ 3, weighed by 1 and ½
        ({"upgo_coef": 2.0}, [2.375, 2.75], [1.375 + 2 * (2.75 - 1), 0.75 + 2 * 0.5 * 1.5]),
        # The ratio 1.5 counts whole: δ_0 = 1.5, and its trace stays 1
        ({"rho_bar": 2.0}, [1 + 1.5 + 0.375, 2.75], [1.5 * 1.375, 0.75]),
        ({"c_bar": 0.25}, [1 + 1 + 0.375 / 4, 2.75], [1.375, 0.75]),
        # The steps of μ taken for those of π: δ_1 = 1.5
        ({"vtrace": False}, [1 + 1 + 0.75, 3.5], [1 + 3.5 / 2 - 1, 1.5]),
    ],
    ids=str,
)
def test_loss_and_gradient_by_hand(options, target, advantages):
    algorithm = hand_algorithm(gamma=0.5, entropy_coef=0.1, value_coef=0.25, **options)
    learn = jax.jit(jax.value_and_grad(algorithm.loss_fn, has_aux=True))
    (loss, metrics), gradient = learn(PARAMS, HAND_TRAJECTORY)
    log_prob, value = np.log([3 / 4, 1 / 2]), np.array([1.0, 2.0])
    target, advantages = np.array(target), np.array(advantages)
    expected = {
        "policy_loss": -(log_prob * advantages).mean(),
        "value_loss": ((target - value) ** 2).mean() / 2,
        "entropy": ENTROPIES.mean(),
        "approx_kl": (1.5 - 1 - math.log(1.5) + 0.5 - 1 - math.log(0.5)) / 2,
        "rho": (min(options.get("rho_bar", 1.0), 1.5) + 0.5) / 2,
    }
    assert set(metrics) == set(expected)
    for name, number in expected.items():
        np.testing.assert_allclose(metrics[name], number, rtol=1e-5, err_msg=name)
    total = expected["policy_loss"] + 0.25 * expected["value_loss"] - 0.1 * expected["entropy"]
    np.testing.assert_allclose(loss, 2 * total, rtol=1e-5)
    # Of constant targets: d(-log π(a) Â) = -Â (1[a] - π), dH = -π (log π + H), dL_V = V - v
    probs = np.array([[3 / 4, 1 / 4], [1 / 2, 1 / 2]])
    policy = -advantages[:, None] * (np.eye(2) - probs)
    entropy = -probs * (np.log(probs) + ENTROPIES[:, None])
    np.testing.assert_allclose(gradient["w"], policy - 0.1 * entropy, atol=1e-6)
    np.testing.assert_allclose(gradient["v"], 0.25 * (value - target), rtol=1e-5)


def test_loss_equals_rlax():
    """On random steps of another policy, with terminations."""
    rng = np.random.default_rng(0)
    steps, envs = 12, 5
    ended = rng.random((steps, envs)) < 0.2
    valid = np.concatenate([np.ones((1, envs), bool), ~ended[:-1]])
    ended &= valid
    valid[1:] = ~ended[:-1]
    obs, last_obs = rng.normal(size=(steps, envs, 2)), rng.normal(size=(envs, 2))
    rollout = Transition(
        obs=jnp.float32(obs),
        action=jnp.array(rng.integers(2, size=(steps, envs))),
        reward=jnp.float32(rng.normal(size=(steps, envs)) * valid),
        terminated=jnp.array(ended),
        truncated=jnp.zeros((steps, envs), bool),
        valid=jnp.array(valid),
        extras=jnp.float32(np.log(rng.uniform(0.2, 0.8, (steps, envs)))),
    )
    trajectory = Trajectory(rollout, jnp.float32(last_obs), Memory((), jnp.array(~ended[-1])))
    algorithm = hand_algorithm(gamma=0.9, entropy_coef=0.1, value_coef=0.5)
    loss, _ = algorithm.loss_fn(PARAMS, trajectory)
    all_obs = np.concatenate([obs, last_obs[None]])
    logits, value = jnp.float32(all_obs @ PARAMS["w"]), jnp.float32(all_obs @ PARAMS["v"])
    ratio = jnp.exp(Categorical(logits[:-1]).log_prob(rollout.action) - rollout.extras)
    discount = 0.9 * jnp.float32(~ended)
    returns = jax.vmap(partial(rlax.vtrace_td_error_and_advantage, lambda_=1.0), 1, 1)(
        value[:-1], value[1:], rollout.reward, discount, ratio
    )
    expected = 0.5 * 0.5 * (valid * returns.errors**2).sum()
    for b in range(envs):
        weight = jnp.float32(valid[:, b])
        terms = logits[:-1, b], rollout.action[:, b], returns.pg_advantage[:, b], weight
        expected += steps * rlax.policy_gradient_loss(*terms)
        expected += steps * 0.1 * rlax.entropy_loss(logits[:-1, b], weight)
    np.testing.assert_allclose(loss, expected, rtol=1e-4)


def collected(core: str) -> tuple[Trainer, Any, Trajectory]:
    """A trainer, its state after two trajectories, and the second of them."""
    trainer = Trainer(replace(SMALL, core=core))
    collect = jax.jit(trainer.collect_trajectory)
    state, _, _ = collect(trainer.state)
    state, trajectory, is_complete = collect(state)
    assert is_complete
    return trainer, state, trajectory


@pytest.mark.parametrize("core", ["none", "lstm", "gru"])
def test_the_policy_that_collected_is_that_of_the_update(core):
    """Its log_prob, memory included, over ends of episodes; so the ratios are 1."""
    trainer, state, trajectory = collected(core)
    assert (~trajectory.rollout.valid).sum() > 3 and trajectory.rollout.truncated.any()
    unroll = jax.jit(trainer.algorithm.unroll)
    distribution, value = unroll(state.learner.params, trajectory)
    log_prob = distribution.log_prob(trajectory.rollout.action)
    np.testing.assert_allclose(log_prob, trajectory.rollout.extras, atol=1e-6)
    assert value.shape == (17, 4) and log_prob.shape == (16, 4)
    if core != "none":
        forgotten = trajectory._replace(core=jax.tree.map(jnp.zeros_like, trajectory.core))
        other, _ = unroll(state.learner.params, forgotten)
        changed = np.abs(other.log_prob(trajectory.rollout.action) - log_prob) > 1e-7
        assert changed.any()
        # Behind the first end of each environment nothing is left of what was before.
        behind = np.cumsum(~np.asarray(trajectory.rollout.valid), axis=0) > 0
        behind &= np.asarray(trajectory.rollout.valid)
        assert behind.any() and not changed[behind].any()


def test_rows_without_a_transition_teach_nothing():
    trainer, state, trajectory = collected("none")
    gradient = jax.jit(jax.grad(trainer.algorithm.loss_fn, has_aux=True))
    rollout, ignored = trajectory.rollout, ~trajectory.rollout.valid
    changed = rollout._replace(
        action=jnp.where(ignored, 1 - rollout.action, rollout.action),
        reward=jnp.where(ignored, 1e6, rollout.reward),
        extras=jnp.where(ignored, -9.0, rollout.extras),
    )
    before, _ = gradient(state.learner.params, trajectory)
    after, _ = gradient(state.learner.params, trajectory._replace(rollout=changed))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), after, before)


@pytest.mark.parametrize("core", ["none", "lstm"])
def test_one_update_a_rollout_and_exact_steps(core):
    trainer = Trainer(replace(SMALL, core=core))
    logs = [log_data for log_data in trainer() if log_data["log_type"] == "train"]
    # 440 env steps are 6 trajectories of 4 x 16 and a rest of 56.
    assert sum(x["logs"]["charts/updates"] for x in logs) == 6
    assert logs[-1]["sample_step"] == int(trainer.state.step) == 440
    # In one process the policy that collects is the one that learns.
    np.testing.assert_allclose([x["logs"]["losses/rho"] for x in logs[:6]], 1, atol=1e-5)
    assert all(abs(x["logs"]["losses/approx_kl"]) < 1e-6 for x in logs[:6])
    assert trainer.evaluate(3)["logs"]["charts/evaluation_length"] <= 9


@pytest.mark.parametrize("core", ["none", "lstm"])
def test_a_saved_policy_acts_with_and_without_memory(core, tmp_path):
    trainer = Trainer(replace(SMALL, core=core))
    for _ in trainer():
        pass
    save(trainer, tmp_path / "run")
    policy = load(tmp_path / "run")
    obs = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    action = policy.predict(obs)
    assert policy.trainer.evaluate(2) == trainer.evaluate(2)
    words, exported = export_policy(policy)
    if core == "none":
        assert words == "(obs) -> action"
        np.testing.assert_array_equal(exported.call(obs), action)
    else:
        assert words == "(obs, core, valid) -> (action, core)"
        start = trainer.algorithm.initial_core(3)
        again, memory = exported.call(obs, start, np.ones(3, bool))
        np.testing.assert_array_equal(again, action)
        assert all((x != 0).any() for x in memory)


def test_runs_on_atari_with_the_preset_and_memory():
    config = Config(env_id="Pong-v5", **PRESETS["atari"])
    small = dict(num_envs=2, num_steps=3, total_timesteps=12, log_frequency=12, core="lstm")
    trainer = Trainer(replace(config, **small))
    logs = {k: v for log_data in trainer() for k, v in log_data["logs"].items()}
    assert logs["charts/updates"] == 2 and np.isfinite(logs["losses/value_loss"])


@pytest.mark.learning
def test_learns_cartpole():
    trainer = Trainer(Config(total_timesteps=150_000, num_steps=5))
    for _ in trainer():
        pass
    # 4 seeds gave 500. Inverted ratios with bootstraps behind terminations gave 111 and 208.
    assert trainer.evaluate(20)["logs"]["charts/evaluation_return"] >= 300
