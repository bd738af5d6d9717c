"""Env steps a second of the training loop, against a plain Python loop and against its own limit.

    python benchmarks/throughput.py                    # DQN on CartPole-v1, one core and all cores
    python benchmarks/throughput.py --algo c51         # the same for C51
    python benchmarks/throughput.py --memory-steps 5000000

Every figure is the median of repeats that are interleaved in one process, so that a machine whose
speed drifts slows all of them alike; quote the ratios. Compilation is left out.

    loop      the training loop of algos/ALGO.py
    baseline  the same Algorithm, called from a Python loop over gymnasium.make_vec
    env       the environments alone, stepped by random actions inside a compiled loop
    learn     the updates alone, on a full replay buffer, in env steps (an update every 10)
    limit     1 / (1 / env + 1 / learn): no loop that does both on one core can be faster
    plain     `python algos/ALGO.py` as a user starts it, from its own log (with all cores allowed)
"""

import importlib
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from machine import ROOT, cpu_model, describe_commit, on_cores
from random_policy import random_steps

from common.run import cli
from common.run.logger import read_metrics

RESULTS = ROOT / "benchmarks" / "results"
Measure = Callable[[int], None]


@dataclass(frozen=True)
class Options:
    """What to measure."""

    algo: Literal["dqn", "c51", "qr_dqn"] = "dqn"
    """file in algos/"""
    num_envs: tuple[int, ...] = (1, 8)
    """numbers of parallel environments"""
    repeats: int = 9
    """interleaved repeats of each figure"""
    seconds: float = 1.0
    """length of one repeat"""
    memory_steps: int = 0
    """instead, train for as many steps and write the resident memory over them"""
    out: str = str(RESULTS)
    """folder for throughput.json, .md and .png, or throughput_ALGO.* of another algorithm"""
    worker: bool = False
    """used by the program itself: measure in this process and print JSON"""


def main(options: Options) -> None:
    """Measure in worker processes, one core then all cores, and write the results."""
    if options.worker:
        print(json.dumps(measure_all(options)))
        return
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    if options.memory_steps:
        figures = measure_memory(options.memory_steps)
        (out / "memory.json").write_text(json.dumps(figures | describe_machine(), indent=2) + "\n")
        print(json.dumps(figures))
        return
    cores = sorted(os.sched_getaffinity(0))
    results: dict[str, Any] = {"machine": describe_machine(), "figures": {}}
    plain = run_plain(options, cores, options.algo)
    flags = ["--algo", options.algo]
    results["figures"]["one core"] = run_worker(options, {cores[0]}, flags=flags) | plain
    results["figures"]["all cores"] = run_worker(options, set(cores), flags=flags)
    name = "throughput" if options.algo == "dqn" else f"throughput_{options.algo}"
    (out / f"{name}.json").write_text(json.dumps(results, indent=2) + "\n")
    table = as_table(results, options.algo)
    (out / f"{name}.md").write_text(table)
    save_picture(results, out / f"{name}.png", options.algo)
    print(table)


def run_worker(
    options: Any, cores: set[int], program: str = __file__, flags: Sequence[str] = ()
) -> dict[str, float]:
    """Measure everything in a process of its own on the given cores."""
    flags = [*flags, "--worker", "--repeats", str(options.repeats)]
    flags += ["--seconds", str(options.seconds), "--num-envs", *map(str, options.num_envs)]
    return in_process([program, *flags], cores)


def in_process(
    command: list[str],
    cores: set[int],
    python: str | None = None,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Any:
    """Run a Python program on the given cores; return its last line, which is JSON."""
    command = [python or sys.executable, *command]
    environment = {**os.environ, **({"NPROC": "1"} if len(cores) == 1 else {}), **variables}
    with on_cores(cores):
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        print(done.stderr, file=sys.stderr)
    done.check_returncode()
    return json.loads(done.stdout.splitlines()[-1])


def run_plain(options: Any, cores: list[int], algo: str = "dqn") -> dict[str, float]:
    """Start algos/ALGO.py as a user does, and pinned by hand, in turn; read the SPS it logged."""
    rates: dict[str, list[float]] = {}
    for _ in range(3):
        for num_envs in options.num_envs:
            for name, chosen in (("plain", set(cores)), ("pinned", {cores[0]})):
                rate = logged_rate(algo, num_envs, chosen)
                rates.setdefault(f"{name} {num_envs}", []).append(rate)
    return {name: statistics.median(values) for name, values in rates.items()}


def logged_rate(algo: str, num_envs: int, cores: set[int]) -> float:
    """Return the median SPS in metrics.csv of a run of 300,000 steps, the first third left out."""
    environment = os.environ | ({"NPROC": "1"} if len(cores) == 1 else {})
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "algos" / f"{algo}.py"), "--runs-dir", folder]
        command += ["--num-envs", str(num_envs), "--total-timesteps", "304000"]
        command += ["--eval-frequency", "0", "--checkpoint-frequency", "0"]
        with on_cores(cores):
            subprocess.run(command, capture_output=True, env=environment, check=True)
        (metrics,) = Path(folder).glob("*/metrics.csv")
        rows = read_metrics(metrics)
    rates = [rate for step, _, name, rate in rows if name == "charts/SPS" and step > 100_000]
    return statistics.median(rates)


