"""Distributions against scipy, closed forms and integrals; the head of a policy."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from gymnasium import spaces
from scipy import integrate, special, stats

from algos import a2c, impala, ppo, ppo_rnn
from common.distributions import (
    Bernoulli,
    Categorical,
    MultiCategorical,
    Normal,
    PolicyHead,
    TanhNormal,
    standard_normals,
)

NUM_SAMPLES = 20_000
INSIDE = np.nextafter(np.float32(1), np.float32(0))  # the closest float inside the bounds


@partial(jax.jit, static_argnames="method")
def call(method, policy, *args):
    """One compiled program rather than one an operation."""
    return getattr(policy, method)(*args)


def assert_frequencies(counts, probs):
    probs = np.float64(probs) / np.sum(probs, dtype=np.float64)
    assert stats.chisquare(counts, probs * np.sum(counts)).pvalue > 1e-3


def log_tanh_slope(u):
    """log(1 - tanh²(u)) in float64, for any u."""
    u = np.abs(np.float64(u))
    return 2 * (np.log(2) - u - np.log1p(np.exp(-2 * u)))


def tanh_normal_log_prob(u, mean, std):
    return (stats.norm.logpdf(np.float64(u), mean, std) - log_tanh_slope(u)).sum(axis=-1)


# --- Categorical ----------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0, 1, 30, 1e4])
def test_categorical(scale):
    logits = scale * np.random.default_rng(0).normal(size=(5, 3, 4)).astype(np.float32)
    policy = Categorical(jnp.asarray(logits))
    action = np.random.default_rng(1).integers(0, 4, (5, 3))
    expected = special.log_softmax(np.float64(logits), axis=-1)
    taken = np.take_along_axis(expected, action[..., None], -1)[..., 0]
    np.testing.assert_allclose(call("log_prob", policy, action), taken, rtol=1e-5, atol=1e-5)
    entropy = stats.entropy(np.exp(expected), axis=-1)
    np.testing.assert_allclose(call("entropy", policy), entropy, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(call("mode", policy), logits.argmax(axis=-1))


def test_categorical_by_hand():
    policy = Categorical(jnp.log(jnp.float32([[1, 2, 5]] * 3)))
    log_probs = call("log_prob", policy, jnp.arange(3))
    np.testing.assert_allclose(log_probs, np.log([1 / 8, 2 / 8, 5 / 8]), rtol=1e-5)
    assert np.isclose(call("entropy", Categorical(jnp.full(7, 9.0))), np.log(7))


def test_sums_over_actions_leave_out_those_of_probability_0():
    policy = Categorical(jnp.array([math.log(3), 0.0, -jnp.inf]))
    np.testing.assert_allclose(policy.probs(), [3 / 4, 1 / 4, 0], rtol=1e-6)
    np.testing.assert_allclose(policy.log_probs(), [math.log(3 / 4), math.log(1 / 4), 0], rtol=1e-6)

    def entropy(logits):
        policy = Categorical(logits)
        return -(policy.probs() * policy.log_probs()).sum()

    value, gradient = jax.value_and_grad(entropy)(policy.logits)
    np.testing.assert_allclose(value, policy.entropy(), rtol=1e-6)
    expected = jax.grad(lambda logits: Categorical(logits).entropy())(policy.logits)
    assert np.isfinite(gradient).all()
    np.testing.assert_allclose(gradient, expected, atol=1e-6)


def test_standard_normals():
    noise = np.asarray(standard_normals(jax.random.key(0), 3, (2_000, 2)))
    assert noise.shape == (3, 2_000, 2)
    columns = noise.transpose(0, 2, 1).reshape(6, 2_000)
    for number, column in enumerate(columns):
        assert stats.kstest(column, "norm").pvalue > 1e-3
        for other in columns[:number]:
            assert stats.pearsonr(column, other).pvalue > 1e-3
    again = standard_normals(jax.random.key(0), 3, (2_000, 2))
    np.testing.assert_array_equal(noise, again)
    assert not np.array_equal(noise, standard_normals(jax.random.key(1), 3, (2_000, 2)))


def test_categorical_samples():
    probs = np.float32([[0.1, 0.2, 0.7], [0.6, 0.3, 0.1]])
    logits = jnp.broadcast_to(jnp.log(probs), (NUM_SAMPLES, 2, 3))
    action = call("sample", Categorical(logits), jax.random.key(0))
    assert action.shape == (NUM_SAMPLES, 2) and action.dtype == jnp.int32
    for i in range(2):
        assert_frequencies(np.bincount(action[:, i], minlength=3), probs[i])
    other = call("sample", Categorical(logits), jax.random.key(1))
    assert not np.array_equal(action, other)


def test_an_action_of_probability_0():
    policy = Categorical(jnp.log(jnp.float32([1, 2, 0])))
    np.testing.assert_allclose(call("entropy", policy), stats.entropy([1 / 3, 2 / 3]), rtol=1e-6)
    assert call("log_prob", policy, jnp.array(2)) == -jnp.inf
    np.testing.assert_allclose(call("log_prob", policy, jnp.array(1)), np.log(2 / 3), rtol=1e-6)
    many = Categorical(jnp.broadcast_to(policy.logits, (NUM_SAMPLES, 3)))
    action = call("sample", many, jax.random.key(0))
    assert_frequencies(np.bincount(action, minlength=3)[:2], [1 / 3, 2 / 3])
    assert (action < 2).all() and call("mode", policy) == 1


@pytest.mark.parametrize("last", [-jnp.inf, -1e30, -200.0, 0.5])
def test_gradients_beside_an_action_of_probability_0(last):
    logits = jnp.float32([0, np.log(2), last])
    probs = special.softmax(np.float64(logits))
    entropy = stats.entropy(probs)
    surprise = np.log(np.where(probs > 0, probs, 1))
    # ∂H/∂l_i = -π_i (log π_i + H), ∂log π_0/∂l_i = [i = 0] - π_i
    slopes = jax.jit(jax.grad(lambda x: Categorical(x).entropy()))(logits)
    np.testing.assert_allclose(slopes, -probs * (surprise + entropy), rtol=1e-4, atol=1e-6)
    slopes = jax.jit(jax.grad(lambda x: Categorical(x).log_prob(jnp.array(0))))(logits)
    np.testing.assert_allclose(slopes, np.array([1, 0, 0]) - probs, rtol=1e-4, atol=1e-6)


# --- MultiCategorical -----------------------------------------------------------------------------


def multi_categorical(batch):
    probs = np.float32([0.2, 0.8]), np.float32([0.5, 0.3, 0.2]), np.float32([0.5, 0.5])
    parts = (Categorical(jnp.broadcast_to(jnp.log(p), (*batch, len(p)))) for p in probs)
    return MultiCategorical(tuple(parts)), probs


def test_multi_categorical():
    policy, probs = multi_categorical((6,))
    assert call("mode", policy).tolist() == [[1, 0, 0]] * 6
    entropy = sum(map(stats.entropy, probs))
    np.testing.assert_allclose(call("entropy", policy), np.full(6, entropy), rtol=1e-6)
    action = np.array([(0, 0, 0), (1, 0, 0), (0, 1, 1), (1, 2, 0), (0, 2, 1), (1, 1, 1)])
    expected = [np.log(probs[0][i] * probs[1][j] * probs[2][k]) for i, j, k in action]
    np.testing.assert_allclose(call("log_prob", policy, action), expected, rtol=1e-5)
    assert multi_categorical(())[0].log_prob(jnp.array([1, 0, 1])).shape == ()


def test_choices_are_drawn_independently():
    policy, probs = multi_categorical((NUM_SAMPLES,))
    action = np.asarray(call("sample", policy, jax.random.key(0)))
    assert action.shape == (NUM_SAMPLES, 3) and action.dtype == np.int32
    joint = np.einsum("i,j,k->ijk", *probs).ravel()
    number = np.ravel_multi_index(tuple(action.T), (2, 3, 2))
    assert_frequencies(np.bincount(number, minlength=12), joint)


# --- Bernoulli ------------------------------------------------------------------------------------

BITS = np.float32([0.2, 0.9, 0.5])


def test_bernoulli():
    policy = Bernoulli(jnp.tile(jnp.asarray(special.logit(BITS)), (3, 1)))
    action = np.array([[0, 0, 0], [1, 1, 0], [0, 1, 1]])
    np.testing.assert_array_equal(call("mode", policy), [[0, 1, 0]] * 3)
    expected = stats.bernoulli.logpmf(action, BITS).sum(axis=-1)
    np.testing.assert_allclose(call("log_prob", policy, action), expected, rtol=1e-5)
    entropy = stats.bernoulli.entropy(BITS).sum()
    np.testing.assert_allclose(call("entropy", policy), np.full(3, entropy), rtol=1e-5)


@pytest.mark.parametrize("logit", [-1e4, -90.0, 90.0, 1e4])
def test_a_bit_that_is_certain(logit):
    policy, likely = Bernoulli(jnp.array([logit])), int(logit > 0)
    assert call("sample", policy, jax.random.key(0)).tolist() == [likely]
    assert call("log_prob", policy, jnp.array([likely])) == 0
    np.testing.assert_allclose(call("log_prob", policy, jnp.array([1 - likely])), -abs(logit))
    np.testing.assert_allclose(call("entropy", policy), 0, atol=1e-3)
    slope = jax.grad(lambda x: Bernoulli(x).entropy())(policy.logits)
    np.testing.assert_allclose(slope, 0, atol=1e-3)


def test_bits_are_drawn_independently():
    policy = Bernoulli(jnp.tile(jnp.asarray(special.logit(BITS)), (NUM_SAMPLES, 1)))
    action = np.asarray(call("sample", policy, jax.random.key(0)))
    assert action.shape == (NUM_SAMPLES, 3) and action.dtype == np.int32
    joint = np.einsum("i,j,k->ijk", *(np.array([1 - p, p]) for p in BITS)).ravel()
    number = np.ravel_multi_index(tuple(action.T), (2, 2, 2))
    assert_frequencies(np.bincount(number, minlength=8), joint)


# --- Normal ---------------------------------------------------------------------------------------

MEAN = np.float32([[0.5, -2, 10], [0, 0, 1], [-4, 3, 0], [1, 1, 1]])
LOG_STD = np.float32([0.3, -1.5, 1])
EACH_ROW = LOG_STD + np.float32([[0], [1], [-1], [0.5]])


@pytest.mark.parametrize("log_std", [LOG_STD, EACH_ROW], ids=["one for all", "one a row"])
def test_normal(log_std):
    policy = Normal(jnp.asarray(MEAN), jnp.asarray(log_std))
    action = MEAN + np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32) * 2
    of_scipy = stats.norm(np.float64(MEAN), np.exp(np.float64(log_std)))
    log_prob, entropy = call("log_prob", policy, action), call("entropy", policy)
    np.testing.assert_allclose(log_prob, of_scipy.logpdf(action).sum(axis=-1), rtol=1e-5)
    assert entropy.shape == (4,)
    np.testing.assert_allclose(entropy, of_scipy.entropy().sum(axis=-1), rtol=1e-5)
    np.testing.assert_array_equal(policy.mode(), MEAN)


def test_normal_gradients():
    # ∂log π/∂mean = z / std, ∂log π/∂log std = z² - 1
    def total(mean, log_std):
        return Normal(mean, log_std).log_prob(jnp.float32([1.5, -1])).sum()

    by_mean, by_log_std = jax.grad(total, (0, 1))(
        jnp.float32([0.5, 0]), jnp.log(jnp.float32([2, 1]))
    )
    np.testing.assert_allclose(by_mean, [0.25, -1], rtol=1e-6)
    np.testing.assert_allclose(by_log_std, [0.25 - 1, 0], atol=1e-6)


@pytest.mark.parametrize("kind", [Normal, TanhNormal])
def test_samples(kind):
    mean, std = np.float32([0.3, -0.5]), np.float32([0.7, 0.2])
    policy = kind(jnp.broadcast_to(mean, (NUM_SAMPLES, 2)), jnp.log(std))
    action = np.asarray(call("sample", policy, jax.random.key(0)))
    assert action.shape == (NUM_SAMPLES, 2) and action.dtype == np.float32
    unbounded = np.arctanh(np.float64(action)) if kind is TanhNormal else action
    for i in range(2):
        assert stats.kstest(unbounded[:, i], stats.norm(mean[i], std[i]).cdf).pvalue > 1e-3
    assert stats.pearsonr(*unbounded.T).pvalue > 1e-3
    assert not np.array_equal(action, call("sample", policy, jax.random.key(1)))


# --- TanhNormal -----------------------------------------------------------------------------------


@pytest.mark.parametrize("log_std", [LOG_STD - 1, EACH_ROW - 1], ids=["one for all", "one a row"])
def test_tanh_normal_log_prob(log_std):
    mean = MEAN / 10
    policy = TanhNormal(jnp.asarray(mean), jnp.asarray(log_std))
    action = np.random.default_rng(0).uniform(-0.98, 0.98, (4, 3)).astype(np.float32)
    std = np.exp(np.float64(log_std))
    expected = tanh_normal_log_prob(np.arctanh(np.float64(action)), np.float64(mean), std)
    np.testing.assert_allclose(call("log_prob", policy, action), expected, rtol=1e-5)
    np.testing.assert_allclose(call("mode", policy), np.tanh(mean), rtol=1e-6)


def test_tanh_normal_density_integrates_to_1():
    policy = TanhNormal(jnp.float32([0.4]), jnp.log(jnp.float32([0.6])))
    middle = (np.arange(20_000) + 0.5) / 10_000 - 1
    density = np.exp(np.float64(call("log_prob", policy, jnp.float32(middle)[:, None])))
    assert np.isclose(density.sum() / 10_000, 1, atol=1e-4)


EDGES = np.float32([1, INSIDE, 1 - 1e-6, 0.9999, -0.9999, -1 + 1e-6, -INSIDE, -1])


@pytest.mark.parametrize(("mean", "std"), [(0.3, 0.7), (-2, 0.2), (8, 1)])
def test_tanh_normal_at_the_bounds(mean, std):
    @jax.jit
    @partial(jax.vmap, in_axes=(None, None, 0))
    @partial(jax.value_and_grad, argnums=(0, 1, 2))
    def log_prob(mean, log_std, action):
        return TanhNormal(mean[None], log_std[None]).log_prob(action[None])

    mean, log_std = np.float32(mean), np.log(np.float32(std))
    values, slopes = log_prob(mean, log_std, EDGES)
    # At a bound itself the closest float inside stands for it.
    u = np.arctanh(np.clip(np.float64(EDGES), -np.float64(INSIDE), np.float64(INSIDE)))
    expected = tanh_normal_log_prob(u[:, None], np.float64(mean), np.exp(np.float64(log_std)))
    np.testing.assert_allclose(values, expected, rtol=1e-5)
    z = (u - mean) / std
    np.testing.assert_allclose(slopes[0], z / std, rtol=1e-4)
    np.testing.assert_allclose(slopes[1], z**2 - 1, rtol=1e-4)
    # ∂log π/∂a = (2a - z / std) / (1 - a²)
    slope = (2 * EDGES - z / std) / (1 - np.tanh(u) ** 2)
    np.testing.assert_allclose(slopes[2][2:-2], slope[2:-2], rtol=1e-3)
    assert np.isfinite(slopes[2]).all()


def test_sample_and_log_prob_is_exact_where_tanh_rounds_to_1():
    mean, key = jnp.float32([[-30, -12], [-7, -1], [2, 9], [12, 30]]), jax.random.key(3)
    log_std = jnp.float32([-0.5, 0.2])

    def sampled(mean, log_std):
        action, log_prob = TanhNormal(mean, log_std).sample_and_log_prob(key)
        return log_prob.sum(), (action, log_prob)

    grad = jax.jit(jax.grad(sampled, (0, 1), has_aux=True))
    slopes, (action, log_prob) = grad(mean, log_std)
    u = call("sample", Normal(mean, log_std), key)
    np.testing.assert_allclose(action, np.tanh(u), rtol=1e-6)
    np.testing.assert_allclose(
        action, call("sample", TanhNormal(mean, log_std), key), rtol=1e-6, atol=1e-7
    )
    assert abs(action[0, 0]) == abs(action[-1, -1]) == 1, "the case that this is about"
    expected = tanh_normal_log_prob(u, np.float64(mean), np.exp(np.float64(log_std)))
    np.testing.assert_allclose(log_prob, expected, rtol=1e-5)
    # u = mean + std ε: log N(u) does not depend on the mean, and only as -log std on the deviation
    by_u = 2 * np.tanh(np.float64(u))
    np.testing.assert_allclose(slopes[0], by_u, rtol=1e-4, atol=1e-5)
    by_log_std = (by_u * (u - mean) - 1).sum(axis=0)
    np.testing.assert_allclose(slopes[1], by_log_std, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("log_std", [LOG_STD - 1, EACH_ROW - 1], ids=["one for all", "one a row"])
def test_of_noise_is_what_sampling_and_log_prob_say(log_std):
    policy, key = TanhNormal(jnp.asarray(MEAN / 10), jnp.asarray(log_std)), jax.random.key(3)
    noise = jax.random.normal(key, MEAN.shape)
    action, log_prob = call("of_noise", policy, noise)
    sampled = call("sample_and_log_prob", policy, key)
    np.testing.assert_allclose(action, sampled[0], rtol=1e-6)
    np.testing.assert_allclose(log_prob, sampled[1], rtol=1e-5, atol=1e-6)
    u = np.float64(MEAN / 10) + np.exp(np.float64(log_std)) * noise
    np.testing.assert_allclose(action, np.tanh(u), rtol=1e-5)
    assert np.abs(action).max() < 0.999, "where arctanh still finds u"
    np.testing.assert_allclose(call("log_prob", policy, action), log_prob, rtol=1e-3, atol=1e-3)


def test_of_noise_and_log_prob_at_the_edge():
    # tanh(±20) is ±1: of_noise knows u, log_prob takes the closest float inside for it.
    policy = TanhNormal(jnp.float32([[20], [-20]]), jnp.zeros(1))
    action, log_prob = call("of_noise", policy, jnp.float32([[0.5], [-0.5]]))
    assert action.tolist() == [[1], [-1]]
    expected = tanh_normal_log_prob(np.array([[20.5], [-20.5]]), np.array([[20], [-20]]), 1)
    np.testing.assert_allclose(log_prob, expected, rtol=1e-6)
    inside = np.arctanh(np.float64(INSIDE))
    expected = tanh_normal_log_prob(inside * np.sign(action), np.array([[20], [-20]]), 1)
    np.testing.assert_allclose(call("log_prob", policy, action), expected, rtol=1e-5)


# At a deviation of e² the 32 points of the quadrature miss the kink of log(1 - tanh²) by 0.08 nats.
ENTROPY_TOLERANCE = [(-5, 2e-6), (-1, 2e-6), (0, 2e-6), (1, 2e-3), (2, 0.1)]


@pytest.mark.parametrize(("log_std", "tolerance"), ENTROPY_TOLERANCE)
def test_tanh_normal_entropy(log_std, tolerance):
    means, std = np.float32([0, 0.5, -2, 5]), np.exp(log_std)

    def entropy(mean):
        def term(z):
            return stats.norm.pdf(z) * -tanh_normal_log_prob(np.array([mean + std * z]), mean, std)

        kink = np.clip(-mean / std, -11, 11)
        return integrate.quad(term, -12, 12, points=[kink], limit=200)[0]

    expected = np.array([entropy(mean) for mean in means])
    each = call("entropy", TanhNormal(means[:, None], np.full(1, log_std, np.float32)))
    np.testing.assert_allclose(each, expected, atol=tolerance, rtol=1e-6)
    for shape in ((2,), (2, 2)):
        policy = TanhNormal(means.reshape(2, 2), np.full(shape, log_std, np.float32))
        rows = each.reshape(2, 2).sum(axis=-1)
        np.testing.assert_allclose(call("entropy", policy), rows, rtol=1e-5)


def test_tanh_normal_entropy_by_samples():
    mean, log_std = jnp.float32([0.5, -1]), jnp.float32([-0.3, 0.2])
    policy = TanhNormal(mean, log_std)
    many = TanhNormal(jnp.broadcast_to(mean, (NUM_SAMPLES, 2)), log_std)
    surprise = -np.asarray(call("sample_and_log_prob", many, jax.random.key(0))[1])
    deviation = surprise.std() / NUM_SAMPLES**0.5
    assert abs(surprise.mean() - call("entropy", policy)) < 4 * deviation < 0.05
    slopes = jax.jit(jax.grad(lambda *x: TanhNormal(*x).entropy(), (0, 1)))(mean, log_std)
    assert np.isfinite(slopes).all() and slopes[0][0] < 0 < slopes[0][1]  # towards the middle


# --- PolicyHead -----------------------------------------------------------------------------------

HEADS = {
    "discrete": (spaces.Discrete(6), []),
    "discrete from 5": (spaces.Discrete(6, start=5), []),
    "multi-discrete": (spaces.MultiDiscrete([2, 4]), [2]),
    "multi-discrete matrix": (spaces.MultiDiscrete([[2], [4]]), [2]),
    "multi-binary": (spaces.MultiBinary(6), [6]),
    "multi-binary matrix": (spaces.MultiBinary([2, 3]), [6]),
    "box": (spaces.Box(-1, 1, (6,)), [6]),
    "box of a matrix": (spaces.Box(-1, 1, (2, 3)), [6]),
    "box of a scalar": (spaces.Box(-1, 1, ()), [1]),
}
FEATURES = np.random.default_rng(0).normal(size=(5, 16)).astype(np.float32)


@pytest.mark.parametrize("name", HEADS)
def test_policy_head(name):
    space, action_shape = HEADS[name]
    head = PolicyHead(16, space, nnx.Rngs(0))
    is_box = isinstance(space, spaces.Box)
    num_outputs = action_shape[0] if is_box else 6
    num_results = 2**6 if isinstance(space, spaces.MultiBinary) else 6 if action_shape == [] else 8
    params = {".".join(map(str, k)): v[...].shape for k, v in nnx.to_flat_state(nnx.state(head))}
    assert params == {
        "linear.kernel": (16, num_outputs),
        "linear.bias": (num_outputs,),
        "log_std": (num_outputs if is_box else 0,),
    }
    policy = head(FEATURES)
    action, entropy = call("sample", policy, jax.random.key(1)), call("entropy", policy)
    log_prob = call("log_prob", policy, action)
    assert action.shape == call("mode", policy).shape == (5, *action_shape)
    assert log_prob.shape == entropy.shape == (5,)
    # The start is next to uniform, or next to a standard normal.
    if is_box:
        assert 0 < np.abs(policy.mean).max() < 0.1
        np.testing.assert_allclose(entropy, num_outputs * stats.norm.entropy(), rtol=1e-6)
        np.testing.assert_allclose(log_prob, stats.norm.logpdf(action).sum(axis=-1), atol=0.3)
    else:
        uniform = np.log(num_results)
        np.testing.assert_allclose(entropy, uniform, rtol=1e-3)
        assert 0 < np.abs(log_prob + uniform).max() < 0.1


def test_policy_head_scale():
    head = PolicyHead(16, spaces.Discrete(6), nnx.Rngs(0), scale=0.5)
    kernel = np.asarray(head.linear.kernel[...])
    np.testing.assert_allclose(kernel.T @ kernel, 0.25 * np.eye(6), atol=1e-6)


@pytest.mark.parametrize("nvec", [[2, 3, 1], [[2], [3], [1]]])
def test_every_choice_has_its_own_logits(nvec):
    head = PolicyHead(16, spaces.MultiDiscrete(nvec), nnx.Rngs(0))
    head.linear.kernel[...] = jnp.zeros((16, 6))
    head.linear.bias[...] = jnp.arange(6.0)
    parts = [part.logits.tolist() for part in head(FEATURES[:1]).parts]
    assert parts == [[[0, 1]], [[2, 3, 4]], [[5]]]


@pytest.mark.parametrize("module", [ppo, ppo_rnn, a2c, impala])
@pytest.mark.parametrize(("flags", "log_std"), [({}, 0.0), ({"log_std_init": -0.5}, -0.5)])
def test_the_deviation_of_a_box_starts_where_the_flag_says(module, flags, log_std):
    box, config = spaces.Box(-1, 1, (3,)), module.Config(**flags)
    model = module.Algorithm(config, box, box).make_model(nnx.Rngs(0))
    start = model.policy_head.log_std[...]
    np.testing.assert_array_equal(start, np.full(3, log_std, np.float32))


def test_the_deviation_of_a_box_is_a_parameter():
    head = PolicyHead(16, spaces.Box(-1, 1, (6,)), nnx.Rngs(0))
    log_std = np.arange(6, dtype=np.float32)
    head.log_std[...] = jnp.asarray(log_std)
    policy = head(FEATURES)
    kernel = np.asarray(head.linear.kernel[...])
    np.testing.assert_allclose(policy.mean, FEATURES @ kernel, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(policy.log_std, np.tile(log_std, (len(FEATURES), 1)))
    graph, params = nnx.split(head)
    grad = jax.jit(jax.grad(lambda p: nnx.merge(graph, p)(FEATURES).entropy().sum()))
    np.testing.assert_allclose(grad(params)["log_std"][...], np.full(6, 5))
