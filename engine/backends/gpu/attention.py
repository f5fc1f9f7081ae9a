# mypy: ignore-errors
"""Paged attention for prefill, decode and mixed steps: one Triton kernel and its split-KV reduce.

A program computes a block of query rows of one sequence for one KV head; its rows are (query, head
of the group), so that every K and V tile is read once for the whole group. It finds its sequence
by a binary search in `cu_q`, so the host never reads a length.
"""

import triton
import triton.language as tl

from engine.backends.gpu.dot import dot
from engine.backends.gpu.kv_codes import widen
from engine.backends.gpu.overlap import wait_for_last_launch

LOG2E = tl.constexpr(1.4426950408889634)
LEAST = tl.constexpr(128)  # keys in a split: with fewer, what a split keeps outweighs what it reads


@triton.jit
def _sequence_of(block, cu_q, num_seqs, BLOCK_Q: tl.constexpr):
    """The last sequence whose first query block is at or before `block`."""
    base = tl.load(cu_q)
    low = 0
    high = num_seqs
    while low < high:
        middle = (low + high) // 2
        first = (tl.load(cu_q + middle) - base) // BLOCK_Q + middle
        if first <= block:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def _split_keys(keys, splits, TILE: tl.constexpr):
    """The keys in a split of so many, a multiple of the tile. The length of the sequence alone decides
    how many of the splits are used, also in a graph that was recorded for any length."""
    even = tl.cdiv(tl.cdiv(keys, TILE), splits)
    return tl.maximum(even, (LEAST + TILE - 1) // TILE) * TILE


@triton.jit
def _bfloat16(x):
    """Rounded to what bfloat16 holds, half to even, in float32."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _columns(place, key_ok, dim_ok, MASKED: tl.constexpr, WHOLE: tl.constexpr):
    """[keys, values] at `place`; WHOLE: every one of a row's values is there."""
    if MASKED:
        tile = tl.load(place, mask=dim_ok[None, :] & key_ok[:, None], other=0)
    elif WHOLE:
        tile = tl.load(place)
    else:
        tile = tl.load(place, mask=dim_ok[None, :], other=0)
    return tile


@triton.jit
def _attend(
    acc, peak, total, q, q_turned, k_base, v_base, k_scales, v_scales, table,
    slope, position, low, reach, begin, end, scale, stride_block, stride_token, scale_block,
    HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, FIRST: tl.constexpr, SOFTCAP: tl.constexpr, KIND: tl.constexpr,
    ALIBI: tl.constexpr, ROTATED: tl.constexpr, ROTATED_PAD: tl.constexpr,
    PRECISION: tl.constexpr, MASKED: tl.constexpr, APART: tl.constexpr = 0,
):  # fmt: skip
    """Online softmax over the keys [begin, end); unmasked tiles must be visible to every row. Keys
    before `low` are not read: their blocks may belong to another sequence by now. `KIND` is one of
    `kv_codes`; scales are read with codes alone. `slope` is read with ALIBI alone: 1 is for biases by
    the distance of a key, 2 for those of Falcon, by its position and rounded to bfloat16. With a WINDOW a
    query sees `reach` keys. With blocks APART, `table` has so many, then their numbers in the sequence.

    With ROTATED values a key is a latent vector and so many values behind it, and the latent vector is
    its value too, which is read once for both."""
    dims = tl.arange(0, HEAD_PAD)
    dim_ok = dims < HEAD_DIM
    for start in range(begin, end, TILE):
        keys = start + tl.arange(0, TILE)
        key_ok = (keys < end) & (keys >= low)
        if MASKED:
            blocks = tl.load(table + keys // PAGE, mask=key_ok, other=0)
        else:
            blocks = tl.load(table + keys // PAGE)
        at = blocks.to(tl.int64) * stride_block + (keys % PAGE) * stride_token
        k_ptr = k_base + at[None, :] + dims[:, None]
        v_ptr = v_base + at[:, None] + dims[None, :]
        if ROTATED > 0:
            turns = tl.arange(0, ROTATED_PAD)
            v = _columns(v_ptr, key_ok, dim_ok, MASKED, HEAD_DIM == HEAD_PAD)
            turned_ptr = k_base + at[:, None] + HEAD_DIM + turns[None, :]
            turned = _columns(turned_ptr, key_ok, turns < ROTATED, MASKED, ROTATED == ROTATED_PAD)
        elif MASKED:
            k = tl.load(k_ptr, mask=dim_ok[:, None] & key_ok[None, :], other=0)
            v = tl.load(v_ptr, mask=dim_ok[None, :] & key_ok[:, None], other=0)
        elif HEAD_DIM != HEAD_PAD:
            k = tl.load(k_ptr, mask=dim_ok[:, None], other=0)
            v = tl.load(v_ptr, mask=dim_ok[None, :], other=0)
        else:
            k = tl.load(k_ptr)
            v = tl.load(v_ptr)
        if KIND != 0:
            scale_at = blocks.to(tl.int64) * scale_block + keys % PAGE
            if ROTATED > 0:
                v_scale = tl.load(v_scales + scale_at, mask=key_ok, other=0.0)
                turned = widen(turned, v_scale.to(tl.float32)[:, None], q.dtype, KIND)
            elif MASKED:
                k_scale = tl.load(k_scales + scale_at, mask=key_ok, other=0.0)
                v_scale = tl.load(v_scales + scale_at, mask=key_ok, other=0.0)
            else:
                k_scale = tl.load(k_scales + scale_at)
                v_scale = tl.load(v_scales + scale_at)
            if ROTATED == 0:
                k = widen(k, k_scale.to(tl.float32)[None, :], q.dtype, KIND)
            v = widen(v, v_scale.to(tl.float32)[:, None], q.dtype, KIND)
        if ROTATED > 0:
            score = dot(q, tl.trans(v), PRECISION) + dot(q_turned, tl.trans(turned), PRECISION)
            score *= scale
        else:
            score = dot(q, k, PRECISION) * scale
        if SOFTCAP > 0:  # tanh by exp; `scale` does not include log2(e) yet
            steep = tl.exp(tl.minimum(-2.0 * score / SOFTCAP, 80.0))
            score = SOFTCAP * (2.0 / (1.0 + steep) - 1.0) * LOG2E
        if ALIBI != 0:
            places = keys
            if APART > 0:
                number = tl.load(table + APART + keys // PAGE, mask=key_ok, other=0)
                places = number * PAGE + keys % PAGE
        if ALIBI == 1:
            score += slope[:, None] * (places[None, :] - position[:, None]).to(tl.float32)
        elif ALIBI == 2:
            bias = _bfloat16(slope[:, None] * _bfloat16(places.to(tl.float32))[None, :])
            score += bias * (scale * LOG2E if SOFTCAP > 0 else scale)
        if MASKED:
            seen = key_ok[None, :] & (keys[None, :] <= position[:, None])
            if WINDOW > 0:
                recent = keys[None, :] > position[:, None] - reach
                seen = seen & (recent | (keys < FIRST)[None, :] if FIRST > 0 else recent)
            score = tl.where(seen, score, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(score, 1))
        shift = new_peak
        if MASKED:  # a row may have seen no key so far: -inf minus -inf is not a number
            shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weight = tl.exp2(score - shift[:, None])
        fade = tl.exp2(peak - shift)
        total = total * fade + tl.sum(weight, 1)
        acc = acc * fade[:, None] + dot(weight.to(v.dtype), v, PRECISION)
        peak = new_peak
    return acc, peak, total


@triton.jit
def _answers(tables, table_rows, seq, table_stride, position, HEAVY: tl.constexpr):
    """Whether a query at this position sees the WINDOW, the FIRST keys and some blocks alone, which the
    sequence's table has from column HEAVY on; prompts see all."""
    row = tables + tl.load(table_rows + seq).to(tl.int64) * table_stride
    return position >= tl.load(row + HEAVY)


@triton.jit(
    do_not_specialize=["num_seqs"],
    do_not_specialize_on_alignment=["table_rows", "seq_lens", "cu_q"],
)
def attention_kernel(
    out, part_acc, part_peak, part_total, q, k_cache, v_cache, k_scales, v_scales,
    tables, table_rows, seq_lens, cu_q, mix,
    sinks, slopes, scale, num_seqs,
    q_token, q_head, o_token, o_head, kv_block, kv_token, kv_head_stride, scale_block, scale_head,
    table_stride,
    HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_Q: tl.constexpr, ONE_QUERY: tl.constexpr,
    TILE: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, FIRST: tl.constexpr,
    SOFTCAP: tl.constexpr, SPLITS: tl.constexpr, KIND: tl.constexpr, SINKS: tl.constexpr,
    ALIBI: tl.constexpr, ROTATED: tl.constexpr, ROTATED_PAD: tl.constexpr, HEAVY: tl.constexpr,
    MOST_HEAVY: tl.constexpr, PRECISION: tl.constexpr, MIXED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """With SINKS each query head has a score that belongs to no key: the first split counts it. So it
    does the FIRST keys, which are seen in addition to the WINDOW, as far as they lie before its tiles.

    With ROTATED values, `kv_head` is a part of the query heads, which all read the same keys; HEAD_DIM is
    the size of a value, behind which a query and a key have their rotated part.

    With HEAVY, a column of the table, answers see the WINDOW, the FIRST keys and blocks apart. There are
    an answer's first position, how many blocks, and MOST_HEAVY cells each for these and their numbers.

    MIXED is for graphs of steps with prompt chunks: `mix` says how many sequences decode, how many there
    are, and the splits of the former's keys, at most SPLITS. Programs beyond these end at once."""
    wait_for_last_launch(OVERLAP)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    if MIXED:
        decodes = tl.load(mix)
        splits = tl.load(mix + 2)
    if ONE_QUERY:
        seq = tl.program_id(0)
        first = 0
        if MIXED:
            split = seq % splits
            seq = seq // splits
            if seq >= decodes:
                return
    else:  # the last blocks of a long prompt have the most keys: they start first
        if MIXED:
            table_rows += decodes
            seq_lens += decodes
            cu_q += decodes
            num_seqs = tl.load(mix + 1) - decodes
            if num_seqs <= 0:
                return
        block = tl.num_programs(0) - 1 - tl.program_id(0)
        seq = _sequence_of(block, cu_q, num_seqs, BLOCK_Q)
        first = (block - ((tl.load(cu_q + seq) - tl.load(cu_q)) // BLOCK_Q + seq)) * BLOCK_Q
    q_begin = tl.load(cu_q + seq)
    q_len = tl.load(cu_q + seq + 1) - q_begin
    kv_len = tl.load(seq_lens + seq)
    if ONE_QUERY:  # a graph's padding has no query: it has no keys and its output is zeros
        kv_len *= q_len
        q_begin = seq
    elif first >= q_len:
        return
    context = kv_len - q_len

    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, HEAD_PAD)
    query = first + rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    row_ok = rows < BLOCK_Q * GROUP
    if not ONE_QUERY:
        row_ok = row_ok & (query < q_len)
    tile_ok = row_ok[:, None] & (dims < HEAD_DIM)[None, :]
    token = (q_begin + query).to(tl.int64)
    q_ptr = q + token[:, None] * q_token + head[:, None] * q_head + dims[None, :]
    q_tile = tl.load(q_ptr, mask=tile_ok, other=0.0)
    q_turned = q_tile
    if ROTATED > 0:
        turns = tl.arange(0, ROTATED_PAD)
        turned_ptr = (
            q + token[:, None] * q_token + head[:, None] * q_head + HEAD_DIM + turns[None, :]
        )
        q_turned = tl.load(turned_ptr, mask=row_ok[:, None] & (turns < ROTATED)[None, :], other=0.0)
    # Rows without a query see the same keys as the block's last one; they are never stored.
    position = context + tl.minimum(query, q_len - 1)

    end = context + tl.minimum(first + BLOCK_Q, q_len)
    begin = 0
    low = 0
    reach = WINDOW
    if WINDOW > 0:
        low = tl.maximum(context + first + 1 - WINDOW, 0)
        if HEAVY > 0:
            answers = _answers(tables, table_rows, seq, table_stride, context, HEAVY)
            low = tl.where(answers, low, 0)
            reach = tl.where(answers, WINDOW, end)
        begin = low // TILE * TILE
    used = 1
    if SPLITS > 1:
        per_split = _split_keys(end - begin, splits if MIXED else SPLITS, TILE)
        used = tl.cdiv(end - begin, per_split)
        begin += split * per_split
        if (split > 0) & (begin >= end):
            return
        end = tl.minimum(end, begin + per_split)
    plain_end = begin
    # Tiles that the block's first query sees in full need no mask. With HEAVY and latent vectors, a loop
    # for these would spill registers.
    PLAIN: tl.constexpr = WINDOW == 0 or (HEAVY > 0 and not ONE_QUERY and ROTATED == 0)
    if PLAIN:
        plain_end = tl.maximum(tl.minimum(end, (context + first + 1) // TILE * TILE), begin)
        if HEAVY > 0:
            plain_end = tl.where(answers, begin, plain_end)

    acc = tl.zeros([BLOCK_M, HEAD_PAD], dtype=tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        peak = tl.where(split == 0, sink, peak)
        total = tl.where(split == 0, 1.0, total)
    slope = peak
    if ALIBI != 0:
        slope = tl.load(slopes + head) * (LOG2E if ALIBI == 1 else 1.0)
    k_base = k_cache + kv_head * kv_head_stride
    v_base = v_cache + kv_head * kv_head_stride
    k_scales += kv_head * scale_head
    v_scales += kv_head * scale_head
    table = tables + tl.load(table_rows + seq).to(tl.int64) * table_stride
    if SOFTCAP == 0:
        scale = scale * LOG2E
    if FIRST > 0:
        lead = tl.where(split == 0, tl.minimum(low, FIRST), 0)
        acc, peak, total = _attend(
            acc, peak, total, q_tile, q_turned, k_base, v_base, k_scales, v_scales, table,
            slope, position, 0, 0, 0, lead, scale, kv_block, kv_token, scale_block,
            HEAD_DIM, HEAD_PAD, TILE, PAGE, 0, 0, SOFTCAP, KIND, ALIBI,
            ROTATED, ROTATED_PAD, PRECISION, True,
        )  # fmt: skip
    if HEAVY > 0:
        stay = tl.where(answers & (split == 0), tl.load(table + HEAVY + 1), 0) * PAGE
        acc, peak, total = _attend(
            acc, peak, total, q_tile, q_turned, k_base, v_base, k_scales, v_scales, table + HEAVY + 2,
            slope, position, 0, 0, 0, stay, scale, kv_block, kv_token, scale_block,
            HEAD_DIM, HEAD_PAD, TILE, PAGE, 0, 0, SOFTCAP, KIND, ALIBI,
            ROTATED, ROTATED_PAD, PRECISION, True, MOST_HEAVY,
        )  # fmt: skip
    if PLAIN:
        acc, peak, total = _attend(
            acc, peak, total, q_tile, q_turned, k_base, v_base, k_scales, v_scales, table,
            slope, position, 0, 0, begin, plain_end, scale, kv_block, kv_token, scale_block,
            HEAD_DIM, HEAD_PAD, TILE, PAGE, 0, FIRST, SOFTCAP, KIND, ALIBI,
            ROTATED, ROTATED_PAD, PRECISION, False,
        )  # fmt: skip
    acc, peak, total = _attend(
        acc, peak, total, q_tile, q_turned, k_base, v_base, k_scales, v_scales, table,
        slope, position, low, reach, plain_end, end, scale, kv_block, kv_token, scale_block,
        HEAD_DIM, HEAD_PAD, TILE, PAGE, WINDOW, FIRST, SOFTCAP, KIND, ALIBI,
        ROTATED, ROTATED_PAD, PRECISION, True,
    )  # fmt: skip

    if used <= 1:
        result = acc / tl.maximum(total, 1e-30)[:, None]
        o_ptr = out + token[:, None] * o_token + head[:, None] * o_head + dims[None, :]
        tl.store(o_ptr, result.to(out.dtype.element_ty), mask=tile_ok)
    elif SPLITS > 1:
        heads = tl.num_programs(1) * GROUP
        cell = (token * heads + head) * (splits if MIXED else SPLITS) + split
        tl.store(part_peak + cell, peak, mask=row_ok)
        tl.store(part_total + cell, total, mask=row_ok)
        tl.store(part_acc + cell[:, None] * HEAD_PAD + dims[None, :], acc, mask=tile_ok)


@triton.jit(do_not_specialize_on_alignment=["table_rows", "seq_lens", "cu_q"])
def combine_kernel(
    out, part_acc, part_peak, part_total, tables, table_rows, seq_lens, cu_q, mix,
    o_token, o_head, table_stride,
    HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
    HEAVY: tl.constexpr, SPLITS: tl.constexpr, MIXED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program combines the partial results of one (token, head) with more than one split. MIXED and
    HEAVY as above."""
    wait_for_last_launch(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    if MIXED:
        of_step = tl.load(mix + 2)
        if token >= tl.load(mix):
            return
    keys = tl.load(seq_lens + token) * (tl.load(cu_q + token + 1) - tl.load(cu_q + token))
    if WINDOW > 0:
        past = tl.maximum(keys - WINDOW, 0) // TILE * TILE
        if HEAVY > 0:
            last = tl.load(seq_lens + token) - 1
            answers = _answers(tables, table_rows, token, table_stride, last, HEAVY)
            past = tl.where(answers, past, 0)
        keys -= past
    used = tl.cdiv(keys, _split_keys(keys, of_step if MIXED else SPLITS, TILE))
    if used <= 1:
        return
    splits = tl.arange(0, SPLITS)
    cells = (token * tl.num_programs(1) + head) * (of_step if MIXED else SPLITS) + splits
    dims = tl.arange(0, HEAD_PAD)
    peak = tl.load(part_peak + cells, mask=splits < used, other=0.0)
    total = tl.load(part_total + cells, mask=splits < used, other=0.0)
    some = total > 0
    peak = tl.where(some, peak, -1e30)
    weight = tl.where(some, tl.exp2(peak - tl.max(peak, 0)), 0.0)
    mask = some[:, None] & (dims < HEAD_DIM)[None, :]
    acc = tl.load(part_acc + cells[:, None] * HEAD_PAD + dims[None, :], mask=mask, other=0.0)
    result = tl.sum(acc * weight[:, None], 0)
    result /= tl.maximum(tl.sum(total * weight, 0), 1e-30)
    o_ptr = out + token * o_token + head * o_head + dims
    tl.store(o_ptr, result.to(out.dtype.element_ty), mask=dims < HEAD_DIM)
