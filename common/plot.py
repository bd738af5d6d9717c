"""Draw the curves of run folders over seeds: python -m common.plot RUN_DIR... [--metric NAME]."""

import difflib
import itertools
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tyro

from common.errors import UserError, one_line

from common.run.cli import exit_codes, parse_flags
from common.run.config import read_object
from common.run.curve import bootstrap_interval, interquartile_mean, on_common_steps
from common.run.logger import read_metrics

FEW_RUNS = 5  # from here on the interquartile mean and its bootstrap interval say more
MAX_COLUMNS = 3


@dataclass(frozen=True)
class PlotOptions:
    """Draw a line for each setting: the mean over its runs, and how far they lie apart."""

    run_dirs: tyro.conf.Positional[tuple[str, ...]] = ()
    """folders of runs"""
    metric: str = "charts/episodic_return"
    """a name in metrics.csv"""
    by: str = "env_id,algo"
    """fields of config.json, with commas between; runs that agree in all of them form one line"""
    out: str = "curve.png"
    """picture to write; its ending is the format"""
    debug: bool = False
    """show tracebacks"""


class Run(NamedTuple):
    """A run folder as it was read."""

    folder: Path
    config: dict[str, Any]
    metrics: dict[str, list[tuple[int, float]]]  # env steps and values by name


class Line(NamedTuple):
    """What the runs of one setting come to, at P env steps."""

    env_id: str | None  # of the axes, where there is one for each environment
    label: str
    num_runs: int
    step: np.ndarray  # [P]
    centre: np.ndarray  # [P]
    low: np.ndarray  # [P], NaN where nothing can be said
    high: np.ndarray  # [P]


def main(options: PlotOptions) -> None:
    """Draw the lines, and print how many runs each has."""
    if not options.run_dirs:
        raise UserError("give one run folder or more, such as those under runs/; see --help")
    folders = [part for folder in options.run_dirs for part in seeds_or_itself(Path(folder))]
    runs = [read_run(folder) for folder in dict.fromkeys(folders)]
    fields = options.by.split(",")
    _check_known("--by", fields, {name for run in runs for name in run.config})
    _check_known("--metric", [options.metric], {name for run in runs for name in run.metrics})
    with_metric = [run for run in runs if options.metric in run.metrics]
    lines = make_lines(with_metric, options.metric, fields)
    save_lines(lines, options.metric, Path(options.out))
    counts = "; ".join(f"{_name(line)}: {_count(line)}" for line in lines)
    without = [str(run.folder) for run in runs if options.metric not in run.metrics]
    left_out = f"; left out, without {options.metric}: {', '.join(without)}" if without else ""
    print(f"{options.out}: {counts}{left_out}")


def seeds_or_itself(folder: Path) -> list[Path]:
    """Return a run folder's seeds if all of them have metrics of their own, else the folder."""
    try:
        seeds = sorted(folder.glob("seed_*"))
        have_metrics = all((seed / "metrics.csv").exists() for seed in seeds)
    except OSError:  # which reading it will name
        return [folder]
    return seeds if seeds and have_metrics else [folder]


def read_run(folder: Path) -> Run:
    """Read a run folder.

    Raises:
        UserError: it has no metrics.csv or no readable config.json.
    """
    try:
        rows = read_metrics(folder / "metrics.csv")
        config = read_object(folder / "config.json")
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"{folder} is not a run folder with metrics ({one_line(error)}); give one under runs/"
        ) from error
    metrics: dict[str, list[tuple[int, float]]] = {}
    for step, _, name, value in rows:
        metrics.setdefault(name, []).append((step, value))
    return Run(folder, config, metrics)


def _check_known(flag: str, names: Iterable[str], known: set[str]) -> None:
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.4)
            hint = (
                f"did you mean {', '.join(near)}?"
                if near
                else f"there are {', '.join(sorted(known))}"
            )
            raise UserError(f"{flag} {name!r} is in none of the runs; {hint}")


