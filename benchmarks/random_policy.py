"""Mean return of a random policy: where the scores of `benchmarks/compare.py` begin.

    python benchmarks/random_policy.py
    python benchmarks/random_policy.py --env-ids LunarLander-v3

writes benchmarks/results/random_policy.json, and keeps what it holds of other environments.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from common.errors import UserError
from machine import ROOT, describe_commit, describe_cores
from tables import FAMILIES

from common.run import checkpoint, cli

NUM_ENVS = 16
ENV_IDS = tuple(dict.fromkeys(env_id for family in FAMILIES for env_id in family.env_ids))


@dataclass(frozen=True)
class RandomOptions:
    """Measure the mean return of actions drawn evenly from the action space."""

    env_ids: tuple[str, ...] = ENV_IDS
    """environments, as --env-id takes them"""
    steps: int = 400_000
    """env steps in each, over 16 environments side by side"""
    out: str = "benchmarks/results/random_policy.json"
    """file of the returns"""


class Place(NamedTuple):
    """What `make_env` asks of a configuration."""

    env_id: str
    env_backend: Any = "auto"
    env_module: str | None = None
    env_kwargs: tuple[str, ...] = ()
    num_envs: int = NUM_ENVS
    env_workers: int = 0
    seed: int = 1


def main(options: RandomOptions) -> None:
    """Measure, and write the file anew after each environment."""
    out = ROOT / options.out
    returns = json.loads(out.read_text()) if out.exists() else {}
    for env_id in options.env_ids:
        returns[env_id] = random_return(env_id, options.steps)
        print(env_id, returns[env_id])
        checkpoint.write_atomically(out, json.dumps(dict(sorted(returns.items())), indent=1) + "\n")


def random_return(env_id: str, steps: int) -> dict[str, Any]:
    """Return the mean return of the episodes that ended, their number, and what measured it.

    Raises:
        UserError: no episode ended.
    """
    import jax

    from common.envs import make_env

    env = make_env(Place(env_id))
    state, _ = random_steps(env)(env.reset(jax.random.key(0)), jax.random.key(1), steps // NUM_ENVS)
    summary = state.summary
    env.check(state)
    if not summary.episodes:
        raise UserError(f"no episode of {env_id} ended in {steps} steps; raise --steps")
    return {
        "return": float(summary.return_sum / summary.episodes),
        "episodes": int(summary.episodes),
        "commit": describe_commit(),
        "machine": describe_cores(),
    }


def random_steps(env: Any) -> Callable[[Any, Any, int], tuple[Any, Any]]:
    """Return a compiled function of state, key and count: vector steps by random actions.

    Actions are drawn evenly from between the bounds of the space.
    """
    import jax
    import numpy as np
    from jax import lax

    from common.envs.env import action_bounds

    low, high = action_bounds(env.action_space)
    is_float = np.issubdtype(low.dtype, np.floating)
    shape = (env.num_envs, *(env.action_space.shape or ()))

    @jax.jit
    def steps(state: Any, key: Any, count: int) -> Any:
        def step(_: Any, carry: Any) -> Any:
            state, key = carry
            key, action_key = jax.random.split(key)
            if is_float:
                action = jax.random.uniform(action_key, shape, minval=low, maxval=high)
            else:
                action = jax.random.randint(action_key, shape, low, high + 1)
            return env.step(state, action)[0], key

        return lax.fori_loop(0, count, step, (state, key))

    return steps


if __name__ == "__main__":
    with cli.exit_codes(debug=False):
        main(cli.parse_flags(RandomOptions, sys.argv[1:], __doc__ or ""))
