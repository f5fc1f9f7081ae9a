"""One generation, from the engine to the client: streamed or whole, paid to the token, ended once."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import orjson

from core.errors import TollhouseError, Unavailable
from core.events import UsageEvent
from engine.protocol import FinishReason, Receipt
from gateway.admission import Booking, Spent
from gateway.ask import Ask, Usage
from gateway.engines.base import Chunk, EngineClient, Generation, Job, TextChunk
from gateway.exchange import ClientGone, Exchange, Headers
from gateway.metering import Ending, Meter
from gateway.streaming import ChoiceOutput, OutputGuard
from gateway.surface import Head, StreamWriter, Surface

log = logging.getLogger("tollhouse.delivery")
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
        guards: Sequence[OutputGuard],
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
        self._guards = guards
        self._choices: list[ChoiceOutput] = []
        self._tokens = 0  # passed to the choices
        self._writer: StreamWriter | None = None
        self._begun = False
        self._ended_by = ""  # where the answer ended early: insufficient_quota

    async def run(self, client: EngineClient, job: Job) -> tuple[Spent, int]:
        """What it came to, and the HTTP status of the answer."""
        codec, stops = self._head.codec, self._ask.stop
        if client.speaks_text:
            codec, stops = None, ()
        guards: Sequence[OutputGuard | None] = self._guards or [None] * self._ask.n
        self._choices = [ChoiceOutput(i, codec, stops, each) for i, each in enumerate(guards)]
        try:
            generation = await client.generate(job)
        except TollhouseError as error:
            await self._meter.close(self._ending("error", int(error.status)), None)
            raise
        self._exchange.on_disconnect(generation.cancel)
        try:
            async with asyncio.timeout(job.request.deadline_s):
                await self._pump(generation)
            return await self._complete(generation)
        except ClientGone:
            return _spent(await self._settle(generation, "client_closed", 499)), 499
        except TimeoutError:
            return await self._broke(generation, _late())
        except TollhouseError as error:
            return await self._broke(generation, error)
        except asyncio.CancelledError:
            generation.cancel()
            self._meter.close_soon(self._ending("shutdown", 499), generation.receipt)
            raise
        except Exception:
            # A fault of ours must not leave the request open: it is paid as far as it was served.
            generation.cancel()
            self._meter.close_soon(self._ending("gateway_fault", 500), generation.receipt)
            raise

    async def _pump(self, generation: Generation) -> None:
        """Until every choice is over. Raises what the engine failed with."""
        if self._ask.stream:
            self._writer = self._surface.stream(self._head, self._ask)
        while not all(choice.over for choice in self._choices):
            chunks = await self._next(generation)
            if self._exchange.gone:
                raise ClientGone
            if not chunks:
                raise _broken_off(generation.receipt)
            for chunk in await self._affordable(chunks):
                if chunk.finish_reason in _BROKEN_OFF:
                    raise _broken_off(generation.receipt, chunk.finish_reason)
                self._choices[chunk.choice].feed(chunk)
            if self._ended_by:
                for choice in self._choices:
                    choice.end(FinishReason.LENGTH)
            if self._writer is not None:
                await self._show(self._writer)
        generation.cancel()  # no-op where the engine ended by itself

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
        """All of them while the money lasts; else those that are paid for, and the answer ends."""
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

    async def _write(self, data: bytes) -> None:
        if not self._exchange.started:
            assert self._writer is not None
            headers = [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),
                *self._headers(),
            ]
            await self._exchange.start(200, headers)
        await self._exchange.write(data)

    def _opening(self, writer: StreamWriter) -> bytes:
        """What a stream begins with, once."""
        if self._begun:
            return b""
        self._begun = True
        return writer.begin()

    async def _complete(self, generation: Generation) -> tuple[Spent, int]:
        reason = self._ended_by or self._choices[0].finish_reason or "stop"
        receipt = await generation.ended(RECEIPT_WAIT_S)
        if self._exchange.gone:
            raise ClientGone
        if self._writer is None:
            for choice in self._choices:
                choice.sent()
        event = await self._meter.close(self._ending(reason, 200), receipt)
        usage = Usage(event.input_tokens, event.cached_tokens, event.output_tokens)
        try:
            if self._writer is not None:
                opening = self._opening(self._writer)
                await self._write(opening + self._writer.end(usage, self._choices))
                await self._exchange.write(b"", more=False)
            else:
                await self._answer(usage)
        except ClientGone:
            log.debug("the client left at the very end")
        return _spent(event), 200

    async def _answer(self, usage: Usage) -> None:
        self._meter.first_token()
        answer = self._surface.answer(self._head, self._ask, self._choices, usage)
        await self._exchange.answer(200, self._headers(), orjson.dumps(answer))

    async def _broke(self, generation: Generation, error: TollhouseError) -> tuple[Spent, int]:
        """The engine failed or the time ran out: an event after the first byte, else an answer."""
        if not self._exchange.started:
            await self._settle(generation, error.code, int(error.status))
            raise error
        event = await self._settle(generation, error.code, int(error.status))
        try:
            assert self._writer is not None
            await self._exchange.write(self._writer.failed(error), more=False)
        except ClientGone:
            log.debug("the client left before it could be told of the failure")
        return _spent(event), int(error.status)

    async def _settle(self, generation: Generation, reason: str, status: int) -> UsageEvent:
        generation.cancel()
        receipt = await generation.ended(RECEIPT_WAIT_S)
        return await self._meter.close(self._ending(reason, status), receipt)

    def _ending(self, reason: str, status: int) -> Ending:
        for guard in self._guards:
            if guard.action is not None and self._meter.moderation in (None, "annotate"):
                self._meter.moderation = guard.action
        delivered = sum(choice.delivered for choice in self._choices)
        seen = sum(choice.seen for choice in self._choices)
        return Ending(delivered, seen, reason, status, prompt_done=delivered > 0)


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
        "The request's deadline passed.",
        next_step="Ask for fewer tokens or give it longer with x-request-timeout-ms.",
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
        next_step="Try again; what was delivered is all that is charged.",
        code="engine_failed",
        retry_after_s=1.0,
    )
