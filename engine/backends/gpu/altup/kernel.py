# mypy: ignore-errors
"""What stands between the products of a layer with several residual streams (`layers/streams.py`). A
program
has one row of the step; streams are [rows, STREAMS, WIDTH], and everything else [rows, WIDTH]."""

import triton
import triton.language as tl

from engine.backends.gpu.pointwise import gate_activation


@triton.jit
def _row(place, cols, ok):
    return tl.load(place + cols, mask=ok, other=0.0).to(tl.float32)


@triton.jit
def _normed(value, weight, cols, ok, eps, WIDTH: tl.constexpr):
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / WIDTH + eps)
    return value * scale * _row(weight, cols, ok)


@triton.jit
def _modes(value, weight, router, cols, ok, each, eps, WIDTH: tl.constexpr, STREAMS: tl.constexpr):
    """[streams], within 1: what the router makes of a row."""
    normed = _normed(value, weight, cols, ok, eps, WIDTH) / WIDTH
    place = router + each[:, None] * WIDTH + cols[None, :]
    matrix = tl.load(place, mask=(each < STREAMS)[:, None] & ok[None, :], other=0.0).to(tl.float32)
    routed = tl.sum(matrix * normed[None, :], 1)
    return 1.0 - 2.0 / (1.0 + tl.exp(tl.minimum(2.0 * routed, 80.0)))


@triton.jit
def _shares(matrix, modes, rows, each, STREAMS: tl.constexpr):
    """These rows of a matrix [any, STREAMS] times the modes, one for each stream."""
    place = matrix + rows[:, None] * STREAMS + each[None, :]
    ok = (each < STREAMS)[:, None] & (each < STREAMS)[None, :]
    return tl.sum(tl.load(place, mask=ok, other=0.0).to(tl.float32) * modes[None, :], 1)


