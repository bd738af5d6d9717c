"""Curves over seeds: which runs form a line, what is drawn of it, and bad input."""

import json
from pathlib import Path

import numpy as np
import pytest
from run_helpers import run_here

from common import plot
from common.errors import UserError

from common.run import load

pytestmark = pytest.mark.filterwarnings("ignore:.*found in sys.modules")
RETURN = "charts/episodic_return"


def make_run(folder, points, metric=RETURN, **config):
    folder.mkdir(parents=True)
    config = {"env_id": "CartPole-v1", "algo": "dqn", "seed": 1, "gamma": 0.99} | config
    (folder / "config.json").write_text(json.dumps(config))
    rows = [f"{step},1.0,{metric},{value}" for step, value in points]
    (folder / "metrics.csv").write_text("\n".join(["step,seconds,name,value", *rows, ""]))
    return folder


def lines_of(*folders, fields=("env_id", "algo"), metric=RETURN):
    return plot.make_lines([plot.read_run(Path(folder)) for folder in folders], metric, fields)


def test_few_runs_are_mean_and_deviation_on_common_steps(tmp_path):
    first = make_run(tmp_path / "1", [(10, 0.0), (20, 10.0), (40, 30.0)])
    second = make_run(tmp_path / "2", [(20, 4.0), (30, 6.0)], seed=2)
    (line,) = lines_of(first, second)
    assert (line.env_id, line.label, line.num_runs) == ("CartPole-v1", "dqn", 2)
    assert line.step.tolist() == [20, 30]
    assert line.centre.tolist() == [7, 13]  # of 10 and 4, of 20 and 6
    assert line.low.tolist() == [4, 6] and line.high.tolist() == [10, 20]


def test_one_run_has_no_interval(tmp_path):
    (line,) = lines_of(make_run(tmp_path / "1", [(10, 1.0), (20, 2.0)]))
    assert line.centre.tolist() == [1, 2] and np.isnan([line.low, line.high]).all()


def test_five_runs_are_interquartile_mean_and_its_interval(tmp_path):
    values = [0.0, 1.0, 2.0, 6.0, 1000.0]
    folders = [make_run(tmp_path / str(i), [(10, v), (20, 7.0)]) for i, v in enumerate(values)]
    (line,) = lines_of(*folders)
    assert line.centre.tolist() == [3, 7]  # one run is cut off at each end
    assert 0 <= line.low[0] < 3 < line.high[0] <= 1000
    assert line.low[1] == line.high[1] == 7


def test_the_bootstrap_draws_within_environments(tmp_path):
    """Each draw has three runs of 0 and three of 8; without strata, some have six of one."""
    folders = [
        make_run(tmp_path / f"{env_id}{i}", [(10, value)], env_id=env_id)
        for env_id, value in (("a", 0.0), ("b", 8.0))
        for i in range(3)
    ]
    (line,) = lines_of(*folders, fields=("algo",))
    assert (line.num_runs, line.env_id, line.label) == (6, None, "dqn")
    assert line.low == line.centre == line.high == 4


def test_runs_that_differ_in_a_field_are_lines_of_their_own(tmp_path):
    points = [(10, 1.0)]
    folders = [
        make_run(tmp_path / "1", points),
        make_run(tmp_path / "2", points, gamma=0.9),
        make_run(tmp_path / "3", points, env_id="Acrobot-v1", gamma=0.9),
        make_run(tmp_path / "4", points, algo="ppo", gamma=0.9, env_kwargs=["a=1"]),
    ]
    named = [(line.env_id, line.label, line.num_runs) for line in lines_of(*folders)]
    assert named == [
        ("Acrobot-v1", "dqn", 1),
        ("CartPole-v1", "dqn", 2),
        ("CartPole-v1", "ppo", 1),
    ]
    by = lines_of(*folders, fields=("gamma", "env_kwargs"))
    assert [(line.label, line.num_runs) for line in by] == [
        ('gamma 0.9, env_kwargs ["a=1"]', 1),
        ("gamma 0.9, env_kwargs –", 2),
        ("gamma 0.99, env_kwargs –", 1),
    ]


