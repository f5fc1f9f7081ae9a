"""From an engine's chunks to text that may leave, one choice at a time, with exact token counts.

Text passes the detokenizer (whole UTF-8 only), the stop strings and the output guard; each may hold
some back. A token counts as delivered when all of its text was written to the client.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine.protocol import FinishReason, TokenLogprob
from gateway.engines.base import Chunk, TextChunk
from gateway.stops import StopMatcher
from gateway.tokenizing import TextCodec

_OPENAI_REASON: dict[str, str] = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


class OutputGuard(Protocol):
    """The safety desk on the way back. What it holds is not shown until it is judged."""

    blocked: bool
    action: str | None  # the strongest that the policy took, once the choice has ended

    @property
    def held(self) -> int:
        """Characters fed and not yet decided."""

    def feed(self, text: str) -> str: ...

    def flush(self) -> str: ...


@dataclass(slots=True)
class Delta:
    """What one choice has for the client now."""

    choice: int
    text: str
    finish_reason: str | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    upstream_logprobs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        return not self.text and self.finish_reason is None and not self.logprobs


class ChoiceOutput:
    def __init__(
        self,
        index: int,
        codec: TextCodec | None,
        stops: tuple[str, ...] = (),
        guard: OutputGuard | None = None,
    ) -> None:
        self.index = index
        self.text: list[str] = []  # all that was released
        self.finish_reason: str | None = None
        self.engine_reason: FinishReason | None = None
        self.generated = 0  # tokens up to the end that the client sees
        self.seen = 0  # tokens that the engine handed over, also past that end
        self.delivered = 0
        self._released = 0  # tokens whose text may leave
        self._detokenizer = codec.detokenizer() if codec else None
        self._stops = StopMatcher(stops) if stops else None
        self._guard = guard
        self._decoded = 0
        self._marks: deque[tuple[int, int]] = deque()  # (text offset of the end, tokens so far)
        self._logprobs: deque[tuple[int, TokenLogprob]] = deque()
        self._delta = Delta(index, "")

    @property
    def stop_matched(self) -> str | None:
        """The stop string that ended the choice, if one did."""
        return self._stops.matched if self._stops else None

    @property
    def over(self) -> bool:
        return self.finish_reason is not None

    def feed(self, chunk: Chunk) -> None:
        if isinstance(chunk, TextChunk):
            self._feed_text(chunk)
            return
        self.seen += len(chunk.tokens)
        if self.over:
            return
        assert self._detokenizer is not None
        for position, token in enumerate(chunk.tokens):
            self.generated += 1
            if chunk.logprobs is not None:
                self._logprobs.append((self.generated, chunk.logprobs[position]))
            if not self._pass(self._detokenizer.feed(token)):
                return
        if chunk.finish_reason is not None:
            self.end(chunk.finish_reason)

    def end(self, reason: FinishReason | str) -> None:
        """The choice ends here; what was held and is harmless leaves with it."""
        if self.over:
            return
        if isinstance(reason, FinishReason):
            self.engine_reason = reason
        if self._detokenizer is not None and not self._pass(self._detokenizer.flush()):
            return
        tail = self._stops.flush() if self._stops else ""
        self._finish(tail, _OPENAI_REASON.get(reason, str(reason)))

    def take(self) -> Delta | None:
        """What is new since the last call; None if nothing."""
        delta = self._delta
        if delta.empty:
            return None
        if self._logprobs:
            while self._logprobs and self._logprobs[0][0] <= self._released:
                delta.logprobs.append(self._logprobs.popleft()[1])
        self._delta = Delta(self.index, "")
        return delta

    def sent(self) -> None:
        """The last delta reached the client's connection."""
        self.delivered = self._released

    def _feed_text(self, chunk: TextChunk) -> None:
        self.seen += chunk.count
        if self.over:
            return
        self.generated += chunk.count
        if chunk.logprobs is not None:
            self._delta.upstream_logprobs.append(chunk.logprobs)
        if self._pass(chunk.text) and chunk.finish_reason is not None:
            self._finish("", chunk.finish_reason)

    def _pass(self, text: str) -> bool:
        """One token's text through stops and guard; False when it ended the choice."""
        self._decoded += len(text)
        if self._detokenizer is None or not self._detokenizer.pending:
            self._marks.append((self._decoded, self.generated))
        if self._stops is not None:
            text = self._stops.feed(text)
            if self._stops.matched is not None:
                self._finish(text, "stop")
                return False
        if self._guard is not None:
            text = self._guard.feed(text)
            if self._guard.blocked:
                self._block(text)
                return False
        self._release(text)
        return True

    def _release(self, text: str) -> None:
        if text:
            self._delta.text += text
            self.text.append(text)
        held = (self._stops.held if self._stops else 0) + (self._guard.held if self._guard else 0)
        reached = self._decoded - held
        marks = self._marks
        while marks and marks[0][0] <= reached:
            self._released = marks.popleft()[1]

    def _finish(self, tail: str, reason: str) -> None:
        if self._guard is not None:
            tail = self._guard.feed(tail) + self._guard.flush()
            if self._guard.blocked:
                self._block(tail)
                return
        if tail:
            self._delta.text += tail
            self.text.append(tail)
        self._released = self.generated
        self.finish_reason = self._delta.finish_reason = reason

    def _block(self, text: str) -> None:
        if text:
            self._delta.text += text
            self.text.append(text)
        self.finish_reason = self._delta.finish_reason = "content_filter"
