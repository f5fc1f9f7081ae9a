"""Parses a provider's answer into a request's mailbox, by the reader of its port.

Framing, errors, counting and the turns of the event loop are those of the parser of OpenAI's answers.
"""

from collections.abc import Callable, Sequence
from typing import Any

from engine.protocol import FinishReason, Receipt
from gateway.engines.answer_fields import Said
from gateway.engines.openai_response import ResponseParser, capped
from gateway.engines.ports.port import Frames, Port, Reader, ReportedError
from gateway.engines.server_events import loads
from gateway.engines.upstream_errors import error_of_reported
from gateway.engines.upstream_usage import CountTokens, UsageCounter
from gateway.request.engine import Job, Mailbox, TextChunk

_FRAMES = "application/vnd.amazon.eventstream"


class PortParser(ResponseParser):
    def __init__(
        self,
        port: Port,
        engine_id: str,
        job: Job,
        mailbox: Mailbox,
        on_close: Callable[[str], None],
        count_tokens: CountTokens | None = None,
    ) -> None:
        super().__init__(engine_id, job, mailbox, on_close, count_tokens)
        self._reader: Reader = port.reader(job.request)
        self._new_frames = port.frames
        self._frames: Frames | None = None

    def on_headers(self, status: int, content_type: str, retry_after: str = "") -> None:
        super().on_headers(status, content_type, retry_after)
        if status < 400 and content_type == _FRAMES:
            self._streams, self._frames = True, self._new_frames()

    def on_data(self, data: bytes) -> None:
        """Frames become the events that they hold, each on a line of its own."""
        if self._frames is None:
            super().on_data(data)
            return
        try:
            events = self._frames.feed(data)
        except ValueError as error:
            self._fail_for(error)
            return
        if events:
            super().on_data(b"".join([b"data: %b\n\n" % event for event in events]))

    def _take_plain(self, event: bytes) -> bool:
        if self._on_close is None or not (text := self._reader.text(event)):
            return False
        self._texts.take_text(0, text)
        return True

    def _take_plain_events(self, lines: bytes) -> int:
        return 0  # events have names, so that they are read one by one

    def _take_plain_answer(self, body: bytes) -> bool:
        return False

    def _parse_event(self, event: Any) -> None:
        if not isinstance(event, dict):
            raise TypeError(f"an event is {type(event).__name__}")
        try:
            said = list(self._reader.read(event))
        except ReportedError as error:
            raise self._error_of(error) from None
        split = self._reader.take_usage()
        self._put(said, split.as_openai() if split is not None else None, final=True)
        if self._reader.ended:
            self._finish(FinishReason.STOP)

    def _parse_answer(self, body: bytes) -> tuple[UsageCounter, Sequence[TextChunk], Receipt]:
        if self._inputs is not None:
            return super()._parse_answer(body)  # embeddings, of providers with OpenAI's form
        usage = self._new_counter()
        answer = loads(body)
        if not isinstance(answer, dict):
            raise TypeError(f"it is {type(answer).__name__}")
        try:
            said = list(self._reader.whole(answer))
        except ReportedError as error:
            raise self._error_of(error) from None
        for each in said:
            each.count(usage)
        if (split := self._reader.take_usage()) is not None:
            usage.report(split.as_openai(), final=True)
        kept = capped(usage, [each.text for each in said], *[each.reason or "" for each in said])
        for each, (text, reason) in zip(said, kept, strict=True):
            each.text, each.reason = text, reason or None
        if not any(each.reason for each in said):
            said.append(Said(reason="stop"))
        request_id = self._mailbox.request_id
        chunks = [each.chunk(request_id, usage.grown()) for each in said if not each.empty]
        return usage, chunks, usage.receipt(FinishReason.STOP)

    def _error_of(self, error: ReportedError) -> Exception:
        reported = error.reported
        request_id = self._mailbox.request_id
        return error_of_reported(self._engine_id, request_id, reported.status, reported.detail)
