"""Run algorithms × environments × seeds side by side, a core each, and report over seeds.

    python benchmarks/sweep.py --algos dqn --env-ids CartPole-v1 Acrobot-v1 --num-seeds 3
    python benchmarks/sweep.py --out /tmp/short -- --total-timesteps 20000
    python benchmarks/sweep.py --algos ../mine/my_ppo.py ppo --out /tmp/mine
    python benchmarks/sweep.py --ray-address auto --out /shared/sweep
    python benchmarks/sweep.py --settings "slow: --learning-rate 1e-4" "fast: --learning-rate 1e-3"

Flags after `--` go to every run, those of a setting to its runs. A repeated call skips finished
runs and goes on with the others.
With --ray-address the runs go to the nodes of a Ray cluster, which have this repository at the same
path. A run whose node is lost starts again on another one.
Folders and files under --out (NAME is ALGO__ENV_ID__SEED, or ALGO__SETTING__ENV_ID__SEED):

    jobs/NAME.json  a finished run: flags, returns, curve, commit, machine; the rest is made from it
    results.csv     one row a run
    results.md      one row an algorithm, setting and environment, beside the published return
    curves.csv      mean, interquartile mean and 95 % interval over seeds; ENV_ID.png shows them
    runs/NAME/      its run folder, and what it printed in output.txt

Exit codes: 0 all finished; 1 a run failed for good; 2 bad input; 130, 143 and 129 stopped by
Ctrl-C, SIGTERM or the end of the terminal (SIGHUP), after the runs wrote their checkpoints (a
second Ctrl-C kills them).
"""

import contextlib
import fcntl
import importlib
import importlib.util
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import IO, Any, Protocol

import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from common.envs import resolve_backend
from common.errors import UserError, one_line
from machine import ROOT, describe_commit, describe_cores, on_cores, usable_cores
from report import (
    Result,
    changed_fields,
    file_name,
    late_return,
    read_curve,
    write_atomically,
    write_report,
)

from common.run import cli
from common.run.config import check_config
from common.run.folder import check_name
from common.run.logger import make_console, read_metrics
from common.run.ray_cluster import check_address, connected
from common.run.runner import stop_signals

MAX_TRIES = 3
POLL_SECONDS = 0.2
OWN_FLAGS = ("--env-id", "--seed", "--num-seeds", "--runs-dir", "--resume", "--eval-frequency")


@dataclass(frozen=True)
class SweepOptions:
    """What to run, how much of it at once, and where results go."""

    algos: tuple[str, ...] = ("dqn",)
    """names of files in algos/, or paths of other files that end in .py"""
    settings: tuple[str, ...] = ()
    """flags to compare, as "NAME: FLAGS"; without any, all runs have the same flags"""
    env_ids: tuple[str, ...] = ("CartPole-v1",)
    """environments, as --env-id takes them"""
    num_seeds: int = 3
    """runs of each algorithm on each environment, with the seeds 1 to num_seeds"""
    workers: int | None = None
    """runs at once, each pinned to a core; as many as there are usable cores if not given"""
    ray_address: str | None = None
    """run on a Ray cluster: auto for the one this machine belongs to, or HOST:PORT of its head"""
    eval_frequency: int = 0
    """env steps between two evaluations; 0 evaluates at the end only"""
    out: str = "runs/sweep"
    """folder of results, run folders and what is needed to go on"""


