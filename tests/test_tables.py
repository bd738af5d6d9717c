"""Tables of algorithm x environment: cells by hand, and the committed pages."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import repeat  # noqa: E402
import report  # noqa: E402
import tables  # noqa: E402

README, SITE = tables.PAGES
FAMILIES = {family.name: family for family in tables.FAMILIES}
CLASSIC, MINATAR = FAMILIES["classic"], FAMILIES["minatar"]


def make_cell(
    returns: list[float], algo: str = "dqn", folder: str = "sweep", **changes: Any
) -> tables.Cell:
    fields: dict[str, Any] = {"algo": algo, "env_id": "CartPole-v1", "steps": 500_000}
    fields |= {"flags": ["--eval-frequency", "0"], "evaluation_return": 0.0, "evaluation_std": 0.0}
    fields |= {"seconds": 1.0, "SPS": 1.0, "commit": "abc", "machine": "CPU", "curve": []}
    runs = enumerate(returns, start=1)
    return tables.Cell(
        folder,
        [report.Result(seed=i, training_return=x, **fields | changes) for i, x in runs],
    )


# Cells


def test_cell_of_five_seeds_by_hand() -> None:
    # The middle three of five: (2 + 3 + 4) / 3.
    text = tables.describe(make_cell([1.0, 100.0, 3.0, 2.0, 4.0]))
    mean, iqm = text.split("<br>")
    assert mean == "22.0 ± 39.0 (498)"
    assert iqm.startswith("IQM 3.00 [")
    low, high = map(float, iqm.split("[")[1].strip("]").split(", "))
    assert 1 <= low < 3 < high <= 100


def test_number_of_seeds_is_said_when_it_is_not_five() -> None:
    assert tables.describe(make_cell([490.0, 500.0])) == "495.0 ± 5.0 (498)<br>2 seeds"
    assert tables.describe(make_cell([490.0], steps=1000)) == "490.0<br>1 seed"
    assert tables.describe(make_cell([7.0] * 6, algo="iqn")) == (
        "7.00 ± 0.00<br>IQM 7.00 [7.00, 7.00]<br>6 seeds"
    )
    assert tables.describe(None) == "–"


def test_flags_that_change_nothing_are_left_out() -> None:
    flags = ["--eval-frequency", "0", "--checkpoint-frequency", "0", "--env-kwargs", "a=1", "b=-2"]
    assert tables.own_flags(make_cell([1.0], flags=flags)) == "`--env-kwargs a=1 b=-2`"
    assert tables.own_flags(make_cell([1.0])) == ""


# Tables


def test_a_row_needs_three_seeds(tmp_path: Path) -> None:
    jobs = tmp_path / "sweep" / "jobs"
    jobs.mkdir(parents=True)
    for algo, count in (("dqn", 3), ("ppo", 2)):
        for run in make_cell([1.0] * count, algo).runs:
            text = json.dumps(dataclasses.asdict(run))
            (jobs / f"{algo}__CartPole-v1__{run.seed}.json").write_text(text)
    assert [cell.runs[0].algo for cell in tables.read_cells(tmp_path)] == ["dqn"]


def test_table_by_hand() -> None:
    cells = [
        make_cell([1.0]),
        make_cell([-1.0], env_id="Acrobot-v1"),
        make_cell([2.0], algo="ppo", folder="sweep_on_policy"),
    ]
    lines = tables.family_table(README, CLASSIC, cells).split("\n")
    assert lines == [
        "| algorithm | CartPole-v1<br>500,000 steps | Acrobot-v1<br>500,000 steps | data |",
        "| --- | --- | --- | --- |",
        "| [dqn](docs/algorithms/dqn.md) | 1.00 (498)<br>1 seed | -1.00 (-89)<br>1 seed "
        "| [sweep](benchmarks/results/sweep/results.md) |",
        "| [ppo](docs/algorithms/ppo.md) | 2.00 (490)<br>1 seed | – "
        "| [sweep_on_policy](benchmarks/results/sweep_on_policy/results.md) |",
    ]


def test_runs_of_two_folders_do_not_hide_each_other() -> None:
    cells = [make_cell([1.0]), make_cell([2.0], folder="sweep_value")]
    with pytest.raises(UserError, match=r"dqn is twice .* sweep, sweep_value"):
        tables.family_table(README, CLASSIC, cells)


def test_a_family_appears_with_its_data() -> None:
    cells = [make_cell([1.0]), make_cell([3.0], env_id="gymnax/CartPole-v1")]
    block = tables.page_block(SITE, cells)
    assert "## Classic control" in block and "MinAtar" not in block and "MuJoCo" not in block
    assert "| gymnax/CartPole-v1 | 500,000 | [dqn](algorithms/dqn.md) | 3.00<br>1 seed |" in block
    more = [make_cell([9.0], folder="sweep_minatar", env_id="pgx/minatar-breakout", steps=10)]
    block = tables.page_block(README, cells + more)
    assert "### MinAtar\n\n| algorithm | pgx/minatar-breakout<br>10 steps | data |" in block
    assert "gymnax/CartPole-v1" not in block, "other runs are on the site alone"


def test_published_figures_that_are_reached_missed_and_not_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    published = {
        ("dqn", "CartPole-v1", 10): 5,
        ("dqn", "Acrobot-v1", 10): -90,
        ("c51", "CartPole-v1", 10): 9,
        ("ppo", "Acrobot-v1", 10): -80,
        ("ppo", "MountainCar-v0", 10): -200,
        ("ppo", "Acrobot-v1", 20): -70,
        ("ppo", "CheetahRun-v1", 10): 432.56,
        ("ppo", "WalkerRun-v1", 10): 125.92,
    }
    monkeypatch.setattr(tables, "PUBLISHED", published)
    cells = [
        make_cell([4.0, 6.0], steps=10),
        make_cell([3.0, 6.0], steps=10, flags=["--gamma", "0.9"]),
        make_cell([3.0, 4.0], steps=10, flags=["--gamma", "0.8"]),
        make_cell([7.0, 8.0], algo="c51", steps=10),
        make_cell([9.0], algo="c51", steps=20),
    ]
    assert tables.published_line(cells) == (
        "Rows beside a figure of CleanRL's: 4, of 2 figures. In 2 rows the 95 % interval reaches "
        "the figure or lies above it, in 1 of these the mean does. Of three seeds the interval "
        "ends at the highest, so that the best one decides. No row reaches 1 of the figures. The "
        "interval ends below for dqn on CartPole-v1 with `--gamma 0.8` (up to 4.00, published 5), "
        "c51 on CartPole-v1 (up to 8.00, published 9). Published, but not run here with 3 seeds: "
        "dqn on Acrobot-v1 after 10 steps; ppo on Acrobot-v1, MountainCar-v0 after 10 steps; "
        "ppo on Acrobot-v1 after 20 steps; ppo on 2 of 48 tasks of dm_control."
    )


def test_table_of_tasks_by_hand() -> None:
    published = {"WalkerRun-v1": (125.92, 10.01), "CheetahRun-v1": (432.56, 82.54)}
    table = tables.TaskTable("dm_control", "sweep_ppo_dm_control", published)
    fields = {"algo": "ppo", "env_id": "CheetahRun-v1", "evaluation_return": 4.0}
    cells = [
        make_cell([1.0, 3.0], folder="sweep_ppo_dm_control", **fields),
        make_cell([9.0, 9.0], folder="sweep_ppo_dm_control_target_kl", **fields),
    ]
    assert tables.task_block(table, cells).split("\n") == [
        "| environment | training return | each seed | CleanRL | evaluation |",
        "| --- | --- | --- | --- | --- |",
        "| CheetahRun-v1 | 2.00 ± 1.00 | 1.00, 3.00 | 432.6 ± 82.5 | 4.00 ± 0.00 |",
        "",
        "Not run with 3 seeds: WalkerRun-v1.",
    ]


def test_every_row_by_hand() -> None:
    cells = [make_cell([2.0], folder="sweep_gymnasium", seconds=90.0, evaluation_return=3.0)]
    row = tables.rows_table(SITE, cells).split("\n")[-1]
    command = "python benchmarks/sweep.py --algos dqn --env-ids CartPole-v1 --num-seeds 1"
    assert row == (
        "| CartPole-v1 | 500,000 | [dqn](algorithms/dqn.md) "
        "| 1 | 2.00 [nan, nan] | 3.00 [nan, nan] "
        f"| 498 | 1.5 | `{command} --eval-frequency 0 --out /tmp/again` | abc | – |"
    )


def test_a_halted_run_does_not_count_in_the_minutes() -> None:
    cells = [make_cell([2.0] * 3)]
    for run, seconds in enumerate((60.0, 90.0, 9000.0)):
        cells[0].runs[run] = dataclasses.replace(cells[0].runs[run], seconds=seconds)
    assert "| 498 | 1.5 | `python" in tables.rows_table(SITE, cells)
    assert "| 1.5 |\n" in report.markdown_report([cells[0].runs])


def test_a_row_is_repeated_where_a_run_of_each_commit_was() -> None:
    cell = make_cell([1.0, 2.0, 3.0])
    cell.runs[0] = dataclasses.replace(cell.runs[0], commit="def")
    equal = repeat.Repeat("abc", "new", "CPU", False, until=50_000, differs_at=None, told=True)
    first, second = "sweep/dqn__CartPole-v1__1", "sweep/dqn__CartPole-v1__2"
    both = {first: dataclasses.replace(equal, commit="def", until=100_000), second: equal}
    assert tables.repeated(cell, both) == "new, 10%"
    assert tables.repeated(cell, {first: both[first]}) == "–", "no run of abc"
    assert tables.repeated(cell, {first: equal, second: equal}) == "–", "made again since"
    assert tables.repeated(cell, {}) == "–"
    cell.runs.append(dataclasses.replace(cell.runs[0], seed=4, commit="new"))
    assert tables.repeated(cell, both) == "new, 10%", "made on the commit that repeated the others"
    untold = dataclasses.replace(equal, told=False)
    assert tables.repeated(cell, both | {second: untold}) == "–"
    differs = dataclasses.replace(equal, differs_at=20_000)
    assert tables.repeated(cell, both | {second: differs}) == "rounds otherwise"


def test_only_what_is_between_the_markers_changes() -> None:
    page = f"above\n{tables.BEGIN}\nold\n{tables.END}\nbelow\n"
    expected = f"above\n{tables.BEGIN}\n\nnew\n\n{tables.END}\nbelow\n"
    other = f"above\nOTHER\nold\n{tables.END}\n"
    assert tables.with_block(page, "new", "PAGE.md") == expected
    assert tables.with_block(expected, "new", "PAGE.md") == expected
    assert tables.with_block(other + page, "new", "PAGE.md") == other + expected
    for wrong in (page.replace(tables.END, ""), page + page, f"{tables.END}{tables.BEGIN}"):
        with pytest.raises(UserError, match=r"^PAGE\.md needs one line"):
            tables.with_block(wrong, "new", "PAGE.md")


def test_algorithms_come_in_the_order_of_the_readme() -> None:
    text = (ROOT / "README.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ") and "](algos/" in line]
    assert [row.split("](algos/")[1].split(".py")[0] for row in rows] == list(tables.ORDER)


def test_a_picture_has_every_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    (tmp_path / "docs" / "img").mkdir(parents=True)
    curve = [(100, 10.0, 2.0), (200, 20.0, 2.0)]
    names = [f"algo{i}" for i in range(12)]
    cells = [make_cell([1.0, 2.0], algo=name, curve=curve) for name in names]
    assert tables.draw_family(CLASSIC, cells) == "docs/img/results_classic.png"
    assert (tmp_path / "docs" / "img" / "results_classic.png").stat().st_size > 1000
    assert tables.draw_family(MINATAR, []) is None


# Committed


@pytest.fixture(scope="module")
def committed() -> list[tables.Cell]:
    """All committed runs."""
    return tables.read_cells(tables.RESULTS)


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.path)
def test_committed_tables_follow_from_the_data(
    page: tables.Page, committed: list[tables.Cell]
) -> None:
    text = (ROOT / page.path).read_text()
    block = tables.page_block(page, committed)
    assert tables.with_block(text, block, page.path) == text, "run python benchmarks/tables.py"


@pytest.mark.parametrize("table", tables.TASK_TABLES, ids=lambda table: table.name)
def test_committed_tables_of_tasks_follow_from_the_data(
    table: tables.TaskTable, committed: list[tables.Cell]
) -> None:
    name = tables.TASKS_PAGE
    text = (ROOT / name).read_text()
    block = tables.task_block(table, committed)
    made = tables.with_block(text, block, name, begin=table.begin)
    assert made == text, "run python benchmarks/tables.py"


def rows_of_results(page: Path) -> list[dict[str, str]]:
    """Return the rows of a page's tables of returns by environment, by the names of columns."""
    rows: list[dict[str, str]] = []
    header: list[str] = []
    for line in page.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line[:1] == "|" else []
        if not cells or cells[:2] == ["environment", "env steps"]:
            header = cells if "training return" in cells else []
        elif header and not cells[0].startswith("---"):
            rows.append(dict(zip(header, cells, strict=True)))
    return rows


