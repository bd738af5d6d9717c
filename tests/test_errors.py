"""Every bad input ends with exit code 2 and one line on standard error, and leaves no folder."""

import json
import re
import shlex
import shutil
import signal
from functools import partial
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from run_helpers import SHORT, finished_run, run_alone, run_forked, run_here
from toy_envs import EchoEnv

from algos.dqn import Config, Trainer
from common.errors import UserError

from common.run.checkpoint import Checkpoints

# name: (flags, what the line must hold)
BAD_FLAGS: dict[str, tuple[str, list[str]]] = {
    "flag unknown": ("--learning-rat 1", ["'--learning-rat'", "--learning-rate", "--help"]),
    "flag unknown, nothing near": ("--zzz 1", ["'--zzz'", "--help"]),
    "flag of another algorithm": ("--gae-lambda 0.9", ["'--gae-lambda'", "--help"]),
    "positional": ("CartPole-v1", ["'CartPole-v1'", "--help"]),
    "flag without value": ("--seed", ["--seed takes a whole number", "no value", "--help"]),
    "flag before another": ("--seed --track", ["--seed takes a whole number", "no value"]),
    "tags without value": ("--wandb-tags", ["--wandb-tags takes a list of words, got no value"]),
    "tags of nothing": ("--wandb-tags=", ["--wandb-tags takes a list of words, got no value"]),
    "kwargs without value": ("--env-kwargs --seed 2", ["--env-kwargs takes a list", "no value"]),
    "switch with a value": ("--track false", ["'false'", "--track takes", "--no-track for false"]),
    "switch with = and a value": ("--no-debug=True", ["'True'", "--no-debug takes no value"]),
    "bare --": ("--", ["unknown argument '--'", "--help"]),
    "bare -- before a flag": ("-- --seed 3", ["unknown argument '--'", "--help"]),
    "two values": ("--seed 1 2", ["'2'", "--help"]),
    "text for int": ("--seed abc", ["--seed takes a whole number", "'abc'", "--help"]),
    "float for int": ("--num-envs=1.5", ["--num-envs takes a whole number", "'1.5'"]),
    "nan for int": ("--batch-size nan", ["--batch-size takes a whole number", "'nan'"]),
    "text for float": ("--gamma x", ["--gamma takes a number", "'x'", "--help"]),
    "underscores": ("--learning_rate x", ["--learning-rate takes a number", "'x'"]),
    "choice": ("--env-backend gym", ["'gym'", "auto, envpool, gymnasium, jax", "--help"]),
    "device": ("--device tpu", ["'tpu'", "auto, cpu, gpu"]),
    "wandb mode": ("--wandb-mode x", ["'x'", "online, offline"]),
    "no preset": ("--preset=", ["--preset needs a value, got ''"]),
    "no resume": ("--resume=", ["--resume needs a value, got ''"]),
    "no module": ("--env-module=", ["--env-module needs a value, got ''"]),
    "no id": ("--env-id=", ["--env-id needs a value, got ''"]),
    "no config": ("--config=", ["--config needs a value, got ''"]),
    "abbreviation": ("--lr 1e-3", ["'--lr'", "did you mean --learning-rate?"]),
    "preset": ("--preset small", ["--preset 'small'", "auto, classic, minatar, atari"]),
    "learning_rate nan": ("--learning-rate nan", ["--learning-rate", "finite number", "nan"]),
    "learning_rate inf": ("--learning-rate inf", ["--learning-rate", "finite number", "inf"]),
    "learning_rate 0": ("--learning-rate 0", ["--learning-rate must be above 0, got 0"]),
    "learning_rate -1": ("--learning-rate -1", ["--learning-rate must be above 0, got -1"]),
    "gamma 1.5": ("--gamma 1.5", ["--gamma must be between 0 and 1, got 1.5"]),
    "gamma nan": ("--gamma nan", ["--gamma", "finite number", "nan"]),
    "tau -0.1": ("--tau -0.1", ["--tau must be between 0 and 1, got -0.1"]),
    "tau inf": ("--tau inf", ["--tau", "finite number", "inf"]),
    "start_epsilon": ("--start-epsilon 2", ["--start-epsilon must be between 0 and 1, got 2"]),
    "end_epsilon": ("--end-epsilon -1", ["--end-epsilon must be between 0 and 1, got -1"]),
    "evaluation_epsilon": ("--evaluation-epsilon nan", ["--evaluation-epsilon", "finite"]),
    "exploration_fraction": ("--exploration-fraction 1.1", ["between 0 and 1, got 1.1"]),
    "batch_size 0": ("--batch-size 0", ["--batch-size must be above 0, got 0"]),
    "num_envs 0": ("--num-envs 0", ["--num-envs must be above 0, got 0"]),
    "num_envs -1": ("--num-envs -1", ["--num-envs must be above 0, got -1"]),
    "total_timesteps 0": ("--total-timesteps 0", ["--total-timesteps must be above 0, got 0"]),
    "total_timesteps odd": (
        "--total-timesteps 1001",
        ["multiple of --num-envs 8", "1001", "use 1000 or 1008"],
    ),
    "total_timesteps too few": ("--total-timesteps 3", ["multiple of --num-envs 8", "use 8 or 8"]),
    "log_frequency 0": ("--log-frequency 0", ["--log-frequency must be above 0, got 0"]),
    "buffer_size -1": ("--buffer-size -1", ["--buffer-size must be above 0, got -1"]),
    "train_frequency 0": ("--train-frequency 0", ["--train-frequency must be above 0, got 0"]),
    "target_network_frequency 0": (
        "--target-network-frequency 0",
        ["--target-network-frequency must be above 0, got 0"],
    ),
    "n_step 0": ("--n-step 0", ["--n-step must be above 0, got 0"]),
    "frame_stack 0": ("--frame-stack 0", ["--frame-stack must be above 0, got 0"]),
    "seed -1": ("--seed -1", ["--seed must be 0 or more, got -1"]),
    "seed 2**40": (f"--seed {2**40}", ["--seed must be below 2147483648", str(2**40)]),
    "total 2**40": (f"--total-timesteps {2**40}", ["--total-timesteps must be below 2147483648"]),
    "learning_starts -1": ("--learning-starts -1", ["--learning-starts must be 0 or more"]),
    "learning_starts too few": (
        "--learning-starts 30 --n-step 3",
        ["--learning-starts 30", "--num-envs 8", "--n-step 3", "at least 32"],
    ),
    "batch larger than buffer": (
        "--batch-size 2000 --buffer-size 1000",
        ["--batch-size 2000", "--buffer-size 1000", "lower the batch"],
    ),
    "buffer too small": (
        "--buffer-size 32 --batch-size 16 --n-step 4",
        ["--buffer-size 32", "--n-step 4", "--num-envs 8", "at least 40"],
    ),
    "frame_stack of no such frames": (
        "--frame-stack 3",
        ["--frame-stack 3", "(4,)", "use --frame-stack 1"],
    ),
    "eval_episodes 2**31 - 1": (
        "--eval-episodes 2147483647",
        ["--eval-episodes must be between 0 and 100000, got 2147483647"],
    ),
    "learning_rate beyond float32": ("--learning-rate 1e39", ["--learning-rate", "3.40282e+38"]),
    "eval_frequency -1": ("--eval-frequency -1", ["--eval-frequency must be 0 or more, got -1"]),
    "keep_checkpoints 0": ("--keep-checkpoints 0", ["--keep-checkpoints must be above 0"]),
    "checkpoint_frequency -1": (
        "--checkpoint-frequency -1",
        ["--checkpoint-frequency must be 0 or more, got -1"],
    ),
    "kwargs twice": ("--env-kwargs a=1 --env-kwargs b=2", ["--env-kwargs comes twice"]),
    "seeds beyond 2**31": (
        "--env-id gymnax/CartPole-v1 --seed 2147483647 --num-seeds 2",
        ["--seed 2147483647 with --num-seeds 2", "beyond 2147483647; lower --seed"],
    ),
    "config missing": ("--config nowhere.json", ["nowhere.json", "--config", "config.json"]),
    "resume missing": ("--resume nowhere", ["nowhere", "--resume", "runs/"]),
    "resume with config": ("--resume a --config b", ["--resume a", "leave out --config b"]),
    "explorers' flag": ("--in-flight 2", ["--in-flight 2 is for Explorers", "give --explorers N"]),
    "env_module missing": (
        "--env-module no_such_module",
        ["'no_such_module'", "No module named", "PYTHONPATH"],
    ),
}

