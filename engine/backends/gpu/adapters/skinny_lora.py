# mypy: ignore-errors
"""LoRA in steps of few rows: what the product of `skinny.py` does for adapters, and the one launch
between two products.

`mid` holds the shrunk rows, x A^T: [16 rows, slices, RANKS, splits of the inputs] float32. The splits,
a power of two, are added in one order where a product expands them.
"""

import triton
import triton.language as tl

from engine.backends.gpu.adapters.lora import rank_rows, share_of, shrink_tile
from engine.backends.gpu.dot import dot
from engine.backends.gpu.overlap import wait_for_last_launch

ROWS = tl.constexpr(16)


@triton.jit
def _rows_of(chunks, order, chunk):
    """A chunk's slot, its tokens, and which of them are used."""
    count = tl.load(chunks + chunk * 3 + 2)
    ok = tl.arange(0, ROWS) < count
    places = tl.load(chunks + chunk * 3 + 1) + tl.arange(0, ROWS)
    tokens = tl.load(order + places, mask=ok, other=0).to(tl.int64)
    return tl.load(chunks + chunk * 3).to(tl.int64), tokens, ok, count > 0


@triton.jit
def shrink_part(
    mid, x, gain, arena, order, chunks, table, ranks, number,
    x_stride, table_slot, table_side, ranks_slot,
    INPUTS: tl.constexpr, SPLITS: tl.constexpr, SLICES: tl.constexpr, RANKS: tl.constexpr,
    NORM: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """mid = one split of x A^T for all slices of one chunk; `number`: chunk * SPLITS + split."""
    split = number % SPLITS
    slot, tokens, row_ok, used = _rows_of(chunks, order, number // SPLITS)
    begin = split * share_of(INPUTS, SPLITS, BLOCK_K)
    end = tl.minimum(begin + share_of(INPUTS, SPLITS, BLOCK_K), INPUTS)
    for piece in range(SLICES):
        rank = tl.load(ranks + slot * ranks_slot + piece, mask=used, other=0)
        a_table = table + slot * table_slot + piece * 2 * table_side
        place = mid + (tokens * SLICES + piece) * (RANKS * SPLITS) + split
        for tile in range(0, rank, BLOCK_R):
            each = tile + tl.arange(0, BLOCK_R)
            acc = shrink_tile(
                x, gain, arena, tokens, row_ok, rank_rows(a_table, each, rank), each < rank,
                begin, end, x_stride, ROWS, BLOCK_R, BLOCK_K, NORM, PRECISION,
            )  # fmt: skip
            ok = row_ok[:, None] & (each < rank)[None, :]
            tl.store(place[:, None] + each[None, :] * SPLITS, acc, mask=ok)


@triton.jit
def low_rank(
    mid, row, mine, lift, ok, piece,
    SPLITS: tl.constexpr, SLICES: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """[rows, ranks]: the shrunk rows, their splits added, where `mine`; 0 elsewhere."""
    place = mid + ((row[:, None] * SLICES + piece) * RANKS + lift[None, :]) * SPLITS
    parts = place[:, :, None] + tl.arange(0, SPLITS)[None, None, :]
    return tl.sum(tl.load(parts, mask=(mine & ok[None, :])[:, :, None], other=0.0), 2)


@triton.jit
def expanded(
    mid, arena, chunks, chunk_of, table, ranks, spans, columns, column_ok, rms, rows, count,
    table_slot, table_side, ranks_slot,
    SPLITS: tl.constexpr, SLICES: tl.constexpr, RANKS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """[rows, columns]: (x A^T * rms) B of every row's adapter, in float32, for columns of the product.

    GROUP chunks make one product: 16 ranks of each lie side by side, and a row is 0 in those of other
    chunks. So a row's sum has the terms of its own adapter alone, in one order."""
    row = tl.arange(0, ROWS)
    owner = tl.load(chunk_of + row, mask=row < rows, other=-1)
    pair = tl.arange(0, 16 * GROUP)
    acc = tl.zeros([ROWS, BLOCK_N], dtype=tl.float32)
    for piece in range(SLICES):
        start = tl.load(spans + piece * 2)
        inside = column_ok & (columns >= start)
        inside = inside & (columns < start + tl.load(spans + piece * 2 + 1))
        if tl.max(inside.to(tl.int32), 0) > 0:
            for first in range(0, count, GROUP):
                chunk = first + pair // 16
                used = chunk < count
                used = used & (tl.load(chunks + chunk * 3 + 2, mask=used, other=0) > 0)
                slot = tl.load(chunks + chunk * 3, mask=used, other=0).to(tl.int64)
                rank = tl.load(ranks + slot * ranks_slot + piece, mask=used, other=0)
                b_table = table + slot * table_slot + (piece * 2 + 1) * table_side
                mine = owner[:, None] == chunk[None, :]
                for lift in tl.range(0, tl.max(rank, 0), 16, num_stages=1):
                    each = lift + pair % 16
                    ok = each < rank
                    low = low_rank(mid, row, mine, each, ok, piece, SPLITS, SLICES, RANKS)
                    place = rank_rows(b_table, each, rank)
                    b_ptr = arena + place[:, None] + (columns - start)[None, :]
                    b = tl.load(b_ptr, mask=ok[:, None] & inside[None, :], other=0.0)
                    # A number that is not finite would reach other rows, as 0 times it.
                    b = tl.where(tl.abs(b) < float("inf"), b, 0.0)
                    acc += dot((low * rms).to(b.dtype), b, PRECISION)
    return acc


@triton.jit
def _expand_in_place(
    x, mid, arena, chunks, order, chunk, table, ranks, begin, end,
    x_stride, table_slot, table_side, ranks_slot,
    SPLITS: tl.constexpr, RANKS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """x[rows of the chunk, begin:end] += mid B, of one slice."""
    slot, tokens, row_ok, used = _rows_of(chunks, order, chunk)
    rank = tl.load(ranks + slot * ranks_slot, mask=used, other=0)
    if rank > 0:
        for first in range(begin, end, BLOCK_N):
            columns = first + tl.arange(0, BLOCK_N)
            column_ok = columns < end
            acc = tl.zeros([ROWS, BLOCK_N], dtype=tl.float32)
            for tile in tl.range(0, rank, BLOCK_R, num_stages=1):
                each = tile + tl.arange(0, BLOCK_R)
                ok = each < rank
                low = low_rank(mid, tokens, row_ok[:, None], each, ok, 0, SPLITS, 1, RANKS)
                place = rank_rows(table + slot * table_slot + table_side, each, rank)
                b_mask = ok[:, None] & column_ok[None, :]
                b = tl.load(arena + place[:, None] + columns[None, :], mask=b_mask, other=0.0)
                acc += dot(low.to(b.dtype), b, PRECISION)
            target = x + tokens[:, None] * x_stride + columns[None, :]
            mask = row_ok[:, None] & column_ok[None, :]
            before = tl.load(target, mask=mask, other=0.0).to(tl.float32)
            tl.store(target, (before + acc).to(x.dtype.element_ty), mask=mask)


@triton.jit
def link_kernel(
    x, gain, arena, order, chunks, before, before_table, before_ranks, after, table, ranks,
    x_stride, table_slot, table_side, ranks_slot,
    WIDTH: tl.constexpr, SPLITS: tl.constexpr, RANKS: tl.constexpr,
    EXPAND: tl.constexpr, SHRINK: tl.constexpr, NORM: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Between two products: `x` gets what adapters add to the product before it (shrunk in `before`, in
    EXPAND splits; 0: nothing), then `after` is x A^T of the SHRINK slices of the product behind it (0:
    none). One program has one of SPLITS parts of the columns of one chunk's rows, for both."""
    wait_for_last_launch(OVERLAP)
    number = tl.program_id(0)
    if EXPAND > 0:
        begin = number % SPLITS * share_of(WIDTH, SPLITS, BLOCK_K)
        end = tl.minimum(begin + share_of(WIDTH, SPLITS, BLOCK_K), WIDTH)
        _expand_in_place(
            x, before, arena, chunks, order, number // SPLITS, before_table, before_ranks,
            begin, end, x_stride, table_slot, table_side, ranks_slot,
            EXPAND, RANKS, BLOCK_R, BLOCK_K, PRECISION,
        )  # fmt: skip
        tl.debug_barrier()  # what one thread has written another one reads below
    if SHRINK > 0:
        shrink_part(
            after, x, gain, arena, order, chunks, table, ranks, number,
            x_stride, table_slot, table_side, ranks_slot,
            WIDTH, SPLITS, SHRINK, RANKS, NORM, BLOCK_R, BLOCK_K, PRECISION,
        )  # fmt: skip
