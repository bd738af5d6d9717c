"""The run folder, the command line, the logs, and the cores that a run takes."""

import contextlib
import csv
import dataclasses
import inspect
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from types import SimpleNamespace

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.envs.classic_control import CartPoleEnv
from PIL import Image
from rich.console import Console
from run_helpers import DQN, SHORT, WITHOUT_WANDB, environment, finished_run, run_here
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from algos import ppo, r2d2
from algos.dqn import PRESETS, Config, Trainer
from common.envs import EpisodeSummary
from common.errors import UserError

from common.run import cli
from common.run.checkpoint import Checkpoints
from common.run.evaluator import Evaluator
from common.run.logger import (
    ConsoleSink,
    CsvSink,
    LogStart,
    TensorBoardSink,
    log_intervals,
    log_points,
    logger,
    make_console,
    read_metrics,
)
from common.run.runner import _unless, check_finite
from common.run.video import save_video


def parse(*args):
    return cli.parse(Config, PRESETS, [str(arg) for arg in args])


# The run folder


def test_run_folder():
    folder, ran = finished_run()
    assert re.fullmatch(r"CartPole-v1__dqn__1__\d{8}-\d{6}", folder.name)
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "metrics.csv", "curve.png", "checkpoints", "videos", "dqn.py"} <= names
    assert (folder / "dqn.py").read_text() == DQN.read_text()
    assert Image.open(folder / "curve.png").size[0] > 300
    config = json.loads((folder / "config.json").read_text())
    assert config["algo"] == "dqn" and config["preset"] == "classic"
    fields = {f.name for c in (Config, cli.LoggingOptions) for f in dataclasses.fields(c)}
    assert fields <= set(config)
    assert not {"resume", "config", "debug"} & set(config)
    assert ran.err == ""  # no warnings of libraries


def test_metrics_csv():
    folder, _ = finished_run()
    with (folder / "metrics.csv").open() as file:
        assert next(csv.reader(file)) == ["step", "seconds", "name", "value"]
    rows = read_metrics(folder / "metrics.csv")
    epsilons = {step: value for step, _, name, value in rows if name == "charts/epsilon"}
    assert epsilons == pytest.approx({1000: 0.525, 2000: 0.05, 3000: 0.05, 4000: 0.05})
    assert [step for step, _, name, _ in rows if name == "charts/evaluation_return"] == [2000, 4000]
    updates = [value for _, _, name, value in rows if name == "charts/updates"]
    assert updates == [0, 100, 100, 100]
    seconds = [row[1] for row in rows]
    assert seconds == sorted(seconds)
    assert seconds[0] > 0.3  # training began before the first log point: it had to compile


def test_tensorboard():
    folder, _ = finished_run()
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    rows = read_metrics(folder / "metrics.csv")
    for tag in ("charts/episodic_return", "charts/SPS", "losses/td_loss", "losses/q_values"):
        expected = [(step, value) for step, _, name, value in rows if name == tag]
        assert [e.step for e in events.Scalars(tag)] == [step for step, _ in expected]
        np.testing.assert_allclose(
            [e.value for e in events.Scalars(tag)], [value for _, value in expected], rtol=1e-6
        )


def test_console_lines():
    _, ran = finished_run()
    lines = ran.out.splitlines()
    assert re.match(
        r"dqn on CartPole-v1 \(envpool\), preset classic, seed 1, (cpu|gpu)(, one core \(\d+\))?$",
        lines[0],
    )
    shown = r"step     2,000 of 4,000  return \d+\.\d  evaluation \d+\.\d  SPS [\d,]+  \d+ s left"
    assert re.fullmatch(shown, lines[2])
    assert "evaluation over 2 episodes: " in ran.out and " ± " in ran.out
    assert re.search(r"best checkpoint: step [24],000, evaluation \d+\.\d ", ran.out)
    assert "\x1b" not in ran.out


def test_video():
    folder, _ = finished_run()
    with Image.open(folder / "videos" / "step_4000.gif") as gif:
        assert gif.n_frames > 1 and max(gif.size) <= 400