def agrees(row: dict[str, str], cell: tables.Cell) -> bool:
    """Return whether runs give what stands in a row."""
    returns = [run.training_return for run in cell.runs]
    digits = report.decimals(np.mean(returns))
    made = {
        "environment": cell.runs[0].env_id,
        "env steps": f"{cell.runs[0].steps:,}",
        "setting": cell.runs[0].setting,
        "training return": report.mean_and_std(returns),
        "each seed": ", ".join(f"{value:.{digits}f}" for value in returns),
        "evaluation": report.mean_and_std([run.evaluation_return for run in cell.runs]),
    }
    written = row | {"environment": row["environment"].removesuffix(", tuned")}
    return all(written[name] == made[name] for name in made.keys() & written.keys())


@pytest.mark.parametrize(
    "page", sorted((ROOT / "docs/algorithms").glob("*.md")), ids=lambda p: p.stem
)
def test_tables_of_an_algorithm_follow_from_the_data(
    page: Path, committed: list[tables.Cell]
) -> None:
    cells = [cell for cell in committed if cell.runs[0].algo == page.stem]
    rows = rows_of_results(page)
    assert rows, "no table of returns by environment"
    wrong = [row for row in rows if not any(agrees(row, cell) for cell in cells)]
    assert wrong == []


def test_committed_reports_follow_from_the_data() -> None:
    folders = [path.parent for path in tables.RESULTS.glob("sweep*/jobs")]
    assert len(folders) > 10
    for folder in folders:
        text = report.markdown_report(report.read_groups(folder))
        assert text == (folder / "results.md").read_text(), f"run benchmarks/report.py {folder}"


def test_every_family_with_data_has_its_picture(committed: list[tables.Cell]) -> None:
    for family in tables.FAMILIES:
        path = ROOT / "docs" / "img" / f"results_{family.name}.png"
        assert path.exists() == bool(tables.family_cells(family, committed))


def test_pictures_of_sweeps_are_those_of_the_data() -> None:
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    text = "".join(page.read_text() for page in pages)
    for name, source in tables.CURVES.items():
        picture = tables.curve_path(name).read_bytes()
        assert picture == (tables.RESULTS / f"{source}.png").read_bytes(), (
            f"curve_{name}.png is old: run python benchmarks/tables.py"
        )
        assert f"img/curve_{name}.png" in text, f"no page shows curve_{name}.png"


def test_committed_data_stay_small() -> None:
    """A clone brings all of them, so that more runs need thinner curves or smaller pictures."""
    size = sum(path.stat().st_size for path in tables.RESULTS.rglob("*") if path.is_file())
    assert size < 20 * 2**20
