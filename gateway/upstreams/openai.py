"""Client of any OpenAI-compatible server: text in, text out, with usage requested on every stream."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import aiohttp
import orjson

from core.clock import SystemClock
from core.counters_memory import MemoryCounters
from core.errors import BadRequest, TollhouseError, Unavailable
from engine.protocol import AdapterState, EngineInfo, EngineStats, FinishReason, Receipt
from gateway.upstreams.base import (
    Generation,
    Job,
    Mailbox,
    StartupProgress,
    TextChunk,
    engine_unavailable,
)
from gateway.upstreams.config import Upstream
from gateway.upstreams.http_pool import CONNECT_S, HttpPool
from gateway.upstreams.openai_body import lora_name, path_of, upstream_body
from gateway.upstreams.openai_stats import stats_of
from gateway.upstreams.upstream_limits import Permit, UpstreamLimits, upstream_busy

log = logging.getLogger("tollhouse.upstream")
_CHECK_S = 5.0
_LOAD_EVERY_S = 1.0
_SILENT_AFTER_S = 2.0  # a state request unanswered for longer counts as silence


class OpenAIEngine:
    """One server. Its final `usage` is the receipt; without one, each chunk counts as a token."""

    speaks_text = True

    def __init__(
        self, upstream: Upstream, model: str, limits: UpstreamLimits | None = None
    ) -> None:
        """Without `limits`, the limits of the upstream's entry apply to this process alone."""
        self.engine_id = upstream.replica_name
        self._upstream = upstream
        self._model = model
        self._base = upstream.url.rstrip("/").removesuffix("/v1")
        self._session: aiohttp.ClientSession | None = None
        self._checker: asyncio.Task[None] | None = None
        headers = {"content-type": "application/json"}
        if upstream.api_key:
            headers["authorization"] = f"Bearer {upstream.api_key}"
        self._headers = headers
        self._pool = HttpPool(self._base, headers)
        self._running: dict[str, _ResponseParser] = {}
        self._healthy = True
        self._adapters: dict[str, AdapterState] = {}
        self._stats: EngineStats | None = None  # from its /metrics
        self._polled_at: float | None = None  # monotonic time of an unanswered state request
        clock = SystemClock()
        self._limits = limits or UpstreamLimits(upstream, MemoryCounters(clock), clock)

    async def start(self) -> None:
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=600),
            headers=self._headers,
        )
        self._checker = asyncio.create_task(self._check())
        self._limits.start()

    async def close(self) -> None:
        for answer in list(self._running.values()):
            answer.abort()
        self._pool.close()
        await self._limits.close()
        if self._checker is not None:
            self._checker.cancel()
            await asyncio.gather(self._checker, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    def info(self) -> EngineInfo | None:
        return None

    def stats(self) -> EngineStats | None:
        """From its /metrics; without them, the requests of this process."""
        return self._stats or EngineStats(len(self._running), 0, 0, 0, 0)

    def healthy(self) -> bool:
        return self._session is not None and self._healthy

    def silent(self) -> bool:
        """Whether it accepts connections but leaves a state request unanswered."""
        polled_at = self._polled_at
        if polled_at is None or self._pool.last_byte_at > polled_at:
            return False
        return time.monotonic() - polled_at > _SILENT_AFTER_S

    def last_output(self) -> float:
        return self._pool.last_byte_at

    async def generate(self, job: Job) -> Generation:
        request_id = job.engine_request.request_id
        body = orjson.dumps(upstream_body(job, self._model, self._upstream.engine))
        permit = await self._limits.acquire() if self._limits else None
        mailbox = Mailbox(request_id, self._cancel)
        answer = _ResponseParser(self.engine_id, job, mailbox, partial(self._release, permit))
        self._running[request_id] = answer
        try:
            answer.terminate = await self._pool.post(path_of(job.request), body, answer)
        except (OSError, TimeoutError) as error:
            answer.on_error(error)
        except asyncio.CancelledError:
            answer.abort()
            raise
        return mailbox

    def startup_progress(self) -> StartupProgress | None:
        return None

    def adapters(self) -> Mapping[str, AdapterState]:
        return self._adapters

    async def load_adapter(self, path: str, digest: str) -> AdapterState:
        assert self._session is not None
        name = lora_name(digest)
        body = orjson.dumps({"lora_name": name, "lora_path": path})
        async with self._session.post(f"{self._base}/v1/load_lora_adapter", data=body) as answer:
            text = await answer.text()
            if answer.status >= 400 and "already" not in text:
                raise Unavailable(
                    f"The upstream cannot load the adapter {name}: {text[:200]}",
                    code="adapter_not_loaded",
                )
        state = self._adapters[digest] = AdapterState(digest, "resident", 0, 0)
        return state

    async def unload_adapter(self, digest: str) -> None:
        assert self._session is not None
        self._adapters.pop(digest, None)
        body = orjson.dumps({"lora_name": lora_name(digest)})
        async with self._session.post(f"{self._base}/v1/unload_lora_adapter", data=body):
            return

    async def receipt(self, request_id: str) -> Receipt | None:
        return None  # OpenAI's API has no receipts

    async def acknowledge(self, request_ids: list[str]) -> None:
        return

    async def _check(self) -> None:
        """Poll its models, adapters and load. It is unhealthy while it refuses connections."""
        listed = 0.0
        while True:
            now = time.monotonic()
            poll_due = bool(self._running) and now - self._pool.last_byte_at > _LOAD_EVERY_S
            try:
                if now - listed >= _CHECK_S or not self._healthy:
                    listed = now
                    self._update_adapters(await self._get("/v1/models"))
                if self._stats is not None or listed == now or poll_due:
                    page = await self._get("/metrics")
                    self._stats = stats_of(page.decode("utf-8", "replace"))
            except (aiohttp.ClientError, TimeoutError, OSError):
                self._healthy, self._stats = False, None
                self._adapters.clear()  # it may restart without any adapter
            await asyncio.sleep(_LOAD_EVERY_S)

    async def _get(self, path: str) -> bytes:
        """The page's body; empty if the server has no such page."""
        assert self._session is not None
        timeout = aiohttp.ClientTimeout(total=_CHECK_S)
        self._polled_at = self._polled_at or time.monotonic()
        async with self._session.get(self._base + path, timeout=timeout) as answer:
            page = await answer.read() if answer.status == 200 else b""
        self._polled_at = None
        return page

    def _update_adapters(self, page: bytes) -> None:
        """Read /v1/models. Adapters that it no longer lists must be loaded again."""
        self._healthy = True
        if not page:
            return
        try:
            names = {str(model["id"]) for model in orjson.loads(page).get("data") or ()}
        except (ValueError, KeyError, TypeError, AttributeError):
            return
        for digest in [each for each in self._adapters if lora_name(each) not in names]:
            log.warning("%s no longer lists the adapter %s", self.engine_id, digest[:12])
            del self._adapters[digest]

    def _release(self, permit: Permit | None, request_id: str) -> None:
        self._running.pop(request_id, None)
        if permit is not None:
            permit.release()

    def _cancel(self, request_id: str) -> None:
        answer = self._running.get(request_id)
        if answer is not None:
            answer.abort()


class _ResponseParser:
    """Parses the response to one call into the request's mailbox. The content type decides whether it
    is a stream, since some servers ignore the `stream` field."""

    def __init__(
        self, engine_id: str, job: Job, mailbox: Mailbox, on_close: Callable[[str], None]
    ) -> None:
        self.terminate: Callable[[], None] | None = None
        self._engine_id = engine_id
        self._mailbox = mailbox
        self._count = _UsageCounter(job)
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
                    _parse_chunk(orjson.loads(event), self._mailbox, self._count)

    def on_end(self) -> None:
        with self._reporting_errors():
            if self._status >= 400:
                raise _status_error(self._status, self._buffer)
            if self._inputs is not None:
                _parse_embeddings(
                    orjson.loads(self._buffer), len(self._inputs), self._mailbox, self._count
                )
            elif not self._streams:
                _parse_completion(orjson.loads(self._buffer), self._mailbox, self._count)
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
            self._mailbox.finish(self._count.receipt(reason))

    def _fail(self, error: TollhouseError) -> None:
        if self._close_once():
            if self.terminate is not None:
                self.terminate()
            self._mailbox.fail(error)

    def _close_once(self) -> bool:
        """Mark the call as ended. True at the first call only."""
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close(self._mailbox.request_id)
        return on_close is not None


class _UsageCounter:
    def __init__(self, job: Job) -> None:
        self._job = job
        self.seen = 0
        self.usage: dict[str, Any] | None = None

    def receipt(self, reason: FinishReason) -> Receipt:
        engine_request = self._job.engine_request
        prompt, cached, generated = len(engine_request.prompt), 0, self.seen
        if self.usage is not None:
            prompt = int(self.usage.get("prompt_tokens") or prompt)
            details = self.usage.get("prompt_tokens_details") or {}
            cached = min(prompt, int(details.get("cached_tokens") or 0))
            generated = int(self.usage.get("completion_tokens") or 0)
        return Receipt(
            request_id=engine_request.request_id,
            namespace=engine_request.namespace,
            adapter=engine_request.adapter,
            prompt=prompt,
            cached=cached,
            computed=prompt - cached,
            unprocessed=0,
            generated=generated,
            delivered=generated,
            recomputed=0,
            discarded=0,
            finish_reason=reason,
            queue_s=0.0,
            prefill_s=0.0,
            decode_s=0.0,
        )


def _parse_chunk(event: dict[str, Any], mailbox: Mailbox, count: _UsageCounter) -> None:
    if event.get("error"):
        raise Unavailable(f"The upstream failed: {str(event['error'])[:200]}", code="engine_failed")
    if event.get("usage"):
        count.usage = event["usage"]
    for choice in event.get("choices") or []:
        delta = choice.get("delta")
        text = (delta.get("content") if delta is not None else choice.get("text")) or ""
        reason = choice.get("finish_reason")
        calls = delta.get("tool_calls") if delta is not None else None
        if not text and reason is None and not calls:
            continue
        tokens = 1 if text or calls else 0
        count.seen += tokens
        mailbox.put(
            TextChunk(
                mailbox.request_id,
                int(choice.get("index") or 0),
                text,
                tokens,
                reason,
                choice.get("logprobs"),
                calls,
            )
        )


def _parse_completion(answer: dict[str, Any], mailbox: Mailbox, count: _UsageCounter) -> None:
    count.usage = answer.get("usage")
    total = int((count.usage or {}).get("completion_tokens") or 0)
    choices = answer["choices"]
    for position, choice in enumerate(choices):
        message = choice.get("message")
        text = (message.get("content") if message is not None else choice.get("text")) or ""
        calls = message.get("tool_calls") if message is not None else None
        # The server reports one total: divide it among the choices so that the shares add up to it.
        share = total // len(choices) + (1 if position < total % len(choices) else 0)
        count.seen += share
        mailbox.put(
            TextChunk(
                mailbox.request_id,
                int(choice.get("index") or 0),
                text,
                share,
                choice.get("finish_reason") or "stop",
                choice.get("logprobs"),
                [{**call, "index": number} for number, call in enumerate(calls or ())],
            )
        )


def _parse_embeddings(
    answer: dict[str, Any], expected: int, mailbox: Mailbox, count: _UsageCounter
) -> None:
    count.usage = answer.get("usage")
    rows = sorted(answer["data"], key=lambda row: int(row["index"]))
    if len(rows) != expected:
        raise ValueError(f"{len(rows)} embeddings for {expected} inputs")
    vectors = [row["embedding"] for row in rows]
    mailbox.put(TextChunk(mailbox.request_id, 0, "", 0, "stop", vectors=vectors))


def _status_error(status: int, body: bytes) -> TollhouseError:
    try:
        detail = orjson.loads(body).get("error") or {}
        message = str(detail.get("message") if isinstance(detail, dict) else detail)
    except (ValueError, AttributeError):
        message = body[:200].decode("utf-8", "replace")
    if status == 429:
        return upstream_busy(message, 1.0)
    if status in (400, 404, 413, 422):
        return BadRequest(f"The upstream refused the request: {message}", code="upstream_refused")
    return Unavailable(
        f"The upstream answered {status}: {message}", code="engine_failed", retry_after_s=1.0
    )
