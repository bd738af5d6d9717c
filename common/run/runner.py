"""From the command line to a finished run folder: parse, train, evaluate, save, report."""

import contextlib
import dataclasses
import importlib.util
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from rich.panel import Panel

from common.envs import config_backend, resolve_backend
from common.errors import UserError, one_line
from common.ranges import LARGEST

from common.run import cli, threads
from common.run.checkpoint import Checkpoints, checkpointer, resume, write_atomically
from common.run.config import read_object
from common.run.devices import learner_on_devices, shard_over_devices
from common.run.evaluator import episodes, evaluator, shown_return, still_running
from common.run.folder import check_name, config_flags, difference, hold, write_config
from common.run.logger import (
    ConsoleSink,
    CsvSink,
    Sink,
    TensorBoardSink,
    decimals,
    ends_log_point,
    logger,
    make_console,
    video_path,
)
from common.run.seeds import batch_seeds, state_of_seed
from common.run.trainer import Call, Learner, Presets, RunConfig, Trainer, start

C = TypeVar("C", bound=RunConfig)
WITH_ALL_SEEDS = "step_with_all_seeds"  # in the folder of a seed: when the run of all wrote it


def run(
    trainer_class: Callable[[C], Trainer],
    config_class: type[C],
    presets: Presets,
    num_cores: int = 1,
) -> None:
    """Run an algorithm file as a program and exit.

    Args:
        trainer_class: the file's Trainer.
        config_class: its Config.
        presets: its tables of defaults.
        num_cores: how many cores its networks run fastest on, where the environment and the
            observations are small.

    Exit codes: 0 trained and evaluated; 2 bad input or a failing environment, after one line that
    says what to do; 130, 143 and 129 stopped by Ctrl-C, SIGTERM or the terminal's end (SIGHUP),
    after a last checkpoint.
    """
    with cli.exit_codes("--debug" in sys.argv), stop_signals(_die) as received:
        options = cli.parse(config_class, presets)
        with contextlib.closing(_Run(trainer_class, options, num_cores)) as run_:
            sys.exit(run_.execute(received))


