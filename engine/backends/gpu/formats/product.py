# mypy: ignore-errors
"""The product of rows and a quantised matrix, whose codes become numbers in the inner loop.

Numbers are exact in the type of the rows (small integers less their zero). A span's sum is multiplied by
its scale in float32, so no weight is rounded. The matrix is the first operand of the tensor cores: few
rows then fill the narrow side of their tiles, and the converted numbers stay in registers.
"""

import triton
import triton.language as tl

from engine.backends.gpu.dot import dot
from engine.backends.gpu.formats.finish import finish


@triton.jit
def _integers(codes, ZERO: tl.constexpr, dtype: tl.constexpr):
    """code - ZERO by way of 2^23 + code, whose bits are those of both: one instruction instead of a
    conversion, of which a processor makes a quarter as many."""
    wide = (codes.to(tl.uint32) | 0x4B000000).to(tl.float32, bitcast=True)
    return (wide - (8388608.0 + ZERO)).to(dtype)


@triton.jit
def _numbers(codes, KIND: tl.constexpr, ZERO: tl.constexpr, dtype: tl.constexpr):
    """The numbers of the codes, of e4m3 divided by 2^8, and of e2m1 by 2^14. The bits of a small float
    are those of a float16 whose exponent has another bias: every device reads it, nothing is rounded."""
    if KIND == "e4m3":
        wide = codes.to(tl.uint16)
        return ((wide & 127) << 7 | (wide & 128) << 8).to(tl.float16, bitcast=True).to(dtype)
    elif KIND == "e2m1":
        wide = codes.to(tl.uint16)
        return ((wide & 7) << 9 | (wide & 8) << 12).to(tl.float16, bitcast=True).to(dtype)
    else:
        return _integers(codes, ZERO, dtype)


@triton.jit
def _inputs(
    x_row, row_ok, order, first,
    INPUTS: tl.constexpr, SPAN: tl.constexpr, SIZE: tl.constexpr, ORDERED: tl.constexpr,
):  # fmt: skip
    """[SIZE, rows] of the inputs from `first` on: those of a span or of half of one, which may lie beyond
    the last input."""
    inputs = first + tl.arange(0, SIZE)
    if INPUTS % SPAN == 0:
        ok = row_ok[None, :]
    else:
        ok = (inputs < INPUTS)[:, None] & row_ok[None, :]
    if ORDERED:
        inputs = tl.load(order + inputs, mask=inputs < INPUTS, other=0)
    return tl.load(x_row[None, :] + inputs[:, None], mask=ok, other=0.0)


@triton.jit
def _stored(scales, minima, place, ok, MINIMA: tl.constexpr):
    """A scale and a minimum an output, as they are stored. They are read a span before they are used, or
    each span would end by waiting for memory."""
    scale = tl.load(scales + place, mask=ok, other=0)
    low = scale
    if MINIMA:
        low = tl.load(minima + place, mask=ok, other=0.0)
    return scale, low


@triton.jit
def _scaled(acc, sums, x_sum, stored, low, MINIMA: tl.constexpr, EXPONENTS: tl.constexpr):
    """acc + scale * sums + minimum * the sum of the inputs."""
    if EXPONENTS:  # 2^14 for the numbers of e2m1
        scale = (stored.to(tl.int32) + 14 << 23).to(tl.float32, bitcast=True)
    else:
        scale = stored.to(tl.float32)
    acc += sums * scale[:, None]
    if MINIMA:
        acc += low.to(tl.float32)[:, None] * x_sum[None, :]
    return acc


