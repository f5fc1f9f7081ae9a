"""A row with guesses as sampling sees it: one row for each token that it may give.

Each is sampled from the model's own distribution, with the random number of its position, and the
answer goes on while what was sampled equals the guess. A guess is one id, so this is rejection
sampling of a distribution that has one: accepted with the id's probability, otherwise replaced by one
of the rest.
"""

from dataclasses import replace

from engine.batch import Row, Sampled
from engine.decoding.edits import edits_read_history


def sampled_rows(row: Row, first: int) -> list[Row]:
    """first: the id of the row's first token, where sampling reads the history."""
    if not row.drafts:
        return [row]
    history = row.history
    if edits_read_history(row.sampling):
        history = [*history[: row.start], first, *row.tokens[1:]]
    known = len(row.tokens) - row.drafts
    return [
        replace(row, tokens=row.tokens[:end], history=history, drafts=0)
        for end in range(known, len(row.tokens) + 1)
    ]


def verified(rows: list[Row], sampled: list[Sampled]) -> list[Sampled]:
    """One result for each row, of the results of its `sampled_rows`."""
    if len(rows) == len(sampled):
        return sampled
    results, each = [], iter(sampled)
    for row in rows:
        found = [next(each) for _ in range(1 + row.drafts)]
        results.append(_verify(row, found) if row.drafts else found[0])
    return results


def _verify(row: Row, found: list[Sampled]) -> Sampled:
    """The tokens up to the first that is not the guess, or up to one that could not be sampled: it is
    computed again."""
    if not found[0].tokens:
        return found[0]
    guesses = row.tokens[len(row.tokens) - row.drafts :]
    count = 1
    while count <= row.drafts and found[count - 1].tokens == guesses[count - 1 : count]:
        if not found[count].tokens:
            break
        count += 1
    tokens = [each.tokens[0] for each in found[:count]]
    if found[0].logprobs is None:
        return Sampled(row.seq, tokens)
    return Sampled(row.seq, tokens, [p for each in found[:count] for p in each.logprobs or ()])
