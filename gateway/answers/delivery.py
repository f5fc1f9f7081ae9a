"""Delivers one generation to the client, streamed or not, with retries and exact accounting."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from math import inf
from typing import Any, TypeVar

import orjson

from core import metrics
from core.errors import TollhouseError, Unavailable
from core.events import CountedBy, UsageEvent
from core.tenants.keys import Principal
from engine.protocol import FinishReason, Receipt
from gateway.admission.rejections import money_ended_error
from gateway.admission.reservation import Reservation
from gateway.answers.choices import ChoiceOutput, fewest_needed
from gateway.answers.chunks import group_chunks, is_large, portions, work_of
from gateway.answers.coverage import Coverage
from gateway.answers.deadlines import Deadlines, deadline_exceeded
from gateway.answers.idle_timer import IdleTimer
from gateway.answers.pass_through import PassThrough
from gateway.answers.reasoning import reader_for
from gateway.answers.surface import ResponseInfo, StreamWriter, Surface
from gateway.edge.threads import run_in_thread
from gateway.engines.generate import generate
from gateway.engines.routing.fallbacks import TryFallback
from gateway.engines.routing.router import RETRY_ON_FALLBACK, Route
from gateway.metering.delivered import StreamCount
from gateway.metering.meter import Ending, Meter
from gateway.metering.spool_statements import Statement, insert_answer
from gateway.request.engine import Chunk, Generation, Job, Mailbox
from gateway.request.exchange import ClientDisconnected, Exchange, Headers
from gateway.request.inference import InferenceRequest, Usage
from gateway.request.output_guard import OutputGuard
from gateway.request.receipts import UpstreamReceipt

log = logging.getLogger("tollhouse.delivery")
T = TypeVar("T")
RECEIPT_WAIT_S = 5.0
# How much may be generated beyond what a client has read, in the units of `work_of`: some 25,000 plain
# tokens, or 1,000 once the client has taken nothing for a while.
MOST_UNREAD, MOST_UNREAD_STALLED = 500_000, 20_000
STALLED_S, LOOK_S = 10.0, 0.5
KEEP_ALIVE = b": keep-alive\n\n"
_INLINE_UNITS = 16_384  # tokens or characters of an answer that is serialised on the event loop
_ABNORMAL_REASONS = (FinishReason.ABORT, FinishReason.DEADLINE, FinishReason.ERROR)


class Delivery:
    _guards: Sequence[OutputGuard] = ()
    _needs_second_opinion = False  # whether a guard may want a second opinion
    _generation: Generation | None = None  # the current attempt
    _first_chunk_seen = False  # whether the first chunk has arrived
    _counted_by: CountedBy | None = None
    _writer: StreamWriter | None = None
    _idle: IdleTimer | None = None  # of a stream, for its keep-alives
    _begun = False
    _count: StreamCount | None = None  # of a stream that has begun
    _written = False  # the last deltas
    _settled = False  # it failed, and its usage is written

    def __init__(
        self,
        surface: Surface,
        exchange: Exchange,
        request: InferenceRequest,
        info: ResponseInfo,
        *,
        guards: Callable[[], Sequence[OutputGuard]],
        meter: Meter,
        reservation: Reservation,
        headers: Callable[[], Headers],
        keep_alive_s: float,
        deadlines: Deadlines,
        owner: Principal | None = None,
    ) -> None:
        self._surface = surface
        self._exchange = exchange
        self._request = request
        self._info = info
        self._meter = meter
        self._coverage = Coverage(reservation)
        self._headers = headers
        self._keep_alive_s = keep_alive_s
        self._deadlines = deadlines
        self._owner = owner
        self._make_guards = guards
        self.choices: list[ChoiceOutput] = []

    async def run(self, route: Route, job: Job, *, final: bool = True) -> int:
        """The HTTP status. Unless `final`, raises TryFallback when no replica produced output; the
        meter stays open then."""
        if self._request.stream:
            self._writer = self._surface.stream(self._info, self._request)
            self._idle = IdleTimer(self._keep_alive_s)
        self._exchange.on_disconnect(self._on_disconnect)
        try:
            with self._deadlines.within(self._seconds_of(job), self._owner):
                while True:
                    try:
                        await self._deliver_chunks(await self._start_generation(route, job), route)
                        break
                    except TollhouseError as error:
                        # Before the first byte is sent, another replica can take over.
                        again = route.failed(error)
                        if self._begun or not again:
                            raise
                        if route.next() is None and not (final and route.is_starting()):
                            raise
                        self._abandon_attempt(error)
            return await self._complete()
        except ClientDisconnected:
            await self._settle("client_closed", 499)
            return 499
        except TimeoutError:
            return await self._fail(deadline_exceeded())
        except TollhouseError as error:
            if not final and not self._exchange.started and error.code in RETRY_ON_FALLBACK:
                if self._generation is not None:
                    self._generation.cancel()
                raise TryFallback(error) from None
            return await self._fail(error)
        except asyncio.CancelledError:
            self._abort("shutdown", 503)
            raise
        except Exception:
            # An internal error must still close the meter, with the usage delivered so far.
            await self._settle_fault()
            raise
        finally:
            if self._idle is not None:
                self._idle.close()
            if self._count is not None:
                self._count.end()
            route.left(self._generation.receipt if self._generation is not None else None)

    @staticmethod
    def _seconds_of(job: Job) -> float:
        seconds = job.engine_request.deadline_s
        return seconds if seconds is not None else inf

    async def _start_generation(self, route: Route, job: Job) -> Generation:
        """Sends the request to the route's replica."""
        replica = route.replica
        if replica is None:
            replica = await self._wait_for(route.wait())
        self._meter.routed = route.why()
        if replica.name != self._meter.opened.engine_id:
            await self._meter.rerouted(replica.name)
        text = replica.client.speaks_text
        self._counted_by = None if text else CountedBy.ENGINE  # a text engine's receipt says it
        self._begin_choices(job, text=text)
        adapter = route.query.target.adapter
        if adapter is not None and not replica.has(adapter.digest):
            await self._wait_for(route.load_adapter(replica))
        if self._exchange.disconnected:
            raise ClientDisconnected
        self._generation = await generate(replica.client, job)
        self._meter.approximated = getattr(self._generation, "notes", ())
        route.sent(self._generation)
        return self._generation

    def _begin_choices(self, job: Job, *, text: bool) -> None:
        """`text`: chunks are text, with stop strings applied, and not tokens."""
        codec, stops = (None, ()) if text else (self._info.codec, self._request.stop)
        self._guards = self._make_guards()
        self._needs_second_opinion = any(guard.needs_second_opinion for guard in self._guards)
        guards: Sequence[OutputGuard | None] = self._guards or [None] * self._request.choices
        request = self._request
        self.choices = [
            ChoiceOutput(
                i,
                codec,
                stops,
                each,
                reader_for(request, codec, job.engine_request.prompt),
                single_tool_call=request.single_tool_call,
                stop_included=request.include_stop_str_in_output,
                keeps_ids=request.return_token_ids,
                min_tokens=request.min_tokens,
            )
            for i, each in enumerate(guards)
        ]

    async def _wait_for(self, work: Coroutine[Any, Any, T]) -> T:
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

    def _abandon_attempt(self, error: TollhouseError) -> None:
        """Abandon the attempt. None of it was delivered, so none of it is billed."""
        metrics.retries.labels(error.code).inc()
        log.warning("retrying on another replica: %s", error.message)
        if self._generation is not None:
            self._generation.cancel()
        self._generation, self._first_chunk_seen = None, False
        self._coverage.restart()

    def _on_disconnect(self) -> None:
        if self._generation is not None:
            self._generation.cancel()

    def _abort(self, reason: str, status: int) -> None:
        receipt = None
        if self._generation is not None:
            self._generation.cancel()
            receipt = self._generation.receipt
        self._meter.close_soon(self._ending(reason, status), receipt)

    async def _deliver_chunks(self, generation: Generation, route: Route) -> None:
        """Until every choice is over. Raises the engine's error."""
        while False in [choice.over for choice in self.choices]:
            chunks = await self._next(generation)
            if not self._first_chunk_seen:
                self._first_chunk_seen = True
                route.first_token()
                if chunks and chunks[0].finish_reason not in _ABNORMAL_REASONS:
                    route.answered()  # a half-open breaker does not wait for the whole answer
            if self._exchange.disconnected:
                raise ClientDisconnected
            if not chunks:
                raise _ended_early(generation.receipt)
            for number, portion in enumerate(portions(await self._coverage.cut(chunks))):
                if number and self._writer is not None:  # a client that reads slowly gets many
                    await self._write_deltas(self._writer)
                    await asyncio.sleep(0)
                await self._feed(portion, generation)
            if self._needs_second_opinion:
                await asyncio.gather(*[choice.resolve() for choice in self.choices])
            if self._writer is not None:
                await self._write_deltas(self._writer)
                self._pass_texts(generation, self._writer)
            if self._coverage.exhausted and False in [choice.over for choice in self.choices]:
                raise money_ended_error()
        if not all(choice.ended_by_engine for choice in self.choices):
            generation.cancel()  # otherwise its receipt follows: usage comes last

    def _pass_texts(self, generation: Generation, writer: StreamWriter) -> None:
        """Once the stream has begun, text that nothing has to judge is written as it comes."""
        if not (self._begun and isinstance(generation, Mailbox)) or generation.passes:
            return
        if self._request.logprobs is None and self._idle is not None:
            passing = (self.choices, self._exchange, writer, self._coverage, self._idle)
            PassThrough(*passing, self._note_delivered).attach(generation)

    async def _feed(self, chunks: list[Chunk], generation: Generation) -> None:
        for run in group_chunks(chunks):
            if run[0].finish_reason in _ABNORMAL_REASONS:
                raise _ended_early(generation.receipt, run[0].finish_reason)
            choice = self.choices[run[0].choice]
            feed = partial(choice.feed_run, run)
            await run_in_thread(feed) if is_large(run, choice.waiting) else feed()

    async def _next(self, generation: Generation) -> list[Chunk]:
        needed = fewest_needed(self.choices) if self._first_chunk_seen else 1
        if self._idle is None:
            return await generation.take(needed)
        while True:
            try:
                return await self._idle.wait(generation.take(needed))
            except TimeoutError:
                await self._write(KEEP_ALIVE)

    async def _write_deltas(self, writer: StreamWriter) -> None:
        deltas = [delta for choice in self.choices for delta in choice.take_all()]
        if not deltas:
            return
        self._meter.first_token()
        self._note_delivered()
        opening = self._opening(writer)
        self._written = False
        try:
            await self._write(opening + b"".join([writer.delta(each) for each in deltas]))
            self._written = True
        finally:
            if self._written:
                for choice in self.choices:
                    choice.sent()

    def _note_delivered(self) -> None:
        """Before each write: what was written earlier has left this process once nothing waits."""
        if self._count is not None:
            if not self._exchange.unsent:
                self._count.note(sum([choice.delivered for choice in self.choices]))
        elif not self._begun:
            self._count = self._meter.begin_stream()

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
        if self._exchange.writable or self._generation is None:
            await self._exchange.write(data, more=more)
        else:
            await self._write_patiently(self._generation, data, more=more)

    async def _write_patiently(self, generation: Generation, data: bytes, *, more: bool) -> None:
        """Ends the generation for a client that does not take what it was sent: raises
        ClientDisconnected once too much waits for it."""
        writing = asyncio.ensure_future(self._exchange.write(data, more=more))
        unsent, stalled_s = self._exchange.unsent, 0.0
        try:
            while not (await asyncio.wait((writing,), timeout=LOOK_S))[0]:
                before, unsent = unsent, self._exchange.unsent
                stalled_s = stalled_s + LOOK_S if unsent == before is not None else 0.0
                unread = sum(map(work_of, generation.waiting()))
                if unread > (MOST_UNREAD if stalled_s < STALLED_S else MOST_UNREAD_STALLED):
                    log.info("a client does not read its stream; the generation ends")
                    raise ClientDisconnected
            await writing
        except asyncio.CancelledError:  # the request is ended, and this was written all the same
            self._written = writing.done() and not (writing.cancelled() or writing.exception())
            raise
        finally:
            writing.cancel()

    def _opening(self, writer: StreamWriter) -> bytes:
        """The opening bytes of the stream, on the first call only."""
        begun, self._begun = self._begun, True
        return b"" if begun else writer.begin()

    async def _complete(self) -> int:
        reason = self.choices[0].finish_reason or "stop"
        receipt = await self._receipt()
        if self._exchange.disconnected:
            raise ClientDisconnected
        if self._writer is None:
            for choice in self.choices:
                choice.sent()
        ending = self._ending(reason, 200)
        event = self._meter.draft(ending, receipt)
        usage, body = self._usage(event), b""
        if self._writer is None:  # made before the request is billed, which fails if it cannot be
            self._meter.first_token()
            whole = partial(self._whole_answer, usage)
            body = await run_in_thread(whole) if self._is_large() else whole()
        statements = self._line_answer if self._exchange.batch_line is not None else None
        event = await self._meter.close(ending, receipt, statements, draft=event)
        try:
            if self._writer is not None:
                opening = self._opening(self._writer)
                await self._write(opening + self._writer.end(usage, self.choices), more=False)
            else:
                await self._exchange.answer(200, self._headers(), body)
        except ClientDisconnected:
            log.debug("the client disconnected before the last byte")
        return 200

    def _usage(self, event: UsageEvent) -> Usage:
        receipt = self._generation.receipt if self._generation is not None else None
        told = receipt.reasoning if isinstance(receipt, UpstreamReceipt) else 0
        reasoning = told or sum([each.reasoning_tokens for each in self.choices])
        output = event.output_tokens
        guessed = (0, 0)
        if receipt is not None and self._request.prediction is not None:
            guessed = (min(receipt.accepted, output), receipt.rejected)
        counts = (event.input_tokens, event.cached_tokens, output)
        uncached = event.input_tokens - event.cached_tokens
        return Usage(*counts, min(output, reasoning), *guessed, *_written(receipt, uncached))

    def _line_answer(self, event: UsageEvent) -> list[Statement]:
        """A batch line's result commits with its usage, so a crash does not run the line again."""
        batch_line, batch_id = self._exchange.batch_line, self._exchange.batch_job
        assert batch_line is not None and batch_id is not None
        answer = self._surface.answer(self._info, self._request, self.choices, self._usage(event))
        return [insert_answer(batch_id, batch_line(event.request_id, answer))]

    def _is_large(self) -> bool:
        """Vectors and logprobs are hundreds of bytes per token; so are texts that it has no bound on."""
        if self._request.lists_numbers:
            return True
        return sum([choice.received for choice in self.choices]) > _INLINE_UNITS

    def _whole_answer(self, usage: Usage) -> bytes:
        answer = self._surface.answer(self._info, self._request, self.choices, usage)
        rows = answer.get("data")
        if isinstance(rows, list):  # one by one: a call holds the interpreter's lock
            answer["data"] = [orjson.Fragment(orjson.dumps(row)) for row in rows]
        return orjson.dumps(answer)

    async def _fail(self, error: TollhouseError) -> int:
        """Report an engine failure or timeout: as a stream event after the first byte, else raise. The
        receipt of a lost connection may take seconds, for which a stream does not wait."""
        waits = isinstance(self._generation, Mailbox) and self._generation.lost
        started = self._exchange.started
        if started and waits:
            await self._write_failure(error)
        await self._settle(error.code, int(error.status))
        if not started:
            raise error
        if not waits:
            await self._write_failure(error)
        return int(error.status)

    async def _write_failure(self, error: TollhouseError) -> None:
        try:
            assert self._writer is not None
            self._exchange.broken = True
            await self._exchange.write(with_retry(self._writer.failed(error), error), more=False)
        except ClientDisconnected:
            log.debug("the client disconnected before the error could be sent")

    async def _settle_fault(self) -> None:
        """Of an error of our own, which the caller raises; a stream that has begun says so itself."""
        if self._settled:
            return
        await self._settle("gateway_fault", 500)
        if self._exchange.started and self._writer is not None:
            await self._write_failure(gateway_fault())

    async def _settle(self, reason: str, status: int) -> None:
        if self._generation is not None:
            self._generation.cancel()
        self._settled = True
        await self._meter.close(self._ending(reason, status), await self._receipt())

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
        delivered = 0
        if self._writer is not None or status == 200:  # an answer that is not streamed came whole
            delivered = sum([choice.delivered for choice in self.choices])
        received = sum([choice.received for choice in self.choices])
        cut = [(guard, self.choices[i]) for i, guard in enumerate(self._guards) if guard.blocked]
        paid_by = cut[0][0].cut_paid_by if cut else None
        waived = sum(choice.delivered for _, choice in cut) if paid_by == "operator" else 0
        return Ending(
            delivered - waived,
            received,
            reason,
            status,
            prompt_done=delivered > 0,
            paid_by=paid_by,
            counted_by=self._counted_by,
        )