@dataclass(frozen=True)
class Job:
    """One run to do: an algorithm in a setting on an environment with a seed."""

    program: Path
    setting: str
    env_id: str
    seed: int
    flags: tuple[str, ...]
    total_timesteps: int
    config: dict[str, Any] = field(default_factory=dict)
    """all its hyper-parameters but the seed"""

    @property
    def algo(self) -> str:
        """Return the name of its file."""
        return self.program.stem

    @property
    def other_program(self) -> str:
        """Return the path of a file that is none of algos/, else nothing."""
        return "" if self.program.parent == ROOT / "algos" else str(self.program)

    @property
    def identity(self) -> dict[str, Any]:
        """Return what its folder keeps, so that no other run goes on there."""
        return {"flags": list(self.flags), "program": self.other_program, "config": self.config}

    def difference(self, saved: dict[str, Any]) -> str:
        """Return how it differs from a run of its name that was kept; nothing if it does not."""
        program = saved.get("program", "")
        if program != self.other_program:
            before = program or f"algos/{self.algo}.py"
            return f"of {before}, not of {self.program}; give another --out"
        if saved["flags"] != list(self.flags):
            return (
                f"with the flags {shlex.join(saved['flags'])!r}, now they are "
                f"{shlex.join(self.flags)!r}; repeat those, or give another --out"
            )
        if differ := changed_fields(saved.get("config", {}), self.config):
            return f"with other defaults of {', '.join(differ)}; give another --out"
        return ""

    @property
    def name(self) -> str:
        """Return what its files are called."""
        setting = f"{self.setting}__" if self.setting else ""
        return f"{self.algo}__{setting}{file_name(self.env_id)}__{self.seed}"


def main(args: list[str]) -> int:
    """Run the sweep that a command line describes and return its exit code.

    Raises:
        UserError: bad input, or a folder that cannot be used; nothing was created.
    """
    split = args.index("--") if "--" in args else len(args)
    hint = "flags of the runs follow `--`; see --help"
    options = cli.parse_flags(SweepOptions, args[:split], __doc__ or "", hint)
    jobs, out = make_jobs(options, args[split + 1 :]), Path(options.out)
    check_name(out, "--out")
    if options.ray_address is not None:
        return _execute_on_ray(jobs, out.absolute(), options)
    workers = options.workers or len(usable_cores())
    _check_same_flags(jobs, out)
    with _locked(out) as lock:
        return Sweep(jobs, out, workers, ThisMachine(workers, lock)).execute()


def _execute_on_ray(jobs: list[Job], out: Path, options: SweepOptions) -> int:
    """Run the sweep on a Ray cluster: runs without a core wait there, so that it may grow."""
    try:
        import sweep_on_ray
    except ImportError as error:
        raise UserError(
            f"--ray-address {options.ray_address} needs Ray; pip install -e '.[distributed]'"
        ) from error
    _check_same_flags(jobs, out)
    with connected(options.ray_address), _locked(out) as lock:
        workers = options.workers or len(jobs)
        return Sweep(jobs, out, workers, sweep_on_ray.Cluster(lock)).execute()


def make_jobs(options: SweepOptions, extra_flags: list[str]) -> list[Job]:
    """Return the runs of a sweep, whose flags are known to be right.

    Raises:
        UserError: an algorithm, number, environment or flag that is not accepted.
    """
    _check_options(options)
    settings = _parse_settings(options.settings)
    programs = dict.fromkeys(_find_program(algo) for algo in options.algos)
    if len({program.stem for program in programs}) < len(programs):
        raise UserError(f"--algos names two files alike: {', '.join(map(str, programs))}; rename")
    own, seeds = ("--eval-frequency", str(options.eval_frequency)), range(1, options.num_seeds + 1)
    jobs = []
    for program, setting, env_id in itertools.product(
        programs, settings, dict.fromkeys(options.env_ids)
    ):
        _check_own_flags([*extra_flags, *settings[setting]])
        flags = (*own, *extra_flags, *settings[setting])
        config = _check_flags(program, env_id, flags)
        steps = config["total_timesteps"]
        jobs += [Job(program, setting, env_id, seed, flags, steps, config) for seed in seeds]
    return jobs


def _parse_settings(texts: Iterable[str]) -> dict[str, list[str]]:
    """Return the flags of each setting by its name, which becomes part of file names."""
    settings: dict[str, list[str]] = {}
    for text in texts:
        name, colon, flags = text.partition(":")
        if not colon or not re.fullmatch(r"[\w.=+-]+", name) or "__" in name or name in settings:
            raise UserError(
                f"--settings takes NAME: FLAGS, each NAME once, of letters, digits and . = + - _, "
                f'got {text!r}; e.g. "lr=1e-3: --learning-rate 1e-3"'
            )
        try:
            settings[name] = shlex.split(flags)
        except ValueError as error:
            raise UserError(f"--settings {text!r} cannot be read: {one_line(error)}") from error
    return settings or {"": []}


