"""The operations of a step on a CPU whose results for a row do not depend on the rest of the batch.

What torch computes in `RowOperations` is exact in each value (sums and products of two numbers), or done
for each row by the same instructions (layer norms).
"""

import torch

from engine.backends.compiled.linear import activate_
from engine.backends.cpu.attention_tile import attend_rows, can_attend
from engine.backends.cpu.operations import CpuOperations
from engine.backends.layers.attention_plan import Tile
from engine.backends.layers.norm import RmsNorm
from engine.backends.layers.operations import Attention, GatedSite
from engine.backends.layers.rotary import RotaryTables, rolled


class CompiledRowOperations(CpuOperations):
    """Implements `Operations` for a model that `decoded_layers` takes: all else has the bits of its one
    call for any number of rows, and so have the queries of prompts by the same kernel."""

    def _attended(self, q: torch.Tensor, tiles: list[Tile], attention: Attention) -> torch.Tensor:
        if all(can_attend(each, self._pool, attention, any_number=True) for each in tiles):
            return attend_rows(q, self._pool, tiles, attention)
        return super()._attended(q, tiles, attention)


class RowOperations(CpuOperations):
    """Implements `Operations` over linears that compute each row by itself."""

    def gate(self, site: GatedSite, x: torch.Tensor, norm: RmsNorm | None) -> torch.Tensor:
        """With and without adapters in the same two steps: a row of the base model may share its
        batch with one that has an adapter there."""
        h = x if norm is None else norm(x)
        if not x.shape[0]:
            return x.new_empty((0, self._spec.intermediate))
        gate, up = site.linear.halves(h)
        if self._lora is not None:
            self._lora.change_(site.layer, site.name, h, gate, up)
        return activate_(gate, self._spec.activation, up)

    def _activated(self, x: torch.Tensor) -> torch.Tensor:
        return activate_(x, self._spec.activation)

    def _attended(self, q: torch.Tensor, tiles: list[Tile], attention: Attention) -> torch.Tensor:
        return attend_rows(q, self._pool, tiles, attention)

    def _placed(self, attention: Attention, qkv: torch.Tensor) -> bool:
        """Never: it depends on the number of rows, and rotations are rounded otherwise."""
        return False

    def _rotate_(self, x: torch.Tensor, angles: RotaryTables) -> None:
        x.copy_(x * angles.cos + rolled(x, angles, self._spec.head_dim) * angles.sin)