def _written(receipt: Receipt | None, most: int) -> tuple[int, int]:
    """What a provider wrote into its cache, for its usual time and for an hour."""
    if not isinstance(receipt, UpstreamReceipt):
        return 0, 0
    long = min(most, receipt.parts.cache_write_1h)
    return min(most - long, receipt.parts.cache_write_5m), long


def with_retry(event: bytes, error: TollhouseError) -> bytes:
    """The last event of a stream that failed, with the time after which a client may try again."""
    if error.retry_after_s is None:
        return event
    retry = b"retry: %d\n" % round(error.retry_after_s * 1000)
    if not event.startswith(b"event: "):
        return retry + event
    name, _, data = event.partition(b"\n")
    return b"%b\n%b%b" % (name, retry, data)


def gateway_fault() -> TollhouseError:
    return TollhouseError(
        "The gateway failed to process this request.",
        next_step="Only what was delivered is charged; report the request id to the operator.",
    )


def _ended_early(
    receipt: Receipt | None, reason: FinishReason | str | None = None
) -> TollhouseError:
    reason = reason or (receipt.finish_reason if receipt else FinishReason.ERROR)
    if reason == FinishReason.DEADLINE:
        return deadline_exceeded()
    detail = f": {receipt.message}" if receipt and receipt.message else ""
    return Unavailable(
        f"The engine ended the request early{detail}.",
        next_step="Retry the request; only the delivered tokens are charged.",
        code="engine_failed",
        retry_after_s=1.0,
    )