def _find_program(algo: str) -> Path:
    """Return the file that --algos names."""
    known = sorted(path.stem for path in (ROOT / "algos").glob("[!_]*.py"))
    if algo in known:
        return ROOT / "algos" / f"{algo}.py"
    path = Path(algo).absolute()
    if path.suffix != ".py" or not path.is_file():
        raise UserError(
            f"unknown --algos {algo!r}; accepted are {', '.join(known)}, and paths of .py files"
        )
    return path


def _check_options(options: SweepOptions) -> None:
    if not options.algos or not options.env_ids:
        raise UserError("--algos and --env-ids need at least one name each")
    if options.num_seeds < 1:
        raise UserError(f"--num-seeds must be 1 or more, got {options.num_seeds}")
    if options.workers is not None and options.workers < 1:
        raise UserError(f"--workers must be 1 or more, got {options.workers}")
    check_address(options.ray_address)


def _check_own_flags(flags: Iterable[str]) -> None:
    for flag in flags:
        if flag.partition("=")[0].replace("_", "-") in OWN_FLAGS:
            raise UserError(
                f"{flag} cannot follow `--` or stand in --settings, because the sweep sets it for "
                "each run"
            )


def _check_flags(program: Path, env_id: str, flags: Iterable[str]) -> dict[str, Any]:
    """Check what can be checked without making environments; return all but the seed as JSON."""
    module = _import_program(program)
    options = cli.parse(module.Config, module.PRESETS, ["--env-id", env_id, *flags])
    config = options.config
    check_config(config)
    if not options.run.eval_episodes:
        raise UserError("--eval-episodes 0 cannot follow `--`: the tables show evaluation returns")
    if config.env_module is None:
        resolve_backend(env_id, config.env_backend)
    fields = {name: value for name, value in asdict(config).items() if name != "seed"}
    return json.loads(json.dumps(fields))


def _import_program(program: Path) -> ModuleType:
    """Import an algorithm, with the modules beside it in reach, as they are when it is run."""
    if program.parent == ROOT / "algos":
        return importlib.import_module(f"algos.{program.stem}")
    name = f"quartet_sweep_{program.stem}"
    spec = importlib.util.spec_from_file_location(name, program)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(program.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(
            f"--algos {program} cannot be imported ({type(error).__name__}: {one_line(error)})"
        ) from error
    finally:
        sys.path.remove(str(program.parent))
    if not hasattr(module, "Config") or not hasattr(module, "PRESETS"):
        raise UserError(f"--algos {program} has no Config or no PRESETS; see docs/new_algorithm.md")
    return module


def _check_same_flags(jobs: list[Job], out: Path) -> None:
    """Refuse to mix runs of different flags or of files alike in one folder of results."""
    places = [(job, out / "jobs" / f"{job.name}.json") for job in jobs]
    places += [(job, out / "runs" / job.name / "job.json") for job in jobs]
    for job, path in places:
        if path.exists() and (difference := job.difference(json.loads(path.read_text()))):
            raise UserError(f"{out} holds {job.name} {difference}")


@contextlib.contextmanager
def _locked(out: Path) -> Generator[IO, None, None]:
    """Hold a lock on `out` that its runs inherit, so that no two processes train one run."""
    path = out / "runs" / "lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.open("a")  # what it holds is the other sweep's until the lock is ours
    except OSError as error:
        raise UserError(f"cannot write to {out} ({error}); give another --out") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"{out} is in use by another sweep, or by runs that a killed one left behind; "
                "wait until they end, or give another --out"
            ) from error
        lock.truncate(0)
        yield lock


