"""LoRA on a CPU: adapters in stacks by rank and slot, added to the base layers row by row.

Rows of a step are sorted by adapter, so that an adapter's rows are one slice.
"""

from dataclasses import dataclass

import torch

from engine.adapter_files import AdapterWeights, part_shape
from engine.layers.kv import release
from engine.models.spec import ModelSpec

# A site is one base matrix product; its parts are the matrices fused into it.
SITES = {"qkv": ("q", "k", "v"), "o": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive token rows of one adapter."""

    slot: int
    rank: int
    first: int
    end: int


class LoraStack:
    """All slots of one rank: for each layer A by site [slots, parts * rank, in] and B by part
    [slots, out, rank]. Memory is taken when a slot is written and given back when it is cleared.
    """

    def __init__(self, spec: ModelSpec, slots: int, rank: int, dtype: torch.dtype) -> None:
        self.rank = rank
        self.a: list[dict[str, torch.Tensor]] = []
        self.b: list[dict[str, torch.Tensor]] = []
        for _ in range(spec.layers):
            self.a.append({})
            self.b.append({})
            for site, parts in SITES.items():
                width = part_shape(spec, parts[0])[0]
                shape = (slots, len(parts) * rank, width)
                self.a[-1][site] = torch.zeros(shape, dtype=dtype)
                for part in parts:
                    out = part_shape(spec, part)[1]
                    self.b[-1][part] = torch.zeros((slots, out, rank), dtype=dtype)

    def store(self, slot: int, weights: AdapterWeights) -> None:
        rank = self.rank
        for layer, (a, b) in enumerate(zip(self.a, self.b, strict=True)):
            for site, parts in SITES.items():
                for number, part in enumerate(parts):
                    rows = a[site][slot, number * rank : (number + 1) * rank].zero_()
                    columns = b[part][slot].zero_()
                    pair = weights.matrices.get((layer, part))
                    if pair is not None:
                        rows[: pair[0].shape[0]] = pair[0]
                        columns[:, : pair[1].shape[1]] = pair[1]

    def clear(self, slot: int) -> None:
        for tensors in (*self.a, *self.b):
            for tensor in tensors.values():
                release(tensor[slot])


def stack_bytes(spec: ModelSpec, rank: int, dtype: torch.dtype) -> int:
    """What one adapter of this rank takes in its stack."""
    parts = [part_shape(spec, part) for parts in SITES.values() for part in parts]
    return spec.layers * rank * sum(width + out for width, out in parts) * dtype.itemsize


class LoraStep:
    """The adapters of one step, ready to be added at every site of every layer."""

    def __init__(self, stacks: dict[int, LoraStack], segments: list[Segment]) -> None:
        self._stacks = stacks
        self._segments = segments

    def add_(self, layer: int, site: str, x: torch.Tensor, y: torch.Tensor) -> None:
        """y [tokens, out] += the adapters' share of x [tokens, in]."""
        for segment in self._segments:
            stack = self._stacks[segment.rank]
            rows = slice(segment.first, segment.end)
            inner = x[rows] @ stack.a[layer][site][segment.slot].T
            column = 0
            for number, part in enumerate(SITES[site]):
                b = stack.b[layer][part][segment.slot]
                share = inner[:, number * segment.rank : (number + 1) * segment.rank]
                y[rows, column : column + b.shape[0]].addmm_(share, b.T)
                column += b.shape[0]
