"""What a device does in a layer with several residual streams, and how torch does it on a CPU."""

from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from engine.backends.layers.norm import RmsNorm
from engine.backends.layers.operations import Attention, GatedSite, Operations, Site
from engine.backends.layers.streams import Ends, LayerInputs, StreamLayer

X_co = TypeVar("X_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Halves:
    """The attention and the MLP of a layer, with their norms."""

    qkv: Site
    attention: Attention
    o: Site
    gate_up: GatedSite
    down: Site
    norms: tuple[RmsNorm, RmsNorm, RmsNorm, RmsNorm]  # before and after attention, then the MLP


class StreamSteps(Protocol[X_co]):
    """Streams are [rows, streams, hidden]. From the last layer with keys of its own on, rows may be the
    sampled ones alone."""

    embedded: torch.Tensor  # [tokens, hidden]

    def inputs(self, given: LayerInputs) -> torch.Tensor:
        """Each layer's own input: [tokens, layers, size]."""

    def begin(self, ends: Ends) -> torch.Tensor:
        """The streams of the embedded tokens."""

    def predict(
        self, layer: StreamLayer, x: torch.Tensor, norm: RmsNorm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The predicted streams, and the norm of the active one: [rows, hidden]."""

    def attention(self, block: Halves, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Of the normed rows `h`: the output before its product [kept, heads * head_dim], and which rows
        go on; None: all."""

    def change(
        self,
        layer: StreamLayer,
        block: Halves,
        y: torch.Tensor,
        predicted: torch.Tensor,
        h: torch.Tensor,
    ) -> torch.Tensor:
        """The streams, corrected by what attention's output `y` and the MLP change. `h`: the normed rows
        that attention read."""

    def add_input(self, layer: StreamLayer, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """The streams with the layer's own input [rows, size]; perhaps added by what reads them next."""

    def end(self, ends: Ends, x: torch.Tensor) -> X_co:
        """The one residual stream of the streams of the last layer."""


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
