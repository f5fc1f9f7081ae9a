# mypy: ignore-errors
"""DoRA's lengths: y = y * factor + shift, for all adapters of a step in one launch, before their sums
are added. Factor and shift are rows of the arena, found through a table as those of `lora.py` are."""

import triton
import triton.language as tl

from engine.backends.gpu.adapters.lora import UNIT, _chunk


@triton.jit
def rescale_kernel(
    y, arena, order, chunks, table, ranks, spans,
    y_stride, table_slot, table_slice, table_side, ranks_slot,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program a chunk, a slice of the linear and BLOCK_N of its columns. `ranks` is 0 where the
    adapter has no factor."""
    piece = tl.program_id(1)
    slot, rank, _, row_ok, tokens = _chunk(chunks, order, ranks, ranks_slot, BLOCK_M)
    width = tl.load(spans + piece * 2 + 1)
    outputs = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    if (rank == 0) | (tl.program_id(2) * BLOCK_N >= width):
        return
    at = table + slot * table_slot + piece * table_slice
    out_ok = outputs < width
    factor = tl.load(arena + tl.load(at).to(tl.int64) * UNIT + outputs, mask=out_ok, other=0.0)
    shift_at = arena + tl.load(at + table_side).to(tl.int64) * UNIT
    shift = tl.load(shift_at + outputs, mask=out_ok, other=0.0)
    columns = tl.load(spans + piece * 2) + outputs
    target = y + tokens[:, None] * y_stride + columns[None, :]
    ok = row_ok[:, None] & out_ok[None, :]
    value = tl.load(target, mask=ok, other=0.0).to(tl.float32)
    value = value * factor.to(tl.float32)[None, :] + shift.to(tl.float32)[None, :]
    tl.store(target, value.to(y.dtype.element_ty), mask=ok)
