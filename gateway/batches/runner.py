"""Runs batches in a gateway process, through the same pipeline as any request, at the lowest priority.

A batch is leased by one process at a time. The answer to a line goes to the spool in the same commit
as its usage event, so after a crash another process continues with the unanswered lines. A line that
was running then runs again, and its first run is not billed.
"""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial

from sqlalchemy import delete
from sqlalchemy.orm import Session

from core import idempotency
from core.batches import files, jobs
from core.batches.jobs import Answered
from core.batches.models import Batch, BatchLine, StoredFile
from core.clock import Clock
from core.database import Database
from core.errors import TollhouseError
from core.ids import new_id
from core.tenants import keys
from core.tenants.keys import Principal
from gateway.batches import input as batch_input
from gateway.batches import lines as batch_lines
from gateway.batches.inner import InnerExchange
from gateway.batches.lines import Later, Serve
from gateway.surface import Surface

log = logging.getLogger("tollhouse.batches")
POLL_S = 1.0
_MOST_BATCHES = 4  # that one process runs at once
_KEEP_OUTPUT_S = 30 * 86_400
_TIDY = timedelta(minutes=10)


class BatchRunner:
    def __init__(
        self,
        database: Database,
        clock: Clock,
        serve: Serve,
        surfaces: Sequence[Surface],
        *,
        at_once: int,
        most_line_bytes: int,
    ) -> None:
        self._database = database
        self._clock = clock
        self._serve = serve
        self._surfaces = {surface.route: surface for surface in surfaces}
        self._at_once = at_once
        self._most_line_bytes = most_line_bytes
        self._slots = asyncio.Semaphore(at_once)
        self._owner = new_id("run")
        self._works: dict[str, asyncio.Task[None]] = {}
        self._running: set[InnerExchange] = set()
        self._tidied: datetime | None = None
        self._principals: dict[str, tuple[float, Principal]] = {}

    async def run(self) -> None:
        """Run until cancelled. With `at_once` 0 this process runs no batches."""
        while self._at_once:
            try:
                await self._look()
            except Exception as error:
                log.warning("cannot read the batch queue, again in %.0f s: %s", POLL_S, error)
            await asyncio.sleep(POLL_S)

    async def stop(self) -> None:
        """Release the leases: another process, or the next start, continues the batches."""
        for exchange in list(self._running):
            exchange.hang_up()
        for work in self._works.values():
            work.cancel()
        await asyncio.gather(*self._works.values(), return_exceptions=True)

    async def _look(self) -> None:
        now = self._clock.now()
        if self._tidied is None or now - self._tidied >= _TIDY:
            self._tidied = now
            await asyncio.to_thread(self._tidy, now)
        while len(self._works) < _MOST_BATCHES:
            batch = await asyncio.to_thread(self._claim)
            if batch is None:
                return
            work = asyncio.create_task(self._work(batch), name=f"tollhouse-{batch.id}")
            self._works[batch.id] = work
            work.add_done_callback(partial(self._forget, batch.id))

    def _forget(self, batch_id: str, _work: asyncio.Task[None]) -> None:
        self._works.pop(batch_id, None)

    def _claim(self) -> Batch | None:
        with self._database.transaction() as session:
            return jobs.claim(session, self._owner, self._clock.now(), list(self._works))

    async def _work(self, batch: Batch) -> None:
        try:
            if batch.status == "validating":
                await asyncio.to_thread(self._validate, batch.id)
            if await self._lines(batch.id):
                await asyncio.to_thread(self._finish, batch.id)
        except Exception:
            log.exception("batch %s stopped and will be resumed", batch.id)
        finally:
            with suppress(Exception):  # if this fails, the lease expires by itself
                await asyncio.shield(asyncio.to_thread(self._give_back, batch.id))

    async def _lines(self, batch_id: str) -> bool:
        """Run the waiting lines. False if another process has taken over the batch."""
        under_way: dict[asyncio.Task[Answered | Later | None], int] = {}
        found: list[Answered] = []
        not_before = 0.0
        try:
            while True:
                batch = await asyncio.to_thread(self._note, batch_id, found)
                found = []
                if batch is None:
                    return False
                if batch.status != "in_progress" or batch.expires_at <= self._clock.now():
                    return True
                room = self._at_once - len(under_way)
                if room and self._clock.monotonic() >= not_before:
                    skip = list(under_way.values())
                    lines = await asyncio.to_thread(self._waiting, batch_id, room, skip)
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
                    if isinstance(result, Later):
                        not_before = self._clock.monotonic() + result.after_s
                    elif result is not None:
                        found.append(result)
        finally:
            for exchange in [e for e in self._running if e.batch_job == batch_id]:
                exchange.hang_up()
            rest = await asyncio.gather(*under_way, return_exceptions=True)
            found += [each for each in rest if isinstance(each, Answered)]
            await asyncio.shield(asyncio.to_thread(self._note, batch_id, found))

    async def _line(self, batch: Batch, line: BatchLine) -> Answered | Later | None:
        async with self._slots:
            try:
                principal = await self._principal(batch.key_id)
            except TollhouseError as error:
                return batch_lines.refused(line.number, line.custom_id, error)
            exchange = batch_lines.exchange_of(principal, line)
            self._running.add(exchange)
            try:
                await self._serve(self._surfaces[batch.endpoint], exchange)
            finally:
                self._running.discard(exchange)
        return batch_lines.outcome(line.number, line.custom_id, exchange)

    async def _principal(self, key_id: str) -> Principal:
        """The key's principal, cached for a second."""
        known = self._principals.get(key_id)
        if known is not None and self._clock.monotonic() - known[0] < 1.0:
            return known[1]
        found = await asyncio.to_thread(self._read_principal, key_id)
        if len(self._principals) > 2 * _MOST_BATCHES:
            self._principals.clear()
        self._principals[key_id] = (self._clock.monotonic(), found)
        return found

    def _read_principal(self, key_id: str) -> Principal:
        with self._database.read() as session:
            return keys.of_id(session, key_id, self._clock.now())

    def _note(self, batch_id: str, found: Sequence[Answered]) -> Batch | None:
        with self._database.transaction() as session:
            batch = jobs.renew(session, batch_id, self._owner, self._clock.now())
            if batch is not None and found:
                jobs.answered(session, batch, found)
            return batch

    def _waiting(self, batch_id: str, limit: int, skip: Sequence[int]) -> list[BatchLine]:
        with self._database.read() as session:
            return jobs.waiting(session, batch_id, limit, skip)

    def _validate(self, batch_id: str) -> None:
        with self._database.transaction() as session:
            batch = session.get_one(Batch, batch_id)
            now = self._clock.now()
            file = session.get(StoredFile, batch.input_file_id)
            if batch.status != "validating":
                return
            if file is None:
                checked = batch_input.Checked([_no_file()])
            else:
                lines = files.lines(session, file)
                checked = batch_input.check(lines, batch.endpoint, self._most_line_bytes)
            if checked.errors or file is None:
                batch.status, batch.errors, batch.ended_at = "failed", checked.errors, now
                return
            rows = batch_input.requests(files.lines(session, file))
            jobs.begin(session, batch, rows, checked.model, now)

    def _finish(self, batch_id: str) -> None:
        """Write the output file, the error file and the final status in one commit."""
        with self._database.transaction() as session:
            batch = jobs.renew(session, batch_id, self._owner, self._clock.now())
            if batch is None or batch.status not in jobs.OPEN:
                return
            now = batch.finalizing_at = self._clock.now()
            end = "cancelled" if batch.status == "cancelling" else "completed"
            if end == "completed" and self._expire(session, batch):
                end = "expired"
            batch.output_file_id = self._file(session, batch, jobs.DONE, "output")
            batch.error_file_id = self._file(session, batch, jobs.FAILED, "error")
            batch.status, batch.ended_at = end, now
            batch.lease_owner = batch.lease_until = None
            session.execute(delete(BatchLine).where(BatchLine.batch_id == batch.id))

    def _expire(self, session: Session, batch: Batch) -> bool:
        """Mark the waiting lines as expired; True if there were any."""
        left = False
        while lines := jobs.waiting(session, batch.id, 500):
            left = True
            jobs.answered(
                session, batch, [batch_lines.expired(e.number, e.custom_id) for e in lines]
            )
        return left

    def _file(self, session: Session, batch: Batch, state: str, word: str) -> str | None:
        if not (batch.completed if state == jobs.DONE else batch.failed):
            return None
        made = files.store(
            session,
            self._clock,
            tenant_id=batch.tenant_id,
            project_id=batch.project_id,
            key_id=batch.key_id,
            filename=f"{batch.id}_{word}.jsonl",
            purpose="batch_output",
            content=jobs.results(session, batch.id, state),
            lifetime_s=_KEEP_OUTPUT_S,
        )
        return made.id

    def _give_back(self, batch_id: str) -> None:
        with self._database.transaction() as session:
            jobs.give_back(session, batch_id, self._owner)

    def _tidy(self, now: datetime) -> None:
        with self._database.transaction() as session:
            files.drop_expired(session, now)
            idempotency.drop_expired(session, now)


def _no_file() -> dict[str, object]:
    message = "The input file was deleted or has expired."
    return {"code": "no_file", "message": message, "param": None, "line": None}
