"""The log-probabilities of prompt tokens, from the logits of the positions before them.

They are the model's own: no penalty, bias, mask or temperature changes them.
"""

from dataclasses import replace

import torch

from engine.backends.layers.logits import log_normalisers
from engine.batch import Row, Sampled
from engine.protocol import PromptLogprob

Scoring = list[tuple[Row, torch.Tensor]]  # the rows that score their prompt, with those logits


def split_logits(rows: list[Row], logits: torch.Tensor) -> tuple[torch.Tensor, Scoring]:
    """The logits of sampled tokens, and apart from them those that score prompts. `rows` are in the
    order of the logits; see `Row.logit_tokens`."""
    if not any(row.scored for row in rows):
        return logits, []
    sampled, scoring, at = [], [], 0
    for row in rows:
        if row.scored:
            scoring.append((row, logits[at : at + row.scored]))
            at += row.scored
        sampled.append(logits[at : at + row.sampled_tokens])
        at += row.sampled_tokens
    return torch.cat(sampled), scoring


def host_scores(scoring: Scoring) -> dict[int, Sampled]:
    """By sequence; an error where a logit is not finite."""
    return {row.seq: _scored(row, logits) for row, logits in scoring}


def with_scores(sampled: list[Sampled], scores: dict[int, Sampled]) -> list[Sampled]:
    """Adds the scores to the result of their sequence, or as one of their own."""
    if not scores:
        return sampled
    left = dict(scores)
    merged = [_merged(each, left.pop(each.seq, None)) for each in sampled]
    return merged + list(left.values())


def _merged(sampled: Sampled, scored: Sampled | None) -> Sampled:
    if scored is None:
        return sampled
    return scored if scored.error else replace(sampled, scores=scored.scores)


def _scored(row: Row, logits: torch.Tensor) -> Sampled:
    log_probs = logits - log_normalisers(logits)
    first = row.start + 1
    tokens = row.history[first : first + row.scored]
    chosen = log_probs.gather(-1, torch.tensor(tokens)[:, None])
    if not torch.isfinite(chosen).all():
        return Sampled(row.seq, [], error="the prompt's logits are not finite")
    ranks = (log_probs > chosen).sum(-1).add(1).tolist()
    top = log_probs.topk(min(row.sampling.prompt_logprobs or 0, logits.shape[-1]), -1)
    values, ids = top.values.tolist(), top.indices.tolist()
    best = [tuple(zip(*each, strict=True)) for each in zip(ids, values, strict=True)]
    listed = zip(tokens, chosen[:, 0].tolist(), ranks, best, strict=True)
    scores = [PromptLogprob(*each) for each in listed]
    return Sampled(row.seq, [], scores=scores)
