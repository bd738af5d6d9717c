"""Gymnasium environments in worker processes: the same rows, and what happens when one fails."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from run_helpers import DQN, environment, run_alone, run_here
from test_envs import learner_action
from toy_envs import env_config, play
from worker_envs import SPACES

from common import env_worker
from common.envs import Env, gymnasium_backend, make_env
from common.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
STEPS = 300


def random_env(space: str, workers: int) -> Env:
    kwargs = dict(env_kwargs=(f"space={space}",), num_envs=4, env_workers=workers)
    return make_env(env_config("ToyRandom-v0", env_module="worker_envs", **kwargs))


def process_env(workers: int, *options: str, purpose: Any = "train", **changes: Any) -> Env:
    kwargs = dict(env_kwargs=options, num_envs=4, env_workers=workers) | changes
    config = env_config("ToyProcess-v0", env_module="worker_envs", **kwargs)
    return make_env(config, purpose, changes.get("evaluated"))


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.slow
def test_workers_give_the_same_rows(space: str) -> None:
    action_space = SPACES[space][1]
    action_space.seed(0)
    sampled = [action_space.sample() for _ in range(STEPS * 4)]
    actions = jax.tree.map(
        lambda *x: jnp.stack(x).reshape(STEPS, 4, *np.shape(x[0])),
        *[learner_action(action_space, action) for action in sampled],
    )
    rows = []
    for workers in (0, 2):
        env = random_env(space, workers)
        assert (env.observation_space, env.action_space) == SPACES[space]
        state, played = play(env, actions)
        env.check(state)
        env.close()
        rows.append(played)
    jax.tree.map(np.testing.assert_array_equal, *rows)
    assert rows[0]["terminated"].sum() > 20 and rows[0]["truncated"].sum() > 20


def first_obs(env: Env) -> np.ndarray:
    return np.asarray(env.reset(jax.random.key(0)).obs)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_each_worker_steps_its_share(workers: int) -> None:
    env = process_env(workers)
    pids, has_jax, is_deaf, _ = first_obs(env).T
    env.close()
    shares = pids.reshape(workers, -1)
    assert (shares == shares[:, :1]).all() and len(set(pids)) == workers
    assert os.getpid() not in pids and not has_jax.any() and is_deaf.all()


def test_workers_may_use_the_cores_that_a_pinned_run_leaves(monkeypatch: Any) -> None:
    monkeypatch.setattr(env_worker, "cores_before_pinning", {min(os.sched_getaffinity(0))})
    env = process_env(2)
    assert (first_obs(env)[:, 3] == 1).all()
    env.close()


@pytest.mark.parametrize(("num_envs", "workers"), [(20, 4), (6, 3), (3, 3), (1, 1)])
def test_evaluation_has_as_many_workers_as_share_out_evenly(num_envs: int, workers: int) -> None:
    env = process_env(4, purpose="evaluate", evaluated=num_envs)
    assert len(env.backend.stepper.envs.processes) == workers
    env.close()


def test_video_needs_no_worker() -> None:
    config = env_config("CartPole-v1", env_backend="gymnasium", env_workers=2)
    env = make_env(config, "video", 1)
    assert isinstance(env.backend.stepper, gymnasium_backend.GymnasiumStepper)


def failure_of(env: Env) -> str:
    actions = jnp.zeros((5, 4), jnp.int32)
    state, _ = play(env, actions)
    with pytest.raises(UserError) as raised:
        env.check(state)
    env.close()
    assert all(not process.is_alive() for process in env.backend.stepper.envs.processes)
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("raise", "ToyProcess-v0: the environment raised UnpicklableError: the maze fell down"),
        ("die", "workers ended, with the exit codes {0: -9, 1: -9}"),
        ("exit", "ToyProcess-v0: the environment raised SystemExit: 7"),
    ],
)
def test_a_failing_worker_is_one_line(capfd: Any, fault: str, words: str) -> None:
    assert words in failure_of(process_env(2, f"fault={fault}", "at=3"))
    assert capfd.readouterr().err == ""


def test_a_worker_that_hangs_on_close_is_killed(capfd: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(gymnasium_backend, "SECONDS_TO_CLOSE", 0.5)
    env = process_env(2, "fault=hang")
    first_obs(env)
    start = time.monotonic()
    env.close()
    assert time.monotonic() - start < 5
    assert all(not process.is_alive() for process in env.backend.stepper.envs.processes)
    assert capfd.readouterr().err.startswith("warning: 2 of 2 environment workers did not close")


def test_what_fails_in_the_worker_alone_is_said_too(tmp_path: Path) -> None:
    flags = "--env-module worker_envs --env-id ToyProcess-v0 --env-workers 1"
    ran = run_alone(*flags.split(), "--env-kwargs", "fault=construct", "--runs-dir", tmp_path)
    first, second = ran.err.splitlines()
    text = "environment worker 0: the environment raised RuntimeError: no such maze"
    assert ran.code == 2 and first.startswith(text)
    assert second.startswith("error: could not make ToyProcess-v0")


REFUSED = {
    "not a multiple": ("--env-backend gymnasium --env-workers 3", ["3", "--num-envs 8"]),
    "more than environments": ("--env-backend gymnasium --env-workers 16", ["16", "--num-envs 8"]),
    "envpool": ("--env-workers 2", ["stepped by envpool", "--env-backend gymnasium"]),
    "JAX": ("--env-id gymnax/CartPole-v1 --env-workers 2", ["stepped by jax"]),
    "negative": ("--env-backend gymnasium --env-workers -1", ["must be 0 or more"]),
    "cannot be made": (
        "--env-module failing_envs --env-id Failing-v0 --env-workers 2 --env-kwargs "
        "fault=construct",
        ["could not make Failing-v0", "no such maze"],
    ),
    "fails at reset": (
        "--env-module failing_envs --env-id Failing-v0 --env-workers 2 --env-kwargs fault=reset",
        ["the environment raised RuntimeError: the maze is shut"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_one_line(capsys: Any, tmp_path: Path, name: str) -> None:
    flags, words = REFUSED[name]
    ran = run_here(capsys, *flags.split(), "--runs-dir", tmp_path)
    assert ran.code == 2 and len(ran.err.splitlines()) == 1, ran.err
    assert all(word in ran.err for word in words), ran.err
    assert not list(tmp_path.iterdir())


def children_of(pid: int) -> list[int]:
    """Return the processes below one, however deep."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    below = [int(child) for task in tasks for child in task.read_text().split()]
    return below + [one for child in below for one in children_of(child)]


