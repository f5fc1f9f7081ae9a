# mypy: ignore-errors
"""Segmented LoRA: y += (x A^T) B for all adapters of a step in one launch; B holds the scaling.

Rows are sorted by adapter and cut into chunks of one adapter each (`lora_chunks.py`); a program
computes one chunk and one slice of the linear (q, k and v are three slices of one). A
table holds the offset of each rank row in a flat arena, so that an adapter can lie in any blocks
of the KV cache. The loop over tiles of ranks stops at the adapter's own rank. Partial sums are
added in a fixed order without atomics, so results are deterministic.
"""

import triton
import triton.language as tl

from engine.backends.gpu.adapters import lora_reference
from engine.backends.gpu.dot import dot

UNIT = tl.constexpr(lora_reference.UNIT)


@triton.jit
def rank_rows(table, ranks, rank):
    """Offsets of the rank rows in the arena, in elements."""
    return tl.load(table + ranks, mask=ranks < rank, other=0).to(tl.int64) * UNIT


@triton.jit
def _chunk(chunks, order, ranks, ranks_slot, BLOCK_M: tl.constexpr):
    """This program's slot, the rank of its slice there (0 for a graph's padding), the chunk's
    indices in the order, which of them are used, and their tokens."""
    chunk = chunks + tl.program_id(0) * 3
    slot = tl.load(chunk).to(tl.int64)
    count = tl.load(chunk + 2)
    rank = tl.load(ranks + slot * ranks_slot + tl.program_id(1), mask=count > 0, other=0)
    rows = tl.arange(0, BLOCK_M)
    places = tl.load(chunk + 1) + rows
    tokens = tl.load(order + places, mask=rows < count, other=0)
    return slot, rank, places.to(tl.int64), rows < count, tokens.to(tl.int64)


