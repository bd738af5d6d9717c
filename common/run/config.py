"""Checks of hyper-parameters: types, ranges, and combinations that cannot work."""

import difflib
import json
import math
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Protocol, Union, get_args, get_origin, get_type_hints

import numpy as np

from common.errors import UserError
from common.ranges import LARGEST, SMALLEST, Range, accepted, fits

from common.run.trainer import RunConfig


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
    """Check what holds for every algorithm: types, ranges, an id, and whole vector steps.

    Raises:
        UserError: the first field that cannot be used, with what is accepted.
    """
    check_ranges(config)
    if not config.env_id:
        raise UserError("--env-id needs a value, got ''; see docs/environments.md for the ids")
    total, num_envs = config.total_timesteps, config.num_envs
    if total % num_envs:
        below = total // num_envs * num_envs
        raise UserError(
            f"--total-timesteps must be a multiple of --num-envs {num_envs}, got {total}; use "
            f"{below or num_envs} or {below + num_envs}"
        )


def check_ranges(options: object) -> None:
    """Check the fields of a dataclass against their types, and the ranges in them.

    Raises:
        UserError: the first field of another type or out of range, with what is accepted.
    """
    for name, hint in get_type_hints(type(options), include_extras=True).items():
        value = getattr(options, name)
        if get_origin(hint) in (Union, types.UnionType) and value is not None:
            hint = get_args(hint)[0]
        kind, *details = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        ranges = [detail for detail in details if isinstance(detail, Range)]
        for limits in ranges:
            _check_number(flag_of(name), value, kind, limits)
        if not ranges and not fits(value, kind):
            raise UserError(
                f"{flag_of(name)} must be {accepted(kind)}, got {value!r}{_of_type(value, kind)}"
            )


def _of_type(value: Any, kind: Any) -> str:
    """Return words about a value that may look right, but has another type than a field's."""
    wanted = get_origin(kind) or kind
    if isinstance(value, list | np.generic) and isinstance(wanted, type):
        return f" of type {type(value).__name__}; give a Python {wanted.__name__}"
    return ""


def _check_number(flag: str, value: Any, kind: type, limits: Range) -> None:
    if not fits(value, kind) or not abs(value) < math.inf:
        raise UserError(
            f"{flag} must be a {'whole' if kind is int else 'finite'} number, got {value!r}"
            f"{_of_type(value, kind)}"
        )
    if not limits.holds(value):
        raise UserError(f"{flag} must be {limits}, got {value}")
    if abs(value) > LARGEST[kind]:
        most = f"below {LARGEST[int] + 1}" if kind is int else f"{LARGEST[float]:g} or less"
        raise UserError(f"{flag} must be {most}, got {value}")
    if 0 < abs(value) < SMALLEST:
        raise UserError(
            f"{flag} must be {SMALLEST:g} or more in size, got {value}, which is 0 in float32"
        )


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
    if total_timesteps * updates_per_step > LARGEST[int]:
        raise UserError(
            f"--updates-per-step {updates_per_step} makes more than {LARGEST[int]} updates of "
            f"--total-timesteps {total_timesteps}; lower one of them"
        )


def check_rollout(config: RolloutConfig, num_updates: int = 1) -> None:
    """Check that a run has at least one rollout, and that all its updates can be counted.

    Args:
        config: of the run.
        num_updates: updates on each rollout.

    Raises:
        UserError: it has none, or the count is too large for 32 bits.
    """
    size = config.num_envs * config.num_steps
    if config.total_timesteps < size:
        raise UserError(
            f"--total-timesteps {config.total_timesteps} is less than a rollout of --num-envs "
            f"{config.num_envs} times --num-steps {config.num_steps} = {size}; use at least "
            f"{size}, or shorter rollouts"
        )
    if config.total_timesteps // size * num_updates > LARGEST[int]:
        raise UserError(
            f"--update-epochs and --num-minibatches make {num_updates} updates of each rollout, "
            f"more than {LARGEST[int]} in --total-timesteps {config.total_timesteps}; lower one of "
            "them"
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


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object that a file holds.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds something else; the message names the file.
    """
    try:
        saved = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from error
    except RecursionError as error:
        raise ValueError(f"{path.name} is nested too deeply") from error
    if not isinstance(saved, dict):
        raise ValueError(f"{path.name} holds a {type(saved).__name__}, not an object")
    return saved


def field_values(saved: dict[str, Any], options: Sequence[type], where: str) -> dict[str, Any]:
    """Return the entries of a JSON object as values of the fields of some dataclasses.

    Raises:
        UserError: an entry that is no field, or has another type; `where` names the object.
    """
    hints: dict[str, Any] = {}
    for one in options:
        hints |= get_type_hints(one)
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in saved.items()}
    for name, value in values.items():
        if name not in hints:
            near = difflib.get_close_matches(name, hints, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "see --help for the names"
            raise UserError(f"{where} has the unknown entry {name!r}; {hint}")
        if not fits(value, hints[name]):
            raise UserError(
                f"{where} gives {name!r} the value {saved[name]!r}, which must be "
                f"{accepted(hints[name])}; correct it"
            )
    return values
