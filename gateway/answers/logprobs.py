"""Log probabilities of one choice, held until the text of their tokens is released.

An entry that shares a character with text that the guard removed is dropped, with its alternatives.
Offsets are in characters of the choice's text before the guard.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from msgspec import Struct

from engine.protocol import PromptLogprob, TokenLogprob


class CutSource(Protocol):
    """The part of an output guard that this module needs."""

    @property
    def cuts(self) -> Sequence[tuple[int, int]]:
        """Removed text: start and end offsets, in order."""

    def clean(self, text: str) -> str | None:
        """The text after the guard's rules; None where they block it."""


class _Entry(Struct):
    start: int
    end: int
    own: TokenLogprob | None = None
    upstream: dict[str, Any] | None = None


class LogprobQueue:
    """`own` entries are of token engines, `upstream` ones are objects of OpenAI's format."""

    def __init__(
        self, guard: CutSource | None, text_of: Callable[[int], str] = lambda _token: ""
    ) -> None:
        self._guard = guard
        self._text_of = text_of
        self._unplaced: list[TokenLogprob] = []  # their text is not complete yet
        self._placed_to = 0
        self._entries: deque[_Entry] = deque()
        self._limit: int | None = None
        self._next_cut = 0
        self._upstream = _UpstreamPlaces()

    def __bool__(self) -> bool:
        return bool(self._entries)

    def add(self, entry: TokenLogprob) -> None:
        self._unplaced.append(entry)

    def place(self, end: int) -> None:
        """The text is complete up to `end`: the added tokens have made it."""
        for each in self._unplaced:
            self._entries.append(_Entry(self._placed_to, end, own=each))
        self._unplaced.clear()
        self._placed_to = end

    def add_upstream(self, given: dict[str, Any] | None, text: str) -> None:
        """A chunk's text and its `logprobs` object, if it has one."""
        listed = (given or {}).get("content") or []
        for start, end, entry in self._upstream.add(listed, text):
            self._entries.append(_Entry(start, end, upstream=entry))

    def limit(self, end: int) -> None:
        """Text from `end` on never reached the guard (a stop string): drop its entries."""
        self._limit = end

    def take(self, released: float) -> tuple[list[TokenLogprob], list[dict[str, Any]]]:
        """The entries whose text lies before offset `released`."""
        own: list[TokenLogprob] = []
        upstream: list[dict[str, Any]] = []
        while self._entries and self._entries[0].end <= released:
            entry = self._entries.popleft()
            if self._is_cut(entry):
                continue
            if entry.own is not None:
                own.append(self._allowed_own(entry.own))
            elif entry.upstream is not None:
                upstream.append(self._allowed_upstream(entry.upstream))
        return own, upstream

    def allowed_prompt(self, scores: list[PromptLogprob]) -> list[PromptLogprob]:
        """The scores of the prompt without alternatives that the guard would remove."""
        if self._guard is None:
            return scores
        listed = {token for each in scores for token, _ in each.top}
        allowed = {token for token in listed if self._is_allowed(self._text_of(token))}
        return [
            replace(each, top=tuple(pair for pair in each.top if pair[0] in allowed))
            for each in scores
        ]

    def _allowed_own(self, entry: TokenLogprob) -> TokenLogprob:
        """The entry without alternatives that the guard would remove."""
        if self._guard is None or not entry.top:
            return entry
        top = [each for each in entry.top if self._is_allowed(self._text_of(each[0]))]
        return replace(entry, top=tuple(top))

    def _allowed_upstream(self, entry: dict[str, Any]) -> dict[str, Any]:
        if self._guard is None:
            return entry
        top = [each for each in entry["top_logprobs"] if self._is_allowed(each["token"])]
        return {**entry, "top_logprobs": top}

    def _is_allowed(self, text: str) -> bool:
        return self._guard is None or self._guard.clean(text) == text

    def _is_cut(self, entry: _Entry) -> bool:
        if self._guard is None:
            return False
        if self._limit is not None and entry.end > self._limit:
            return True
        cuts = self._guard.cuts
        while self._next_cut < len(cuts) and cuts[self._next_cut][1] <= entry.start:
            self._next_cut += 1
        if self._next_cut == len(cuts):
            return False
        start, end = cuts[self._next_cut]
        return start < entry.end and end > entry.start


class _UpstreamPlaces:
    """Finds the characters that an upstream's tokens stand for, by comparing bytes.

    Tokens may arrive before their text (an incomplete character). Tokens whose bytes are not those
    of the text are dropped, because it is unknown which text they stand for.
    """

    def __init__(self) -> None:
        self._raw = b""  # text, of which no token stands for the part from `_at` on
        self._at = 0
        self._tokens: deque[tuple[bytes, dict[str, Any]]] = deque()
        self._begun = 0  # characters of the text before `_raw`, the last one perhaps incomplete

    def add(self, listed: Sequence[Any], text: str) -> list[tuple[int, int, dict[str, Any]]]:
        if not listed and not self._tokens and self._at == len(self._raw):
            self._begun += len(text)
            return []
        self._raw, self._at = self._raw[self._at :] + text.encode("utf-8", "surrogatepass"), 0
        self._tokens += [(_bytes_of(each), _entry(each)) for each in listed if _valid(each)]
        placed: list[tuple[int, int, dict[str, Any]]] = []
        while self._tokens:
            raw, entry = self._tokens[0]
            if not self._raw.startswith(raw, self._at):
                if raw.startswith(self._raw[self._at : self._at + len(raw)]):
                    return placed  # the rest of its text follows
                self._tokens.clear()
                break
            self._tokens.popleft()
            start = self._begun - (1 if raw and _continues(raw[0]) else 0)
            self._skip(len(raw))
            placed.append((start, self._begun, entry))
        self._skip(len(self._raw) - self._at)
        return placed

    def _skip(self, count: int) -> None:
        skipped = self._raw[self._at : self._at + count]
        self._begun += (
            len(skipped) if skipped.isascii() else sum(not _continues(byte) for byte in skipped)
        )
        self._at += count


def _continues(byte: int) -> bool:
    """Whether a byte of UTF-8 continues a character."""
    return byte & 0xC0 == 0x80


def _entry(given: dict[str, Any]) -> dict[str, Any]:
    """An upstream's entry with the known fields only; the token's text is that of its bytes."""
    top = [_token(each) for each in given.get("top_logprobs") or () if _valid(each)]
    return {**_token(given), "top_logprobs": top}


def _token(given: dict[str, Any]) -> dict[str, Any]:
    text, raw = given["token"], given.get("bytes")
    if raw is not None:
        text = bytes(raw).decode("utf-8", "replace")
    return {"token": text, "logprob": given.get("logprob"), "bytes": raw}


def _valid(given: Any) -> bool:
    if not isinstance(given, dict) or not isinstance(given.get("token"), str):
        return False
    if not isinstance(given.get("logprob"), int | float | None):
        return False
    raw = given.get("bytes")
    return raw is None or (
        isinstance(raw, list) and all(isinstance(byte, int) and 0 <= byte < 256 for byte in raw)
    )


def _bytes_of(given: dict[str, Any]) -> bytes:
    raw = given.get("bytes")
    return bytes(raw) if raw is not None else str(given["token"]).encode("utf-8", "surrogatepass")
