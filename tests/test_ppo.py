"""PPO: losses and targets by hand, the gradient step, exact counts, and learning."""

import math
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest import mock

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rlax
from gymnasium import spaces
from run_helpers import best_return
from toy_envs import EchoEnv, NonsenseEnv, TimerJaxEnv, use_env

from algos import ppo, ppo_rnn
from algos.ppo import PRESETS, Algorithm, Config, LearnerState, Trainer
from common import load
from common.distributions import Categorical
from common.normalize import Normalizer, init_stats, normalize
from common.replay import Transition
from common.rollout import RolloutBatch, Trajectory, shuffled_rows, take_minibatch

# Some episodes of random actions end by falling, some by the time limit.
SMALL = Config(
    env_id="gymnax/CartPole-v1",
    env_kwargs=("max_steps_in_episode=16",),
    num_envs=4,
    num_steps=32,
    total_timesteps=384,
    log_frequency=128,
    update_epochs=2,
    num_minibatches=2,
)
VECTOR, TWO = spaces.Box(-9, 9, (4,), np.float32), spaces.Discrete(2)


@pytest.fixture(scope="module")
def trainer():
    return Trainer(SMALL)


def leaves_equal(left, right) -> None:
    jax.tree.map(np.testing.assert_array_equal, left, right)


# --- Losses ---------------------------------------------------------------------------------------


def hand_algorithm(**options) -> Algorithm:
    """An Algorithm whose logits are obs @ W and whose values are obs @ v."""
    algorithm = object.__new__(Algorithm)
    algorithm.config = Config(**options)
    algorithm.predict = lambda params, obs: (Categorical(obs @ params["w"]), obs @ params["v"])
    return algorithm


# π = [¾, ¼] and V = 1 where obs = [1, 0]; π = [½, ½] and V = 2 where obs = [0, 1]
PARAMS = {"w": jnp.array([[math.log(3), 0.0], [0.0, 0.0]]), "v": jnp.array([1.0, 2.0])}
LOSSES = {"policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction"}
HAND_BATCH = RolloutBatch(
    obs=jnp.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]),
    action=jnp.array([0, 1, 1]),
    log_prob=jnp.log(jnp.array([1 / 2, 5 / 9, 1 / 3])),  # ratios 3/2 and 9/10
    value=jnp.array([0.7, 2.0, 5.0]),
    advantages=jnp.array([2.0, -1.0, 4.0]),
    returns=jnp.array([3.0, 2.5, 6.0]),
    weight=jnp.array([1.5, 1.5, 0.0]),
)
NONSENSE_ROW = RolloutBatch(
    obs=HAND_BATCH.obs.at[2].set(jnp.array([-70.0, 1e3])),
    action=HAND_BATCH.action.at[2].set(0),
    log_prob=HAND_BATCH.log_prob.at[2].set(-9.0),
    value=HAND_BATCH.value.at[2].set(-1e4),
    advantages=HAND_BATCH.advantages.at[2].set(1e6),
    returns=HAND_BATCH.returns.at[2].set(-1e6),
    weight=HAND_BATCH.weight,
)


def batch_of(**fields) -> RolloutBatch:
    """A RolloutBatch of rows of equal weight that holds only what one loss reads."""
    empty = RolloutBatch(*[None] * 6, weight=jnp.ones(len(next(iter(fields.values())))))
    return empty._replace(**{name: jnp.asarray(x) for name, x in fields.items()})


def test_policy_loss_by_hand():
    # Inside the clip, beyond it (a gain stays clipped), and back into it (a loss counts in full).
    ratio = jnp.array([1.1, 1.5, 0.5, 1.5, 0.5])
    batch = batch_of(advantages=[2.0, 2.0, 2.0, -2.0, -2.0])
    algorithm = hand_algorithm(clip_coef=0.2, normalize_advantages=False)
    loss, slope = jax.jit(jax.value_and_grad(algorithm.policy_loss))(ratio, batch)
    np.testing.assert_allclose(loss, -(2.2 + 2.4 + 1.0 - 3.0 - 1.6) / 5, rtol=1e-5)
    np.testing.assert_allclose(slope, [-2 / 5, 0, -2 / 5, 2 / 5, 0], rtol=1e-6)


def test_policy_loss_weighs_rows():
    algorithm = hand_algorithm(normalize_advantages=False)
    batch = batch_of(advantages=[2.0, 2.0, 50.0], weight=[0.5, 2.5, 0.0])
    loss = algorithm.policy_loss(jnp.array([1.1, 0.9, 1.0]), batch)
    np.testing.assert_allclose(loss, -(0.5 * 2.2 + 2.5 * 1.8) / 3, rtol=1e-6)


