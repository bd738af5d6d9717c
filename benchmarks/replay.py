"""Time of a prioritized replay buffer by its capacity, beside flashbax and a sum tree in numpy.

    pip install flashbax
    python benchmarks/replay.py

One core, medians of interleaved repeats, compilation left out; quote the ratios. An iteration adds
one step of 8 environments with observations of CartPole's size, draws a batch by priority and gives
its rows new priorities. Buffers are full before anything is measured.

    ours      common/replay.py, in a compiled loop that takes over the buffer's memory
    flashbax  its prioritised flat buffer, in such a loop
    numpy     a binary sum tree and vectorized numpy, in a Python loop
"""

import importlib.metadata
import json
import os
import sys
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from common.errors import UserError
from common.replay import Replay, Transition
from throughput import (
    RESULTS,
    Measure,
    describe_figures,
    describe_machine,
    in_process,
    median_rates,
    write_figures,
)

from common.run import cli

SIDES = ("ours", "flashbax", "numpy")
NUM_ENVS, OBS, ALPHA, BETA = 8, 4, 0.6, 0.4
NUM_STEPS = 1024  # steps that are added over and over


@dataclass(frozen=True)
class Options:
    """What to measure."""

    capacities: tuple[int, ...] = (10_000, 100_000, 1_000_000)
    """transitions that a buffer holds"""
    batch_sizes: tuple[int, ...] = (32, 128)
    """rows of a batch"""
    repeats: int = 9
    """interleaved repeats of each figure"""
    seconds: float = 0.5
    """length of one repeat"""
    out: str = str(RESULTS)
    """folder for replay.json and replay.md"""
    worker: bool = False
    """used by the program itself: measure in this process and print JSON"""


def main(options: Options) -> None:
    """Measure in a process on one core, and write the results.

    Raises:
        UserError: flashbax is missing.
    """
    if options.worker:
        print(json.dumps(measure_all(options)))
        return
    version = require_flashbax()
    flags = ["--worker", "--repeats", str(options.repeats), "--seconds", str(options.seconds)]
    flags += ["--capacities", *map(str, options.capacities)]
    flags += ["--batch-sizes", *map(str, options.batch_sizes)]
    figures = in_process([__file__, *flags], {min(os.sched_getaffinity(0))})
    results = {"machine": describe_machine() | {"flashbax": version}, "microseconds": figures}
    write_figures(options.out, "replay", results, as_table(results))


def require_flashbax() -> str:
    """Return the version of flashbax.

    Raises:
        UserError: it is missing.
    """
    try:
        import flashbax  # noqa: F401
    except ImportError as error:
        raise UserError("flashbax is missing; pip install flashbax") from error
    return importlib.metadata.version("flashbax")


def measure_all(options: Options) -> dict[str, float]:
    """Return microseconds an iteration by side, batch size and capacity."""
    makers = dict(zip(SIDES, (ours_measure, flashbax_measure, numpy_measure), strict=True))
    measures: dict[str, tuple[Measure, float]] = {}
    for batch_size in options.batch_sizes:
        for capacity in options.capacities:
            for side, make in makers.items():
                name = f"{side} {batch_size} {capacity}"
                measures[name] = make(capacity, batch_size), 1.0
    rates = median_rates(measures, options.repeats, options.seconds, first=20)
    return {name: 1e6 / rate for name, rate in rates.items()}


def make_steps() -> dict[str, np.ndarray]:
    """Return the steps that are added, [1024, 8, ...]."""
    rng = np.random.default_rng(0)
    shape = NUM_STEPS, NUM_ENVS
    return {
        "obs": rng.normal(size=(*shape, OBS)).astype(np.float32),
        "action": rng.integers(2, size=shape).astype(np.int32),
        "reward": np.ones(shape, np.float32),
        "terminated": rng.random(shape) < 0.005,
    }


def td_error(obs: Any, next_obs: Any, reward: Any) -> Any:
    """Return numbers [B] that depend on all that was drawn, so that all of it is made."""
    return reward + next_obs.sum(axis=-1) - obs.sum(axis=-1)


