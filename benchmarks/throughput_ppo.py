"""Env steps a second of PPO's training loop, against a plain Python loop and its own limit.

    python benchmarks/throughput_ppo.py

One core, medians of interleaved repeats, compilation left out, as in `throughput.py`; quote the
ratios. CartPole-v1 by envpool, the default settings: rollouts of 128 steps, 4 epochs of 4
minibatches.

    loop      the training loop of algos/ppo.py
    baseline  the same Agent, called from a Python loop over gymnasium.make_vec
    env       the environments alone, stepped by random actions inside a compiled loop
    learn     the updates on one rollout alone, in env steps (those of the rollout)
    limit     1 / (1 / env + 1 / learn): no loop that does both on one core can be faster
    plain     `python algos/ppo.py` as a user starts it, from its own log (with all cores allowed)

`loop` also chooses the actions, which `limit` leaves out.
"""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from throughput import (
    RESULTS,
    Measure,
    as_table,
    describe_machine,
    env_measure,
    median_rates,
    module_of,
    run_plain,
    run_worker,
    save_picture,
    share_of_limit,
)

from common.run import cli

ENDLESS = 2**30  # env steps that no measurement reaches
GYMNAX_ENVS = 4  # PureJaxRL's setting


@dataclass(frozen=True)
class Options:
    """What to measure."""

    num_envs: tuple[int, ...] = (4, 8)
    """numbers of parallel environments"""
    repeats: int = 9
    """interleaved repeats of each figure"""
    seconds: float = 1.0
    """length of one repeat"""
    out: str = str(RESULTS)
    """folder for throughput_ppo.json, throughput_ppo.md and throughput_ppo.png"""
    worker: bool = False
    """used by the program itself: measure in this process and print JSON"""


def main(options: Options) -> None:
    """Measure in a worker process on one core, then whole runs, and write the results."""
    if options.worker:
        print(json.dumps(measure_all(options)))
        return
    cores = sorted(os.sched_getaffinity(0))
    figures = run_worker(options, {cores[0]}, __file__) | run_plain(options, cores, "ppo")
    write({"machine": describe_machine(), "figures": {"one core": figures}}, Path(options.out))


