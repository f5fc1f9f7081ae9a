"""Samples the tokens of a whole batch from its logits.

Each row's logits are changed by what its own request asks for, in this order:

1. the repetition, frequency and presence penalties (`penalties.py`)
2. DRY, the LZ penalty, logit_bias, bad_words and min_tokens, which are added up (`edits.py`)
3. allowed_token_ids and the grammar: every other id is excluded (`masks.py`, `grammar/`)
4. temperature
5. top-nσ and min-p, then typical, then top-k, then top-p of what top-k leaves (`truncation.py`)
6. softmax and one draw, or the greatest logit where the temperature is 0

Log-probabilities are reported as they are after step 3. The random number of a row depends only on
its own seed, choice and position, so other rows cannot change it.
"""

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.backends.compiled.linear import has_kernel
from engine.backends.compiled.pointwise import greatest_ids
from engine.backends.layers.logits import log_normalisers
from engine.backends.layers.transfer import on_device
from engine.batch import Row, Sampled
from engine.decoding.edits import Edit, edits_for, penalised
from engine.decoding.few import FewIds
from engine.decoding.grammar.step_masks import Begun, StepMasks
from engine.decoding.masks import Mask, exclude_, mask_of
from engine.decoding.penalties import Penalties
from engine.decoding.splitmix import mix
from engine.decoding.truncation import GREEDY_BELOW, draw, excludes_rare
from engine.protocol import SamplingParams, TokenLogprob

if TYPE_CHECKING:
    from engine.decoding.grammar.matchers import Matchers

_STRIPE = 128
_NOT_FINITE = -1  # in `Choice.tokens`: the row's logits are not finite, so no token was chosen