@triton.jit
def predict_kernel(
    out, normed, x, added, added_weight, router_weight, router, prediction, weight, eps,
    WIDTH: tl.constexpr, PAD: tl.constexpr, STREAMS: tl.constexpr, STREAMS_PAD: tl.constexpr,
    ACTIVE: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """out = each stream and the sum of all in shares by the active one, whose norm is `normed`. With
    ADDED, norm(added) comes to all streams but the first before."""
    row = tl.program_id(0).to(tl.int64)
    cols, each = tl.arange(0, PAD), tl.arange(0, STREAMS_PAD)
    ok = cols < WIDTH
    begin = x + row * STREAMS * WIDTH
    kind = x.dtype.element_ty
    plus = tl.zeros([PAD], dtype=tl.float32)
    if ADDED:
        plus = _normed(_row(added + row * WIDTH, cols, ok), added_weight, cols, ok, eps, WIDTH)
    active = _row(begin + ACTIVE * WIDTH, cols, ok)
    if ACTIVE > 0:
        active = (active + plus).to(kind).to(tl.float32)
    modes = _modes(active, router_weight, router, cols, ok, each, eps, WIDTH, STREAMS)
    places = each[:, None] * WIDTH + cols[None, :]
    tile_ok = (each < STREAMS)[:, None] & ok[None, :]
    total = tl.load(begin + places, mask=tile_ok, other=0.0).to(tl.float32)
    total = (total + tl.where(each > 0, 1.0, 0.0)[:, None] * plus[None, :]).to(kind).to(tl.float32)
    for other in tl.static_range(STREAMS):
        value = _row(begin + other * WIDTH, cols, ok)
        if other > 0:
            value = (value + plus).to(kind).to(tl.float32)
        share = _shares(prediction, modes, each * STREAMS + other, each, STREAMS)
        total += share[:, None] * value[None, :]
    kept = total.to(kind)
    tl.store(out + row * STREAMS * WIDTH + places, kept, mask=tile_ok)
    active = tl.sum(tl.where((each == ACTIVE)[:, None], kept.to(tl.float32), 0.0), 0)
    result = _normed(active, weight, cols, ok, eps, WIDTH)
    tl.store(normed + row * WIDTH + cols, result.to(kind), mask=ok)


@triton.jit
def join_kernel(
    out, normed, product, product_weight, active, x, beside, beside_weight, weight, stride, eps,
    WIDTH: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """out = (active + norm(product) + x + norm(beside)) / sqrt(2), and its norm. `active` has a stride
    of its own: it is one of the streams."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, PAD)
    ok = cols < WIDTH
    at = row * WIDTH
    kind = out.dtype.element_ty
    attended = _normed(_row(product + at, cols, ok), product_weight, cols, ok, eps, WIDTH)
    attended += _row(active + row * stride, cols, ok)
    of_low_rank = _normed(_row(beside + at, cols, ok), beside_weight, cols, ok, eps, WIDTH)
    of_low_rank += _row(x + at, cols, ok)
    joined = ((attended + of_low_rank) * 0.7071067811865476).to(kind)
    tl.store(out + at + cols, joined, mask=ok)
    result = _normed(joined.to(tl.float32), weight, cols, ok, eps, WIDTH)
    tl.store(normed + at + cols, result.to(kind), mask=ok)


@triton.jit
def correct_kernel(
    out, active_out, product, product_weight, joined, predicted, router_weight, router, correction,
    scale, eps,
    WIDTH: tl.constexpr, PAD: tl.constexpr, STREAMS: tl.constexpr, STREAMS_PAD: tl.constexpr,
    ACTIVE: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """out = each predicted stream and its share of what the layer changed: joined + norm(product) less
    the prediction of the active one. `active_out` is that stream, times `scale` if SCALED."""
    row = tl.program_id(0).to(tl.int64)
    cols, each = tl.arange(0, PAD), tl.arange(0, STREAMS_PAD)
    ok = cols < WIDTH
    at = row * WIDTH
    kind = out.dtype.element_ty
    computed = _normed(_row(product + at, cols, ok), product_weight, cols, ok, eps, WIDTH)
    computed = (computed + _row(joined + at, cols, ok)).to(kind).to(tl.float32)
    modes = _modes(computed, router_weight, router, cols, ok, each, eps, WIDTH, STREAMS)
    share = _shares(correction, modes, each, each, STREAMS) + 1.0
    places = row * STREAMS * WIDTH + each[:, None] * WIDTH + cols[None, :]
    tile_ok = (each < STREAMS)[:, None] & ok[None, :]
    streams = tl.load(predicted + places, mask=tile_ok, other=0.0).to(tl.float32)
    is_active = (each == ACTIVE)[:, None]
    change = computed - tl.sum(tl.where(is_active, streams, 0.0), 0)
    kept = (streams + share[:, None] * change[None, :]).to(kind)
    tl.store(out + places, kept, mask=tile_ok)
    active = tl.sum(tl.where(is_active, kept.to(tl.float32), 0.0), 0)
    if SCALED:
        active *= _row(scale, cols, ok)
    tl.store(active_out + at + cols, active.to(kind), mask=ok)


@triton.jit(do_not_specialize=["rows"])
def lengthen_kernel(
    out, first, others, stride, rows,
    WIDTH: tl.constexpr, PAD: tl.constexpr, STREAMS: tl.constexpr, LEAST: tl.constexpr,
    MEAN: tl.constexpr,
):  # fmt: skip
    """`others` [STREAMS - 1, rows, WIDTH] at the length of `first`: as streams behind it, or the MEAN of
    all. A mean square below LEAST counts as that."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, PAD)
    ok = cols < WIDTH
    kind = out.dtype.element_ty
    begin = out + row * (WIDTH if MEAN else STREAMS * WIDTH) + cols
    total = _row(first + row * stride, cols, ok)
    square = tl.sum(total * total, 0)
    if not MEAN:
        tl.store(begin, total.to(kind), mask=ok)
    for other in tl.static_range(1, STREAMS):
        value = _row(others + ((other - 1) * rows + row) * WIDTH, cols, ok)
        own = tl.maximum(tl.sum(value * value, 0), LEAST * WIDTH)
        value *= tl.sqrt(square / own)
        if MEAN:
            total += value
        else:
            tl.store(begin + other * WIDTH, value.to(kind), mask=ok)
    if MEAN:
        tl.store(begin, (total / STREAMS).to(kind), mask=ok)


@triton.jit
def sparse_gated_kernel(
    out, gate_up, stride, cutoff, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr
):
    """As `gated_kernel`, of gates less their row's mean and `cutoff` standard deviations, or 0 where
    that is negative. One program a row."""
    row = tl.program_id(0).to(tl.int64)
    begin = gate_up + row * stride
    block = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for first in range(0, WIDTH, BLOCK):
        ok = first + block < WIDTH
        total += _row(begin, first + block, ok)
    mean = tl.sum(total, 0) / WIDTH
    square = tl.zeros([BLOCK], dtype=tl.float32)
    for first in range(0, WIDTH, BLOCK):
        ok = first + block < WIDTH
        apart = _row(begin, first + block, ok) - mean
        square += tl.where(ok, apart * apart, 0.0)
    least = mean + cutoff * tl.sqrt(tl.sum(square, 0) / WIDTH)
    for first in range(0, WIDTH, BLOCK):
        cols = first + block
        ok = cols < WIDTH
        gate = _row(begin, cols, ok)
        up = _row(begin + WIDTH, cols, ok)
        result = gate_activation(tl.maximum(gate - least, 0.0), GELU) * up
        tl.store(out + row * WIDTH + cols, result.to(out.dtype.element_ty), mask=ok)
