"""Where log_data goes: metrics.csv, TensorBoard, Weights & Biases and the console."""

import contextlib
import csv
import math
import os
import socket
import sys
import time
import uuid
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from common.envs import Env, EpisodeSummary
from common.errors import one_line

from common.run.cli import LoggingOptions
from common.run.trainer import Call, Trainer, TrainState


class LogStart(NamedTuple):
    """The beginning of an interval between two log points."""

    step: int  # env steps done
    seconds: float  # `time.perf_counter()`


def log_intervals(trainer: Trainer) -> Generator[tuple[LogStart, int], None, None]:
    """Yield the start of each logging interval and the env steps to do in it, until the end."""
    config = trainer.config
    while (step := int(trainer.state.step)) < config.total_timesteps:
        num_steps = min(config.log_frequency, config.total_timesteps - step)
        yield LogStart(step, time.perf_counter()), num_steps


def log_points(
    env: Env,
    state: TrainState,
    start: LogStart,
    logs: dict[str, Any],
    metrics: dict[str, Any],
    divisors: Mapping[str, str] = MappingProxyType({}),
) -> Generator[dict, None, None]:
    """Yield the log_data of one log point: "collect", and last "train".

    Args:
        env: the environments, which are checked first.
        state: the TrainState at the log point.
        start: the start of the interval.
        logs: what "collect" shows besides env steps a second, and the mean raw return and length of
            the games finished in the interval.
        metrics: sums over the updates of the interval. A name with a slash, such as charts/updates,
            is a count and shown as it is, any other as losses/NAME, its mean over "charts/updates".
        divisors: the counts by which to divide instead, for metrics that not every update has.

    Where the arrays have an axis of seeds, env steps a second are those of all seeds, the deviation
    of their returns is shown beside the mean, games are counted over all seeds, and all other
    figures are means over the seeds.

    Raises:
        UserError: an environment failed.
    """
    env.check(state.env)
    step = int(state.step)
    rate = (step - start.step) / (time.perf_counter() - start.seconds)
    logs = {name: float(value) for name, value in logs.items()}
    logs["charts/SPS"] = rate * np.size(state.env.summary.episodes)
    logs |= _finished_games(state.env.summary)
    yield {"log_type": "collect", "sample_step": step, "logs": logs}
    yield {"log_type": "train", "sample_step": step, "logs": _means_of_updates(metrics, divisors)}


def _finished_games(summary: EpisodeSummary) -> dict[str, float]:
    """Return the number of games finished in an interval, and their mean return and length."""
    episodes, return_sum, length_sum = map(np.atleast_1d, jax.device_get(summary))  # [S]
    logs = {"charts/episodes": float(episodes.sum())}
    some = episodes > 0  # [S], the seeds that finished a game
    if some.any():
        returns = return_sum[some] / episodes[some]
        logs["charts/episodic_return"] = float(returns.mean())
        logs["charts/episodic_length"] = float((length_sum[some] / episodes[some]).mean())
        logs |= {"charts/episodic_return_std": float(returns.std())} if len(episodes) > 1 else {}
    return logs


def _means_of_updates(metrics: dict[str, Any], divisors: Mapping[str, str]) -> dict[str, float]:
    """Return the counts among summed metrics, and the others as means of what was counted."""
    sums = {name: np.mean(value) for name, value in jax.device_get(metrics).items()}
    counts = {name: float(sum_) for name, sum_ in sums.items() if "/" in name}
    means = {}
    for name in (name for name in sums if name not in counts):
        if count := counts[divisors.get(name, "charts/updates")]:
            means[f"losses/{name}"] = float(sums[name] / count)
    return means | counts


def ends_log_point(log_data: dict) -> bool:
    """Return whether this log_data is the last of its log point: all that was done is logged."""
    return log_data["log_type"] == "train"


class Sink(Protocol):
    """One destination of log_data."""

    def write(self, step: int, logs: dict[str, float]) -> None:
        """Take the scalars of one log point."""

    def close(self) -> None:
        """Flush and close."""


