"""Float matrices to 8-bit and 4-bit codes in groups of 32."""

import torch
import torch.nn.functional as F

from engine.backends.layers.packed import GROUP, Codes

_SHARES = tuple(1 - 0.025 * step for step in range(13))  # of a group's range, tried for 4 bits
_ROWS = 2048  # quantised at once


def quantize(weight: torch.Tensor, to: str, inputs: torch.Tensor | None = None) -> Codes:
    """`weight` [out, in] in float32; `to` is int8 (symmetric) or int4 (with a zero point a group).
    `inputs` [in]: the mean square of each input, by which its column's errors weigh; else all alike."""
    by = _grouped(torch.ones(1, weight.shape[1]) if inputs is None else inputs[None])
    by = by.clamp(min=1e-6 * float(by.mean()))  # an input that the text never used
    parts = [
        _int8(part) if to == "int8" else _int4(part, by) for part in torch.split(weight, _ROWS)
    ]
    codes, scales, minima = (torch.cat(each) for each in zip(*parts, strict=True))
    codes = codes.flatten(1)[:, : weight.shape[1]].contiguous()
    if to == "int8":
        return Codes(codes, scales, None, 8, GROUP, 128)
    return Codes(codes, scales, minima, 4, GROUP, 0)


def _grouped(weight: torch.Tensor) -> torch.Tensor:
    """[out, groups, 32]; the last value fills a group that is not whole."""
    rest = -weight.shape[1] % GROUP
    if rest:
        weight = F.pad(weight[None], (0, rest), mode="replicate")[0]
    return weight.reshape(weight.shape[0], -1, GROUP)


def _int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    groups = _grouped(weight)
    scales = _stored(groups.abs().amax(2) / 127)
    codes = (groups / scales.clamp(min=1e-30)[:, :, None]).round().clamp(-127, 127)
    return (codes + 128).to(torch.uint8), scales, scales


def _int4(
    weight: torch.Tensor, by_input: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The range of each group is narrowed to where the squared error, in shares of `by_input`
    [1, groups, 32], is least."""
    groups = _grouped(weight)
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    best = torch.full_like(low, torch.inf)
    codes = torch.zeros_like(groups, dtype=torch.uint8)
    scales, zeros = torch.zeros_like(low), torch.zeros_like(low)
    for share in _SHARES:
        scale = _stored((high - low) * share / 15)
        by = scale.clamp(min=1e-30)
        zero = (-low * share / by).round().clamp(0, 15)
        tried = (groups / by[:, :, None] + zero[:, :, None]).round().clamp(0, 15)
        steps = tried - zero[:, :, None]
        # The scale that fits these codes best, by least squares.
        fitted = (steps * groups * by_input).sum(2)
        fitted /= (steps.square() * by_input).sum(2).clamp(min=1e-30)
        scale = _stored(fitted.clamp(min=0))
        error = ((steps * scale[:, :, None] - groups).square() * by_input).sum(2)
        better = error < best
        best = torch.where(better, error, best)
        codes = torch.where(better[:, :, None], tried.to(torch.uint8), codes)
        scales, zeros = torch.where(better, scale, scales), torch.where(better, zero, zeros)
    return codes, scales, -scales * zeros


def _stored(scales: torch.Tensor) -> torch.Tensor:
    """As float16 holds them, so that codes are chosen for the scale that is served; a group too
    small for that becomes zeros."""
    return scales.half().float()
