"""PPO on Pong: env steps a second of algos/ppo.py, of the same work in PyTorch, and the limit.

    pip install torch
    python benchmarks/pong_torch.py

Both sides have the settings of the `atari` preset, which are CleanRL's: 8 environments x 128 steps,
4 epochs of 4 minibatches of 256, the Nature CNN under policy and value. Each runs in a process of
its own on one core, in turn, and does one rollout with its updates before the clock starts.

    ours        algos/ppo.py
    torch       PyTorch, its environments stepped from Python through envpool's Gymnasium interface
    env         the environments alone, stepped by random actions inside a compiled loop
    arithmetic  counted FLOP of a rollout and its updates, at the rate of 512 x 512 x 512 float32
                matrix products in the same run
    limit       1 / (1 / env + 1 / arithmetic)
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from common.errors import UserError
from conv import GEMM_SIZE, forward_flop, gemm_measure, gradient_flop, nature_cnn_macs
from throughput import (
    RESULTS,
    describe_figures,
    describe_machine,
    env_measure,
    in_process,
    median_rates,
    write_figures,
)

from common.run import cli

SIDES = ("ours", "torch")


@dataclass(frozen=True)
class Options:
    """How long to measure."""

    rollouts: int = 8
    """rollouts of each side in each round, after one that is not measured"""
    rounds: int = 2
    """turns of each side"""
    channels_last: bool = False
    """let PyTorch keep images as [B, H, W, C], which CleanRL does not do and can be faster"""
    out: str = str(RESULTS)
    """folder for pong.json and pong.md"""
    worker: Literal["ours", "torch", "limit", "none"] = "none"
    """used by the program itself: measure this in this process and print JSON"""


def main(options: Options) -> None:
    """Measure in worker processes on one core, in turn, and write the results.

    Raises:
        UserError: PyTorch is missing.
    """
    if options.worker != "none":
        print(json.dumps(measure(options)))
        return
    version = require_torch()
    core = min(os.sched_getaffinity(0))
    flags = ["--rollouts", str(options.rollouts)]
    flags += ["--channels-last"] * options.channels_last
    command = [__file__, *flags, "--worker"]
    rounds = [
        {name: in_process([*command, name], {core}) for name in (*SIDES, "limit")}
        for _ in range(options.rounds)
    ]
    results = {"machine": describe_machine() | {"torch": version}, **summarize(rounds)}
    write_figures(options.out, "pong", results, as_table(results))


def require_torch() -> str:
    """Return the version of PyTorch.

    Raises:
        UserError: it is missing.
    """
    try:
        import torch
    except ImportError as error:
        raise UserError("the baseline needs PyTorch; pip install torch") from error
    return torch.__version__


def measure(options: Options) -> Any:
    """Return what one worker measures: env steps a second of each rollout, or the limit's parts."""
    from algos.ppo import PRESETS, Config

    config = Config("Pong-v5", **PRESETS["atari"])
    if options.worker == "limit":
        return measure_limit(config)
    ours = options.worker == "ours"
    rollout = our_rollout(config) if ours else TorchPPO(config, options.channels_last).rollout
    rollout()
    return [time_rollout(rollout, config) for _ in range(options.rollouts)]


def time_rollout(rollout: Callable[[], None], config: Any) -> float:
    """Return the env steps a second of one rollout with its updates."""
    start = time.perf_counter()
    rollout()
    return config.num_envs * config.num_steps / (time.perf_counter() - start)


def our_rollout(config: Any) -> Callable[[], None]:
    """Return a function that does one rollout and its updates by algos/ppo.py."""
    import jax

    from algos.ppo import Trainer

    trainer = Trainer(config)

    def rollout() -> None:
        trainer.state, _ = trainer.compiled_run(trainer.state, 1)
        jax.block_until_ready(trainer.state)

    return rollout


def measure_limit(config: Any) -> dict[str, float]:
    """Return the env steps a second of environments and arithmetic, and the latter's parts."""
    from common.envs import make_env

    rates = median_rates(
        {
            "env": (env_measure(config, "train"), config.num_envs),
            "GEMM_GFLOP_per_s": (gemm_measure(), 2 * GEMM_SIZE**3 / 1e9),
        },
        repeats=5,
        seconds=1.0,
        first=1,
    )
    space: Any = make_env(config).action_space
    flop = rollout_flop(config, int(space.n)) / 1e9
    rates["arithmetic"] = config.num_envs * config.num_steps / flop * rates["GEMM_GFLOP_per_s"]
    return rates | {"GFLOP_per_rollout": flop}


