"""A trained policy as a numpy function, for deployment, videos and Gymnasium loops."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

from common import __version__
from common.envs.env import sub_spaces, to_space
from common.errors import UserError, one_line
from common.networks import Memory

from common.run.checkpoint import Checkpoints, go_on_from, restore_state
from common.run.cli import ExplorerOptions, LoggingOptions, RunOptions
from common.run.config import field_values, read_object
from common.run.trainer import Trainer

OLDEST = "0.1.0"  # the release that wrote no version into config.json


class Policy:
    """What `load` returns: `predict(obs)` on the host, and the trainer for everything else."""

    def __init__(self, trainer: Trainer, step: int) -> None:
        self.trainer, self.step = trainer, step
        self._key = jax.random.key(0)
        self._act = jax.jit(trainer.evaluator.act)
        self._core: Any = None

    def predict(self, obs: Any) -> Any:
        """Return the evaluation actions [B, *action] for a batch of observations [B, *obs].

        A single observation [*obs] gives a single action, as `env.step` takes it. A recurrent
        policy remembers from call to call; call `reset` where an episode starts.

        Raises:
            UserError: the observations have another shape than the environment's.
        """
        space = self.trainer.env.observation_space
        single = _batch_rank(space, obs) == 0
        batch = jax.tree.map(lambda x: np.asarray(x)[None] if single else np.asarray(x), obs)
        self._key, key = jax.random.split(self._key)
        size = len(jax.tree.leaves(batch)[0])
        if self._core is None:
            self._core = self.trainer.evaluator.initial_core(size)
        memory = Memory(self._core, jnp.ones(size, bool))
        action, self._core = self._act(self.trainer.state.learner, batch, key, memory)
        action = to_space(self.trainer.env.action_space, jax.tree.map(np.asarray, action))
        return jax.tree.map(lambda x: x[0], action) if single else action

    def reset(self, started: Any = None) -> None:
        """Forget the past: of all episodes, or of those that `started` [B] marks."""
        if started is None or self._core is None:
            self._core = None
        else:
            begins = np.asarray(started, bool)[:, None]
            self._core = jax.tree.map(lambda x: jnp.where(begins, 0, x), self._core)


def load(
    run_dir: str | Path, step: int | str = "latest", changes: dict[str, Any] | None = None
) -> Policy:
    """Load a run folder's policy, and the trainer as it stood at that step.

    This runs the algorithm file that the folder keeps, and imports the `env_module` that its
    config.json names: open only run folders that you trust.

    Args:
        run_dir: a folder under runs/.
        step: a checkpoint's step, "latest" or "best".
        changes: other values for fields of Config, such as {"total_timesteps": 100_000}.

    Raises:
        UserError: the folder is missing, or is no run folder, or has no such checkpoint or field.
    """
    if isinstance(step, str) and step not in ("latest", "best"):
        raise UserError(f"the checkpoint must be a step, latest or best, got {step!r}")
    folder, changes = Path(run_dir), changes or {}
    saved, module = read_run(folder)
    names = module.Config.__dataclass_fields__
    if unknown := [name for name in changes if name not in names]:
        raise UserError(
            f"{saved['algo']}.py in {folder} has no {unknown[0]!r} to change; leave it out"
        )
    trainer: Trainer = module.Trainer(_config(module.Config, folder, saved, changes))
    checkpoints = folder / "checkpoints"
    if step == "best" and checkpoints.is_dir():
        best = Checkpoints(checkpoints).best()
        step = best[0] if best else "latest"
    wanted = None if isinstance(step, str) else step
    state, found = restore_state(trainer, checkpoints, wanted, print)
    go_on_from(trainer, state, found)
    return Policy(trainer, found)


def read_run(folder: Path) -> tuple[dict[str, Any], ModuleType]:
    """Return what config.json says and the algorithm file as it was when it trained.

    Raises:
        UserError: it is no run folder, or another release wrote it.
    """
    try:
        saved = read_object(folder / "config.json")
        _check_version(folder, saved)
        module = _import_file(folder / f"{saved['algo']}.py")
        assert module.Config.__dataclass_fields__
    except UserError:
        raise
    # The copy of the algorithm may raise anything while it is imported.
    except Exception as error:
        raise UserError(
            f"{folder} is not a run folder ({one_line(error)}); give one under runs/"
        ) from error
    return saved, module


def _config(config_class: Any, folder: Path, saved: dict[str, Any], changes: dict[str, Any]) -> Any:
    """Return the Config that a run folder was trained with, but for some changes."""
    path, names = folder / "config.json", config_class.__dataclass_fields__
    flags = {name: value for name, value in saved.items() if name not in ("algo", "version")}
    values = field_values(
        flags, (config_class, LoggingOptions, RunOptions, ExplorerOptions), str(path)
    )
    missing = [name for name in (*names, "num_seeds") if name not in values]
    if missing:
        raise UserError(f"{path} lacks the entry {missing[0]!r}; give a run folder as it was left")
    if values["num_seeds"] > 1:
        raise UserError(
            f"{folder} holds {values['num_seeds']} seeds; give one of its folders, such as "
            f"{folder}/seed_{values['seed']}"
        )
    try:
        return config_class(**{name: values[name] for name in names} | changes)
    except UserError as error:
        changed = f" with the changes {changes}" if changes else ""
        raise UserError(f"{path}{changed} cannot be used: {error}") from error


def _check_version(folder: Path, saved: dict[str, Any]) -> None:
    """Refuse a folder whose algorithm file was written for another layout of this package."""
    written_by = str(saved.get("version", OLDEST))
    if written_by.split(".")[:2] != __version__.split(".")[:2]:
        raise UserError(
            f"{folder} was written by Quartet {written_by}, whose {saved['algo']}.py this release, "
            f"{__version__}, cannot run; install that release, or train on with --resume {folder}"
        )


def _import_file(path: Path) -> ModuleType:
    """Import the algorithm as it was when it trained: the run folder keeps a copy."""
    spec = importlib.util.spec_from_file_location(f"quartet_run_{path.stem}", path)
    if spec is None or spec.loader is None or not path.exists():
        raise FileNotFoundError(f"no {path.name} in it")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _batch_rank(space: Any, obs: Any) -> int:
    """Return how many leading axes an observation has beyond its space: 0 or 1."""
    while isinstance(space, spaces.Dict | spaces.Tuple):
        key, space = next(iter(sub_spaces(space).items()))
        obs = obs[key]
    shape, expected = np.shape(obs), space.shape or ()
    rank = len(shape) - len(expected)
    if rank not in (0, 1) or shape[rank:] != expected:
        raise UserError(
            f"observations must have the shape {expected}, or {('B', *expected)} for a batch, got "
            f"{shape}; give what the environment returns"
        )
    return rank
