"""One run on several devices: parameters on each, environments and minibatches shared out."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from common.errors import UserError
from common.replay import ReplayState
from common.rollout import Trajectory
from common.sharding import DATA_AXIS

from common.run.trainer import Learner, Trainer, TrainState


def shard_over_devices(trainer: Trainer, num_devices: int) -> None:
    """Spread the environments of a trainer over devices; the results stay what they were.

    XLA derives the rest from where the arrays lie: each device steps its environments, and the
    gradient of a minibatch is summed over the devices.

    Raises:
        UserError: the environment is not written in JAX, the devices are not there, or num_envs is
            not a multiple of their number.
    """
    env = trainer.env
    if not env.restorable:
        env.close()
        raise UserError(
            f"--num-devices {num_devices} needs a JAX environment, such as gymnax/CartPole-v1, not "
            f"{env.env_id}; with --explorers it takes any"
        )
    mesh = _mesh(trainer, num_devices)
    shardings = _shardings(mesh, trainer.state)
    _spread(trainer, shardings)
    replicated = NamedSharding(mesh, PartitionSpec())
    run = jax.jit(trainer.run_iterations, donate_argnums=0, out_shardings=(shardings, replicated))

    trainer.compiled_run = partial(_on_mesh, mesh, run)


def learner_on_devices(trainer: Learner, num_devices: int) -> Callable[..., Any]:
    """Return `learn_trajectory`, compiled for several devices; the results stay what they were.

    Each device learns from its share of a trajectory's environments. `trainer.state` is spread.

    Raises:
        UserError: the devices are not there, or num_envs is not a multiple of their number.
    """
    mesh = _mesh(trainer, num_devices)
    replicated = NamedSharding(mesh, PartitionSpec())
    rows = NamedSharding(mesh, PartitionSpec(None, DATA_AXIS))  # [T, N, ...]
    others = NamedSharding(mesh, PartitionSpec(DATA_AXIS))  # [N, ...]
    trajectory: Any = Trajectory(rows, others, others, others, others)  # type: ignore
    state = _shardings(mesh, trainer.state)._replace(env=replicated)
    _spread(trainer, state)
    learn = jax.jit(
        trainer.learn_trajectory,
        donate_argnums=(0, 1),
        in_shardings=(state, replicated, trajectory),
        out_shardings=(state, replicated),
    )
    return partial(_on_mesh, mesh, learn)


def _mesh(trainer: Trainer, num_devices: int) -> Any:
    """Return the devices as a mesh of one axis."""
    problem = None
    if trainer.config.num_envs % num_devices:
        problem = f"does not divide --num-envs {trainer.config.num_envs}"
    elif num_devices > jax.device_count():
        problem = (
            f"is more than the {jax.device_count()} devices that JAX finds; on a CPU set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={num_devices}"
        )
    if problem:
        trainer.env.close()
        raise UserError(f"--num-devices {num_devices} {problem}")
    devices = jax.devices()[:num_devices]
    return jax.make_mesh((num_devices,), (DATA_AXIS,), (AxisType.Auto,), devices=devices)


def _spread(trainer: Trainer, shardings: Any) -> None:
    """Put the state where it belongs, on other hosts too, whose devices device_put refuses."""
    trainer.state = jax.jit(lambda state: state, out_shardings=shardings)(trainer.state)


def _on_mesh(mesh: Any, run: Callable[..., Any], *args: Any) -> Any:
    with jax.set_mesh(mesh):
        return run(*args)


def _shardings(mesh: Any, state: TrainState) -> Any:
    """Return a sharding for each array of a TrainState: along the environments, or replicated."""

    def along(*axes: Any) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*axes))

    def of_part(name: str, part: Any) -> Any:
        if name in ("env", "core"):
            return jax.tree.map(lambda x: along(DATA_AXIS) if x.ndim else along(), part)
        if isinstance(part, ReplayState):  # rows [T, N, ...]; priorities have no axis of N
            return jax.tree.map(lambda x: along(None, DATA_AXIS) if x.ndim > 1 else along(), part)
        return jax.tree.map(lambda _: along(), part)

    return state._replace(**{k: of_part(k, part) for k, part in state._asdict().items()})
