# mypy: ignore-errors
"""The linear layer of a decoding step with few rows. It is bound by reading the weight, so it fuses
the RMS norm before it, the gate or the rotation after it, the residual sum and what adapters add, and
saves their launches."""

import triton
import triton.language as tl

from engine.backends.gpu.adapters.lora import share_of
from engine.backends.gpu.adapters.skinny_lora import expanded, shrink_part
from engine.backends.gpu.dot import dot
from engine.backends.gpu.overlap import prefetch, wait_for_last_launch


@triton.jit
def _rotate_and_store(
    out, low, high, number, row, row_ok, ok, out_stride,
    positions, slots, angles, cache, kv_block, kv_token, kv_head_stride,
    HALF: tl.constexpr, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Pairs of values (`low` and `high`, of the numbers `number`): queries and keys are rotated, queries
    go to `out`, keys and values to the cache, as `rotary_kernel` does."""
    head, dim = number // HALF, number % HALF
    position = tl.load(positions + row, mask=row_ok, other=0).to(tl.int64)
    angle = angles + position[:, None] * (2 * HALF) + dim[None, :]
    turned = ok & (head < Q_HEADS + KV_HEADS)[None, :]
    cos = tl.load(angle, mask=turned, other=1.0)
    sin = tl.load(angle + HALF, mask=turned, other=0.0)
    low, high = low * cos - high * sin, high * cos + low * sin
    kind = out.dtype.element_ty
    place = out + row.to(tl.int64)[:, None] * out_stride + (head * (2 * HALF) + dim)[None, :]
    query = ok & (head < Q_HEADS)[None, :]
    tl.store(place, low.to(kind), mask=query)
    tl.store(place + HALF, high.to(kind), mask=query)
    slot = tl.load(slots + row, mask=row_ok, other=-1).to(tl.int64)
    page = cache + (slot // PAGE * kv_block + slot % PAGE * kv_token)[:, None]
    place = page + ((head - Q_HEADS) * kv_head_stride + dim)[None, :]
    stored = ok & (slot >= 0)[:, None] & (head >= Q_HEADS)[None, :]
    tl.store(place, low.to(kind), mask=stored)
    tl.store(place + HALF, high.to(kind), mask=stored)


@triton.jit
def _keep_part(
    acc, partial, arrived, tile, part, row,
    PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Keeps the sum of one part of the inputs. Returns where the first part of the tile lies, and how
    many others were there before."""
    cell = partial + tile * (PARTS * BLOCK_M * BLOCK_N)
    cell += row[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    tl.store(cell + part * (BLOCK_M * BLOCK_N), acc)
    tl.debug_barrier()  # all threads have written before one of them says so
    return cell, tl.atomic_add(arrived + tile, 1)


@triton.jit(do_not_specialize=["rows", "count"])
def skinny_kernel(
    out, x, weight, bias, gain, rows, eps, x_stride, out_stride,
    mid, arena, order, chunks, chunk_of, table, ranks, spans, count, table_slot, table_side, ranks_slot,
    positions, slots, angles, cache, kv_block, kv_token, kv_head_stride, partial, arrived,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    NORM: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr, ADD: tl.constexpr,
    LORA: tl.constexpr, SPLITS: tl.constexpr, SLICES: tl.constexpr, RANKS: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_R: tl.constexpr, SHRINK_K: tl.constexpr,
    HALF: tl.constexpr, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, PAGE: tl.constexpr,
    PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program computes all rows and BLOCK_N outputs. GATE is "", "silu" or "gelu"; with a gate
    weight and bias hold the gate's rows followed by those of the up part. ADD sums into `out`.

    With NORM, inputs are scaled by `gain` and outputs by 1 / rms(x), which is known only at the
    end of the loop.

    LORA is "", "expand" (the `count` chunks of `mid` are added to the outputs) or "shrink" (`mid` is
    filled, by programs of their own before the others).

    HALF is half a head where outputs are queries, keys and values that are rotated and stored (0: they
    are not). A program then computes BLOCK_N pairs, which lie HALF apart.

    PARTS programs share the inputs of a tile, where nothing but ADD or `bias` comes after. The last of
    them adds the sums in the order of the inputs; `arrived` counts them, and is 0 between launches.
    """
    tile = tl.program_id(0)
    if LORA == "shrink":
        if tile < count * SPLITS:
            wait_for_last_launch(OVERLAP)
            shrink_part(
                mid, x, x, arena, order, chunks, table, ranks, tile,
                x_stride, table_slot, table_side, ranks_slot,
                INPUTS, SPLITS, SLICES, RANKS, False, BLOCK_R, SHRINK_K, PRECISION,
            )  # fmt: skip
            return
        tile -= count * SPLITS
    begin = 0
    end = INPUTS
    if PARTS > 1:
        part = tile % PARTS
        tile = tile // PARTS
        begin = part * share_of(INPUTS, PARTS, BLOCK_K)
        end = tl.minimum(begin + share_of(INPUTS, PARTS, BLOCK_K), INPUTS)
    TWO: tl.constexpr = GATE != "" or HALF > 0  # outputs of each column, APART rows of the weight
    APART: tl.constexpr = HALF if HALF > 0 else OUTPUTS
    number = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    out_ok = number < OUTPUTS
    outputs = number
    if HALF > 0:
        outputs = number // HALF * (2 * HALF) + number % HALF
    row = tl.arange(0, BLOCK_M)
    row_ok = row < rows
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    square = tl.zeros([BLOCK_M], dtype=tl.float32)
    x_row = x + row.to(tl.int64)[:, None] * x_stride
    w_row = weight + outputs.to(tl.int64)[None, :] * INPUTS
    if 4 * BLOCK_K * PARTS <= INPUTS and OUTPUTS % BLOCK_N == 0:
        prefetch(w_row + begin, 4 * BLOCK_K, OVERLAP)
        if TWO:
            prefetch(w_row + APART * INPUTS, 4 * BLOCK_K, OVERLAP)
    wait_for_last_launch(OVERLAP)
    for first in range(begin, end, BLOCK_K):
        inputs = first + tl.arange(0, BLOCK_K)
        if INPUTS % BLOCK_K == 0:
            x_mask = row_ok[:, None]
            w_mask = out_ok[None, :]
        else:
            x_mask = row_ok[:, None] & (inputs < INPUTS)[None, :]
            w_mask = out_ok[None, :] & (inputs < INPUTS)[:, None]
        x_tile = tl.load(x_row + inputs[None, :], mask=x_mask, other=0.0)
        if NORM:
            wide = x_tile.to(tl.float32)
            square += tl.sum(wide * wide, 1)
            scale = tl.load(gain + inputs, mask=inputs < INPUTS, other=0.0).to(tl.float32)
            x_tile = (wide * scale[None, :]).to(weight.dtype.element_ty)
        w_tile = tl.load(w_row + inputs[:, None], mask=w_mask, other=0.0)
        acc += dot(x_tile, w_tile, PRECISION)
        if TWO:
            up_row = w_row + APART * INPUTS
            up_tile = tl.load(up_row + inputs[:, None], mask=w_mask, other=0.0)
            up += dot(x_tile, up_tile, PRECISION)
    if PARTS > 1:
        cell, before = _keep_part(acc, partial, arrived, tile, part, row, PARTS, BLOCK_M, BLOCK_N)
        if before < PARTS - 1:
            return
        acc = tl.load(cell, cache_modifier=".cg")
        for each in tl.static_range(1, PARTS):
            acc += tl.load(cell + each * (BLOCK_M * BLOCK_N), cache_modifier=".cg")
        tl.store(arrived + tile, 0)
    rms = tl.full([BLOCK_M, 1], 1.0, dtype=tl.float32)
    if NORM:
        rms = (1.0 / tl.sqrt(square / INPUTS + eps))[:, None]
        acc *= rms
        up *= rms
    if BIAS:
        acc += tl.load(bias + outputs, mask=out_ok, other=0.0).to(tl.float32)[None, :]
        if TWO:
            up_bias = tl.load(bias + APART + outputs, mask=out_ok, other=0.0)
            up += up_bias.to(tl.float32)[None, :]
    if LORA == "expand":
        acc += expanded(
            mid, arena, chunks, chunk_of, table, ranks, spans, outputs, out_ok, rms, rows, count,
            table_slot, table_side, ranks_slot, SPLITS, SLICES, RANKS, GROUP, BLOCK_N, PRECISION,
        )  # fmt: skip
        if TWO:
            up += expanded(
                mid, arena, chunks, chunk_of, table, ranks, spans, APART + outputs, out_ok, rms,
                rows, count, table_slot, table_side, ranks_slot, SPLITS, SLICES, RANKS, GROUP, BLOCK_N,
                PRECISION,
            )  # fmt: skip
    if GATE != "":
        inner = acc
        if GATE == "gelu":  # the tanh form, as in `gated_kernel`
            inner = 1.5957691216057308 * (acc + 0.044715 * acc * acc * acc)
        acc = acc / (1.0 + tl.exp(tl.minimum(-inner, 80.0))) * up
    ok = row_ok[:, None] & out_ok[None, :]
    if HALF > 0:
        _rotate_and_store(
            out, acc, up, number, row, row_ok, ok, out_stride,
            positions, slots, angles, cache, kv_block, kv_token, kv_head_stride,
            HALF, Q_HEADS, KV_HEADS, PAGE,
        )  # fmt: skip
    else:
        place = out + row.to(tl.int64)[:, None] * out_stride + outputs[None, :]
        if ADD:
            acc += tl.load(place, mask=ok, other=0.0).to(tl.float32)
        tl.store(place, acc.to(out.dtype.element_ty), mask=ok)
