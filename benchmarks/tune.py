"""Tune the fields of an algorithm file's Config with Optuna; trials train in this process.

    python benchmarks/tune.py --algo dqn --env-id gymnax/CartPole-v1 \\
        --fields learning_rate gamma num_envs=4:64 batch_size=64,128 -- --total-timesteps 50000

Flags after `--` hold for every trial. The first trial takes the defaults, which with the types of
the fields also give the ranges:

    Positive, NonNegative       from default / 10 to default * 10 (int: / 4 to * 4), even in the log
    Fraction of 0.9 and more    its distance from 1 from / 10 to * 10, even in the log
    other Fraction              from 0 to 1, even
    bool, Literal               every value
    NAME=LOW:HIGH, NAME=A,B,C   what is said here; LOW:HIGH keeps the spacing of the type

A trial's value is the mean training return of the last tenth of its steps, over seeds. Trials that
are below the median at a log point stop there, and so do combinations that Config refuses.
Files under --out, written after each trial:

    trials.csv  one row a trial: state, value, seconds, fields, and why it stopped
    study.json  what was tuned, and the best command line

Exit codes: 0 done; 1 no trial came to its end; 2 bad input; 130 stopped by Ctrl-C.
"""

import argparse
import contextlib
import dataclasses
import difflib
import importlib
import json
import shlex
import sys
import types
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import numpy as np

from common.errors import UserError, one_line
from common.ranges import Range
from machine import ROOT, cpu_model, describe_commit
from report import Curve, csv_text, late_return, write_atomically

from common.run import cli, threads
from common.run.config import flag_of

NEAR_ONE = 0.9
FIXED = cli.ENVIRONMENT_FIELDS - {"num_envs"} | {"seed", "total_timesteps", "log_frequency"}


@dataclass(frozen=True)
class TuneOptions:
    """What to tune, how long, and where the results go."""

    algo: str = "dqn"
    """name of a file in algos/"""
    env_id: str = "gymnax/CartPole-v1"
    """environment, as --env-id takes it"""
    fields: tuple[str, ...] = ("learning_rate",)
    """fields of Config, as NAME, NAME=LOW:HIGH or NAME=A,B,C"""
    num_trials: int = 20
    """settings to try"""
    num_seeds: int = 1
    """runs of each setting, with the seeds 1 to num_seeds"""
    sampler_seed: int = 0
    """seed of the settings that are tried"""
    out: str = "runs/tune"
    """folder of the results"""
    debug: bool = False
    """show tracebacks"""


class Choices(NamedTuple):
    """One of a few values."""

    values: tuple[Any, ...]


class Interval(NamedTuple):
    """A number from low to high; `log`: even in its logarithm, or in that of 1 - x."""

    low: float
    high: float
    log: Literal["", "x", "1 - x"]


Space = Choices | Interval


def main(args: list[str]) -> int:
    """Tune what a command line describes and return the exit code.

    Raises:
        UserError: bad input, or a folder that cannot be used; no trial was made.
    """
    split = args.index("--") if "--" in args else len(args)
    hint = "flags of the trials follow `--`; see --help"
    options = cli.parse_flags(TuneOptions, args[:split], __doc__ or "", hint)
    return Tuning(options, args[split + 1 :]).execute()


