"""Explorers: env steps a second beside RLlib's, policy lag and what it costs, returns.

    python benchmarks/throughput_explorers.py
    python benchmarks/throughput_explorers.py --parts peers --rllib-python PATH/TO/python

Every figure is of whole programs, one after the other, with nothing else on the machine; those that
are compared take turns, round by round. Env steps a second are the median of a run's log points.

    peers     `impala.py --explorers 2`, and RLlib's IMPALA with two env runners (rllib_rate.py)
    scaling   1, 2, 4 and 8 Explorers, on CartPole-v1 and where a step waits for a millisecond
    store     trajectories through Ray's object store, of two Explorers that compute nothing
    lag       1, 4 and 16 trajectories in flight, with and without V-trace, 500,000 steps
    learning  CartPole-v1, 500,000 steps, in one process and with two Explorers
"""

import dataclasses
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from machine import ROOT
from report import late_return, read_curve
from throughput import RESULTS, describe_machine

from common.run import cli
from common.run.logger import read_metrics

EXPLORERS = (1, 2, 4, 8)
IN_FLIGHT = (1, 4, 16)
LEARNING = ("impala", "ppo", "apex_dqn")
SLEEPING = ("--env-module", "sleeping_env", "--env-id", "Sleeping-v0")


@dataclasses.dataclass(frozen=True)
class Options:
    """What to measure."""

    parts: tuple[str, ...] = ("peers", "scaling", "store", "lag", "learning")
    """which of the figures; those of other parts stay in the files"""
    rounds: int = 3
    """repeats of each figure in turn; for lag and learning the number of seeds"""
    seconds: float = 60.0
    """length of RLlib's runs, behind their warm-up"""
    rllib_python: str | None = None
    """a Python that can import ray.rllib; peers needs it"""
    out: str = str(RESULTS)
    """folder for throughput_explorers.json, .md and .png"""
    worker: bool = False
    """used by the program itself: measure the store in this process and print JSON"""


class Rate(NamedTuple):
    """What a run came to."""

    SPS: float  # env steps a second, median of the log points behind the first
    policy_lag: float  # trajectories learned between acting and learning, mean
    training_return: float  # of the last tenth of the steps
    curve: list[tuple[int, float, float]]


def main(options: Options) -> None:
    """Measure, and write the results."""
    if options.worker:
        print(json.dumps(store_rate()))
        return
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    path = out / "throughput_explorers.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    measures = {
        "peers": peers,
        "scaling": scaling,
        "store": store,
        "lag": lag,
        "learning": learning,
    }
    for part in options.parts:
        results[part] = measures[part](options) | {"machine": describe_machine()}
        path.write_text(json.dumps(results, indent=1) + "\n")
        (out / "throughput_explorers.md").write_text(as_table(results))
    if "lag" in results:
        save_picture(results["lag"]["runs"], out / "throughput_explorers.png")
    print(as_table(results))


def peers(options: Options) -> dict[str, Any]:
    """Return runs of ours and of RLlib's in turn; ours makes as many steps as RLlib's made."""
    if options.rllib_python is None:
        raise SystemExit("peers needs --rllib-python, a Python with ray[rllib] and torch")
    rates: dict[str, list[Any]] = {"rllib": [], "ours": [], "ours, as many steps": []}
    program = [options.rllib_python, str(ROOT / "benchmarks" / "rllib_rate.py")]
    for seed in range(1, options.rounds + 1):
        done = subprocess.run([*program, str(options.seconds)], stdout=subprocess.PIPE, check=True)
        rllib = json.loads(done.stdout.splitlines()[-1])
        rates["rllib"].append(rllib)
        ours = run("--explorers", 2, "--total-timesteps", 1_000_000, "--seed", seed)
        rates["ours"].append({"SPS": ours.SPS})
        steps = int(rllib["steps"]) // 160 * 160
        same = run("--explorers", 2, "--total-timesteps", steps, "--seed", seed)
        rates["ours, as many steps"].append({"SPS": same.SPS, "return": same.training_return})
    return {"runs": rates}


def scaling(options: Options) -> dict[str, Any]:
    """Return env steps a second and lag by environment and number of Explorers."""
    found: dict[str, dict[int, list[Any]]] = {}
    for _, count in itertools.product(range(options.rounds), EXPLORERS):
        length = ("--total-timesteps", 8_000 * count, "--log-frequency", 800 * count)
        cases = {
            "CartPole-v1": ("--total-timesteps", 1_000_000),
            "Sleeping-v0, 8 in each Explorer": (*SLEEPING, *length),
            "Sleeping-v0, 1 in each": (*SLEEPING, *length, "--num-envs", 1, "--num-steps", 50),
        }
        for case, flags in cases.items():
            rate = run("--explorers", count, *flags)
            figures = {"SPS": rate.SPS, "policy_lag": rate.policy_lag}
            found.setdefault(case, {}).setdefault(count, []).append(figures)
    return {"runs": found}