class Training:
    """A run of DQN in a process group of its own, with two workers that step slowly."""

    def __init__(self, runs: Path, *options: str) -> None:
        flags = "--env-module worker_envs --env-id ToyProcess-v0 --env-workers 2 --log-frequency 80"
        flags += " --learning-starts 40 --eval-frequency 0 --eval-episodes 2"
        command = [sys.executable, str(DQN), *flags.split(), "--runs-dir", str(runs)]
        self.process = subprocess.Popen(
            [*command, "--env-kwargs", "delay=0.01", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
            start_new_session=True,
        )
        wait_until(lambda: list(runs.glob("*/metrics.csv")))
        self.below = children_of(self.process.pid)


def wait_until(condition: Any, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.slow
def test_a_signal_reaches_the_whole_group(tmp_path: Path, number: signal.Signals) -> None:
    training = Training(tmp_path)
    workers = [p for p in training.below if "jaxlib" in Path(f"/proc/{p}/maps").read_text()]
    assert len(training.below) >= 3 and not workers
    os.killpg(training.process.pid, number)
    out, err = training.process.communicate(timeout=60)
    assert training.process.returncode == 128 + number and err == "", err
    assert f"stopped by {number.name}; go on with --resume" in out
    wait_until(lambda: not any(map(is_alive, training.below)), 10)


@pytest.mark.slow
def test_a_run_ends_with_its_workers(tmp_path: Path) -> None:
    training = Training(tmp_path, "--total-timesteps", "160")
    out, err = training.process.communicate(timeout=60)
    assert (training.process.returncode, err) == (0, "") and "evaluation over 2 episodes" in out
    wait_until(lambda: not any(map(is_alive, training.below)), 10)


def test_no_worker_outlives_a_killed_run(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.process.kill()
    _, err = training.process.communicate(timeout=60)
    wait_until(lambda: not any(map(is_alive, training.below)), 10)
    assert "Traceback" not in err


@pytest.mark.slow
def test_what_was_trained_until_a_worker_died_is_kept(tmp_path: Path) -> None:
    training = Training(tmp_path, "fault=die", "at=60")
    out, err = training.process.communicate(timeout=60)
    assert training.process.returncode == 2, (out, err)
    assert len(err.splitlines()) == 1 and "environment workers ended" in err
    assert list(tmp_path.glob("*/checkpoints/*"))
