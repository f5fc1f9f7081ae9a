"""Which flags an OpenAI-compatible upstream was started without, and what does not work for that."""

from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from gateway.catalog.upstreams import Upstream
from gateway.engines.server_kinds import (
    LLAMA_CPP,
    MAX_PAGE_BYTES,
    SGLANG,
    VLLM,
    Detected,
    detect,
    json_object,
    read_page,
)

_ANSWER_S = 10.0
_TOOL = {"type": "function", "function": {"name": "noop", "parameters": {"type": "object"}}}
_METRICS = "its load is not known and requests spread evenly, without {}"
# Fields of SGLang's /get_server_info, and what is missing while one is unset.
_SGLANG = (
    ("enable_metrics", _METRICS.format("--enable-metrics")),
    ("enable_cache_report", "cached tokens are reported as 0, without --enable-cache-report"),
    ("tool_call_parser", "tool calls come as text, without --tool-call-parser"),
)


@dataclass(frozen=True, slots=True)
class Probe:
    entry: Upstream
    kind: str  # declared or detected; empty: unknown
    name: str  # with its version
    lacks: tuple[str, ...]


async def probe_servers(entries: list[Upstream]) -> list[Probe]:
    """Reads the pages of each server; vLLM, which tells its flags on none of them, gets two requests
    of one token."""
    return [await _Server(entry).probe() for entry in entries]


class _Server:
    def __init__(self, entry: Upstream) -> None:
        self._entry = entry
        self._base = entry.url.rstrip("/").removesuffix("/v1")
        key = entry.api_key
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._too_large: list[str] = []  # pages

    async def probe(self) -> Probe:
        models, metrics = await self._get("/v1/models"), await self._get("/metrics")
        found = await detect(self._get, models, metrics, self._entry.engine)
        name = f"{found.kind} {found.version}".strip() or "unknown kind"
        lacks = await self._lacks(found, has_metrics=bool(metrics)) if models else []
        lacks += [
            f"{path} has more than {MAX_PAGE_BYTES >> 20} MiB and is not read, without the address "
            "of a model server"
            for path in dict.fromkeys(self._too_large)
        ]
        return Probe(self._entry, found.kind, name, tuple(lacks))

    async def _lacks(self, found: Detected, *, has_metrics: bool) -> list[str]:
        if found.kind == VLLM:
            return await self._vllm()
        if found.kind == SGLANG and found.page:
            return [why for field, why in _SGLANG if field in found.page and not found.page[field]]
        if found.kind == LLAMA_CPP:
            lacks = [] if has_metrics else [_METRICS.format("--metrics")]
            if "tools" not in found.capabilities:
                lacks.append("tool calls, without --jinja and a chat template that has them")
            return lacks
        return []

    async def _vllm(self) -> list[str]:
        lacks = []
        _, plain = await self._ask({})
        usage = plain.get("usage")
        if isinstance(usage, dict) and not usage.get("prompt_tokens_details"):
            lacks.append("cached tokens are reported as 0, without --enable-prompt-tokens-details")
        status, refusal = await self._ask({"tools": [_TOOL], "tool_choice": "auto"})
        if status == 400 and "--enable-auto-tool-choice" in orjson.dumps(refusal).decode():
            lacks.append(
                "requests with tools are refused, without --enable-auto-tool-choice and "
                "--tool-call-parser"
            )
        return lacks

    async def _ask(self, more: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        model = self._entry.upstream_model or self._entry.model
        messages = [{"role": "user", "content": "Hi"}]
        body = {"model": model, "messages": messages, "max_tokens": 1, **more}
        status, raw = await self._send("POST", "/v1/chat/completions", body)
        return status, json_object(raw)

    async def _get(self, path: str) -> bytes:
        status, page = await self._send("GET", path, None)
        return page if status == 200 else b""

    async def _send(self, method: str, path: str, body: Any) -> tuple[int, bytes]:
        timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
        try:
            async with (
                aiohttp.ClientSession(headers=self._headers, timeout=timeout) as session,
                session.request(method, self._base + path, json=body) as answer,
            ):
                page = await read_page(answer)
                if page is None:
                    self._too_large.append(path)
                return answer.status, page or b""
        except (aiohttp.ClientError, TimeoutError, OSError):
            return 0, b""
