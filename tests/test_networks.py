"""Encoders and layers against hand-written numpy."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from gymnasium import spaces
from jax import lax

from common import cpu_gradients
from common.cpu_gradients import FEW
from common.networks import (
    CNN,
    MLP,
    Conv,
    Encoder,
    MinAtarCNN,
    NatureCNN,
    Network,
    NoisyLinear,
    NoisyMLP,
    is_grid,
    is_image,
)


def image_space(*shape: int, high: int = 255) -> spaces.Box:
    return spaces.Box(0, high, shape, np.uint8)


def forward(module: nnx.Module, x: Any) -> Any:
    graph, params = nnx.split(module)
    return jax.jit(lambda params, x: nnx.merge(graph, params)(x))(params, x)


def encode(space: spaces.Space, obs: Any) -> np.ndarray:
    encoder = Encoder(space, nnx.Rngs(0))
    features = encoder(jax.tree.map(jnp.asarray, obs))
    batch = len(jax.tree.leaves(obs)[0])
    assert features.shape == (batch, encoder.num_features) and features.dtype == jnp.float32
    assert not encoder.has_cnn
    return np.asarray(features)


FLAT = {
    "vector": (spaces.Box(-9, 9, (2,)), np.float32([[1, -2], [3, 4]]), [[1, -2], [3, 4]]),
    "scalar": (spaces.Box(-9, 9, ()), np.float32([5, -6]), [[5], [-6]]),
    "matrix": (spaces.Box(-9, 9, (2, 2)), np.float32([[[1, 2], [3, 4]]]), [[1, 2, 3, 4]]),
    "integers": (spaces.Box(-9, 9, (2,), np.int32), np.int32([[1, -2]]), [[1, -2]]),
    "bytes": (image_space(3), np.uint8([[0, 51, 255]]), [[0, 0.2, 1]]),
    "bytes that are 0 or 1": (image_space(3, high=1), np.uint8([[0, 1, 1]]), [[0, 1, 1]]),
    "small image": (image_space(1, 2, 2), np.uint8([[[[0, 255], [51, 0]]]]), [[0, 1, 0.2, 0]]),
    "discrete": (spaces.Discrete(3), np.int32([2, 0]), [[0, 0, 1], [1, 0, 0]]),
    "discrete from 5": (spaces.Discrete(3, start=5), np.int32([6, 7]), [[0, 1, 0], [0, 0, 1]]),
    "multi-discrete": (
        spaces.MultiDiscrete([2, 3]),
        np.int32([[1, 0], [0, 2]]),
        [[0, 1, 1, 0, 0], [1, 0, 0, 0, 1]],
    ),
    "multi-discrete from [3, -1]": (
        spaces.MultiDiscrete([2, 3], start=[3, -1]),
        np.int32([[4, -1], [3, 1]]),
        [[0, 1, 1, 0, 0], [1, 0, 0, 0, 1]],
    ),
    "multi-discrete matrix": (
        spaces.MultiDiscrete([[2], [3]]),
        np.int32([[[1], [2]]]),
        [[0, 1, 0, 0, 1]],
    ),
    "multi-binary": (spaces.MultiBinary(3), np.int8([[1, 0, 1]]), [[1, 0, 1]]),
    "multi-binary matrix": (spaces.MultiBinary([1, 2]), np.int8([[[0, 1]]]), [[0, 1]]),
    "dict": (
        spaces.Dict(b=spaces.Discrete(2), a=spaces.Box(-9, 9, (2,))),
        {"b": np.int32([1]), "a": np.float32([[7, 8]])},
        {"a": [[7, 8]], "b": [[0, 1]]},
    ),
    "tuple": (
        spaces.Tuple((spaces.Discrete(2), image_space(1))),
        (np.int32([0, 1]), np.uint8([[255], [0]])),
        [[1, 0, 1], [0, 1, 0]],
    ),
    "nested": (
        spaces.Dict(x=spaces.Tuple((spaces.Discrete(2, start=4), spaces.Dict(y=image_space(1))))),
        {"x": (np.int32([5]), {"y": np.uint8([[51]])})},
        [[0, 1, 0.2]],
    ),
}


@pytest.mark.parametrize("name", FLAT)
def test_features_of_each_space(name: str) -> None:
    space, obs, expected = FLAT[name]
    if isinstance(expected, dict):  # in the order of the space
        expected = np.concatenate([expected[key] for key in space.spaces], axis=1)
    np.testing.assert_allclose(encode(space, obs), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("space", "image"),
    [
        (image_space(4, 84, 84), True),
        (image_space(84, 84, 4), True),
        (image_space(36, 36, 3), True),
        (image_space(35, 36, 3), False),
        (image_space(1, 36, 35), False),
        (image_space(40, 2, 40), False),
        (image_space(7, 7, 3), False),
        (image_space(84, 84), False),
        (image_space(100), False),
        (spaces.Box(0, 1, (84, 84, 3), np.float32), False),
        (spaces.Discrete(3), False),
    ],
)
def test_is_image(space: spaces.Space, image: bool) -> None:
    assert is_image(space) == image
    encoder = nnx.eval_shape(lambda: Encoder(space, nnx.Rngs(0)))
    assert encoder.has_cnn == image
    assert encoder.num_features == (512 if image else spaces.flatdim(space))


@pytest.mark.parametrize(
    ("space", "grid"),
    [
        (spaces.Box(0, 1, (10, 10, 4), np.float32), True),
        (spaces.Box(0, 1, (8, 16, 7), np.uint8), True),
        (spaces.Box(0, 1, (10, 10, 10), np.float32), False),
        (spaces.Box(0, 1, (7, 10, 4), np.float32), False),
        (spaces.Box(0, 1, (10, 17, 4), np.float32), False),
        (spaces.Box(0, 1, (10, 10), np.float32), False),
        (spaces.Box(-1, 1, (10, 10, 4), np.float32), False),
        (spaces.Box(0, 2, (10, 10, 4), np.float32), False),
        (spaces.MultiBinary((10, 10, 4)), False),
    ],
)
def test_is_grid(space: spaces.Space, grid: bool) -> None:
    assert is_grid(space) == grid
    encoder = nnx.eval_shape(lambda: Encoder(space, nnx.Rngs(0)))
    assert encoder.has_cnn == grid
    assert encoder.num_features == (128 if grid else spaces.flatdim(space))
    assert encoder.num_units == (128 if grid else 0)


def test_minatar_cnn_by_hand() -> None:
    obs = (np.random.default_rng(0).random((5, 10, 10, 4)) < 0.2).astype(np.float32)
    cnn = MinAtarCNN((10, 10, 4), nnx.Rngs(0))
    conv, dense = cnn.layers[0].conv, cnn.dense
    kernel, bias = np.asarray(conv.kernel), np.asarray(conv.bias)
    assert kernel.shape == (3, 3, 4, 16) and dense.kernel.shape == (8 * 8 * 16, 128)
    windows = np.lib.stride_tricks.sliding_window_view(obs, (3, 3), axis=(1, 2))
    hidden = np.einsum("byxcij,ijco->byxo", windows, kernel) + bias  # [5, 8, 8, 16]
    hidden = np.maximum(hidden, 0).reshape(5, -1)
    expected = np.maximum(hidden @ np.asarray(dense.kernel) + np.asarray(dense.bias), 0)
    np.testing.assert_allclose(forward(cnn, obs), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_rows", [128, 129])
def test_gradients_of_the_dense_layer(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of few and of many rows on a CPU, against those of another device."""
    obs = np.random.default_rng(0).random((num_rows, 10, 10, 4)).astype(np.float32)
    graph, params = nnx.split(MinAtarCNN((10, 10, 4), nnx.Rngs(0)))

    def loss(params: Any) -> Any:
        return (nnx.merge(graph, params)(obs) ** 2).mean()

    grads = jax.jit(jax.grad(loss))(params)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    jax.tree.map(assert_near, grads, jax.jit(jax.grad(lambda params: loss(params)))(params))


