"""Checkpoints: which are kept, how a run goes on after a signal, a kill, a fault or a full disk."""

import contextlib
import errno
import fcntl
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from run_helpers import (
    DQN,
    SHORT,
    Fork,
    environment,
    finished_run,
    run_alone,
    run_forked,
    run_here,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from algos import impala, ppo_rnn, r2d2
from algos.dqn import Config, Trainer
from common import __version__, load
from common.envs.env import NOT_FINITE
from common.errors import UserError

from common.run.checkpoint import (
    Checkpoints,
    checkpointer,
    go_on_from,
    restore_state,
    resume,
    save_checkpoint,
    write_atomically,
)
from common.run.logger import logger, read_metrics
from common.run.seeds import batch_seeds

TOTAL = 16_000
LIFE_FLAGS = [
    *("--env-id", "gymnax/CartPole-v1", "--total-timesteps", str(TOTAL)),
    *("--learning-starts", "1000", "--log-frequency", "400", "--checkpoint-frequency", "400"),
    *("--eval-frequency", "0", "--eval-episodes", "2"),
]


def wait_for(condition, process: subprocess.Popen | Fork, seconds: float = 120) -> None:
    """Poll quickly, so that short moments such as a save are not missed."""
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.0005)


def rows_of(folder: Path) -> list[tuple[int, str, float]]:
    """metrics.csv without what the clock decides."""
    rows = read_metrics(folder / "metrics.csv")
    return [(step, name, value) for step, _, name, value in rows if name != "charts/SPS"]


def last_step(folder: Path) -> int:
    with contextlib.suppress(OSError, IndexError):
        return read_metrics(folder / "metrics.csv")[-1][0]
    return 0


def checkpoint_steps(folder: Path) -> list[int]:
    checkpoints = folder / "checkpoints"
    return Checkpoints(checkpoints).steps() if checkpoints.is_dir() else []


def the_run(runs: Path) -> Path | None:
    folders = list(runs.iterdir()) if runs.is_dir() else []
    assert len(folders) <= 1
    return folders[0] if folders else None


def assert_equal(first: Any, second: Any) -> None:
    """Equal to the bit, keys included; the classes may come from two copies of the algorithm."""
    flat, other = jax.tree.leaves(first), jax.tree.leaves(second)
    for x, y in zip(flat, other, strict=True):
        np.testing.assert_array_equal(raw(x), raw(y))


def raw(x: Any) -> np.ndarray:
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)


def tensorboard_steps(folder: Path, tag: str) -> list[int]:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return [event.step for event in events.Scalars(tag)]


@pytest.mark.slow
def test_killed_at_ten_moments_the_run_ends_as_if_nothing_had_happened(tmp_path):
    rng, runs = random.Random(3), tmp_path / "runs"
    reference = Fork(*LIFE_FLAGS, "--runs-dir", tmp_path / "reference")
    _, err = reference.communicate()
    assert reference.returncode == 0, err
    flags, killed_in_a_save = [*LIFE_FLAGS, "--runs-dir", runs], 0
    moments = ["early"] * 2 + ["between log points"] * 3 + ["save"] * 5 + ["SIGTERM"]
    for moment in rng.sample(moments, len(moments)):
        life = Fork(*flags)
        killed_in_a_save += kill_at(moment, life, runs, rng)
        folder = the_run(runs)
        if folder and checkpoint_steps(folder):
            flags = ["--resume", folder]
        elif folder:
            shutil.rmtree(folder)  # killed before its first checkpoint: anew
    assert killed_in_a_save
    life = Fork(*flags)
    _, err = life.communicate()
    assert life.returncode == 0, err
    first, second = the_run(tmp_path / "reference"), the_run(runs)
    assert first and second
    assert rows_of(second) == rows_of(first)
    steps = [step for step, name, _ in rows_of(second) if name == "charts/epsilon"]
    assert steps == list(range(400, TOTAL + 1, 400))
    assert tensorboard_steps(second, "charts/epsilon") == steps
    assert_equal(load(second).trainer.state, load(first).trainer.state)


def kill_at(moment: str, life: Fork, runs: Path, rng: random.Random) -> bool:
    """End a life; say whether a save was under way."""
    before = last_step(folder) if (folder := the_run(runs)) else 0

    def progressed() -> bool:
        return (folder := the_run(runs)) is not None and last_step(folder) > before

    def saves() -> bool:
        return any(runs.glob("*/checkpoints/*tmp*"))

    if moment == "early":
        time.sleep(rng.uniform(0, 1.3))
    else:
        wait_for(progressed, life)
        wait_for(saves, life) if moment == "save" else time.sleep(rng.uniform(0, 0.15))
    killed = moment != "SIGTERM"
    life.send_signal(signal.SIGKILL if killed else signal.SIGTERM)
    out, err = life.communicate()
    if killed:
        assert life.returncode == -signal.SIGKILL, (out, err)
        return saves()
    folder = the_run(runs)
    assert life.returncode == 143 and folder and f"go on with --resume {folder}" in out and not err
    assert checkpoint_steps(folder)[-1] == last_step(folder)
    return False


