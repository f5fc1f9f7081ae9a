"""Screens transcripts and translations of audio by the tenant's policy for answers.

What the policy blocks is refused; what it redacts is replaced, in every form of the answer. The text
stands in some forms more than once (segments, words, log-probabilities): these parts are screened
too, and left out where anything was removed, since parts of them cannot be separated from the rest.
"""

import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import orjson

from core.errors import ContentBlocked
from gateway.edge.threads import run_in_thread
from gateway.engines.server_events import DONE, EventReader, data_of, loads
from gateway.engines.surrogates import whole_texts
from gateway.request.output_guard import OutputGuard

GUARDS = 2  # per request: one for the text, one for the other fields
_INLINE_CHARACTERS = 1_000
_LONGEST_EVENT = 8 << 20  # bytes
# Of a JSON answer: they hold none of what was said.
_FACTS = frozenset(
    {
        *("task", "language", "duration", "usage", "type", "id", "item_id", "segment_id"),
        *("speaker", "object", "created", "model"),
    }
)
_TIME = r"(?:\d+:)?\d+:\d\d[.,]\d{3}"
_TIMING = re.compile(rf"\s*{_TIME}\s+-->\s+{_TIME}(?:\s+[a-z]+:\S+)*\s*")


class TranscriptBlocked(ContentBlocked):
    """`paid_by`: who pays for the audio under the policy, `tenant` or `operator`."""

    def __init__(self, paid_by: str) -> None:
        super().__init__(
            "The moderation policy blocked the transcript.",
            next_step="Ask your administrator about the policy.",
            param="file",
        )
        self.paid_by = paid_by


async def screened(body: bytes, guards: Sequence[OutputGuard]) -> bytes:
    """A whole answer as the policy leaves it: JSON, or text, SRT or WebVTT. Raises TranscriptBlocked."""
    if not guards:
        return body
    try:
        found = orjson.loads(body)
    except ValueError:
        found = None
    if isinstance(found, dict):
        return await _screened_json(body, found, guards)
    return await _screened_lines(body, guards[0])


async def _screened_json(
    body: bytes, found: dict[str, Any], guards: Sequence[OutputGuard]
) -> bytes:
    text = found.get("text")
    text = text if isinstance(text, str) else ""
    released = await _judged(guards[0], text)
    beside = unlike(text, _said({**found, "text": text}))
    if released == text and await _judged(guards[1], beside) == beside:
        return body
    return orjson.dumps({**_facts(found), "text": released})


async def _screened_lines(body: bytes, guard: OutputGuard) -> bytes:
    """The lines that were spoken are screened as one text, for a number may be cut by a line's end."""
    lines = body.decode("utf-8", "replace").splitlines(keepends=True)
    spoken = [number for number in range(len(lines)) if _is_spoken(lines, number)]
    texts = [lines[number].strip() for number in spoken]
    whole = " ".join(texts)
    released = await _judged(guard, whole)
    if released == whole:
        return body
    changed = _redacted(texts, released, guard.cuts)
    for number, before, after in zip(spoken, texts, changed, strict=True):
        lines[number] = lines[number].replace(before, after, 1)
    return "".join(lines).encode()


def _is_spoken(lines: Sequence[str], number: int) -> bool:
    """Not a cue's number, its timing, the head of WebVTT or empty."""
    line = lines[number].strip()
    if not line or (number == 0 and line.lstrip("\ufeff") == "WEBVTT") or _TIMING.fullmatch(line):
        return False
    numbers_a_cue = number + 1 < len(lines) and _TIMING.fullmatch(lines[number + 1])
    return not (line.isdigit() and numbers_a_cue)


def _redacted(texts: Sequence[str], released: str, cuts: Sequence[tuple[int, int]]) -> list[str]:
    """The texts, which were screened joined by spaces, without what was cut from them. What replaces
    a cut stands in the text in which it begins."""
    marks, at, until = list[tuple[int, int, str]](), 0, 0
    for start, end in cuts:
        at += start - until
        closing = released.index("]", at) + 1
        marks.append((start, end, released[at:closing]))
        at, until = closing, end
    changed, offset = [], 0
    for text in texts:
        pieces, left = list[str](), 0
        for start, end, mark in marks:
            first, last = max(0, start - offset), min(len(text), end - offset)
            if first >= len(text) or last <= 0:
                continue
            pieces += [text[left:first], mark if start >= offset else ""]
            left = last
        changed.append("".join([*pieces, text[left:]]))
        offset += len(text) + 1
    return changed


def unlike(text: str, others: Sequence[Any]) -> str:
    """What the strings in `others` say, without those lists that say what `text` does."""
    said = _bare(text)
    found = [" ".join(strings) for each in others if (strings := list(_strings(each)))]
    return " ".join([each for each in found if _bare(each) not in said])


def _bare(text: str) -> str:
    return "".join(text.split())


def _strings(value: Any) -> Iterator[str]:
    """All strings in it, in order."""
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, list | dict):
            left += reversed(list(each.values()) if isinstance(each, dict) else each)


