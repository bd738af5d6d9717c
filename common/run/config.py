"""Checks of hyper-parameters: the ranges in their types, and combinations that cannot work."""

import math
import types
from typing import Annotated, Any, Protocol, Union, get_args, get_origin, get_type_hints

from common.errors import UserError
from common.ranges import Range

from common.run.trainer import RunConfig

LARGEST = 2**31 - 1  # of the 32-bit integers that count inside the program


class ReplayConfig(RunConfig, Protocol):
    """The fields of a Config that size a replay buffer."""

    @property
    def buffer_size(self) -> int:
        """Transitions that the buffer holds."""

    @property
    def batch_size(self) -> int:
        """Transitions in a minibatch."""

    @property
    def learning_starts(self) -> int:
        """Env steps before the first update."""

    @property
    def n_step(self) -> int:
        """Steps of reward in a target."""


class RolloutConfig(RunConfig, Protocol):
    """The fields of a Config that size a rollout."""

    @property
    def num_steps(self) -> int:
        """Steps of each environment in a rollout."""


def check_config(config: RunConfig) -> None:
    """Check what holds for every algorithm: ranges, and whole vector steps.

    Raises:
        UserError: the first field that is out of range, with what is accepted.
    """
    check_ranges(config)
    total, num_envs = config.total_timesteps, config.num_envs
    if total % num_envs:
        below = total // num_envs * num_envs
        raise UserError(
            f"--total-timesteps must be a multiple of --num-envs {num_envs}, got {total}; use "
            f"{below or num_envs} or {below + num_envs}"
        )


def check_ranges(options: object) -> None:
    """Check the fields of a dataclass against the ranges in their types (`common.ranges`).

    Raises:
        UserError: the first field that is out of range, with what is accepted.
    """
    for name, hint in get_type_hints(type(options), include_extras=True).items():
        value = getattr(options, name)
        if get_origin(hint) in (Union, types.UnionType) and value is not None:
            hint = get_args(hint)[0]
        if get_origin(hint) is Annotated:
            kind, *details = get_args(hint)
            for accepted in details:
                if isinstance(accepted, Range):
                    _check_number(flag_of(name), value, kind, accepted)


def _check_number(flag: str, value: Any, kind: type, accepted: Range) -> None:
    kinds = int if kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not math.isfinite(value):
        raise UserError(
            f"{flag} must be a {'whole' if kind is int else 'finite'} number, got {value!r}"
        )
    if not accepted.holds(value):
        raise UserError(f"{flag} must be {accepted}, got {value}")
    if kind is int and abs(value) > LARGEST:
        raise UserError(f"{flag} must be below {LARGEST + 1}, got {value}")


def check_replay(config: ReplayConfig) -> None:
    """Check that the buffer holds a batch, and a whole transition before the first update.

    Raises:
        UserError: it does not.
    """
    if config.batch_size > config.buffer_size:
        raise UserError(
            f"--batch-size {config.batch_size} is larger than --buffer-size {config.buffer_size}; "
            "lower the batch or enlarge the buffer"
        )
    least = (config.n_step + 1) * config.num_envs
    if config.learning_starts < least:
        raise UserError(
            f"--learning-starts {config.learning_starts} comes before the buffer holds a complete "
            f"transition; with --num-envs {config.num_envs} and --n-step {config.n_step} use at "
            f"least {least}"
        )


def check_updates(updates_per_step: float, total_timesteps: int) -> None:
    """Check that the updates of a run can be counted.

    Raises:
        UserError: the ratio is too small to be a fraction, or the count too large for 32 bits.
    """
    if updates_per_step < 1e-3:
        raise UserError(f"--updates-per-step must be at least 0.001, got {updates_per_step}")
    if total_timesteps * updates_per_step > LARGEST:
        raise UserError(
            f"--updates-per-step {updates_per_step} makes more than {LARGEST} updates of "
            f"--total-timesteps {total_timesteps}; lower one of them"
        )


def check_rollout(config: RolloutConfig) -> None:
    """Check that a run has at least one rollout.

    Raises:
        UserError: it has none.
    """
    size = config.num_envs * config.num_steps
    if config.total_timesteps < size:
        raise UserError(
            f"--total-timesteps {config.total_timesteps} is less than a rollout of --num-envs "
            f"{config.num_envs} times --num-steps {config.num_steps} = {size}; use at least "
            f"{size}, or shorter rollouts"
        )


def check_minibatches(num_minibatches: int, rows: int, what: str) -> None:
    """Check that the rows of a rollout can be cut into minibatches of one size.

    Raises:
        UserError: they cannot; `what` names the rows.
    """
    if rows % num_minibatches:
        raise UserError(
            f"--num-minibatches {num_minibatches} does not divide {what}; use a divisor of {rows}"
        )


def flag_of(name: str) -> str:
    """Return a field's command-line flag."""
    return "--" + name.replace("_", "-")
