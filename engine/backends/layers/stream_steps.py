"""A layer with several residual streams in torch, on a CPU."""

import torch

from engine.backends.layers.norm import RmsNorm
from engine.backends.layers.operations import Halves, Operations
from engine.backends.layers.streams import Ends, LayerInputs, StreamLayer


class TorchSteps:
    """Implements `StreamSteps` for operations whose residual stream is a tensor."""

    def __init__(
        self,
        do: Operations[torch.Tensor],
        tokens: torch.Tensor,
        embedded: torch.Tensor,
        activation: str,
    ) -> None:
        self._do = do
        self._tokens = tokens
        self._activation = activation
        self.embedded = embedded

    def inputs(self, given: LayerInputs) -> torch.Tensor:
        return given(self._tokens, self.embedded)

    def begin(self, ends: Ends) -> torch.Tensor:
        return ends.streams(self.embedded)

    def predict(
        self, layer: StreamLayer, x: torch.Tensor, norm: RmsNorm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        predicted = layer.predicted(x)
        return predicted, norm(predicted[:, layer.active].contiguous())

    def attention(self, block: Halves, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        qkv = self._do.project(block.qkv, h, None)
        y, kept = self._do.attend(block.attention, qkv, torch.arange(len(h)))
        return y, kept if len(kept) < len(h) else None

    def change(
        self,
        layer: StreamLayer,
        block: Halves,
        y: torch.Tensor,
        predicted: torch.Tensor,
        h: torch.Tensor,
    ) -> torch.Tensor:
        _, after_attention, before_mlp, after_mlp = block.norms
        active = predicted[:, layer.active].contiguous()
        joined = layer.joined(self._do.add(block.o, y, active, after_attention), h)
        inner = self._do.gate(block.gate_up, joined, before_mlp)
        return layer.corrected(predicted, self._do.add(block.down, inner, joined, after_mlp))

    def add_input(self, layer: StreamLayer, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        return layer.add_input(x, given, self._activation)

    def end(self, ends: Ends, x: torch.Tensor) -> torch.Tensor:
        return ends.mean(x)
