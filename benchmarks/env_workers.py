"""Env steps a second of a slow Gymnasium environment, by the number of worker processes.

    python benchmarks/env_workers.py

A step takes 5 ms, asleep (as one that waits for a server) or busy. The numbers of workers take
turns, and the median of the rounds counts.
"""

import os
import statistics
import sys
import time
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from algos.dqn import Config
from common.envs import make_env

from common.run import cli

SECONDS, NUM_ENVS, STEPS, ROUNDS = 0.005, 8, 40, 3
WORKERS = (0, 1, 2, 4, 8)


class SlowEnv(gym.Env):
    """Four zeros, after 5 ms."""

    def __init__(self, busy: bool) -> None:
        self.busy = busy
        self.observation_space = spaces.Box(-1, 1, (4,), np.float32)
        self.action_space = spaces.Discrete(2)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict]:
        """Start an episode that never ends."""
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        """Sleep, or compute."""
        end = time.perf_counter() + SECONDS
        if not self.busy:
            time.sleep(SECONDS)
        while time.perf_counter() < end:
            pass
        return np.zeros(4, np.float32), 1.0, False, False, {}


def measure(busy: bool, workers: int) -> tuple[float, float]:
    """Return the seconds that it takes to make the environments, and their steps a second."""
    options = (f"busy={busy}",)
    config = Config(
        "Slow-v0", num_envs=NUM_ENVS, total_timesteps=8, env_workers=workers, env_kwargs=options
    )
    start = time.perf_counter()
    env: Any = make_env(config)
    stepper = env.backend.stepper
    stepper.reset()
    made = time.perf_counter()
    for _ in range(STEPS):
        stepper.step(np.zeros(NUM_ENVS, np.int32))
    end = time.perf_counter()
    stepper.close()
    return made - start, NUM_ENVS * STEPS / (end - made)


def main() -> None:
    """Print a table of markdown."""
    print(f"{NUM_ENVS} environments, {os.cpu_count()} cores, median of {ROUNDS} rounds\n")
    print("| workers | " + " | ".join(map(str, WORKERS)) + " |\n|" + "---|" * (len(WORKERS) + 1))
    starts: dict[int, list[float]] = {workers: [] for workers in WORKERS}
    for busy in (False, True):
        rates: dict[int, list[float]] = {workers: [] for workers in WORKERS}
        for workers in WORKERS * ROUNDS:
            seconds, rate = measure(busy, workers)
            starts[workers].append(seconds)
            rates[workers].append(rate)
        row = [f"{statistics.median(rates[workers]):.0f}" for workers in WORKERS]
        print(f"| steps/s, {'busy' if busy else 'asleep'} | " + " | ".join(row) + " |")
    row = [f"{statistics.median(starts[workers]):.2f}" for workers in WORKERS]
    print("| seconds to start | " + " | ".join(row) + " |")


if __name__ == "__main__":
    with cli.exit_codes(debug=False):
        cli.parse_flags(cli.NoFlags, sys.argv[1:], __doc__ or "")
        gym.register("Slow-v0", SlowEnv)
        main()