def test_advantages_are_normalized_over_the_valid_rows_of_the_minibatch():
    # 1 and 3 have mean 2 and deviation 1, whatever the third says.
    batch = batch_of(advantages=[1.0, 3.0, 50.0], weight=[1.5, 1.5, 0.0])
    loss = hand_algorithm().policy_loss(jnp.array([1.0, 1.1, 1.0]), batch)
    np.testing.assert_allclose(loss, -(1.5 * -1 + 1.5 * 1.1) / 3, rtol=1e-6)


def test_policy_loss_equals_rlax():
    ratio = jnp.exp(jax.random.normal(jax.random.key(0), (64,)))
    advantages = jax.random.normal(jax.random.key(1), (64,))
    for epsilon in (0.1, 0.3):
        algorithm = hand_algorithm(clip_coef=epsilon, normalize_advantages=False)
        loss = algorithm.policy_loss(ratio, batch_of(advantages=advantages))
        expected = rlax.clipped_surrogate_pg_loss(ratio, advantages, epsilon)
        np.testing.assert_allclose(loss, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("clip", "errors", "slope"),
    [
        (True, [0.8**2, 2.0**2, 1.9**2, 0.3**2], [0, -2, 0, 0.3]),
        (False, [0.5**2, 2.0**2, 1.5**2, 0.3**2], [0.5, -2, -1.5, 0.3]),
    ],
)
def test_value_loss_by_hand(clip, errors, slope):
    # V_old ± 0.2: 0.8 counts for 0.5, not 2.3 for 2, 1.1 counts for 1.5, and 1.3 is in between.
    batch = batch_of(value=[1.0, 2.5, 0.9, 1.2], returns=[0.0, 4.0, 3.0, 1.0])
    algorithm = hand_algorithm(clip_value_loss=clip, clip_coef=0.2)
    value = jnp.array([0.5, 2.0, 1.5, 1.3])
    loss, gradient = jax.jit(jax.value_and_grad(algorithm.value_loss))(value, batch)
    np.testing.assert_allclose(loss, sum(errors) / 4 / 2, rtol=1e-5)
    np.testing.assert_allclose(gradient, np.array(slope) / 4, rtol=1e-5)
    weighted = batch._replace(weight=jnp.array([0.0, 4.0, 0.0, 0.0]))
    np.testing.assert_allclose(algorithm.value_loss(value, weighted), errors[1] / 2, rtol=1e-6)


def test_loss_by_hand():
    algorithm = hand_algorithm(normalize_advantages=False, entropy_coef=0.1, value_coef=0.25)
    loss, (approx_kl, metrics) = jax.jit(algorithm.loss_fn)(PARAMS, HAND_BATCH)
    entropy = (-3 / 4 * math.log(3 / 4) - 1 / 4 * math.log(1 / 4) + math.log(2)) / 2
    expected = {
        "policy_loss": -(2 * 1.2 - 0.9) / 2,
        "value_loss": ((0.9 - 3) ** 2 + (2 - 2.5) ** 2) / 2 / 2,
        "entropy": entropy,
        "approx_kl": (1.5 - 1 - math.log(1.5) + 0.9 - 1 - math.log(0.9)) / 2,
        "clip_fraction": 0.5,
    }
    assert set(metrics) == set(expected) == LOSSES and approx_kl == metrics["approx_kl"]
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)
    total = expected["policy_loss"] + 0.25 * expected["value_loss"] - 0.1 * entropy
    np.testing.assert_allclose(loss, total, rtol=1e-5)


@pytest.mark.parametrize("normalize_advantages", [False, True])
@pytest.mark.parametrize("clip_value_loss", [False, True])
def test_a_row_of_weight_0_has_no_influence(normalize_advantages, clip_value_loss):
    algorithm = hand_algorithm(
        normalize_advantages=normalize_advantages, clip_value_loss=clip_value_loss
    )
    learn = jax.jit(jax.value_and_grad(algorithm.loss_fn, has_aux=True))
    leaves_equal(learn(PARAMS, HAND_BATCH), learn(PARAMS, NONSENSE_ROW))


def test_nothing_is_learned_from_a_minibatch_without_valid_rows():
    batch = HAND_BATCH._replace(weight=jnp.zeros(3))
    learn = jax.jit(jax.value_and_grad(hand_algorithm().loss_fn, has_aux=True))
    assert not any(np.any(x) for x in jax.tree.leaves(learn(PARAMS, batch)))


# --- Targets and batches --------------------------------------------------------------------------

