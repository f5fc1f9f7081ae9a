"""Deny and allow lists: one Aho-Corasick pass, then word boundaries; the longest term wins."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from ahocorasick_rs import AhoCorasick

from moderation.loose import loosen_text
from moderation.matching import MAX_HITS, Hit
from moderation.normalise import fold, lower
from moderation.verdict import Action

LONGEST_TERM = 128
MOST_TERMS = 20_000


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

    def find(self, text: str, start: int = 0) -> list[Hit]:
        if not self._by_key:
            return []
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
        heads = self._heads
        for begin in range(max(start, len(text) - self._longest), len(text)):
            if text[begin:] in heads and starts_word(text, begin):
                return begin
        return len(text)


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
    return lower(fold(term).text).strip()


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
