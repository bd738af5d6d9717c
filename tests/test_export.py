"""Policies as StableHLO: the actions of `Policy.predict`, without this project."""

import re
import sys
from functools import partial
from pathlib import Path

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from gymnasium import spaces
from jax import export
from run_helpers import finished_run, run_alone, run_here
from toy_envs import EchoEnv

from algos import a2c, dqn, ppo, ppo_rnn, sac, sac_discrete
from common import load
from common.envs.env import to_space
from common.export import export_policy, from_start
from common.networks import Encoder, Memory

from common.run.load import Policy

pytestmark = pytest.mark.filterwarnings("ignore:.*found in sys.modules")
QUICKSTART = Path(__file__).parents[1] / "docs" / "quickstart.md"
WITHOUT_PROJECT = "import sys; sys.modules |= {'common': None, 'algos': None}\n"
USE = '\nnp.save("action.npy", np.asarray(policy.call(np.load("obs.npy"))))\n'


def make_policy(module, env_id, **flags):
    """A policy of new parameters; where observations are normalised, by other figures than 0, 1."""
    trainer = module.Trainer(module.Config(env_id=env_id, **flags))
    learner = trainer.state.learner
    if getattr(trainer.config, "normalize_obs", False):
        stats = learner.normalizer.obs
        stats = stats._replace(mean=stats.mean + 0.5, variance=stats.variance * 4)
        learner = learner._replace(normalizer=learner.normalizer._replace(obs=stats))
    trainer.state = trainer.state._replace(learner=learner)
    return Policy(trainer, 0)


def reloaded(policy):
    words, exported = export_policy(policy)
    assert exported.platforms == ("cpu", "cuda")
    return words, export.deserialize(exported.serialize())


def random_obs(policy, rows):
    shape = policy.trainer.env.observation_space.shape
    return np.random.default_rng(0).normal(size=(rows, *shape)).astype(np.float32)


def test_the_file_of_a_run_folder_loads_without_this_project(tmp_path, capsys):
    """With the lines that the documentation gives."""
    path = tmp_path / "policy.stablehlo"
    ran = run_here(capsys, finished_run()[0], "--out", path, module="common.export")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == f"{path}: (obs) -> action for cpu and cuda, checkpoint 4000\n"

    section = QUICKSTART.read_text().partition("## Export\n")[2]
    (snippet,) = re.findall(r"```python\n(.*?)```", section.partition("\n## ")[0], re.DOTALL)
    policy = load(finished_run()[0])
    obs = random_obs(policy, 64) * 5
    np.save(tmp_path / "obs.npy", obs)
    (tmp_path / "use.py").write_text(f"{WITHOUT_PROJECT}{snippet}{USE}")
    here = f"import os, runpy; os.chdir({str(tmp_path)!r}); runpy.run_path('use.py')"
    ran = run_alone(program=("-I", "-c", here))
    assert ran.code == 0, ran.err
    actions = np.load(tmp_path / "action.npy")
    np.testing.assert_array_equal(actions, policy.predict(obs))
    assert len(set(actions.tolist())) == 2


@pytest.mark.parametrize(
    ("module", "flags", "sizes"), [(ppo, {"normalize_obs": True}, (7, 1)), (sac, {}, (7,))]
)
def test_continuous_actions(module, flags, sizes):
    policy = make_policy(module, "gymnax/Pendulum-v1", **flags)
    words, exported = reloaded(policy)
    assert words == "(obs) -> action"
    for rows in sizes:
        obs = random_obs(policy, rows)
        action = np.asarray(exported.call(obs))
        assert action.shape == (rows, 1)
        np.testing.assert_allclose(action, policy.predict(obs), atol=1e-6, rtol=1e-6)


def test_actions_are_counted_from_the_start_of_their_space():
    space = spaces.Dict(
        a=spaces.Discrete(3, start=-1),
        b=spaces.Tuple((spaces.MultiDiscrete([2, 2], start=[1, 5]), spaces.MultiBinary(2))),
    )
    action = {"a": np.int32([0, 2]), "b": (np.int32([[0, 1], [1, 0]]), np.int32([[0, 1], [1, 1]]))}
    given, expected = from_start(space, action), to_space(space, action)
    jax.tree.map(np.testing.assert_array_equal, given, expected)
    np.testing.assert_array_equal(given["a"], [-1, 1])


def test_an_exported_policy_counts_actions_as_predict_does():
    obs_space, action_space = spaces.Box(-1, 1, (4,), np.float32), spaces.Discrete(3, start=5)
    gym.register("ExportEcho-v0", partial(EchoEnv, obs_space, action_space))
    policy = make_policy(dqn, "ExportEcho-v0")
    obs = random_obs(policy, 20)
    action = np.asarray(reloaded(policy)[1].call(obs))
    assert action.min() >= 5
    np.testing.assert_array_equal(action, policy.predict(obs))


