"""Converts an engine's chunks to text for the client, per choice, with exact token counts.

Text passes the detokenizer (complete UTF-8 only), the stop strings and the output guard; each may
hold text back. A token counts as delivered when all of its text has been written to the client. Of
text engines the unit is the character, since a chunk may hold any number of tokens.
"""

from collections import deque
from collections.abc import Sequence
from math import inf
from typing import Any

from msgspec import Struct

from engine.protocol import FinishReason, PromptLogprob, TokenLogprob
from gateway.answers.logprobs import LogprobQueue
from gateway.answers.reasoning import Reader
from gateway.answers.stops import StopMatcher
from gateway.answers.tool_calls import PartialCall, ToolCall, as_text, clean_call, cut_text
from gateway.answers.upstream_reasoning import UpstreamReasoning, with_reasoning
from gateway.catalog.codec.tokenizing import TextCodec
from gateway.request.engine import Chunk, TextChunk, calls_text
from gateway.request.output_guard import OutputGuard
from gateway.request.thoughts import Annotation, Detail

_OPENAI_REASON: dict[str, str] = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}
_REASONS = frozenset({"stop", "length", "tool_calls", "content_filter", "function_call"})


def _known_reason(given: str) -> str:
    """An upstream's finish reason, or `stop` when it is none of OpenAI's: it reaches the client."""
    return given if given in _REASONS else "stop"


class Delta(Struct):
    """New output of one choice for the client."""

    choice: int
    text: str
    finish_reason: str | None = None
    logprobs: list[TokenLogprob] = []
    upstream_logprobs: list[dict[str, Any]] = []
    calls: list[ToolCall] = []
    reasoning: str = ""  # before the text
    # Of the reasoning up to here, before the text: see `request/thoughts.py`.
    details: list[Detail] = []
    annotations: list[Annotation] = []  # an upstream's citations
    refused: bool = False  # the text is an upstream's refusal
    tokens: int = 0  # of the choice so far; 0 for text engines, which count at the end

    @property
    def empty(self) -> bool:
        said = self.text or self.calls or self.reasoning  # no log probability comes without
        return not (said or self.details or self.annotations) and self.finish_reason is None


