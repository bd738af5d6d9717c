"""Checkpoints: the whole TrainState, atomic, the last few and the best, and how to go on."""

import contextlib
import inspect
import itertools
import json
import logging
import operator
import os
import shutil
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from common.envs import Env, make_env
from common.errors import UserError, one_line
from common.normalize import NormalizerState
from common.replay import ReplayState, interrupt

from common.run.logger import ends_log_point
from common.run.seeds import for_each_seed
from common.run.trainer import Call, Trainer, TrainState

CHECKSUMS, LATEST = "checksums.json", "latest_step"
PIECE = 1 << 26  # bytes compressed at once, and of a file: what is not written yet is in memory
CHUNK = 1 << 20  # bytes read at once: a replay buffer must not enter memory a second time


class Checkpoints:
    """The checkpoints of one folder, written by orbax, with a checksum of each of their files.

    Without `keep` they are for reading: another process may be writing at the same time.
    """

    def __init__(self, folder: Path, keep: int | None = None) -> None:
        import orbax.checkpoint as ocp
        from orbax.checkpoint import checkpoint_managers as managers

        self.folder, self._ocp = folder, ocp
        best = managers.BestN(
            get_metric_fn=lambda metrics: metrics["return"],
            n=1,
            keep_checkpoints_without_metrics=False,
        )
        policy = managers.AnyPreservationPolicy([managers.LatestN(keep or 1), best])
        self._options = ocp.CheckpointManagerOptions(
            preservation_policy=policy,
            best_fn=lambda metrics: metrics["return"],
            enable_async_checkpointing=False,
        )

    def steps(self) -> list[int]:
        """Return the steps that were written to the end, oldest first."""
        return sorted(int(path.name) for path in self.folder.glob("*") if path.name.isdecimal())

    def best(self) -> tuple[int, float] | None:
        """Return the step with the highest return, and that; None if no return is known."""
        returns = {}
        for step in self.steps():
            with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
                metrics = json.loads((self.folder / str(step) / "metrics/metrics").read_text())
                returns[step] = float(metrics["return"])
        return max(returns.items(), key=lambda item: (item[1], item[0]), default=None)

    def latest_step(self) -> int | None:
        """Return the step that was written last, with its checksums; 0.1.0 did not keep it."""
        try:
            return int((self.folder / LATEST).read_text())
        except (OSError, ValueError):
            return None

    def missing_step(self) -> int | None:
        """Return the step written last if it is not there any more."""
        latest = self.latest_step()
        return None if latest in self.steps() else latest

    def save(self, step: int, state: Any, episode_return: float | None) -> None:
        """Write a checkpoint; a killed or failed write leaves the earlier ones as they are.

        Raises:
            Exception: orbax has many, one of them for a step that is there already.
        """
        metrics = None if episode_return is None else {"return": episode_return}
        filled = _filled(state)
        in_pieces = jax.tree.map(lambda _: self._ocp.SaveArgs(chunk_byte_size=PIECE), filled)
        args = self._ocp.args.PyTreeSave(
            filled, save_args=in_pieces, ocdbt_target_data_file_size=PIECE
        )
        for left_over in self.folder.glob("*.orbax-checkpoint-tmp*"):  # they fill the disk
            shutil.rmtree(left_over, ignore_errors=True)
        latest = self.latest_step()
        # A try may have failed behind what orbax does at one stroke.
        is_unfinished = step in self.steps() and (latest is None or latest < step)
        if not is_unfinished:
            with _quiet_orbax():
                manager = self._ocp.CheckpointManager(self.folder.absolute(), options=self._options)
                manager.save(step, args=args, metrics=metrics, force=True)
        sums = json.dumps(_checksums(self.folder / str(step)))
        write_atomically(self.folder / str(step) / CHECKSUMS, sums)
        write_atomically(self.folder / LATEST, str(step))

    def check(self, step: int) -> None:
        """Compare the files of a step with their checksums; 0.1.0 wrote none.

        Raises:
            ValueError: names a file that is damaged, missing or new.
        """
        path = self.folder / str(step) / CHECKSUMS
        if not path.exists():
            return
        try:
            expected = dict(json.loads(path.read_text()))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{CHECKSUMS} is damaged") from error
        found = _checksums(self.folder / str(step))
        for name in sorted(expected.keys() | found.keys()):
            if expected.get(name) != found.get(name):
                raise ValueError(f"{name} is damaged")

    def restore(self, step: int, like: Any) -> Any:
        """Return the checkpoint of a step, with the structure, shapes and dtypes of `like`.

        Raises:
            ValueError, OSError, KeyError: it is damaged or holds something else.
        """
        self.check(step)
        ocp, path = self._ocp, self.folder.absolute() / str(step) / "default"
        with _quiet_orbax():
            checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
            saved = checkpointer.metadata(path).item_metadata.tree
            abstract = _as_saved(_abstract(jax.eval_shape(_filled, like)), saved)
            small = jax.tree.map(lambda x: ocp.PLACEHOLDER if _is_large(x) else x, abstract)
            restore_args = ocp.checkpoint_utils.construct_restore_args(small)
            args = ocp.args.PyTreeRestore(small, restore_args=restore_args)
            restored = checkpointer.restore(path, args=args)
        found = {_name(key): x for key, x in jax.tree.leaves_with_path(restored)}

        def leaf(key: Any, x: Any) -> Array:
            if not x.size:
                return jnp.zeros(x.shape, x.dtype)
            return _read_in_pieces(path, _name(key), x) if _is_large(x) else found[_name(key)]

        return jax.tree.map_with_path(leaf, like)

    def set_aside(self, step: int) -> None:
        """Rename a damaged step, so that saving goes on without it."""
        path = self.folder / str(step)
        path.rename(path.with_name(f"{step}.damaged-{time.time_ns()}"))

    def set_aside_after(self, step: int) -> None:
        """Rename the checkpoints of later steps: they could not be read now, and may be whole."""
        for later in (s for s in self.steps() if s > step):
            self.set_aside(later)
        write_atomically(self.folder / LATEST, str(step))


