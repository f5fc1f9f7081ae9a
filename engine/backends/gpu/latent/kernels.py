# mypy: ignore-errors
"""What latent attention computes besides its products: the rotation of queries with the norm and the
storing of keys, and adapters of the projection that both sides have absorbed."""

import triton
import triton.language as tl

from engine.backends.gpu.adapters.lora import rank_rows
from engine.backends.gpu.dot import dot
from engine.backends.gpu.kv_codes import encode, head_scale


@triton.jit
def place_latent_kernel(
    q_out, cache, scales, q, keys, weight, positions, slots, table,
    q_token, keys_token, out_token, kv_block, kv_token, scale_block, eps,
    HEADS: tl.constexpr, PLAIN: tl.constexpr, LATENT: tl.constexpr, LATENT_PAD: tl.constexpr,
    HALF: tl.constexpr, HALF_PAD: tl.constexpr, BLOCK_H: tl.constexpr, PAGE: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """One program handles one token. The rotated part of its query heads, which follows their PLAIN one,
    is rotated and written behind the absorbed one. Of its key, the latent vector is normed and the part
    behind it rotated, by HALF pairs of neighbours; both go into the cache at the token's slot (negative:
    not written), as codes with one scale where KIND (of `kv_codes`) says so."""
    token = tl.program_id(0).to(tl.int64)
    pairs = tl.arange(0, HALF_PAD)
    pair_ok = pairs < HALF
    angle = table + tl.load(positions + token).to(tl.int64) * (2 * HALF) + pairs
    cos = tl.load(angle, mask=pair_ok, other=0.0)
    sin = tl.load(angle + HALF, mask=pair_ok, other=0.0)
    for first in range(0, HEADS, BLOCK_H):
        heads = first + tl.arange(0, BLOCK_H)
        ok = (heads < HEADS)[:, None] & pair_ok[None, :]
        source = (
            q + token * q_token + heads[:, None] * (PLAIN + 2 * HALF) + PLAIN + 2 * pairs[None, :]
        )
        low = tl.load(source, mask=ok, other=0.0).to(tl.float32)
        high = tl.load(source + 1, mask=ok, other=0.0).to(tl.float32)
        place = q_out + token * out_token + heads[:, None] * (LATENT + 2 * HALF) + LATENT
        place += 2 * pairs[None, :]
        kind = q_out.dtype.element_ty
        tl.store(place, (low * cos[None, :] - high * sin[None, :]).to(kind), mask=ok)
        tl.store(place + 1, (high * cos[None, :] + low * sin[None, :]).to(kind), mask=ok)
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    dims = tl.arange(0, LATENT_PAD)
    dim_ok = dims < LATENT
    row = keys + token * keys_token
    value = tl.load(row + dims, mask=dim_ok, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / LATENT + eps)
    value = value * scale * tl.load(weight + dims, mask=dim_ok, other=0.0).to(tl.float32)
    low = tl.load(row + LATENT + 2 * pairs, mask=pair_ok, other=0.0).to(tl.float32)
    high = tl.load(row + LATENT + 2 * pairs + 1, mask=pair_ok, other=0.0).to(tl.float32)
    new_low = low * cos - high * sin
    new_high = high * cos + low * sin
    stored = cache + slot // PAGE * kv_block + slot % PAGE * kv_token
    behind = stored + LATENT + 2 * pairs
    kind = cache.dtype.element_ty
    if KIND == 0:
        tl.store(stored + dims, value.to(kind), mask=dim_ok)
        tl.store(behind, new_low.to(kind), mask=pair_ok)
        tl.store(behind + 1, new_high.to(kind), mask=pair_ok)
    else:
        turned = tl.maximum(tl.abs(new_low), tl.abs(new_high))
        finite = (tl.abs(new_low) < float("inf")) & (tl.abs(new_high) < float("inf"))
        good = tl.min((tl.abs(value) < float("inf")).to(tl.int32), 0)
        bad = good * tl.min(finite.to(tl.int32), 0) == 0
        value = tl.where(bad, 0.0, value)
        new_low = tl.where(bad, 0.0, new_low)
        new_high = tl.where(bad, 0.0, new_high)
        largest = tl.maximum(tl.max(tl.abs(value), 0), tl.max(tl.where(bad, 0.0, turned), 0))
        of_head = head_scale(largest, bad, KIND)
        inverse = tl.where(bad, 0.0, tl.math.div_rn(1.0, of_head))
        tl.store(stored + dims, encode(value * inverse, KIND), mask=dim_ok)
        tl.store(behind, encode(new_low * inverse, KIND), mask=pair_ok)
        tl.store(behind + 1, encode(new_high * inverse, KIND), mask=pair_ok)
        tl.store(scales + slot // PAGE * scale_block + slot % PAGE, of_head.to(tl.bfloat16))


@triton.jit
def by_head_kernel(
    y, x, arena, order, chunks, inner, outer, ranks,
    y_token, y_head, x_token, x_head, table_slot, ranks_slot,
    inner_first, inner_head, outer_first, outer_head,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """y[token, head] += (x[token, head] F^T) G, whose rank rows are those of an adapter's table: of F
    from `inner_first` and of G from `outer_first` on, and further on for each head. One program a chunk
    of rows with one adapter, and a head."""
    head = tl.program_id(1).to(tl.int64)
    chunk = chunks + tl.program_id(0) * 3
    slot = tl.load(chunk).to(tl.int64)
    count = tl.load(chunk + 2)
    rank = tl.load(ranks + slot * ranks_slot, mask=count > 0, other=0)
    rows = tl.arange(0, BLOCK_M)
    row_ok = rows < count
    tokens = tl.load(order + tl.load(chunk + 1) + rows, mask=row_ok, other=0).to(tl.int64)
    x_row = x + tokens[:, None] * x_token + head * x_head
    y_row = y + tokens[:, None] * y_token + head * y_head
    for tile in range(0, rank, BLOCK_R):
        each = tile + tl.arange(0, BLOCK_R)
        rank_ok = each < rank
        f_rows = (
            arena
            + rank_rows(inner + slot * table_slot, each, rank)
            + inner_first
            + head * inner_head
        )
        low = tl.zeros([BLOCK_M, BLOCK_R], dtype=tl.float32)
        for first in range(0, INPUTS, BLOCK_K):
            inputs = first + tl.arange(0, BLOCK_K)
            ok = inputs < INPUTS
            x_tile = tl.load(x_row + inputs[None, :], mask=row_ok[:, None] & ok[None, :], other=0.0)
            f_mask = ok[:, None] & rank_ok[None, :]
            f_tile = tl.load(f_rows[None, :] + inputs[:, None], mask=f_mask, other=0.0)
            low += dot(x_tile, f_tile, PRECISION)
        g_rows = (
            arena
            + rank_rows(outer + slot * table_slot, each, rank)
            + outer_first
            + head * outer_head
        )
        for first in range(0, OUTPUTS, BLOCK_N):
            outputs = first + tl.arange(0, BLOCK_N)
            ok = outputs < OUTPUTS
            g_mask = rank_ok[:, None] & ok[None, :]
            g_tile = tl.load(g_rows[:, None] + outputs[None, :], mask=g_mask, other=0.0)
            gain = dot(low.to(g_tile.dtype), g_tile, PRECISION)
            target = y_row + outputs[None, :]
            mask = row_ok[:, None] & ok[None, :]
            before = tl.load(target, mask=mask, other=0.0).to(tl.float32)
            tl.store(target, (before + gain).to(y.dtype.element_ty), mask=mask)
