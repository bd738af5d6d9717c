"""Networks that papers take for granted: encoders for any observation space, and MLPs."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from gymnasium import spaces
from jax import Array, lax

from common import cpu_gradients
from common.action_masks import without_mask

SMALLEST_CNN_IMAGE = 36
SMALLEST_GRID, LARGEST_GRID = 8, 16
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


def is_grid(space: spaces.Space) -> bool:
    """Return whether a space is a small image [H, W, C] of numbers from 0 to 1, as in MinAtar."""
    if not isinstance(space, spaces.Box) or len(space.shape) != 3:
        return False
    *size, channels = space.shape
    is_small = min(size) >= SMALLEST_GRID and max(size) <= LARGEST_GRID and channels < min(size)
    return is_small and space.low.min() >= 0 and space.high.max() <= 1


class Encoder(nnx.Module):
    """Features of an observation from any supported space.

    Vectors pass flat and unchanged, uint8 arrays are scaled to [0, 1], discrete values become
    one-hot vectors, and the parts of Dict and Tuple spaces are concatenated. Images go through the
    Nature CNN, grids of MinAtar through the CNN of its paper, one layer of 16 3 x 3 kernels and 128
    units (Young and Tian 2019, https://arxiv.org/abs/1903.03176). The part `action_mask` is left
    out: it is no input, but masks the output.

    Args:
        space: of the observations.
        rngs: for the parameters.
        kernel_init: of the CNNs' kernels.
        cnn_dense: whether the CNNs end with their dense layer, or before it.
        layer_norm: whether each layer of the CNNs is normalised before its ReLU.

    Attributes:
        num_features: of the result.
        has_cnn: whether any part goes through a CNN.
        num_units: of the largest dense layer that a CNN ends with, or would end with.
    """

    def __init__(
        self,
        space: spaces.Space,
        rngs: nnx.Rngs,
        kernel_init: Initializer = FLAX_DEFAULT,
        cnn_dense: bool = True,
        layer_norm: bool = False,
    ) -> None:
        self.space = without_mask(space)
        parts = _parts(self.space)
        options = rngs, kernel_init, cnn_dense, layer_norm
        self.cnns = nnx.List([_cnn(part, *options) for part in parts])
        self.has_cnn = any(self.cnns)
        self.num_units = max((cnn.num_units for cnn in self.cnns if cnn), default=0)
        self.num_features = sum(
            c.num_features if c else spaces.flatdim(p)
            for c, p in zip(self.cnns, parts, strict=True)
        )

    def __call__(self, obs: Any) -> Array:
        """[B, *obs] -> [B, num_features] float32."""
        parts = zip(_values(self.space, obs), _parts(self.space), self.cnns, strict=True)
        features = [cnn(x) if cnn else _flat(x, space) for x, space, cnn in parts]
        return features[0] if len(features) == 1 else jnp.concatenate(features, axis=-1)


def _cnn(space: Any, *options: Any) -> "CNN | None":
    if is_image(space):
        return NatureCNN(space.shape, *options)
    return MinAtarCNN(space.shape, *options) if is_grid(space) else None


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
    is_byte = isinstance(space, spaces.Box) and x.dtype == jnp.uint8 and space.high.max() > 1
    scale = 1 / 255 if is_byte else 1.0
    return x.reshape(x.shape[0], -1).astype(jnp.float32) * scale


class MLP(nnx.Module):
    """Linear layers with an activation, ReLU unless told otherwise, after each.

    With `layer_norm`, LayerNorm (Ba et al. 2016) comes between a layer and its activation.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        rngs: nnx.Rngs,
        activation: Callable[[Array], Array] = jax.nn.relu,
        kernel_init: Initializer = FLAX_DEFAULT,
        layer_norm: bool = False,
    ) -> None:
        self.layers = nnx.List(
            [
                nnx.Linear(*pair, kernel_init=kernel_init, rngs=rngs)
                for pair in itertools.pairwise(sizes)
            ]
        )
        self.norms = nnx.List(
            [nnx.LayerNorm(size, rngs=rngs) if layer_norm else None for size in sizes[1:]]
        )
        self.activation = activation
        self.num_features = sizes[-1]

    def __call__(self, x: Array) -> Array:
        """[B, sizes[0]] -> [B, sizes[-1]]."""
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = self.activation(_normed(norm, layer(x)))
        return x