def test_no_video_where_nothing_renders(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = ["--env-id", "gymnax/CartPole-v1", "--total-timesteps", "80", "--eval-episodes", "1"]
    ran = run_here(capsys, *flags, "--capture-video")
    assert ran.code == 0
    assert "no video: JAX environments cannot be rendered" in ran.out
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("gymnax-CartPole-v1__dqn__1__")


def test_an_endless_episode_is_no_endless_video(monkeypatch, tmp_path):
    class Endless:
        env_id = "Endless-v0"
        reset = staticmethod(lambda key: Endless)
        step = staticmethod(lambda state, action: (state, None))
        check = close = staticmethod(lambda *state: None)
        render = staticmethod(lambda state: np.zeros((4, 4, 3), np.uint8))
        obs = finished = np.zeros(1)
        running_return = np.array([4.5])
        ended = np.zeros(1, bool)

    monkeypatch.setattr("common.run.video.make_env", lambda *args, **kwargs: Endless)
    monkeypatch.setattr("jax.jit", lambda function: function)
    play = Evaluator(Config(), lambda *args: 0)
    play.max_steps = 50
    assert save_video(play, None, tmp_path / "a.gif") == 4.5
    with Image.open(tmp_path / "a.gif") as gif:
        assert gif.size == (4, 4)


def test_a_run_whose_evaluation_is_cut_off(capsys, tmp_path):
    """It is evaluated to the limit, and says so."""
    flags = ["--env-id", "Failing-v0", "--env-module", "failing_envs"]
    flags += ["--total-timesteps", "80", "--log-frequency", "40", "--eval-frequency", "40"]
    flags += ["--eval-episodes", "3", "--eval-max-steps", "15", "--runs-dir", tmp_path]
    ran = run_here(capsys, *flags)
    assert ran.code == 0 and "evaluation over 3 episodes: 15.0 ± 0.0" in ran.out
    assert "3 of 3 episodes still running after 15 steps: their returns so far count" in ran.out
    (folder,) = tmp_path.iterdir()
    rows = read_metrics(folder / "metrics.csv")
    unfinished = [(step, v) for step, _, name, v in rows if name == "charts/evaluation_unfinished"]
    assert unfinished == [(40, 3), (80, 3)]
    flags = [folder, "--episodes", 21, "--max-steps", 10]
    ran = run_here(capsys, *flags, module="common.evaluate")
    assert ran.out.splitlines() == [
        "10.0 ± 0.0 over 21 episodes, checkpoint 80",
        "20 of 21 episodes still running after 10 steps: their returns so far count; episodes that "
        "never began do not",
    ]


def test_evaluation_off(capsys, tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr("common.run.evaluator.make_env", lambda *args: made.append(args))
    flags = ["--total-timesteps", "800", "--log-frequency", "400", "--eval-frequency", "400"]
    flags += ["--checkpoint-frequency", "400", "--eval-episodes", "0", "--runs-dir", tmp_path]
    ran = run_here(capsys, *flags, "--capture-video")
    assert ran.code == 0 and "evaluation off" in ran.out and "video: " in ran.out
    (folder,) = tmp_path.iterdir()
    assert not made and not [n for *_, n, _ in read_metrics(folder / "metrics.csv") if "eval" in n]
    result = json.loads((folder / "result.json").read_text())
    assert (result["episodes"], result["evaluation_return"], result["evaluation_std"]) == (
        *(0, None, None),
    )
    # The best checkpoint is that of the best training return.
    rows = read_metrics(folder / "metrics.csv")
    returns = {step: v for step, _, name, v in rows if name == "charts/episodic_return"}
    best = max(returns, key=lambda step: returns[step])
    assert Checkpoints(folder / "checkpoints").best() == (best, pytest.approx(returns[best]))
    assert f"best checkpoint: step {best}, training return {returns[best]:.1f}" in ran.out


@pytest.mark.slow
def test_evaluation_off_with_many_seeds(capsys, tmp_path):
    flags = ["--env-id", "gymnax/CartPole-v1", "--num-seeds", 2, "--total-timesteps", 80]
    ran = run_here(capsys, *flags, "--eval-episodes", 0, "--runs-dir", tmp_path)
    assert ran.code == 0 and "evaluation off" in ran.out
    (folder,) = tmp_path.iterdir()
    assert Checkpoints(folder / "seed_2" / "checkpoints").steps() == [80]


# The command line


def test_config_of_a_run_gives_the_same_config():
    folder, _ = finished_run()
    options = parse("--config", folder / "config.json")
    values = dict(total_timesteps=4000, learning_starts=1000, log_frequency=1000)
    assert options.config == Config(**values)
    assert options.run.eval_frequency == 2000 and options.logging.capture_video
    flags = ["--seed", 5, "--gamma", 0.9, "--no-capture-video", "--env-kwargs", "a=1", "b=2"]
    options = parse(*flags, "--config", folder / "config.json")
    values |= dict(seed=5, gamma=0.9, env_kwargs=("a=1", "b=2"))
    assert options.config == Config(**values)
    assert not options.logging.capture_video


def test_config_file_with_every_type(tmp_path):
    values = dict(learning_rate=1, env_kwargs=["a=1"], env_module=None, env_backend="jax")
    (tmp_path / "c.json").write_text(json.dumps(values | {"track": True, "wandb_tags": ["x"]}))
    options = parse("--config", tmp_path / "c.json")
    assert options.config == Config(learning_rate=1, env_kwargs=("a=1",), env_backend="jax")
    assert options.logging.track and options.logging.wandb_tags == ("x",)


@pytest.mark.parametrize(
    ("flags", "preset"),
    [
        ("", "classic"),
        ("--env-id Pong-v5", "atari"),
        ("--env_id Pong-v5", "atari"),
        ("--env-id=Pong-v5", "atari"),
        ("--env-id Pong-v5 --preset classic", "classic"),
        ("--env-id Pong-v5 --env-backend gymnasium", "classic"),
        ("--preset atari", "atari"),
        ("--env-id Pong-v5 --preset auto", "atari"),
        ("--env-id HalfCheetah-v5", "classic"),
    ],
)
def test_preset(flags, preset):
    options = parse(*flags.split())
    assert options.run.preset == preset
    assert options.config.frame_stack == PRESETS[preset].get("frame_stack", 1)


@pytest.mark.parametrize(
    ("env_id", "backend", "of_dqn", "of_ppo"),
    [
        ("CartPole-v1", None, "classic", "classic"),
        ("Pendulum-v1", None, "classic", "mujoco"),
        ("Pendulum-v1", "gymnasium", "classic", "mujoco"),
        ("HalfCheetah-v4", None, "classic", "mujoco"),
        ("HalfCheetah-v5", "auto", "classic", "mujoco"),
        ("gymnax/Pendulum-v1", None, "classic", "mujoco"),
        ("gymnax/CartPole-v1", "jax", "classic", "classic"),
        ("gymnax/Breakout-MinAtar", None, "minatar", "minatar"),
        ("pgx/minatar-space_invaders", "auto", "minatar", "minatar"),
        ("Pong-v5", None, "atari", "atari"),
        ("Pong-v5", "envpool", "atari", "atari"),
        ("Pong-v5", "gymnasium", "classic", "classic"),
        ("Pong-v4", None, "classic", "classic"),
        ("NoSuchThing-v5", None, "classic", "classic"),
        ("some.module:Thing-v0", None, "classic", "classic"),
    ],
)
def test_the_environment_chooses_the_preset(env_id, backend, of_dqn, of_ppo):
    assert cli._auto_preset(env_id, backend, PRESETS) == of_dqn
    assert cli._auto_preset(env_id, backend, ppo.PRESETS) == of_ppo


def test_the_chosen_preset_gives_the_defaults():
    options = cli.parse(ppo.Config, ppo.PRESETS, ["--env-id", "Pendulum-v1"])
    assert options.run.preset == "mujoco" and options.config.num_steps == 2048
    assert options.config == ppo.Config(env_id="Pendulum-v1", **ppo.PRESETS["mujoco"])


def test_env_kwargs_leave_those_of_the_preset_whose_keys_are_not_given(tmp_path):
    def env_kwargs(*flags):
        flags = ["--env-id", "Pong-v5", *flags]
        return cli.parse(r2d2.Config, r2d2.PRESETS, flags).config.env_kwargs

    assert env_kwargs() == ("episodic_life=False", "reward_clip=False")
    given = env_kwargs("--env-kwargs", "frame_skip=2", "reward_clip=True")
    assert given == ("episodic_life=False", "frame_skip=2", "reward_clip=True")
    # A file of flags has them whole.
    (tmp_path / "c.json").write_text('{"preset": "atari", "env_kwargs": ["frame_skip=2"]}')
    assert env_kwargs("--config", str(tmp_path / "c.json")) == ("frame_skip=2",)


def test_a_config_files_own_preset_may_be_named_again(tmp_path):
    (tmp_path / "c.json").write_text('{"preset": "atari", "batch_size": 64}')
    options = parse("--config", tmp_path / "c.json", "--preset", "atari")
    assert options.run.preset == "atari" and options.config.buffer_size == 1_000_000
    chosen = parse("--config", tmp_path / "c.json", "--preset", "auto", "--env-id", "Pong-v5")
    assert chosen.run == options.run


def test_flags_win_over_the_preset():
    options = parse("--env-id", "Pong-v5", "--batch-size", 64)
    assert (options.config.batch_size, options.config.buffer_size) == (64, 1_000_000)


def test_help(capsys):
    with pytest.raises(SystemExit) as stop:
        parse("--help")
    text = capsys.readouterr().out
    assert not stop.value.code
    for group in ("algorithm", "environment", "logging", "run", "explorers"):
        assert f"{group} options" in text
    for options in (Config, cli.LoggingOptions, cli.RunOptions, cli.ExplorerOptions):
        docs = cli._field_docs(options)
        for field in dataclasses.fields(options):
            assert f"--{field.name.replace('_', '-')}" in text
            words = docs[field.name].split()
            assert words and words[0] in text


def test_help_of_a_module():
    command = [sys.executable, "-m", "common.plot", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True)
    assert shown.stdout.startswith("usage: python -m common.plot [-h]"), shown.stderr
    reader, writer = os.pipe()
    os.close(reader)  # as `--help | head` may do
    for unbuffered in ("", "1"):
        env = os.environ | {"PYTHONUNBUFFERED": unbuffered}
        unread = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, env=env)
        assert (unread.returncode, unread.stderr) == (1, "")
    os.close(writer)


def test_what_importing_an_algorithm_costs():
    heavy = ["wandb", "matplotlib.pyplot", "orbax.checkpoint", "tensorflow", "torch", "envpool"]
    code = f"import sys, time, algos.dqn; print([m for m in {heavy} if m in sys.modules]);"
    code += "print(time.process_time())"  # not what other processes take of a core
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    found, seconds = done.stdout.split()
    assert found == "[]", done.stderr
    assert float(seconds) < 10  # 2 s with bytecode, 6 without


def test_wandb_is_only_imported_for_tracking():
    assert "sys.modules['wandb'] = None" in WITHOUT_WANDB  # how the finished run was run
    assert finished_run()[1].code == 0


@pytest.mark.slow
def test_wandb_offline(capsys, tmp_path, monkeypatch):
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    flags = ["--total-timesteps", "80", "--eval-episodes", "1", "--runs-dir", tmp_path]
    flags += ["--track", "--wandb-mode", "offline", "--wandb-tags", "a", "b", "--capture-video"]
    ran = run_here(capsys, *flags)
    assert ran.code == 0
    (folder,) = tmp_path.iterdir()
    (offline,) = (folder / "wandb").glob("offline-run-*")
    assert offline.name.endswith((folder / "wandb_id").read_text())
    (record,) = offline.glob("run-*.wandb")
    assert b"learning_rate" in record.read_bytes()
    assert (offline / "files" / "dqn.py").read_text() == DQN.read_text()
    (video,) = (offline / "files" / "media" / "videos").glob("video_*.gif")
    assert video.read_bytes() == (folder / "videos" / "step_80.gif").read_bytes()
    assert video.name.encode() in record.read_bytes()
    assert f"video: {folder}/videos/step_80.gif" in ran.out


# Trainer on its own


def test_trainer_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    closed = []
    trainer = Trainer(Config(total_timesteps=1208, learning_starts=200, log_frequency=500))
    monkeypatch.setattr(trainer.env, "close", lambda: closed.append(True))
    logs = list(trainer())
    assert [d["sample_step"] for d in logs[::2]] == [504, 1008, 1208]
    assert int(trainer.state.step) == 1208
    assert closed == [True] and not list(tmp_path.iterdir())
    for log_data in logs:
        assert set(log_data) == {"log_type", "sample_step", "logs"}
        assert log_data["log_type"] in ("collect", "train")
        assert all(type(value) is float for value in log_data["logs"].values())


def test_trainer_closed_early(monkeypatch):
    closed = []
    trainer = Trainer(Config(total_timesteps=1200, learning_starts=200, log_frequency=400))
    monkeypatch.setattr(trainer.env, "close", lambda: closed.append(True))
    generator = trainer()
    next(generator)
    assert not closed
    generator.close()
    assert closed == [True]
    assert int(trainer.state.step) == 400
    assert inspect.getgeneratorstate(generator) == "GEN_CLOSED"


# Logs


def env_of(failure=None):
    def check(state):
        if failure:
            raise failure

    return SimpleNamespace(check=check)


def state_of(step, episodes=0, return_sum=0.0, length_sum=0.0):
    summary = EpisodeSummary(jnp.int32(episodes), jnp.float32(return_sum), jnp.float32(length_sum))
    return SimpleNamespace(step=jnp.int32(step), env=SimpleNamespace(summary=summary))


def seconds_ago(step, seconds):
    return LogStart(step, time.perf_counter() - seconds)


def test_log_points():
    sums = {"charts/updates": 4.0, "charts/target_updates": 1.0, "td_loss": jnp.float32(8)}
    state, start = state_of(100, 2, 30, 40), seconds_ago(60, 800)
    collect, train = log_points(env_of(), state, start, {"charts/epsilon": jnp.float32(0.5)}, sums)
    assert collect["logs"].pop("charts/SPS") == pytest.approx((100 - 60) / 800, rel=0.05)
    logs = {"charts/epsilon": 0.5, "charts/episodes": 2.0}
    logs |= {"charts/episodic_return": 15.0, "charts/episodic_length": 20.0}
    assert collect == {"log_type": "collect", "sample_step": 100, "logs": logs}
    logs = {"losses/td_loss": 2.0, "charts/updates": 4.0, "charts/target_updates": 1.0}
    assert train == {"log_type": "train", "sample_step": 100, "logs": logs}
    values = (collect["sample_step"], *collect["logs"].values(), *train["logs"].values())
    assert {type(value) for value in values} == {int, float}


def test_log_points_without_games_and_updates():
    sums = {"charts/updates": 0.0, "td_loss": 0.0}
    collect, train = log_points(env_of(), state_of(8), seconds_ago(0, 1), {}, sums)
    assert collect["logs"].keys() == {"charts/SPS", "charts/episodes"}
    assert collect["logs"]["charts/episodes"] == 0.0
    assert train["logs"] == {"charts/updates": 0.0}


def test_log_points_divide_by_the_count_that_is_named():
    sums = {"critic_loss": 12.0, "actor_loss": 9.0, "actor_norm": 6.0}
    counts = {"charts/updates": 6.0, "charts/actor_updates": 3.0}
    args = env_of(), state_of(8), seconds_ago(0, 1), {}
    divisors = {"actor_loss": "charts/actor_updates"}
    _, train = log_points(*args, sums | counts, divisors)
    losses = {"losses/critic_loss": 2.0, "losses/actor_loss": 3.0, "losses/actor_norm": 1.0}
    assert train["logs"] == losses | counts
    # Updates of the critics alone so far; and an algorithm that names no count of its own.
    _, train = log_points(*args, sums | counts | {"charts/actor_updates": 0.0}, divisors)
    assert "losses/actor_loss" not in train["logs"] and train["logs"]["losses/critic_loss"] == 2
    _, train = log_points(*args, sums | {"charts/updates": 6.0})
    assert train["logs"] == losses | {"losses/actor_loss": 1.5, "charts/updates": 6.0}


def test_a_failed_environment_has_no_log_point():
    env = env_of(UserError("the motor broke"))
    with pytest.raises(UserError, match="the motor broke"):
        next(log_points(env, state_of(8), seconds_ago(0, 1), {}, {"charts/updates": 1.0}))


@pytest.mark.parametrize(
    ("first_step", "intervals"),
    [(0, [(0, 500), (504, 500), (1008, 200)]), (1000, [(1000, 208)]), (1208, [])],
)
def test_log_intervals(first_step, intervals):
    # Every interval does its env steps in vector steps of 8.
    config = SimpleNamespace(total_timesteps=1208, log_frequency=500)
    trainer, seen = SimpleNamespace(config=config, state=state_of(first_step)), []
    before = time.perf_counter()
    for start, num_steps in log_intervals(trainer):
        seen.append((start.step, num_steps))
        assert before <= start.seconds <= time.perf_counter()
        trainer.state = state_of(start.step + -(-num_steps // 8) * 8)
    assert seen == intervals


def call_of(*log_data):
    """A `Trainer.__call__` that yields these."""

    def call(trainer):
        yield from log_data

    return call


def log(step, kind="train", **logs):
    return {"log_type": kind, "sample_step": step, "logs": logs}


class Broken:
    """A sink that fails at its second write, and when it is closed."""

    def __init__(self):
        self.steps = []

    def write(self, step, logs):
        self.steps.append(step)
        if len(self.steps) > 1:
            raise OSError("no space left")

    def close(self):
        raise RuntimeError("cannot close")


def test_a_sink_that_fails_is_dropped(tmp_path):
    said, broken = [], Broken()
    path = tmp_path / "metrics.csv"

    def no_sink():
        raise OSError("read-only\nfile system")

    def make_sinks():
        return [lambda: broken, no_sink, lambda: CsvSink(path, 0, time.time())]

    call = logger(make_sinks, said.append)(call_of(log(1, a=1.0), log(2, a=2.0), log(3, a=3.0)))
    assert len(list(call(None))) == 3
    assert broken.steps == [1, 2]
    assert [row[3] for row in read_metrics(path)] == [1, 2, 3]
    assert len(said) == 2 and all(text.startswith("warning: ") for text in said)
    assert "read-only file system" in said[0] and "no space left" in said[1]


def test_a_sink_that_cannot_close(tmp_path):
    said = []
    call = logger(lambda: [Broken], said.append)(call_of(log(1)))
    list(call(None))
    assert len(said) == 1 and "cannot close" in said[0]


def test_an_environment_may_change_the_working_folder(capsys, tmp_path, monkeypatch):
    """As simulators with a folder for scratch files do: the run stays where it was started."""
    monkeypatch.chdir(tmp_path)

    class Moving(CartPoleEnv):
        def __init__(self, render_mode=None):
            super().__init__()
            os.chdir(tempfile.mkdtemp(dir=tmp_path))

    gym.register("Moving-v0", Moving, max_episode_steps=20)
    flags = [*SHORT, "--env-id", "Moving-v0", "--runs-dir", "runs"]
    ran = run_here(capsys, *flags)
    del gym.registry["Moving-v0"]
    (folder,) = (tmp_path / "runs").iterdir()
    assert ran.code == 0 and f"run folder: runs/{folder.name} " in ran.out
    assert Checkpoints(folder / "checkpoints").steps() == [4000]
    assert {"config.json", "dqn.py", "metrics.csv"} <= {path.name for path in folder.iterdir()}


def test_a_run_without_standard_output(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    with cli.exit_codes(debug=False):
        make_console().print("no one reads this")


@pytest.mark.parametrize(("second", "passed_on"), [(8, 2), (16, 4)])
def test_after_a_signal_no_log_point_comes_twice(second, passed_on):
    """Explorers that are interrupted may have made no step since the last one."""
    received, seen = [], []
    points = [log(8, "collect"), log(8), log(second, "collect"), log(second)]
    for log_data in _unless(received)(call_of(*points))(None):
        seen.append(log_data)
        received += [signal.SIGINT] * (len(seen) == 2)
    assert seen == points[:passed_on]


def test_csv_drops_rows_beyond_the_restored_step(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text(
        "step,seconds,name,value\n100,2.0,a,1.5\n200,3.0,a,nan\n300,4.0,a,3.5\n300,5.0,b,\n400,6.0,a,1"
    )
    assert [row[0] for row in read_metrics(path)] == [100, 200, 300]  # torn rows are no rows
    sink = CsvSink(path, 200, time.time() - 7)
    sink.write(300, {"a": 9.0})
    sink.close()
    rows = read_metrics(path)
    assert [row[0] for row in rows] == [100, 200, 300]
    assert rows[-1][1] == pytest.approx(3 + 7, abs=1) and rows[-1][3] == 9.0
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.csv"]


def test_tensorboard_drops_events_beyond_the_restored_step(tmp_path):
    for first_step, steps in ((0, (100, 200, 300, 400)), (200, (300,)), (300, (400, 500))):
        sink = TensorBoardSink(tmp_path, first_step, {})
        for step in steps:
            sink.write(step, {"a": step + first_step})
        if first_step:
            sink.close()  # the first one is killed: what was logged is on disk all the same
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    shown = [(event.step, event.value) for event in events.Scalars("a")]
    assert shown == [(100, 100), (200, 200), (300, 500), (400, 700), (500, 800)]


def test_tensorboard_has_the_hyperparameters():
    folder, _ = finished_run()
    events = EventAccumulator(str(folder), size_guidance={"tensors": 0})
    events.Reload()
    (event,) = events.Tensors("hyperparameters")
    assert events.SummaryMetadata("hyperparameters").plugin_data.plugin_name == "text"
    assert event.step == 0
    config = json.loads((folder / "config.json").read_text())
    rows = event.tensor_proto.string_val[0].decode().splitlines()
    assert rows[:2] == ["| flag | value |", "|---|---|"]
    cells = dict(row.strip("| ").split(" | ") for row in rows[2:] if row.count(" | ") == 1)
    assert cells["learning_rate"] == "0.00025" and cells["eval_frequency"] == "2000"
    assert len(rows) == 2 + len(config)
    (content,) = events.PluginTagToContent("hparams").values()
    hparams = HParamsPluginData.FromString(content).session_start_info.hparams
    assert hparams.keys() == config.keys()
    assert hparams["learning_rate"].number_value == 0.00025
    assert hparams["env_id"].string_value == "CartPole-v1" and hparams["env_module"].string_value
    assert hparams["capture_video"].bool_value is True
    assert len(list(folder.glob("**/events.out.tfevents.*"))) == 1


def test_a_bar_in_a_flag_breaks_no_table(tmp_path):
    TensorBoardSink(tmp_path, 0, {"env_kwargs": ("a=|",)}).close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    (event,) = events.Tensors("hyperparameters")
    assert b"| env_kwargs | ('a=&#124;',) |" in event.tensor_proto.string_val[0]


def test_progress_bar_on_a_terminal():
    screen = io.StringIO()
    sink = ConsoleSink(Console(file=screen, force_terminal=True, width=120), 4000, 0)
    sink.write(1000, {"charts/SPS": 5000.0, "charts/episodic_return": 20.0})
    sink.write(2000, {"losses/td_loss": 1.0})
    sink.close()
    text = re.sub(r"\x1b\[[^A-Za-z]*[A-Za-z]", "", screen.getvalue())
    assert "2000/4000" in text and "return 20.0  SPS 5,000" in text and "━" in text


def test_plain_lines_elsewhere():
    paper = io.StringIO()
    sink = ConsoleSink(Console(file=paper, width=200), 4000, 0)
    sink.write(1000, {"charts/SPS": 500.0, "charts/episodic_return": 20.0})
    sink.write(1000, {"losses/td_loss": 1.0})
    sink.close()
    assert paper.getvalue() == "step     1,000 of 4,000  return 20.0  SPS 500  6 s left\n"


def test_a_loss_that_is_not_finite_is_said_once():
    paper = io.StringIO()
    sink = ConsoleSink(Console(file=paper, width=200), 4000, 0)
    for step, loss in ((1000, 1.0), (2000, math.inf), (3000, math.nan)):
        sink.write(step, {"losses/td_loss": loss, "losses/q_values": 1.0})
    sink.close()
    assert paper.getvalue() == (
        "warning: losses/td_loss is not finite at step 2,000; lower --learning-rate, or find the "
        "place with --debug\n"
    )


def test_the_console_takes_nothing_for_markup(capsys):
    make_console().print("[red]a[/red] [/b] :smile: " + "x" * 300)
    assert capsys.readouterr().out == "[red]a[/red] [/b] :smile: " + "x" * 300 + "\n"


def test_a_full_disk_and_a_reader_that_is_gone_end_no_run(monkeypatch):
    full = open("/dev/full", "w")  # noqa: SIM115
    monkeypatch.setattr(sys, "stdout", full)
    make_console().print("a line")
    with contextlib.suppress(OSError):
        full.close()
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:  # neither does its last flush fail
        monkeypatch.setattr(sys, "stdout", pipe)
        make_console().print("a line")
        make_console().print("another")


class Learner:
    """A trainer whose second weight is not finite from step 24 on."""

    config = SimpleNamespace(total_timesteps=40)

    def __init__(self):
        self.state = type("State", (), {"step": 0, "learner": {"w": [jnp.ones(2)] * 2}})

    def __call__(self):
        for step in range(8, 41, 8):
            bad = jnp.array([1.0, jnp.nan if step >= 24 else 1.0])
            self.state.learner = {"key": jax.random.key(0), "w": [jnp.ones(2), bad]}
            yield log(step, "collect", SPS=1.0)
            yield log(step, "train", loss=2.0)


def test_check_finite_names_the_parameter_and_passes_on_log_points():
    seen = []
    with pytest.raises(UserError, match=r"\['w'\]\[1\] is not finite at step 24"):
        for log_data in check_finite(16)(Learner.__call__)(Learner()):
            seen.append((log_data["sample_step"], log_data["log_type"]))
    assert seen == [(16, "collect"), (16, "train")]


def test_check_finite_passes_on_the_last_log_point():
    trainer = Learner()
    points = [log(step, "train", loss=2.0) for step in range(8, 41, 8)]
    passed = [x["sample_step"] for x in check_finite(16)(call_of(*points))(trainer)]
    assert passed == [16, 32, 40]


def test_check_finite_names_the_metric():
    trainer = Learner()
    call = check_finite(16)(call_of(log(8, "collect", a=1.0), log(8, b=float("inf"))))
    with pytest.raises(UserError, match=r"^b is not finite at step 8"):
        list(call(trainer))


# Cores

CHOOSE = """
import os, sys
from common.run.threads import use_cores
held = use_cores(int(os.environ.get("WANTED", "1")))
print(held, sorted(os.sched_getaffinity(0)), os.environ.get("NPROC"), flush=True)
sys.stdin.read()
"""


class Chooser:
    """A process that takes a core, and holds it until it is let go."""

    def __init__(self, temporary, cores=None, **env):
        command = [sys.executable, "-c", CHOOSE]
        if cores is not None:
            command = ["taskset", "-c", str(cores), *command]
        kept = {k: v for k, v in environment().items() if k != "XLA_FLAGS"}
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=kept | {"TMPDIR": str(temporary)} | env,
        )
        assert self.process.stdout
        self.said = self.process.stdout.readline().strip()

    def let_go(self):
        self.process.communicate()


cores_of_this_process = sorted(os.sched_getaffinity(0))
needs_free_cores = pytest.mark.skipif(
    len(cores_of_this_process) < 2 or len(cores_of_this_process) != os.cpu_count(),
    reason="needs two cores and no affinity mask",
)


@needs_free_cores
def test_every_run_takes_its_own_core_until_none_is_left(tmp_path):
    choosers = [Chooser(tmp_path) for _ in cores_of_this_process]
    taken = [f"[{core}] [{core}] 1" for core in cores_of_this_process]
    assert [chooser.said for chooser in choosers] == taken
    nothing = Chooser(tmp_path)
    assert nothing.said == f"[] {cores_of_this_process} None"
    choosers[1].let_go()
    again = Chooser(tmp_path)
    assert again.said == taken[1]
    for chooser in (*choosers[::2], nothing, again):
        chooser.let_go()


@needs_free_cores
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cores": 0}, "[] [0] None"),
        ({"NPROC": "2"}, f"[] {cores_of_this_process} 2"),
        (
            {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"},
            f"[] {cores_of_this_process} None",
        ),
        ({"XLA_FLAGS": "--xla_dump_to=/nowhere"}, "[0] [0] 1"),
    ],
)
def test_the_users_own_choice_of_cores_stands(tmp_path, options, said):
    chooser = Chooser(tmp_path, **options)
    chooser.let_go()
    assert chooser.said == said


@needs_free_cores
def test_a_run_takes_several_cores_or_what_is_left(tmp_path):
    two = Chooser(tmp_path, WANTED="2")
    two.let_go()
    assert two.said == "[0, 1] [0, 1] 2"
    one = Chooser(tmp_path)
    rest = Chooser(tmp_path, WANTED="64")
    for chooser in (one, rest):
        chooser.let_go()
    others = cores_of_this_process[1:]
    assert (one.said, rest.said) == ("[0] [0] 1", f"{others} {others} {len(others)}")


SPREAD = """
import os
import jax
from common.run.threads import XLA_POOL, _name_of, spread_pool, use_cores
cores = use_cores(2)
jax.devices()
spread_pool(cores)
tasks = [int(task) for task in os.listdir("/proc/self/task")]
pool = [task for task in tasks if _name_of(task) == XLA_POOL]
print(sorted(sorted(os.sched_getaffinity(task)) for task in pool))
"""


@needs_free_cores
def test_each_thread_of_the_pool_gets_a_core_of_its_own(tmp_path):
    kept = {k: v for k, v in environment().items() if k != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-c", SPREAD],
        env=kept | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "[[0], [1]]\n"), done.stderr