def ours_measure(capacity: int, batch_size: int) -> Measure:
    """Iterations of the project's buffer."""
    replay = Replay(capacity, NUM_ENVS, gamma=0.99, priority_exponent=ALPHA)
    steps = jax.tree.map(jnp.asarray, make_steps())
    no, yes = jnp.zeros(NUM_ENVS, bool), jnp.ones(NUM_ENVS, bool)

    def add(number: Array, state: Any) -> Any:
        step = jax.tree.map(lambda x: x[number % NUM_STEPS], steps)
        return replay.add(state, Transition(**step, truncated=no, valid=yes))

    def iterate(number: Array, carry: tuple) -> tuple:
        state, key = carry
        key, sample_key = jax.random.split(key)
        state = add(number, state)
        batch = replay.sample(state, sample_key, batch_size, BETA)
        new = batch.weight * td_error(batch.obs, batch.next_obs, batch.reward)
        return replay.update_priorities(state, batch.index, new), key

    empty = replay.init(steps["obs"][0], steps["action"][0])
    full = jax.jit(lambda state: lax.fori_loop(0, replay.num_rows, add, state))(empty)
    return compiled_measure(iterate, (full, jax.random.key(0)))


def flashbax_measure(capacity: int, batch_size: int) -> Measure:
    """Iterations of flashbax's prioritised flat buffer, which draws pairs of steps."""
    import flashbax

    buffer = flashbax.make_prioritised_flat_buffer(
        max_length=capacity,
        min_length=NUM_ENVS,
        sample_batch_size=batch_size,
        add_batch_size=NUM_ENVS,
        priority_exponent=ALPHA,
        device="cpu",
    )
    steps = jax.tree.map(jnp.asarray, make_steps())

    def add(number: Array, state: Any) -> Any:
        return buffer.add(state, jax.tree.map(lambda x: x[number % NUM_STEPS], steps))

    def iterate(number: Array, carry: tuple) -> tuple:
        state, key = carry
        key, sample_key = jax.random.split(key)
        state = add(number, state)
        batch = buffer.sample(state, sample_key)
        first, second = batch.experience.first, batch.experience.second
        weight = batch.probabilities**-BETA  # [B]
        weight = weight / weight.max()
        new = weight * td_error(first["obs"], second["obs"], first["reward"])
        return buffer.set_priorities(state, batch.indices, jnp.abs(new) + 1e-6), key

    empty = buffer.init(jax.tree.map(lambda x: x[0, 0], steps))
    num_rows = capacity // NUM_ENVS
    full = jax.jit(lambda state: lax.fori_loop(0, num_rows, add, state))(empty)
    return compiled_measure(iterate, (full, jax.random.key(0)))


def compiled_measure(iterate: Any, carry: Any) -> Measure:
    """Run iterations in a compiled loop that takes over the memory of its input."""
    loop = jax.jit(lambda carry, n: lax.fori_loop(0, n, iterate, carry), donate_argnums=0)
    held = [carry]

    def run(count: int) -> None:
        held[0] = jax.block_until_ready(loop(held[0], count))

    return run


