"""The policy that a run leaves: loaded, served with numpy, and evaluated."""

import json
import re
import shutil
from dataclasses import asdict, replace
from functools import partial

import gymnasium as gym
import jax
import numpy as np
import pytest
from gymnasium import spaces
from run_helpers import finished_run, run_alone, run_here
from toy_envs import EchoEnv

from algos import a2c, impala, ppo, ppo_rnn, sac, sac_discrete, td3
from common import load, save
from common.errors import UserError
from common.networks import Memory

from common.run.load import Policy
from common.run.logger import read_metrics


@pytest.fixture(scope="module")
def policy():
    return load(finished_run()[0])


def test_policy_serves_one_observation_and_a_batch(policy):
    obs = np.random.default_rng(0).normal(scale=5, size=(256, 4)).astype(np.float32)
    actions = policy.predict(obs)
    algorithm, learner = policy.trainer.algorithm, policy.trainer.state.learner
    greedy = np.asarray(algorithm.predict(learner.params, obs)).argmax(axis=-1)
    np.testing.assert_array_equal(actions, greedy)
    assert isinstance(actions, np.ndarray) and len(set(actions.tolist())) == 2
    for one in range(4):
        single = policy.predict(obs[one])
        assert isinstance(single, np.int64)
        assert single == actions[one]
    assert policy.predict(obs[:1].astype(np.float64)).shape == (1,)


@pytest.mark.parametrize("shape", [(3,), (5, 3), (2, 5, 4), ()])
def test_policy_refuses_other_shapes(policy, shape):
    with pytest.raises(UserError, match=r"shape \(4,\)") as raised:
        policy.predict(np.zeros(shape))
    assert str(shape) in str(raised.value)


def test_reset_forgets_the_rows_that_it_is_told_whatever_their_type():
    policy = Policy(ppo_rnn.Trainer(ppo_rnn.Config(env_id="gymnax/CartPole-v1")), 0)
    policy.predict(np.ones((2, 4), np.float32))
    before = jax.tree.map(np.asarray, policy._core)
    policy.reset([1, 0])
    for now, then in zip(jax.tree.leaves(policy._core), jax.tree.leaves(before), strict=True):
        assert not now[0].any() and then.any(axis=1).all()
        np.testing.assert_array_equal(now[1], then[1])


def test_load_a_step_and_the_best(policy):
    folder, _ = finished_run()
    rows = read_metrics(folder / "metrics.csv")
    evaluation = {step: v for step, _, name, v in rows if name == "charts/evaluation_return"}
    assert policy.step == 4000
    assert load(folder, "best").step == max(evaluation, key=lambda s: (evaluation[s], s))
    assert load(str(folder), 3000).step == 3000
    with pytest.raises(UserError, match="latest or best, got 'first'"):
        load(folder, "first")