def measure_all(options: Options) -> dict[str, float]:
    """Return env steps a second by name, as medians of interleaved repeats."""
    Config = importlib.import_module(f"algos.{options.algo}").Config
    measures: dict[str, tuple[Measure, float]] = {}
    for num_envs in options.num_envs:
        config = Config(num_envs=num_envs)
        measures[f"loop {num_envs}"] = loop_measure(config), num_envs
        measures[f"env {num_envs}"] = env_measure(config), num_envs
        measures[f"baseline {num_envs}"] = baseline_measure(config), num_envs
    measures["learn"] = learn_measure(Config()), Config().train_frequency
    gymnax = Config(env_id="gymnax/CartPole-v1", num_envs=10)
    measures["gymnax loop 10"] = loop_measure(gymnax), 10
    measures["gymnax env 10"] = env_measure(gymnax), 10
    return median_rates(measures, options.repeats, options.seconds)


@dataclass(frozen=True)
class OneCoreOptions:
    """How long to measure on one core."""

    repeats: int = 9
    """interleaved repeats of each figure"""
    seconds: float = 1.0
    """length of one repeat, if one call does not take longer"""
    out: str = str(RESULTS)
    """folder for the figures, as JSON and as a table"""
    worker: bool = False
    """used by the program itself: measure in this process and print JSON"""


def on_one_core(program: str, options: OneCoreOptions) -> Any:
    """Return what a program prints as a worker on the first core."""
    flags = ["--worker", "--repeats", str(options.repeats), "--seconds", str(options.seconds)]
    return in_process([program, *flags], {min(os.sched_getaffinity(0))})


def write_figures(folder: str, name: str, results: dict[str, Any], table: str) -> None:
    """Write NAME.json and NAME.md, and print the table."""
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(results, indent=2) + "\n")
    (out / f"{name}.md").write_text(table)
    print(table)


