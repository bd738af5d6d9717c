"""Several devices, which take a process of their own: JAX makes its devices once."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_helpers import environment, run_alone, run_here

from algos import ppo

PPO = Path(ppo.__file__)
GYMNAX = ("--env-id", "gymnax/CartPole-v1")
FOUR = {"XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=4"}
TRAIN = """
import importlib, json, sys
import jax, numpy as np
from common.run.devices import shard_over_devices

def train(module, iterations, num_devices):
    options = dict(learning_starts=280) if hasattr(module.Config, "learning_starts") else {}
    config = module.Config(env_id="gymnax/CartPole-v1", num_envs=8, total_timesteps=8192, **options)
    trainer = module.Trainer(config)
    if num_devices > 1:
        shard_over_devices(trainer, num_devices)
    trainer.state, metrics = trainer.compiled_run(trainer.state, iterations)
    return trainer, float(metrics["charts/updates"])

results = {}
for name, iterations in json.loads(sys.argv[1]).items():
    module = importlib.import_module(f"algos.{name}")
    alone, updates = train(module, iterations, 1)
    together, _ = train(module, iterations, 4)
    difference = jax.tree.map(
        lambda a, b: float(np.abs(np.asarray(a) - np.asarray(b)).max()) if a.size else 0.0,
        alone.state.learner.params,
        together.state.learner.params,
    )
    obs = together.state.env.obs
    results[name] = {
        "updates": updates,
        "difference": max(jax.tree.leaves(difference)),
        "rows": sorted(len(shard.data) for shard in obs.addressable_shards),
        "replicated": all(x.sharding.is_fully_replicated
                          for x in jax.tree.leaves(together.state.learner.params)),
    }
print(json.dumps(results))
"""
ITERATIONS = {"ppo": 2, "a2c": 12, "ppo_rnn": 2, "impala": 12, "pqn": 2, "dqn": 60, "r2d2": 100}


@pytest.fixture(scope="module")
def trained_on_four() -> dict[str, dict[str, Any]]:
    """What came of training each algorithm on one device and on four."""
    ran = run_alone(json.dumps(ITERATIONS), program=("-c", TRAIN), timeout=600, **FOUR)
    assert ran.code == 0, ran.err
    return json.loads(ran.out.splitlines()[-1])


@pytest.mark.parametrize("algo", ITERATIONS)
@pytest.mark.slow
def test_four_devices_learn_what_one_learns(algo, trained_on_four):
    result = trained_on_four[algo]
    assert result["updates"] >= 10
    assert result["difference"] <= 1e-5
    assert result["rows"] == [2, 2, 2, 2]
    assert result["replicated"]


@pytest.mark.slow
def test_a_run_on_two_devices(tmp_path):
    flags = (*GYMNAX, "--num-devices", 2, "--total-timesteps", 2048, "--log-frequency", 1024)
    flags += ("--eval-frequency", 0, "--eval-episodes", 2, "--runs-dir", tmp_path)
    ran = run_alone(*flags, program=(str(PPO),), **FOUR)
    assert ran.code == 0, ran.err
    folder = next(tmp_path.iterdir())
    program = ("-m", "common.evaluate")
    played = run_alone(folder, "--episodes", 2, program=program)
    assert played.code == 0, played.err
    mean = float(played.out.split()[0])
    assert np.isclose(mean, json.loads((folder / "result.json").read_text())["evaluation_return"])


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("--num-devices", 2), "needs a JAX environment, such as gymnax/CartPole-v1"),
        ((*GYMNAX, "--num-devices", 3), "does not divide --num-envs 4"),
        ((*GYMNAX, "--num-devices", 4), "is more than the 1 devices that JAX finds"),
        ((*GYMNAX, "--num-devices", 2, "--num-seeds", 2), "cannot go together"),
        ((*GYMNAX, "--num-devices", 0), "--num-devices must be above 0, got 0"),
    ],
)
def test_bad_numbers_of_devices(flags, line, tmp_path, capsys):
    ran = run_here(capsys, *flags, "--runs-dir", tmp_path / "runs", module="algos.ppo")
    assert ran.code == 2
    assert line in ran.err
    assert len(ran.err.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


LEARN = """
import importlib, json, sys
import jax, numpy as np
from common.run.devices import learner_on_devices

module = importlib.import_module(sys.argv[1])

def learned(num_devices):
    trainer = module.Trainer(module.Config(env_id="CartPole-v1", num_envs=8, num_steps=16))
    _, trajectory, _ = jax.jit(trainer.collect_trajectory)(trainer.state)
    learn = jax.jit(trainer.learn_trajectory)
    learn = learner_on_devices(trainer, num_devices) if num_devices > 1 else learn
    zeros = trainer.zero_metrics(trainer.state)
    return learn(trainer.state, zeros, jax.device_get(trajectory))[0].learner.params

alone, together = learned(1), learned(4)
difference = jax.tree.map(
    lambda a, b: float(np.abs(np.asarray(a) - np.asarray(b)).max(initial=0)), alone, together
)
print(json.dumps({
    "difference": max(jax.tree.leaves(difference)),
    "devices": len(jax.tree.leaves(together)[0].sharding.device_set),
}))
"""


@pytest.mark.parametrize("module", ["impala", "ppo"])
@pytest.mark.slow
def test_a_learner_of_explorers_learns_the_same_on_four_devices(module):
    """From an environment outside JAX too: only trajectories cross the devices."""
    ran = run_alone(f"algos.{module}", program=("-c", LEARN), **FOUR)
    assert ran.code == 0, ran.err
    found = json.loads(ran.out.splitlines()[-1])
    assert found["devices"] == 4 and found["difference"] < 1e-6


HOST = """
import json, sys
import jax, numpy as np

address, count, index = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
if count > 1:
    jax.distributed.initialize(address, count, index)

from algos import ppo
from common.run.devices import shard_over_devices

config = ppo.Config(env_id="gymnax/CartPole-v1", num_envs=8, total_timesteps=4096)
trainer = ppo.Trainer(config)
if count > 1:
    shard_over_devices(trainer, jax.device_count())
logs = [log_data["logs"] for log_data in trainer()]
learner = jax.tree.map(lambda x: x.addressable_data(0), trainer.state.learner)
print(json.dumps({
    "devices": jax.device_count(),
    "episodes": logs[-2]["charts/episodes"],
    "params": float(sum(np.abs(x).sum() for x in jax.tree.leaves(learner.params))),
    "evaluation": trainer.evaluator(learner, 4096, 4)["logs"]["charts/evaluation_return"],
}))
"""


@pytest.mark.slow
def test_two_hosts_train_one_policy():
    """As two processes on loopback, each with one device; and as one process does it alone."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-c", HOST, address]
    hosts = [
        subprocess.Popen([*command, "2", str(index)], stdout=subprocess.PIPE, env=environment())
        for index in range(2)
    ]
    found = [json.loads(host.communicate(timeout=120)[0].splitlines()[-1]) for host in hosts]
    ran = run_alone(address, 1, 0, program=("-c", HOST))
    alone = json.loads(ran.out.splitlines()[-1])
    assert found[0] == found[1] and found[0]["devices"] == 2
    assert found[0]["episodes"] == alone["episodes"] > 0
    assert found[0]["params"] == pytest.approx(alone["params"], rel=1e-5)
    assert found[0]["evaluation"] >= 8
