"""Chooses by measurement, on the present GPU, how decoding steps of few tokens run linears."""

from collections.abc import Callable

import torch
from torch import Tensor

from engine.backends.gpu.skinny_launch import CANDIDATES, SkinnyTiles
from engine.runners.gpu.cuda_graphs import CudaGraph

_REPLAYS = 20


def fastest_tiles(
    tokens: int, tiles_by_tokens: dict[int, SkinnyTiles], forward: Callable[[], Tensor]
) -> dict[int, SkinnyTiles]:
    """The fastest tiles for `tokens` tokens, as an update of `tiles_by_tokens`; empty if the plain
    path is as fast.

    Whole steps are timed as graphs, so that launches saved by fusion count. Changes `tiles_by_tokens`
    while it measures.
    """
    best = _milliseconds(forward)
    update: dict[int, SkinnyTiles] = {}
    for tiles in CANDIDATES:
        tiles_by_tokens[tokens] = tiles
        elapsed = _milliseconds(forward)
        if elapsed < best:
            best, update = elapsed, {tokens: tiles}
    del tiles_by_tokens[tokens]
    return update


def _milliseconds(forward: Callable[[], Tensor]) -> float:
    graph = CudaGraph(forward)
    graph.replay()
    begin, end = _event(), _event()
    begin.record()
    for _ in range(_REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / _REPLAYS


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
