"""Paged attention on a CPU; a GPU uses the kernels.

Few queries of a sequence are computed by the compiled kernel, which reads keys and values where they
lie. Without it, and for the queries of prompts, they are gathered, and scores and values computed with
`bmm`, which for few queries is three times as fast as torch's fused kernel; a tile of queries is small
enough that its scores stay in the processor's cache.
"""

import torch
import torch.nn.functional as F

from engine.backends.cpu.attention_tile import attend_tile, can_attend
from engine.backends.layers.attention_plan import Tile
from engine.backends.layers.kv import KvPool
from engine.backends.layers.operations import Attention
from engine.model_spec import AttentionShape


def attend(q: torch.Tensor, pool: KvPool, tiles: list[Tile], attention: Attention) -> torch.Tensor:
    """q: [tokens, heads, head_dim], rotated; the keys and values of these tokens are in the pool.

    Returns [tokens, heads * head_dim].
    """
    tokens, heads, dim = q.shape
    if len(tiles) == 1 and tiles[0].queries == 1 and isinstance(tiles[0].rows, slice):
        return _attend(q, pool, tiles[0], attention).flatten(1)
    out = torch.empty((tokens, pool.kv_heads, pool.group, dim), dtype=q.dtype)
    for tile in tiles:
        part = _attend(q[tile.rows], pool, tile, attention)
        if isinstance(tile.rows, slice):
            out[tile.rows] = part
        else:
            out.index_copy_(0, tile.rows, part)
    return out.view(tokens, heads * dim)


def _attend(q: torch.Tensor, pool: KvPool, tile: Tile, attention: Attention) -> torch.Tensor:
    """[queries, kv heads, group, head_dim]"""
    if can_attend(tile, pool, attention):
        found = attend_tile(q, pool, tile, attention)
        return found.view(len(q), pool.kv_heads, pool.group, -1)
    return _attend_tile(q, pool, tile, attention)


def _attend_tile(q: torch.Tensor, pool: KvPool, tile: Tile, attention: Attention) -> torch.Tensor:
    """[queries, kv heads, group, head_dim], in the memory order of the products."""
    dim, shape, sinks = q.shape[-1], attention.shape, attention.sinks
    kv_heads, group, batch = pool.kv_heads, pool.group, tile.sequences * pool.kv_heads
    kv = pool.gather(attention.source, tile.gather).view(-1, batch, tile.positions, dim)
    k, v = kv[0], kv[-1]
    if tile.prefix_length is not None and _is_plain(attention):
        k, v = k[None, :, : tile.prefix_length], v[None, :, : tile.prefix_length]
        q = q.view(1, kv_heads, group, dim)
        return F.scaled_dot_product_attention(q, k, v, scale=shape.scale)
    if tile.queries == 1:
        q = q.reshape(batch, group, dim)
    else:
        q = q.view(tile.queries, kv_heads, group, dim).permute(1, 2, 0, 3)
        q = q.reshape(batch, group * tile.queries, dim)
    scores = _scores(q, k, tile.mask, shape)
    if attention.alibi is not None:
        bias = attention.alibi(tile.keys, tile.newest).view(-1, kv_heads, group, 1, tile.positions)
        scores.view(-1, kv_heads, group, tile.queries, tile.positions).add_(bias)
    if sinks is None:
        weights = torch.softmax(scores, -1)
    else:
        each = sinks.view(1, kv_heads, group, 1).expand(tile.sequences, -1, -1, tile.queries)
        with_sinks = torch.cat((scores, each.reshape(batch, -1, 1)), -1)
        weights = torch.softmax(with_sinks, -1)[..., :-1]
    if tile.observed is not None and attention.layer < pool.last_layer:
        tile.observed.add(weights.view(kv_heads, group, tile.queries, tile.positions))
    out = torch.bmm(weights, v)
    if tile.queries == 1:
        return out.view(tile.sequences, kv_heads, group, dim)
    return out.view(kv_heads, group, tile.queries, dim).permute(2, 0, 1, 3)


def _is_plain(attention: Attention) -> bool:
    """Whether torch's fused product computes it."""
    return not attention.shape.softcap and attention.sinks is None and attention.alibi is None


def _scores(
    q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, shape: AttentionShape
) -> torch.Tensor:
    keys, cap = k.transpose(1, 2), shape.softcap
    if mask is not None and not cap:
        return torch.baddbmm(mask, q, keys, alpha=shape.scale)
    scores = torch.baddbmm(q.new_empty(1, 1, 1), q, keys, beta=0, alpha=shape.scale)
    if cap:
        scores = scores.div_(cap).tanh_().mul_(cap)
    return scores if mask is None else scores.add_(mask)
