"""Statistics, tables and pictures of finished sweep runs.

    python benchmarks/report.py benchmarks/results/sweep

makes the tables and pictures of a sweep's folder again from its `jobs/*.json`, without training.
"""

import csv
import functools
import io
import json
import shlex
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tyro

from common.errors import UserError

from common.run import checkpoint, cli
from common.run.curve import bootstrap_interval, interquartile_mean, on_common_steps

FEW_CURVES = 4  # of more, each is its mean and interval alone, and the legend stands beside them
MANY_SEEDS = 5  # of fewer, a quarter is less than a seed or two

# Mean training return of 3 seeds: CleanRL's tables for dqn_jax.py (dqn.py: 488.7, -91.5, -195.0),
# c51_jax.py, ppo.py, pqn.py, and ppo_, ddpg_, td3_ and sac_continuous_action.py, on the pages of
# these algorithms, such as https://docs.cleanrl.dev/rl-algorithms/ddpg/
PUBLISHED: dict[tuple[str, str, int], float] = {
    ("dqn", "CartPole-v1", 500_000): 498,
    ("dqn", "Acrobot-v1", 500_000): -89,
    ("dqn", "MountainCar-v0", 500_000): -189,
    ("c51", "CartPole-v1", 500_000): 491,
    ("c51", "Acrobot-v1", 500_000): -87,
    ("c51", "MountainCar-v0", 500_000): -174,
    ("ppo", "CartPole-v1", 500_000): 490,
    ("ppo", "Acrobot-v1", 500_000): -86,
    ("ppo", "MountainCar-v0", 500_000): -200,
    ("ppo", "HalfCheetah-v4", 1_000_000): 1443,
    ("ppo", "Walker2d-v4", 1_000_000): 2288,
    ("ppo", "Hopper-v4", 1_000_000): 2383,
    ("ppo", "InvertedPendulum-v4", 1_000_000): 963,
    ("ppo", "Humanoid-v4", 1_000_000): 716,
    ("ppo", "Pusher-v4", 1_000_000): -40,
    ("ddpg", "HalfCheetah-v4", 1_000_000): 10374,
    ("ddpg", "Walker2d-v4", 1_000_000): 1240,
    ("ddpg", "Hopper-v4", 1_000_000): 1577,
    ("ddpg", "InvertedPendulum-v4", 1_000_000): 643,
    ("ddpg", "Humanoid-v4", 1_000_000): 1700,
    ("ddpg", "Pusher-v4", 1_000_000): -77,
    ("td3", "HalfCheetah-v4", 1_000_000): 9583,
    ("td3", "Walker2d-v4", 1_000_000): 4058,
    ("td3", "Hopper-v4", 1_000_000): 3135,
    ("td3", "InvertedPendulum-v4", 1_000_000): 969,
    ("td3", "Humanoid-v4", 1_000_000): 5035,
    ("td3", "Pusher-v4", 1_000_000): -31,
    ("sac", "HalfCheetah-v4", 1_000_000): 9635,
    ("sac", "Walker2d-v4", 1_000_000): 3591,
    ("sac", "Hopper-v4", 1_000_000): 2310,
    ("sac", "InvertedPendulum-v4", 1_000_000): 909,
    ("sac", "Humanoid-v4", 1_000_000): 4996,
    ("sac", "Pusher-v4", 1_000_000): -22,
    ("pqn", "CartPole-v1", 500_000): 495,
    ("pqn", "Acrobot-v1", 500_000): -96,
    ("pqn", "MountainCar-v0", 500_000): -200,
}
# CleanRL's ppo_continuous_action.py on dm_control, 8,000,000 env steps, by envpool's ids: mean and
# deviation of 10 seeds, https://docs.cleanrl.dev/rl-algorithms/rpo/; the tables on its PPO page are
# an older one, of 3 seeds with the script's own number of steps, and a newer one of three tasks.
DM_CONTROL: dict[str, tuple[float, float]] = {
    "AcrobotSwingup-v1": (26.87, 7.93),
    "AcrobotSwingupSparse-v1": (1.70, 0.88),
    "BallInCupCatch-v1": (935.26, 12.57),
    "CartpoleBalance-v1": (790.36, 17.64),
    "CartpoleBalanceSparse-v1": (986.04, 9.93),
    "CartpoleSwingup-v1": (590.21, 16.72),
    "CartpoleSwingupSparse-v1": (240.14, 299.93),
    "CartpoleTwoPoles-v1": (216.31, 4.03),
    "CartpoleThreePoles-v1": (160.03, 2.52),
    "CheetahRun-v1": (472.14, 99.62),
    "DogStand-v1": (332.06, 23.66),
    "DogWalk-v1": (124.92, 23.13),
    "DogTrot-v1": (79.89, 12.30),
    "DogRun-v1": (69.07, 8.17),
    "DogFetch-v1": (28.34, 4.87),
    "FingerSpin-v1": (630.06, 252.99),
    "FingerTurnEasy-v1": (237.76, 78.10),
    "FingerTurnHard-v1": (83.76, 28.96),
    "FishUpright-v1": (559.72, 65.79),
    "FishSwim-v1": (80.42, 9.18),
    "HopperStand-v1": (3.26, 1.65),
    "HopperHop-v1": (6.48, 18.92),
    "HumanoidStand-v1": (20.76, 29.35),
    "HumanoidWalk-v1": (8.92, 18.01),
    "HumanoidRun-v1": (5.44, 9.16),
    "HumanoidRunPureState-v1": (1.13, 0.11),
    "HumanoidCMUStand-v1": (4.64, 0.37),
    "HumanoidCMURun-v1": (0.88, 0.09),
    "ManipulatorBringBall-v1": (0.42, 0.14),
    "ManipulatorBringPeg-v1": (0.95, 0.43),
    "ManipulatorInsertBall-v1": (41.24, 27.27),
    "ManipulatorInsertPeg-v1": (40.72, 15.95),
    "PendulumSwingup-v1": (472.19, 385.47),
    "PointMassEasy-v1": (534.23, 264.35),
    "PointMassHard-v1": (129.75, 61.18),
    "QuadrupedWalk-v1": (247.29, 90.48),
    "QuadrupedRun-v1": (171.50, 37.90),
    "QuadrupedEscape-v1": (23.11, 10.48),
    "QuadrupedFetch-v1": (183.71, 25.14),
    "ReacherEasy-v1": (773.01, 56.70),
    "ReacherHard-v1": (637.84, 81.15),
    "StackerStack2-v1": (58.02, 11.04),
    "StackerStack4-v1": (73.84, 14.48),
    "SwimmerSwimmer6-v1": (164.22, 18.44),
    "SwimmerSwimmer15-v1": (161.02, 24.56),
    "WalkerStand-v1": (439.24, 210.22),
    "WalkerWalk-v1": (305.74, 92.15),
    "WalkerRun-v1": (128.18, 91.52),
}
# The same column of that page on Gymnasium's tasks.
GYMNASIUM: dict[str, tuple[float, float]] = {
    "Ant-v4": (1824.17, 905.78),
    "HalfCheetah-v4": (2637.19, 1068.49),
    "Hopper-v4": (2741.42, 269.11),
    "Humanoid-v4": (583.17, 27.88),
    "HumanoidStandup-v4": (109325.87, 16161.71),
    "InvertedDoublePendulum-v4": (5626.22, 289.23),
    "InvertedPendulum-v4": (888.83, 34.66),
    "Pusher-v4": (-30.35, 6.43),
    "Reacher-v4": (-4.65, 0.96),
    "Swimmer-v4": (124.88, 22.24),
    "Walker2d-v4": (2872.92, 690.53),
    "BipedalWalker-v3": (172.12, 96.05),
    "Pendulum-v1": (-1141.98, 135.55),
}
PUBLISHED |= {
    ("ppo", env_id, 8_000_000): mean for env_id, (mean, _) in (DM_CONTROL | GYMNASIUM).items()
}

