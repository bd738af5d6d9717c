"""Ranges in the types of fields, and what a Config refuses when it is made."""

import importlib
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest

from common.errors import UserError
from common.ranges import Fraction, NonNegative, Positive, ProperFraction, Range

from common.run.config import check_minibatches, check_ranges, check_updates

ALGOS = sorted(p.stem for p in (Path(__file__).parent.parent / "algos").glob("[a-z]*.py"))
WITH_REPLAY = [
    algo
    for algo in ALGOS
    if hasattr(importlib.import_module(f"algos.{algo}").Config, "buffer_size")
]


@dataclass(frozen=True)
class Options:
    """A field of each kind of range, and some without one."""

    size: Positive[int] = 1
    rate: Positive[float] = 1.0
    limit: Positive[float] | None = None
    count: NonNegative[int] = 0
    share: Fraction = 0.5
    memory: ProperFraction = 0.5
    angle: Annotated[float, "radians", Range(above=-3, at_most=3)] = 0.0
    name: str = "free"
    flag: bool = False
    free: int = -7
    table: dict[str, int] = field(default_factory=dict)
    anything: Any = None
    words: tuple[str, ...] = ()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"size": 2**31 - 1, "rate": 1e-9, "limit": 3, "count": 0, "name": "", "free": -(2**40)},
        {"share": 0, "memory": 0.0, "angle": 3},
        {"share": 1.0, "memory": 0.999, "angle": -2.9},
    ],
)
def test_what_lies_inside_is_accepted(fields):
    check_ranges(Options(**fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"size": 0}, "--size must be above 0, got 0"),
        ({"size": 1.0}, "--size must be a whole number, got 1.0"),
        ({"size": True}, "--size must be a whole number, got True"),
        ({"size": 2**31}, "--size must be below 2147483648, got 2147483648"),
        ({"rate": 0.0}, "--rate must be above 0, got 0.0"),
        (
            {"rate": 1e-46},
            "--rate must be 1.17549e-38 or more in size, got 1e-46, which is 0 in float32",
        ),
        ({"rate": 10**400}, f"--rate must be 3.40282e+38 or less, got {10**400}"),
        ({"name": None}, "--name must be a text, got None"),
        ({"flag": 1}, "--flag must be true or false, got 1"),
        ({"free": 2.0}, "--free must be a whole number, got 2.0"),
        ({"rate": math.inf}, "--rate must be a finite number, got inf"),
        ({"rate": math.nan}, "--rate must be a finite number, got nan"),
        ({"rate": "1"}, "--rate must be a finite number, got '1'"),
        ({"rate": None}, "--rate must be a finite number, got None"),
        ({"limit": -1.0}, "--limit must be above 0, got -1.0"),
        ({"count": -1}, "--count must be 0 or more, got -1"),
        (
            {"size": np.int64(3)},
            "--size must be a whole number, got np.int64(3) of type int64; give a Python int",
        ),
        (
            {"rate": np.float32(0.5)},
            "--rate must be a finite number, got np.float32(0.5) of type float32; give a Python "
            "float",
        ),
        (
            {"size": np.float32(3)},
            "--size must be a whole number, got np.float32(3.0) of type float32; give a Python int",
        ),
        (
            {"rate": [0.5]},
            "--rate must be a finite number, got [0.5] of type list; give a Python float",
        ),
        (
            {"words": ["a"]},
            "--words must be a list of words, got ['a'] of type list; give a Python tuple",
        ),
        ({"share": 1.01}, "--share must be between 0 and 1, got 1.01"),
        ({"share": -0.1}, "--share must be between 0 and 1, got -0.1"),
        ({"memory": 1.0}, "--memory must be 0 or more and below 1, got 1.0"),
        ({"angle": -3.0}, "--angle must be above -3 and 3 or less, got -3.0"),
    ],
)
def test_what_lies_outside_is_named_with_what_is_accepted(fields, message):
    with pytest.raises(UserError) as raised:
        check_ranges(Options(**fields))
    assert str(raised.value) == message


@pytest.mark.parametrize("algo", ALGOS)
def test_a_config_checks_itself(algo):
    config = importlib.import_module(f"algos.{algo}").Config()
    with pytest.raises(UserError, match=r"--gamma must be between 0 and 1, got 1\.5"):
        replace(config, gamma=1.5)
    with pytest.raises(UserError, match="--total-timesteps must be a multiple of --num-envs 3"):
        replace(config, num_envs=3)
    with pytest.raises(UserError, match=r"--seed must be a whole number, got 1\.5"):
        type(config)(seed=1.5)


