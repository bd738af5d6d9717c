"""A GIF of one episode, through the environment's own rendering."""

from pathlib import Path
from typing import Any

import jax
import numpy as np

from common.envs import Env, make_env
from common.networks import Memory

from common.run.evaluator import Evaluator

MAX_FRAMES = 1_000
MAX_SIDE = 400
FRAME_MILLISECONDS = 33


def save_video(evaluator: Evaluator, learner: Any, path: Path) -> float:
    """Play one full episode, write it as a GIF, and return its raw return.

    Frames beyond the first 1,000 are played but not written; after the evaluator's `max_steps` the
    episode is cut off.

    Raises:
        UserError: the environment cannot render.
        OSError: the file cannot be written.
    """
    from PIL import Image

    env = make_env(evaluator.config, "video", num_envs=1)
    try:
        frames, episode_return = _play(env, evaluator, learner)
    finally:
        env.close()
    images = [Image.fromarray(_shrunk(frame)) for frame in frames]
    path.parent.mkdir(parents=True, exist_ok=True)
    images[0].save(
        path, save_all=True, append_images=images[1:], duration=FRAME_MILLISECONDS, loop=0
    )
    return episode_return


def _play(env: Env, evaluator: Evaluator, learner: Any) -> tuple[list[np.ndarray], float]:
    step, act = jax.jit(env.step), jax.jit(evaluator.act)
    env_key, key = jax.random.split(jax.random.key(evaluator.config.seed))
    state, core = env.reset(env_key), evaluator.initial_core(1)
    frames = [env.render(state)]
    for _ in range(evaluator.max_steps):
        key, action_key = jax.random.split(key)
        action, core = act(learner, state.obs, action_key, Memory(core, ~state.ended))
        state, _ = step(state, action)
        env.check(state)
        if len(frames) < MAX_FRAMES:
            frames.append(env.render(state))
        if bool(state.finished[0]):
            return frames, float(state.finished_return[0])
    return frames, float(state.running_return[0])


def _shrunk(frame: np.ndarray) -> np.ndarray:
    """[H, W, 3] -> every k-th pixel, so that no side is above 400."""
    k = -(-max(frame.shape[:2]) // MAX_SIDE)
    return np.ascontiguousarray(frame[::k, ::k])
