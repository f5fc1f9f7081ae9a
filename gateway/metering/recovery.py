"""Settles what a dead gateway process left in its spool file.

A file whose lock is free has no owner. Its outbox is shipped, and each opened record without a
closed one is settled from the engine's receipt. If the engine answers but has none, as upstreams, the
counts that the dead process had stored are its receipt; without them the request is closed with zero
tokens. If the engine does not answer, recovery waits until the request's maximum lifetime has passed.
"""

import asyncio
import logging
import sqlite3
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Protocol

from msgspec.structs import replace

from core import metrics
from core.clock import Clock
from core.errors import TollhouseError
from core.events import CountedBy, EngineCount, OpenedRequest, SettledBy, UsageEvent
from engine.protocol import WHOLE, FinishReason, Receipt
from gateway.edge.threads import Work, run_as
from gateway.metering.engine_receipts import engine_count
from gateway.metering.meter import Counts, Outcome, usage_event, waive_all, with_dropped
from gateway.metering.parked_records import retry_parked
from gateway.metering.shipper import ship_file
from gateway.metering.spool import SpoolFile
from gateway.metering.spool_statements import insert_receipt, move_to_outbox, park_opened
from gateway.metering.usage_sink import UsageSink
from gateway.request.engine import RequestStillRunning
from gateway.request.receipts import merged_receipt

log = logging.getLogger("tollhouse.recovery")
_LOST = "gateway_lost"  # finish reason of what a killed process did not deliver whole


class ReceiptSource(Protocol):
    async def receipts_of(self, opened: OpenedRequest) -> list[Receipt]:
        """One for each prompt that ran. Raises RequestStillRunning, or another TollhouseError if
        the engine does not answer."""

    async def acknowledge(self, request_ids: list[str]) -> None: ...


# The stored counts of the prompts with these ids that this engine ran.
StoredCounts = Callable[[Sequence[str], str], list[EngineCount]]


def _no_counts(request_ids: Sequence[str], engine_id: str) -> list[EngineCount]:
    return []


class Recovery:
    def __init__(
        self,
        directory: Path,
        own: Path,
        sink: UsageSink,
        receipts: ReceiptSource,
        clock: Clock,
        *,
        longest_life_s: float,
        on_settled: Callable[[UsageEvent], Awaitable[None]],
        stored_counts: StoredCounts = _no_counts,
    ) -> None:
        """`on_settled` releases what the dead process had reserved."""
        self._directory = directory
        self._own = own
        self._sink = sink
        self._receipts = receipts
        self._clock = clock
        self._on_settled = on_settled
        self._stored_counts = stored_counts
        self._longest_life = timedelta(seconds=longest_life_s + 60)
        self._adopted: dict[Path, SpoolFile] = {}
        self._unreadable: set[Path] = set()  # already logged
        self.first_round_done = (
            asyncio.Event()
        )  # set after the first round: older records are in the database

    async def run(self, every_s: float = 5.0) -> None:
        while True:
            try:
                await self.round()
                self.first_round_done.set()
            except Exception as error:
                log.warning(
                    "recovery of spool files failed; retrying in %.0f s: %s", every_s, error
                )
            await asyncio.sleep(every_s)

    async def round(self) -> int:
        """Adopt orphaned files and settle what can be settled; returns the number of requests.
        A file that fails is retried in the next round and does not hold up the others."""
        self._adopt()
        settled = 0
        for path, file in list(self._adopted.items()):
            try:
                await run_as(Work.OWN, self._ship, file)  # with the counts of its open requests
                if found := await self._settle(file):
                    settled += found
                    await run_as(Work.OWN, self._ship, file)
                if file.is_empty():
                    file.close(remove=True)
                    del self._adopted[path]
            except Exception as error:
                log.warning("cannot recover %s; retrying in the next round: %s", path.name, error)
        metrics.spool_parked_adopted.set(self.parked())
        return settled

    def adopted(self) -> list[SpoolFile]:
        return list(self._adopted.values())

    def parked(self) -> int:
        """Parked records of the adopted files."""
        return sum(file.parked() for file in self._adopted.values())

    def close(self) -> None:
        for file in self._adopted.values():
            file.close()
        self._adopted.clear()

    def _adopt(self) -> None:
        for path in sorted(self._directory.glob("*.db")):
            if path == self._own or path in self._adopted:
                continue
            try:
                file = _file_of_the_dead(path)
            except OSError:  # locked: its process is alive
                continue
            except sqlite3.OperationalError as error:  # a full disk, for one
                log.warning("cannot adopt %s; retrying in the next round: %s", path.name, error)
                continue
            except sqlite3.DatabaseError as error:
                if path not in self._unreadable:
                    log.error(
                        "%s cannot be read: %s; move it and its logs away and keep them",
                        path,
                        error,
                    )
                self._unreadable.add(path)
                continue
            log.info("adopted %s, left by a process that exited", path.name)
            self._adopted[path] = file

    def _ship(self, file: SpoolFile) -> None:
        ship_file(file.connection, self._sink, file.commit)

    async def _settle(self, file: SpoolFile) -> int:
        """Settle the open requests, each in a commit of its own: one bad record ends nothing."""
        return sum([await self._settle_one(file, each) for each in file.open_requests()])

    async def _settle_one(self, file: SpoolFile, opened: OpenedRequest) -> int:
        try:
            settlement = await self._settled(opened, file.delivered)
        except ValueError as error:
            log.error("the open request %s is parked: %s", opened.request_id, error)
            file.commit(park_opened(opened.request_id, str(error)))
            return 0
        if settlement is None:
            return 0
        event, receipts = settlement
        noted = [
            insert_receipt(engine_count(opened.engine_id, each, event.finished_at))
            for each in receipts
        ]
        file.commit([*noted, *move_to_outbox(event)])
        if receipts:
            await self._follow_up(
                "acknowledge the receipt of",
                event,
                self._receipts.acknowledge(list(opened.engine_request_ids)),
            )
        await self._follow_up("release the reservation of", event, self._on_settled(event))
        return 1

    async def _follow_up(self, what: str, event: UsageEvent, work: Awaitable[None]) -> None:
        """Do what follows a settled request. The record is durable, and what fails here expires."""
        try:
            await work
        except Exception as error:
            log.warning("could not %s %s: %s", what, event.request_id, error)

    async def _settled(
        self, opened: OpenedRequest, counts_left: dict[str, int] | None
    ) -> tuple[UsageEvent, list[Receipt]] | None:
        now = self._clock.now()
        # A request without a count had no stream yet: nothing was delivered.
        delivered = None if counts_left is None else counts_left.get(opened.request_id, 0)
        try:
            receipts = await self._receipts.receipts_of(opened)
        except RequestStillRunning:
            return None
        except TollhouseError:
            if now - opened.opened_at < self._longest_life:
                return None
            receipts = []
        if receipts:
            whole = merged_receipt(opened.request_id, receipts)
            return event_of_receipt(opened, whole, now, delivered), receipts
        names = opened.engine_request_ids
        counts = await run_as(Work.OWN, self._stored_counts, names, opened.engine_id)
        if not counts:
            return event_of_receipt(opened, None, now), []
        stored = merged_receipt(opened.request_id, [_receipt_of(opened, each) for each in counts])
        # Its streams are counted in characters, of which so many tokens were made: all or none.
        sent = None if delivered is None else stored.generated if delivered else 0
        # Who had counted them, the server or a tokenizer, is not stored.
        return replace(event_of_receipt(opened, stored, now, sent), counted_by=None), []


