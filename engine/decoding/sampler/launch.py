"""Chooses the tokens of a batch in one launch, after one copy of what its rows ask for."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.backends.gpu.launch import power_of_two
from engine.backends.layers.transfer import on_device
from engine.decoding.sampler.kernel import sample_kernel
from engine.decoding.truncation import GREEDY_BELOW
from engine.protocol import SamplingParams

_BLOCK = 4096  # ids in one iteration


@dataclass(frozen=True, slots=True)
class LastTokens:
    """Where the step after this one finds the tokens chosen now."""

    tokens: Tensor  # int64, by sequence row
    rows: Tensor  # int32: the sequence row of each row of logits


def sample(
    logits: Tensor,
    params: list[SamplingParams],
    uniforms: list[float],
    last: LastTokens,
    block: int = _BLOCK,
) -> Tensor:
    """The token of each row of `logits`, [rows, vocab] contiguous in the last dimension: int64 [rows],
    -1 where a row's logits are not finite. `uniforms`: one number in [0, 1) for each row, 0 for those
    that are greedy. Of `params` temperature, min-p, top-k and top-p are followed."""
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    greedy = all(each.temperature < GREEDY_BELOW for each in params)
    parameters = kept = last.tokens
    if not greedy:
        table = [_parameters(*pair) for pair in zip(params, uniforms, strict=True)]
        parameters = on_device(table, logits.device, torch.float64)
        kept = torch.empty(rows, vocab, device=logits.device)
    block = min(block, power_of_two(vocab))
    sample_kernel[(rows,)](
        tokens, last.tokens, last.rows, logits, parameters, kept, vocab, logits.stride(0),
        GREEDY=greedy, BLOCK=block, num_warps=max(1, min(16, block // 256)),
        enable_fp_fusion=False,  # a product and a sum are rounded one by one, as torch does
    )  # fmt: skip
    return tokens


def _parameters(params: SamplingParams, uniform: float) -> list[float]:
    temperature = 0.0 if params.temperature < GREEDY_BELOW else params.temperature
    floor = math.log(params.min_p) if params.min_p > 0 else -math.inf
    return [temperature, uniform, floor, params.top_p, params.top_k, 0.0]