class Place(Protocol):
    """Where the processes of runs are: on this machine, or on the nodes of a cluster."""

    def start(self, run: "Run", worker: int) -> None:
        """Start the process of a run, for the worker of a number."""

    def poll(self, run: "Run") -> int | None:
        """Return None, or the exit code of a process that has ended: -N if signal N killed it."""

    def progress(self, run: "Run") -> tuple[int, dict[str, float]] | None:
        """Return the last logged env step and the latest scalars; None of a run not yet started."""

    def origin(self, run: "Run") -> tuple[str, str]:
        """Return the commit and the machine that a run trained on."""

    def stop(self, run: "Run") -> None:
        """Let a run write its checkpoint and end."""

    def kill(self, run: "Run") -> None:
        """End a run at once."""


class Sweep:
    """Works off jobs with a number of workers, of which each has at most one run."""

    def __init__(self, jobs: list[Job], out: Path, workers: int, place: Place) -> None:
        self.jobs, self.out, self.workers, self.place = jobs, out, workers, place
        self.display = Display()
        self.waiting = deque(Run(job, out) for job in jobs if not self._result_path(job).exists())
        self.running: dict[int, Run] = {}
        self.failures: list[str] = []
        self.told_to_stop = False

    def execute(self) -> int:
        """Run everything, write the report and return the exit code."""
        skipped = len(self.jobs) - len(self.waiting)
        self.display.say(f"runs: {len(self.jobs)}, finished before: {skipped}, folder: {self.out}")
        with self.display, stop_signals() as received:
            try:
                self._work_off(received)
            finally:
                self._kill_runs()
        write_report(self.out)
        for line in self.failures:
            print(line, file=sys.stderr)
        if received:
            self.display.say(f"stopped by {received[0].name}; the same call goes on from here")
            return 128 + received[0]
        return 1 if self.failures else 0

    def _work_off(self, received: list[signal.Signals]) -> None:
        while self.running or (self.waiting and not received):
            if not received:
                self._start_runs()
            elif not self.told_to_stop:
                self._tell_to_stop()
            for worker in list(self.running):
                self._look_after(worker)
            time.sleep(POLL_SECONDS)

    def _start_runs(self) -> None:
        for worker in range(self.workers):
            if worker not in self.running and self.waiting:
                run = self.waiting.popleft()
                run.tries += 1
                run.started = time.monotonic()
                self._write_state(run, run.seconds)
                self.place.start(run, worker)
                self.running[worker] = run

    def _tell_to_stop(self) -> None:
        """Send SIGTERM to every run, once: a second one would keep it from its checkpoint."""
        self.display.say("stopping: the runs write their checkpoints")
        self.told_to_stop = True
        for run in self.running.values():
            self.place.stop(run)

    def _kill_runs(self) -> None:
        """Leave no run behind when the sweep itself fails or gets a second Ctrl-C."""
        for run in self.running.values():
            self.place.kill(run)

    def _look_after(self, worker: int) -> None:
        run = self.running[worker]
        code = self.place.poll(run)
        latest = self.place.progress(run)
        if latest is not None:
            self.display.show(run.job, *latest)
        if code is not None:
            del self.running[worker]
            self._settle(run, code)

    def _settle(self, run: "Run", code: int) -> None:
        """Decide what the end of a run's process means."""
        name, missing = run.job.name, run.missing()
        has_begun = self.place.progress(run) is not None  # else it waited for a core
        self._write_state(run, run.seconds + has_begun * (time.monotonic() - run.started))
        self.display.drop(run)
        end = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        stops = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        interrupted = code < 0 or code - 128 in stops
        if code == 0 and not missing:
            result = make_result(run, *self.place.origin(run))
            write_atomically(self._result_path(run.job), json.dumps(asdict(result)))
            self.display.say(_summary(name, result))
        elif self.told_to_stop:
            self.display.say(f"{name}: stopped at step {run.progress()[0]:,}")
        elif interrupted and run.tries < MAX_TRIES:
            self.display.say(f"{name}: {end}; try {run.tries + 1} of {MAX_TRIES} follows")
            self.waiting.appendleft(run)
        else:
            self.display.say(f"{name}: failed, {end}")
            reason = run.last_words() if code else missing
            line = f"failed: {name}, {end} at try {run.tries}: {reason} (see {run.output})"
            self.failures.append(line)

    def _write_state(self, run: "Run", seconds: float) -> None:
        state = run.job.identity | {"seconds": round(seconds, 1)}
        write_atomically(run.folder / "job.json", json.dumps(state))

    def _result_path(self, job: Job) -> Path:
        return self.out / "jobs" / f"{job.name}.json"


