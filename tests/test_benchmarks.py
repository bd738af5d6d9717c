"""Counting, measuring and writing of the benchmarks; the figures themselves are not tested."""

import json
import math
import os
import re
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from algos import c51, pqn
from algos.ppo import Config
from common.errors import UserError

from common.run import cli

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import conv  # noqa: E402
import gpu  # noqa: E402
import gpu_items  # noqa: E402
import mujoco_versions  # noqa: E402
import pong_torch  # noqa: E402
import quantile_loss  # noqa: E402
import replay  # noqa: E402
import same_bits  # noqa: E402
import throughput  # noqa: E402
import throughput_ppo  # noqa: E402
import throughput_pqn  # noqa: E402

MACHINE = {"cpu": "CPU", "cores": 2, "jax": "1.2", "commit": "abc", "command": "python x.py"}
MACS = [3_276_800, 2_654_208, 1_806_336, 1_605_632]
FIGURES = {"loop 4": 40.0, "baseline 4": 10.0, "env 4": 100.0, "learn 4": 100.0}
FIGURES |= {"gymnax loop 4": 70.0, "gymnax env 4": 300.0, "plain 4": 38.0, "pinned 4": 40.0}


# Counting


def test_macs_by_hand() -> None:
    # positions · kernel area · input channels · output channels, then inputs · outputs
    assert conv.nature_cnn_macs() == MACS
    assert MACS == [20**2 * 8**2 * 4 * 32, 9**2 * 4**2 * 32 * 64, 7**2 * 3**2 * 64 * 64, 3136 * 512]
    assert conv.nature_cnn_macs(1, 36) == [64 * 64 * 32, 9 * 16 * 32 * 64, 9 * 64 * 64, 64 * 512]


def test_flop_by_hand() -> None:
    assert conv.forward_flop(MACS, 2) == 2 * 2 * 9_342_976
    forward, parameters, inputs = 9_342_976, 9_342_976, 9_342_976 - 3_276_800
    assert conv.gradient_flop(MACS, 2) == 2 * 2 * (forward + parameters + inputs)
    assert conv.count_flop("forward 8") == conv.forward_flop(MACS, 8)
    assert conv.count_flop("gradient 32") == conv.gradient_flop(MACS, 32)


def test_flop_of_a_rollout_by_hand() -> None:
    config = Config(num_envs=2, num_steps=3, update_epochs=5, num_minibatches=1)
    macs = 9_342_976 + 512 * (6 + 1)
    inference, row = (3 + 1) * 2 * 2 * macs, 2 * (3 * macs - 3_276_800)
    assert pong_torch.rollout_flop(config, 6) == inference + 5 * 3 * 2 * row


# Writing


def test_throughput_is_written(tmp_path: Path) -> None:
    results = {"machine": MACHINE, "figures": {"one core": FIGURES}}
    throughput_ppo.write(results, tmp_path / "new")
    folder = tmp_path / "new"
    assert json.loads((folder / "throughput_ppo.json").read_text()) == results
    assert (folder / "throughput_ppo.png").stat().st_size > 1000
    table = (folder / "throughput_ppo.md").read_text()
    assert table.startswith("PPO on CartPole-v1, env steps a second: CPU, 2 cores, jax 1.2")
    assert "| one core | 4 | 40 | 10 | 4.0 | 100 | 100 | 80% |" in table
    assert "| `python algos/ppo.py --num-envs 4` | 4 | 38 | 95% |" in table
    assert "gymnax/CartPole-v1, 4 envs" in table and "| one core | 70 | 300 |" in table


def test_dqn_has_one_rate_of_updates_for_all() -> None:
    figures = {"loop 1": 40.0, "loop 8": 50.0, "env 1": 100.0, "env 8": 300.0, "learn": 100.0}
    assert throughput.share_of_limit(figures, 1) == pytest.approx(40 / 50)
    assert throughput.share_of_limit(figures, 8) == pytest.approx(50 / 75)


