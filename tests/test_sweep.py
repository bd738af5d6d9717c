import contextlib
import csv
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from common.envs import resolve_backend
from common.errors import UserError

from common.run import cli

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import report  # noqa: E402
import sweep  # noqa: E402


def make_result(**changes):
    fields = dict(algo="dqn", env_id="CartPole-v1", seed=1, flags=["--eval-frequency", "0"])
    fields |= dict(steps=500_000, training_return=490.0, evaluation_return=500.0)
    fields |= dict(evaluation_std=0.0, seconds=60.0, SPS=1000.0, commit="abc", machine="CPU")
    return report.Result(**fields | {"curve": [(100, 10.0, 2.0)]} | changes)


# Aggregation


def test_late_return_weighs_by_episodes_and_takes_only_the_last_tenth():
    curve = [(80, 1000.0, 50.0), (90, 500.0, 9.0), (95, 10.0, 3.0), (100, 20.0, 1.0)]
    assert report.late_return(curve, 100) == (10 * 3 + 20) / 4
    assert report.late_return(curve, 100, share=0.2) == (500 * 9 + 10 * 3 + 20) / 13
    assert np.isnan(report.late_return(curve[:2], 100))
    assert np.isnan(report.late_return([], 100))


def test_on_common_steps_interpolates_but_never_extrapolates():
    curves = [[(10, 0.0, 1), (20, 10.0, 1), (40, 30.0, 1)], [(20, 5.0, 1), (30, 7.0, 1)]]
    steps, returns = report.on_common_steps(curves)
    assert steps.tolist() == [20, 30]
    assert returns.tolist() == [[10, 20], [5, 7]]


def test_on_common_steps_without_a_finished_episode_is_empty():
    steps, returns = report.on_common_steps([[(10, 0.0, 1)], []])
    assert steps.shape == (0,) and returns.shape == (2, 0)
    assert all(values.shape == (0,) for values in report.curve_statistics(returns))


def test_curve_statistics_by_hand():
    returns = np.array([[0.0, 7.0], [1.0, 7.0], [3.0, 7.0], [100.0, 7.0]])
    mean, iqm, low, high = report.curve_statistics(returns)
    assert mean.tolist() == [26, 7]
    assert iqm.tolist() == [2, 7]  # a quarter of the seeds is cut off at each end
    assert 0 <= low[0] < 26 < high[0] <= 100
    assert low[1] == high[1] == 7


def test_curve_statistics_interval_is_the_bootstrap_percentile_interval():
    # Of 2 seeds, each resample has the mean 0, 1 or 2, with probability 1/4, 1/2 and 1/4.
    _, _, low, high = report.curve_statistics(np.array([[0.0], [2.0]]))
    assert (low.item(), high.item()) == (0, 2)


def test_curve_statistics_of_one_seed_has_no_interval():
    mean, iqm, low, high = report.curve_statistics(np.array([[1.0, 2.0]]))
    assert mean.tolist() == iqm.tolist() == [1, 2]
    assert np.isnan(low).all() and np.isnan(high).all()


def test_read_curve_keeps_the_log_points_with_episodes():
    rows = [(10, 0.1, "charts/episodes", 0.0), (20, 0.2, "charts/episodes", 3.0)]
    rows += [(20, 0.2, "charts/episodic_return", 9.5), (20, 0.2, "losses/td_loss", 1.0)]
    assert report.read_curve(rows) == [(20, 9.5, 3.0)]


def test_read_latest_reads_the_end_and_skips_cut_lines(tmp_path):
    path = tmp_path / "metrics.csv"
    assert sweep.read_latest(path) == (0, {})
    path.write_text("step,seconds,name,value\n")
    assert sweep.read_latest(path) == (0, {})
    path.write_text("step,seconds,name,value\n10,0.1,a,1.5\n20,0.2,a,2.5\n20,0.2,b,3.5\n30,0.3,a")
    assert sweep.read_latest(path) == (20, {"a": 2.5, "b": 3.5})
    assert sweep.read_latest(path, size=25) == (20, {"b": 3.5})