class ThisMachine:
    """Starts runs as processes of this machine, each pinned to a core."""

    def __init__(self, workers: int, lock: IO) -> None:
        self.environment, self.lock = child_environment(workers), lock
        self.commit = describe_commit()
        self.processes: dict[Run, subprocess.Popen] = {}

    def start(self, run: "Run", worker: int) -> None:
        """Start a run on its worker's core."""
        cores = usable_cores()
        core = cores[worker % len(cores)]
        with on_cores(None if core is None else {core}):
            self.processes[run] = run.open_process(self.environment, self.lock)

    def poll(self, run: "Run") -> int | None:
        """Return None, or the exit code of a process that has ended."""
        return self.processes[run].poll()

    def progress(self, run: "Run") -> tuple[int, dict[str, float]]:
        """Return the last logged env step and the latest scalars."""
        return run.progress()

    def origin(self, run: "Run") -> tuple[str, str]:
        """Return the commit and this machine."""
        return self.commit, describe_cores()

    def stop(self, run: "Run") -> None:
        """Send SIGTERM."""
        self.processes[run].terminate()

    def kill(self, run: "Run") -> None:
        """Send SIGKILL."""
        self.processes[run].kill()


class Run:
    """A job in progress: its folder, what it wrote there, and how often it was started.

    A Ray cluster gets it by value: it names nothing that takes long to import.
    """

    def __init__(self, job: Job, out: Path) -> None:
        self.job, self.folder = job, out / "runs" / job.name
        self.output = self.folder / "output.txt"
        self.tries = 0
        self.started = 0.0  # time.monotonic() at the start of its latest process

    def open_process(
        self, environment: dict[str, str], lock: IO, launcher: Sequence[str] = ()
    ) -> subprocess.Popen:
        """Start its process, from its last checkpoint if there is one.

        It holds the lock until it ends.
        It gets a session of its own, because Ctrl-C in a terminal reaches the whole session, and
        a run that also gets the sweep's SIGTERM dies without a checkpoint.
        """
        with self.output.open("a") as output:
            return subprocess.Popen(
                [*launcher, *self._command()],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(lock.fileno(),),
                start_new_session=True,
            )

    @property
    def seconds(self) -> float:
        """Return the wall time of its processes that have ended."""
        path = self.folder / "job.json"
        return json.loads(path.read_text())["seconds"] if path.exists() else 0.0

    def run_folders(self) -> list[Path]:
        """Return the folders it trained in, oldest first."""
        return sorted(path.parent for path in self.folder.glob("*/config.json"))

    def progress(self) -> tuple[int, dict[str, float]]:
        """Return the last logged env step and the latest scalars."""
        folders = self.run_folders()
        return read_latest(folders[-1] / "metrics.csv") if folders else (0, {})

    def missing(self) -> str:
        """Return what it has not written: a full disk, say, does not stop training."""
        step = self.progress()[0]
        if step < self.job.total_timesteps:
            return f"metrics.csv ends at step {step:,} of {self.job.total_timesteps:,}"
        written = (self.run_folders()[-1] / "result.json").exists()
        return "" if written else "there is no result.json"

    def last_words(self) -> str:
        """Return the last line it printed."""
        lines = self.output.read_text(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "no output")

    def _command(self) -> list[str]:
        job = self.job
        program = [sys.executable, str(job.program)]
        # A checkpoint's folder is a plain number once it is complete.
        saved = [path for path in self.folder.glob("*/checkpoints/*") if path.name.isdigit()]
        if saved:
            return [*program, "--resume", str(max(saved).parents[1])]
        own = ["--env-id", job.env_id, "--seed", str(job.seed), "--runs-dir", str(self.folder)]
        return [*program, *own, *job.flags]


