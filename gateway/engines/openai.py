"""Any OpenAI-compatible server as an engine: text in, text out, usage asked for on every stream."""

import asyncio
import logging
from typing import Any

import aiohttp
import orjson

from core.errors import BadRequest, RateLimited, TollhouseError, Unavailable
from engine.protocol import AdapterState, EngineInfo, EngineStats, FinishReason, Receipt
from gateway.ask import Ask
from gateway.engines.base import Generation, Job, Mailbox, TextChunk, engine_gone
from gateway.upstreams import Upstream

log = logging.getLogger("tollhouse.upstream")
_CHECK_S = 5.0
_PASSED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "seed",
)


class OpenAIEngine:
    """One server. Its last usage is the receipt; without one, what came is counted by chunks."""

    speaks_text = True

    def __init__(self, upstream: Upstream, model: str) -> None:
        self.engine_id = (upstream.name or upstream.url)[:80]
        self._upstream = upstream
        self._model = model
        self._base = upstream.url.rstrip("/").removesuffix("/v1")
        self._session: aiohttp.ClientSession | None = None
        self._checker: asyncio.Task[None] | None = None
        self._running: dict[str, asyncio.Task[None]] = {}
        self._well = True

    async def start(self) -> None:
        headers = {"content-type": "application/json"}
        if self._upstream.api_key:
            headers["authorization"] = f"Bearer {self._upstream.api_key}"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=600),
            headers=headers,
            auto_decompress=True,
        )
        self._checker = asyncio.create_task(self._check())

    async def close(self) -> None:
        tasks = [*self._running.values(), *([self._checker] if self._checker else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    def info(self) -> EngineInfo | None:
        return None

    def stats(self) -> EngineStats | None:
        return EngineStats(len(self._running), 0, 0, 0, 0)

    def healthy(self) -> bool:
        return self._session is not None and self._well

    async def generate(self, job: Job) -> Generation:
        request_id = job.request.request_id
        mailbox = Mailbox(request_id, self._cancel)
        self._running[request_id] = asyncio.create_task(self._run(job, mailbox))
        return mailbox

    async def load_adapter(self, path: str, name: str = "") -> AdapterState:
        assert self._session is not None
        body = orjson.dumps({"lora_name": name, "lora_path": path})
        async with self._session.post(f"{self._base}/v1/load_lora_adapter", data=body) as answer:
            text = await answer.text()
            if answer.status >= 400 and "already" not in text:
                raise Unavailable(
                    f"The upstream cannot load the adapter {name}: {text[:200]}",
                    code="adapter_not_loaded",
                )
        return AdapterState(digest="", state="resident", rank=0, generation=0)

    async def unload_adapter(self, digest: str, name: str = "") -> None:
        assert self._session is not None
        body = orjson.dumps({"lora_name": name})
        async with self._session.post(f"{self._base}/v1/unload_lora_adapter", data=body):
            return

    async def receipt(self, request_id: str) -> Receipt | None:
        return None  # a server that is not ours keeps none

    async def acknowledge(self, request_ids: list[str]) -> None:
        return

    async def _check(self) -> None:
        """A server that refuses connections is left alone until it takes them again."""
        assert self._session is not None
        timeout = aiohttp.ClientTimeout(total=_CHECK_S)
        while True:
            await asyncio.sleep(_CHECK_S)
            try:
                async with self._session.get(f"{self._base}/v1/models", timeout=timeout):
                    self._well = True
            except (aiohttp.ClientError, TimeoutError):
                self._well = False

    def _cancel(self, request_id: str) -> None:
        task = self._running.get(request_id)
        if task is not None:
            task.cancel()

    async def _run(self, job: Job, mailbox: Mailbox) -> None:
        count = _Count(job)
        try:
            await self._exchange(job, mailbox, count)
            mailbox.finish(count.receipt(FinishReason.STOP))
        except asyncio.CancelledError:
            mailbox.finish(count.receipt(FinishReason.ABORT))
        except TollhouseError as error:
            mailbox.fail(error)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            mailbox.fail(engine_gone(self.engine_id, str(error) or type(error).__name__))
        except (ValueError, KeyError, TypeError) as error:
            mailbox.fail(engine_gone(self.engine_id, f"its answer makes no sense ({error!r})"))
        finally:
            self._running.pop(job.request.request_id, None)

    async def _exchange(self, job: Job, mailbox: Mailbox, count: "_Count") -> None:
        assert self._session is not None
        url = self._base + _path(job.ask)
        body = orjson.dumps(upstream_body(job, self._model))
        async with self._session.post(url, data=body) as answer:
            if answer.status >= 400:
                raise _refused(answer.status, await answer.read())
            # The answer says what it is: some servers stream, or do not, whatever was asked.
            if answer.content_type != "text/event-stream":
                _whole(orjson.loads(await answer.read()), mailbox, count)
                return
            async for line in answer.content:
                if line.startswith(b"data:"):
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        return
                    _piece(orjson.loads(data), mailbox, count)


class _Count:
    def __init__(self, job: Job) -> None:
        self._job = job
        self.seen = 0
        self.usage: dict[str, Any] | None = None

    def receipt(self, reason: FinishReason) -> Receipt:
        request = self._job.request
        prompt, cached, generated = len(request.prompt), 0, self.seen
        if self.usage is not None:
            prompt = int(self.usage.get("prompt_tokens") or prompt)
            details = self.usage.get("prompt_tokens_details") or {}
            cached = min(prompt, int(details.get("cached_tokens") or 0))
            generated = int(self.usage.get("completion_tokens") or 0)
        return Receipt(
            request_id=request.request_id,
            namespace=request.namespace,
            adapter=request.adapter,
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


def upstream_body(job: Job, model: str) -> dict[str, Any]:
    ask = job.ask
    body: dict[str, Any] = {"model": job.adapter_name or model, "stream": ask.stream}
    if ask.messages is not None:
        body["messages"] = ask.messages
        body["max_tokens"] = job.request.sampling.max_tokens
        if ask.tools:
            body["tools"] = ask.tools
        if ask.logprobs is not None:
            body["logprobs"] = True
            body["top_logprobs"] = ask.logprobs
    else:
        body["prompt"] = ask.prompt
        body["max_tokens"] = job.request.sampling.max_tokens
    for name in _PASSED:
        value = getattr(ask, name)
        if value is not None:
            body[name] = value
    if ask.n > 1:
        body["n"] = ask.n
    if ask.stop:
        body["stop"] = list(ask.stop)
    if ask.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in ask.logit_bias.items()}
    if ask.stream:
        body["stream_options"] = {"include_usage": True}
    return body


def _path(ask: Ask) -> str:
    return "/v1/chat/completions" if ask.messages is not None else "/v1/completions"


def _piece(event: dict[str, Any], mailbox: Mailbox, count: _Count) -> None:
    if event.get("error"):
        raise Unavailable(f"The upstream failed: {str(event['error'])[:200]}", code="engine_failed")
    if event.get("usage"):
        count.usage = event["usage"]
    for choice in event.get("choices") or []:
        delta = choice.get("delta")
        text = (delta.get("content") if delta is not None else choice.get("text")) or ""
        reason = choice.get("finish_reason")
        if not text and reason is None:
            continue
        tokens = 1 if text else 0
        count.seen += tokens
        mailbox.put(
            TextChunk(
                mailbox.request_id,
                int(choice.get("index") or 0),
                text,
                tokens,
                reason,
                choice.get("logprobs"),
            )
        )


def _whole(answer: dict[str, Any], mailbox: Mailbox, count: _Count) -> None:
    count.usage = answer.get("usage")
    total = int((count.usage or {}).get("completion_tokens") or 0)
    choices = answer["choices"]
    for position, choice in enumerate(choices):
        message = choice.get("message")
        text = (message.get("content") if message is not None else choice.get("text")) or ""
        # The server tells one sum: it is spread, so that it comes out whole.
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
            )
        )


def _refused(status: int, body: bytes) -> TollhouseError:
    try:
        said = orjson.loads(body).get("error") or {}
        message = str(said.get("message") if isinstance(said, dict) else said)
    except (ValueError, AttributeError):
        message = body[:200].decode("utf-8", "replace")
    if status == 429:
        return RateLimited(f"The upstream is at its limit: {message}", retry_after_s=1.0)
    if status in (400, 404, 413, 422):
        return BadRequest(f"The upstream refused the request: {message}", code="upstream_refused")
    return Unavailable(
        f"The upstream answered {status}: {message}", code="engine_failed", retry_after_s=1.0
    )
