"""Run algorithm files as programs, in this process or in one of their own."""

import functools
import importlib
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

TESTS = Path(__file__).parent
DQN = TESTS.parent / "algos" / "dqn.py"
SHORT = [
    *("--total-timesteps", "4000", "--learning-starts", "1000", "--log-frequency", "1000"),
    *("--eval-frequency", "0", "--eval-episodes", "2"),
]
WITHOUT_WANDB = """
import sys
sys.modules['wandb'] = None  # importing it fails
from algos import dqn
dqn.run(dqn.Trainer, dqn.Config, dqn.PRESETS)
"""
# Programs without callbacks are compiled once for all processes that share the folder.
CACHE_OPTIONS = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}


class Ran(NamedTuple):
    """What a program left behind."""

    code: int
    out: str
    err: str


def environment(**extra: str) -> dict[str, str]:
    """The environment of a child process that finds failing_envs, and no account or token.

    It chooses its cores itself, as conftest.py's choice is for the tests' own process.
    """
    dropped = ("WANDB_", "RAY_AUTH_TOKEN", "NPROC")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
    return kept | {"PYTHONPATH": str(TESTS), "WANDB_SILENT": "true"} | extra


def run_alone(
    *args: Any, program: tuple[str, ...] = (str(DQN),), timeout: float = 300, **extra: str
) -> Ran:
    """Run a program in its own process, for `timeout` seconds at most."""
    command = [sys.executable, *program, *map(str, args)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment(**extra), timeout=timeout
    )
    return Ran(done.returncode, done.stdout, done.stderr)


def run_here(capsys: Any, *args: Any, module: str = "algos.dqn") -> Ran:
    """Run `python -m module` in this process, which is not pinned to a core for it."""
    capsys.readouterr()
    argv = [module, *map(str, args)]
    code: Any = 0
    with mock.patch.object(sys, "argv", argv), mock.patch("common.run.threads.use_cores"):
        try:
            if module.startswith("algos."):
                algo = importlib.import_module(module)
                algo.run(algo.Trainer, algo.Config, algo.PRESETS)
            else:
                runpy.run_module(module, run_name="__main__")
        except SystemExit as stop:
            code = stop.code
    return Ran(code, *capsys.readouterr())


def best_return(trainer: Any) -> float:
    """Train to the end; the training return of the best log point.

    A short run with a large step size may lose in its last steps what it had learned, and which one
    does depends on how its machine rounds.
    """
    logs = [log_data["logs"] for log_data in trainer() if log_data["log_type"] == "collect"]
    return max(log["charts/episodic_return"] for log in logs if log["charts/episodes"])


@functools.cache
def finished_run() -> tuple[Path, Ran]:
    """A finished run folder, which tests must copy before they change it, and what it printed."""
    runs = Path(_scratch(), "runs")
    flags = ("--eval-frequency", 2000, "--checkpoint-frequency", 1000, "--capture-video")
    ran = run_alone(*SHORT, *flags, "--runs-dir", runs, program=("-c", WITHOUT_WANDB))
    assert ran.code == 0, ran.err
    return next(runs.iterdir()), ran


@functools.cache
def _scratch() -> str:
    folder = tempfile.TemporaryDirectory(prefix="quartet-tests-")
    _kept.append(folder)
    return folder.name


_kept: list[tempfile.TemporaryDirectory] = []
