"""Explorers on several nodes of a cluster, and runs of programs with Explorers from end to end."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from run_helpers import environment
from test_explorers import SMALL, Run

from algos import impala

from common.run.checkpoint import Checkpoints
from common.run.logger import read_metrics

IMPALA = Path(__file__).parent.parent / "algos" / "impala.py"


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Generator[Cluster, None, None]:
    """A cluster of two nodes with one core each; the second can be taken away."""
    with tempfile.TemporaryDirectory(prefix="quartet-ray-") as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        head = {"num_cpus": 1, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        cluster.add_node(num_cpus=1)
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
        ray.shutdown()
        cluster.shutdown()


@pytest.mark.slow
def test_a_node_is_lost_and_another_comes(nodes):
    with closing(Run(impala, replace(SMALL, total_timesteps=256_000))) as run:
        for _ in range(3):
            run.next()
        while None in run.explorers.places:
            run.next()
        nodes.remove_node(next(iter(nodes.worker_nodes)), allow_graceful=False)
        start = time.monotonic()
        while not any("was lost" in line for line in run.said):
            run.next()
        assert time.monotonic() - start < 10
        run.next()  # the Explorer of the first node goes on alone
        assert None in run.explorers.places
        nodes.add_node(num_cpus=1)
        while None in run.explorers.places:
            run.next()
        step, logs = run.finish()[-1]
        assert step == run.trainer.config.total_timesteps and logs["explorers/restarts"] == 1


class Program:
    """`impala.py` with two Explorers, in a process group of its own, as a terminal starts it."""

    def __init__(self, *args: Any, **variables: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(IMPALA), "--explorers", "2", *map(str, args)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(**variables),
            start_new_session=True,
        )

    def wait_for_step(self, runs: Path, step: int) -> Path:
        """Wait until a run folder has logged a step, and return it."""
        while self.process.poll() is None:
            for path in runs.glob("*/metrics.csv"):
                if any(row[0] >= step for row in read_metrics(path)):
                    return path.parent
            time.sleep(0.1)
        raise AssertionError(self.process.communicate())

    def family(self) -> list[int]:
        """The processes that it started, and those that they did, whatever their session."""
        children: dict[int, list[int]] = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                words = path.read_text().rpartition(")")[2].split()
                children.setdefault(int(words[1]), []).append(int(path.parent.name))
        found = children.get(self.process.pid, [])
        for pid in found:
            found += children.get(pid, [])
        return found

    def wait(self, timeout: float) -> tuple[int, str, str]:
        """Wait until it has ended, and return its exit code, output and errors."""
        try:
            out, err = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)  # else it trains on beside other tests
            raise
        return self.process.returncode, out, err

    def end(self, number: signal.Signals) -> tuple[int, str, str]:
        """Signal the group, as Ctrl-C does, and wait until nothing is left of it."""
        family = self.family()
        assert len(family) > 3
        os.killpg(self.process.pid, number)
        ended = self.wait(60)
        deadline = time.monotonic() + 10
        while left := [pid for pid in family if Path(f"/proc/{pid}").exists()]:
            assert time.monotonic() < deadline, left
            time.sleep(0.1)
        return ended


@pytest.mark.slow
def test_a_killed_learner_leaves_no_process_and_its_run_goes_on(tmp_path):
    flags = ["--total-timesteps", 2_000_000, "--runs-dir", tmp_path, "--eval-frequency", 0]
    flags += ["--checkpoint-frequency", 10_000, "--eval-episodes", 2]
    program = Program(*flags)
    folder = program.wait_for_step(tmp_path, 20_000)
    code, _, _ = program.end(signal.SIGKILL)
    assert code == -signal.SIGKILL
    saved = max(int(path.name) for path in folder.glob("checkpoints/*") if path.name.isdigit())
    assert saved >= 10_000
    again = Program("--resume", folder)
    again.wait_for_step(tmp_path, saved + 20_000)
    code, out, err = again.end(signal.SIGINT)
    assert code == 130 and f"stopped by SIGINT; go on with --resume {folder}" in out, (out, err)
    assert f"resuming at step {saved}" in out and "Traceback" not in err
    rows = read_metrics(folder / "metrics.csv")
    steps = [step for step, _, name, _ in rows if name == "explorers/policy_lag"]
    # A signal does not wait for the log point, which comes every 63 trajectories of 20 x 8.
    assert steps[:-1] == list(range(10_080, steps[-1], 10_080)) and steps[-1] % 160 == 0


@pytest.mark.slow
def test_the_end_of_the_terminal_leaves_a_checkpoint(tmp_path):
    """It reaches Ray's processes as well, whose end would end the Learner before it has saved."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup
    try:
        program = Program("--total-timesteps", 2_000_000, "--runs-dir", tmp_path)
    finally:
        signal.signal(signal.SIGHUP, before)
    folder = program.wait_for_step(tmp_path, 10_000)
    code, out, err = program.end(signal.SIGHUP)
    assert code == 129 and f"stopped by SIGHUP; go on with --resume {folder}" in out, (out, err)
    assert Checkpoints(folder / "checkpoints").steps()


@pytest.mark.learning
@pytest.mark.slow
def test_two_explorers_learn_cartpole(tmp_path):
    flags = ["--total-timesteps", 150_000, "--num-steps", 5, "--runs-dir", tmp_path]
    program = Program(*flags, HOME=str(tmp_path))
    code, _, err = program.wait(300)
    assert code == 0, err
    assert not (tmp_path / ".ray").exists()
    result = json.loads(next(tmp_path.glob("*/result.json")).read_text())
    assert result["steps"] == 150_000 and result["evaluation_return"] >= 150
