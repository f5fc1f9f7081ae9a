"""The operations of a step over several residual streams, by the kernels."""

import torch
from torch import Tensor

from engine.backends.gpu.altup.launch import (
    Added,
    correct,
    gather,
    join,
    predict,
    sparse_gated,
    spread,
)
from engine.backends.gpu.altup.sampled import all_sampled, fitting_splits, of_sampled
from engine.backends.gpu.operations import KernelOperations, Residual, product
from engine.backends.gpu.pointwise_launch import gated, gated_by, rms_norm
from engine.backends.layers.linear import Linear
from engine.backends.layers.norm import RmsNorm
from engine.backends.layers.operations import Halves
from engine.backends.layers.streams import Ends, LayerInputs, StreamLayer


class StreamOperations(KernelOperations):
    """Implements `engine.backends.layers.operations.StreamSteps`."""

    embedded: Tensor
    _added: Added | None = None  # to the streams, by the kernel that predicts
    _gate: Tensor  # the active stream, which gates the layer's own input
    _only_sampled = False

    def streams(self, x: Residual) -> "StreamOperations":
        self.embedded = x.total
        return self

    def inputs(self, given: LayerInputs) -> Tensor:
        size = given.norm.weight.shape[0]
        shares = product(given.product, self.embedded) * self.embedded.shape[1] ** -0.5
        normed = rms_norm(shares.view(-1, size), given.norm)
        return given.joined(self.tokens, normed)

    def begin(self, ends: Ends) -> Tensor:
        products = [product(each, self.embedded) for each in ends.spread]
        return spread(self.embedded, torch.stack(products))

    def predict(self, layer: StreamLayer, x: Tensor, norm: RmsNorm) -> tuple[Tensor, Tensor]:
        added, self._added = self._added, None
        return predict(layer, x, norm, added)

    def attention(self, block: Halves, h: Tensor) -> tuple[Tensor, Tensor | None]:
        device, step = self._device, self._step
        q = self._queries(block.attention, self._linear(block.qkv, h))
        kept = None
        if block.attention.layer == device.spec.cached_layers - 1 and not all_sampled(step):
            kept = step.sampled
            if not len(kept):
                return h[:0], kept
            q, most = q.index_select(0, kept), device.partials.total.shape[0]
            splits = fitting_splits(len(kept), device.spec.heads, step.splits, most)
            self._step, self._only_sampled = of_sampled(step, splits), True
        return self._attended(block.attention, q), kept

    def change(
        self, layer: StreamLayer, block: Halves, y: Tensor, predicted: Tensor, h: Tensor
    ) -> Tensor:
        _, after_attention, before_mlp, after_mlp = block.norms
        beside = product(layer.right, product(layer.left, h))
        joined, normed = join(
            self._linear(block.o, y), predicted[:, layer.active], h, beside,
            (after_attention, layer.beside_norm, before_mlp),
        )  # fmt: skip
        y = self._linear(block.down, self._inner(block, self._linear(block.gate_up, normed)))
        x, self._gate = correct(layer, y, after_mlp, joined, predicted)
        return x

    def _inner(self, block: Halves, gate_up: Tensor) -> Tensor:
        gelu, cutoff = self._device.spec.activation != "silu", block.gate_up.cutoff
        return gated(gate_up, gelu) if cutoff is None else sparse_gated(gate_up, cutoff, gelu)

    def add_input(self, layer: StreamLayer, x: Tensor, given: Tensor) -> Tensor:
        gate = product(layer.gate, self._gate)
        inner = gated_by(gate, given, gelu=self._device.spec.activation != "silu")
        self._added = product(layer.projection, inner), layer.input_norm
        return x

    def end(self, ends: Ends, x: Tensor) -> Residual:
        if self._added is not None:
            added, norm = self._added
            x[:, 1:] += rms_norm(added, norm)[:, None]
        if not len(x):
            return Residual(x[:, 0])
        others = [
            product(each, x[:, n].contiguous()) for n, each in enumerate(ends.gather, start=1)
        ]
        return Residual(gather(x[:, 0], torch.stack(others)))

    def logits(self, head: Linear, x: Residual, norm: RmsNorm) -> Tensor:
        if not x.total.shape[0]:
            return self._device.logits[:0]
        if not self._only_sampled:
            return super().logits(head, x, norm)
        return self._head(head, rms_norm(x.total, norm))
