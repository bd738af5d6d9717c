"""The command line: one flat set of flags from an algorithm's Config and the runner's options."""

import argparse
import ast
import contextlib
import dataclasses
import difflib
import inspect
import io
import itertools
import os
import re
import sys
import textwrap
import traceback
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin, get_type_hints

import tyro
from gymnasium import spaces
from rich.console import Console

from common.envs import import_envpool
from common.errors import UserError, one_line
from common.ranges import NonNegative, Positive, Range, accepted

from common.run.config import check_ranges, field_values, flag_of, read_object
from common.run.trainer import Presets, RunConfig

ABBREVIATIONS = {"--lr": "--learning-rate", "--bs": "--batch-size", "--steps": "--total-timesteps"}
Episodes = Annotated[int, Range(at_least=0, at_most=100_000)]  # of evaluation, counted in 32 bits
NOT_SAVED = {"config", "resume", "debug"}  # fields of RunOptions that no config.json has
ENVIRONMENT_FIELDS = {
    *("env_id", "env_backend", "env_module", "env_kwargs", "num_envs", "env_workers")
}


@dataclasses.dataclass(frozen=True)
class LoggingOptions:
    """Where a run's figures go."""

    runs_dir: str = "runs"  # folder in which every run gets a folder of its own
    track: bool = False  # log to Weights & Biases as well
    wandb_project: str = "quartet"  # wandb project
    wandb_entity: str | None = None  # wandb user or team; the account's default if not given
    wandb_group: str | None = None  # wandb group, for example one for all seeds of a setting
    wandb_tags: tuple[str, ...] = ()  # wandb tags
    wandb_mode: Literal["online", "offline"] = "online"  # offline: upload later by `wandb sync`
    capture_video: bool = False  # save a GIF of the final policy where the environment can render


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """How a run is evaluated, saved, resumed and executed."""

    preset: str = "auto"  # table of defaults; auto chooses by the environment
    config: str | None = None  # JSON file of defaults, such as a run's config.json; flags win
    resume: str | None = None  # run folder to go on with
    eval_frequency: NonNegative[int] = 50_000  # env steps between two; 0: at the end only
    eval_episodes: Episodes = 20  # full episodes an evaluation; 0: no evaluation
    eval_max_steps: Positive[int] = 100_000  # steps after which evaluation cuts an episode off
    checkpoint_frequency: NonNegative[int] = 100_000  # env steps between two; 0: at the end only
    keep_checkpoints: Positive[int] = 2  # latest checkpoints kept; the best one is kept as well
    device: Literal["auto", "cpu", "gpu"] = "auto"  # auto computes on a GPU if there is one
    num_cores: Positive[int] | None = None  # cores to hold; by default the file's
    num_seeds: Positive[int] = 1  # seeds in one program, from --seed on; JAX envs only
    num_devices: Positive[int] = 1  # devices that share the environments; JAX envs only
    debug: bool = False  # show tracebacks, and check every quantity for NaN after each step (slow)


@dataclasses.dataclass(frozen=True)
class ExplorerOptions:
    """Processes that collect, on this machine or on a Ray cluster."""

    explorers: NonNegative[int] = 0  # Explorers that collect; 0: this process does
    ray_address: str | None = None  # Ray cluster, or auto; by default this machine alone
    in_flight: NonNegative[int] = 0  # trajectories on their way at once; 0: two for each Explorer
    publish_frequency: Positive[int] = 1  # trajectories learned between two that are published
    explorer_timeout: Positive[float] = 60.0  # seconds for a trajectory; a slower one is replaced
    max_explorer_restarts: NonNegative[int] = 3  # failures of one Explorer before training stops


@dataclasses.dataclass(frozen=True)
class Options:
    """Everything the command line says."""

    config: RunConfig
    logging: LoggingOptions
    run: RunOptions
    explorers: ExplorerOptions


