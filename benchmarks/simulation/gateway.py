"""A gateway process on the product's own spool, meter, shipper and recovery; only disk, clock, network
and engine are simulated. A process that is killed leaves its files to the next one.
"""

import asyncio
import errno
import sqlite3
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.simulation.engine import ENGINE, LONGEST_LIFE_S, Engine
from benchmarks.simulation.event_loop import SimulatedLoop
from benchmarks.simulation.faults import Crash, Faults
from billing.pricing import prices
from billing.pricing.pricing import PriceBook
from core.clock import FakeClock
from core.database import Database
from core.errors import TollhouseError, Unavailable
from core.events import CountedBy, OpenedRequest, UsageEvent, UsageKind
from core.ids import REQUEST, new_id
from engine.protocol import FinishReason
from gateway.metering.engine_receipts import ReceiptLog
from gateway.metering.meter import Ending, Meter, MeterServices, blocked_ending
from gateway.metering.recovery import Recovery
from gateway.metering.shipper import Shipper
from gateway.metering.spool import Spool, SpoolFile, connect
from gateway.metering.spool_log import logs_of
from gateway.metering.spool_records import OutboxBatch
from gateway.metering.spool_statements import Statement
from gateway.metering.usage_sink import SqlUsageSink
from tests.billing.simulation.books import Happened, Outcome, ended

T = TypeVar("T")
_STATUSES = (200, 200, 200, 400, 429, 499, 500, 503)
_NO_ENGINE = (UsageKind.MODERATION, UsageKind.CACHE_HIT, UsageKind.GPU_SECONDS)
_WHOLE = (FinishReason.STOP, FinishReason.LENGTH)
# By kind the most units of one request: seconds, characters, images.
_MOST_UNITS = {UsageKind.AUDIO: 3600, UsageKind.SPEECH: 4096, UsageKind.IMAGE: 10}


class Killed(BaseException):
    """kill -9: nothing catches it."""


class FullDisk(SpoolFile):
    """A spool file on a disk that is full now and then."""

    def __init__(self, path: Path, faults: Faults) -> None:
        super().__init__(path)
        self._faults = faults

    def append(self, statements: list[Statement]) -> None:
        if self._faults.strike("spool's disk is full", 0.04):
            raise OSError(errno.ENOSPC, "No space left on device")
        super().append(statements)


class Books:
    """The gateway's way to the tables, over a network that may fail and repeat."""

    def __init__(self, database: Database, clock: FakeClock, faults: Faults) -> None:
        self._books, self._faults = SqlUsageSink(database, clock), faults

    def record(self, batch: OutboxBatch) -> None:
        for _ in range(2 if self._faults.strike("shipment doubled") else 1):
            if self._faults.strike("shipment reordered"):
                self._faults.chance.shuffle(batch.usage)
            self._books.record(batch)
        if self._faults.strike("gateway dies before it forgets", 0.05):
            raise Killed

    def park(self, batch: OutboxBatch, reason: str) -> None:
        self._books.park(batch, reason)


@dataclass
class Site:
    """What all gateway processes share."""

    folder: Path  # of the spool files
    database: Database
    clock: FakeClock
    faults: Faults
    engine: Engine
    happened: Happened


