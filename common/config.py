"""Checks of hyper-parameters by their standard names, shared by every algorithm's Config."""

import dataclasses
import math
from typing import Any

from common.errors import UserError

POSITIVE = {
    "num_envs",
    "total_timesteps",
    "log_frequency",
    "buffer_size",
    "n_step",
    "frame_stack",
    "target_network_frequency",
    "batch_size",
    "train_frequency",
    "learning_rate",
    "num_steps",
    "update_epochs",
    "num_minibatches",
    "core_size",
    "clip_coef",
    "max_grad_norm",
    "target_kl",
    "updates_per_step",
    "policy_frequency",
    "alpha",
}
NOT_NEGATIVE = {
    "seed",
    "learning_starts",
    "entropy_coef",
    "value_coef",
    "exploration_noise",
    "policy_noise",
    "noise_clip",
}
UNIT_INTERVAL = {
    "gamma",
    "gae_lambda",
    "tau",
    "start_epsilon",
    "end_epsilon",
    "exploration_fraction",
    "evaluation_epsilon",
    "noise_correlation",
    "target_entropy",
}


def check_config(config: Any) -> None:
    """Check types, ranges, and the combinations that hold for every algorithm.

    Raises:
        UserError: the first field that is out of range, with what is accepted.
    """
    for field in dataclasses.fields(config):
        _check_field(field.name, getattr(config, field.name), field.default)
    _check_total(config.total_timesteps, config.num_envs)
    if hasattr(config, "buffer_size"):
        _check_replay(config)
    if hasattr(config, "num_steps"):
        _check_rollout(config)


def _check_field(name: str, value: Any, default: Any) -> None:
    if value is None and default is None:
        return
    flag = flag_of(name)
    whole = isinstance(default, int)
    if name in POSITIVE | NOT_NEGATIVE | UNIT_INTERVAL:
        kind = int if whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, kind) or not math.isfinite(value):
            raise UserError(
                f"{flag} must be {'a whole' if whole else 'a finite'} number, got {value!r}"
            )
    if name in POSITIVE and value <= 0:
        raise UserError(f"{flag} must be above 0, got {value}")
    if name in NOT_NEGATIVE and value < 0:
        raise UserError(f"{flag} must be 0 or more, got {value}")
    if name in UNIT_INTERVAL and not 0 <= value <= 1:
        raise UserError(f"{flag} must lie between 0 and 1, got {value}")
    if name == "noise_correlation" and value == 1:
        raise UserError(f"{flag} must be below 1, or the noise would never change, got {value}")
    if name == "updates_per_step" and value < 1e-3:
        raise UserError(f"{flag} must be at least 0.001, got {value}")
    if whole and abs(value) >= 2**31:
        raise UserError(f"{flag} must be below 2147483648, got {value}")


def _check_total(total_timesteps: int, num_envs: int) -> None:
    if total_timesteps % num_envs:
        below = total_timesteps // num_envs * num_envs
        raise UserError(
            f"--total-timesteps must be a multiple of --num-envs {num_envs}, got "
            f"{total_timesteps}; use {below or num_envs} or {below + num_envs}"
        )


def _check_replay(config: Any) -> None:
    if config.total_timesteps * getattr(config, "updates_per_step", 0) >= 2**31:
        raise UserError(
            f"--updates-per-step {config.updates_per_step} makes more than 2147483647 updates of "
            f"--total-timesteps {config.total_timesteps}; lower one of them"
        )
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


def _check_rollout(config: Any) -> None:
    size = config.num_envs * config.num_steps
    rollout = f"a rollout of --num-envs {config.num_envs} times --num-steps {config.num_steps}"
    if config.total_timesteps < size:
        raise UserError(
            f"--total-timesteps {config.total_timesteps} is less than {rollout} = {size}; use at "
            f"least {size}, or shorter rollouts"
        )
    if hasattr(config, "core") and config.num_envs % config.num_minibatches:
        raise UserError(
            f"--num-minibatches {config.num_minibatches} does not divide --num-envs "
            f"{config.num_envs}, whose sequences stay whole; use a divisor of it"
        )
    if size % getattr(config, "num_minibatches", 1):
        raise UserError(
            f"--num-minibatches {config.num_minibatches} does not divide {rollout} = {size}; use a "
            "divisor of it"
        )


def flag_of(name: str) -> str:
    """Return a field's command-line flag."""
    return "--" + name.replace("_", "-")