def logger(
    make_sinks: Callable[[], list[Callable[[], Sink]]], say: Callable[[str], None]
) -> Callable[[Call], Call]:
    """Decorate `Trainer.__call__`: hand every log_data to the sinks.

    Sinks are made at the first log point, so that a run that fails before it leaves no folder. One
    that fails (a full disk, say) is reported and dropped: logging never stops training.
    """

    def decorate(call: Call) -> Call:
        def logged(trainer: Trainer) -> Generator[dict, None, None]:
            sinks: list[Sink] | None = None
            try:
                with contextlib.closing(call(trainer)) as inner:
                    for log_data in inner:
                        sinks = _opened(make_sinks(), say) if sinks is None else sinks
                        sinks = [sink for sink in sinks if _written(sink, log_data, say)]
                        yield log_data
            finally:
                for sink in sinks or []:
                    with _reported(say):
                        sink.close()

        return logged

    return decorate


def _opened(makers: list[Callable[[], Sink]], say: Callable[[str], None]) -> list[Sink]:
    sinks = []
    for make in makers:
        with _reported(say):
            sinks.append(make())
    return sinks


def _written(sink: Sink, log_data: dict, say: Callable[[str], None]) -> bool:
    with _reported(say):
        sink.write(log_data["sample_step"], log_data["logs"])
        return True
    return False


@contextlib.contextmanager
def _reported(say: Callable[[str], None]) -> Generator[None, None, None]:
    try:
        yield
    except Exception as error:
        text = f"{type(error).__name__}: {one_line(error)}"
        say(f"warning: a log is given up, training goes on ({text})")


class CsvSink:
    """metrics.csv: one row a scalar, as step, seconds since training began, name, value.

    A resumed run keeps the rows up to `first_step` and goes on counting the seconds from there.
    """

    def __init__(self, path: Path, first_step: int, start_time: float) -> None:
        rows = read_metrics(path) if path.exists() else []
        kept = [row for row in rows if row[0] <= first_step]
        self._start = start_time - (kept[-1][1] if kept else 0.0)
        fresh = path.with_suffix(".tmp")
        self._file = fresh.open("w", newline="")
        self._writer = csv.writer(self._file)
        self._writer.writerow(("step", "seconds", "name", "value"))
        self._writer.writerows(kept)
        self._file.flush()
        os.replace(fresh, path)

    def write(self, step: int, logs: dict[str, float]) -> None:
        """Append the scalars and flush."""
        seconds = round(time.time() - self._start, 3)
        self._writer.writerows((step, seconds, name, value) for name, value in logs.items())
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: Path) -> list[tuple[int, float, str, float]]:
    """Return the rows of a metrics.csv: step, seconds, name, value; torn ones are left out.

    The last line is torn if nothing ends it: what stands there may be half a number.
    """
    rows = []
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        for line in (line for line in file if line.endswith("\n")):
            with contextlib.suppress(ValueError, csv.Error, StopIteration):
                step, seconds, name, value = next(csv.reader([line]))
                rows.append((int(step), float(seconds), name, float(value)))
    return rows


def decimals(largest: float) -> int:
    """Return how many decimals a return of this size is shown with: more where it is small."""
    return 1 if largest >= 10 else 3


