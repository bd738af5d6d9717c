"""Environments of three backends behind one contract; see `common.envs.env`."""

import ast
import difflib
import functools
import importlib
import sys
import warnings
from collections.abc import Iterable
from types import ModuleType
from typing import Any, Literal, Protocol

import numpy as np
from gymnasium import spaces

from common.action_masks import MASK_KEY
from common.env_worker import sub_spaces
from common.envs.env import Env, EnvState, EpisodeSummary, TimeStep, scale_action
from common.errors import UserError, failures, one_line

__all__ = [
    "Env",
    "EnvBackend",
    "EnvConfig",
    "EnvState",
    "EpisodeSummary",
    "TimeStep",
    "config_backend",
    "import_envpool",
    "make_env",
    "require_action_space",
    "require_bounded_actions",
    "resolve_backend",
    "scale_action",
]

EnvBackend = Literal["auto", "envpool", "gymnasium", "jax"]
Purpose = Literal["train", "evaluate", "video"]
PURPOSES = ("train", "evaluate", "video")
KINDS = spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary
MOST_VALUES = 1_000_000  # of a Discrete space; a layer of 120 units on them takes half a GB


class EnvConfig(Protocol):
    """The fields of an algorithm's Config that describe its environment."""

    @property
    def env_id(self) -> str: ...  # noqa: D102
    @property
    def env_backend(self) -> EnvBackend: ...  # noqa: D102
    @property
    def env_module(self) -> str | None: ...  # noqa: D102
    @property
    def env_kwargs(self) -> tuple[str, ...]: ...  # noqa: D102
    @property
    def num_envs(self) -> int: ...  # noqa: D102
    @property
    def env_workers(self) -> int: ...  # noqa: D102
    @property
    def seed(self) -> int: ...  # noqa: D102


def make_env(
    config: EnvConfig,
    purpose: Purpose = "train",
    num_envs: int | None = None,
    first_step: int = 0,
) -> Env:
    """Make the environments of a run, each with its own seed.

    Args:
        config: names the environment, its options, how many run in parallel, and the seed.
        purpose: Atari is clipped and cut into lives in training only; "video" can be rendered. No
            two purposes share a seed.
        num_envs: instead of config.num_envs.
        first_step: env steps done so far, so that a resumed run sees new episodes.

    Raises:
        UserError: unknown id, backend, module or option, an unsupported space, or a number of
            workers that does not fit.
    """
    backend = config_backend(config)
    _check_workers(config, backend)
    options = _parse_kwargs(config.env_kwargs)
    entropy = [config.seed, PURPOSES.index(purpose), first_step]
    words = np.random.SeedSequence(entropy).generate_state(num_envs or config.num_envs)
    seeds = [int(word) >> 1 for word in words]
    if config.env_workers and purpose != "video":
        env = Env(config.env_id, _make_workers(config, seeds, options))
    else:
        env = Env(config.env_id, _make_backend(config.env_id, backend, seeds, options, purpose))
    _check_space(config.env_id, "observation", env.observation_space)
    _check_space(config.env_id, "action", env.action_space)
    _check_mask(config.env_id, env.observation_space, env.action_space)
    return env


def config_backend(config: EnvConfig) -> EnvBackend:
    """Import the module of a configuration, and return the backend that serves its environment.

    An id that the module registers is Gymnasium's, whatever else knows it, unless the configuration
    names a backend.

    Raises:
        UserError: if the module cannot be imported, or no backend knows the id.
    """
    registered = _registered_by(config.env_module) if config.env_module else set()
    if ":" in config.env_id:
        _import_from_here()
    if config.env_backend == "auto" and config.env_id in registered:
        return "gymnasium"
    return resolve_backend(config.env_id, config.env_backend)


def _make_backend(
    env_id: str, backend: str, seeds: list[int], options: dict[str, Any], purpose: Purpose
) -> Any:
    if backend == "envpool":
        from common.envs import envpool_backend as ep
        from common.envs.host import HostBackend

        if purpose == "video":
            options = {"render_mode": "rgb_array"} | options
        pool = ep.make_pool(env_id, seeds, options, training=purpose == "train")
        if ep.wide_dtypes(pool) - {np.dtype(np.float64)}:
            return HostBackend(ep.PoolStepper(pool))
        return ep.XlaPoolBackend(pool)
    if backend == "gymnasium":
        from common.envs.gymnasium_backend import GymnasiumStepper
        from common.envs.host import HostBackend

        return HostBackend(GymnasiumStepper(env_id, seeds, options, render=purpose == "video"))
    from common.envs.jax_backend import GymnaxEnv, JaxBackend, PgxEnv

    family, name = env_id.split("/", 1)
    make = GymnaxEnv if family == "gymnax" else PgxEnv
    return JaxBackend(make(name, options), len(seeds), PURPOSES.index(purpose))


