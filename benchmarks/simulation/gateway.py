"""A gateway process and its engine, on the product's own spool file, shipper and recovery."""

from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.simulation.faults import Crash, Faults
from billing import prices
from billing.pricing import PriceBook
from core.clock import FakeClock
from core.database import Database
from core.errors import TollhouseError
from core.events import OpenedRequest, SettledBy, UsageEvent, UsageKind
from core.ids import REQUEST, new_id
from engine.protocol import FinishReason, Receipt
from gateway.metering.meter import Counts, usage_event
from gateway.metering.receipt_log import engine_count
from gateway.metering.recovery import event_of_receipt
from gateway.metering.shipper import ship_file
from gateway.metering.spool import (
    OutboxBatch,
    SpoolFile,
    Statement,
    insert_opened,
    insert_receipt,
    move_to_outbox,
)
from gateway.metering.usage_sink import SqlUsageSink


@dataclass
class Engine:
    """Remembers what it did for each request until it is asked."""

    receipts: dict[str, Receipt] = field(default_factory=dict)

    def run(self, opened: OpenedRequest, cached: int, generated: int, delivered: int) -> Receipt:
        made = Receipt(
            request_id=opened.request_id,
            namespace=opened.tenant_id,
            adapter=opened.adapter,
            prompt=opened.prompt_tokens,
            cached=cached,
            computed=opened.prompt_tokens - cached,
            unprocessed=0,
            generated=generated,
            delivered=delivered,
            recomputed=0,
            discarded=0,
            finish_reason=FinishReason.STOP,
            queue_s=0.0,
            prefill_s=0.0,
            decode_s=0.0,
        )
        self.receipts[opened.request_id] = made
        return made


class Books:
    """The gateway's way to the tables, over a network that may fail and repeat."""

    def __init__(self, database: Database, clock: FakeClock, faults: Faults) -> None:
        self._books, self._faults = SqlUsageSink(database, clock), faults

    def record(self, batch: OutboxBatch) -> None:
        for _ in range(2 if self._faults.strike("shipment doubled") else 1):
            if self._faults.strike("shipment reordered"):
                self._faults.chance.shuffle(batch.usage)
            self._books.record(batch)

    def park(self, batch: OutboxBatch, reason: str) -> None:
        self._books.park(batch, reason)


@dataclass
class Gateway:
    """Opens, streams, closes; may die at any moment and be started again on the same file."""

    path: Path
    database: Database
    clock: FakeClock
    faults: Faults
    engine: Engine
    truth: dict[str, Receipt]  # what engines really did, by request
    file: SpoolFile | None = None
    book: PriceBook | None = None  # kept until prices change, as gateways do

    def start(self) -> None:
        """Adopt what the last process left, settle its open requests by the engine's receipts."""
        if self.file is not None:
            return
        self.file = SpoolFile(self.path)
        for opened in self.file.open_requests():
            receipt = self.engine.receipts.get(opened.request_id)
            event = event_of_receipt(opened, receipt, self.clock.now())
            noted = [] if receipt is None else [_noted(receipt, self.clock)]
            self._commit([*noted, *move_to_outbox(event)])

    def die(self) -> None:
        """As by kill -9; a write that was not acknowledged may lie torn behind the others."""
        if self.file is None:
            return
        log = Path(f"{self.path}-wal")
        # A clean close would empty the log into the file: what a killed process leaves is put back.
        left = {name: name.read_bytes() for name in (self.path, log) if name.exists()}
        self.file.close()
        self.file = self.book = None
        if self.faults.strike("write torn", 0.5):
            left[log] = left.get(log, b"") + self._torn()
        for name, data in left.items():
            name.write_bytes(data)

    def _torn(self) -> bytes:
        return self.faults.chance.randbytes(self.faults.chance.randint(1, 4096))

    def serve(self, tenant_id: str) -> None:
        """One request, with a crash possible between any two of its steps."""
        chance, now = self.faults.chance, self.clock.now()
        if self.book is None:
            with self.database.read() as session:
                self.book = prices.load_price_book(session)
        adapter = "lora" if chance.random() < 0.3 else None
        prompt, generated = chance.randint(1, 3000), chance.randint(0, 800)
        try:
            pinned = self.book.pin(tenant_id, "demo", adapter, now, "USD")
        except TollhouseError:
            return
        opened = OpenedRequest(
            request_id=new_id(REQUEST),
            tenant_id=tenant_id,
            project_id=f"proj{chance.randint(0, 1)}",
            key_id="key",
            kind=UsageKind.GENERATION,
            route="/v1/chat/completions",
            model="demo",
            adapter=adapter,
            adapter_digest=None,
            price_version=pinned.id,
            opened_at=now,
            prompt_tokens=prompt,
        )
        if self.faults.strike("spool's disk is full", 0.03):
            return  # refused before any work
        self._commit([insert_opened(opened)])
        if self.faults.strike("gateway dies before the engine", 0.04):
            self.truth[opened.request_id] = self.engine.run(opened, 0, 0, 0)
            raise Crash
        cached = chance.randint(0, prompt)
        delivered = generated if chance.random() < 0.8 else chance.randint(0, generated)
        receipt = self.engine.run(opened, cached, generated, delivered)
        self.truth[opened.request_id] = receipt
        if self.faults.strike("gateway dies in the middle", 0.06):
            raise Crash
        event = _event(opened, receipt, self.clock)
        self._commit([_noted(receipt, self.clock), *move_to_outbox(event)])

    def ship(self, books: Books) -> None:
        if self.file is None:
            return
        file = self.file

        def _forget(statements: list[Statement]) -> None:
            if self.faults.strike("gateway dies before it forgets", 0.05):
                raise Crash
            file.commit(statements)

        ship_file(file.connection, books, _forget)

    def _commit(self, statements: list[Statement]) -> None:
        assert self.file is not None
        self.file.commit(statements)


def _noted(receipt: Receipt, clock: FakeClock) -> Statement:
    return insert_receipt(engine_count("", receipt, clock.now()))


def _event(opened: OpenedRequest, receipt: Receipt, clock: FakeClock) -> UsageEvent:
    waived = receipt.generated - receipt.delivered
    counts = Counts(receipt.prompt, receipt.cached, receipt.delivered, waived)
    return usage_event(
        opened,
        counts,
        finished_at=clock.now(),
        finish_reason="stop",
        status=200,
        settled_by=SettledBy.GATEWAY,
    )
