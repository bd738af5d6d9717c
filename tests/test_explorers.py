"""Explorers: exact counts, policy lag, and what happens when they die, hang or raise."""

import os
import signal
import time
from collections.abc import Generator
from contextlib import closing
from dataclasses import replace
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from run_helpers import run_here

from algos import apex_dqn, impala, ppo, ppo_rnn, pqn, r2d2

from common.run.cli import ExplorerOptions
from common.run.explorer import Explorer, packed, unpacked, weights_of
from common.run.explorers import ExplorerFailure, Explorers, _plan, _Slots
from common.run.ray_cluster import connected

SMALL = impala.Config(
    env_id="gymnax/CartPole-v1",
    num_envs=4,
    num_steps=16,
    total_timesteps=64_000,
    log_frequency=1_280,
)


@pytest.fixture(scope="module")
def cluster() -> Generator[None, None, None]:
    """Ray on this machine, for all tests of the file."""
    with connected(None, num_cpus=4):
        yield


class Run:
    """A Trainer in the hands of Explorers, driven log point by log point."""

    def __init__(self, module: Any, config: Any, **options: Any) -> None:
        self.trainer = module.Trainer(config)
        self.said: list[str] = []
        options = {"explorers": 2, "explorer_timeout": 5.0} | options
        self.explorers = Explorers(self.trainer, ExplorerOptions(**options), self.said.append)
        self.trainer.compiled_run = self.explorers.run
        self._log_points = (x for x in self.trainer() if x["log_type"] == "train")

    def next(self) -> tuple[int, dict[str, float]]:
        """Return step and figures of the next log point."""
        log_data = next(self._log_points)
        return log_data["sample_step"], log_data["logs"]

    def finish(self) -> list[tuple[int, dict[str, float]]]:
        return [(x["sample_step"], x["logs"]) for x in self._log_points]

    def kill(self, number: int) -> None:
        os.kill(self.explorers.places[number][1], signal.SIGKILL)

    def close(self) -> None:
        self._log_points.close()
        self.explorers.close()


def test_slots_cover_every_step_once_and_again_what_was_lost():
    slots = _Slots(first=32, size=16, total=100)
    assert [slots.take() for _ in range(3)] == [32, 48, 64]
    slots.give_back(48)
    slots.give_back(32)
    assert [slots.take() for _ in range(4)] == [32, 48, 80, 96]
    assert slots.is_empty()
    slots.give_back(96)
    assert not slots.is_empty() and slots.take() == 96


def test_packed_parameters_come_back_bit_for_bit():
    """Also integers that float32 does not hold, and scalars between vectors."""
    tree = {
        "kernel": jnp.arange(6.0).reshape(2, 3) / 7,
        "count": jnp.asarray([2**24 + 1, -5]),
        "bias": [jnp.float32(0.1), jnp.zeros((0, 4)), jnp.asarray([True, False])],
    }
    vectors = jax.jit(packed)(tree)
    assert {name: x.shape for name, x in vectors.items()} == {
        "float32": (7,),
        "int32": (2,),
        "bool": (2,),
    }
    chex.assert_trees_all_equal(unpacked(vectors, jax.eval_shape(lambda: tree)), tree, strict=True)