# A lane each: terminated at row 1, truncated at rows 0 and 3, terminated at the window's end.
VALUE = [[1, 3, 0], [2, 7, 0], [100, 1, 0], [4, 2, 2]]
REWARD = [[1, 1, 0], [3, 0, 0], [0, 2, 0], [3, 3, 5]]
TERMINATED = [[0, 0, 0], [1, 0, 0], [0, 0, 0], [0, 0, 1]]
TRUNCATED = [[0, 1, 0], [0, 0, 0], [0, 0, 0], [0, 1, 0]]
VALID = [[1, 1, 1], [1, 0, 1], [0, 1, 1], [1, 1, 1]]


def test_targets_by_hand():
    algorithm = hand_algorithm(gamma=0.5, gae_lambda=0.5)
    rollout = Transition(
        obs=jnp.arange(12.0).reshape(4, 3),
        action=jnp.arange(12).reshape(4, 3) % 2,
        reward=jnp.float32(REWARD),
        terminated=jnp.array(TERMINATED, bool),
        truncated=jnp.array(TRUNCATED, bool),
        valid=jnp.array(VALID, bool),
        extras=(-jnp.arange(12.0).reshape(4, 3), jnp.float32(VALUE)),
    )
    batch = jax.jit(algorithm.targets)(rollout, jnp.array([10.0, 20.0, 1000.0]))
    valid = np.array(VALID, bool)
    expected = np.zeros((4, 3))
    # δ: 1 + ½·2 - 1 = 1, then 3 - 2 = 1 without the 100 of the invalid row, then 3 + ½·10 - 4 = 4
    expected[[0, 1, 3], 0] = 1 + 1 / 4, 1, 4
    # δ: 1 + ½·7 - 3 with the value of the final observation; 2 + ½·2 - 1 = 2; 3 + ½·20 - 2 = 11
    expected[[0, 2, 3], 1] = 1.5, 2 + 11 / 4, 11
    # δ: 0, 0, ½·2 = 1, and 5 - 2 = 3 without the 1000
    expected[:, 2] = 7 / 64, 7 / 16, 7 / 4, 3
    np.testing.assert_allclose(np.where(valid, batch.advantages, 0), expected, rtol=1e-6)
    returns = np.where(valid, expected + VALUE, 0)
    np.testing.assert_allclose(np.where(valid, batch.returns, 0), returns, rtol=1e-6)
    np.testing.assert_allclose(batch.weight, valid * 12 / 10, rtol=1e-6)
    kept = rollout.obs, rollout.action, *rollout.extras
    leaves_equal(batch[:4], kept)


def test_truncated_episodes_can_be_taken_for_terminated_ones():
    truncated = jnp.array([[False, True, False], [False, False, True]]).T[:, :2]  # [T, N]
    zeros = jnp.zeros((3, 2))
    rollout = Transition(
        obs=zeros[..., None],
        action=zeros.astype(int),
        reward=zeros + 1,
        terminated=~truncated & False,
        truncated=truncated,
        valid=~truncated | True,
        extras=(zeros, zeros + 4),
    )
    last_value = jnp.array([6.0, 6.0])

    def advantages(**options):
        algorithm = hand_algorithm(gamma=0.5, gae_lambda=0.0, **options)
        return algorithm.targets(rollout, last_value).advantages.T.tolist()

    # δ: 1 + ½·4 - 4 = -1, at the end 1 + ½·6 - 4 = 0, and where nothing follows 1 - 4 = -3
    assert advantages() == [[-1, -1, 0], [-1, -1, 0]]
    assert advantages(terminate_truncated=True) == [[-1, -3, 0], [-1, -1, -3]]


def collect(trainer, rollouts=1):
    """Collect rollouts; the policy stays, but for larger logits and the statistics.

    Returns:
        the state after the last of them, that rollout, and what `prepare` makes of it.
    """
    run, prepare = jax.jit(trainer.collect_trajectory), jax.jit(trainer.agent.prepare)
    learner = trainer.state.learner
    params = jax.tree.map(jnp.copy, learner.params)
    head = params["policy_head"]["linear"]
    head["kernel"] = 100 * head["kernel"]
    state, learner = trainer.state, learner._replace(params=params)
    for _ in range(rollouts):
        state, trajectory, is_complete = run(state._replace(learner=learner))
        assert is_complete
        leaves_equal(state.learner, learner)
        learner, batch = prepare(state.learner, trajectory.rollout, trajectory.last_obs)
    return state, trajectory.rollout, learner, batch


@pytest.fixture(scope="module")
def collected(trainer):
    state, rollout, learner, batch = collect(trainer, rollouts=2)
    assert rollout.terminated.any() and rollout.truncated.any() and not rollout.valid.all()
    return state, rollout, learner, batch


