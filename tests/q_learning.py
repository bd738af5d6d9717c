"""What the tests of DQN and its variants share: a linear network, a batch, a short run to learn."""

from typing import Any

import jax.numpy as jnp
import optax

from common.replay import Batch

PARAMS = {"w": jnp.array([[1.0, 2.0], [3.0, -1.0]])}  # Q(s) = s @ w
TARGET = {"w": jnp.array([[2.0, 0.0], [0.0, 5.0]])}
CARTPOLE: dict[str, Any] = dict(
    total_timesteps=50_000,
    learning_starts=1_000,
    learning_rate=1e-3,
    exploration_fraction=0.4,
    target_network_frequency=250,
    train_frequency=4,
)


def linear_algorithm(module: Any, **options: Any) -> Any:
    """An Algorithm whose Q-values are obs @ W, for arithmetic by hand."""
    algorithm = object.__new__(module.Algorithm)
    algorithm.config = module.Config(**options)
    algorithm.predict = lambda params, obs: obs @ params["w"]
    algorithm.optimizer = optax.sgd(1.0, momentum=0.5)  # its first step is that of SGD
    return algorithm


def hand_batch(weight: tuple = (1.0, 1.0, 1.0)) -> Batch:
    """Three rows."""
    return Batch(
        obs=jnp.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]),
        action=jnp.array([0, 1, 1]),
        reward=jnp.array([1.0, 2.0, 3.0]),
        discount=jnp.array([0.5, 0.0, 0.25]),  # the second row is terminal, the third is 2-step
        next_obs=jnp.array([[1.0, 1.0], [9.0, 9.0], [2.0, -1.0]]),
        weight=jnp.array(weight),
        extras=(),
    )


def return_after_cartpole(module: Any, seed: int) -> float:
    """Train for a short while; the mean return of 20 episodes."""
    trainer = module.Trainer(module.Config(seed=seed, **CARTPOLE))
    for _ in trainer():
        pass
    return trainer.evaluate(20)["logs"]["charts/evaluation_return"]
