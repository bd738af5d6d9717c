"""Tuning: the ranges that types give, what a trial is worth, what stops it, and the best flags."""

import csv
import importlib
import json
import shlex
import sys
from pathlib import Path
from typing import ClassVar

import pytest

from algos import dqn, ppo, sac
from common.errors import UserError

from common.run import cli

pytest.importorskip("optuna")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import tune

FLAGS = ["--total-timesteps", "1000", "--learning-starts", "100", "--log-frequency", "100"]


class FakeTrainer:
    """Its return is that of `curve` at each log point; two episodes end there."""

    made: ClassVar[list] = []
    curve = staticmethod(lambda config, step: 1e4 * config.learning_rate)

    def __init__(self, config):
        self.config, self.env = config, self

    def close(self):
        pass

    def __call__(self):
        self.made.append(self.config)
        for step in range(100, self.config.total_timesteps + 100, 100):
            step = min(step, self.config.total_timesteps)
            logs = {"charts/episodic_return": self.curve(self.config, step), "charts/episodes": 2.0}
            yield {"log_type": "collect", "sample_step": step, "logs": logs}
            yield {"log_type": "train", "sample_step": step, "logs": {"losses/td_loss": 1.0}}


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(dqn, "Trainer", FakeTrainer)
    monkeypatch.setattr(FakeTrainer, "made", [])
    return monkeypatch


def tuned(out, *args, flags=FLAGS):
    code = tune.main([*map(str, args), "--out", str(out), "--", *flags])
    return code, list(csv.DictReader((out / "trials.csv").read_text().splitlines()))


# Ranges


def test_ranges_come_from_types_and_defaults():
    fields = ("learning_rate", "gamma", "tau", "num_envs", "n_step", "learning_starts")
    assert tune.spaces_of(dqn.Config(), fields) == {
        "learning_rate": (2.5e-5, 2.5e-3, "x"),
        "gamma": (pytest.approx(0.9), pytest.approx(0.999), "1 - x"),
        "tau": (0, 1, ""),  # 1.0 has no distance from 1
        "num_envs": (2, 32, "x"),
        "n_step": (1, 4, "x"),
        "learning_starts": (2500, 40_000, "x"),
    }
    fields = ("anneal_lr", "entropy_coef", "clip-coef", "gae_lambda")
    spaces = tune.spaces_of(ppo.Config(), fields)
    assert spaces["anneal_lr"] == tune.Choices((False, True))
    assert spaces["entropy_coef"] == (0.001, 0.1, "x")
    assert spaces["clip_coef"] == (pytest.approx(0.02), 2.0, "x")
    assert spaces["gae_lambda"] == (pytest.approx(0.5), pytest.approx(0.995), "1 - x")
    spaces = tune.spaces_of(sac.Config(), ("tau", "alpha=0.01:1", "noise_correlation"))
    assert spaces["tau"] == spaces["noise_correlation"] == (0, 1, "")
    assert spaces["alpha"] == (0.01, 1, "")  # no default from which to tell the spacing


def test_literals_are_choices():
    ppo_rnn = importlib.import_module("algos.ppo_rnn")
    (name,) = [f for f in ppo_rnn.Config.__dataclass_fields__ if f in ("core", "core_kind", "cell")]
    assert tune.spaces_of(ppo_rnn.Config(), (name,)) == {name: tune.Choices(("lstm", "gru"))}


def test_given_ranges():
    given = ("learning_rate=1e-4:1e-2", "gamma=0.9:0.99", "tau=0.1,0.5", "batch_size=32:64")
    assert tune.spaces_of(dqn.Config(), given) == {
        "learning_rate": (1e-4, 1e-2, "x"),
        "gamma": (0.9, 0.99, "1 - x"),
        "tau": tune.Choices((0.1, 0.5)),
        "batch_size": (32, 64, "x"),
    }
    spaces = tune.spaces_of(dqn.Config(), ("gamma=0.5:1", "learning_starts=0:100"))
    assert spaces == {"gamma": (0.5, 1, ""), "learning_starts": (0, 100, "")}
    assert tune.spaces_of(ppo.Config(), ("anneal_lr=true",))["anneal_lr"].values == (True,)


# Trials


def test_the_value_is_the_late_return_over_seeds_and_the_first_trial_the_defaults(tmp_path, fake):
    fake.setattr(FakeTrainer, "curve", lambda self, config, step: step * config.seed / 100)
    fields = ("--fields", "learning_rate", "gamma", "--num-seeds", "2", "--num-trials", "1")
    code, (row,) = tuned(tmp_path, *fields)
    assert code == 0 and row["state"] == "complete"
    assert float(row["value"]) == (10 + 20) / 2  # step 1000 alone is in the last tenth
    assert (float(row["learning_rate"]), float(row["gamma"])) == (2.5e-4, pytest.approx(0.99))
    assert [config.seed for config in FakeTrainer.made] == [1, 2]


