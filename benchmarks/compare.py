"""Performance profiles, sample efficiency, wall time and spread of the algorithms of each family.

    python benchmarks/compare.py

rewrites what stands between the two markers in docs/comparison.md from the `jobs/*.json` under
benchmarks/results/sweep* and from random_policy.json, and draws docs/img/profile_*.png. Nothing is
trained. Families, rows and the order of algorithms are those of `benchmarks/tables.py`.

Performance profiles, interquartile means over all runs and stratified bootstrap: Agarwal et al.
2021, https://arxiv.org/abs/2108.13264
"""

import json
import math
import sys
from itertools import groupby
from typing import NamedTuple

import gymnasium
import numpy as np

from common.errors import UserError
from report import Curve, median_minutes, save_picture, write_atomically
from tables import (
    FAMILIES,
    RESULTS,
    ROOT,
    Cell,
    Family,
    Page,
    algorithm_link,
    family_cells,
    markdown_table,
    place,
    read_cells,
    with_block,
)

from common.run import cli
from common.run.curve import bootstrap_interval, interquartile_mean

PAGE = Page("docs/comparison.md", "algorithms", "`{0}`", whole=True)
BEGIN = "<!-- results: written by `python benchmarks/compare.py` -->"
GRID = 201  # points of a curve's mean, and of a profile
LEVELS = (0.5, 0.9)  # scores whose first env step is named

Column = tuple[str, int]
"""an environment and the env steps of its runs"""


class Scale(NamedTuple):
    """What a score of 0 and of 1 stand for on an environment."""

    random: float  # return of a random policy
    best: float  # highest mean training return, or the threshold that no algorithm reaches

    def score(self, returns: np.ndarray) -> np.ndarray:
        """Return 0 for a random policy's return and 1 for the best."""
        return (returns - self.random) / (self.best - self.random)


class Standing(NamedTuple):
    """An algorithm's runs on the environments that all algorithms of a family share."""

    cells: dict[Column, Cell]
    scores: list[np.ndarray]  # of the final training return, [S] for each environment
    areas: list[np.ndarray]  # mean score over the whole run, [S] for each environment


def main() -> None:
    """Rewrite the page and the pictures, and name them."""
    cells = read_cells(RESULTS)
    path = ROOT / PAGE.path
    write_atomically(path, with_block(path.read_text(), page_block(cells), PAGE.path, BEGIN))
    pictures = []
    for family in FAMILIES:
        members = family_cells(family, cells)
        if members:
            pictures.append(draw_profiles(family, standings(family, members)))
    print("files:", ", ".join([PAGE.path, *pictures]))


def page_block(cells: list[Cell]) -> str:
    """Return what stands between the page's markers."""
    parts = []
    for family in FAMILIES:
        members = family_cells(family, cells)
        if members:
            parts += [f"## {family.title}", family_table(family, members)]
            parts.append(f"![Performance profiles: {family.title}](img/profile_{family.name}.png)")
    return "\n\n".join(parts)


def read_random() -> dict[str, float]:
    """Return the mean return of a random policy by environment."""
    text = (RESULTS / "random_policy.json").read_text()
    return {env_id: measured["return"] for env_id, measured in json.loads(text).items()}


def shared_columns(family: Family, cells: list[Cell]) -> list[Column]:
    """Return the environments on which every algorithm of a family has run."""
    labels = {cell.runs[0].label for cell in cells}
    columns = sorted({cell.column for cell in cells}, key=lambda x: place(family.env_ids, x[0]))
    return [
        column
        for column in columns
        if {cell.runs[0].label for cell in cells if cell.column == column} == labels
    ]


def scale_of(column: Column, cells: list[Cell]) -> Scale:
    """Return the scale of an environment.

    Its 1 is the best algorithm's mean or, where that falls short, the return at which Gymnasium
    counts the environment as solved.

    Raises:
        UserError: the return of a random policy is not known.
    """
    random = read_random()
    env_id = column[0]
    if env_id not in random:
        command = f"python benchmarks/random_policy.py --env-ids {env_id}"
        raise UserError(f"no random policy was measured on {env_id}; run {command}")
    returns = [
        np.mean([run.training_return for run in cell.runs])
        for cell in cells
        if cell.column == column
    ]
    spec = gymnasium.registry.get(env_id)
    if spec is not None and spec.reward_threshold is not None:
        returns.append(spec.reward_threshold)
    return Scale(random[env_id], float(max(returns)))


def standings(family: Family, cells: list[Cell]) -> list[Standing]:
    """Return how each algorithm of a family stands on the environments that all share."""
    columns = shared_columns(family, cells)
    scales = [scale_of(column, cells) for column in columns]
    rows = []
    for _, same in groupby(cells, lambda cell: cell.runs[0].label):
        by_column = {cell.column: cell for cell in same}
        row = {column: by_column[column] for column in columns}
        scores, areas = [], []
        for cell, scale in zip(row.values(), scales, strict=True):
            scores.append(scale.score(np.array([run.training_return for run in cell.runs])))
            areas.append(np.array([area(run.curve, run.steps, scale) for run in cell.runs]))
        rows.append(Standing(row, scores, areas))
    return rows


