"""What benchmarks/gpu.py runs, each item in a process of its own: checks, and env steps a second.

Some items need a second process, on the CPU or after a restart: PARTS are what that one does.
"""

import json
import math
import os
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from throughput import Measure, env_measure, in_process, median_rates
from throughput_off_policy import loop_measure

PROGRAM = str(Path(__file__).with_name("gpu.py"))
GYMNAX = "gymnax/CartPole-v1"
ENDLESS = 2**30  # env steps that no measurement reaches
CLOSE = 1e-4  # relative to the largest number of an array
SPREAD_AT_LEAST = 0.1  # of the return, where the seeds happen to lie closer together


class Outcome(NamedTuple):
    """What an item found: ok, failed or skipped, one line about it, and numbers by name."""

    status: str
    detail: str
    figures: dict[str, Any]


class Item(NamedTuple):
    """A check or a measurement, and after how many seconds it is given up."""

    name: str
    is_check: bool
    run: Callable[[], Outcome]
    seconds: float


def all_items(small: bool) -> list[Item]:
    """Return the items, the most important ones first."""
    steps = 60 if small else 300
    checks: dict[str, Callable[[], Outcome]] = {
        "envpool": partial(check_pool, "CartPole-v1", steps),
        "float64": partial(check_pool, "HalfCheetah-v4", steps),
        "convolutions": partial(check_convolutions, small),
        "donation": check_donation,
        "resume": check_resume,
        "devices": check_devices,
        "learning": partial(check_learning, small),
    }
    rates: list[tuple[str, int]] = [("dqn", 8), ("ppo", 8), ("sac", 1), ("pong", 8)]
    if not small:
        rates += [("ppo", 512), ("dqn", 512), ("pong", 64), ("ppo", 4096), ("dqn", 4096)]
        rates += [("sac", 8), ("ppo", 64), ("dqn", 64), ("sac", 64), ("dqn", 1), ("ppo", 1)]
        rates += [("pong", 512)]  # last: making as many games takes a while
    num_seeds = 4 if small else 64
    items = [Item(name, True, run, 90.0) for name, run in checks.items()]
    items += [
        Item(f"{name}-{n}", False, partial(measure_loop, name, n, small), 60.0) for name, n in rates
    ]
    seeds = partial(measure_seeds, num_seeds, small)
    items.insert(len(checks) + 4, Item(f"seeds-{num_seeds}", False, seeds, 60.0))
    return items


def verdict(holds: bool, detail: str, **figures: float) -> Outcome:
    """Return the outcome of a check."""
    return Outcome("ok" if holds else "failed", detail, figures)


def second_process(part: str, folder: str, on_cpu: bool, small: bool) -> None:
    """Run one of PARTS, which leaves its results in a folder."""
    flags = ["--worker", part, "--folder", folder, *(["--small"] if small else [])]
    cores = os.sched_getaffinity(0)
    in_process([PROGRAM, *flags], cores, variables={"JAX_PLATFORMS": "cpu"} if on_cpu else {})


# Environments


def check_pool(env_id: str, steps: int) -> Outcome:
    """Steps inside a compiled program against numpy steps of a pool with the same seeds."""
    import envpool
    import jax
    from jax import lax

    from algos.ppo import Config
    from common.envs import make_env

    config = Config(env_id, num_envs=8, env_kwargs=("max_episode_steps=45",))
    env: Any = make_env(config, "evaluate")
    pool = env.backend.pool
    seeds = [int(seed) for seed in pool.config["env_seed"]]
    twin = envpool.make(env_id, env_type="gymnasium", num_envs=8, seed=seeds, max_episode_steps=45)
    actions = random_actions(env, steps)
    state = env.reset(jax.random.key(0))
    got = [np.array(state.obs)[None]]  # [1, N, *obs]
    scan = jax.jit(lambda state, actions: lax.scan(env.step, state, actions), donate_argnums=0)
    halves = []
    for half in np.split(actions, 2):  # two calls of one program, as between two log points
        state, rows = scan(state, half)
        halves.append(jax.tree.map(np.asarray, rows))
    got += [np.concatenate(pair) for pair in zip(*halves, strict=True)]  # each [T, N, ...]
    env.check(state)
    dtype = pool.spec.action_array_spec[pool._action_keys[-1]].dtype
    first = twin.reset()[0][None]
    rows = [twin.step(action.astype(dtype))[:4] for action in actions]
    wanted = [first, *(np.stack(column) for column in zip(*rows, strict=True))]
    return compare_steps(got, wanted, f"{steps} steps by {type(env.backend).__name__}")


