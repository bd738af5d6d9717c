"""Tables of algorithm x environment, and a picture of each, from the committed sweeps.

    python benchmarks/tables.py

rewrites what stands between the two markers in README.md, docs/results.md and PPO's page from the
`jobs/*.json` under benchmarks/results/sweep*, draws docs/img/results_*.png, and copies
docs/img/curve_*.png from the folders of the sweeps. Nothing is trained.
"""

import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from common.errors import UserError
from machine import ROOT
from repeat import RESULTS, Repeat, first_of_commits, read_repeats, run_name
from report import (
    DM_CONTROL,
    GYMNASIUM,
    MANY_SEEDS,
    PUBLISHED,
    Result,
    commits,
    decimals,
    draw_curve,
    mean_and_std,
    median_minutes,
    read_groups,
    robust_interval,
    robust_mean,
    save_picture,
    seed_curves,
    sweep_command,
    write_atomically,
)

from common.run import cli

BEGIN = "<!-- results: written by `python benchmarks/tables.py` -->"
END = "<!-- end of results -->"
TASKS_PAGE = "docs/algorithms/ppo.md"
LEAST_SEEDS = 3  # of a row
ORDER = (
    *("dqn", "double_dqn", "dueling_dqn", "prioritized_dqn", "noisy_dqn", "c51", "qr_dqn", "iqn"),
    *("rainbow", "pqn", "apex_dqn", "r2d2"),
    *("ppo", "ppo_rnn", "impala", "a2c", "ddpg", "td3", "sac", "sac_discrete"),
)
# They do not change what a run learns, or stand in the table.
SILENT_FLAGS = (
    *("--eval-frequency", "--checkpoint-frequency", "--log-frequency"),
    "--total-timesteps",
)
EXPLANATION = (
    "Training return: all episodes that ended in the last 10 % of the steps, and in up to 2 % "
    "before them, as log points count whole; mean ± standard deviation over seeds (divided by "
    "their number). Over 5 seeds also the interquartile mean (IQM) with its bootstrapped 95 % "
    "interval. In parentheses: CleanRL's mean of 3 seeds (of 10 after 8,000,000 steps) after as "
    "many steps, over the [last 100 episodes]"
    "(https://github.com/openrlbenchmark/openrlbenchmark/blob/main/openrlbenchmark/rlops.py) "
    "of each. Command, commit and machine of each figure are in `results.md` of the folder under "
    "data."
)


ROWS_ORIGIN = ("published", "minutes", "command", "commit", "repeated")
ROWS = (
    "Interquartile means over seeds with bootstrapped 95 % intervals (percentiles of 2,000 draws). "
    "As rliable's, the mean leaves out whole seeds: one of five at each end, and of fewer than "
    f"{MANY_SEEDS} none. Of three seeds the interval ends at the lowest and the highest. "
    "Evaluation: the final policy, greedy where the algorithm's page does not say otherwise. "
    "Published: CleanRL, training return, on its pages of the algorithms, such as "
    "[DDPG's](https://docs.cleanrl.dev/rl-algorithms/ddpg/), of SAC in "
    "[its data](https://github.com/vwxyzjn/cleanrl/blob/master/docs/benchmark/sac.md), of PPO "
    "after 8,000,000 steps on [RPO's](https://docs.cleanrl.dev/rl-algorithms/rpo/). Minutes: wall "
    "time of a run, median over seeds, on one core where `results.md` names no GPU; it shared its "
    "machine with other runs, and cores differed by about 2.5 times. Repeated: the commit on which "
    "the first part of a run was trained again (`benchmarks/repeat.py`), and how much of it, with "
    "the returns of the row's own commit to the bit, and with its losses where all returns are "
    "alike, so that the row is one of that commit, too; *rounds otherwise* where one differs."
)


@dataclass(frozen=True)
class Family:
    """Environments that share a table."""

    name: str  # of its picture
    title: str
    folders: tuple[str, ...]  # under benchmarks/results; one that is missing is left out
    env_ids: tuple[str, ...]  # in their order; others of the folders are left out


