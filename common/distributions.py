"""Action distributions: parameters as NamedTuples, and the functions of them that papers write.

Log-probabilities and entropies are in nats and sum over the dimensions of an action; `action` has
the shape [..., *action] that `sample` returns.
"""

import math
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from gymnasium import spaces
from jax import Array, lax

from common.action_masks import mask_actions

HALF_LOG_2_PI = 0.5 * math.log(2 * math.pi)


class Distribution(Protocol):
    """What the distributions of this module have in common."""

    def sample(self, key: Array) -> Array:
        """Draw an action."""

    def mode(self) -> Array:
        """Return the most likely action."""

    def log_prob(self, action: Array) -> Array:
        """Return the log-probability or log-density of an action [...]."""

    def entropy(self) -> Array:
        """Return the entropy [...]."""


class Categorical(NamedTuple):
    """One of A actions, with probabilities softmax(logits)."""

    logits: Array  # [..., A]

    def sample(self, key: Array) -> Array:
        """Draw an action [...] int32 (the Gumbel-max trick)."""
        return jax.random.categorical(key, self.logits)

    def mode(self) -> Array:
        """Return the most likely action [...]."""
        return self.logits.argmax(axis=-1)

    def probs(self) -> Array:
        """Return π(a) of every action [..., A]."""
        return jax.nn.softmax(self.logits)

    def log_probs(self) -> Array:
        """Log π(a) of every action [..., A], for sums over π(a): finite where π(a) = 0."""
        return _finite(jax.nn.log_softmax(self.logits))

    def log_prob(self, action: Array) -> Array:
        """Log π(a) [...]."""
        log_probs = jax.nn.log_softmax(self.logits)  # [..., A]
        return jnp.take_along_axis(log_probs, action[..., None], axis=-1)[..., 0]

    def entropy(self) -> Array:
        """-Σ_a π(a) log π(a) [...]; an action of probability 0 adds nothing."""
        log_probs = jax.nn.log_softmax(self.logits)  # [..., A]
        return -(jnp.exp(log_probs) * _finite(log_probs)).sum(axis=-1)


def _finite(log_probs: Array) -> Array:
    # Not after the product with π: 0 times infinity would make the gradient NaN.
    return jnp.where(jnp.isfinite(log_probs), log_probs, 0.0)


class MultiCategorical(NamedTuple):
    """Several independent choices at once, for MultiDiscrete actions."""

    parts: tuple[Categorical, ...]  # one [..., n_i] for each choice

    def sample(self, key: Array) -> Array:
        """Draw an action [..., choices] int32."""
        keys = jax.random.split(key, len(self.parts))
        return jnp.stack([p.sample(k) for p, k in zip(self.parts, keys, strict=True)], axis=-1)

    def mode(self) -> Array:
        """Return the most likely action [..., choices]."""
        return jnp.stack([part.mode() for part in self.parts], axis=-1)

    def log_prob(self, action: Array) -> Array:
        """Σ_i log π_i(a_i) [...]."""
        return sum_of(part.log_prob(action[..., i]) for i, part in enumerate(self.parts))

    def entropy(self) -> Array:
        """Σ_i H(π_i) [...]."""
        return sum_of(part.entropy() for part in self.parts)


def sum_of(terms: Any) -> Array:
    """Return the sum of a few arrays of one shape."""
    return jnp.stack(list(terms)).sum(axis=0)


class Bernoulli(NamedTuple):
    """Independent bits, each 1 with probability sigmoid(logit), for MultiBinary actions."""

    logits: Array  # [..., D]

    def sample(self, key: Array) -> Array:
        """Draw an action [..., D] int32."""
        return jax.random.bernoulli(key, jax.nn.sigmoid(self.logits)).astype(jnp.int32)

    def mode(self) -> Array:
        """Return the most likely action [..., D]."""
        return (self.logits > 0).astype(jnp.int32)

    def log_prob(self, action: Array) -> Array:
        """Σ_d log π_d(a_d) [...]."""
        return jax.nn.log_sigmoid(jnp.where(action > 0, self.logits, -self.logits)).sum(axis=-1)

    def entropy(self) -> Array:
        """Σ_d H(π_d) [...]."""
        probs = jax.nn.sigmoid(self.logits)  # [..., D]
        # -p log p - (1 - p) log(1 - p), with log(1 - p) = log p - logit.
        return ((1 - probs) * self.logits - jax.nn.log_sigmoid(self.logits)).sum(axis=-1)


class Normal(NamedTuple):
    """Independent normal distributions for the dimensions of a vector."""

    mean: Array  # [..., D]
    log_std: Array  # [..., D] or [D]

    def sample(self, key: Array) -> Array:
        """Draw an action [..., D]."""
        return self.mean + jnp.exp(self.log_std) * jax.random.normal(key, self.mean.shape)

    def mode(self) -> Array:
        """Return the mean [..., D]."""
        return self.mean

    def log_prob(self, action: Array) -> Array:
        """Log-density [...]."""
        z = (action - self.mean) * jnp.exp(-self.log_std)  # [..., D]
        return -(0.5 * z**2 + self.log_std + HALF_LOG_2_PI).sum(axis=-1)

    def entropy(self) -> Array:
        """Σ_d (log σ_d + ½ log 2πe) [...]."""
        log_std = jnp.broadcast_to(self.log_std, self.mean.shape)  # [..., D]
        return (log_std + HALF_LOG_2_PI + 0.5).sum(axis=-1)


