"""Images on a CPU: milliseconds of the Nature CNN, alone and inside a compiled loop.

    python benchmarks/conv.py

One core, medians of interleaved repeats, compilation left out. Two forms of the same network, with
the same parameters: `plain` calls nnx.Conv, `ours` is common.networks.NatureCNN. Each is called
from Python (`alone`), and from a lax.fori_loop inside one program (`loop`), where training calls
it. The share beside a time is that of the rate of 512 x 512 x 512 float32 matrix products in the
same run, which no form of the network can exceed by much.

    forward   the features of a batch of uint8 images [B, 4, 84, 84]
    gradient  forward, and the gradient of all parameters
"""

import json
import sys
from collections.abc import Callable, Sequence
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

from common.run import cli

CASES = {"gradient 32": 32, "gradient 256": 256, "forward 8": 8}  # name: batch
FORMS = ("plain alone", "plain loop", "ours alone", "ours loop")
GEMM_SIZE = 512


def main(options: OneCoreOptions) -> None:
    """Measure in a worker process on one core, and write the results."""
    if options.worker:
        print(json.dumps(measure_all(options)))
        return
    figures = on_one_core(__file__, options)
    results = {"machine": describe_machine(), **figures}
    write_figures(options.out, "conv", results, as_table(results))


def nature_cnn_macs(channels: int = 4, size: int = 84) -> list[int]:
    """Return the multiply-adds of each layer of the Nature CNN for one square image.

    A convolution: positions of the kernel x kernel area x input channels x output channels. The
    dense layer: inputs x outputs.
    """
    macs = []
    for outputs, kernel, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
        size = (size - kernel) // stride + 1
        macs.append(size**2 * kernel**2 * channels * outputs)
        channels = outputs
    return [*macs, size**2 * channels * 512]


def forward_flop(macs: Sequence[int], batch: int) -> int:
    """Return the FLOP of a batch's features: two for each multiply-add of each layer."""
    return 2 * batch * sum(macs)


def gradient_flop(macs: Sequence[int], batch: int) -> int:
    """Return the FLOP of the forward and the backward pass of a batch.

    Backward, each layer takes one product like its forward one for the gradient of its parameters,
    and one for that of its inputs, which the first layer's images do not need.
    """
    return 3 * forward_flop(macs, batch) - forward_flop(macs[:1], batch)


def count_flop(case: str) -> int:
    """Return the FLOP of one of CASES."""
    count = gradient_flop if case.startswith("gradient") else forward_flop
    return count(nature_cnn_macs(), CASES[case])


def measure_all(options: OneCoreOptions) -> dict[str, Any]:
    """Return GEMM_GFLOP_per_s, and GFLOP and milliseconds by case."""
    measures = {"gemm": (gemm_measure(), 2 * GEMM_SIZE**3 / 1e9)}
    for case, batch in CASES.items():
        for form in FORMS:
            measures[f"{form} {case}"] = form_measure(form, case.split()[0], batch), 1.0
    rates = median_rates(measures, options.repeats, options.seconds, first=1)
    return {
        "GEMM_GFLOP_per_s": rates["gemm"],
        "GFLOP": {case: count_flop(case) / 1e9 for case in CASES},
        "ms": {f: {case: 1e3 / rates[f"{f} {case}"] for case in CASES} for f in FORMS},
    }


def gemm_measure() -> Measure:
    """Products of a matrix [512, 512] with an orthogonal one, each of the result of the last."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax import lax

    normal = np.random.default_rng(0).normal(size=(GEMM_SIZE, GEMM_SIZE))
    matrix = jnp.asarray(np.linalg.qr(normal)[0], jnp.float32)
    products = jax.jit(lambda x, n: lax.fori_loop(0, n, lambda _, x: x @ matrix, x))
    return lambda count: jax.block_until_ready(products(matrix, count))


def form_measure(form: str, task: str, batch: int) -> Measure:
    """Calls of one form of the network for a "gradient" or "forward"."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from flax import nnx

    from common.networks import NatureCNN

    kind, where = form.split()
    graph, params = nnx.split(NatureCNN((4, 84, 84), nnx.Rngs(0)))
    images = np.random.default_rng(0).integers(0, 256, (batch, 4, 84, 84), np.uint8)

    def forward(params: Any, images: Any) -> Any:
        cnn = nnx.merge(graph, params)
        return cnn(images) if kind == "ours" else plain_features(cnn, images)

    gradient = jax.grad(lambda params, images: (forward(params, images) ** 2).mean())
    function = gradient if task == "gradient" else forward
    repeat = repeat_in_program if where == "loop" else repeat_from_python
    return repeat(function, params, jnp.asarray(images))


def plain_features(cnn: Any, images: Any) -> Any:
    """Return the features of a NatureCNN by nnx.Conv: [B, C, H, W] -> [B, 512]."""
    import jax
    import jax.numpy as jnp

    x = jnp.moveaxis(images, 1, -1).astype(jnp.float32) / 255  # [B, H, W, C]
    for layer in cnn.layers:
        x = jax.nn.relu(layer.conv(x))
    return jax.nn.relu(cnn.dense(x.reshape(len(x), -1)))


def repeat_from_python(function: Callable[..., Any], *args: Any) -> Measure:
    """Call the compiled function, once an iteration."""
    import jax

    compiled = jax.jit(function)

    def run(count: int) -> None:
        for _ in range(count):
            jax.block_until_ready(compiled(*args))

    return run


def repeat_in_program(function: Callable[..., Any], *args: Any) -> Measure:
    """Call the function in a loop of one program, once an iteration.

    What a call returns changes one element of each argument of the next one. Otherwise XLA would
    move whatever stays the same out of the loop, which training never allows.
    """
    import jax
    import jax.numpy as jnp
    from jax import lax

    @jax.jit
    def loop(args: tuple, count: int) -> Any:
        def call(_: Any, carry: tuple) -> tuple:
            args, last = carry
            change = jax.tree.leaves(last)[0].ravel()[0] * 1e-30
            args = jax.tree.map(lambda x: x.at[(0,) * x.ndim].add(change.astype(x.dtype)), args)
            return args, function(*args)

        shapes = jax.eval_shape(function, *args)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return lax.fori_loop(0, count, call, (args, zeros))

    return lambda count: jax.block_until_ready(loop(args, count))


def as_table(results: dict[str, Any]) -> str:
    """Return the figures as a markdown table: ms, and the share of the GEMM rate."""
    gemm, flop = results["GEMM_GFLOP_per_s"], results["GFLOP"]
    title = "Nature CNN on one core, ms and share of the GEMM rate"
    lines = [
        describe_figures(title, results["machine"]),
        "",
        f"Products of {GEMM_SIZE} x {GEMM_SIZE} x {GEMM_SIZE}: {gemm:.1f} GFLOP/s.",
        "",
        "| | " + " | ".join(flop) + " |",
        "|---" * (1 + len(flop)) + "|",
        "| GFLOP | " + " | ".join(f"{x:.3f}" for x in flop.values()) + " |",
    ]
    for form, times in results["ms"].items():
        cells = [f"{ms:.2f} ({flop[case] / (ms / 1e3) / gemm:.0%})" for case, ms in times.items()]
        lines.append(f"| {form} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    with cli.exit_codes(debug=False):
        main(cli.parse_flags(OneCoreOptions, sys.argv[1:], __doc__ or ""))