@pytest.fixture
def plain_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions as on a GPU, which compile faster."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


def test_an_image_beside_a_vector(plain_convolutions: None) -> None:
    space = spaces.Dict(image=image_space(36, 36, 3), speed=spaces.Box(-9, 9, (2,)))
    encoder = Encoder(space, nnx.Rngs(0))
    assert encoder.has_cnn and encoder.num_features == 514
    image = np.random.default_rng(0).integers(0, 256, (2, 36, 36, 3), np.uint8)
    obs = {"image": jnp.asarray(image), "speed": jnp.float32([[1, 2], [3, 4]])}
    features = forward(encoder, obs)
    cnn = next(cnn for cnn in encoder.cnns if cnn)
    np.testing.assert_allclose(features[:, :512], forward(cnn, obs["image"]), rtol=1e-5)
    np.testing.assert_array_equal(features[:, 512:], [[1, 2], [3, 4]])


def test_mlp() -> None:
    mlp = MLP((2, 3, 1), nnx.Rngs(0))
    mlp.layers[0].kernel[...] = jnp.float32([[1, 0, -1], [0, 2, 1]])
    mlp.layers[0].bias[...] = jnp.float32([0, -3, 0])
    mlp.layers[1].kernel[...] = jnp.float32([[1], [10], [100]])
    mlp.layers[1].bias[...] = jnp.float32([-5])
    # hidden: [2, -1, -1] -> [2, 0, 0], and [1, 5, 3] -> [1, 5, 3]
    np.testing.assert_allclose(mlp(jnp.float32([[2, 1], [1, 4]])), [[0], [1 + 50 + 300 - 5]])
    assert mlp.num_features == 1
    assert MLP((7,), nnx.Rngs(0)).num_features == 7


