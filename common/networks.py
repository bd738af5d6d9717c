"""Networks that papers take for granted: encoders for any observation space, and MLPs."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from gymnasium import spaces
from jax import Array, lax

SMALLEST_CNN_IMAGE = 36
FLAX_DEFAULT = nnx.initializers.lecun_normal()

Initializer = Callable[..., Array]


def is_image(space: spaces.Space) -> bool:
    """Return whether a space is a uint8 image that the Nature CNN can take."""
    if not isinstance(space, spaces.Box) or space.dtype != np.uint8 or len(space.shape) != 3:
        return False
    return min(_image_shape(space.shape)[1:]) >= SMALLEST_CNN_IMAGE


def _image_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """[C, H, W] or [H, W, C] -> (C, H, W); the smaller of the outer axes is the channels."""
    return shape if shape[0] < shape[-1] else (shape[2], *shape[:2])


class Encoder(nnx.Module):
    """Features of an observation from any supported space.

    Vectors pass flat and unchanged, uint8 arrays are scaled to [0, 1], discrete values become
    one-hot vectors, images go through the Nature CNN, and the parts of Dict and Tuple spaces are
    concatenated.
    """

    def __init__(
        self, space: spaces.Space, rngs: nnx.Rngs, kernel_init: Initializer = FLAX_DEFAULT
    ) -> None:
        self.space = space
        parts = _parts(space)
        self.has_cnn = any(is_image(p) for p in parts)
        self.cnns = nnx.List(
            [NatureCNN(p.shape, rngs, kernel_init) if is_image(p) else None for p in parts]
        )
        self.num_features = sum(
            c.num_features if c else spaces.flatdim(p)
            for c, p in zip(self.cnns, parts, strict=True)
        )

    def __call__(self, obs: Any) -> Array:
        """[B, *obs] -> [B, num_features] float32."""
        parts = zip(_values(self.space, obs), _parts(self.space), self.cnns, strict=True)
        features = [cnn(x) if cnn else _flat(x, space) for x, space, cnn in parts]
        return features[0] if len(features) == 1 else jnp.concatenate(features, axis=-1)


def _parts(space: spaces.Space) -> list[spaces.Space]:
    if isinstance(space, spaces.Dict):
        return [part for s in space.spaces.values() for part in _parts(s)]
    if isinstance(space, spaces.Tuple):
        return [part for s in space.spaces for part in _parts(s)]
    return [space]


def _values(space: spaces.Space, obs: Any) -> list[Array]:
    if isinstance(space, spaces.Dict):
        return [x for key, s in space.spaces.items() for x in _values(s, obs[key])]
    if isinstance(space, spaces.Tuple):
        return [x for key, s in enumerate(space.spaces) for x in _values(s, obs[key])]
    return [obs]


def _flat(x: Array, space: Any) -> Array:
    """[B, *obs] -> [B, features] float32."""
    if isinstance(space, spaces.Discrete):
        return jax.nn.one_hot(x - int(space.start), int(space.n))
    if isinstance(space, spaces.MultiDiscrete):
        sizes, starts = space.nvec.ravel(), space.start.ravel()
        x = x.reshape(x.shape[0], -1)  # [B, parts]
        one_hots = [jax.nn.one_hot(x[:, i] - int(starts[i]), int(n)) for i, n in enumerate(sizes)]
        return jnp.concatenate(one_hots, axis=-1)
    scale = 1 / 255 if x.dtype == jnp.uint8 and space.high.max() > 1 else 1.0
    return x.reshape(x.shape[0], -1).astype(jnp.float32) * scale


class MLP(nnx.Module):
    """Linear layers with an activation, ReLU unless told otherwise, after each."""

    def __init__(
        self,
        sizes: Sequence[int],
        rngs: nnx.Rngs,
        activation: Callable[[Array], Array] = jax.nn.relu,
        kernel_init: Initializer = FLAX_DEFAULT,
    ) -> None:
        self.layers = nnx.List(
            [
                nnx.Linear(*pair, kernel_init=kernel_init, rngs=rngs)
                for pair in itertools.pairwise(sizes)
            ]
        )
        self.activation = activation
        self.num_features = sizes[-1]

    def __call__(self, x: Array) -> Array:
        """[B, sizes[0]] -> [B, sizes[-1]]."""
        for layer in self.layers:
            x = self.activation(layer(x))
        return x


class Network(nnx.Module):
    """An encoder, two hidden layers with ReLU and a linear head: a policy, or a critic of actions.

    Parameters and results are those of three `nnx.Linear`; on a CPU their gradients take the way
    that is fastest there.
    """

    def __init__(
        self,
        obs_space: spaces.Space,
        num_actions: int,
        num_outputs: int,
        rngs: nnx.Rngs,
        hidden: tuple[int, int] = (256, 256),
    ) -> None:
        self.encoder = Encoder(obs_space, rngs)
        num_inputs = self.encoder.num_features + num_actions
        self.first = nnx.Linear(num_inputs, hidden[0], rngs=rngs)
        self.second = nnx.Linear(*hidden, rngs=rngs)
        self.head = nnx.Linear(hidden[1], num_outputs, rngs=rngs)

    def __call__(self, obs: Any, *action: Array) -> Array:
        """[B, *obs], and actions [B, num_actions] if there are any -> [B, num_outputs]."""
        x = jnp.concatenate([self.encoder(obs), *action], axis=-1)
        if jax.default_backend() != "cpu":
            return self.head(jax.nn.relu(self.second(jax.nn.relu(self.first(x)))))
        layers = self.first, self.second, self.head
        kernels = [layer.kernel[...] for layer in layers]
        biases = [jnp.asarray(layer.bias) for layer in layers]
        x = jax.nn.relu(_relu_product(x, kernels[0], biases[0], kernels[1]) + biases[1])
        # The fast form of a narrow kernel's gradient transposes the product.
        product = _matmul if kernels[2].shape[1] <= FEW else jnp.matmul
        return product(x, kernels[2]) + biases[2]


class RecurrentCore(nnx.Module):
    """An LSTM (Hochreiter and Schmidhuber 1997) or GRU (Cho et al. 2014) over sequences."""

    def __init__(self, kind: str, num_features: int, size: int, rngs: nnx.Rngs) -> None:
        cell = {"lstm": nnx.OptimizedLSTMCell, "gru": nnx.GRUCell}[kind]
        self.cell = cell(num_features, size, rngs=rngs)

    def __call__(self, state: Any, features: Array, valid: Array) -> tuple[Array, Any]:
        """Unroll a state [B, ...] over features [B, T, F] to outputs [B, T, size] and a new state.

        The row after an end is not `valid` [B, T]: it is the last to see the old episode, and the
        state behind it is zero.
        """

        def step(state: Any, row: tuple[Array, Array]) -> tuple[Any, Array]:
            features, valid = row
            state, output = self.cell(state, features)
            return jax.tree.map(lambda x: valid[:, None] * x, state), output

        rows = features.swapaxes(0, 1), valid.swapaxes(0, 1)  # [T, B, ...]
        state, output = lax.scan(step, state, rows)  # [T, B, size]
        return output.swapaxes(0, 1), state


def initial_core(kind: str, size: int, num_envs: int) -> Any:
    """Return the state of a `RecurrentCore` at the start of an episode: [N, size], two for LSTM."""
    zeros = jnp.zeros((num_envs, size))
    return (zeros, zeros.copy()) if kind == "lstm" else zeros


class NatureCNN(nnx.Module):
    """The convolutional encoder of Mnih et al. 2015 (Methods, model architecture).

    Takes uint8 images as [B, C, H, W] or [B, H, W, C]: the smallest axis of the two outer ones is
    taken for the channels.
    """

    def __init__(
        self,
        shape: tuple[int, ...] | None,
        rngs: nnx.Rngs,
        kernel_init: Initializer = FLAX_DEFAULT,
    ) -> None:
        assert shape is not None
        self.channels_first = shape[0] < shape[-1]
        channels, height, width = _image_shape(shape)
        specs = [(channels, 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1)]
        self.layers = nnx.List([Conv(*spec, rngs, kernel_init) for spec in specs])
        for _, _, kernel, stride in specs:
            height, width = ((n - kernel) // stride + 1 for n in (height, width))
        self.dense = nnx.Linear(height * width * 64, 512, kernel_init=kernel_init, rngs=rngs)
        self.num_features = 512

    def __call__(self, images: Array) -> Array:
        """[B, C, H, W] or [B, H, W, C] uint8 -> [B, 512]."""
        if jax.default_backend() != "cpu":
            x = self._convolve(images)  # [B, features]
            return jax.nn.relu(self.dense(x))
        x = _by_chunks(self._convolve, images)  # [B, features]
        kernel, bias = jnp.asarray(self.dense.kernel), jnp.asarray(self.dense.bias)
        return jax.nn.relu(_matmul(x, kernel) + bias)

    def _convolve(self, images: Array) -> Array:
        if self.channels_first:
            images = jnp.moveaxis(images, 1, -1)  # [B, H, W, C]
        x = images
        for layer in self.layers:
            x = layer(x)
        return x.reshape(x.shape[0], -1)


class Conv(nnx.Module):
    """Valid convolution and ReLU; bytes are scaled to [0, 1] first.

    On a CPU it is written as patches and matrix products, because XLA's convolution gradients are
    15 to 20 times slower inside loops there than outside. Parameters and results are those of
    `nnx.Conv`.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int,
        stride: int,
        rngs: nnx.Rngs,
        kernel_init: Initializer = FLAX_DEFAULT,
    ) -> None:
        self.conv = nnx.Conv(
            inputs,
            outputs,
            (kernel, kernel),
            (stride, stride),
            padding="VALID",
            kernel_init=kernel_init,
            rngs=rngs,
        )
        self.kernel, self.stride = kernel, stride

    def __call__(self, x: Array) -> Array:
        """[B, H, W, inputs] -> [B, H', W', outputs]."""
        if jax.default_backend() != "cpu":
            return jax.nn.relu(self.conv(_as_float(x)))
        size, stride = self.kernel, self.stride
        kernel, bias = jnp.asarray(self.conv.kernel), jnp.asarray(self.conv.bias)
        if stride > 1 and size % stride == 0:
            x, kernel = _space_to_depth(x, kernel, stride)
            size, stride = size // stride, 1
        flat = kernel.reshape(-1, kernel.shape[-1])  # [size * size * inputs, outputs]
        return _conv_relu(_as_float(x), flat, bias, size, stride)


