"""Env steps a second of DDPG, TD3 and SAC at HalfCheetah size, against the arithmetic they need.

    python benchmarks/throughput_off_policy.py
    python benchmarks/throughput_off_policy.py --sbx-python /path/to/a/python/with/sbx-rl

One core, medians of interleaved repeats, compilation left out; quote the ratios. HalfCheetah-v4 by
envpool, one environment, one update of batch 256 a step, networks of 256 x 256.

    loop      the training loop of algos/NAME.py
    env       the environment alone, stepped by random actions inside a compiled loop
    learn     the updates alone, minibatches drawn from the replay buffer
    gemm      GFLOP/s of products of 256 x 256 by 256 x 256, one after the other
    limit     updates a second if the operations counted by `count_flops` ran at that rate
    sbx       Stable-Baselines Jax on the same core, processes in turn with ours; needs its own
              environment: pip install sbx-rl 'gymnasium[mujoco]'

Where the time goes: durations of XLA's operations by their names, from jax.profiler, which itself
slows the small ones down.
"""

import collections
import importlib
import json
import os
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from throughput import (
    RESULTS,
    ROOT,
    Measure,
    describe_figures,
    describe_machine,
    env_measure,
    in_process,
    median_rates,
    write_figures,
)

from common.run import cli

ALGOS = ("ddpg", "td3", "sac")
OBS, ACTIONS, HIDDEN, BATCH = 17, 6, 256, 256  # HalfCheetah and the default settings
WARM_UP = 1_000
# The first rule that fits the name of an operation says what it is counted as.
KINDS = {
    "ffi_call": "environment",
    "gather": "drawing the minibatch",
    "while": "random numbers",
    "ynn_fusion": "matrix products",
    "dot": "matrix products",
    "multiply_add": "Adam and target networks",
    "": "activations, losses and copies",
}


@dataclass(frozen=True)
class Options:
    """What to measure."""

    algos: tuple[str, ...] = ALGOS
    """names of files in algos/"""
    repeats: int = 5
    """interleaved repeats of each figure"""
    seconds: float = 2.0
    """length of one repeat"""
    rounds: int = 3
    """whole processes of ours and of SBX, in turn"""
    sbx_python: str | None = None
    """a Python that can import sbx"""
    out: str = str(RESULTS)
    """folder for throughput_off_policy.json and .md"""
    worker: str = ""
    """used by the program itself: `all`, or `loop` of the first algorithm; print JSON"""


def main(options: Options) -> None:
    """Measure in processes on one core and on all, and write the results."""
    if options.worker:
        print(json.dumps(measure_all(options) if options.worker == "all" else loops(options)))
        return
    cores = sorted(os.sched_getaffinity(0))
    figures = worker(options, "all", {cores[0]}, options.algos)
    results: dict[str, Any] = {"machine": describe_machine(), "one core": figures}
    results["all cores"] = worker(options, "loop", set(cores), options.algos)
    if options.sbx_python:
        results["sbx"] = in_turn(options, {cores[0]})
    write_figures(options.out, "throughput_off_policy", results, as_table(results))


def worker(options: Options, kind: str, cores: set[int], algos: tuple[str, ...]) -> Any:
    """Measure in a process of its own on the given cores."""
    flags = ["--worker", kind, "--repeats", str(options.repeats), "--seconds", str(options.seconds)]
    return in_process([__file__, *flags, "--algos", *algos], cores)


def in_turn(options: Options, cores: set[int]) -> dict[str, list[float]]:
    """Return env steps a second of whole processes, ours and SBX's in turn."""
    rates: dict[str, list[float]] = collections.defaultdict(list)
    for _ in range(options.rounds):
        for algo in options.algos:
            rates[f"ours {algo}"].append(worker(options, "loop", cores, (algo,))[f"loop {algo}"])
            program = [str(ROOT / "benchmarks" / "sbx_rate.py"), algo]
            rates[f"sbx {algo}"].append(in_process(program, cores, options.sbx_python))
    return dict(rates)