Curve = list[tuple[int, float, float]]
"""env step, mean return and number of the episodes that ended since the log point before"""


@dataclass(frozen=True)
class Result:
    """What a finished run came to."""

    algo: str
    env_id: str
    seed: int
    flags: list[str]
    steps: int
    training_return: float
    """mean of the episodes that ended in the last 10 % of the steps"""
    evaluation_return: float
    evaluation_std: float
    seconds: float
    """wall time of its processes, with start, compilation and evaluation"""
    SPS: float
    """env steps a second, the median of its log points"""
    commit: str
    machine: str
    curve: Curve
    setting: str = ""
    """name of its flags under --settings"""
    program: str = ""
    """path of its file, if that is not in algos/"""
    config: dict[str, Any] = field(default_factory=dict)
    """all its hyper-parameters, as defaults change; older results have none"""

    @property
    def label(self) -> str:
        """Return algorithm and setting."""
        return f"{self.algo}, {self.setting}" if self.setting else self.algo


class SeedCurves(NamedTuple):
    """The learning curves of an algorithm on an environment over seeds, at P env steps."""

    algo: str  # and its setting, if there are several
    seeds: int
    step: np.ndarray  # [P]
    mean: np.ndarray  # [P]
    iqm: np.ndarray  # [P]
    low: np.ndarray  # [P]
    high: np.ndarray  # [P]