class NoisyLinear(nnx.Module):
    """A linear layer whose weights carry learned noise (Fortunato et al. 2018, section 3).

        y = (μ_w + σ_w ⊙ f(ε_out) f(ε_in)ᵀ) x + μ_b + σ_b ⊙ f(ε_out),  f(x) = sign(x) √|x|

    This is the factorised form (eqs. 10 and 11), https://arxiv.org/abs/1706.10295.
    """

    def __init__(self, inputs: int, outputs: int, rngs: nnx.Rngs, sigma: float = 0.5) -> None:
        bound = inputs**-0.5

        def uniform(*shape: int) -> Array:
            return jax.random.uniform(rngs.params(), shape, minval=-bound, maxval=bound)

        self.mean_kernel = nnx.Param(uniform(inputs, outputs))
        self.mean_bias = nnx.Param(uniform(outputs))
        self.sigma_kernel = nnx.Param(jnp.full((inputs, outputs), sigma * bound, jnp.float32))
        self.sigma_bias = nnx.Param(jnp.full(outputs, sigma * bound, jnp.float32))

    def __call__(self, x: Array, key: Array | None = None, num_draws: int = 1) -> Array:
        """[B, inputs] -> [B, outputs], without noise where there is no key.

        Args:
            x: inputs.
            key: of the noise.
            num_draws: 1 for noise that all rows share, B for noise of each row.
        """
        kernel, bias = self.mean_kernel[...], self.mean_bias[...]
        if key is None:
            return x @ kernel + bias  # [B, outputs]
        in_key, out_key = jax.random.split(key)
        noise_in = _signed_root(jax.random.normal(in_key, (num_draws, x.shape[1])))
        noise_out = _signed_root(jax.random.normal(out_key, (num_draws, kernel.shape[1])))
        bias += self.sigma_bias[...] * noise_out  # [num_draws, outputs]
        if num_draws == 1:
            return x @ (kernel + self.sigma_kernel[...] * noise_in.T * noise_out) + bias
        # (σ ⊙ f(ε_out) f(ε_in)ᵀ) x is also f(ε_out) ⊙ σ (f(ε_in) ⊙ x): no kernel for each row.
        return x @ kernel + noise_out * ((x * noise_in) @ self.sigma_kernel[...]) + bias


class NoisyMLP(nnx.Module):
    """Noisy linear layers with ReLU between them."""

    def __init__(self, sizes: Sequence[int], rngs: nnx.Rngs, sigma: float = 0.5) -> None:
        pairs = itertools.pairwise(sizes)
        self.layers = nnx.List([NoisyLinear(*pair, rngs, sigma) for pair in pairs])

    def __call__(self, x: Array, key: Array | None = None, num_draws: int = 1) -> Array:
        """[B, sizes[0]] -> [B, sizes[-1]]; arguments as of `NoisyLinear`."""
        num = len(self.layers)
        keys = [None] * num if key is None else jax.random.split(key, num)
        for layer, layer_key in zip(self.layers[:-1], keys[:-1], strict=True):
            x = jax.nn.relu(layer(x, layer_key, num_draws))
        return self.layers[-1](x, keys[-1], num_draws)


def _signed_root(x: Array) -> Array:
    return jnp.sign(x) * jnp.sqrt(jnp.abs(x))


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
        hidden: tuple[int, int],
    ) -> None:
        self.encoder = Encoder(obs_space, rngs)
        num_inputs = self.encoder.num_features + num_actions
        self.first = nnx.Linear(num_inputs, hidden[0], rngs=rngs)
        self.second = nnx.Linear(*hidden, rngs=rngs)
        self.head = nnx.Linear(hidden[1], num_outputs, rngs=rngs)

    def __call__(self, obs: Any, *action: Array) -> Array:
        """[B, *obs], and actions [B, num_actions] if there are any -> [B, num_outputs]."""
        x = jnp.concatenate([self.encoder(obs), *action], axis=-1)
        if cpu_gradients.are_for(x):
            layers = self.first, self.second, self.head
            kernels = [layer.kernel[...] for layer in layers]
            biases = [jnp.asarray(layer.bias) for layer in layers]
            return cpu_gradients.mlp(x, kernels, biases)
        return self.head(jax.nn.relu(self.second(jax.nn.relu(self.first(x)))))


class Memory(NamedTuple):
    """What a recurrent policy acts on besides the observation."""

    core: Any  # [N, ...] recurrent state, () for a policy without one
    valid: Array  # [N] False on the row after an episode's end


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
    """Return the state of a `RecurrentCore` at the start of an episode: [N, size], two for LSTM.

    It is () for the kind "none".
    """
    if kind == "none":
        return ()
    zeros = jnp.zeros((num_envs, size))
    return (zeros, zeros.copy()) if kind == "lstm" else zeros


