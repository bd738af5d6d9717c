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
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from throughput import (
    Measure,
    OneCoreOptions,
    describe_figures,
    describe_machine,
    median_rates,
    on_one_core,
    write_figures,
)
from throughput_ppo import ENDLESS, learn_measure, loop_measure

from common.run import cli

PAPER = {"num_envs": 32, "num_steps": 64, "update_epochs": 4, "num_minibatches": 16}
SETTINGS: dict[str, dict[str, dict[str, int]]] = {
    "default": {"ppo": {}, "pqn": {}},
    "same default": {"ppo": {}, "pqn": {"num_envs": 4}},
    "paper": {"ppo": PAPER, "pqn": PAPER},
}


def main(options: OneCoreOptions) -> None:
    """Measure in a worker process on one core, and write the results."""
    if options.worker:
        print(json.dumps(median_rates(measures(), options.repeats, options.seconds, first=1)))
        return
    figures = on_one_core(__file__, options)
    results = {"machine": describe_machine(), "figures": figures}
    write_figures(options.out, "throughput_pqn", results, as_table(results))


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
    with cli.exit_codes(debug=False):
        main(cli.parse_flags(OneCoreOptions, sys.argv[1:], __doc__ or ""))
