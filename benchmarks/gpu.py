"""Whether everything holds on a GPU, and how fast it is there: one command, under 8 minutes.

    python benchmarks/gpu.py
    python benchmarks/gpu.py --items envpool ppo-512
    JAX_PLATFORMS=cpu python benchmarks/gpu.py --small    # a minute or two on a CPU

Every item runs in a process of its own, which is given up after a while; one that fails is
recorded with its last error line, and the next one starts. Results are written after each item.

    envpool       CartPole-v1 stepped in a compiled program: equal to numpy steps of its twin
    float64       likewise HalfCheetah-v4, whose numbers have 64 bits
    convolutions  the Nature CNN and its gradient, against a CPU's
    donation      the compiled run of DQN takes over the memory of its input, and warns of nothing
    resume        DQN resumed by another process goes on bit for bit
    devices       PPO on all devices learns what it learns on one; skipped if there is one
    learning      PPO on gymnax/CartPole-v1, 3 seeds: as good as on the CPU in the last tenth
    dqn-N, ppo-N  env steps a second on CartPole-v1 with N environments, and of these alone
    sac-N         likewise SAC on HalfCheetah-v4, an update an env step
    pong-N        likewise PPO on Pong-v5
    seeds-N       env steps a second of N seeds of PPO on gymnax/CartPole-v1 in one program

Speeds are medians of interleaved repeats with compilation left out. Other libraries, such as
CleanRL and SBX, are not compared here.

Exits with 0 if all checks held, and with 1 if one failed.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import UserError, one_line
from gpu_items import PARTS, PROGRAM, Item, Outcome, all_items
from throughput import RESULTS, describe_figures, describe_machine

from common.run import cli
from common.run.checkpoint import write_atomically

GRACE = 25.0  # seconds that the last item may take beyond the limit
DEVICE = "device"  # the worker that tells what JAX runs on
LONGEST_LINE = 300


@dataclass(frozen=True)
class Options:
    """What to run."""

    items: tuple[str, ...] = ()
    """items to run; all if none is given"""
    out: str = str(RESULTS)
    """folder for gpu.json and gpu.md"""
    seconds_limit: float = 450.0
    """start no item after as many seconds"""
    small: bool = False
    """shrink everything, to try the program on a CPU"""
    worker: str = ""
    """used by the program itself: run this item in this process and print JSON"""
    folder: str = ""
    """used by the program itself: where a second process finds and leaves its files"""


class Ended(NamedTuple):
    """How a process ended: its exit code, None if it was given up, and what it printed."""

    code: int | None
    out: str
    err: str


def main(options: Options) -> int:
    """Run the items one by one; return the exit code."""
    if options.worker:
        work(options)
        return 0
    items = chosen_items(options)
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the item's process as well
    start = time.monotonic()
    device = run_item(Item(DEVICE, False, describe_device, 90.0), options, 90.0)
    print(f"device: {device['detail']}", flush=True)
    machine = describe_machine() | {"device": device["detail"]} | device["figures"]
    results: dict[str, Any] = {"machine": machine, "small": options.small}
    results |= {"seconds_limit": options.seconds_limit, "items": {}}
    write(results, out)

    def run(item: Item, seconds: float) -> dict[str, Any]:
        return run_item(item, options, seconds)

    for name, entry in run_all(items, run, options.seconds_limit, start):
        results["items"][name] = entry
        write(results, out)
        print(f"{name}: {entry['status']}, {entry['seconds']} s: {describe(entry)}", flush=True)
    print(f"\n{as_table(results)}")
    entries = results["items"].values()
    return int(any(entry["kind"] == "check" and entry["status"] == "failed" for entry in entries))


def chosen_items(options: Options) -> list[Item]:
    """Return the items to run, in their order.

    Raises:
        UserError: a name is unknown.
    """
    items = all_items(options.small)
    names = [item.name for item in items]
    for name in options.items:
        if name not in names:
            raise UserError(f"unknown --items {name!r}; accepted are {', '.join(names)}")
    return [item for item in items if not options.items or item.name in options.items]


def run_all(
    items: list[Item],
    run: Callable[[Item, float], dict[str, Any]],
    limit: float,
    start: float,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the entry of each item; those after the time limit are skipped.

    Args:
        items: what to run.
        run: runs one and returns its entry; it is given the seconds that it may take.
        limit: seconds after `start` from which on nothing is begun.
        start: when the program began.
        clock: tells the time.
    """
    for item in items:
        elapsed = clock() - start
        left = limit + GRACE - elapsed
        kind = "check" if item.is_check else "rate"
        if elapsed >= limit:
            yield item.name, skipped(kind, f"--seconds-limit {limit:.0f} was used up", 0.0)
            continue
        entry = {"kind": kind, **run(item, min(item.seconds, left))}
        if entry.pop("given_up", False) and left < item.seconds:
            detail = f"cut off {GRACE:.0f} s after --seconds-limit {limit:.0f}"
            entry = skipped(kind, detail, entry["seconds"])
        yield item.name, entry


def skipped(kind: str, detail: str, seconds: float) -> dict[str, Any]:
    """Return the entry of an item that was not finished."""
    return {
        "kind": kind,
        "status": "skipped",
        "seconds": seconds,
        "detail": detail,
        "figures": {},
    }


