"""Builds a model's linear layers and its embedding in the format that their weights have."""

from dataclasses import dataclass

import torch

from engine.backends.compiled.linear import RowGatedLinear, RowLinear, is_fast
from engine.backends.layers.device.linear import DeviceLinear
from engine.backends.layers.device.matrix import from_codes
from engine.backends.layers.embedding import DenseEmbedding, Embedding
from engine.backends.layers.linear import DenseGatedLinear, DenseLinear, GatedLinear, Linear
from engine.backends.layers.packed import Codes, joined, pack
from engine.backends.layers.quantised_linear import (
    QuantizedEmbedding,
    QuantizedGatedLinear,
    QuantizedLinear,
)
from engine.models.weights import Weights


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
        return float_linear(_dense(weights, matrices), bias, weights.by_row, few_rows)
    parts = _joined(coded, bias)
    if weights.on_device:
        return _device_linear(weights, parts)
    return QuantizedLinear([pack(*part) for part in parts])


def gated_linear(
    weights: Weights, gate: Matrix, up: Matrix, *, few_rows: bool = False
) -> GatedLinear:
    matrices = [gate, up]
    coded, bias = _codes(weights, matrices), _bias(weights, matrices)
    if coded is None:
        return float_gated_linear(_dense(weights, matrices), bias, weights.by_row, few_rows)
    if weights.on_device:
        return _device_linear(weights, _joined(coded, bias))
    first, second = (None, None) if bias is None else bias.chunk(2)
    return QuantizedGatedLinear(pack(coded[0], first), pack(coded[1], second))


def embedding_and_head(
    weights: Weights, shape: tuple[int, int], name: str, head_name: str | None
) -> tuple[Embedding, Linear]:
    """The token table, and the matrix of the logits: the same where it has no name."""
    coded = _table_codes(weights, shape, name)
    if coded is None:
        table = weights.take(name, shape)
        head = (
            _head(weights, shape, head_name)
            if head_name
            else float_linear(table, by_row=weights.by_row)
        )
        return DenseEmbedding(table), head
    packed = pack(coded)
    head = _head(weights, shape, head_name) if head_name else QuantizedLinear([packed])
    return QuantizedEmbedding(packed, weights.dtype), head


def embedding(weights: Weights, shape: tuple[int, int], name: str) -> Embedding:
    """An embedding table other than the token table."""
    coded = _table_codes(weights, shape, name)
    if coded is None:
        return DenseEmbedding(weights.take(name, shape))
    return QuantizedEmbedding(pack(coded), weights.dtype)


def _table_codes(weights: Weights, shape: tuple[int, int], name: str) -> Codes | None:
    """None on a GPU, where a table is in floats."""
    return None if weights.on_device else weights.codes(name, shape, embedding=True)


def float_linear(
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    by_row: bool = False,
    few_rows: bool = False,
) -> Linear:
    """by_row: each row by itself, however fast that is."""
    by_row = by_row or is_fast(weight, few_rows=few_rows)
    return RowLinear(weight, bias) if by_row else DenseLinear(weight, bias)


def float_gated_linear(
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    by_row: bool = False,
    few_rows: bool = False,
) -> GatedLinear:
    by_row = by_row or is_fast(weight, few_rows=few_rows)
    return (RowGatedLinear if by_row else DenseGatedLinear)(weight, bias)


def _head(weights: Weights, shape: tuple[int, int], name: str) -> Linear:
    coded = weights.codes(name, shape, embedding=True)
    if coded is None:
        return float_linear(weights.take(name, shape), by_row=weights.by_row)
    if weights.on_device:
        return _device_linear(weights, [(coded, None)])
    return QuantizedLinear([pack(coded)])


def _joined(
    coded: list[Codes], bias: torch.Tensor | None
) -> list[tuple[Codes, torch.Tensor | None]]:
    """Neighbours of one format as one, with their part of the bias."""
    groups: list[list[Codes]] = []
    for codes in coded:
        if groups and groups[-1][0].format == codes.format:
            groups[-1].append(codes)
        else:
            groups.append([codes])
    parts = [joined(same) for same in groups]
    if bias is None:
        return [(part, None) for part in parts]
    biases = torch.split(bias, [part.shape[0] for part in parts])
    return list(zip(parts, biases, strict=True))


def _device_linear(
    weights: Weights, parts: list[tuple[Codes, torch.Tensor | None]]
) -> DeviceLinear:
    return DeviceLinear([from_codes(*part).to(weights.device) for part in parts])


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
    """Zeros for a matrix without one if others have one."""
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
