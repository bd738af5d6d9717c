"""The learning curve of a run as a picture, and the statistics of several runs' curves."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common.run.logger import read_metrics

LINES = {"charts/episodic_return": "training", "charts/evaluation_return": "evaluation"}


def save_curve(metrics: Path, picture: Path, title: str) -> None:
    """Draw the training and evaluation returns of a metrics.csv over env steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(title=title, xlabel="env steps", ylabel="episodic return (raw)")
    rows = read_metrics(metrics)
    for name, label in LINES.items():
        points = [(step, value) for step, _, row_name, value in rows if row_name == name]
        if points:
            axes.plot(
                *zip(*points, strict=True), label=label, marker="." if len(points) < 30 else ""
            )
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    figure.savefig(picture, dpi=120)


def on_common_steps(curves: Sequence[Sequence[tuple]]) -> tuple[np.ndarray, np.ndarray]:
    """Return env steps [P] and the values of S curves there [S, P], interpolated linearly.

    A curve is points of env step, value and whatever else. Steps before the first or after the last
    point of any curve are left out.
    """
    if not all(curves):
        return np.empty(0), np.empty((len(curves), 0))
    points = [np.asarray(curve) for curve in curves]
    steps = np.unique(np.concatenate([curve[:, 0] for curve in points]))  # [P]
    outside = {"left": np.nan, "right": np.nan}
    rows = [np.interp(steps, curve[:, 0], curve[:, 1], **outside) for curve in points]
    values = np.stack(rows)  # [S, P]
    known = np.isfinite(values).all(axis=0)
    return steps[known].astype(int), values[:, known]


def interquartile_mean(*values: np.ndarray, axis: int = 0) -> np.ndarray:
    """Return the mean of all values along an axis but the lowest and the highest quarter."""
    from scipy.stats import trim_mean

    return trim_mean(np.concatenate(values, axis=axis), 0.25, axis=axis)


def bootstrap_interval(strata: Sequence[np.ndarray], statistic: Any) -> tuple[np.ndarray, ...]:
    """Return the ends of the 95 % interval of `statistic(*strata, axis)`, [P] each.

    Runs [S_i, P] are drawn again within each stratum. The interval is the percentile bootstrap's,
    which stays defined where all runs agree. From a stratum of one run nothing can be said, and it
    is NaN.
    """
    from scipy.stats import bootstrap

    low = high = np.full(strata[0].shape[1], np.nan)
    if all(len(runs) > 1 for runs in strata) and strata[0].size:
        resampled = bootstrap(
            strata, statistic, axis=0, n_resamples=2000, batch=100, method="percentile", rng=0
        )
        low, high = resampled.confidence_interval
    return low, high