class Process:
    """One life of a gateway process, wired as `gateway/wiring.py` does."""

    def __init__(self, site: Site, path: Path) -> None:
        books = Books(site.database, site.clock, site.faults)
        self.site = site
        self.loop = SimulatedLoop(site.clock)
        self.file = FullDisk(path, site.faults)
        self.spool = Spool(self.file)
        self.spool.bind(self.loop)
        self.shipper = Shipper(self.spool, books)
        self.reader = connect(path)
        self.receipts = ReceiptLog(self.spool, site.clock)
        self.services = MeterServices(self.spool, site.clock, site.engine.forget)
        self.recovery = Recovery(
            site.folder,
            path,
            books,
            site.engine,
            site.clock,
            longest_life_s=LONGEST_LIFE_S,
            on_settled=_settled,
        )

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    def ship(self) -> None:
        """A round of the shipper; a failure is for the next round."""
        self.run(_turns())
        with suppress(Crash, sqlite3.Error):
            self.shipper.drain(self.reader, whole=self.site.faults.chance.random() < 0.5)
        self.run(_turns())

    def kill(self) -> None:
        """A clean close would empty the logs into the files: what a killed process leaves is put
        back, and a write that was not acknowledged may lie torn behind the others."""
        files = [self.file, *self.recovery.adopted()]
        written = {file.path: (_wal_of(file), *_logs_of(file)) for file in files}
        paths = [path for file, logs in written.items() for path in (file, *logs)]
        left = {path: path.read_bytes() for path in paths if path.exists()}
        self.reader.close()
        for file in files:
            file.close()
            if self.site.faults.strike("write torn", 0.5):
                torn = self._torn()
                for path in {*written[file.path][:1], *written[file.path][-1:]}:
                    left[path] = left.get(path, b"") + torn
        for path, data in left.items():
            path.write_bytes(data)
        self.loop.close()

    def _torn(self) -> bytes:
        chance = self.site.faults.chance
        return chance.randbytes(chance.randint(1, 4096))


@dataclass
class Gateway:
    """A place for a process; each life has a spool file of its own."""

    site: Site
    name: str
    lives: int = 0
    process: Process | None = None
    book: PriceBook | None = None  # kept until prices change, as gateways do

    def start(self) -> Process:
        if self.process is None:
            self.lives += 1
            path = self.site.folder / f"{self.name}-{self.lives}.db"
            self.process = Process(self.site, path)
        return self.process

    def die(self) -> None:
        process, self.process, self.book = self.process, None, None
        if process is not None:
            process.kill()

    def ship(self) -> None:
        self.start().ship()

    def recover(self) -> None:
        """A round over what dead processes left."""
        process = self.start()
        process.run(process.recovery.round())

    def rests(self) -> bool:
        """Whether nothing waits, here or in files of the dead."""
        process = self.start()
        return process.file.is_empty() and not process.recovery.adopted()

    def serve(self, tenant_id: str) -> None:
        """One request, with a crash possible between any two of its steps."""
        if self.book is None:
            with self.site.database.read() as session:
                self.book = prices.load_price_book(session)
        adapter = "lora" if self.site.faults.chance.random() < 0.3 else None
        try:
            pinned = self.book.pin(tenant_id, "demo", adapter, self.site.clock.now(), "USD")
        except TollhouseError:
            return
        opened = _opened(self.site, tenant_id, adapter, pinned.id)
        process = self.start()
        if opened.kind in _NO_ENGINE:
            process.run(_without_engine(process, opened))
        elif opened.kind in _MOST_UNITS:
            process.run(_of_units(process, opened))
        else:
            process.run(_with_engine(process, opened))


async def _with_engine(process: Process, opened: OpenedRequest) -> None:
    site, chance, name = process.site, process.site.faults.chance, opened.request_id
    meter = Meter(process.services, opened)
    try:
        await meter.write_opened()
    except Unavailable:
        return  # refused before any work
    site.happened.opened(opened)
    if site.faults.strike("gateway dies before the engine", 0.04):
        raise Killed
    prompt, generated = opened.prompt_tokens, chance.randint(0, 800)
    if chance.random() < 0.1:
        payer = chance.choice(["tenant", "operator"])
        fee = int(payer == "tenant")
        site.happened.may_be(name, Outcome(prompt * fee, 0, 0, 0, 400, fee))
        await meter.close(blocked_ending(payer), None)
        return
    sent = generated if chance.random() < 0.8 else chance.randint(0, generated)
    cached = chance.randint(0, prompt)
    receipt = site.engine.run(opened, cached, generated, sent)
    dies = site.faults.strike("gateway dies in the middle", 0.06)
    read = sent if chance.random() < 0.7 else chance.randint(0, sent)
    whole = receipt.finish_reason in _WHOLE and 0 < read == generated
    site.happened.may_be(name, ended(prompt, cached, read, generated, 200 if whole else 503))
    if read and (stream := meter.begin_stream()):
        stream.note(read)
    if dies:
        raise Killed
    process.receipts.arrived(ENGINE, receipt)
    status = chance.choice(_STATUSES)
    site.happened.may_be(name, ended(prompt, cached, read, generated, status))
    ending = Ending(read, generated, "stop", status, True, counted_by=CountedBy.ENGINE)
    await meter.close(ending, receipt)
    if site.faults.strike("gateway dies after the end", 0.04):
        raise Killed


