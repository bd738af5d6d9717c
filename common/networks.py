"""Networks that papers take for granted: encoders for any observation space, and MLPs."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from gymnasium import spaces
from jax import Array

SMALLEST_CNN_IMAGE = 36


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

    def __init__(self, space: spaces.Space, rngs: nnx.Rngs) -> None:
        self.space = space
        parts = _parts(space)
        self.has_cnn = any(is_image(p) for p in parts)
        self.cnns = nnx.List([NatureCNN(p.shape, rngs) if is_image(p) else None for p in parts])
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
    """Linear layers with ReLU after each."""

    def __init__(self, sizes: Sequence[int], rngs: nnx.Rngs) -> None:
        pairs = itertools.pairwise(sizes)
        self.layers = nnx.List([nnx.Linear(i, o, rngs=rngs) for i, o in pairs])
        self.num_features = sizes[-1]

    def __call__(self, x: Array) -> Array:
        """[B, sizes[0]] -> [B, sizes[-1]]."""
        for layer in self.layers:
            x = jax.nn.relu(layer(x))
        return x


class NatureCNN(nnx.Module):
    """The convolutional encoder of Mnih et al. 2015 (Methods, model architecture).

    Takes uint8 images as [B, C, H, W] or [B, H, W, C]: the smallest axis of the two outer ones is
    taken for the channels.
    """

    def __init__(self, shape: tuple[int, ...] | None, rngs: nnx.Rngs) -> None:
        assert shape is not None
        self.channels_first = shape[0] < shape[-1]
        channels, height, width = _image_shape(shape)
        specs = [(channels, 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1)]
        self.layers = nnx.List([Conv(*spec, rngs=rngs) for spec in specs])
        for _, _, kernel, stride in specs:
            height, width = ((n - kernel) // stride + 1 for n in (height, width))
        self.dense = nnx.Linear(height * width * 64, 512, rngs=rngs)
        self.num_features = 512

    def __call__(self, images: Array) -> Array:
        """[B, C, H, W] or [B, H, W, C] uint8 -> [B, 512]."""
        if self.channels_first:
            images = jnp.moveaxis(images, 1, -1)  # [B, H, W, C]
        x = images.astype(jnp.float32) / 255
        for layer in self.layers:
            x = jax.nn.relu(layer(x))
        return jax.nn.relu(self.dense(x.reshape(x.shape[0], -1)))


class Conv(nnx.Module):
    """Valid convolution; on a CPU as patches and one matrix product.

    XLA's CPU convolution gradients are 15 to 20 times slower inside loops than outside; patches
    cost the same in both. Parameters and results are those of `nnx.Conv`.
    """

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(
            inputs, outputs, (kernel, kernel), (stride, stride), padding="VALID", rngs=rngs
        )
        self.kernel, self.stride = kernel, stride

    def __call__(self, x: Array) -> Array:
        """[B, H, W, inputs] -> [B, H', W', outputs]."""
        if jax.default_backend() != "cpu":
            return self.conv(x)
        _, height, width, _ = x.shape
        k, s = self.kernel, self.stride
        rows, columns = (height - k) // s + 1, (width - k) // s + 1
        patches = [
            x[:, i : i + s * (rows - 1) + 1 : s, j : j + s * (columns - 1) + 1 : s]
            for i in range(k)
            for j in range(k)
        ]
        kernel, bias = jnp.asarray(self.conv.kernel), jnp.asarray(self.conv.bias)
        # [k, k, C, outputs]
        flat = kernel.reshape(math.prod(kernel.shape[:3]), -1)
        return jnp.concatenate(patches, axis=-1) @ flat + bias
