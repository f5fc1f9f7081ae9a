"""Chooses by measurement, on the present GPU, how decoding steps of few tokens run linears."""

from collections.abc import Callable

import torch
from torch import Tensor

from engine.graphs import CudaGraph
from engine.kernels.skinny_launch import CANDIDATES, SkinnyTiles

_REPLAYS = 20


def fastest_tiles(
    tokens: int, used: dict[int, SkinnyTiles], forward: Callable[[], Tensor]
) -> dict[int, SkinnyTiles]:
    """The fastest tiles for `tokens` tokens, as an update of `used`; empty if the plain path is
    as fast.

    Whole steps are timed as graphs, so that launches saved by fusion count. Changes `used` while
    it measures.
    """
    best = _milliseconds(forward)
    found: dict[int, SkinnyTiles] = {}
    for tiles in CANDIDATES:
        used[tokens] = tiles
        spent = _milliseconds(forward)
        if spent < best:
            best, found = spent, {tokens: tiles}
    del used[tokens]
    return found


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
