"""From an engine's chunks to text that may leave, one choice at a time, with exact token counts.

Text passes the detokenizer (whole UTF-8 only), the stop strings and the output guard; each may hold
some back. A token counts as delivered when all of its text was written to the client.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine.protocol import FinishReason, TokenLogprob
from gateway.engines.base import Chunk, TextChunk
from gateway.prompts.tokenizing import TextCodec
from gateway.streaming.stops import StopMatcher
from gateway.streaming.tool_calls import ToolCall, ToolReader, as_text

_OPENAI_REASON: dict[str, str] = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


def runs(chunks: Iterable[Chunk]) -> Iterator[list[Chunk]]:
    """Neighbours that are plain text of one choice, together; every other chunk alone."""
    run: list[Chunk] = []
    for chunk in chunks:
        plain = isinstance(chunk, TextChunk) and chunk.plain
        if run and not (plain and run[0].choice == chunk.choice):
            yield run
            run = []
        run.append(chunk)
        if not plain:
            yield run
            run = []
    if run:
        yield run


class OutputGuard(Protocol):
    """The safety desk on the way back. What it holds is not shown until it is judged."""

    blocked: bool
    action: str | None  # the strongest that the policy took, once the choice has ended
    asks: bool  # it may hold a whole choice for a second opinion
    undecided: bool  # after `flush`: `decide` has to be awaited

    @property
    def held(self) -> int:
        """Characters fed and not yet decided."""

    @property
    def cut_paid_by(self) -> str:
        """Tenant or house: who bears what was delivered of a blocked choice."""

    def feed(self, text: str) -> str: ...

    def flush(self) -> str: ...

    async def decide(self) -> str:
        """What may leave of the choice, once the second opinion is there; nothing where blocked."""

    def over(self) -> None:
        """The request has ended, in whatever way. Called on each, maybe more than once."""


@dataclass(slots=True)
class Delta:
    """What one choice has for the client now."""

    choice: int
    text: str
    finish_reason: str | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    upstream_logprobs: list[dict[str, Any]] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        return not (self.text or self.calls or self.logprobs) and self.finish_reason is None


class ChoiceOutput:
    def __init__(
        self,
        index: int,
        codec: TextCodec | None,
        stops: tuple[str, ...] = (),
        guard: OutputGuard | None = None,
        tools: ToolReader | None = None,
        *,
        one_call: bool = False,
    ) -> None:
        self.index = index
        self.text: list[str] = []  # all that was released
        self.calls: list[ToolCall] = []
        self.vectors: list[Any] = []
        self.finish_reason: str | None = None
        self.waits: str | None = None  # the finish reason of one that a guard has yet to judge
        self.engine_reason: FinishReason | None = None
        self.ended_by_engine = False  # it said so itself: nothing more is generated
        self.generated = 0  # tokens up to the end that the client sees
        self.seen = 0  # tokens that the engine handed over, also past that end
        self.delivered = 0
        self._released = 0  # tokens whose text may leave
        self._detokenizer = codec.detokenizer() if codec else None
        self._stops = StopMatcher(stops) if stops else None
        self._guard = guard
        self._tools = tools
        self._one_call = one_call  # the choice ends with its first
        self._upstream_calls: dict[int, dict[str, Any]] = {}  # still being told
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
        return self.finish_reason is not None or self.waits is not None

    async def judge(self) -> None:
        """Ends a choice that waits for its judgement."""
        if self._guard is None or self.waits is None:
            return
        reason = self.waits
        text = await self._guard.decide()
        self.waits = None
        if self._guard.blocked:
            self._released = 0  # it was held whole: no token of it left, not even one without text
            self._block(text)
        else:
            self._conclude(text, reason)

    def feed(self, chunk: Chunk) -> None:
        if isinstance(chunk, TextChunk):
            self._feed_text(chunk)
            return
        self.seen += len(chunk.tokens)
        self.ended_by_engine |= chunk.finish_reason is not None
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

    def feed_run(self, run: Sequence[Chunk]) -> None:
        """One of `runs`, as one text: the guard judges alike however a text is cut."""
        if len(run) == 1 or self.over or self._stops is not None or self._tools is not None:
            for chunk in run:
                self.feed(chunk)
            return
        texts = [chunk for chunk in run if isinstance(chunk, TextChunk)]
        for chunk in texts:
            self.seen += chunk.count
            self.generated += chunk.count
            self._mark(chunk.text)
        self._judge("".join([chunk.text for chunk in texts]))

    def _feed_text(self, chunk: TextChunk) -> None:
        self.seen += chunk.count
        self.ended_by_engine |= chunk.finish_reason is not None
        if self.over:
            return
        self.generated += chunk.count
        if chunk.logprobs is not None:
            self._delta.upstream_logprobs.append(chunk.logprobs)
        if chunk.vectors is not None:
            self.vectors = chunk.vectors
        text = chunk.text
        if self._tools is not None:
            text += self._told_calls(chunk)
        if self._pass(text) and chunk.finish_reason is not None:
            self._finish("", chunk.finish_reason)

    def _told_calls(self, chunk: TextChunk) -> str:
        """What an upstream says of calls, as text once they are whole: they take the way of any."""
        for piece in chunk.calls or ():
            known = self._upstream_calls.setdefault(int(piece.get("index") or 0), {})
            told = piece.get("function") or {}
            known["id"] = piece.get("id") or known.get("id")
            known["name"] = told.get("name") or known.get("name")
            known["arguments"] = known.get("arguments", "") + (told.get("arguments") or "")
        if chunk.finish_reason is None or not self._upstream_calls:
            return ""
        whole, self._upstream_calls = self._upstream_calls, {}
        return as_text(whole[number] for number in sorted(whole))

    def _pass(self, text: str) -> bool:
        """One token's text through stops and guard; False when it ended the choice."""
        self._mark(text)
        return self._judge(text)

    def _mark(self, text: str) -> None:
        self._decoded += len(text)
        if self._detokenizer is None or not self._detokenizer.pending:
            self._marks.append((self._decoded, self.generated))

    def _judge(self, text: str) -> bool:
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
        if self._one_call and self.calls:
            self._released = self.generated
            self.finish_reason = self._delta.finish_reason = "tool_calls"
            return False
        return True

    def _release(self, text: str) -> None:
        if self._tools is not None:
            text = self._calls_read(*self._tools.feed(text))
        if text:
            self._delta.text += text
            self.text.append(text)
        held = (self._stops.held if self._stops else 0) + (self._guard.held if self._guard else 0)
        held += self._tools.held if self._tools else 0
        reached = self._decoded - held
        marks = self._marks
        while marks and marks[0][0] <= reached:
            self._released = marks.popleft()[1]

    def _calls_read(self, text: str, calls: list[ToolCall]) -> str:
        calls = calls[: 1 - len(self.calls)] if self._one_call else calls
        self.calls += calls
        self._delta.calls += calls
        return text

    def _finish(self, tail: str, reason: str) -> None:
        if self._guard is not None:
            tail = self._guard.feed(tail) + self._guard.flush()
            if self._guard.blocked:
                self._block(tail)
                return
            if self._guard.undecided:
                self.waits = reason
                return
        self._conclude(tail, reason)

    def _conclude(self, tail: str, reason: str) -> None:
        if self._tools is not None:
            before = self._calls_read(*self._tools.feed(tail))
            tail = before + self._calls_read(*self._tools.flush())
            if reason in ("stop", "tool_calls"):
                reason = "tool_calls" if self.calls else "stop"
        if tail:
            self._delta.text += tail
            self.text.append(tail)
        self._released = self.generated
        self.finish_reason = self._delta.finish_reason = reason

    def _block(self, text: str) -> None:
        if self._tools is not None:
            text = self._calls_read(*self._tools.feed(text))
        if text:
            self._delta.text += text
            self.text.append(text)
        self.finish_reason = self._delta.finish_reason = "content_filter"
