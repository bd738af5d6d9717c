"""Exploration noise: its distribution, and what is correlated with what."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from common.exploration import next_noise, uniform_action


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.95])
def test_noise_stays_standard_normal_and_is_correlated_in_time(correlation):
    def step(noise, key):
        noise = next_noise(key, noise, correlation)
        return noise, noise

    keys = jax.random.split(jax.random.key(0), 400)
    start = jax.random.normal(jax.random.key(1), (500, 2))
    noise = np.asarray(jax.jit(lambda *x: jax.lax.scan(step, *x)[1])(start, keys))
    np.testing.assert_allclose(noise.std(axis=(1, 2)).mean(), 1, atol=0.01)
    assert stats.kstest(noise[-1].ravel(), "norm").pvalue > 1e-3  # 1,000 independent numbers
    for lag in (1, 3):
        pairs = noise[lag:].ravel(), noise[:-lag].ravel()
        np.testing.assert_allclose(stats.pearsonr(*pairs).statistic, correlation**lag, atol=0.01)
    spread = 4 / np.sqrt(400 * 500 * (1 - correlation) / (1 + correlation))
    for first, second in ((noise[..., 0], noise[..., 1]), (noise[:, 1:], noise[:, :-1])):
        assert abs(stats.pearsonr(first.ravel(), second.ravel()).statistic) < spread


def test_next_noise_by_hand():
    key, noise = jax.random.key(0), jnp.array([[1.0], [-2.0]])
    fresh = jax.random.normal(key, (2, 1))
    np.testing.assert_allclose(next_noise(key, noise, 0.6), 0.6 * noise + 0.8 * fresh, rtol=1e-6)
    np.testing.assert_array_equal(next_noise(key, noise, 0.0), fresh)
    np.testing.assert_array_equal(next_noise(key, noise, 1.0), noise)


def test_uniform_action():
    noise = jax.random.normal(jax.random.key(2), (100_000,))
    action = np.asarray(uniform_action(noise))
    assert stats.kstest(action, stats.uniform(-1, 2).cdf).pvalue > 1e-3
    quantiles = stats.norm.ppf([0.01, 0.25, 0.5, 0.9]).astype(np.float32)
    np.testing.assert_allclose(uniform_action(quantiles), [-0.98, -0.5, 0, 0.8], atol=1e-6)
    assert np.abs(uniform_action(jnp.array([-40.0, 40.0]))).tolist() == [1, 1]
