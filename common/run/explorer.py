"""One Explorer: the collecting half of an algorithm file, in a process that Ray starts."""

import os
import socket
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from common.envs import EpisodeSummary

from common.run import threads

SPAWN_KEY = 0x4558  # keeps the seeds of Explorers apart from all others of a run


class Plan(NamedTuple):
    """What every Explorer of a run is built from."""

    path: str  # of the algorithm file, for tracebacks
    source: str  # its text: another machine need not have the file
    import_path: list[str]  # of the Learner, for environments that are imported
    config: dict[str, Any]
    num_explorers: int
    first_step: int  # env steps that the run had made when it started or went on
    weights: list[jax.ShapeDtypeStruct]  # leaves of the Learner's, which has all environments


class Collected(NamedTuple):
    """What an Explorer returns."""

    trajectory: Any  # rollout.Trajectory of numpy arrays; None if the end of the run cut it
    summary: EpisodeSummary
    num_steps: int  # env steps made for it
    version: int  # of the parameters that acted


class Explorer:
    """The environments and the compiled half of one Explorer; Ray makes an actor of it."""

    def is_placed(self) -> tuple[str, int]:
        """Return host and process number: Ray has found a core and started the process."""
        return socket.gethostname(), os.getpid()

    def start(self, plan: Plan, number: int, restarts: int) -> None:
        """Make the environments, with seeds of this Explorer's own, and compile."""
        jax.config.update("jax_platforms", "cpu")
        threads.use_cores(1)
        os.environ.setdefault("NPROC", "1")
        sys.path += [path for path in plan.import_path if path not in sys.path]
        module = _run_file(plan)
        origin = plan.config["seed"], SPAWN_KEY, number, restarts, plan.first_step
        seed = int(np.random.SeedSequence(origin).generate_state(1)[0]) >> 1
        # Without the checks of __post_init__: they are of the whole run, and this may be a share.
        config = object.__new__(module.Config)
        vars(config).update(plan.config | {"seed": seed})
        self.trainer = module.Trainer(config)
        if hasattr(self.trainer.agent, "spread_exploration"):
            num_envs = plan.config["num_envs"]
            total = plan.num_explorers * num_envs
            self.trainer.agent.spread_exploration(number * num_envs, total)
        self._is_new = True
        learner = self.trainer.state.learner
        self._make_learner = type(learner)
        self._state = _without_learner(self.trainer.state)
        compiled = jax.jit(self._collect, donate_argnums=0)
        self._shapes = jax.tree.unflatten(jax.tree.structure(weights_of(learner)), plan.weights)
        weights = jax.eval_shape(packed, self._shapes)
        self._compiled = compiled.lower(self._state, weights, np.int32(0)).compile()

    def collect(self, weights: dict[str, Any], version: int, step: int) -> Collected:
        """Make a trajectory from env step `step` of the run on.

        Args:
            weights: what collecting needs of the LearnerState, `packed`.
            version: of these parameters.
            step: env steps of the run before this trajectory.

        Raises:
            UserError: an environment failed.
        """
        args = self._state, weights, np.int32(step)
        self._state, trajectory, is_complete = self._compiled(*args)
        self.trainer.env.check(self._state.env)
        return Collected(
            trajectory=self._sendable(trajectory) if is_complete else None,
            summary=jax.device_get(self._state.env.summary),
            num_steps=int(self._state.step) - step,
            version=version,
        )

    def _sendable(self, trajectory: Any) -> Any:
        is_new = np.full(self.trainer.config.num_envs, self._is_new)
        self._is_new = False
        return jax.device_get(trajectory)._replace(is_new=is_new)

    def _collect(self, state: Any, weights: dict[str, Any], step: Any) -> tuple:
        learner = self._make_learner(**unpacked(weights, self._shapes), opt_state=())
        env = self.trainer.env.reset_summary(state.env)
        state = state._replace(learner=learner, env=env, step=step)
        state, trajectory, is_complete = self.trainer.collect_trajectory(state)
        return _without_learner(state), trajectory, is_complete


def weights_of(learner: Any) -> dict[str, Any]:
    """Return the parts of a LearnerState that collecting needs."""
    return {name: part for name, part in learner._asdict().items() if name != "opt_state"}


def packed(tree: Any) -> dict[str, Array]:
    """Join the arrays of each dtype to one vector: one large one travels faster than many."""
    groups: dict[str, list[Array]] = {}
    for leaf in jax.tree.leaves(tree):
        groups.setdefault(leaf.dtype.name, []).append(leaf.ravel())
    return {dtype: jnp.concatenate(group) for dtype, group in groups.items()}


def unpacked(vectors: dict[str, Array], shapes: Any) -> Any:
    """Return the pytree, of these shapes and dtypes, that was `packed`."""
    leaves, structure = jax.tree.flatten(shapes)
    starts = dict.fromkeys(vectors, 0)
    parts = []
    for leaf in leaves:
        start = starts[leaf.dtype.name]
        end = starts[leaf.dtype.name] = start + leaf.size
        parts.append(vectors[leaf.dtype.name][start:end].reshape(leaf.shape))
    return jax.tree.unflatten(structure, parts)


def _without_learner(state: Any) -> Any:
    """Return a TrainState without what an Explorer is sent, or never uses."""
    return state._replace(**{name: () for name in ("learner", "replay") if name in state._fields})


def _run_file(plan: Plan) -> ModuleType:
    """Return the algorithm file as a module."""
    module = ModuleType(f"quartet_explorer_{Path(plan.path).stem}")
    module.__file__ = plan.path
    sys.modules[module.__name__] = module
    exec(compile(plan.source, plan.path, "exec"), vars(module))
    return module
