"""Quantised blocks to codes and to float32, vectorised over blocks.

Block layouts: ggml's `ggml-common.h`. A block holds one or two float16 factors and packed integers;
a value is factor * integer, less a minimum where the type has one.
"""

from collections.abc import Callable

import numpy as np

from engine.models.gguf import types
from engine.models.gguf.codes import Array, BlockCodes
from engine.models.gguf.k_quants import q2_k, q3_k, q4_k, q5_k, q6_k


def dequantise(kind: int, raw: Array) -> Array:
    """`raw` is uint8, whole blocks of a type of `types.BLOCKS`. Returns float32, flat."""
    if kind == types.F32:
        return raw.view("<f4")
    if kind == types.F16:
        return raw.view("<f2").astype(np.float32)
    if kind == types.BF16:
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return codes_of(kind, raw).values().reshape(-1)


def codes_of(kind: int, raw: Array) -> BlockCodes:
    """`raw` is uint8, whole blocks of a type that has codes."""
    return _READERS[kind](raw.reshape(-1, types.BLOCKS[kind][1]))


def has_codes(kind: int) -> bool:
    return kind in _READERS


def _q4_0(blocks: Array) -> BlockCodes:
    return BlockCodes(_nibbles(blocks[:, 2:]).astype(np.int8) - 8, _factor(blocks))


def _q4_1(blocks: Array) -> BlockCodes:
    return BlockCodes(_nibbles(blocks[:, 4:]).astype(np.int8), _factor(blocks), _minimum(blocks))


def _q5_0(blocks: Array) -> BlockCodes:
    fives = _fives(blocks[:, 2:6], blocks[:, 6:])
    return BlockCodes(fives.astype(np.int8) - 16, _factor(blocks))


def _q5_1(blocks: Array) -> BlockCodes:
    fives = _fives(blocks[:, 4:8], blocks[:, 8:])
    return BlockCodes(fives.astype(np.int8), _factor(blocks), _minimum(blocks))


def _q8_0(blocks: Array) -> BlockCodes:
    return BlockCodes(blocks[:, 2:].view(np.int8), _factor(blocks))


def _factor(blocks: Array) -> Array:
    return np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float32)


def _minimum(blocks: Array) -> Array:
    return np.ascontiguousarray(blocks[:, 2:4]).view("<f2").astype(np.float32)


def _nibbles(packed: Array) -> Array:
    """The low halves of all bytes, then the high ones."""
    return np.concatenate((packed & 15, packed >> 4), axis=1)


def _fives(high: Array, packed: Array) -> Array:
    """Four bits of `packed` below one of `high`, which has a bit a value, the lowest first."""
    bits: Array = np.unpackbits(high, axis=1, bitorder="little") << 4
    return _nibbles(packed) | bits


_READERS: dict[int, Callable[[Array], BlockCodes]] = {
    types.Q4_0: _q4_0,
    types.Q4_1: _q4_1,
    types.Q5_0: _q5_0,
    types.Q5_1: _q5_1,
    types.Q8_0: _q8_0,
    types.Q2_K: q2_k,
    types.Q3_K: q3_k,
    types.Q4_K: q4_k,
    types.Q5_K: q5_k,
    types.Q6_K: q6_k,
}
