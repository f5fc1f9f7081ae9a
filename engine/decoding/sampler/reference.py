"""The torch reference of the sampling kernel: the rules of `decoding/truncation.py`, with an
exponential whose every operation rounds as the kernel's does."""

import torch
from torch import Tensor

from engine.decoding.truncation import GREEDY_BELOW, draw
from engine.protocol import SamplingParams

_FACTORS = [
    1.535336188319500e-4, 1.339887440266574e-3, 9.618437357674640e-3, 5.550332471162809e-2,
    2.402264791363012e-1, 6.931472028550421e-1, 1.0,
]  # fmt: skip


def exponential_reference(gaps: Tensor) -> Tensor:
    """Of float32 numbers up to 0: the powers of 2 of Cephes' exp2f."""
    power = gaps.clamp(min=-40.0) * 1.4426950408889634
    whole = (power + 0.5).floor()
    x = power - whole
    value = torch.full_like(x, _FACTORS[0])
    for each in _FACTORS[1:]:
        value = value * x + each
    return value * ((whole.int() + 127) << 23).view(torch.float32)


def sample_reference(logits: Tensor, params: list[SamplingParams], uniforms: list[float]) -> Tensor:
    """The token of each row: int64 [rows], -1 where its logits are not finite."""
    logits = logits.float()
    greatest, tokens = logits.max(-1)
    for n, each in enumerate(params):
        if each.temperature >= GREEDY_BELOW:
            row = logits[n : n + 1]
            tokens[n] = draw(row, [each], [uniforms[n]], exponential_reference)[0]
    return tokens.masked_fill(~torch.isfinite(greatest), -1)
