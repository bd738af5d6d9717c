"""Runs that are trained again: what is compared, and how, by a program in place of DQN."""

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from common.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import repeat  # noqa: E402
import report  # noqa: E402

CURVE = [(10, 1.0, 2.0), (20, 1.5, 3.0), (40, 2.0, 1.0)]
# Logs the step plus the seed as its return, up to the step --last.
PROGRAM = """
import pathlib, sys, time
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
folder = pathlib.Path(flags["--runs-dir"]) / "run"
folder.mkdir()
(folder / "config.json").write_text("{}")
with (folder / "metrics.csv").open("w", buffering=1) as metrics:
    print("step,seconds,name,value", file=metrics)
    for step in range(10, int(flags["--last"]) + 10, 10):
        print(f"{step},0.1,charts/episodes,2.0", file=metrics)
        print(f"{step},0.1,losses/td_loss,{step / 10}", file=metrics)
        print(f"{step},0.1,charts/episodic_return,{step + int(flags['--seed'])}.0", file=metrics)
        time.sleep(0.02)
sys.exit("no more")
"""


def make_result(**changes: Any) -> report.Result:
    fields: dict[str, Any] = {"algo": "dqn", "env_id": "CartPole-v1", "seed": 1, "flags": []}
    fields |= {"steps": 100, "training_return": 0.0, "evaluation_return": 0.0}
    fields |= {"evaluation_std": 0.0, "seconds": 1.0, "SPS": 1.0, "commit": "abc", "machine": "CPU"}
    return report.Result(**fields | {"curve": CURVE} | changes)


LOSSES = [(5, "losses/td_loss", 0.5), (20, "losses/td_loss", 0.25), (40, "losses/td_loss", 0.1)]


def compare(curve: report.Curve, until: int, before: report.Curve = CURVE) -> tuple:
    return tuple(repeat.compare(repeat.Part(before, []), repeat.Part(curve, LOSSES), until))


def test_compare_by_hand() -> None:
    assert compare([*CURVE, (50, 9.0, 1.0)], until=40) == (40, None, True)
    assert compare(CURVE, until=30) == (20, None, True)
    assert compare(CURVE, until=10) == (10, None, False), "one return tells nothing"
    other = [CURVE[0], (20, 1.5000000000000002, 3.0), CURVE[2]]
    assert compare(other, until=40) == (40, 20, True)
    assert compare(other, until=19) == (10, None, False)
    more_episodes = [(10, 1.0, 3.0), *CURVE[1:]]
    assert compare(more_episodes, until=40) == (40, 10, True)
    with pytest.raises(UserError, match="no episode ended in the first 9 steps"):
        compare(CURVE, until=9)


def test_steps_before_the_first_update_tell_nothing() -> None:
    data = repeat.Part(CURVE, [])
    for losses, told in (([(39, "losses/a", 1.0)], True), (LOSSES[2:], False), ([], False)):
        part = repeat.Part(CURVE, losses)
        assert repeat.compare(data, part, until=40) == (40, None, told)


def test_losses_tell_where_returns_are_alike() -> None:
    alike = [(step, -200.0, 1.0) for step in (10, 20, 40)]
    before = repeat.Part(alike, LOSSES)
    assert compare(alike, until=40, before=alike) == (40, None, False), "data have no losses"
    assert repeat.compare(before, before, until=40) == (40, None, True)
    assert repeat.compare(repeat.Part(alike, LOSSES[2:]), before, until=40) == (40, 5, False)
    cut = repeat.Part(alike, LOSSES[:2])
    assert repeat.compare(before, cut, until=40) == (40, None, True), "the last point may be cut"
    for losses in (LOSSES[:1], [LOSSES[0], (20, "losses/td_loss", 0.26), LOSSES[2]]):
        assert repeat.compare(before, repeat.Part(alike, losses), until=40) == (40, 20, True)


def test_a_missing_point_differs() -> None:
    assert compare(CURVE[:2], until=40) == (40, 40, True)
    assert compare([*CURVE[:2], (30, 2.0, 1.0), CURVE[2]], until=40) == (40, 40, True)
    assert compare(CURVE, until=40, before=CURVE[:2]) == (20, 40, True)


def test_a_comparison_goes_on_until_three_returns_tell() -> None:
    steady = [(step, -200.0, 1.0) for step in range(10, 60, 10)]
    varied = [(60, -190.0, 1.0), (70, -200.0, 1.0), (80, -180.0, 1.0), (90, -170.0, 1.0)]
    assert repeat.last_step(make_result(curve=steady + varied), share=0.1) == 90
    assert repeat.last_step(make_result(curve=steady + varied[:1]), share=0.1) == 60
    assert repeat.last_step(make_result(curve=steady), share=0.1) == 10
    assert repeat.last_step(make_result(curve=CURVE), share=0.95) == 95
    assert repeat.last_step(make_result(curve=[]), share=0.101) == 11


