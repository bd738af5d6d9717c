"""The files of a run folder, who may write them, and `common.save`."""

import dataclasses
import fcntl
import inspect
import json
import re
import sys
from pathlib import Path
from typing import IO, Any

from common import __version__
from common.errors import UserError, one_line

from common.run.checkpoint import Checkpoints, is_lost, save_checkpoint, write_atomically
from common.run.config import flag_of, read_object
from common.run.trainer import RunConfig, Trainer

LOCK = "lock"
# In which orbax does not find a file of that name, and what tensorstore takes for more than one.
PATTERN = re.compile(r"\\|\[.*\]|(?<=/)(\*+|gs:)(?=/|$)")
MAY_CHANGE = ("total_timesteps", "eval_stochastic", "evaluation_epsilon")


def save(trainer: Trainer, folder: str | Path) -> None:
    """Write a trainer that is driven by hand as a run folder, or as one more step of its own.

    `load`, `--resume`, and the programs `common.evaluate` and `common.export` take the folder.
    Every step that is saved is kept.

    Raises:
        UserError: the folder cannot be written, or holds something else, such as a run of another
            algorithm or configuration, or one that has reached this step.
    """
    folder, source = Path(folder), _source_of(trainer)
    check_name(folder, "the folder")
    flags = config_flags(source.stem, trainer.config, trainer.evaluator.num_seeds or 1)
    try:
        earlier = _earlier_flags(folder, trainer, source.stem)
        folder.mkdir(parents=True, exist_ok=True)
        with hold(folder):
            write_config(folder, earlier | flags, source)
            save_checkpoint(folder / "checkpoints", sys.maxsize, trainer, None)
    except UserError:
        raise
    except Exception as error:  # orbax has many
        raise UserError(
            f"cannot save to {folder} ({one_line(error)[:200]}); give a folder that you may write "
            "to, with space left"
        ) from error


def config_flags(algo: str, config: RunConfig, num_seeds: int) -> dict[str, Any]:
    """Return the part of config.json that says what is trained."""
    about = {"algo": algo, "version": __version__}
    return about | dataclasses.asdict(config) | {"num_seeds": num_seeds}


def write_config(folder: Path, flags: dict[str, Any], source: Path) -> None:
    """Write config.json and a copy of the algorithm file."""
    write_atomically(folder / "config.json", json.dumps(flags, indent=2))
    write_atomically(folder / source.name, source.read_bytes())


def check_name(folder: Path, flag: str) -> None:
    """Refuse a folder whose checkpoints orbax could not read again, as it searches by patterns.

    Raises:
        UserError: its whole path has a backslash, words in brackets, or a part ** or gs:.
    """
    if found := PATTERN.search(str(folder.absolute())):
        raise UserError(
            f"{flag} {folder} has {found[0]} in its whole path; checkpoints that are written there "
            "cannot be read again, so give a folder without it, or move it to one"
        )


def hold(folder: Path) -> IO:
    """Keep other processes from training in a run folder until this one ends, however it ends."""
    try:
        lock = (folder / LOCK).open("w")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UserError(
            f"{folder} is in use by another process; wait until it ends, or stop it"
        ) from error
    except OSError as error:
        raise UserError(
            f"cannot lock {folder} ({error}); give a folder that you may write to, on a disk that "
            "has space and file locks"
        ) from error
    return lock


def difference(saved: dict[str, Any], config: RunConfig, num_seeds: int) -> str:
    """Say which field differs from a saved config.json, but for those that may; "" if none does."""
    for name, value in config_flags("", config, num_seeds).items():
        before = saved.get(name, value)
        before = tuple(before) if isinstance(before, list) else before
        if name not in ("algo", "version", *MAY_CHANGE) and before != value:
            return f"{flag_of(name)} {value} differs from {before}"
    return ""


def _source_of(trainer: Trainer) -> Path:
    """Return the file of a trainer's class: two run folders may have modules of one name."""
    source = Path(inspect.getfile(type(trainer).__call__))
    if not source.is_file():
        raise UserError(
            f"{type(trainer).__name__} stands in no file, which a run folder would keep; write the "
            "algorithm to a .py file and import it"
        )
    return source


def _earlier_flags(folder: Path, trainer: Trainer, algo: str) -> dict[str, Any]:
    """Return what config.json says in a folder that `trainer` may be saved to."""
    if is_lost(trainer.state):
        raise UserError("the trainer was interrupted and has lost its arrays; make a new one")
    if not folder.is_dir() or all(path.name == LOCK for path in folder.iterdir()):
        return {}
    try:
        saved = read_object(folder / "config.json")
        trained_by = saved["algo"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{folder} holds other files than a run's; give another folder") from error
    if trained_by != algo:
        raise UserError(f"{folder} was trained by {trained_by}, not by {algo}; give another folder")
    if different := difference(saved, trainer.config, trainer.evaluator.num_seeds or 1):
        raise UserError(f"{different} in {folder}; give another folder")
    step, latest = int(trainer.state.step), Checkpoints(folder / "checkpoints").latest_step()
    if latest is not None and step <= latest:
        raise UserError(
            f"{folder} has reached step {latest} and the trainer is at {step}; train on before you "
            "save again, or give another folder"
        )
    return saved