def test_a_batch_is_what_summing_the_rewards_gives(trainer, collected):
    last_obs = collected[0].env.obs[None]
    _, rollout, learner, batch = jax.tree.map(np.asarray, (None, *collected[1:]))
    obs = np.concatenate([rollout.obs, last_obs]).reshape(-1, 4)
    value = jax.jit(trainer.algorithm.predict)(learner.params, obs)[1].reshape(33, 4)
    gamma, decay = 0.99, 0.99 * 0.95
    advantages, rows = np.zeros((32, 4)), batch.weight.reshape(32, 4) > 0
    np.testing.assert_array_equal(rows, rollout.valid)
    for lane in range(4):
        later = 0.0
        for t in reversed(range(32)):
            goes_on = not (rollout.terminated[t, lane] or rollout.truncated[t, lane])
            following = 0.0 if rollout.terminated[t, lane] else value[t + 1, lane]
            error = rollout.reward[t, lane] + gamma * following - value[t, lane]
            later = advantages[t, lane] = error + decay * goes_on * later
    got = batch.advantages.reshape(32, 4)
    np.testing.assert_allclose(got[rows], advantages[rows], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(
        batch.returns.reshape(32, 4)[rows], (advantages + value[:32])[rows], rtol=1e-4, atol=1e-4
    )
    np.testing.assert_array_equal(batch.obs.reshape(32, 4, 4), rollout.obs)
    np.testing.assert_array_equal(batch.action.reshape(32, 4), rollout.action)


def assert_the_policy_is_unchanged_on_the_first_minibatch(trainer, collected):
    _, _, learner, batch = collected
    rows = shuffled_rows(jax.random.key(0), 2, 2, len(batch.weight))
    assert rows.shape == (2, 2, 64)
    minibatch = take_minibatch(batch, rows[0, 0])
    distribution, value = jax.jit(trainer.algorithm.predict)(learner.params, minibatch.obs)
    log_prob = distribution.log_prob(minibatch.action)
    assert np.std(log_prob) > 0.05
    np.testing.assert_allclose(jnp.exp(log_prob - minibatch.log_prob), 1.0, atol=1e-6)
    np.testing.assert_allclose(value, minibatch.value, rtol=1e-6, atol=1e-6)
    _, (approx_kl, metrics) = jax.jit(trainer.algorithm.loss_fn)(learner.params, minibatch)
    assert abs(approx_kl) <= 1e-6 and metrics["clip_fraction"] == 0


def test_the_policy_is_unchanged_on_the_first_minibatch(trainer, collected):
    assert_the_policy_is_unchanged_on_the_first_minibatch(trainer, collected)


def test_the_policy_is_unchanged_under_normalization_and_clipped_actions():
    options = {"env_id": "gymnax/Pendulum-v1", "normalize_obs": True, "normalize_reward": True}
    trainer = Trainer(replace(SMALL, **options))
    second = collect(trainer, rollouts=2)
    assert np.abs(second[1].action).max() > 1
    assert_the_policy_is_unchanged_on_the_first_minibatch(trainer, second)
    # New statistics are of what the environments gave; the value behind the rollout is of what the
    # policy would have seen there, by the old ones.
    state, rollout, learner, batch = second
    before = state.learner.normalizer
    after, reward = Normalizer(obs=True, reward=True, gamma=0.99).update(before, rollout)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4), learner.normalizer, after)
    seen = normalize(before.obs, state.env.obs)
    value = trainer.algorithm.predict(learner.params, seen)[1]
    assert np.abs(seen - state.env.obs).max() > 0.1 and rollout.valid[-1].all()
    advantages = reward[-1] + 0.99 * value - rollout.extras[1][-1]
    np.testing.assert_allclose(batch.advantages.reshape(32, 4)[-1], advantages, rtol=1e-4)


# --- The gradient step ----------------------------------------------------------------------------


def flat(tree) -> np.ndarray:
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


def test_gradient_steps_by_hand():
    # Adam with eps 1e-5, of a gradient that is not longer than 0.5.
    options = dict(normalize_advantages=False, entropy_coef=0.0, value_coef=0.0)
    algorithm = Algorithm(replace(SMALL, anneal_lr=False, **options), VECTOR, TWO)
    gradient_of = jax.jit(jax.grad(lambda params, batch: algorithm.loss_fn(params, batch)[0]))
    learn = jax.jit(algorithm.learn)
    obs = jax.random.normal(jax.random.key(1), (32, 4))
    start = algorithm.init(jax.random.key(0), obs)
    batch = batch_of(obs=obs, action=jnp.arange(32) % 2, advantages=obs[:, 0])
    batch = batch._replace(log_prob=jnp.full(32, math.log(0.5)), value=obs[:, 0], returns=obs[:, 1])
    for scale in (100.0, 1e-3):
        state, mean, square = start, 0.0, 0.0
        scaled = batch._replace(advantages=scale * batch.advantages)
        for t in (1, 2, 3):
            gradient = flat(gradient_of(state.params, scaled))
            norm = np.linalg.norm(gradient)
            assert (norm > 0.5) == (scale > 1)
            gradient *= min(1.0, 0.5 / norm)
            mean, square = 0.9 * mean + 0.1 * gradient, 0.999 * square + 0.001 * gradient**2
            step = mean / (1 - 0.9**t) / (np.sqrt(square / (1 - 0.999**t)) + 1e-5)
            before = flat(state.params)
            state, _, metrics = learn(state, scaled)
            np.testing.assert_allclose(flat(state.params), before - 2.5e-4 * step, atol=2e-7)
        assert np.abs(step).max() > 0.5 and set(metrics) == LOSSES