def test_one_run_of_each_commit_is_repeated() -> None:
    seeds = {3: "abc", 1: "def", 2: "abc", 4: "def"}
    group = [make_result(seed=seed, commit=commit) for seed, commit in seeds.items()]
    assert sorted(run.seed for run in repeat.first_of_commits(group)) == [1, 2]
    alike = [(10, -200.0, 1.0), (20, -200.0, 1.0)]
    steady = [make_result(seed=seed, curve=alike) for seed in (1, 2)]
    assert [run.seed for run in repeat.first_of_commits(steady)] == [1]
    later = [make_result(seed=seed) for seed in (4, 3)]
    assert [run.seed for run in repeat.first_of_commits(steady + later)] == [3], "which can tell"


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "algos").mkdir()
    (tmp_path / "algos" / "dqn.py").write_text(PROGRAM)
    monkeypatch.setattr(repeat, "ROOT", tmp_path)
    monkeypatch.setattr(repeat, "REPEATS", tmp_path / "repeat.json")
    return tmp_path


def curve_of_program(seed: int, offset: float = 0.0) -> report.Curve:
    return [(step, step + seed + offset, 2.0) for step in range(10, 110, 10)]


def test_a_run_is_trained_as_far_as_asked_and_what_came_of_it_is_kept(results: Path) -> None:
    result = make_result(seed=3, flags=["--last", "1000000"], curve=curve_of_program(3))
    found = repeat.repeat(result, share=0.5)
    assert (found.commit, found.beside) == ("abc", False)
    assert (found.until, found.differs_at, found.told) == (50, None, True)
    repeat.keep("sweep/dqn__CartPole-v1__3", found)
    other = dataclasses.replace(found, differs_at=10)
    repeat.keep("sweep/dqn__CartPole-v1__1", other)
    assert list(repeat.read_repeats().values()) == [other, found]


def test_where_data_differ_the_commit_is_trained_as_well(results: Path) -> None:
    def git(*args: str) -> str:
        own = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        return subprocess.check_output(["git", *own, *args], cwd=results, text=True).strip()

    git("init", "--quiet")
    git("add", "algos")
    git("commit", "--quiet", "--message", "made the data")
    commit = git("rev-parse", "--short", "HEAD")
    flags, rounded = ["--last", "1000000"], curve_of_program(1, offset=1e-6)
    result = make_result(flags=flags, curve=rounded, commit=commit)
    equal = repeat.repeat(result, share=0.2)
    assert (equal.beside, equal.differs_at, equal.until) == (True, None, 40)
    assert f"equals {commit}, trained here, up to step 40" in repeat.describe(equal)

    (results / "algos" / "dqn.py").write_text(PROGRAM.replace("}.0", "}.5"))
    differs = repeat.repeat(result, share=0.2)
    assert (differs.beside, differs.differs_at) == (True, 10)
    assert f"differs from {commit}, trained here, at step 10" in repeat.describe(differs)

    (results / "algos" / "dqn.py").write_text(PROGRAM.replace("step / 10", "step / 20"))
    differs = repeat.repeat(result, share=0.2)
    assert (differs.beside, differs.differs_at) == (True, 10), "losses alone"
    assert git("worktree", "list").count("\n") == 0, "nothing is left behind"

    with pytest.raises(UserError, match="commit 1234567 is not here"):
        repeat.repeat(dataclasses.replace(result, commit="1234567"), share=0.2)


def test_where_nothing_was_learned_the_commit_is_not_trained(results: Path) -> None:
    program = PROGRAM.replace("losses/", "charts/")
    (results / "algos" / "dqn.py").write_text(program)
    result = make_result(flags=["--last", "1000000"], curve=curve_of_program(1))
    found = repeat.repeat(result, share=0.2)
    assert (found.beside, found.differs_at, found.told) == (False, None, False)


def test_a_run_that_ends_before_is_an_error(results: Path) -> None:
    with pytest.raises(UserError, match=r"dqn__CartPole-v1__1 ended at step 30: no more"):
        repeat.repeat(make_result(flags=["--last", "30"]), share=0.5)


def test_kept_findings_are_of_committed_runs() -> None:
    names = set(repeat.chosen_runs(repeat.Options()))
    assert set(repeat.read_repeats()) <= names, "delete what repeat.json has of runs that are gone"


def test_an_unknown_folder_is_one_line():
    with pytest.raises(UserError, match="unknown --folders 'sweeps'; accepted are sweep, "):
        repeat.main(repeat.Options(folders=("sweeps",)))