def _file_of_the_dead(path: Path) -> SpoolFile:
    """With its parked records put back. Unlocked again if that fails, or nobody could ever adopt it."""
    file = SpoolFile(path)
    try:
        retry_parked(file)
    except BaseException:
        file.close()
        raise
    return file


def _receipt_of(opened: OpenedRequest, count: EngineCount) -> Receipt:
    """What is stored of a receipt. How the generation ended is not: the client's process died."""
    return Receipt(
        request_id=count.request_id,
        namespace=opened.tenant_id,
        adapter=opened.adapter_digest,
        prompt=count.prompt_tokens,
        cached=count.cached_tokens,
        computed=count.prompt_tokens - count.cached_tokens,
        unprocessed=0,
        generated=count.generated_tokens,
        delivered=count.generated_tokens,
        recomputed=0,
        discarded=0,
        finish_reason=FinishReason.ABORT,
        queue_s=0.0,
        prefill_s=0.0,
        decode_s=0.0,
        busy_us=count.busy_us,
    )


def event_of_receipt(
    opened: OpenedRequest, receipt: Receipt | None, now: datetime, sent: int | None = None
) -> UsageEvent:
    """`sent`: tokens that were written to the client; None: what the engine delivered counts."""
    if receipt is None:
        return usage_event(
            opened,
            Counts(0, 0, 0, 0),
            Outcome(
                finished_at=now,
                finish_reason="expired",
                status=500,
                settled_by=SettledBy.EXPIRY,
            ),
        )
    delivered = min(receipt.delivered if sent is None else sent, receipt.generated)
    counts = Counts(receipt.prompt, receipt.cached, delivered, receipt.generated - delivered)
    complete = receipt.finish_reason in WHOLE
    lost = sent is not None and not (complete and 0 < delivered == receipt.generated)
    is_operators = opened.batch_job is not None or (lost and not delivered)
    if is_operators:
        counts = waive_all(counts)
    outcome = Outcome(
        finished_at=now,
        finish_reason=_LOST if lost else str(receipt.finish_reason),
        status=503 if lost else 200 if complete else 499,
        settled_by=SettledBy.RECEIPT,
        counted_by=CountedBy.ENGINE,
        quantity=int(not is_operators),
        paid_by="operator" if is_operators else None,
        queue_ms=round(receipt.queue_s * 1000),
        busy_us=receipt.busy_us,
        truncated=with_dropped(None, receipt),
        duration_ms=round((receipt.queue_s + receipt.prefill_s + receipt.decode_s) * 1000),
    )
    return usage_event(opened, counts, outcome)