@triton.jit(do_not_specialize=["rows"])
def product_kernel(
    out, x, codes, scales, minima, factors, bias, order, chunks, places, rows, x_stride, out_stride,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, KIND: tl.constexpr, ZERO: tl.constexpr,
    SPAN: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, MINIMA: tl.constexpr,
    FACTORS: tl.constexpr, BIAS: tl.constexpr, ORDERED: tl.constexpr, EXPERTS: tl.constexpr,
    ACTIVE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out = x W^T + b for BLOCK_N outputs and BLOCK_M rows.

    With EXPERTS a program computes one of `chunks`: rows of one expert, sorted by expert. Their inputs
    are rows of x in that order ("sorted"), or those of their tokens ("tokens"): the choice that is n-th
    in the order is number `places[n]`, of which each token has ACTIVE.
    """
    EXPONENTS: tl.constexpr = KIND == "e2m1"
    HALVES: tl.constexpr = (KIND == "int4") | EXPONENTS
    BYTES: tl.constexpr = SPAN // 2 if HALVES else SPAN
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    out_ok = outputs < OUTPUTS
    row_ok = row < rows
    source = row
    if EXPERTS != "":
        chunk = chunks + tl.program_id(1) * 3
        expert = tl.load(chunk).to(tl.int64)
        count = tl.load(chunk + 2)
        if count == 0:
            return
        row_ok = tl.arange(0, BLOCK_M) < count
        row = tl.load(chunk + 1) + tl.arange(0, BLOCK_M)
        source = row
        if EXPERTS == "tokens":
            source = tl.load(places + row, mask=row_ok, other=0) // ACTIVE
        codes += expert * ((INPUTS + SPAN - 1) // SPAN * BYTES * OUTPUTS)
        scales += expert * (GROUPS * OUTPUTS)
        minima += expert * (GROUPS * OUTPUTS)
        factors += expert * OUTPUTS
        bias += expert * OUTPUTS
        order += expert * INPUTS
    x_row = x + source.to(tl.int64) * x_stride
    code_row = codes + outputs[:, None] * BYTES + tl.arange(0, BYTES)[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    SPANS: tl.constexpr = (INPUTS + SPAN - 1) // SPAN
    PAIRS: tl.constexpr = HALVES and GROUP < SPAN  # of scales: one for each half of a span
    if KIND != "float":
        stored, low = _stored(scales, minima, outputs, out_ok, MINIMA)
    if PAIRS:
        stored_high, low_high = _stored(scales, minima, outputs + OUTPUTS, out_ok, MINIMA)
    for span in range(SPANS):
        first = span * SPAN
        ahead_ok = out_ok & (span + 1 < SPANS)
        ahead = (first + SPAN) // GROUP * OUTPUTS + outputs
        if KIND != "float":
            next_stored, next_low = _stored(scales, minima, ahead, ahead_ok, MINIMA)
        if PAIRS:
            next_high, next_low_high = _stored(scales, minima, ahead + OUTPUTS, ahead_ok, MINIMA)
        read = tl.load(code_row, mask=out_ok[:, None], other=0)
        code_row += OUTPUTS * BYTES
        x_tile = _inputs(x_row, row_ok, order, first, INPUTS, SPAN, BYTES, ORDERED)
        if HALVES:
            sums = dot(_numbers(read & 15, KIND, ZERO, x_tile.dtype), x_tile, PRECISION)
            x_high = _inputs(x_row, row_ok, order, first + BYTES, INPUTS, SPAN, BYTES, ORDERED)
            high = dot(_numbers(read >> 4, KIND, ZERO, x_tile.dtype), x_high, PRECISION)
            x_sum = tl.sum(x_tile.to(tl.float32), 0)
            high_sum = tl.sum(x_high.to(tl.float32), 0)
            if PAIRS:
                acc = _scaled(acc, sums, x_sum, stored, low, MINIMA, EXPONENTS)
                acc = _scaled(acc, high, high_sum, stored_high, low_high, MINIMA, EXPONENTS)
                stored_high, low_high = next_high, next_low_high
            else:
                acc = _scaled(acc, sums + high, x_sum + high_sum, stored, low, MINIMA, EXPONENTS)
        elif KIND == "float":
            acc += dot(read, x_tile, PRECISION)
        else:
            sums = dot(_numbers(read, KIND, ZERO, x_tile.dtype), x_tile, PRECISION)
            x_sum = tl.sum(x_tile.to(tl.float32), 0)
            acc = _scaled(acc, sums, x_sum, stored, low, MINIMA, EXPONENTS)
        if KIND != "float":
            stored, low = next_stored, next_low
    if KIND == "e4m3":
        acc *= 256.0
    finish(acc, factors, bias, out, row, row_ok, outputs, out_ok, out_stride, FACTORS, BIAS)