def test_committed_table_follows_from_its_figures() -> None:
    results = json.loads((throughput.RESULTS / "throughput.json").read_text())
    assert throughput.as_table(results) == (throughput.RESULTS / "throughput.md").read_text()


def test_table_of_convolutions() -> None:
    results = {"machine": MACHINE, "GEMM_GFLOP_per_s": 100.0}
    results |= {"GFLOP": {"gradient 32": 1.5, "forward 8": 0.15}}
    results |= {"ms": {"ours loop": {"gradient 32": 30.0, "forward 8": 2.0}}}
    table = conv.as_table(results)
    assert "| | gradient 32 | forward 8 |\n|---|---|---|\n" in table
    assert "| ours loop | 30.00 (50%) | 2.00 (75%) |" in table


def test_table_of_the_quantile_loss() -> None:
    times = {"pairs": 30.0, "ours": 2.5}
    us = {form: dict.fromkeys(quantile_loss.CASES, time) for form, time in times.items()}
    table = quantile_loss.as_table({"machine": MACHINE, "us": us})
    assert "\n| IQN, `atari` | 32 × 64 × 64 | 30 | 2 | 12.0 |\n" in table


def test_pong_is_summarized_by_medians_and_their_limit() -> None:
    part = {"env": 300.0, "arithmetic": 150.0, "GFLOP_per_rollout": 222.0, "GEMM_GFLOP_per_s": 33.0}
    rounds: list[Any] = [{"ours": [70.0, 90.0], "torch": [40.0, 30.0], "limit": part}]
    rounds.append({"ours": [80.0], "torch": [40.0], "limit": part | {"env": 100.0}})
    rounds.append({"ours": [80.0], "torch": [90.0], "limit": part})
    results = {"machine": MACHINE | {"torch": "2.0"}, **pong_torch.summarize(rounds)}
    assert results["figures"]["limit"] == pytest.approx(100)
    table = pong_torch.as_table(results)
    assert "| ours | 80 | 80% |" in table and "| torch | 40 | 40% |" in table
    assert table.endswith("ours / torch: 2.00\n")


# Measuring


def test_the_plain_loop_learns_by_the_update_of_the_file_of_its_config() -> None:
    loop = throughput.PythonLoop(c51.Config(num_envs=2, buffer_size=40, batch_size=8))
    before = np.array(loop.learner.params["head"]["kernel"])  # a copy: learning donates it
    assert before.shape == (84, 2 * 101)
    loop.run(5)  # 10 env steps, so one update
    assert int(loop.learner.opt_state[0].count) == 1
    assert (before != loop.learner.params["head"]["kernel"]).any()


@pytest.mark.slow
def test_worker_measures_a_loop_below_its_limit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(throughput_ppo, "gymnax_measures", lambda num_envs: {})
    # Time of this process only: other programs on the machine do not count.
    clock = SimpleNamespace(perf_counter=time.process_time)
    monkeypatch.setattr(throughput, "time", clock)
    # Long enough that neither the start of a call nor a collection of garbage counts.
    options = throughput_ppo.Options(num_envs=(4,), repeats=3, seconds=0.2, worker=True)
    throughput_ppo.main(options)
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(figures) == {f"{name} 4" for name in ("loop", "env", "learn", "baseline", "limit")}
    assert all(math.isfinite(rate) and rate > 0 for rate in figures.values())
    assert figures["loop 4"] < 1.3 * figures["limit 4"]


def test_without_torch_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    out = tmp_path / "out"
    with pytest.raises(SystemExit) as exit_info, cli.exit_codes(debug=False):
        pong_torch.main(pong_torch.Options(out=str(out)))
    assert exit_info.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and "pip install torch" in line
    assert not out.exists()


# Comparing


def test_the_comparison_with_mujoco_2_says_what_it_needs(tmp_path: Path, monkeypatch: Any) -> None:
    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(mujoco_versions, "version", version)
    out = tmp_path / "table.md"
    with pytest.raises(UserError, match="'mujoco<3'"):
        mujoco_versions.main(mujoco_versions.VersionOptions(out=str(out)))
    assert not out.exists()