@contextlib.contextmanager
def exit_codes(debug: bool) -> Generator[None, None, None]:
    """Turn a UserError into one line and its exit code, and Ctrl-C into one line and 130."""
    if sys.stdout is None:  # closed by whoever started this process
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, it lasts as long as the process
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without ± shows ?
    try:
        yield
    except UserError as error:
        if debug:
            traceback.print_exc()
        print("error:", one_line(error), file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("stopped by SIGINT", file=sys.stderr)
        sys.exit(130)


def parse(
    config_class: type[RunConfig], presets: Presets, args: Sequence[str] | None = None
) -> Options:
    """Read the command line over the preset, the --config file or the resumed run's config.

    Raises:
        UserError: a flag, value, preset or file that is not accepted.
        SystemExit: after --help.
    """
    args = sys.argv[1:] if args is None else list(args)
    early = _early_flags(args)
    for name, value in vars(early).items():
        if value == "":
            raise UserError(f"{flag_of(name)} needs a value, got ''; leave it out, or see --help")
    defaults = _defaults(config_class, presets, early)
    groups = {
        "algorithm": _group(config_class, "algorithm", defaults, presets),
        "environment": _group(config_class, "environment", defaults, presets),
        "logging": _with_defaults(LoggingOptions, defaults),
        "run": _group(RunOptions, "run", defaults | {"config": early.config}, presets),
        "explorers": _with_defaults(ExplorerOptions, defaults),
    }
    flat_group: Any = tyro.conf.OmitArgPrefixes
    fields = [(name, flat_group[type(group)], group) for name, group in groups.items()]
    root = dataclasses.make_dataclass("Flags", fields)
    summary = sys.modules[config_class.__module__].__doc__ or ""
    parsed = parse_flags(root, args, summary.split("\n\n")[0])
    flat = {f: v for g in (parsed.algorithm, parsed.environment) for f, v in vars(g).items()}
    of_preset = presets[defaults["preset"]].get("env_kwargs", ())
    if flat["env_kwargs"] != defaults.get("env_kwargs", ()):
        flat["env_kwargs"] = _over_preset(flat["env_kwargs"], of_preset)
    run = RunOptions(**vars(parsed.run) | {"preset": defaults["preset"]})
    _check_explorer_flags(parsed.explorers, _with_defaults(ExplorerOptions, defaults))
    options = Options(config_class(**flat), parsed.logging, run, parsed.explorers)
    check_ranges(options.run)
    check_ranges(options.explorers)
    return options


def _check_explorer_flags(given: ExplorerOptions, defaults: ExplorerOptions) -> None:
    for name, value in vars(given).items():
        if not given.explorers and value != getattr(defaults, name) and name != "explorers":
            raise UserError(
                f"{flag_of(name)} {value} is for Explorers, and there are none; give --explorers N"
            )


def checkpoint_of(text: str) -> int | str:
    """Return what --checkpoint names, as `load` takes it: a step, "latest" or "best".

    Raises:
        UserError: it is something else.
    """
    if text in ("latest", "best"):
        return text
    if not text.isdecimal() or len(text) > 20:  # Python reads no number of thousands of digits
        raise UserError(f"--checkpoint must be a step, latest or best, got {text!r}")
    return int(text)


def algo_of(algorithm: type) -> str:
    """Return the name of the file that holds an algorithm's class."""
    return Path(sys.modules[algorithm.__module__].__file__ or "").stem


def _early_flags(args: Sequence[str]) -> argparse.Namespace:
    """Find the flags that choose the defaults of all others, and those that cannot be empty."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    choosing = ("config", "resume", "preset", "env-id", "env-backend")
    for flag in (*choosing, "env-module", "runs-dir"):
        names = dict.fromkeys((f"--{flag}", f"--{flag.replace('-', '_')}"))
        parser.add_argument(*names, nargs="?")
    return parser.parse_known_args(args)[0]


def _defaults(config_class: type, presets: Presets, early: argparse.Namespace) -> dict[str, Any]:
    saved = _saved_flags(config_class, early)
    env_id = early.env_id or saved.get("env_id") or config_class().env_id
    of_file = saved.get("preset") or "auto"
    preset = early.preset or of_file
    if preset == "auto":
        preset = _auto_preset(env_id, early.env_backend or saved.get("env_backend"), presets)
    if preset not in presets:
        raise UserError(f"unknown --preset {preset!r}; accepted are auto, {', '.join(presets)}")
    if of_file not in ("auto", preset):
        here = f" ({preset} here)" if early.preset == "auto" else ""
        raise UserError(
            f"--preset {early.preset}{here} differs from the preset {of_file} in "
            f"{early.config or early.resume}, whose values would stay; leave it out"
        )
    return presets[preset] | saved | {"preset": preset}


def _saved_flags(config_class: type, early: argparse.Namespace) -> dict[str, Any]:
    """Return the flags of the --config file or of the run to resume."""
    if early.resume and early.config:
        raise UserError(
            f"--resume {early.resume} brings its own config.json; leave out --config {early.config}"
        )
    if early.config:
        return _read_config(Path(early.config), "--config", config_class)
    if not early.resume:
        return {}
    path, algo = Path(early.resume, "config.json"), algo_of(config_class)
    trained_by = _read_json(path, "--resume").get("algo")
    if trained_by != algo:
        raise UserError(
            f"--resume {early.resume} was trained by {trained_by}, not by {algo}; resume it with "
            "its own file"
        )
    return _read_config(path, "--resume", config_class)


def _over_preset(env_kwargs: tuple[str, ...], of_preset: tuple[str, ...]) -> tuple[str, ...]:
    """Return the KEY=VALUE pairs of a preset whose keys are not given, and those that are."""
    given = {pair.partition("=")[0] for pair in env_kwargs}
    return (*(pair for pair in of_preset if pair.partition("=")[0] not in given), *env_kwargs)


def _auto_preset(env_id: str, backend: str | None, presets: Presets) -> str:
    """Return the preset of MinAtar, Atari (envpool's) or continuous actions, else the first."""
    if "minatar" in presets and re.fullmatch("pgx/minatar-.*|gymnax/.*-MinAtar", env_id):
        return "minatar"
    name, first = env_id.removeprefix("gymnax/"), next(iter(presets))
    if len(presets) == 1 or ("mujoco" not in presets and not name.endswith("-v5")):
        return first
    envpool = import_envpool()
    from common.envs.envpool_backend import is_atari

    if name not in envpool.list_all_envs():
        return first
    if is_atari(name):
        return first if backend in ("gymnasium", "jax") or "atari" not in presets else "atari"
    continuous = isinstance(envpool.make_spec(name).action_space, spaces.Box)
    return "mujoco" if continuous and "mujoco" in presets else first


def _read_json(path: Path, flag: str) -> dict[str, Any]:
    wanted = {
        "--config": "a JSON file of flags such as a run's config.json",
        "--resume": "a run folder, such as one under runs/",
    }
    try:
        return read_object(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{flag} cannot read {path} ({error}); give {wanted[flag]}") from error


def _read_config(path: Path, flag: str, config_class: type) -> dict[str, Any]:
    saved = _read_json(path, flag)
    for name in ("algo", "version"):
        saved.pop(name, None)
    for name in NOT_SAVED & saved.keys():
        raise UserError(
            f"{flag}: {path} has the entry {name!r}, which holds for one call alone; leave it out, "
            f"and give {flag_of(name)}"
        )
    options = (config_class, LoggingOptions, RunOptions, ExplorerOptions)
    return field_values(saved, options, f"{flag}: {path}")


def _group(config_class: type, group: str, defaults: dict[str, Any], presets: Presets) -> Any:
    """Return an instance of a dataclass with the fields of one help group."""
    docs, hints = _field_docs(config_class), get_type_hints(config_class)
    if "preset" in docs:
        docs["preset"] += f"; accepted are auto, {', '.join(presets)}"
    fields = []
    for field in dataclasses.fields(config_class):
        if (field.name in ENVIRONMENT_FIELDS) == (group == "environment"):
            help_text = tyro.conf.arg(help=docs[field.name])
            annotated: Any = Annotated
            hint = annotated[hints[field.name], help_text]
            fields.append((field.name, hint, dataclasses.field(default=field.default)))
    made = dataclasses.make_dataclass(group, fields, frozen=True)
    return _with_defaults(made, defaults)


def _with_defaults(options: type, defaults: dict[str, Any]) -> Any:
    names = {f.name for f in dataclasses.fields(options)}
    return options(**{k: v for k, v in defaults.items() if k in names})


def _field_docs(config_class: type) -> dict[str, str]:
    """Return the comment beside each field of a dataclass."""
    lines = textwrap.dedent(inspect.getsource(config_class)).split("\n")
    body = ast.parse("\n".join(lines)).body[0].body  # type: ignore
    docs = {}
    for field in body:
        if isinstance(field, ast.AnnAssign):
            rest = lines[(field.end_lineno or 0) - 1].encode()[field.end_col_offset :].decode()
            docs[field.target.id] = rest.strip(" #")  # type: ignore
    return docs


@dataclasses.dataclass(frozen=True)
class NoFlags:
    """The flags of a program that has none: it answers --help, and refuses all others."""


def parse_flags(
    root: type, args: Sequence[str], description: str, hint: str = "see --help for all flags"
) -> Any:
    """Read flags into a dataclass; nested ones group them. An unknown one is answered with `hint`.

    Raises:
        UserError: an unknown flag, a missing value or one of the wrong type.
        SystemExit: after --help.
    """
    hints, printed = _flag_hints(root), io.StringIO()
    _check_words(hints, args)
    module = sys.modules["__main__"].__spec__  # None where a file was started by its path
    prog = f"python -m {module.name}" if module else None
    try:
        with contextlib.redirect_stderr(printed):
            try:
                result: tuple[Any, list[str]] = tyro.cli(
                    root, prog=prog, args=args, description=description, return_unknown_args=True
                )
            finally:
                sys.stdout.flush()  # at the interpreter's end nobody would catch what it raises
    except SystemExit as stop:
        if not stop.code:
            raise
        raise UserError(_bad_value(printed.getvalue(), hints, args)) from stop
    except BrokenPipeError:  # whoever reads --help has seen enough
        Console().on_broken_pipe()
        raise
    parsed, unknown = result
    if not unknown:
        return parsed
    flag = unknown[0].partition("=")[0]
    near = [ABBREVIATIONS[flag]] if ABBREVIATIONS.get(flag) in hints else []
    near = near or difflib.get_close_matches(flag, hints, n=3)
    hint = f"did you mean {', '.join(near)}? see --help" if near else hint
    if not flag.startswith("-"):
        raise UserError(f"unknown argument {flag!r}; {_switch_before(flag, hints, args) or hint}")
    raise UserError(f"unknown flag {flag!r}; {hint}")


def _switch_before(word: str, hints: dict[str, Any], args: Sequence[str]) -> str:
    """Return how the switch that stands before `word` is set; "" if there is none."""
    for before, following in itertools.pairwise([part for arg in args for part in arg.split("=")]):
        name = before.replace("_", "-").replace("--no-", "--", 1)
        if following == word and hints.get(name) is bool:
            off = name.replace("--", "--no-", 1)
            return f"{before} takes no value: give {name} for true, {off} for false"
    return ""


def _check_words(hints: dict[str, Any], args: Sequence[str]) -> None:
    """Refuse what tyro passes over: a flag of several words with none or twice, and a bare --."""
    if "--" in args:
        raise UserError("unknown argument '--'; leave it out, or see --help for all flags")
    seen = set()
    for arg, following in itertools.pairwise([*args, "--"]):
        name, equals, value = arg.partition("=")
        flag = name.replace("_", "-")
        missing = not value if equals else following.startswith("--")
        if get_origin(hints.get(flag)) is not tuple:
            continue
        if missing:
            raise UserError(f"{flag} takes {accepted(hints[flag])}, got no value; see --help")
        if flag in seen:
            raise UserError(f"{flag} comes twice; give all of its words behind one")
        seen.add(flag)


def _flag_hints(root: Any) -> dict[str, Any]:
    hints: dict[str, Any] = {}
    for name, hint in get_type_hints(root).items():
        nested = dataclasses.is_dataclass(hint)
        hints |= _flag_hints(hint) if nested else {flag_of(name): hint}
    return hints


def _bad_value(box: str, hints: dict[str, Any], args: Sequence[str]) -> str:
    """Turn tyro's box about a value into one line."""
    lines = [line.strip("│╭╮╰╯─ ") for line in box.splitlines()]
    text = " ".join(line for line in lines[1:] if line)
    flag = next(
        (word for word in text.replace("'", " ").replace(":", " ").split() if word in hints), None
    )
    if flag is None:
        return f"{text}; see --help"
    given = "no value"
    for arg, following in itertools.pairwise([*args, "--"]):
        name, equals, value = arg.partition("=")
        if name.replace("_", "-") == flag and (equals or not following.startswith("--")):
            given = repr(value if equals else following)
    return f"{flag} takes {accepted(hints[flag])}, got {given}; see --help"
