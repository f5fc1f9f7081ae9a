"""The experts of a layer as a GPU computes them: two stacks of matrices."""

from dataclasses import replace

import torch

from engine.backends.layers.device.matrix import DeviceMatrix, from_codes, from_floats, stacked
from engine.backends.layers.packed import Codes, joined
from engine.errors import CheckpointError
from engine.model_spec import ExpertsSpec, ModelSpec
from engine.models.weights import Weights

_Part = tuple[str, int, int]  # a matrix by name, its outputs and inputs


def device_experts(
    spec: ModelSpec, experts: ExpertsSpec, roots: list[str], weights: Weights
) -> tuple[DeviceMatrix, DeviceMatrix]:
    """(gate and up, down) of the experts at `roots`. Raises CheckpointError naming the tensor."""
    gate, up, down = experts.names
    size, hidden = experts.intermediate, spec.hidden
    inner = [[(f"{each}.{name}", size, hidden) for name in (gate, up)] for each in roots]
    outer = [[(f"{each}.{down}", hidden, size)] for each in roots]
    return _stack(inner, weights), _stack(outer, weights)


def _stack(parts: list[list[_Part]], weights: Weights) -> DeviceMatrix:
    coded = [
        [weights.codes(f"{name}.weight", (out, width)) for name, out, width in each]
        for each in parts
    ]
    flat = [codes for each in coded for codes in each if codes is not None]
    whole = len(flat) == sum(map(len, coded))
    if flat and whole and len({(codes.zero, codes.minima is None) for codes in flat}) > 1:
        flat = [_from_zero(codes) for codes in flat]
    matrices, first = [], 0
    for each in parts:
        bias = _bias(each, weights)
        if not whole:
            held = [weights.take(f"{name}.weight", (out, width)) for name, out, width in each]
            matrices.append(from_floats(torch.cat(held), bias))
            continue
        codes = flat[first : first + len(each)]
        first += len(each)
        if any(one.format != codes[0].format for one in codes):
            raise CheckpointError(
                f"{each[0][0]} and {each[1][0]} are stored in two formats or orders of their inputs, "
                "which a GPU does not compute: set device to cpu"
            )
        matrices.append(from_codes(joined(codes), bias).to(weights.device))
    try:
        return stacked(matrices)
    except ValueError as error:
        raise CheckpointError(
            f"experts in the layer of {parts[0][0][0]} use different quantisation, {error}: "
            "set device to cpu"
        ) from None


def _from_zero(codes: Codes) -> Codes:
    """The same values with codes from 0 and minima."""
    low = -codes.scales * codes.zero
    return replace(codes, zero=0, minima=low if codes.minima is None else codes.minima + low)


def _bias(parts: list[_Part], weights: Weights) -> torch.Tensor | None:
    found = [weights.take_optional(f"{name}.bias", (out,)) for name, out, _ in parts]
    some = next((each for each in found if each is not None), None)
    if some is None:
        return None
    return torch.cat(
        [
            some.new_zeros(out) if each is None else each
            for each, (_, out, _) in zip(found, parts, strict=True)
        ]
    )