class TanhNormal(NamedTuple):
    """a = tanh(u), u ~ Normal(mean, std): actions between -1 and 1.

    log π(a) = log N(u) - Σ_d log(1 - tanh²(u_d)) (Haarnoja et al. 2018, appendix C), the slope
    written as 2 (log 2 - u - softplus(-2u)), which stays exact where tanh(u) rounds to ±1.
    """

    mean: Array  # [..., D]
    log_std: Array  # [..., D] or [D]

    def sample(self, key: Array) -> Array:
        """Draw an action [..., D]."""
        return jnp.tanh(Normal(*self).sample(key))

    def sample_and_log_prob(self, key: Array) -> tuple[Array, Array]:
        """Draw an action [..., D] with its log-density [...], exact however close to the bounds."""
        return self.of_noise(jax.random.normal(key, self.mean.shape))

    def of_noise(self, noise: Array) -> tuple[Array, Array]:
        """Return a = tanh(mean + std ε) of standard normal noise ε, and log π(a) as exact."""
        unbounded = self.mean + jnp.exp(self.log_std) * noise  # [..., D]
        log_prob = -0.5 * noise**2 - self.log_std - HALF_LOG_2_PI - _log_tanh_slope(unbounded)
        return jnp.tanh(unbounded), log_prob.sum(axis=-1)

    def mode(self) -> Array:
        """Return tanh(mean) [..., D], the image of the most likely u."""
        return jnp.tanh(self.mean)

    def log_prob(self, action: Array) -> Array:
        """Log-density [...]; actions at a bound count as the closest float inside it."""
        inside = 1 - np.finfo(np.float32).epsneg
        return self._log_prob(jnp.arctanh(jnp.clip(action, -inside, inside)))

    def entropy(self) -> Array:
        """H(N) + E[Σ_d log(1 - tanh²(u_d))] [...], its expectation by Gauss-Hermite quadrature.

        Exact to float32 for deviations up to 1; 1.5e-3 nats off at e, 0.08 at e².
        """
        nodes, weights = np.polynomial.hermite_e.hermegauss(32)
        std = jnp.exp(self.log_std)
        u = self.mean[..., None] + std[..., None] * nodes.astype(np.float32)  # [..., D, 32]
        weight = (weights / weights.sum()).astype(np.float32)
        return Normal(*self).entropy() + (_log_tanh_slope(u) * weight).sum(axis=(-2, -1))

    def _log_prob(self, unbounded: Array) -> Array:
        return Normal(*self).log_prob(unbounded) - _log_tanh_slope(unbounded).sum(axis=-1)


def _log_tanh_slope(u: Array) -> Array:
    """log(1 - tanh²(u)) without cancellation."""
    return 2 * (math.log(2) - u - jax.nn.softplus(-2 * u))


def standard_normals(key: Array, num: int, shape: tuple[int, ...]) -> Array:
    """Draw ε ~ N(0, 1) num times [num, *shape], each array only once.

    In a loop: outside of one, XLA draws an array again in each of its uses, and on a CPU random
    bits are dear.
    """
    draw = partial(jax.random.normal, shape=shape)
    return lax.map(draw, jax.random.split(key, num))


class PolicyHead(nnx.Module):
    """The last layer of a policy: features to a distribution over the actions of a space.

    Discrete: logits. MultiDiscrete: the logits of every choice in turn. MultiBinary: the logit of
    every bit. Box: the mean of a normal distribution, whose standard deviation exp(log_std) does
    not depend on the features; `log_std_init` is what log_std starts from.
    """

    action_spaces = spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary, spaces.Box

    def __init__(
        self,
        num_features: int,
        space: Any,
        rngs: nnx.Rngs,
        scale: float = 0.01,
        log_std_init: float = 0.0,
    ) -> None:
        self.space = space
        if isinstance(space, spaces.Box | spaces.MultiBinary):
            num_outputs = math.prod(space.shape)
        else:
            num_outputs = int(np.sum(space.nvec if hasattr(space, "nvec") else space.n))
        init = nnx.initializers.orthogonal(scale)
        self.linear = nnx.Linear(num_features, num_outputs, kernel_init=init, rngs=rngs)
        num_deviations = num_outputs if isinstance(space, spaces.Box) else 0
        self.log_std = nnx.Param(jnp.full(num_deviations, log_std_init, jnp.float32))

    def __call__(self, features: Array, mask: Array | None = None) -> Distribution:
        """[B, num_features] -> distribution over actions [B, ...], none that `mask` rules out."""
        outputs = self.linear(features)
        if isinstance(self.space, spaces.Discrete):
            return Categorical(mask_actions(outputs, mask))
        if isinstance(self.space, spaces.MultiDiscrete):
            ends = np.cumsum(self.space.nvec.ravel())[:-1]
            parts = jnp.split(outputs, ends, axis=-1)
            masks = [None] * len(parts) if mask is None else jnp.split(mask, ends, axis=-1)
            return MultiCategorical(tuple(map(Categorical, map(mask_actions, parts, masks))))
        if isinstance(self.space, spaces.MultiBinary):
            return Bernoulli(outputs)
        return Normal(outputs, jnp.broadcast_to(self.log_std[...], outputs.shape))
