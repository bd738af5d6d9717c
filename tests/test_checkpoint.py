"""Checkpoints as files."""

import jax
import jax.numpy as jnp
import pytest

from common.run import checkpoint


def test_a_large_array_is_written_in_pieces_and_comes_back_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "PIECE", 1 << 16)
    shape = (3, 1 << 17, 2)  # a row is larger than a piece
    state = {"frames": jax.random.bits(jax.random.key(0), shape, jnp.uint8)}
    checkpoints = checkpoint.Checkpoints(tmp_path / "50% of #2, a|b", keep=1)  # no URL
    checkpoints.save(1, state, None)
    sizes = [path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()]
    assert sum(sizes) > 12 << 16 and max(sizes) < 3 << 16
    restored = checkpoints.restore(1, state)
    assert (restored["frames"] == state["frames"]).all()


@pytest.mark.parametrize(
    ("shape", "dtype"), [((11, 1 << 10), jnp.uint8), ((10, 1 << 10), jnp.int8)]
)
def test_a_large_array_of_another_shape_or_dtype_is_refused(tmp_path, monkeypatch, shape, dtype):
    monkeypatch.setattr(checkpoint, "PIECE", 1 << 10)
    checkpoints = checkpoint.Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, {"frames": jnp.zeros((10, 1 << 10), jnp.uint8)}, None)
    with pytest.raises(ValueError, match=r"frames is uint8 \(10, 1024\), not u?int8 \(1"):
        checkpoints.restore(1, {"frames": jnp.zeros(shape, dtype)})