class Display:
    """A live line a run on a terminal; elsewhere a plain line at each tenth of a run."""

    def __init__(self) -> None:
        self.console = make_console()
        self._shown: dict[str, int] = {}
        self._progress: Progress | None = None
        if self.console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
            more = (TextColumn("{task.fields[text]}"), TimeRemainingColumn())
            self._progress = Progress(*columns, *more, console=self.console)

    def __enter__(self) -> "Display":
        if self._progress:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress:
            self._progress.stop()

    def say(self, line: str) -> None:
        """Print a line that stays."""
        self.console.print(line, markup=False)

    def show(self, job: Job, step: int, logs: dict[str, float]) -> None:
        """Show how far a run is."""
        name, total = job.name, job.total_timesteps
        shown = {"charts/episodic_return": "return {:.1f}", "charts/SPS": "SPS {:,.0f}"}
        text = "  ".join(form.format(logs[key]) for key, form in shown.items() if key in logs)
        if self._progress:
            if name not in self._shown:
                self._shown[name] = self._progress.add_task(name, total=total, text="")
            self._progress.update(self._shown[name], completed=step, text=text)
        elif 10 * step // total > self._shown.get(name, 0):
            self._shown[name] = 10 * step // total
            self.say(f"{name}: step {step:,} of {total:,}  {text}")

    def drop(self, run: Run) -> None:
        """Take a run's live line away."""
        if self._progress and run.job.name in self._shown:
            self._progress.remove_task(self._shown.pop(run.job.name))


def read_latest(metrics: Path, size: int = 4096) -> tuple[int, dict[str, float]]:
    """Return the last env step in a metrics.csv, and the latest scalars, from its end alone."""
    if not metrics.exists():
        return 0, {}
    with metrics.open("rb") as file:
        file.seek(max(0, metrics.stat().st_size - size))
        lines = file.read().decode().split("\n")[1:-1]  # the first and last may be cut
    rows = [line.strip().split(",") for line in lines]
    return int(rows[-1][0]) if rows else 0, {row[2]: float(row[3]) for row in rows}


def child_environment(workers: int) -> dict[str, str]:
    """One thread for XLA, and a share of a GPU's memory, unless the user has set them."""
    defaults = {"NPROC": "1", "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.9 / workers:.2f}"}
    return {**defaults, **os.environ}


def make_result(run: Run, commit: str, machine: str) -> Result:
    """Read what a run that ended well left in its folder."""
    folder, job = run.run_folders()[-1], run.job
    final = json.loads((folder / "result.json").read_text())
    rows = read_metrics(folder / "metrics.csv")
    curve = read_curve(rows)
    return Result(
        algo=job.algo,
        env_id=job.env_id,
        seed=job.seed,
        flags=list(job.flags),
        steps=final["steps"],
        training_return=late_return(curve, final["steps"]),
        evaluation_return=final["evaluation_return"],
        evaluation_std=final["evaluation_std"],
        seconds=max(run.seconds, rows[-1][1]),  # a killed sweep has not counted its processes
        SPS=float(np.median([value for _, _, name, value in rows if name == "charts/SPS"])),
        commit=commit,
        machine=machine if final["device"] == "cpu" else f"{machine}, {final['device']}",
        curve=curve,
        setting=job.setting,
        program=job.other_program,
        config=job.config,
    )


def _summary(name: str, result: Result) -> str:
    return (
        f"{name}: {result.steps:,} steps in {result.seconds:.0f} s, training return "
        f"{result.training_return:.1f}, evaluation {result.evaluation_return:.1f} ± "
        f"{result.evaluation_std:.1f}"
    )


if __name__ == "__main__":
    with cli.exit_codes(debug=False):
        sys.exit(main(sys.argv[1:]))