# The same for algorithms that learn from rollouts: (algorithm, flags, what the line must hold)
BAD_ROLLOUT_FLAGS: dict[str, tuple[str, str, list[str]]] = {
    "num_steps 0": ("ppo", "--num-steps 0", ["--num-steps must be above 0, got 0"]),
    "num_steps float": ("a2c", "--num-steps 2.5", ["--num-steps takes a whole number", "'2.5'"]),
    "update_epochs 0": ("ppo", "--update-epochs 0", ["--update-epochs must be above 0, got 0"]),
    "clip_coef -1": ("ppo", "--clip-coef -1", ["--clip-coef must be above 0, got -1"]),
    "clip_coef nan": ("ppo", "--clip-coef nan", ["--clip-coef", "finite number", "nan"]),
    "gae_lambda 1.5": (
        "ppo",
        "--gae-lambda 1.5",
        ["--gae-lambda must be between 0 and 1, got 1.5"],
    ),
    "gae_lambda -1": ("a2c", "--gae-lambda -1", ["--gae-lambda must be between 0 and 1, got -1"]),
    "target_kl 0": ("ppo", "--target-kl 0", ["--target-kl must be above 0, got 0"]),
    "target_kl text": ("ppo", "--target-kl x", ["--target-kl takes a number", "'x'"]),
    "entropy_coef": ("ppo", "--entropy-coef -0.1", ["--entropy-coef must be 0 or more, got -0.1"]),
    "value_coef": ("a2c", "--value-coef -1", ["--value-coef must be 0 or more, got -1"]),
    "max_grad_norm": ("a2c", "--max-grad-norm 0", ["--max-grad-norm must be above 0, got 0"]),
    "num_minibatches 0": ("ppo", "--num-minibatches 0", ["--num-minibatches must be above 0"]),
    "num_minibatches 3": (
        "ppo",
        "--num-minibatches 3",
        ["--num-minibatches 3 does not divide", "--num-envs 4 times --num-steps 128 = 512"],
    ),
    "q_lambda 1.5": ("pqn", "--q-lambda 1.5", ["--q-lambda must be between 0 and 1, got 1.5"]),
    "continuous actions of pqn": (
        "pqn",
        "--env-id Pendulum-v1",
        ["pqn needs a Discrete action space, Pendulum-v1 has Box(-2.0, 2.0"],
    ),
    "num_minibatches of sequences": (
        "ppo_rnn",
        "--num-minibatches 16",
        ["--num-minibatches 16 does not divide --num-envs 8", "whole"],
    ),
    "too many updates": (
        "ppo",
        "--update-epochs 1000000 --num-minibatches 512",
        ["512000000 updates of each rollout", "in --total-timesteps 500000; lower one of them"],
    ),
    "less than a rollout": (
        "ppo",
        "--total-timesteps 508",
        ["--total-timesteps 508 is less than", "--num-envs 4 times --num-steps 128 = 512"],
    ),
    "less than a short rollout": (
        "a2c",
        "--total-timesteps 32",
        ["--total-timesteps 32 is less than", "--num-envs 8 times --num-steps 5 = 40"],
    ),
    "core": ("ppo_rnn", "--core rnn", ["'rnn'", "lstm, gru", "--help"]),
    "core_size 0": ("ppo_rnn", "--core-size 0", ["--core-size must be above 0, got 0"]),
    "core of a feed-forward": ("ppo", "--core lstm", ["'--core'", "--help"]),
    "clip_coef of a2c": ("a2c", "--clip-coef 0.2", ["'--clip-coef'", "--help"]),
    "preset": ("ppo_rnn", "--preset big", ["--preset 'big'", "auto, classic, mujoco, atari"]),
    "text actions": (
        "ppo",
        "--env-module failing_envs --env-id Failing-v0 --env-kwargs fault=space",
        ["Failing-v0", "Text"],
    ),
    **{
        f"several actions at once, {algo}": (
            algo,
            "--env-id ToyDictActions-v0",
            [f"{algo} needs a Discrete, MultiDiscrete, MultiBinary or Box action", "Dict('a'"],
        )
        for algo in ("a2c", "ppo", "ppo_rnn")
    },
}
TWO = spaces.Discrete(2)
gym.register(
    "ToyDictActions-v0", lambda: EchoEnv(spaces.Box(-1, 1, (3,), np.float32), spaces.Dict(a=TWO))
)