def random_actions(env: Any, steps: int) -> np.ndarray:
    """Return actions [steps, N, *action] that are drawn evenly from between the bounds."""
    from common.envs.env import action_bounds

    low, high = action_bounds(env.action_space)
    rng = np.random.default_rng(0)
    shape = (steps, env.num_envs, *(env.action_space.shape or ()))
    if np.issubdtype(low.dtype, np.integer):
        return rng.integers(low, high + 1, shape, np.int32)
    return rng.uniform(low, high, shape).astype(np.float32)


def compare_steps(got: list[np.ndarray], wanted: list[np.ndarray], what: str) -> Outcome:
    """Compare first obs, obs, reward, terminated and truncated value by value.

    64 bits of `wanted` are rounded to 32.
    """
    names = ("first obs", "obs", "reward", "terminated", "truncated")
    wanted = [np.asarray(y, x.dtype) for x, y in zip(got, wanted, strict=True)]
    different = {name: int((x != y).sum()) for name, x, y in zip(names, got, wanted, strict=True)}
    ends = int((wanted[3] | wanted[4]).sum())
    total = sum(x.size for x in got)
    wrong = ", ".join(f"{count} of {name}" for name, count in different.items() if count)
    detail = f"{what}, {ends} ends of episodes: " + (
        f"different are {wrong}" if wrong else f"all {total:,} values equal"
    )
    return verdict(not wrong and ends > 0, detail, different=sum(different.values()))


# Arithmetic


def check_convolutions(small: bool) -> Outcome:
    """The Nature CNN here against the way it goes on a CPU."""
    import jax

    with tempfile.TemporaryDirectory() as folder:
        second_process("features", folder, on_cpu=True, small=small)
        on_cpu = np.load(Path(folder, "features.npz"))
        wanted = [on_cpu[name] for name in on_cpu.files]
    with jax.default_matmul_precision("highest"):
        plain = worst_difference(network_arrays(small, plain=True), wanted)
        ours = worst_difference(network_arrays(small), wanted)
    default = worst_difference(network_arrays(small), wanted)
    detail = (
        f"largest relative difference {ours:.1e}, of nnx.Conv {plain:.1e}; "
        f"{default:.1e} in JAX's default precision of products"
    )
    worst = max(ours, plain)
    return verdict(worst <= CLOSE, detail, ours=ours, plain=plain, default_precision=default)


def network_arrays(small: bool, plain: bool = False) -> list[np.ndarray]:
    """Return the features of some images, and the gradient of each parameter."""
    import jax
    from flax import nnx

    from common.networks import NatureCNN
    from conv import plain_features

    rng = np.random.default_rng(0)
    graph, params = nnx.split(NatureCNN((4, 84, 84), nnx.Rngs(0)))
    # Drawn on the host: the devices round their random numbers differently.
    params = jax.tree.map(
        lambda x: np.float32(rng.normal(size=x.shape) / math.sqrt(math.prod(x.shape[:-1]))), params
    )
    images = rng.integers(0, 256, (8 if small else 64, 4, 84, 84), np.uint8)

    def loss_and_features(params: Any) -> tuple[Any, Any]:
        cnn = nnx.merge(graph, params)
        features = plain_features(cnn, images) if plain else cnn(images)
        return (features**2).mean(), features

    gradient, features = jax.jit(jax.grad(loss_and_features, has_aux=True))(params)
    return [np.asarray(x) for x in (features, *jax.tree.leaves(gradient))]


def save_features(folder: str, small: bool) -> None:
    """Write what `network_arrays` gives in this process."""
    np.savez(Path(folder, "features.npz"), *network_arrays(small))


def worst_difference(got: list[np.ndarray], wanted: list[np.ndarray]) -> float:
    """Return the largest difference of two lists of arrays, each relative to its largest number."""
    pairs = [(np.float64(x), np.float64(y)) for x, y in zip(got, wanted, strict=True) if x.size]
    return max(
        float(np.abs(x - y).max() / max(np.abs(y).max(), np.finfo(np.float32).tiny))
        for x, y in pairs
    )


# The training process