def test_the_best_command_line_gives_the_best_config(tmp_path, fake, capsys):
    fields = ("learning_rate", "gamma", "num_envs=7:9", "tau=0.5,1")
    code, rows = tuned(tmp_path, "--fields", *fields, "--num-trials", "8")
    complete = [row for row in rows if row["state"] == "complete"]
    best = max(complete, key=lambda row: float(row["value"]))
    assert code == 0 and len(rows) == 8 and float(best["value"]) > 2.5
    *_, summary, command = capsys.readouterr().out.splitlines()
    assert summary.startswith("best of 8 trials: ")
    assert command == json.loads((tmp_path / "study.json").read_text())["best_command"]
    program, *flags = shlex.split(command)[1:]
    config = cli.parse(dqn.Config, dqn.PRESETS, flags).config
    assert program == "algos/dqn.py" and config.env_id == "gymnax/CartPole-v1"
    assert flags.count("--total-timesteps") == 1
    assert config in FakeTrainer.made
    for name in ("learning_rate", "gamma", "num_envs", "tau"):
        assert getattr(config, name) == float(best[name])
    assert 1000 - config.num_envs < config.total_timesteps <= 1000


def test_bools_make_flags():
    assert tune._flag("anneal_lr", False) == ["--no-anneal-lr"]
    assert tune._flag("anneal_lr", True) == ["--anneal-lr"]


def test_refused_combinations_are_pruned_with_their_reason(tmp_path, fake, capsys):
    fields = ("batch_size=64,5000", "buffer_size=128,256")
    _, rows = tuned(tmp_path, "--fields", *fields, "--num-trials", "10")
    refused = [row for row in rows if row["batch_size"] == "5000"]
    assert refused and len(refused) < 10
    for row in refused:
        assert row["state"] == "pruned" and row["value"] == ""
        assert "--batch-size 5000 is larger than --buffer-size" in row["reason"]
    assert all(config.batch_size == 64 for config in FakeTrainer.made)
    code, _ = tuned(
        tmp_path / "none",
        "--fields",
        "batch_size=5000",
        "--num-trials",
        "2",
        flags=[*FLAGS, "--buffer-size", "128"],
    )
    assert code == 1 and "no trial came to its end" in capsys.readouterr().err


def test_trials_below_the_median_stop_early(tmp_path, fake):
    """Each trial is worse than all before it: those after Optuna's first five stop at once."""
    fake.setattr(FakeTrainer, "curve", lambda self, config, step: -float(len(self.made)))
    _, rows = tuned(tmp_path, "--num-trials", "7")
    assert [row["state"] for row in rows] == ["complete"] * 5 + ["pruned"] * 2
    assert rows[-1]["reason"] == "below the median at step 100 of seed 1"


def test_a_trial_that_fails_while_it_trains_is_pruned(tmp_path, fake):
    def diverge(self, config, step):
        raise UserError("the action is not finite")

    fake.setattr(FakeTrainer, "curve", diverge)
    code, (row,) = tuned(tmp_path, "--num-trials", "1")
    assert (code, row["state"], row["reason"]) == (1, "pruned", "the action is not finite")


def test_without_a_late_episode_there_is_no_value(tmp_path, fake):
    fake.setattr(tune, "points", lambda training: iter([(100, 1.0, 2.0)]))
    code, (row,) = tuned(tmp_path, "--num-trials", "1")
    assert code == 1 and "no episode ended" in row["reason"]


def test_a_real_trial(tmp_path):
    code, (row,) = tuned(tmp_path, "--num-trials", "1", "--fields", "learning_rate")
    assert code == 0 and 8 < float(row["value"]) < 100 and float(row["seconds"]) > 0


# Bad input


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["--algo", "nope"], "unknown --algo 'nope'; accepted are"),
        (["--env-id", "gymnax/Cartpole-v1"], "gymnax/Cartpole-v1"),
        (["--num-trials", "0"], "--num-trials must be 1 or more, got 0"),
        (["--num-seeds", "0"], "--num-seeds must be 1 or more, got 0"),
        (["--fields", "learning_rat"], "cannot be tuned; did you mean learning_rate"),
        (["--fields", "seed"], "'seed' cannot be tuned"),
        (["--fields", "evaluation_epsilon=2:3"], "values must be between 0 and 1"),
        (["--fields", "gamma=0.9:0.8"], "NAME=LOW:HIGH, with LOW below HIGH"),
        (["--fields", "gamma=0.9:high"], "'high' is not a number"),
        (["--fields", "batch_size=1.5,2"], "'1.5' is not a whole number"),
        (["--gamma", "0.9"], "unknown flag '--gamma'; flags of the trials follow `--`"),
        (["--", "--gamma", "2"], "--gamma must be between 0 and 1"),
        (["--", "--seed=3"], "--seed=3 cannot follow `--`"),
    ],
)
def test_bad_input_is_one_line_and_creates_nothing(tmp_path, args, part):
    out = tmp_path / "out"
    with pytest.raises(UserError) as error:
        tune.main(["--out", str(out), *args])
    assert part in str(error.value) and "\n" not in str(error.value)
    assert not out.exists()


def test_a_default_of_zero_needs_a_range():
    config = ppo.Config(entropy_coef=0.0)
    with pytest.raises(UserError, match=r"gives no range; say which, as entropy_coef=LOW:HIGH"):
        tune.spaces_of(config, ("entropy_coef",))


def test_out_that_holds_a_study_or_cannot_be_written(tmp_path, fake):
    tuned(tmp_path, "--num-trials", "1")
    with pytest.raises(UserError, match="holds a study already"):
        tuned(tmp_path, "--num-trials", "1")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write to --out"):
        tune.main(["--out", str(tmp_path / "file" / "out"), "--", *FLAGS])


def test_without_optuna_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(UserError, match=r"pip install -e '\.\[tune\]'"):
        tune.main([])
