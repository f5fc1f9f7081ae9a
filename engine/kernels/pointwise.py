# mypy: ignore-errors
"""The kernels between matrix products: RMS norm with residual, rotary embedding with the KV write,
and the gated activation. Each reads its input once and writes its output once."""

import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(
    out, x, residual, weight, stride, residual_stride, eps,
    WIDTH: tl.constexpr, PAD: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """One row a program: residual += x, out = norm(residual) * weight."""
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
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / WIDTH + eps)
    gain = tl.load(weight + cols, mask=ok, other=0.0).to(tl.float32)
    result = (value * scale * gain).to(out.dtype.element_ty)
    tl.store(out + row * WIDTH + cols, result, mask=ok)


@triton.jit
def rotary_kernel(
    q_out, k_cache, v_cache, qkv, positions, slots, table, q_weight, k_weight,
    qkv_stride, kv_block, kv_token, kv_head_stride, eps,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr,
    HEADS: tl.constexpr, PAGE: tl.constexpr, NORM: tl.constexpr, ROTATE: tl.constexpr,
):  # fmt: skip
    """One program handles one token and HEADS of its heads. Queries are written packed, keys and
    values into the cache at the token's slot (block * PAGE + offset; negative: not written). Query
    and key heads may be normed first (Qwen3), and not be rotated (SmolLM3)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims = tl.arange(0, HALF_PAD)
    slot = tl.load(slots + token).to(tl.int64)
    ok = (head < Q_HEADS + 2 * KV_HEADS)[:, None] & (dims < HALF)[None, :]
    source = qkv + token * qkv_stride + head[:, None] * (2 * HALF) + dims[None, :]
    low = tl.load(source, mask=ok, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=ok, other=0.0).to(tl.float32)
    is_query = (head < Q_HEADS)[:, None]
    is_value = (head >= Q_HEADS + KV_HEADS)[:, None]
    if NORM:
        square = (tl.sum(low * low, 1) + tl.sum(high * high, 1)) / (2 * HALF)
        scale = (1.0 / tl.sqrt(square + eps))[:, None]
        dim_ok = dims < HALF
        q_low = tl.load(q_weight + dims, mask=dim_ok, other=0.0).to(tl.float32)[None, :]
        q_high = tl.load(q_weight + HALF + dims, mask=dim_ok, other=0.0).to(tl.float32)[None, :]
        k_low = tl.load(k_weight + dims, mask=dim_ok, other=0.0).to(tl.float32)[None, :]
        k_high = tl.load(k_weight + HALF + dims, mask=dim_ok, other=0.0).to(tl.float32)[None, :]
        gain_low = tl.where(is_query, q_low, k_low)
        gain_high = tl.where(is_query, q_high, k_high)
        low = tl.where(is_value, low, low * scale * gain_low)
        high = tl.where(is_value, high, high * scale * gain_high)
    if ROTATE:
        angle = table + tl.load(positions + token).to(tl.int64) * (2 * HALF) + dims
        cos = tl.load(angle, mask=dims < HALF, other=0.0)[None, :]
        sin = tl.load(angle + HALF, mask=dims < HALF, other=0.0)[None, :]
        new_low = tl.where(is_value, low, low * cos - high * sin)
        new_high = tl.where(is_value, high, high * cos + low * sin)
    else:
        new_low, new_high = low, high

    to_query = ok & is_query
    q_place = q_out + (token * Q_HEADS + head[:, None]) * (2 * HALF) + dims[None, :]
    tl.store(q_place, new_low.to(q_out.dtype.element_ty), mask=to_query)
    tl.store(q_place + HALF, new_high.to(q_out.dtype.element_ty), mask=to_query)
    if slot >= 0:
        cell = (slot // PAGE) * kv_block + (slot % PAGE) * kv_token
        kind = k_cache.dtype.element_ty
        to_key = ok & (head >= Q_HEADS)[:, None] & (head < Q_HEADS + KV_HEADS)[:, None]
        k_place = k_cache + cell + (head - Q_HEADS)[:, None] * kv_head_stride + dims[None, :]
        tl.store(k_place, new_low.to(kind), mask=to_key)
        tl.store(k_place + HALF, new_high.to(kind), mask=to_key)
        to_value = ok & is_value
        v_head = (head - Q_HEADS - KV_HEADS)[:, None]
        v_place = v_cache + cell + v_head * kv_head_stride + dims[None, :]
        tl.store(v_place, new_low.to(kind), mask=to_value)
        tl.store(v_place + HALF, new_high.to(kind), mask=to_value)


@triton.jit
def gated_kernel(
    out, gate_up, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr
):
    """out = act(gate) * up, where a row of `gate_up` is the gate followed by the up part."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = cols < WIDTH
    gate = tl.load(gate_up + row * stride + cols, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + WIDTH + cols, mask=ok, other=0.0).to(tl.float32)
    if GELU:  # the tanh form: x * sigmoid(2 u), u = sqrt(2/pi) (x + 0.044715 x^3)
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    else:
        inner = gate
    result = gate / (1.0 + tl.exp(tl.minimum(-inner, 80.0))) * up
    tl.store(out + row * WIDTH + cols, result.to(out.dtype.element_ty), mask=ok)