@pytest.mark.parametrize("anneal", [True, False])
def test_step_size_falls_to_0_over_the_updates_of_the_run(anneal):
    config = replace(SMALL, learning_rate=0.1, anneal_lr=anneal, total_timesteps=400)
    optimizer = Algorithm(config, VECTOR, TWO).optimizer
    params = {"x": jnp.zeros(1)}
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    steps = []
    for _ in range(3 * 2 * 2):  # 400 env steps are 3 rollouts of 128, and a rest
        change, state = update({"x": jnp.array([0.25])}, state, params)
        steps.append(-change["x"][0])
    expected = 0.1 * (1 - anneal * np.arange(12) / 12)
    np.testing.assert_allclose(steps, expected, rtol=1e-3)


def test_recurrent_ppo_has_the_same_optimizer():
    """Clipped where a gradient is long, with Adam's ε where it is short, and annealed."""
    fields = dict(num_envs=4, num_steps=32, total_timesteps=384, update_epochs=2, num_minibatches=2)
    params = {"x": jnp.zeros(2)}
    updates = []
    for module in (ppo, ppo_rnn):
        optimizer = module.Algorithm(module.Config(**fields), VECTOR, TWO).optimizer
        state = optimizer.init(params)
        for gradient in ([3.0, 4.0], [0.3, 0.0], [0.0, 1e-5]):
            update, state = optimizer.update({"x": jnp.array(gradient)}, state, params)
            updates.append(update["x"])
    np.testing.assert_array_equal(updates[:3], updates[3:])


# --- The epochs -----------------------------------------------------------------------------------


def learn(learner, minibatch):
    """Write down which rows came, at the place of this update; the KL divergence is the first."""
    count, seen = learner
    approx_kl = minibatch.value[0]
    metrics = {"approx_kl": approx_kl, "loss": minibatch.weight.sum()}
    return (count + 1, seen.at[count].set(minibatch.value)), approx_kl, metrics


def learned(value, rows, monkeypatch, target_kl=None, module=ppo, **before):
    """The updates that `Trainer.learn_trajectory` makes of rows [K, M, B], and its metrics."""
    rows = jnp.asarray(rows)
    epochs, minibatches, size = rows.shape
    value = jnp.float32(value)
    batch = batch_of(value=value)._replace(
        **dict.fromkeys(("obs", "action", "log_prob", "advantages", "returns"), value)
    )
    trainer = object.__new__(module.Trainer)
    trainer.config = SimpleNamespace(
        update_epochs=epochs, num_minibatches=minibatches, target_kl=target_kl
    )
    trainer.agent = SimpleNamespace(learn=learn, prepare=lambda learner, *_: (learner, batch))
    monkeypatch.setattr(module, "shuffled_rows", lambda *_: rows)
    learner = jnp.int32(0), jnp.full((epochs * minibatches, size), -1.0)
    metrics = {"approx_kl": 0.0, "loss": 0.0, "charts/updates": 0.0} | before
    metrics = {name: jnp.float32(x) for name, x in metrics.items()}
    fields = {"learner": learner, "env": (), "key": jax.random.key(0), "step": jnp.int32(0)}
    fields |= {"core": ()} if module is ppo_rnn else {}
    state = module.TrainState(**fields)
    state, metrics = trainer.learn_trajectory(state, metrics, Trajectory((), ()))
    assert state.key != jax.random.key(0), "else the first action would be drawn as the rows were"
    count, seen = state.learner
    return int(count), seen, {name: float(x) for name, x in metrics.items()}


@pytest.mark.parametrize("module", [ppo, ppo_rnn])
def test_every_epoch_learns_from_each_minibatch(monkeypatch, module):
    rows = np.array([[[2, 0], [1, 3]], [[3, 2], [0, 1]], [[1, 0], [2, 3]]])
    count, seen, metrics = learned([1, 2, 4, 8], rows, monkeypatch, module=module)
    assert count == 6
    assert seen.tolist() == [[4, 1], [2, 8], [8, 4], [1, 2], [2, 1], [4, 8]]
    assert metrics == {"approx_kl": 4 + 2 + 8 + 1 + 2 + 4, "loss": 12, "charts/updates": 6}