def rollout_flop(config: Any, num_actions: int) -> int:
    """Return the FLOP of a rollout [T, N] and its updates.

    Forward, T + 1 batches of N observations (the last for its value); forward and backward, every
    row once an epoch. The heads of policy and value count as one dense layer.
    """
    macs = [*nature_cnn_macs(), 512 * (num_actions + 1)]
    size = config.num_steps * config.num_envs
    inference = forward_flop(macs, size + config.num_envs)
    return inference + config.update_epochs * gradient_flop(macs, size)


class TorchPPO:
    """PPO in PyTorch, one vector step after the other, from Python."""

    def __init__(self, config: Any, channels_last: bool = False) -> None:
        import torch

        from common.envs.envpool_backend import make_pool

        torch.set_num_threads(1)
        torch.manual_seed(config.seed)
        self.config, self.rollouts = config, 0
        self.pool = make_pool(config.env_id, list(range(config.num_envs)), {}, training=True)
        self.body, self.policy, self.value = torch_layers(int(self.pool.action_space.n))
        self.format = torch.channels_last if channels_last else torch.contiguous_format
        layers: Any = torch.nn.ModuleList([self.body, self.policy, self.value])
        layers.to(memory_format=self.format)
        self.parameters = list(layers.parameters())
        self.optimizer = torch.optim.Adam(self.parameters, lr=config.learning_rate, eps=1e-5)
        self.obs = torch.from_numpy(self.pool.reset()[0])
        self.ended = torch.zeros(config.num_envs, dtype=torch.bool)

    def predict(self, obs: Any) -> tuple[Any, Any]:
        """[B, 4, 84, 84] uint8 -> distribution over actions, and value [B]."""
        from torch.distributions import Categorical

        images = (obs / 255).contiguous(memory_format=self.format)  # [B, 4, 84, 84]
        features = self.body(images)  # [B, 512]
        return Categorical(logits=self.policy(features)), self.value(features)[:, 0]

    def rollout(self) -> None:
        """Do one rollout and its updates."""
        import torch

        from common.rollout import RolloutBatch

        config = self.config
        total = config.total_timesteps // (config.num_envs * config.num_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = config.learning_rate * (1 - self.rollouts / total)
        self.rollouts += 1
        with torch.no_grad():
            steps = [self.collect() for _ in range(config.num_steps)]
            batch = self.prepare([torch.stack(x) for x in zip(*steps, strict=True)])
        size = len(batch.weight)
        for _ in range(config.update_epochs):
            for rows in torch.randperm(size).split(size // config.num_minibatches):
                columns: list[Any] = [x[rows] for x in batch[:-1]]
                self.learn(RolloutBatch(*columns))

    def collect(self) -> tuple:
        """Act and step: obs, action, log_prob, value, reward, terminated, truncated, valid [N]."""
        import torch

        obs, valid = self.obs, ~self.ended
        distribution, value = self.predict(obs)
        action = distribution.sample()
        next_obs, *step, _ = self.pool.step(action.numpy().astype(np.int32))
        reward, terminated, truncated = map(torch.from_numpy, step)
        self.obs, self.ended = torch.from_numpy(next_obs), terminated | truncated
        log_prob = distribution.log_prob(action)
        return obs, action, log_prob, value, reward, terminated, truncated, valid

    def prepare(self, rollout: list) -> Any:
        """Columns of a rollout [T, N] -> rows [T * N] with advantages by GAE, and returns."""
        import torch

        from common.rollout import RolloutBatch

        obs, action, log_prob, value, reward, terminated, truncated, valid = rollout
        next_value = torch.cat([value[1:], self.predict(self.obs)[1][None]])  # [T, N]
        gamma, trace = self.config.gamma, self.config.gamma * self.config.gae_lambda
        td_error = reward + gamma * ~terminated * next_value - value  # [T, N]
        goes_on = ~(terminated | truncated)  # [T, N]
        advantages = torch.empty_like(td_error)
        later = torch.zeros_like(td_error[0])
        for t in reversed(range(len(td_error))):
            later = td_error[t] + trace * goes_on[t] * later  # [N]
            advantages[t] = later
        targets = advantages, advantages + value, valid.float()
        columns: list[Any] = [x.flatten(0, 1) for x in (obs, action, log_prob, value, *targets)]
        return RolloutBatch(*columns)

    def learn(self, batch: Any) -> None:
        """One gradient step on a minibatch [B]; rows after an episode's end weigh nothing."""
        import torch

        self.optimizer.zero_grad()
        self.loss(batch).backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, self.config.max_grad_norm)
        self.optimizer.step()

    def loss(self, batch: Any) -> Any:
        """Return the clipped policy loss, the clipped value loss and the entropy bonus in one."""
        import torch

        config, epsilon = self.config, self.config.clip_coef
        weight = batch.weight / batch.weight.mean()  # [B]
        distribution, value = self.predict(batch.obs)
        ratio = (distribution.log_prob(batch.action) - batch.log_prob).exp()  # [B]
        advantages = batch.advantages - (weight * batch.advantages).mean()  # [B]
        advantages = advantages / ((weight * advantages**2).mean().sqrt() + 1e-8)  # [B]
        clipped_ratio = ratio.clamp(1 - epsilon, 1 + epsilon)  # [B]
        gain = torch.minimum(ratio * advantages, clipped_ratio * advantages)  # [B]
        near = batch.value + (value - batch.value).clamp(-epsilon, epsilon)  # [B]
        errors = (value - batch.returns) ** 2, (near - batch.returns) ** 2
        value_loss = 0.5 * torch.maximum(*errors)  # [B]
        bonus = config.entropy_coef * distribution.entropy()  # [B]
        return (weight * (config.value_coef * value_loss - gain - bonus)).mean()


