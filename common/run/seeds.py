"""Many seeds in one program: the whole training process under `vmap`, for JAX environments."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from common.errors import UserError
from common.replay import ReplayState

from common.run.trainer import Trainer, TrainState

SEEDS_AXIS = "seeds"


def batch_seeds(trainer: Trainer, num_seeds: int) -> None:
    """Make a trainer train the seeds `config.seed` to `config.seed + num_seeds - 1` at once.

    Every array of `trainer.state` gets a leading axis of seeds, but for `step` and the replay's
    position, which all seeds share; so do the metrics that `trainer.compiled_run` returns. A seed
    learns what it would learn alone, up to the rounding of larger matrix products.

    Raises:
        UserError: the environment is not written in JAX.
    """
    if not trainer.env.restorable:
        trainer.env.close()
        raise UserError(
            f"--num-seeds {num_seeds} needs a JAX environment, such as gymnax/CartPole-v1, not "
            f"{trainer.env.env_id}; for others start a run for each seed, or benchmarks/sweep.py"
        )
    seeds = range(trainer.config.seed, trainer.config.seed + num_seeds)
    state = jax.vmap(trainer.init_state)(jnp.stack([jax.random.key(seed) for seed in seeds]))
    axes = _axes(state)
    trainer.env.seeds_axis = SEEDS_AXIS
    trainer.evaluator.num_seeds = num_seeds
    trainer.state = jax.tree.map(
        lambda axis, x: jax.tree.map(lambda y: y[0], x) if axis is None else x,
        axes,
        state,
        is_leaf=lambda axis: axis is None,
    )
    run = jax.vmap(
        trainer.run_iterations,
        in_axes=(axes, None),
        out_axes=(axes, 0),
        axis_name=SEEDS_AXIS,
    )
    trainer.compiled_run = jax.jit(run, donate_argnums=0)


def state_of_seed(state: TrainState, index: int) -> Any:
    """Return the TrainState of one seed, as its run alone would have it."""
    return jax.tree.map(
        lambda axis, x: x if axis is None else jax.tree.map(lambda y: y[index], x),
        _axes(state),
        state,
        is_leaf=lambda axis: axis is None,
    )


def for_each_seed(change: Callable[[Any], Any], state: Any) -> Any:
    """Return the TrainState of all seeds after `change(state) -> state` of each."""
    axes = _axes(state)
    return jax.vmap(change, in_axes=(axes,), out_axes=axes)(state)


def _axes(state: TrainState) -> Any:
    """Return the axis of seeds for each part of a TrainState; None for what all seeds share."""
    axes: dict[str, Any] = dict.fromkeys(state._asdict(), 0) | {"step": None}
    for name, part in state._asdict().items():
        if isinstance(part, ReplayState):
            axes[name] = ReplayState(0, 0, position=None, size=None, priorities=0)  # type: ignore
    return state._replace(**axes)
