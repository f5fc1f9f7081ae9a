"""The forward pass over several residual streams, and its parts of the checkpoint."""

import torch

from engine.backends.layers.linear import Linear
from engine.backends.layers.norm import RmsNorm
from engine.backends.layers.operations import Halves, Operations, X
from engine.backends.layers.streams import Ends, LayerInputs, StreamLayer
from engine.model_spec import ModelSpec, StreamsSpec
from engine.models.linears import Matrix, embedding, linear
from engine.models.weights import Weights


class Streams:
    """Runs the layers of a decoder whose spec has `streams`."""

    def __init__(self, spec: ModelSpec, streams: StreamsSpec, weights: Weights) -> None:
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

    def __call__(self, do: Operations[X], x: X, blocks: list[Halves]) -> X:
        """x: the embeddings of the step's tokens. The residual stream before the last norm, perhaps of
        the sampled rows alone."""
        steps = do.streams(x)
        inputs = steps.inputs(self._inputs)
        streams = steps.begin(self._ends)
        for number, (block, layer) in enumerate(zip(blocks, self._layers, strict=True)):
            predicted, h = steps.predict(layer, streams, block.norms[0])
            y, kept = steps.attention(block, h)
            if kept is not None:
                predicted, h, inputs = (
                    each.index_select(0, kept) for each in (predicted, h, inputs)
                )
            if not len(h):
                return steps.end(self._ends, predicted)
            streams = steps.change(layer, block, y, predicted, h)
            streams = steps.add_input(layer, streams, inputs[:, number])
        return steps.end(self._ends, streams)


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
