"""ggml's K-quants: blocks of 256 values in groups of 16 or 32, each group with a quantised scale.

Every function takes [blocks, bytes of a block] in uint8.
"""

import numpy as np

from engine.models.gguf.codes import Array, BlockCodes

_PAIRS = np.array([0, 2, 4, 6], np.uint8)[:, None]  # shifts of the four two-bit fields of a byte
_HALVES = np.array([0, 4], np.uint8)[:, None]  # of the two four-bit fields


def q2_k(blocks: Array) -> BlockCodes:
    scales, packed, factors = _split(blocks, 16, 64, 4)
    d, dmin = _halves(factors)
    values = _two_bits(packed, 2).reshape(-1, 16, 16)
    return _coded(values, d[:, None] * (scales & 15), -dmin[:, None] * (scales >> 4))


def q3_k(blocks: Array) -> BlockCodes:
    mask, packed, scales, factor = _split(blocks, 32, 64, 12, 2)
    low = _two_bits(packed, 2).reshape(-1, 8, 32)
    # Bit g of mask byte l belongs to value l of group g of 32; where it is 0, 4 is taken off.
    high = (mask[:, None, :] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    values = (low.astype(np.int8) - 4 * (1 - high.astype(np.int8))).reshape(-1, 16, 16)
    scale = factor.view("<f2").astype(np.float32) * (_six_bit_scales(scales).astype(np.int8) - 32)
    return _coded(values, scale)


def q4_k(blocks: Array) -> BlockCodes:
    factors, scales, packed = _split(blocks, 4, 12, 128)
    return _with_minima(factors, scales, _four_bits(packed))


def q5_k(blocks: Array) -> BlockCodes:
    factors, scales, high, packed = _split(blocks, 4, 12, 32, 128)
    # Bit g of byte l is the fifth of value l of group g of 32.
    bits = (high[:, None, :] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    return _with_minima(factors, scales, _four_bits(packed) | bits << 4)


def q6_k(blocks: Array) -> BlockCodes:
    packed, high, scales, factor = _split(blocks, 128, 64, 16, 2)
    # Each half of 128: 64 low halves, then their 64 high ones; two bits above, 32 bytes for 4 x 32.
    low = (packed.reshape(-1, 2, 1, 64) >> _HALVES) & 15
    values = low.reshape(-1, 2, 4, 32) | _two_bits(high, 2) << 4
    scale = factor.view("<f2").astype(np.float32) * scales.view(np.int8)
    return _coded((values.astype(np.int8) - 32).reshape(-1, 16, 16), scale)


def _split(blocks: Array, *sizes: int) -> list[Array]:
    return [np.ascontiguousarray(part) for part in np.split(blocks, np.cumsum(sizes)[:-1], axis=1)]


def _halves(factors: Array) -> tuple[Array, Array]:
    wide = factors.view("<f2").astype(np.float32)
    return wide[:, 0], wide[:, 1]


def _coded(values: Array, scales: Array, minima: Array | None = None) -> BlockCodes:
    return BlockCodes(values.reshape(-1, 256).astype(np.int8), scales, minima)


def _two_bits(packed: Array, groups: int) -> Array:
    """[blocks, groups, 4, bytes of a group]: all bytes' lowest two bits first, then the next."""
    return (packed.reshape(len(packed), groups, 1, -1) >> _PAIRS) & 3


def _four_bits(packed: Array) -> Array:
    """[blocks, 8, 32]: of each 32 bytes first the low halves, then the high ones."""
    return ((packed.reshape(-1, 4, 1, 32) >> _HALVES) & 15).reshape(-1, 8, 32)


def _six_bit_scales(packed: Array) -> Array:
    """Q3_K's 16: eight bytes with two lows of four bits, four bytes with four highs of two."""
    low = np.concatenate((packed[:, :8] & 15, packed[:, :8] >> 4), axis=1)
    high: Array = _two_bits(packed[:, 8:], 1).reshape(-1, 16) << 4
    return low | high


def _with_minima(factors: Array, packed: Array, values: Array) -> BlockCodes:
    """Q4_K's and Q5_K's eight scales and minima, six bits each in twelve bytes."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate((first & 63, third & 15 | first >> 6 << 4), axis=1)
    minima = np.concatenate((second & 63, third >> 4 | second >> 6 << 4), axis=1)
    d, dmin = _halves(factors)
    return _coded(values, d[:, None] * scales, -dmin[:, None] * minima)