def numpy_measure(capacity: int, batch_size: int) -> Measure:
    """Iterations of the numpy buffer."""
    replay, rng = NumpyReplay(capacity), np.random.default_rng(0)
    for _ in range(capacity // NUM_ENVS):
        replay.add()

    def run(count: int) -> None:
        for _ in range(count):
            replay.add()
            index, obs, next_obs, reward, weight = replay.sample(rng, batch_size)
            replay.tree.update(index, priority(weight * td_error(obs, next_obs, reward)))

    return run


def priority(error: np.ndarray) -> np.ndarray:
    """Return p^α of errors [B]."""
    return (np.abs(error) + 1e-6) ** ALPHA


class NumpyTree:
    """A binary tree of sums in one array: node i has the children 2 i and 2 i + 1."""

    def __init__(self, num_leaves: int) -> None:
        self.first_leaf = 1 << (num_leaves - 1).bit_length()
        self.sums = np.zeros(2 * self.first_leaf)

    def update(self, index: np.ndarray, value: Any) -> None:
        """Set the leaves index [B], and make their ancestors again."""
        node = index + self.first_leaf  # [B]
        self.sums[node] = value
        while node[0] > 1:
            node = node >> 1
            self.sums[node] = self.sums[2 * node] + self.sums[2 * node + 1]

    def draw(self, fraction: np.ndarray) -> np.ndarray:
        """Return the leaf [B] at which the running sum passes a fraction [B] of the total."""
        rest = fraction * self.sums[1]  # [B]
        node = np.ones(len(fraction), np.int64)  # [B]
        while node[0] < self.first_leaf:
            left = self.sums[2 * node]
            goes_right = rest >= left
            rest = rest - left * goes_right
            node = 2 * node + goes_right
        return node - self.first_leaf


class NumpyReplay:
    """A ring of steps with priorities; the next observation is that of the step after."""

    def __init__(self, capacity: int) -> None:
        self.num_rows = capacity // NUM_ENVS
        self.steps = make_steps()
        self.storage = {
            name: np.zeros((self.num_rows, *x.shape[1:]), x.dtype) for name, x in self.steps.items()
        }
        self.tree = NumpyTree(self.num_rows * NUM_ENVS)
        self.position = self.count = 0

    def add(self) -> None:
        """Write one step of all environments over the oldest row."""
        for name, rows in self.storage.items():
            rows[self.position] = self.steps[name][self.count % NUM_STEPS]
        lanes = np.arange(NUM_ENVS)
        complete = (self.position - 1) % self.num_rows * NUM_ENVS + lanes
        newest = self.position * NUM_ENVS + lanes
        values = np.repeat([1.0, 0.0], NUM_ENVS)
        self.tree.update(np.concatenate([complete, newest]), values)
        self.count += 1
        self.position = self.count % self.num_rows

    def sample(self, rng: np.random.Generator, batch_size: int) -> tuple[np.ndarray, ...]:
        """Return index, obs, next_obs, reward and importance weight of a batch [B]."""
        shares = np.arange(batch_size) + rng.random(batch_size)
        index = self.tree.draw(shares / batch_size)
        row, lane = np.divmod(index, NUM_ENVS)
        weight = self.tree.sums[index + self.tree.first_leaf] ** -BETA
        obs, reward = self.storage["obs"], self.storage["reward"]
        for name in ("action", "terminated"):  # a batch has them as well
            self.storage[name][row, lane]
        next_obs = obs[(row + 1) % self.num_rows, lane]
        return index, obs[row, lane], next_obs, reward[row, lane], weight / weight.max()


def as_table(results: dict[str, Any]) -> str:
    """Return the figures as a markdown table, with ratios by capacity and to ours."""
    figures, machine = results["microseconds"], results["machine"]
    parts = [name.split() for name in figures]
    batch_sizes = sorted({int(batch_size) for _, batch_size, _ in parts})
    capacities = sorted({int(capacity) for _, _, capacity in parts})
    low, high = capacities[0], capacities[-1]
    title = f"Prioritized replay, {NUM_ENVS} environments, one core, µs to add, draw and update"
    names = ["", "batch", *(f"{x:,}" for x in capacities), f"{high:,} / {low:,}"]
    lines = [describe_figures(title, machine), ""]
    lines += ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    for batch_size in batch_sizes:
        for side in SIDES:
            times = [figures[f"{side} {batch_size} {x}"] for x in capacities]
            ours = [figures[f"ours {batch_size} {x}"] for x in capacities]
            cells = [
                f"{time:.1f}" + (f" ({time / own:.1f} times ours)" if side != "ours" else "")
                for time, own in zip(times, ours, strict=True)
            ]
            row = [side, str(batch_size), *cells, f"{times[-1] / times[0]:.2f}"]
            lines.append("| " + " | ".join(row) + " |")
    return "\n".join([*lines, "", f"flashbax {machine['flashbax']}"]) + "\n"


if __name__ == "__main__":
    with cli.exit_codes(debug=False):
        main(cli.parse_flags(Options, sys.argv[1:], __doc__ or ""))