def test_metrics_are_added_to_those_before(monkeypatch):
    rows, before = np.array([[[2, 0], [1, 3]]]), {"loss": 100.0, "charts/updates": 7.0}
    _, _, metrics = learned([1, 2, 4, 8], rows, monkeypatch, approx_kl=0.5, **before)
    assert metrics == {"approx_kl": 0.5 + 4 + 2, "loss": 104, "charts/updates": 9}


@pytest.mark.parametrize("minibatches", [1, 2, 4])
@pytest.mark.parametrize(
    ("target_kl", "updates"), [(None, 4), (0.1, 1), (0.25, 2), (0.5, 3), (0.75, 3), (1.0, 4)]
)
def test_target_kl_stops_after_the_first_minibatch_above_it(
    target_kl, updates, minibatches, monkeypatch
):
    divergence = [0.25, 0.5, 1.0, 0.125]
    rows = np.arange(4).reshape(-1, minibatches, 1)
    count, seen, metrics = learned(divergence, rows, monkeypatch, target_kl, approx_kl=5.0)
    assert count == metrics["charts/updates"] == metrics["loss"] == updates
    assert seen[:, 0].tolist() == divergence[:updates] + [-1] * (4 - updates)
    assert metrics["approx_kl"] == 5 + sum(divergence[:updates])


def test_a_kl_divergence_that_is_not_a_number_does_not_end_the_updates_in_silence(monkeypatch):
    rows = np.arange(4).reshape(2, 2, 1)
    count, _, metrics = learned([0.25, math.nan, 0.25, 0.25], rows, monkeypatch, target_kl=0.5)
    assert count == 4 and math.isnan(metrics["approx_kl"])


# --- Counting -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "points", "updates"),
    [
        ({"num_minibatches": 4, "update_epochs": 3, "log_frequency": 130}, [256, 384], [24, 12]),
        ({"total_timesteps": 440}, [128, 256, 384, 440], [4, 4, 4, 0]),
    ],
)
def test_updates_are_what_the_steps_imply(changes, points, updates, monkeypatch):
    trainer = Trainer(replace(SMALL, **changes))
    closed = mock.Mock(wraps=trainer.env.close)
    monkeypatch.setattr(trainer.env, "close", closed)
    learners, logs = [], []
    for log_data in trainer():
        if log_data["log_type"] == "train":
            learners.append(jax.tree.map(np.array, trainer.state.learner))
            logs.append(log_data["logs"])
            assert log_data["sample_step"] == int(trainer.state.step) == points[len(logs) - 1]
        closed.assert_not_called()
    closed.assert_called_once()
    assert [x["charts/updates"] for x in logs] == updates
    counts = [x for x in jax.tree.leaves(learners[-1].opt_state) if x.dtype == np.int32]
    assert {int(x) for x in counts} == {sum(updates)}
    for updates_before, before, after, log in zip(
        updates[1:], learners, learners[1:], logs[1:], strict=False
    ):
        if updates_before:
            assert {f"losses/{name}" for name in LOSSES} < set(log)
            assert (before.params["value_head"]["bias"] != after.params["value_head"]["bias"]).all()
        else:  # a rollout that the end of the run cuts is not learned from
            leaves_equal(before, after)


def test_a_tiny_target_kl_leaves_each_rollout_at_once():
    # At the first minibatch, before any step, rounding alone decides on which side of 0 KL lies.
    trainer = Trainer(replace(SMALL, update_epochs=8, target_kl=1e-12, learning_rate=1e-2))
    updates = [x["logs"]["charts/updates"] for x in trainer() if x["log_type"] == "train"]
    assert len(updates) == 3 and set(updates) <= {1, 2}


def test_stopping_early_closes_the_environments(monkeypatch):
    trainer = Trainer(SMALL)

    def run(state, num_iterations):
        return state._replace(step=state.step + 128 * num_iterations), {"charts/updates": 0.0}

    closed = mock.Mock()
    monkeypatch.setattr(trainer, "compiled_run", run)
    monkeypatch.setattr(trainer.env, "close", closed)
    training = trainer()
    assert next(training)["sample_step"] == 128
    closed.assert_not_called()
    training.close()
    closed.assert_called_once()


# --- Episode boundaries ---------------------------------------------------------------------------


def test_rows_without_a_transition_teach_nothing():
    trainer = Trainer(replace(SMALL, normalize_obs=True, learning_rate=1e-2))
    trainer.env = NonsenseEnv(trainer.env.env_id, trainer.env.backend)

    @jax.jit
    def train(nonsense):
        trainer.env.nonsense = nonsense
        state, metrics = trainer.run_iterations(trainer.state, 3)
        return state.learner, metrics

    leaves_equal(train(1.5), train(-1e4))