async def _of_units(process: Process, opened: OpenedRequest) -> None:
    """Audio, speech and images, which another server makes: units are known where it answered."""
    site, chance = process.site, process.site.faults.chance
    meter = Meter(process.services, opened)
    try:
        await meter.write_opened()
    except Unavailable:
        return
    site.happened.opened(opened)
    if site.faults.strike("gateway dies before the units are known", 0.06):
        raise Killed
    status = chance.choice(_STATUSES)
    units = chance.randint(1, _MOST_UNITS[opened.kind]) if status in (200, 499) else 0
    fee = int(status in (200, 499))
    site.happened.may_be(opened.request_id, Outcome(0, 0, 0, 0, status, fee, units))
    await meter.close(Ending(0, 0, "stop", status, prompt_done=False, units=units), None)


async def _without_engine(process: Process, opened: OpenedRequest) -> None:
    """Calls of the moderation endpoint, cached answers, and seconds of dedicated capacity."""
    site, chance = process.site, process.site.faults.chance
    seconds = chance.randint(1, 3600) if opened.kind == UsageKind.GPU_SECONDS else 1
    event = _event(opened, seconds, site.clock)

    def _durable() -> None:
        site.happened.opened(opened)
        site.happened.may_be(opened.request_id, Outcome(0, 0, 0, 0, 200, seconds))

    await process.spool.close(event, _durable)


def _opened(site: Site, tenant_id: str, adapter: str | None, version: str) -> OpenedRequest:
    chance = site.faults.chance
    # One random() whatever the kinds: another kind leaves what follows in a seed as it is.
    weights = [8 if kind is UsageKind.GENERATION else 1 for kind in UsageKind]
    return OpenedRequest(
        request_id=new_id(REQUEST),
        tenant_id=tenant_id,
        project_id=f"proj{chance.randint(0, 1)}",
        key_id="key",
        kind=chance.choices([*UsageKind], weights)[0],
        route="/v1/chat/completions",
        model="demo",
        adapter=adapter,
        adapter_digest=None,
        price_version=version,
        opened_at=site.clock.now(),
        prompt_tokens=chance.randint(1, 3000),
        engine_id=ENGINE,
    )


def _event(opened: OpenedRequest, quantity: int, clock: FakeClock) -> UsageEvent:
    return UsageEvent(
        request_id=opened.request_id,
        tenant_id=opened.tenant_id,
        project_id=opened.project_id,
        key_id=opened.key_id,
        kind=opened.kind,
        route=opened.route,
        model=opened.model,
        adapter=opened.adapter,
        adapter_digest=None,
        price_version=opened.price_version,
        occurred_at=opened.opened_at,
        finished_at=clock.now(),
        input_tokens=0,
        cached_tokens=0,
        output_tokens=0,
        waived_tokens=0,
        finish_reason="stop",
        status=200,
        quantity=quantity,
    )


async def _turns() -> None:
    """Enough turns of the loop for what is queued to be committed."""
    for _ in range(4):
        await asyncio.sleep(0)


async def _settled(_: UsageEvent) -> None:
    return None


def _wal_of(file: SpoolFile) -> Path:
    return Path(f"{file.path}-wal")


def _logs_of(file: SpoolFile) -> list[Path]:
    return [path for _, path in logs_of(file.path)]
