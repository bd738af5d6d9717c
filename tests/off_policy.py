"""What the tests of actor-critic algorithms with a replay buffer share: a batch, and an oracle."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from gymnasium import spaces

from common.optimize import Trained, descend
from common.replay import Batch

OBS_SPACE = spaces.Box(-10, 10, (3,), np.float32)
ACTION_SPACE = spaces.Box(np.float32([-1, 0]), np.float32([3, 0.5]))

# Q_1(s, a) = s · [1, 2] + 4 a and Q_2(s, a) = s · [3, -1] - 2 a
CRITIC = {"obs": jnp.array([[1.0, 2.0], [3.0, -1.0]]), "action": jnp.array([[4.0], [-2.0]])}
# Q⁻_1(s, a) = s · [2, 0] + a and Q⁻_2(s, a) = s · [0, 5] - a
TARGET_CRITIC = {"obs": jnp.array([[2.0, 0.0], [0.0, 5.0]]), "action": jnp.array([[1.0], [-1.0]])}

# A plain row, one that terminates, one that a time limit cuts, one of two steps, and an invalid one
HAND_BATCH = Batch(
    obs=jnp.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [1.0, -1.0], [5.0, 5.0]]),
    action=jnp.array([[0.5], [-0.5], [0.0], [1.0], [0.1]]),
    reward=jnp.array([1.0, 2.0, 3.0, 4.0, 50.0]),
    discount=jnp.array([0.5, 0.0, 0.5, 0.25, 0.5]),
    next_obs=jnp.array([[1.0, 1.0], [9.0, 9.0], [2.0, -1.0], [0.0, 1.0], [7.0, 7.0]]),
    weight=jnp.array([1.25, 1.25, 1.25, 1.25, 0.0]),
    extras=(),
)
# The targets of the tests of the critics' loss. Q_1 = 3, 0, 3, 3 and Q_2 = 2, 0, 2, 2 are off by
# -1, 1, 0, -3 and 0, 1, 1, -2.
HAND_TARGET = jnp.array([2.0, 1.0, 3.0, 0.0, 9.0])
# Σ_b (y - Q_i) ∂Q_i/∂θ over the valid rows, for i = 1, 2
ERRORS_TIMES_SLOPES = {"obs": np.array([[-4, 4], [-1, 4]]), "action": np.array([[-4], [-2.5]])}


def bare_algorithm(algorithm_class: Any, config: Any, model: Any, *params: Any) -> tuple:
    """An Algorithm of a model by hand that descends with step size 1, and `Trained` of params."""
    algorithm = object.__new__(algorithm_class)
    algorithm.config, algorithm.model = config, model
    algorithm.optimizer = optax.sgd(1.0)
    algorithm.descend = partial(descend, algorithm.optimizer)
    return algorithm, [Trained(x, algorithm.optimizer.init(x)) for x in params]


def hand_values(critic: Any, obs: Any, action: Any) -> Any:
    """q_values [2, B] of parameters such as CRITIC."""
    return critic["obs"] @ obs.T + critic["action"] @ action.T


def with_nonsense(batch: Batch) -> Batch:
    """Other content in the last row, whose weight is 0."""

    def spoil(x: Any) -> Any:
        return x.at[-1].set(77 if jnp.issubdtype(x.dtype, jnp.floating) else 0)

    return jax.tree.map(spoil, batch)._replace(weight=batch.weight)


def relu_network(params: Any, *inputs: Any) -> np.ndarray:
    """Two hidden layers with ReLU and a linear head, in float64."""
    x = np.concatenate([np.float64(x) for x in inputs], axis=-1)
    for name in ("first", "second", "head"):
        x = x @ np.float64(params[name]["kernel"]) + np.float64(params[name]["bias"])
        x = x if name == "head" else np.maximum(x, 0)
    return x


def random_batch(seed: int, size: int = 12) -> Batch:
    """Rows of OBS_SPACE and ACTION_SPACE; a third terminate, a third are invalid."""
    rng = np.random.default_rng(seed)
    obs, next_obs = rng.normal(size=(2, size, 3)).astype(np.float32)
    action = rng.uniform(-1, 1, (size, 2)).astype(np.float32)
    discount = np.float32(0.9) * (np.arange(size) % 3 != 0)
    weight = np.float32(1.5) * (np.arange(size) % 3 != 1)
    reward = rng.normal(size=size).astype(np.float32)
    return Batch(obs, action, reward, discount, next_obs, weight, ())


def leaves_equal(first: Any, second: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, first, second)


def leaves_differ(first: Any, second: Any) -> bool:
    """Whether every array differs somewhere."""
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return all(not np.array_equal(x, y) for x, y in pairs)