@pytest.mark.slow
def test_evaluate():
    folder, _ = finished_run()
    flags = [folder, "--episodes", 3, "--video"]
    ran = run_alone(*flags, program=("-m", "common.evaluate"), PYTHONIOENCODING="ascii")
    assert (ran.code, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert re.fullmatch(r"\d+\.\d+ \? \d+\.\d+ over 3 episodes, checkpoint 4000", lines[0])
    assert lines[1] == f"video: {folder}/videos/step_4000.gif"


def test_evaluate_the_best(capsys, tmp_path):
    folder = shutil.copytree(finished_run()[0], tmp_path / "run")
    flags = [folder, "--episodes", 2, "--checkpoint", "best"]
    ran = run_here(capsys, *flags, module="common.evaluate")
    best = load(folder, "best").step
    shown = rf"\d+\.\d+ ± \d+\.\d+ over 2 episodes, checkpoint {best}\n"
    assert ran.code == 0 and re.fullmatch(shown, ran.out)


DRAWING = {
    a2c: "gymnax/CartPole-v1",
    ppo: "gymnax/Pendulum-v1",
    ppo_rnn: "gymnax/CartPole-v1",
    impala: "gymnax/Pendulum-v1",
    sac: "gymnax/Pendulum-v1",
    sac_discrete: "gymnax/CartPole-v1",
}


@pytest.mark.parametrize("module", DRAWING, ids=lambda module: module.__name__)
def test_evaluation_draws_from_the_policy_if_it_is_told_to(module):
    """The mode is one action; draws of a new policy differ, and have its mean."""
    mode, drawn = (
        module.Trainer(module.Config(env_id=DRAWING[module], eval_stochastic=flag))
        for flag in (False, True)
    )
    assert module.Config().eval_stochastic is False
    obs = np.tile(np.float32(mode.state.env.obs[:1]), (500, 1))
    core = drawn.evaluator.initial_core(500)
    memory = Memory(core, np.ones(500, bool))
    learner, key = drawn.state.learner, jax.random.key(3)
    (one, _), (many, _) = (t.evaluator.act(learner, obs, key, memory) for t in (mode, drawn))
    assert np.ptp(one) < 1e-6 and one.shape == many.shape
    if DRAWING[module] == "gymnax/CartPole-v1":
        assert 150 < np.asarray(many).sum() < 350
    else:
        # Near 0, where a new policy's mean is; bounds ± 2.
        assert np.asarray(many).std() > 0.5 and abs(np.asarray(many).mean()) < 0.3
        assert np.abs(many).max() <= 2


def test_evaluate_draws_other_episodes_and_actions(capsys, tmp_path):
    trainer = a2c.Trainer(a2c.Config(env_id="gymnax/CartPole-v1", seed=4))
    save(trainer, tmp_path / "run")

    def evaluate(*flags):
        ran = run_here(capsys, tmp_path / "run", *flags, module="common.evaluate")
        assert (ran.code, ran.err) == (0, "")
        return ran.out

    plain, other, drawn = evaluate(), evaluate("--seed", 5), evaluate("--stochastic")
    assert len({plain, other, drawn}) == 3
    assert plain == evaluate("--seed", 4) and drawn == evaluate("--stochastic")
    changes = {"seed": 5, "eval_stochastic": True}
    assert asdict(load(tmp_path / "run", changes=changes).trainer.config) == (
        asdict(trainer.config) | changes
    )


def test_stochastic_where_there_is_nothing_to_draw_from(capsys, tmp_path):
    folder, _ = finished_run()
    ran = run_here(capsys, folder, "--stochastic", module="common.evaluate")
    assert ran.code == 2 and ran.out == ""
    assert ran.err == (
        "error: --stochastic: dqn explores by its --evaluation-epsilon, 0.0 in this run; leave it "
        "out\n"
    )
    save(td3.Trainer(td3.Config(env_id="gymnax/Pendulum-v1")), tmp_path / "run")
    ran = run_here(capsys, tmp_path / "run", "--stochastic", module="common.evaluate")
    assert ran.code == 2
    assert ran.err == "error: --stochastic: td3 has no policy to draw actions from; leave it out\n"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--max-steps", "0"], "--max-steps must be above 0, got 0"),
        (["--seed", "-1"], "--seed must be 0 or more, got -1"),
    ],
)
def test_bad_flags_of_evaluate(capsys, flags, words):
    ran = run_here(capsys, finished_run()[0], *flags, module="common.evaluate")
    assert ran.code == 2 and ran.err == f"error: {words}\n"


def test_changes_that_the_algorithm_does_not_know():
    with pytest.raises(UserError, match="no 'eval_stochastic' to change"):
        load(finished_run()[0], changes={"eval_stochastic": True})


def test_a_policy_is_the_code_that_trained_it(tmp_path):
    """The copy in the run folder counts, not what the algorithm's file has become."""
    folder = shutil.copytree(finished_run()[0], tmp_path / "run")
    code = (folder / "dqn.py").read_text()
    (folder / "dqn.py").write_text(code.replace("q_values.argmax(axis=-1))", "0 * explore)"))
    assert code != (folder / "dqn.py").read_text()
    obs = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    assert not load(folder).predict(obs).any()