FAMILIES = (
    Family(
        "classic",
        "Classic control",
        ("sweep", "sweep_value", "sweep_on_policy", "sweep_impala", "sweep_sac_discrete_classic"),
        ("CartPole-v1", "Acrobot-v1", "MountainCar-v0"),
    ),
    Family("lunarlander", "LunarLander-v3, own flags", ("sweep_lunarlander",), ("LunarLander-v3",)),
    Family(
        "on_policy",
        "Continuous control, on-policy, own flags",
        (
            "sweep_on_policy_pendulum",
            "sweep_on_policy_mountain_car",
            "sweep_on_policy_lunarlander_continuous",
        ),
        ("Pendulum-v1", "MountainCarContinuous-v0", "LunarLanderContinuous-v3"),
    ),
    Family(
        "off_policy",
        "Continuous control, off-policy, own flags",
        ("sweep_off_policy_pendulum", "sweep_mountain_car", "sweep_lunarlander_continuous"),
        ("Pendulum-v1", "MountainCarContinuous-v0", "LunarLanderContinuous-v3"),
    ),
    Family(
        "mujoco",
        "MuJoCo",
        ("sweep_halfcheetah", "sweep_off_policy_mujoco", "sweep_ppo_mujoco"),
        ("HalfCheetah-v4", "Hopper-v4", "Walker2d-v4"),
    ),
    Family(
        "minatar",
        "MinAtar",
        ("sweep_minatar",),
        ("pgx/minatar-asterix", "pgx/minatar-breakout", "pgx/minatar-space_invaders"),
    ),
)


# Pictures of one sweep that pages show: docs/img/curve_NAME.png is a copy of the one that
# `report.py` draws, since the site has docs/ alone.
CURVES = {
    "acrobot": "sweep/Acrobot-v1",
    "cartpole": "sweep/CartPole-v1",
    "impala_acrobot": "sweep_impala/Acrobot-v1",
    "impala_cartpole": "sweep_impala/CartPole-v1",
    "lunarlander": "sweep_lunarlander/LunarLander-v3",
    "memory": "sweep_memory/gymnax-MemoryChain-bsuite",
    "off_policy_halfcheetah": "sweep_halfcheetah/HalfCheetah-v4",
    "off_policy_hopper": "sweep_off_policy_mujoco/Hopper-v4",
    "off_policy_humanoid": "sweep_off_policy_humanoid/Humanoid-v4",
    "off_policy_lunarlander_continuous": "sweep_lunarlander_continuous/LunarLanderContinuous-v3",
    "off_policy_mountain_car": "sweep_mountain_car/MountainCarContinuous-v0",
    "off_policy_pendulum": "sweep_off_policy_pendulum/Pendulum-v1",
    "off_policy_walker2d": "sweep_off_policy_mujoco/Walker2d-v4",
    "on_policy_acrobot": "sweep_on_policy/Acrobot-v1",
    "on_policy_cartpole": "sweep_on_policy/CartPole-v1",
    "on_policy_mountain_car": "sweep_on_policy_mountain_car/MountainCarContinuous-v0",
    "on_policy_pendulum": "sweep_on_policy_pendulum/Pendulum-v1",
    "ppo_halfcheetah": "sweep_ppo_mujoco/HalfCheetah-v4",
    "ppo_hopper": "sweep_ppo_mujoco/Hopper-v4",
    "ppo_humanoid": "sweep_ppo_mujoco/Humanoid-v4",
    "ppo_lunarlander": "sweep_ppo_lunarlander/LunarLander-v3",
    "ppo_walker2d": "sweep_ppo_mujoco/Walker2d-v4",
    "pusher": "sweep_pusher/Pusher-v4",
    "rainbow_ablation": "sweep_rainbow_ablation/pgx-minatar-breakout",
    "sac_discrete_acrobot": "sweep_sac_discrete_classic/Acrobot-v1",
    "sac_discrete_cartpole": "sweep_sac_discrete/CartPole-v1",
    "sac_discrete_mountain_car": "sweep_sac_discrete_classic/MountainCar-v0",
    "value_acrobot": "sweep_value/Acrobot-v1",
    "value_cartpole": "sweep_value/CartPole-v1",
}


class Cell(NamedTuple):
    """The runs of an algorithm on an environment, which differ in the seed alone."""

    folder: str
    runs: list[Result]

    @property
    def column(self) -> tuple[str, int]:
        """Return the environment and the length of the runs."""
        return self.runs[0].env_id, self.runs[0].steps

    @property
    def returns(self) -> list[float]:
        """Return the training return of each run."""
        return [run.training_return for run in self.runs]

    @property
    def figure(self) -> tuple[str, str, int]:
        """Return what its published figure is called in PUBLISHED."""
        return self.runs[0].label, *self.column


@dataclass(frozen=True)
class Page:
    """A page with markers, and how it refers to what lies elsewhere."""

    path: str
    algorithms: str  # folder of the pages of algorithms, as links begin
    data: str  # what stands for a folder of results, with {} for its name
    whole: bool = False  # with pictures, and with runs that are in no family