# The same for algorithms of continuous actions and a replay buffer
BAD_ACTOR_CRITIC_FLAGS: dict[str, tuple[str, str, list[str]]] = {
    **{
        f"discrete actions, {algo}": (
            algo,
            "--env-id CartPole-v1",
            [f"{algo} needs a Box action space, CartPole-v1 has Discrete(2)"],
        )
        for algo in ("ddpg", "td3", "sac")
    },
    "continuous actions": (
        "sac_discrete",
        "--env-id Pendulum-v1",
        ["sac_discrete needs a Discrete action space, Pendulum-v1 has Box(-2.0, 2.0"],
    ),
    **{
        f"{name}, {algo}": (
            algo,
            f"--env-id {env_id}",
            [f"{algo} scales its actions to their bounds, {env_id}", "finite bounds"],
        )
        for algo in ("ddpg", "td3", "sac")
        for name, env_id in {
            "no bounds": "ToyUnbounded-v0",
            "one bound": "ToyOneBound-v0",
            "bounds beyond float32": "ToyEnormous-v0",
        }.items()
    },
    **{
        f"no actions, {algo}": (algo, "--env-id ToyNoActions-v0", ["empty action space", "Toy"])
        for algo in ("sac", "ppo")
    },
    "whole numbers for actions": (
        "sac",
        "--env-id ToyWholeActions-v0",
        ["sac needs a floating Box action space"],
    ),
    **{
        f"updates_per_step {value}": (
            "sac",
            f"--env-id Pendulum-v1 --updates-per-step {value}",
            ["--updates-per-step must be", f"got {value}"],
        )
        for value in ("0", "-1", "0.0004")
    },
    "updates_per_step too many": (
        "sac",
        "--updates-per-step 2.5 --total-timesteps 1000000000",
        ["--updates-per-step 2.5 makes more than 2147483647 updates"],
    ),
    "target_entropy 2": (
        "sac_discrete",
        "--target-entropy 2",
        ["--target-entropy must be between 0 and 1, got 2"],
    ),
    "num_cores 0": ("sac", "--num-cores 0", ["--num-cores must be above 0, got 0"]),
    "noise_correlation 1": (
        "td3",
        "--noise-correlation 1",
        ["--noise-correlation must be 0 or more and below 1, got 1.0"],
    ),
    "updates_per_step nan": ("td3", "--updates-per-step nan", ["--updates-per-step", "finite"]),
    "noise_correlation 1.5": (
        "ddpg",
        "--noise-correlation 1.5",
        ["--noise-correlation must be 0 or more and below 1, got 1.5"],
    ),
    "noise_correlation -1": (
        "sac",
        "--noise-correlation -0.5",
        ["must be 0 or more and below 1, got -0.5"],
    ),
    "policy_frequency 0": (
        "td3",
        "--policy-frequency 0",
        ["--policy-frequency must be above 0, got 0"],
    ),
    "policy_noise -1": ("td3", "--policy-noise -1", ["--policy-noise must be 0 or more, got -1"]),
    "noise_clip -1": ("td3", "--noise-clip -1", ["--noise-clip must be 0 or more, got -1"]),
    "exploration_noise -1": (
        "ddpg",
        "--exploration-noise -1",
        ["--exploration-noise must be 0 or more, got -1"],
    ),
    "alpha 0": ("sac", "--alpha 0", ["--alpha must be above 0, got 0"]),
    "target_entropy nan": (
        "sac",
        "--target-entropy nan",
        ["--target-entropy", "finite number", "nan"],
    ),
    "alpha nan": ("sac_discrete", "--alpha nan", ["--alpha", "finite number", "nan"]),
    "tau 2": ("sac", "--tau 2", ["--tau must be between 0 and 1, got 2"]),
    "learning_starts 1": ("td3", "--learning-starts 1", ["--learning-starts 1", "at least 2"]),
    "policy_frequency of sac": ("sac", "--policy-frequency 2", ["'--policy-frequency'", "--help"]),
}
for toy_id, action_space in {
    "ToyUnbounded-v0": spaces.Box(-np.inf, np.inf, (2,), np.float32),
    "ToyOneBound-v0": spaces.Box(np.float32([-1, -1]), np.float32([1, np.inf])),
    "ToyWholeActions-v0": spaces.Box(0, 3, (2,), np.int32),
    "ToyEnormous-v0": spaces.Box(-1e308, 1e308, (2,), np.float64),
    "ToyNoActions-v0": spaces.Box(-1, 1, (0,), np.float32),
}.items():
    gym.register(toy_id, partial(EchoEnv, spaces.Box(-1, 1, (3,), np.float32), action_space))