@pytest.mark.slow
def test_signals_end_a_run_that_then_goes_on_with_new_episodes(tmp_path):
    runs, env = tmp_path / "runs", environment()
    flags = ["--total-timesteps", "200000", "--learning-starts", "1000", "--log-frequency", "2000"]
    flags += ["--eval-frequency", "0", "--eval-episodes", "2", "--runs-dir", str(runs)]
    flags += ["--track", "--wandb-mode", "offline"]
    stopped_at = 0
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        process = subprocess.Popen(
            [sys.executable, str(DQN), *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        goal = stopped_at + 6000
        wait_for(lambda goal=goal: (run := the_run(runs)) and last_step(run) >= goal, process)
        process.send_signal(number)
        out, err = process.communicate(timeout=120)
        folder = the_run(runs)
        assert folder and process.returncode == code, (out, err)
        assert "Traceback" not in err
        assert out.splitlines()[-1] == (
            f"stopped by {signal.Signals(number).name}; go on with --resume {folder}"
        )
        if stopped_at:
            assert f"resuming at step {stopped_at}: CartPole-v1 starts new episodes" in out
        stopped_at = last_step(folder)
        assert checkpoint_steps(folder)[-1] == stopped_at
        flags = ["--resume", str(folder)]
    steps = [step for step, name, _ in rows_of(folder) if name == "charts/epsilon"]
    assert steps == list(range(2000, stopped_at + 1, 2000))
    assert tensorboard_steps(folder, "charts/epsilon") == steps
    wandb_id = (folder / "wandb_id").read_text()
    offline = [path.name for path in (folder / "wandb").glob("offline-run-*")]
    assert len(offline) == 2 and all(name.endswith(wandb_id) for name in offline)


def test_ctrl_c_before_the_first_log_point_leaves_nothing(tmp_path):
    process = subprocess.Popen(
        [sys.executable, str(DQN), "--runs-dir", str(tmp_path / "runs"), "--capture-video"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    assert process.stdout
    assert process.stdout.readline().startswith("dqn on CartPole-v1")  # it compiles now
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert out == "stopped by SIGINT; nothing was learned yet\n"
    assert not err
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_ctrl_c_at_fifty_moments_of_the_first_six_seconds(tmp_path):
    """Making the environments, compiling, training and saving: none is torn."""

    def interrupted(moment: float) -> tuple[float, int | None, str, str]:
        run = Fork("--runs-dir", tmp_path / "runs")
        time.sleep(moment)
        run.send_signal(signal.SIGINT)
        out, err = run.communicate()
        return moment, run.returncode, out, err

    with ThreadPoolExecutor(4) as pool:
        ended = list(pool.map(interrupted, np.linspace(0.02, 6, 50)))
    for moment, code, out, err in ended:
        assert (moment, code, err) == (moment, 130, "")
        assert out.splitlines()[-1].startswith("stopped by SIGINT; ")


def test_the_second_ctrl_c_ends_the_run_at_once():
    code = (
        "import signal, time; from common.run.runner import _die, stop_signals\n"
        "with stop_signals(_die) as received:\n"
        "    signal.raise_signal(signal.SIGTERM); print(received, flush=True)\n"
        "    signal.raise_signal(signal.SIGINT); print('never')"
    )
    ran = run_alone(program=("-c", code))
    assert ran == (130, "[<Signals.SIGTERM: 15>]\n", "killed by SIGINT\n")


@pytest.mark.parametrize(
    ("before", "received"), [("SIG_DFL", "[<Signals.SIGHUP: 1>]"), ("SIG_IGN", "[]")]
)
def test_the_end_of_the_terminal_is_a_signal_unless_nohup_has_it_ignored(before, received):
    code = (
        "import signal; from common.run.runner import _die, stop_signals\n"
        f"signal.signal(signal.SIGHUP, signal.{before})\n"
        "with stop_signals(_die) as received:\n"
        "    signal.raise_signal(signal.SIGHUP); print(received)"
    )
    assert run_alone(program=("-c", code)) == (0, f"{received}\n", "")


def test_a_terminal_that_ends_may_say_so_twice():
    """Its shell and the kernel both do; standard error is gone by then."""
    code = (
        "import os, signal; from common.run.runner import _die, stop_signals\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
        "with stop_signals(_die) as received:\n"
        "    for _ in range(3): signal.raise_signal(signal.SIGHUP)\n"
        "    print(received, flush=True); os.close(2)\n"
        "    signal.raise_signal(signal.SIGTERM); print('never')"
    )
    assert run_alone(program=("-c", code)) == (143, "[<Signals.SIGHUP: 1>]\n", "")


def test_ctrl_c_outside_of_training(capsys, tmp_path, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("algos.dqn.Trainer.__init__", interrupted)
    ran = run_here(capsys, "--runs-dir", tmp_path / "runs")
    assert (ran.code, ran.err) == (130, "stopped by SIGINT\n")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("fault", ["raise", "nan_reward", "exit", "interrupt"])
@pytest.mark.slow
def test_an_environment_that_fails_late_leaves_a_checkpoint(capsys, tmp_path, fault):
    flags = ["--env-module", "failing_envs", "--env-id", "Failing-v0", "--runs-dir", tmp_path]
    kwargs = ["--env-kwargs", f"fault={fault}", "at=300", f"once={tmp_path}/mended"]
    ran = run_here(capsys, *SHORT, *flags, *kwargs)
    (folder,) = tmp_path.glob("*__dqn__*")
    assert ran.code == 2 and ran.err.count("\n") == 1
    assert ran.err.startswith("error: Failing-v0") and f"run folder: {folder}" in ran.err
    assert last_step(folder) == 2000
    (step,) = checkpoint_steps(folder)
    assert 2000 < step <= 8 * 315
    ran = run_here(capsys, "--resume", folder)
    assert ran.code == 0, ran.err
    assert f"resuming at step {step}: Failing-v0 starts new episodes" in ran.out
    losses = [value for _, name, value in rows_of(folder) if name == "losses/td_loss"]
    assert last_step(folder) == 4000 and np.isfinite(losses).all()


def test_a_damaged_checkpoint_falls_back_to_the_one_before_it(tmp_path):
    folder = Path(shutil.copytree(finished_run()[0], tmp_path / "run"))
    assert checkpoint_steps(folder)[-2:] == [3000, 4000]
    damaged = sorted((folder / "checkpoints" / "4000").rglob("d/*"))[0]
    damaged.write_bytes(damaged.read_bytes()[:10])
    name = damaged.relative_to(folder / "checkpoints" / "4000").as_posix()
    flags = ["--total-timesteps", 5000, "--checkpoint-frequency", 0, "--keep-checkpoints", 1]
    ran = run_forked("--resume", folder, *flags)
    assert (ran.code, ran.err) == (0, "")
    line = f"warning: checkpoint 4000 of {folder} cannot be read ({name} is damaged); set aside"
    assert line in ran.out.splitlines()
    assert "resuming at step 3000" in ran.out
    assert {5000} <= set(checkpoint_steps(folder)) and 4000 not in checkpoint_steps(folder)
    assert len(list((folder / "checkpoints").glob("4000.damaged-*"))) == 1
    epsilon = {step: v for step, name, v in rows_of(folder) if name == "charts/epsilon"}
    assert list(epsilon) == [1000, 2000, 3000, 4000, 5000]
    assert epsilon[4000] == pytest.approx(0.05)
    names = [(step, name) for step, name, _ in rows_of(folder)]
    assert len(names) == len(set(names))
    # The next --resume needs no flag to know the new end.
    assert json.loads((folder / "config.json").read_text())["total_timesteps"] == 5000
    assert json.loads((folder / "result.json").read_text())["steps"] == 5000


def test_a_flipped_byte_is_never_restored(tmp_path, capsys):
    """One byte of every file of the newest checkpoint in turn: load takes the one before."""
    folder = Path(shutil.copytree(finished_run()[0], tmp_path / "run"))
    newest, rng = folder / "checkpoints" / "4000", random.Random(0)
    files = [path for path in newest.rglob("*") if path.is_file()]
    assert {"checksums.json", "metrics", "_METADATA", "manifest.ocdbt"} <= {f.name for f in files}
    for path in files:
        content = path.read_bytes()
        place = rng.randrange(len(content))
        flipped = bytes([content[place] ^ (1 << rng.randrange(8))])
        path.write_bytes(content[:place] + flipped + content[place + 1 :])
        with pytest.raises(ValueError, match="is damaged"):
            Checkpoints(folder / "checkpoints").check(4000)
        path.write_bytes(content)
    Checkpoints(folder / "checkpoints").check(4000)
    path.write_bytes(b"")
    capsys.readouterr()
    assert load(folder).step == 3000
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1 and said[0].startswith(f"warning: checkpoint 4000 of {folder} cannot be")


def test_files_that_vanish_or_appear_are_noticed(tmp_path):
    folder = Path(shutil.copytree(finished_run()[0], tmp_path / "run")) / "checkpoints"
    (folder / "4000" / "default" / "more").write_text("x")
    with pytest.raises(ValueError, match="default/more is damaged"):
        Checkpoints(folder).check(4000)
    (folder / "4000" / "default" / "more").rename(folder / "4000" / ".DS_Store")
    (folder / "4000" / "default" / ".hidden").mkdir()
    (folder / "4000" / "default" / ".hidden" / "more").touch()
    Checkpoints(folder).check(4000)  # hidden files are not orbax's
    (folder / "4000" / "metrics" / "metrics").unlink()
    with pytest.raises(ValueError, match="metrics/metrics is damaged"):
        Checkpoints(folder).check(4000)
    # At 3000 there was no evaluation, and 2000 is kept if it had the better one.
    best = Checkpoints(folder).best()
    assert best and best[0] == 2000 if 2000 in Checkpoints(folder).steps() else best is None


def test_a_save_that_failed_at_its_checksums_can_be_tried_again(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path / "c", keep=2)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr("common.run.checkpoint.write_atomically", no_space)
        checkpoints.save(10, {"w": jnp.ones(3)}, None)
    checkpoints.save(10, {"w": jnp.ones(3)}, None)
    assert (tmp_path / "c" / "10" / "checksums.json").exists() and checkpoints.steps() == [10]
    checkpoints.check(10)


def test_a_step_that_was_written_is_not_written_again(tmp_path):
    """Else another run that is driven by hand in that folder would lose what it learned."""
    checkpoints = Checkpoints(tmp_path / "c", keep=2)
    checkpoints.save(10, {"w": jnp.ones(3)}, None)
    with pytest.raises(Exception, match="already exists"):
        checkpoints.save(10, {"w": jnp.zeros(3)}, None)
    assert checkpoints.restore(10, {"w": jnp.zeros(3)})["w"].tolist() == [1, 1, 1]


def test_what_a_failed_save_left_over_does_not_fill_the_disk(tmp_path):
    left_over = tmp_path / "c" / "10.orbax-checkpoint-tmp" / "default"
    left_over.mkdir(parents=True)
    Checkpoints(tmp_path / "c", keep=2).save(20, {"w": jnp.ones(3)}, None)
    assert not left_over.parent.exists()


def no_space(*args):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_no_whole_checkpoint_is_one_line(tmp_path):
    folder = Path(shutil.copytree(finished_run()[0], tmp_path / "run"))
    for step in checkpoint_steps(folder):
        (folder / "checkpoints" / str(step) / "checksums.json").write_text("{")
    ran = run_forked("--resume", folder, "--total-timesteps", 5000)
    assert ran.code == 2 and ran.err.count("\n") == 1
    assert f"no checkpoint of {folder} can be restored: all are damaged (of 4000, " in ran.err
    assert checkpoint_steps(folder)[-2:] == [3000, 4000]


def test_a_missing_latest_checkpoint_is_named(tmp_path, capsys):
    folder = Path(shutil.copytree(finished_run()[0], tmp_path / "run"))
    shutil.rmtree(folder / "checkpoints" / "4000")
    capsys.readouterr()
    assert load(folder).step == 3000
    line = f"warning: checkpoint 4000 of {folder}, the last one, is missing\n"
    assert capsys.readouterr().out == line


def test_metrics_csv_with_anything_in_it(tmp_path):
    path = tmp_path / "metrics.csv"
    good = "step,seconds,name,value\n100,1.5,charts/SPS,3.0\n"
    bad = b"100,\xff\xfe,x,1\n" + b'200,1,"' + b"a" * 200_000 + b'",1\n\x00\n300,1\n"\n'
    path.write_bytes(good.encode() + bad + b"400,2.0,charts/SPS,4.0\n")
    assert read_metrics(path)[0] == (100, 1.5, "charts/SPS", 3.0)
    assert read_metrics(path)[-1] == (400, 2.0, "charts/SPS", 4.0)
    assert len(read_metrics(path)) <= 3


def test_a_run_folder_in_use_is_refused(tmp_path):
    folder = Path(shutil.copytree(finished_run()[0], tmp_path / "run"))
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ran = run_forked("--resume", folder, "--total-timesteps", 5000)
    line = f"error: {folder} is in use by another process; wait until it ends, or stop it\n"
    assert ran == (2, "", line)
    assert checkpoint_steps(folder)[-1] == 4000


def test_resuming_a_finished_run_says_so(tmp_path):
    folder = Path(shutil.copytree(finished_run()[0], tmp_path / "run"))
    ran = run_forked("--resume", folder)
    assert (ran.code, ran.err) == (0, "")
    assert "all 4,000 steps are done; --total-timesteps above that trains on" in ran.out
    ran = run_forked("--resume", folder, "--total-timesteps", 2000)
    line = f"error: --total-timesteps 2000 is below step 4000, which {folder} has reached; give at "
    assert ran == (2, "", f"{line}least that\n")


def test_a_run_folder_of_an_earlier_release(tmp_path):
    # 0.1.0 wrote no version, and its files import modules that have moved since.
    folder = Path(shutil.copytree(finished_run()[0], tmp_path / "run"))
    flags = json.loads((folder / "config.json").read_text())
    assert flags.pop("version") == __version__
    (folder / "config.json").write_text(json.dumps(flags))
    (folder / "dqn.py").write_text("from common.runner import run\n")
    line = (
        rf"^{folder} was written by Quartet 0\.1\.0, whose dqn\.py this release, "
        rf"{re.escape(__version__)}, cannot run; install that release, or train on with --resume"
    )
    with pytest.raises(UserError, match=line):
        load(folder)
    ran = run_forked("--resume", folder, "--total-timesteps", 5000)
    assert (ran.code, ran.err) == (0, "")
    assert "resuming at step 4000" in ran.out
    assert json.loads((folder / "config.json").read_text())["version"] == __version__
    assert (folder / "dqn.py").read_text() == DQN.read_text()
    assert load(folder).step == 5000


def test_replay_does_not_join_the_rows_before_and_after():
    folder, said = finished_run()[0], []
    trainer = Trainer(Config(**SHORT_CONFIG))
    first_obs = np.asarray(trainer.state.env.obs)
    resume(
        trainer, Path(shutil.copytree(folder, folder.parent / "seam")) / "checkpoints", said.append
    )
    saved, _ = restore_state(
        Trainer(Config(**SHORT_CONFIG)), folder / "checkpoints", None, said.append
    )
    state = trainer.state
    assert said == ["resuming at step 4000: CartPole-v1 starts new episodes"]
    newest = int(saved.replay.position) - 1
    assert saved.replay.storage.valid[newest].any()
    assert not state.replay.storage.valid[newest].any()
    assert_equal(state.learner, saved.learner)
    assert_equal(state.key, jax.random.split(saved.key)[1])
    assert not np.array_equal(first_obs, np.asarray(state.env.obs))  # other episodes than at first
    trainer.env.close()


SHORT_CONFIG: dict[str, Any] = dict(total_timesteps=4000, learning_starts=1000, log_frequency=1000)


@pytest.mark.parametrize(
    ("env_id", "backend"),
    [("CartPole-v1", "envpool"), ("CartPole-v1", "gymnasium"), ("gymnax/CartPole-v1", "jax")],
)
@pytest.mark.slow
def test_a_seed_decides_everything(env_id, backend):
    def train(seed: int) -> Any:
        config = Config(env_id=env_id, env_backend=backend, seed=seed, **SHORT_CONFIG)
        trainer = Trainer(config)
        logs = [(d["sample_step"], d["log_type"]) for d in trainer()]
        assert logs == [(s, t) for s in (1000, 2000, 3000, 4000) for t in ("collect", "train")]
        return trainer.state

    first, again, other = train(1), train(1), train(2)
    assert_equal(again.learner, first.learner)
    assert_equal(again.replay, first.replay)
    assert_equal(again.key, first.key)
    for x, y in (
        (first.learner.params["head"]["kernel"], other.learner.params["head"]["kernel"]),
        (first.replay.storage.obs, other.replay.storage.obs),
        (first.replay.storage.action, other.replay.storage.action),
    ):
        assert not np.array_equal(x, y)


class FakeState(NamedTuple):
    """A TrainState in small."""

    learner: Any
    env: Any
    step: jax.Array


class FakeTrainer:
    """Logs the given returns, one every 100 steps."""

    def __init__(self, returns: list[float | None], restorable: bool = True) -> None:
        self.returns = returns
        self.env = type("FakeEnv", (), {"restorable": restorable})
        self.state = FakeState({"w": jnp.zeros(3)}, {"obs": jnp.ones(2)}, jnp.int32(0))

    def __call__(self):
        for episode_return in self.returns:
            step = self.state.step + 100
            w = jnp.full(3, episode_return or 0.0)
            self.state = self.state._replace(learner={"w": w}, step=step)
            known = episode_return is not None
            step, logs = int(step), {"charts/episodic_return": episode_return} if known else {}
            yield {"log_type": "collect", "sample_step": step, "logs": logs}
            yield {"log_type": "train", "sample_step": step, "logs": {}}


def saved_by(folder: Path, trainer: FakeTrainer, frequency: int = 100, keep: int = 2) -> Any:
    """The decorated generator of a fake trainer, and what it says."""
    said: list[str] = []
    decorate = checkpointer(lambda: folder, frequency, keep, "charts/episodic_return", said.append)
    return decorate(FakeTrainer.__call__)(trainer), said


def test_the_last_ones_and_the_best_are_kept(tmp_path):
    trainer = FakeTrainer([1, 9, 3, 4, 5, 2])
    generator, _ = saved_by(tmp_path / "c", trainer)
    list(generator)
    checkpoints = Checkpoints(tmp_path / "c")
    assert checkpoints.steps() == [200, 500, 600]
    assert checkpoints.best()[0] == 200
    best = checkpoints.restore(200, trainer.state)
    assert isinstance(best, FakeState) and best.learner["w"].tolist() == [9, 9, 9]


def test_a_step_without_a_return_has_none_of_another_step(tmp_path):
    list(saved_by(tmp_path / "c", FakeTrainer([5, None, None]), keep=3)[0])
    returns = tmp_path.glob("c/*/metrics/metrics")
    assert [path.parts[-3] for path in returns] == ["100"]


def test_what_an_interrupted_program_took_hides_no_error(tmp_path):
    """The arrays handed to it are gone: the error that ended it is raised, and nothing is saved."""
    trainer = FakeTrainer([1, 2, 3])
    generator, said = saved_by(tmp_path / "c", trainer, frequency=0)
    next(generator), next(generator)
    trainer.state.learner["w"].delete()
    with pytest.raises(ZeroDivisionError):
        generator.throw(ZeroDivisionError)
    assert not said and not (tmp_path / "c").exists()


def test_a_later_checkpoint_that_cannot_be_read_is_set_aside(tmp_path):
    """Else the next resume might take it, although training went on from the one before."""
    trainer = Trainer(Config(**SHORT_CONFIG))
    folder = tmp_path / "run" / "checkpoints"
    for step in (100, 200):
        trainer.state = trainer.state._replace(step=jnp.int32(step))
        save_checkpoint(folder, 9, trainer, None)
    Checkpoints(folder, 9).save(300, {"of": jnp.ones(3)}, None)  # whole, and of something else
    resume(trainer, folder, [].append)
    assert int(trainer.state.step) == 200 and Checkpoints(folder).steps() == [100, 200]
    assert len(list(folder.glob("300.damaged-*"))) == 1


@pytest.mark.parametrize(
    ("frequency", "expected"), [(0, [600]), (250, [300, 500, 600]), (10_000, [600]), (600, [600])]
)
def test_when_checkpoints_are_due(tmp_path, frequency, expected):
    list(saved_by(tmp_path / "c", FakeTrainer([1, 2, 3, 4, 5, 6]), frequency, keep=9)[0])
    assert Checkpoints(tmp_path / "c").steps() == expected


def test_a_checkpoint_waits_for_the_end_of_its_log_point(tmp_path):
    generator, _ = saved_by(tmp_path / "c", FakeTrainer([1, 2, 3]))
    next(generator), next(generator)
    assert not (tmp_path / "c").exists()  # a kill here loses no logged row
    next(generator)
    assert Checkpoints(tmp_path / "c").steps() == [100]
    generator.close()


def test_a_run_that_ends_early_is_saved(tmp_path):
    generator, _ = saved_by(tmp_path / "c", FakeTrainer([1, 2, 3]), frequency=0)
    next(generator)
    generator.close()
    assert Checkpoints(tmp_path / "c").steps() == [100]

    with pytest.raises(ZeroDivisionError):
        generator, _ = saved_by(tmp_path / "d", FakeTrainer([1, 2, 3]), frequency=0)
        next(generator)
        generator.throw(ZeroDivisionError)
    assert Checkpoints(tmp_path / "d").steps() == [100]

    generator, _ = saved_by(tmp_path / "e", FakeTrainer([1, 2, 3]))
    generator.close()  # before its first log point
    assert not (tmp_path / "e").exists()


@pytest.mark.parametrize("module", [impala, ppo_rnn, r2d2])
def test_new_episodes_begin_without_a_memory_and_a_return(module):
    """Where the environments lie outside JAX, and their episodes are gone."""
    flags = {"core": "lstm"} if module is impala else {}
    flags |= {"normalize_reward": True} if module is ppo_rnn else {}
    for env_id, restorable in (("CartPole-v1", False), ("gymnax/CartPole-v1", True)):
        trainer = module.Trainer(module.Config(env_id=env_id, **flags))
        state = trainer.state._replace(core=jax.tree.map(jnp.ones_like, trainer.state.core))
        if module is ppo_rnn:
            normalizer = state.learner.normalizer
            normalizer = normalizer._replace(running_return=normalizer.running_return + 50)
            state = state._replace(learner=state.learner._replace(normalizer=normalizer))
        go_on_from(trainer, state, 0)
        for leaf in jax.tree.leaves(trainer.state.core):
            np.testing.assert_array_equal(leaf, float(restorable))
        if module is ppo_rnn:
            running_return = trainer.state.learner.normalizer.running_return
            np.testing.assert_array_equal(running_return, 50.0 * restorable)


@pytest.mark.parametrize("num_seeds", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_that_an_environment_in_jax_ended_goes_on(tmp_path, num_seeds):
    flags = {"learning_starts": 400, "total_timesteps": 1600, "log_frequency": 800}
    config = Config(env_id="gymnax/CartPole-v1", buffer_size=2000, **flags)

    def make() -> Trainer:
        trainer = Trainer(config)
        if num_seeds > 1:
            batch_seeds(trainer, num_seeds)
        return trainer

    ended, said = make(), []
    list(itertools.islice(ended(), 2))
    first = (0,) * (num_seeds > 1)  # of two seeds, only one is at fault
    env, newest = ended.state.env, (*first, ended.state.replay.position - 1, 0)
    env = env._replace(fault=env.fault.at[first].set(NOT_FINITE), obs=env.obs.at[first].set(np.nan))
    storage = ended.state.replay.storage
    storage = storage._replace(reward=storage.reward.at[newest].set(np.nan))
    ended.state = ended.state._replace(env=env, replay=ended.state.replay._replace(storage=storage))
    save_checkpoint(tmp_path / "c", 1, ended, None)

    trainer = make()
    resume(trainer, tmp_path / "c", said.append)
    assert said == ["resuming at step 800: gymnax/CartPole-v1 starts new episodes"]
    assert not trainer.state.env.fault.any() and np.isfinite(trainer.state.env.obs).all()
    assert not trainer.state.replay.storage.valid[newest[:-1]].any()
    logs = [log_data["logs"] for log_data in trainer()][-1]
    assert int(trainer.state.step) == 1600 and np.isfinite(logs["losses/td_loss"])


def test_environments_outside_jax_are_not_saved(tmp_path):
    trainer = FakeTrainer([1], restorable=False)
    list(saved_by(tmp_path / "c", trainer)[0])
    restored = Checkpoints(tmp_path / "c").restore(100, trainer.state._replace(env=()))
    assert restored.env == () and int(restored.step) == 100


def test_reading_disturbs_no_save_under_way(tmp_path):
    list(saved_by(tmp_path / "c", FakeTrainer([1, 2]))[0])
    unfinished = tmp_path / "c" / "300.orbax-checkpoint-tmp"
    unfinished.mkdir()
    assert Checkpoints(tmp_path / "c").steps() == [100, 200]
    assert unfinished.exists()
    list(saved_by(tmp_path / "c", FakeTrainer([1, 2, 3]))[0])
    assert not unfinished.exists()  # the writer itself clears away what a kill left


@pytest.fixture
def full_disk(monkeypatch, tmp_path):
    """No save succeeds in the folders of this list."""
    full: list[Path] = []
    save = Checkpoints.save

    def save_or_fail(self, step, state, episode_return):
        if any(self.folder.is_relative_to(folder) for folder in full):
            no_space()
        save(self, step, state, episode_return)

    monkeypatch.setattr(Checkpoints, "save", save_or_fail)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    return full


def test_a_failing_save_does_not_stop_training(tmp_path, full_disk):
    trainer = FakeTrainer([1, 2, 3, 4, 5, 6])
    generator, said = saved_by(tmp_path / "c", trainer)
    for log_data in generator:
        full_disk[:] = [tmp_path / "c"] if log_data["sample_step"] in (300, 400) else []
    assert int(trainer.state.step) == 600
    assert len(said) == 2 and "\n" not in "".join(said)
    assert all("warning: checkpoint not written" in s and "No space left" in s for s in said)
    assert Checkpoints(tmp_path / "c").steps()[-2:] == [500, 600]


def test_the_last_save_is_tried_elsewhere(tmp_path, full_disk):
    trainer = FakeTrainer([1, 2, 3])
    generator, _ = saved_by(tmp_path / "run" / "c", trainer)
    for log_data in generator:
        full_disk[:] = [tmp_path / "run"] if log_data["sample_step"] >= 200 else []
        if log_data["sample_step"] == 300:
            break
    with pytest.raises(UserError, match="the last checkpoint could not be written") as raised:
        generator.close()
    saved = re.search(r"saved as (\S+) instead", str(raised.value))
    assert saved and str(tmp_path / "run" / "c") in str(raised.value)
    assert Checkpoints(tmp_path / "run" / "c").steps() == [100]
    shutil.move(saved[1], tmp_path / "run" / "c")
    assert Checkpoints(tmp_path / "run" / "c").steps() == [100, 300]
    restored = Checkpoints(tmp_path / "run" / "c").restore(300, trainer.state)
    assert restored.learner["w"].tolist() == [3, 3, 3]


def test_the_last_save_may_lack_its_checksums_alone(tmp_path, monkeypatch, full_disk):
    """A copy could not be moved to where the files of the step are, and need not be."""

    def write_or_fail(path, text):
        if path.is_relative_to(tmp_path / "c"):
            no_space()
        write_atomically(path, text)

    monkeypatch.setattr("common.run.checkpoint.write_atomically", write_or_fail)
    trainer = FakeTrainer([1, 2])
    generator, _ = saved_by(tmp_path / "c", trainer, frequency=0)
    with pytest.raises(UserError, match=r"files are in \S+, and a copy is \S+; free") as raised:
        list(generator)
    assert "instead" not in str(raised.value)
    saved = re.search(r"a copy is (\S+);", str(raised.value))
    for folder in (Path(saved[1]).parent, tmp_path / "c"):
        assert Checkpoints(folder).steps() == [200]
        assert Checkpoints(folder).restore(200, trainer.state).learner["w"].tolist() == [2, 2, 2]


def test_where_no_run_folder_can_be_made_a_whole_one_is_saved_elsewhere(tmp_path, full_disk):
    config = Config(env_id="gymnax/CartPole-v1", total_timesteps=1600, log_frequency=800)
    trainer, said = Trainer(config), []

    def no_folder() -> Path:
        raise UserError("cannot make a run folder; give --runs-dir")

    call = checkpointer(no_folder, 0, 1, "charts/episodic_return", said.append)(Trainer.__call__)
    with (
        pytest.raises(UserError, match=r"cannot make a run folder.* on with --resume") as raised,
        contextlib.closing(call(trainer)) as training,
    ):
        next(training), next(training)
    folder = re.search(r"saved as the run folder (\S+);", str(raised.value))
    assert folder and Path(folder[1]).is_relative_to(tmp_path / "temporary")
    assert load(folder[1]).step == 800


def test_no_save_anywhere(tmp_path, full_disk):
    full_disk[:] = [tmp_path]
    generator, said = saved_by(tmp_path / "c", FakeTrainer([1, 2]))
    with pytest.raises(UserError, match=r"nor in .*No space left.*free space"):
        list(generator)
    assert len(said) == 2 and not list((tmp_path / "temporary").iterdir())


def test_an_error_while_closing_reaches_the_driver(tmp_path, full_disk):
    """Python only prints what a generator raises when it is thrown away instead of closed."""
    full_disk[:] = [tmp_path]
    said: list[str] = []
    save = checkpointer(lambda: tmp_path / "c", 0, 1, "charts/episodic_return", said.append)
    call = logger(lambda: [], said.append)(save(FakeTrainer.__call__))
    with (
        pytest.raises(UserError, match="last checkpoint"),
        contextlib.closing(call(FakeTrainer([1, 2]))) as training,
    ):
        next(training)


FULL_DISK = """
mount -t tmpfs -o size=$SIZE none "$DISK"
"$PYTHON" "$DQN" $FLAGS --runs-dir "$DISK/runs" > "$OUT/first.out" 2> "$OUT/first.err"
echo $? > "$OUT/first.code"
mount -o remount,size=100m "$DISK"
"$PYTHON" "$DQN" --resume "$DISK"/runs/* --eval-episodes 2 > "$OUT/second.out" 2> "$OUT/second.err"
echo $? > "$OUT/second.code"
"""


@pytest.mark.slow
def test_a_disk_that_is_really_full(tmp_path):
    unshare = ["unshare", "--mount", *([] if os.getuid() == 0 else ["--map-root-user"])]
    probe = [*unshare, "mount", "-t", "tmpfs", "none", str(tmp_path)]
    if not shutil.which("unshare") or subprocess.run(probe, capture_output=True).returncode:
        pytest.skip("cannot mount a small disk here")
    (tmp_path / "disk").mkdir()
    flags = [*SHORT, "--checkpoint-frequency", "1000", "--keep-checkpoints", "4"]
    names = {"DISK": "disk", "OUT": "", "TMPDIR": ""}
    env = {name: str(tmp_path / value) for name, value in names.items()}
    # Room for two checkpoints and most of a third, with 100 KiB to spare on either side.
    env |= {"SIZE": "640k", "PYTHON": sys.executable, "DQN": str(DQN), "FLAGS": " ".join(flags)}
    subprocess.run([*unshare, "sh", "-c", FULL_DISK], env=environment(**env), check=True)

    def read(name: str) -> str:
        return (tmp_path / name).read_text()

    assert read("first.code") == "2\n", read("first.err")
    assert "warning: checkpoint not written" in read("first.out")
    assert "step     4,000 of 4,000" in read("first.out")
    assert read("first.err").count("\n") == 1
    saved = re.search(r"it was saved as (\S+) instead", read("first.err"))
    assert saved and Checkpoints(Path(saved[1]).parent).steps() == [4000]
    # The earlier checkpoints were not harmed.
    assert read("second.code") == "0\n", read("second.err")
    assert "resuming at step 2000: CartPole" in read("second.out")
