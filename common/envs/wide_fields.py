"""64-bit fields of a pool inside a program of 32-bit numbers: as pairs of words, bit by bit.

JAX has no 64-bit types unless all of it has. A pool's custom call only sees memory, so that a
float64 [...] can enter and leave the program as uint32 [..., 2], lower word first.
"""

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, ffi, lax

SIGN = np.uint32(1 << 31)


def float64_words(x: Array) -> Array:
    """float32 [...] -> uint32 [..., 2], the words of the same number as float64.

    Numbers below 1.2e-38 become 0.
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    exponent, mantissa = (bits >> 23) & 0xFF, bits & 0x7FFFFF
    wide = jnp.where(exponent == 0xFF, 0x7FF, exponent + 896)
    magnitude = jnp.where(exponent == 0, 0, (wide << 20) | (mantissa >> 3))
    upper = (bits & SIGN) | magnitude
    return jnp.stack([jnp.where(exponent == 0, 0, mantissa << 29), upper], axis=-1)


def float32_of_words(words: Array) -> Array:
    """uint32 [..., 2] of float64 -> the nearest float32 [...], ties to even as IEEE 754 has it.

    Numbers below 1.2e-38 become 0.
    """
    lower, upper = words[..., 0], words[..., 1]
    exponent = ((upper >> 20) & 0x7FF).astype(jnp.int32) - 896
    mantissa = ((upper & 0xFFFFF) << 3) | (lower >> 29)
    rest, half = lower & 0x1FFFFFFF, 0x10000000
    rounds_up = (rest > half) | ((rest == half) & (mantissa & 1 == 1))
    # A mantissa that overflows carries into the exponent, up to infinity.
    magnitude = (exponent.astype(jnp.uint32) << 23) + mantissa + rounds_up
    magnitude = jnp.where(exponent <= 0, 0, jnp.where(exponent >= 255, 0x7F800000, magnitude))
    is_nan = (exponent == 0x7FF - 896) & ((mantissa | rest) != 0)
    magnitude = jnp.where(is_nan, 0x7FC00000, magnitude)
    return lax.bitcast_convert_type((upper & SIGN) | magnitude, jnp.float32)


def wide_xla(pool: Any) -> tuple[np.ndarray, Callable]:
    """Return the handle and the traceable step of a pool with float64 fields, as `pool.xla()` does.

    step(handle, action) -> (handle, (obs, reward, terminated, truncated, info)), in float32.
    """
    native = dict(pool._xla())
    send, recv = (_custom_call(pool, name, *native[name]) for name in ("send", "recv"))

    def step(handle: Array, action: Any) -> tuple[Array, Any]:
        (handle,) = send(handle, *pool._from(action))
        handle, *fields = recv(handle)
        return handle, pool._to(fields, False, True)

    return np.frombuffer(native["send"][0], np.uint8), step


def _custom_call(pool: Any, name: str, handle: bytes, specs: Any, capsules: Any) -> Callable:
    """Return a traceable call of the pool: fields [...] -> fields [...], words in between."""
    target = f"{type(pool).__name__}_{id(pool)}_wide_{name}"
    for platform, capsule in zip(("cpu", "gpu"), capsules, strict=True):
        if capsule is not None:
            ffi.register_ffi_target(target, capsule, platform=platform, api_version=1)
    inputs_are_wide, results_are_wide = ([d == np.float64 for d, _ in spec] for spec in specs)
    results = [
        jax.ShapeDtypeStruct((*shape, 2) if dtype == np.float64 else tuple(shape), kind)
        for dtype, shape in specs[1]
        for kind in [np.uint32 if dtype == np.float64 else dtype]
    ]
    call = ffi.ffi_call(target, results, has_side_effect=True, input_output_aliases={0: 0})
    address = int.from_bytes(handle, byteorder=sys.byteorder)

    def words_call(*fields: Any) -> list[Any]:
        pairs = zip(fields, inputs_are_wide, strict=True)
        words = call(*(float64_words(x) if wide else x for x, wide in pairs), handle=address)
        pairs = zip(words, results_are_wide, strict=True)
        return [float32_of_words(x) if wide else x for x, wide in pairs]

    return words_call