class _Run:
    """One run: its options, its folder and its trainer."""

    def __init__(
        self, trainer_class: Callable[[Any], Trainer], options: cli.Options, num_cores: int
    ) -> None:
        self.trainer_class, self.num_cores = trainer_class, num_cores
        self.config, self.run, self.logging = options.config, options.run, options.logging
        self.explorers = options.explorers
        self.source = Path(sys.modules[type(self.config).__module__].__file__ or "")
        self.algo = self.source.stem
        self.console = make_console()
        # Absolute, as an environment may change the working folder.
        self._folder = Path(self.run.resume).absolute() if self.run.resume else None
        self._runs_dir = Path(self.logging.runs_dir).absolute()
        self._lock: IO | None = None
        self.first_step = 0
        self.start_time = time.time()

    def close(self) -> None:
        """Let other processes train in the run folder."""
        if self._lock is not None:
            self._lock.close()

    def execute(self, received: list[signal.Signals]) -> int:
        """Do all of it, unless a signal is `received` on the way; return the exit code."""
        self._check_before_start()
        with contextlib.ExitStack() as stack:
            if self.explorers.explorers:
                from common.run.ray_cluster import connected

                num_cpus = max(self.explorers.explorers, os.cpu_count() or 1)
                stack.enter_context(connected(self.explorers.ray_address, num_cpus))
            return self._execute(received)

    def _execute(self, received: list[signal.Signals]) -> int:
        self._choose_device()
        trainer = self._make_trainer()
        if self.run.resume:
            self._resume(trainer)
        if self.run.num_devices > 1 and not self.explorers.explorers:
            shard_over_devices(trainer, self.run.num_devices)
        try:
            with self._exploring(trainer, received):
                self._train(trainer, received)
            if not received:
                self._report(trainer)
        except UserError as error:
            where = f"; run folder: {self._shown_folder}" if self._folder else ""
            raise type(error)(f"{error}{where}") from error
        if not received:
            return 0
        hint = "nothing was learned yet"
        if self._folder:
            hint = f"go on with --resume {self._shown_folder}"
        self.console.print(f"stopped by {received[0].name}; {hint}")
        return 128 + received[0]

    @contextlib.contextmanager
    def _exploring(
        self, trainer: Trainer, received: list[signal.Signals]
    ) -> Generator[None, None, None]:
        """Let Explorers collect, if there are any."""
        if not self.explorers.explorers:
            yield
            return
        from common.run.explorers import Explorers

        learner = cast(Learner, trainer)  # as `_check_explorers` found
        count = self.run.num_devices
        learn = learner_on_devices(learner, count) if count > 1 else None
        explorers = Explorers(learner, self.explorers, self.console.print, received, learn)
        with contextlib.closing(explorers):
            trainer.compiled_run = explorers.run
            yield

    def _resume(self, trainer: Trainer) -> None:
        resume(trainer, self.folder() / "checkpoints", self.console.print)
        self.first_step, total = int(trainer.state.step), self.config.total_timesteps
        if self.first_step == total:
            say = self.console.print
            say(f"all {total:,} steps are done; --total-timesteps above that trains on")

    def _train(self, trainer: Trainer, received: list[signal.Signals]) -> None:
        """Train to the end, or until a signal."""
        self.start_time = time.time()
        self.console.print(self._describe())
        starts, total = getattr(self.config, "learning_starts", 0), self.config.total_timesteps
        if starts >= total:
            self.console.print(
                f"warning: nothing is learned before --learning-starts {starts:,} of "
                f"--total-timesteps {total:,}; lower the one or raise the other"
            )
        call = self._decorated(_unless(received)(start), received)
        with contextlib.closing(call(trainer)) as training:
            for log_data in training:
                if received and ends_log_point(log_data):
                    break

    def folder(self) -> Path:
        """Return the run folder, made with config and code when first asked for."""
        if self._folder is None:
            env_id = self.config.env_id.replace("/", "-").replace(":", "-")
            stamp = time.strftime("%Y%m%d-%H%M%S")
            name = f"{env_id}__{self.algo}__{self.config.seed}__{stamp}"
            folder = _make_unique(self._runs_dir, name)
            try:
                self._lock = hold(folder)
                write_config(folder, self._flags(), self.source)
            except (OSError, UserError) as error:
                shutil.rmtree(folder, ignore_errors=True)
                raise UserError(
                    f"cannot write into the run folder {folder} ({error}); give another --runs-dir"
                ) from error
            self._folder = folder
        return self._folder

    @property
    def _shown_folder(self) -> Path:
        """The run folder as the user gave its place: relative or absolute."""
        if self.run.resume:
            return Path(self.run.resume)
        return Path(self.logging.runs_dir) / self.folder().name

    def _flags(self) -> dict[str, Any]:
        run = dataclasses.asdict(self.run)
        for name in cli.NOT_SAVED:
            del run[name]
        trained = config_flags(self.algo, self.config, self.run.num_seeds)
        explorers = dataclasses.asdict(self.explorers)
        return trained | dataclasses.asdict(self.logging) | run | explorers

    def _describe(self) -> str:
        device = jax.devices()[0]
        cores = " and ".join(map(str, self.cores))
        held = {0: "", 1: f", one core ({cores})"}.get(len(self.cores), f", cores {cores}")
        backend: str = config_backend(self.config)
        if backend != resolve_backend(self.config.env_id, self.config.env_backend):
            backend += f", as {self.config.env_module} registers it"
        return (
            f"{self.algo} on {self.config.env_id} ({backend}), "
            f"preset {self.run.preset}, seed {self.config.seed}, {device.platform}{held}"
        )

    def _check_before_start(self) -> None:
        if self.run.resume:
            _check_resume(Path(self.run.resume), self.config, self.run.num_seeds)
            _check_writable(Path(self.run.resume), "--resume")
            self._lock = hold(Path(self.run.resume))
        else:
            _check_writable(Path(self.logging.runs_dir), "--runs-dir")
        if self.explorers.explorers:
            self._check_explorers()
        if self.config.seed + self.run.num_seeds - 1 > LARGEST[int]:
            raise UserError(
                f"--seed {self.config.seed} with --num-seeds {self.run.num_seeds} counts beyond "
                f"{LARGEST[int]}; lower --seed"
            )
        if self.run.num_seeds > 1 and self.run.num_devices > 1:
            raise UserError("--num-seeds and --num-devices cannot go together; leave one out")
        if self.logging.track and self.logging.wandb_mode == "online":
            _check_wandb_login()

    def _check_explorers(self) -> None:
        if not hasattr(self.trainer_class, "collect_trajectory"):
            raise UserError(
                f"{self.algo} takes no --explorers: it collects and learns in turn, step by step; "
                "try apex_dqn.py, impala.py or ppo.py"
            )
        if importlib.util.find_spec("ray") is None:
            raise UserError("--explorers are actors of Ray; pip install -e '.[distributed]'")
        if self.run.num_seeds > 1:
            raise UserError("--num-seeds and --explorers cannot go together; leave one out")
        from common.run.explorers import group_size

        pace = cast(type[Learner], self.trainer_class).pace
        count, workers = self.explorers.explorers, self.config.env_workers
        num_envs = self.config.num_envs // group_size(pace, self.config.num_envs, count)
        if workers and num_envs % workers:
            raise UserError(
                f"--env-workers {workers} does not divide the {num_envs} environments of each of "
                f"{count} --explorers; use a divisor"
            )

    def _choose_device(self) -> None:
        platforms = {"auto": None, "cpu": "cpu", "gpu": "cuda"}
        if self.run.device != "auto":
            jax.config.update("jax_platforms", platforms[self.run.device])
        has_gpu = self.run.device != "cpu" and _has_nvidia_device()
        wanted = self.run.num_cores or self._best_num_cores()
        self.cores = [] if has_gpu else threads.use_cores(wanted)
        try:
            jax.devices()
            threads.spread_pool(self.cores)
        except (RuntimeError, AssertionError) as error:
            raise UserError(
                f"--device {self.run.device} was asked for, but JAX finds no such device; use "
                "--device cpu and unset JAX_PLATFORMS, or pip install -e '.[gpu]' on a "
                "machine with an NVIDIA driver"
            ) from error

    def _best_num_cores(self) -> int:
        """Return how many cores are fastest; 0 leaves the choice to the system."""
        run = self.run
        many_envs = self.config.num_envs * run.num_seeds > 256
        return 0 if run.preset == "atari" or many_envs or run.num_devices > 1 else self.num_cores

    def _make_trainer(self) -> Trainer:
        config = self.config
        if self.run.debug:
            config = dataclasses.replace(config, log_frequency=config.num_envs)
        trainer = self.trainer_class(config)
        if self.run.num_seeds > 1:
            batch_seeds(trainer, self.run.num_seeds)
        trainer.evaluator.max_steps = self.run.eval_max_steps
        return trainer

    def _decorated(self, call: Call, received: list[signal.Signals]) -> Call:
        run, say = self.run, self.console.print
        if run.debug:
            call = check_finite(self.config.log_frequency)(call)
        best_of = "evaluation_return" if self._ranks_evaluations else "episodic_return"
        if run.eval_episodes:
            call = evaluator(run.eval_frequency, run.eval_episodes)(call)
        call = checkpointer(
            lambda: self.folder() / "checkpoints",
            run.checkpoint_frequency,
            run.keep_checkpoints,
            f"charts/{best_of}",
            say,
        )(call)
        if self.logging.capture_video:
            call = self._filmed(call, received)
        return logger(self._sinks, say)(call)

    def _filmed(self, call: Call, received: list[signal.Signals]) -> Call:
        """Decorate `Trainer.__call__`: a GIF at its end, while wandb still takes it."""

        def filmed(trainer: Trainer) -> Generator[dict, None, None]:
            with contextlib.closing(call(trainer)) as inner:
                yield from inner
            if not received:
                self.video = self._video(trainer)

        return filmed

    def _sinks(self) -> list[Callable[[], Sink]]:
        folder, first_step = self.folder(), self.first_step
        if self.run.resume:
            # total_timesteps may have been raised, and the file may be another release's.
            with contextlib.suppress(OSError):
                write_config(folder, self._flags(), self.source)
        sinks: list[Callable[[], Sink]] = [
            partial(CsvSink, folder / "metrics.csv", first_step, self.start_time),
            partial(TensorBoardSink, folder, first_step, self._flags()),
            partial(
                ConsoleSink,
                self.console,
                self.config.total_timesteps,
                first_step,
                self.run.num_seeds,
            ),
        ]
        if self.logging.track:
            from common.run.logger import WandbSink

            sinks.append(partial(WandbSink, folder, self._flags(), self.logging, self.source))
        return sinks

    def _report(self, trainer: Trainer) -> None:
        folder, logs = self.folder(), self._last_evaluation(trainer)
        mean, std = (logs.get(f"charts/evaluation_{name}") for name in ("return", "std"))
        result: dict[str, Any] = {
            "steps": int(trainer.state.step),
            "episodes": self.run.eval_episodes,
        }
        result |= {"evaluation_return": mean, "evaluation_std": std}
        result |= {"device": jax.devices()[0].device_kind}
        first, last = self.config.seed, self.config.seed + self.run.num_seeds - 1
        seeds = f"seed {first}" if first == last else f"seeds {first} to {last}"
        title = f"{self.algo} on {self.config.env_id}, {seeds}"
        lines = [
            f"{title}: {self.config.total_timesteps:,} steps",
            *self._describe_evaluation(logs),
            *self._describe_best(folder),
            f"run folder: {self._shown_folder}",
        ]
        if self.run.num_seeds > 1:
            lines.append(f"policies: its folders seed_{first} to seed_{last}")
            lines += self._save_seeds(trainer, logs)
        lines += self._write_report(result, title)
        if self.logging.capture_video:
            lines.append(self.video)
        self.console.print(Panel("\n".join(lines), expand=False))

    def _last_evaluation(self, trainer: Trainer) -> dict[str, float]:
        """Return the logs of the evaluation at the end; empty where evaluation is off."""
        if not self.run.eval_episodes:
            return {}
        log_data = trainer.evaluator.latest
        if log_data is None or log_data["sample_step"] != int(trainer.state.step):
            log_data = trainer.evaluate(self.run.eval_episodes)
        return log_data["logs"]

    def _describe_evaluation(self, logs: dict[str, float]) -> list[str]:
        count = self.run.eval_episodes
        if not count:
            return ["evaluation off"]
        shown = shown_return(logs["charts/evaluation_return"], logs["charts/evaluation_std"])
        unfinished = still_running(logs, count, self.run.eval_max_steps, self.run.num_seeds)
        return [f"evaluation over {episodes(count)}: {shown}", *unfinished]

    @property
    def _ranks_evaluations(self) -> bool:
        """Whether evaluations rank the checkpoints, rather than returns of training."""
        return self.run.eval_frequency > 0 and self.run.eval_episodes > 0

    def _describe_best(self, folder: Path) -> list[str]:
        best = Checkpoints(folder / "checkpoints").best()
        if best is None:
            return []
        kind = "evaluation" if self._ranks_evaluations else "training return"
        step, episode_return = best
        shown = f"{episode_return:.{decimals(abs(episode_return))}f}"
        return [f"best checkpoint: step {step:,}, {kind} {shown}"]

    def _save_seeds(self, trainer: Trainer, logs: dict[str, float]) -> list[str]:
        """Give every seed a run folder of its own; return lines about those left as they are."""
        went_on, missing = [], {}
        for index in range(self.run.num_seeds):
            name = f"seed_{self.config.seed + index}"
            try:
                if not self._save_seed(trainer, index, logs):
                    went_on.append(name)
            except Exception as error:  # orbax has many
                missing[name] = one_line(error)[:200]
        lines = [f"left as they went on alone: {', '.join(went_on)}"] if went_on else []
        if missing:
            reason = next(iter(missing.values()))
            lines.append(f"missing: {', '.join(missing)} ({reason}); --resume writes them")
        return lines

    def _save_seed(self, trainer: Trainer, index: int, logs: dict[str, float]) -> bool:
        """Write a seed's run folder, to load, to evaluate and to go on with.

        One that was trained on alone stays as it is, and False is returned.
        """
        seed, step = self.config.seed + index, int(trainer.state.step)
        folder = self.folder() / f"seed_{seed}"
        checkpoints, mark = Checkpoints(folder / "checkpoints", keep=1), folder / WITH_ALL_SEEDS
        latest = checkpoints.latest_step()
        went_on = mark.exists() and latest is not None and latest > int(mark.read_text())
        if went_on or (folder / "metrics.csv").exists():  # which only a run of its own writes
            return False
        if step != latest:
            folder.mkdir(exist_ok=True)
            with hold(folder):
                write_config(folder, self._flags() | {"seed": seed, "num_seeds": 1}, self.source)
                write_atomically(mark, str(step))
                mean = logs.get(f"seed_{seed}/evaluation_return")
                checkpoints.save(step, state_of_seed(trainer.state, index), mean)
        return True

    def _write_report(self, result: dict[str, Any], title: str) -> list[str]:
        from common.run.curve import save_curve

        folder = self.folder()
        try:
            (folder / "result.json").write_text(json.dumps(result, indent=2))
            save_curve(folder / "metrics.csv", folder / "curve.png", title)
        except OSError as error:
            return [f"the report could not be written: {error}"]
        return []

    def _video(self, trainer: Trainer) -> str:
        from common.run.video import save_video

        path = video_path(self.folder(), int(trainer.state.step))
        try:
            save_video(trainer.evaluator, trainer.state.learner, path)
        except Exception as error:
            # Rendering may lack a display or a package; the training is done all the same.
            return f"no video: {one_line(error)}"
        return f"video: {path}"