def _check_workers(config: EnvConfig, backend: str) -> None:
    workers = config.env_workers
    if workers and backend != "gymnasium":
        hint = ", or add --env-backend gymnasium if Gymnasium knows the id too"
        raise UserError(
            f"--env-workers {workers} is for Gymnasium environments, {config.env_id} is stepped by "
            f"{backend}; leave it out{hint if backend == 'envpool' else ''}"
        )
    if workers and config.num_envs % workers:
        raise UserError(
            f"--env-workers {workers} does not divide --num-envs {config.num_envs}; "
            "give each worker as many environments"
        )


def _make_workers(config: EnvConfig, seeds: list[int], options: dict[str, Any]) -> Any:
    """Return the backend of as many workers as can share out the environments evenly."""
    from common.envs.gymnasium_backend import WorkerStepper
    from common.envs.host import HostBackend

    sizes = range(1, config.env_workers + 1)
    workers = max(count for count in sizes if len(seeds) % count == 0)
    return HostBackend(WorkerStepper(config.env_id, seeds, options, workers, config.env_module))


def resolve_backend(env_id: str, backend: EnvBackend = "auto") -> EnvBackend:
    """Return the backend that serves `env_id`.

    Raises:
        UserError: if no backend, or not the one asked for, knows the id.
    """
    if backend not in ("auto", "envpool", "gymnasium", "jax"):
        raise UserError(
            f"unknown --env-backend {backend!r}; accepted are auto, envpool, gymnasium, jax"
        )
    order: tuple[EnvBackend, ...] = (
        ("envpool", "gymnasium", "jax") if backend == "auto" else (backend,)
    )
    if env_id.startswith(("gymnax/", "pgx/")) and backend == "auto":
        order = ("jax",)
    known = {name: _known_ids(name, env_id) for name in order}
    for name in order:
        if env_id in known[name] or (name == "gymnasium" and ":" in env_id):
            return name
    candidates = sorted({id_ for ids in known.values() for id_ in ids})
    raise UserError(_unknown_id(env_id, backend, candidates))


def import_envpool() -> ModuleType:
    """Import envpool, whose newer wheels load libEGL and libOpenGL of the system.

    Raises:
        UserError: it cannot be imported.
    """
    try:
        import envpool
    except ImportError as error:
        raise UserError(
            f"envpool cannot be imported ({one_line(error)}); on Debian and Ubuntu the system "
            "libraries that it needs come with: apt install libegl1 libopengl0"
        ) from error
    # Its own spaces set this off; nothing that a user could change.
    warnings.filterwarnings("ignore", message=".*precision lowered by casting")
    return envpool


def _known_ids(backend: str, env_id: str) -> list[str]:
    if backend == "envpool":
        return import_envpool().list_all_envs()
    if backend == "gymnasium":
        import gymnasium

        return list(gymnasium.registry)
    family = env_id.split("/", 1)[0]
    if family not in ("gymnax", "pgx"):
        return []
    try:
        library = importlib.import_module(family)
    except ImportError as error:
        problem = f"needs the package {family}"
        if getattr(error, "name", None) != family:
            problem = f"needs the package {family}, which cannot be imported ({one_line(error)})"
        raise UserError(f"{env_id} {problem}; pip install -e '.[jax-envs]'") from error
    names = library.registered_envs if family == "gymnax" else library.available_envs()
    return [f"{family}/{name}" for name in names]


def _unknown_id(env_id: str, backend: str, candidates: list[str]) -> str:
    near = difflib.get_close_matches(env_id, candidates, n=3, cutoff=0.5)
    where = "any backend" if backend == "auto" else f"backend {backend}"
    hint = f"did you mean {', '.join(near)}?" if near else "see docs/environments.md for the ids"
    return f"unknown --env-id {env_id!r} for {where}; {hint} (--env-module imports your own first)"


@functools.cache
def _registered_by(module: str) -> set[str]:
    """Import a module, from the current folder too, and return the ids that it registers.

    What a module registered that was imported before cannot be told from what others did: then it
    is all but Gymnasium's own.
    """
    import gymnasium

    before = dict(gymnasium.registry)
    if module in sys.modules:
        before = {name: spec for name, spec in before.items() if _is_own(spec)}
    _import_from_here()
    try:
        importlib.import_module(module)
    except failures() as error:
        raise UserError(
            f"--env-module {module!r} could not be imported ({type(error).__name__}: {error}); "
            "give a module in this folder or on PYTHONPATH that registers the environment"
        ) from error
    return {name for name, spec in gymnasium.registry.items() if before.get(name) is not spec}