# Of logits [rows, vocab], what each row asks for, and a number in [0, 1) for each: its tokens, int64
# [rows], or -1. It follows the parameters of steps 4 to 6.
Choose = Callable[[torch.Tensor, list[SamplingParams], list[float]], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Choice:
    """Sampled tokens, still on the device."""

    tokens: torch.Tensor  # [rows]; -1 for a row whose logits are not finite
    logprobs: torch.Tensor | None  # of the sampled token: [rows]
    top: tuple[torch.Tensor, torch.Tensor] | None  # values and ids: [rows, largest `logprobs`]
    late: frozenset[int] = frozenset()  # rows to be computed again
    errors: Mapping[int, str] = field(default_factory=dict)  # by row


@dataclass(frozen=True, slots=True)
class _Changes:
    """What a sequence's request changes, decided once."""

    edits: tuple[Edit, ...]
    allowed: Mask | None
    plain: bool  # no logit is changed, nothing but the token is wanted, and a kernel chooses it


class Sampler:
    """Keeps the state of each sequence until `forget`."""

    def __init__(
        self,
        vocab: int,
        eos: tuple[int, ...],
        device: torch.device,
        matchers: "Matchers | None" = None,
        by_row: bool = False,
        choose: Choose | None = None,
    ) -> None:
        """by_row: each row is sampled by itself, so that the others cannot change its exponentials.
        choose: in place of torch's operations."""
        self._vocab = vocab
        self._eos = eos
        self._device = device
        self._matchers = matchers
        self._by_row = by_row
        self._choose = choose
        self._penalties = Penalties(vocab, device)
        self._keys: dict[int, int] = {}
        self._changes: dict[int, _Changes] = {}

    def begin(self, rows: list[Row]) -> Begun | None:
        """Start on the masks of the rows' grammars while their logits are computed."""
        return self._matchers.begin(rows) if self._matchers is not None else None

    def __call__(
        self,
        rows: list[Row],
        logits: torch.Tensor,
        begun: Begun | None = None,
        patience_s: float | None = None,
    ) -> Choice:
        """logits: float32 [rows, vocab], changed in place. begun: what `begin` returned for these
        rows. patience_s: how long to wait for their masks; None: until they are ready."""
        allowed = StepMasks()
        if begun is not None and self._matchers is not None:
            allowed = self._matchers.finish(begun, patience_s)
        self._process_(rows, logits, allowed)
        tokens = self.choose(rows, logits, allowed.few)
        self._penalties.count(rows, tokens)
        logprobs, top = _logprobs(rows, logits, tokens)
        return Choice(tokens, logprobs, top, frozenset(allowed.late), allowed.errors)

    def choose(
        self, rows: list[Row], logits: torch.Tensor, few: FewIds | None = None
    ) -> torch.Tensor:
        """Tokens from logits that need no change. Logits may have any float type where `choose` takes
        it. few: ids of rows that may sample no others."""
        uniforms = [0.0 if is_greedy(row.sampling) else self._uniform(row) for row in rows]
        params = [row.sampling for row in rows]
        if self._choose is not None:
            return self._choose(logits, params, uniforms)
        return self._choose_by_torch(logits, params, uniforms, few)

    def is_plain(self, row: Row) -> bool:
        """Whether `choose` alone gives the row's result."""
        return self._changes_for(row).plain

    def accept(self, rows: list[Row], sampled: list[Sampled]) -> list[Sampled]:
        """Tell the grammars which tokens were taken, of one row per sequence."""
        if self._matchers is None:
            return sampled
        return [
            self._accept(self._matchers, row, each)
            if row.sampling.grammar is not None and each.tokens
            else each
            for row, each in zip(rows, sampled, strict=True)
        ]

    def _accept(self, matchers: "Matchers", row: Row, sampled: Sampled) -> Sampled:
        """What was sampled after the grammar's end is dropped."""
        count = matchers.accept(row, sampled.tokens)
        if count is None:
            return sampled
        logprobs = None if sampled.logprobs is None else sampled.logprobs[:count]
        return replace(sampled, tokens=sampled.tokens[:count], logprobs=logprobs, ended=True)

    def forget(self, seq: int) -> None:
        self._penalties.forget(seq)
        self._keys.pop(seq, None)
        self._changes.pop(seq, None)
        if self._matchers is not None:
            self._matchers.forget(seq)

    def _process_(self, rows: list[Row], logits: torch.Tensor, allowed: StepMasks) -> None:
        self._penalties.apply_(rows, logits)
        at: list[tuple[int, int]] = []
        amounts: list[float] = []
        own: dict[int, Mask] = {}
        for n, row in enumerate(rows):
            changes = self._changes_for(row)
            for edit in changes.edits:
                for token, amount in edit(row):
                    at.append((n, token))
                    amounts.append(amount)
            if changes.allowed is not None:
                own[n] = changes.allowed
        if at:
            where = on_device(at, self._device).unbind(1)
            logits.index_put_(where, on_device(amounts, self._device), accumulate=True)
        if own:
            exclude_(logits, list(own), np.stack(list(own.values())))
        if allowed.masks is not None:
            exclude_(logits, allowed.index, allowed.masks)

    def _changes_for(self, row: Row) -> _Changes:
        found = self._changes.get(row.seq)
        if found is None:
            params = row.sampling
            allowed = params.allowed_token_ids
            found = self._changes[row.seq] = _Changes(
                edits_for(params, self._eos, self._vocab),
                mask_of(allowed, self._vocab) if allowed else None,
                _is_plain(params),
            )
        return found

    def _choose_by_torch(
        self,
        logits: torch.Tensor,
        params: list[SamplingParams],
        uniforms: list[float],
        few: FewIds | None,
    ) -> torch.Tensor:
        stochastic = [n for n, each in enumerate(params) if not is_greedy(each)]
        tokens = finite_best_ids(logits)
        if few is not None and stochastic:
            listed, found = few.drawn(logits, params, uniforms)
            index = on_device(listed, self._device)
            tokens[index] = found.where(tokens[index] >= 0, _NOT_FINITE)
            stochastic = sorted({*stochastic} - {*listed})
        if not stochastic:
            return tokens
        drawn = [(params[n], uniforms[n]) for n in stochastic]
        if self._by_row:
            for n, (each, uniform) in zip(stochastic, drawn, strict=True):
                one = draw(logits[n : n + 1], [each], [uniform])[0]
                tokens[n] = one.where(tokens[n] >= 0, _NOT_FINITE)
            return tokens
        asked, numbers = map(list, zip(*drawn, strict=True))
        if len(stochastic) == len(params):
            return draw(logits, asked, numbers).where(tokens >= 0, _NOT_FINITE)
        index = on_device(stochastic, self._device)
        found = draw(logits[index], asked, numbers)
        tokens[index] = found.where(tokens[index] >= 0, _NOT_FINITE)
        return tokens

    def _uniform(self, row: Row) -> float:
        """A number in [0, 1) that depends on this row's seed, choice and position."""
        seed = row.sampling.seed
        if seed is None:
            key = self._keys.setdefault(row.seq, secrets.randbits(64))
        else:
            key = mix(seed ^ mix(row.choice + 1))
        return float(mix(key + 0x9E3779B97F4A7C15 * row.position) >> 12) * 2.0**-52


def is_greedy(params: SamplingParams) -> bool:
    """Whether the greatest logit is the sampled token."""
    return params.temperature < GREEDY_BELOW


def _is_plain(params: SamplingParams) -> bool:
    return (
        (not excludes_rare(params) or is_greedy(params))
        and params.logprobs is None
        and not params.allowed_token_ids
        and params.grammar is None
        and not penalised(params)
        and not edits_for(params, (), 1)
    )


def finite_best_ids(logits: torch.Tensor) -> torch.Tensor:
    """`best_ids`, with -1 in the rows whose logits are not finite."""
    if logits.device.type == "cpu" and has_kernel() and logits.dtype is torch.float32:
        return greatest_ids(logits)
    # The greatest logit is NaN or infinite wherever one of the row is. It is the chosen one, whose
    # look-up costs less than another pass over the vocabulary.
    tokens = best_ids(logits)
    greatest = logits.gather(-1, tokens[:, None])[:, 0]
    return tokens.masked_fill(~torch.isfinite(greatest), _NOT_FINITE)


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
        none = [None] * len(rows)
        return [
            _sampled(n, rows, choice, *pair)
            for n, pair in enumerate(zip(tokens, none, strict=True))
        ]
    logprobs = choice.logprobs.tolist()
    values, ids = ([], []) if choice.top is None else (t.tolist() for t in choice.top)
    samples = []
    for n, (row, token) in enumerate(zip(rows, tokens, strict=True)):
        counts = row.sampling.logprobs
        if counts is None:
            samples.append(_sampled(n, rows, choice, token, None))
            continue
        if row.sampling.logprob_token_ids:
            counts = len(row.sampling.logprob_token_ids)
        top = tuple(zip(ids[n][:counts], values[n][:counts], strict=True)) if counts else ()
        if row.sampling.logprob_token_ids and token not in row.sampling.logprob_token_ids:
            top = ((token, logprobs[n]), *top)
        listed = [TokenLogprob(token, logprobs[n], top)]
        samples.append(_sampled(n, rows, choice, token, listed))
    return samples


def _sampled(
    n: int, rows: list[Row], choice: Choice, token: int, logprobs: list[TokenLogprob] | None
) -> Sampled:
    row = rows[n]
    if n in choice.errors:
        return Sampled(row.seq, [], error=choice.errors[n])
    if n in choice.late:
        return Sampled(row.seq, [])
    if token != _NOT_FINITE:
        return Sampled(row.seq, [token], logprobs)
    source = "the model" if row.adapter is None else "the model with its adapter"
    error = f"{source} computed logits that are not finite"
    params = row.sampling
    if params.grammar is not None or params.allowed_token_ids or params.bad_words:
        error = f"{error}, or the grammar, allowed_token_ids and bad_words leave no token"
    return Sampled(row.seq, [], error=error)


def _logprobs(
    rows: list[Row], logits: torch.Tensor, tokens: torch.Tensor
) -> tuple[torch.Tensor | None, tuple[torch.Tensor, torch.Tensor] | None]:
    """Log-probabilities after penalties and bias, before temperature and truncation."""
    counts = [_logprob_count(row.sampling) for row in rows]
    if max(counts) < 0:
        return None, None
    log_probs = logits - log_normalisers(logits)
    chosen = log_probs.gather(-1, tokens.clamp(min=0)[:, None])[:, 0]
    largest = min(max(counts), logits.shape[-1])
    named = {n: row.sampling.logprob_token_ids for n, row in enumerate(rows)}
    named = {n: ids for n, ids in named.items() if ids and counts[n] >= 0}
    width = max([largest, *map(len, named.values())])
    if width == 0:
        return chosen, None
    top = log_probs.topk(min(width, logits.shape[-1]), -1)
    values, indices = top.values, top.indices
    for n, ids in named.items():
        wanted = on_device(list(ids), logits.device)
        values[n, : len(ids)] = log_probs[n, wanted]
        indices[n, : len(ids)] = wanted
    return chosen, (values, indices)


def _logprob_count(params: SamplingParams) -> int:
    return -1 if params.logprobs is None else params.logprobs