def score_curve(curve: Curve, steps: int, scale: Scale) -> np.ndarray:
    """Return a run's score at GRID env steps from 0 to its end, [GRID].

    It starts as a random policy, and keeps its last return after the last episode that ended.
    """
    step, returns, _ = zip(*curve, strict=True)
    grid = np.linspace(0, steps, GRID)
    return scale.score(np.interp(grid, [0, *step], [scale.random, *returns]))


def area(curve: Curve, steps: int, scale: Scale) -> float:
    """Return the mean score over all env steps: the higher, the fewer steps it took to learn."""
    return float(np.trapezoid(score_curve(curve, steps, scale)) / (GRID - 1))


def steps_to(level: float, cell: Cell, scale: Scale) -> int | None:
    """Return the first env step where the mean score over seeds reaches a level, if any does."""
    steps = cell.column[1]
    mean = np.mean([score_curve(run.curve, steps, scale) for run in cell.runs], axis=0)  # [GRID]
    reached = np.flatnonzero(mean >= level)
    return int(np.linspace(0, steps, GRID)[reached[0]]) if len(reached) else None


def aggregate(scores: list[np.ndarray]) -> tuple[float, float, float]:
    """Return the interquartile mean over all runs and its 95 % interval, drawn by environment.

    Every environment counts alike, however many seeds it has.
    """
    strata = [values[:, None] for values in scores]  # [S, 1] each
    low, high = bootstrap_interval(strata, balanced_mean)
    return float(balanced_mean(*strata)[0]), float(low[0]), float(high[0])


def balanced_mean(*strata: np.ndarray, axis: int = 0) -> np.ndarray:
    """Return the interquartile mean of runs that are repeated to equal numbers in all strata.

    The number is a multiple of 4, so that a quarter is cut off exactly at each end, also of 5 runs.
    """
    most = math.lcm(4, *(runs.shape[axis] for runs in strata))
    repeated = [np.repeat(runs, most // runs.shape[axis], axis=axis) for runs in strata]
    return interquartile_mean(*repeated, axis=axis)


def profile(scores: list[np.ndarray], levels: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return the share of runs above each level, and the ends of its 95 % interval, [P] each.

    Every environment counts alike, however many seeds it has (Agarwal et al. 2021, Eq. 1).
    """
    above = [(values[:, None] > levels).astype(float) for values in scores]  # [S, P] each
    low, high = bootstrap_interval(above, mean_of_means)
    return mean_of_means(*above), low, high


def mean_of_means(*strata: np.ndarray, axis: int = 0) -> np.ndarray:
    """Return the mean over strata of the mean over runs."""
    return np.mean([runs.mean(axis=axis) for runs in strata], axis=0)


def family_table(family: Family, cells: list[Cell]) -> str:
    """Return a family's algorithms beside each other in markdown."""
    columns = shared_columns(family, cells)
    scales = [scale_of(column, cells) for column in columns]
    names = " / ".join(env_id for env_id, _ in columns)
    reached = [f"env steps to {level}" for level in LEVELS]
    header = ["algorithm", "score", "lowest run", "area", *reached, "minutes a run"]
    rows = []
    for standing in standings(family, cells):
        iqm, low, high = aggregate(standing.scores)
        in_turn = list(zip(standing.cells.values(), scales, strict=True))
        reached = [[steps_to(level, *pair) for pair in in_turn] for level in LEVELS]
        minutes = [median_minutes(cell.runs) for cell, _ in in_turn]
        row = [
            algorithm_link(PAGE, in_turn[0][0]),
            f"{iqm:.2f} [{low:.2f}, {high:.2f}]",
            f"{min(values.min() for values in standing.scores):.2f}",
            f"{np.mean([values.mean() for values in standing.areas]):.2f}",
            *(" / ".join("–" if x is None else f"{x:,}" for x in steps) for steps in reached),
            " / ".join(f"{value:.1f}" for value in minutes),
        ]
        rows.append(row)
    return f"On {names}:\n\n{markdown_table(header, rows)}"


def draw_profiles(family: Family, rows: list[Standing]) -> str:
    """Draw the performance profiles of a family; return the picture's path."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    FigureCanvasAgg(figure)
    names = ", ".join(env_id for env_id, _ in rows[0].cells)
    axes = figure.add_subplot(title=names, xlabel="score τ", ylabel="share of runs above τ")
    scores = np.concatenate([values for row in rows for values in row.scores])
    levels = np.linspace(np.floor(scores.min() * 10) / 10, scores.max(), GRID)
    for i, row in enumerate(rows):
        share, low, high = profile(row.scores, levels)
        colour, dashes = f"C{i % 10}", "-" if i < 10 else "--"
        label = next(iter(row.cells.values())).runs[0].label
        axes.plot(levels, share, dashes, color=colour, label=label)
        axes.fill_between(levels, low, high, color=colour, alpha=0.08, lw=0)
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    path = f"docs/img/profile_{family.name}.png"
    save_picture(figure, ROOT / path)
    return path


if __name__ == "__main__":
    with cli.exit_codes(debug=False):
        cli.parse_flags(cli.NoFlags, sys.argv[1:], __doc__ or "")
        main()