def _is_own(spec: Any) -> bool:
    """Return whether an environment is one of Gymnasium's own."""
    return isinstance(spec.entry_point, str) and spec.entry_point.startswith("gymnasium.")


def _import_from_here() -> None:
    """Let modules lie in the current folder."""
    if "" not in sys.path:
        sys.path.append("")


def _parse_kwargs(pairs: Iterable[str]) -> dict[str, Any]:
    options = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name.isidentifier():
            raise UserError(f"--env-kwargs takes KEY=VALUE, got {pair!r}; e.g. frame_skip=2")
        try:
            options[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            options[name] = text
        except (TypeError, MemoryError, RecursionError) as error:
            raise UserError(
                f"--env-kwargs {name} has a value that Python cannot read: {text}; "
                "give a number, a text, or a short list of them"
            ) from error
    return options


def _check_space(env_id: str, what: str, space: spaces.Space) -> None:
    parts = sub_spaces(space) if isinstance(space, spaces.Dict | spaces.Tuple) else {}
    for part in parts.values():
        _check_space(env_id, what, part)
    if not isinstance(space, (*KINDS, spaces.Dict, spaces.Tuple)):
        names = ", ".join(kind.__name__ for kind in KINDS)
        raise UserError(
            f"{env_id} has the {what} space {space}; accepted are {names}, and Dict and Tuple of "
            "these; wrap the environment to convert it"
        )
    if not parts and (space.shape is None or 0 in space.shape):
        raise UserError(
            f"{env_id} has the empty {what} space {space}; give every part at least one number"
        )
    counts = getattr(space, "nvec", getattr(space, "n", 0))
    if np.max(counts) > MOST_VALUES:
        raise UserError(
            f"{env_id} has the {what} space {space}, and networks have weights for each value; "
            f"wrap it to give at most {MOST_VALUES}"
        )


def _check_mask(env_id: str, obs_space: spaces.Space, action_space: Any) -> None:
    """Check that the part `action_mask` of an observation space has one entry for each action."""
    if not isinstance(obs_space, spaces.Dict) or MASK_KEY not in obs_space.spaces:
        return
    if not isinstance(action_space, spaces.Discrete | spaces.MultiDiscrete):
        raise UserError(
            f"{env_id} has the observation {MASK_KEY!r}, which masks Discrete and MultiDiscrete "
            f"actions, not {action_space}; give that part of the observation another name"
        )
    num_actions = spaces.flatdim(action_space)
    if obs_space[MASK_KEY].shape != (num_actions,):
        raise UserError(
            f"{env_id} has the observation {MASK_KEY!r} {obs_space[MASK_KEY]} for {action_space}; "
            f"give one entry for each action, as MultiBinary({num_actions}) has"
        )
    if len(obs_space.spaces) == 1:
        raise UserError(
            f"{env_id} observes nothing but {MASK_KEY!r}; add the observation itself under another "
            "key, such as 'observation'"
        )


def require_action_space(algo: str, env: Env, *kinds: type[spaces.Space]) -> None:
    """Raise a UserError if the action space of `env` is not of a kind that `algo` takes."""
    space = env.action_space
    if isinstance(space, kinds) and not _is_integer_box(space):
        return
    env.close()
    box = "floating Box" if isinstance(space, spaces.Box) else "Box"
    names = [box if kind is spaces.Box else kind.__name__ for kind in kinds]
    accepted = " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
    raise UserError(
        f"{algo} needs a {accepted} action space, {env.env_id} has {space}; "
        "choose an environment or an algorithm that fits"
    )


def require_bounded_actions(algo: str, env: Env) -> None:
    """Raise a UserError unless the actions of `env` are floats between finite bounds."""
    require_action_space(algo, env, spaces.Box)
    space: Any = env.action_space
    # Actions are scaled in float32, up to its largest number: 1e308 of a float64 Box is infinite.
    if np.abs(np.array([space.low, space.high], np.float64)).max() <= np.finfo(np.float32).max:
        return
    env.close()
    raise UserError(
        f"{algo} scales its actions to their bounds, {env.env_id} has {space} without finite ones; "
        "wrap it to give its action space finite bounds, in float32 too"
    )


def _is_integer_box(space: spaces.Space) -> bool:
    return isinstance(space, spaces.Box) and not np.issubdtype(space.dtype, np.floating)
