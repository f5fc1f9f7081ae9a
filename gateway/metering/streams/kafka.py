"""Kafka as the stream: one topic, keyed by tenant, an idempotent producer and one consumer group.

The group's offset moves only after the database's commit. The topic's retention must be longer than
the longest outage of the database: Kafka deletes by time, whether a message was stored or not.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

from confluent_kafka import (
    Consumer,
    KafkaError,
    KafkaException,
    Producer,
    TopicPartition,
)

from core.waiting import within
from gateway.metering.streams.base import Delivery, Lag, Mark, Message, StreamDown

GROUP = "tollhouse-store"
_HEADERS = 1024  # bytes of a message besides its body
_MOST_BYTES = 1_000_000  # the default of brokers and clients
_KEPT_KB = 65_536  # of messages that a consumer reads ahead


class KafkaStream:
    """A producer, a consumer that belongs to the group, and one that only looks at offsets, each made
    at its first use. Safe to use from several threads."""

    def __init__(
        self,
        servers: str,
        topic: str,
        *,
        options: Mapping[str, str] | None = None,
        timeout_s: float = 10.0,
    ) -> None:
        self.most_bytes = _MOST_BYTES - _HEADERS
        self._topic = topic
        self._timeout_s = timeout_s
        # A broker that is silent for so long is connected to again; a fetch that finds nothing is
        # answered within half a second.
        silent_ms = int(timeout_s * 1000)
        own = {
            "socket.timeout.ms": silent_ms,
            "socket.connection.setup.timeout.ms": max(1000, silent_ms),
        }
        self._common = {"bootstrap.servers": servers, **own, **(options or {})}
        self._producer: Producer | None = None
        self._member: Consumer | None = None
        self._watcher: Consumer | None = None
        self._publishing, self._watching = threading.Lock(), threading.Lock()

    def publish(self, messages: Sequence[Message]) -> None:
        with self._publishing:
            failures = self._publish(messages)
            if failures:
                # A message that is still on its way would arrive before those that are sent again,
                # which is harmless; what has failed for good stays failed in this producer.
                self._producer = None
                raise self._down(failures[0])

    def _publish(self, messages: Sequence[Message]) -> list[str]:
        producer = self._producer = self._producer or Producer(
            {
                **self._common,
                "enable.idempotence": True,
                "compression.type": "lz4",
                "linger.ms": 5,
                "delivery.timeout.ms": int(self._timeout_s * 1000),
            }
        )
        kept, failures = 0, list[str]()

        def _delivered(error: KafkaError | None, _message: object) -> None:
            nonlocal kept
            kept += error is None
            if error is not None:
                failures.append(error.str())

        for each in messages:
            while True:
                try:
                    producer.produce(
                        self._topic, each.body, key=each.tenant_id, on_delivery=_delivered
                    )
                    break
                except BufferError:
                    producer.poll(0.1)
                except KafkaException as error:
                    return [error.args[0].str()]
        producer.flush(self._timeout_s + 1.0)
        if kept < len(messages) and not failures:
            failures.append(f"{len(messages) - kept} messages were not confirmed")
        return failures

    def fetch(self, most: int, wait_s: float) -> list[Delivery]:
        if self._member is None:
            self._member = Consumer(
                {
                    **self._common,
                    "group.id": GROUP,
                    "enable.auto.commit": False,
                    "auto.offset.reset": "earliest",
                    "queued.max.messages.kbytes": _KEPT_KB,
                }
            )
            self._member.subscribe([self._topic])
        found = []
        for each in self._consume(self._member, most, wait_s):
            name = f"{each.topic()} {each.partition()} {each.offset()}"
            handle = (each.partition(), each.offset())
            found.append(Delivery(name, each.value() or b"", handle))
        return found

    def acknowledge(self, deliveries: Sequence[Delivery]) -> None:
        ends: dict[int, int] = {}
        for each in deliveries:
            partition, offset = each.handle
            ends[partition] = max(ends.get(partition, 0), offset + 1)
        self._move(ends, commit=True)

    def give_back(self, deliveries: Sequence[Delivery]) -> None:
        starts: dict[int, int] = {}
        for each in deliveries:
            partition, offset = each.handle
            starts[partition] = min(starts.get(partition, offset), offset)
        self._move(starts, commit=False)

    def lag(self) -> Lag:
        with self._watching:
            waiting = 0
            first: list[TopicPartition] = []
            for partition, (stored, end) in self._positions().items():
                if end > stored:
                    waiting += end - stored
                    first.append(TopicPartition(self._topic, partition, stored))
            return Lag(waiting, self._oldest(first) if first else None)

    def mark(self) -> Mark:
        with self._watching:
            return {partition: end for partition, (_, end) in self._positions().items()}

    def is_stored(self, mark: Mark) -> bool:
        with self._watching:
            found = self._positions()
        return all(
            partition in found and found[partition][0] >= end for partition, end in mark.items()
        )

    def close(self) -> None:
        for consumer in (self._member, self._watcher):
            if consumer is not None:
                consumer.close()
        if self._producer is not None:
            self._producer.flush(self._timeout_s)
        self._member = self._watcher = self._producer = None

    def _consume(self, consumer: Consumer, most: int, wait_s: float) -> list[Any]:
        """`consume` waits until it has `most` messages, so the first is awaited alone."""
        try:
            found = consumer.consume(1, wait_s)
            if found and most > 1:
                found += consumer.consume(most - 1, 0.05)
        except KafkaException as error:
            raise self._down(error.args[0].str()) from None
        good = []
        for each in found:
            failure = each.error()
            if failure is None:
                good.append(each)
            elif failure.code() not in (
                KafkaError._PARTITION_EOF,
                KafkaError.UNKNOWN_TOPIC_OR_PART,  # before the first message
            ):
                if good:
                    self.give_back([Delivery("", b"", (m.partition(), m.offset())) for m in good])
                raise self._down(failure.str())
        return good

    def _move(self, offsets: dict[int, int], *, commit: bool) -> None:
        if self._member is None:
            return
        places = [TopicPartition(self._topic, each, at) for each, at in offsets.items()]
        try:
            if commit:
                # The client waits for the group's coordinator for as long as none answers.
                committing = partial(self._member.commit, offsets=places, asynchronous=False)
                within(committing, 2 * self._timeout_s, "the commit of offsets")
                return
            for place in places:
                self._member.seek(place)
        except TimeoutError as error:
            raise self._down(str(error)) from None
        except KafkaException as error:
            # The partition belongs to another member now, which gets its messages again.
            raise self._down(error.args[0].str()) from None

    def _positions(self) -> dict[int, tuple[int, int]]:
        """The group's offset and the end of each partition. Call it with the lock held."""
        if self._watcher is None:
            self._watcher = Consumer(
                {**self._common, "group.id": GROUP, "enable.auto.commit": False}
            )
        watcher, wait = self._watcher, self._timeout_s
        try:
            topic = watcher.list_topics(self._topic, timeout=wait).topics[self._topic]
            places = [TopicPartition(self._topic, each) for each in topic.partitions]
            found = {}
            for place in watcher.committed(places, timeout=wait) if places else ():
                low, high = watcher.get_watermark_offsets(place, timeout=wait)
                found[place.partition] = (place.offset if place.offset >= 0 else low, high)
        except KafkaException as error:
            raise self._down(error.args[0].str()) from None
        return found

    def _oldest(self, places: list[TopicPartition]) -> datetime | None:
        """When the first message at these offsets was published; None if none can be read."""
        assert self._watcher is not None
        self._watcher.assign(places)
        seen: dict[int, float] = {}
        deadline = time.monotonic() + self._timeout_s
        try:
            while len(seen) < len(places) and time.monotonic() < deadline:
                for each in self._consume(self._watcher, 1, 0.2):
                    seen.setdefault(each.partition(), each.timestamp()[1] / 1000)
        finally:
            self._watcher.unassign()
        return datetime.fromtimestamp(min(seen.values()), UTC) if seen else None

    def _down(self, why: str) -> StreamDown:
        return StreamDown(
            f"The Kafka topic {self._topic} does not answer: {why}.",
            next_step="Check TOLLHOUSE_STREAM_URL and the brokers.",
            retry_after_s=5.0,
        )
