"""Samples one token per row from logits truncated by top-nσ, min-p, typical, top-k and top-p."""

import math

import torch

from engine.layers.transfer import on_device
from engine.protocol import SamplingParams

_CANDIDATES = 256  # sorted first for top-p; the whole vocabulary only if their mass is too small


def draw(logits: torch.Tensor, params: list[SamplingParams], uniforms: list[float]) -> torch.Tensor:
    """logits: float32 [rows, vocab], not changed. uniforms: one number in [0, 1) per row.

    Returns ids [rows], by inversion of each row's cumulative distribution.
    """
    device = logits.device
    # One copy for both: float64 holds a temperature exactly, too.
    table = on_device([uniforms, [p.temperature for p in params]], device, torch.float64)
    u = table[0]
    scaled = logits / table[1, :, None].float()
    _mask_low_(scaled, params)
    _mask_atypical_(scaled, params)
    ranked = [n for n, p in enumerate(params) if p.top_k > 0 or p.top_p < 1.0]
    if not ranked:
        return _invert(torch.softmax(scaled, -1), u)
    if len(ranked) == len(params):
        return _draw_ranked(scaled, params, u)
    index = on_device(ranked, device)
    tokens = _invert(torch.softmax(scaled, -1), u)
    tokens[index] = _draw_ranked(scaled[index], [params[n] for n in ranked], u[index])
    return tokens


def _mask_low_(scaled: torch.Tensor, params: list[SamplingParams]) -> None:
    """Masks logits below the threshold of min-p or top-nσ (arXiv 2407.01082, 2411.07641)."""
    if not any(p.min_p > 0 or p.top_n_sigma > 0 for p in params):
        return
    device = scaled.device
    best = scaled.amax(-1, keepdim=True)
    logs = [math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params]
    floor = best + on_device(logs, device)[:, None]
    if any(p.top_n_sigma > 0 for p in params):
        widths = on_device([p.top_n_sigma or math.inf for p in params], device)[:, None]
        floor = torch.maximum(floor, best - widths * _deviation(scaled))
    scaled.masked_fill_(scaled < floor, -math.inf)


def _mask_atypical_(scaled: torch.Tensor, params: list[SamplingParams]) -> None:
    """Keeps the ids whose surprise is nearest to the expected one, up to the mass `typical_p`
    (arXiv 2202.00666)."""
    if all(p.typical_p >= 1 for p in params):
        return
    device = scaled.device
    logs = torch.log_softmax(scaled, -1)
    shares = logs.exp()
    entropy = -(shares * logs).nansum(-1, keepdim=True)
    order = (-logs - entropy).abs().argsort(-1)
    sorted_shares = shares.gather(-1, order)
    before = sorted_shares.cumsum(-1) - sorted_shares
    masses = on_device([p.typical_p if p.typical_p < 1 else math.inf for p in params], device)
    outside = torch.empty_like(before, dtype=torch.bool)
    outside.scatter_(-1, order, before >= masses[:, None])
    scaled.masked_fill_(outside, -math.inf)


def _deviation(scaled: torch.Tensor) -> torch.Tensor:
    """Standard deviation of each row's finite logits: [rows, 1]."""
    finite = torch.isfinite(scaled)
    count = finite.sum(-1, keepdim=True)
    values = scaled.masked_fill(~finite, 0.0)
    mean = values.sum(-1, keepdim=True) / count
    squares = ((values - mean) * finite).square().sum(-1, keepdim=True)
    return (squares / (count - 1).clamp(min=1)).sqrt()


def _draw_ranked(
    scaled: torch.Tensor, params: list[SamplingParams], u: torch.Tensor
) -> torch.Tensor:
    vocab = scaled.shape[-1]
    device = scaled.device
    limits = on_device([p.top_k or vocab for p in params], device)[:, None]
    masses = on_device([p.top_p for p in params], device)[:, None]
    width = min(vocab, max(_CANDIDATES, *(p.top_k for p in params)))
    # Whether the candidates are too few is known only on the device, and reading it would make the
    # host wait for the step: on a GPU top-p without top-k sorts the whole vocabulary.
    if device.type != "cpu" and any(p.top_k == 0 for p in params):
        width = vocab
    while True:
        values, ids = scaled.topk(width, -1)
        beyond = torch.arange(width, device=device) >= limits
        values = values.masked_fill(beyond, -math.inf)
        # The total mass: of the candidates that top-k leaves, or of all ids where top-k is off.
        total = torch.where(
            limits < vocab, torch.logsumexp(values, -1, True), torch.logsumexp(scaled, -1, True)
        )
        shares = (values - total).exp()
        before = shares.cumsum(-1) - shares
        too_few = (limits > width) & (before[:, -1:] + shares[:, -1:] < masses)
        if width == vocab or all(p.top_k > 0 for p in params):  # `too_few` need not be read
            break
        if not bool(too_few.any()):
            break
        width = vocab
    outside = before >= masses
    outside[:, 0] = False
    rank = _invert(shares.masked_fill(outside, 0.0), u)
    return ids.gather(-1, rank[:, None])[:, 0]


def _invert(shares: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """The first index at which the cumulative sum exceeds u times the total: [rows].

    Always a valid index, even where logits are NaN.
    """
    cumulated = shares.cumsum(-1, dtype=torch.float64)
    target = u[:, None] * cumulated[:, -1:]
    return torch.searchsorted(cumulated, target, right=True)[:, 0].clamp_(max=shares.shape[-1] - 1)