def normed(x: Any, scale: Any = 1.0, bias: Any = 0.0) -> Any:
    """LayerNorm over the last axis in the precision of x, with the epsilon of Flax."""
    deviation = np.sqrt(x.var(-1, keepdims=True) + 1e-6)
    return (x - x.mean(-1, keepdims=True)) / deviation * scale + bias


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_layer_norm_comes_before_the_activation(backend: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    mlp = MLP((3, 8, 5), nnx.Rngs(0), layer_norm=True)
    first, second = mlp.norms
    first.scale[...], first.bias[...] = jnp.linspace(0.5, 2, 8), jnp.linspace(-1, 1, 8)
    x = np.random.default_rng(0).normal(size=(6, 3))
    expected = x
    for layer, norm in zip(mlp.layers, (first, second), strict=True):
        scale, bias = np.float64(norm.scale[...]), np.float64(norm.bias[...])
        expected = np.maximum(normed(expected @ np.float64(layer.kernel[...]), scale, bias), 0)
    got = mlp(jnp.float32(x))
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)
    # The size of an input is gone, its sign is not.
    np.testing.assert_allclose(mlp(jnp.float32(10 * x)), got, rtol=1e-3, atol=1e-3)
    assert np.abs(np.asarray(mlp(jnp.float32(-x))) - got).max() > 0.1


@pytest.mark.parametrize("layer_norm", [False, True])
def test_layer_norm_adds_two_parameters_a_layer(layer_norm: bool) -> None:
    def make_cnn() -> NatureCNN:
        return NatureCNN((4, 84, 84), nnx.Rngs(0), layer_norm=layer_norm)

    mlp = MLP((3, 8, 5), nnx.Rngs(0), layer_norm=layer_norm)
    for module, layers in ((nnx.eval_shape(make_cnn), 4), (mlp, 2)):
        params = jax.tree.leaves(nnx.to_pure_dict(nnx.state(module)))
        assert len(params) == layers * (4 if layer_norm else 2)


