import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from common.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import sweep  # noqa: E402

# Takes DQN's flags and writes what a run writes, but trains nothing. It waits half way while
# there is a file `hold` in the sweep's folder.
PROGRAM = """
if __name__ != "__main__":
    from algos.dqn import PRESETS, Config
else:
    import json, os, pathlib, signal, sys, time

    def stop(*_):
        (folder / "checkpoints" / str(step)).mkdir(parents=True, exist_ok=True)
        sys.exit(143)

    flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
    folder = pathlib.Path(flags.get("--resume") or pathlib.Path(flags["--runs-dir"], "run"))
    if "--resume" not in flags:
        folder.mkdir()
        config = {"seed": int(flags["--seed"]), "total": int(flags["--total-timesteps"])}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "metrics.csv").write_text("step,seconds,name,value\\n")
    config = json.loads((folder / "config.json").read_text())
    step = max((int(path.name) for path in folder.glob("checkpoints/*")), default=0)
    signal.signal(signal.SIGTERM, stop)
    print("from step", step, "process", os.getpid(), "NPROC", os.environ["NPROC"], flush=True)
    while step < config["total"]:
        step += 1000
        logs = {"charts/episodes": 2.0, "charts/episodic_return": step + config["seed"]}
        with (folder / "metrics.csv").open("a") as file:
            for name, value in (logs | {"charts/SPS": 100.0}).items():
                file.write(f"{step},0.0,{name},{value}\\n")
        if step == config["total"] // 2:
            (folder / "checkpoints" / str(step)).mkdir(parents=True)
        while 2 * step >= config["total"] and (folder.parents[2] / "hold").exists():
            time.sleep(0.02)
    final = {"steps": step, "device": "cpu"}
    final |= {"evaluation_return": 9.5 + config["seed"], "evaluation_std": 1.0}
    (folder / "result.json").write_text(json.dumps(final))
"""
JOB = "dummy__CartPole-v1__{}"


class Nodes:
    """A cluster of two nodes of one core each, on this machine."""

    def __init__(self):
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 1, "include_dashboard": False}
        # A lost node is noticed in a second, not in fifteen.
        head["_system_config"] = {"health_check_period_ms": 300, "health_check_timeout_ms": 1000}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.second = self.cluster.add_node(num_cpus=1)

    def replace_second(self):
        self.cluster.remove_node(self.second, allow_graceful=False)
        self.second = self.cluster.add_node(num_cpus=1)


@pytest.fixture(scope="module")
def nodes():
    folder = tempfile.mkdtemp(prefix="ray-")  # of pytest's own, the names of sockets get too long
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("NPROC", "1")
        handler = signal.getsignal(signal.SIGTERM)
        nodes = Nodes()
        signal.signal(signal.SIGTERM, handler)  # Ray has set its own
        yield nodes
        nodes.cluster.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "dummy.py"
    path.write_text(PROGRAM)
    return str(path)


def arguments(program, out, *more):
    args = ["--algos", program, "--out", str(out), *more]
    return [*args, "--", "--total-timesteps", "8000"]


def jobs_of(out):
    results = [json.loads(path.read_text()) for path in sorted((out / "jobs").iterdir())]
    return [result | {"seconds": None} for result in results]


def wait_until(found):
    end = time.monotonic() + 60
    while not found() and time.monotonic() < end:
        time.sleep(0.05)
    assert found()


def output(out, seed):
    path = out / "runs" / JOB.format(seed) / "output.txt"
    return path.read_text() if path.exists() else ""


def processes(out):
    """The ids of all processes that runs of the sweep had."""
    outputs = [path.read_text() for path in out.glob("runs/*/output.txt")]
    return [int(found) for text in outputs for found in re.findall(r"process (\d+)", text)]


def stat(process):
    """State, parent and more, as the kernel has them; Z for a process that is gone."""
    path = Path(f"/proc/{process}/stat")
    return path.read_text().rpartition(")")[2].split() if path.exists() else ["Z"]


def is_alive(process):
    return stat(process)[0] not in "ZX"


@pytest.mark.parametrize(
    ("address", "part"),
    [
        ("127.0.0.1:1", "127.0.0.1:1 is no cluster that this machine reaches (.*refused); start"),
        ("nowhere.invalid:6379", "nowhere.invalid:6379 is no cluster that this machine reaches"),
        ("local", "--ray-address must be auto or HOST:PORT, got 'local'"),
        ("", "--ray-address must be auto or HOST:PORT, got ''"),
    ],
)
def test_a_bad_address_is_one_line_and_creates_nothing(tmp_path, address, part):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(UserError, match=part.replace("(", r"\(").replace(")", r"\)")) as error:
        sweep.main(["--ray-address", address, "--out", str(tmp_path / "out")])
    assert "\n" not in str(error.value)
    assert signal.getsignal(signal.SIGTERM) is before
    assert not (tmp_path / "out").exists()