class Tuning:
    """A study: the defaults, the ranges of what is tuned, and the trials."""

    def __init__(self, options: TuneOptions, flags: list[str]) -> None:
        self.optuna = _import_optuna()
        _check_options(options, flags)
        self.options, self.flags, self.out = options, flags, Path(options.out)
        self.module = importlib.import_module(f"algos.{options.algo}")
        parsed = cli.parse(
            self.module.Config, self.module.PRESETS, ["--env-id", options.env_id, *flags]
        )
        self.config = parsed.config
        self.spaces = spaces_of(self.config, options.fields)
        self.commit = describe_commit()

    def execute(self) -> int:
        """Make the trials and return the exit code."""
        optuna, options = self.optuna, self.options
        self.module.Trainer(self.config).env.close()  # the defaults must work
        _make_folder(self.out)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.study = optuna.create_study(
            direction="maximize",
            sampler=optuna.samplers.TPESampler(seed=options.sampler_seed),
            pruner=optuna.pruners.MedianPruner(),
        )
        self.study.enqueue_trial(default_parameters(self.config, self.spaces, options.fields))
        self.study.optimize(self.objective, options.num_trials, callbacks=[self._write])
        if (best := self._best()) is None:
            print("no trial came to its end; trials.csv says why", file=sys.stderr)
            return 1
        print(f"best of {len(self.study.trials)} trials: {best.value:.1f}, in {self.out}")
        print(self.command(best))
        return 0

    def objective(self, trial: Any) -> float:
        """Return the mean training return of the last tenth of the steps, over seeds."""
        values = {name: suggest(trial, name, space) for name, space in self.spaces.items()}
        trial.set_user_attr("fields", values)
        try:
            config = with_fields(self.config, values)
            trial.set_user_attr("total_timesteps", config.total_timesteps)
            returns = [self._train(trial, config, i) for i in range(self.options.num_seeds)]
        except UserError as error:
            raise self._stopped(trial, one_line(error)) from error
        if not np.isfinite(returns).all():
            raise self._stopped(trial, "no episode ended in the last tenth of the steps")
        return float(np.mean(returns))

    def _train(self, trial: Any, config: Any, index: int) -> float:
        """Train one seed; its log points follow those of the seeds before."""
        config = dataclasses.replace(config, seed=index + 1)
        points_before = index * -(-config.total_timesteps // config.log_frequency)
        curve: Curve = []
        with contextlib.closing(self.module.Trainer(config)()) as training:
            for step, value, episodes in points(training):
                curve.append((step, value, episodes))
                # Counted, because with another num_envs log points lie at slightly other steps.
                trial.report(value, points_before + round(step / config.log_frequency))
                self._stop_below_median(trial, f"step {step} of seed {config.seed}")
        return late_return(curve, config.total_timesteps)

    def _stop_below_median(self, trial: Any, where: str) -> None:
        if trial.should_prune():
            raise self._stopped(trial, f"below the median at {where}")

    def _stopped(self, trial: Any, reason: str) -> Exception:
        trial.set_user_attr("reason", reason)
        return self.optuna.TrialPruned(reason)

    def _best(self) -> Any:
        complete = self.study.get_trials(states=[self.optuna.trial.TrialState.COMPLETE])
        return max(complete, key=lambda trial: trial.value, default=None)

    def command(self, trial: Any) -> str:
        """Return the command line that trains with a trial's fields."""
        own = ["python", f"algos/{self.options.algo}.py", "--env-id", self.options.env_id]
        values = dict(trial.user_attrs["fields"])
        total = trial.user_attrs["total_timesteps"]
        flags = self.flags
        if total != self.config.total_timesteps:  # a multiple of the trial's --num-envs
            given = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
            given.add_argument("--total-timesteps", "--total_timesteps")
            flags = given.parse_known_args(flags)[1]
            values["total_timesteps"] = total
        words = [word for name, value in values.items() for word in _flag(name, value)]
        return shlex.join([*own, *flags, *words])

    def _write(self, study: Any, trial: Any) -> None:
        """Say how a trial ended, and write the files."""
        best, attributes = self._best(), trial.user_attrs
        ended = f"{trial.value:.1f}" if trial.value is not None else ""
        if "reason" in attributes:
            ended = f"stopped, {attributes['reason']}"
        shown = "  ".join(f"{name} {_short(v)}" for name, v in attributes["fields"].items())
        print(f"trial {trial.number}: {ended}  ({shown})", flush=True)
        write_atomically(self.out / "trials.csv", self._table(study.trials))
        about = {
            "options": dataclasses.asdict(self.options),
            "flags": self.flags,
            "spaces": {name: space._asdict() for name, space in self.spaces.items()},
            "best_value": best and best.value,
            "best_command": best and self.command(best),
            "commit": self.commit,
            "machine": cpu_model(),
        }
        write_atomically(self.out / "study.json", json.dumps(about, indent=2))

    def _table(self, trials: list[Any]) -> str:
        rows = []
        for trial in (trial for trial in trials if "fields" in trial.user_attrs):
            seconds = trial.duration.total_seconds() if trial.duration else float("nan")
            state, value = trial.state.name.lower(), trial.value
            if state == "pruned":
                value = None  # Optuna gives the last log point's
            fields = trial.user_attrs["fields"].values()
            reason = trial.user_attrs.get("reason", "")
            rows.append([trial.number, state, value, f"{seconds:.1f}", *fields, reason])
        return csv_text(["trial", "state", "value", "seconds", *self.spaces, "reason"], rows)


def _import_optuna() -> Any:
    try:
        return importlib.import_module("optuna")
    except ImportError as error:
        raise UserError("tuning needs Optuna; pip install -e '.[tune]'") from error


def _check_options(options: TuneOptions, flags: list[str]) -> None:
    known = sorted(path.stem for path in (ROOT / "algos").glob("[!_]*.py"))
    if options.algo not in known:
        raise UserError(f"unknown --algo {options.algo!r}; accepted are {', '.join(known)}")
    for name in ("num_trials", "num_seeds"):
        if getattr(options, name) < 1:
            raise UserError(f"{flag_of(name)} must be 1 or more, got {getattr(options, name)}")
    if not options.fields:
        raise UserError("--fields needs at least one name")
    for flag in flags:
        if flag.partition("=")[0].replace("_", "-") in ("--env-id", "--seed", "--num-seeds"):
            raise UserError(f"{flag} cannot follow `--`; give it before, or leave it out")


def _make_folder(out: Path) -> None:
    if (out / "study.json").exists():
        raise UserError(f"--out {out} holds a study already; give another folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(out / "trials.csv", "")
    except OSError as error:
        raise UserError(f"cannot write to --out {out} ({error}); give another folder") from error


def points(training: Iterable[dict]) -> Generator[tuple[int, float, float], None, None]:
    """Yield env step, mean return and number of episodes of the log points that have episodes."""
    for log_data in training:
        logs = log_data["logs"]
        if "charts/episodic_return" in logs:
            step = log_data["sample_step"]
            yield step, logs["charts/episodic_return"], logs["charts/episodes"]


def with_fields(config: Any, values: dict[str, Any]) -> Any:
    """Return a Config with other values, its steps rounded down to whole vector steps.

    Raises:
        UserError: they do not go together.
    """
    num_envs = values.get("num_envs", config.num_envs)
    total = max(config.total_timesteps // num_envs, 1) * num_envs
    return dataclasses.replace(config, total_timesteps=total, **values)


def spaces_of(config: Any, fields: tuple[str, ...]) -> dict[str, Space]:
    """Return the range of each field, from NAME, NAME=LOW:HIGH or NAME=A,B,C.

    Raises:
        UserError: a field or a range that is not accepted.
    """
    hints = get_type_hints(type(config), include_extras=True)
    known = [name for name in hints if name not in FIXED]
    spaces = {}
    for field in fields:
        name = field.partition("=")[0].replace("-", "_")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3)
            hint = f"did you mean {', '.join(near)}?" if near else f"there are {', '.join(known)}"
            raise UserError(f"--fields {name!r} cannot be tuned; {hint}")
        kind, accepted = _kind_and_range(hints[name])
        default = getattr(config, name)
        make = given_space if "=" in field else default_space
        spaces[name] = make(field, kind, accepted, default)
    return spaces


def _kind_and_range(hint: Any) -> tuple[Any, Range | None]:
    """Return the plain type of a field, without None, and its range if it has one."""
    if get_origin(hint) in (Union, types.UnionType):
        hint = get_args(hint)[0]
    if get_origin(hint) is not Annotated:
        return hint, None
    kind, *details = get_args(hint)
    return kind, next((x for x in details if isinstance(x, Range)), None)


def default_space(field: str, kind: Any, accepted: Range | None, default: Any) -> Space:
    """Return the range that a field's type and default give.

    Raises:
        UserError: they give none.
    """
    if kind is bool:
        return Choices((False, True))
    if get_origin(kind) is Literal:
        return Choices(get_args(kind))
    log = _log(kind, accepted, default)
    if log == "1 - x":
        return Interval(max(1 - (1 - default) * 10, 0.0), 1 - (1 - default) / 10, log)
    if log and kind is int:
        return Interval(max(default // 4, 1), default * 4, log)
    if log:
        return Interval(default / 10, default * 10, log)
    if kind is float and _is_fraction(accepted):
        return Interval(0.0, 1.0, "")
    raise UserError(
        f"--fields {field} has the default {default!r}, which gives no range; say which, as "
        f"{field}=LOW:HIGH or {field}=A,B,C"
    )


def given_space(field: str, kind: Any, accepted: Range | None, default: Any) -> Space:
    """Return the range that NAME=LOW:HIGH or NAME=A,B,C gives.

    Raises:
        UserError: values that the field does not take.
    """
    text = field.partition("=")[2]
    is_interval = ":" in text and kind in (int, float)
    values = [_parsed(field, part, kind) for part in text.split(":" if is_interval else ",")]
    if accepted is not None and not all(map(accepted.holds, values)):
        raise UserError(f"--fields {field}: values must be {accepted}")
    if not is_interval:
        return Choices(tuple(values))
    if len(values) != 2 or not values[0] < values[1]:
        raise UserError(f"--fields {field} must be NAME=LOW:HIGH, with LOW below HIGH")
    low, high = values
    log = _log(kind, accepted, default)
    fits = {"x": low > 0, "1 - x": high < 1}.get(log, True)
    return Interval(low, high, log if fits else "")


def _is_fraction(accepted: Range | None) -> bool:
    return accepted is not None and accepted.at_least == 0 and 1 in (accepted[2:])


def _log(kind: Any, accepted: Range | None, default: Any) -> Literal["", "x", "1 - x"]:
    """Return in which logarithm a field is even."""
    if kind not in (int, float) or accepted is None or default is None:
        return ""
    if _is_fraction(accepted):
        return "1 - x" if NEAR_ONE <= default < 1 else ""
    return "x" if default > 0 and 0 in (accepted.above, accepted.at_least) else ""


def _parsed(field: str, text: str, kind: Any) -> Any:
    """Return a value of a field's type."""
    known: dict[Any, Callable[[str], Any]] = {
        int: int,
        float: float,
        bool: {"true": True, "false": False}.__getitem__,
    }
    try:
        if get_origin(kind) is Literal:
            return {str(value): value for value in get_args(kind)}[text]
        return known.get(kind, str)(text)
    except (ValueError, LookupError) as error:
        words = {int: "a whole number", float: "a number", bool: "true or false"}
        wanted = words.get(kind) or f"one of {', '.join(map(str, get_args(kind)))}"
        raise UserError(f"--fields {field}: {text!r} is not {wanted}; correct it") from error


def suggest(trial: Any, name: str, space: Space) -> Any:
    """Return a trial's value of a field."""
    if isinstance(space, Choices):
        return trial.suggest_categorical(name, space.values)
    if space.log == "1 - x":
        return 1 - trial.suggest_float(f"1 - {name}", 1 - space.high, 1 - space.low, log=True)
    of_kind = trial.suggest_int if isinstance(space.high, int) else trial.suggest_float
    return of_kind(name, space.low, space.high, log=bool(space.log))


def default_parameters(
    config: Any, spaces: dict[str, Space], fields: tuple[str, ...]
) -> dict[str, Any]:
    """Return the defaults as Optuna's parameters; fields whose range was given are left out."""
    given = {field.partition("=")[0].replace("-", "_") for field in fields if "=" in field}
    parameters = {}
    for name, space in spaces.items():
        near_one = isinstance(space, Interval) and space.log == "1 - x"
        value = getattr(config, name)
        if name not in given:
            parameters[f"1 - {name}" if near_one else name] = 1 - value if near_one else value
    return parameters


def _flag(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [flag_of(name if value else f"no_{name}")]
    return [flag_of(name), str(value)]


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    with cli.exit_codes("--debug" in sys.argv):
        threads.use_cores(1)
        sys.exit(main(sys.argv[1:]))
