"""The words of many pieces of one text, which is tokenised once.

Words never contain white space, so inside a piece its words are those of the text. Only its two
ends, where a piece may begin or end within a word, are tokenised separately.
"""

from bisect import bisect_left
from collections.abc import Sequence

from msgspec import Struct

from moderation.classifiers.features import MOST_WORDS, TOKEN, words_of

Cuts = Sequence[tuple[int, int]]
_MOST_PIECES = 16
_LONGEST_RUN = 8_000  # characters


class Piece(Struct, frozen=True):
    """A piece's words: `head`, then `first` to `last` (exclusive) of the text's, then `tail`."""

    head: list[str]
    first: int = 0
    last: int = 0
    tail: list[str] = []


def runs(cuts: Cuts) -> list[Cuts]:
    """Split the cuts, in order, into runs of nearby cuts of limited total length."""
    found: list[Cuts] = []
    begin = 0
    for at, (_, end) in enumerate(cuts):
        if at - begin == _MOST_PIECES or end - cuts[begin][0] > _LONGEST_RUN:
            found.append(cuts[begin:at])
            begin = at
    return [each for each in (*found, cuts[begin:]) if each]


def read_pieces(text: str, cuts: Cuts) -> tuple[list[str], list[Piece]]:
    """Return the words of a folded text and its pieces."""
    lowered = text.lower()
    if len(lowered) != len(text):
        return [], [Piece(words_of(text[start:end])) for start, end in cuts]
    found = list(TOKEN.finditer(lowered))
    words, starts = [each.group() for each in found], [each.start() for each in found]
    pieces = []
    for start, end in cuts:
        first, last = _next_space(text, start, end), _last_space(text, start, end)
        if first >= last or end - start > MOST_WORDS:
            pieces.append(Piece(words_of(text[start:end])))
            continue
        head, tail = words_of(text[start:first]), words_of(text[last:end])
        pieces.append(Piece(head, bisect_left(starts, first), bisect_left(starts, last), tail))
    return words, pieces


def _next_space(text: str, start: int, end: int) -> int:
    """Return the first offset from which no word began before the piece."""
    if start and not text[start - 1].isspace():
        while start < end and not text[start].isspace():
            start += 1
    return start


def _last_space(text: str, start: int, end: int) -> int:
    """Return the last offset up to which no word continues after the piece."""
    if end < len(text) and not text[end].isspace():
        while start < end and not text[end - 1].isspace():
            end -= 1
    return end
