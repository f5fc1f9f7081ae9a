"""Launches paged attention: chooses tile sizes, and splits the keys when few sequences decode."""

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from engine.backends.gpu.attention import attention_kernel, combine_kernel
from engine.backends.gpu.attention_reference import AttentionStep
from engine.backends.gpu.kv_launch import KINDS, PagedKv, of_kernels
from engine.backends.gpu.launch import capability, power_of_two, precision
from engine.backends.gpu.mixed import MixLimits, most_chunks
from engine.backends.gpu.overlap import overlapped
from engine.backends.layers.alibi import Alibi
from engine.model_spec import AttentionShape, ModelSpec

MAX_SPLITS = 32
_LATENT_HEADS = 32  # with 64, a Blackwell's registers spill; codes are widened in registers


@dataclass(frozen=True, slots=True)
class Tiles:
    block_m: int  # query rows (query, head of the group) in a program
    keys: int  # keys in one iteration of its loop
    warps: int
    stages: int


def decode_tiles(group: int, head_dim: int, dtype: torch.dtype) -> Tiles:
    block_m = max(16, power_of_two(group))
    if dtype == torch.float32:
        return Tiles(block_m, 32, 8, 2) if head_dim <= 128 else Tiles(block_m, 16, 8, 1)
    return Tiles(block_m, 64 if head_dim <= 128 else 32, 4, 3)


def prefill_tiles(group: int, head_dim: int, dtype: torch.dtype, codes: bool = False) -> Tiles:
    min_rows = max(16, power_of_two(group))
    if dtype == torch.float32:  # sums of more rows or keys would spill
        return Tiles(min_rows, 16, 8, 1) if head_dim > 128 else Tiles(max(32, min_rows), 16, 8, 2)
    # Before Hopper the operands of products are in registers, which fewer stages or more warps spare;
    # codes are widened in registers.
    early = capability() < 90
    if capability() >= 100 and head_dim <= 64:  # scores of 64 keys would spill there
        return Tiles(max(128, min_rows), 32, 8, 3)
    if head_dim > 128:
        keys = 16 if early and codes else 32
        return Tiles(max(64, min_rows), keys, 8 if early or codes else 4, 2)
    if early and codes:
        return Tiles(max(64, min_rows), 32, 8, 2)
    return Tiles(max(128, min_rows), 64, 8, 2 if early else 3)


def latent_tiles(group: int, dtype: torch.dtype, codes: bool, one_query: bool) -> Tiles:
    """Of a program for `group` heads over latent vectors, whose sums fill the registers of 8 warps."""
    rows = max(16, power_of_two(group))
    if codes:  # with another number of stages, registers spill on a Blackwell
        return Tiles(rows, 16, 8, 2 if one_query else 1)
    return Tiles(rows, 16, 8, 1) if dtype == torch.float32 else Tiles(rows, 32, 8, 2)