async def _judged(guard: OutputGuard, text: str) -> str:
    """What may be sent of a text that is whole."""
    judge = partial(_judge, guard, text)
    released = judge() if len(text) <= _INLINE_CHARACTERS else await run_in_thread(judge)
    return released + await _decided(guard)


def _judge(guard: OutputGuard, text: str) -> str:
    released = guard.feed(text)
    return released if guard.blocked else released + guard.flush()


async def _decided(guard: OutputGuard) -> str:
    text = await guard.decide() if guard.undecided and not guard.blocked else ""
    if guard.blocked:
        raise TranscriptBlocked(guard.cut_paid_by)
    return text


class TranscriptEvents:
    """A stream of events. A piece of text leaves when the guard has released it; all other events wait
    for the end of the stream, and those that hold text leave only if nothing was removed."""

    def __init__(self, guards: Sequence[OutputGuard]) -> None:
        self._guard, self._beside = guards
        self._events = EventReader(_LONGEST_EVENT)
        self._given: list[str] = []
        self._released: list[str] = []
        self._waiting: list[tuple[bytes, Any]] = []
        self._last: dict[str, Any] = {}  # the last piece's event

    async def feed(self, data: bytes) -> bytes:
        """A piece of the upstream's stream; what may be sent now. Raises TranscriptBlocked."""
        events = self._events.feed(data)
        if self._events.too_long:
            raise TranscriptBlocked("operator")  # it cannot be screened
        return b"".join([self._event(each) for each in events])

    async def end(self) -> bytes:
        """The upstream's stream is over: the rest of what may be sent. Raises TranscriptBlocked."""
        sent = self._event(self._events.end())
        told = [found for _, found in self._waiting]
        streamed = bool(self._given)
        if not streamed:  # the whole text comes at the end alone
            texts = [found["text"] for found in told if _is_done(found)]
            self._take("".join(texts[:1]))
        tail = "" if self._guard.blocked else self._guard.flush()
        tail += await _decided(self._guard)
        if tail and streamed:
            sent += _with_piece(self._last, tail)
        self._released.append(tail)
        given, released = "".join(self._given), "".join(self._released)
        beside = unlike(given, [each for found in told for each in _said(found)])
        is_clean = given == released and await _judged(self._beside, beside) == beside
        for event, found in self._waiting:
            if is_clean or found is None:
                sent += event
            elif _is_done(found):
                sent += _written({**_facts(found), "text": released})
            elif isinstance(found, dict) and _choice_of(found):
                sent += _with_piece(found, None)
        return sent

    def _event(self, event: bytes) -> bytes:
        data = data_of(event)
        if not data:
            return b""  # a comment, or nothing
        try:
            found = whole_texts(loads(data))
        except ValueError:
            found = None if data == DONE else data.decode("utf-8", "replace")
        given = _piece_of(found)
        if given is None:
            self._waiting.append((event + b"\n\n", found))
            return b""
        self._last = found
        released = self._take(given)
        if released == given and not self._guard.held and not unlike(given, _said(found)):
            return event + b"\n\n"
        return _with_piece(found, released) if released else b""

    def _take(self, text: str) -> str:
        self._given.append(text)
        released = self._guard.feed(text)
        if self._guard.blocked:
            raise TranscriptBlocked(self._guard.cut_paid_by)
        self._released.append(released)
        return released


def _piece_of(found: Any) -> str | None:
    """The piece of text that an event is: OpenAI's, or vLLM's, which has a chat chunk's choices."""
    if not isinstance(found, dict):
        return None
    choice = _choice_of(found)
    if choice.get("finish_reason") is not None:
        return None  # it stands after all text
    delta = found.get("delta", choice.get("delta"))
    piece = delta.get("content") if isinstance(delta, dict) else delta
    return piece if isinstance(piece, str) else None


def _choice_of(found: dict[str, Any]) -> dict[str, Any]:
    choices = found.get("choices")
    choice = choices[0] if isinstance(choices, list) and len(choices) == 1 else None
    return choice if isinstance(choice, dict) else {}


def _with_piece(found: dict[str, Any], piece: str | None) -> bytes:
    """An event of the same shape with this text, or a choice's end without any."""
    choice = _choice_of(found)
    if not choice:
        return _written({**_facts(found), "delta": piece})
    ends = {name: choice.get(name) for name in ("index", "finish_reason")}
    delta = {} if piece is None else {"content": piece}
    return _written({**_facts(found), "choices": [{**ends, "delta": delta}]})


def _is_done(found: Any) -> bool:
    is_text = isinstance(found, dict) and isinstance(found.get("text"), str)
    return is_text and str(found.get("type")).endswith(".done")


def _facts(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name in _FACTS}


def _said(found: Any) -> list[Any]:
    if not isinstance(found, dict):
        return [found]
    return [value for name, value in found.items() if name not in _FACTS]


def _written(event: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(event) + b"\n\n"
