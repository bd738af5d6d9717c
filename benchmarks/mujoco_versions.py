"""A step of envpool's MuJoCo tasks beside one of Gymnasium's from the same state.

    pip install "gymnasium[mujoco]" "mujoco<3"  # on Python 3.11
    python benchmarks/mujoco_versions.py

writes benchmarks/results/mujoco_versions.md.
"""

import sys
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version

import numpy as np

from common.errors import UserError
from machine import ROOT, describe_commit
from tables import markdown_table

from common.run import checkpoint, cli

# How many positions an observation leaves out; nothing depends on where the robot is.
UNSEEN = {
    "HalfCheetah-v4": 1,
    "Walker2d-v4": 1,
    "InvertedPendulum-v4": 0,
    "InvertedDoublePendulum-v4": 0,
    "Swimmer-v4": 2,
    "Hopper-v4": 1,
    "Humanoid-v4": 2,
    "HumanoidStandup-v4": 2,
    "Ant-v4": 2,
}
NUM_EPISODES, MAX_STEPS = 20, 100  # of each environment, and of each episode
HEADER = ["environment", "margin", "steps", "equal to 1e-6", "largest difference", "of a reward"]


@dataclass(frozen=True)
class VersionOptions:
    """Compare the steps of envpool's MuJoCo tasks with those of Gymnasium's."""

    out: str = "benchmarks/results/mujoco_versions.md"
    """file of the table"""


def main(options: VersionOptions) -> None:
    """Write the table, and print it.

    Raises:
        UserError: MuJoCo is not installed.
    """
    try:
        packages = {name: version(name) for name in ("envpool", "gymnasium", "mujoco")}
    except ModuleNotFoundError as error:
        raise UserError(
            f"{error}; to compare with MuJoCo 2: pip install 'gymnasium[mujoco]' 'mujoco<3'"
        ) from error
    rows = []
    for env_id in UNSEEN:
        margin, found = compare(env_id)
        state, reward = np.array(found).T
        rows.append(
            [
                *(env_id, f"{margin:g}", f"{len(found):,}", f"{(state < 1e-6).mean():.0%}"),
                *(f"{state.max():.1g}", f"{reward.max():.1g}"),
            ]
        )
    made = " · ".join(f"{name} {number}" for name, number in packages.items())
    text = f"{markdown_table(HEADER, rows)}\n\n{made} · commit {describe_commit()}\n"
    checkpoint.write_atomically(ROOT / options.out, text)
    print(text)


def compare(env_id: str) -> tuple[float, list[tuple[float, float]]]:
    """Return the margin of contacts, and of each step how far states and rewards differ.

    States are positions and velocities, and actions are random. Before each step Gymnasium's
    environment gets the state of envpool's. Observations of Hopper, Walker2d and
    InvertedDoublePendulum have velocities clipped at 10; a step from one of these is left out.
    """
    import envpool
    import gymnasium

    pool = envpool.make_gymnasium(env_id, num_envs=1, seed=1)
    env = gymnasium.make(env_id).unwrapped
    env.reset(seed=1)
    env.action_space.seed(1)
    state = partial(state_of, env_id, env.model.nq, env.model.nv)
    found = []
    for _ in range(NUM_EPISODES):
        (before,), _ = pool.reset()
        for _ in range(MAX_STEPS):
            position, velocity = state(before)
            env.set_state(position, velocity)
            action = env.action_space.sample()
            expected, expected_reward, *_ = env.step(action)
            (obs,), (reward,), *ends, _ = pool.step(action[None].astype(float))
            if np.abs(velocity).max() != 10:
                differences = np.concatenate(state(obs)) - np.concatenate(state(expected))
                found.append((np.abs(differences).max(), abs(reward - expected_reward)))
            if np.any(ends):
                break
            before = obs
    return env.model.geom_margin.max(), found


def state_of(
    env_id: str, num_positions: int, num_velocities: int, obs: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions and velocities that an observation tells, unseen positions being 0."""
    if env_id == "InvertedDoublePendulum-v4":
        cart, sine, cosine, velocity, _ = np.split(obs, [1, 3, 5, 8])
        return np.concatenate([cart, np.arctan2(sine, cosine)]), velocity
    unseen = UNSEEN[env_id]
    seen, end = num_positions - unseen, num_positions - unseen + num_velocities
    return np.concatenate([np.zeros(unseen), obs[:seen]]), obs[seen:end]


if __name__ == "__main__":
    with cli.exit_codes(debug=False):
        main(cli.parse_flags(VersionOptions, sys.argv[1:], __doc__ or ""))
