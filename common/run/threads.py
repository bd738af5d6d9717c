"""Threads: small networks run fastest on one core, networks of 256 units on two.

Three effects cost speed when threads roam free: XLA splits small matrix products over its pool,
envpool hands each step from core to core, and the scheduler puts two threads of XLA's pool on one
core for whole runs. Pinning cures all of them.
"""

import fcntl
import os
import tempfile
from pathlib import Path
from typing import IO

from common import env_worker

XLA_POOL = "tf_XLAEigen"

_held_locks: list[IO] = []


def use_cores(wanted: int) -> list[int]:
    """Pin this process to up to `wanted` cores that no other run of ours holds; return them.

    Must run before JAX starts its backend. Does nothing, and returns [], if the user chose already
    (an affinity mask by taskset or a scheduler, NPROC, or thread flags for XLA), if there is only
    one core, or if every core is taken. A core is held by a file lock, which the kernel frees when
    the process ends.
    """
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    chosen_by_user = len(cores) != os.cpu_count() or "NPROC" in os.environ
    if chosen_by_user or len(cores) < 2 or "thread" in os.environ.get("XLA_FLAGS", ""):
        return []
    folder = Path(tempfile.gettempdir(), f"quartet-cores-{os.getuid()}")
    held: list[int] = []
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        for core in sorted(cores):
            if len(held) < wanted and _lock(folder / str(core)):
                held.append(core)
    except OSError:
        return []
    if held:
        os.environ["NPROC"] = str(len(held))
        env_worker.cores_before_pinning = cores  # the workers may use all of them
        os.sched_setaffinity(0, held)
    return held


def spread_pool(cores: list[int]) -> None:
    """Give each thread of XLA's pool a core of its own, once JAX has started its backend."""
    if len(cores) < 2:
        return
    tasks = sorted(int(task.name) for task in Path("/proc/self/task").iterdir())
    pool = [task for task in tasks if _name_of(task) == XLA_POOL]
    for task, core in zip(pool, cores, strict=False):
        os.sched_setaffinity(task, {core})


def _name_of(task: int) -> str:
    try:
        return Path(f"/proc/self/task/{task}/comm").read_text().strip()
    except OSError:
        return ""  # a thread that has ended since it was listed


def _lock(path: Path) -> bool:
    lock = path.open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return False
    _held_locks.append(lock)
    return True
