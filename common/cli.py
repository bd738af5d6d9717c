"""The command line: one flat set of flags from an algorithm's Config and the runner's options."""

import argparse
import ast
import contextlib
import dataclasses
import inspect
import io
import itertools
import json
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import tyro

from common.errors import UserError

ENVIRONMENT_FIELDS = {"env_id", "env_backend", "env_module", "env_kwargs", "num_envs"}


@dataclasses.dataclass(frozen=True)
class LoggingOptions:
    """Where a run's figures go."""

    runs_dir: str = "runs"
    """folder in which every run gets a folder of its own"""
    track: bool = False
    """log to Weights & Biases as well"""
    wandb_project: str = "quartet"
    """wandb project"""
    wandb_entity: str | None = None
    """wandb user or team; the account's default if not given"""
    wandb_group: str | None = None
    """wandb group, for example one for all seeds of a setting"""
    wandb_tags: tuple[str, ...] = ()
    """wandb tags"""
    wandb_mode: Literal["online", "offline"] = "online"
    """offline needs no network and no account; `wandb sync` uploads later"""
    capture_video: bool = False
    """save a GIF of the final policy where the environment can render"""


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """How a run is evaluated, saved, resumed and executed."""

    preset: str = "auto"
    """table of defaults: auto takes atari for envpool's Atari ids, else classic"""
    config: str | None = None
    """JSON file of defaults, such as a run's config.json; flags win"""
    resume: str | None = None
    """run folder to go on with; only total_timesteps, logging and run options may change"""
    eval_frequency: int = 50_000
    """env steps between two evaluations; 0 evaluates at the end only"""
    eval_episodes: int = 20
    """full episodes an evaluation"""
    checkpoint_frequency: int = 100_000
    """env steps between two checkpoints; 0 saves at the end only"""
    keep_checkpoints: int = 2
    """latest checkpoints kept; the best one is kept as well"""
    device: Literal["auto", "cpu", "gpu"] = "auto"
    """what JAX computes on; auto takes a GPU if there is one"""
    debug: bool = False
    """show tracebacks, and check every quantity for NaN after each step (slow)"""


@dataclasses.dataclass(frozen=True)
class Options:
    """Everything the command line says."""

    config: Any
    logging: LoggingOptions
    run: RunOptions


def parse(
    config_class: type, presets: dict[str, dict], args: Sequence[str] | None = None
) -> Options:
    """Read the command line over the preset, the --config file or the resumed run's config.

    Raises:
        UserError: a flag, value, preset or file that is not accepted.
        SystemExit: after --help.
    """
    args = sys.argv[1:] if args is None else list(args)
    early = _early_flags(args)
    defaults = _defaults(config_class, presets, early)
    groups = {
        "algorithm": _group(config_class, "algorithm", defaults),
        "environment": _group(config_class, "environment", defaults),
        "logging": _with_defaults(LoggingOptions, defaults),
        "run": _with_defaults(RunOptions, defaults | {"config": early.config}),
    }
    flat_group: Any = tyro.conf.OmitArgPrefixes
    fields = [(name, flat_group[type(group)], group) for name, group in groups.items()]
    root = dataclasses.make_dataclass("Flags", fields)
    parsed = _run_tyro(root, config_class, args)
    flat = {f: v for g in (parsed.algorithm, parsed.environment) for f, v in vars(g).items()}
    options = Options(config_class(**flat), parsed.logging, parsed.run)
    _check_run_options(options.run)
    return options


def _early_flags(args: Sequence[str]) -> argparse.Namespace:
    """Find the flags that choose the defaults of all others."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in ("config", "resume", "preset", "env-id", "env-backend"):
        parser.add_argument(f"--{flag}", nargs="?")
    return parser.parse_known_args(args)[0]


def _defaults(config_class: type, presets: dict, early: argparse.Namespace) -> dict[str, Any]:
    names = {
        f.name for c in (config_class, LoggingOptions, RunOptions) for f in dataclasses.fields(c)
    }
    path = Path(early.resume, "config.json") if early.resume else early.config
    saved = _read_config(Path(path), names) if path else {}
    env_id = early.env_id or saved.get("env_id") or config_class().env_id
    preset = early.preset or saved.get("preset") or "auto"
    if preset == "auto":
        preset = "atari" if _is_atari(env_id, early.env_backend) else "classic"
    if preset not in presets:
        raise UserError(f"unknown --preset {preset!r}; accepted are auto, {', '.join(presets)}")
    return presets[preset] | {"preset": preset} | saved


def _is_atari(env_id: str, backend: str | None) -> bool:
    if backend in ("gymnasium", "jax") or not env_id.endswith("-v5"):
        return False
    import envpool

    from common.envs.envpool_backend import is_atari

    return env_id in envpool.list_all_envs() and is_atari(env_id)


def _read_config(path: Path, names: set[str]) -> dict[str, Any]:
    try:
        saved = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(
            f"cannot read {path} ({error}); give a JSON file of flags such as a run's config.json"
        ) from error
    if not isinstance(saved, dict):
        raise UserError(f"{path} holds a {type(saved).__name__}, not a JSON object of flags")
    saved.pop("algo", None)
    unknown = sorted(set(saved) - names)
    if unknown:
        raise UserError(f"{path} has the unknown entry {unknown[0]!r}; see --help for the names")
    return {k: tuple(v) if isinstance(v, list) else v for k, v in saved.items()}


def _group(config_class: type, group: str, defaults: dict[str, Any]) -> Any:
    """Return an instance of a dataclass with the fields of one help group."""
    docs, hints = _field_docs(config_class), get_type_hints(config_class)
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
    """Return the doc string under each field of a dataclass."""
    body = ast.parse(textwrap.dedent(inspect.getsource(config_class))).body[0].body  # type: ignore
    docs = {}
    for statement, following in itertools.pairwise(body):
        if isinstance(statement, ast.AnnAssign) and isinstance(following, ast.Expr):
            docs[statement.target.id] = following.value.value  # type: ignore
    return docs


def _run_tyro(root: type, config_class: type, args: list[str]) -> Any:
    printed = io.StringIO()
    summary = sys.modules[config_class.__module__].__doc__ or ""
    try:
        with contextlib.redirect_stderr(printed):
            return tyro.cli(root, args=args, description=summary.split("\n\n")[0])
    except SystemExit as stop:
        if not stop.code:
            raise
        lines = (line.strip("│╭╮╰╯─ ") for line in printed.getvalue().splitlines())
        kept = [line for line in lines if line and not line.startswith("For full helptext")]
        raise UserError("; ".join(kept[1:]) + "; see --help") from stop


def _check_run_options(run: RunOptions) -> None:
    for name in ("eval_frequency", "checkpoint_frequency"):
        if getattr(run, name) < 0:
            raise UserError(
                f"--{name.replace('_', '-')} must be 0 or more, got {getattr(run, name)}"
            )
    for name in ("eval_episodes", "keep_checkpoints"):
        if getattr(run, name) < 1:
            raise UserError(
                f"--{name.replace('_', '-')} must be 1 or more, got {getattr(run, name)}"
            )
