"""Samples one token per row from logits truncated by top-nσ, min-p, typical, top-k and top-p.

An id's share is a whole number: its probability in units of 2^-34 of the likeliest id's. Sums of
them in float64 are exact up to 2^19 ids, so the same in any order: a kernel that sums in another way
chooses the same ids. What the units drop is at most 2^-34 of the likeliest id's probability for each
id, in all 0.001 % for 128k ids.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from engine.backends.layers.transfer import on_device
from engine.protocol import SamplingParams

GREEDY_BELOW = 1e-5  # a temperature this small is greedy
_UNIT = 2.0**34  # the share of the likeliest id
_NO_SHARE = -30.0  # a gap; exp(-30) is 2^-43
_CANDIDATES = 256  # sorted first for top-p; the whole vocabulary only if their mass is too small

Exponential = Callable[[Tensor], Tensor]  # of float32 numbers up to 0


def draw(
    logits: Tensor,
    params: list[SamplingParams],
    uniforms: list[float],
    exponential: Exponential = torch.exp,
) -> Tensor:
    """logits: float32 [rows, vocab], not changed. uniforms: one number in [0, 1) per row.

    Returns ids [rows], by inversion of each row's cumulative distribution over the ids.
    """
    gaps = _gaps_of(logits, [p.temperature for p in params])
    _mask_low_(gaps, params)
    _mask_atypical_(gaps, params)
    u = on_device(uniforms, logits.device, torch.float64)
    ranked = [n for n, p in enumerate(params) if p.top_k > 0 or p.top_p < 1.0]
    if not ranked:
        return _invert(_shares(gaps, exponential), u)
    if len(ranked) == len(params):
        return _draw_ranked(gaps, params, u, exponential)
    rest = [n for n in range(len(params)) if n not in ranked]
    tokens = torch.empty(len(params), dtype=torch.int64, device=logits.device)
    tokens[rest] = _invert(_shares(gaps[rest], exponential), u[rest])
    asked = [params[n] for n in ranked]
    tokens[ranked] = _draw_ranked(gaps[ranked], asked, u[ranked], exponential)
    return tokens


def excludes_rare(params: SamplingParams) -> bool:
    """Whether ids are excluded by a measure of all of the row's logits: top-nσ or typical."""
    return params.top_n_sigma > 0 or params.typical_p < 1


def without_rare(logits: Tensor, params: list[SamplingParams]) -> Tensor:
    """`logits`, or a copy of them without the ids that top-nσ and typical exclude: [rows, vocab]."""
    narrow = [n for n, p in enumerate(params) if p.temperature >= GREEDY_BELOW and excludes_rare(p)]
    if not narrow:
        return logits
    asked = [params[n] for n in narrow]
    index = on_device(narrow, logits.device)
    part = logits[index]
    gaps = _gaps_of(part, [p.temperature for p in asked])
    _mask_low_(gaps, asked)
    _mask_atypical_(gaps, asked)
    part.masked_fill_(gaps == -math.inf, -math.inf)
    return logits.index_copy(0, index, part)


def _gaps_of(logits: Tensor, temperatures: list[float]) -> Tensor:
    """How far each logit is below its row's greatest, over the temperature: float32, up to 0."""
    steps = on_device(temperatures, logits.device, torch.float32)[:, None]
    return (logits - logits.amax(-1, keepdim=True)).div_(steps)


def _mask_low_(gaps: Tensor, params: list[SamplingParams]) -> None:
    """Masks ids below the threshold of min-p or top-nσ (arXiv 2407.01082, 2411.07641)."""
    if not any(p.min_p > 0 or p.top_n_sigma > 0 for p in params):
        return
    device = gaps.device
    logs = [math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params]
    floor = on_device(logs, device)[:, None]
    if any(p.top_n_sigma > 0 for p in params):
        widths = on_device([p.top_n_sigma or math.inf for p in params], device)[:, None]
        floor = torch.maximum(floor, -widths * _deviation(gaps))
    gaps.masked_fill_(gaps < floor, -math.inf)


def _mask_atypical_(gaps: Tensor, params: list[SamplingParams]) -> None:
    """Keeps the ids whose surprise is nearest to the expected one, up to the mass `typical_p`
    (arXiv 2202.00666)."""
    if all(p.typical_p >= 1 for p in params):
        return
    logs = torch.log_softmax(gaps, -1)
    shares = logs.exp()
    entropy = -(shares * logs).nansum(-1, keepdim=True)
    order = (-logs - entropy).abs().argsort(-1)
    sorted_shares = shares.gather(-1, order)
    before = sorted_shares.cumsum(-1) - sorted_shares
    masses = on_device([p.typical_p if p.typical_p < 1 else math.inf for p in params], gaps.device)
    outside = torch.empty_like(before, dtype=torch.bool)
    outside.scatter_(-1, order, before >= masses[:, None])
    gaps.masked_fill_(outside, -math.inf)