def short_dqn() -> Any:
    """Return a trainer of DQN in which learning starts at step 1,000."""
    from algos.dqn import Config, Trainer

    return Trainer(Config(GYMNAX, buffer_size=2_000, learning_starts=1_000, total_timesteps=20_000))


def check_donation() -> Outcome:
    """Whether the compiled program takes over the memory of its input."""
    import jax

    trainer = short_dqn()
    env = trainer.state.env
    # The program starts a new summary and never reads the old one, so that it cannot take it over.
    before = jax.tree.leaves(trainer.state._replace(env=env._replace(summary=())))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.state, _ = trainer.compiled_run(trainer.state, 200)
        jax.block_until_ready(trainer.state)
    lines = [str(warning.message).split("\n")[0] for warning in caught]
    lines = [line for line in lines if "donat" in line.lower()]
    kept = sum(not leaf.is_deleted() for leaf in before)
    detail = f"{len(before) - kept} of {len(before)} arrays taken over"
    detail += "".join(f"; warning: {line}" for line in dict.fromkeys(lines))
    return verdict(not kept and not lines, detail, kept=kept)


def check_resume() -> Outcome:
    """Save half-way, and compare the end with that of a new process that resumed there."""
    from common.run.checkpoint import Checkpoints

    with tempfile.TemporaryDirectory() as folder:
        trainer = short_dqn()
        trainer.state, _ = trainer.compiled_run(trainer.state, 250)
        Checkpoints(Path(folder, "checkpoints"), keep=1).save(2_000, trainer.state, None)
        trainer.state, _ = trainer.compiled_run(trainer.state, 250)
        second_process("rest_of_run", folder, on_cpu=False, small=False)
        resumed = np.load(Path(folder, "end.npz"))
        after = [resumed[name] for name in resumed.files]
    whole = state_arrays(trainer.state)
    if all(np.array_equal(x, y) for x, y in zip(whole, after, strict=True)):
        return verdict(True, f"{len(whole)} arrays equal bit for bit, 2,000 steps after a restart")
    num_different = sum(not np.array_equal(x, y) for x, y in zip(whole, after, strict=True))
    worst = worst_difference(after, whole)
    detail = (
        f"{num_different} of {len(whole)} arrays differ, by {worst:.1e} of their largest number"
    )
    return verdict(False, detail, worst=worst)


def finish_run(folder: str, small: bool) -> None:
    """Go on with the run of `check_resume` from its checkpoint; write its end."""
    from common.run.checkpoint import resume

    trainer = short_dqn()
    resume(trainer, Path(folder, "checkpoints"), lambda line: None)
    trainer.state, _ = trainer.compiled_run(trainer.state, 250)
    np.savez(Path(folder, "end.npz"), *state_arrays(trainer.state))


def state_arrays(state: Any) -> list[np.ndarray]:
    """Return all arrays of a state, random keys as their words."""
    import jax
    import jax.numpy as jnp

    def raw(x: Any) -> np.ndarray:
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if is_key else x)

    return [raw(x) for x in jax.tree.leaves(state)]


