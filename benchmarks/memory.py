"""Resident memory of DQN's Atari preset: with a full buffer, while it is saved, and restored.

    python benchmarks/memory.py                        # 1,000,000 frames: 16 GB, and 8 of disk
    python benchmarks/memory.py --buffer-size 100000

The buffer is filled with random bytes, so that every page is resident and the checkpoint is as
large as the frames. Saving and restoring happen in processes of their own, whose memory is sampled
every 20 ms. The checkpoint is deleted at the end.
"""

import json
import os
import resource
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from throughput import RESULTS, describe_machine, in_process

from common.run import cli

ROWS_AT_ONCE = 1_000
STEP = 1_000


@dataclass(frozen=True)
class Options:
    """What to measure."""

    buffer_size: int = 1_000_000
    """frames in the buffer"""
    folder: str = tempfile.gettempdir()
    """where the checkpoint is written, for the time of the measurement"""
    out: str = str(RESULTS)
    """folder for memory_atari.json"""
    worker: Literal["save", "restore", "none"] = "none"
    """used by the program itself: measure this in this process and print JSON"""


def main(options: Options) -> None:
    """Measure a save, then a restore, and write the results."""
    if options.worker != "none":
        measure = {"save": measure_save, "restore": measure_restore}[options.worker]
        print(json.dumps(measure(options)))
        return
    cores = os.sched_getaffinity(0)
    figures: dict[str, Any] = {"buffer_size": options.buffer_size}
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="quartet-memory-") as folder:
        flags = ["--buffer-size", str(options.buffer_size), "--folder", folder, "--worker"]
        for name in ("save", "restore"):
            figures[name] = in_process([__file__, *flags, name], cores)
        if figures["save"].pop("sum") != figures["restore"].pop("sum"):
            raise SystemExit("the frames that were restored are not those that were saved")
        written = (path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
        figures["checkpoint_GB"] = sum(written) / 1e9
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(figures | {"machine": describe_machine()}, indent=2)
    (out / "memory_atari.json").write_text(text + "\n")
    print(text)


def measure_save(options: Options) -> dict[str, float]:
    """Return GB of the frames, GB resident with a full buffer, and at the peak of a save."""
    from common.run.checkpoint import save_checkpoint

    trainer = make_trainer(options)
    fill(trainer)
    figures = {"frames_GB": frames(trainer).nbytes / 1e9, "before_GB": resident_GB()}
    save = partial(save_checkpoint, Path(options.folder) / "checkpoints", 1, trainer, None)
    figures["peak_GB"] = peak_during(save)
    return figures | {"sum": checksum(frames(trainer))}


def measure_restore(options: Options) -> dict[str, float]:
    """Return GB resident at the peak of a restore, and after it."""
    from common.run.checkpoint import resume

    trainer = make_trainer(options)
    say = partial(print, file=sys.stderr)
    peak = peak_during(partial(resume, trainer, Path(options.folder) / "checkpoints", say))
    figures = {"peak_GB": peak, "after_GB": resident_GB()}
    return figures | {"sum": checksum(frames(trainer))}


def make_trainer(options: Options) -> Any:
    """Return a trainer of DQN on Breakout-v5 with the settings of the atari preset."""
    from algos.dqn import PRESETS, Config, Trainer

    settings = PRESETS["atari"] | {"buffer_size": options.buffer_size}
    return Trainer(Config(env_id="Breakout-v5", **settings))


def frames(trainer: Any) -> Any:
    """Return all frames [T, N, 84, 84]."""
    return trainer.state.replay.storage.obs


def fill(trainer: Any) -> None:
    """Write random bytes over all frames, where they are."""
    import jax
    from jax import lax

    def write(array: Any, block: Any, start: int) -> Any:
        return lax.dynamic_update_slice_in_dim(array, block, start, 0)

    in_place = jax.jit(write, donate_argnums=0)
    rng = np.random.default_rng(0)
    state = trainer.state
    filled = frames(trainer)
    for start in range(0, len(filled), ROWS_AT_ONCE):
        shape = (min(ROWS_AT_ONCE, len(filled) - start), *filled.shape[1:])
        block = rng.integers(256, size=shape, dtype=np.uint8)
        filled = in_place(filled, block, start)
    storage = state.replay.storage._replace(obs=filled)
    replay = state.replay._replace(storage=storage)
    trainer.state = state._replace(replay=replay, step=state.step + STEP)


def checksum(array: Any) -> int:
    """Return the sum of some of the frames, which were read back."""
    return int(np.asarray(array[::997]).sum(dtype=np.int64))


def peak_during(action: Callable[[], Any]) -> float:
    """Return the most GB that are resident while an action runs."""
    stop, peaks = threading.Event(), [resident_GB()]

    def watch() -> None:
        while not stop.wait(0.02):
            peaks.append(resident_GB())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        action()
    finally:
        stop.set()
        watcher.join()
    return max(peaks)


def resident_GB() -> float:
    """Return how much memory of this process is resident."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e9


if __name__ == "__main__":
    with cli.exit_codes(debug=False):
        main(cli.parse_flags(Options, sys.argv[1:], __doc__ or ""))
