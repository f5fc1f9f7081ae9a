"""Server-sent events as the HTML standard defines them: the one reader of all streams that come in.

A line ends with LF, CR or CRLF, a byte-order mark may come first, an event may have several `data`
lines, which are joined by line feeds, and it ends with an empty line. Reads may cut it anywhere.
"""

import json
from typing import Any

import orjson

from gateway.engines.surrogates import whole_text

_MARK = b"\xef\xbb\xbf"
DONE = b"[DONE]"
# Fields whose next piece may have the other half of a surrogate pair.
_IN_PIECES = frozenset(
    ("content", "text", "reasoning_content", "reasoning", "refusal", "arguments", "delta")
)


class LineEnds:
    """Makes each line of a stream end with one line feed, whatever it ended with."""

    def __init__(self) -> None:
        self._returned = False  # the last read ended with CR, which LF may complete
        self._head: bytes | None = b""  # the first bytes, which may be a mark; None once known

    def unify(self, data: bytes) -> bytes:
        if self._head is not None:
            data = self._head + data
            if len(data) < len(_MARK) and _MARK.startswith(data):
                self._head = data
                return b""
            self._head, data = None, data.removeprefix(_MARK)
        if self._returned and data:
            self._returned, data = False, data.removeprefix(b"\n")
        if data.find(b"\r") >= 0:
            self._returned = data.endswith(b"\r")
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        return data


class EventReader:
    """`feed` returns the events that a read completes, each as its lines without the empty one."""

    def __init__(self, longest: int) -> None:
        """`longest`: bytes of an event; a longer one sets `too_long`, and is dropped."""
        self.too_long = False
        self._longest = longest
        self._ends = LineEnds()
        self._rest: list[bytes] = []
        self._size = 0  # bytes of the rest

    def feed(self, data: bytes) -> list[bytes]:
        data = self._ends.unify(data)
        events: list[bytes] = []
        if data.find(b"\n") >= 0:
            *events, data = b"".join([*self._rest, data]).split(b"\n\n")
            self._rest, self._size = [], 0
        self._rest.append(data)
        self._size += len(data)
        if self._size > self._longest:
            self.too_long, self._rest, self._size = True, [], 0
        return [event.lstrip(b"\n") for event in events]

    def end(self) -> bytes:
        """The lines after the last whole event."""
        left, self._rest, self._size = b"".join(self._rest), [], 0
        return left.strip(b"\n")


def data_of(event: bytes) -> bytes:
    """The data of an event; empty for a comment."""
    return b"\n".join(
        [data for line in event.split(b"\n") if (data := data_line(line)) is not None]
    )


def data_line(line: bytes) -> bytes | None:
    """The value of a `data` line; None for any other line."""
    if not line.startswith(b"data"):
        return None
    if line.startswith(b"data:"):
        return line[5:].strip()
    return b"" if line == b"data" else None


def loads(data: bytes | memoryview) -> Any:
    """JSON as servers write it: also with halves of surrogate pairs, which stay in the texts that
    are sent in pieces, with bytes that are not UTF-8, which are replaced, and with NaN and
    infinities, which become None. Raises ValueError."""
    try:
        return orjson.loads(data)
    except ValueError:
        text = bytes(data).decode("utf-8", "replace")
        try:
            return json.loads(text, parse_constant=_none, object_hook=_whole)
        except RecursionError as error:
            raise ValueError(str(error)) from None


def _whole(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        name: whole_text(value) if isinstance(value, str) and name not in _IN_PIECES else value
        for name, value in fields.items()
    }


def _none(_constant: str) -> None:
    return None