def check_devices() -> Outcome:
    """PPO on all devices against PPO on one."""
    import jax

    from algos.ppo import Config, Trainer

    from common.run.devices import shard_over_devices

    count = jax.device_count()
    if count == 1:
        return Outcome("skipped", "there is one device", {})
    config = Config(GYMNAX, num_envs=4 * count, total_timesteps=ENDLESS // count * count)
    ends = []
    for num_devices in (1, count):
        trainer = Trainer(config)
        if num_devices > 1:
            shard_over_devices(trainer, num_devices)
        with jax.default_matmul_precision("highest"):
            trainer.state, _ = trainer.compiled_run(trainer.state, 2)
        ends.append([np.asarray(x) for x in jax.tree.leaves(trainer.state.learner.params)])
    worst = worst_difference(ends[1], ends[0])
    detail = f"{count} devices; parameters after 32 updates differ by {worst:.1e} of the largest"
    return verdict(worst <= 1e-3, detail, worst=worst)


def check_learning(small: bool) -> Outcome:
    """Mean return of the last tenth of PPO here and on the CPU, within the spread of the seeds."""
    with tempfile.TemporaryDirectory() as folder:
        save_curves(folder, small)
        here = json.loads(Path(folder, "curves.json").read_text())
        second_process("curves", folder, on_cpu=True, small=small)
        on_cpu = json.loads(Path(folder, "curves.json").read_text())
    return compare_curves(here["curve"], on_cpu["curve"])


def compare_curves(here: list[list[float]], on_cpu: list[list[float]]) -> Outcome:
    """Compare two curves [points, seeds] by their last point.

    The spread is the range of the seeds, the wider one of the two, or a tenth of the return.
    """
    last, last_on_cpu = here[-1], on_cpu[-1]
    mean, mean_on_cpu = np.mean(last), np.mean(last_on_cpu)
    spread = max(np.ptp(last), np.ptp(last_on_cpu), SPREAD_AT_LEAST * mean_on_cpu)
    difference = abs(mean - mean_on_cpu)
    detail = f"last tenth {mean:.1f}, on the CPU {mean_on_cpu:.1f}, spread {spread:.1f}"
    figures = {"here": here, "on_cpu": on_cpu}
    return Outcome("ok" if difference <= spread else "failed", detail, figures)


def save_curves(folder: str, small: bool) -> None:
    """Train three seeds of PPO; write their mean returns in each tenth of the run."""
    import jax

    from algos.ppo import Config, Trainer

    from common.run.logger import ends_log_point
    from common.run.seeds import batch_seeds

    total = 10_240 if small else 102_400  # ten log points of whole rollouts
    trainer = Trainer(Config(GYMNAX, num_envs=8, total_timesteps=total, log_frequency=total // 10))
    batch_seeds(trainer, 3)
    curve = []
    for log_data in trainer():
        if ends_log_point(log_data):
            summary = jax.device_get(trainer.state.env.summary)
            curve.append((summary.return_sum / np.maximum(summary.episodes, 1)).tolist())
    Path(folder, "curves.json").write_text(json.dumps({"curve": curve}))


# Speed


def measure_loop(name: str, num_envs: int, small: bool) -> Outcome:
    """Env steps a second of a training loop, and of its environments alone."""
    trainer, steps = learning_trainer(name, num_envs, small)
    measures = {
        "loop": (loop_measure(trainer), float(steps)),
        "env": (env_measure(trainer.config, "train"), float(num_envs)),
    }
    return Outcome("ok", f"{name} with {num_envs} environments", rates_of(measures, small))


def learning_trainer(name: str, num_envs: int, small: bool) -> tuple[Any, int]:
    """Return a trainer that learns already, and the env steps of one iteration."""
    from algos import dqn, ppo, sac

    sizes: dict[str, Any] = {"num_envs": num_envs, "total_timesteps": ENDLESS}
    if name in ("ppo", "pong"):
        if name == "pong":
            sizes = ppo.PRESETS["atari"] | {"env_id": "Pong-v5"} | sizes
        sizes |= {"num_steps": 16} if small else {}
        trainer: Any = ppo.Trainer(ppo.Config(**sizes))
        return trainer, num_envs * trainer.config.num_steps
    sizes["learning_starts"] = max(1_000, 4 * num_envs)
    if name == "dqn":
        trainer = dqn.Trainer(dqn.Config(buffer_size=max(10_000, 16 * num_envs), **sizes))
    else:
        trainer = sac.Trainer(sac.Config(**sizes))
    loop_measure(trainer)(sizes["learning_starts"] // num_envs + 2)
    return trainer, num_envs


def measure_seeds(num_seeds: int, small: bool) -> Outcome:
    """Env steps a second of many seeds of PPO in one program, all together, and of one alone."""
    from algos.ppo import Config, Trainer

    from common.run.seeds import batch_seeds

    config = Config(GYMNAX, total_timesteps=ENDLESS)
    steps = config.num_envs * config.num_steps
    alone, together = Trainer(config), Trainer(config)
    batch_seeds(together, num_seeds)
    measures = {
        "loop": (loop_measure(together), float(num_seeds * steps)),
        "one_seed": (loop_measure(alone), float(steps)),
    }
    return Outcome("ok", f"{num_seeds} seeds of ppo on {GYMNAX}", rates_of(measures, small))


def rates_of(measures: dict[str, tuple[Measure, float]], small: bool) -> dict[str, float]:
    """Return what each measure does in a second, rounded to whole steps."""
    repeats, seconds = (1, 0.05) if small else (3, 1.0)
    rates = median_rates(measures, repeats, seconds, first=1)
    return {name: float(round(rate)) for name, rate in rates.items()}


PARTS: dict[str, Callable[[str, bool], None]] = {
    "features": save_features,
    "rest_of_run": finish_run,
    "curves": save_curves,
}
