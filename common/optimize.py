"""Gradient steps for algorithms that train several sets of parameters side by side."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax


class Trained(NamedTuple):
    """Parameters with the state of their optimizer."""

    params: Any
    opt_state: Any


def descend(
    optimizer: optax.GradientTransformation, loss_fn: Callable, trained: Trained, *args: Any
) -> tuple[Trained, Any]:
    """One gradient step on `loss_fn(params, *args) -> (loss, aux)`; return aux too."""
    grads, aux = jax.grad(loss_fn, has_aux=True)(trained.params, *args)
    updates, opt_state = optimizer.update(grads, trained.opt_state, trained.params)
    return Trained(optax.apply_updates(trained.params, updates), opt_state), aux
