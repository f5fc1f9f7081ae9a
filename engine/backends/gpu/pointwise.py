# mypy: ignore-errors
"""The kernels between matrix products: RMS norm with residual, rotary embedding with the KV write,
and the gated activation. Each reads its input once and writes its output once."""

import triton
import triton.language as tl

from engine.backends.gpu.kv_codes import encode, head_scale


@triton.jit
def rms_norm_kernel(
    out, x, residual, weight, bias, stride, residual_stride, eps,
    WIDTH: tl.constexpr, PAD: tl.constexpr, RESIDUAL: tl.constexpr, MEAN: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    """One row a program: residual += x, out = norm(residual) * weight. A layer norm subtracts the
    MEAN first, and may add a BIAS."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, PAD)
    ok = cols < WIDTH
    value = tl.load(x + row * stride + cols, mask=ok, other=0.0).to(tl.float32)
    if RESIDUAL:
        place = residual + row * residual_stride + cols
        value += tl.load(place, mask=ok, other=0.0).to(tl.float32)
        kept = value.to(residual.dtype.element_ty)
        tl.store(place, kept, mask=ok)
        value = kept.to(tl.float32)  # rounded like the stored residual
    if MEAN:
        value = tl.where(ok, value - tl.sum(value, 0) / WIDTH, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / WIDTH + eps)
    gain = tl.load(weight + cols, mask=ok, other=0.0).to(tl.float32)
    result = value * scale * gain
    if BIAS:
        result += tl.load(bias + cols, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + cols, result.to(out.dtype.element_ty), mask=ok)


@triton.jit
def rotary_kernel(
    q_out, cache, scales, qkv, positions, slots, table, q_weight, k_weight,
    qkv_stride, kv_block, kv_token, kv_head_stride, scale_block, scale_head, eps,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr,
    TURNED: tl.constexpr, NEIGHBOURS: tl.constexpr, HEADS: tl.constexpr, PAGE: tl.constexpr,
    NORM: tl.constexpr, MEAN: tl.constexpr, BY_HEAD: tl.constexpr, OF_VALUES: tl.constexpr,
    ROTATE: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """One program handles one token and HEADS of its heads. Queries are written packed, keys and
    values into the cache at the token's slot (block * PAGE + offset; negative: not written), as codes
    and their scales where KIND (of `kv_codes`) says so. Query and key heads may be normed first
    (Qwen3), less their MEAN and with weights BY_HEAD (Command R), and not be rotated (SmolLM3). Norms
    OF_VALUES have no weights (Gemma 3n). With 0 KV_HEADS there are queries alone.

    A head has HALF pairs of values. A pair is two NEIGHBOURS, or one value of each half; of the
    first TURNED pairs only, which then make the beginning of the head."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims = tl.arange(0, HALF_PAD)
    slot = tl.load(slots + token).to(tl.int64)
    ok = (head < Q_HEADS + 2 * KV_HEADS)[:, None] & (dims < HALF)[None, :]
    if NEIGHBOURS:
        low_at = 2 * dims
        high_at = low_at + 1
    elif TURNED == HALF:
        low_at = dims
        high_at = dims + HALF
    else:
        low_at = tl.where(dims < TURNED, dims, dims + TURNED)
        high_at = tl.where(dims < TURNED, dims + TURNED, dims + HALF)
    source = qkv + token * qkv_stride + head[:, None] * (2 * HALF)
    low = tl.load(source + low_at[None, :], mask=ok, other=0.0).to(tl.float32)
    high = tl.load(source + high_at[None, :], mask=ok, other=0.0).to(tl.float32)
    is_query = (head < Q_HEADS)[:, None]
    is_value = (head >= Q_HEADS + KV_HEADS)[:, None]
    if NORM:
        mean = 0.0
        if MEAN:
            mean = ((tl.sum(low, 1) + tl.sum(high, 1)) / (2 * HALF))[:, None]
        c_low = tl.where(ok, low - mean, 0.0)
        c_high = tl.where(ok, high - mean, 0.0)
        square = (tl.sum(c_low * c_low, 1) + tl.sum(c_high * c_high, 1)) / (2 * HALF)
        scale = (1.0 / tl.sqrt(square + eps))[:, None]
        q_gain = q_weight + low_at[None, :]
        k_gain = k_weight + low_at[None, :]
        q_ok = (dims < HALF)[None, :]
        k_ok = q_ok
        if BY_HEAD:
            q_gain += head[:, None] * (2 * HALF)
            k_gain += (head - Q_HEADS)[:, None] * (2 * HALF)
            q_ok = ok & is_query
            k_ok = ok & (is_query == 0) & (is_value == 0)
        step = (high_at - low_at)[None, :]
        q_low = tl.load(q_gain, mask=q_ok, other=0.0).to(tl.float32)
        q_high = tl.load(q_gain + step, mask=q_ok, other=0.0).to(tl.float32)
        k_low = tl.load(k_gain, mask=k_ok, other=0.0).to(tl.float32)
        k_high = tl.load(k_gain + step, mask=k_ok, other=0.0).to(tl.float32)
        gain_low = tl.where(is_query, q_low, k_low)
        gain_high = tl.where(is_query, q_high, k_high)
        if OF_VALUES:
            low = tl.where(is_value, c_low * scale, c_low * scale * gain_low)
            high = tl.where(is_value, c_high * scale, c_high * scale * gain_high)
        else:
            low = tl.where(is_value, low, c_low * scale * gain_low)
            high = tl.where(is_value, high, c_high * scale * gain_high)
    if ROTATE:
        angle = table + tl.load(positions + token).to(tl.int64) * (2 * HALF) + dims
        cos = tl.load(angle, mask=dims < HALF, other=0.0)[None, :]
        sin = tl.load(angle + HALF, mask=dims < HALF, other=0.0)[None, :]
        new_low = tl.where(is_value, low, low * cos - high * sin)
        new_high = tl.where(is_value, high, high * cos + low * sin)
    else:
        new_low, new_high = low, high

    to_query = ok & is_query
    q_place = q_out + (token * Q_HEADS + head[:, None]) * (2 * HALF)
    tl.store(q_place + low_at[None, :], new_low.to(q_out.dtype.element_ty), mask=to_query)
    tl.store(q_place + high_at[None, :], new_high.to(q_out.dtype.element_ty), mask=to_query)
    if slot >= 0:
        stored = (head - Q_HEADS)[:, None]  # key heads, then value heads
        to_cache = ok & (stored >= 0)
        page = slot // PAGE
        place = cache + page * kv_block + (slot % PAGE) * kv_token
        place += stored * kv_head_stride
        low_place = place + low_at[None, :]
        high_place = place + high_at[None, :]
        kind = cache.dtype.element_ty
        if KIND == 0:
            tl.store(low_place, new_low.to(kind), mask=to_cache)
            tl.store(high_place, new_high.to(kind), mask=to_cache)
        else:
            finite = (tl.abs(new_low) < float("inf")) & (tl.abs(new_high) < float("inf"))
            bad = tl.min((finite | (dims >= HALF)[None, :]).to(tl.int32), 1) == 0
            counted = ok & (bad == 0)[:, None]
            new_low = tl.where(counted, new_low, 0.0)
            new_high = tl.where(counted, new_high, 0.0)
            largest = tl.max(tl.maximum(tl.abs(new_low), tl.abs(new_high)), 1)
            of_heads = head_scale(largest, bad, KIND)
            inverse = tl.where(bad, 0.0, tl.math.div_rn(1.0, of_heads))[:, None]
            low_codes = new_low * inverse
            high_codes = new_high * inverse
            tl.store(low_place, encode(low_codes, KIND), mask=to_cache)
            tl.store(high_place, encode(high_codes, KIND), mask=to_cache)
            scale_at = scales + page * scale_block + slot % PAGE + (head - Q_HEADS) * scale_head
            is_stored = (head >= Q_HEADS) & (head < Q_HEADS + 2 * KV_HEADS)
            tl.store(scale_at, of_heads.to(tl.bfloat16), mask=is_stored)


@triton.jit
def gate_activation(gate, GELU: tl.constexpr):
    if GELU:  # the tanh form: x * sigmoid(2 u), u = sqrt(2/pi) (x + 0.044715 x^3)
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    else:
        inner = gate
    return gate / (1.0 + tl.exp(tl.minimum(-inner, 80.0)))


@triton.jit
def gated_kernel(
    out, gates, ups, stride, up_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr,
):  # fmt: skip
    """out = act(gate) * up, of rows of gates and of what they are multiplied with."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = cols < WIDTH
    gate = tl.load(gates + row * stride + cols, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(ups + row * up_stride + cols, mask=ok, other=0.0).to(tl.float32)
    result = gate_activation(gate, GELU) * up
    tl.store(out + row * WIDTH + cols, result.to(out.dtype.element_ty), mask=ok)


@triton.jit
def activated_kernel(x, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr):
    """x = act(x), of an MLP without a gate: "silu", "gelu" (by erf), or its tanh form."""
    place = x + tl.program_id(0).to(tl.int64) * stride
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = cols < WIDTH
    value = tl.load(place + cols, mask=ok, other=0.0).to(tl.float32)
    if ACTIVATION == "gelu":
        result = 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    else:
        inner = value
        if ACTIVATION == "gelu_tanh":
            inner = 1.5957691216057308 * (value + 0.044715 * value * value * value)
        result = value / (1.0 + tl.exp(tl.minimum(-inner, 80.0)))
    tl.store(place + cols, result.to(x.dtype.element_ty), mask=ok)