PAGES = (
    Page("README.md", "docs/algorithms", "[{0}](benchmarks/results/{0}/results.md)"),
    Page("docs/results.md", "algorithms", "`{0}`", whole=True),
)


@dataclass(frozen=True)
class TaskTable:
    """A column of CleanRL's on PPO's page, with a row of ours beside each task."""

    name: str  # in its marker
    folder: str  # under benchmarks/results
    published: dict[str, tuple[float, float]]

    @property
    def begin(self) -> str:
        """Return the line above it."""
        return f"<!-- {self.name}: written by `python benchmarks/tables.py` -->"


TASK_TABLES = (
    TaskTable("dm_control", "sweep_ppo_dm_control", DM_CONTROL),
    TaskTable("gymnasium", "sweep_ppo_gymnasium", GYMNASIUM),
)


def main() -> None:
    """Rewrite the pages and pictures, and name them."""
    cells = read_cells(RESULTS)
    for page in PAGES:
        path = ROOT / page.path
        write_atomically(path, with_block(path.read_text(), page_block(page, cells), page.path))
    path = ROOT / TASKS_PAGE
    text = path.read_text()
    for table in TASK_TABLES:
        text = with_block(text, task_block(table, cells), TASKS_PAGE, begin=table.begin)
    write_atomically(path, text)
    pictures = [draw_family(family, family_cells(family, cells)) for family in FAMILIES]
    for name, source in CURVES.items():
        shutil.copyfile(RESULTS / f"{source}.png", curve_path(name))
    made = [*(page.path for page in PAGES), TASKS_PAGE, *filter(None, pictures)]
    print("files:", ", ".join(made))


def curve_path(name: str) -> Path:
    """Return where pages have a picture of CURVES."""
    return ROOT / "docs" / "img" / f"curve_{name}.png"


def read_cells(results: Path) -> list[Cell]:
    """Return the groups of runs of all sweeps, in the order in which algorithms are named.

    A group that is too small for a row is left out until its sweep has gone on.
    """
    folders = sorted(path.parent for path in results.glob("sweep*/jobs"))
    cells = [Cell(folder.name, runs) for folder in folders for runs in read_groups(folder)]
    whole = [cell for cell in cells if len(cell.runs) >= LEAST_SEEDS]
    return sorted(
        whole, key=lambda cell: (place(ORDER, cell.runs[0].algo), cell.runs[0].label, cell.folder)
    )


def place(order: tuple[str, ...], name: str) -> tuple[int, str]:
    """Return what sorts a name: those of the order first, others by the alphabet."""
    return (order.index(name) if name in order else len(order)), name


def with_block(text: str, block: str, name: str, begin: str = BEGIN) -> str:
    """Return a page's text with another block between its markers.

    Raises:
        UserError: a marker is missing, or there is more than one.
    """
    before, *others = text.split(begin)
    if len(others) != 1 or END not in others[0]:
        raise UserError(f"{name} needs one line {begin} and below it a line {END}")
    after = others[0][others[0].index(END) :]
    return f"{before}{begin}\n\n{block}\n\n{after}"


def page_block(page: Page, cells: list[Cell]) -> str:
    """Return what stands between a page's markers."""
    parts = [EXPLANATION, published_line(cells)]
    level = "##" if page.whole else "###"
    for family in FAMILIES:
        members = family_cells(family, cells)
        if members:
            parts += [f"{level} {family.title}", family_table(page, family, members)]
        if members and page.whole:
            parts.append(f"![Learning curves: {family.title}](img/results_{family.name}.png)")
    rest = [cell for cell in cells if not any(belongs(cell, family) for family in FAMILIES)]
    if rest and page.whole:
        parts += [f"{level} Other runs", other_table(page, rest)]
    if page.whole:
        parts += [f"{level} Every row", ROWS, rows_table(page, cells)]
    return "\n\n".join(parts)


def family_cells(family: Family, cells: Iterable[Cell]) -> list[Cell]:
    """Return the cells of a family's table."""
    return [cell for cell in cells if belongs(cell, family)]


def belongs(cell: Cell, family: Family) -> bool:
    """Return whether a cell is one of a family's table."""
    return cell.runs[0].env_id in family.env_ids and cell.folder in family.folders


