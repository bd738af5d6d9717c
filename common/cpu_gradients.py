"""Layers and a loss whose gradients are slow in XLA on a CPU, written the way that is fast there.

Values are those of the plain forms, to the last bits of float32; `common.networks` and
`common.targets` take these where `are_for` says so. Four forms are slow: the gradients of
convolutions inside loops, 15 to 17 times, x.T @ grad, the gradient of a kernel: 205 us against 145
for 256 x 256 x 256, the gradient of LayerNorm, which keeps several arrays of the size of its input,
and the quantile Huber loss, whose arrays of all pairs go through memory: 6 to 16 times as long.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, export, lax

CHUNK = 8  # images whose features and gradients fit into the cache together
LAYER_NORM_EPSILON = 1e-6  # that of `nnx.LayerNorm`
FEW = 64  # columns up to which a matrix is cheap to transpose
FEW_TARGETS = 16  # of a row, up to which arrays of all pairs are small


def are_for(x: Array) -> bool:
    """Return whether x [B, ...] should take these layers: on a CPU alone.

    A batch of any size is traced for export, which learns nothing, and for other devices too.
    """
    return jax.default_backend() == "cpu" and not export.is_symbolic_dim(x.shape[0])


def by_chunks(function: Callable[[Array], Array], x: Array) -> Array:
    """Apply a function to a few rows at a time, so that what lies between fits into the cache."""
    rows = len(x)
    if rows <= CHUNK:
        return function(x)
    padding = [(0, -rows % CHUNK)] + [(0, 0)] * (x.ndim - 1)
    chunks = jnp.pad(x, padding).reshape(-1, CHUNK, *x.shape[1:])
    result = lax.map(function, chunks)  # [chunks, CHUNK, ...]
    return result.reshape(-1, *result.shape[2:])[:rows]


def as_float(x: Array) -> Array:
    """Scale bytes to [0, 1]; pass other arrays as they are."""
    return x.astype(jnp.float32) / 255 if x.dtype == jnp.uint8 else x


def conv(x: Array, kernel: Array, bias: Array, stride: int, relu: bool = True) -> Array:
    """Valid convolution, and ReLU, as patches and matrix products; bytes are scaled to [0, 1].

    x [B, H, W, C], kernel [K, K, C, O] -> [B, H', W', O]
    """
    size = kernel.shape[0]
    if stride > 1 and size % stride == 0:
        x, kernel = _space_to_depth(x, kernel, stride)
        size, stride = size // stride, 1
    flat = kernel.reshape(-1, kernel.shape[-1])  # [size * size * C, O]
    return _conv(as_float(x), flat, bias, size, stride, relu)


def mlp(x: Array, kernels: Sequence[Array], biases: Sequence[Array]) -> Array:
    """Two hidden layers with ReLU and a linear head: [B, inputs] -> [B, outputs]."""
    x = jax.nn.relu(_relu_product(x, kernels[0], biases[0], kernels[1]) + biases[1])
    # The fast form of a narrow kernel's gradient transposes the product.
    product = matmul if kernels[2].shape[1] <= FEW else jnp.matmul
    return product(x, kernels[2]) + biases[2]


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


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _conv(x: Array, kernel: Array, bias: Array, size: int, stride: int, relu: bool) -> Array:
    """Convolution of [B, H, W, C] with [size * size * C, O], and ReLU."""
    y = _patches(x, size, stride) @ kernel + bias
    return jax.nn.relu(y) if relu else y


def _conv_forward(
    x: Array, kernel: Array, bias: Array, size: int, stride: int, relu: bool
) -> tuple[Array, tuple[Array, Array, Array | None]]:
    y = _conv(x, kernel, bias, size, stride, relu)
    return y, (x, kernel, y if relu else None)


def _conv_backward(
    size: int, stride: int, relu: bool, saved: tuple[Array, Array, Array | None], grad: Array
) -> tuple[Array, Array, Array]:
    """Make the patches again rather than keep them: they are four to nine times as large as x."""
    x, kernel, y = saved
    grad = lax.optimization_barrier(grad if y is None else jnp.where(y > 0, grad, 0.0))
    patches, fold = jax.vjp(lambda x: _patches(x, size, stride), x)
    flat = patches.reshape(-1, patches.shape[-1])
    grad_patches, grad_kernel = _matmul_backward((flat, kernel), grad.reshape(len(flat), -1))
    grad_patches = lax.optimization_barrier(grad_patches).reshape(patches.shape)
    return fold(grad_patches)[0], grad_kernel, grad.sum((0, 1, 2))


_conv.defvjp(_conv_forward, _conv_backward)


@jax.custom_vjp
def matmul(x: Array, kernel: Array) -> Array:
    """[rows, inputs] @ [inputs, outputs] with the fast form of its gradient."""
    return x @ kernel


def _matmul_backward(saved: tuple[Array, Array], grad: Array) -> tuple[Array, Array]:
    """Up to three times as fast as x.T @ grad, which XLA makes of it without the barrier."""
    x, kernel = saved
    return grad @ kernel.T, lax.optimization_barrier(grad.T @ x).T


matmul.defvjp(lambda x, kernel: (x @ kernel, (x, kernel)), _matmul_backward)


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


@jax.custom_vjp
def layer_norm(x: Array, scale: Array, bias: Array) -> Array:
    """(x - E[x]) / √(Var[x] + ε) * scale + bias over the last axis, as `nnx.LayerNorm` has it."""
    return _layer_norm_forward(x, scale, bias)[0]


def _layer_norm_forward(x: Array, scale: Array, bias: Array) -> tuple[Array, tuple[Array, ...]]:
    mean = x.mean(-1, keepdims=True)
    variance = jnp.maximum((x * x).mean(-1, keepdims=True) - mean * mean, 0.0)
    factor = lax.rsqrt(variance + LAYER_NORM_EPSILON)
    return (x - mean) * (factor * scale) + bias, (x, mean, factor, scale)


def _layer_norm_backward(saved: tuple[Array, ...], grad: Array) -> tuple[Array, Array, Array]:
    """Two sums a row, and only x kept of its size: a tenth less time for a whole network."""
    x, mean, factor, scale = saved
    normed = (x - mean) * factor
    inner = grad * scale
    inner -= inner.mean(-1, keepdims=True) + normed * (inner * normed).mean(-1, keepdims=True)
    rows = tuple(range(x.ndim - 1))
    return factor * inner, (grad * normed).sum(rows), grad.sum(rows)


layer_norm.defvjp(_layer_norm_forward, _layer_norm_backward)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def quantile_huber_loss(quantiles: Array, tau: Array, target: Array, kappa: float) -> Array:
    """The loss of `common.targets`, one y_j of each row after the other.

    quantiles [B, N], tau [B, N], target [B, N'] -> [B]
    """
    return _loss_and_slope(quantiles, tau, target, kappa)[0]


def _loss_and_slope(
    quantiles: Array, tau: Array, target: Array, kappa: float
) -> tuple[Array, Array]:
    """Return the loss [B], and how fast it falls as the quantiles rise [B, N]."""

    def add(sums: tuple[Array, Array], y: Array) -> tuple[tuple[Array, Array], None]:
        loss, slope = sums  # [B, N] each
        error = y[:, None] - quantiles  # [B, N]
        near = jnp.clip(error, -kappa, kappa)  # L_κ'(u); L_κ(u) is L_κ'(u) (u - ½ L_κ'(u))
        fall = jnp.abs(tau - (error < 0)) * near
        return (loss + fall * (error - 0.5 * near), slope + fall), None

    zeros = jnp.zeros_like(quantiles)
    (loss, slope), _ = lax.scan(add, (zeros, zeros), target.T, unroll=4)
    scale = kappa * target.shape[1]
    return loss.sum(axis=1) / scale, slope / scale


def _quantile_huber_forward(
    quantiles: Array, tau: Array, target: Array, kappa: float
) -> tuple[Array, tuple[Array, ...]]:
    loss, slope = _loss_and_slope(quantiles, tau, target, kappa)
    return loss, (quantiles, tau, target, slope)


def _quantile_huber_backward(
    kappa: float, saved: tuple[Array, ...], grad: Array
) -> tuple[Array, Array, Array]:
    """What nobody asks for, such as the gradient by a target, is not computed."""
    quantiles, tau, target, slope = saved
    _, pull = jax.vjp(lambda t, y: _loss_and_slope(quantiles, t, y, kappa)[0], tau, target)
    grad_tau, grad_target = pull(grad)
    return -grad[:, None] * slope, grad_tau, grad_target


quantile_huber_loss.defvjp(_quantile_huber_forward, _quantile_huber_backward)
