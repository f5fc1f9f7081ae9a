"""Reasoning that an upstream sends in a field of its own, marked in the text so that it passes the same
steps as the answer: guard, counts and logs.

The marks are two noncharacters of Unicode, which are reserved for uses within a program. Where a text
of the upstream has one all the same, a replacement character takes its place: a model that is made to
write marks cannot move its answer into its reasoning, or out of it.
"""

import re
from math import inf

from gateway.answers.reasoning import OutputReader, Reader

_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_MARKS = re.compile(f"({_OPEN}|{_CLOSE})")
_NO_MARKS = str.maketrans(dict.fromkeys((_OPEN, _CLOSE), "\N{REPLACEMENT CHARACTER}"))


class MarkedReasoning:
    """Reads marked text: `feed` returns (reasoning, answer), and holds nothing."""

    held = 0

    def __init__(self) -> None:
        self._open = False
        self._fed = self._end = 0  # characters

    @property
    def end(self) -> float:
        """Where, in the text fed, the reasoning ends; infinite while it goes on."""
        return inf if self._open else self._end

    def feed(self, text: str) -> tuple[str, str]:
        parts: dict[bool, list[str]] = {True: [], False: []}
        for part in _MARKS.split(text):
            self._fed += len(part)
            if part in (_OPEN, _CLOSE):
                self._open = part == _OPEN
                self._end = self._fed
            else:
                parts[self._open].append(part)
        return "".join(parts[True]), "".join(parts[False])

    def flush(self) -> tuple[str, str]:
        return "", ""


class UpstreamReasoning:
    """Marks one choice's texts as they arrive."""

    def __init__(self) -> None:
        self._open = False
        self.marks = 0  # characters that were added

    def marked(self, reasoning: str, text: str, *, ends: bool) -> str:
        """`ends`: more than reasoning follows, or nothing does."""
        reasoning, text = reasoning.translate(_NO_MARKS), text.translate(_NO_MARKS)
        before = self._turned(True) + reasoning if reasoning else ""
        return before + (self._turned(False) + text if text or ends or not reasoning else "")

    def _turned(self, to_open: bool) -> str:
        if self._open is to_open:
            return ""
        self._open, self.marks = to_open, self.marks + 1
        return _OPEN if to_open else _CLOSE


def with_reasoning(reader: Reader | None) -> Reader:
    """The reader of a choice whose upstream sends reasoning."""
    if reader is None:
        return OutputReader(None, MarkedReasoning())
    if isinstance(reader, OutputReader):
        reader.read_marks(MarkedReasoning())
    return reader