class TensorBoardSink:
    """TensorBoard event files, written without TensorFlow and without a thread that could die.

    The flags of the run stand under Text as a table, and under HParams beside those of other runs.
    """

    def __init__(self, folder: Path, first_step: int, flags: dict[str, Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        self._writer = RecordWriter((folder / name).open("wb"))
        self._add(file_version="brain.Event:2")
        if first_step:
            # Tells TensorBoard to drop what a killed run wrote beyond its last checkpoint.
            self._add(step=first_step + 1, session_log=SessionLog(status=SessionLog.START))
        plain = {
            k: v if isinstance(v, bool | int | float | str) else str(v) for k, v in flags.items()
        }
        self._add(step=first_step, summary=text_pb("hyperparameters", _table(plain)))
        self._add(step=first_step, summary=hparams_pb(plain))

    def write(self, step: int, logs: dict[str, float]) -> None:
        """Add one event with the scalars and flush."""
        values = [self._summary.Value(tag=k, simple_value=v) for k, v in logs.items()]
        self._add(step=step, summary=self._summary(value=values))

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()

    def _add(self, **fields: Any) -> None:
        event = self._event(wall_time=time.time(), **fields)
        self._writer.write(event.SerializeToString())
        self._writer.flush()


def _table(flags: dict[str, Any]) -> str:
    """Return flags as a table in Markdown."""
    rows = (f"| {name} | {str(value).replace('|', '&#124;')} |" for name, value in flags.items())
    return "\n".join(("| flag | value |", "|---|---|", *rows))


def video_path(folder: Path, step: int) -> Path:
    """Return where a run folder has the GIF of a step."""
    return folder / "videos" / f"step_{step}.gif"


class WandbSink:
    """A Weights & Biases run; resuming a run folder goes on with the same wandb run."""

    def __init__(self, folder: Path, flags: dict, options: LoggingOptions, code: Path) -> None:
        import wandb

        self._folder, self._step, self._video = folder, 0, wandb.Video
        id_file = folder / "wandb_id"
        run_id = id_file.read_text() if id_file.exists() else uuid.uuid4().hex[:8]
        id_file.write_text(run_id)
        self._run = wandb.init(
            project=options.wandb_project,
            entity=options.wandb_entity,
            group=options.wandb_group,
            tags=options.wandb_tags,
            mode=options.wandb_mode,
            name=folder.name,
            id=run_id,
            resume="allow",
            config=flags,
            dir=str(folder),
        )
        self._run.save(str(code), base_path=str(code.parent), policy="now")
        self._run.define_metric("sample_step")
        self._run.define_metric("*", step_metric="sample_step")

    def write(self, step: int, logs: dict[str, float]) -> None:
        """Log the scalars of one log point."""
        self._step = step
        self._run.log(logs | {"sample_step": step})

    def close(self) -> None:
        """Log the GIF of the last step if there is one, and finish the wandb run."""
        path = video_path(self._folder, self._step)
        if path.exists():
            self._run.log({"video": self._video(str(path)), "sample_step": self._step})
        self._run.finish()


class ConsoleSink:
    """A live progress bar on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console, total: int, first_step: int, num_seeds: int = 1) -> None:
        self.console, self._total, self._num_seeds = console, total, num_seeds
        self._warned = False
        self._latest = {"return": math.nan, "evaluation": math.nan, "SPS": math.nan}
        self._progress: Progress | None = None
        if console.is_terminal:
            columns = [BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[text]}")]
            self._progress = Progress(*columns, TimeRemainingColumn(), console=console)
            self._task = self._progress.add_task("", total=total, completed=first_step, text="")
            self._progress.start()

    def write(self, step: int, logs: dict[str, float]) -> None:
        """Show the step, the latest returns and the speed, and once a loss that is not finite."""
        self._warn(step, [name for name, value in logs.items() if not math.isfinite(value)])
        names = {
            "return": "charts/episodic_return",
            "evaluation": "charts/evaluation_return",
            "SPS": "charts/SPS",
        }
        for short, name in names.items():
            self._latest[short] = logs.get(name, self._latest[short])
        shown = {k: v for k, v in self._latest.items() if not math.isnan(v)}
        text = "  ".join(
            f"{k} {v:,.0f}" if k == "SPS" else f"{k} {v:.{decimals(abs(v))}f}"
            for k, v in shown.items()
        )
        if self._progress:
            self._progress.update(self._task, completed=step, text=text)
        elif "charts/SPS" in logs:
            left = (self._total - step) * self._num_seeds / logs["charts/SPS"]
            self.console.print(f"step {step:>9,} of {self._total:,}  {text}  {left:.0f} s left")

    def _warn(self, step: int, names: list[str]) -> None:
        if names and not self._warned:
            self._warned = True
            self.console.print(
                f"warning: {names[0]} is not finite at step {step:,}; lower --learning-rate, or "
                "find the place with --debug"
            )

    def close(self) -> None:
        """Stop the progress bar."""
        if self._progress:
            self._progress.stop()


class _LastingConsole(Console):
    """A console that prints what it can: a full disk or a reader that is gone ends no run."""

    def print(self, *objects: Any, **options: Any) -> None:
        with contextlib.suppress(OSError):
            super().print(*objects, **options)

    def on_broken_pipe(self) -> None:
        # Nor may the flush at the end of the process fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def make_console() -> Console:
    """Return a console on standard output that never wraps, nor takes [a] or :b: for markup."""
    width = None if sys.stdout.isatty() else 200
    return _LastingConsole(width=width, highlight=False, soft_wrap=True, markup=False, emoji=False)
