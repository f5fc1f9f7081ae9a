"""Parses the responses of OpenAI-compatible servers, streamed or whole, into a request's mailbox."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import orjson

from core.errors import TollhouseError
from engine.protocol import FinishReason
from gateway.upstreams.base import Job, Mailbox, TextChunk, calls_text, engine_unavailable
from gateway.upstreams.upstream_errors import error_of_event, error_of_status
from gateway.upstreams.upstream_usage import CountTokens, UsageCounter


class ResponseParser:
    """Parses the response to one call. The content type decides whether it is a stream, since some
    servers ignore the `stream` field."""

    def __init__(
        self,
        engine_id: str,
        job: Job,
        mailbox: Mailbox,
        on_close: Callable[[str], None],
        count_tokens: CountTokens | None = None,
    ) -> None:
        self.terminate: Callable[[], None] | None = None
        self._engine_id = engine_id
        self._mailbox = mailbox
        self._usage = UsageCounter(job, count_tokens)
        self._inputs = job.request.inputs
        self._on_close: Callable[[str], None] | None = on_close
        self._status = 0
        self._streams = False
        self._buffer = b""  # an incomplete line of a stream; else the body so far

    def on_headers(self, status: int, content_type: str) -> None:
        self._status = status
        streams = content_type == "text/event-stream" and self._inputs is None
        self._streams = status < 400 and streams

    def on_data(self, data: bytes) -> None:
        if not self._streams:
            self._buffer += data
            return
        lines = (self._buffer + data).split(b"\n")
        self._buffer = lines.pop()
        with self._reporting_errors():
            for line in lines:
                if line.startswith(b"data:"):
                    event = line[5:].strip()
                    if event == b"[DONE]":
                        self._finish(FinishReason.STOP)
                        return
                    self._parse_event(orjson.loads(event))

    def on_end(self) -> None:
        with self._reporting_errors():
            if self._status >= 400:
                raise error_of_status(
                    self._engine_id, self._mailbox.request_id, self._status, self._buffer
                )
            if self._inputs is not None:
                self._parse_embeddings(orjson.loads(self._buffer), len(self._inputs))
            elif not self._streams:
                self._parse_completion(orjson.loads(self._buffer))
            self._finish(FinishReason.STOP)

    def on_error(self, error: Exception) -> None:
        self._fail(engine_unavailable(self._engine_id, str(error) or type(error).__name__))

    def abort(self) -> None:
        if self.terminate is not None:
            self.terminate()
        self._finish(FinishReason.ABORT)

    @contextlib.contextmanager
    def _reporting_errors(self) -> Iterator[None]:
        try:
            yield
        except TollhouseError as error:
            self._fail(error)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self._fail(
                engine_unavailable(self._engine_id, f"its response is malformed ({error!r})")
            )

    def _finish(self, reason: FinishReason) -> None:
        if self._close_once():
            self._mailbox.finish(self._usage.receipt(reason))

    def _fail(self, error: TollhouseError) -> None:
        if self._close_once():
            if self.terminate is not None:
                self.terminate()
            generated = self._usage.received
            receipt = self._usage.receipt(FinishReason.ERROR) if generated else None
            self._mailbox.fail(error, receipt)

    def _close_once(self) -> bool:
        """Mark the call as ended. True at the first call only."""
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close(self._mailbox.request_id)
        return on_close is not None

    def _parse_event(self, event: dict[str, Any]) -> None:
        if event.get("error"):
            raise error_of_event(self._engine_id, self._mailbox.request_id, event["error"])
        choices = event.get("choices") or ()
        for choice in choices:
            self._count(choice, choice.get("delta"))
        if event.get("usage"):
            self._usage.report(event["usage"], final=not choices)
        for choice in choices:
            delta = choice.get("delta")
            text = (delta.get("content") if delta is not None else choice.get("text")) or ""
            reason = choice.get("finish_reason")
            calls = delta.get("tool_calls") if delta is not None else None
            if text or reason is not None or calls:
                self._put(choice, text, reason, calls)

    def _parse_completion(self, answer: dict[str, Any]) -> None:
        choices = answer["choices"]
        for choice in choices:
            self._count(choice, choice.get("message"))
        self._usage.report(answer.get("usage"), final=True)
        for choice in choices:
            message = choice.get("message")
            text = (message.get("content") if message is not None else choice.get("text")) or ""
            calls = message.get("tool_calls") if message is not None else None
            calls = [{**call, "index": number} for number, call in enumerate(calls or ())]
            self._put(choice, text, choice.get("finish_reason") or "stop", calls)

    def _parse_embeddings(self, answer: dict[str, Any], expected: int) -> None:
        self._usage.report(answer.get("usage"), final=True)
        rows = sorted(answer["data"], key=lambda row: int(row["index"]))
        if len(rows) != expected:
            raise ValueError(f"{len(rows)} embeddings for {expected} inputs")
        vectors = [row["embedding"] for row in rows]
        self._mailbox.put(TextChunk(self._mailbox.request_id, 0, "", 0, "stop", vectors=vectors))

    def _count(self, choice: dict[str, Any], message: dict[str, Any] | None) -> None:
        """Count a choice's output; `message` is a chat's message or delta."""
        index = int(choice.get("index") or 0)
        holder = choice if message is None else message
        if text := holder.get("text" if message is None else "content"):
            self._usage.add(index, "text", text)
        if calls := holder.get("tool_calls"):
            self._usage.add(index, "calls", calls_text(calls))
        if reasoning := holder.get("reasoning_content") or holder.get("reasoning"):
            self._usage.add(index, "reasoning", str(reasoning))

    def _put(
        self,
        choice: dict[str, Any],
        text: str,
        reason: str | None,
        calls: list[dict[str, Any]] | None,
    ) -> None:
        self._mailbox.put(
            TextChunk(
                self._mailbox.request_id,
                int(choice.get("index") or 0),
                text,
                self._usage.grown(),
                reason,
                choice.get("logprobs"),
                calls,
            )
        )
