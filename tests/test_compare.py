"""Scores, areas and performance profiles by hand, and the committed comparison."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import compare  # noqa: E402
import report  # noqa: E402
import tables  # noqa: E402

CLASSIC = tables.FAMILIES[0]
SCALE = compare.Scale(random=20.0, best=220.0)


def make_cell(
    returns: list[float], algo: str = "dqn", env_id: str = "CartPole-v1", **changes: Any
) -> tables.Cell:
    fields: dict[str, Any] = {"algo": algo, "env_id": env_id, "steps": 1000, "flags": []}
    fields |= {"evaluation_return": 0.0, "evaluation_std": 0.0, "seconds": 60.0, "SPS": 1.0}
    fields |= {"commit": "abc", "machine": "CPU", "curve": [(500, 120.0, 1.0)]}
    runs = enumerate(returns, start=1)
    return tables.Cell(
        "sweep", [report.Result(seed=i, training_return=x, **fields | changes) for i, x in runs]
    )


@pytest.fixture
def known_random(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"CartPole-v1": 20.0, "Acrobot-v1": -500.0}
    monkeypatch.setattr(compare, "read_random", lambda: known)


def test_score_is_0_for_random_and_1_for_the_best() -> None:
    np.testing.assert_allclose(SCALE.score(np.array([20.0, 220.0, 120.0, 320.0])), [0, 1, 0.5, 1.5])


def test_curve_starts_at_random_and_keeps_its_last_return() -> None:
    scores = compare.score_curve([(500, 220.0, 3.0), (800, 120.0, 1.0)], 1000, SCALE)
    at = [int(step / 1000 * (compare.GRID - 1)) for step in (0, 250, 500, 650, 800, 1000)]
    np.testing.assert_allclose(scores[at], [0, 0.5, 1, 0.75, 0.5, 0.5])


def test_area_by_hand() -> None:
    # Half of 0.5 on the way up to step 500, 0.5 behind it.
    assert compare.area([(500, 120.0, 1.0)], 1000, SCALE) == pytest.approx(0.375)


def test_first_env_step_of_a_level() -> None:
    cell = make_cell([1.0, 1.0], curve=[(500, 220.0, 1.0)])
    assert compare.steps_to(0.5, cell, SCALE) == 250
    assert compare.steps_to(0.9, cell, SCALE) == 450
    assert compare.steps_to(1.1, cell, SCALE) is None


def test_profile_counts_every_environment_alike() -> None:
    # One of two runs above 0.5 on the first, all four on the second: (1/2 + 1) / 2.
    scores = [np.array([0.4, 0.6]), np.array([0.7, 0.8, 0.9, 1.0])]
    share, low, high = compare.profile(scores, np.array([0.0, 0.5, 0.85, 1.0]))
    np.testing.assert_allclose(share, [1.0, 0.75, 0.25, 0.0])
    assert (low <= share).all() and (share <= high).all()
    np.testing.assert_allclose([low[1], high[1]], [0.5, 1.0])


def test_aggregate_is_the_interquartile_mean_of_all_runs() -> None:
    scores = [np.array([0.0, 1.0]), np.array([2.0, 9.0])]
    mean, low, high = compare.aggregate(scores)
    assert mean == pytest.approx(1.5)
    assert 0 <= low < mean < high <= 9


def test_aggregate_cuts_off_an_exact_quarter() -> None:
    # Of 5 runs, 1.25 at each end: three quarters of 1 and of 10 are left, and 2 whole.
    mean, _, _ = compare.aggregate([np.array([0.0, 1.0, 2.0, 10.0, 100.0])])
    assert mean == pytest.approx((0.75 * 1 + 2 + 0.75 * 10) / 2.5)


def test_aggregate_counts_every_environment_alike() -> None:
    # As 0, 0, 3, 3 and 2, 4, 6, 8; the middle four are 2, 3, 3, 4.
    mean, _, _ = compare.aggregate([np.array([0.0, 3.0]), np.array([2.0, 4.0, 6.0, 8.0])])
    assert mean == pytest.approx(3.0)


@pytest.mark.usefixtures("known_random")
def test_best_is_the_threshold_that_no_algorithm_reaches() -> None:
    # Gymnasium's thresholds: 475 of CartPole-v1, -100 of Acrobot-v1.
    cells = [make_cell([400.0]), make_cell([480.0, 482.0], algo="ppo")]
    assert compare.scale_of(("CartPole-v1", 1000), cells[:1]) == (20.0, 475.0)
    assert compare.scale_of(("CartPole-v1", 1000), cells) == (20.0, 481.0)
    cells = [make_cell([-130.0], env_id="Acrobot-v1")]
    assert compare.scale_of(("Acrobot-v1", 1000), cells) == (-500.0, -100.0)


@pytest.mark.usefixtures("known_random")
def test_environments_that_one_algorithm_lacks_are_left_out() -> None:
    cells = [
        make_cell([260.0]),
        make_cell([-100.0], env_id="Acrobot-v1"),
        make_cell([500.0, 500.0], algo="ppo", curve=[(500, 260.0, 1.0)]),
    ]
    assert compare.shared_columns(CLASSIC, cells) == [("CartPole-v1", 1000)]
    dqn, ppo = compare.standings(CLASSIC, cells)
    np.testing.assert_allclose(dqn.scores, [[0.5]])
    np.testing.assert_allclose(ppo.scores, [[1.0, 1.0]])
    assert compare.family_table(CLASSIC, cells).split("\n")[-1] == (
        "| [ppo](algorithms/ppo.md) | 1.00 [1.00, 1.00] | 1.00 | 0.38 | 500 | – | 1.0 |"
    )


@pytest.mark.usefixtures("known_random")
def test_an_environment_without_a_random_policy_is_named() -> None:
    with pytest.raises(UserError, match=r"random_policy.py --env-ids MountainCar-v0$"):
        compare.scale_of(("MountainCar-v0", 1000), [make_cell([1.0], env_id="MountainCar-v0")])


def test_random_return_of_cartpole() -> None:
    import random_policy

    measured = random_policy.random_return("CartPole-v1", 20_000)
    assert 20 < measured["return"] < 25 and measured["episodes"] > 700
    with pytest.raises(UserError, match=r"no episode of CartPole-v1 ended in 32 steps"):
        random_policy.random_return("CartPole-v1", 32)


def test_committed_comparison_follows_from_the_data() -> None:
    text = (ROOT / compare.PAGE.path).read_text()
    block = compare.page_block(tables.read_cells(tables.RESULTS))
    expected = tables.with_block(text, block, compare.PAGE.path, compare.BEGIN)
    assert text == expected, "run python benchmarks/compare.py"


def test_the_page_names_every_row_that_falls_short() -> None:
    section = (ROOT / compare.PAGE.path).read_text().split("### Where we fall short")[1]
    table = section.split("| best known reason |", 1)[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    named = set()
    for algorithm, env_id, flags, returns, published, reason in rows:
        assert reason
        algo = algorithm.split("]")[0].strip("[").lower()
        named.add((algo, env_id, flags, returns, round(float(published.split(" ±")[0]), 1)))
    short = set()
    for cell in tables.read_cells(tables.RESULTS):
        if cell.figure not in tables.PUBLISHED or tables.reaches_published(cell):
            continue
        algo, env_id, _ = cell.figure
        returns, published = report.mean_and_std(cell.returns), tables.PUBLISHED[cell.figure]
        short.add((algo, env_id, tables.own_flags(cell), returns, round(published, 1)))
    assert named == short and len(rows) == len(short)


def test_every_family_has_its_profiles() -> None:
    cells = tables.read_cells(tables.RESULTS)
    for family in tables.FAMILIES:
        path = ROOT / "docs" / "img" / f"profile_{family.name}.png"
        assert path.exists() == bool(tables.family_cells(family, cells))
