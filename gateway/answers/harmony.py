"""Reads output in OpenAI's harmony format, which gpt-oss writes: messages with a channel each.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>

`analysis` is reasoning, `final` and a `commentary` to nobody are the answer, and a message to a function
that the request declares is a tool call. Output without a header is the answer as it is.
"""

import re
from collections.abc import Iterable, Mapping
from math import inf
from typing import Literal

from gateway.answers.tool_calls import ToolCall, ToolReader

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
TAGS = frozenset({START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS})
_LONGEST = 300  # characters of a header
_BETWEEN = "\n\n"  # of two messages of one kind
_HEADER_STARTS = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS, "to=", "assistant")
_AFTER_HEADER = re.compile("|".join(map(re.escape, (MESSAGE, START, *ENDS))))
_AFTER_BODY = re.compile("|".join(map(re.escape, (START, CHANNEL, *ENDS))))
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_RECIPIENT = re.compile(r"to=(?:functions\.)?(\S+?)(?=<\||\s|$)")


class HarmonyReader:
    """As `reasoning.OutputReader`: `feed` and `flush` return (text, complete calls)."""

    def __init__(
        self, names: Iterable[str], begun: str = "", shown: Mapping[int, str] | None = None
    ) -> None:
        """names: of the declared functions. begun: the prompt's text after its last `<|start|>`.
        shown: control tokens, by id, that are part of what is read."""
        self.shown = shown or {}
        self._names = frozenset(names)
        self._tools = ToolReader(self._names)
        self._held = ""
        self._fed = self._end = 0  # characters
        self._kind: Literal["header", "reasoning", "text", "call"] = "header"
        self._function = ""  # of the call that is read
        self._messages = 0  # begun so far
        self._said: set[str] = set()  # kinds that have text
        self._between = ""  # before the next text of this message
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []
        self._before, found, _ = begun.partition(MESSAGE)  # the part of the header in the prompt
        if found:
            self._begin(self._before)

    @property
    def held(self) -> int:
        return len(self._held)

    @property
    def reasoning_end(self) -> float:
        """Characters of the text fed up to the end of the reasoning; infinite while it goes on."""
        return inf if self._kind == "reasoning" else self._end

    def feed(self, text: str) -> tuple[str, list[ToolCall]]:
        self._held += text
        self._fed += len(text)
        while self._read_header() if self._kind == "header" else self._read_body():
            continue
        return self._take()

    def flush(self, *, cut: bool = False) -> tuple[str, list[ToolCall]]:
        """The end of the output ends the message; with `cut`, a call is what there is of it. A header
        that was not completed is dropped, unless
        it may have been plain text."""
        left, self._held = self._held, ""
        if self._kind == "call" and cut:
            self._calls += self._tools.cut_call(None, self._function, left.strip())
        elif self._kind != "header":
            self._add(left, last=True)
        elif not self._messages and not any(tag in left for tag in TAGS):
            self._begin("")
            self._add(left, last=True)
        return self._take()

    def take_reasoning(self) -> str:
        """What was added since the last call."""
        taken, self._reasoning = "".join(self._reasoning), []
        return taken

    def _take(self) -> tuple[str, list[ToolCall]]:
        text, calls = "".join(self._text), self._calls
        self._text, self._calls = [], []
        return text, calls

    def _read_header(self) -> bool:
        """False when more text is needed."""
        held = self._held
        start = held.lstrip()[:20]
        may_be = any(each.startswith(start) or start.startswith(each) for each in _HEADER_STARTS)
        if not may_be and CHANNEL not in self._before:
            self._begin("")
            return True
        found = _AFTER_HEADER.search(held)
        length = found.start() if found is not None else len(held) - _partial(held)
        if length > _LONGEST:  # no header: text, with any tags that it has
            self._begin("")
            self._add(held[:_LONGEST], last=False)
            self._held = held[_LONGEST:]
            return True
        if found is None:
            return False
        header = self._before + held[:length]
        self._held, self._before = held[found.end() :], ""
        if found[0] == MESSAGE:
            self._begin(header)
        return True

    def _begin(self, header: str) -> None:
        """A message of this header; the answer where there is none."""
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        self._messages += 1
        if recipient is not None and recipient[1] in self._names:
            self._kind, self._function = "call", recipient[1]
            return
        self._kind = "reasoning" if channel is not None and channel[1] == "analysis" else "text"
        self._between = _BETWEEN if self._kind in self._said else ""

    def _read_body(self) -> bool:
        """False when more text is needed."""
        found = _AFTER_BODY.search(self._held)
        if found is None:
            if self._kind != "call":
                sure = len(self._held) - _partial(self._held)
                self._add(self._held[:sure], last=False)
                self._held = self._held[sure:]
            return False
        self._add(self._held[: found.start()], last=True)
        # A channel without a start is the next message's header.
        self._held = self._held[found.start() if found[0] == CHANNEL else found.end() :]
        if self._kind == "reasoning":
            self._end = self._fed - len(self._held)
        self._kind, self._before = "header", ""
        return True

    def _add(self, text: str, *, last: bool) -> None:
        """Text of the message that is read, `last` to its end."""
        if self._kind == "call":
            assert last
            given = text.strip() or "{}"
            call = {"name": self._function, "arguments": given}
            calls = self._tools.calls_in(given, lambda _: [call])
            self._calls += calls
            if calls:
                return
            self._kind = "text"
            self._between = _BETWEEN if "text" in self._said else ""
        if text:
            kept = self._reasoning if self._kind == "reasoning" else self._text
            kept.append(self._between + text)
            self._between = ""
            self._said.add(self._kind)


def begun_message(text: str) -> str:
    """The part of a prompt's text after its last `<|start|>`."""
    return text.rpartition(START)[2] if START in text else ""


def _partial(held: str) -> int:
    """Length of the longest suffix that is a prefix of a tag."""
    at = held.rfind("<", max(0, len(held) - max(map(len, TAGS)) + 1))
    if at < 0:
        return 0
    return len(held) - at if any(tag.startswith(held[at:]) for tag in TAGS) else 0