def run_item(item: Item, options: Options, seconds: float) -> dict[str, Any]:
    """Run an item in a process of its own; return its entry."""
    command = [sys.executable, PROGRAM, "--worker", item.name, *["--small"] * options.small]
    # What JAX would take of the GPU's memory at the start is missing to an item's second process.
    variables = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} if item.is_check else {}
    start = time.monotonic()
    ended = run_alone(command, seconds, os.environ | variables)
    entry = entry_of(ended, seconds)
    return entry | {"seconds": round(time.monotonic() - start, 1)}


def run_alone(command: list[str], seconds: float, variables: Any) -> Ended:
    """Run a process and all that it starts; give them up after some seconds.

    Into files, not pipes: a pipe stays open as long as any child of the process lives.
    """
    file = partial(tempfile.TemporaryFile, "w+", errors="replace")
    with file() as out, file() as err:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=variables,
            start_new_session=True,
        )
        code = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        err.seek(0)
        return Ended(code, out.read(), err.read())


def entry_of(ended: Ended, seconds: float) -> dict[str, Any]:
    """Return what the last line of a worker says, or else how it died and its last error line."""
    with contextlib.suppress(IndexError, TypeError, ValueError):
        outcome = Outcome(**json.loads(ended.out.splitlines()[-1]))
        failed = outcome.status == "failed"
        return outcome._asdict() | ({"stderr": ended.err[-3000:]} if failed else {})
    how = f"given up after {seconds:.0f} s" if ended.code is None else f"exit code {ended.code}"
    if ended.code is not None and ended.code < 0:
        how = f"died of {signal.Signals(-ended.code).name}"
    detail = f"{how}: {last_error_line(ended.err)}"
    entry = {"status": "failed", "detail": detail, "figures": {}, "stderr": ended.err[-3000:]}
    return entry | ({"given_up": True} if ended.code is None else {})


def last_error_line(text: str) -> str:
    """Return the last line that says something, which JAX's remarks on its tracebacks do not."""
    remarks = "---", "For simplicity, JAX has removed"
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith(remarks)]
    return lines[-1][:LONGEST_LINE] if lines else "no output"


def work(options: Options) -> None:
    """Run one item in this process, print its outcome and end."""
    if options.worker in PARTS:
        PARTS[options.worker](options.folder, options.small)
        print("null")
        return
    items = {item.name: item.run for item in all_items(options.small)}
    run = describe_device if options.worker == DEVICE else items[options.worker]
    try:
        outcome = run()
    except Exception as error:
        traceback.print_exc()
        line = f"{type(error).__name__}: {one_line(error)}"
        if isinstance(error, subprocess.CalledProcessError):
            line = f"in a second process: {last_error_line(error.stderr)}"
        outcome = Outcome("failed", line[:LONGEST_LINE], {})
    print(json.dumps(outcome._asdict()), flush=True)
    sys.stderr.flush()
    # The end of the interpreter could hang or crash in threads of pools and of the device.
    os._exit(0)


def describe_device() -> Outcome:
    """Return what JAX runs on."""
    import jax

    device = jax.devices()[0]
    memory = (device.memory_stats() or {}).get("bytes_limit")
    figures = {"platform": device.platform, "num_devices": jax.device_count()}
    figures |= {"memory_GiB": round(memory / 2**30, 1)} if memory else {}
    return Outcome("ok", device.device_kind, figures)


def write(results: dict[str, Any], out: Path) -> None:
    """Write gpu.json and gpu.md; a kill leaves the old files or the new ones."""
    write_atomically(out / "gpu.json", json.dumps(results, indent=2) + "\n")
    write_atomically(out / "gpu.md", as_table(results))


def describe(entry: dict[str, Any]) -> str:
    """Return one line about an item."""
    figures = entry["figures"] if entry["kind"] == "rate" else {}
    return "; ".join([entry["detail"], *(f"{name} {rate:,.0f}" for name, rate in figures.items())])


def as_table(results: dict[str, Any]) -> str:
    """Return the results as markdown tables."""
    entries = results["items"]
    title = f"{results['machine']['device']}{', small' if results['small'] else ''}"
    lines = [describe_figures(title, results["machine"]), ""]
    checks = {name: entry for name, entry in entries.items() if entry["kind"] == "check"}
    rates = {name: entry for name, entry in entries.items() if entry["kind"] == "rate"}
    lines += ["| check | result | seconds | |", "|---|---|---|---|"]
    for name, entry in checks.items():
        detail = entry["detail"].replace("|", "\\|")
        lines.append(f"| {name} | {entry['status']} | {entry['seconds']} | {detail} |")
    lines += ["", "| env steps a second | loop | environments alone | loop / environments |"]
    lines += ["|---|---|---|---|"]
    lines += [rate_row(name, entry) for name, entry in rates.items()]
    return "\n".join(lines) + "\n"


def rate_row(name: str, entry: dict[str, Any]) -> str:
    """Return the line of one measurement."""
    if entry["status"] != "ok":
        detail = entry["detail"].replace("|", "\\|")
        return f"| {name} | {entry['status']}: {detail} | | |"
    loop = entry["figures"]["loop"]
    if "one_seed" in entry["figures"]:
        alone = entry["figures"]["one_seed"]
        return f"| {name} | {loop:,.0f} | one seed: {alone:,.0f} | {loop / alone:.1f} times |"
    env = entry["figures"]["env"]
    return f"| {name} | {loop:,.0f} | {env:,.0f} | {loop / env:.0%} |"


if __name__ == "__main__":
    with cli.exit_codes(debug=False):
        sys.exit(main(cli.parse_flags(Options, sys.argv[1:], __doc__ or "")))
