"""The quantile Huber loss on a CPU: microseconds of it and its gradient, by all pairs and ours.

    python benchmarks/quantile_loss.py

One core, medians of interleaved repeats, inside a compiled loop, where training calls it. `pairs`
is the formula with arrays [B, N, N'], which is what other devices get, `ours` is what
`common.targets.quantile_huber_loss` takes on a CPU.
"""

import json
import sys

from common import cpu_gradients
from conv import repeat_in_program
from throughput import (
    Measure,
    OneCoreOptions,
    describe_figures,
    describe_machine,
    median_rates,
    on_one_core,
    write_figures,
)

from common.run import cli

CASES = {  # name: minibatch and quantiles
    "QR-DQN, `classic`": (128, 51),
    "QR-DQN, `minatar`": (32, 51),
    "QR-DQN, `atari`": (32, 200),
    "IQN, `atari`": (32, 64),
}
FORMS = {"pairs": 1_000_000, "ours": cpu_gradients.FEW_TARGETS}  # name: targets up to which pairs


def main(options: OneCoreOptions) -> None:
    """Measure in a worker process on one core, and write the results."""
    if options.worker:
        print(json.dumps(measure_all(options)))
        return
    microseconds = on_one_core(__file__, options)
    results = {"machine": describe_machine(), "us": microseconds}
    write_figures(options.out, "quantile_loss", results, as_table(results))


def measure_all(options: OneCoreOptions) -> dict[str, dict[str, float]]:
    """Return microseconds by form and case."""
    measures = {
        f"{form} {case}": (loss_measure(form, *sizes), 1.0)
        for form in FORMS
        for case, sizes in CASES.items()
    }
    rates = median_rates(measures, options.repeats, options.seconds, first=1)
    return {f: {case: 1e6 / rates[f"{f} {case}"] for case in CASES} for f in FORMS}


def loss_measure(form: str, batch: int, num_quantiles: int) -> Measure:
    """Mean losses of a minibatch, and their gradients by its quantiles."""
    import jax
    import jax.numpy as jnp

    from common.targets import quantile_huber_loss

    quantiles, target = 5 * jax.random.normal(jax.random.key(0), (2, batch, num_quantiles))
    tau = (jnp.arange(num_quantiles) + 0.5) / num_quantiles
    learn = jax.value_and_grad(lambda theta, y: quantile_huber_loss(theta, tau, y).mean())
    cpu_gradients.FEW_TARGETS = FORMS[form]
    measure = repeat_in_program(learn, quantiles, target)
    measure(1)  # traced while the form is chosen
    return measure


def as_table(results: dict) -> str:
    """Return the figures as a markdown table."""
    lines = [
        describe_figures("Quantile Huber loss and gradient on one core, µs", results["machine"]),
        "",
        "| | B × N × N' | all pairs | one target after the other | ratio |",
        "|---|---|---|---|---|",
    ]
    for case, (batch, size) in CASES.items():
        pairs, ours = (results["us"][form][case] for form in FORMS)
        shape = f"{batch} × {size} × {size}"
        lines.append(f"| {case} | {shape} | {pairs:.0f} | {ours:.0f} | {pairs / ours:.1f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    with cli.exit_codes(debug=False):
        main(cli.parse_flags(OneCoreOptions, sys.argv[1:], __doc__ or ""))
