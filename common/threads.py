"""Threads: small networks run fastest with the whole process on one core.

Two effects cost up to a third of the speed when threads roam free: XLA splits small matrix products
over its pool, and envpool hands each step from core to core. Pinning cures both. Must run before
JAX starts its backend.
"""

import fcntl
import os
import tempfile
from pathlib import Path
from typing import IO

_held_locks: list[IO] = []


def use_one_core() -> int | None:
    """Pin this process to a core that no other run of ours holds, and return its number.

    Does nothing, and returns None, if the user chose already (an affinity mask by taskset or a
    scheduler, NPROC, or thread flags for XLA), if there is only one core, or if every core is
    taken. The core is held by a file lock, which the kernel frees when the process ends.
    """
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    chosen_by_user = len(cores) != os.cpu_count() or "NPROC" in os.environ
    if chosen_by_user or len(cores) < 2 or "thread" in os.environ.get("XLA_FLAGS", ""):
        return None
    folder = Path(tempfile.gettempdir(), f"quartet-cores-{os.getuid()}")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        core = next((core for core in sorted(cores) if _lock(folder / str(core))), None)
    except OSError:
        return None
    if core is not None:
        os.environ["NPROC"] = "1"
        os.sched_setaffinity(0, {core})
    return core


def _lock(path: Path) -> bool:
    lock = path.open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return False
    _held_locks.append(lock)
    return True
