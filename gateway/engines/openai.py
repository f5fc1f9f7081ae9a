"""Client of any OpenAI-compatible server: text in, text out, with usage requested on every stream."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import aiohttp
import orjson

from core.clock import SystemClock
from core.counters_memory import MemoryCounters
from core.errors import ContextLengthExceeded, TollhouseError, Unavailable
from engine.protocol import AdapterState, EngineInfo, EngineStats, Receipt
from gateway.catalog.upstreams import Upstream
from gateway.engines.http_pool import CONNECT_S, HttpPool
from gateway.engines.openai_body import KINDS, lora_name, path_of, upstream_body
from gateway.engines.openai_context import context_of
from gateway.engines.openai_response import ResponseParser
from gateway.engines.openai_stats import stats_of
from gateway.engines.refusal_texts import client_text
from gateway.engines.server_kinds import SHOWN, Detected, detect, read_page
from gateway.engines.upstream_limits import Permit, UpstreamLimits
from gateway.engines.upstream_usage import CountTokens
from gateway.request.engine import Generation, Job, Mailbox, StartupProgress, reporting

log = logging.getLogger("tollhouse.upstream")
_CHECK_S = 5.0
_LOAD_EVERY_S = 1.0
_SILENT_AFTER_S = 2.0  # a state request unanswered for longer counts as silence


class OpenAIEngine:
    """One server. The `usage` that it reports is the receipt; see `upstream_usage` for the others."""

    speaks_text = True
    refusal = ""

    def __init__(
        self,
        upstream: Upstream,
        model: str,
        limits: UpstreamLimits | None = None,
        count_tokens: CountTokens | None = None,
    ) -> None:
        """Without `limits`, the limits of the upstream's entry apply to this process alone.
        `count_tokens` is the model's tokenizer, for output whose usage the server does not report."""
        self.engine_id = upstream.replica_name
        self.on_receipt: Callable[[str, Receipt], None] | None = None
        # Called when the server's pages have said another kind, or other capabilities.
        self.on_detected: Callable[[], None] | None = None
        # Called with the context length that the server reports, if the upstream's entry has none.
        self.on_context: Callable[[int], None] | None = None
        self._context = upstream.context_length  # tokens; 0: not known yet
        self._upstream = upstream
        self.kind = upstream.engine
        self.capabilities = frozenset(upstream.capabilities)
        self._shown: Callable[[Any], str] | None = None
        self._detected: Detected | None = None
        self._apply(Detected(upstream.engine))
        self.upstream_model = model
        self._count_tokens = count_tokens
        self._base = upstream.url.rstrip("/").removesuffix("/v1")
        self._session: aiohttp.ClientSession | None = None
        self._checker: asyncio.Task[None] | None = None
        headers = {"content-type": "application/json"}
        if upstream.api_key:
            headers["authorization"] = f"Bearer {upstream.api_key}"
        self._headers = headers
        self._pool = HttpPool(self._base, headers)
        self._running: dict[str, ResponseParser] = {}
        self._retries: set[asyncio.Task[None]] = set()
        self._healthy = True
        self._adapters: dict[str, AdapterState] = {}
        self._stats: EngineStats | None = None  # from its /metrics
        self._polled_at: float | None = None  # monotonic time of an unanswered state request
        clock = SystemClock()
        if limits is None:
            limits = UpstreamLimits(upstream, MemoryCounters(clock), clock)
        self._limits = limits
        self._is_limited = bool(self._limits)
        self._report = reporting(self)

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

    @property
    def parameters(self) -> frozenset[str]:
        """Sampling parameters beyond OpenAI's that it supports."""
        return KINDS[self.kind] | frozenset(self._upstream.parameters)

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
        path, body, notes = self._call_of(job)
        permit = await self._limits.acquire() if self._is_limited else None
        mailbox = Mailbox(request_id, self._cancel, self._report)
        on_close = partial(self._release, permit)
        mailbox.notes = notes
        answer = self._parser_of(job, mailbox, on_close)
        if job.request.clamp_max_tokens and "max_tokens" in body:
            answer.retry = partial(self._retry, path, body, answer)
        answer.shown = self._shown
        self._running[request_id] = answer
        await self._post(path, body, answer)
        return mailbox

    def _call_of(self, job: Job) -> tuple[str, Any, tuple[str, ...]]:
        """Path and body of the request, and what of it is only approximated."""
        upstream = self._upstream
        body = upstream_body(
            job,
            self.upstream_model,
            self.kind,
            shared_cache=bool(upstream.shared_cache),
            reasoning_back=upstream.reasoning_back,
        )
        return path_of(job.request), body, ()

    def _parser_of(
        self, job: Job, mailbox: Mailbox, on_close: Callable[[str], None]
    ) -> ResponseParser:
        return ResponseParser(self.engine_id, job, mailbox, on_close, self._count_tokens)

    async def _headers_of(self, path: str, body: bytes) -> bytes:
        """Lines of headers for this call alone, beside those of the connection."""
        return b""

    async def _post(self, path: str, body: dict[str, Any], answer: ResponseParser) -> None:
        try:
            sent = orjson.dumps(body)
            headers = await self._headers_of(path, sent)
            terminate = await self._pool.post(path, sent, answer, headers)
        except TollhouseError as error:
            answer.refuse(error)
        except (OSError, TimeoutError) as error:
            answer.on_error(error)
        except asyncio.CancelledError:  # while it connected: nothing was sent, or is to be paid
            answer.on_error(ConnectionAbortedError("the request ended before it was sent"))
            raise
        else:
            answer.sent(terminate)

    def _retry(
        self, path: str, body: dict[str, Any], answer: ResponseParser, refusal: TollhouseError
    ) -> bool:
        """Whether the request is sent once more, with what the server's refusal says that its context
        has left: a `max_tokens` that may be reduced fitted by our estimate, and not by its count."""
        if not isinstance(refusal, ContextLengthExceeded):
            return False
        prompt, limit = refusal.prompt_tokens, refusal.limit
        left = limit - prompt if prompt is not None and limit is not None else 0
        if not 0 < left < body["max_tokens"]:
            return False
        task = asyncio.create_task(self._post(path, {**body, "max_tokens": left}, answer))
        self._retries.add(task)
        task.add_done_callback(self._retries.discard)
        return True

    @asynccontextmanager
    async def forward(
        self, path: str, body: Any, content_type: str
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Post a body as it is. Raises aiohttp.ClientError or OSError, also while the answer is read,
        and RateLimited at the entry's limits."""
        assert self._session is not None
        permit = await self._limits.acquire() if self._is_limited else None
        headers = {"content-type": content_type, "accept-encoding": "identity"}
        try:
            async with self._session.post(
                self._base + path, data=body, headers=headers, allow_redirects=False
            ) as answer:
                yield answer
        finally:
            if permit is not None:
                permit.release()

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
                log.warning("%s cannot load the adapter %s: %s", self.engine_id, name, text[:500])
                raise Unavailable(
                    "The upstream of this model cannot load the adapter.",
                    next_step=f"The operator finds the reason in the log under {name}.",
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
        listed, models = 0.0, b""
        while True:
            now = time.monotonic()
            poll_due = bool(self._running) and now - self._pool.last_byte_at > _LOAD_EVERY_S
            try:
                if now - listed >= _CHECK_S or not self._healthy:
                    listed = now
                    models = await self._get("/v1/models")
                    self._update_adapters(models)
                    if not self._context:
                        self._learn_context(models, await self._get("/props"))
                if self._stats is not None or listed == now or poll_due:
                    page = await self._get("/metrics")
                    self._stats = stats_of(page.decode("utf-8", "replace"))
                    if self._detected is None and models:
                        self._take(await detect(self._page, models, page, self._upstream.engine))
            except (aiohttp.ClientError, TimeoutError, OSError):
                self._healthy, self._stats, self._detected = False, None, None
                self._adapters.clear()  # it may restart without any adapter
            await asyncio.sleep(_LOAD_EVERY_S)

    async def _get(self, path: str) -> bytes:
        """The page's body; empty if the server has no such page, or one that is too large."""
        assert self._session is not None
        timeout = aiohttp.ClientTimeout(total=_CHECK_S)
        self._polled_at = self._polled_at or time.monotonic()
        async with self._session.get(self._base + path, timeout=timeout) as answer:
            page = await read_page(answer) if answer.status == 200 else None
        self._polled_at = None
        return page or b""

    async def _page(self, path: str) -> bytes:
        """A page that only some kinds of servers have; empty without an answer."""
        assert self._session is not None
        timeout = aiohttp.ClientTimeout(total=_CHECK_S)
        try:
            async with self._session.get(self._base + path, timeout=timeout) as answer:
                page = await read_page(answer) if answer.status == 200 else None
                return page or b""
        except (aiohttp.ClientError, TimeoutError, OSError):
            return b""

    def _take(self, detected: Detected) -> None:
        """Serve by what the server's pages say; what its entry declares stays."""
        self._detected = detected
        before = self.kind, self.capabilities
        self._apply(detected)
        if self._upstream.shares_cache_as(self.kind) and self._upstream.shared_cache is None:
            log.warning(
                "%s: tenants share its prefix cache, and its timing tells whether a prompt was seen "
                'before; declare "shared_cache": true in its entry, or name its engine',
                self.engine_id,
            )
        if before == (self.kind, self.capabilities):
            return
        name = f"{detected.kind} {detected.version}".strip()
        log.info("%s is %s: %s", self.engine_id, name, ", ".join(sorted(self.capabilities)))
        if self.on_detected is not None:
            self.on_detected()

    def _apply(self, detected: Detected) -> None:
        upstream = self._upstream
        self.kind = upstream.engine or detected.kind
        self.capabilities = frozenset(upstream.capabilities) or detected.capabilities
        shows = upstream.error_text
        if shows is None:
            shows = self.kind in SHOWN
        self._shown = partial(client_text, secrets=(upstream.api_key,)) if shows else None

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

    def _learn_context(self, models: bytes, props: bytes) -> None:
        self._context = context_of(models, props, self.upstream_model)
        if self._context and self.on_context is not None:
            self.on_context(self._context)

    def _release(self, permit: Permit | None, request_id: str) -> None:
        self._running.pop(request_id, None)
        if permit is not None:
            permit.release()

    def _cancel(self, request_id: str) -> None:
        answer = self._running.get(request_id)
        if answer is not None:
            answer.abort()
