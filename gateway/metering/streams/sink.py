"""The usage sink that publishes to a stream, which confirms a record before the spool deletes it."""

from gateway.metering.spool_records import OutboxBatch
from gateway.metering.streams.base import UsageStream
from gateway.metering.streams.messages import messages_of
from gateway.metering.usage_sink import UsageSink


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
