"""Checkpoints as files."""

import jax
import jax.numpy as jnp

from common.run import checkpoint


def test_a_large_array_is_written_in_pieces_and_comes_back_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "PIECE", 1 << 16)
    state = {"frames": jax.random.bits(jax.random.key(0), (10, 1 << 16), jnp.uint8)}
    checkpoints = checkpoint.Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, state, None)
    sizes = [path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()]
    assert sum(sizes) > 10 << 16 and max(sizes) < 3 << 16
    restored = checkpoints.restore(1, state)
    assert (restored["frames"] == state["frames"]).all()