def latent_group(heads: int, codes: bool) -> int:
    """Query heads in a program over latent vectors: each reads these once for all its heads."""
    most = min(heads, _LATENT_HEADS // 2 if codes else _LATENT_HEADS)
    return next(group for group in range(most, 0, -1) if heads % group == 0)


def key_programs(spec: ModelSpec, codes: bool) -> int:
    """Programs that read the keys of one query."""
    return spec.kv_heads if spec.latent is None else spec.heads // latent_group(spec.heads, codes)


def choose_splits(sequences: int, kv_heads: int, max_keys: int, processors: int) -> int:
    """Number of splits of `max_keys` keys with which a decode step fills 1.5 times the multiprocessors:
    a power of two, with at least 128 keys in a split. A shorter sequence uses the first of them."""
    splits_for_occupancy = -(-3 * processors // max(1, 2 * sequences * kv_heads))
    by_length = max(1, max_keys // 128)
    return min(MAX_SPLITS, power_of_two(splits_for_occupancy), power_of_two(by_length))


def max_partials(sequences: int, heads: int, kv_heads: int, processors: int) -> int:
    """The partials that any decode step of up to `sequences` sequences needs."""
    counts = range(1, sequences + 1)
    return heads * max(n * choose_splits(n, kv_heads, 1 << 30, processors) for n in counts)


@cache
def mix_limits(
    tokens: int, sequences: int, kv_heads: int, max_keys: int, processors: int
) -> MixLimits:
    """Of a graph with room for so many tokens and sequences, in which a mix has as many splits as
    `choose_splits` gives its decoding sequences."""
    splits = [choose_splits(n, kv_heads, max_keys, processors) for n in range(1, sequences + 1)]
    return MixLimits(
        splits=splits[0],
        programs=max(n * each for n, each in enumerate(splits, 1)),
        combined=sum(each > 1 for each in splits),
        chunks=most_chunks(tokens, sequences),
    )


@dataclass(frozen=True, slots=True)
class Partials:
    """Buffers for partial results of split decoding; allocated once, as graphs keep the address."""

    acc: Tensor
    peak: Tensor
    total: Tensor

    @staticmethod
    def make(count: int, head_dim: int, device: torch.device) -> "Partials":
        """`count` is the maximum of sequences x heads x splits."""
        wide = power_of_two(head_dim)
        flat = torch.zeros(count, device=device)
        return Partials(torch.zeros(count, wide, device=device), flat, flat.clone())


def paged_attention(
    q: Tensor,
    kv: Tensor,
    step: AttentionStep,
    shape: AttentionShape,
    *,
    scales: Tensor | None = None,
    sinks: Tensor | None = None,
    alibi: Alibi | None = None,
    rotated: int = 0,
    out: Tensor | None = None,
    partials: Partials | None = None,
    splits: int = 1,
    tiles: Tiles | None = None,
) -> Tensor:
    """`q` is [tokens, heads, dim], `kv` [blocks, key heads and then value heads, block size, dim]
    contiguous in the last dimension, and `scales` without that one where they are codes; `sinks`
    [heads] are additional scores; `alibi` is added to those of the keys (not together with `sinks`).
    Decoding sequences and prompt chunks are launched separately, each with its own tiles; `splits` is of
    the keys of decoding ones, with a mix the most that it allows. Returns [tokens, heads, dim], in `out`
    if that is given: it may be `q`, whose rows a program reads before it writes them.

    With `rotated` values behind each latent vector, `kv` has one head, and the result is [tokens, heads,
    dim - rotated], sums of latent vectors."""
    tokens, heads, dim = q.shape
    dim -= rotated
    out = q.new_empty(tokens, heads, dim) if out is None else out
    group = latent_group(heads, scales is not None) if rotated else 2 * heads // kv.shape[1]
    if step.answers is not None and not shape.window:
        shape = replace(shape, window=step.answers.sight.window, first=step.answers.sight.first)
    else:
        step = replace(step, answers=None)
    given = _Given(of_kernels(kv, scales), shape, sinks, alibi, rotated, step.answers is not None)
    mix = step.mix
    if step.decodes or mix is not None:
        if splits == 1:
            partials = None
        elif partials is None:
            most = step.decodes * splits if mix is None else mix.limits.programs
            partials = Partials.make(most * heads, dim, q.device)
        chosen = tiles or _tiles(q, given, group, one_query=True)
        _launch(q, given, out, step, chosen, one_query=True, splits=splits, partials=partials)
    if step.decodes < step.seq_lens.shape[0] or mix is not None:
        chosen = tiles or _tiles(q, given, group, one_query=False)
        _launch(q, given, out, step, chosen, one_query=False, splits=1, partials=None)
    return out


@dataclass(frozen=True, slots=True)
class _Given:
    """What a layer's attention reads besides the queries."""

    cache: PagedKv
    shape: AttentionShape
    sinks: Tensor | None
    alibi: Alibi | None
    rotated: int
    apart: bool  # answers see blocks apart


def _tiles(q: Tensor, given: _Given, group: int, one_query: bool) -> Tiles:
    codes, dim = given.cache.kind != 0, q.shape[2]
    if given.rotated:
        found = latent_tiles(group, q.dtype, codes, one_query)
        # By what compiles: with e4m3 and blocks apart, a stage less spills on a Blackwell.
        more = given.apart and given.cache.kind == KINDS[torch.float8_e4m3fn]
        return replace(found, stages=found.stages + 1) if more else found
    if one_query:
        found = decode_tiles(group, dim, q.dtype)
    else:
        found = prefill_tiles(group, dim, q.dtype, codes)
    if not given.apart:
        return found
    # The loop over blocks apart takes registers.
    most = max(64, power_of_two(group))
    warps = 4 if one_query or dim <= 64 else 8
    stages = 2 if given.alibi is None else 3
    return Tiles(min(found.block_m, most), min(found.keys, 32), warps, stages)


def _launch(
    q: Tensor,
    given: _Given,
    out: Tensor,
    step: AttentionStep,
    tiles: Tiles,
    *,
    one_query: bool,
    splits: int,
    partials: Partials | None,
) -> None:
    """Launches the decoding sequences (`one_query`) or all others."""
    cache, shape, sinks, alibi = given.cache, given.shape, given.sinks, given.alibi
    kv, scales = cache.data, cache.scales
    tokens, heads, dim = out.shape
    kv_heads, page, head_strides = kv.shape[1] // 2, kv.shape[2], (kv.stride(1), scales.stride(1))
    if given.rotated:  # all query heads read the same keys
        kv_heads, head_strides = heads // latent_group(heads, cache.kind != 0), (0, 0)
    first_value = 0 if given.rotated else kv_heads
    group, decodes = heads // kv_heads, step.decodes
    first, count = (0, decodes) if one_query else (decodes, step.seq_lens.shape[0] - decodes)
    block_q = 1 if one_query else tiles.block_m // group
    # A sequence adds at most one partly filled block; programs past the last block return at once.
    blocks = count if one_query else (tokens - decodes) // block_q + count
    grid, combined = (blocks, kv_heads, splits), decodes
    mix, mixed, answers = step.tables, step.mix is not None, step.answers
    heavy = 0 if answers is None else answers.column
    if step.mix is not None:  # kernels read which sequences they have
        mix, limits, first, count = step.mix.counts, step.mix.limits, 0, 0
        blocks = limits.programs if one_query else tokens // block_q + limits.chunks
        grid, combined = (blocks, kv_heads, 1), limits.combined
    buffers = partials if partials is not None else Partials(q, q, q)
    attention_kernel[grid](
        out, buffers.acc, buffers.peak, buffers.total, q, kv, kv[:, first_value:],
        scales, scales[:, first_value:],
        step.tables, step.table_rows[first:], step.seq_lens[first:], step.cu_q[first:], mix,
        q if sinks is None else sinks, q if alibi is None else alibi.slopes, shape.scale, count,
        q.stride(0), q.stride(1), out.stride(0), out.stride(1),
        kv.stride(0), kv.stride(2), head_strides[0], scales.stride(0), head_strides[1],
        step.tables.stride(0),
        HEAD_DIM=dim, HEAD_PAD=power_of_two(dim), GROUP=group,
        BLOCK_M=tiles.block_m, BLOCK_Q=block_q, ONE_QUERY=one_query, TILE=tiles.keys, PAGE=page,
        WINDOW=shape.window, FIRST=shape.first if shape.window else 0, SOFTCAP=shape.softcap,
        SPLITS=splits, KIND=cache.kind, SINKS=sinks is not None,
        ALIBI=0 if alibi is None else 1 + alibi.rounded,
        ROTATED=given.rotated, ROTATED_PAD=max(16, power_of_two(max(1, given.rotated))),
        HEAVY=heavy, MOST_HEAVY=0 if answers is None else answers.blocks,
        PRECISION=precision(q), MIXED=mixed,
        **overlapped(),
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    if partials is not None:
        combine_kernel[(combined, heads)](
            out, partials.acc, partials.peak, partials.total, step.tables, step.table_rows,
            step.seq_lens, step.cu_q, mix, out.stride(0), out.stride(1), step.tables.stride(0),
            HEAD_DIM=dim, HEAD_PAD=power_of_two(dim), TILE=tiles.keys, WINDOW=shape.window,
            HEAVY=heavy, SPLITS=splits, MIXED=mixed, **overlapped(), num_warps=4,
        )  # fmt: skip
