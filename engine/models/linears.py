"""Builds a model's linear layers and its embedding in the format that their weights have."""

from dataclasses import dataclass

import torch

from engine.dense.linear import RowGatedLinear, RowLinear, is_fast
from engine.layers.embedding import DenseEmbedding, Embedding
from engine.layers.linear import DenseGatedLinear, DenseLinear, GatedLinear, Linear
from engine.models.weights import Weights
from engine.quantization.linear import QuantizedEmbedding, QuantizedGatedLinear, QuantizedLinear
from engine.quantization.packed import Codes, joined, pack


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix of the checkpoint: `name` without its suffix."""

    name: str
    width: int
    out: int


def linear(weights: Weights, matrices: list[Matrix], *, few_rows: bool = False) -> Linear:
    """The matrices of one input, one above the other. `few_rows`: most steps have few for it."""
    coded, bias = _codes(weights, matrices), _bias(weights, matrices)
    if coded is None:
        return _float_linear(weights, _dense(weights, matrices), bias, few_rows)
    parts: list[tuple[list[Codes], int]] = []  # neighbours of one format, and where they begin
    first = 0
    for codes in coded:
        if parts and parts[-1][0][0].format == codes.format:
            parts[-1][0].append(codes)
        else:
            parts.append(([codes], first))
        first += codes.shape[0]
    packed = []
    for same, begin in parts:
        whole = joined(same)
        end = begin + whole.shape[0]
        packed.append(pack(whole, None if bias is None else bias[begin:end]))
    return QuantizedLinear(packed)


def gated_linear(
    weights: Weights, gate: Matrix, up: Matrix, *, few_rows: bool = False
) -> GatedLinear:
    matrices = [gate, up]
    coded, bias = _codes(weights, matrices), _bias(weights, matrices)
    if coded is None:
        weight = _dense(weights, matrices)
        by_row = weights.by_row or (few_rows and is_fast(weight))
        return (RowGatedLinear if by_row else DenseGatedLinear)(weight, bias)
    first, second = (None, None) if bias is None else bias.chunk(2)
    return QuantizedGatedLinear(pack(coded[0], first), pack(coded[1], second))


def embedding_and_head(
    weights: Weights, shape: tuple[int, int], name: str, head_name: str | None
) -> tuple[Embedding, Linear]:
    """The token table, and the matrix of the logits: the same where it has no name."""
    coded = weights.codes(name, shape, embedding=True)
    if coded is None:
        table = weights.take(name, shape)
        head = _head(weights, shape, head_name) if head_name else _float_linear(weights, table)
        return DenseEmbedding(table), head
    packed = pack(coded)
    head = _head(weights, shape, head_name) if head_name else QuantizedLinear([packed])
    return QuantizedEmbedding(packed, weights.dtype), head


def embedding(weights: Weights, shape: tuple[int, int], name: str) -> Embedding:
    """A table beside the token table."""
    coded = weights.codes(name, shape, embedding=True)
    if coded is None:
        return DenseEmbedding(weights.take(name, shape))
    return QuantizedEmbedding(pack(coded), weights.dtype)


def _float_linear(
    weights: Weights,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    few_rows: bool = False,
) -> Linear:
    by_row = weights.by_row or (few_rows and is_fast(weight))
    return RowLinear(weight, bias) if by_row else DenseLinear(weight, bias)


def _head(weights: Weights, shape: tuple[int, int], name: str) -> Linear:
    coded = weights.codes(name, shape, embedding=True)
    if coded is None:
        return _float_linear(weights, weights.take(name, shape))
    return QuantizedLinear([pack(coded)])


def _codes(weights: Weights, matrices: list[Matrix]) -> list[Codes] | None:
    """None unless all of them are quantised."""
    found = []
    for each in matrices:
        codes = weights.codes(f"{each.name}.weight", (each.out, each.width))
        if codes is None:
            return None
        found.append(codes)
    return found


def _dense(weights: Weights, matrices: list[Matrix]) -> torch.Tensor:
    return torch.cat(
        [weights.take(f"{each.name}.weight", (each.out, each.width)) for each in matrices]
    )


def _bias(weights: Weights, matrices: list[Matrix]) -> torch.Tensor | None:
    """Zeros for a matrix without one beside others that have one."""
    biases = [weights.take_optional(f"{each.name}.bias", (each.out,)) for each in matrices]
    first = next((bias for bias in biases if bias is not None), None)
    if first is None:
        return None
    return torch.cat(
        [
            first.new_zeros(each.out) if bias is None else bias
            for bias, each in zip(biases, matrices, strict=True)
        ]
    )