@contextlib.contextmanager
def stop_signals(
    second: Callable[[int, Any], None] | None = None,
) -> Generator[list[signal.Signals], None, None]:
    """Collect the first Ctrl-C, SIGTERM or SIGHUP instead of dying; the `second` kills as usual.

    An exception that a signal raises in the midst of JAX is lost where C++ calls Python, in a
    callback of the garbage collector for one, or ends the process with a segmentation fault.
    """
    received: list[signal.Signals] = []
    caught = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # nohup has it ignored
        caught.append(signal.SIGHUP)

    def receive(number: int, frame: Any) -> None:
        received.append(signal.Signals(number))
        for one in caught:
            # A terminal that ends sends SIGHUP twice, by its shell and by the kernel.
            is_hangup = one == signal.SIGHUP
            signal.signal(one, signal.SIG_IGN if is_hangup else second or previous[one])

    previous = {one: signal.signal(one, receive) for one in caught}
    try:
        yield received
    finally:
        for one in caught:
            signal.signal(one, previous[one])


def _die(number: int, frame: Any) -> None:
    """End at once, without what exceptions and destructors would do on the way."""
    with contextlib.suppress(OSError):  # where the terminal is gone
        os.write(2, f"killed by {signal.Signals(number).name}\n".encode())
    os._exit(128 + number)


