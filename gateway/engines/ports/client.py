"""Client of a provider: OpenAI's client with the provider's port in place of OpenAI's shapes.

A provider has no page that says whether it is up: requests tell, and the router's breaker keeps them
away from one that fails.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from core.clock import SystemClock
from core.errors import MissingExtra, Unavailable
from engine.protocol import AdapterState
from gateway.catalog.upstreams import Upstream
from gateway.engines.learned_limits import WATCHED, LearnedLimits
from gateway.engines.openai import OpenAIEngine
from gateway.engines.ports.parser import PortParser
from gateway.engines.ports.registry import port_of
from gateway.engines.refusal_texts import client_text
from gateway.engines.upstream_limits import UpstreamLimits
from gateway.engines.upstream_usage import CountTokens
from gateway.request.engine import Generation, Job, Mailbox


class ProviderEngine(OpenAIEngine):
    def __init__(
        self,
        upstream: Upstream,
        model: str,
        limits: UpstreamLimits | None = None,
        count_tokens: CountTokens | None = None,
    ) -> None:
        # The port sends the key in its own header.
        super().__init__(replace(upstream, api_key=""), model, limits, count_tokens)
        self._port = port = port_of(upstream)
        self.capabilities = frozenset(upstream.capabilities) or port.capabilities
        self._learned = LearnedLimits(upstream, model, self._limits.counters, SystemClock())
        self._pool.watched, self._pool.on_watched = WATCHED, self._learned.learn
        if upstream.error_text is not False:  # providers write it about the request alone
            self._shown = partial(client_text, secrets=(upstream.api_key,))

    @property
    def parameters(self) -> frozenset[str]:
        return self._port.parameters | frozenset(self._upstream.parameters)

    async def generate(self, job: Job) -> Generation:
        await self._learned.take()
        return await super().generate(job)

    async def close(self) -> None:
        await super().close()
        await self._learned.close()

    def _call_of(self, job: Job) -> tuple[str, dict[str, Any], tuple[str, ...]]:
        call = self._port.call(job, self.upstream_model)
        return call.path, call.body | job.request.extra_fields, call.notes

    def _parser_of(self, job: Job, mailbox: Mailbox, on_close: Callable[[str], None]) -> PortParser:
        return PortParser(self._port, self.engine_id, job, mailbox, on_close, self._count_tokens)

    async def _headers_of(self, path: str, body: bytes) -> bytes:
        try:
            headers = await self._port.headers(path, body)
        except MissingExtra:
            raise
        except Exception as error:  # of a library that finds credentials
            failure = Unavailable(
                "The gateway has no valid credentials for this model's provider.",
                next_step="The operator finds the reason in the log.",
                code="engine_failed",
                retry_after_s=5.0,
            )
            failure.add_note(f"{self.engine_id}: {error}")
            raise failure from error
        lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        if lines.count("\n") != len(headers):
            raise ValueError("a header of an upstream holds a line break")
        return lines.encode("latin-1")

    async def load_adapter(self, path: str, digest: str) -> AdapterState:
        raise Unavailable(
            "This model's provider takes no adapters.",
            next_step="Use a model of the built-in engine or of a server that loads them.",
            code="adapter_not_loaded",
        )

    async def unload_adapter(self, digest: str) -> None:
        return

    async def _check(self) -> None:
        await asyncio.Event().wait()  # until it is cancelled
