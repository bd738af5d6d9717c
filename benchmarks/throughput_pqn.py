"""Env steps a second of PQN's training loop beside PPO's, and what LayerNorm costs it.

    python benchmarks/throughput_pqn.py

One core, medians of interleaved repeats, compilation left out, as in `throughput.py`; quote the
ratios. gymnax/CartPole-v1, whose steps cost next to nothing: what is compared is acting and
learning.

    default       the defaults of both files; PPO has 4 environments, PQN 8
    same default  PQN with PPO's 4 environments: as many updates of as many rows
    paper         the settings of PQN's paper: 32 environments, 64 steps, 4 epochs, 16 minibatches
    loop          the training loop
    learn         the updates on one rollout alone, in env steps (those of the rollout)
"""

import json
import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from throughput import (
    RESULTS,
    Measure,
    describe_figures,
    describe_machine,
    in_process,
    median_rates,
)
from throughput_ppo import ENDLESS, learn_measure, loop_measure

PAPER = {"num_envs": 32, "num_steps": 64, "update_epochs": 4, "num_minibatches": 16}
SETTINGS: dict[str, dict[str, dict[str, int]]] = {
    "default": {"ppo": {}, "pqn": {}},
    "same default": {"ppo": {}, "pqn": {"num_envs": 4}},
    "paper": {"ppo": PAPER, "pqn": PAPER},
}


@dataclass(frozen=True)
class Options:
    """What to measure."""

    repeats: int = 9
    """interleaved repeats of each figure"""
    seconds: float = 1.0
    """length of one repeat"""
    out: str = str(RESULTS)
    """folder for throughput_pqn.json and throughput_pqn.md"""
    worker: bool = False
    """used by the program itself: measure in this process and print JSON"""


def main(options: Options) -> None:
    """Measure in a worker process on one core, and write the results."""
    if options.worker:
        print(json.dumps(median_rates(measures(), options.repeats, options.seconds, first=1)))
        return
    core = min(os.sched_getaffinity(0))
    flags = ["--worker", "--repeats", str(options.repeats), "--seconds", str(options.seconds)]
    figures = in_process([__file__, *flags], {core})
    results = {"machine": describe_machine(), "figures": figures}
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "throughput_pqn.json").write_text(json.dumps(results, indent=2) + "\n")
    table = as_table(results)
    (out / "throughput_pqn.md").write_text(table)
    print(table)


def measures() -> dict[str, tuple[Measure, float]]:
    """Return every figure's measure, with the env steps of one iteration."""
    from algos import ppo, pqn

    found: dict[str, tuple[Measure, float]] = {}
    for name, flags in SETTINGS.items():
        plain = {"ppo": ppo.Config, "pqn": pqn.Config}
        options: dict[str, Any] = dict(env_id="gymnax/CartPole-v1", total_timesteps=ENDLESS)
        for algo, config_class in plain.items():
            config = config_class(**options, **flags[algo])
            steps = config.num_envs * config.num_steps
            found[f"{name} loop {algo}"] = loop_measure(config), steps
            found[f"{name} learn {algo}"] = learn_measure(config), steps
        with without_layer_norm():
            found[f"{name} loop pqn without LayerNorm"] = loop_measure(config), steps
            found[f"{name} learn pqn without LayerNorm"] = learn_measure(config), steps
    return found


@contextmanager
def without_layer_norm() -> Generator[None]:
    """Leave LayerNorm out of PQN's network."""
    from algos import pqn

    mlp: Any = pqn.MLP

    def plain(*args: Any, layer_norm: bool, **options: Any) -> Any:
        return mlp(*args, **options)

    pqn.MLP = plain  # type: ignore[misc,assignment]
    try:
        yield
    finally:
        pqn.MLP = mlp  # type: ignore[misc]


def as_table(results: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    figures = results["figures"]
    lines = [
        describe_figures(
            "PQN and PPO on gymnax/CartPole-v1, env steps a second", results["machine"]
        ),
        "",
        "| setting | | PPO | PQN | PQN / PPO | PQN without LayerNorm |",
        "|---|---|---|---|---|---|",
    ]
    for name in SETTINGS:
        for what in ("loop", "learn"):
            ppo, pqn = figures[f"{name} {what} ppo"], figures[f"{name} {what} pqn"]
            plain = figures[f"{name} {what} pqn without LayerNorm"]
            lines.append(
                f"| {name} | {what} | {ppo:,.0f} | {pqn:,.0f} | {pqn / ppo:.2f} | {plain:,.0f} |"
            )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main(tyro.cli(Options))