def test_axes_of_each_environment(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    titles = []
    add = Figure.add_subplot

    def add_subplot(figure, *args, **kwargs):
        titles.append(add(figure, *args, **kwargs))
        return titles[-1]

    monkeypatch.setattr(Figure, "add_subplot", add_subplot)
    envs = ["a", "b", "c", "d"]
    folders = [make_run(tmp_path / e, [(10, 1.0), (20, 2.0)], env_id=e) for e in envs]
    folders.append(make_run(tmp_path / "a2c", [(10, 1.0)], env_id="a", algo="a2c"))
    plot.save_lines(lines_of(*folders), RETURN, tmp_path / "curve.png")
    assert [axes.get_title() for axes in titles] == envs
    colours = [[line.get_color() for line in axes.lines] for axes in titles]
    assert colours == [["C0", "C1"], ["C1"], ["C1"], ["C1"]]  # one for an algorithm everywhere
    assert titles[0].get_subplotspec().get_gridspec().get_geometry() == (2, 3)


def test_program(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for seed in (1, 2):
        make_run(Path("seeds", f"seed_{seed}"), [(10, float(seed))], seed=seed)
    make_run(Path("alone"), [(10, 3.0)])
    # One of two seeds was trained on, the other has no metrics: the folder counts itself.
    make_run(Path("alone", "seed_1"), [(10, 9.0)], seed=1)
    (Path("alone") / "seed_2").mkdir()
    assert plot.seeds_or_itself(Path("alone")) == [Path("alone")]
    make_run(Path("ppo"), [(10, 3.0)], algo="ppo")
    make_run(Path("other"), [(10, 3.0)], metric="charts/SPS")
    ran = run_here(capsys, "seeds", "alone", "alone", "ppo", "other", module="common.plot")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == (
        "curve.png: dqn on CartPole-v1: 3 runs; ppo on CartPole-v1: 1 run; "
        "left out, without charts/episodic_return: other\n"
    )
    assert Path("curve.png").read_bytes().startswith(b"\x89PNG")
    flags = ("--metric", "charts/SPS", "--by", "gamma", "--out", "speed.svg")
    ran = run_here(capsys, "other", *flags, module="common.plot")
    assert (ran.code, ran.out) == (0, "speed.svg: gamma 0.99: 1 run\n")
    assert "<svg" in Path("speed.svg").read_text()


def test_runs_without_common_steps_are_named(tmp_path, capsys):
    first = make_run(tmp_path / "1", [(10, 1.0)])
    second = make_run(tmp_path / "2", [(20, 1.0)])
    ran = run_here(capsys, first, second, "--out", tmp_path / "a.png", module="common.plot")
    assert ran.code == 0 and ran.out.endswith("2 runs, no env steps in common\n")


@pytest.mark.parametrize(
    ("args", "part"),
    [
        ([], "give one run folder or more"),
        (["nowhere"], "nowhere is not a run folder with metrics"),
        (["empty"], "empty is not a run folder with metrics"),
        (["run", "--metric", "charts/episodic_retur"], "did you mean charts/episodic_return?"),
        (["run", "--metric", "x"], "--metric 'x' is in none of the runs; there are charts/"),
        (["run", "--by", "gama"], "--by 'gama' is in none of the runs; did you mean gamma?"),
        (["run", "--by", ""], "--by '' is in none of the runs"),
        (["run", "--out", "nowhere/a.png"], "--out nowhere/a.png cannot be written"),
        (["run", "--out", "a.xyz"], "--out a.xyz cannot be written"),
        (["run", "--metrics", "a"], "did you mean --metric?"),
    ],
)
def test_bad_input_is_one_line_and_creates_nothing(tmp_path, capsys, monkeypatch, args, part):
    monkeypatch.chdir(tmp_path)
    make_run(Path("run"), [(10, 1.0)])
    Path("empty").mkdir()
    ran = run_here(capsys, *args, module="common.plot")
    assert ran.code == 2 and ran.out == ""
    assert part in ran.err and ran.err.count("\n") == 1 and len(ran.err) < 400
    assert {path.name for path in tmp_path.iterdir()} == {"run", "empty"}


@pytest.mark.parametrize(
    ("text", "why"),
    [("3", "holds a int, not an object"), ('{"algo": ', "Expecting value"), ("[" * 99_999, "deep")],
)
@pytest.mark.parametrize("read", [plot.read_run, load.read_run])
def test_a_config_that_is_no_object(tmp_path, read, text, why):
    folder = make_run(tmp_path / "1", [(10, 1.0)])
    (folder / "config.json").write_text(text)
    with pytest.raises(UserError, match=rf"not a run folder .*\(config.json.*{why}"):
        read(folder)