class ChoiceOutput:
    finish_reason: str | None = None
    pending_reason: str | None = None  # finish reason while a guard's verdict is pending
    engine_reason: FinishReason | None = None
    ended_by_engine = False  # the engine reported a finish reason and generates no more
    generated = 0  # tokens (of text engines: characters) up to the end of the choice
    received = 0  # tokens received from the engine, including those after the end
    delivered = 0
    refused = False  # the upstream refuses: its text is the reason
    upstream_stop: str | None = None  # the stop string that an upstream says ended the choice
    reasoning_tokens = 0  # of those whose text was released
    _released = 0  # tokens whose text may be sent
    _marking: UpstreamReasoning | None = None
    _upstream_pieces = 0  # characters of the calls that an upstream has begun
    _decoded = 0
    _passed = 0  # characters that passed the stop strings
    _reached: float = 0  # characters of the text before the guard that were released
    _call_blocked = False  # a tool call was dropped for what its decoded arguments hold

    def __init__(
        self,
        index: int,
        codec: TextCodec | None,
        stops: tuple[str, ...] = (),
        guard: OutputGuard | None = None,
        reader: Reader | None = None,
        *,
        single_tool_call: bool = False,
        stop_included: bool = False,
        keeps_ids: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """keeps_ids: the client wants the tokens, of which deltas have entries without a score.
        min_tokens: no stop string is looked for in the text of the first so many."""
        self.index = index
        self.text: list[str] = []  # released so far
        self.calls: list[ToolCall] = []
        self.reasoning: list[str] = []  # released so far
        self.details: list[Detail] = []  # the same
        self.annotations: list[Annotation] = []  # the same
        self.vectors: list[Any] = []
        self.scores: list[float] = []
        self.prompt_logprobs: list[PromptLogprob] = []  # of a prompt's first choice
        shown = reader.shown if reader is not None else None
        self._detokenizer = codec.detokenizer(shown) if codec else None
        self._stops = StopMatcher(stops, included=stop_included) if stops else None
        self._min_tokens = min_tokens
        self._guard = guard
        self._reader = reader
        self._single_tool_call = single_tool_call  # the choice ends after its first tool call
        self._upstream_calls: dict[int, PartialCall] = {}  # by index
        self._marks: deque[tuple[int, int]] = deque()  # (text offset of the end, tokens so far)
        self._keeps_ids = keeps_ids
        self._logprobs = LogprobQueue(guard, codec.token_text if codec else lambda _token: "")
        self._delta = Delta(index, "")
        self._ready: list[Delta] = []  # before it: reasoning begins a new one after text or a call
        self._parts: list[Delta] = []  # of an answer that is not streamed
        # Details and annotations with their place in the text, until the text before them is released.
        self._beside: deque[tuple[int, TextChunk]] = deque()
        self._texts: list[str] = []  # of the delta

    @property
    def stop_matched(self) -> str | None:
        """The stop string that ended the choice, if one did."""
        return self._stops.matched if self._stops else self.upstream_stop

    @property
    def over(self) -> bool:
        return self.finish_reason is not None or self.pending_reason is not None

    @property
    def waiting(self) -> int:
        """Characters of incomplete tool calls, which are screened at once when they are complete."""
        return self._upstream_pieces + (self._reader.held if self._reader is not None else 0)

    @property
    def needed(self) -> int:
        """Characters of its text that must come before any more of it can be sent, at least 1."""
        return self._guard.needed if self._guard is not None else 1

    @property
    def spare(self) -> int:
        """Characters that can be fed before anything may end the choice."""
        return self._guard.spare if self._guard is not None else 0

    @property
    def unread(self) -> bool:
        """Whether nothing reads its text: each piece is sent as it comes."""
        return self.only_guarded and self._guard is None

    @property
    def only_guarded(self) -> bool:
        """Whether nothing but a guard that decides by itself reads its text."""
        plain = self._stops is None and self._reader is None and self._detokenizer is None
        return plain and (self._guard is None or not self._guard.needs_second_opinion)

    def pass_text(self, text: str) -> None:
        """Count a piece of an `unread` text, which the caller writes to the client at once."""
        self.received += len(text)
        self.generated += len(text)
        self._decoded += len(text)
        self._logprobs.add_upstream(None, text)
        self.text.append(text)
        self._reached = self._decoded
        self._released = self.delivered = self.generated

    async def resolve(self) -> None:
        """Finish a choice that waits for its guard's verdict."""
        if self._guard is None or self.pending_reason is None:
            return
        reason = self.pending_reason
        text = await self._guard.decide()
        self.pending_reason = None
        if self._guard.blocked:
            self._released = self._reached = (
                0  # the whole choice was held, so no token was delivered
            )
            self._block(text)
        else:
            self._conclude(text, reason)

    def feed(self, chunk: Chunk) -> None:
        if isinstance(chunk, TextChunk):
            self._feed_text(chunk)
            return
        if chunk.prompt_logprobs is not None:
            self.prompt_logprobs = self._logprobs.allowed_prompt(chunk.prompt_logprobs)
        self.received += len(chunk.tokens)
        self.ended_by_engine |= chunk.finish_reason is not None
        if self.over:
            return
        assert self._detokenizer is not None
        for position, token in enumerate(chunk.tokens):
            self.generated += 1
            if chunk.logprobs is not None:
                self._logprobs.add(chunk.logprobs[position])
            elif self._keeps_ids:
                self._logprobs.add(TokenLogprob(token, 0.0))
            if not self._process(self._detokenizer.feed(token)):
                return
        if chunk.finish_reason is not None:
            self.end(chunk.finish_reason)

    def end(self, reason: FinishReason | str) -> None:
        """End the choice and release the held text that passes the guard."""
        if self.over:
            return
        if isinstance(reason, FinishReason):
            self.engine_reason = reason
        if self._detokenizer is not None and not self._process(self._detokenizer.flush()):
            return
        tail = self._stops.flush() if self._stops else ""
        self._finish(tail, _OPENAI_REASON.get(reason, str(reason)))

    def take_all(self) -> list[Delta]:
        """The new output since the last call, in order."""
        ready, self._ready = self._ready, []
        last = self.take()
        return ready if last is None else [*ready, last]

    def parts(self) -> list[Delta]:
        """The whole output in order, of an answer that is not streamed; the same at each call."""
        self._parts += self.take_all()
        return self._parts

    def take(self) -> Delta | None:
        """The new output since the last call, after the deltas that are ready; None if there is
        none."""
        delta = self._delta
        delta.text, self._texts = "".join(self._texts), []
        delta.refused = self.refused
        if delta.empty:
            return None
        if self._logprobs:
            own, upstream = self._logprobs.take(self._reached)
            delta.logprobs += own
            if upstream:
                delta.upstream_logprobs.append({"content": upstream})
        if self._detokenizer is not None:
            delta.tokens = self._released
        self._delta = Delta(self.index, "")
        return delta

    def sent(self) -> None:
        """Mark the last delta as written to the client's connection."""
        self.delivered = self._released

    def feed_run(self, run: Sequence[Chunk]) -> None:
        """Feed a group of `group_chunks` as one text; the guard's verdict does not depend on chunking."""
        if len(run) == 1 or self.over or self._reader is not None:
            for chunk in run:
                self.feed(chunk)
            return
        texts = [chunk for chunk in run if isinstance(chunk, TextChunk)]
        for chunk in texts:
            self.received += chunk.characters
            self.generated += chunk.characters
            self._mark(chunk.text)
        text = "".join([chunk.text for chunk in texts])
        self._logprobs.add_upstream(None, text)
        self._screen(text)

    def _feed_text(self, chunk: TextChunk) -> None:
        size = chunk.characters
        self.received += size
        self.ended_by_engine |= chunk.finish_reason is not None
        if self.over:
            return
        self.generated += size
        self.vectors = chunk.vectors or self.vectors
        self.scores = chunk.scores or self.scores
        self.refused |= chunk.refused
        self.upstream_stop = chunk.stop or self.upstream_stop
        text = chunk.text
        if chunk.reasoning and self._marking is None:
            self._marking, self._reader = UpstreamReasoning(), with_reasoning(self._reader)
        if self._marking is not None:
            ends = bool(chunk.calls) or chunk.finish_reason is not None
            text = self._marking.marked(chunk.reasoning, text, ends=ends)
        if self._reader is not None:
            text += self._complete_calls(chunk)
        self._logprobs.add_upstream(chunk.logprobs, text)
        if chunk.details or chunk.annotations:
            self._beside.append((self._decoded + len(text), chunk))
        reason = chunk.finish_reason
        if self._process(text, last=reason is not None) and reason is not None:
            self._finish("", _known_reason(reason))

    def _complete_calls(self, chunk: TextChunk) -> str:
        """Tool calls that an upstream parsed, as text once complete, so that they pass the guard."""
        for piece in chunk.calls or ():
            known = self._upstream_calls.setdefault(int(piece.get("index") or 0), PartialCall())
            known.add(piece)
        self._upstream_pieces += len(calls_text(chunk.calls or []))
        if chunk.finish_reason is None or not self._upstream_calls:
            return ""
        found, self._upstream_calls, self._upstream_pieces = self._upstream_calls, {}, 0
        whole = [found[number] for number in sorted(found)]
        last = whole[-1]
        if chunk.finish_reason == "length" and last.name and last.is_cut:
            before = as_text(each.joined() for each in whole[:-1])
            return before + cut_text(last.joined(cut=True))
        return as_text(each.joined() for each in whole)

    def _process(self, text: str, *, last: bool = False) -> bool:
        """Pass a token's text through stops and guard. False when it ended the choice."""
        self._mark(text)
        return self._screen(text, last=last)

    def _mark(self, text: str) -> None:
        self._decoded += len(text)
        if self._detokenizer is not None and not self._detokenizer.pending:
            self._marks.append((self._decoded, self.generated))
            self._logprobs.place(self._decoded)

    def _screen(self, text: str, *, last: bool = False) -> bool:
        if self._stops is not None:
            if self.generated > self._min_tokens:
                text = self._stops.feed(text)
            self._passed += len(text)
            if self._stops.matched is not None:
                self._logprobs.limit(self._passed)
                self._finish(text, "stop")
                return False
        if self._guard is not None:
            text = self._guard.feed(text, last=last)
            if self._guard.blocked:
                self._block(text)
                return False
        self._release(text)
        if self._call_blocked:
            self._block("")
            return False
        if self._single_tool_call and self.calls:
            self._released = self.generated
            self.finish_reason = self._delta.finish_reason = "tool_calls"
            return False
        return True

    def _release(self, text: str) -> None:
        if self._beside:
            text = self._release_parts(text)
        if self._reader is not None:
            text = self._add_calls(*self._reader.feed(text))
        if text:
            self._add_text(text)
        held = self._held_before + (self._reader.held if self._reader else 0)
        reached = self._reached = self._decoded - held
        if self._detokenizer is None:
            added = self._marking.marks if self._marking is not None else 0
            passed = reached - added
            passed = passed if passed < self.generated else self.generated
            if passed > self._released:
                self._released = passed
        marks = self._marks
        end = self._reader.reasoning_end if self._reader is not None else 0
        while marks and marks[0][0] <= reached:
            offset, self._released = marks.popleft()
            if offset <= end:
                self.reasoning_tokens = self._released

    @property
    def _held_before(self) -> int:
        """Characters that the steps before the reader hold back."""
        return (self._stops.held if self._stops else 0) + (self._guard.held if self._guard else 0)

    def _release_parts(self, text: str) -> str:
        """Release the text up to each place that has something beside it; returns the rest."""
        reached = self._decoded - self._held_before
        start = reached - len(text)
        while self._beside and self._beside[0][0] <= reached:
            place = self._beside[0][0]
            part, text = text[: max(0, place - start)], text[max(0, place - start) :]
            start += len(part)
            if self._reader is not None:
                part = self._add_calls(*self._reader.feed(part))
            if part:
                self._add_text(part)
            self._add_beside(place)
        return text

    def _add_beside(self, reached: float) -> None:
        """Details and annotations of the text that is released up to `reached`."""
        while self._beside and self._beside[0][0] <= reached:
            chunk = self._beside.popleft()[1]
            if chunk.details:
                self._begin_part()
                self.details += chunk.details
                self._delta.details += chunk.details
            if chunk.annotations:
                self.annotations += chunk.annotations
                self._delta.annotations += chunk.annotations

    def _begin_part(self) -> None:
        """Reasoning, and what belongs to it, comes first in a delta."""
        if not (self._texts or self._delta.calls):
            return
        self._delta.text, self._texts = "".join(self._texts), []
        self._delta.refused = self.refused
        self._ready.append(self._delta)
        self._delta = Delta(self.index, "")

    def _add_text(self, text: str) -> None:
        self._texts.append(text)
        self.text.append(text)

    def _add_calls(self, text: str, calls: list[ToolCall]) -> str:
        if self._reader is not None and (reasoning := self._reader.take_reasoning()):
            self.reasoning.append(reasoning)
            self._begin_part()
            self._delta.reasoning += reasoning
        calls = calls[: 1 - len(self.calls)] if self._single_tool_call else calls
        if self._guard is not None and calls:
            cleaned = [clean_call(call, self._guard) for call in calls]
            calls = [call for call in cleaned if call is not None]
            self._call_blocked |= len(calls) < len(cleaned)
        self.calls += calls
        self._delta.calls += calls
        return text

    def _finish(self, tail: str, reason: str) -> None:
        if self._guard is not None:
            tail = self._guard.feed(tail, last=True) + self._guard.flush()
            if self._guard.blocked:
                self._block(tail)
                return
            if self._guard.undecided:
                self.pending_reason = reason
                return
        self._conclude(tail, reason)

    def _conclude(self, tail: str, reason: str) -> None:
        if self._beside:
            tail = self._release_parts(tail)
        if self._reader is not None:
            before = self._add_calls(*self._reader.feed(tail))
            tail = before + self._add_calls(*self._reader.flush(cut=reason == "length"))
            if reason in ("stop", "tool_calls"):
                reason = "tool_calls" if self.calls else "stop"
            reason = "content_filter" if self._call_blocked else reason
        if tail:
            self._add_text(tail)
        self._add_beside(inf)
        self._released, self._reached = self.generated, inf
        end = self._reader.reasoning_end if self._reader is not None else 0
        self.reasoning_tokens = max(
            self.reasoning_tokens, *(tokens for offset, tokens in self._marks if offset <= end), 0
        )
        self.finish_reason = self._delta.finish_reason = reason

    def _block(self, text: str) -> None:
        if self._reader is not None:
            text = self._add_calls(*self._reader.feed(text))
        if text:
            self._add_text(text)
        self.finish_reason = self._delta.finish_reason = "content_filter"


def fewest_needed(choices: Sequence[ChoiceOutput]) -> int:
    """Characters that must come before anything more can be sent: until then they wait together, and
    cost no turn each."""
    return min([choice.needed for choice in choices if not choice.over])