def _deviation(scaled: Tensor) -> Tensor:
    """Standard deviation of each row's finite numbers: [rows, 1]."""
    finite = torch.isfinite(scaled)
    count = finite.sum(-1, keepdim=True)
    values = scaled.masked_fill(~finite, 0.0)
    mean = values.sum(-1, keepdim=True) / count
    squares = ((values - mean) * finite).square().sum(-1, keepdim=True)
    return (squares / (count - 1).clamp(min=1)).sqrt()


def _shares(gaps: Tensor, exponential: Exponential) -> Tensor:
    """Masked ids get the greatest gap whose share is certainly 0: of minus infinity, processors compute
    the exponential many times slower."""
    return exponential(gaps.clamp(min=_NO_SHARE)).mul_(_UNIT).floor_()


def _sum(shares: Tensor) -> Tensor:
    return shares.sum(-1, True, dtype=torch.float64)


def _draw_ranked(
    gaps: Tensor, params: list[SamplingParams], u: Tensor, exponential: Exponential
) -> Tensor:
    """Of the ids in top-k, and in top-p of what top-k leaves. Of equal logits the lower id ranks
    higher."""
    vocab = gaps.shape[-1]
    limits = on_device([p.top_k or vocab for p in params], gaps.device)[:, None]
    masses = on_device([p.top_p for p in params], gaps.device, torch.float64)[:, None]
    # One more than can be kept, which tells whether the last kept one has an equal.
    width = min(vocab, max(_CANDIDATES, *(p.top_k for p in params)) + 1)
    every = None  # the mass of all ids, where top-k is off
    if any(p.top_k == 0 for p in params):
        every = _sum(_shares(gaps, exponential))
    while True:
        values, ids = _greatest(gaps, width)
        beyond = torch.arange(width, device=gaps.device) >= limits
        own = _shares(values, exponential).masked_fill_(beyond, 0)
        total = _sum(own) if every is None else _sum(own).where(limits < vocab, every)
        needed = (masses * total).ceil().clamp(min=1)
        # Every rank has a share that is not negative, so that these are the first ones of a row.
        kept = (own.cumsum(-1, dtype=torch.float64) - own < needed) & ~beyond
        if width == vocab or not bool((kept[:, -1:] & (limits >= width)).any()):
            break
        width = vocab
    count = kept.sum(-1, True).clamp(min=1)
    last = values.gather(-1, count - 1)
    if ids is None or bool(
        (values.gather(-1, count.clamp(max=width - 1)) == last)[count < width].any()
    ):
        return _invert(_kept_of_all(gaps, last, count, values, exponential), u)
    order = ids.masked_fill(~kept, vocab).argsort(-1)
    place = _invert(own.masked_fill_(~kept, 0).gather(-1, order), u)
    return ids.gather(-1, order.gather(-1, place[:, None]))[:, 0]


def _kept_of_all(
    gaps: Tensor, last: Tensor, count: Tensor, values: Tensor, exponential: Exponential
) -> Tensor:
    """The shares of all ids; 0 but for so many of the greatest, of which `last` is the least."""
    shares = _shares(gaps, exponential)
    enough = gaps >= last
    shares.mul_(enough)
    if bool((enough.count_nonzero(-1)[:, None] > count).any()):
        equal = gaps == last
        ties = count - (values > last).sum(-1, True)
        shares.masked_fill_(equal & (equal.cumsum(-1) > ties), 0)
    return shares


def _greatest(gaps: Tensor, width: int) -> tuple[Tensor, Tensor | None]:
    """Each row's greatest numbers in order, [rows, width], and their ids where they are few."""
    if width < gaps.shape[-1] or gaps.device.type != "cpu":
        values, ids = gaps.topk(width, -1)
        return values, ids
    # A tenth of the time that torch takes.
    return torch.from_numpy(np.sort(gaps.numpy())).flip(-1), None


def _invert(shares: Tensor, u: Tensor) -> Tensor:
    """The first index at which the cumulative sum exceeds u times the total: [rows].

    Always a valid index, even where logits are NaN.
    """
    cumulated = shares.cumsum(-1, dtype=torch.float64)
    target = u[:, None] * cumulated[:, -1:]
    return torch.searchsorted(cumulated, target, right=True)[:, 0].clamp_(max=shares.shape[-1] - 1)