BAD_ENVIRONMENTS: dict[str, tuple[str, list[str]]] = {
    "id near": ("--env-id CartPol-v1", ["'CartPol-v1'", "did you mean CartPole-v1"]),
    "id near, atari": ("--env-id Breakot-v5", ["'Breakot-v5'", "Breakout-v5"]),
    "id near, gymnax": ("--env-id gymnax/Cartpole-v1", ["gymnax/CartPole-v1"]),
    "id strange": ("--env-id zzzzzz", ["'zzzzzz'", "docs/environments.md"]),
    "id of another backend": (
        "--env-id gymnax/CartPole-v1 --env-backend envpool",
        ["'gymnax/CartPole-v1'", "backend envpool"],
    ),
    "id unknown to gymnasium": (
        "--env-id Breakout-v5 --env-backend gymnasium",
        ["'Breakout-v5'", "backend gymnasium"],
    ),
    "action space": ("--env-id Pendulum-v1", ["dqn", "Discrete", "Box(-2.0, 2.0", "Pendulum-v1"]),
    "two players": ("--env-id pgx/connect_four", ["connect_four", "2 players", "pgx/2048"]),
    "arm passes through the object": (
        "--env-id Pusher-v4",
        ["Pusher-v4", "MuJoCo 3", "--env-id Pusher-v5", "--env-backend gymnasium", "mujoco<3"],
    ),
    "kwargs without =": ("--env-kwargs frame_skip", ["--env-kwargs", "'frame_skip'", "KEY=VALUE"]),
    "kwargs too deep": (f"--env-kwargs x={'-' * 100_000}1", ["--env-kwargs x", "a number"]),
    "kwargs too long": (f"--env-kwargs x={'9' * 5000}", ["999 ... 999", "max_episode_steps"]),
    "kwargs without a hash": ("--env-kwargs x={[]:1}", ["--env-kwargs x", "{[]:1}", "a number"]),
    "no episode": ("--env-kwargs max_episode_steps=0", ["max_episode_steps=0", "1 or more"]),
    "truth for steps": ("--env-kwargs max_episode_steps=True", ["=True", "a whole number"]),
    "text for steps": ("--env-kwargs max_episode_steps=1e3", ["=1000.0", "a whole number"]),
    "endless threshold": ("--env-kwargs reward_threshold=1e999", ["=inf", "finite number"]),
    "threads below 0": ("--env-kwargs num_threads=-3", ["num_threads=-3", "between 0 and 1024"]),
    "too many threads": ("--env-kwargs num_threads=100000", ["=100000", "between 0 and 1024"]),
    "kwargs that follow from others": (
        "--env-kwargs max_num_players=2",
        ["max_num_players", "num_thr"],
    ),
    "kwargs that end envpool's process": (
        "--env-id Pong-v5 --env-kwargs stack_num=0",
        ["{'stack_num': 0}", "Pong-v5", "noop_max"],
    ),
    "steps beyond 32 bits": (
        "--env-id gymnax/CartPole-v1 --env-kwargs max_steps_in_episode=99999999999999",
        ["max_steps_in_episode must be between 1 and", "99999999999999"],
    ),
    "no steps": (
        "--env-id gymnax/CartPole-v1 --env-kwargs max_steps_in_episode=0",
        ["max_steps_in_episode must be between 1 and", "got 0"],
    ),
    "gravity beyond 32 bits": (
        "--env-id gymnax/CartPole-v1 --env-kwargs gravity=1e400",
        ["gravity must be between", "got inf"],
    ),
    "kwargs unknown to envpool": (
        "--env-kwargs gravity=1",
        ["gravity", "CartPole-v1", "max_episode_steps"],
    ),
    "kwargs unknown to gymnasium": (
        "--env-backend gymnasium --env-kwargs gravity=1",
        ["gravity", "CartPole-v1", "--env-kwargs"],
    ),
    "kwargs unknown to gymnax": (
        "--env-id gymnax/CartPole-v1 --env-kwargs weight=1",
        ["weight", "gravity", "--env-kwargs"],
    ),
    "raises when made": (
        "--env-module failing_envs --env-id Failing-v0 --env-kwargs fault=construct",
        ["Failing-v0", "no such maze"],
    ),
    "exits when made": (
        "--env-module failing_envs --env-id Failing-v0 --env-kwargs fault=exit at=0",
        ["Failing-v0", "SystemExit: 0"],
    ),
    "interrupts when made": (
        "--env-module failing_envs --env-id Failing-v0 --env-kwargs fault=interrupt at=0",
        ["Failing-v0", "KeyboardInterrupt"],
    ),
    "exits at reset": (
        "--env-module failing_envs --env-id Failing-v0 --env-kwargs fault=exit at=1",
        ["SystemExit: 0", "--debug"],
    ),
    "raises at reset": (
        "--env-module failing_envs --env-id Failing-v0 --env-kwargs fault=reset",
        ["RuntimeError", "the maze is shut", "--debug"],
    ),
    "shape at reset": (
        "--env-module failing_envs --env-id Failing-v0 --env-kwargs fault=reset_shape",
        ["(3,)", "(4,)"],
    ),
    "unsupported space": (
        "--env-module failing_envs --env-id Failing-v0 --env-kwargs fault=space",
        ["Failing-v0", "Text", "Box, Discrete, MultiDiscrete"],
    ),
}

