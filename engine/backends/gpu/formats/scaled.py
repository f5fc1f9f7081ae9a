# mypy: ignore-errors
"""Products of rows and matrices that are both in 8 bits: integers, or e4m3 where the device multiplies
it."""

import triton
import triton.language as tl

from engine.backends.gpu.dot import WIDEN
from engine.backends.gpu.formats.finish import finish


@triton.jit
def round_rows_kernel(
    codes, scales, x, x_stride, WIDTH: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK: tl.constexpr, MOST: tl.constexpr, INTEGERS: tl.constexpr,
):  # fmt: skip
    """One program rounds one group of a row, so that its greatest value is MOST. A value that is not
    finite makes the scale so: no code could say it."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    place = tl.arange(0, BLOCK)
    inputs = group * GROUP + place
    ok = (place < GROUP) & (inputs < WIDTH)
    values = tl.load(x + row * x_stride + inputs, mask=ok, other=0.0).to(tl.float32)
    wrong = tl.where(tl.abs(values) < float("inf"), 0.0, float("nan"))
    values = tl.where(tl.abs(values) < float("inf"), values, 0.0)
    scale = tl.math.div_rn(tl.max(tl.abs(values), 0), MOST)
    safe = tl.where(scale > 0.0, scale, 1.0)
    found = tl.math.div_rn(values, tl.zeros_like(values) + safe)
    if INTEGERS:
        step = 1.0
    else:  # e4m3 has steps of 2^-3 within a power of two, from 2^-6 on
        power = (found.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        step = tl.maximum(power, 0.015625) * 0.125
    shift = step * 12582912.0  # 1.5 * 2^23 steps: the sum is rounded to a whole one, halves to even
    found = (found + shift) - shift
    tl.store(scales + row * GROUPS + group, scale + tl.sum(wrong, 0))
    target = codes + row * (GROUP * GROUPS) + inputs
    tl.store(target, found.to(codes.dtype.element_ty), mask=place < GROUP)


@triton.jit(do_not_specialize=["rows"])
def scaled_kernel(
    out, x, row_scales, codes, scales, factors, bias, rows, x_stride, out_stride,
    OUTPUTS: tl.constexpr, SPANS: tl.constexpr, SPAN: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, INTEGERS: tl.constexpr, FACTORS: tl.constexpr, BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out = x W^T + b for BLOCK_N outputs and BLOCK_M rows; x is [rows, SPANS * SPAN or more].
    Integers are summed over all inputs and scaled once; small floats are summed over a span, and scaled
    by both scales."""
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    out_ok = outputs < OUTPUTS
    row_ok = row < rows
    place = tl.arange(0, SPAN)
    x_place = x + row.to(tl.int64)[None, :] * x_stride + place[:, None]
    code_row = codes + outputs[:, None] * SPAN + place[None, :]
    if INTEGERS:
        whole = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.int32)
    else:
        of_row = row_scales + row * GROUPS
        # Read a span before they are used, or each span would end by waiting for memory.
        scale = tl.load(scales + outputs, mask=out_ok, other=0.0)
        of_rows = tl.load(of_row, mask=row_ok, other=0.0)
    acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for span in range(SPANS):
        read = tl.load(code_row, mask=out_ok[:, None], other=0)
        x_tile = tl.load(x_place, mask=row_ok[None, :], other=0.0)
        code_row += OUTPUTS * SPAN
        x_place += SPAN
        if INTEGERS:
            signed = (read ^ 128).to(tl.int8, bitcast=True)
            whole += tl.dot(signed, x_tile, out_dtype=tl.int32)
        else:
            ahead, more = (span + 1) * SPAN // GROUP, span + 1 < SPANS
            next_scale = tl.load(scales + ahead * OUTPUTS + outputs, mask=out_ok & more, other=0.0)
            next_of_rows = tl.load(of_row + ahead, mask=row_ok & more, other=0.0)
            small = read.to(tl.float8e4nv, bitcast=True)
            if WIDEN:
                sums = tl.dot(small.to(tl.float32), x_tile.to(tl.float32))
            else:
                # Tensor cores add e4m3 with few bits: what one instruction adds goes to a float32.
                sums = tl.dot(small, x_tile, max_num_imprecise_acc=32)
            acc += sums * scale[:, None] * of_rows[None, :]
            scale, of_rows = next_scale, next_of_rows
    if INTEGERS:
        scale = tl.load(scales + outputs, mask=out_ok, other=0.0).to(tl.float32)
        of_rows = tl.load(row_scales + row, mask=row_ok, other=0.0)
        acc = whole.to(tl.float32) * scale[:, None] * of_rows[None, :]
    finish(acc, factors, bias, out, row, row_ok, outputs, out_ok, out_stride, FACTORS, BIAS)
