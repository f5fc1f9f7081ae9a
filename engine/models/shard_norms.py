"""Norms over values that several ranks have."""

from dataclasses import replace

import torch

from engine.backends.compiled.group import Group
from engine.backends.layers.norm import RmsNorm
from engine.models.decoder import Decoder
from engine.models.shares import Shard


class SummedRmsNorm(RmsNorm):
    """An RMS norm of which each rank has some of the values. `copies`: ranks that have the same ones."""

    def __init__(self, own: RmsNorm, size: int, copies: int, group: Group) -> None:
        self.weight, self.eps = own.weight, own.eps
        self._values = size * copies
        self._group = group

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        squares = self._group.sum_(wide.square().sum(-1, keepdim=True))
        return (wide * torch.rsqrt(squares / self._values + self.eps) * self.weight).to(x.dtype)

    def of_heads_(self, x: torch.Tensor) -> None:
        raise NotImplementedError("it is over all heads together")


def sum_row_norms(decoder: Decoder, shard: Shard, group: Group) -> None:
    """Makes norms over all query heads, and over all key heads, those of all ranks together."""
    sizes = (shard.whole.q_width, 1), (shard.whole.kv_width, shard.kv_copies)
    for block in decoder.blocks:
        norms = block.attention.row_norms
        if norms is not None:
            summed = tuple(
                SummedRmsNorm(norm, *size, group) for norm, size in zip(norms, sizes, strict=True)
            )
            block.attention = replace(block.attention, row_norms=summed)