@pytest.mark.parametrize("shape", [(7, 12), (3, 2, 5, 9)])
def test_gradient_of_layer_norm_is_that_of_flax(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    x, weight = (rng.normal(size=shape).astype(np.float32) for _ in range(2))
    scale, bias = (rng.normal(size=shape[-1]).astype(np.float32) for _ in range(2))
    graph = nnx.graphdef(nnx.LayerNorm(shape[-1], rngs=nnx.Rngs(0)))

    def of_flax(x: Any, scale: Any, bias: Any) -> Any:
        return nnx.merge(graph, {"scale": scale, "bias": bias})(x)

    def loss(layer_norm: Any, *inputs: Any) -> Any:
        out = layer_norm(*inputs)
        return (out * weight).sum(), out

    got, expected = (
        jax.tree.leaves(jax.grad(partial(loss, f), (0, 1, 2), has_aux=True)(3 * x + 1, scale, bias))
        for f in (cpu_gradients.layer_norm, of_flax)
    )
    for one, other in zip(got, expected, strict=True):
        assert_near(one, other)


def test_kernels_start_as_they_are_told_to() -> None:
    init = nnx.initializers.constant(0.5)
    networks = (
        MLP((3, 8, 5), nnx.Rngs(0), kernel_init=init),
        Encoder(image_space(36, 36, 3), nnx.Rngs(0), init),
    )
    leaves = jax.tree.leaves([nnx.to_pure_dict(nnx.state(network)) for network in networks])
    kernels = [x for x in leaves if x.ndim > 1]
    assert len(kernels) == 2 + 4 and all((x == 0.5).all() for x in kernels)


def test_mlp_without_layers_passes_its_input() -> None:
    np.testing.assert_array_equal(MLP((2,), nnx.Rngs(0))(jnp.float32([[-1, 2]])), [[-1, 2]])


def noise_factor(key: Any, shape: tuple[int, ...]) -> np.ndarray:
    """f(ε) = sign(ε) √|ε| in float64."""
    noise = np.float64(jax.random.normal(key, shape))
    return np.sign(noise) * np.sqrt(np.abs(noise))


def noisy_reference(layer: NoisyLinear, x: np.ndarray, key: Any, num_draws: int) -> np.ndarray:
    """Equations 9 to 11 of Fortunato et al. 2018, row by row with whole matrices of noise."""
    kernel, bias = np.float64(layer.mean_kernel[...]), np.float64(layer.mean_bias[...])
    sigma_kernel, sigma_bias = layer.sigma_kernel[...], layer.sigma_bias[...]
    in_key, out_key = jax.random.split(key)
    noise_in = noise_factor(in_key, (num_draws, kernel.shape[0]))
    noise_out = noise_factor(out_key, (num_draws, kernel.shape[1]))
    rows = []
    for i, row in enumerate(x):
        draw = i % num_draws
        noise = np.outer(noise_in[draw], noise_out[draw])  # [inputs, outputs] (eq. 10)
        weights = kernel + np.float64(sigma_kernel) * noise
        rows.append(row @ weights + bias + np.float64(sigma_bias) * noise_out[draw])
    return np.array(rows)


def other_sigmas(layer: NoisyLinear) -> NoisyLinear:
    """Sigmas that all differ."""
    for i, sigma in enumerate((layer.sigma_kernel, layer.sigma_bias)):
        sigma[...] = jax.random.uniform(jax.random.key(i), sigma[...].shape)
    return layer


@pytest.mark.parametrize(("num_rows", "num_draws"), [(5, 1), (5, 5)])
def test_noisy_linear_is_equations_9_to_11(num_rows: int, num_draws: int) -> None:
    layer = other_sigmas(NoisyLinear(4, 3, nnx.Rngs(0)))
    x = np.resize(np.random.default_rng(0).normal(size=(5, 4)), (num_rows, 4))
    key = jax.random.key(7)
    expected = noisy_reference(layer, x, key, num_draws)
    np.testing.assert_allclose(layer(jnp.float32(x), key, num_draws), expected, rtol=1e-5)
    means = x @ np.asarray(layer.mean_kernel[...]) + np.asarray(layer.mean_bias[...])
    np.testing.assert_allclose(layer(jnp.float32(x)), means, rtol=1e-5)
    assert not np.isclose(expected, means).any()
    same = layer(jnp.ones((num_rows, 4)), key, num_draws)
    assert (len(np.unique(same, axis=0)) == 1) == (num_draws == 1)


def test_noisy_linear_at_first() -> None:
    layer = NoisyLinear(100, 400, nnx.Rngs(0), sigma=0.3)
    for mean in (layer.mean_kernel[...], layer.mean_bias[...]):
        assert -0.1 <= mean.min() < -0.098 and 0.098 < mean.max() <= 0.1
        np.testing.assert_allclose(mean.std(), 0.1 / np.sqrt(3), rtol=0.05)
    for sigma in (layer.sigma_kernel[...], layer.sigma_bias[...]):
        np.testing.assert_allclose(sigma, 0.03, rtol=1e-6)
        assert not sigma.weak_type, "else a run compiles again after its first log point"


def test_noise_has_the_mean_0_and_reaches_the_sigmas() -> None:
    layer = other_sigmas(NoisyLinear(3, 2, nnx.Rngs(0)))
    x = jnp.float32([[1, -2, 0.5]])
    outputs = jax.vmap(lambda key: layer(x, key)[0])(jax.random.split(jax.random.key(0), 40_000))
    np.testing.assert_allclose(outputs.mean(axis=0), layer(x)[0], atol=0.03)
    # Var = E|ε| Σ_i (σ_i x_i)² E|ε| + E|ε| σ_b², and E|ε| = √(2 / π)
    size = np.sqrt(2 / np.pi)
    kernel, bias = (np.asarray(s[...]) for s in (layer.sigma_kernel, layer.sigma_bias))
    variance = size**2 * ((np.asarray(x).T * kernel) ** 2).sum(axis=0) + size * bias**2
    np.testing.assert_allclose(outputs.var(axis=0), variance, rtol=0.05)
    graph, params = nnx.split(layer)
    grads = jax.grad(lambda p: nnx.merge(graph, p)(x, jax.random.key(1)).sum())(params)
    assert all((x != 0).all() for x in jax.tree.leaves(grads)) and len(jax.tree.leaves(grads)) == 4


def test_noisy_mlp() -> None:
    mlp = NoisyMLP((4, 6, 5, 2), nnx.Rngs(0), sigma=0.7)
    x, key = np.random.default_rng(0).normal(size=(5, 4)), jax.random.key(3)
    expected = x
    for i, (layer, layer_key) in enumerate(zip(mlp.layers, jax.random.split(key, 3), strict=True)):
        np.testing.assert_allclose(layer.sigma_bias[...], 0.7 / (4, 6, 5)[i] ** 0.5, rtol=1e-6)
        expected = noisy_reference(layer, expected, layer_key, 5)
        expected = expected if i == 2 else np.maximum(expected, 0)
    np.testing.assert_allclose(mlp(jnp.float32(x), key, 5), expected, rtol=1e-4, atol=1e-5)
    first, second = (mlp.layers[i].mean_kernel[...] for i in (0, 1))
    hidden = np.maximum(x @ np.asarray(first) + np.asarray(mlp.layers[0].mean_bias[...]), 0)
    hidden = hidden @ np.asarray(second) + np.asarray(mlp.layers[1].mean_bias[...])
    last = mlp.layers[2]
    means = np.maximum(hidden, 0) @ np.asarray(last.mean_kernel[...])
    np.testing.assert_allclose(mlp(jnp.float32(x)), means + np.asarray(last.mean_bias[...]), 1e-4)


# inputs, outputs, kernel, stride, height: width is 3 more
CONVOLUTIONS = [
    (3, 5, 8, 4, 39),
    (5, 4, 4, 2, 9),
    (4, 6, 3, 1, 7),
    (2, 3, 1, 1, 4),
    (1, 2, 3, 2, 8),
    (2, 3, 5, 3, 13),
    (2, 3, 2, 2, 2),
]


def assert_near(got: Any, expected: Any) -> None:
    """Compare to 1e-5 of the largest entry."""
    assert got.shape == expected.shape and got.dtype == expected.dtype
    scale = float(np.abs(expected).max())
    assert scale > 0
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5 * scale)


