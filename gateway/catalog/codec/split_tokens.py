"""The control tokens before which a text can be split, and one pattern that finds them.

A token is left out where a match of any added token can span its start: the token stands within the
other one, or begins with an end of it. An automaton of all tokens (Aho and Corasick, 1975) finds these
in time that is linear in their length; a comparison of each pair is quadratic, and models have
thousands of tokens.
"""

import re
from collections.abc import Sequence
from itertools import groupby, takewhile

# Beyond these a prompt is not split, and is encoded as a whole each time.
_MOST_CHARACTERS = 1_000_000
_MOST_TOKENS = 20_000
_LONGEST = 64  # characters; longer tokens are no split points


def split_pattern(candidates: Sequence[str], added: Sequence[str]) -> re.Pattern[str] | None:
    """Of those candidates that no token of `added`, which has them too, overlaps. None: there are none,
    or the tokens are too many to be searched for."""
    if len(added) > _MOST_TOKENS or sum(map(len, added)) > _MOST_CHARACTERS:
        return None
    overlapped = _overlapped(added)
    kept = [each for each in candidates if len(each) <= _LONGEST and each not in overlapped]
    return re.compile(_alternatives(sorted(set(kept)))) if kept else None


def _overlapped(texts: Sequence[str]) -> set[str]:
    """Those within another text, and those that begin with an end of any text (their own, too)."""
    automaton = _Automaton(texts)
    for text in texts:
        automaton.read(text)
    return automaton.overlapped()


class _Automaton:
    """A node is a beginning of a text; its link, the longest beginning that is a proper end of it."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._link = [0]
        self._texts = {text: self._add(text) for text in texts}
        self._whole = set(self._texts.values())
        waiting = list(self._next[0].values())
        for node in waiting:  # grows: by length
            for character, child in self._next[node].items():
                self._link[child] = self._step(self._link[node], character)
                waiting.append(child)
        self._within: set[int] = set()  # nodes that stand within a text, or at its end
        self._at_end: set[int] = set()

    def read(self, text: str) -> None:
        node = 0
        for place, character in enumerate(text, 1):
            node = self._step(node, character)
            # The text itself does not overlap itself, as a whole.
            same = place == len(text)
            self._mark(self._link[node] if same else node, self._within)
        self._mark(self._link[node], self._at_end)

    def overlapped(self) -> set[str]:
        """A beginning that is some text's end overlaps all texts that begin so."""
        found = set()
        for text, last in self._texts.items():
            node = 0
            for character in text:
                node = self._next[node][character]
                if node in self._at_end:
                    found.add(text)
            if last in self._within:
                found.add(text)
        return found

    def _mark(self, node: int, marked: set[int]) -> None:
        while node and node not in marked:
            marked.add(node)
            node = self._link[node]

    def _step(self, node: int, character: str) -> int:
        while node and character not in self._next[node]:
            node = self._link[node]
        return self._next[node].get(character, 0)

    def _add(self, text: str) -> int:
        node = 0
        for character in text:
            following = self._next[node].get(character)
            if following is None:
                following = self._next[node][character] = len(self._next)
                self._next.append({})
                self._link.append(0)
            node = following
        return node


def _alternatives(texts: list[str]) -> str:
    """A pattern of sorted texts, of which none begins with another: each character is read once."""
    shared = _shared(texts[0], texts[-1])
    if len(texts) == 1:
        return re.escape(shared)
    groups = groupby(texts, key=lambda text: text[len(shared)])
    inner = "|".join(_alternatives([text[len(shared) :] for text in group]) for _, group in groups)
    return f"{re.escape(shared)}(?:{inner})"


def _shared(first: str, last: str) -> str:
    """What both begin with, and so do all texts that are sorted between them."""
    pairs = zip(first, last, strict=False)
    return "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