def test_the_value_goes_on_after_a_time_limit_and_not_after_an_end(monkeypatch):
    # Three steps of reward 1: then nothing, or the value of an endless episode.
    use_env(monkeypatch, ppo, TimerJaxEnv(3))
    config = Config(num_steps=16, total_timesteps=40_000, gamma=0.8, learning_rate=1e-2)
    trainer = Trainer(replace(config, clip_value_loss=False, log_frequency=40_000))
    list(trainer())
    _, value = trainer.algorithm.predict(trainer.state.learner.params, jnp.eye(4))
    np.testing.assert_allclose(value, [1 / (1 - 0.8), 1, 1.8, 2.44], atol=0.1)


# --- Spaces ---------------------------------------------------------------------------------------

ACTION_SPACES = {
    "discrete": spaces.Discrete(3, start=2),
    "multi_discrete": spaces.MultiDiscrete([2, 3]),
    "multi_binary": spaces.MultiBinary([3, 1]),
    "box": spaces.Box(np.float32([[-3, 0]]), np.float32([[-1, 10]])),
}
OBSERVATION = spaces.Dict(place=spaces.Discrete(3), speed=spaces.Box(-1, 1, (2,), np.float32))
for name, space in ACTION_SPACES.items():
    make = partial(EchoEnv, OBSERVATION, space)
    gym.register(f"ToyEcho-{name}-v0", make, max_episode_steps=6)


@pytest.mark.parametrize("name", ACTION_SPACES)
def test_action_spaces_and_dict_observations(name, monkeypatch):
    monkeypatch.setattr(EchoEnv, "actions", [])
    config = Config(env_id=f"ToyEcho-{name}-v0", num_envs=2, num_steps=64, total_timesteps=128)
    trainer = Trainer(replace(config, normalize_obs=True))
    _, rollout, learner, batch = collect(trainer)
    trainer.env.close()
    valid, space = np.asarray(rollout.valid), ACTION_SPACES[name]
    sampled = np.asarray(rollout.action)[valid].reshape(-1, *space.shape)
    played = np.array(EchoEnv.actions, np.float32)
    assert len(played) == valid.sum() == 110
    if name == "discrete":
        assert set(played.tolist()) == {2, 3, 4}
        np.testing.assert_array_equal(played, sampled + 2)
    elif name == "multi_discrete":
        assert {tuple(x) for x in played.tolist()} == {(i, j) for i in range(2) for j in range(3)}
        np.testing.assert_array_equal(played, sampled)
    elif name == "multi_binary":
        assert len({tuple(x) for x in played[..., 0].tolist()}) == 8
        np.testing.assert_array_equal(played, sampled)
    else:
        # -1 and 1 are the bounds, and beyond them the policy's action is clipped on the way only.
        middle, half = (space.low + space.high) / 2, (space.high - space.low) / 2
        np.testing.assert_allclose(played, middle + half * np.clip(sampled, -1, 1), rtol=1e-5)
        assert (played == space.low).any() and (played == space.high).any()
        assert np.abs(sampled).max() > 1.5
    learner, _, metrics = jax.jit(trainer.agent.learn)(learner, batch)
    assert np.isfinite(jax.tree.leaves(metrics)).all()
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(learner.params))


def test_policy_and_value_are_networks_of_their_own(trainer):
    """Of two layers of tanh each, from the parameters; orthogonal ones at first."""
    params = trainer.state.learner.params
    obs, outputs = jax.random.normal(jax.random.key(0), (5, 4)), []
    heads = ("actor", params["policy_head"]["linear"], 0.01), ("critic", params["value_head"], 1.0)
    for name, head, scale in heads:
        x = np.float64(obs)
        for i in range(2):
            layer = params[name]["layers"][i]
            kernel = np.float64(layer["kernel"])
            np.testing.assert_allclose(kernel @ kernel.T, 2 * np.eye(len(kernel)), atol=1e-5)
            x = np.tanh(x @ kernel + layer["bias"])
        kernel = np.float64(head["kernel"]) / scale
        np.testing.assert_allclose(kernel.T @ kernel, np.eye(kernel.shape[1]), atol=1e-5)
        outputs.append(scale * x @ kernel + head["bias"])
    policy, value = trainer.algorithm.predict(params, obs)
    np.testing.assert_allclose(policy.logits, outputs[0], atol=1e-6)
    np.testing.assert_allclose(value, outputs[1][:, 0], atol=1e-5)


def test_evaluation_plays_the_most_likely_action():
    trainer = Trainer(replace(SMALL, env_id="gymnax/Pendulum-v1", env_kwargs=()))
    learner, agent = trainer.state.learner, trainer.agent
    obs = jax.random.normal(jax.random.key(0), (5, 3))
    mean = trainer.algorithm.predict(learner.params, obs)[0].mean
    for key in (0, 1):
        np.testing.assert_allclose(agent.predict(learner, obs, jax.random.key(key)), 2 * mean)