# entries to change (None: to leave out), and what the line must hold
BAD_SAVED: dict[str, tuple[dict, list[str]]] = {
    "text for a number": (dict(gamma="high"), ["'gamma'", "'high'", "a number"]),
    "null": (dict(num_envs="null"), ["'num_envs'", "None", "a whole number"]),
    "list for a number": (dict(seed=[1]), ["'seed'", "[1]", "a whole number"]),
    "text for a list": (dict(env_kwargs="a=1"), ["'env_kwargs'", "'a=1'", "a list of words"]),
    "text for a count of seeds": (dict(num_seeds="2"), ["'num_seeds'", "'2'", "a whole number"]),
    "below its range": (dict(batch_size=-1), ["config.json", "--batch-size must be above 0"]),
    "unknown entry": (dict(gama=0.9), ["'gama'", "did you mean 'gamma'?"]),
    "no environment": (dict(env_id=None), ["lacks the entry 'env_id'"]),
    "no algorithm": (dict(algo=None), ["not a run folder"]),
    "number for a version": (dict(version=5), ["Quartet 5"]),
}


@pytest.mark.parametrize("name", BAD_SAVED)
def test_load_refuses_a_damaged_config(name, tmp_path):
    folder, (changes, words) = finished_run()[0], BAD_SAVED[name]
    saved = json.loads((folder / "config.json").read_text()) | changes
    saved = {
        k: None if v == "null" else v for k, v in saved.items() if v is not None or k not in changes
    }
    shutil.copyfile(folder / "dqn.py", tmp_path / "dqn.py")
    (tmp_path / "config.json").write_text(json.dumps(saved))
    with pytest.raises(UserError) as raised:
        load(tmp_path)
    assert not [word for word in [str(tmp_path), *words] if word not in str(raised.value)]


@pytest.mark.parametrize("code", ["raise RuntimeError('half')", "from common import no_such_name"])
def test_load_refuses_a_copy_that_cannot_be_imported(code, tmp_path):
    shutil.copyfile(finished_run()[0] / "config.json", tmp_path / "config.json")
    (tmp_path / "dqn.py").write_text(code)
    with pytest.raises(UserError, match="not a run folder"):
        load(tmp_path)


SPACES = {
    "discrete": spaces.Discrete(3, start=5),
    "multi_discrete": spaces.MultiDiscrete([2, 3], start=[1, -1]),
    "multi_binary": spaces.MultiBinary([2, 2]),
    "box": spaces.Box(np.float64([-1, 0]), np.float64([3, 0.5]), dtype=np.float64),
}


@pytest.mark.parametrize("name", SPACES)
def test_actions_are_what_the_environment_takes(name, monkeypatch):
    """One by one and in a batch, and those that evaluation plays in an environment."""
    obs_space, action_space = spaces.Box(-1, 1, (4,), np.float32), SPACES[name]
    env_id = f"LoadEcho{name.replace('_', '')}-v0"
    gym.register(env_id, partial(EchoEnv, obs_space, action_space))
    config = ppo.Config(env_id=env_id, num_envs=2, num_steps=8, total_timesteps=16)
    trainer = ppo.Trainer(replace(config, num_minibatches=1))
    policy, obs = Policy(trainer, 0), np.stack([obs_space.sample() for _ in range(8)])
    actions = policy.predict(obs)
    played = []
    monkeypatch.setattr(trainer.env.backend.stepper.envs, "step", played.append)
    act = trainer.agent.predict(trainer.state.learner, obs, jax.random.key(0))
    with pytest.raises(TypeError):
        trainer.env.backend.stepper.step(np.asarray(act))
    np.testing.assert_array_equal(actions, played[0])
    for one, several in zip(obs, actions, strict=True):
        action = policy.predict(one)
        assert action_space.contains(action) and action_space.contains(several)
        np.testing.assert_allclose(action, several, rtol=1e-6)
    trainer.env.close()