def lag(options: Options) -> dict[str, Any]:
    """Return late training returns by number in flight, with and without V-trace, and seed."""
    runs = []
    for seed in range(1, options.rounds + 1):
        for in_flight, vtrace in itertools.product(IN_FLIGHT, (True, False)):
            flags = ("--explorers", 2, "--in-flight", in_flight, "--seed", seed)
            rate = run(*flags, "--vtrace" if vtrace else "--no-vtrace")
            setting = {"in_flight": in_flight, "vtrace": vtrace, "seed": seed}
            runs.append(setting | rate._asdict())
    return {"runs": runs}


def learning(options: Options) -> dict[str, Any]:
    """Return late training returns by algorithm, number of Explorers and seed."""
    runs = []
    seeds = range(1, options.rounds + 1)
    for seed, algo, count in itertools.product(seeds, LEARNING, (0, 2)):
        rate = run("--explorers", count, "--seed", seed, algo=algo)
        found = {"SPS": rate.SPS, "training_return": rate.training_return}
        runs.append({"algo": algo, "explorers": count, "seed": seed} | found)
    return {"runs": runs}


def run(*flags: Any, algo: str = "impala") -> Rate:
    """Return the figures of an algorithm file with flags, as a user starts it."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "algos" / f"{algo}.py"), *map(str, flags)]
        command += ["--runs-dir", folder, "--eval-frequency", "0", "--eval-episodes", "0"]
        environment = os.environ | {"PYTHONPATH": str(ROOT / "benchmarks")}
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
        rows = read_metrics(next(Path(folder).glob("*/metrics.csv")))
    # At the first log point the Explorers start, and the Learner compiles.
    SPS = [value for _, _, name, value in rows if name == "charts/SPS"][1:]
    lags = [value for _, _, name, value in rows if name == "explorers/policy_lag"][1:]
    curve = read_curve(rows)
    late = late_return(curve, rows[-1][0])
    return Rate(float(np.median(SPS)), float(np.mean(lags or [0.0])), late, curve)


def store(options: Options) -> dict[str, Any]:
    """Return megabytes a second of trajectories, in a process of its own each time."""
    command = [sys.executable, __file__, "--worker"]
    rates = []
    for _ in range(options.rounds):
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        rates.append(json.loads(done.stdout.splitlines()[-1]))
    return {"runs": rates}


def store_rate(seconds: float = 10.0) -> float:
    """Return megabytes a second that two Explorers of `constant_trajectories.py` deliver."""
    import constant_trajectories

    from common.run.cli import ExplorerOptions
    from common.run.explorers import Explorers
    from common.run.ray_cluster import connected

    options = ExplorerOptions(explorers=2)
    with connected(None, num_cpus=2):
        trainer = constant_trajectories.Trainer(constant_trajectories.Config())
        explorers = Explorers(trainer, options, print)
        state, _ = explorers.run(trainer.state, 0)  # while the Explorers start
        start, megabytes = time.perf_counter(), 0.0
        while time.perf_counter() - start < seconds:
            state, logs = explorers.run(state, 0)
            megabytes += logs["explorers/megabytes"]
        rate = megabytes / (time.perf_counter() - start)
        explorers.close()
    return rate


def as_table(results: dict[str, Any]) -> str:
    """Return the figures in Markdown, a section a part."""
    makers = {
        "peers": _peers_rows,
        "scaling": _scaling_rows,
        "store": _store_rows,
        "lag": _lag_rows,
        "learning": _learning_rows,
    }
    parts = []
    for part in (part for part in makers if part in results):
        machine = results[part]["machine"]
        about = ("cpu", "cores", "jax", "commit", "command")
        head = ", ".join(f"{name} {machine[name]}" for name in about)
        parts.append("\n".join([f"## {part}", "", head, "", *makers[part](results[part]["runs"])]))
    return "\n\n".join(parts) + "\n"


def _spread(values: list[float]) -> str:
    """Return median, least and most."""
    return f"{np.median(values):,.0f} ({min(values):,.0f} to {max(values):,.0f})"


def _peers_rows(runs: dict[str, list[Any]]) -> list[str]:
    rates = {name: [x["SPS"] for x in figures] for name, figures in runs.items()}
    ratio = np.median(rates["ours"]) / np.median(rates["rllib"])
    steps = [int(x["steps"]) for x in runs["rllib"]]
    returns = {name: [x["return"] for x in runs[name]] for name in ("rllib", "ours, as many steps")}
    return [
        f"| | env steps a second | return after {min(steps):,} to {max(steps):,} env steps |",
        "|---|---|---|",
        f"| RLlib | {_spread(rates['rllib'])} | {_spread(returns['rllib'])} |",
        f"| ours | {_spread(rates['ours'])} | {_spread(returns['ours, as many steps'])} |",
        f"| ratio | {ratio:.1f} | |",
    ]


def _scaling_rows(runs: dict[str, dict[str, list[Any]]]) -> list[str]:
    rows = ["| environments | Explorers | env steps a second | to one | policy lag |"]
    rows += ["|---|---|---|---|---|"]
    for case, counts in runs.items():
        one = np.median([x["SPS"] for x in counts[min(counts, key=int)]])
        for count, figures in counts.items():
            rates = [x["SPS"] for x in figures]
            lags = np.median([x["policy_lag"] for x in figures])
            ratio = np.median(rates) / one
            rows.append(f"| {case} | {count} | {_spread(rates)} | {ratio:.2f} | {lags:.1f} |")
    return rows


def _store_rows(rates: list[float]) -> list[str]:
    return [f"{_spread(rates)} megabytes a second from two Explorers, 4.5 MB a trajectory"]


def _lag_rows(runs: list[dict[str, Any]]) -> list[str]:
    rows = [
        "| in flight | policy lag | V-trace | training return | each seed |",
        "|---|---|---|---|---|",
    ]
    for in_flight, vtrace in itertools.product(IN_FLIGHT, (True, False)):
        found = _of(runs, in_flight, vtrace)
        returns = [x["training_return"] for x in found]
        each = ", ".join(f"{x:.1f}" for x in returns)
        lags = np.mean([x["policy_lag"] for x in found])
        mean = f"{np.mean(returns):.1f} ± {np.std(returns):.1f}"
        rows.append(f"| {in_flight} | {lags:.1f} | {'yes' if vtrace else 'no'} | {mean} | {each} |")
    return rows


def _learning_rows(runs: list[dict[str, Any]]) -> list[str]:
    rows = [
        "| | Explorers | training return | each seed | env steps a second |",
        "|---|---|---|---|---|",
    ]
    for algo, count in itertools.product(LEARNING, (0, 2)):
        found = [x for x in runs if x["algo"] == algo and x["explorers"] == count]
        returns = [x["training_return"] for x in found]
        each = ", ".join(f"{x:.1f}" for x in returns)
        mean = f"{np.mean(returns):.1f} ± {np.std(returns):.1f}"
        rows.append(
            f"| {algo} | {count} | {mean} | {each} | {_spread([x['SPS'] for x in found])} |"
        )
    return rows


def _of(runs: list[dict[str, Any]], in_flight: int, vtrace: bool) -> list[dict[str, Any]]:
    return [x for x in runs if x["in_flight"] == in_flight and x["vtrace"] == vtrace]


def save_picture(runs: list[dict[str, Any]], path: Path) -> None:
    """Draw the mean curves over seeds by number in flight, with and without V-trace."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(IN_FLIGHT), figsize=(10, 3.2), sharey=True)
    for axis, in_flight in zip(axes, IN_FLIGHT, strict=True):
        for vtrace, label in ((True, "V-trace"), (False, "without")):
            found = _of(runs, in_flight, vtrace)
            grid = np.linspace(0, 500_000, 51)[1:]
            curves = np.array([np.interp(grid, *np.array(x["curve"]).T[:2]) for x in found])
            thousands = grid / 1_000
            (line,) = axis.plot(thousands, curves.mean(axis=0), label=label)
            bounds = curves.min(axis=0), curves.max(axis=0)
            axis.fill_between(thousands, *bounds, alpha=0.2, color=line.get_color())
        lags = np.mean([x["policy_lag"] for x in runs if x["in_flight"] == in_flight])
        axis.set_title(f"{in_flight} in flight, policy lag {lags:.1f}")
        axis.set_xlabel("thousand env steps")
    axes[0].set_ylabel("training return")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    with cli.exit_codes(debug=False):
        main(cli.parse_flags(Options, sys.argv[1:], __doc__ or ""))