@dataclass(frozen=True)
class ReportOptions:
    """Make the tables and pictures of a sweep again from the data of its finished runs."""

    out: tyro.conf.Positional[str] = "benchmarks/results/sweep"
    """folder of a sweep, as its --out names it"""


def main(options: ReportOptions) -> None:
    """Print the table, and name the files that were made.

    Raises:
        UserError: the folder holds no finished runs.
    """
    out = Path(options.out)
    if not list((out / "jobs").glob("*.json")):
        raise UserError(f"{out} holds no finished runs; give a folder of benchmarks/sweep.py")
    write_report(out)
    print((out / "results.md").read_text())
    made = [*sorted(out.glob("*.csv")), *sorted(out.glob("*.png"))]
    print("files:", ", ".join(map(str, [out / "results.md", *made])))


def read_curve(rows: list[tuple[int, float, str, float]]) -> Curve:
    """Return env step, mean return and number of episodes where a metrics.csv has episodes."""
    episodes = {step: value for step, _, name, value in rows if name == "charts/episodes"}
    returns = ((step, value) for step, _, name, value in rows if name == "charts/episodic_return")
    return [(step, value, episodes[step]) for step, value in returns]


def late_return(curve: Curve, total_steps: int, share: float = 0.1) -> float:
    """Return the mean over the episodes of the last `share` of the steps; NaN if none ended.

    A point of the curve counts whole, with episodes that ended since the point before it.
    """
    late = [point for point in curve if point[0] > (1 - share) * total_steps]
    if not late:
        return float("nan")
    _, returns, episodes = zip(*late, strict=True)
    return float(np.average(returns, weights=episodes))


def curve_statistics(returns: np.ndarray) -> tuple[np.ndarray, ...]:
    """[S, P] -> mean, interquartile mean and ends of the mean's 95 % interval over seeds, [P] each.

    From one seed nothing can be said, and the interval is NaN.
    """
    low, high = bootstrap_interval([returns], np.mean)
    return returns.mean(axis=0), interquartile_mean(returns), low, high


def write_report(out: Path) -> None:
    """Make tables and pictures from all finished runs under `out`."""
    groups = read_groups(out)
    if not groups:
        return
    write_atomically(out / "results.csv", _runs_table([run for group in groups for run in group]))
    write_atomically(out / "results.md", markdown_report(groups))
    rows = []
    for env_id, same_env in groupby(groups, lambda group: group[0].env_id):
        curves = [seed_curves(group) for group in same_env]
        save_curves(curves, env_id, out / f"{file_name(env_id)}.png")
        for algo, seeds, steps, *columns in curves:
            for step, *values in zip(steps, *columns, strict=True):
                # As many digits as the returns of runs have, which are in 32 bits.
                rows.append((env_id, algo, seeds, step, *(float(f"{x:.7g}") for x in values)))
    write_atomically(out / "curves.csv", csv_text(("env_id", *SeedCurves._fields), rows))