CHUNK = 8


def _by_chunks(function: Callable[[Array], Array], x: Array) -> Array:
    """Apply a function to a few rows at a time, so that what lies between fits into the cache."""
    rows = len(x)
    if rows <= CHUNK:
        return function(x)
    padding = [(0, -rows % CHUNK)] + [(0, 0)] * (x.ndim - 1)
    chunks = jnp.pad(x, padding).reshape(-1, CHUNK, *x.shape[1:])
    result = lax.map(function, chunks)  # [chunks, CHUNK, ...]
    return result.reshape(-1, *result.shape[2:])[:rows]


def _as_float(x: Array) -> Array:
    return x.astype(jnp.float32) / 255 if x.dtype == jnp.uint8 else x


def _space_to_depth(x: Array, kernel: Array, stride: int) -> tuple[Array, Array]:
    """Turn blocks of stride x stride pixels into channels: a convolution of stride 1 is left.

    x [B, H, W, C], kernel [K, K, C, O] -> [B, H / s, W / s, s s C], [K / s, K / s, s s C, O]
    """
    s, size = stride, kernel.shape[0] // stride
    rows, columns = (n // s for n in x.shape[1:3])
    x = x[:, : rows * s, : columns * s].reshape(len(x), rows, s, columns, -1)
    x = jnp.concatenate([x[:, :, i] for i in range(s)], axis=-1)  # [B, H / s, W / s, s s C]
    outputs = kernel.shape[-1]
    kernel = kernel.reshape(size, s, size, -1, outputs)  # [K / s, s, K / s, s C, O]
    kernel = jnp.moveaxis(kernel, 1, 2).reshape(size, size, -1, outputs)
    # Without the barrier XLA would make x again for each patch that reads it.
    return lax.optimization_barrier(x), kernel


def _patches(x: Array, size: int, stride: int) -> Array:
    """[B, H, W, C] -> [B, H', W', size * size * C]."""
    rows, columns = ((n - size) // stride * stride + 1 for n in x.shape[1:3])
    slices = [
        x[:, i : i + rows : stride, j : j + columns : stride]
        for i in range(size)
        for j in range(size)
    ]
    return jnp.concatenate(slices, axis=-1)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _conv_relu(x: Array, kernel: Array, bias: Array, size: int, stride: int) -> Array:
    """Convolution of [B, H, W, C] with [size * size * C, O], and ReLU."""
    return jax.nn.relu(_patches(x, size, stride) @ kernel + bias)


def _conv_relu_forward(
    x: Array, kernel: Array, bias: Array, size: int, stride: int
) -> tuple[Array, tuple[Array, Array, Array]]:
    y = _conv_relu(x, kernel, bias, size, stride)
    return y, (x, kernel, y)


def _conv_relu_backward(
    size: int, stride: int, saved: tuple[Array, Array, Array], grad: Array
) -> tuple[Array, Array, Array]:
    """Make the patches again rather than keep them: they are four to nine times as large as x."""
    x, kernel, y = saved
    grad = lax.optimization_barrier(jnp.where(y > 0, grad, 0.0))
    patches, fold = jax.vjp(lambda x: _patches(x, size, stride), x)
    flat = patches.reshape(-1, patches.shape[-1])
    grad_patches, grad_kernel = _matmul_backward((flat, kernel), grad.reshape(len(flat), -1))
    grad_patches = lax.optimization_barrier(grad_patches).reshape(patches.shape)
    return fold(grad_patches)[0], grad_kernel, grad.sum((0, 1, 2))


_conv_relu.defvjp(_conv_relu_forward, _conv_relu_backward)


@jax.custom_vjp
def _matmul(x: Array, kernel: Array) -> Array:
    """[rows, inputs] @ [inputs, outputs] with the fast form of its gradient."""
    return x @ kernel


def _matmul_backward(saved: tuple[Array, Array], grad: Array) -> tuple[Array, Array]:
    """Up to three times as fast as x.T @ grad, which XLA makes of it without the barrier."""
    x, kernel = saved
    return grad @ kernel.T, lax.optimization_barrier(grad.T @ x).T


_matmul.defvjp(lambda x, kernel: (x @ kernel, (x, kernel)), _matmul_backward)


# The gradient of a product x @ kernel needs x.T @ grad, the one form that is slow on a CPU: 205 us
# against 145 for 256 x 256 x 256. To transpose x takes 56 us.
FEW = 64


@jax.custom_vjp
def _relu_product(x: Array, kernel: Array, bias: Array, next_kernel: Array) -> Array:
    """relu(x @ kernel + bias) @ next_kernel, for [rows, inputs], [inputs, hidden], ..."""
    return jax.nn.relu(x @ kernel + bias) @ next_kernel


def _relu_product_forward(
    x: Array, kernel: Array, bias: Array, next_kernel: Array
) -> tuple[Array, tuple[Array, ...]]:
    hidden = jax.nn.relu(x @ kernel + bias)
    return hidden @ next_kernel, (x, kernel, bias, next_kernel, hidden)


def _relu_product_backward(saved: tuple[Array, ...], grad: Array) -> tuple[Array, ...]:
    """Of few inputs, the transposed hidden layer is made again rather than transposed."""
    x, kernel, bias, next_kernel, hidden = saved
    transposed = hidden.T
    if kernel.shape[0] <= FEW:
        small = lax.optimization_barrier((kernel.T, x.T))
        transposed = jax.nn.relu(small[0] @ small[1] + bias[:, None])  # [hidden, rows]
    grad_hidden = jnp.where(hidden > 0, grad @ next_kernel.T, 0.0)
    return grad_hidden @ kernel.T, x.T @ grad_hidden, grad_hidden.sum(0), transposed @ grad


_relu_product.defvjp(_relu_product_forward, _relu_product_backward)