# These fail inside the compiled loop, before the first log point.
LATE_FAULTS: dict[str, list[str]] = {
    "raise": ["RuntimeError", "the maze fell down", "--debug"],
    "exit": ["SystemExit: 0", "--debug"],
    "interrupt": ["KeyboardInterrupt", "--debug"],
    "nan_obs": ["not finite", "mend the environment"],
    "nan_reward": ["not finite", "mend the environment"],
    "dtype": ["complex64", "float32"],
    "shape": ["(3,)", "(4,)"],
}


def check(ran, words, runs: Path) -> None:
    """One line on standard error that holds the words, exit code 2, no run folder."""
    lines = ran.err.splitlines()
    assert ran.code == 2, (ran.out, ran.err)
    assert len(lines) == 1 and lines[0].startswith("error: "), ran.err
    assert not [word for word in words if word not in lines[0]], lines[0]
    assert len(lines[0]) < 1_600, lines[0]
    assert "Traceback" not in ran.out
    assert not runs.is_dir() or not list(runs.iterdir())


@pytest.mark.parametrize("name", BAD_FLAGS)
def test_bad_flag(capsys, tmp_path, name):
    flags, words = BAD_FLAGS[name]
    runs = tmp_path / "runs"
    check(run_here(capsys, *shlex.split(flags), "--runs-dir", runs), words, runs)


@pytest.mark.parametrize("name", BAD_ROLLOUT_FLAGS)
def test_bad_flag_of_a_rollout(capsys, tmp_path, name):
    algo, flags, words = BAD_ROLLOUT_FLAGS[name]
    runs = tmp_path / "runs"
    argv = [*shlex.split(flags), "--runs-dir", runs]
    check(run_here(capsys, *argv, module=f"algos.{algo}"), words, runs)


