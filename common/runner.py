"""From the command line to a finished run folder: parse, train, evaluate, save, report."""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.panel import Panel

from common import cli, threads
from common.checkpoint import checkpointer, resume
from common.envs import resolve_backend
from common.errors import UserError
from common.evaluator import evaluator
from common.logger import ConsoleSink, CsvSink, Sink, TensorBoardSink, logger, make_console

Call = Callable[[Any], Generator[dict, None, None]]


def run(trainer_class: type, config_class: type, presets: dict[str, dict[str, Any]]) -> None:
    """Run an algorithm file as a program and exit.

    Exit codes: 0 trained and evaluated; 2 bad input or a failing environment, after one line that
    says what to do; 130 and 143 stopped by Ctrl-C or SIGTERM, after a last checkpoint.
    """
    debug = "--debug" in sys.argv
    try:
        options = cli.parse(config_class, presets)
        sys.exit(_Run(trainer_class, options).execute())
    except UserError as error:
        if debug:
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


class _Run:
    """One run: its options, its folder and its trainer."""

    def __init__(self, trainer_class: type, options: cli.Options) -> None:
        self.trainer_class, self.options = trainer_class, options
        self.config, self.run, self.logging = options.config, options.run, options.logging
        self.source = Path(sys.modules[trainer_class.__module__].__file__ or "")
        self.algo = self.source.stem
        self.console = make_console()
        self._folder = Path(self.run.resume) if self.run.resume else None
        self.first_step = 0

    def execute(self) -> int:
        self._check_before_start()
        self._choose_device()
        trainer = self._make_trainer()
        say = self.console.print
        if self.run.resume:
            resume(trainer, self.folder() / "checkpoints", say)
            self.first_step = int(trainer.state.step)
        say(self._describe())
        with _stop_signals() as received:
            for _ in self._decorated(self.trainer_class.__call__)(trainer):
                if received:
                    break
        if received:
            folder = self._folder or "no run folder: nothing was learned yet"
            say(f"stopped by {received[0].name}; go on with --resume {folder}")
            return 128 + received[0]
        self._report(trainer)
        return 0

    def folder(self) -> Path:
        """Return the run folder, made with config and code when first asked for."""
        if self._folder is None:
            env_id = self.config.env_id.replace("/", "-").replace(":", "-")
            stamp = time.strftime("%Y%m%d-%H%M%S")
            name = f"{env_id}__{self.algo}__{self.config.seed}__{stamp}"
            self._folder = _make_unique(Path(self.logging.runs_dir), name)
            (self._folder / "config.json").write_text(json.dumps(self._flags(), indent=2))
            shutil.copyfile(self.source, self._folder / self.source.name)
        return self._folder

    def _flags(self) -> dict[str, Any]:
        run = dataclasses.asdict(self.run)
        for name in ("config", "resume", "debug"):
            del run[name]
        return {
            "algo": self.algo,
            **dataclasses.asdict(self.config),
            **dataclasses.asdict(self.logging),
            **run,
        }

    def _describe(self) -> str:
        device = jax.devices()[0]
        core = "" if self.core is None else f", one core ({self.core})"
        return (
            f"{self.algo} on {self.config.env_id} ({resolve_backend(self.config.env_id)}), "
            f"preset {self.run.preset}, seed {self.config.seed}, {device.platform}{core}"
        )

    def _check_before_start(self) -> None:
        if self.run.resume:
            _check_resume(Path(self.run.resume), self.algo, self.config)
        _check_writable(Path(self.run.resume or self.logging.runs_dir))
        if self.logging.track and self.logging.wandb_mode == "online":
            _check_wandb_login()

    def _choose_device(self) -> None:
        platforms = {"auto": None, "cpu": "cpu", "gpu": "cuda"}
        if self.run.device != "auto":
            jax.config.update("jax_platforms", platforms[self.run.device])
        has_gpu = self.run.device != "cpu" and _has_nvidia_device()
        small = self.run.preset != "atari" and self.config.num_envs <= 256
        self.core = threads.use_one_core() if small and not has_gpu else None
        try:
            jax.devices()
        except RuntimeError as error:
            raise UserError(
                "--device gpu was asked for, but JAX finds no GPU; use --device cpu, or "
                "pip install 'quartet-rl[gpu]' on a machine with an NVIDIA driver"
            ) from error

    def _make_trainer(self) -> Any:
        config = self.config
        if self.run.debug:
            config = dataclasses.replace(config, log_frequency=config.num_envs)
        return self.trainer_class(config)

    def _decorated(self, call: Call) -> Call:
        run, say = self.run, self.console.print
        if run.debug:
            call = check_finite(self.config.log_frequency)(call)
        best_of = "charts/evaluation_return" if run.eval_frequency else "charts/episodic_return"
        call = evaluator(run.eval_frequency, run.eval_episodes)(call)
        call = checkpointer(
            lambda: self.folder() / "checkpoints",
            run.checkpoint_frequency,
            run.keep_checkpoints,
            best_of,
            say,
        )(call)
        return logger(self._sinks, say)(call)

    def _sinks(self) -> list[Sink]:
        folder = self.folder()
        sinks: list[Sink] = [
            CsvSink(folder / "metrics.csv", self.first_step),
            TensorBoardSink(folder, self.first_step),
            ConsoleSink(self.console, self.config.total_timesteps, self.first_step),
        ]
        if self.logging.track:
            from common.logger import WandbSink

            sinks.append(WandbSink(folder, self._flags(), self.logging, self.source))
        return sinks

    def _report(self, trainer: Any) -> None:
        from common.curve import save_curve

        folder = self.folder()
        log_data = trainer._run_evaluate(self.run.eval_episodes)
        mean, std = (log_data["logs"][f"charts/evaluation_{k}"] for k in ("return", "std"))
        title = f"{self.algo} on {self.config.env_id}, seed {self.config.seed}"
        save_curve(folder / "metrics.csv", folder / "curve.png", title)
        lines = [
            f"{title}: {self.config.total_timesteps:,} steps",
            f"evaluation over {self.run.eval_episodes} episodes: {mean:.1f} ± {std:.1f}",
            f"run folder: {folder}",
        ]
        if self.logging.capture_video:
            lines.append(self._video(trainer))
        self.console.print(Panel("\n".join(lines), expand=False))

    def _video(self, trainer: Any) -> str:
        from common.video import save_video

        path = self.folder() / "videos" / f"step_{self.config.total_timesteps}.gif"
        try:
            save_video(self.config, trainer.agent.predict, trainer.state.learner, path)
        except (UserError, OSError) as error:
            return f"no video: {error}"
        return f"video: {path}"


