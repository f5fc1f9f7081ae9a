"""LoRA on a CPU in which a row's sums do not depend on the other rows."""

import torch

from engine.backends.compiled.linear import compiled
from engine.backends.layers.lora import LoraStep


class RowLoraStep(LoraStep):
    """Its groups are not padded: each slot has its own rows, one slot after the other."""

    def add_(self, layer: int, site: str, x: torch.Tensor, *outputs: torch.Tensor) -> None:
        for group in self._groups:
            stack = self._stacks[group.rank]
            first = group.first
            for slot in range(group.slots.start, group.slots.stop):
                rows = slice(first, first + group.width)
                first += group.width
                for number, (part, output) in enumerate(
                    zip(stack.layout[layer][site], outputs, strict=True)
                ):
                    if stack.changes(slot, layer, part):
                        a = stack.a[layer][site][slot, number * group.rank :]
                        _add(x[rows], a, stack.b[layer][part][slot], output[rows])


def _add(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """out += (x A^T) B, with as many rows of A as B has."""
    compiled().add_ranks(
        x.data_ptr(), x.stride(0), a.data_ptr(), b.data_ptr(), out.data_ptr(), out.stride(0),
        len(x), x.shape[1], *b.shape, x.dtype is torch.bfloat16, torch.get_num_threads(),
    )  # fmt: skip
