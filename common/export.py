"""Write a policy as StableHLO: python -m common.export RUN_DIR [--checkpoint latest|best|STEP]."""

import importlib.util
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro
from gymnasium import spaces

from common.errors import UserError, one_line

from common.run import threads
from common.run.cli import checkpoint_of, exit_codes, parse_flags

if TYPE_CHECKING:
    from jax.export import Exported

    from common.run.load import Policy

PLATFORMS = ("cpu", "cuda")
# Fields of Config that make evaluation random where they are not 0 or False.
DRAWING = ("evaluation_epsilon", "eval_stochastic", "num_policy_tau")


@dataclass(frozen=True)
class ExportOptions:
    """Write the evaluation action of a run folder's policy, with its parameters, as one file."""

    run_dir: tyro.conf.Positional[str] = ""
    """folder of a run"""
    checkpoint: str = "latest"
    """a step, latest or best"""
    out: str | None = None
    """file to write; policy.stablehlo in the run folder if not given"""
    debug: bool = False
    """show tracebacks"""


def main(options: ExportOptions) -> None:
    """Write the file, and print what it takes and gives."""
    if not options.run_dir:
        raise UserError("give a run folder, such as one under runs/; see --help")
    checkpoint = checkpoint_of(options.checkpoint)
    if importlib.util.find_spec("flatbuffers") is None:
        raise UserError("the file is written by flatbuffers; pip install -e '.[export]'")
    path = Path(options.out or Path(options.run_dir, "policy.stablehlo"))
    if options.out and not _can_be_written(path):
        raise UserError(
            f"--out {path} cannot be written; give the name of a file in a folder that exists"
        )
    threads.use_cores(1)
    from common.run.load import load

    policy = load(options.run_dir, checkpoint)
    words, exported = export_policy(policy)
    try:
        path.write_bytes(exported.serialize())
    except OSError as error:
        raise UserError(f"--out {path} cannot be written ({one_line(error)})") from error
    platforms = " and ".join(exported.platforms)
    print(f"{path}: {words} for {platforms}, checkpoint {policy.step}")


def _can_be_written(path: Path) -> bool:
    try:
        return path.parent.is_dir() and not path.is_dir()
    except OSError:  # too long a name, or a folder that may not be searched
        return False


def export_policy(policy: "Policy") -> tuple[str, "Exported"]:
    """Return the call of a policy in words, and the call itself, for batches of any size B.

    The call is (obs) -> action; for a policy that draws, (obs, seed) -> action; for one with a
    memory, (obs, core, valid) -> (action, core), and with both the seed last. Leading axes are B; a
    seed is an integer [].
    """
    import jax
    import jax.numpy as jnp
    from jax import export

    from common.networks import Memory

    trainer, evaluator, key = policy.trainer, policy.trainer.evaluator, jax.random.key(0)
    learner = trainer.state.learner
    (size,) = export.symbolic_shape("B")
    space = trainer.env.action_space

    def of_any_size(x: Any) -> Any:
        return jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype)

    def act(obs: Any, seed: Any = 0) -> Any:
        action, _ = remember(obs, (), jnp.ones(jax.tree.leaves(obs)[0].shape[0], bool), seed)
        return action

    def remember(obs: Any, core: Any, valid: Any, seed: Any = 0) -> Any:
        action, core = evaluator.act(learner, obs, jax.random.key(seed), Memory(core, valid))
        return from_start(space, action), core

    like = jax.eval_shape(trainer.env.reset, key).obs, evaluator.initial_core(1)
    obs, core = jax.tree.map(of_any_size, like)
    exported = partial(export.export, platforms=PLATFORMS)
    draws = any(getattr(trainer.config, name, 0) for name in DRAWING)
    seed = [jax.ShapeDtypeStruct((), jnp.uint32)] if draws else []
    and_seed = ", seed" * draws
    if jax.tree.leaves(core):
        valid = jax.ShapeDtypeStruct((size,), jnp.bool_)
        words = f"(obs, core, valid{and_seed}) -> (action, core)"
        return words, exported(jax.jit(remember))(obs, core, valid, *seed)
    return f"(obs{and_seed}) -> action", exported(jax.jit(act))(obs, *seed)


def from_start(space: spaces.Space, action: Any) -> Any:
    """Return actions as the space counts them; the learner counts from 0."""
    if isinstance(space, spaces.Dict):
        return {name: from_start(space[name], action[name]) for name in space.spaces}
    if isinstance(space, spaces.Tuple):
        return tuple(from_start(s, a) for s, a in zip(space.spaces, action, strict=True))
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        return action + space.start
    return action


if __name__ == "__main__":
    with exit_codes("--debug" in sys.argv):
        main(parse_flags(ExportOptions, sys.argv[1:], __doc__ or ""))
