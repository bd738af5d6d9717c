"""Run algorithm files as programs, in this process or in one of their own."""

import functools
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
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
# Imports once, and forks before JAX has any thread: [module, folder for its output, arguments] ->
# process, and a process that has ended -> its exit code.
FORKS = """
import importlib, json, os, sys
import envpool, orbax.checkpoint, tensorboard.plugins.hparams.summary_v2
import algos.dqn

for line in sys.stdin:
    match json.loads(line):
        case int(ended):
            answer = os.waitstatus_to_exitcode(os.waitpid(ended, 0)[1])
        case module, folder, arguments:
            answer = os.fork()
            if not answer:
                break
    print(answer, flush=True)
else:
    sys.exit()
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
for stream, name in ((1, "out"), (2, "err")):
    os.dup2(os.open(f"{folder}/{name}", os.O_CREAT | os.O_WRONLY), stream)
sys.argv = [module, *arguments]
algo = importlib.import_module(module)
algo.run(algo.Trainer, algo.Config, algo.PRESETS)
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


class Fork:
    """A run in a process of its own that has its imports behind it, which take most of its time.

    Its programs are compiled for a quick start, not for speed.
    """

    def __init__(self, *args: Any, module: str = "algos.dqn") -> None:
        self._folder = Path(tempfile.mkdtemp(dir=_scratch()))
        self.pid = _forks([module, str(self._folder), list(map(str, args))])
        self.returncode: int | None = None
        self._ended = os.pidfd_open(self.pid)

    def send_signal(self, number: int) -> None:
        """Send a signal while it runs."""
        signal.pidfd_send_signal(self._ended, number)

    def poll(self, timeout: float = 0) -> int | None:
        """Return its exit code, the negative of a signal that killed it, or None if it runs."""
        if self.returncode is None and select.select([self._ended], [], [], timeout)[0]:
            self.returncode = _forks(self.pid)
            os.close(self._ended)
        return self.returncode

    def communicate(self, timeout: float = 300) -> tuple[str, str]:
        """Wait for its end; what it wrote to stdout and stderr."""
        if self.poll(timeout) is None:
            self.send_signal(signal.SIGKILL)
            raise TimeoutError(f"process {self.pid} runs for more than {timeout} seconds")
        return (self._folder / "out").read_text(), (self._folder / "err").read_text()


def run_forked(*args: Any, module: str = "algos.dqn") -> Ran:
    """Run an algorithm in its own process, without waiting for imports."""
    fork = Fork(*args, module=module)
    out, err = fork.communicate()
    return Ran(fork.returncode, out, err)


def _forks(request: Any) -> int:
    """Ask the process that forks; one request at a time."""
    with _asking:
        server = _fork_server()
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        return int(server.stdout.readline())


@functools.cache
def _fork_server() -> Any:
    cache = str(Path(_scratch(), "cache"))
    quick = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JAX_COMPILATION_CACHE_DIR": cache}
    return subprocess.Popen(
        [sys.executable, "-c", FORKS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(**quick, **CACHE_OPTIONS),
    )


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
_asking = threading.Lock()