def median_rates(
    measures: dict[str, tuple[Measure, float]], repeats: int, seconds: float, first: int = 100
) -> dict[str, float]:
    """Return what each measure does in a second: medians of interleaved repeats.

    Args:
        measures: what to run, and what one iteration of it counts for (env steps, say).
        repeats: repeats of each.
        seconds: length of one repeat.
        first: iterations tried first to find how many fill a repeat.
    """
    counts = {name: calibrate(run, seconds, first) for name, (run, _) in measures.items()}
    rates: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(repeats):
        for name, (run, amount) in measures.items():
            start = time.perf_counter()
            run(counts[name])
            rates[name].append(counts[name] * amount / (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in rates.items()}


def calibrate(run: Measure, seconds: float, first: int = 100) -> int:
    """Return how many iterations take about `seconds`; compiles on the way."""
    run(max(1, first // 10))
    count = first
    while True:
        start = time.perf_counter()
        run(count)
        elapsed = time.perf_counter() - start
        if elapsed > seconds / 10:
            return max(1, int(count * seconds / elapsed))
        count *= 4


def module_of(config: Any) -> Any:
    """Return the algorithm file of a Config."""
    return importlib.import_module(type(config).__module__)


def loop_measure(config: Any) -> Measure:
    """Iterations of the training loop after learning has started."""
    import jax

    trainer = module_of(config).Trainer(config)
    trainer.state, _ = trainer.compiled_run(
        trainer.state, 2 * config.learning_starts // config.num_envs
    )

    def run(iterations: int) -> None:
        trainer.state, _ = trainer.compiled_run(trainer.state, iterations)
        jax.block_until_ready(trainer.state)

    return run


def env_measure(config: Any, purpose: Any = "evaluate") -> Measure:
    """Vector steps of the environments alone, with actions drawn evenly from between the bounds."""
    import jax

    from common.envs import make_env

    env = make_env(config, purpose)
    steps = random_steps(env)
    carry = [env.reset(jax.random.key(0)), jax.random.key(1)]

    def run(count: int) -> None:
        carry[:] = jax.block_until_ready(steps(*carry, count))

    return run


def learn_measure(config: Any) -> Measure:
    """Updates alone: sample, target, loss, gradient, Adam."""
    import jax
    from jax import lax

    trainer = module_of(config).Trainer(config)
    # The loop keeps the trainer alive through this closure, and its pool with it.
    state, _ = trainer.compiled_run(trainer.state, config.buffer_size // config.num_envs)

    def update(_: Any, state: Any) -> Any:
        return trainer._run_train(state)[0]

    updates = jax.jit(lambda state, n: lax.fori_loop(0, n, update, state))
    carry = [state]

    def run(count: int) -> None:
        carry[0] = jax.block_until_ready(updates(carry[0], count))

    return run


class PythonLoop:
    """The loop that people write: a Python `for` over gymnasium.make_vec and a numpy buffer."""

    def __init__(self, config: Any) -> None:
        import gymnasium
        import jax
        import numpy as np

        algo = module_of(config)
        n, self.config = config.num_envs, config
        self.envs = gymnasium.make_vec(config.env_id, num_envs=n, vectorization_mode="sync")
        spaces = self.envs.single_observation_space, self.envs.single_action_space
        algorithm = algo.Algorithm(config, *spaces)
        agent = algo.Agent(config, algorithm)
        self.sample = jax.jit(agent.sample)
        self.learn = jax.jit(agent.learn, donate_argnums=0)
        self.split = jax.random.split
        self.learner, self.key = algorithm.init(jax.random.key(0)), jax.random.key(1)
        self.rng = np.random.default_rng(0)
        self.obs, _ = self.envs.reset(seed=0)
        self.ended, self.step = np.zeros(n, bool), 0
        self.capacity = config.buffer_size // n
        shapes: dict[str, tuple] = {"obs": spaces[0].shape, "next_obs": spaces[0].shape}  # type: ignore
        shapes |= dict.fromkeys(("action", "reward", "discount", "weight"), ())
        self.buffers = {
            name: np.zeros((self.capacity, n, *shape), np.int32 if name == "action" else np.float32)
            for name, shape in shapes.items()
        }

    def run(self, iterations: int) -> None:
        """Vector steps, each followed by the updates that fall due."""
        frequency = self.config.train_frequency
        for _ in range(iterations):
            before = self.step
            self.collect(before // self.config.num_envs % self.capacity)
            for _ in range(self.step // frequency - before // frequency):
                self.update()

    def collect(self, row: int) -> None:
        """Act, step, store."""
        import numpy as np

        self.key, key = self.split(self.key)
        action = np.asarray(self.sample(self.learner, self.obs, self.step, key))
        next_obs, reward, terminated, truncated, _ = self.envs.step(action)
        values = {"obs": self.obs, "next_obs": next_obs, "action": action, "reward": reward}
        discount = self.config.gamma * (1.0 - terminated)
        for name, value in (values | {"discount": discount, "weight": ~self.ended}).items():
            self.buffers[name][row] = value
        self.obs, self.ended = next_obs, terminated | truncated
        self.step += self.config.num_envs

    def update(self) -> None:
        """One minibatch."""
        from common.replay import Batch

        size = self.config.batch_size
        row = self.rng.integers(0, self.capacity, size)
        env = self.rng.integers(0, self.config.num_envs, size)
        columns: dict[str, Any] = {name: x[row, env] for name, x in self.buffers.items()}
        self.learner, _ = self.learn(self.learner, Batch(**columns, extras=()))


def baseline_measure(config: Any) -> Measure:
    """Iterations of the Python loop, its buffer full."""
    loop = PythonLoop(config)
    loop.run(loop.capacity)
    return loop.run


def measure_memory(steps: int) -> dict[str, Any]:
    """Train DQN on CartPole-v1 and return the resident memory in MiB at each tenth of the way."""
    from algos.dqn import Config, Trainer

    from common.run import threads

    threads.use_one_core()
    trainer = Trainer(replace(Config(), total_timesteps=steps, log_frequency=steps // 100))
    resident = {}
    for log_data in trainer():
        if log_data["log_type"] == "collect" and log_data["sample_step"] % (steps // 10) == 0:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            resident[log_data["sample_step"]] = round(pages * resource.getpagesize() / 2**20, 1)
    return {"resident_MiB": resident}


def describe_machine() -> dict[str, Any]:
    """Return what a reader needs to place the figures."""
    import jax

    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "commit": describe_commit(),
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
    }


def learn_figure(figures: dict[str, float], num_envs: int) -> float:
    """Return the rate of the updates alone, which may depend on the number of environments."""
    return figures.get(f"learn {num_envs}") or figures["learn"]


def share_of_limit(figures: dict[str, float], num_envs: int) -> float:
    """Return loop / limit for one number of environments."""
    limit = 1 / (1 / figures[f"env {num_envs}"] + 1 / learn_figure(figures, num_envs))
    return figures[f"loop {num_envs}"] / limit


def describe_figures(title: str, machine: dict[str, Any]) -> str:
    """Return the line over a table: what was measured, on which machine, by which command."""
    return (
        f"{title}: {machine['cpu']}, {machine['cores']} cores, "
        f"jax {machine['jax']}, commit {machine['commit']}, `{machine['command']}`"
    )


def as_table(results: dict[str, Any], algo: str = "dqn") -> str:
    """Return the figures as a markdown table."""
    lines = [
        describe_figures(f"{algo.upper()} on CartPole-v1, env steps a second", results["machine"]),
        "",
        "| cores | envs | loop | baseline | loop / baseline | env | learn | share of limit |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for cores, figures in results["figures"].items():
        for name in figures:
            if not name.startswith("loop "):
                continue
            n = int(name.split()[1])
            loop, baseline, env = (figures[f"{k} {n}"] for k in ("loop", "baseline", "env"))
            lines.append(
                f"| {cores} | {n} | {loop:,.0f} | {baseline:,.0f} | {loop / baseline:.1f} | "
                f"{env:,.0f} | {learn_figure(figures, n):,.0f} | {share_of_limit(figures, n):.0%} |"
            )
    lines += plain_table(results["figures"]["one core"], algo)
    (gymnax,) = (name for name in figures if name.startswith("gymnax loop "))
    n = int(gymnax.split()[2])
    lines += ["", f"| gymnax/CartPole-v1, {n} envs | loop | env |", "|---|---|---|"]
    for cores, figures in results["figures"].items():
        loop, env = figures[f"gymnax loop {n}"], figures[f"gymnax env {n}"]
        lines.append(f"| {cores} | {loop:,.0f} | {env:,.0f} |")
    return "\n".join(lines) + "\n"


def plain_table(figures: dict[str, float], algo: str) -> list[str]:
    """Return the lines that compare a plain start with one pinned by hand."""
    lines = ["", "| started as | envs | SPS logged | of pinned by hand |", "|---|---|---|---|"]
    for name in figures:
        if name.startswith("plain "):
            n = name.split()[1]
            plain, pinned = figures[name], figures[f"pinned {n}"]
            command = f"`python algos/{algo}.py --num-envs {n}`"
            lines.append(f"| {command} | {n} | {plain:,.0f} | {plain / pinned:.0%} |")
    return lines


def save_picture(results: dict[str, Any], path: Path, algo: str = "dqn") -> None:
    """Draw loop, baseline and limit on one core as bars."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figures = results["figures"]["one core"]
    counts = [int(name.split()[1]) for name in figures if name.startswith("loop ")]
    limits = [figures[f"loop {n}"] / share_of_limit(figures, n) for n in counts]
    bars = {
        "Python loop over gymnasium.make_vec": [figures[f"baseline {n}"] for n in counts],
        f"algos/{algo}.py": [figures[f"loop {n}"] for n in counts],
        "limit: environment + learning": limits,
    }
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    title = f"{algo.upper()} on CartPole-v1, one core"
    axes = figure.add_subplot(title=title, ylabel="env steps a second")
    for i, (label, values) in enumerate(bars.items()):
        positions = [x + (i - 1) * 0.27 for x in range(len(counts))]
        axes.bar_label(axes.bar(positions, values, 0.25, label=label), fmt="{:,.0f}")
    axes.set_xticks(range(len(counts)), [f"{n} env{'s' * (n > 1)}" for n in counts])
    axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    with cli.exit_codes(debug=False):
        main(cli.parse_flags(Options, sys.argv[1:], __doc__ or ""))
