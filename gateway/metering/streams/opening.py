"""Opens the stream that TOLLHOUSE_STREAM_URL names, and makes the usage sink of the settings."""

from urllib.parse import parse_qsl, urlsplit

from core.clock import Clock
from core.database import Database
from core.errors import SettingError
from core.extras import imports_of
from gateway.metering.spool_records import OutboxBatch
from gateway.metering.streams.base import UsageStream
from gateway.metering.streams.messages import messages_of
from gateway.metering.usage_sink import SqlUsageSink, UsageSink


class StreamSink:
    """Records that are larger than a message may be go to the database directly, as parked ones do."""

    def __init__(self, stream: UsageStream, database_sink: UsageSink) -> None:
        self._stream = stream
        self._database_sink = database_sink

    def record(self, batch: OutboxBatch) -> None:
        messages, large = messages_of(batch, self._stream.most_bytes)
        if messages:
            self._stream.publish(messages)
        if large.usage or large.receipts or large.moderation or large.lines:
            self._database_sink.record(large)

    def park(self, batch: OutboxBatch, reason: str) -> None:
        self._database_sink.park(batch, reason)


STREAM, TOPIC = "tollhouse_usage", "tollhouse.usage"


def open_stream(url: str, *, timeout_s: float | None = None) -> UsageStream:
    """nats://host:4222[,host:4222]?stream=&replicas=&credentials= or
    kafka://host:9092[,host:9092]?topic=, where further parameters are librdkafka's settings.

    Connects at the first use. SettingError names the extra that the scheme needs.
    """
    parts = urlsplit(url)
    given = dict(parse_qsl(parts.query, keep_blank_values=True))
    if parts.scheme == "nats":
        with imports_of("nats", "TOLLHOUSE_STREAM_URL=nats://…", SettingError):
            from gateway.metering.streams.nats import NatsStream

        stream = NatsStream(
            [f"nats://{each}" for each in _servers(parts.netloc, url)],
            given.pop("stream", STREAM),
            replicas=_replicas(given.pop("replicas", "1")),
            credentials=given.pop("credentials", ""),
            timeout_s=timeout_s or 5.0,
        )
        if given:
            raise _wrong(f"{next(iter(given))!r} is not a parameter of nats://")
        return stream
    if parts.scheme == "kafka":
        with imports_of("kafka", "TOLLHOUSE_STREAM_URL=kafka://…", SettingError):
            from gateway.metering.streams.kafka import KafkaStream

        topic = given.pop("topic", TOPIC)
        servers = ",".join(_servers(parts.netloc, url))
        return KafkaStream(servers, topic, options=given, timeout_s=timeout_s or 10.0)
    raise _wrong(f"{parts.scheme!r} is not nats or kafka")


def make_sink(database: Database, clock: Clock, stream: UsageStream | None) -> UsageSink:
    sink = SqlUsageSink(database, clock)
    return StreamSink(stream, sink) if stream is not None else sink


def _servers(netloc: str, url: str) -> list[str]:
    """The servers in order; user and password before the first are for all of them."""
    login, at, hosts = netloc.rpartition("@")
    if at and url.startswith("kafka"):
        raise _wrong("give sasl.username and sasl.password as parameters")
    names = [each.strip() for each in hosts.split(",") if each.strip()]
    if not names:
        raise _wrong("it names no server")
    return [f"{login}{at}{each}" for each in names]


def _replicas(given: str) -> int:
    if not (given.isascii() and given.isdecimal()) or not 1 <= int(given) <= 5:
        raise _wrong(f"replicas is {given!r}, not a number from 1 to 5")
    return int(given)


def _wrong(why: str) -> SettingError:
    return SettingError(
        f"TOLLHOUSE_STREAM_URL is wrong: {why}.",
        next_step="Write nats://host:4222 or kafka://host:9092.",
    )
