"""Two penalties on tokens that would continue a repeat of earlier text: DRY and LZ.

Both find, for each earlier place in a window, how many ids before it equal the end of the history:
the length of the repeat that the id at that place would continue.
"""

import math

import numpy as np
from numpy.typing import NDArray

from engine.batch import Row

_DRY_WINDOW = 1024  # ids looked back
_LZ_WINDOW = 512
_LONGEST = 48  # longer repeats are penalised like one of this length


def dry_edits(row: Row) -> list[tuple[int, float]]:
    """DRY ("don't repeat yourself", as in llama.cpp): minus multiplier * base ** (repeat - allowed) for
    the id that would continue the longest repeat, if the repeat has the allowed length or more."""
    params = row.sampling
    window = _window(row, _DRY_WINDOW)
    most: dict[int, int] = {}
    for place, length in _repeats(window, frozenset(params.dry_breakers)):
        token = int(window[place])
        most[token] = max(length, most.get(token, 0))
    return [
        (token, -params.dry_multiplier * params.dry_base ** (length - params.dry_allowed_length))
        for token, length in most.items()
        if length >= params.dry_allowed_length and token not in params.dry_breakers
    ]


def lz_edits(row: Row, vocab: int) -> list[tuple[int, float]]:
    """The LZ penalty (arXiv 2504.20131): minus strength * the nats that LZ77 saves on the id.

    An id costs ln(vocab) as a literal. As the end of a match of `length` ids at `distance`, each of
    its ids costs (ln(distance) + ln(length)) / length.
    """
    window = _window(row, _LZ_WINDOW)
    lengths = np.ones(len(window))
    for place, length in _repeats(window, frozenset()):
        lengths[place] = length + 1
    costs = (np.log(len(window) - np.arange(len(window))) + np.log(lengths)) / lengths
    saved = math.log(vocab) - costs
    best: dict[int, float] = {}
    for token, nats in zip(window.tolist(), saved.tolist(), strict=True):
        if nats > best.get(token, 0.0):
            best[token] = nats
    return [(token, -row.sampling.lz_penalty * nats) for token, nats in best.items()]


def _window(row: Row, size: int) -> NDArray[np.int64]:
    end = row.position
    return np.array(row.history[max(0, end - size) : end], np.int64)


def _repeats(
    window: NDArray[np.int64], breakers: frozenset[int]
) -> list[tuple[int, int]]:  # fmt: skip
    """(place, repeat): the `repeat` ids before `place` equal the last ones; at least one."""
    last = len(window) - 1
    if last < 1 or int(window[last]) in breakers:
        return []
    ids = window.tolist()
    found = []
    for end in np.nonzero(window[:last] == window[last])[0].tolist():
        length = 1
        while (
            length < min(_LONGEST, end + 1)
            and ids[end - length] == ids[last - length]
            and ids[last - length] not in breakers
        ):
            length += 1
        found.append((end + 1, length))
    return found
