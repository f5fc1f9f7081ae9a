"""What a choice of an OpenAI-compatible server says, whole or streamed, in one form.

Servers write a text as a string or as a list of parts, reasoning in one of two fields or as a part,
and a refusal in a field of its own or as a part.
"""

from typing import Any

from msgspec import Struct

from gateway.engines.call_pieces import CallPieces, whole_calls
from gateway.engines.surrogates import SplitPairs, whole_text
from gateway.engines.upstream_usage import UsageCounter
from gateway.request.engine import TextChunk, calls_text
from gateway.request.thoughts import Annotation, Detail


class Said(Struct):
    index: int = 0
    text: str = ""
    reasoning: str = ""
    refusal: str = ""
    calls: list[dict[str, Any]] | None = None
    reason: str | None = None
    logprobs: dict[str, Any] | None = None
    # Of providers that have them: see `TextChunk`.
    details: list[Detail] | None = None
    annotations: list[Annotation] | None = None
    stop: str | None = None

    @property
    def empty(self) -> bool:
        said = self.text or self.reasoning or self.refusal or self.calls
        return not (said or self.details or self.annotations) and self.reason is None

    def count(self, usage: UsageCounter) -> None:
        if text := self.text + self.refusal:
            usage.add(self.index, "text", text)
        if self.calls:
            usage.add(self.index, "calls", calls_text(self.calls))
        if self.reasoning:
            usage.add(self.index, "reasoning", self.reasoning)

    def chunk(self, request_id: str, grown: int) -> TextChunk:
        """`grown`: tokens that it adds, roughly."""
        return TextChunk(
            request_id,
            self.index,
            self.text + self.refusal,
            grown,
            self.reason,
            self.logprobs,
            self.calls,
            reasoning=self.reasoning,
            refused=bool(self.refusal),
            details=self.details,
            annotations=self.annotations,
            stop=self.stop,
        )


class StreamedChoices:
    """The choices of one stream, whose pieces are read in order."""

    def __init__(self) -> None:
        self._calls: dict[int, CallPieces] = {}  # by choice
        self._pairs = SplitPairs()

    @property
    def waiting(self) -> bool:
        """Whether the end of a text is held, which the next piece of it completes."""
        return bool(self._pairs)

    def read(self, choice: dict[str, Any]) -> Said:
        delta = choice.get("delta")
        said = _said(choice, {"content": choice.get("text")} if delta is None else delta)
        ends, pairs = said.reason is not None, self._pairs
        said.text = pairs.join((said.index, "text"), said.text, last=ends)
        said.reasoning = pairs.join((said.index, "reasoning"), said.reasoning, last=ends)
        said.refusal = pairs.join((said.index, "refusal"), said.refusal, last=ends)
        if delta is not None and (calls := delta.get("tool_calls")):
            pieces = self._calls.setdefault(said.index, CallPieces()).read(calls)
            said.calls = [self._joined(said.index, piece) for piece in pieces]
        return said

    def _joined(self, index: int, call: dict[str, Any]) -> dict[str, Any]:
        arguments = call["function"]["arguments"]
        joined = self._pairs.join((index, "call", call["index"]), arguments, last=False)
        if joined == arguments:
            return call
        return {**call, "function": {**call["function"], "arguments": joined}}


def whole_choice(choice: dict[str, Any]) -> Said:
    """A choice of an answer that is not streamed."""
    message = choice.get("message")
    said = _said(choice, {"content": choice.get("text")} if message is None else message)
    said.text, said.refusal = whole_text(said.text), whole_text(said.refusal)
    said.reasoning = whole_text(said.reasoning)
    if message is not None and (calls := message.get("tool_calls")):
        said.calls = whole_calls(calls)
    return said


def _said(choice: dict[str, Any], message: dict[str, Any]) -> Said:
    """Without the calls."""
    text, reasoning, refusal = _texts_of(message.get("content"))
    own = message.get("reasoning_content") or message.get("reasoning")
    refused = message.get("refusal")
    return Said(
        int(choice.get("index") or 0),
        text,
        (own if isinstance(own, str) else "") + reasoning,
        (refused if isinstance(refused, str) else "") + refusal,
        None,
        choice.get("finish_reason"),
        choice.get("logprobs"),
    )


def _texts_of(content: Any) -> tuple[str, str, str]:
    """(text, reasoning, refusal) of a message's content."""
    if content is None or isinstance(content, str):
        return content or "", "", ""
    if not isinstance(content, list):
        raise TypeError(f"the content of a choice is {type(content).__name__}")
    texts: dict[str, list[str]] = {"text": [], "thinking": [], "refusal": []}
    for part in content:
        kind = str(part.get("type"))
        name = "thinking" if kind in ("thinking", "reasoning") else kind
        texts[name if name in texts else "text"] += _strings(part, kind)
    return tuple("".join(each) for each in texts.values())  # type: ignore[return-value]


def _strings(part: dict[str, Any], kind: str) -> list[str]:
    """The text of a part, which some servers nest: a thought is a list of parts of text."""
    given = part.get(kind, part.get("text"))
    if isinstance(given, list):
        return [text for each in given for text in _strings(each, str(each.get("type")))]
    return [given] if isinstance(given, str) else []
