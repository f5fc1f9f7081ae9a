"""Launching paged attention: tile sizes by shape, the split of long sequences when few run."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.attention import attention_kernel, combine_kernel
from engine.kernels.attention_reference import AttentionShape, AttentionStep

MOST_SPLITS = 32


@dataclass(frozen=True, slots=True)
class Tiles:
    block_m: int  # query rows (query, head of the group) of a program
    keys: int  # keys of one step of its loop
    warps: int
    stages: int


def decode_tiles(group: int, head_dim: int, dtype: torch.dtype) -> Tiles:
    block_m = max(16, _power_of_two(group))
    if dtype == torch.float32:
        return Tiles(block_m, 32, 4, 2)
    return Tiles(block_m, 64 if head_dim <= 128 else 32, 4, 3)


def prefill_tiles(group: int, head_dim: int, dtype: torch.dtype) -> Tiles:
    least = max(16, _power_of_two(group))
    if dtype == torch.float32:
        return Tiles(max(32, least), 32, 4, 2)
    if head_dim > 128:
        return Tiles(max(64, least), 32, 4, 2)
    return Tiles(max(128, least), 64, 8, 3)


def choose_splits(sequences: int, kv_heads: int, most_keys: int, processors: int) -> int:
    """Splits of the keys so that a decode step fills the chip once and a half: a power of two, and
    no split below 128 keys. The lengths themselves are never read."""
    wanted = -(-3 * processors // max(1, 2 * sequences * kv_heads))
    room = max(1, most_keys // 128)
    return min(MOST_SPLITS, _power_of_two(wanted), _power_of_two(room))


def most_partials(sequences: int, heads: int, kv_heads: int, processors: int) -> int:
    """Cells that `Partials` needs for any number of sequences up to that."""
    counts = range(1, sequences + 1)
    return heads * max(n * choose_splits(n, kv_heads, 1 << 30, processors) for n in counts)


def _power_of_two(n: int) -> int:
    """The smallest that is not below `n`."""
    return 1 << (n - 1).bit_length()


@dataclass(frozen=True, slots=True)
class Partials:
    """Room for partial results of split decoding; made once, since graphs keep its address."""

    acc: Tensor
    peak: Tensor
    total: Tensor

    @staticmethod
    def make(cells: int, head_dim: int, device: torch.device) -> "Partials":
        """`cells` is the most that sequences x heads x splits can be."""
        wide = _power_of_two(head_dim)
        flat = torch.zeros(cells, device=device)
        return Partials(torch.zeros(cells, wide, device=device), flat, flat.clone())


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    step: AttentionStep,
    shape: AttentionShape,
    out: Tensor | None = None,
    partials: Partials | None = None,
    splits: int = 1,
    tiles: Tiles | None = None,
) -> Tensor:
    """`q` is [tokens, heads, dim], the caches [blocks, kv heads, block size, dim] with any strides
    but the last. Decoding sequences and prompt chunks are launched apart, each with its tiles."""
    out = torch.empty_like(q) if out is None else out
    group, dim = q.shape[1] // k_cache.shape[1], q.shape[2]
    sequences, decodes = step.seq_lens.shape[0], step.decodes
    if decodes:
        chosen = tiles or decode_tiles(group, dim, q.dtype)
        room = partials if splits > 1 else None
        if splits > 1 and room is None:
            room = Partials.make(decodes * q.shape[1] * splits, dim, q.device)
        _launch(q, k_cache, v_cache, out, step, 0, decodes, decodes, shape, chosen, splits, room)
    if decodes < sequences:
        chosen = tiles or prefill_tiles(group, dim, q.dtype)
        rows = q.shape[0] - decodes
        _launch(q, k_cache, v_cache, out, step, decodes, sequences, rows, shape, chosen, 1, None)
    return out


def _launch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    step: AttentionStep,
    begin: int,
    end: int,
    rows: int,
    shape: AttentionShape,
    tiles: Tiles,
    splits: int,
    room: Partials | None,
) -> None:
    if k_cache.stride() != v_cache.stride() or k_cache.stride(3) != 1:
        raise ValueError("the K and V caches must have the same strides and adjacent dims")
    heads, dim = q.shape[1], q.shape[2]
    kv_heads, page = k_cache.shape[1], k_cache.shape[2]
    one_query = begin == 0 and end == step.decodes
    block_q = 1 if one_query else tiles.block_m // (heads // kv_heads)
    # Every sequence adds at most one partly filled block; programs past the last one leave at once.
    blocks = end if one_query else rows // block_q + end - begin
    grid = (blocks, kv_heads, splits)
    place = room if room is not None else Partials(q, q, q)
    attention_kernel[grid](
        out, place.acc, place.peak, place.total, q, k_cache, v_cache,
        step.tables, step.table_rows[begin:], step.seq_lens[begin:], step.cu_q[begin:],
        shape.scale, end - begin,
        q.stride(0), q.stride(1), out.stride(0), out.stride(1),
        k_cache.stride(0), k_cache.stride(2), k_cache.stride(1), step.tables.stride(0),
        HEAD_DIM=dim, HEAD_PAD=_power_of_two(dim), GROUP=heads // kv_heads,
        BLOCK_M=tiles.block_m, BLOCK_Q=block_q, ONE_QUERY=one_query,
        TILE=tiles.keys, PAGE=page, WINDOW=shape.window, SOFTCAP=shape.softcap, SPLITS=splits,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    if room is not None:
        combine_kernel[(rows, heads)](
            out, room.acc, room.peak, room.total, out.stride(0), out.stride(1),
            HEAD_DIM=dim, HEAD_PAD=_power_of_two(dim), SPLITS=splits, num_warps=4,
        )  # fmt: skip