@pytest.mark.parametrize("module", [ppo_rnn, pqn])
def test_an_explorer_has_its_share_of_the_environments(module, monkeypatch):
    """Two of four, fewer than minibatches and running returns; seeds differ after restarts too."""
    monkeypatch.setattr("common.run.threads.use_cores", lambda count: [])
    config = module.Config(env_id="gymnax/CartPole-v1", num_envs=4, num_steps=8)
    trainer = module.Trainer(config)
    plan, weights = _plan(trainer, 2, 2), packed(weights_of(trainer.state.learner))
    first_obs = []
    resumed = plan._replace(first_step=640)  # a run that goes on plays other episodes
    for plan_, number, restarts in ((plan, 0, 0), (plan, 1, 0), (plan, 0, 1), (resumed, 0, 0)):
        explorer = Explorer()
        explorer.start(plan_, number, restarts)
        collected = explorer.collect(weights, version=7, step=160)
        rollout = collected.trajectory.rollout
        assert rollout.obs.shape == (8, 2, 4) and collected.trajectory.is_new.all()
        assert (collected.num_steps, collected.version) == (16, 7)
        first_obs.append(rollout.obs[0].tobytes())
        assert not explorer.collect(weights, 8, 176).trajectory.is_new.any()
    assert len(set(first_obs)) == 4
    # The end of the run cuts a trajectory: 500,000 steps of all are 250,000 of this one.
    assert explorer.collect(weights, 9, 249_990)[::2] == (None, 10)


