"""The machine and the commit that a figure comes from, and the cores that processes run on."""

import contextlib
import os
import platform
import subprocess
from collections.abc import Generator
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def usable_cores() -> list[int | None]:
    """Return the cores this process may use; [None] where the system does not tell."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [None]


@contextlib.contextmanager
def on_cores(cores: set[int] | None) -> Generator[None, None, None]:
    """Start processes on cores from their first instruction on: children inherit affinity."""
    if cores is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def describe_commit() -> str:
    """Return git's short hash, marked if the code that runs differs from it."""
    git = partial(subprocess.run, cwd=ROOT, capture_output=True, text=True)
    try:
        head = git(["git", "rev-parse", "--short", "HEAD"])
        changed = git(["git", "diff", "--quiet", "HEAD", "--", "algos", "common"])
    except FileNotFoundError:
        return "unknown"
    if head.returncode:
        return "unknown"
    return head.stdout.strip() + "-dirty" * bool(changed.returncode)


def cpu_model() -> str:
    """Return the model name of the first core."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().split("\n") if info.exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.machine())


def describe_cores() -> str:
    """Return CPU model and number of cores."""
    return f"{cpu_model()}, {os.cpu_count()} cores"