@contextlib.contextmanager
def _stop_signals() -> Generator[list[signal.Signals], None, None]:
    """Collect the first Ctrl-C or SIGTERM instead of dying; the second one kills as usual."""
    received: list[signal.Signals] = []
    caught = (signal.SIGINT, signal.SIGTERM)

    def receive(number: int, frame: Any) -> None:
        received.append(signal.Signals(number))
        for one in caught:
            signal.signal(one, previous[one])

    previous = {one: signal.signal(one, receive) for one in caught}
    try:
        yield received
    finally:
        for one in caught:
            signal.signal(one, previous[one])


def check_finite(log_frequency: int) -> Callable[[Call], Call]:
    """Decorate a `Trainer.__call__` that yields every vector step: stop at the first NaN.

    Log points between multiples of `log_frequency` are checked, but not passed on.

    Raises:
        UserError: names the first metric, else the first array of the learner, that is not finite.
    """

    def decorate(call: Call) -> Call:
        def checked(trainer: Any) -> Generator[dict, None, None]:
            last = int(trainer.state.step)
            for log_data in call(trainer):
                step = log_data["sample_step"]
                arrays = jax.tree_util.tree_leaves_with_path(trainer.state.learner)
                named = {**log_data["logs"], **{jax.tree_util.keystr(p): x for p, x in arrays}}
                for name, value in named.items():
                    if not np.isfinite(np.asarray(value)).all():
                        raise UserError(
                            f"{name.lstrip('.')} is not finite at step {step}: lower "
                            "--learning-rate, or look for a division or logarithm of zero before it"
                        )
                if step // log_frequency > last // log_frequency:
                    yield log_data
                if log_data["log_type"] == "train":
                    last = step

        return checked

    return decorate


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


def _check_writable(path: Path) -> None:
    existing = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise UserError(f"cannot write to {path} ({existing} refuses); give another --runs-dir")


def _check_resume(folder: Path, algo: str, config: Any) -> None:
    saved = json.loads((folder / "config.json").read_text())
    if saved.get("algo") != algo:
        raise UserError(
            f"{folder} was trained by {saved.get('algo')}, not by {algo}; "
            "resume it with its own file"
        )
    for name, value in dataclasses.asdict(config).items():
        before = tuple(saved[name]) if isinstance(value, tuple) else saved.get(name)
        if name != "total_timesteps" and before != value:
            raise UserError(
                f"--{name.replace('_', '-')} {value} differs from {before} in {folder}; a resumed "
                "run may only change --total-timesteps, logging and run options"
            )


def _check_wandb_login() -> None:
    import wandb

    if not wandb.api.api_key:
        raise UserError(
            "--track needs a wandb account on this machine; run `wandb login`, or use "
            "--wandb-mode offline"
        )


def _has_nvidia_device() -> bool:
    return Path("/dev/nvidia0").exists()