def write(results: dict[str, Any], out: Path) -> None:
    """Write and print the figures by name, in env steps a second."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "throughput_ppo.json").write_text(json.dumps(results, indent=2) + "\n")
    table = as_table(results, "ppo")
    (out / "throughput_ppo.md").write_text(table)
    save_picture(results, out / "throughput_ppo.png", "ppo")
    print(table)


def measure_all(options: Options) -> dict[str, float]:
    """Return env steps a second by name, as medians of interleaved repeats."""
    measures = gymnax_measures(GYMNAX_ENVS)
    for n in options.num_envs:
        measures |= cartpole_measures(n)
    figures = median_rates(measures, options.repeats, options.seconds, first=1)
    for n in options.num_envs:
        figures[f"limit {n}"] = figures[f"loop {n}"] / share_of_limit(figures, n)
    return figures


def cartpole_measures(num_envs: int) -> dict[str, tuple[Measure, float]]:
    """Return the measures of CartPole-v1 by envpool, with the env steps of one iteration."""
    from algos.ppo import Config

    config = Config(num_envs=num_envs, total_timesteps=ENDLESS)
    rollout = num_envs * config.num_steps
    return {
        f"loop {num_envs}": (loop_measure(config), rollout),
        f"env {num_envs}": (env_measure(config), num_envs),
        f"learn {num_envs}": (learn_measure(config), rollout),
        f"baseline {num_envs}": (PythonLoop(config).run, rollout),
    }


def gymnax_measures(num_envs: int) -> dict[str, tuple[Measure, float]]:
    """Return the measures of CartPole-v1 by gymnax, with the env steps of one iteration."""
    from algos.ppo import Config

    config = Config("gymnax/CartPole-v1", num_envs=num_envs, total_timesteps=ENDLESS)
    return {
        f"gymnax loop {num_envs}": (loop_measure(config), num_envs * config.num_steps),
        f"gymnax env {num_envs}": (env_measure(config), num_envs),
    }


def loop_measure(config: Any) -> Measure:
    """Iterations of the training loop, a rollout and its updates each."""
    import jax

    trainer = module_of(config).Trainer(config)

    def run(iterations: int) -> None:
        trainer.state, _ = trainer.compiled_run(trainer.state, iterations)
        jax.block_until_ready(trainer.state)

    return run


def learn_measure(config: Any) -> Measure:
    """Updates alone: advantages, shuffling, and every pass over one real rollout.

    Each repeat starts from the same learner, so that it never strays far from the rollout.
    """
    import jax
    from jax import lax

    trainer = module_of(config).Trainer(config)
    state, trajectory, _ = jax.jit(trainer.collect_trajectory)(trainer.state)
    zeros = trainer.zero_metrics(state)

    @jax.jit
    def updates(state: Any, trajectory: Any, count: int) -> Any:
        def update(_: Any, carry: tuple) -> tuple:
            state, sums = carry
            return trainer.learn_trajectory(state, sums, trajectory)

        return lax.fori_loop(0, count, update, (state, zeros))

    return lambda count: jax.block_until_ready(updates(state, trajectory, count))


class PythonLoop:
    """The loop that people write: a Python `for` over gymnasium.make_vec and numpy rollouts."""

    def __init__(self, config: Any) -> None:
        import gymnasium
        import jax

        from algos.ppo import Agent, Algorithm

        self.config = config
        self.envs = gymnasium.make_vec(
            config.env_id, num_envs=config.num_envs, vectorization_mode="sync"
        )
        spaces = self.envs.single_observation_space, self.envs.single_action_space
        algorithm = Algorithm(config, *spaces)
        self.agent: Any = Agent(config, algorithm, spaces[1])
        self.sample = jax.jit(self._sample)
        self.prepare = jax.jit(self.agent.prepare)
        self.learn = jax.jit(self._learn, donate_argnums=0)
        self.obs, _ = self.envs.reset(seed=config.seed)
        self.ended = np.zeros(config.num_envs, bool)
        self.learner, self.key = algorithm.init(jax.random.key(0), self.obs), jax.random.key(1)
        self.rng = np.random.default_rng(0)

    def _sample(self, learner: Any, obs: Any, key: Any) -> tuple:
        import jax

        key, action_key = jax.random.split(key)
        return key, self.agent.sample(learner, obs, 0, action_key)

    def _learn(self, learner: Any, batch: Any, rows: Any) -> Any:
        from common.rollout import take_minibatch

        return self.agent.learn(learner, take_minibatch(batch, rows))[0]

    def run(self, iterations: int) -> None:
        """Rollouts, each followed by its updates."""
        import jax

        for _ in range(iterations):
            rows = [self.collect() for _ in range(self.config.num_steps)]
            self.update(jax.tree.map(lambda *x: np.stack(x), *rows))
        jax.block_until_ready(self.learner)

    def collect(self) -> Any:
        """Act and step; return the row."""
        from common.replay import Transition

        self.key, (action, extras) = self.sample(self.learner, self.obs, self.key)
        row: dict[str, Any] = {"obs": self.obs, "action": np.asarray(action), "valid": ~self.ended}
        obs, reward, terminated, truncated, _ = self.envs.step(row["action"])
        row |= {"reward": np.float32(reward), "terminated": terminated, "truncated": truncated}
        self.obs, self.ended = obs, terminated | truncated
        return Transition(**row, extras=tuple(np.asarray(x) for x in extras))

    def update(self, rollout: Any) -> None:
        """Several passes over a rollout in minibatches."""
        self.learner, batch = self.prepare(self.learner, rollout, self.obs)
        for _ in range(self.config.update_epochs):
            rows = self.rng.permutation(len(batch.weight)).astype(np.int32)
            for minibatch in rows.reshape(self.config.num_minibatches, -1):
                self.learner = self.learn(self.learner, batch, minibatch)


if __name__ == "__main__":
    with cli.exit_codes(debug=False):
        main(cli.parse_flags(Options, sys.argv[1:], __doc__ or ""))