@pytest.mark.parametrize("name", BAD_ACTOR_CRITIC_FLAGS)
def test_bad_flag_of_an_actor_critic(capsys, tmp_path, name):
    algo, flags, words = BAD_ACTOR_CRITIC_FLAGS[name]
    runs = tmp_path / "runs"
    argv = [*shlex.split(flags), "--runs-dir", runs]
    check(run_here(capsys, *argv, module=f"algos.{algo}"), words, runs)
    assert not runs.exists()


@pytest.mark.parametrize("name", BAD_ENVIRONMENTS)
def test_bad_environment(capsys, tmp_path, name):
    flags, words = BAD_ENVIRONMENTS[name]
    runs = tmp_path / "runs"
    check(run_here(capsys, *shlex.split(flags), "--runs-dir", runs), words, runs)


@pytest.mark.parametrize("fault", LATE_FAULTS)
def test_environment_that_fails_before_the_first_log_point(capsys, tmp_path, fault):
    runs = tmp_path / "runs"
    flags = ["--env-module", "failing_envs", "--env-id", "Failing-v0", "--runs-dir", runs]
    ran = run_here(capsys, *SHORT, *flags, "--env-kwargs", f"fault={fault}", "at=30")
    check(ran, ["Failing-v0", *LATE_FAULTS[fault]], runs)