def loops(options: Options) -> dict[str, float]:
    """Return env steps a second of the training loops alone."""
    from common.run.threads import spread_pool

    measures = {f"loop {algo}": (loop_measure(make_trainer(algo)), 1.0) for algo in options.algos}
    spread_pool(sorted(os.sched_getaffinity(0)))
    return median_rates(measures, options.repeats, options.seconds)


def measure_all(options: Options) -> dict[str, Any]:
    """Return rates by name, and for each algorithm where the time of a step goes."""
    from algos.sac import Config

    measures: dict[str, tuple[Measure, float]] = {"gemm": (gemm_measure(), 2 * 256**3 / 1e9)}
    trainers = {algo: make_trainer(algo) for algo in options.algos}
    for algo, trainer in trainers.items():
        measures[f"loop {algo}"] = loop_measure(trainer), 1.0
        measures[f"learn {algo}"] = learn_measure(make_trainer(algo), algo), 1.0
    measures["env"] = env_measure(Config("HalfCheetah-v4")), 1.0
    rates = median_rates(measures, options.repeats, options.seconds)
    for algo in options.algos:
        rates[f"limit {algo}"] = rates["gemm"] * 1e9 / count_flops(algo)
    return rates | {f"shares {algo}": shares(trainer) for algo, trainer in trainers.items()}


def count_flops(algo: str) -> float:
    """Return the floating-point operations of one update in matrix products, nothing twice."""
    batch = 2.0 * BATCH

    def forward(inputs: int, outputs: int) -> float:
        return batch * (inputs * HIDDEN + HIDDEN * HIDDEN + HIDDEN * outputs)

    def backward(inputs: int, outputs: int) -> float:
        """The gradient of the parameters; that of the inputs is needed of inner layers only."""
        return 2 * forward(inputs, outputs) - batch * inputs * HIDDEN

    num_critics = 1 if algo == "ddpg" else 2
    actor = OBS, 2 * ACTIONS if algo == "sac" else ACTIONS
    critic = OBS + ACTIONS, 1
    action_gradient = batch * (HIDDEN + HIDDEN * HIDDEN + HIDDEN * ACTIONS)
    target = forward(*actor) + num_critics * forward(*critic)
    critic_loss = num_critics * (forward(*critic) + backward(*critic))
    of_critics = (2 if algo == "sac" else 1) * (forward(*critic) + action_gradient)
    actor_loss = forward(*actor) + of_critics + backward(*actor)
    return target + critic_loss + actor_loss / (2 if algo == "td3" else 1)


def make_trainer(algo: str) -> Any:
    """Return a trainer that learns already."""
    module = importlib.import_module(f"algos.{algo}")
    trainer = module.Trainer(module.Config("HalfCheetah-v4", learning_starts=WARM_UP))
    trainer.state, _ = trainer.compiled_run(trainer.state, WARM_UP + 10)
    return trainer


def loop_measure(trainer: Any) -> Measure:
    """Steps of the training loop, with one update each."""
    import jax

    def run(count: int) -> None:
        trainer.state, _ = trainer.compiled_run(trainer.state, count)
        jax.block_until_ready(trainer.state)

    return run


def learn_measure(trainer: Any, algo: str) -> Measure:
    """Updates alone."""
    import jax
    from jax import lax

    def update(number: Any, state: Any) -> Any:
        return trainer._run_train(state, *((number,) if algo == "td3" else ()))[0]

    updates = jax.jit(lambda state, n: lax.fori_loop(0, n, update, state), donate_argnums=0)
    carry = [trainer.state]

    def run(count: int) -> None:
        carry[0] = jax.block_until_ready(updates(carry[0], count))

    return run


