"""What the clients of a stream ask for and how they take failures, without a server."""

import base64
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from billing.usage import usage
from core.clock import FakeClock
from core.database import Database
from core.events import EngineCount
from gateway.metering.streams.base import Delivery, Message, StreamDown
from gateway.metering.streams.messages import (
    MESSAGE_BYTES,
    batch_of,
    encoded,
    messages_of,
    read,
    read_record,
)
from gateway.metering.streams.opening import open_stream
from gateway.metering.streams.storing import StreamStore
from tests.gateway.metering.spool_rows import NOW
from tests.gateway.metering.test_refusals import event

confluent = pytest.importorskip("confluent_kafka")
api = pytest.importorskip("nats.js.api")
kafka = pytest.importorskip("gateway.metering.streams.kafka")
nats = pytest.importorskip("gateway.metering.streams.nats")
MESSAGES = [Message("1", "org_a", b"one"), Message("2", "org_b", b"two")]


class Producer:
    """Confirms the first `confirmed` messages; `error` is what it says of all others."""

    confirmed, error = 2, None
    made: list[dict[str, Any]]

    def __init__(self, config: dict[str, Any]) -> None:
        self.made.append(config)
        self._waiting: list[Callable[[Any, Any], None]] = []

    def produce(self, topic: str, body: bytes, *, key: str, on_delivery: Any) -> None:
        self._waiting.append(on_delivery)

    def poll(self, _timeout_s: float) -> None:
        return

    def flush(self, _timeout_s: float) -> None:
        for number, told in enumerate(self._waiting):
            if number < self.confirmed or self.error is not None:
                told(None if number < self.confirmed else self.error, None)
        self._waiting.clear()


@pytest.fixture
def producer(monkeypatch: pytest.MonkeyPatch) -> type[Producer]:
    made = type("Made", (Producer,), {"made": []})
    monkeypatch.setattr(kafka, "Producer", made)
    return made


@pytest.mark.parametrize("confirmed", [0, 1])
def test_a_batch_that_kafka_did_not_confirm_whole_is_not_sent(
    producer: type[Producer], confirmed: int
) -> None:
    """The spool keeps it, and it is sent again by another producer."""
    producer.confirmed = confirmed
    stream = kafka.KafkaStream("a:1", "usage")
    with pytest.raises(StreamDown, match=f"{2 - confirmed} messages were not confirmed"):
        stream.publish(MESSAGES)
    producer.confirmed = 2
    stream.publish(MESSAGES)
    assert len(producer.made) == 2
    stream.publish(MESSAGES)
    assert len(producer.made) == 2, "one that works is kept"


def test_a_message_that_kafka_refuses_is_told(producer: type[Producer]) -> None:
    producer.confirmed, producer.error = (
        1,
        confluent.KafkaError(confluent.KafkaError.MSG_SIZE_TOO_LARGE),
    )
    with pytest.raises(StreamDown, match="does not answer"):
        kafka.KafkaStream("a:1", "usage").publish(MESSAGES)


def test_the_address_and_its_parameters_reach_the_client_of_kafka(
    producer: type[Producer],
) -> None:
    url = "kafka://a:1,b:2?topic=other&security.protocol=ssl"
    for timeout_s, milliseconds in ((None, 10_000), (3.0, 3_000)):
        open_stream(url, timeout_s=timeout_s).publish(MESSAGES)
        config = producer.made[-1]
        assert config["bootstrap.servers"] == "a:1,b:2" and config["security.protocol"] == "ssl"
        assert config["delivery.timeout.ms"] == config["socket.timeout.ms"] == milliseconds
        assert config["enable.idempotence"] is True


