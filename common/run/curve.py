"""The learning curve of a run as a picture."""

from pathlib import Path

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