BAD_FIELDS: dict[str, tuple[dict, str]] = {
    "number for an id": (dict(env_id=3), "--env-id must be a text, got 3"),
    "no id": (dict(env_id=""), "--env-id needs a value, got ''"),
    "text for a list": (dict(env_kwargs="a=1"), "--env-kwargs must be a list of words, got 'a=1'"),
    "list for a tuple": (dict(env_kwargs=["a=1"]), "--env-kwargs must be a list of words"),
    "dict for a tuple": (dict(env_kwargs={"a": 1}), "--env-kwargs must be a list of words"),
    "numbers in a tuple": (dict(env_kwargs=(1,)), "--env-kwargs must be a list of words"),
    "number for a module": (dict(env_module=3), "--env-module must be a text, got 3"),
    "no such backend": (dict(env_backend="foo"), "--env-backend must be one of auto, envpool"),
}


@pytest.mark.parametrize("name", BAD_FIELDS)
@pytest.mark.parametrize("algo", ALGOS)
def test_every_field_is_held_to_its_type(algo, name):
    fields, message = BAD_FIELDS[name]
    with pytest.raises(UserError) as raised:
        importlib.import_module(f"algos.{algo}").Config(**fields)
    assert message in str(raised.value)


def test_bools_and_choices_are_held_to_their_types():
    with pytest.raises(UserError, match="--normalize-obs must be true or false, got 'yes'"):
        importlib.import_module("algos.ppo").Config(normalize_obs="yes")
    with pytest.raises(UserError, match="--core must be one of lstm, gru, got 'rnn'"):
        importlib.import_module("algos.ppo_rnn").Config(core="rnn")


@pytest.mark.parametrize("algo", WITH_REPLAY)
def test_replay_holds_a_batch_and_a_transition(algo):
    config = importlib.import_module(f"algos.{algo}").Config()
    with pytest.raises(UserError, match="--batch-size 3 is larger than --buffer-size 2"):
        replace(config, batch_size=3, buffer_size=2)
    rows = {"burn_in": 1, "sequence_length": 1, "sequence_period": 1} if algo == "r2d2" else {}
    config = replace(config, num_envs=8, n_step=4, **rows)
    least = 8 * (6 if algo == "r2d2" else 5)
    with pytest.raises(UserError, match=f" use at least {least}"):
        replace(config, learning_starts=least - 1)
    with pytest.raises(UserError, match="--num-envs 8 and --n-step 4 use at least 40"):
        replace(config, learning_starts=39)
    replace(config, learning_starts=least)


@pytest.mark.parametrize("algo", ["ddpg", "td3", "sac", "sac_discrete"])
def test_updates_can_be_counted(algo):
    config = importlib.import_module(f"algos.{algo}").Config()
    with pytest.raises(UserError, match=r"--updates-per-step must be at least 0\.001, got 0\.0009"):
        replace(config, updates_per_step=0.0009)
    with pytest.raises(UserError, match="more than 2147483647 updates"):
        replace(config, updates_per_step=20_000.0)
    check_updates(1.0, 2**31 - 1)


@pytest.mark.parametrize("algo", ["ppo", "a2c", "ppo_rnn", "impala", "pqn", "apex_dqn"])
def test_a_run_has_a_rollout(algo):
    config = importlib.import_module(f"algos.{algo}").Config(num_envs=4, num_steps=25)
    with pytest.raises(UserError, match=r"is less than a rollout .* = 100; use at least 100"):
        replace(config, total_timesteps=96)
    replace(config, total_timesteps=100)


def test_minibatches_have_one_size():
    check_minibatches(4, 12, "x")
    with pytest.raises(
        UserError, match="--num-minibatches 5 does not divide x; use a divisor of 12"
    ):
        check_minibatches(5, 12, "x")
    ppo, ppo_rnn = (importlib.import_module(f"algos.{algo}").Config for algo in ("ppo", "ppo_rnn"))
    ppo(num_envs=2, num_steps=128, num_minibatches=4)
    with pytest.raises(
        UserError,
        match="does not divide --num-envs 2, whose sequences stay whole; use a divisor of 2",
    ):
        ppo_rnn(num_envs=2, num_steps=128, num_minibatches=4)