def conv_and_reference(inputs: int, outputs: int, kernel: int, stride: int) -> tuple:
    """Conv and ReLU after nnx.Conv as functions of the same parameters, and these."""
    conv = nnx.eval_shape(lambda: Conv(inputs, outputs, kernel, stride, nnx.Rngs(0)))
    size = (kernel, kernel)
    reference = nnx.eval_shape(
        lambda: nnx.Conv(inputs, outputs, size, stride, padding="VALID", rngs=nnx.Rngs(0))
    )
    graph, plain_graph = nnx.graphdef(conv), nnx.graphdef(reference)
    rng = np.random.default_rng(2)
    shapes = {"kernel": (*size, inputs, outputs), "bias": (outputs,)}
    params = {k: 0.3 * rng.normal(size=shape).astype(np.float32) for k, shape in shapes.items()}
    return (
        lambda params, x: nnx.merge(graph, {"conv": params})(x),
        lambda params, x: jax.nn.relu(nnx.merge(plain_graph, params)(x)),
        params,
    )


@pytest.mark.parametrize(("inputs", "outputs", "kernel", "stride", "height"), CONVOLUTIONS)
def test_conv_is_a_convolution_and_relu(
    inputs: int, outputs: int, kernel: int, stride: int, height: int
) -> None:
    *functions, params = conv_and_reference(inputs, outputs, kernel, stride)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, height, height + 3, inputs)).astype(np.float32)
    rows, columns = ((n - kernel) // stride + 1 for n in x.shape[1:3])
    weight = rng.normal(size=(2, rows, columns, outputs)).astype(np.float32)

    def loss(convolve: Any, params: Any, x: Any) -> Any:
        out = convolve(params, x)
        return (out * weight).sum(), out

    results = []
    for convolve in functions:
        grad = jax.jit(jax.grad(partial(loss, convolve), (0, 1), has_aux=True))
        results.append(jax.tree.leaves(grad(params, x)))
    assert len(results[0]) == 4, "gradients of bias, kernel and input, and the output"
    for got, expected in zip(*results, strict=True):
        assert_near(got, expected)
    assert (results[0][-1] == 0).any()


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
@pytest.mark.parametrize("stride", [1, 2])
def test_conv_scales_bytes(stride: int, backend: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    conv, reference, params = conv_and_reference(2, 3, 2, stride)
    images = np.random.default_rng(0).integers(0, 256, (2, 5, 4, 2), np.uint8)
    expected = jax.jit(reference)(params, np.float32(images / 255))
    assert_near(jax.jit(conv)(params, images), expected)
    assert_near(jax.jit(conv)(params, np.float32(images / 255)), expected)


@pytest.mark.parametrize(("backend", "convolutions"), [("cpu", 0), ("gpu", 3)])
def test_only_a_cpu_uses_patches(backend: str, convolutions: int, monkeypatch: Any) -> None:
    cnn = NatureCNN((36, 36, 3), nnx.Rngs(0))
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    program = str(jax.make_jaxpr(cnn)(jnp.zeros((1, 36, 36, 3), jnp.uint8)))
    assert program.count("conv_general_dilated[") == convolutions


def naive_convolution(x: np.ndarray, kernel: np.ndarray, bias: np.ndarray, stride: int) -> Any:
    k = kernel.shape[0]
    rows, columns = ((n - k) // stride + 1 for n in x.shape[1:3])
    out = np.zeros((len(x), rows, columns, kernel.shape[-1]))
    for i in range(rows):
        for j in range(columns):
            patch = x[:, i * stride : i * stride + k, j * stride : j * stride + k]
            out[:, i, j] = np.tensordot(patch, kernel, axes=3) + bias
    return out


def test_nature_cnn_by_hand() -> None:
    cnn = NatureCNN((44, 36, 3), nnx.Rngs(0))
    images = np.random.default_rng(0).integers(0, 256, (2, 44, 36, 3), np.uint8)
    x = images / 255
    for layer, stride in zip(cnn.layers, (4, 2, 1), strict=True):
        kernel, bias = np.asarray(layer.conv.kernel[...]), np.asarray(layer.conv.bias[...])
        x = np.maximum(naive_convolution(np.float64(x), kernel, bias, stride), 0)
    assert x.shape == (2, 2, 1, 64)
    dense = cnn.dense
    expected = x.reshape(2, -1) @ np.asarray(dense.kernel[...]) + np.asarray(dense.bias[...])
    np.testing.assert_allclose(forward(cnn, images), np.maximum(expected, 0), rtol=1e-4, atol=1e-5)


def test_encoder_without_the_dense_layer(plain_convolutions: None) -> None:
    space = spaces.Dict(image=image_space(44, 36, 3), speed=spaces.Box(-9, 9, (2,)))
    encoder = Encoder(space, nnx.Rngs(0), cnn_dense=False)
    cnn = NatureCNN((44, 36, 3), nnx.Rngs(1))
    part = next(cnn for cnn in encoder.cnns if cnn)
    assert part.dense is None and encoder.num_features == 2 * 1 * 64 + 2
    for layer, whole in zip(part.layers, cnn.layers, strict=True):
        layer.conv.kernel[...] = whole.conv.kernel[...]
    image = np.random.default_rng(0).integers(0, 256, (2, 44, 36, 3), np.uint8)
    obs = {"image": jnp.asarray(image), "speed": jnp.float32([[1, 2], [3, 4]])}
    features = np.asarray(forward(encoder, obs))
    np.testing.assert_array_equal(features[:, 128:], [[1, 2], [3, 4]])
    dense = features[:, :128] @ np.asarray(cnn.dense.kernel[...])
    np.testing.assert_allclose(forward(cnn, image), np.maximum(dense, 0), rtol=1e-4, atol=1e-5)


def plain_nature_cnn(params: Any, images: Any) -> Any:
    """The same from jax.lax's own convolutions, [B, H, W, C] -> [B, 512]."""
    x = images / jnp.float32(255)
    for i, stride in enumerate((4, 2, 1)):
        conv = params["layers"][i]["conv"]
        strides, order = (stride, stride), ("NHWC", "HWIO", "NHWC")
        x = lax.conv_general_dilated(x, conv["kernel"], strides, "VALID", dimension_numbers=order)
        x = jax.nn.relu(x + conv["bias"])
    dense = params["dense"]
    return jax.nn.relu(x.reshape(len(x), -1) @ dense["kernel"] + dense["bias"])


WEIGHT = np.random.default_rng(1).normal(size=(32, 512)).astype(np.float32)


def nature_cnn(shape: tuple) -> tuple:
    """The network as a function of its parameters, and these with biases."""
    cnn = NatureCNN(shape, nnx.Rngs(0))
    for layer in cnn.layers:
        layer.conv.bias[...] = jnp.linspace(-0.2, 0.2, len(layer.conv.bias[...]))
    graph, params = nnx.split(cnn)
    return lambda params, x: nnx.merge(graph, params)(x), nnx.to_pure_dict(params)


def grads_and_features(apply: Any, params: Any, images: Any) -> Any:
    def loss(params: Any) -> Any:
        features = apply(params, images)
        return (features * WEIGHT[: len(images)]).sum(), features

    return jax.grad(loss, has_aux=True)(params)


@pytest.fixture(scope="module")
def plain_results() -> Any:
    """Gradients and features of one image at a time, so that one program serves all batches."""
    _, params = nature_cnn((36, 40, 3))
    images = np.random.default_rng(0).integers(0, 256, (32, 36, 40, 3), np.uint8)

    def of_one(image: Any, weight: Any) -> Any:
        def loss(params: Any) -> Any:
            features = plain_nature_cnn(params, image[None])[0]
            return (features * weight).sum(), features

        return jax.grad(loss, has_aux=True)(params)

    grads, features = jax.jit(lambda *rows: lax.map(lambda row: of_one(*row), rows))(images, WEIGHT)
    return images, jax.tree.map(np.asarray, grads), np.asarray(features)


# Up to 8 images go at once, more of them by chunks of 8.
@pytest.mark.parametrize(
    ("batch", "channels_first"),
    [(1, False), (7, True), (8, False), (9, True), (32, False)],
)
def test_nature_cnn_by_chunks(batch: int, channels_first: bool, plain_results: Any) -> None:
    images, grads, features = plain_results
    images = np.moveaxis(images, -1, 1) if channels_first else images
    apply, params = nature_cnn(images.shape[1:])
    got = jax.jit(partial(grads_and_features, apply))(params, images[:batch])
    assert_near(got[1], features[:batch])
    expected = jax.tree.map(lambda x: x[:batch].sum(axis=0), grads)
    jax.tree.map(assert_near, got[0], expected)


def test_nature_cnn_inside_a_loop(plain_results: Any) -> None:
    images, grads, _ = plain_results
    apply, params = nature_cnn(images.shape[1:])
    rows = np.random.default_rng(0).integers(0, 32, (3, 9))

    def loss(params: Any, images: Any, weight: Any) -> Any:
        return (apply(params, images) * weight).sum()

    def learn(i: Any, sums: Any) -> Any:
        row = jnp.asarray(rows)[i]
        minibatch = jnp.asarray(images)[row], jnp.asarray(WEIGHT)[row]
        return jax.tree.map(jnp.add, sums, jax.grad(loss)(params, *minibatch))

    zeros = jax.tree.map(np.zeros_like, params)
    got = jax.jit(lambda: lax.fori_loop(0, 3, learn, zeros))()
    expected = jax.tree.map(lambda x: x[rows.ravel()].sum(axis=0), grads)
    jax.tree.map(assert_near, got, expected)


def test_nature_cnn_with_layer_norm_is_that_of_flax() -> None:
    """In value and gradient: nnx.Conv, nnx.LayerNorm and ReLU, on a CPU too."""
    cnn = NatureCNN((36, 40, 3), nnx.Rngs(0), layer_norm=True)
    graph, params = nnx.split(cnn)
    images = np.random.default_rng(0).integers(0, 256, (9, 36, 40, 3), np.uint8)

    def plain(cnn: Any, images: Any) -> Any:
        x = images / jnp.float32(255)
        for layer in cnn.layers:
            x = jax.nn.relu(layer.norm(layer.conv(x)))
        return jax.nn.relu(cnn.norm(cnn.dense(x.reshape(len(x), -1))))

    def apply(function: Any, params: Any, images: Any) -> Any:
        return function(nnx.merge(graph, params), images)

    got, expected = (
        jax.jit(partial(grads_and_features, partial(apply, f)))(params, images)
        for f in (CNN.__call__, plain)
    )
    assert (expected[1] == 0).any() and (expected[1] > 0).any()
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        scale = float(np.abs(other).max())
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4 * scale)


def test_atari_shape() -> None:
    cnn = nnx.eval_shape(lambda: NatureCNN((4, 84, 84), nnx.Rngs(0)))
    shapes = [layer.conv.kernel.shape for layer in cnn.layers]
    assert shapes == [(8, 8, 4, 32), (4, 4, 32, 64), (3, 3, 64, 64)]
    assert cnn.dense.kernel.shape == (3136, 512)
    features = nnx.eval_shape(lambda cnn, x: cnn(x), cnn, jnp.zeros((2, 4, 84, 84), jnp.uint8))
    assert features.shape == (2, 512)


def network_and_reference(num_inputs: int, num_actions: int, num_outputs: int) -> tuple:
    """A Network and three plain nnx.Linear as functions of the same parameters, and these."""
    space, hidden = spaces.Box(-9, 9, (num_inputs,)), (24, 16)
    network = Network(space, num_actions, num_outputs, nnx.Rngs(0), hidden)
    graph, params = nnx.split(network)
    params = nnx.to_pure_dict(params)
    for i, name in enumerate(("first", "second", "head")):
        params[name]["bias"] = jnp.linspace(-0.3, 0.2 + i, len(params[name]["bias"]))
    layers = {name: nnx.graphdef(getattr(network, name)) for name in params}

    def reference(params: Any, *inputs: Any) -> Any:
        x = jnp.concatenate(inputs, axis=-1)
        for name in ("first", "second"):
            x = jax.nn.relu(nnx.merge(layers[name], params[name])(x))
        return nnx.merge(layers["head"], params["head"])(x)

    return lambda params, *inputs: nnx.merge(graph, params)(*inputs), reference, params


NETWORKS = {  # inputs, actions, outputs
    "critic": (3, 2, 1),
    "policy": (3, 0, 4),
    "as many inputs as few": (FEW - 2, 2, 1),
    "more": (FEW - 1, 2, 1),
    "many outputs": (5, 0, FEW + 1),
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("way", ["vmap", "fori_loop"])
def test_network_is_three_linear_layers(name: str, way: str) -> None:
    num_inputs, num_actions, num_outputs = NETWORKS[name]
    network, reference, params = network_and_reference(*NETWORKS[name])
    rng = np.random.default_rng(0)
    shapes = [(4, 7, num_inputs), (4, 7, num_actions)][: 2 if num_actions else 1]
    inputs = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    weight = rng.normal(size=(4, 7, num_outputs)).astype(np.float32)

    def learn(apply: Any, params: Any, weight: Any, *inputs: Any) -> Any:
        def loss(params: Any, *inputs: Any) -> Any:
            outputs = apply(params, *inputs)
            return (weight * outputs).sum(), outputs

        return jax.grad(loss, tuple(range(1 + len(inputs))), has_aux=True)(params, *inputs)

    def everything(apply: Any) -> Any:
        of_rows = partial(learn, apply)
        if way == "vmap":  # parameters too, as with many seeds
            many = jax.tree.map(lambda x: jnp.stack([x, 2 * x, -x, x + 1]), params)
            return jax.vmap(of_rows)(many, weight, *inputs)

        def add(i: Any, sums: Any) -> Any:
            rows = [jnp.asarray(x)[i] for x in (weight, *inputs)]
            return jax.tree.map(jnp.add, sums, of_rows(params, *rows))

        zeros = jax.eval_shape(of_rows, params, weight[0], *(x[0] for x in inputs))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape), zeros)
        return lax.fori_loop(0, 4, add, zeros)

    got, expected = (jax.jit(partial(everything, apply))() for apply in (network, reference))
    jax.tree.map(assert_near, got, expected)


def test_network_of_images_and_sizes() -> None:
    network = nnx.eval_shape(lambda: Network(image_space(4, 84, 84), 0, 6, nnx.Rngs(0), (256, 256)))
    assert network.first.kernel.shape == (512, 256) and network.second.kernel.shape == (256, 256)
    assert network.head.kernel.shape == (256, 6)
    outputs = nnx.eval_shape(lambda net, x: net(x), network, jnp.zeros((2, 4, 84, 84), jnp.uint8))
    assert outputs.shape == (2, 6)
