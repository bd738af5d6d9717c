"""Running statistics against numpy over everything seen, and what they scale."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

from algos import a2c, ppo, ppo_rnn
from common import normalize as module
from common.normalize import Normalizer, RunningStats, init_stats, normalize, standardize
from common.replay import Transition

update_stats = jax.jit(module.update_stats)
EMPTY = init_stats(jnp.zeros((1, 3)))
SCALE, SHIFT = np.float32([0.1, 1, 300]), np.float32([-2, 0, 50])


def random_rows(rng, shape=(16, 4), share=0.7):
    """Rows [*shape, 3] and which of them are valid; the others hold a billion."""
    valid = rng.random(shape) < share
    x = rng.normal(size=(*shape, 3)).astype(np.float32) * SCALE + SHIFT
    return np.where(valid[..., None], x, np.float32(1e9)), valid


@pytest.mark.parametrize("shape", [(16, 4), (64,), (4, 2, 8)])
def test_statistics_are_those_of_all_valid_rows_together(shape):
    rng, seen, stats = np.random.default_rng(0), [], EMPTY
    for share in (0.7, 0.02, 1.0, 0.0, *rng.random(20)):
        x, valid = random_rows(rng, shape, share)
        seen.append(x[valid])
        stats = update_stats(stats, x, valid)
        together = np.float64(np.concatenate(seen))
        assert stats.num_rows == len(together)
        np.testing.assert_allclose(stats.mean, together.mean(axis=0), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(stats.variance, together.var(axis=0), rtol=1e-5)
    assert stats.mean.dtype == stats.variance.dtype == stats.num_rows.dtype == jnp.float32


def test_the_first_rollout_gives_its_own_variance():
    x = np.float32([[[3, 0, 1e-3], [5, 0, -1e-3]], [[9e9] * 3, [7, 0, 3e-3]]])
    valid = np.array([[True, True], [False, True]])
    stats = update_stats(EMPTY, x, valid)
    np.testing.assert_allclose(stats.mean, [5, 0, 1e-3], rtol=1e-6)
    np.testing.assert_allclose(stats.variance, [8 / 3, 0, 8e-6 / 3], rtol=1e-5)


def test_one_row_has_no_variance():
    stats = update_stats(EMPTY, np.float32([[1, 2, 3]]), np.array([True]))
    assert stats.mean.tolist() == [1, 2, 3] and stats.variance.tolist() == [0, 0, 0]


def test_a_rollout_without_valid_rows_changes_nothing():
    rng = np.random.default_rng(0)
    x, valid = random_rows(rng)
    for before in (EMPTY, update_stats(EMPTY, x, valid)):
        after = update_stats(before, x, np.zeros_like(valid))
        jax.tree.map(np.testing.assert_array_equal, after, before)
    assert EMPTY.num_rows == 0 and not EMPTY.mean.any() and (EMPTY.variance == 1).all()


def test_precision_far_from_zero():
    # Around 10,000 float32 lie 0.001 apart. The mean may be off by a few of these steps, a variance
    # of 1 by their squares only, as it is taken around a mean of the same rollout.
    rng, seen, stats = np.random.default_rng(0), [], EMPTY
    for _ in range(50):
        x = (1e4 + rng.normal(size=(256, 3))).astype(np.float32)
        seen.append(x)
        stats = update_stats(stats, x, np.ones(256, bool))
    together = np.float64(np.concatenate(seen))
    np.testing.assert_allclose(stats.mean, together.mean(axis=0), atol=4e-3)
    np.testing.assert_allclose(stats.variance, together.var(axis=0), rtol=1e-4)
    scaled = np.asarray(normalize(stats, together.astype(np.float32)))
    np.testing.assert_allclose(scaled.mean(axis=0), 0, atol=4e-3)
    np.testing.assert_allclose(scaled.std(axis=0), 1, rtol=1e-3)


def test_many_rollouts_do_not_drift():
    # After five million rows a rollout's share is 1e-5, which still counts.
    stats = RunningStats(jnp.float32(5e6), jnp.zeros(3), jnp.ones(3))
    x, valid = np.full((50, 3), 100, np.float32), np.ones(50, bool)
    for _ in range(100):
        stats = update_stats(stats, x, valid)
    share = 5e3 / (5e6 + 5e3)
    np.testing.assert_allclose(stats.mean, share * 100, rtol=1e-3)
    np.testing.assert_allclose(stats.variance, 1 - share + share * (1 - share) * 1e4, rtol=1e-3)


def test_normalize():
    stats = RunningStats(jnp.float32(9), jnp.float32([1, -2, 0]), jnp.float32([4, 0.25, 1e4]))
    x = jnp.float32([[[3, -1, 50]], [[1, -2, 0]]])
    np.testing.assert_allclose(normalize(stats, x), [[[1, 2, 0.5]], [[0, 0, 0]]], rtol=1e-5)
    x = jnp.float32([[1e6, 2.9, 1e3 - 1], [-1e6, -8, -2e3]])
    np.testing.assert_allclose(normalize(stats, x), [[10, 9.8, 9.99], [-10, -10, -10]], rtol=1e-5)


def test_a_constant_feature_stays_finite():
    stats = update_stats(EMPTY, np.full((8, 3), 5, np.float32), np.ones(8, bool))
    x = jnp.float32([[5, 6, 4]])
    assert normalize(stats, x).tolist() == [[0, 10, -10]]


def test_observations_with_parts():
    rng = np.random.default_rng(0)
    obs = {
        "image": rng.integers(0, 256, (6, 4, 5, 5, 2), np.uint8),
        "pair": (rng.normal(3, 2, (6, 4)).astype(np.float32), rng.integers(0, 9, (6, 4, 1))),
        "vector": rng.normal(-1, 5, (6, 4, 3)).astype(np.float32),
    }
    valid = rng.random((6, 4)) < 0.5
    obs = jax.tree.map(jnp.asarray, obs)
    stats = update_stats(init_stats(jax.tree.map(lambda x: x[0], obs)), obs, valid)
    assert jax.tree.structure(stats.mean) == jax.tree.structure(stats.variance)
    assert jax.tree.structure(stats.mean) == jax.tree.structure(obs)

    def check(mean, variance, x):
        rows = np.float64(np.asarray(x)[valid])
        assert mean.shape == variance.shape == x.shape[2:]
        np.testing.assert_allclose(mean, rows.mean(axis=0), rtol=1e-5)
        np.testing.assert_allclose(variance, rows.var(axis=0), rtol=1e-5)

    jax.tree.map(check, stats.mean, stats.variance, obs)
    scaled = normalize(stats, obs)
    for x, y in ((obs["image"], scaled["image"]), (obs["pair"][1], scaled["pair"][1])):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)
    for x in (scaled["pair"][0], scaled["vector"]):
        np.testing.assert_allclose(np.asarray(x)[valid].mean(axis=0), 0, atol=1e-5)
        np.testing.assert_allclose(np.asarray(x)[valid].std(axis=0), 1, rtol=1e-5)


# --- Normalizer -----------------------------------------------------------------------------------


def random_rollouts(rng, num_steps, num_envs=3):
    """Rollouts whose episodes go on from one to the next; some end on the last row of one."""
    ended = np.zeros(num_envs, bool)
    for length in num_steps:
        rows = []
        for t in range(length):
            valid = ~ended
            terminated, truncated = (rng.random((2, num_envs)) < 0.1) & valid
            terminated[0] |= valid[0] & (t == length - 1)
            reward = rng.normal(2, 30, num_envs).astype(np.float32) * valid
            obs = np.where(valid[:, None], rng.normal(5, 3, (num_envs, 2)), 1e9)
            ended = terminated | truncated
            rows.append(Transition(np.float32(obs), (), reward, terminated, truncated, valid))
        yield jax.tree.map(lambda *x: np.stack(x), *rows)


def make_normalizer(obs=True, reward=True, gamma=0.9):
    normalizer = Normalizer(obs, reward, gamma)
    return normalizer, normalizer.init(jnp.zeros((3, 2)))


def test_rewards_are_divided_by_the_deviation_of_running_returns():
    (normalizer, state), returns, running = make_normalizer(), [], np.zeros(3)
    update, crossings = jax.jit(normalizer.update), 0
    for rollout in random_rollouts(np.random.default_rng(0), (8, 8, 1, 2, 8, 8)):
        crossings += (running != 0).sum()
        for reward, terminated, truncated, valid in zip(*rollout[2:6], strict=True):
            for i in np.flatnonzero(valid):
                running[i] = reward[i] + 0.9 * running[i]
                returns.append(running[i])
                if terminated[i] or truncated[i]:
                    running[i] = 0
        state, scaled = update(state, rollout)
        np.testing.assert_allclose(scaled, rollout.reward / np.std(returns), rtol=1e-4)
        np.testing.assert_allclose(state.running_return, running, rtol=1e-4, atol=1e-5)
        assert state.returns.num_rows == len(returns)
    assert crossings > 5


@pytest.mark.parametrize("algo", [a2c, ppo, ppo_rnn], ids=lambda algo: algo.__name__)
def test_running_returns_have_the_discount_of_the_config(algo):
    config = algo.Config(gamma=0.5, normalize_obs=False, normalize_reward=True)
    algorithm = algo.Algorithm(config, spaces.Box(-1, 1, (3,)), spaces.Discrete(2))
    assert algorithm.normalizer == Normalizer(obs=False, reward=True, gamma=0.5)


def test_observations_are_scaled_by_all_valid_rows_so_far():
    (normalizer, state), seen = make_normalizer(), []
    for rollout in random_rollouts(np.random.default_rng(1), (8, 8, 8)):
        seen.append(rollout.obs[rollout.valid])
        state, _ = jax.jit(normalizer.update)(state, rollout)
    seen = np.float64(np.concatenate(seen))
    obs = rollout.obs[rollout.valid]
    expected = (obs - seen.mean(axis=0)) / seen.std(axis=0)
    np.testing.assert_allclose(normalizer.observe(state, obs), expected, rtol=1e-4, atol=1e-5)
    assert (normalizer.observe(state, rollout.obs[~rollout.valid]) == 10).all()


def test_scaled_rewards_are_clipped():
    normalizer, state = make_normalizer(gamma=0.0)
    reward = np.zeros((1000, 3), np.float32)
    reward[500] = 1, -1, 0
    no = np.zeros((1000, 3), bool)
    rollout = Transition(np.zeros((1000, 3, 2), np.float32), (), reward, no, no, ~no)
    _, scaled = normalizer.update(state, rollout)
    assert reward[500, 0] / reward.std() > 10
    assert scaled[500].tolist() == [10, -10, 0]


def test_before_the_first_rollout_observations_are_only_clipped():
    normalizer, state = make_normalizer()
    obs = jnp.float32([[0.5, -3], [11, -1e9]])
    np.testing.assert_allclose(normalizer.observe(state, obs), [[0.5, -3], [10, -10]], rtol=1e-6)


@pytest.mark.parametrize("obs", [False, True])
@pytest.mark.parametrize("reward", [False, True])
def test_only_what_is_wanted_is_scaled(obs, reward):
    normalizer, state = make_normalizer(obs, reward)
    (rollout,) = random_rollouts(np.random.default_rng(0), (8,))
    state, scaled = normalizer.update(state, rollout)
    assert (not jax.tree.leaves(state.obs)) == (not obs)
    assert len(jax.tree.leaves((state.returns, state.running_return))) == (4 if reward else 0)
    assert np.array_equal(scaled, rollout.reward) == (not reward)
    assert np.array_equal(normalizer.observe(state, rollout.obs), rollout.obs) == (not obs)


# --- standardize ----------------------------------------------------------------------------------


def test_standardize():
    x = jnp.float32([1, 3, 5, 7])
    expected = np.array([-3, -1, 1, 3]) / 5**0.5
    np.testing.assert_allclose(standardize(x, jnp.ones(4)), expected, rtol=1e-5)


def test_rows_of_weight_0_do_not_count():
    rng = np.random.default_rng(0)
    kept = rng.random(64) < 0.6
    x = rng.normal(40, 5, 64).astype(np.float32)
    weight = np.float32(kept / kept.mean())
    scaled = np.asarray(standardize(jnp.asarray(x), jnp.asarray(weight)))[kept]
    np.testing.assert_allclose(scaled.mean(), 0, atol=1e-5)
    np.testing.assert_allclose(scaled.std(), 1, rtol=1e-5)
    np.testing.assert_allclose(scaled, (x[kept] - x[kept].mean()) / x[kept].std(), rtol=1e-4)
    other = np.asarray(standardize(jnp.where(kept, x, 1e6), jnp.asarray(weight)))[kept]
    np.testing.assert_array_equal(other, scaled)


def test_equal_rows_stay_finite():
    assert standardize(jnp.full(4, 7.0), jnp.ones(4)).tolist() == [0, 0, 0, 0]
    assert np.isfinite(standardize(jnp.arange(4.0), jnp.zeros(4))).all()
