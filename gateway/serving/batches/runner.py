"""Runs batches in a gateway process, through the same pipeline as any request, at the lowest priority.

A batch is leased by one process at a time. The answer to a line goes to the spool in the same commit
as its usage event, so after a crash another process continues with the unanswered lines. A line that
was running then runs again, and its first run is not billed.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import datetime, timedelta
from functools import partial

from sqlalchemy import delete
from sqlalchemy.orm import Session

from core import idempotency
from core.batches import files, jobs
from core.batches.jobs import LineResult
from core.batches.models import Batch, BatchLine, StoredFile
from core.clock import Clock
from core.database import Database
from core.errors import TollhouseError
from core.fair_queue import FairQueue
from core.ids import new_id
from core.responses import completions, conversations, records
from core.tenants import keys
from core.tenants.keys import Principal
from gateway.answers.surface import Surface
from gateway.edge.threads import run_in_thread
from gateway.serving.batches import input_file as batch_input
from gateway.serving.batches import lines as batch_lines
from gateway.serving.batches.lines import InternalExchange, RetryLater, Serve


class FairSlots:
    """`count` holders at once. Tenants that wait take turns, however many lines each has waiting."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._queue: FairQueue[asyncio.Future[None]] = FairQueue()

    @asynccontextmanager
    async def hold(self, tenant_id: str) -> AsyncIterator[None]:
        await self._acquire(tenant_id)
        try:
            yield
        finally:
            self._release()

    async def _acquire(self, tenant_id: str) -> None:
        if self._free and not len(self._queue):
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        ticket = self._queue.push(tenant_id, 1, 1, turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._release()
            raise
        finally:
            self._queue.remove(ticket)

    def _release(self) -> None:
        while len(self._queue):
            ticket = self._queue.heads()[0]
            self._queue.serve(ticket)
            if not ticket.item.done():
                ticket.item.set_result(None)
                return
        self._free += 1


log = logging.getLogger("tollhouse.batches")
POLL_S = 1.0
_MAX_BATCHES = 64  # that one process runs at once; their lines share `at_once` slots
_UNPAID_PAUSE_S = 60.0
_KEEP_OUTPUT_S = 30 * 86_400
_PURGE_EVERY = timedelta(minutes=10)


class BatchRunner:
    def __init__(
        self,
        database: Database,
        clock: Clock,
        serve: Serve,
        surfaces: Sequence[Surface],
        *,
        at_once: int,
        max_line_bytes: int,
    ) -> None:
        self._database = database
        self._clock = clock
        self._serve = serve
        self._surfaces = {surface.route: surface for surface in surfaces}
        self._concurrency = at_once
        self._max_line_bytes = max_line_bytes
        self._slots = FairSlots(at_once)
        self._owner = new_id("run")
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._running: set[InternalExchange] = set()
        self._purged_at: datetime | None = None
        self._principals: dict[str, tuple[float, Principal]] = {}

    async def run(self) -> None:
        """Run until cancelled. With `at_once` 0 this process runs no batches."""
        while self._concurrency:
            try:
                await self._poll()
            except Exception as error:
                log.warning("cannot read the batch queue, again in %.0f s: %s", POLL_S, error)
            await asyncio.sleep(POLL_S)

    async def stop(self) -> None:
        """Release the leases: another process, or the next start, continues the batches."""
        for exchange in list(self._running):
            exchange.disconnect()
        for batch_task in self._tasks.values():
            batch_task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _poll(self) -> None:
        now = self._clock.now()
        if self._purged_at is None or now - self._purged_at >= _PURGE_EVERY:
            self._purged_at = now
            await asyncio.to_thread(self._purge_expired, now)
        while len(self._tasks) < _MAX_BATCHES:
            batch = await asyncio.to_thread(self._claim)
            if batch is None:
                return
            batch_task = asyncio.create_task(self._run_batch(batch), name=f"tollhouse-{batch.id}")
            self._tasks[batch.id] = batch_task
            batch_task.add_done_callback(partial(self._forget, batch.id))

    def _forget(self, batch_id: str, _run_batch: asyncio.Task[None]) -> None:
        self._tasks.pop(batch_id, None)

    def _claim(self) -> Batch | None:
        with self._database.transaction() as session:
            return jobs.claim(session, self._owner, self._clock.now(), list(self._tasks))

    async def _run_batch(self, batch: Batch) -> None:
        try:
            if batch.in_progress_at is None:
                await asyncio.to_thread(self._validate, batch.id)
            if await self._lines(batch.id):
                await asyncio.to_thread(self._finish, batch.id)
        except Exception:
            log.exception("batch %s stopped and will be resumed", batch.id)
        finally:
            with suppress(Exception):  # if this fails, the lease expires by itself
                await asyncio.shield(asyncio.to_thread(self._release_lease, batch.id))

    async def _lines(self, batch_id: str) -> bool:
        """Run the waiting lines. False if another process has taken over the batch."""
        under_way: dict[asyncio.Task[LineResult | RetryLater | None], int] = {}
        answers: list[LineResult] = []
        not_before = 0.0
        try:
            while True:
                batch = await asyncio.to_thread(self._save_answers, batch_id, answers)
                answers = []
                if batch is None:
                    return False
                if batch.status != "in_progress" or batch.expires_at <= self._clock.now():
                    return True
                free_slots = self._concurrency - len(under_way)
                if free_slots and self._clock.monotonic() >= not_before:
                    skip = list(under_way.values())
                    lines = await asyncio.to_thread(self._waiting, batch_id, free_slots, skip)
                    under_way |= {
                        asyncio.create_task(self._line(batch, each)): each.number for each in lines
                    }
                    if not under_way:
                        return True
                if not under_way:
                    await asyncio.sleep(POLL_S)
                    continue
                ended, _ = await asyncio.wait(
                    under_way, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED
                )
                for task in ended:
                    del under_way[task]
                    result = task.result()
                    if isinstance(result, RetryLater):
                        not_before = self._clock.monotonic() + result.after_s
                    elif result is not None:
                        answers.append(result)
        finally:
            for exchange in [e for e in self._running if e.batch_job == batch_id]:
                exchange.disconnect()
            rest = await asyncio.gather(*under_way, return_exceptions=True)
            answers += [each for each in rest if isinstance(each, LineResult)]
            await asyncio.shield(asyncio.to_thread(self._save_answers, batch_id, answers))

    async def _line(self, batch: Batch, line: BatchLine) -> LineResult | RetryLater | None:
        async with self._slots.hold(batch.tenant_id):
            try:
                principal = await self._principal(batch.key_id)
            except TollhouseError as error:
                return batch_lines.key_rejected(line.number, line.custom_id, error)
            if principal.unpaid:  # the lines wait for the payment, or expire
                return RetryLater(_UNPAID_PAUSE_S)
            exchange = batch_lines.exchange_for(principal, line)
            self._running.add(exchange)
            try:
                await self._serve(self._surfaces[batch.endpoint], exchange)
            finally:
                self._running.discard(exchange)
        outcome = partial(batch_lines.outcome, line.number, line.custom_id, exchange)
        return await run_in_thread(outcome)  # it parses and encodes the answer

    async def _principal(self, key_id: str) -> Principal:
        """The key's principal, cached for a second."""
        known = self._principals.get(key_id)
        if known is not None and self._clock.monotonic() - known[0] < 1.0:
            return known[1]
        principal = await asyncio.to_thread(self._read_principal, key_id)
        if len(self._principals) > 2 * _MAX_BATCHES:
            self._principals.clear()
        self._principals[key_id] = (self._clock.monotonic(), principal)
        return principal

    def _read_principal(self, key_id: str) -> Principal:
        with self._database.read() as session:
            return keys.find_by_id(session, key_id, self._clock.now())

    def _save_answers(self, batch_id: str, answers: Sequence[LineResult]) -> Batch | None:
        with self._database.transaction() as session:
            batch = jobs.renew(session, batch_id, self._owner, self._clock.now())
            if batch is not None and answers:
                jobs.record_results(session, batch, answers)
            return batch

    def _waiting(self, batch_id: str, limit: int, skip: Sequence[int]) -> list[BatchLine]:
        with self._database.read() as session:
            return jobs.waiting_lines(session, batch_id, limit, skip)

    def _validate(self, batch_id: str) -> None:
        with self._database.transaction() as session:
            batch = session.get_one(Batch, batch_id, with_for_update=True)
            now = self._clock.now()
            file = session.get(StoredFile, batch.input_file_id)
            if batch.in_progress_at is not None or batch.status not in ("validating", "cancelling"):
                return
            cancelled = batch.status == "cancelling"  # its lines are listed all the same
            if file is None:
                checked = batch_input.ValidationResult([_no_file()])
            else:
                lines = files.lines(session, file, self._max_line_bytes)
                checked = batch_input.validate(lines, batch.endpoint, self._max_line_bytes)
            if checked.errors or file is None:
                if cancelled:
                    return
                batch.status, batch.errors, batch.ended_at = "failed", checked.errors, now
                return
            rows = batch_input.read_requests(files.lines(session, file, self._max_line_bytes))
            jobs.start(session, batch, rows, checked.model, now)

    def _finish(self, batch_id: str) -> None:
        """Write the output file, the error file and the final status in one commit."""
        with self._database.transaction() as session:
            batch = jobs.renew(session, batch_id, self._owner, self._clock.now())
            if batch is None or batch.status not in jobs.OPEN:
                return
            now = batch.finalizing_at = self._clock.now()
            cancelled = batch.status == "cancelling"
            code = batch_lines.CANCELLED if cancelled else batch_lines.EXPIRED
            left = self._leave(session, batch, code)
            end = "cancelled" if cancelled else "expired" if left else "completed"
            if batch.completed:
                batch.output_file_id = self._file(session, batch, [jobs.DONE], "output")
            if batch.failed or left:
                states = [jobs.FAILED, jobs.UNRUN]
                batch.error_file_id = self._file(session, batch, states, "error")
            batch.status, batch.ended_at = end, now
            batch.lease_owner = batch.lease_until = None
            session.execute(delete(BatchLine).where(BatchLine.batch_id == batch.id))

    def _leave(self, session: Session, batch: Batch, code: str) -> bool:
        """Give each waiting line its result, that it did not run; True if there were any."""
        left = False
        while lines := jobs.waiting_lines(session, batch.id, 500):
            left = True
            results = [batch_lines.unrun(each.number, each.custom_id, code) for each in lines]
            jobs.record_unrun(session, batch, results)
        return left

    def _file(self, session: Session, batch: Batch, states: Sequence[str], kind: str) -> str:
        file = files.store(
            session,
            self._clock,
            tenant_id=batch.tenant_id,
            project_id=batch.project_id,
            key_id=batch.key_id,
            filename=f"{batch.id}_{kind}.jsonl",
            purpose="batch_output",
            content=jobs.result_chunks(session, batch.id, states),
            lifetime_s=_KEEP_OUTPUT_S,
        )
        return file.id

    def _release_lease(self, batch_id: str) -> None:
        with self._database.transaction() as session:
            jobs.release(session, batch_id, self._owner)

    def _purge_expired(self, now: datetime) -> None:
        with self._database.transaction() as session:
            files.drop_expired(session, now)
            idempotency.drop_expired(session, now)
            records.drop_expired(session, now)
            conversations.drop_expired(session, now)
            completions.drop_expired(session, now)


def _no_file() -> dict[str, object]:
    message = "The input file was deleted or has expired."
    return {"code": "no_file", "message": message, "param": None, "line": None}