def family_table(page: Page, family: Family, cells: list[Cell]) -> str:
    """Return algorithm x environment in markdown.

    Raises:
        UserError: two folders have the same runs.
    """
    columns = sorted({cell.column for cell in cells}, key=lambda x: place(family.env_ids, x[0]))
    header = ["algorithm", *(f"{env_id}<br>{steps:,} steps" for env_id, steps in columns), "data"]
    rows = []
    for label, same in groupby(cells, lambda cell: cell.runs[0].label):
        row = list(same)
        by_column = {cell.column: cell for cell in row}
        if len(by_column) < len(row):
            folders = ", ".join(sorted(cell.folder for cell in row))
            raise UserError(f"{label} is twice in one cell of {family.title}: {folders}")
        returns = [describe(by_column.get(column)) for column in columns]
        data = [page.data.format(name) for name in dict.fromkeys(cell.folder for cell in row)]
        rows.append([algorithm_link(page, row[0]), *returns, ", ".join(data)])
    return markdown_table(header, rows)


def other_table(page: Page, cells: list[Cell]) -> str:
    """Return the runs that are in no family, a line each."""
    rows = []
    for cell in sorted(cells, key=lambda cell: cell.column):
        env_id, steps = cell.column
        name, data = algorithm_link(page, cell), page.data.format(cell.folder)
        rows.append([env_id, f"{steps:,}", name, describe(cell), own_flags(cell), data])
    header = ["environment", "env steps", "algorithm", "training return", "flags", "data"]
    return markdown_table(header, rows)


def describe(cell: Cell | None) -> str:
    """Return a cell's training return, beside the published one."""
    if cell is None:
        return "–"
    returns = cell.returns
    published = PUBLISHED.get(cell.figure)
    parts = [mean_and_std(returns) + (f" ({published})" if published is not None else "")]
    if len(returns) >= MANY_SEEDS:
        parts.append(f"IQM {robust_mean(returns)}")
    if len(returns) != MANY_SEEDS:
        parts.append(f"{len(returns)} seed{'s' * (len(returns) > 1)}")
    return "<br>".join(parts)


def published_line(cells: list[Cell]) -> str:
    """Return how many published figures our rows reach, and name those that they do not."""
    beside = [cell for cell in cells if cell.figure in PUBLISHED]
    short = [cell for cell in beside if not reaches_published(cell)]
    means = sum(sum(cell.returns) / len(cell.returns) >= PUBLISHED[cell.figure] for cell in beside)
    named = []
    for cell in short:
        flags = f" with {own_flags(cell)}" if own_flags(cell) else ""
        high, published = robust_interval(*cell.returns)[2], PUBLISHED[cell.figure]
        name = f"{cell.figure[0]} on {cell.figure[1]}{flags}"
        named.append(f"{name} (up to {high:.{decimals(high)}f}, published {published})")
    figures = {cell.figure for cell in beside}
    missed = figures - {cell.figure for cell in beside if cell not in short}
    line = (
        f"Rows beside a figure of CleanRL's: {len(beside)}, of {len(figures)} figures. In "
        f"{len(beside) - len(short)} rows the 95 % interval reaches the figure or lies above it, "
        f"in {means} of these the mean does. Of three seeds the interval ends at the highest, so "
        f"that the best one decides. No row reaches {len(missed)} of the figures"
    )
    line += f". The interval ends below for {', '.join(named)}." if named else "."
    return line + not_run(figures)


def reaches_published(cell: Cell) -> bool:
    """Return whether the interval of a cell reaches its published figure or lies above it."""
    return robust_interval(*cell.returns)[2] >= PUBLISHED[cell.figure]


def not_run(figures: set[tuple[str, str, int]]) -> str:
    """Return a sentence that names the published figures without a row, if there are any."""
    missing = [figure for figure in PUBLISHED if figure not in figures]
    tasks = [env_id for _, env_id, _ in missing if env_id in DM_CONTROL]
    named = []
    others = [figure for figure in missing if figure[1] not in DM_CONTROL]
    for (algo, steps), same in groupby(others, key=lambda figure: (figure[0], figure[2])):
        env_ids = ", ".join(env_id for _, env_id, _ in same)
        named.append(f"{algo} on {env_ids} after {steps:,} steps")
    if tasks:
        named.append(f"ppo on {len(tasks)} of {len(DM_CONTROL)} tasks of dm_control")
    if not named:
        return ""
    return f" Published, but not run here with {LEAST_SEEDS} seeds: {'; '.join(named)}."