def test_report_shows_mean_std_published_figure_and_origin():
    flags = ["--eval-frequency", "0", "--gamma", "0.9"]
    group = [make_result(seed=1, flags=flags), make_result(seed=2, training_return=480.0)]
    text = report.markdown_report([group, [make_result(steps=1000, commit="def")]])
    first, second = (line for line in text.split("\n") if line.startswith("| dqn"))
    assert first.startswith(
        "| dqn | CartPole-v1 | 2 | 500,000 | 485.0 ± 5.0 | – | 498 | 500.0 ± 0.0"
    )
    assert second.startswith("| dqn | CartPole-v1 | 1 | 1,000 | 490.0 | – | – |")
    assert (
        "--num-seeds 2 --eval-frequency 0 --out /tmp/again -- --gamma 0.9`, commit abc, CPU" in text
    )


def test_small_returns_have_two_digits_behind_the_point():
    assert report.mean_and_std([1.04, 1.09, 1.09]) == "1.07 ± 0.02"
    assert report.mean_and_std([-9.99, -9.99]) == "-9.99 ± 0.00"
    assert report.mean_and_std([9.0, 11.0]) == "10.0 ± 1.0"
    assert report.mean_and_std([-0.001]) == "0.00"
    assert report.robust_mean([1.04, 1.04, 1.04]) == "1.04 [1.04, 1.04]"
    assert report.robust_mean([12.0, 12.0, 12.0]) == "12.0 [12.0, 12.0]"


def test_write_report_makes_every_file_also_without_any_episode(tmp_path):
    high, low = ([(100, value, 1.0)] for value in (10.0, 11 / 3))
    results = [make_result(curve=high), make_result(seed=2, curve=low)]
    results.append(make_result(env_id="a/B", curve=[]))
    for i, result in enumerate(results):
        report.write_atomically(tmp_path / "jobs" / f"{i}.json", json.dumps(asdict(result)))
    report.write_report(tmp_path)
    assert len((tmp_path / "results.csv").read_text().split()) == 1 + 3
    assert (tmp_path / "curves.csv").read_text().split()[1:] == [
        "CartPole-v1,dqn,2,100,6.833333,6.833333,3.666667,10.0"
    ]
    assert {path.name for path in tmp_path.glob("*.png")} == {"CartPole-v1.png", "a-B.png"}


# Bad input


@pytest.mark.parametrize(
    "args, part",
    [
        (["--algos", "dqn", "nope"], "unknown --algos 'nope'; accepted are"),
        (["--workers", "0"], "--workers must be 1 or more, got 0"),
        (["--workers", "two"], "--workers"),
        (["--out", "o[1]"], "--out o[1] has [1] in its whole path"),
        (["--num-seeds", "0"], "--num-seeds must be 1 or more, got 0"),
        (["--env-ids", "CartPole-v1", "Cartpole-v1"], "unknown --env-id 'Cartpole-v1'"),
        (["--eval-frequency", "-1"], "--eval-frequency must be 0 or more, got -1"),
        (["--gamma", "0.9"], "unknown flag '--gamma'; flags of the runs follow `--`"),
        (["--", "--gama", "0.9"], "--gama"),
        (["--", "--gamma", "2"], "--gamma must be between 0 and 1"),
        (["--", "--eval-episodes", "0"], "--eval-episodes 0 cannot follow `--`"),
        (["--", "--seed=3"], "--seed=3 cannot follow `--`"),
        (["--", "--num-seeds", "4"], "--num-seeds cannot follow `--`"),
        (["--settings", "fast"], "--settings takes NAME: FLAGS"),
        (["--settings", "a/b: --gamma 0.9"], "--settings takes NAME: FLAGS"),
        (["--settings", "a: --gamma 0.9", "a: --gamma 0.8"], "each NAME once"),
        (["--settings", "a: --gamma '0.9"], "cannot be read: No closing quotation"),
        (["--settings", "a: --gama 0.9"], "unknown flag '--gama'"),
        (["--settings", "a: --seed 3"], "--seed cannot follow `--` or stand in --settings"),
        (["--algos", "nowhere/mine.py"], "unknown --algos 'nowhere/mine.py'"),
        (["--algos", "dqn", str(ROOT / "tests" / "off_policy.py")], "has no Config or no PRESETS"),
    ],
)
def test_bad_input_is_one_line_and_creates_nothing(tmp_path, args, part):
    out = tmp_path / "out"
    with pytest.raises(UserError) as error:
        sweep.main(["--out", str(out), *args])
    assert part in str(error.value) and "\n" not in str(error.value)
    assert not out.exists()


