"""The forward pass over several residual streams, and its parts of the checkpoint."""

import math
from dataclasses import dataclass

import torch

from engine.layers.linear import Linear
from engine.layers.norm import RmsNorm
from engine.layers.operations import Attention, GatedSite, Operations, Site
from engine.model_spec import ModelSpec, StreamsSpec
from engine.models.linears import Matrix, embedding, linear
from engine.models.weights import Weights
from engine.streams.streams import Ends, LayerInputs, StreamLayer


@dataclass(frozen=True, slots=True)
class Halves:
    """The attention and the MLP of a layer, with their norms."""

    qkv: Site
    attention: Attention
    o: Site
    gate_up: GatedSite
    down: Site
    norms: tuple[RmsNorm, RmsNorm, RmsNorm, RmsNorm]  # before and after attention, then the MLP


class Streams:
    """Runs the layers of a decoder whose spec has `streams`."""

    def __init__(self, spec: ModelSpec, streams: StreamsSpec, weights: Weights) -> None:
        self._activation = spec.activation
        self._active = streams.active
        hidden, root, others = spec.hidden, spec.root, range(streams.count - 1)

        def matrix(name: str, width: int, out: int) -> Linear:
            return linear(weights, [Matrix(f"{root}.{name}", width, out)])

        self._ends = Ends(
            [matrix(f"altup_projections.{n}", hidden, hidden) for n in others],
            [matrix(f"altup_unembed_projections.{n}", hidden, hidden) for n in others],
        )
        size = streams.inputs
        norm = weights.take(f"{root}.per_layer_projection_norm.weight", (size,))
        width = spec.layers * size
        scale = float(torch.tensor(size**0.5, dtype=weights.dtype))
        self._inputs = LayerInputs(
            embedding(weights, (streams.vocab, width), f"{root}.embed_tokens_per_layer.weight"),
            scale,
            matrix("per_layer_model_projection", hidden, width),
            RmsNorm(norm, spec.eps),
            streams.vocab,
        )
        self._layers = [
            _layer(spec, streams, f"{root}.layers.{n}", weights) for n in range(spec.layers)
        ]

    def __call__(
        self, do: Operations[torch.Tensor], x: torch.Tensor, blocks: list[Halves]
    ) -> torch.Tensor:
        """x: the embeddings of the step's tokens. The residual stream of the sampled rows: [rows,
        hidden], before the last norm."""
        inputs = self._inputs(do.token_ids(), x)
        x = self._ends.streams(x)
        for number, (block, layer) in enumerate(zip(blocks, self._layers, strict=True)):
            before_attention, after_attention, before_mlp, after_mlp = block.norms
            predicted = layer.predicted(x)
            active = predicted[:, self._active].contiguous()
            h = before_attention(active)
            y, kept = do.attend(
                block.attention, do.project(block.qkv, h, None), torch.arange(len(x))
            )
            if not len(kept):
                return active[:0]
            if len(kept) < len(x):
                predicted, active, h, inputs = (
                    each.index_select(0, kept) for each in (predicted, active, h, inputs)
                )
            attended = do.add(block.o, y, active, after_attention)
            joined = (attended + layer.beside(h)) * math.sqrt(0.5)
            inner = do.gate(block.gate_up, joined, before_mlp)
            x = layer.corrected(predicted, do.add(block.down, inner, joined, after_mlp))
            x = layer.add_input(x, inputs[:, number], self._activation)
        return self._ends.mean(x)


def _layer(spec: ModelSpec, streams: StreamsSpec, root: str, weights: Weights) -> StreamLayer:
    hidden, count, inputs = spec.hidden, streams.count, streams.inputs

    def norm(name: str) -> RmsNorm:
        return RmsNorm(weights.take(f"{root}.{name}.weight", (hidden,)), spec.eps)

    def matrix(name: str, width: int, out: int) -> Linear:
        return linear(weights, [Matrix(f"{root}.{name}", width, out)])

    def small(name: str, *shape: int) -> torch.Tensor:
        return weights.take(f"{root}.altup.{name}", shape)

    return StreamLayer(
        active=streams.active,
        router_norm=norm("altup.router_norm"),
        router=small("modality_router.weight", count, hidden),
        prediction=small("prediction_coefs.weight", count * count, count),
        correction=small("correction_coefs.weight", count, count),
        scale=small("correct_output_scale", hidden) if streams.scaled else None,
        left=matrix("laurel.linear_left", hidden, streams.rank),
        right=matrix("laurel.linear_right", streams.rank, hidden),
        beside_norm=norm("laurel.post_laurel_norm"),
        gate=matrix("per_layer_input_gate", hidden, inputs),
        projection=matrix("per_layer_projection", inputs, hidden),
        input_norm=norm("post_per_layer_input_norm"),
    )
