"""Samples the tokens of a whole batch from its logits.

Order: penalties and bias, temperature, truncation, softmax, sample. The random number of a row
depends only on its own seed, choice and position, so other rows cannot change it.
"""

import secrets
from dataclasses import dataclass

import torch

from engine.batch import NOT_FINITE, Row, Sampled
from engine.decoding.penalties import Penalties
from engine.decoding.splitmix import mix
from engine.decoding.truncation import draw
from engine.layers.transfer import on_device
from engine.protocol import SamplingParams

_GREEDY_BELOW = 1e-5  # a temperature this small is greedy: dividing by it would overflow
_STRIPE = 128


@dataclass(frozen=True, slots=True)
class Choice:
    """Sampled tokens, still on the device."""

    tokens: torch.Tensor  # [rows]; NOT_FINITE for a row whose logits are
    logprobs: torch.Tensor | None  # of the sampled token: [rows]
    top: tuple[torch.Tensor, torch.Tensor] | None  # values and ids: [rows, largest `logprobs`]


class Sampler:
    """Keeps the penalty counts and random keys of each sequence until `forget`."""

    def __init__(self, vocab: int, eos: tuple[int, ...], device: torch.device) -> None:
        self._device = device
        self._penalties = Penalties(vocab, eos, device)
        self._keys: dict[int, int] = {}

    def __call__(self, rows: list[Row], logits: torch.Tensor) -> Choice:
        """logits: float32 [rows, vocab], changed in place."""
        self._penalties.apply_(rows, logits)
        stochastic = [n for n, row in enumerate(rows) if row.sampling.temperature >= _GREEDY_BELOW]
        tokens = self._choose(rows, logits, stochastic)
        self._penalties.count(rows, tokens)
        logprobs, top = _logprobs(rows, logits, tokens)
        # The greatest logit is NaN or infinite wherever one of the row is. For a greedy row it is
        # the chosen one, whose look-up costs less than another pass over the vocabulary.
        greatest = logits.amax(-1) if stochastic else _chosen(logits, tokens)
        return Choice(refuse_not_finite(tokens, greatest), logprobs, top)

    def forget(self, seq: int) -> None:
        self._penalties.forget(seq)
        self._keys.pop(seq, None)

    def _choose(self, rows: list[Row], logits: torch.Tensor, stochastic: list[int]) -> torch.Tensor:
        if not stochastic:
            return best_ids(logits)
        params = [rows[n].sampling for n in stochastic]
        uniforms = [self._uniform(rows[n]) for n in stochastic]
        if len(stochastic) == len(rows):
            return draw(logits, params, uniforms)
        tokens = best_ids(logits)
        index = on_device(stochastic, self._device)
        tokens[index] = draw(logits[index], params, uniforms)
        return tokens

    def _uniform(self, row: Row) -> float:
        """A number in [0, 1) that depends on this row's seed, choice and position."""
        seed = row.sampling.seed
        if seed is None:
            key = self._keys.setdefault(row.seq, secrets.randbits(64))
        else:
            key = mix(seed ^ mix(row.choice + 1))
        position = row.start + len(row.tokens)
        return float(mix(key + 0x9E3779B97F4A7C15 * position) >> 12) * 2.0**-52


def refuse_not_finite(tokens: torch.Tensor, greatest: torch.Tensor) -> torch.Tensor:
    """`tokens`, with NOT_FINITE in the rows whose greatest logit is not a finite number."""
    return tokens.masked_fill(~torch.isfinite(greatest), NOT_FINITE)


def _chosen(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return logits.gather(-1, tokens[:, None])[:, 0]


def best_ids(logits: torch.Tensor) -> torch.Tensor:
    """The first id of each row's greatest logit: [rows].

    In two stages, because torch vectorises a row's maximum on a CPU but not its argmax.
    """
    rows, vocab = logits.shape
    if vocab % _STRIPE:
        return logits.argmax(-1)
    stripes = logits.view(rows, -1, _STRIPE)
    stripe = stripes.amax(-1).argmax(-1)
    inside = stripes[torch.arange(rows, device=logits.device), stripe]
    return stripe * _STRIPE + inside.argmax(-1)


def host_samples(rows: list[Row], choice: Choice) -> list[Sampled]:
    """Waits for the device and returns the step's tokens."""
    tokens = choice.tokens.tolist()
    if choice.logprobs is None:
        return [Sampled(row.seq, token) for row, token in zip(rows, tokens, strict=True)]
    logprobs = choice.logprobs.tolist()
    values, ids = ([], []) if choice.top is None else (t.tolist() for t in choice.top)
    samples = []
    for n, (row, token) in enumerate(zip(rows, tokens, strict=True)):
        counts = row.sampling.logprobs
        if counts is None:
            samples.append(Sampled(row.seq, token))
            continue
        top = tuple(zip(ids[n][:counts], values[n][:counts], strict=True)) if counts else ()
        samples.append(Sampled(row.seq, token, logprobs[n], top))
    return samples


def _logprobs(
    rows: list[Row], logits: torch.Tensor, tokens: torch.Tensor
) -> tuple[torch.Tensor | None, tuple[torch.Tensor, torch.Tensor] | None]:
    """Log-probabilities after penalties and bias, before temperature and truncation."""
    counts = [_logprob_count(row.sampling) for row in rows]
    if max(counts) < 0:
        return None, None
    log_probs = logits - torch.logsumexp(logits, -1, keepdim=True)
    chosen = log_probs.gather(-1, tokens[:, None])[:, 0]
    largest = min(max(counts), logits.shape[-1])
    if largest == 0:
        return chosen, None
    top = log_probs.topk(largest, -1)
    return chosen, (top.values, top.indices)


def _logprob_count(params: SamplingParams) -> int:
    return -1 if params.logprobs is None else params.logprobs
