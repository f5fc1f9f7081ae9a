"""Delivers one generation to the client, streamed or not, with retries and exact accounting."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import orjson

from core import metrics
from core.errors import TollhouseError, Unavailable
from core.events import UsageEvent
from engine.protocol import FinishReason, Receipt
from gateway.ask import Ask, Usage
from gateway.engines.base import Chunk, Generation, Job, TextChunk
from gateway.engines.several import generate
from gateway.exchange import ClientGone, Exchange, Headers
from gateway.limits.admission import Booking, Spent
from gateway.metering.meter import Ending, Meter
from gateway.metering.spool import Statement, answering
from gateway.routing.fallbacks import FallThrough
from gateway.routing.router import MODEL_AWAY, Route
from gateway.streaming.choices import ChoiceOutput, OutputGuard, runs
from gateway.streaming.tool_calls import reader_for
from gateway.surface import Head, StreamWriter, Surface

log = logging.getLogger("tollhouse.delivery")
T = TypeVar("T")
RECEIPT_WAIT_S = 5.0
KEEP_ALIVE = b": keep-alive\n\n"
_BROKEN_OFF = (FinishReason.ABORT, FinishReason.DEADLINE, FinishReason.ERROR)


class Delivery:
    def __init__(
        self,
        surface: Surface,
        exchange: Exchange,
        ask: Ask,
        head: Head,
        *,
        guards: Callable[[], Sequence[OutputGuard]],
        meter: Meter,
        booking: Booking,
        headers: Callable[[], Headers],
        keep_alive_s: float,
    ) -> None:
        self._surface = surface
        self._exchange = exchange
        self._ask = ask
        self._head = head
        self._meter = meter
        self._booking = booking
        self._headers = headers
        self._keep_alive_s = keep_alive_s
        self._make_guards = guards
        self._guards: Sequence[OutputGuard] = ()
        self._asks = False  # whether a guard may want a second opinion
        self._choices: list[ChoiceOutput] = []
        self._generation: Generation | None = None  # the current attempt
        self._waited = False  # whether the first chunk has arrived
        self._tokens = 0  # tokens passed to the choices
        self._writer: StreamWriter | None = None
        self._begun = False
        self._ended_by = ""  # reason for an early end: insufficient_quota

    async def run(self, route: Route, job: Job, *, final: bool = True) -> tuple[Spent, int]:
        """The usage to settle and the HTTP status. Unless `final`, raises FallThrough when no replica
        produced output; the meter stays open then."""
        if self._ask.stream:
            self._writer = self._surface.stream(self._head, self._ask)
        self._exchange.on_disconnect(self._client_left)
        try:
            async with asyncio.timeout(job.request.deadline_s):
                while True:
                    try:
                        await self._pump(await self._sent(route, job), route)
                        break
                    except TollhouseError as error:
                        # Before the first byte is sent, another replica can take over.
                        again = route.failed(error)
                        if self._begun or not again:
                            raise
                        if route.next() is None and not (final and route.coming()):
                            raise
                        self._give_up(error)
            return await self._complete(route)
        except ClientGone:
            return _spent(await self._settle("client_closed", 499)), 499
        except TimeoutError:
            return await self._broke(_late())
        except TollhouseError as error:
            if not final and not self._exchange.started and error.code in MODEL_AWAY:
                if self._generation is not None:
                    self._generation.cancel()
                raise FallThrough(error) from None
            return await self._broke(error)
        except asyncio.CancelledError:
            self._drop("shutdown", 499)
            raise
        except Exception:
            # An internal error must still close the meter, with the usage delivered so far.
            self._drop("gateway_fault", 500)
            raise
        finally:
            route.left(self._generation.receipt if self._generation is not None else None)

    async def _sent(self, route: Route, job: Job) -> Generation:
        """Sends the request to the route's replica."""
        place = route.place
        if place is None:
            place = await self._attend(route.wait())
        self._meter.routed = route.why()
        if place.name != self._meter.opened.engine_id:
            await self._meter.moved(place.name)
        codec, stops = self._head.codec, self._ask.stop
        if place.client.speaks_text:
            codec, stops = None, ()
        self._guards = self._make_guards()
        self._asks = any(guard.asks for guard in self._guards)
        guards: Sequence[OutputGuard | None] = self._guards or [None] * self._ask.choices
        ask = self._ask
        self._choices = [
            ChoiceOutput(i, codec, stops, each, reader_for(ask), one_call=ask.one_call)
            for i, each in enumerate(guards)
        ]
        adapter = route.query.target.adapter
        if adapter is not None and not place.has(adapter.digest):
            await self._attend(route.load_adapter(place))
        if self._exchange.gone:
            raise ClientGone
        self._generation = await generate(place.client, job)
        route.sent(self._generation)
        return self._generation

    async def _attend(self, work: Coroutine[Any, Any, T]) -> T:
        """Awaits `work` (a replica or adapter that loads), with keep-alives on a stream."""
        if self._writer is None:
            return await work
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait((task,), timeout=self._keep_alive_s))[0]:
                await self._write(KEEP_ALIVE)
            return task.result()
        finally:
            task.cancel()

    def _give_up(self, error: TollhouseError) -> None:
        """Abandon the attempt. None of it was delivered, so none of it is billed."""
        metrics.retries.labels(error.code).inc()
        log.warning("retrying on another replica: %s", error.message)
        if self._generation is not None:
            self._generation.cancel()
        self._generation, self._waited, self._tokens = None, False, 0

    def _client_left(self) -> None:
        if self._generation is not None:
            self._generation.cancel()

    def _drop(self, reason: str, status: int) -> None:
        receipt = None
        if self._generation is not None:
            self._generation.cancel()
            receipt = self._generation.receipt
        self._meter.close_soon(self._ending(reason, status), receipt)

    async def _pump(self, generation: Generation, route: Route) -> None:
        """Delivers chunks until every choice is over. Raises the engine's error."""
        while not all(choice.over for choice in self._choices):
            chunks = await self._next(generation)
            if not self._waited:
                self._waited = True
                route.begun()
            if self._exchange.gone:
                raise ClientGone
            if not chunks:
                raise _broken_off(generation.receipt)
            for run in runs(await self._affordable(chunks)):
                if run[0].finish_reason in _BROKEN_OFF:
                    raise _broken_off(generation.receipt, run[0].finish_reason)
                self._choices[run[0].choice].feed_run(run)
            if self._ended_by:
                for choice in self._choices:
                    choice.end(FinishReason.LENGTH)
            if self._asks:
                await asyncio.gather(*[choice.judge() for choice in self._choices])
            if self._writer is not None:
                await self._show(self._writer)
        if not all(choice.ended_by_engine for choice in self._choices):
            generation.cancel()  # otherwise its receipt follows: usage comes last

    async def _next(self, generation: Generation) -> list[Chunk]:
        if self._writer is None:
            return await generation.take()
        while True:
            try:
                async with asyncio.timeout(self._keep_alive_s):
                    return await generation.take()
            except TimeoutError:
                await self._write(KEEP_ALIVE)

    async def _affordable(self, chunks: list[Chunk]) -> list[Chunk]:
        """The chunks that the money covers; the response ends when it does not cover all."""
        arrived = sum(_size(chunk) for chunk in chunks)
        total = self._tokens + arrived
        if total <= self._booking.covered or await self._booking.extend(total):
            self._tokens = total
            return chunks
        left = max(0, self._booking.covered - self._tokens)
        self._ended_by = "insufficient_quota"
        self._tokens += left
        return _first_tokens(chunks, left)

    async def _show(self, writer: StreamWriter) -> None:
        deltas = [delta for choice in self._choices if (delta := choice.take())]
        if not deltas:
            return
        self._meter.first_token()
        opening = self._opening(writer)
        await self._write(opening + b"".join([writer.delta(each) for each in deltas]))
        for choice in self._choices:
            choice.sent()

    async def _write(self, data: bytes, *, more: bool = True) -> None:
        if not self._exchange.started:
            assert self._writer is not None
            headers = [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),
                *self._headers(),
            ]
            await self._exchange.start(200, headers)
        await self._exchange.write(data, more=more)

    def _opening(self, writer: StreamWriter) -> bytes:
        """The opening bytes of the stream, on the first call only."""
        if self._begun:
            return b""
        self._begun = True
        return writer.begin()

    async def _complete(self, route: Route) -> tuple[Spent, int]:
        reason = self._ended_by or self._choices[0].finish_reason or "stop"
        receipt = await self._receipt()
        route.answered()
        if self._exchange.gone:
            raise ClientGone
        if self._writer is None:
            for choice in self._choices:
                choice.sent()
        also = self._line_answer if self._exchange.batch_line is not None else None
        event = await self._meter.close(self._ending(reason, 200), receipt, also)
        usage = _usage(event)
        try:
            if self._writer is not None:
                opening = self._opening(self._writer)
                await self._write(opening + self._writer.end(usage, self._choices), more=False)
            else:
                await self._answer(usage)
        except ClientGone:
            log.debug("the client disconnected before the last byte")
        return _spent(event), 200

    def _line_answer(self, event: UsageEvent) -> list[Statement]:
        """A batch line's result commits with its usage, so a crash does not run the line again."""
        batch_line, batch_id = self._exchange.batch_line, self._exchange.batch_job
        assert batch_line is not None and batch_id is not None
        answer = self._surface.answer(self._head, self._ask, self._choices, _usage(event))
        return [answering(batch_id, batch_line(event.request_id, answer))]

    async def _answer(self, usage: Usage) -> None:
        self._meter.first_token()
        answer = self._surface.answer(self._head, self._ask, self._choices, usage)
        await self._exchange.answer(200, self._headers(), orjson.dumps(answer))

    async def _broke(self, error: TollhouseError) -> tuple[Spent, int]:
        """Report an engine failure or timeout: as a stream event after the first byte, else raise."""
        if not self._exchange.started:
            await self._settle(error.code, int(error.status))
            raise error
        event = await self._settle(error.code, int(error.status))
        try:
            assert self._writer is not None
            self._exchange.broken = True
            await self._exchange.write(self._writer.failed(error), more=False)
        except ClientGone:
            log.debug("the client disconnected before the error could be sent")
        return _spent(event), int(error.status)

    async def _settle(self, reason: str, status: int) -> UsageEvent:
        if self._generation is not None:
            self._generation.cancel()
        return await self._meter.close(self._ending(reason, status), await self._receipt())

    async def _receipt(self) -> Receipt | None:
        if self._generation is None:
            return None
        receipt = await self._generation.ended(RECEIPT_WAIT_S)
        if receipt is None:
            self._generation.cancel()
        return receipt or self._generation.receipt

    def _ending(self, reason: str, status: int) -> Ending:
        for guard in self._guards:
            guard.over()
            if guard.action is not None and self._meter.moderation in (None, "annotate"):
                self._meter.moderation = guard.action
        delivered = sum(choice.delivered for choice in self._choices)
        seen = sum(choice.seen for choice in self._choices)
        cut = [
            (guard, choice)
            for guard, choice in zip(self._guards, self._choices, strict=False)
            if guard.blocked
        ]
        paid_by = cut[0][0].cut_paid_by if cut else None
        billed = delivered
        if paid_by == "house":
            billed -= sum(choice.delivered for _, choice in cut)
        return Ending(billed, seen, reason, status, prompt_done=delivered > 0, paid_by=paid_by)