def read_groups(out: Path) -> list[list[Result]]:
    """Return all finished runs under `out`, in groups that differ in the seed alone.

    Raises:
        UserError: runs of a group differ in more, as defaults changed between them.
    """
    paths = (out / "jobs").glob("*.json")
    results = [Result(**json.loads(path.read_text())) for path in paths]
    results.sort(key=lambda result: (result.env_id, result.label, result.seed))
    groups = [list(group) for _, group in groupby(results, lambda r: (r.env_id, r.label))]
    for group in groups:
        _check_same_config(out, group)
    return groups


def changed_fields(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the hyper-parameters that two runs both have, with other values."""
    return sorted(name for name in before.keys() & now.keys() if before[name] != now[name])


def _check_same_config(out: Path, group: list[Result]) -> None:
    first, *others = [result for result in group if result.config] or group
    for other in others:
        if differ := changed_fields(first.config, other.config):
            raise UserError(
                f"{out} holds {first.label} on {first.env_id} with other {', '.join(differ)} for "
                f"seed {first.seed} than for {other.seed}; train one of them again elsewhere"
            )


def _runs_table(results: list[Result]) -> str:
    left_out = ("flags", "curve", "config")
    header = [name for name in Result.__dataclass_fields__ if name not in left_out]
    return csv_text(header, [[getattr(result, name) for name in header] for result in results])


def seed_curves(group: list[Result]) -> SeedCurves:
    """Return the statistics of the learning curves of a group of runs."""
    steps, returns = on_common_steps([result.curve for result in group])
    return SeedCurves(group[0].label, len(group), steps, *curve_statistics(returns))


def save_curves(curves: list[SeedCurves], env_id: str, picture: Path) -> None:
    """Draw the learning curves of the algorithms on one environment."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    is_crowded = len(curves) > FEW_CURVES
    figure = Figure(figsize=(9, 5) if is_crowded else (7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    ylabel = "episodic return (raw), 95 % interval"
    axes = figure.add_subplot(title=env_id, xlabel="env steps", ylabel=ylabel)
    for i, curve in enumerate(curves):
        many = f"mean of {curve.seeds} seeds" if curve.seeds > 1 else "1 seed"
        draw_curve(axes, curve, i, f"{curve.algo}, {many}")
        if curve.seeds >= MANY_SEEDS and not is_crowded:
            axes.plot(curve.step, curve.iqm, "--", color=f"C{i}", label="interquartile mean")
    axes.grid(alpha=0.3)
    axes.legend(**({"loc": "center left", "bbox_to_anchor": (1, 0.5)} if is_crowded else {}))
    save_picture(figure, picture, colours=64 if len(curves) == 1 else 256)


def save_picture(figure: Any, path: Path, colours: int = 256) -> None:
    """Write a figure in few colours: as the repository keeps it, bytes count."""
    from PIL import Image

    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=120)
    image = Image.open(drawn).convert("RGB")
    # Without the refinement by k-means, shades of intervals would take each other's colours.
    image.quantize(colours, Image.Quantize.MAXCOVERAGE, kmeans=2).save(path, optimize=True)


def draw_curve(axes: Any, curve: SeedCurves, number: int, label: str) -> None:
    """Draw a mean over seeds and its 95 % interval; there are ten colours, then dashes."""
    colour, dashes = f"C{number % 10}", "-" if number < 10 else "--"
    axes.plot(curve.step, curve.mean, dashes, color=colour, label=label)
    if np.isfinite(curve.low).any():
        axes.fill_between(curve.step, curve.low, curve.high, color=colour, alpha=0.15, lw=0)


def markdown_report(groups: list[list[Result]]) -> str:
    """Return results.md for groups of runs that differ in the seed alone."""
    names = ("algorithm", "environment", "seeds", "env steps", "training return")
    more = ("IQM [95 % interval]", "published", "evaluation return", "SPS", "minutes a run")
    lines = [
        "# Returns over seeds",
        "",
        "| " + " | ".join(names + more) + " |",
        "|---" * len(names + more) + "|",
        *(_markdown_row(group) for group in groups),
        "",
        "Mean ± standard deviation over seeds. Training return: all episodes that ended in the "
        "last 10 % of the steps. IQM: its interquartile mean over 5 seeds or more, with the "
        "bootstrapped 95 % interval. Evaluation return: the final policy. Published: CleanRL's "
        "training return, 3 seeds (after 8,000,000 steps: 10), as many steps. SPS: env steps a "
        "second, median of the log points. Minutes: median over seeds.",
        "",
        *(_markdown_origin(group) for group in groups),
    ]
    return "\n".join(lines) + "\n"


def _markdown_row(group: list[Result]) -> str:
    first = group[0]
    returns = [result.training_return for result in group]
    published = PUBLISHED.get((first.label, first.env_id, first.steps), "–")
    cells = (
        first.label,
        first.env_id,
        len(group),
        f"{first.steps:,}",
        mean_and_std(returns),
        robust_mean(returns) if len(group) >= MANY_SEEDS else "–",
        published,
        mean_and_std([result.evaluation_return for result in group]),
        f"{np.mean([result.SPS for result in group]):,.0f}",
        f"{median_minutes(group):.1f}",
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def median_minutes(runs: list[Result]) -> float:
    """Return the wall minutes of a run; the median leaves out one that was halted on its way."""
    return float(np.median([run.seconds for run in runs])) / 60


def _markdown_origin(group: list[Result]) -> str:
    """Return how to make the runs of a group again, and what made them."""
    first = group[0]
    machines = "; ".join(sorted({result.machine for result in group}))
    made = f"`{sweep_command(group)}`, commit {commits(group)}, {machines}"
    return f"- {first.label} on {first.env_id}: {made}"


def sweep_command(group: list[Result]) -> str:
    """Return the command that makes the runs of a group again."""
    first = group[0]
    _, eval_frequency, *extra = first.flags
    own = [
        "--algos",
        first.program or first.algo,
        "--env-ids",
        first.env_id,
        "--num-seeds",
        str(len(group)),
    ]
    own += ["--eval-frequency", eval_frequency, "--out", "/tmp/again"]
    own += ["--", *extra] if extra else []
    return shlex.join(["python", "benchmarks/sweep.py", *own])


def commits(group: list[Result]) -> str:
    """Return the commits that made the runs of a group."""
    return ", ".join(sorted({result.commit for result in group}))


def mean_and_std(values: list[float]) -> str:
    """Return mean ± standard deviation; the mean alone of one value."""
    mean = float(np.mean(values))
    digits = decimals(mean)
    spread = f" ± {np.std(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean:z.{digits}f}{spread}"


def decimals(mean: float) -> int:
    """Return how many digits behind the point a mean return and what stands beside it have."""
    return 2 if abs(mean) < 10 else 1


def robust_mean(values: list[float]) -> str:
    """Return the interquartile mean and the ends of its bootstrapped 95 % interval."""
    mean, low, high = robust_interval(*values)
    digits = decimals(mean)
    return f"{mean:z.{digits}f} [{low:z.{digits}f}, {high:z.{digits}f}]"


@functools.cache
def robust_interval(*values: float) -> tuple[float, float, float]:
    """Return the interquartile mean and the ends of its bootstrapped 95 % interval."""
    runs = np.array(values)[:, None]  # [S, 1]
    low, high = bootstrap_interval([runs], interquartile_mean)
    return float(interquartile_mean(runs)[0]), float(low[0]), float(high[0])


def file_name(env_id: str) -> str:
    """Return an environment id as part of a file name."""
    return env_id.replace("/", "-").replace(":", "-")


def csv_text(header: Iterable[str], rows: Iterable[Iterable]) -> str:
    """Return a table as the text of a CSV file."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *rows])
    return text.getvalue()


def write_atomically(path: Path, text: str) -> None:
    """Replace a file as a whole, so that a killed sweep leaves no half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    checkpoint.write_atomically(path, text)


if __name__ == "__main__":
    with cli.exit_codes(debug=False):
        main(cli.parse_flags(ReportOptions, sys.argv[1:], __doc__ or ""))