def test_docs_have_the_table_of_mujocos_versions() -> None:
    table, _ = (throughput.RESULTS / "mujoco_versions.md").read_text().split("\n\n")
    assert table in (BENCHMARKS.parent / "docs" / "environments.md").read_text()


def test_same_bits(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(same_bits, "CASES", [("dqn", {}), ("sac", {"alpha": 0.2})])
    seen = []

    def bits_of_run(algo: str, fields: dict) -> list[str]:
        seen.append((algo, fields))
        return [f"500 losses/td_loss {(fields['seed'] / 3).hex()}", digest]

    monkeypatch.setattr(same_bits, "bits_of_run", bits_of_run)
    file, digest = str(tmp_path / "before.json"), "abc"
    assert same_bits.main(same_bits.Options(out=file, num_seeds=2)) == 0
    expected = [("dqn", {}), ("dqn", {}), ("sac", {"alpha": 0.2}), ("sac", {"alpha": 0.2})]
    assert seen == [(algo, x | {"seed": i % 2 + 1}) for i, (algo, x) in enumerate(expected)]
    assert same_bits.main(same_bits.Options(against=file, num_seeds=2)) == 0
    assert capsys.readouterr().out.count(": 0 of 2 differ") == 4
    digest = "abd"
    assert same_bits.main(same_bits.Options(against=file, num_seeds=1, algos=("sac",))) == 1
    assert capsys.readouterr().out == "sac case 1 seed 1: 1 of 2 differ, the first abd\n"
    # What is not there any more differs, too.
    monkeypatch.setattr(same_bits, "bits_of_run", lambda algo, fields: [])
    assert same_bits.main(same_bits.Options(against=file, num_seeds=1, algos=("sac",))) == 1
    monkeypatch.setattr(same_bits, "bits_of_run", bits_of_run)
    # A seed that was not written before differs whole.
    assert same_bits.main(same_bits.Options(against=file, num_seeds=3, algos=("dqn",))) == 1


def test_same_bits_runs_every_algorithm() -> None:
    files = {path.stem for path in (BENCHMARKS.parent / "algos").glob("[!_]*.py")}
    assert {algo for algo, _ in same_bits.CASES} == files


def test_the_bits_of_a_run_are_those_of_its_seed() -> None:
    fields: dict[str, Any] = same_bits.CARTPOLE | {
        "total_timesteps": 400,
        "log_frequency": 200,
        "learning_starts": 100,
    }
    runs = [same_bits.bits_of_run("dqn", fields | {"seed": seed}) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
    assert len(runs[0][-1]) == 64 and not any("SPS" in line for line in runs[0])
    names = {line.split()[1] for line in runs[0][:-1]}
    assert {"losses/td_loss", "losses/q_values", "charts/updates", "charts/epsilon"} <= names


# On a GPU


def gpu_results(**entries: tuple[str, str, dict[str, float]]) -> dict[str, Any]:
    """Results as gpu.py writes them; each entry is (status, detail, figures)."""
    kinds = {name: "rate" if "_" in name else "check" for name in entries}
    keys = "status", "detail", "figures"
    items = {
        name.replace("_", "-"): {"kind": kinds[name], "seconds": 2.5}
        | dict(zip(keys, entry, strict=True))
        for name, entry in entries.items()
    }
    return {"machine": MACHINE | {"device": "GPU X"}, "small": False, "items": items}


def test_gpu_table_by_hand() -> None:
    results = gpu_results(
        envpool=("ok", "all equal", {}),
        resume=("failed", "ValueError: a | b", {}),
        dqn_8=("ok", "", {"loop": 1500.0, "env": 6000.0}),
        ppo_8=("skipped", "time is up", {}),
        seeds_4=("ok", "", {"loop": 900.0, "one_seed": 300.0}),
    )
    title = "GPU X: CPU, 2 cores, jax 1.2, commit abc, `python x.py`"
    assert gpu.as_table(results).splitlines() == [
        *(title, ""),
        *("| check | result | seconds | |", "|---|---|---|---|"),
        "| envpool | ok | 2.5 | all equal |",
        r"| resume | failed | 2.5 | ValueError: a \| b |",
        "",
        "| env steps a second | loop | environments alone | loop / environments |",
        "|---|---|---|---|",
        "| dqn-8 | 1,500 | 6,000 | 25% |",
        "| ppo-8 | skipped: time is up | | |",
        "| seeds-4 | 900 | one seed: 300 | 3.0 times |",
    ]


def test_a_failing_item_is_recorded_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = {
        "device": 'print(\'{"status": "ok", "detail": "GPU X", "figures": {}}\')',
        "envpool": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
        "float64": "raise SystemExit('first\\nlast line\\n---\\nFor simplicity, JAX has removed')",
        "dqn-8": "import subprocess; subprocess.run(['sleep', '60'])",
        "ppo-8": 'print(\'{"status": "ok", "detail": "d", "figures": {"loop": 2, "env": 4}}\')',
    }
    written: list[int] = []

    def run_alone(command: list[str], seconds: float, variables: Any) -> gpu.Ended:
        name = command[command.index("--worker") + 1]
        file = tmp_path / "gpu.json"
        written.append(len(json.loads(file.read_text())["items"]) if file.exists() else 0)
        seconds = 0.5 if name == "dqn-8" else seconds
        return run([sys.executable, "-c", programs[name]], seconds, variables)

    run = gpu.run_alone
    monkeypatch.setattr(gpu, "run_alone", run_alone)
    monkeypatch.setattr(gpu.signal, "signal", lambda *_: None)
    options = gpu.Options(items=("ppo-8", "envpool", "float64", "dqn-8"), out=str(tmp_path))
    assert gpu.main(options) == 1
    results = json.loads((tmp_path / "gpu.json").read_text())
    assert {name: x["status"] for name, x in results["items"].items()} == {
        "envpool": "failed",
        "float64": "failed",
        "dqn-8": "failed",
        "ppo-8": "ok",
    }
    details = [results["items"][name]["detail"] for name in ("envpool", "float64", "dqn-8")]
    assert details[0].startswith("died of SIGSEGV")
    assert details[1] == "exit code 1: last line"
    assert details[2].startswith("given up after") and results["items"]["dqn-8"]["seconds"] < 30
    assert written == [0, 0, 1, 2, 3], "the results are written after each item"
    assert "| ppo-8 | 2 | 4 | 50% |" in (tmp_path / "gpu.md").read_text()
    monkeypatch.setitem(programs, "dqn-8", "raise SystemExit('no such kernel')")
    assert gpu.main(gpu.Options(items=("dqn-8",), out=str(tmp_path))) == 0, "no check failed"


def test_after_the_time_limit_items_are_skipped() -> None:
    now, given = [100.0], []

    def run(item: gpu_items.Item, seconds: float) -> dict[str, Any]:
        given.append((item.name, seconds))
        now[0] += min(item.run(), seconds)  # type: ignore[arg-type]
        entry = {"status": "ok", "detail": "", "figures": {}, "seconds": seconds}
        return entry | ({"given_up": True, "status": "failed"} if item.run() > seconds else {})  # type: ignore

    lengths = {"a": 40, "b": 70, "c": 9, "d": 500, "e": 1}
    items = [gpu_items.Item(n, n != "c", lambda n=n: lengths[n], 60.0) for n in lengths]  # type: ignore
    got = dict(gpu.run_all(items, run, 110.0, 100.0, lambda: now[0]))
    assert given == [("a", 60.0), ("b", 60.0), ("c", 35.0), ("d", 26.0)]
    statuses = [got[name]["status"] for name in lengths]
    assert statuses == ["ok", "failed", "ok", "skipped", "skipped"]
    assert got["e"]["detail"] == "--seconds-limit 110 was used up"
    assert "cut off 25 s after" in got["d"]["detail"]
    assert got["c"]["kind"] == "rate" and "given_up" not in got["b"]


def test_different_steps_and_curves_are_found() -> None:
    flags, obs = np.array([[False, True]]), np.float32([[1, 2]])
    arrays = [obs, obs, np.float32([[0, 1]]), flags, ~flags]
    wide = [np.float64(x) if x.dtype == np.float32 else x for x in arrays]
    outcome = gpu_items.compare_steps(arrays, wide, "1 step")
    assert outcome == ("ok", "1 step, 2 ends of episodes: all 10 values equal", {"different": 0})
    wide[2] = np.array([[0, 1.01]])
    outcome = gpu_items.compare_steps(arrays, wide, "1 step")
    assert outcome.status == "failed" and outcome.detail.endswith("different are 1 of reward")
    no_ends = [*arrays[:3], np.zeros(2, bool), np.zeros(2, bool)]
    assert gpu_items.compare_steps(no_ends, no_ends, "").status == "failed"
    assert (
        gpu_items.worst_difference(
            [np.ones(2), np.array([3.0, 8])], [np.ones(2), np.array([4.0, 8])]
        )
        == 0.125
    )
    # Means 50 and 80; ranges 20 and 10, and a tenth of 80 is 8.
    here, on_cpu = [[1.0, 1], [40.0, 60]], [[1.0, 1], [75.0, 85]]
    assert gpu_items.compare_curves(here, on_cpu).status == "failed"
    assert gpu_items.compare_curves(here, [[1.0, 1], [65.0, 70]]).status == "ok"


def test_gpu_figures_in_the_docs_are_those_of_the_data() -> None:
    results = json.loads((throughput.RESULTS / "gpu.json").read_text())
    table = gpu.as_table(results)
    assert (throughput.RESULTS / "gpu.md").read_text() == table
    rates = [row for row in table.splitlines() if re.match(r"\| [a-z]+-\d+ \| [\d,]+ \|", row)]
    shown = (BENCHMARKS.parent / "docs" / "performance.md").read_text().splitlines()
    assert len(rates) >= 16 and set(rates) <= set(shown)
    section = (BENCHMARKS.parent / "README.md").read_text().split("On one NVIDIA H200")[1]
    figures = re.findall(r"\| ([\d,]+)(?: over all seeds)? \|$", section.split("![")[0], re.M)
    assert len(figures) == 4 and all(f" {figure} |" in table for figure in figures)


@pytest.mark.slow
def test_gpu_program_on_a_cpu(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--small", "--out", str(tmp_path)]
    items = ["envpool", "donation", "dqn-8"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [*command, "--items", *items], capture_output=True, text=True, env=environment, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "gpu.json").read_text())
    assert list(results["items"]) == items
    assert {entry["status"] for entry in results["items"].values()} == {"ok"}
    assert results["items"]["envpool"]["detail"].endswith("values equal")
    figures = results["items"]["dqn-8"]["figures"]
    assert figures["env"] > figures["loop"] > 0
    machine = results["machine"]
    assert machine["device"] == machine["platform"] == "cpu" and machine["num_devices"] == 1
    assert {"jax", "commit", "command"} <= set(machine)
    assert "| donation | ok |" in (tmp_path / "gpu.md").read_text()
    unknown = subprocess.run(
        [*command, "--items", "envpol"], capture_output=True, text=True, timeout=280
    )
    assert unknown.returncode == 2
    (line,) = unknown.stderr.splitlines()
    assert line.startswith("error: unknown --items 'envpol'; accepted are envpool, float64")


@pytest.mark.parametrize("name", ["compare", "env_workers", "tables"])
def test_refuses_flags(name: str) -> None:
    """A program without flags does not start with one: two of these would write the docs anew."""
    command = [sys.executable, str(BENCHMARKS / f"{name}.py")]
    done = subprocess.run([*command, "--out", "x"], capture_output=True, text=True, timeout=280)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == ["error: unknown flag '--out'; see --help for all flags"]


# Prioritized replay


def test_numpy_tree_by_hand() -> None:
    tree = replay.NumpyTree(5)
    tree.update(np.arange(5), np.array([1.0, 2.0, 0.0, 4.0, 3.0]))
    assert tree.sums[1:8].tolist() == [10, 7, 3, 3, 4, 3, 0]
    # Running sums 1, 3, 3, 7, 10.
    assert tree.draw(np.array([0.0, 0.1, 0.29, 0.3, 0.69, 0.99])).tolist() == [0, 1, 1, 3, 3, 4]
    tree.update(np.array([3]), 0.0)
    assert tree.sums[1:8].tolist() == [6, 3, 3, 3, 0, 3, 0]


def test_numpy_replay_never_draws_the_newest_row() -> None:
    buffer, rng = replay.NumpyReplay(32), np.random.default_rng(0)
    for _ in range(7):  # 4 rows: number 2 is the newest
        buffer.add()
    index, obs, next_obs, reward, weight = buffer.sample(rng, 64)
    assert set(index // 8) == {0, 1, 3}
    # Rows 0, 1 and 3 hold steps 4, 5 and 3; the next observation is that of the step after.
    step, lane = np.array([4, 5, -1, 3])[index // 8], index % 8
    assert np.array_equal(obs, buffer.steps["obs"][step, lane])
    assert np.array_equal(next_obs, buffer.steps["obs"][step + 1, lane])
    assert (weight == 1).all() and (reward == 1).all()


@pytest.mark.parametrize("make", [replay.ours_measure, replay.numpy_measure])
def test_replay_iterations_run_again_and_again(make: Any) -> None:
    run = make(64, 8)
    run(2)
    run(3)


def test_replay_table_by_hand() -> None:
    figures = {f"ours 32 {n}": time for n, time in ((10, 20.0), (100, 25.0))}
    figures |= {f"{side} 32 {n}": 50.0 for side in ("flashbax", "numpy") for n in (10, 100)}
    results = {"machine": MACHINE | {"flashbax": "0.1"}, "microseconds": figures}
    lines = replay.as_table(results).splitlines()
    assert "|  | batch | 10 | 100 | 100 / 10 |" in lines
    assert "| ours | 32 | 20.0 | 25.0 | 1.25 |" in lines
    assert "| numpy | 32 | 50.0 (2.5 times ours) | 50.0 (2.0 times ours) | 1.00 |" in lines
    assert lines[-1] == "flashbax 0.1"


def test_without_flashbax_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "flashbax", None)
    out = tmp_path / "out"
    with pytest.raises(SystemExit) as exit_info, cli.exit_codes(debug=False):
        replay.main(replay.Options(out=str(out)))
    assert exit_info.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and "pip install flashbax" in line
    assert not out.exists()


def test_table_of_pqn() -> None:
    figures = {
        f"{name} {what} {algo}": rate
        for name in throughput_pqn.SETTINGS
        for what in ("loop", "learn")
        for algo, rate in {"ppo": 2_000.0, "pqn": 1_500.0, "pqn without LayerNorm": 1_800.0}.items()
    }
    table = throughput_pqn.as_table({"machine": MACHINE, "figures": figures})
    assert "| paper | learn | 2,000 | 1,500 | 0.75 | 1,800 |" in table
    assert len(table.splitlines()) == 4 + 6


def test_pqn_without_layer_norm() -> None:
    config = pqn.Config(env_id="gymnax/CartPole-v1")
    with throughput_pqn.without_layer_norm():
        plain = pqn.Trainer(config).state.learner.params
    whole = pqn.Trainer(config).state.learner.params
    # Two layers, each with a scale and a bias.
    assert len(jax.tree.leaves(whole)) == len(jax.tree.leaves(plain)) + 4