class CNN(nnx.Module):
    """Convolutions, and a dense layer with ReLU unless told otherwise.

    Takes images as [B, C, H, W] or [B, H, W, C]: the smaller of the two outer axes is taken for the
    channels.

    Args:
        shape: of an image.
        rngs: for the parameters.
        kernel_init: of the kernels.
        dense: without it, the result is that of the last convolution.
        layer_norm: whether LayerNorm comes between each layer and its ReLU, over the channels of
            each pixel.
        layers: outputs, kernel and stride of each convolution.
        num_units: of the dense layer.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        rngs: nnx.Rngs,
        kernel_init: Initializer = FLAX_DEFAULT,
        dense: bool = True,
        layer_norm: bool = False,
        *,
        layers: Sequence[tuple[int, int, int]],
        num_units: int,
    ) -> None:
        self.channels_first = shape[0] < shape[-1]
        self.num_units = num_units
        inputs, height, width = _image_shape(shape)
        convolutions = []
        for outputs, kernel, stride in layers:
            spec = inputs, outputs, kernel, stride
            convolutions.append(Conv(*spec, rngs, kernel_init, layer_norm))
            height, width = ((n - kernel) // stride + 1 for n in (height, width))
            inputs = outputs
        self.layers = nnx.List(convolutions)
        size = height * width * inputs
        self.num_features = num_units if dense else size
        linear = partial(nnx.Linear, kernel_init=kernel_init, rngs=rngs)
        self.dense = linear(size, num_units) if dense else None
        self.norm = nnx.LayerNorm(num_units, rngs=rngs) if dense and layer_norm else None

    def __call__(self, images: Array) -> Array:
        """[B, C, H, W] or [B, H, W, C] -> [B, num_features]."""
        on_cpu = cpu_gradients.are_for(images)
        x = cpu_gradients.by_chunks(self._convolve, images) if on_cpu else self._convolve(images)
        if self.dense is None:
            return x
        if on_cpu and len(x) > self.num_units:  # a fast form of the gradient, for many rows alone
            product = cpu_gradients.matmul(x, jnp.asarray(self.dense.kernel))  # [B, units]
            x = product + jnp.asarray(self.dense.bias)
        else:
            x = self.dense(x)
        return jax.nn.relu(_normed(self.norm, x))

    def _convolve(self, images: Array) -> Array:
        if self.channels_first:
            images = jnp.moveaxis(images, 1, -1)  # [B, H, W, C]
        x = images
        for layer in self.layers:
            x = layer(x)
        return x.reshape(x.shape[0], -1)


# Mnih et al. 2015, Methods, model architecture; Young and Tian 2019, section 3.
NatureCNN = partial(CNN, layers=((32, 8, 4), (64, 4, 2), (64, 3, 1)), num_units=512)
MinAtarCNN = partial(CNN, layers=((16, 3, 1),), num_units=128)


class Conv(nnx.Module):
    """Valid convolution, LayerNorm if asked for, and ReLU; bytes are scaled to [0, 1] first.

    Parameters and results are those of `nnx.Conv` and `nnx.LayerNorm`, on a CPU too.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int,
        stride: int,
        rngs: nnx.Rngs,
        kernel_init: Initializer = FLAX_DEFAULT,
        layer_norm: bool = False,
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
        self.norm = nnx.LayerNorm(outputs, rngs=rngs) if layer_norm else None
        self.stride = stride

    def __call__(self, x: Array) -> Array:
        """[B, H, W, inputs] -> [B, H', W', outputs]."""
        if cpu_gradients.are_for(x):
            kernel, bias = jnp.asarray(self.conv.kernel), jnp.asarray(self.conv.bias)
            y = cpu_gradients.conv(x, kernel, bias, self.stride, relu=self.norm is None)
            return jax.nn.relu(_normed(self.norm, y)) if self.norm else y
        y = self.conv(cpu_gradients.as_float(x))
        return jax.nn.relu(_normed(self.norm, y))


def _normed(norm: nnx.LayerNorm | None, x: Array) -> Array:
    """Apply LayerNorm over the last axis if there is one."""
    if norm is None:
        return x
    if cpu_gradients.are_for(x):
        return cpu_gradients.layer_norm(x, jnp.asarray(norm.scale), jnp.asarray(norm.bias))
    return norm(x)
