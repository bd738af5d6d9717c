"""Evaluation: full episodes, raw returns, in environments that training never sees."""

import contextlib
import math
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from common.envs import Env, EnvConfig, EnvState, make_env
from common.errors import UserError
from common.networks import Memory

from common.run.cli import RunOptions
from common.run.logger import decimals
from common.run.trainer import Call, Trainer

MAX_ENVS = 20

Predict = Callable[..., Any]


class _Play(NamedTuple):
    env: EnvState
    core: Any  # recurrent state, or ()
    key: Array
    finished: Array  # [N] episodes finished, at most quota
    returns: Array  # [N, quota], NaN for episodes that have not begun
    lengths: Array  # [N, quota], likewise
    is_done: Array  # [N] the quota is played, or an episode has reached the limit


class Evaluator:
    """Plays episodes with `predict(learner, obs, key) -> action`; environments are made once.

    Every environment plays the same number of episodes, so that short episodes do not count more
    often than long ones. With `initial_core(num_envs)`, a recurrent state or (), the policy is
    `predict(learner, obs, key, memory) -> (action, core)`.
    """

    def __init__(
        self,
        config: EnvConfig,
        predict: Predict,
        initial_core: Callable[[int], Any] | None = None,
    ) -> None:
        self.config, self.predict = config, predict
        self.has_memory = initial_core is not None
        self.initial_core = initial_core or (lambda num_envs: ())
        self.num_seeds: int | None = None  # axis 0 of `learner`, where there is one of seeds
        self.max_steps = RunOptions.eval_max_steps  # of an episode, after which it is cut off
        self.latest: dict | None = None  # log_data of the last evaluation
        self._env: Env | None = None

    def __call__(self, learner: Any, step: int, num_episodes: int) -> dict:
        """Play `num_episodes` full episodes and return their log_data.

        The keys depend on the seed and on `step`, the env steps trained so far, alone: evaluation
        does not change training. With seeds, each plays as many episodes: the return is the mean
        over all, the deviation that of the seeds' means.

        An environment whose episode reaches `max_steps` plays no other: that episode counts with
        its return and length so far, in "charts/evaluation_unfinished" too.

        Raises:
            UserError: an environment failed, or there is no episode to play.
        """
        if num_episodes < 1:
            raise UserError(f"an evaluation has 1 episode or more, got {num_episodes}")
        num_envs = min(num_episodes, MAX_ENVS)
        if self._env is None or self._env.num_envs != num_envs:
            self.close()
            self._env = make_env(self.config, "evaluate", num_envs)
            play = self._play if self.num_seeds is None else self._play_seeds
            self._compiled = jax.jit(play, static_argnames=("quota", "max_steps"))
        quota = math.ceil(num_episodes / num_envs)
        start = self._start(self._env, step)
        played = self._compiled(learner, *start, quota=quota, max_steps=self.max_steps)
        self._env.check(played.env)
        ended = np.arange(quota) < np.asarray(played.finished)[..., None]
        # Column by column: the first episode of every environment comes before any second one.
        returns, lengths, ended = (
            np.swapaxes(x, -1, -2).reshape(*x.shape[:-2], -1)[..., :num_episodes]
            for x in (played.returns, played.lengths, ended)
        )
        logs = self._logs(returns, lengths)
        if unfinished := int((~ended & ~np.isnan(returns)).sum()):
            logs["charts/evaluation_unfinished"] = float(unfinished)
        self.latest = {"log_type": "evaluate", "sample_step": step, "logs": logs}
        return self.latest

    def _logs(self, returns: np.ndarray, lengths: np.ndarray) -> dict[str, float]:
        """Return the logs of raw returns and lengths [episodes], with seeds [S, episodes]."""
        logs = {
            "charts/evaluation_return": float(np.nanmean(returns)),
            "charts/evaluation_std": float(np.nanstd(returns)),
            "charts/evaluation_length": float(np.nanmean(lengths)),
        }
        if self.num_seeds is not None:
            of_seeds = np.nanmean(returns, axis=-1)  # [S]
            logs["charts/evaluation_std"] = float(of_seeds.std())
            for i, value in enumerate(of_seeds):
                logs[f"seed_{self.config.seed + i}/evaluation_return"] = float(value)
        return logs

    def _start(self, env: Env, step: int) -> tuple[EnvState, Array]:
        """Return fresh environments and the key of an evaluation, for each seed if there are."""
        if self.num_seeds is None:
            env_key, key = jax.random.split(_evaluation_key(self.config.seed, step))
            return env.reset(env_key), key
        seeds = range(self.config.seed, self.config.seed + self.num_seeds)
        keys = jnp.stack([_evaluation_key(seed, step) for seed in seeds])  # [S]
        env_keys, keys = jax.vmap(jax.random.split, out_axes=1)(keys)  # [S], [S]
        return jax.vmap(env.reset)(env_keys), keys

    def _play_seeds(
        self, learner: Any, env_state: EnvState, key: Array, quota: int, max_steps: int
    ) -> _Play:
        play = partial(self._play, quota=quota, max_steps=max_steps)
        return jax.vmap(play)(learner, env_state, key)

    def act(self, learner: Any, obs: Any, key: Array, memory: Memory) -> tuple[Any, Any]:
        """Return actions [N, *action] and the new recurrent state, () for a policy without one."""
        if self.has_memory:
            return self.predict(learner, obs, key, memory)
        return self.predict(learner, obs, key), ()

    def close(self) -> None:
        """Free the environments."""
        if self._env is not None:
            self._env.close()
            self._env = None

    def _play(
        self, learner: Any, env_state: EnvState, key: Array, quota: int, max_steps: int
    ) -> _Play:
        env = self._env
        assert env is not None
        n = env.num_envs

        def goes_on(play: _Play) -> Array:
            return ~play.is_done.all() & (play.env.fault == 0)

        def step(play: _Play) -> _Play:
            key, action_key = jax.random.split(play.key)
            memory = Memory(play.core, ~play.env.ended)
            action, core = self.act(learner, play.env.obs, action_key, memory)
            state, _ = env.step(play.env, action)
            so_far = state.running_return, state.running_length
            whole = state.finished_return, state.finished_length
            value, length = jax.tree.map(partial(jnp.where, state.finished), whole, so_far)  # [N]
            # An out-of-range column is dropped: what a lane plays when it is done does not count.
            place = jnp.arange(n), jnp.where(play.is_done, quota, play.finished)
            finished = play.finished + (state.finished & ~play.is_done)
            is_done = play.is_done | (finished == quota) | (state.running_length >= max_steps)
            return _Play(
                env=state,
                core=core,
                key=key,
                finished=finished,
                returns=play.returns.at[place].set(value, mode="drop"),
                lengths=play.lengths.at[place].set(length.astype(jnp.float32), mode="drop"),
                is_done=is_done,
            )

        count, is_done = jnp.zeros(n, jnp.int32), jnp.zeros(n, bool)
        unplayed = jnp.full((n, quota), jnp.nan)
        play = _Play(env_state, self.initial_core(n), key, count, unplayed, unplayed, is_done)
        return lax.while_loop(goes_on, step, play)


