"""Stores chat completions whose request has `store: true`, before the last byte is sent."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import orjson
from sqlalchemy.exc import SQLAlchemyError

from core.errors import TollhouseError
from core.responses import completions
from core.tenants.keys import Principal
from gateway.answers.choices import ChoiceOutput
from gateway.answers.surface import ResponseInfo
from gateway.formats.chat.response import ChatStream, ChatSurface
from gateway.request.exchange import Exchange, Headers
from gateway.request.inference import InferenceRequest, Usage
from gateway.serving.relay import RelayExchange
from gateway.serving.stored_responses.expansion import ResponseStore

if TYPE_CHECKING:
    from gateway.serving.context import RequestContext

log = logging.getLogger("tollhouse.responses")
# What a stored completion shows of its request.
_SHOWN = ("temperature", "top_p", "seed", "presence_penalty", "frequency_penalty", "tools")
Finish = Callable[[Sequence[ChoiceOutput], Usage], None]


class StoredCompletions:
    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    async def check_room(self, ctx: "RequestContext") -> None:
        """InsufficientQuota, before it runs, if a completion to be stored does not fit."""
        if ctx.exchange.batch_job is None:
            request = ctx.request
            known = [request.messages, request.tools, request.extra["store"]]
            await self._store.check_room(ctx.principal, len(orjson.dumps(known)))

    def watch(self, ctx: "RequestContext") -> None:
        """Store the context's completion once it is complete, unless it is a line of a batch."""
        if ctx.exchange.batch_job is not None or isinstance(ctx.surface, _StoredSurface):
            return  # the latter of a fallback, whose first model is watched already
        surface = ctx.surface = _StoredSurface()

        async def _save() -> None:
            if surface.finished is not None:
                await self._save(ctx, surface.finished)

        ctx.exchange = _SavingExchange(ctx.exchange, ctx.principal, _save)

    async def _save(self, ctx: "RequestContext", completion: dict[str, Any]) -> None:
        request = ctx.request
        shown = {name: getattr(request, name) for name in _SHOWN}
        stored = (
            completion
            | shown
            | {
                "metadata": request.extra["store"],
                "request_id": ctx.request_id,
                "tool_choice": request.engine_parameters.get("tool_choice"),
                "response_format": request.engine_parameters.get("response_format"),
                "input_user": request.end_user,
            }
        )
        content = {
            "completion": stored,
            "messages": request.messages or [],
            "safety_identifier": request.safety_identifier,
        }
        try:
            await asyncio.shield(asyncio.to_thread(self._write, ctx.principal, content))
        except (SQLAlchemyError, TollhouseError) as error:
            # It is complete and billed, so the client gets it.
            log.warning("a completion was not stored: %s", str(error).partition("\n")[0])

    def _write(self, principal: Principal, content: dict[str, Any]) -> None:
        store = self._store
        adding = len(orjson.dumps(content))
        with store.database.transaction() as session:
            store.quotas.check(session, principal.tenant_id, principal.plan, adding)
            completions.save(session, store.sealer, principal, content, store.clock.now())


class _StoredSurface(ChatSurface):
    finished: dict[str, Any] | None = None  # the completion, once it is complete

    def answer(
        self,
        info: ResponseInfo,
        request: InferenceRequest,
        choices: Sequence[ChoiceOutput],
        usage: Usage,
    ) -> dict[str, Any]:
        self.finished = super().answer(info, request, choices, usage)
        return self.finished

    def stream(self, info: ResponseInfo, request: InferenceRequest) -> ChatStream:
        def _finish(choices: Sequence[ChoiceOutput], usage: Usage) -> None:
            self.answer(info, request, choices, usage)

        return _StoredStream(info, request, _finish)


class _StoredStream(ChatStream):
    def __init__(self, info: ResponseInfo, request: InferenceRequest, finish: Finish) -> None:
        super().__init__(info, request)
        self._finish = finish

    def end(self, usage: Usage, choices: Sequence[ChoiceOutput]) -> bytes:
        self._finish(choices, usage)
        return super().end(usage, choices)


class _SavingExchange(RelayExchange):
    def __init__(self, outer: Exchange, principal: Principal, save: Any) -> None:
        super().__init__(outer, principal, b"")
        self.batch_job, self.batch_line = outer.batch_job, outer.batch_line
        self.request_id = outer.request_id
        self._save = save

    async def write(self, data: bytes, *, more: bool = True) -> None:
        if not more:
            await self._save()
        await super().write(data, more=more)

    async def answer(self, status: int, headers: Headers, body: bytes) -> None:
        await self._save()
        await super().answer(status, headers, body)