def gemm_measure() -> Measure:
    """Products of 256 x 256 matrices, each needing the one before."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    x = jax.random.normal(jax.random.key(0), (256, 256)) / 16

    @jax.jit
    def products(x: Any, count: int) -> Any:
        return lax.fori_loop(0, count, lambda _, y: y @ x, jnp.eye(256))

    return lambda count: jax.block_until_ready(products(x, count))


def shares(trainer: Any, steps: int = 200) -> dict[str, float]:
    """Return microseconds a step by kind of operation, as XLA's profiler has it."""
    import jax

    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            loop_measure(trainer)(steps)
        (path,) = Path(folder).rglob("*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(path))
    spans = collections.defaultdict(list)
    for plane in profile.planes:
        for line in plane.lines:
            for event in line.events:
                if name := dict(event.stats).get("hlo_op"):
                    spans[line.name].append((event.start_ns, event.duration_ns, name))
    total: dict[str, float] = collections.defaultdict(float)
    for name, duration in (leaf for line in spans.values() for leaf in leaves(line)):
        total[next(kind for rule, kind in KINDS.items() if rule in name)] += duration
    return {kind: nanoseconds / steps / 1e3 for kind, nanoseconds in total.items()}


def leaves(spans: list[tuple[float, float, str]]) -> list[tuple[str, float]]:
    """Return the name and duration of the spans that hold no other; small loops count as a whole.

    A loop of random numbers holds a few steps of arithmetic; its time is its own.
    """
    spans = sorted(spans, key=lambda span: (span[0], -span[1]))
    found: list[tuple[str, float]] = []
    end_of_loop = 0.0
    for i, (start, duration, name) in enumerate(spans):
        holds_next = i + 1 < len(spans) and spans[i + 1][0] < start + duration
        is_small_loop = name.startswith("while") and duration < 200_000
        if start >= end_of_loop and (is_small_loop or not holds_next):
            found.append((name, duration))
        if is_small_loop:
            end_of_loop = max(end_of_loop, start + duration)
    return found


def as_table(results: dict[str, Any]) -> str:
    """Return the figures as markdown tables."""
    one, every = results["one core"], results["all cores"]
    algos = [name.split()[1] for name in one if name.startswith("loop ")]
    title = "HalfCheetah-v4, one environment, one update of batch 256 a step"
    lines = [describe_figures(title, results["machine"]), ""]
    lines += [f"Products of 256 x 256: {one['gemm']:.0f} GFLOP/s. Environment: {one['env']:,.0f}."]
    lines += ["", "| algorithm | MFLOP an update | limit | learn | of limit | loop | all cores |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for algo in algos:
        limit, learn, loop = (one[f"{kind} {algo}"] for kind in ("limit", "learn", "loop"))
        lines.append(
            f"| {algo} | {count_flops(algo) / 1e6:.0f} | {limit:.0f} | {learn:.0f} | "
            f"{learn / limit:.0%} | {loop:.0f} | {every[f'loop {algo}']:.0f} |"
        )
    kinds = list(dict.fromkeys(KINDS.values()))
    lines += [
        "",
        "| microseconds a step | " + " | ".join(algos) + " |",
        "|---|" + "---|" * len(algos),
    ]
    for kind in kinds:
        values = (one[f"shares {algo}"].get(kind, 0.0) for algo in algos)
        lines.append(f"| {kind} | " + " | ".join(f"{value:,.0f}" for value in values) + " |")
    if "sbx" in results:
        lines += ["", "| algorithm | ours | SBX | ratio |", "|---|---|---|---|"]
        for algo in algos:
            rates = (results["sbx"][f"{who} {algo}"] for who in ("ours", "sbx"))
            ours, sbx = map(statistics.median, rates)
            lines.append(f"| {algo} | {ours:.0f} | {sbx:.0f} | {ours / sbx:.2f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    with cli.exit_codes(debug=False):
        main(cli.parse_flags(Options, sys.argv[1:], __doc__ or ""))