def test_out_that_cannot_be_written_or_is_in_use(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write to"):
        sweep.main(["--out", str(tmp_path / "file" / "out")])
    with sweep._locked(tmp_path) as lock:
        lock.write("word")  # by which the nodes of a cluster know a shared folder
        lock.flush()
        with pytest.raises(UserError, match="is in use by another sweep"):
            sweep.main(["--out", str(tmp_path)])
        assert (tmp_path / "runs" / "lock").read_text() == "word"


def mine() -> str:
    """DQN with a field more, which needs a module that lies beside it."""
    text = (ROOT / "algos" / "dqn.py").read_text()
    text = text.replace("from dataclasses", "import beside_mine\nfrom dataclasses", 1)
    field = "    boldness: Positive[float] = 1.0  # how much it dares\n"
    return text.replace("    gamma: ", f"{field}    gamma: ", 1)


def test_a_file_from_elsewhere_and_settings(tmp_path):
    (tmp_path / "mine.py").write_text(mine())
    (tmp_path / "beside_mine.py").touch()
    algos = ("dqn", str(tmp_path / "mine.py"))
    settings = ("lr=1e-3: --learning-rate 1e-3", "lr=1e-4: --learning-rate 1e-4")
    options = sweep.SweepOptions(algos, settings, num_seeds=1)
    jobs = sweep.make_jobs(options, ["--gamma", "0.9"])
    assert [job.name for job in jobs] == [
        f"{algo}__{setting}__CartPole-v1__1"
        for algo in ("dqn", "mine")
        for setting in ("lr=1e-3", "lr=1e-4")
    ]
    flags = ("--eval-frequency", "0", "--gamma", "0.9", "--learning-rate", "1e-4")
    assert jobs[-1].flags == flags and jobs[-1].program == tmp_path / "mine.py"
    command = sweep.Run(jobs[-1], tmp_path)._command()
    assert command[1] == str(tmp_path / "mine.py") and command[-2:] == ["--learning-rate", "1e-4"]
    with pytest.raises(UserError, match="unknown flag '--boldness'"):
        sweep.make_jobs(options, ["--boldness", "2"])
    assert sweep.make_jobs(sweep.SweepOptions(algos[1:]), ["--boldness", "2"])
    (tmp_path / "dqn.py").touch()
    with pytest.raises(UserError, match="two files alike"):
        sweep.make_jobs(sweep.SweepOptions(("dqn", str(tmp_path / "dqn.py"))), [])
    (tmp_path / "mine.py").write_text("raise RuntimeError('not\\ntoday')")
    with pytest.raises(UserError, match=r"cannot be imported \(RuntimeError: not today\)"):
        sweep.make_jobs(options, [])


def test_runs_of_other_defaults_are_no_group(tmp_path):
    """A default that changed between two calls of one sweep shows in no flag."""
    configs = [{"gamma": 0.9, "tau": 1.0}, {}, {"gamma": 0.9}, {"gamma": 0.8, "tau": 1.0}]
    for seed, config in enumerate(configs, 1):
        result = make_result(seed=seed, config=config)
        report.write_atomically(tmp_path / "jobs" / f"{seed}.json", json.dumps(asdict(result)))
        if seed < 4:
            assert len(report.read_groups(tmp_path)) == 1
    with pytest.raises(UserError, match="other gamma for seed 1 than for 4"):
        report.read_groups(tmp_path)


def test_the_report_has_a_line_for_each_setting(tmp_path):
    flags = ["--eval-frequency", "0", "--gamma", "0.9"]
    results = [make_result(setting="low", flags=flags, program="/tmp/dqn.py"), make_result()]
    results += [make_result(setting="low", seed=2, flags=flags, training_return=480.0)]
    for i, result in enumerate(results):
        report.write_atomically(tmp_path / "jobs" / f"{i}.json", json.dumps(asdict(result)))
    report.write_report(tmp_path)
    text = (tmp_path / "results.md").read_text()
    assert "| dqn | CartPole-v1 | 1 | 500,000 | 490.0 | – | 498 |" in text
    assert "| dqn, low | CartPole-v1 | 2 | 500,000 | 485.0 ± 5.0 | – | – |" in text
    assert "sweep.py --algos /tmp/dqn.py --env-ids CartPole-v1 --num-seeds 2" in text
    rows = list(csv.DictReader((tmp_path / "curves.csv").read_text().splitlines()))
    assert [(row["algo"], row["seeds"]) for row in rows] == [("dqn", "1"), ("dqn, low", "2")]


def test_finished_runs_are_skipped_setting_by_setting(tmp_path, monkeypatch, capsys):
    def fake(run):
        return [sys.executable, "-c", FAKE_RUN, str(tmp_path / "runs" / run.job.name), "8000"]

    monkeypatch.setattr(sweep.Run, "_command", fake)
    args = ["--num-seeds", "1", "--workers", "1", "--out", str(tmp_path), "--settings"]
    last = ["--", "--total-timesteps", "8000"]
    assert sweep.main([*args, "a: --gamma 0.9", *last]) == 0
    assert sweep.main([*args, "a: --gamma 0.9", "b: --gamma 0.8", *last]) == 0
    assert "runs: 2, finished before: 1" in capsys.readouterr().out
    names = {path.stem for path in (tmp_path / "jobs").iterdir()}
    assert names == {"dqn__a__CartPole-v1__1", "dqn__b__CartPole-v1__1"}
    with pytest.raises(UserError, match="repeat those, or give another --out"):
        sweep.main([*args, "a: --gamma 0.7", *last])
    path = tmp_path / "jobs" / "dqn__a__CartPole-v1__1.json"
    finished = json.loads(path.read_text())
    assert finished["config"]["gamma"] == 0.9 and "seed" not in finished["config"]
    for place in (path, tmp_path / "runs" / path.stem / "job.json"):  # finished, and not yet
        kept = json.loads(place.read_text())
        place.write_text(json.dumps(kept | {"config": {"tau": 0.5}}))  # the default of then
        with pytest.raises(UserError, match="with other defaults of tau; give another --out"):
            sweep.main([*args, "a: --gamma 0.9", *last])
        place.write_text(json.dumps(kept))
    mine = tmp_path / "mine" / "dqn.py"  # an edited copy is another program
    mine.parent.mkdir()
    shutil.copy(ROOT / "algos" / "dqn.py", mine)
    with pytest.raises(UserError, match=rf"of algos/dqn\.py, not of {mine}; give another --out"):
        sweep.main(["--algos", str(mine), *args, "a: --gamma 0.9", *last])


@pytest.mark.parametrize(("progress", "seconds"), [(None, 7.0), ((0, {}), 107.0)])
def test_waiting_for_a_core_is_no_time_of_a_run(tmp_path, monkeypatch, progress, seconds):
    monkeypatch.setattr("time.monotonic", lambda: 300.0)
    place = SimpleNamespace(progress=lambda run: progress)
    (job,) = sweep.make_jobs(sweep.SweepOptions(num_seeds=1), [])
    stopped = sweep.Sweep([job], tmp_path, 1, place)
    run, stopped.told_to_stop = stopped.waiting[0], True
    stopped._write_state(run, 7.0)
    run.started = 200.0
    stopped._settle(run, -9)
    assert run.seconds == seconds


# Processes

FAKE_RUN = """
import json, os, pathlib, sys
folder = pathlib.Path(sys.argv[1], "run")
folder.mkdir()
(folder / "config.json").write_text("{}")
logs = {"charts/episodes": 2.0, "charts/episodic_return": 9.0, "charts/SPS": 100.0}
lines = [f"{sys.argv[2]},1.0,{name},{value}" for name, value in logs.items()]
(folder / "metrics.csv").write_text("\\n".join(["step,seconds,name,value", *lines, ""]))
evaluation = {"evaluation_return": 9.5, "evaluation_std": 1.0}
(folder / "result.json").write_text(json.dumps({"steps": 8000, "device": "TPU"} | evaluation))
print(sorted(os.sched_getaffinity(0)), os.environ["NPROC"])
"""


def test_a_job_that_fails_for_good_does_not_stop_the_others(tmp_path, monkeypatch, capsys):
    programs = {
        1: ["print('error: no such thing'); raise SystemExit(2)"],
        2: ["import os, signal; os.kill(os.getpid(), signal.SIGKILL)"],
        3: [FAKE_RUN, str(tmp_path / "runs" / "dqn__CartPole-v1__3"), "8000"],
        4: [FAKE_RUN, str(tmp_path / "runs" / "dqn__CartPole-v1__4"), "4000"],
    }
    monkeypatch.delenv("NPROC", raising=False)
    monkeypatch.setattr(
        sweep.Run, "_command", lambda run: [sys.executable, "-c", *programs[run.job.seed]]
    )
    args = ["--num-seeds", "4", "--workers", "1", "--out", str(tmp_path)]
    assert sweep.main([*args, "--", "--total-timesteps", "8000"]) == 1
    refused, killed, cut = capsys.readouterr().err.splitlines()
    assert "dqn__CartPole-v1__1, exit code 2 at try 1: error: no such thing" in refused
    assert "dqn__CartPole-v1__2, killed by SIGKILL at try 3" in killed
    assert "dqn__CartPole-v1__4, exit code 0 at try 1: metrics.csv ends at step 4,000" in cut
    (path,) = (tmp_path / "jobs").iterdir()
    result = json.loads(path.read_text())
    assert result["curve"] == [[8000, 9.0, 2.0]] and result["SPS"] == 100
    assert (result["training_return"], result["evaluation_return"]) == (9, 9.5)
    assert result["machine"].endswith("cores, TPU") and result["commit"]
    core = min(os.sched_getaffinity(0))
    assert (tmp_path / "runs/dqn__CartPole-v1__3/output.txt").read_text() == f"[{core}] 1\n"


class SweepProcess:
    """A real sweep of short runs, which can be stopped and whose runs can be killed."""

    def __init__(self, out, num_seeds):
        flags = ["--total-timesteps", "80000", "--learning-starts", "1000", "--eval-episodes", "2"]
        flags += ["--log-frequency", "2000", "--checkpoint-frequency", "0"]
        self.args = [
            "--num-seeds",
            str(num_seeds),
            "--workers",
            "2",
            "--out",
            str(out),
            "--",
            *flags,
        ]
        program = [sys.executable, str(ROOT / "benchmarks" / "sweep.py")]
        self.process = subprocess.Popen(
            program + self.args, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def wait_for(self, find):
        while not (found := find()):
            assert self.process.poll() is None, self.process.communicate()[0]
            time.sleep(0.02)
        return found

    def run_id(self, job):
        """Return the process id of a run of this sweep, or None."""
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                parent = int(stat.read_text().rpartition(")")[2].split()[1])
                if parent == self.process.pid and job in stat.with_name("cmdline").read_text():
                    return int(stat.parent.name)
        return None

    def end(self):
        output = self.process.communicate(timeout=120)[0]
        return self.process.returncode, output


@pytest.mark.slow
def test_a_stopped_sweep_goes_on_survives_a_killed_run_and_skips_what_is_finished(tmp_path, capsys):
    job = "dqn__CartPole-v1__1"
    stopped = SweepProcess(tmp_path, num_seeds=1)
    stopped.wait_for(lambda: list(tmp_path.glob(f"runs/{job}/*/metrics.csv")))
    stopped.process.send_signal(signal.SIGINT)
    code, output = stopped.end()
    assert code == 130 and "stopped by SIGINT; the same call goes on from here" in output
    said = tmp_path / "runs" / job / "output.txt"
    assert "stopped by SIGTERM; go on with --resume" in said.read_text()
    assert list(tmp_path.glob(f"runs/{job}/*/checkpoints/*000"))
    assert not (tmp_path / "jobs").exists()

    started = SweepProcess(tmp_path, num_seeds=2)
    os.kill(started.wait_for(lambda: started.run_id(job)), signal.SIGKILL)
    code, output = started.end()
    assert code == 0 and f"{job}: killed by SIGKILL; try 2 of 3 follows" in output
    assert "resuming at step" in said.read_text()
    assert len(list(tmp_path.glob(f"runs/{job}/*/config.json"))) == 1
    check_results(tmp_path)

    assert sweep.main(started.args) == 0
    assert capsys.readouterr().out == f"runs: 2, finished before: 2, folder: {tmp_path}\n"
    with pytest.raises(UserError, match="repeat those, or give another --out"):
        sweep.main([*started.args, "--gamma", "0.9"])


def check_results(out):
    rows = list(csv.DictReader((out / "results.csv").read_text().splitlines()))
    assert [(row["seed"], row["steps"]) for row in rows] == [("1", "80000"), ("2", "80000")]
    for row in rows:
        assert float(row["training_return"]) > 8 and float(row["evaluation_return"]) > 8
        assert float(row["SPS"]) > 0 and float(row["seconds"]) > 1
    last = list(csv.DictReader((out / "curves.csv").read_text().splitlines()))[-1]
    assert (last["seeds"], last["step"]) == ("2", "80000")
    assert float(last["low"]) <= float(last["mean"]) <= float(last["high"])
    assert (out / "CartPole-v1.png").read_bytes().startswith(b"\x89PNG")
    assert "| dqn | CartPole-v1 | 2 | 80,000 |" in (out / "results.md").read_text()


# Weights & Biases


VALUE_BASED = ["dqn", "double_dqn", "dueling_dqn", "prioritized_dqn", "noisy_dqn", "c51"]
VALUE_BASED += ["qr_dqn", "iqn", "rainbow", "pqn"]
FAMILIES = {
    "value_classic.yaml": [*VALUE_BASED, "r2d2", "apex_dqn"],
    "value_minatar.yaml": [*VALUE_BASED, "ppo"],
    "value_atari.yaml": [*VALUE_BASED, "r2d2", "apex_dqn"],
}
SWEEPS = [
    (path, algo)
    for path in sorted((ROOT / "benchmarks/sweeps").glob("*.yaml"))
    for algo in FAMILIES.get(path.name, [Path(yaml.safe_load(path.read_text())["program"]).stem])
]


@pytest.mark.parametrize(("path", "algo"), SWEEPS, ids=lambda part: getattr(part, "name", part))
def test_wandb_sweep_files_give_flags_that_our_command_line_takes(path, algo):
    described = yaml.safe_load(path.read_text())
    assert (ROOT / described["program"]).exists() and described["method"] == "grid"
    parameters = described["parameters"]
    env_ids = parameters["env-id"]["values"]
    first = {k: v["values"][0] if "values" in v else v["value"] for k, v in parameters.items()}
    # As `wandb agent` replaces them.
    flags = [f"--{name}={value}" for name, value in first.items()]
    macros = {"${env}": [], "${interpreter}": [], "${program}": [described["program"]]}
    words = [word.replace("${envvar:ALGO}", algo) for word in described["command"]]
    program, *args = (
        part for word in words for part in (macros | {"${args}": flags}).get(word, [word])
    )
    assert program == f"algos/{algo}.py"
    module = importlib.import_module(f"algos.{algo}")
    options = cli.parse(module.Config, module.PRESETS, args)
    assert options.config.env_id == env_ids[0] and options.config.seed == 1
    assert options.logging.track
    assert options.logging.wandb_project == described["project"]
    for env_id in env_ids:
        resolve_backend(env_id)


def test_every_algorithm_has_a_wandb_sweep_file():
    assert {algo for _, algo in SWEEPS} == {path.stem for path in (ROOT / "algos").glob("[!_]*.py")}