def make_lines(runs: Sequence[Run], metric: str, fields: Sequence[str]) -> list[Line]:
    """Return a line for each combination of the fields' values, in alphabetical order."""

    def setting(run: Run) -> list[str]:
        values = [run.config.get(field, "–") for field in fields]
        return [value if isinstance(value, str) else json.dumps(value) for value in values]

    lines = []
    for values, same in itertools.groupby(sorted(runs, key=setting), key=setting):
        named = dict(zip(fields, values, strict=True))
        env_id = named.pop("env_id", None)
        lines.append(make_line(list(same), metric, env_id, named))
    return sorted(lines, key=lambda line: line.env_id or "")


def make_line(runs: list[Run], metric: str, env_id: str | None, named: dict[str, str]) -> Line:
    """Return mean ± deviation of a few runs, of many the interquartile mean and its interval.

    The bootstrap draws runs within their environment, should there be several in one line.
    """
    steps, values = on_common_steps([run.metrics[metric] for run in runs])  # [P], [S, P]
    label = ", ".join(v if k == "algo" else f"{k} {v}" for k, v in named.items())
    if len(runs) < FEW_RUNS:
        mean, std = values.mean(axis=0), values.std(axis=0)
        spread = std if len(runs) > 1 else np.full_like(std, np.nan)
        return Line(env_id, label, len(runs), steps, mean, mean - spread, mean + spread)
    env_ids = np.array([str(run.config.get("env_id")) for run in runs])
    strata = [values[env_ids == one] for one in np.unique(env_ids)]  # [S_i, P] each
    low, high = bootstrap_interval(strata, interquartile_mean)
    return Line(env_id, label, len(runs), steps, interquartile_mean(values), low, high)


def save_lines(lines: list[Line], metric: str, picture: Path) -> None:
    """Draw the lines, on axes for each environment.

    Raises:
        UserError: the picture cannot be written.
    """
    from matplotlib.figure import Figure

    env_ids = list(dict.fromkeys(line.env_id for line in lines))
    labels = list(dict.fromkeys(line.label for line in lines))
    colours = {label: f"C{i}" for i, label in enumerate(labels)}  # the same on all axes
    columns = min(len(env_ids), MAX_COLUMNS)
    rows = -(-len(env_ids) // columns)
    figure = Figure(figsize=(7 if columns == 1 else 5 * columns, 4 * rows), layout="constrained")
    for i, env_id in enumerate(env_ids):
        axes = figure.add_subplot(rows, columns, i + 1, xlabel="env steps", ylabel=metric)
        axes.set(title=env_id or "")
        _draw(axes, [line for line in lines if line.env_id == env_id], colours)
    try:
        figure.savefig(picture, dpi=120, format=picture.suffix[1:] or "png")
    except (OSError, ValueError) as error:
        raise UserError(
            f"--out {picture} cannot be written ({one_line(error)}); give a file such as curve.png"
        ) from error


def _draw(axes: Any, lines: list[Line], colours: dict[str, str]) -> None:
    for line in lines:
        few = line.num_runs < FEW_RUNS
        what = "mean ± std" if few else "interquartile mean, 95 % interval"
        label = ", ".join(part for part in (line.label, _count(line)) if part)
        shown = label if line.num_runs == 1 else f"{label}: {what}"
        colour = colours[line.label]
        axes.plot(line.step, line.centre, color=colour, label=shown)
        axes.fill_between(line.step, line.low, line.high, color=colour, alpha=0.2, lw=0)
    axes.grid(alpha=0.3)
    axes.legend()


def _name(line: Line) -> str:
    return " ".join(part for part in (line.label, line.env_id and f"on {line.env_id}") if part)


def _count(line: Line) -> str:
    empty = "" if line.step.size else ", no env steps in common"
    return f"{line.num_runs} run{'s' * (line.num_runs > 1)}{empty}"


if __name__ == "__main__":
    with exit_codes("--debug" in sys.argv):
        main(parse_flags(PlotOptions, sys.argv[1:], __doc__ or ""))
