"""Background responses: generated without a connection, shown and cancelled by any process.

The request runs through the pipeline as any streamed one. Its events go to the database a few times
a second, so that another process can show them, and so that a killed gateway leaves what was charged.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import orjson
from msgspec.structs import replace
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from billing.usage.raw_rows import Reading, Wanted
from billing.usage.reading import read_rows
from billing.usage.tables import UsageEventRow
from core.clock import Clock
from core.errors import TollhouseError, Unavailable
from core.ids import REQUEST, moment_of, new_id
from core.responses import background
from core.responses.background import LEASE
from core.responses.conversations import with_id
from core.responses.models import ResponseRecord
from core.responses.records import Exchanged
from core.tenants.keys import Principal
from core.tenants.scope import TenantScope
from gateway.answers.choices import ChoiceOutput
from gateway.answers.surface import ResponseInfo
from gateway.edge.decoding import parse_body
from gateway.formats.responses.response import (
    ResponsesSurface,
    ResponseStream,
    response_object,
    usage_object,
)
from gateway.request.exchange import Exchange
from gateway.request.inference import InferenceRequest, Usage
from gateway.serving.background.exchange import BackgroundExchange
from gateway.serving.headers import response_headers
from gateway.serving.pipeline import Pipeline
from gateway.serving.stored_responses.conversation_items import append_to_conversation
from gateway.serving.stored_responses.expansion import Expanded, ResponseStore, unreachable

_E = UsageEventRow
_COUNTS = (_E.input_tokens, _E.cached_tokens, _E.output_tokens)
_AROUND = timedelta(days=1)  # a request occurs when its id is made, by clocks that may differ


def with_charged_usage(
    session: Session, scope: TenantScope, response: dict[str, Any]
) -> dict[str, Any]:
    """Without usage as long as its event is not stored, or lies on a ClickHouse that does not answer."""
    if response["status"] not in ("failed", "cancelled") or response.get("usage"):
        return response
    request_id = f"{REQUEST}_{response['id'].rpartition('_')[2]}"
    at = datetime.fromtimestamp(moment_of(request_id) / 1000, UTC)
    wanted = Wanted(at - _AROUND, at + _AROUND, scope.tenant_id)
    only = (_E.request_id == request_id,)
    reading = Reading(_COUNTS, (_E.occurred_at,), conditions=only, limit=1)
    for counts in read_rows(session, wanted, reading, lacks=[]):
        return response | {"usage": usage_object(Usage(*counts))}
    return response


class StoredSurface(ResponsesSurface):
    def __init__(self, fields: dict[str, Any]) -> None:
        """`fields` of the response that the body no longer says, such as previous_response_id."""
        self._fields = fields
        self.finished: dict[str, Any] | None = None  # the response, once it is complete or failed

    def parse(self, raw: bytes) -> InferenceRequest:
        request = super().parse(raw)
        return replace(request, extra=request.extra | {"fields": self._fields})

    def answer(
        self,
        info: ResponseInfo,
        request: InferenceRequest,
        choices: Sequence[ChoiceOutput],
        usage: Usage,
    ) -> dict[str, Any]:
        self.finished = super().answer(info, request, choices, usage)
        return self.finished

    def stream(self, info: ResponseInfo, request: InferenceRequest) -> ResponseStream:
        return ResponseStream(info, request, self._finish)

    def _finish(self, response: dict[str, Any]) -> None:
        self.finished = response


log = logging.getLogger("tollhouse.responses")
MOST_RUNS = 1_000  # of one process
KEEP_ALIVE = b": keep-alive\n\n"
_FLUSH_S = 0.3
_SWEEP_S = 5.0
_ADMISSION_WAIT_S = 1.0  # a refusal within it is the answer of the request
_KEEP_ALIVE_S = 10.0
_STOP_WAIT_S = 10.0
_STOPPED = "The gateway was stopped. Only what it delivered is charged; send the request again."


@dataclass(eq=False)
class Run:
    """A background response of this process."""

    principal: Principal
    expanded: Expanded
    surface: StoredSurface
    exchange: BackgroundExchange
    response: dict[str, Any]  # as it was when it was queued
    task: asyncio.Task[None] | None = None
    flushed: int = 0  # events in the database
    lost: bool = False  # cancelled, deleted or taken for dead

    @property
    def id(self) -> str:
        return str(self.response["id"])

    @property
    def over(self) -> bool:
        return self.task is not None and self.task.done()

    def failure(self) -> tuple[str, str]:
        """Code and message, where the run is over without a response."""
        if self.exchange.refusal is not None:
            error = orjson.loads(self.exchange.refusal[2])["error"]
            code = error["code"]
            return (code if code == "rate_limit_exceeded" else "server_error"), error["message"]
        if self.exchange.disconnected:
            return "server_error", _STOPPED
        return "server_error", "The gateway failed to process this request."


@dataclass(eq=False)
class BackgroundResponses:
    store: ResponseStore
    pipeline: Pipeline
    _runs: dict[str, Run] = field(default_factory=dict)
    _flushing: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def _clock(self) -> Clock:
        return self.store.clock

    async def run(self) -> None:
        """Write events and fail lost responses, until cancelled."""
        next_sweep = 0.0
        while True:
            try:
                await self.flush()
                if self._clock.monotonic() >= next_sweep:
                    next_sweep = self._clock.monotonic() + _SWEEP_S
                    await asyncio.to_thread(self._sweep)
            except Exception as error:
                problem = str(error).partition("\n")[0]
                log.warning("background responses are not stored, again soon: %s", problem)
            await asyncio.sleep(_FLUSH_S)

    async def stop(self) -> None:
        """End all runs: what they have delivered is charged and kept."""
        for run in self._runs.values():
            run.exchange.disconnect()
        tasks = [run.task for run in self._runs.values() if run.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=_STOP_WAIT_S)
            with suppress(SQLAlchemyError):  # then the lease runs out
                await self.flush()

    async def serve(self, outer: Exchange, principal: Principal, expanded: Expanded) -> None:
        """Answers with the queued response, or with its events. Raises what is wrong with it."""
        if len(self._runs) >= MOST_RUNS:
            raise Unavailable(
                f"{MOST_RUNS} background responses run in this gateway process.",
                next_step="Try again shortly.",
                code="too_many_background_responses",
                retry_after_s=5.0,
            )
        run = await self._begin(outer, principal, expanded)
        with suppress(TimeoutError):
            await asyncio.wait_for(run.exchange.admitted.wait(), _ADMISSION_WAIT_S)
        if run.exchange.refusal is not None:
            await outer.answer(*run.exchange.refusal)
            return
        try:
            await asyncio.to_thread(self._store_queued, run)
        except SQLAlchemyError:
            run.exchange.disconnect()
            raise unreachable() from None
        self._runs[run.id] = run
        assert run.exchange.request_id is not None
        headers = response_headers(run.exchange.request_id, 0, [])
        if not expanded.streamed:
            await outer.answer(200, headers, orjson.dumps(run.response))
            return
        await outer.start(200, [(b"content-type", b"text/event-stream; charset=utf-8"), *headers])
        try:
            async for event in self.tail(principal.scope, run.id, 0):
                await outer.write(event)
        except (TollhouseError, SQLAlchemyError) as error:  # deleted, or the database is down
            log.info("the events of %s ended early: %s", run.id, error)
        await outer.write(b"", more=False)

    async def tail(self, scope: TenantScope, response_id: str, first: int) -> AsyncIterator[bytes]:
        """The events from number `first` on, until the response is over. The caller has checked
        that the scope may read it."""
        run = self._runs.get(response_id)
        while run is not None and not run.lost and not run.over:
            for event in run.exchange.events[first:]:
                first += 1
                yield event
            try:
                await asyncio.wait_for(run.exchange.change(), _KEEP_ALIVE_S)
            except TimeoutError:
                yield KEEP_ALIVE
        if run is not None:
            await self.flush()
        waited = 0.0
        while True:
            events, complete = await asyncio.to_thread(self._stored, scope, response_id, first)
            for event in events:
                first += 1
                yield event
            if complete:
                return
            waited = 0.0 if events else waited + _FLUSH_S
            if waited > _KEEP_ALIVE_S:
                waited = 0.0
                yield KEEP_ALIVE
            await asyncio.sleep(_FLUSH_S)

    async def cancel(self, scope: TenantScope, response_id: str) -> dict[str, Any]:
        await self.flush()
        response = await asyncio.to_thread(self._cancel, scope, response_id)
        if response_id in self._runs:
            self._lose(self._runs[response_id])
        return response

    async def flush(self) -> None:
        """Write what this process's runs have added."""
        async with self._flushing:
            if not self._runs:
                return
            over = {run.id for run in self._runs.values() if run.over}
            counts = {run.id: len(run.exchange.events) for run in self._runs.values()}
            kept = await asyncio.to_thread(self._write, counts, over)
            for response_id, count in counts.items():
                run = self._runs[response_id]
                run.flushed = count
                if response_id not in kept and response_id not in over:
                    self._lose(run)
            for response_id in over:
                del self._runs[response_id]

    def _lose(self, run: Run) -> None:
        run.lost = True
        run.exchange.disconnect()
        run.exchange.notify()

    async def _begin(self, outer: Exchange, principal: Principal, expanded: Expanded) -> Run:
        request_id, now = new_id(REQUEST), self._clock.now()
        response_id = f"resp_{request_id.rpartition('_')[2]}"
        created = int(now.timestamp())
        fields = expanded.fields | {
            "id": response_id,
            "created_at": created,
            "background": True,
        }
        surface = StoredSurface(fields)
        request = await parse_body(surface.parse, expanded.body)
        info = ResponseInfo(request_id, created, request.model, None, 0)
        queued = response_object(info, request, "queued", [])
        exchange = BackgroundExchange(outer, principal, expanded.body, request_id)
        run = Run(principal, expanded, surface, exchange, queued)
        run.task = asyncio.create_task(self.pipeline.serve(surface, exchange))
        run.task.add_done_callback(lambda _task: exchange.notify())
        return run

    def _store_queued(self, run: Run) -> None:
        given = Exchanged(run.response, [with_id(each) for each in run.expanded.own])
        store = self.store
        with store.database.transaction() as session:
            background.begin(session, store.sealer, run.principal, given, self._clock.now())

    def _write(self, counts: dict[str, int], over: set[str]) -> set[str]:
        """In a thread. The runs whose responses are still active."""
        now = self._clock.now()
        with self.store.database.transaction() as session:
            rows = background.active(session, list(counts))
            for response_id, row in rows.items():
                run = self._runs[response_id]
                new = run.exchange.events[run.flushed : counts[response_id]]
                background.append(session, self.store.sealer, row, new)
                if response_id in over:
                    self._end(session, run, row)
                else:
                    row.lease_until = now + LEASE
        return set(rows)

    def _end(self, session: Any, run: Run, row: ResponseRecord) -> None:
        store, finished = self.store, run.surface.finished
        if finished is None:
            code, message = run.failure()
            background.fail(session, store.sealer, row, code, message)
            return
        background.finish(session, store.sealer, row, finished)
        if run.expanded.conversation_id and finished["status"] != "failed":
            own = [with_id(each) for each in run.expanded.own]
            append_to_conversation(session, store, run.principal.scope, own, finished)

    def _sweep(self) -> None:
        with self.store.database.transaction() as session:
            lost = background.fail_lost(session, self.store.sealer, self._clock.now())
        if lost:
            log.warning("%d background responses failed: their gateway was stopped", lost)

    def _stored(self, scope: TenantScope, response_id: str, first: int) -> tuple[list[bytes], bool]:
        store = self.store
        with store.database.read() as session:
            return background.events_from(
                session, store.sealer, scope, response_id, first, self._clock.now()
            )

    def _cancel(self, scope: TenantScope, response_id: str) -> dict[str, Any]:
        store = self.store
        with store.database.transaction() as session:
            return background.cancel(session, store.sealer, scope, response_id, self._clock.now())
