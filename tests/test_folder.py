"""`common.save` and `common.load` around a trainer that is driven by hand."""

import contextlib
import errno
import json
import os
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from run_helpers import run_here

from algos import a2c, dqn, ppo
from common import load, save
from common.errors import UserError

from common.run.checkpoint import Checkpoints
from common.run.folder import hold

CONFIG = dqn.Config(
    env_id="gymnax/CartPole-v1",
    num_envs=4,
    buffer_size=400,
    batch_size=16,
    learning_starts=100,
    log_frequency=200,
    total_timesteps=600,
)


def train(trainer, to):
    """Drive a trainer by hand to an env step."""
    with contextlib.closing(trainer()) as training:
        for log_data in training:
            if log_data["sample_step"] == to and log_data["log_type"] == "train":
                return trainer
    raise AssertionError(f"step {to} was not reached")


def same(first, second):
    """Whether two states are equal to the bit."""
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return all(bool((x == y).all()) for x, y in pairs)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder saved at steps 200 and 400, and the trainer at 400."""
    folder = tmp_path_factory.mktemp("hand") / "runs" / "cartpole"
    trainer = dqn.Trainer(CONFIG)
    with contextlib.closing(trainer()) as training:
        for log_data in training:
            if log_data["log_type"] == "train":
                save(trainer, folder)
                if log_data["sample_step"] == 400:
                    break
    return folder, trainer


def test_a_saved_trainer_is_a_run_folder(saved):
    folder, trainer = saved
    config = json.loads((folder / "config.json").read_text())
    assert (config["algo"], config["num_seeds"], config["buffer_size"]) == ("dqn", 1, 400)
    assert (folder / "dqn.py").read_bytes() == Path(dqn.__file__).read_bytes()
    assert Checkpoints(folder / "checkpoints").steps() == [200, 400]
    assert {path.name for path in folder.iterdir()} == {
        *("config.json", "dqn.py", "checkpoints", "lock"),
    }
    policy = load(folder)
    assert policy.step == 400 and same(policy.trainer.state, trainer.state)
    assert load(str(folder), 200).step == 200
    log_data = policy.trainer.evaluate()
    assert log_data["logs"] == trainer.evaluate(20)["logs"]


def test_a_loaded_trainer_goes_on_as_if_nothing_had_happened(saved, tmp_path):
    folder, _ = saved
    whole = train(dqn.Trainer(CONFIG), 600)
    trainer = load(folder, 200).trainer
    steps = [log_data["sample_step"] for log_data in trainer()]
    assert steps == [400, 400, 600, 600]
    assert same(trainer.state, whole.state)
    save(trainer, tmp_path / "copy")
    further = load(tmp_path / "copy", changes={"total_timesteps": 800}).trainer
    assert [log_data["sample_step"] for log_data in further()] == [800, 800]
    # A step more, and the new total, in the folder that it came from.
    save(further, tmp_path / "copy")
    assert Checkpoints(tmp_path / "copy" / "checkpoints").steps() == [600, 800]
    assert json.loads((tmp_path / "copy" / "config.json").read_text())["total_timesteps"] == 800


def test_environments_outside_jax_start_new_episodes(tmp_path):
    config = ppo.Config(num_envs=2, num_steps=16, log_frequency=64, total_timesteps=192)
    trainer = train(ppo.Trainer(config), 64)
    save(trainer, tmp_path / "run")
    policy = load(tmp_path / "run")
    first_obs = np.asarray(ppo.Trainer(config).state.env.obs)
    assert (np.asarray(policy.trainer.state.env.obs) != first_obs).any()
    steps = [log_data["sample_step"] for log_data in policy.trainer()]
    assert steps == [128, 128, 192, 192]
    assert policy.predict(first_obs).shape == (2,)
    save(policy.trainer, tmp_path / "run")
    assert load(tmp_path / "run").step == 192


def test_programs_take_the_folder(saved, capsys, tmp_path):
    folder, _ = saved
    ran = run_here(capsys, folder, "--episodes", 2, module="common.evaluate")
    assert re.fullmatch(r"\d+\.\d ± \d+\.\d+ over 2 episodes, checkpoint 400\n", ran.out), ran
    out = tmp_path / "policy.stablehlo"
    assert run_here(capsys, folder, "--out", out, module="common.export").code == 0
    trainer = load(folder).trainer
    save(trainer, tmp_path / "run")
    ran = run_here(capsys, "--resume", tmp_path / "run", "--eval-episodes", 1)
    assert (ran.code, ran.err) == (0, "") and "resuming at step 400" in ran.out
    assert load(tmp_path / "run").step == 600


def test_many_seeds_are_saved_as_such(tmp_path):
    trainer = dqn.Trainer(CONFIG)
    trainer.evaluator.num_seeds = 2  # as `batch_seeds` has it
    save(trainer, tmp_path / "run")
    assert json.loads((tmp_path / "run" / "config.json").read_text())["num_seeds"] == 2
    refused(dqn.Trainer(CONFIG), tmp_path / "run", "--num-seeds 1 differs from 2")
    with pytest.raises(UserError, match=r"holds 2 seeds; give one of its folders, .*seed_1"):
        load(tmp_path / "run")


def test_a_resumed_run_may_change_how_evaluation_draws(tmp_path, capsys):
    folder = tmp_path / "run"
    save(a2c.Trainer(a2c.Config(env_id=CONFIG.env_id, total_timesteps=160)), folder)
    flags = ["--resume", folder, "--eval-stochastic", "--eval-episodes", 1, "--capture-video"]
    ran = run_here(capsys, *flags, module="algos.a2c")
    assert (ran.code, ran.err) == (0, "")
    policy = load(folder)
    assert policy.step == 160 and policy.trainer.config.eval_stochastic
    # The run is over; its video is tried all the same.
    ran = run_here(capsys, *flags[:2], "--capture-video", "--eval-episodes", 0, module="algos.a2c")
    assert ran.code == 0 and "all 160 steps are done" in ran.out and "no video: " in ran.out


def refused(trainer, folder, *words):
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} if folder.is_dir() else 0
    with pytest.raises(UserError) as raised:
        save(trainer, folder)
    text = str(raised.value)
    assert all(word in text for word in words) and "\n" not in text, text
    if before != 0:
        assert before == {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def full_disk(path, content):
    path.touch()
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_folder_that_holds_something_else(saved, tmp_path):
    folder, trainer = saved
    refused(trainer, folder, "has reached step 400 and the trainer is at 400", "another folder")
    refused(dqn.Trainer(CONFIG), folder, "has reached step 400 and the trainer is at 0")
    other = dqn.Trainer(dqn.Config(**vars(CONFIG) | {"gamma": 0.5}))
    refused(other, folder, "--gamma 0.5 differs from 0.99", "another folder")
    refused(
        a2c.Trainer(a2c.Config(env_id=CONFIG.env_id)),
        folder,
        "by dqn, not by a2c",
    )
    (tmp_path / "notes.txt").write_text("mine")
    refused(trainer, tmp_path, "holds other files than a run's")
    (tmp_path / "config.json").write_text("[1]")
    refused(trainer, tmp_path, "holds other files than a run's")


def test_a_folder_that_cannot_be_written(saved, tmp_path):
    _, trainer = saved
    (tmp_path / "file").touch()
    refused(trainer, tmp_path / "file", "cannot save to", "give a folder")
    refused(trainer, tmp_path / "file" / "below", "cannot save to")
    (tmp_path / "held").mkdir()
    save(trainer, tmp_path / "held")  # an empty folder is as good as none
    later = train(load(tmp_path / "held").trainer, 600)
    with hold(tmp_path / "held"):
        refused(later, tmp_path / "held", "in use by another process")


def test_a_save_that_failed_can_be_tried_again(saved, tmp_path, monkeypatch):
    _, trainer = saved
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full_disk)
        refused(trainer, tmp_path / "run", "cannot save to", "No space left")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["lock"]
    with monkeypatch.context() as patch:  # behind what orbax does at one stroke
        patch.setattr("common.run.checkpoint._checksums", lambda folder: full_disk(folder, ""))
        with pytest.raises(UserError, match="No space left"):
            save(trainer, tmp_path / "run")
    save(trainer, tmp_path / "run")
    assert load(tmp_path / "run").step == 400
    Checkpoints(tmp_path / "run" / "checkpoints").check(400)
    refused(trainer, tmp_path / "run", "has reached step 400 and the trainer is at 400")


def test_a_copy_of_the_code_is_never_half(saved, tmp_path, monkeypatch):
    _, trainer = saved
    save(trainer, tmp_path / "run")
    whole = (tmp_path / "run" / "dqn.py").read_bytes()
    later = train(load(tmp_path / "run").trainer, 600)

    write = Path.write_bytes

    def half_a_copy(path, content):
        write(path, content[:100] if content == whole else content)
        if content == whole:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", half_a_copy)
    refused(later, tmp_path / "run", "cannot save to", "No space left")
    assert (tmp_path / "run" / "dqn.py").read_bytes() == whole


def test_folders_whose_checkpoints_could_not_be_read(saved, tmp_path):
    for name, found in (("run[2]", "[2]"), ("a\\b", "\\"), ("**", "**"), ("gs:", "gs:")):
        refused(saved[1], tmp_path / name, f"has {found} in its whole path", "give a folder")
    for name in ("run?", "run*", "a[b"):
        save(saved[1], tmp_path / name)
        assert load(tmp_path / name).step == 400
    with pytest.raises(UserError, match=r"cannot save to .* File name too long"):
        save(saved[1], tmp_path / ("n" * 300))


def test_a_folder_that_cannot_be_locked(saved, tmp_path):
    (tmp_path / "lock").mkdir()
    refused(saved[1], tmp_path, f"cannot lock {tmp_path}", "Is a directory", "file locks")


def test_code_that_stands_in_no_file(saved, tmp_path):
    _, trainer = saved
    scope = {}
    exec(compile("class Typed:\n    def __call__(self): ...", "<cell>", "exec"), scope)
    typed = scope["Typed"]()
    typed.state = trainer.state
    refused(typed, tmp_path / "run", "Typed stands in no file")
    assert not (tmp_path / "run").exists()


def test_arrays_that_an_interruption_took(tmp_path):
    trainer = dqn.Trainer(CONFIG)
    jax.tree.leaves(trainer.state.learner)[0].delete()
    refused(trainer, tmp_path / "run", "has lost its arrays")