def torch_layers(num_actions: int) -> tuple[Any, Any, Any]:
    """Return the Nature CNN, the policy's head and the value's, with orthogonal weights."""
    from torch import nn

    def scaled(layer: Any, gain: float = 2**0.5) -> Any:
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
        return layer

    convolutions = nn.Conv2d(4, 32, 8, 4), nn.Conv2d(32, 64, 4, 2), nn.Conv2d(64, 64, 3, 1)
    layers = [part for layer in convolutions for part in (scaled(layer), nn.ReLU())]
    body = nn.Sequential(*layers, nn.Flatten(), scaled(nn.Linear(3136, 512)), nn.ReLU())
    return body, scaled(nn.Linear(512, num_actions), 0.01), scaled(nn.Linear(512, 1), 1.0)


def summarize(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return medians over all rollouts of all rounds, the limit, and the rates of each round."""
    figures = {
        side: statistics.median(rate for one in rounds for rate in one[side]) for side in SIDES
    }
    limits = [one["limit"] for one in rounds]
    figures |= {name: statistics.median(x[name] for x in limits) for name in limits[0]}
    figures["limit"] = 1 / (1 / figures["env"] + 1 / figures["arithmetic"])
    return {"figures": figures, "rounds": rounds}


def as_table(results: dict[str, Any]) -> str:
    """Return the figures as a markdown table."""
    figures = results["figures"]
    title = f"PPO on Pong-v5 on one core, torch {results['machine']['torch']}"
    lines = [
        describe_figures(title, results["machine"]),
        "",
        f"A rollout and its updates: {figures['GFLOP_per_rollout']:.0f} GFLOP; matrix products: "
        f"{figures['GEMM_GFLOP_per_s']:.1f} GFLOP/s.",
        "",
        "| | env steps a second | of the limit |",
        "|---|---|---|",
    ]
    for name in (*SIDES, "env", "arithmetic", "limit"):
        lines.append(f"| {name} | {figures[name]:,.0f} | {figures[name] / figures['limit']:.0%} |")
    lines += ["", f"ours / torch: {figures['ours'] / figures['torch']:.2f}"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    with cli.exit_codes(debug=False):
        main(cli.parse_flags(Options, sys.argv[1:], __doc__ or ""))
