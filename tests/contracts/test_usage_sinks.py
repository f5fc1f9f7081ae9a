"""What every usage sink does with the records of the spool: the database, NATS JetStream, Kafka.

What a sink has taken is in the database once its stream is empty, once, however often, in which order
and however broken it was sent.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
from msgspec.structs import replace
from sqlalchemy import func, select
from sqlalchemy.exc import OperationalError

from billing.usage import usage
from billing.usage.tables import EngineReceipt, UsageEventRow
from core.batches import jobs
from core.batches.models import Batch
from core.clock import FakeClock, SystemClock
from core.database import Database
from core.events import EngineCount, ModerationEvent, UsageEvent
from gateway.metering.batch_shippers import InlineShipper
from gateway.metering.spool import SpoolFile
from gateway.metering.spool_records import OutboxBatch
from gateway.metering.spool_statements import insert_receipt, move_to_outbox
from gateway.metering.streams import messages
from gateway.metering.streams.base import Message, StreamDown, UsageStream, wait_until_stored
from gateway.metering.streams.messages import batch_of, messages_of
from gateway.metering.streams.opening import make_sink
from gateway.metering.streams.storing import StreamStore, release_parked
from gateway.metering.usage_sink import SqlUsageSink, UsageSink
from moderation.models import Decision
from tests.conftest import need_nats
from tests.contracts.usage_streams import kafka_url, nats_url, opened, store_waiting
from tests.core.batches.test_jobs import batch as started_batch
from tests.gateway.metering.spool_rows import NOW
from tests.gateway.metering.test_refusals import event, parked, price_of, stored


@dataclass
class Bench:
    database: Database
    sink: UsageSink
    stream: UsageStream | None
    price: str

    def batch(self, *names: str, tenants: int = 1) -> OutboxBatch:
        events = [
            event(name, self.price, tenant_id=f"org_{number % tenants}")
            for number, name in enumerate(names)
        ]
        return batch_of(("usage", each) for each in events)

    def store(self) -> int:
        """Store what lies in the stream; the number of messages."""
        if self.stream is None or not self.stream.lag().messages:
            return 0
        # A new member of a Kafka group waits for its partitions.
        return self.consumer().store_next(20.0) + store_waiting(self.consumer())

    def consumer(self, sink: UsageSink | None = None) -> StreamStore:
        assert self.stream is not None
        clock = SystemClock()
        return StreamStore(
            self.stream, sink or SqlUsageSink(self.database, clock), self.database, clock
        )


@pytest.fixture(scope="module")
def kafka_stream() -> Iterator[UsageStream]:
    """One for all tests: a group waits seconds for its first members."""
    pytest.importorskip("confluent_kafka")
    with kafka_url() as url, opened(url) as stream:
        yield stream


@pytest.fixture
def nats_stream() -> Iterator[UsageStream]:
    need_nats()
    with nats_url() as url, opened(url) as stream:
        yield stream


@pytest.fixture(params=["nats_stream", "kafka_stream"])
def stream(request: pytest.FixtureRequest) -> UsageStream:
    found: UsageStream = request.getfixturevalue(request.param)
    assert found.lag().messages == 0
    return found


def bench_of(database: Database, stream: UsageStream | None) -> Bench:
    sink = make_sink(database, SystemClock(), stream)
    return Bench(database, sink, stream, price_of(database))


@pytest.fixture(params=["database", "nats_stream", "kafka_stream"])
def any_bench(request: pytest.FixtureRequest, sqlite_database: Database) -> Bench:
    stream = None if request.param == "database" else request.getfixturevalue(request.param)
    return bench_of(sqlite_database, stream)


@pytest.fixture
def bench(sqlite_database: Database, stream: UsageStream) -> Bench:
    return bench_of(sqlite_database, stream)


def count(database: Database, table: type) -> int:
    with database.read() as session:
        return session.scalar(select(func.count()).select_from(table)) or 0


def decision(name: str) -> ModerationEvent:
    return ModerationEvent(
        name, "org_0", "proj_a", "key_a", NOW, "input", "block", "v1", "0" * 64, ("hate",), {}
    )


def test_every_kind_of_record_arrives_once(any_bench: Bench) -> None:
    names = [f"req_{number}" for number in range(700)]
    batch = any_bench.batch(*names, tenants=3)
    batch.receipts.append(EngineCount("req_1", "engine", 10, 4, 6, NOW))
    batch.moderation.append(decision("req_2"))
    for _ in range(3):
        any_bench.sink.record(batch)
        any_bench.store()
    any_bench.sink.record(batch)
    any_bench.sink.record(any_bench.batch(*names[:10], "req_new"))
    any_bench.store()
    assert stored(any_bench.database) == sorted([*names, "req_new"])
    assert count(any_bench.database, EngineReceipt) == 1
    assert count(any_bench.database, Decision) == 1
    assert not parked(any_bench.database)
    with any_bench.database.read() as session:
        row = session.get(UsageEventRow, "req_4")
        assert row is not None and row.tenant_id == "org_1"
        sums = session.execute(
            select(func.sum(UsageEventRow.input_tokens), func.sum(UsageEventRow.output_tokens))
        ).one()
    assert tuple(sums) == (701 * 10, 701 * 5)


def test_an_event_that_can_never_be_stored_is_parked_and_the_others_are_stored(
    any_bench: Bench,
) -> None:
    batch = any_bench.batch("req_1", "req_2", "req_3")
    batch.usage[1] = replace(batch.usage[1], price_version="price_of_nobody")
    any_bench.sink.record(batch)
    any_bench.store()
    assert stored(any_bench.database) == ["req_1", "req_3"]
    assert [(row.request_id, row.code) for row in parked(any_bench.database)] == [
        ("req_2", "unknown_price")
    ]


def test_parked_by_the_spool_is_parked_in_the_database(any_bench: Bench) -> None:
    any_bench.sink.park(any_bench.batch("req_1"), "refused")
    assert [row.request_id for row in parked(any_bench.database)] == ["req_1"]


def test_the_spool_gives_up_a_record_only_when_the_sink_has_it(
    any_bench: Bench, tmp_path: Path
) -> None:
    file = SpoolFile(tmp_path / "spool" / "1.db")
    for number in range(5):
        file.commit(move_to_outbox(event(f"req_{number}", any_bench.price)))
    file.commit([insert_receipt(EngineCount("req_0", "engine", 10, 4, 6, NOW))])
    shipped = InlineShipper(file.connection, any_bench.sink).ship(0, 100)
    file.close()
    any_bench.store()
    assert (shipped.rows, shipped.refused) == (6, "")
    assert len(stored(any_bench.database)) == 5 and count(any_bench.database, EngineReceipt) == 1


def test_a_stream_says_what_waits_and_since_when(bench: Bench, stream: UsageStream) -> None:
    assert stream.lag().messages == 0 and stream.lag().oldest is None
    wait_until_stored(stream, 1.0)
    bench.sink.record(bench.batch("req_1"))
    lag = stream.lag()
    assert lag.messages == 1 and lag.oldest is not None
    assert abs((SystemClock().now() - lag.oldest).total_seconds()) < 60
    with pytest.raises(StreamDown, match="not in the database yet"):
        wait_until_stored(stream, 0.1)
    bench.store()
    wait_until_stored(stream, 1.0)
    assert stream.lag() == type(lag)(0, None)


def test_messages_in_any_order_and_doubled(bench: Bench, stream: UsageStream) -> None:
    """The seeded order stands for several gateways whose messages pass each other."""
    names = [f"req_{number}" for number in range(40)]
    made = []
    for first in range(0, 40, 5):
        made += messages_of(bench.batch(*names[first : first + 5], tenants=2), 10**6)[0]
    mixed = made * 2
    Random(7).shuffle(mixed)
    for each in mixed:
        stream.publish([each])
    bench.store()
    assert stored(bench.database) == sorted(names)


class Refusing:
    """A database that is down, or that dies at a given moment."""

    def __init__(self, sink: UsageSink, then: Callable[[], None]) -> None:
        self._sink, self._then = sink, then

    def record(self, batch: OutboxBatch) -> None:
        self._sink.record(batch)
        self._then()

    def park(self, batch: OutboxBatch, reason: str) -> None:
        self._sink.park(batch, reason)


def test_a_consumer_that_fails_between_commit_and_acknowledgement_loses_nothing(
    bench: Bench,
    stream: UsageStream,
) -> None:
    bench.sink.record(bench.batch("req_1", "req_2"))

    def _die() -> None:
        raise OperationalError("commit", {}, Exception("the connection is gone"))

    dying = bench.consumer(Refusing(SqlUsageSink(bench.database, SystemClock()), _die))
    with pytest.raises(OperationalError):
        dying.store_next(20.0)
    assert stored(bench.database) == ["req_1", "req_2"]  # it was committed
    assert stream.lag().messages == 1  # and is not acknowledged
    assert bench.consumer().store_next(20.0) == 1  # it comes again
    assert stored(bench.database) == ["req_1", "req_2"]
    assert stream.lag().messages == 0


def test_a_message_that_cannot_be_read_is_parked_and_the_others_are_stored(
    bench: Bench, stream: UsageStream
) -> None:
    [good] = messages_of(bench.batch("req_1"), 10**6)[0]
    [newer] = messages_of(bench.batch("req_2"), 10**6)[0]
    broken = newer.body.replace(b"gateway", b"gatewax")  # a value of a newer version
    assert broken != newer.body
    stream.publish([Message("1", "org_0", b"\xc1 no message"), good, Message("2", "", broken)])
    bench.store()
    assert stream.lag().messages == 0
    assert stored(bench.database) == ["req_1"]
    waiting = parked(bench.database)
    assert [row.code for row in waiting] == ["invalid", "invalid"]
    assert any("gatewax" in row.reason for row in waiting)
    with bench.database.transaction() as session:
        assert usage.release(session, SystemClock()) == 0


def test_a_parked_record_is_released_once_it_can_be_stored(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.sink.record(bench.batch("req_1", "req_2"))
    clock = SystemClock()
    decode = messages._DECODERS

    class OldVersion:
        def decode(self, body: bytes) -> object:
            if b"req_2" in body:
                raise ValueError("a field of a newer version")
            return decode["usage"].decode(body)

    with monkeypatch.context() as patch:
        patch.setattr(messages, "_DECODERS", {**decode, "usage": OldVersion()})
        bench.store()
    sink = SqlUsageSink(bench.database, clock)
    assert stored(bench.database) == ["req_1"]
    assert [row.reason for row in parked(bench.database)] == ["a field of a newer version"]
    assert release_parked(bench.database, sink, clock) == 1
    assert stored(bench.database) == ["req_1", "req_2"] and not parked(bench.database)
    assert release_parked(bench.database, sink, clock) == 0


def test_a_record_larger_than_a_message_goes_to_the_database(
    bench: Bench, stream: UsageStream
) -> None:
    batch = bench.batch("req_1", "req_2")
    batch.usage[0] = replace(batch.usage[0], routed="x" * (stream.most_bytes + 1))
    bench.sink.record(batch)
    assert stored(bench.database) == ["req_1"]
    bench.store()
    assert stored(bench.database) == ["req_1", "req_2"]


def test_messages_hold_one_tenant_and_the_same_content_has_the_same_id() -> None:
    events: list[UsageEvent] = [
        event(f"req_{number}", "price_1", tenant_id=f"org_{number % 2}") for number in range(6)
    ]
    batch = batch_of(("usage", each) for each in events)
    first, large = messages_of(batch, 10**6)
    again, _ = messages_of(batch, 10**6)
    assert [each.id for each in first] == [each.id for each in again]
    assert [each.tenant_id for each in first] == ["org_0", "org_1"] and not large.usage
    split, _ = messages_of(batch, 1200)
    assert len(split) == 6 and max(len(each.body) for each in split) <= 1200


def test_an_answered_line_of_a_batch_is_stored_once(any_bench: Bench) -> None:
    """The process that ran it may have died before it wrote the answer itself."""
    batch_id = started_batch(any_bench.database, FakeClock(NOW))
    answer = jobs.LineResult(1, True, '{"a": 1}', 5, 2, 3)
    for _ in range(2):
        any_bench.sink.record(batch_of([("lines", (batch_id, answer))]))
        any_bench.store()
    with any_bench.database.read() as session:
        made = session.get_one(Batch, batch_id)
        assert (made.completed, made.input_tokens, made.output_tokens) == (1, 5, 3)
        assert [line.number for line in jobs.waiting_lines(session, batch_id, 9)] == [0, 2]