def test_an_empty_runs_dir(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check(run_here(capsys, *SHORT, "--runs-dir="), ["--runs-dir needs a value, got ''"], tmp_path)


def test_help_names_the_presets(capsys):
    for flag in ("--help", "-h"):
        ran = run_here(capsys, flag)
        assert ran.code == 0 and "auto, classic, minatar, atari" in " ".join(ran.out.split())


def test_a_close_that_fails_changes_nothing(capsys, tmp_path):
    runs = tmp_path / "runs"
    flags = ["--env-module", "failing_envs", "--env-id", "Failing-v0", "--runs-dir", runs]
    ran = run_here(capsys, *SHORT, *flags, "--env-kwargs", "closing=True")
    assert ran.code == 0 and list(runs.glob("*/result.json"))
    assert set(ran.err.splitlines()) == {
        "warning: close: the environment raised SystemExit: 0; "
        "mend the environment (--debug shows the traceback)"
    }
    ran = run_here(capsys, *SHORT, *flags, "--env-kwargs", "closing=True", "fault=raise", "at=30")
    assert ran.code == 2 and "error: Failing-v0: the environment raised RuntimeError" in ran.err


def test_a_vector_is_no_stack_of_frames():
    with pytest.raises(UserError, match="--frame-stack 4"):
        Trainer(Config(frame_stack=4))  # CartPole-v1 observes 4 numbers


def test_runs_dir_that_is_a_file(capsys, tmp_path):
    runs = tmp_path / "runs"
    runs.touch()
    ran = run_here(capsys, *SHORT, "--runs-dir", runs)
    check(ran, [str(runs), "--runs-dir"], runs)
    ran = run_here(capsys, *SHORT, "--runs-dir", runs / "below")
    check(ran, [str(runs), "--runs-dir"], runs)


def test_runs_dir_whose_checkpoints_could_not_be_read(capsys, tmp_path):
    """orbax looks for its files by patterns, and finds none below exp[1]."""
    runs = tmp_path / "exp[1]"
    check(
        run_here(capsys, *SHORT, "--runs-dir", runs),
        ["--runs-dir", "has [1] in its whole path"],
        runs,
    )


def test_runs_dir_that_leads_nowhere(capsys, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    ran = run_here(capsys, *SHORT, "--runs-dir", tmp_path / "link")
    check(ran, ["cannot write to --runs-dir", "link"], tmp_path / "gone")


def test_runs_dir_where_nobody_may_write(capsys):
    runs = Path("/proc/runs")
    check(run_here(capsys, *SHORT, "--runs-dir", runs), [str(runs), "--runs-dir"], runs)


@pytest.mark.parametrize("episodes", ["0", "-3", "x"])
def test_evaluate_episodes(capsys, tmp_path, episodes):
    ran = run_here(capsys, tmp_path, "--episodes", episodes, module="common.evaluate")
    check(ran, ["--episodes", episodes], tmp_path)


@pytest.fixture
def ctrl_c_raises():
    """Python's own handler, which a process that a shell starts in the background lacks."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.mark.usefixtures("ctrl_c_raises")
def test_ctrl_c_in_the_code_of_an_environment(capsys, tmp_path):
    """Without signals collected, Ctrl-C raises KeyboardInterrupt wherever Python is."""
    runs = tmp_path / "runs"
    flags = ["--env-module", "failing_envs", "--env-id", "Failing-v0", "--runs-dir", runs]
    assert run_here(capsys, *SHORT, *flags).code == 0
    (folder,) = runs.iterdir()
    edit_config(folder, env_kwargs=["fault=interrupt", "at=5"])
    ran = run_here(capsys, folder, module="common.evaluate")
    assert (ran.code, ran.out, ran.err) == (130, "", "stopped by SIGINT\n")


@pytest.mark.slow
def test_evaluate_flags(capsys, tmp_path):
    def evaluate(*args):
        return run_here(capsys, *args, module="common.evaluate")

    check(evaluate(), ["give a run folder", "--help"], tmp_path)
    check(evaluate(tmp_path / "nowhere"), ["nowhere", "runs/"], tmp_path)
    check(evaluate(tmp_path), [str(tmp_path), "not a run folder", "runs/"], tmp_path)
    check(evaluate(tmp_path, "--episode", "3"), ["'--episode'", "--episodes"], tmp_path)
    check(evaluate(tmp_path, "--checkpoint", "first"), ["'first'", "latest or best"], tmp_path)
    folder, _ = finished_run()
    check(evaluate(folder, "--checkpoint", "123"), ["step 123", "4000"], tmp_path)
    check(evaluate(folder, "--checkpoint", "1" * 5_000), ["latest or best"], tmp_path)
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    shutil.rmtree(copy / "videos", ignore_errors=True)
    (copy / "videos").touch()
    ran = evaluate(copy, "--video", "--episodes", 1)
    assert ran.code == 2 and ran.err.startswith("error: --video ") and ran.err.count("\n") == 1


CONFIGS: dict[str, tuple[str, list[str]]] = {
    "not JSON": ("{", ["config.json", "give a JSON file"]),
    "not an object": ("[1]", ["list", "give a JSON file"]),
    "unknown key": ('{"gama": 1}', ["'gama'", "did you mean 'gamma'"]),
    "text for a number": ('{"gamma": "high"}', ["'gamma'", "'high'", "a number"]),
    "number for a text": ('{"env_id": 5}', ["'env_id'", "5", "a text"]),
    "float for int": ('{"num_envs": 2.5}', ["'num_envs'", "2.5", "a whole number"]),
    "int for bool": ('{"track": 1}', ["'track'", "1", "true or false"]),
    "bool for int": ('{"seed": true}', ["'seed'", "True", "a whole number"]),
    "null character": ('{"runs_dir": "a\\u0000b"}', ["'runs_dir'", "'a\\x00b'", "a text"]),
    "null": ('{"seed": null}', ["'seed'", "None", "a whole number"]),
    "choice": ('{"env_backend": "gym"}', ["'gym'", "auto, envpool, gymnasium, jax"]),
    "text for a list": ('{"env_kwargs": "a=1"}', ["'env_kwargs'", "'a=1'", "a list"]),
    "NaN": ('{"gamma": NaN}', ["--gamma", "nan"]),
    "too deep": ("[" * 100_000, ["nested too deeply", "give a JSON file"]),
    "beyond floats": (f'{{"learning_rate": 1{"0" * 400}}}', ["--learning-rate", "3.40282e+38"]),
    "range": ('{"tau": 2}', ["--tau must be between 0 and 1, got 2"]),
    "preset": ('{"preset": "x"}', ["--preset 'x'", "auto, classic, minatar, atari"]),
    "config": ('{"config": "c"}', ["'config', which holds for one call", "give --config"]),
    "resume": ('{"resume": "r"}', ["'resume', which holds for one call", "give --resume"]),
    "debug": ('{"debug": true}', ["'debug', which holds for one call", "give --debug"]),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_bad_config_file(capsys, tmp_path, name):
    text, words = CONFIGS[name]
    (tmp_path / "config.json").write_text(text)
    runs = tmp_path / "runs"
    ran = run_here(capsys, "--config", tmp_path / "config.json", "--runs-dir", runs)
    check(ran, words, runs)


def test_a_run_too_short_to_learn_says_so(capsys, tmp_path):
    flags = ("--total-timesteps", 1600, "--eval-frequency", 0, "--eval-episodes", 0)
    ran = run_here(capsys, *flags, "--runs-dir", tmp_path)
    assert ran.code == 0
    assert "warning: nothing is learned before --learning-starts 10,000 of" in ran.out


def test_a_preset_against_that_of_a_config_file(capsys, tmp_path):
    """The file's values win over a preset's, so that the flag would change the label alone."""
    path, runs = tmp_path / "config.json", tmp_path / "runs"
    path.write_text('{"preset": "classic", "gamma": 0.9}')
    ran = run_here(capsys, "--config", path, "--preset", "atari", "--runs-dir", runs)
    check(ran, [f"--preset atari differs from the preset classic in {path}", "leave it out"], runs)
    path.write_text('{"preset": "atari"}')
    ran = run_here(capsys, "--config", path, "--preset", "auto", "--runs-dir", runs)
    check(ran, ["--preset auto (classic here) differs from the preset atari in"], runs)


@pytest.fixture
def run_folder(tmp_path) -> Path:
    """A finished run to spoil."""
    return Path(shutil.copytree(finished_run()[0], tmp_path / "run"))


def edit_config(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def test_resume_of_a_foreign_folder(capsys, tmp_path):
    ran = run_here(capsys, "--resume", tmp_path)
    check(ran, [str(tmp_path), "give a run folder"], tmp_path / "runs")
    (tmp_path / "config.json").write_text("{")
    ran = run_here(capsys, "--resume", tmp_path)
    check(ran, [str(tmp_path), "give a run folder"], tmp_path / "runs")
    (tmp_path / "config.json").write_text('{"name": "another project"}')
    ran = run_here(capsys, "--resume", tmp_path)
    check(ran, [str(tmp_path), "dqn"], tmp_path / "runs")


def test_resume_without_checkpoints(capsys, run_folder, tmp_path):
    shutil.rmtree(run_folder / "checkpoints")
    check(run_here(capsys, "--resume", run_folder), ["no checkpoint"], tmp_path / "runs")


def test_resume_by_another_algorithm(capsys, run_folder, tmp_path):
    edit_config(run_folder, algo="ppo", gae_lambda=0.95)
    ran = run_here(capsys, "--resume", run_folder)
    check(ran, ["trained by ppo, not by dqn"], tmp_path / "runs")


@pytest.mark.parametrize(
    ("flag", "value", "before"),
    [
        ("num-envs", "4", "8"),
        ("env-id", "Acrobot-v1", "CartPole-v1"),
        ("preset", "atari", "the preset classic"),
    ],
)
def test_resume_with_other_flags(capsys, run_folder, tmp_path, flag, value, before):
    ran = run_here(capsys, "--resume", run_folder, f"--{flag}", value)
    words = [f"--{flag} {value} differs from {before}"]
    words += [] if flag == "preset" else ["--total-timesteps"]
    check(ran, words, tmp_path / "runs")


# In processes of their own: reads that orbax gave up on end with the process, not with the test.
def test_resume_of_another_shape(run_folder, tmp_path):
    edit_config(run_folder, num_envs=4)
    checkpoint_steps = Checkpoints(run_folder / "checkpoints").steps()
    ran = run_forked("--resume", run_folder)
    check(ran, ["no checkpoint", str(run_folder), "can be restored"], tmp_path / "runs")
    assert ran.out.count("warning") == len(checkpoint_steps)  # one line for each that was tried


def test_resume_from_damaged_checkpoints(run_folder, tmp_path):
    for file in (run_folder / "checkpoints").rglob("d/*"):
        file.write_bytes(file.read_bytes()[:10])
    before = sorted(run_folder.rglob("*"))
    ran = run_forked("--resume", run_folder)
    check(ran, ["no checkpoint", str(run_folder), "can be restored"], tmp_path / "runs")
    assert sorted(run_folder.rglob("*")) == before


def test_load_refuses_a_damaged_copy_of_the_algorithm(capsys, run_folder, tmp_path):
    (run_folder / "dqn.py").write_text("def (")
    ran = run_here(capsys, run_folder, module="common.evaluate")
    check(ran, ["not a run folder"], tmp_path / "runs")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--env-id Acrobt-v1", ["'Acrobt-v1'", "Acrobot-v1"]),
        ("--env-id Pendulum-v1", ["Discrete", "Box(-2.0, 2.0"]),
        ("--env-module broken_envs", ["'broken_envs'", "PYTHONPATH", "half a wheel"]),
        ("--device gpu", ["--device gpu", "--device cpu", ".[gpu]"]),
        ("--track", ["wandb login", "--wandb-mode offline"]),
    ],
)
def test_as_a_real_process(tmp_path, flags, words):
    if flags == "--device gpu" and Path("/dev/nvidia0").exists():
        pytest.skip("this machine has a GPU")
    (tmp_path / "broken_envs.py").write_text("raise RuntimeError('half a\\nwheel')")
    home = {"HOME": str(tmp_path), "PYTHONPATH": str(tmp_path)}
    ran = run_alone(*shlex.split(flags), "--runs-dir", tmp_path / "runs", **home)
    check(ran, words, tmp_path / "runs")


def test_debug_shows_the_traceback(capsys, tmp_path):
    ran = run_here(capsys, "--debug", "--env-id", "Pendulum-v1", "--runs-dir", tmp_path / "runs")
    assert ran.code == 2
    assert ran.err.startswith("Traceback") and "require_action_space" in ran.err
    assert ran.err.splitlines()[-1].startswith("error: dqn needs a Discrete action space")


@pytest.mark.parametrize(
    "flags",
    [
        "--learning-rate 1e30",
        "--env-module failing_envs --env-id Failing-v0 --env-kwargs fault=huge_reward at=1",
    ],
)
def test_debug_names_the_first_quantity_that_is_not_finite(capsys, tmp_path, flags):
    runs = tmp_path / "runs"
    ran = run_here(capsys, *SHORT, "--debug", "--runs-dir", runs, *flags.split())
    line = ran.err.splitlines()[-1]
    assert ran.code == 2
    named = r"error: (losses/td_loss|params\S+|opt_state\S+) is not finite at step 10\d\d: lower "
    assert re.match(named + "--learning-rate", line), line
