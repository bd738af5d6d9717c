"""One run on several devices: parameters on each, environments and minibatches shared out."""

from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from common.errors import UserError
from common.replay import ReplayState
from common.sharding import DATA_AXIS

from common.run.trainer import Trainer, TrainState


def shard_over_devices(trainer: Trainer, num_devices: int) -> None:
    """Spread the environments of a trainer over devices; the results stay what they were.

    XLA derives the rest from where the arrays lie: each device steps its environments, and the
    gradient of a minibatch is summed over the devices.

    Raises:
        UserError: the environment is not written in JAX, the devices are not there, or num_envs is
            not a multiple of their number.
    """
    config, env = trainer.config, trainer.env
    problem = None
    if not env.restorable:
        problem = f"needs a JAX environment, such as gymnax/CartPole-v1, not {env.env_id}"
    elif config.num_envs % num_devices:
        problem = f"does not divide --num-envs {config.num_envs}"
    elif num_devices > jax.device_count():
        problem = (
            f"is more than the {jax.device_count()} devices that JAX finds; on a CPU set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={num_devices}"
        )
    if problem:
        env.close()
        raise UserError(f"--num-devices {num_devices} {problem}")
    devices = jax.devices()[:num_devices]
    mesh = jax.make_mesh((num_devices,), (DATA_AXIS,), (AxisType.Auto,), devices=devices)
    shardings = _shardings(mesh, trainer.state)
    trainer.state = jax.device_put(trainer.state, shardings)
    replicated = NamedSharding(mesh, PartitionSpec())
    run = jax.jit(trainer.run_iterations, donate_argnums=0, out_shardings=(shardings, replicated))

    def run_on_mesh(*args: Any) -> Any:
        with jax.set_mesh(mesh):
            return run(*args)

    trainer.compiled_run = run_on_mesh


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