def test_runs_on_images():
    config = Config(env_id="Breakout-v5", num_envs=2, num_steps=4, total_timesteps=8)
    trainer = Trainer(replace(config, update_epochs=1, num_minibatches=1))
    logs = {k: v for log_data in trainer() for k, v in log_data["logs"].items()}
    assert trainer.state.env.obs.shape == (2, 4, 84, 84)
    assert logs["charts/updates"] == 1 and np.isfinite(list(logs.values())).all()
    # The heads read the shared encoder, without hidden layers in between.
    assert set(trainer.state.learner.params) == {"encoder", "policy_head", "value_head"}


# --- Normalisation --------------------------------------------------------------------------------


def test_statistics_count_valid_rows_and_change_once_a_rollout():
    trainer = Trainer(replace(SMALL, normalize_obs=True, normalize_reward=True))
    _, rollout, learner, batch = collect(trainer)
    stats, rows = learner.normalizer.obs, np.asarray(rollout.obs)[np.asarray(rollout.valid)]
    assert int(stats.num_rows) == len(rows) < 128
    np.testing.assert_allclose(stats.mean, rows.mean(axis=0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(stats.variance, rows.var(axis=0), rtol=1e-4)
    # What the policy saw while it acted is what it learns from; rewards have their scale at once.
    np.testing.assert_array_equal(batch.obs, np.asarray(rollout.obs).reshape(-1, 4))
    deviation = np.sqrt(np.asarray(learner.normalizer.returns.variance))
    assert deviation > 1.5
    value = np.asarray(rollout.extras[1])
    ends = np.asarray(rollout.terminated)
    expected = 1 / deviation - value[ends]
    got = np.asarray(batch.advantages).reshape(32, 4)[ends]
    np.testing.assert_allclose(got, expected, rtol=1e-4)


def test_evaluation_changes_nothing():
    trainer = Trainer(replace(SMALL, normalize_obs=True, normalize_reward=True))
    before = jax.tree.map(jnp.copy, trainer.state._replace(key=()))
    assert trainer.evaluate(2)["logs"]["charts/evaluation_length"] <= 16
    keys = (before.env.inner.key, trainer.state.env.inner.key)
    leaves_equal(*map(jax.random.key_data, keys))
    leaves_equal(before.learner, trainer.state.learner)


def test_a_saved_policy_sees_through_its_statistics(tmp_path):
    flags = "--normalize-obs --total-timesteps 2048 --num-steps 64 --learning-rate 1e-2"
    argv = ["ppo", *flags.split(), "--eval-episodes", "2", "--runs-dir", str(tmp_path)]
    with mock.patch.object(sys, "argv", argv), mock.patch("common.run.threads.use_cores"):
        with pytest.raises(SystemExit) as stopped:
            ppo.run(Trainer, Config, PRESETS)
        assert stopped.value.code == 0
    policy = load(next(tmp_path.iterdir()))
    trainer, learner = policy.trainer, policy.trainer.state.learner
    obs = np.random.default_rng(0).normal(scale=0.3, size=(256, 4)).astype(np.float32)
    actions = policy.predict(obs)
    stats = learner.normalizer.obs
    assert 1500 < stats.num_rows < 2048
    seen = normalize(stats, obs)
    logits = trainer.algorithm.predict(learner.params, seen)[0].logits
    np.testing.assert_array_equal(actions, np.argmax(logits, axis=-1))
    other = learner.normalizer._replace(obs=init_stats(obs))
    trainer.state = trainer.state._replace(learner=learner._replace(normalizer=other))
    assert (policy.predict(obs) != actions).any()
    trainer.env.close()


# --- Learning -------------------------------------------------------------------------------------


def test_learner_state_holds_every_array_that_learning_changes(trainer):
    assert LearnerState._fields == ("params", "opt_state", "normalizer")
    assert not jax.tree.leaves(trainer.state.learner.normalizer)


@pytest.mark.learning
@pytest.mark.parametrize("seed", [1, 2])
def test_learns_cartpole(seed):
    config = Config(seed=seed, num_envs=8, num_steps=64, total_timesteps=102_400)
    trainer = Trainer(replace(config, learning_rate=2e-3, log_frequency=10_240))
    # 12 seeds gave 495 to 500, and last policies of 200 to 500. Bootstraps behind terminations gave
    # 500 and 263 and end at 10, no bootstrap 14 and 49, advantages of the wrong sign 362 and 438.
    assert best_return(trainer) >= 475
    assert trainer.evaluate(20)["logs"]["charts/evaluation_return"] >= 100
