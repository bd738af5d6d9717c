"""How the rows of a minibatch are shared out among devices."""

from typing import TypeVar

import jax
from jax.sharding import PartitionSpec

DATA_AXIS = "data"

T = TypeVar("T")


def shard_rows(batch: T) -> T:
    """Share the rows [B, ...] of a minibatch out among the devices, if there are several."""
    if jax.sharding.get_abstract_mesh().empty:
        return batch
    return jax.lax.with_sharding_constraint(batch, PartitionSpec(DATA_AXIS))
