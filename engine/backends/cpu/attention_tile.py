"""Attention in which a query's result depends on its position and its sequence's keys alone."""

import torch

from engine.backends.compiled.linear import DTYPES, compiled, has_kernel
from engine.backends.layers.attention_plan import Tile
from engine.backends.layers.kv import KvPool
from engine.backends.layers.operations import Attention

_FEW_QUERIES = 8  # of a sequence, as of one that verifies guesses: they share a pass over its keys
_FEW_POSITIONS = 128  # up to which a prompt's queries take no longer here either


def can_attend(tile: Tile, pool: KvPool, attention: Attention, *, any_number: bool = False) -> bool:
    """Whether the queries of a tile are computed here, where keys and values are read where they lie and
    not gathered first: few of each sequence, those of a short prompt, or `any_number`."""
    few = tile.queries <= _FEW_QUERIES or tile.positions <= _FEW_POSITIONS
    return (
        (few or any_number)
        and not tile.gaps
        and tile.observed is None
        and has_kernel()
        and pool.dtype in DTYPES
        and attention.alibi is None
        and not attention.shape.first
    )


def attend_rows(
    q: torch.Tensor, pool: KvPool, tiles: list[Tile], attention: Attention
) -> torch.Tensor:
    """As `engine.backends.cpu.attention.attend`, without ALiBi and attention sinks."""
    tokens, heads, dim = q.shape
    out = torch.empty((tokens, heads * dim), dtype=q.dtype)
    for tile in tiles:
        out[tile.rows] = attend_tile(q[tile.rows], pool, tile, attention)
    return out


def attend_tile(q: torch.Tensor, pool: KvPool, tile: Tile, attention: Attention) -> torch.Tensor:
    """q: [queries of all sequences, heads, dim]. Returns [queries, heads * dim]."""
    shape, sinks, (tokens, heads, dim) = attention.shape, attention.sinks, q.shape
    memory, rows = pool.paged(attention.source, tile.gather)
    values = 0 if pool.heads == pool.kv_heads else rows.numel() // 2 * 8
    sinks = None if sinks is None else sinks.float()
    if q.stride()[1:] != (dim, 1):
        q = q.contiguous()
    out = torch.empty((tokens, heads * dim), dtype=q.dtype)
    compiled().attend(
        q.data_ptr(), q.stride(0), memory.data_ptr(), rows.data_ptr(), rows.data_ptr() + values,
        out.data_ptr(), tile.starts.data_ptr(), tile.newest.data_ptr(),
        0 if sinks is None else sinks.data_ptr(),
        (
            tile.sequences, tile.queries, tile.positions, pool.kv_heads, pool.group, dim,
            shape.window, pool.block_size,
        ),
        shape.scale, shape.softcap or 0.0, q.dtype is torch.bfloat16, torch.get_num_threads(),
    )  # fmt: skip
    return out