def _unless(received: list[signal.Signals]) -> Callable[[Call], Call]:
    """Decorate `Trainer.__call__`: a signal before the first log point ends it without a trace.

    A later one may come when Explorers have made no step since the last log point, which would be
    logged twice.
    """

    def decorate(call: Call) -> Call:
        def started(trainer: Trainer) -> Generator[dict, None, None]:
            logged = None
            with contextlib.closing(call(trainer)) as inner:
                for count, log_data in enumerate(inner if not received else ()):
                    step = log_data["sample_step"]
                    if received and (count == 0 or step == logged):
                        return
                    yield log_data
                    logged = step if ends_log_point(log_data) else None

        return started

    return decorate


def check_finite(log_frequency: int) -> Callable[[Call], Call]:
    """Decorate a `Trainer.__call__` that yields every vector step: stop at the first NaN.

    Log points between multiples of `log_frequency` are checked, but not passed on, save the last.

    Raises:
        UserError: names the first metric, else the first array of the learner, that is not finite.
    """

    def decorate(call: Call) -> Call:
        def checked(trainer: Trainer) -> Generator[dict, None, None]:
            last = int(trainer.state.step)
            with contextlib.closing(call(trainer)) as inner:
                for log_data in inner:
                    step = log_data["sample_step"]
                    _check_finite(step, log_data["logs"], trainer.state.learner)
                    is_last = step >= trainer.config.total_timesteps
                    if is_last or step // log_frequency > last // log_frequency:
                        yield log_data
                    if ends_log_point(log_data):
                        last = step

        return checked

    return decorate


