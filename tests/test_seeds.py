import json
import shutil

import jax
import numpy as np
import pytest
from run_helpers import run_forked

from algos import a2c, dqn, impala, ppo, ppo_rnn, pqn, r2d2
from common import load, save
from common.errors import UserError

from common.run.logger import read_metrics
from common.run.seeds import batch_seeds, state_of_seed

WITH_REPLAY = [dqn, r2d2]
GYMNAX = ("--env-id", "gymnax/CartPole-v1")
SHORT = (*GYMNAX, "--log-frequency", 2048, "--eval-frequency", 2048, "--eval-episodes", 4)


def make(module, seed):
    options = {"learning_starts": 500} if module in WITH_REPLAY else {}
    config = module.Config(env_id="gymnax/CartPole-v1", total_timesteps=8192, seed=seed, **options)
    return module.Trainer(config)


@pytest.mark.parametrize(
    "module", [*WITH_REPLAY, ppo, a2c, ppo_rnn, impala, pqn], ids=lambda module: module.__name__
)
@pytest.mark.optimized
@pytest.mark.slow
def test_a_seed_learns_what_it_learns_alone(module):
    iterations = 100 if module in WITH_REPLAY else 4
    together, alone = make(module, 3), make(module, 5)
    before = state_of_seed((batch_seeds(together, 3), together.state)[1], 2).learner.params
    together.state, _ = together.compiled_run(together.state, iterations)
    alone.state, _ = alone.compiled_run(alone.state, iterations)
    of_batch = state_of_seed(together.state, 2)
    assert int(of_batch.step) == int(alone.state.step)
    params, expected = of_batch.learner.params, alone.state.learner.params
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), params, expected)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(initial=0), params, before)
    assert max(jax.tree.leaves(moved)) > 1e-3
    other = state_of_seed(together.state, 0).learner.params
    apart = jax.tree.map(lambda a, b: np.abs(a - b).max(initial=0), params, other)
    assert max(jax.tree.leaves(apart)) > 1e-2


@pytest.mark.optimized
def test_logs_mean_and_spread():
    trainer = make(ppo, 1)
    batch_seeds(trainer, 3)
    logs = [log_data["logs"] for log_data in trainer()][-2:]
    summary = jax.device_get(trainer.state.env.summary)
    returns = summary.return_sum / summary.episodes
    assert logs[0]["charts/episodic_return"] == pytest.approx(returns.mean())
    assert logs[0]["charts/episodic_return_std"] == pytest.approx(returns.std())
    assert logs[0]["charts/episodes"] == summary.episodes.sum()
    assert logs[1]["charts/updates"] == 16 * 16


@pytest.mark.slow
def test_evaluation_plays_each_seeds_policy():
    together, alone = make(ppo, 1), make(ppo, 2)
    batch_seeds(together, 2)
    logs = together.evaluate(6)["logs"]
    expected = alone.evaluate(6)["logs"]["charts/evaluation_return"]
    returns = [logs["seed_1/evaluation_return"], logs["seed_2/evaluation_return"]]
    assert returns[1] == expected
    assert logs["charts/evaluation_return"] == pytest.approx(np.mean(returns))
    assert logs["charts/evaluation_std"] == pytest.approx(np.std(returns))


@pytest.fixture(scope="module")
def batch_run(tmp_path_factory):
    runs = tmp_path_factory.mktemp("runs")
    flags = (*SHORT, "--num-seeds", 3, "--total-timesteps", 4096, "--runs-dir", runs)
    ran = run_forked(*flags, module="algos.ppo")
    assert ran.code == 0, ran.err
    return next(runs.iterdir()), ran


@pytest.mark.slow
def test_every_seed_leaves_a_policy(batch_run):
    folder, ran = batch_run
    assert "seeds 1 to 3" in ran.out
    obs = np.linspace(-0.2, 0.2, 40, dtype=np.float32).reshape(10, 4)
    learners = []
    for seed in (1, 2, 3):
        policy = load(folder / f"seed_{seed}")
        assert policy.trainer.config.seed == seed
        assert policy.step == 4096
        assert policy.predict(obs).shape == (10,)
        learners.append(policy.trainer.state.learner.params["value_head"]["kernel"])
    assert abs(learners[0] - learners[1]).max() > 1e-3
    names = {name for _, _, name, _ in read_metrics(folder / "metrics.csv")}
    assert {"charts/episodic_return_std", "seed_3/evaluation_return"} <= names


@pytest.mark.slow
def test_the_folder_of_all_seeds_is_no_policy(batch_run):
    with pytest.raises(
        UserError, match=r"holds 3 seeds; give one of its folders, such as .*seed_1"
    ):
        load(batch_run[0])


@pytest.mark.slow
def test_a_batch_goes_on(batch_run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(batch_run[0], folder)
    flags = ("--resume", folder, "--total-timesteps", 8192)
    ran = run_forked(*flags, module="algos.ppo")
    assert ran.code == 0, ran.err
    assert load(folder / "seed_2").step == 8192
    one = ("--resume", folder / "seed_1", "--total-timesteps", 10240)
    ran = run_forked(*one, module="algos.ppo")
    assert ran.code == 0, ran.err
    shutil.rmtree(folder / "seed_2")
    ran = run_forked(*flags, module="algos.ppo")  # all is done: only what is missing is written
    assert (ran.code, ran.err) == (0, "") and "all 8,192 steps are done" in ran.out
    assert "left as they went on alone: seed_1" in ran.out
    assert load(folder / "seed_1").step == 10240 and load(folder / "seed_2").step == 8192
    shutil.rmtree(folder / "seed_3")
    (folder / "seed_3").touch()
    ran = run_forked(*flags, module="algos.ppo")
    assert (ran.code, ran.err) == (0, "") and "missing: seed_3 (" in ran.out
    (folder / "seed_3").unlink()
    by_hand = load(folder / "seed_2", changes={"total_timesteps": 10240}).trainer
    list(by_hand())
    save(by_hand, folder / "seed_2")
    more = ("--resume", folder, "--total-timesteps", 12288)
    ran = run_forked(*more, module="algos.ppo")
    assert ran.code == 0 and "left as they went on alone: seed_1, seed_2" in ran.out
    steps = [load(folder / f"seed_{seed}").step for seed in (1, 2, 3)]
    assert steps == [10240, 10240, 12288]
    ran = run_forked(*flags, "--num-seeds", 2, module="algos.ppo")
    assert ran.code == 2
    assert "--num-seeds 2 differs from 3" in ran.err


def test_other_environments_are_refused(tmp_path):
    flags = ("--num-seeds", 2, "--runs-dir", tmp_path / "runs")
    ran = run_forked(*flags, module="algos.ppo")
    assert ran.code == 2
    assert ran.err.startswith("error: --num-seeds 2 needs a JAX environment")
    assert len(ran.err.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_config_of_a_seed_is_its_own(batch_run):
    config = json.loads((batch_run[0] / "seed_3" / "config.json").read_text())
    assert (config["seed"], config["num_seeds"]) == (3, 1)
