"""Patterns on RE2, whose time is linear in the text, so that no pattern can hang the gateway.

A pattern matches at most `longest` characters. With this bound a stream can be judged: a character
is safe once `longest` more have arrived, or at once where `head` shows that no match begins there.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

import re2

from moderation.errors import BadPattern
from moderation.matching import MAX_HITS, Hit
from moderation.verdict import Action

MAX_MATCH_LENGTH = 512
DEFAULT_MATCH_LENGTH = 128
MAX_PATTERN_LENGTH = 1_000
_MEMORY_BYTES = 1 << 20
# Candidates that a validator may refuse in one text before shorter ones are no longer tried.
_MAX_REFUSALS = 500
# Long texts are searched in pieces, because RE2's Python binding copies its input on each call.
_SLICE = 4_096


@lru_cache(maxsize=4096)
def compile_pattern(source: str) -> "re2._Regexp":
    """Compile a pattern with a memory limit. Raises BadPattern with RE2's reason."""
    if not source:
        raise BadPattern("an empty pattern matches everything; write at least one character")
    if len(source) > MAX_PATTERN_LENGTH:
        raise BadPattern(f"the pattern has {len(source)} characters; at most {MAX_PATTERN_LENGTH}")
    options = re2.Options()
    options.log_errors = False
    options.max_mem = _MEMORY_BYTES
    try:
        compiled = re2.compile(source, options)
    except re2.error as error:
        raise BadPattern(f"RE2 refuses the pattern: {_reason(error)}") from None
    except UnicodeEncodeError:
        raise BadPattern("the pattern has a lone surrogate: remove it") from None
    if compiled.search("") is not None:
        raise BadPattern("the pattern matches the empty text; make some part of it mandatory")
    return compiled


def _reason(error: Exception) -> str:
    cause = error.args[0] if error.args else error
    return cause.decode(errors="replace") if isinstance(cause, bytes) else str(cause)


@dataclass(frozen=True)
class PatternMatcher:
    """Finds one pattern. `accepts` validates candidates; `head` (stdlib `re`) narrows the hold.

    A text that contains none of `needs` has no match; this check is ten times as fast as a search.
    """

    name: str
    source: str
    action: Action
    category: str = "pattern"
    longest: int = DEFAULT_MATCH_LENGTH
    accepts: Callable[[str], bool] | None = None
    head: re.Pattern[str] | None = None
    needs: tuple[str, ...] = ()
    part: re.Pattern[str] | None = None  # is in every match, and is found faster than the pattern
    head_of: str = ""  # all characters that a head may have, if they are few
    head_from: str = ""  # what every head begins with
    head_ends: frozenset[str] = frozenset()  # characters that no head has; nor white space then

    @property
    def strictest_action(self) -> Action:
        return self.action

    @property
    def _slice(self) -> int:
        return _SLICE + 2 * self.longest

    def find(self, text: str, start: int = 0) -> list[Hit]:
        return self.hits(text, start) if self.may_find(text, start) else []

    def hits(self, text: str, start: int) -> list[Hit]:
        """As `find`, where `may_find` is known to hold."""
        if self.part is not None and self.part.search(text, start) is None:
            return []
        return [
            Hit(begin, end, self.category, self._rule, self.action)
            for begin, end in self._spans(text, start)
        ]

    @cached_property
    def _rule(self) -> str:
        return f"{self.category}:{self.name}"

    def may_find(self, text: str, start: int = 0) -> bool:
        """Whether the text contains any of `needs`, and so may have a match."""
        return not self.needs or self._needed.search(text, start) is not None

    @cached_property
    def _needed(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self.needs)))

    def _spans(self, text: str, start: int) -> Iterator[tuple[int, int]]:
        refusals = accepted_count = 0
        while start < len(text):
            # Includes the character before `start`, so that ^ and \b see it.
            base = max(0, start - 1)
            piece = text[base : start + self._slice]
            certain = (
                len(text) if base + len(piece) == len(text) else start + self._slice - self.longest
            )
            found = self._first(piece, start - base)
            if found is None or base + found[0] >= certain:
                start = certain
                continue
            begin, end = found
            accepted = end - begin <= self.longest and self._accepted(piece[begin:end])
            if accepted:
                accepted_count += 1
                if accepted_count > MAX_HITS:
                    yield base + begin, len(text)
                    return
                yield base + begin, base + end
                start = base + end
                continue
            refusals += 1
            start = base + (begin + 1 if refusals <= _MAX_REFUSALS else max(end, begin + 1))

    def _first(self, piece: str, start: int) -> tuple[int, int] | None:
        pattern = compile_pattern(self.source)
        # As bytes the binding counts no characters, which takes longer than the search.
        given: str | bytes = piece.encode() if piece.isascii() else piece
        found = pattern.search(given, start)
        if found is None:
            return None
        begin, end = found.span()
        if end - begin > self.longest:
            shorter = pattern.match(given, begin, begin + self.longest)
            end = end if shorter is None else shorter.end()
        return begin, end

    def _accepted(self, candidate: str) -> bool:
        return self.accepts is None or self.accepts(candidate)

    def hold(self, text: str, start: int = 0) -> int:
        length = len(text)
        first = length - self.longest
        first = first if first > start else start
        if self.head is None:
            return first
        # A head ends where the text does. These look at its end, which the search finds last.
        if self.head_ends and (text[-1:] in self.head_ends or text[-1:].isspace()):
            return length
        if self.head_of:
            first = max(first, len(text.rstrip(self.head_of)))
        if self.head_from:
            first = text.find(self.head_from, first)
        if not 0 <= first < length:
            return length
        found = self.head.search(text, first)
        return len(text) if found is None else found.start()
