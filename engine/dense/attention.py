"""Attention in which a query's result depends on its position and its sequence's keys alone."""

import torch

from engine.dense.linear import compiled
from engine.layers.attention_plan import Tile
from engine.layers.kv import KvPool
from engine.layers.operations import Attention


def attend_rows(
    q: torch.Tensor, pool: KvPool, tiles: list[Tile], attention: Attention
) -> torch.Tensor:
    """As `engine.layers.attention.attend`, without ALiBi and first keys beside a window."""
    tokens, heads, dim = q.shape
    out = torch.empty((tokens, heads * dim), dtype=q.dtype)
    for tile in tiles:
        out[tile.rows] = _attend_tile(q[tile.rows], pool, tile, attention)
    return out


def _attend_tile(q: torch.Tensor, pool: KvPool, tile: Tile, attention: Attention) -> torch.Tensor:
    shape, sinks, dim = attention.shape, attention.sinks, q.shape[-1]
    kv = pool.gather(attention.source, tile.gather)
    half = kv.numel() // 2 * kv.element_size()
    starts = tile.keys[:, 0].contiguous()
    sinks = None if sinks is None else sinks.float()
    if q.stride()[1:] != (dim, 1):
        q = q.contiguous()
    out = torch.empty((len(q), q.shape[1] * dim), dtype=q.dtype)
    compiled().attend(
        q.data_ptr(), q.stride(0), kv.data_ptr(), kv.data_ptr() + half, out.data_ptr(),
        starts.data_ptr(), tile.newest.data_ptr(), 0 if sinks is None else sinks.data_ptr(),
        (tile.sequences, tile.queries, tile.positions, pool.kv_heads, pool.group, dim, shape.window),
        shape.scale, shape.softcap or 0.0, q.dtype is torch.bfloat16, torch.get_num_threads(),
    )  # fmt: skip
    return out
