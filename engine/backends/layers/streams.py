"""The arithmetic of several residual streams, and of each layer's own inputs, by torch.

A layer computes attention and MLP for one stream, the active one; the others are predicted before it and
corrected by what it changed (alternating updates, arXiv 2301.13310). The stream is [rows, streams,
hidden].
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.backends.layers.embedding import Embedding
from engine.backends.layers.linear import Linear, activate
from engine.backends.layers.norm import RmsNorm

LEAST_SQUARE = 1e-5  # of a stream's mean square, where it is divided by


@dataclass(frozen=True, slots=True)
class Ends:
    """What the streams are made of, and what they become. A product for each stream but the first."""

    spread: list[Linear]
    gather: list[Linear]

    def streams(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, hidden], and its products at the length of x."""
        return torch.stack([x, *(_as_long_as(x, product(x)) for product in self.spread)], 1)

    def mean(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, hidden]"""
        first = x[:, 0].contiguous()
        if not len(x):
            return first
        others = (product(x[:, n].contiguous()) for n, product in enumerate(self.gather, start=1))
        return torch.stack([first, *(_as_long_as(first, each) for each in others)]).mean(0)


def _as_long_as(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    length = x.square().mean(-1, keepdim=True).sqrt()
    own = other.square().mean(-1, keepdim=True).clamp(min=LEAST_SQUARE).sqrt()
    return other * length / own


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """Each layer's own input: a row of a table for the token, and a product of its embedding."""

    table: Embedding  # [vocabulary, layers * size]
    scale: float  # of its rows
    product: Linear
    norm: RmsNorm
    vocab: int  # ids from there on have the row of id 0

    def __call__(self, tokens: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """x: the embeddings of the tokens. [rows, layers, size]"""
        size = self.norm.weight.shape[0]
        projected = (self.product(x) * x.shape[-1] ** -0.5).view(len(x), -1, size)
        return self.joined(tokens, self.norm(projected))

    def joined(self, tokens: torch.Tensor, projected: torch.Tensor) -> torch.Tensor:
        """projected: the normed product [..., size]. [rows, layers, size]"""
        rows = self.table(torch.where(tokens < self.vocab, tokens, 0)) * self.scale
        rows = rows.view(len(tokens), -1, projected.shape[-1])
        return (projected.view_as(rows) + rows) * math.sqrt(0.5)


@dataclass(frozen=True, slots=True)
class StreamLayer:
    """A layer's part in the streams; the small matrices stay floats."""

    active: int
    router_norm: RmsNorm
    router: torch.Tensor  # [streams, hidden]
    prediction: torch.Tensor  # [streams * streams, streams]
    correction: torch.Tensor  # [streams, streams]
    scale: (
        torch.Tensor | None
    )  # of the active stream, where the layer's own input is gated: [hidden]
    left: Linear  # a low-rank product parallel to attention (arXiv 2411.07501)
    right: Linear
    beside_norm: RmsNorm
    gate: Linear  # of the layer's own input
    projection: Linear  # of it to the streams
    input_norm: RmsNorm

    def predicted(self, x: torch.Tensor) -> torch.Tensor:
        """Each stream, plus the sum of all in shares that depend on the active one."""
        count = x.shape[1]
        shares = F.linear(self._modes(x[:, self.active]), self.prediction)
        return torch.baddbmm(x, shares.view(-1, count, count), x)

    def corrected(self, predicted: torch.Tensor, computed: torch.Tensor) -> torch.Tensor:
        """Each stream, plus its share of what the layer changed: computed [rows, hidden] minus the
        prediction of the active one."""
        shares = F.linear(self._modes(computed), self.correction) + 1
        change = computed - predicted[:, self.active]
        return torch.addcmul(predicted, change[:, None], shares[:, :, None])

    def _modes(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, streams], within 1"""
        routed = F.linear(self.router_norm(x.contiguous()) / x.shape[-1], self.router)
        return torch.tanh(routed.float()).to(x.dtype)

    def joined(self, attended: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Attention's output [rows, hidden], with the parallel low-rank product of x."""
        parallel = x + self.beside_norm(self.right(self.left(x)))
        return (attended + parallel) * math.sqrt(0.5)

    def add_input(self, x: torch.Tensor, given: torch.Tensor, activation: str) -> torch.Tensor:
        """Adds the layer's own input [rows, size] to all streams but the first, in place."""
        active = x[:, self.active].contiguous()
        if self.scale is not None:
            active = active * self.scale
        gated = activate(self.gate(active), activation) * given
        x[:, 1:] += self.input_norm(self.projection(gated))[:, None]
        return x
