"""Advantages and returns against sums written from their definitions, and against rlax."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rlax

from common import targets

gae, td_lambda_return = jax.jit(targets.gae), jax.jit(targets.td_lambda_return)
n_step_return = jax.jit(targets.n_step_return, static_argnames="n")
vtrace, upgo_return = jax.jit(targets.vtrace), jax.jit(targets.upgo_return)

T, B = 24, 8
GAMMA_LAMBDA = [(0.9, 0.8), (0.99, 0.95), (1.0, 1.0), (0.9, 0.0), (0.9, 1.0), (0.0, 0.9)]
STEPS = [1, 2, 5, T, 3 * T]
# Each with options under which every part of its equation counts.
TARGETS = {
    "gae": partial(gae, gamma=0.9, lambda_=0.8),
    "lambda": partial(td_lambda_return, gamma=0.9, lambda_=0.8),
    "n_step": partial(n_step_return, gamma=0.9, n=3),
    "vtrace": lambda *rows: vtrace(jnp.ones((T, B)), *rows, 0.9, 0.8).target,
    "vtrace, advantages": lambda *rows: vtrace(jnp.ones((T, B)), *rows, 0.9, 0.8).advantages,
    "upgo": partial(upgo_return, gamma=0.9),
}


def random_rollout(seed=0):
    """Reward, terminated, truncated [T, B], value [T + 1, B], and which rows are valid [T, B]."""
    rng = np.random.default_rng(seed)
    terminated, truncated = rng.random((2, T, B)) < 0.15
    terminated[-1], truncated[-1] = np.arange(B) == 0, np.arange(B) == 1
    terminated[-4:-1, :2] = truncated[-4:-1, :2] = False
    terminated[:, 2] = truncated[:, 2] = False
    valid = np.ones((T, B), bool)
    for t in range(1, T):
        valid[t] = ~(terminated | truncated)[t - 1]
        terminated[t] &= valid[t]
        truncated[t] &= valid[t]
    reward = rng.normal(size=(T, B)).astype(np.float32) * valid
    return reward, terminated, truncated, rng.normal(size=(T + 1, B)).astype(np.float32), valid


def rows_to_the_end(terminated, truncated, t, b):
    """How many rows from t on belong to its episode and the window."""
    ends = np.flatnonzero((terminated | truncated)[t:, b])
    return ends[0] + 1 if len(ends) else len(terminated) - t


def summed_gae(reward, terminated, truncated, value, gamma, lambda_):
    td_error = reward + gamma * np.where(terminated, 0.0, value[1:]) - value[:-1]
    advantages = np.zeros(reward.shape)
    for t, b in np.ndindex(reward.shape):
        for k in range(rows_to_the_end(terminated, truncated, t, b)):
            advantages[t, b] += (gamma * lambda_) ** k * td_error[t + k, b]
    return advantages


def summed_n_step(reward, terminated, truncated, value, gamma, n):
    returns = np.zeros(reward.shape)
    for t, b in np.ndindex(reward.shape):
        m = min(n, rows_to_the_end(terminated, truncated, t, b))
        returns[t, b] = sum(gamma**k * reward[t + k, b] for k in range(m))
        if not terminated[t + m - 1, b]:
            returns[t, b] += gamma**m * value[t + m, b]
    return returns


def mixed_lambda_return(reward, terminated, truncated, value, gamma, lambda_):
    """(1 - λ) Σ_{n<h} λⁿ⁻¹ Gⁿ + λʰ⁻¹ Gʰ with h steps left (Sutton and Barto 2018, eq. 12.3)."""
    steps = reward, terminated, truncated, value, gamma
    n_step = {n: summed_n_step(*steps, n) for n in range(1, len(reward) + 1)}
    returns = np.zeros(reward.shape)
    for t, b in np.ndindex(reward.shape):
        h = rows_to_the_end(terminated, truncated, t, b)
        returns[t, b] = lambda_ ** (h - 1) * n_step[h][t, b]
        for n in range(1, h):
            returns[t, b] += (1 - lambda_) * lambda_ ** (n - 1) * n_step[n][t, b]
    return returns


def assert_valid_rows_equal(got, expected, valid, tolerance=1e-5):
    assert got.dtype == jnp.float32 and got.shape == valid.shape
    np.testing.assert_allclose(got[valid], expected[valid], rtol=tolerance, atol=tolerance)


def test_the_random_rollouts_have_every_kind_of_row():
    _, terminated, truncated, _, valid = random_rollout()
    assert (terminated & ~truncated).any() and (truncated & ~terminated).any()
    assert (terminated & truncated).any()
    assert terminated[-1].any() and truncated[-1].any() and (~valid[-1]).any()
    ended = terminated | truncated
    assert (ended[2:] & ~valid[1:-1]).any(), "an episode of one step"
    assert not ended.any(axis=0).all(), "a lane without an end"


@pytest.mark.parametrize(("gamma", "lambda_"), GAMMA_LAMBDA)
def test_gae(gamma, lambda_):
    *rows, valid = random_rollout()
    advantages = gae(*rows, gamma, lambda_)
    assert_valid_rows_equal(advantages, summed_gae(*rows, gamma, lambda_), valid)
    reward, terminated, truncated, value = rows
    discount = np.float32(gamma * ~terminated)
    mixing = np.float32(lambda_ * ~(terminated | truncated))
    by_rlax = jax.vmap(rlax.truncated_generalized_advantage_estimation, 1, 1)
    assert_valid_rows_equal(advantages, by_rlax(reward, discount, mixing, value), valid)


@pytest.mark.parametrize(("gamma", "lambda_"), GAMMA_LAMBDA)
def test_td_lambda_return(gamma, lambda_):
    *rows, valid = random_rollout()
    returns = td_lambda_return(*rows, gamma, lambda_)
    assert_valid_rows_equal(returns, mixed_lambda_return(*rows, gamma, lambda_), valid)
    reward, terminated, truncated, value = rows
    discount = np.float32(gamma * ~terminated)
    mixing = np.float32(lambda_ * ~(terminated | truncated))
    by_rlax = jax.vmap(rlax.lambda_returns, 1, 1)
    assert_valid_rows_equal(returns, by_rlax(reward, discount, value[1:], mixing), valid)


@pytest.mark.parametrize("n", STEPS)
@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
def test_n_step_return(n, gamma):
    *rows, valid = random_rollout()
    returns = n_step_return(*rows, gamma, n)
    assert_valid_rows_equal(returns, summed_n_step(*rows, gamma, n), valid)
    reward, terminated, truncated, value = rows
    discount = np.float32(gamma * ~terminated)
    mixing = np.float32(~(terminated | truncated))
    by_rlax = jax.vmap(rlax.n_step_bootstrapped_returns, (1, 1, 1, None, 1), 1)
    expected = by_rlax(reward, discount, value[1:], n, mixing)
    assert_valid_rows_equal(returns, expected, valid)


def summed_vtrace(ratio, rows, gamma, lambda_, rho_bar, c_bar):
    """Equation 1, and the advantages of section 4.2, as sums and products over the rows left."""
    reward, terminated, truncated, value = rows
    rho, c = np.minimum(rho_bar, ratio), lambda_ * np.minimum(c_bar, ratio)
    td_error = rho * (reward + gamma * np.where(terminated, 0, value[1:]) - value[:-1])
    target = np.float64(value)  # [T + 1, B]
    for t, b in np.ndindex(reward.shape):
        for k in range(rows_to_the_end(terminated, truncated, t, b)):
            target[t, b] += gamma**k * np.prod(c[t : t + k, b]) * td_error[t + k, b]
    advantages = np.zeros(reward.shape)
    for t, b in np.ndindex(reward.shape):
        left = rows_to_the_end(terminated, truncated, t, b)
        following = target[t + 1, b] if left > 1 else value[t + 1, b]
        bootstrap = 0 if terminated[t, b] else gamma * following
        advantages[t, b] = rho[t, b] * (reward[t, b] + bootstrap - value[t, b])
    return target[:-1], advantages


@pytest.mark.parametrize(("gamma", "lambda_"), GAMMA_LAMBDA)
@pytest.mark.parametrize(("rho_bar", "c_bar"), [(1.0, 1.0), (2.0, 0.5), (np.inf, np.inf)])
def test_vtrace(gamma, lambda_, rho_bar, c_bar):
    *rows, valid = random_rollout()
    ratio = np.float32(np.exp(np.random.default_rng(1).normal(size=(T, B)) / 2))
    got = vtrace(ratio, *rows, gamma, lambda_, rho_bar, c_bar)
    expected = summed_vtrace(ratio, rows, gamma, lambda_, rho_bar, c_bar)
    for x, y in zip(got, expected, strict=True):
        assert_valid_rows_equal(x, y, valid, tolerance=1e-4)


@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("lambda_", [0.0, 0.8, 1.0])
def test_vtrace_equals_rlax(gamma, lambda_):
    """rlax knows no truncations, and takes γ = 0 for a termination."""
    reward, terminated, truncated, value, valid = random_rollout()
    terminated = terminated | truncated
    ratio = np.float32(np.exp(np.random.default_rng(1).normal(size=(T, B)) / 2))
    got = vtrace(ratio, reward, terminated, np.zeros((T, B), bool), value, gamma, lambda_)
    discount = np.float32(gamma * ~terminated)
    by_rlax = jax.vmap(partial(rlax.vtrace_td_error_and_advantage, lambda_=lambda_), 1, 1)
    expected = by_rlax(value[:-1], value[1:], reward, discount, ratio)
    np.testing.assert_allclose((got.target - value[:-1])[valid], expected.errors[valid], atol=1e-5)
    if lambda_ == 1:
        # Elsewhere rlax mixes v_{t+1} and V(s_{t+1}) in the advantages.
        assert_valid_rows_equal(got.advantages, expected.pg_advantage, valid)


@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
def test_vtrace_on_policy_is_the_return_to_the_end(gamma):
    """With ratios of 1 it is the n-step return to the end of the window, and its advantage."""
    *rows, valid = random_rollout()
    got = vtrace(np.ones((T, B), np.float32), *rows, gamma)
    assert_valid_rows_equal(got.target, summed_n_step(*rows, gamma, T), valid)
    assert_valid_rows_equal(got.advantages, summed_gae(*rows, gamma, 1.0), valid)


@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
def test_upgo_return(gamma):
    *rows, valid = random_rollout()
    reward, terminated, truncated, value = rows
    bootstrap = gamma * np.where(terminated, 0, value[1:])
    expected = np.zeros((T, B))
    for t, b in np.ndindex(T, B):
        left, power = rows_to_the_end(terminated, truncated, t, b), 1.0
        for k in range(t, t + left):
            is_last = k == t + left - 1
            goes_on = not is_last and reward[k + 1, b] + bootstrap[k + 1, b] >= value[k + 1, b]
            expected[t, b] += power * (reward[k, b] + (0 if goes_on else bootstrap[k, b]))
            power *= gamma
            if not goes_on:
                break
    assert_valid_rows_equal(upgo_return(*rows, gamma), expected, valid)
    discount = np.float32(gamma * ~(terminated | truncated))
    step = np.where(truncated & ~terminated, reward + bootstrap, reward).astype(np.float32)
    better = np.concatenate([step[1:] + discount[1:] * value[2:] >= value[1:-1], np.ones((1, B))])
    by_rlax = jax.vmap(rlax.lambda_returns, 1, 1)
    by_rlax = by_rlax(step, discount, value[1:], np.float32(better))
    assert_valid_rows_equal(upgo_return(*rows, gamma), by_rlax, valid)


def test_by_hand():
    # Two rows to a termination, an invalid row, a truncation, an invalid row, the window's end.
    reward = jnp.float32([1, 2, 0, 3, 0, 4, 5])[:, None]
    terminated = (jnp.arange(7) == 1)[:, None]
    truncated = (jnp.arange(7) == 3)[:, None]
    value = jnp.float32([10, 20, 30, 40, 50, 60, 70, 80])[:, None]
    rows, valid = (reward, terminated, truncated, value), np.array([0, 1, 3, 5, 6])
    # TD errors: 1 + 10 - 10, 2 - 20, 3 + 25 - 40, 4 + 35 - 60, 5 + 40 - 70
    advantages = gae(*rows, 0.5, 0.5)[valid, 0]
    assert advantages.tolist() == [1 - 18 / 4, -18, -12, -21 - 25 / 4, -25]
    # The last step of each episode: 2, 3 + 25, 5 + 40; half of what follows it is the next value's
    returns = td_lambda_return(*rows, 0.5, 0.5)[valid, 0]
    assert returns.tolist() == [1 + (10 + 1) / 2, 2, 28, 4 + (35 + 22.5) / 2, 45]
    returns = n_step_return(*rows, 0.5, 1)[valid, 0]
    assert returns.tolist() == [1 + 10, 2, 28, 4 + 35, 45]
    returns = n_step_return(*rows, 0.5, 2)[valid, 0]
    assert returns.tolist() == [1 + 1, 2, 28, 4 + 2.5 + 20, 45]
    # At steps 0 and 5 the next step is worse than its value: 2 < 20, 5 + 40 < 70
    returns = upgo_return(*rows, 0.5)[valid, 0]
    assert returns.tolist() == [1 + 10, 2, 28, 4 + 35, 45]
    assert upgo_return(*rows[:3], value.at[1].set(2), 0.5)[0, 0] == 1 + 2 / 2
    # Ratios of 0.5, 3, ..., of which 3 counts as 1
    ratio = jnp.float32([0.5, 3, 1, 1, 1, 2, 0.5])[:, None]
    target, advantages = (x[valid, 0].tolist() for x in vtrace(ratio, *rows, 0.5))
    assert target == [10 + (1 - 18 / 2) / 2, 2, 28, 60 - 21 - 12.5 / 2, 70 - 12.5]
    assert advantages == [(1 + 2 / 2 - 10) / 2, -18, -12, 4 + 57.5 / 2 - 60, -12.5]


@pytest.mark.parametrize("name", TARGETS)
def test_what_stands_in_an_invalid_row_does_not_matter(name):
    reward, terminated, truncated, value, valid = random_rollout()
    target = TARGETS[name]
    before = target(reward, terminated, truncated, value)
    noise = np.random.default_rng(1).normal(size=(T, B)).astype(np.float32) * 1e3
    ends = ~valid & (noise > 0)
    changed = np.where(valid, reward, noise), terminated | ends, truncated | (~valid & ~ends)
    after = target(*changed, value)
    np.testing.assert_array_equal(after[valid], before[valid])
    assert not np.array_equal(after, before)


@pytest.mark.parametrize("name", TARGETS)
def test_the_value_after_an_end_matters_if_it_is_truncated_only(name):
    *steps, value, valid = random_rollout()
    _, terminated, truncated = steps
    target = TARGETS[name]
    before = target(*steps, value)
    # The last row of `value` is that of a final observation too, where the last step ended.
    after_end = np.zeros((T + 1, B), bool)
    after_end[1:] = terminated
    changed = target(*steps, np.where(after_end, 1e3, value).astype(np.float32))
    np.testing.assert_array_equal(changed[valid], before[valid])
    cut_only = truncated & ~terminated
    after_end[1:] = cut_only
    changed = target(*steps, np.where(after_end, value + 100, value).astype(np.float32))
    np.testing.assert_allclose((changed - before)[cut_only], 0.9 * 100, rtol=1e-4)
    in_cut_episode = np.zeros((T, B), bool)
    for t, b in np.argwhere(valid):
        in_cut_episode[t, b] = cut_only[t + rows_to_the_end(terminated, truncated, t, b) - 1, b]
    np.testing.assert_array_equal(changed[valid & ~in_cut_episode], before[valid & ~in_cut_episode])


@pytest.mark.parametrize("name", TARGETS)
def test_the_value_after_the_window_matters_unless_the_last_step_terminated(name):
    *steps, value, _ = random_rollout()
    _, terminated, _ = steps
    before = TARGETS[name](*steps, value)
    # A copy: JAX may not have read the first array yet.
    later = np.concatenate([value[:-1], value[-1:] + 100])
    change = np.asarray(TARGETS[name](*steps, later) - before)[-1]
    np.testing.assert_allclose(change, np.where(terminated[-1], 0, 90), rtol=1e-4)


@pytest.mark.parametrize(("gamma", "lambda_"), GAMMA_LAMBDA)
def test_the_targets_agree_with_each_other(gamma, lambda_):
    *rows, valid = random_rollout()
    of_gae = gae(*rows, gamma, lambda_) + rows[-1][:-1]
    assert_valid_rows_equal(td_lambda_return(*rows, gamma, lambda_), of_gae, valid)
    if lambda_ in (0, 1):
        n = 1 if lambda_ == 0 else T
        assert_valid_rows_equal(n_step_return(*rows, gamma, n), of_gae, valid)


def test_long_windows_stay_exact():
    rng = np.random.default_rng(0)
    reward, value = rng.random((500, 1)), rng.random((501, 1)) * 500
    never = np.zeros((500, 1), bool)
    rows = reward.astype(np.float32), never, never, value.astype(np.float32)
    td_error = (reward + 0.99 * value[1:] - value[:-1])[:, 0]
    powers = 0.99 ** np.arange(500)
    expected = [powers[: 500 - t] @ td_error[t:] for t in range(500)]
    np.testing.assert_allclose(gae(*rows, 0.99, 1.0)[:, 0], expected, atol=2e-3)


def test_a_single_row():
    steps = jnp.float32([[2]]), jnp.array([[False]]), jnp.array([[False]])
    value = jnp.float32([[3], [4]])
    assert gae(*steps, value, 0.5, 0.9) == 2 + 2 - 3
    assert td_lambda_return(*steps, value, 0.5, 0.9) == n_step_return(*steps, value, 0.5, 9) == 4


# --- distributions over returns -------------------------------------------------------------------


def projected(reward, discount, probs, support):
    """Algorithm 1 of Bellemare et al. 2017 with its floor and ceiling, in float64."""
    low, high, num = support[0], support[-1], len(support)
    result = np.zeros(probs.shape)
    for row in range(len(probs)):
        for j in range(num):
            moved = np.clip(reward[row] + discount[row] * support[j], low, high)
            place = (moved - low) / (high - low) * (num - 1)
            lower, upper = math.floor(place), math.ceil(place)
            result[row, lower] += probs[row, j] * (upper - place + (lower == upper))
            result[row, upper] += probs[row, j] * (place - lower)
    return result


@pytest.mark.parametrize("size", [0.1, 3.0, 100.0])
def test_categorical_projection(size):
    rng = np.random.default_rng(0)
    support = np.linspace(-10, 10, 51)
    reward, discount = size * rng.normal(size=64), 0.99 ** rng.integers(1, 6, 64)
    discount[:8] = 0.0
    probs = rng.dirichlet(np.full(51, 0.2), 64)
    got = targets.categorical_projection(*map(jnp.float32, (reward, discount, probs, support)))
    expected = projected(reward, discount, probs, support)
    np.testing.assert_allclose(got, expected, atol=1e-5)
    np.testing.assert_allclose(got.sum(axis=1), 1, rtol=1e-5)
    moved = reward[:, None] + discount[:, None] * support
    by_rlax = jax.vmap(rlax.categorical_l2_project, (0, 0, None))
    np.testing.assert_allclose(got, by_rlax(*map(jnp.float32, (moved, probs, support))), atol=1e-5)


@pytest.mark.parametrize(
    ("reward", "discount", "expected"),
    [
        (0.0, 1.0, [0.1, 0.2, 0.3, 0.4]),  # every atom falls on itself
        (1.0, 1.0, [0, 0.1, 0.2, 0.3 + 0.4]),  # on the next one, and beyond the end
        (-2.0, 1.0, [0.1 + 0.2 + 0.3, 0.4, 0, 0]),
        (0.5, 1.0, [0.05, 0.15, 0.25, 0.15 + 0.4]),
        (99.0, 0.0, [0, 0, 0, 1]),
        (0.25, 0.0, [0, 0.75, 0.25, 0]),  # terminal, between two atoms
        (2.0, 0.5, [0, 0, 0.05 + 0.0, 0.05 + 0.9]),
    ],
)
def test_categorical_projection_by_hand(reward, discount, expected):
    support, probs = jnp.float32([-1, 0, 1, 2]), jnp.float32([[0.1, 0.2, 0.3, 0.4]])
    steps = jnp.float32([reward]), jnp.float32([discount])
    got = targets.categorical_projection(*steps, probs, support)[0]
    np.testing.assert_allclose(got, expected, atol=1e-7)
    assert got.sum() == 1


@pytest.mark.parametrize("kappa", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("num_targets", [7, 31])
def test_quantile_huber_loss(kappa, per_row, num_targets):
    rng = np.random.default_rng(0)
    quantiles, target = rng.normal(size=(6, 5)), 2 * rng.normal(size=(6, num_targets))
    tau = rng.random((6, 5)) if per_row else (np.arange(5) + 0.5) / 5
    expected = np.zeros(6)
    for b, i, j in np.ndindex(6, 5, num_targets):
        error = target[b, j] - quantiles[b, i]
        huber = error**2 / 2 if abs(error) <= kappa else kappa * (abs(error) - kappa / 2)
        side = abs((tau[b, i] if per_row else tau[i]) - (error < 0))
        expected[b] += side * huber / kappa / num_targets
    arrays = [jnp.float32(x) for x in (quantiles, tau, target)]
    got = targets.quantile_huber_loss(*arrays, kappa)
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    taus = jnp.broadcast_to(arrays[1], (6, 5))
    by_rlax = jax.vmap(partial(rlax.quantile_regression_loss, huber_param=kappa))
    np.testing.assert_allclose(got * kappa, by_rlax(arrays[0], taus, arrays[2]), rtol=1e-5)


def test_gradients_of_the_quantile_loss_are_those_of_all_pairs(monkeypatch):
    keys = jax.random.split(jax.random.key(0), 4)
    quantiles, tau = jax.random.normal(keys[0], (6, 5)), jax.random.uniform(keys[1], (6, 5))
    target = 2 * jax.random.normal(keys[2], (6, 31))
    weight = jax.random.normal(keys[3], (6,))

    def gradients():
        def loss(*arrays):
            return weight @ targets.quantile_huber_loss(*arrays, kappa=0.5)

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(quantiles, tau, target)

    one_by_one = gradients()
    monkeypatch.setattr(targets.cpu_gradients, "FEW_TARGETS", 31)
    for got, expected in zip(one_by_one, gradients(), strict=True):
        assert (got != 0).any()
        np.testing.assert_allclose(got, expected, atol=1e-6)


def test_the_quantile_loss_is_least_at_the_quantiles():
    samples = jnp.float32(np.random.default_rng(0).exponential(size=(1, 4_001)))
    tau, kappa = jnp.float32([0.1, 0.5, 0.9]), 1e-3
    loss = jax.jit(jax.grad(lambda q: targets.quantile_huber_loss(q, tau, samples, kappa).sum()))
    exact = jnp.quantile(samples, tau, axis=1).T
    np.testing.assert_allclose(loss(exact), 0, atol=2e-3)
    assert (loss(exact - 0.1) < -0.005).all() and (loss(exact + 0.1) > 0.005).all()


# --- rescaled values ------------------------------------------------------------------------------

LARGE = np.concatenate([-np.geomspace(1e-4, 1e4, 400)[::-1], [0], np.geomspace(1e-4, 1e4, 400)])


def rescaled(x, epsilon=1e-3):
    return np.sign(x) * (np.sqrt(np.abs(x) + 1) - 1) + epsilon * x


def test_value_rescale_and_back():
    value = jnp.float32(LARGE)
    np.testing.assert_allclose(targets.value_rescale(value), rescaled(LARGE), rtol=1e-6)
    back = targets.value_unrescale(targets.value_rescale(value))
    np.testing.assert_allclose(back, LARGE, rtol=1e-5, atol=1e-5)
    forth = targets.value_rescale(targets.value_unrescale(value / 100))
    np.testing.assert_allclose(forth, LARGE / 100, rtol=1e-5, atol=1e-5)
    by_rlax = rlax.signed_hyperbolic(value, 1e-3), rlax.signed_parabolic(value / 100, 1e-3)
    np.testing.assert_allclose(targets.value_rescale(value), by_rlax[0], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(
        targets.value_unrescale(value / 100), by_rlax[1], rtol=1e-4, atol=3e-4
    )
    assert targets.value_rescale(jnp.float32(3), 0.5) == 1 + 1.5
    assert targets.value_unrescale(jnp.float32(0)) == 0


@pytest.mark.parametrize("n", STEPS)
def test_n_step_rescaled_return(n):
    reward, terminated, truncated, value, valid = random_rollout()
    reward = 100 * reward
    got = jax.jit(targets.n_step_rescaled_return, static_argnames="n")(
        reward, terminated, truncated, value, 0.9, n
    )
    root = (np.sqrt(1 + 4e-3 * (np.abs(np.float64(value)) + 1.001)) - 1) / 2e-3
    unrescaled = np.sign(value) * (root**2 - 1)
    expected = rescaled(summed_n_step(reward, terminated, truncated, unrescaled, 0.9, n))
    assert_valid_rows_equal(got, expected, valid)


BAD = {
    "value without the last row": lambda r, d, c, v: (r, d, c, v[:-1]),
    "value of other lanes": lambda r, d, c, v: (r, d, c, v[:, :-1]),
    "one lane of flags": lambda r, d, c, v: (r, d[:, :1], c, v),
    "rows of flags missing": lambda r, d, c, v: (r, d, c[1:], v),
    "one reward a row": lambda r, d, c, v: (r[:, :1], d, c, v),
    "terminated as numbers": lambda r, d, c, v: (r, d.astype(np.float32), c, v),
    "truncated as numbers": lambda r, d, c, v: (r, d, c.astype(np.int32), v),
    "whole rewards": lambda r, d, c, v: (r.astype(np.int32), d, c, v),
    "values in half precision": lambda r, d, c, v: (r, d, c, v.astype(np.float16)),
}


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("bad", BAD)
def test_wrong_shapes_and_dtypes_are_refused(name, bad):
    rows = BAD[bad](*random_rollout()[:4])
    with pytest.raises(AssertionError):
        TARGETS[name](*rows)


@pytest.mark.parametrize("n", [0, -1])
def test_n_below_1_is_refused(n):
    with pytest.raises(ValueError, match=f"n must be 1 or more, got {n}"):
        n_step_return(*random_rollout()[:4], 0.9, n)
