"""Changes of single logits on the host: a list of (id, amount) for a row, which are added.

An amount of minus infinity excludes the id. Each function is pure: it reads the row's parameters and
its ids so far, and nothing of other rows.
"""

from collections.abc import Callable, Iterable
from math import inf

from engine.batch import Row
from engine.decoding.repeats import dry_edits, lz_edits
from engine.protocol import SamplingParams

Edit = Callable[[Row], Iterable[tuple[int, float]]]


def edits_for(params: SamplingParams, eos: tuple[int, ...], vocab: int) -> tuple[Edit, ...]:
    """The changes that a request asks for."""
    found: list[Edit] = []
    if params.dry_multiplier > 0:
        found.append(dry_edits)
    if params.lz_penalty > 0:
        found.append(lambda row: lz_edits(row, vocab))
    if params.logit_bias:
        found.append(lambda row: row.sampling.logit_bias.items())
    if params.bad_words:
        found.append(_bad_words)
    if params.min_tokens > 0:
        ends = tuple((token, -inf) for token in {*eos, *params.stop_token_ids})
        found.append(lambda row: ends if _too_short(row) else ())
    return tuple(found)


def reads_history(params: SamplingParams) -> bool:
    """Whether a change or the grammar depends on the last sampled id, which the host must know."""
    return params.grammar is not None or edits_read_history(params)


def edits_read_history(params: SamplingParams) -> bool:
    return (
        params.dry_multiplier > 0
        or params.lz_penalty > 0
        or any(len(word) > 1 for word in params.bad_words)
    )


def penalised(params: SamplingParams) -> bool:
    """Whether a penalty depends on how often each id was generated."""
    return (
        params.repetition_penalty != 1.0
        or params.frequency_penalty != 0.0
        or params.presence_penalty != 0.0
    )


def _too_short(row: Row) -> bool:
    return row.position - row.prompt_len < row.sampling.min_tokens


def _bad_words(row: Row) -> Iterable[tuple[int, float]]:
    """The last id of every word whose other ids are the end of the history."""
    end = row.position
    for word in row.sampling.bad_words:
        lead = len(word) - 1
        if lead == 0 or (lead <= end and row.history[end - lead : end] == list(word[:-1])):
            yield word[-1], -inf