def _check_finite(step: int, logs: dict[str, float], learner: Any) -> None:
    arrays = jax.tree_util.tree_leaves_with_path(learner)
    floats = [(p, x) for p, x in arrays if jnp.issubdtype(x.dtype, jnp.floating)]
    for name, value in {**logs, **{jax.tree_util.keystr(p): x for p, x in floats}}.items():
        if not np.isfinite(np.asarray(value)).all():
            raise UserError(
                f"{name.lstrip('.')} is not finite at step {step}: lower --learning-rate, or look "
                "for a division or logarithm of zero before it"
            )


def _make_unique(parent: Path, name: str) -> Path:
    try:
        for suffix in ["", *(f"-{i}" for i in range(2, 1000))]:
            with contextlib.suppress(FileExistsError):
                (parent / (name + suffix)).mkdir(parents=True)
                return parent / (name + suffix)
    except OSError as error:
        raise UserError(
            f"cannot make a run folder in {parent} ({error}); give --runs-dir"
        ) from error
    raise UserError(f"{parent} holds too many runs called {name}; give another --runs-dir")


def _check_writable(path: Path, flag: str) -> None:
    check_name(path, flag)
    try:
        paths = path.absolute(), *path.absolute().parents
        existing = next(p for p in paths if p.exists() or p.is_symlink())  # it may lead nowhere
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        raise UserError(
            f"cannot write to {flag} {path} ({error}); give a folder that you may write to"
        ) from error


def _check_resume(folder: Path, config: RunConfig, num_seeds: int) -> None:
    saved = read_object(folder / "config.json")
    if different := difference(saved, config, num_seeds):
        raise UserError(
            f"{different} in {folder}; a resumed run may only change --total-timesteps, the "
            "actions of evaluation, and logging, run (but for --num-seeds) and Explorer options"
        )


def _check_wandb_login() -> None:
    import wandb

    if not wandb.login(prompt=False, verify=False):
        raise UserError(
            "--track needs a wandb account on this machine; run `wandb login`, or use "
            "--wandb-mode offline"
        )


def _has_nvidia_device() -> bool:
    return Path("/dev/nvidia0").exists()