def test_a_policy_that_draws_takes_a_seed():
    policy = make_policy(dqn, "gymnax/CartPole-v1", evaluation_epsilon=0.5)
    words, exported = reloaded(policy)
    assert words == "(obs, seed) -> action"
    obs, learner = random_obs(policy, 100), policy.trainer.state.learner
    predict = jax.jit(policy.trainer.agent.predict)
    actions = [np.asarray(exported.call(obs, np.uint32(seed))) for seed in (1, 2)]
    assert (actions[0] != actions[1]).any()
    for seed, action in zip((1, 2), actions, strict=True):
        expected = predict(learner, obs, jax.random.key(seed))
        np.testing.assert_array_equal(action, expected)


@pytest.mark.parametrize("module", [a2c, ppo, sac, sac_discrete])
def test_drawn_actions_are_those_of_the_same_seed(module):
    continuous = module in (ppo, sac)
    env_id = "gymnax/Pendulum-v1" if continuous else "gymnax/CartPole-v1"
    policy = make_policy(module, env_id, eval_stochastic=True)
    words, exported = reloaded(policy)
    assert words == "(obs, seed) -> action"
    obs, learner = random_obs(policy, 100), policy.trainer.state.learner
    actions = [np.asarray(exported.call(obs, np.uint32(seed))) for seed in (1, 2)]
    assert (actions[0] != actions[1]).any()
    predict = jax.jit(policy.trainer.agent.predict)
    for seed, action in zip((1, 2), actions, strict=True):
        expected = predict(learner, obs, jax.random.key(seed))
        np.testing.assert_allclose(action, expected, atol=1e-6)


def test_a_policy_that_draws_and_remembers():
    policy = make_policy(ppo_rnn, "gymnax/CartPole-v1", eval_stochastic=True)
    words, exported = reloaded(policy)
    assert words == "(obs, core, valid, seed) -> (action, core)"
    obs, core = random_obs(policy, 100), policy.trainer.evaluator.initial_core(100)
    valid = np.ones(100, bool)
    drawn = [exported.call(obs, core, valid, np.uint32(seed)) for seed in (1, 2)]
    assert (np.asarray(drawn[0][0]) != np.asarray(drawn[1][0])).any()
    jax.tree.map(np.testing.assert_array_equal, drawn[0][1], drawn[1][1])


def test_a_policy_that_remembers_takes_and_gives_its_memory():
    policy = make_policy(ppo_rnn, "gymnax/CartPole-v1")
    words, exported = reloaded(policy)
    assert words == "(obs, core, valid) -> (action, core)"
    evaluator, learner = policy.trainer.evaluator, policy.trainer.state.learner
    obs, core = random_obs(policy, 5), evaluator.initial_core(5)
    act = jax.jit(evaluator.act)
    for valid in (np.ones(5, bool), np.arange(5) != 2):
        expected = act(learner, obs, jax.random.key(0), Memory(core, valid))
        action, core = exported.call(obs, core, valid)
        np.testing.assert_array_equal(action, expected[0])
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), core, expected[1])
    rows = jax.tree.leaves(core)[0].any(axis=1)
    assert rows.tolist() == [True, True, False, True, True]


def test_images_and_dicts_of_any_batch_size():
    image = spaces.Box(0, 255, (36, 36, 3), np.uint8)
    space = spaces.Dict({"image": image, "kind": spaces.Discrete(3), "x": spaces.Box(-1, 1, (2,))})
    encoder = Encoder(space, nnx.Rngs(0))
    (size,) = export.symbolic_shape("B")
    space.seed(0)
    rows = [space.sample() for _ in range(11)]  # more than a chunk of the layers for a CPU
    obs = jax.tree.map(lambda *x: jnp.stack(x), *rows)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype), obs)
    exported = export.export(jax.jit(encoder), platforms=("cpu", "cuda"))(like)
    np.testing.assert_allclose(exported.call(obs), jax.jit(encoder)(obs), atol=1e-5)


@pytest.mark.parametrize(
    ("args", "part"),
    [
        ([], "give a run folder"),
        (["nowhere"], "nowhere is not a run folder"),
        (["run"], "run is not a run folder"),
        (["run", "--checkpoint", "first"], "--checkpoint must be a step, latest or best"),
        (["run", "--out", "nowhere/a"], "--out nowhere/a cannot be written"),
        (["run", "--out", "run"], "--out run cannot be written"),
        (["run", "--out", "n" * 300], "nnn cannot be written"),
    ],
)
def test_bad_input_is_one_line_and_creates_nothing(tmp_path, capsys, monkeypatch, args, part):
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    ran = run_here(capsys, *args, module="common.export")
    assert ran.code == 2 and part in ran.err and ran.err.count("\n") == 1
    assert [path.name for path in tmp_path.rglob("*")] == ["run"]


def test_without_flatbuffers_the_extra_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "flatbuffers", None)
    ran = run_here(capsys, tmp_path, module="common.export")
    assert ran.code == 2 and "pip install -e '.[export]'" in ran.err