def test_an_explorers_environments_have_epsilons_of_their_own(monkeypatch):
    """Those of its number among all Explorers, not those of the first again."""
    monkeypatch.setattr("common.run.threads.use_cores", lambda count: [])
    config = apex_dqn.Config(env_id="gymnax/CartPole-v1", num_envs=2, num_steps=8)
    trainer, explorer = apex_dqn.Trainer(config), Explorer()
    explorer.start(_plan(trainer, 1, 3), 2, 0)
    share = np.array([4, 5]) / (3 * 2 - 1)
    expected = config.base_epsilon ** (1 + config.epsilon_exponent * share)
    np.testing.assert_allclose(explorer.trainer.agent.epsilon, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("ppo", "--explorers", 3), "--explorers 3 does not divide --num-envs 4"),
        (
            ("ppo", "--explorers", 2, "--env-backend", "gymnasium", "--env-workers", 4),
            "--env-workers 4 does not divide the 2 environments of each of 2 --explorers",
        ),
        (("dqn", "--explorers", 2), "dqn takes no --explorers"),
        (("impala", "--explorers", 2, "--num-seeds", 2), "--num-seeds and --explorers cannot"),
        (("impala", "--explorers", 2, "--ray-address", "127.0.0.1:9"), "--ray-address 127.0.0.1:9"),
        (
            ("impala", "--explorers", 2, "--ray-address", "head"),
            "--ray-address must be auto or HOST",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_in_one_line(args, said, capsys, tmp_path):
    algo, *flags = args
    ran = run_here(capsys, *flags, "--runs-dir", tmp_path / "runs", module=f"algos.{algo}")
    assert ran.code == 2 and ran.err.startswith(f"error: {said}") and ran.err.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_without_ray_the_extra_is_named(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    ran = run_here(capsys, "--explorers", 2, "--runs-dir", tmp_path / "runs", module="algos.impala")
    assert ran.code == 2
    assert ran.err == "error: --explorers are actors of Ray; pip install -e '.[distributed]'\n"


def test_a_ray_that_does_not_start_is_one_line_and_no_folder(capsys, monkeypatch, tmp_path):
    def times_out(**options: Any) -> None:
        raise Exception("The current node timed out during startup.\nIt has 30 seconds.")

    monkeypatch.setattr("ray.init", times_out)
    ran = run_here(capsys, "--explorers", 2, "--runs-dir", tmp_path / "runs", module="algos.impala")
    assert ran.code == 2 and ran.err.count("\n") == 1
    assert ran.err.startswith("error: Ray could not be started on this machine (The current node")
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_killed_explorers_come_back_and_every_step_counts_once(cluster):
    with closing(Run(impala, replace(SMALL, total_timesteps=64_040))) as run:
        step, logs = run.next()
        assert step == 1_280 and logs["charts/updates"] == 20
        run.kill(0)
        start = time.monotonic()
        while not any("explorer 0 was lost" in line for line in run.said):
            run.next()
        assert time.monotonic() - start < 10
        while run.explorers.places[0] is None:
            run.next()
        run.kill(0)
        run.kill(1)
        rest = run.finish()
        # 64,040 env steps are 1,000 trajectories of 4 x 16 and a rest of 40.
        assert rest[-1][0] == int(run.trainer.state.step) == 64_040
        assert rest[-1][1]["explorers/restarts"] >= 3


def failing(**env_kwargs: Any) -> Any:
    """A small run on an environment with a fault."""
    flags = tuple(f"{name}={value}" for name, value in env_kwargs.items())
    env = {"env_id": "Failing-v0", "env_module": "failing_envs", "env_kwargs": flags}
    return replace(SMALL, total_timesteps=6_400, **env)


@pytest.mark.slow
def test_an_explorer_that_hangs_is_replaced(cluster, tmp_path):
    config = failing(fault="hang", once=tmp_path / "hung")
    with closing(Run(impala, config, explorer_timeout=2.0)) as run:
        assert run.finish()[-1][0] == 6_400
        assert sum("did not answer for 2 s" in line for line in run.said) == 1


@pytest.mark.slow
def test_an_explorer_that_raises_is_reported_once_and_ends_the_run(cluster):
    with closing(Run(impala, failing(fault="raise"), explorers=1, max_explorer_restarts=1)) as run:
        with pytest.raises(ExplorerFailure, match="explorer 0 raised an error, after 1 restarts"):
            run.finish()
        assert sum("the maze fell down" in line for line in run.said) == 1, run.said
        assert "failing_envs.py" in run.said[0] and run.said[0].startswith("explorer 0 raised")
        # At its step 100 it had made 6 whole trajectories of 16 steps, each time.
        assert int(run.trainer.state.step) == 2 * 6 * 64
        assert ExplorerFailure.exit_code == 1


@pytest.mark.slow
def test_on_policy_explorers_share_the_environments_and_wait_for_each_other(cluster):
    config = ppo.Config(env_id="gymnax/CartPole-v1", total_timesteps=5_000, log_frequency=1_024)
    with closing(Run(ppo, config)) as run:
        log_points = run.finish()
    # 5,000 env steps are 9 rollouts of 4 x 128 and a rest of 392.
    assert [step for step, _ in log_points] == [1_024, 2_048, 3_072, 4_096, 5_000]
    assert sum(logs["charts/updates"] for _, logs in log_points) == 9 * 4 * 4
    assert all(logs["explorers/policy_lag"] == 0 for _, logs in log_points)
    last = log_points[-1][1]
    assert last["explorers/SPS_0"] == last["explorers/SPS_1"] > 0


@pytest.mark.parametrize("module", [apex_dqn, r2d2])
@pytest.mark.slow
def test_replay_takes_what_explorers_send(cluster, module):
    """As many updates as in one process, whatever order the trajectories come in."""
    config = module.Config(
        env_id="gymnax/CartPole-v1",
        num_envs=4,
        num_steps=20,
        total_timesteps=4_000,
        log_frequency=2_000,
        learning_starts=1_000,
        buffer_size=2_000,
        train_frequency=40,
    )
    # In step, the lanes of a group need one each, however few may be on their way.
    with closing(Run(module, config, in_flight=1)) as run:
        log_points = run.finish()
        assert [step for step, _ in log_points] == [2_000, 4_000]
        updates = sum(logs["charts/updates"] for _, logs in log_points)
        assert updates == 3_000 // config.train_frequency
        replay = run.trainer.state.replay
    assert int(replay.size) == run.trainer.replay.num_rows


@pytest.mark.slow
def test_the_lag_grows_with_what_is_in_flight(cluster):
    lags = {}
    for in_flight in (1, 8):
        options = {"explorers": 1, "in_flight": in_flight}
        with closing(Run(impala, replace(SMALL, total_timesteps=6_400), **options)) as run:
            log_points = run.finish()
        lags[in_flight] = log_points[-1][1]["explorers/policy_lag"]
        assert all(logs["explorers/megabytes"] > 0 for _, logs in log_points)
    assert lags[1] == 0 and 2 < lags[8] <= 8