@triton.jit
def share_of(INPUTS: tl.constexpr, SPLITS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Inputs of one of SPLITS parts, a multiple of the tile."""
    return (INPUTS + BLOCK_K * SPLITS - 1) // (BLOCK_K * SPLITS) * BLOCK_K


@triton.jit
def shrink_tile(
    x, gain, arena, tokens, row_ok, places, rank_ok, begin, end, x_stride,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, NORM: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """x A^T for the inputs [begin, end) and one tile of ranks, in float32. With NORM inputs are scaled by
    `gain` before, as the product of few rows does (`skinny.py`)."""
    acc = tl.zeros([BLOCK_M, BLOCK_R], dtype=tl.float32)
    x_row = x + tokens[:, None] * x_stride
    for first in range(begin, end, BLOCK_K):
        inputs = first + tl.arange(0, BLOCK_K)
        ok = inputs < end
        x_tile = tl.load(x_row + inputs[None, :], mask=row_ok[:, None] & ok[None, :], other=0.0)
        if NORM:
            scale = tl.load(gain + inputs, mask=ok, other=0.0).to(tl.float32)
            x_tile = (x_tile.to(tl.float32) * scale[None, :]).to(x.dtype.element_ty)
        a_mask = ok[:, None] & rank_ok[None, :]
        a_tile = tl.load(arena + places[None, :] + inputs[:, None], mask=a_mask, other=0.0)
        acc += dot(x_tile, a_tile, PRECISION)
    return acc


@triton.jit
def shrink_kernel(
    mid, x, arena, order, chunks, table, ranks,
    x_stride, mid_split, mid_token, mid_slice, table_slot, table_slice, ranks_slot,
    INPUTS: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """mid[split, index in the order, slice, rank] = the split's part of x A^T."""
    piece = tl.program_id(1)
    split = tl.program_id(2)
    slot, rank, at, row_ok, tokens = _chunk(chunks, order, ranks, ranks_slot, BLOCK_M)
    begin = split * share_of(INPUTS, SPLITS, BLOCK_K)
    end = tl.minimum(begin + share_of(INPUTS, SPLITS, BLOCK_K), INPUTS)
    a_table = table + slot * table_slot + piece * table_slice
    place = at[:, None] * mid_token + split.to(tl.int64) * mid_split
    for tile in range(0, rank, BLOCK_R):
        each = tile + tl.arange(0, BLOCK_R)
        places = rank_rows(a_table, each, rank)
        acc = shrink_tile(
            x, x, arena, tokens, row_ok, places, each < rank, begin, end, x_stride,
            BLOCK_M, BLOCK_R, BLOCK_K, False, PRECISION,
        )  # fmt: skip
        ok = row_ok[:, None] & (each < rank)[None, :]
        tl.store(mid + place + piece * mid_slice + each[None, :], acc, mask=ok)


@triton.jit
def expand_kernel(
    y, mid, arena, order, chunks, table, ranks, spans,
    y_stride, mid_split, mid_token, mid_slice, table_slot, table_slice, table_side, ranks_slot,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y[token, the slice's columns] += mid B."""
    piece = tl.program_id(1)
    slot, rank, at, row_ok, tokens = _chunk(chunks, order, ranks, ranks_slot, BLOCK_M)
    width = tl.load(spans + piece * 2 + 1)
    outputs = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    if (rank == 0) | (tl.program_id(2) * BLOCK_N >= width):
        return
    b_table = table + slot * table_slot + piece * table_slice + table_side
    place = mid + at[:, None] * mid_token + piece * mid_slice
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for tile in range(0, rank, BLOCK_R):
        each = tile + tl.arange(0, BLOCK_R)
        ok = row_ok[:, None] & (each < rank)[None, :]
        low = tl.zeros([BLOCK_M, BLOCK_R], dtype=tl.float32)
        for split in tl.static_range(SPLITS):
            low += tl.load(place + split * mid_split + each[None, :], mask=ok, other=0.0)
        b_mask = (each < rank)[:, None] & (outputs < width)[None, :]
        b_place = arena + rank_rows(b_table, each, rank)[:, None] + outputs[None, :]
        b_tile = tl.load(b_place, mask=b_mask, other=0.0)
        acc += dot(low.to(b_tile.dtype), b_tile, PRECISION)
    columns = tl.load(spans + piece * 2) + outputs
    target = y + tokens[:, None] * y_stride + columns[None, :]
    ok = row_ok[:, None] & (outputs < width)[None, :]
    before = tl.load(target, mask=ok, other=0.0).to(tl.float32)
    tl.store(target, (before + acc).to(y.dtype.element_ty), mask=ok)


@triton.jit
def fused_kernel(
    y, x, arena, order, chunks, table, ranks, spans,
    x_stride, y_stride, table_slot, table_slice, table_side, ranks_slot,
    INPUTS: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Shrink and expand in one program, which computes every PARTS-th tile of the slice's columns.

    Each part repeats the shrink (its weights are then in L2), which costs less than a second
    launch while the inputs are few.
    """
    piece = tl.program_id(1)
    slot, rank, _, row_ok, tokens = _chunk(chunks, order, ranks, ranks_slot, BLOCK_M)
    start = tl.load(spans + piece * 2)
    width = tl.load(spans + piece * 2 + 1)
    a_table = table + slot * table_slot + piece * table_slice
    y_row = y + tokens[:, None] * y_stride + start
    for tile in range(0, rank, BLOCK_R):
        each = tile + tl.arange(0, BLOCK_R)
        rank_ok = each < rank
        low = shrink_tile(
            x, x, arena, tokens, row_ok, rank_rows(a_table, each, rank), rank_ok, 0, INPUTS,
            x_stride, BLOCK_M, BLOCK_R, BLOCK_K, False, PRECISION,
        )  # fmt: skip
        b_places = rank_rows(a_table + table_side, each, rank)
        for left in range(tl.program_id(2) * BLOCK_N, width, PARTS * BLOCK_N):
            outputs = left + tl.arange(0, BLOCK_N)
            out_ok = outputs < width
            b_mask = rank_ok[:, None] & out_ok[None, :]
            b_place = arena + b_places[:, None] + outputs[None, :]
            b_tile = tl.load(b_place, mask=b_mask, other=0.0)
            gain = dot(low.to(b_tile.dtype), b_tile, PRECISION)
            target = y_row + outputs[None, :]
            ok = row_ok[:, None] & out_ok[None, :]
            before = tl.load(target, mask=ok, other=0.0).to(tl.float32)
            tl.store(target, (before + gain).to(y.dtype.element_ty), mask=ok)