def _size(chunk: Chunk) -> int:
    return chunk.count if isinstance(chunk, TextChunk) else len(chunk.tokens)


def _first_tokens(chunks: list[Chunk], left: int) -> list[Chunk]:
    kept: list[Chunk] = []
    for chunk in chunks:
        size = _size(chunk)
        if size > left:
            if left and not isinstance(chunk, TextChunk):
                logprobs = chunk.logprobs[:left] if chunk.logprobs else None
                cut = replace(chunk, tokens=chunk.tokens[:left], logprobs=logprobs)
                kept.append(replace(cut, finish_reason=None))
            return kept
        kept.append(chunk)
        left -= size
    return kept


def _usage(event: UsageEvent) -> Usage:
    return Usage(event.input_tokens, event.cached_tokens, event.output_tokens)


def _spent(event: UsageEvent) -> Spent:
    return Spent(
        event.input_tokens,
        event.cached_tokens,
        event.output_tokens,
        event.waived_tokens,
        event.status,
    )


def _late() -> TollhouseError:
    return Unavailable(
        "The request exceeded its deadline.",
        next_step="Request fewer tokens, or allow more time with x-request-timeout-ms.",
        code="deadline_exceeded",
    )


def _broken_off(
    receipt: Receipt | None, reason: FinishReason | str | None = None
) -> TollhouseError:
    reason = reason or (receipt.finish_reason if receipt else FinishReason.ERROR)
    if reason == FinishReason.DEADLINE:
        return _late()
    detail = f": {receipt.message}" if receipt and receipt.message else ""
    return Unavailable(
        f"The engine ended the request early{detail}.",
        next_step="Retry the request; only the delivered tokens are charged.",
        code="engine_failed",
        retry_after_s=1.0,
    )
