"""Deny and allow lists: one Aho-Corasick pass, then word boundaries; the longest term wins.

A space of a phrase matches any run of white space and fillers, line breaks included.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from ahocorasick_rs import AhoCorasick
from msgspec import Struct
from msgspec.structs import replace

from moderation.loose import loosen_text
from moderation.matching import MAX_HITS, Hit
from moderation.normalise import FILLER, fold, lower
from moderation.verdict import Action

LONGEST_TERM = 128
MOST_TERMS = 20_000
# The widest gap, in characters, over which two words still read as one phrase.
WIDEST_GAP = 32
_GAP = re.compile(rf"[\s{FILLER}]+")
_UNUSUAL_GAP = re.compile(rf"[\s{FILLER}]{{2,{WIDEST_GAP}}}|[^\S ]|{FILLER}")


@dataclass(frozen=True, slots=True)
class Term:
    """A tenant's word or phrase; a hit must cover at least `least` original characters."""

    text: str
    action: Action = Action.BLOCK
    category: str = "deny_list"
    least: int = 0


@dataclass(frozen=True)
class TermMatcher:
    """Finds terms in a folded, lower-cased text; offsets are those of the text given."""

    terms: tuple[Term, ...]

    @cached_property
    def _by_key(self) -> dict[str, Term]:
        by_key: dict[str, Term] = {}
        for term in self.terms:
            key = term_key(term.text)
            known = by_key.get(key)
            if known is None or term.action > known.action:
                by_key[key] = term
        return by_key

    @cached_property
    def _keys(self) -> list[str]:
        return sorted(self._by_key)

    @cached_property
    def _automaton(self) -> AhoCorasick:
        return AhoCorasick(self._keys)

    @cached_property
    def _heads(self) -> frozenset[str]:
        return frozenset(key[:end] for key in self._keys for end in range(1, len(key) + 1))

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._keys), default=0)

    @cached_property
    def strictest_action(self) -> Action:
        return max((term.action for term in self._by_key.values()), default=Action.ALLOW)

    @cached_property
    def _has_phrases(self) -> bool:
        return any(" " in key for key in self._keys)

    @cached_property
    def _reach(self) -> int:
        """The most characters that a hit can cover."""
        return max((len(key) + key.count(" ") * WIDEST_GAP for key in self._keys), default=0)

    def _collapsed(self, text: str, start: int) -> "_Collapsed | None":
        """The text from `start` on with every gap as one space, and from the character before it,
        which decides whether a word starts there. None if the text is already so."""
        if not self._has_phrases or _UNUSUAL_GAP.search(text, max(0, start - 1)) is None:
            return None
        return _Collapsed.of(text, max(0, start - 1))

    def find(self, text: str, start: int = 0) -> list[Hit]:
        if not self._by_key:
            return []
        collapsed = self._collapsed(text, start)
        if collapsed is None:
            return self._found(text, start)
        hits = self._found(collapsed.text, 0)
        begins = [collapsed.original(hit.start) for hit in hits]
        return [
            replace(hit, start=begin, end=collapsed.original(hit.end - 1) + 1)
            for begin, hit in zip(begins, hits, strict=True)
            if begin >= start
        ]

    def _found(self, text: str, start: int) -> list[Hit]:
        best: dict[int, tuple[int, int]] = {}
        keys = self._keys
        matches = self._automaton.find_matches_as_indexes(text, overlapping=True)
        for number, begin, end in matches:
            if begin >= start and end > best.get(begin, (0, 0))[0] and bounded(text, begin, end):
                best[begin] = (end, number)
            if len(best) > MAX_HITS:
                begin = max(best)
                best[begin] = (len(text), best[begin][1])
                break
        return [self._hit(begin, end, keys[number]) for begin, (end, number) in best.items()]

    def _hit(self, begin: int, end: int, key: str) -> Hit:
        term = self._by_key[key]
        return Hit(begin, end, term.category, f"term:{term.category}", term.action, term.least)

    def hold(self, text: str, start: int = 0) -> int:
        collapsed = self._collapsed(text, max(start, len(text) - self._reach))
        if collapsed is None:
            return self._begun(text, start)
        read = collapsed.text
        first = next((i for i in range(len(read)) if collapsed.original(i) >= start), len(read))
        begin = self._begun(read, first)
        return collapsed.original(begin) if begin < len(read) else len(text)

    def _begun(self, text: str, start: int) -> int:
        """The first index from which the end of the text is the beginning of a term."""
        heads = self._heads
        for begin in range(max(start, len(text) - self._longest), len(text)):
            if text[begin:] in heads and starts_word(text, begin):
                return begin
        return len(text)


class _Collapsed(Struct, frozen=True):
    """A text with every gap as one space; `places[i]` is an index in it from which on the original
    index is higher by `shifts[i]`."""

    text: str
    places: list[int]
    shifts: list[int]

    @classmethod
    def of(cls, text: str, start: int) -> "_Collapsed":
        pieces: list[str] = []
        places, shifts, shift, at = [0], [start], start, start
        for gap in _UNUSUAL_GAP.finditer(text, start):
            pieces += [text[at : gap.start()], " "]
            at = gap.end()
            shift += at - gap.start() - 1
            places.append(at - shift)
            shifts.append(shift)
        pieces.append(text[at:])
        return cls("".join(pieces), places, shifts)

    def original(self, index: int) -> int:
        return index + self.shifts[bisect_right(self.places, index) - 1]


def is_word_character(character: str) -> bool:
    """Whether a character joins with its neighbour to a word; never in scripts without spaces."""
    if character.isascii():
        return character.isalnum() or character == "_"
    point = ord(character)
    spaceless = 0x0E00 <= point < 0x1100 or 0x2E80 <= point < 0xE000 or point >= 0x20000
    return character.isalnum() and not spaceless


def starts_word(text: str, at: int) -> bool:
    return not (at and is_word_character(text[at]) and is_word_character(text[at - 1]))


def bounded(text: str, start: int, end: int) -> bool:
    """Whether a match has no word character directly before or after it."""
    if not starts_word(text, start):
        return False
    if end == len(text):
        return True
    return not (is_word_character(text[end - 1]) and is_word_character(text[end]))


def term_key(term: str) -> str:
    return _GAP.sub(" ", lower(fold(term).text)).strip()


def loose_terms(terms: Iterable[Term]) -> tuple[Term, ...]:
    """Return the terms in the spelling of the loose view.

    In that view "assss" becomes "as". A squeezed spelling therefore counts only where the original
    is longer than the term, so that "as" is never read as "ass".
    """
    variants: list[Term] = []
    for term in terms:
        key = term_key(term.text)
        loose = loosen_text(key)
        variants.append(Term(loose, term.action, term.category))
        squeezed = "".join(c for i, c in enumerate(loose) if not i or c != loose[i - 1])
        if squeezed != loose:
            variants.append(Term(squeezed, term.action, term.category, len(key) + 1))
    return tuple(variants)