def test_without_ray_the_extra_is_named_and_nothing_created(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "sweep_on_ray", raising=False)
    with pytest.raises(UserError, match=r"needs Ray; pip install -e '\.\[distributed\]'"):
        sweep.main(["--ray-address", "auto", "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_nodes_without_a_shared_folder_give_the_results_of_one_machine(
    tmp_path, monkeypatch, nodes, program, capsys
):
    import sweep_on_ray

    init = sweep_on_ray.RunOnNode.__init__

    def on_another_disk(self, run, word, cwd):
        init(self, type(run)(run.job, tmp_path / "disk"), word, cwd)

    monkeypatch.setattr(sweep_on_ray.RunOnNode, "__init__", on_another_disk)
    out, alone = tmp_path / "out", tmp_path / "alone"
    settings = ("--num-seeds", "2", "--settings", "a: --gamma 0.9", "b: --gamma 0.8")
    on_ray = ("--ray-address", nodes.cluster.address)
    before = signal.getsignal(signal.SIGTERM)
    assert sweep.main(arguments(program, out, *settings, *on_ray)) == 0
    assert signal.getsignal(signal.SIGTERM) is before
    assert sweep.main(arguments(program, alone, *settings)) == 0
    assert jobs_of(out) == jobs_of(alone) and len(jobs_of(out)) == 4
    assert jobs_of(out)[1]["training_return"] == 8002 and jobs_of(out)[1]["commit"]
    for name in ("curves.csv", "results.md"):
        assert (out / name).read_text() == (alone / name).read_text().replace("alone", "out")
    assert not list(out.glob("runs/*/run/checkpoints"))
    assert len(list((tmp_path / "disk").glob("runs/*/run/checkpoints"))) == 4

    # Another sweep finds what this one left on the node's disk.
    shutil.rmtree(out)
    other = ("--num-seeds", "1", "--settings", "a: --gamma 0.7")
    assert sweep.main(arguments(program, out, *other, *on_ray)) == 1
    error = capsys.readouterr().err
    assert "8000 --gamma 0.9', now they are '--eval-frequency 0" in error
    assert "8000 --gamma 0.7'; repeat those, or give another --out" in error


@pytest.mark.slow
def test_a_lost_node_and_a_killed_worker_lose_no_run(tmp_path, nodes, program):
    (tmp_path / "hold").touch()
    args = arguments(program, tmp_path, "--num-seeds", "4", "--ray-address", nodes.cluster.address)
    command = [sys.executable, str(ROOT / "benchmarks" / "sweep.py"), *args]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            wait_until(lambda: len(list(tmp_path.glob("runs/*/run/checkpoints/4000"))) == 2)
            runs = processes(tmp_path)
            nodes.replace_second()
            (survivor,) = (run for run in runs if is_alive(run))
            os.kill(int(stat(survivor)[1]), signal.SIGKILL)
            wait_until(lambda: not is_alive(survivor))
        finally:
            (tmp_path / "hold").unlink()
        said = process.communicate(timeout=60)[0]
    assert process.returncode == 0
    assert said.count("killed by SIGKILL; try 2 of 3 follows") == 2
    assert [result["training_return"] for result in jobs_of(tmp_path)] == [8001, 8002, 8003, 8004]
    starts = [output(tmp_path, seed).count("from step") for seed in range(1, 5)]
    assert sorted(starts) == [1, 1, 2, 2]
    lost = output(tmp_path, 1 + starts.index(2)).splitlines()
    assert lost[1].startswith("Ray: ") and lost[2].startswith("from step 4000")


def test_a_stopped_sweep_leaves_nothing_running_and_goes_on_without_ray(
    tmp_path, nodes, program, capsys
):
    (tmp_path / "hold").touch()

    def stop():
        try:
            wait_until(lambda: len(list(tmp_path.glob("runs/*/run/checkpoints/4000"))) == 2)
            time.sleep(2.5)  # the sweep has looked at both
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=stop)
    thread.start()
    args = arguments(program, tmp_path, "--num-seeds", "3")
    assert sweep.main(["--ray-address", nodes.cluster.address, *args]) == 130
    thread.join()
    said = capsys.readouterr().out
    assert said.count("stopped at step 4,000") == 2 and said.count("stopped at step 0") == 1
    assert "stopped by SIGINT; the same call goes on from here" in said
    runs = processes(tmp_path)
    assert len(runs) == 2 and not any(is_alive(run) for run in runs)
    assert not (tmp_path / "jobs").exists()

    (tmp_path / "hold").unlink()
    assert sweep.main(args) == 0
    assert output(tmp_path, 1).count("from step 4000") == 1
    assert [result["steps"] for result in jobs_of(tmp_path)] == [8000] * 3


def test_what_keeps_a_run_from_starting_is_its_last_word(tmp_path, nodes, program, capsys):
    out = tmp_path / "out"
    (out / "runs" / JOB.format(1) / "lock").mkdir(parents=True)
    args = arguments(program, out, "--num-seeds", "2", "--workers", "1")
    assert sweep.main(["--ray-address", nodes.cluster.address, *args]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"failed: {JOB.format(1)}, exit code 1 at try 1: Ray: IsADirectoryError")
    assert [result["seed"] for result in jobs_of(out)] == [2]
