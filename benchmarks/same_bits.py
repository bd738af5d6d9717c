"""Whether a change of form changed a number: every metric and the final parameters, bit by bit.

    git stash && python benchmarks/same_bits.py --out before.json && git stash pop
    python benchmarks/same_bits.py --against before.json

Short runs of every file in algos/ on gymnax environments, which are the same to the bit on one
machine. Speed is left out. Exits with 1 if anything differs.
"""

import dataclasses
import hashlib
import importlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from common.run import cli

CARTPOLE = {"env_id": "gymnax/CartPole-v1"}
PENDULUM = {"env_id": "gymnax/Pendulum-v1"}
REPLAY = {
    "total_timesteps": 4_000,
    "log_frequency": 500,
    "learning_starts": 1_000,
    "buffer_size": 2_000,
}
ROLLOUT = {"total_timesteps": 8_192, "log_frequency": 2_048}
NORMALIZED = {"normalize_obs": True}
VALUE_BASED = (
    *("double_dqn", "dueling_dqn", "prioritized_dqn", "noisy_dqn"),
    *("c51", "qr_dqn", "iqn", "rainbow", "r2d2"),
)
CASES: list[tuple[str, dict[str, Any]]] = [
    ("dqn", CARTPOLE | REPLAY),
    ("dqn", CARTPOLE | REPLAY | {"num_envs": 1, "n_step": 3, "train_frequency": 4, "tau": 0.5}),
    *((algo, CARTPOLE | REPLAY) for algo in VALUE_BASED),
    ("ppo", CARTPOLE | ROLLOUT),
    ("ppo", CARTPOLE | ROLLOUT | NORMALIZED | {"target_kl": 0.003, "learning_rate": 2e-3}),
    ("ppo", PENDULUM | ROLLOUT | NORMALIZED | {"normalize_reward": True, "num_minibatches": 2}),
    ("a2c", CARTPOLE | ROLLOUT),
    ("a2c", PENDULUM | ROLLOUT | NORMALIZED | {"normalize_advantages": True}),
    ("ppo_rnn", CARTPOLE | ROLLOUT | {"total_timesteps": 4_096, "target_kl": 0.003}),
    ("ppo_rnn", PENDULUM | ROLLOUT | NORMALIZED | {"core": "gru", "total_timesteps": 4_096}),
    ("impala", CARTPOLE | ROLLOUT),
    ("impala", PENDULUM | ROLLOUT | {"core": "lstm", "total_timesteps": 4_096}),
    ("pqn", CARTPOLE | ROLLOUT),
    ("apex_dqn", CARTPOLE | REPLAY),
    ("ddpg", PENDULUM | REPLAY),
    ("ddpg", PENDULUM | REPLAY | NORMALIZED | {"num_envs": 4, "noise_correlation": 0.9}),
    ("td3", PENDULUM | REPLAY),
    ("td3", PENDULUM | REPLAY | {"num_envs": 4, "n_step": 3, "policy_frequency": 3}),
    ("sac", PENDULUM | REPLAY),
    ("sac", PENDULUM | REPLAY | NORMALIZED | {"num_envs": 4, "alpha": 0.2}),
    ("sac_discrete", CARTPOLE | REPLAY),
    ("sac_discrete", CARTPOLE | REPLAY | NORMALIZED | {"alpha": 0.2, "n_step": 3}),
]


@dataclass(frozen=True)
class Options:
    """What to run, and what to compare it with."""

    out: str | None = None
    """file to write the bits to"""
    against: str | None = None
    """file of an earlier run to compare with"""
    algos: tuple[str, ...] = ()
    """algorithms to run; all if none is given"""
    num_seeds: int = 3
    """seeds of each case, from 1 on"""


def main(options: Options) -> int:
    """Run the cases; write and compare what they gave."""
    before = json.loads(Path(options.against).read_text()) if options.against else {}
    bits: dict[str, list[str]] = {}
    num_different = 0
    for number, (algo, fields) in enumerate(CASES):
        if options.algos and algo not in options.algos:
            continue
        for seed in range(1, options.num_seeds + 1):
            name = f"{algo} case {number} seed {seed}"
            bits[name] = bits_of_run(algo, fields | {"seed": seed})
            if options.against:
                old = before.get(name, [])
                different = [line for line in bits[name] if line not in old]
                different = different or [line for line in old if line not in bits[name]]
                num_different += bool(different)
                shown = f", the first {different[0]}" if different else ""
                print(f"{name}: {len(different)} of {len(bits[name])} differ{shown}", flush=True)
    if options.out:
        Path(options.out).write_text(json.dumps(bits, indent=0) + "\n")
    return int(num_different > 0)


def bits_of_run(algo: str, fields: dict[str, Any]) -> list[str]:
    """Return each metric of each log point in hexadecimal, and a digest of the parameters."""
    module = importlib.import_module(f"algos.{algo}")
    trainer = module.Trainer(dataclasses.replace(module.Config(), **fields))
    lines = []
    for log_data in trainer():
        for name, value in sorted(log_data["logs"].items()):
            if name != "charts/SPS":
                lines.append(f"{log_data['sample_step']} {name} {float(value).hex()}")
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(trainer.state.learner):
        digest.update(np.asarray(leaf).tobytes())
    return [*lines, digest.hexdigest()]


if __name__ == "__main__":
    with cli.exit_codes(debug=False):
        sys.exit(main(cli.parse_flags(Options, sys.argv[1:], __doc__ or "")))