def _checksums(folder: Path) -> dict[str, int]:
    """Return the CRC-32 of the files below a folder by relative path, but for hidden ones.

    Those, such as the .DS_Store of a Mac that looked into it, are not orbax's.
    """
    files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    orbax_files = [path for path in files if not any(part[0] == "." for part in path.parts)]
    return {
        path.as_posix(): _crc32(folder / path) for path in orbax_files if path.name != CHECKSUMS
    }


def _crc32(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            crc = zlib.crc32(chunk, crc)
    return crc


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write in one step: a kill leaves the old file or the new one."""
    fresh = path.with_suffix(".tmp")
    try:
        fresh.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)


def _is_large(x: Any) -> bool:
    return not jnp.issubdtype(x.dtype, jax.dtypes.prng_key) and x.size * x.dtype.itemsize > PIECE


def _read_in_pieces(path: Path, name: str, like: Any) -> Array:
    """Return one array of an orbax checkpoint; orbax itself would hold it twice for a while."""
    import tensorstore as ts

    base = {"driver": "file", "path": f"{path}/"}  # no URL, to which a # or % has a meaning
    files = {"driver": "ocdbt", "base": base, "path": name.replace("/", ".")}
    store = ts.open({"driver": "auto", "kvstore": files}, open=True, read=True).result()
    if store.shape != like.shape or store.dtype.numpy_dtype != like.dtype:
        raise ValueError(
            f"{name} is {store.dtype.name} {store.shape}, not {like.dtype} {like.shape}"
        )
    put = jax.jit(lax.dynamic_update_slice, donate_argnums=0)
    array, sizes = jnp.zeros(like.shape, like.dtype), store.chunk_layout.read_chunk_template.shape
    for start in itertools.product(*map(range, itertools.repeat(0), store.shape, sizes)):
        ends = map(min, store.shape, map(operator.add, start, sizes))
        array = put(array, store[tuple(map(slice, start, ends))].read().result(), start)
    return array


def _filled(state: Any) -> Any:
    """Give arrays without elements one: orbax refuses to save them."""
    return jax.tree.map(lambda x: x if x.size else jnp.zeros(1, x.dtype), state)


_name = partial(jax.tree_util.keystr, simple=True, separator="/")


def _as_saved(state: Any, saved: Any) -> Any:
    """Turn NamedTuples into dicts, without fields that hold nothing and that were not saved.

    Such a field is one that the release which wrote the checkpoint did not have.
    """
    if not hasattr(state, "_asdict") or not isinstance(saved, dict):
        return state
    return {
        name: _as_saved(part, saved.get(name))
        for name, part in state._asdict().items()
        if name in saved or jax.tree.leaves(part)
    }


@contextlib.contextmanager
def _quiet_orbax() -> Generator[None, None, None]:
    """Keep orbax's own remarks off standard error: what matters is raised."""
    from absl import logging as absl_logging

    verbosity, earlier = absl_logging.get_verbosity(), sys.unraisablehook
    asyncio_logger = logging.getLogger("asyncio")
    level = asyncio_logger.level

    def hook(unraisable: Any) -> None:
        left_over = inspect.iscoroutine(unraisable.object)
        if not left_over and str(unraisable.exc_value) != "Event loop is closed":
            earlier(unraisable)

    sys.unraisablehook = hook
    absl_logging.set_verbosity(absl_logging.FATAL)
    # Futures of parallel writes that failed too, beside the one that is raised.
    asyncio_logger.setLevel(logging.CRITICAL)
    yield
    # Not after a failure: reads and writes still under way then fail later, each with a traceback.
    sys.unraisablehook = earlier
    absl_logging.set_verbosity(verbosity)
    asyncio_logger.setLevel(level)


def saved_part(trainer: Trainer, state: TrainState) -> TrainState:
    """Return what a checkpoint holds: environments outside JAX cannot be saved."""
    return state if trainer.env.restorable else state._replace(env=())


def checkpointer(
    folder: Callable[[], Path], frequency: int, keep: int, best_of: str, say: Callable[[str], None]
) -> Callable[[Call], Call]:
    """Decorate `Trainer.__call__`: save every `frequency` env steps (0 = never) and at its end.

    A run that ends before its first log point leaves nothing. A failing save does not stop
    training; if the last one fails, the system's temporary folder is tried.

    Args:
        folder: returns the checkpoint folder, made when first asked for.
        frequency: env steps between two saves.
        keep: how many of the latest checkpoints stay; the best one stays as well.
        best_of: name of the logged return that ranks checkpoints; `say` prints a line.
    """

    def decorate(call: Call) -> Call:
        def checkpointed(trainer: Trainer) -> Generator[dict, None, None]:
            first = last = tried = saved = int(trainer.state.step)
            best = None
            try:
                with contextlib.closing(call(trainer)) as inner:
                    for log_data in inner:
                        step = log_data["sample_step"]
                        best = log_data["logs"].get(best_of, best if step == last else None)
                        last = step
                        yield log_data
                        due = frequency and step // frequency > tried // frequency
                        if due and ends_log_point(log_data):
                            tried = step
                            with _reported(say):
                                save_checkpoint(folder(), keep, trainer, best)
                                saved = step
            finally:
                learned = last > first and not is_lost(trainer.state)
                if learned and (step := int(trainer.state.step)) > saved:
                    _save_at_end(folder, keep, trainer, best if step == last else None)

        return checkpointed

    return decorate


def save_checkpoint(
    folder: Path, keep: int, trainer: Trainer, episode_return: float | None
) -> None:
    """Write where a trainer stands; keep the latest ones, and the one with the best return."""
    state = saved_part(trainer, trainer.state)
    Checkpoints(folder, keep).save(int(trainer.state.step), state, episode_return)


@contextlib.contextmanager
def _reported(say: Callable[[str], None]) -> Generator[None, None, None]:
    try:
        yield
    except Exception as error:
        say(f"warning: checkpoint not written ({_brief(error)}); the earlier ones are intact")


def _save_at_end(
    folder: Callable[[], Path], keep: int, trainer: Trainer, episode_return: float | None
) -> None:
    place = None
    try:
        place = folder()
        save_checkpoint(place, keep, trainer, episode_return)
    except Exception as error:
        where = _rescue(place, trainer, episode_return)
        raise UserError(
            f"the last checkpoint could not be written ({_brief(error)}); {where}"
        ) from error


def _rescue(folder: Path | None, trainer: Trainer, episode_return: float | None) -> str:
    """Save into the system's temporary folder; say where, or why not.

    Args:
        folder: that of the run's checkpoints; None if there is no run folder, so that a whole one
            is made.
    """
    from common.run.folder import save

    temporary = Path(tempfile.gettempdir())
    try:
        temporary = Path(tempfile.mkdtemp(prefix="quartet-checkpoint-"))
        if folder is None:
            save(trainer, temporary)
            return f"it was saved as the run folder {temporary}; go on with --resume {temporary}"
        save_checkpoint(temporary, 1, trainer, episode_return)
    except Exception as error:
        if temporary != Path(tempfile.gettempdir()):
            shutil.rmtree(temporary, ignore_errors=True)
        go_on = "start again" if folder is None else "go on with --resume"
        return f"nor in {temporary} ({_brief(error)}); free space and {go_on}"
    step = int(trainer.state.step)
    saved = temporary / str(step)
    if step in Checkpoints(folder).steps():  # all but its checksums, so that nothing can move there
        return (
            f"its files are in {folder / str(step)}, and a copy is {saved}; free space and go on "
            "with --resume"
        )
    return (
        f"it was saved as {saved} instead; free space, move it into {folder} and go on with "
        "--resume"
    )


def is_lost(state: Any) -> bool:
    """Return whether arrays were handed to a compiled program that never returned."""
    return any(leaf.is_deleted() for leaf in jax.tree.leaves(state) if isinstance(leaf, Array))


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {one_line(error)[:200]}"


def resume(trainer: Trainer, folder: Path, say: Callable[[str], None]) -> None:
    """Put the newest readable checkpoint of `folder` into `trainer.state`.

    Raises:
        UserError: there is no checkpoint, or none that fits this algorithm and configuration, or
            its step is above --total-timesteps.
    """
    _set_damaged_aside(Checkpoints(folder), say)
    state, step = restore_state(trainer, folder, None, say)
    if step > (total := trainer.config.total_timesteps):
        trainer.env.close()
        raise UserError(
            f"--total-timesteps {total} is below step {step}, which {folder.parent} has reached; "
            "give at least that"
        )
    Checkpoints(folder).set_aside_after(step)
    new_episodes = f": {trainer.config.env_id} starts new episodes"
    say(f"resuming at step {step}{new_episodes if _starts_anew(trainer.env, state) else ''}")
    go_on_from(trainer, state, step)


def go_on_from(trainer: Trainer, state: Any, step: int) -> None:
    """Put a restored state into `trainer.state`, with new environments where they lie outside JAX.

    These start new episodes with new seeds and without a memory or a return so far, and replay does
    not join the rows before and after. Those in JAX do so if the run ended because one had failed.
    """
    if not trainer.env.restorable:
        trainer.env.close()
        trainer.env = make_env(trainer.config, first_step=step)
    if _starts_anew(trainer.env, state):
        start_anew = partial(_with_new_episodes, trainer.env)
        state = for_each_seed(start_anew, state) if trainer.env.seeds_axis else start_anew(state)
    # All on one footing: restored arrays are bound to a device, and a mix would compile twice.
    trainer.state = jax.device_put(state, jax.devices()[0])


def _starts_anew(env: Env, state: Any) -> bool:
    return not env.restorable or bool((state.env.fault != 0).any())


def _with_new_episodes(env: Env, state: Any) -> Any:
    env_key, key = jax.random.split(state.key)
    state = state._replace(env=env.reset(env_key), key=key)
    state = jax.tree.map(
        _cut_off, state, is_leaf=lambda part: isinstance(part, ReplayState | NormalizerState)
    )
    if hasattr(state, "core"):
        state = state._replace(core=jax.tree.map(jnp.zeros_like, state.core))
    return state


def _cut_off(part: Any) -> Any:
    """Return a part of a state as it is where the episodes that it stems from are gone."""
    if isinstance(part, ReplayState):
        return interrupt(part)
    if isinstance(part, NormalizerState):
        return part._replace(running_return=jax.tree.map(jnp.zeros_like, part.running_return))
    return part


def _set_damaged_aside(checkpoints: Checkpoints, say: Callable[[str], None]) -> None:
    """Look at every step, as the next save does, and take those away that it could not read.

    Raises:
        UserError: none is whole; all stay where they are.
    """
    damaged, steps, where = {}, checkpoints.steps(), checkpoints.folder.parent
    for step in steps:
        try:
            checkpoints.check(step)
        except (OSError, ValueError) as error:
            damaged[step] = error
    if steps and len(damaged) == len(steps):
        reason = damaged[steps[-1]]
        raise UserError(
            f"no checkpoint of {where} can be restored: all are damaged (of {steps[-1]}, "
            f"{reason}); give another run folder"
        )
    for step, problem in damaged.items():
        checkpoints.set_aside(step)
        say(f"warning: checkpoint {step} of {where} cannot be read ({problem}); set aside")


def restore_state(
    trainer: Trainer, folder: Path, step: int | None, say: Callable[[str], None]
) -> tuple[Any, int]:
    """Return the TrainState of a step (the newest readable one for None), and that step.

    Frees the trainer's own state first, so that a large replay does not need its memory twice.

    Raises:
        UserError: there is none, or none that fits.
    """
    steps = Checkpoints(folder).steps()
    if step is None and (missing_step := Checkpoints(folder).missing_step()) is not None:
        say(f"warning: checkpoint {missing_step} of {folder.parent}, the last one, is missing")
    if not steps or (step is not None and step not in steps):
        missing = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        hint = "give a run folder that training left behind"
        if steps:
            hint = f"it has those of {', '.join(map(str, steps))}"
        raise UserError(f"{folder.parent} has {missing}; {hint}")
    like = jax.eval_shape(lambda: saved_part(trainer, trainer.state))
    trainer.state = None
    problem = ""
    for candidate in [step] if step is not None else reversed(steps):
        try:
            return Checkpoints(folder).restore(candidate, like), candidate
        except Exception as error:
            reason = _brief(error)
            problem = problem or reason
            say(f"warning: checkpoint {candidate} of {folder.parent} cannot be read ({reason})")
    raise UserError(
        f"no checkpoint of {folder.parent} can be restored ({problem}); give a run folder that is "
        "whole, of the same algorithm and environment"
    )


def _abstract(state: Any) -> Any:
    """Return the shapes and dtypes of a state, on the first device."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), state)