def shown_return(mean: float, deviation: float) -> str:
    """Return `mean ± deviation` with the digits that matter: more of them where both are small."""
    digits = decimals(max(abs(mean), deviation))
    return f"{mean:.{digits}f} ± {deviation:.{digits}f}"


def episodes(count: int) -> str:
    """Return a number of episodes in words."""
    return f"{count} episode{'s' * (count != 1)}"


def still_running(
    logs: dict[str, float], num_episodes: int, max_steps: int, num_seeds: int = 1
) -> list[str]:
    """Return a line about the episodes of an evaluation that were cut off, if there are any."""
    unfinished = int(logs.get("charts/evaluation_unfinished", 0))
    if not unfinished:
        return []
    rest = "; episodes that never began do not" if num_episodes > MAX_ENVS else ""
    return [
        f"{unfinished} of {episodes(num_episodes * num_seeds)} still running after {max_steps:,} "
        f"steps: their returns so far count{rest}"
    ]


def _evaluation_key(seed: int, step: int) -> Array:
    return jax.random.fold_in(jax.random.key(seed), step)


def evaluator(frequency: int, num_episodes: int) -> Callable[[Call], Call]:
    """Decorate `Trainer.__call__`: evaluate every `frequency` env steps (0 = never) and at the end.

    The evaluation is yielded before the other log_data of its log point.
    """

    def decorate(call: Call) -> Call:
        def evaluated(trainer: Trainer) -> Generator[dict, None, None]:
            last = int(trainer.state.step)
            with contextlib.closing(call(trainer)) as inner:
                for log_data in inner:
                    step = log_data["sample_step"]
                    due = bool(frequency) and step // frequency > last // frequency
                    if due or last < trainer.config.total_timesteps <= step:
                        yield trainer.evaluate(num_episodes)
                    last = step
                    yield log_data

        return evaluated

    return decorate