def task_block(table: TaskTable, cells: list[Cell]) -> str:
    """Return a row a task of CleanRL's, and names of those without enough seeds."""
    cell_of = {cell.column[0]: cell for cell in cells if cell.folder == table.folder}
    rows = []
    for env_id, (mean, std) in table.published.items():
        if cell := cell_of.get(env_id):
            evaluation = mean_and_std([run.evaluation_return for run in cell.runs])
            ours = decimals(sum(cell.returns) / len(cell.returns))
            seeds = ", ".join(f"{value:.{ours}f}" for value in cell.returns)
            theirs = decimals(mean)
            published = f"{mean:.{theirs}f} ± {std:.{theirs}f}"
            rows.append([env_id, mean_and_std(cell.returns), seeds, published, evaluation])
    header = ["environment", "training return", "each seed", "CleanRL", "evaluation"]
    lines = markdown_table(header, rows)
    missing = [env_id for env_id in table.published if env_id not in cell_of]
    if not missing:
        return lines
    return f"{lines}\n\nNot run with {LEAST_SEEDS} seeds: {', '.join(missing)}."


def rows_table(page: Page, cells: list[Cell]) -> str:
    """Return every group of runs, a line each, with what made it."""
    rows, repeats = [], read_repeats()
    for cell in sorted(cells, key=lambda cell: cell.column):
        env_id, steps = cell.column
        runs = cell.runs
        row = [
            env_id,
            f"{steps:,}",
            algorithm_link(page, cell),
            str(len(runs)),
            robust_mean(cell.returns),
            robust_mean([run.evaluation_return for run in runs]),
            str(PUBLISHED.get(cell.figure, "–")),
            f"{median_minutes(runs):.1f}",
            f"`{sweep_command(runs)}`",
            commits(runs),
            repeated(cell, repeats),
        ]
        rows.append(row)
    header = ["environment", "env steps", "algorithm", "seeds", "training return", "evaluation"]
    return markdown_table([*header, *ROWS_ORIGIN], rows)


def repeated(cell: Cell, repeats: dict[str, Repeat]) -> str:
    """Return on which commit a row's runs were repeated, and how far; – where that tells nothing.

    A run of each of its commits must have been repeated since it was made, but for those that were
    made on a commit that repeated the others.
    """
    valid = {}
    for run in first_of_commits(cell.runs):
        found = repeats.get(run_name(cell.folder, run))
        if found and found.commit == run.commit:
            valid[run.commit] = found
    if any(found.differs_at is not None for found in valid.values()):
        return "rounds otherwise"
    on = {found.repeated_on for found in valid.values()}
    others = {run.commit for run in cell.runs} - valid.keys() - on
    if not valid or others or not all(found.told for found in valid.values()):
        return "–"
    share = min(found.until for found in valid.values()) / cell.runs[0].steps
    return f"{', '.join(sorted(on))}, {share:.0%}"


def own_flags(cell: Cell) -> str:
    """Return the flags that change what a run learns."""
    flags = " ".join(cell.runs[0].flags)
    named = [part.strip() for part in flags.split("--") if part.strip()]
    own = [f"--{part}" for part in named if f"--{part.split()[0]}" not in SILENT_FLAGS]
    return f"`{' '.join(own)}`" if own else ""


def algorithm_link(page: Page, cell: Cell) -> str:
    """Return the name of a row, with a link to the algorithm's page."""
    first = cell.runs[0]
    return f"[{first.label}]({page.algorithms}/{first.algo}.md)"


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    """Return a table in markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw_family(family: Family, cells: list[Cell]) -> str | None:
    """Draw the learning curves of a family side by side; return the picture's path, if any."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if not cells:
        return None
    columns = sorted({cell.column for cell in cells}, key=lambda x: place(family.env_ids, x[0]))
    labels = list(dict.fromkeys(cell.runs[0].label for cell in cells))
    figure = Figure(figsize=(4.5 * len(columns), 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    for i, column in enumerate(columns):
        axes = figure.add_subplot(1, len(columns), i + 1, title=column[0], xlabel="env steps")
        for cell in (cell for cell in cells if cell.column == column):
            label = cell.runs[0].label
            draw_curve(axes, seed_curves(cell.runs), labels.index(label), label)
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("training return, mean over seeds")
    handles = {line.get_label(): line for axes in figure.axes for line in axes.lines}
    shown = [label for label in labels if label in handles]
    lines = [handles[label] for label in shown]
    figure.legend(lines, shown, loc="outside lower center", ncols=min(len(shown), 6))
    path = f"docs/img/results_{family.name}.png"
    save_picture(figure, ROOT / path)
    return path


if __name__ == "__main__":
    with cli.exit_codes(debug=False):
        cli.parse_flags(cli.NoFlags, sys.argv[1:], __doc__ or "")
        main()