def test_the_address_and_its_parameters_reach_the_client_of_nats(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[tuple[Any, dict[str, Any]]] = []
    monkeypatch.setattr(nats, "NatsStream", lambda *given, **more: made.append((given, more)))
    open_stream("nats://u:p@a:1,b:2?stream=own&replicas=3&credentials=/c")
    open_stream("nats://a", timeout_s=3.0)
    assert made == [
        (
            (["nats://u:p@a:1", "nats://u:p@b:2"], "own"),
            {"replicas": 3, "credentials": "/c", "timeout_s": 5.0},
        ),
        ((["nats://a"], "tollhouse_usage"), {"replicas": 1, "credentials": "", "timeout_s": 3.0}),
    ]


class Member:
    """A consumer whose partitions another one has taken."""

    def commit(self, **_given: Any) -> None:
        raise confluent.KafkaException(confluent.KafkaError(confluent.KafkaError._STATE))

    def seek(self, _place: Any) -> None:
        raise confluent.KafkaException(confluent.KafkaError(confluent.KafkaError._STATE))


def test_a_consumer_that_lost_its_partition_is_told() -> None:
    stream = kafka.KafkaStream("a:1", "usage")
    stream._member = Member()
    taken = [Delivery("", b"", (0, 7))]
    with pytest.raises(StreamDown):
        stream.acknowledge(taken)
    with pytest.raises(StreamDown):
        stream.give_back(taken)


def test_what_waits_is_read_only_where_something_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The age is that of the first message that is not stored; an empty partition is not awaited."""
    asked: list[list[tuple[int, int]]] = []
    since = datetime(2026, 1, 1, tzinfo=UTC)

    def _oldest(places: list[Any]) -> datetime:
        asked.append([(each.partition, each.offset) for each in places])
        return since

    stream = kafka.KafkaStream("a:1", "usage")
    positions = {0: (5, 5), 1: (3, 7)}
    monkeypatch.setattr(stream, "_positions", lambda: positions)
    monkeypatch.setattr(stream, "_oldest", _oldest)
    lag = stream.lag()
    assert (lag.messages, lag.oldest, asked) == (4, since, [[(1, 3)]])
    del positions[1]
    lag = stream.lag()
    assert (lag.messages, lag.oldest, len(asked)) == (0, None, 1)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, ""),
        ({"retention": api.RetentionPolicy.LIMITS}, "has the retention"),
        ({"discard": api.DiscardPolicy.OLD}, ""),
        ({"discard": api.DiscardPolicy.OLD, "max_msgs": -1, "max_bytes": -1}, ""),
        ({"discard": api.DiscardPolicy.OLD, "max_msgs": 1}, "discards old messages"),
        ({"discard": api.DiscardPolicy.OLD, "max_bytes": 1}, "discards old messages"),
        ({"max_msgs": 1}, ""),
        ({"max_age": 60.0}, "deletes messages after 60 s"),
    ],
)
def test_which_streams_would_lose_messages(changes: dict[str, Any], problem: str) -> None:
    config = api.StreamConfig(
        name="s",
        retention=api.RetentionPolicy.WORK_QUEUE,
        discard=api.DiscardPolicy.NEW,
    ).evolve(**changes)
    found = nats._would_lose(config)
    assert found.startswith(problem) and bool(found) is bool(problem)


@pytest.mark.parametrize("kind", ["usage", ""])
def test_a_parked_record_that_still_cannot_be_read_is_an_error(kind: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_record(kind, b"\xc1")


@pytest.mark.parametrize(
    "greeting",
    [b"", b"nonsense\r\n", b'INFO {"max_payload": 1024}\r\n'],
    ids=["none", "wrong", "info"],
)
def test_a_connection_to_nats_that_fails_is_closed_and_made_anew_by_the_next_call(
    greeting: bytes,
) -> None:
    """A client that reconnects by itself would send again what the spool sends again too."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        stream = nats.NatsStream(
            [f"nats://127.0.0.1:{server.getsockname()[1]}"], "own", timeout_s=1.0
        )
        for _ in range(2):
            with ThreadPoolExecutor(1) as caller:
                called = caller.submit(stream.lag)
                connection, _ = server.accept()
                connection.sendall(greeting)
                assert isinstance(called.exception(60), StreamDown)
            with connection:
                connection.settimeout(10)
                while connection.recv(4096):
                    pass
        server.settimeout(0.2)
        with pytest.raises(TimeoutError):
            server.accept()
        stream.close()


def test_a_message_ends_before_the_record_that_would_make_it_too_large() -> None:
    events = [event(f"req_{n}", "price", routed="x" * 40_000) for n in range(10)]
    messages, large = messages_of(batch_of(("usage", each) for each in events), 2**20)
    assert not large.usage and len(messages) == 4
    assert all(len(each.body) <= MESSAGE_BYTES + 256 for each in messages)
    found = read(each.body for each in messages).batch()
    assert [each.request_id for each in found.usage] == [each.request_id for each in events]


def test_what_the_database_refuses_is_parked_by_its_kind(sqlite_database: Database) -> None:
    """A usage event as such, so that it can be mended; any other record as it came."""
    refused = event("req_bad", "price"), EngineCount("req_x", "engine", 1, 0, 1, NOW)
    parked: list[str] = []

    def _record(batch: Any) -> None:
        if any(each in refused for each in [*batch.usage, *batch.receipts]):
            raise ValueError("this makes no sense")

    sink: Any = SimpleNamespace(
        record=_record, park=lambda batch, _reason: parked.append(batch.usage[0].request_id)
    )
    whole = batch_of([("usage", refused[0]), ("receipts", refused[1])])
    bodies = [each.body for each in messages_of(whole, 2**20)[0]]
    answered: list[str] = []
    stream: Any = SimpleNamespace(
        fetch=lambda _most, _wait_s: [Delivery("", body, None) for body in bodies],
        acknowledge=lambda _found: answered.append("stored"),
        give_back=lambda _found: answered.append("again"),
    )
    store = StreamStore(stream, sink, sqlite_database, FakeClock(NOW))
    assert store.store_next(1.0) == len(bodies) and answered == ["stored"]
    assert parked == ["req_bad"]
    with sqlite_database.read() as session:
        kept = [row.payload for row in usage.parked(session)]
    assert len(kept) == 1 and kept[0] is not None
    assert base64.b64decode(kept[0]["base64"]) == encoded(refused[1])
