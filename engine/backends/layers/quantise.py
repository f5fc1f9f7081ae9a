"""Float matrices to 8-bit and 4-bit codes in groups of 32."""

import torch
import torch.nn.functional as F

from engine.backends.layers.packed import GROUP, Codes

_SHARES = tuple(1 - 0.025 * step for step in range(13))  # of a group's range, tried for 4 bits
_TURNS = 3
_ROWS = 2048  # quantised at once


def quantize(
    weight: torch.Tensor,
    to: str,
    inputs: torch.Tensor | None = None,
    *,
    zero_points: bool = False,
) -> Codes:
    """`weight` [out, in] in float32; `to` is int8 (symmetric) or int4 (with a minimum a group).
    `inputs` [in]: the mean square of each input, by which its column's errors weigh; else all alike.
    `zero_points`: each minimum is minus the scale times a whole number from 0 to 15, as in files."""
    by = _grouped(torch.ones(1, weight.shape[1]) if inputs is None else inputs[None])
    by = by.clamp(min=1e-6 * float(by.mean()))  # an input that the text never used
    four = _by_zero_point if zero_points else _by_minimum
    parts = [_int8(part) if to == "int8" else four(part, by) for part in torch.split(weight, _ROWS)]
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


def _by_minimum(
    weight: torch.Tensor, by_input: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales and minima of 4 bits, of least squared error in shares of `by_input` [1, groups, 32]:
    from each narrowed range, codes and the line through them are fitted in turns. Both numbers of a line
    are what float16 holds before codes are chosen, so that nothing but the codes is off."""
    groups = _grouped(weight)
    low, high = groups.amin(2), groups.amax(2)
    total = by_input.sum(2)
    mean = (groups * by_input).sum(2) / total
    best = torch.full_like(low, torch.inf)
    codes = torch.zeros_like(groups, dtype=torch.uint8)
    scales, minima = torch.zeros_like(low), torch.zeros_like(low)
    for share in _SHARES:
        scale = _stored((high - low) * share / 15)
        minimum = _stored((low + high - (high - low) * share) / 2)
        for _ in range(_TURNS):
            by = scale.clamp(min=1e-30)[:, :, None]
            tried = ((groups - minimum[:, :, None]) / by).round().clamp(0, 15)
            found = tried * scale[:, :, None] + minimum[:, :, None]
            error = ((found - groups).square() * by_input).sum(2)
            better = error < best
            best = torch.where(better, error, best)
            codes = torch.where(better[:, :, None], tried.to(torch.uint8), codes)
            scales = torch.where(better, scale, scales)
            minima = torch.where(better, minimum, minima)
            middle = (tried * by_input).sum(2) / total
            steps = (tried - middle[:, :, None]) * by_input
            rise = (steps * (groups - mean[:, :, None])).sum(2)
            run = (steps * (tried - middle[:, :, None])).sum(2)
            scale = _stored((rise / run.clamp(min=1e-30)).clamp(min=0))
            minimum = _stored(mean - scale * middle)
    return codes, scales, minima


def _by_zero_point(
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
