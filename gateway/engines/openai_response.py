"""Parses the responses of OpenAI-compatible servers, streamed or whole, into a request's mailbox.

Nothing that grows with the response occupies the event loop: events are parsed a few at a time, a
large whole answer is parsed in a thread, and so is the counting of tokens that were not reported.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from core.errors import TollhouseError
from engine.protocol import FinishReason, Receipt
from gateway.engines.answer_fields import Said, StreamedChoices, whole_choice
from gateway.engines.answer_shapes import (
    Completion,
    Embeddings,
    PlainEvent,
    choice_of,
    completion_decoder,
    embeddings_decoder,
    plain_answer_decoder,
    plain_event_decoder,
    plain_events_decoder,
)
from gateway.engines.joined_texts import JoinedTexts
from gateway.engines.server_events import DONE, LineEnds, data_line, loads
from gateway.engines.upstream_errors import error_of_event, error_of_status
from gateway.engines.upstream_scores import ROUTES as SCORES
from gateway.engines.upstream_scores import scores_of
from gateway.engines.upstream_usage import CountTokens, UsageCounter
from gateway.request.engine import Job, Mailbox, TextChunk, engine_unavailable

_STOP = FinishReason.STOP
_INLINE_BYTES = 16_384  # of events or of a whole answer; about a millisecond
_LONGEST_LINE = 8 << 20  # bytes of one event of a stream
_LARGEST_ANSWER = 256 << 20  # bytes of an answer that is not streamed
_NEXT_EVENT = b"\n\ndata: "
# What parsing raises: an error that the server reports, or the trace of a malformed response.
_MALFORMED = (
    *(TollhouseError, ValueError, KeyError, TypeError, AttributeError, msgspec.DecodeError),
)


class ResponseParser:
    """Parses the response to one call. The content type decides whether it is a stream, since some
    servers ignore the `stream` field."""

    terminate: Callable[[], None] | None = None
    # Given the error of a refusal, says whether the request is sent once more, to this parser.
    retry: Callable[[TollhouseError], bool] | None = None
    # What a client reads of the server's text of a refusal; None: nothing.
    shown: Callable[[Any], str] | None = None
    _status = 0
    _retry_after = ""  # the header's value
    _streams = False
    _at_end: Callable[[], None] | None = None  # once what waits is parsed
    _size = 0  # bytes of `_parts`
    _event_size = 0  # bytes of `_event`
    _task: asyncio.Task[None] | None = None  # parses a whole answer, or counts its tokens

    def __init__(
        self,
        engine_id: str,
        job: Job,
        mailbox: Mailbox,
        on_close: Callable[[str], None],
        count_tokens: CountTokens | None = None,
    ) -> None:
        self._engine_id = engine_id
        self._mailbox = mailbox
        self._new_counter = partial(UsageCounter, job, count_tokens)
        self._usage = self._new_counter()
        self._inputs = job.request.inputs
        self._request = job.request
        # With tools the end of a call may end the choice, within the chunk that holds it.
        self._texts = JoinedTexts(mailbox, self._usage, joins=not job.request.tools)
        self._on_close: Callable[[str], None] | None = on_close
        self._parts: list[bytes] = []  # an incomplete line of a stream; else the body so far
        self._ends = LineEnds()
        self._choices = StreamedChoices()
        self._event: list[bytes] = []  # data lines of an event that has not ended
        self._waiting: deque[bytes] = deque()  # whole lines of a stream, not parsed yet, by read

    def sent(self, terminate: Callable[[], None]) -> None:
        """The request is sent, and `terminate` cancels it."""
        if self._on_close is None:
            terminate()
        else:
            self.terminate = terminate

    def on_headers(self, status: int, content_type: str, retry_after: str = "") -> None:
        self._status, self._retry_after = status, retry_after
        streams = content_type == "text/event-stream" and self._inputs is None
        self._streams = status < 400 and streams

    def on_data(self, data: bytes) -> None:
        if self._on_close is None:
            return
        if self._streams:
            data = self._ends.unify(data)
        if self._streams and data.find(b"\n") >= 0:
            alone = not (self._size or self._waiting or self._event)
            if alone and self._take_one_event(data):
                return
            lines, _, data = (b"".join(self._parts) + data).rpartition(b"\n")
            self._parts, self._size = [], 0
            self._waiting.append(lines)
            if len(self._waiting) == 1:
                self._parse_some()
        self._parts.append(data)
        self._size += len(data)
        if self._size > (_LONGEST_LINE if self._streams else _LARGEST_ANSWER):
            self._fail(engine_unavailable(self._engine_id, f"it sent {self._size} bytes at once"))

    def _take_one_event(self, data: bytes) -> bool:
        """Whether the read is one whole event, a piece of text and nothing else, and was taken: most
        reads of a stream are."""
        whole = data.startswith(b"data: ") and data.find(b"\n") == len(data) - 2
        whole = whole and data.endswith(b"\n")
        if not (whole and len(data) < _INLINE_BYTES and self._take_plain(data[6:-2])):
            return False
        self._texts.put_if_needed()
        self._end_if_cut()
        return True

    def on_end(self) -> None:
        body, self._parts = b"".join(self._parts), []
        if self._status >= 400:
            request_id = self._mailbox.request_id
            head = body[:_INLINE_BYTES]
            told = self._retry_after
            error = error_of_status(
                self._engine_id, request_id, self._status, head, told, self.shown
            )
            retry, self.retry = self.retry, None
            if self._on_close is not None and retry is not None and retry(error):
                self._size = 0
            else:
                self._fail(error)
        elif self._streams:
            self._after_lines(partial(self._finish, FinishReason.STOP))
        elif len(body) <= _INLINE_BYTES:
            try:
                if not self._take_plain_answer(body):
                    self._take_answer(*self._parse_answer(body))
            except _MALFORMED as error:
                self._fail_for(error)
        else:
            self._task = asyncio.create_task(self._parse_in_thread(body))

    def refuse(self, error: TollhouseError) -> None:
        """The request could not be sent, for a reason of ours."""
        self._fail(error)

    def on_error(self, error: Exception) -> None:
        failure = engine_unavailable(self._engine_id, str(error) or type(error).__name__)
        self._after_lines(partial(self._fail, failure))

    def abort(self) -> None:
        if self.terminate is not None:
            self.terminate()
        if self._task is None:  # otherwise all of the answer came, and it is soon counted
            self._after_lines(partial(self._finish, FinishReason.ABORT))

    def _after_lines(self, act: Callable[[], None]) -> None:
        if self._waiting and self._on_close is not None:
            self._at_end = act
        else:
            act()

    def _parse_some(self) -> None:
        """Parse some lines of the stream; more of them in another turn of the event loop."""
        waiting = self._waiting
        lines, rest = _split(waiting[0])
        try:
            self._parse_lines(lines)
        except _MALFORMED as error:
            self._fail_for(error)
        if self._on_close is None:
            return
        if rest:
            waiting[0] = rest
        else:
            waiting.popleft()
        self._texts.put_if_needed()
        if self._end_if_cut():
            return
        if waiting:
            asyncio.get_running_loop().call_soon(self._parse_some)
        elif (act := self._at_end) is not None:
            self._at_end = None
            act()

    def _end_if_cut(self) -> bool:
        """End the answer of a server that ignores max_tokens."""
        if not self._usage.cut or self._on_close is None:
            return False
        terminate, self.terminate = self.terminate, None
        if terminate is not None:
            terminate()
        self._waiting.clear()
        for index in range(self._request.n or 1):
            self._mailbox.put(TextChunk(self._mailbox.request_id, index, "", 0, "length"))
        self._finish(FinishReason.LENGTH)
        return True

    def _parse_lines(self, lines: bytes) -> None:
        taken = self._take_plain_events(lines)
        rest = lines.split(b"\n\n", taken)[taken:]
        for line in rest[0].split(b"\n") if rest else ():
            if self._on_close is None:
                return
            if not line:
                self._end_event()
            elif (data := data_line(line)) is not None:
                self._add_data(data)

    def _add_data(self, data: bytes) -> None:
        """A `data` line. One that is JSON by itself is an event, which some servers end without an
        empty line; of any other the next lines are waited for."""
        if self._event or not self._take_data(data):
            self._event.append(data)
            self._event_size += len(data)
            if self._event_size > _LONGEST_LINE:
                raise ValueError(f"an event of {self._event_size} bytes")

    def _end_event(self) -> None:
        if self._event:
            data, self._event, self._event_size = b"\n".join(self._event), [], 0
            if data and not self._take_data(data):
                raise ValueError("an event that is not JSON")

    def _take_data(self, data: bytes) -> bool:
        """False for what is not JSON."""
        if data == DONE:
            self._finish(FinishReason.STOP)
            return True
        if self._take_plain(data):
            return True
        try:
            event = loads(data)
        except ValueError:
            return False
        self._texts.put()
        self._parse_event(event)
        return True

    def _take_plain_events(self, lines: bytes) -> int:
        """How many events at the beginning are pieces of text and nothing else, and were taken. They
        are decoded together: one by one takes three times as long."""
        if not lines.startswith(b"data: {") or lines.find(_NEXT_EVENT) < 0:
            return 0
        if self._event or self._choices.waiting:
            return 0
        events = lines[6:].partition(b"\n\ndata: [DONE]")[0]
        listed = events.replace(_NEXT_EVENT, b",")
        try:
            decoded = plain_events_decoder.decode(b"[" + listed + b"]")
        except (ValueError, RecursionError, msgspec.MsgspecError):
            return 0  # something else among them, or malformed: each by itself tells
        if len(decoded) != (len(events) - len(listed)) // (len(_NEXT_EVENT) - 1) + 1:
            return 0
        return self._texts.take_first(decoded) if self._on_close is not None else 0

    def _take_plain_answer(self, body: bytes) -> bool:
        """Whether the whole answer is the text of one choice and nothing else, and was taken."""
        try:
            answer = plain_answer_decoder.decode(body)
        except (ValueError, RecursionError, msgspec.MsgspecError):
            return False  # something else, or malformed: the general parser tells
        choice = answer.choices[0]
        message, index = choice.message, choice.index or 0
        if (
            self._inputs is not None
            or message.tool_calls
            or message.reasoning_content
            or message.reasoning
            or message.refusal
            or choice.logprobs is not None
            or answer.error
        ):
            return False
        usage, text = self._usage, message.content or ""
        if text:
            usage.add(index, "text", text)
        usage.report(answer.usage, final=True)
        text, reason = capped(usage, [text], choice.finish_reason or "stop")[0]
        chunk = TextChunk(self._mailbox.request_id, index, text, usage.grown(), reason)
        self._take_answer(usage, (chunk,), usage.receipt(_STOP))
        return True

    async def _parse_in_thread(self, body: bytes) -> None:
        try:
            self._take_answer(*await asyncio.to_thread(self._parse_answer, body))
        except _MALFORMED as error:
            self._fail_for(error)

    def _parse_answer(self, body: bytes) -> tuple[UsageCounter, Sequence[TextChunk], Receipt]:
        """Touches no state of the parser, since it may run in a thread."""
        usage = self._new_counter()
        if self._request.route in SCORES:
            scores, told = scores_of(body, self._request)
            usage.report(told, final=True)
            chunks = [TextChunk(self._mailbox.request_id, 0, "", 0, "stop", scores=scores)]
        elif self._inputs is not None:
            chunks = self._parse_embeddings(
                embeddings_decoder.decode(body), len(self._inputs), usage
            )
        else:
            chunks = self._parse_completion(completion_decoder.decode(body), usage)
        return usage, chunks, usage.receipt(FinishReason.STOP)

    def _take_answer(
        self, usage: UsageCounter, chunks: Sequence[TextChunk], receipt: Receipt
    ) -> None:
        self._usage = usage
        for chunk in chunks:
            self._mailbox.put(chunk)
        if self._close_once():
            self._mailbox.finish(receipt)

    def _fail_for(self, error: Exception) -> None:
        """`error`: what parsing has raised."""
        if not isinstance(error, TollhouseError):
            error = engine_unavailable(self._engine_id, f"its response is malformed ({error!r})")
        self._fail(error)

    def _finish(self, reason: FinishReason) -> None:
        if self._close_once():
            self._with_receipt(reason, self._mailbox.finish)

    def _fail(self, error: TollhouseError) -> None:
        terminate = self.terminate
        if self._close_once():
            if terminate is not None:
                terminate()
            self._waiting.clear()
            if self._usage.received:
                self._with_receipt(FinishReason.ERROR, partial(self._mailbox.fail, error))
            else:
                self._mailbox.fail(error)

    def _with_receipt(self, reason: FinishReason, then: Callable[[Receipt], None]) -> None:
        """Make the receipt, in a thread if many tokens are to be counted for it."""
        if self._usage.uncounted <= _INLINE_BYTES:
            then(self._usage.receipt(reason))
        else:
            self._task = asyncio.create_task(self._count_in_thread(reason, then))

    async def _count_in_thread(self, reason: FinishReason, then: Callable[[Receipt], None]) -> None:
        then(await asyncio.to_thread(self._usage.receipt, reason))

    def _close_once(self) -> bool:
        """Mark the call as ended. True at the first call only."""
        self._texts.put()
        self._texts.closed = True
        on_close, self._on_close = self._on_close, None
        # The call refers to this parser: the request and its prompt would wait for the collector.
        self.terminate = self.retry = None
        if on_close is not None:
            on_close(self._mailbox.request_id)
        return on_close is not None

    def _take_plain(self, event: bytes) -> bool:
        """Whether the event is a piece of text and nothing else, and was taken."""
        try:
            return self._take_event(plain_event_decoder.decode(event))
        except (ValueError, RecursionError, msgspec.MsgspecError):
            return False  # something else, or malformed: the general parser tells

    def _take_event(self, event: PlainEvent) -> bool:
        open_ = self._on_close is not None and not self._choices.waiting
        return open_ and self._texts.take(event)

    def _parse_event(self, event: dict[str, Any]) -> None:
        if event.get("error"):
            raise error_of_event(self._engine_id, self._mailbox.request_id, event["error"])
        said = [self._choices.read(choice) for choice in event.get("choices") or ()]
        self._put(said, event.get("usage"), final=not said)

    def _put(self, said: Sequence[Said], usage: Any, *, final: bool) -> None:
        """Put what an event says, with the usage that it reports, if any."""
        for each in said:
            each.count(self._usage)
        if usage:
            self._usage.report(usage, final=final)
        for each in said:
            beyond = min(len(each.text), self._usage.beyond_cap()) if each.text else 0
            if beyond > 0:
                self._usage.drop(beyond)
                each.text = each.text[: len(each.text) - beyond]
                each.reason = each.reason and "length"
            if not each.empty:
                self._mailbox.put(each.chunk(self._mailbox.request_id, self._usage.grown()))

    def _parse_completion(self, answer: Completion, usage: UsageCounter) -> list[TextChunk]:
        if answer.error:
            raise error_of_event(self._engine_id, self._mailbox.request_id, answer.error)
        if not answer.choices:
            raise ValueError("it has no choices")
        said = [whole_choice(choice_of(each)) for each in answer.choices]
        for each in said:
            each.count(usage)
        usage.report(answer.usage, final=True)
        reasons = [each.reason or "stop" for each in said]
        kept = capped(usage, [each.text for each in said], *reasons)
        for each, (text, reason) in zip(said, kept, strict=True):
            each.text, each.reason = text, reason
        return [each.chunk(self._mailbox.request_id, usage.grown()) for each in said]

    def _parse_embeddings(
        self, answer: Embeddings, expected: int, usage: UsageCounter
    ) -> list[TextChunk]:
        if answer.error:
            raise error_of_event(self._engine_id, self._mailbox.request_id, answer.error)
        usage.report(answer.usage, final=True)
        rows = sorted(answer.data, key=lambda row: row.index)
        if len(rows) != expected:
            raise ValueError(f"{len(rows)} embeddings for {expected} inputs")
        vectors = [bytes(row.embedding) for row in rows]
        return [TextChunk(self._mailbox.request_id, 0, "", 0, "stop", vectors=vectors)]


def capped(usage: UsageCounter, texts: Sequence[str], *reasons: str) -> list[tuple[str, str]]:
    """The texts of a whole answer up to its cap, with their finish reasons."""
    beyond = usage.beyond_cap()
    total = sum(map(len, texts)) if beyond > 0 else 0
    if not total:
        return list(zip(texts, reasons, strict=True))
    kept = [text[: len(text) - min(len(text), -(-beyond * len(text) // total))] for text in texts]
    usage.drop(total - sum(map(len, kept)))
    return [
        (short, reason if short == text else "length")
        for short, text, reason in zip(kept, texts, reasons, strict=True)
    ]


def _split(lines: bytes) -> tuple[bytes, bytes]:
    """What one turn parses, some whole events or one long line, and the rest."""
    if len(lines) <= _INLINE_BYTES:
        return lines, b""
    at = lines.rfind(b"\n\n", 0, _INLINE_BYTES)
    if at >= 0:  # the rest begins with an event, as what is decoded together does
        return lines[: at + 1], lines[at + 2 :]
    line, _, rest = lines.partition(b"\n")
    return line, rest
