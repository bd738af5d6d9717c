"""Env steps a second of Stable-Baselines Jax on HalfCheetah-v4, for throughput_off_policy.py.

    python benchmarks/sbx_rate.py sac

Runs in an environment of its own: pip install sbx-rl 'gymnasium[mujoco]'. The settings are those
of algos/: batch 256, two layers of 256, one update a step, which is SBX's default but for TD3.
"""

import json
import os
import sys
import tempfile
import time

import gymnasium
import sbx
from stable_baselines3.common.callbacks import BaseCallback

WARM_UP, STEPS = 1_000, 3_000


class Clock(BaseCallback):
    """Times the steps after the warm-up, in which compilation falls."""

    def _on_step(self) -> bool:
        if self.num_timesteps == WARM_UP:
            self.start = time.perf_counter()
        return self.num_timesteps < WARM_UP + STEPS


def main(algo: str) -> None:
    """Train and print the rate."""
    os.chdir(tempfile.gettempdir())  # where MuJoCo may write its log
    model = getattr(sbx, algo.upper())(
        "MlpPolicy",
        gymnasium.make("HalfCheetah-v4"),
        learning_rate=3e-4,
        batch_size=256,
        learning_starts=WARM_UP // 2,
        train_freq=1,
        gradient_steps=1,
        policy_kwargs={"net_arch": [256, 256]},
    )
    clock = Clock()
    model.learn(10**9, callback=clock)
    print(json.dumps(STEPS / (time.perf_counter() - clock.start)))


if __name__ == "__main__":
    main(sys.argv[1])
