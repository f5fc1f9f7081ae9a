"""The port of durable streams: messages that are kept until they are stored in the database."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from core.clock import Clock
from core.errors import DependencyDown

# What each of several partitions holds up to now, by partition.
Mark = dict[int, int]


@dataclass(frozen=True, slots=True)
class Message:
    id: str  # the same for the same content: a stream that knows it keeps one copy
    tenant_id: str  # the last part of a subject, or the key; "" if the records name no tenant
    body: bytes


@dataclass(frozen=True, slots=True)
class Delivery:
    """A message as a consumer gets it. `name` says where it lies, for an operator."""

    name: str
    body: bytes
    handle: Any  # what the stream acknowledges it by


@dataclass(frozen=True, slots=True)
class Lag:
    """Messages that are not in the database yet, and when the oldest of them was published."""

    messages: int
    oldest: datetime | None


class StreamDown(DependencyDown):
    """The stream does not answer, or does not confirm that it keeps a message."""

    code = "stream_unavailable"


class UsageStream(Protocol):
    """Raises StreamDown for whatever passes, SettingError for a stream that would lose messages.

    Messages are delivered at least once and in any order; several consumers share them.
    """

    most_bytes: int  # the largest body that the stream takes

    def publish(self, messages: Sequence[Message]) -> None:
        """Returns when the stream has confirmed that it keeps every message."""

    def fetch(self, most: int, wait_s: float) -> list[Delivery]:
        """Up to `most` messages; waits `wait_s` seconds for the first one."""

    def acknowledge(self, deliveries: Sequence[Delivery]) -> None:
        """The messages are stored, and the stream need not keep them."""

    def give_back(self, deliveries: Sequence[Delivery]) -> None:
        """The messages are not stored: deliver them again."""

    def lag(self) -> Lag: ...

    def mark(self) -> Mark:
        """The end of what has been published."""

    def is_stored(self, mark: Mark) -> bool:
        """Whether everything before the mark has been acknowledged."""

    def close(self) -> None: ...


def age_s(oldest: datetime | None, clock: Clock) -> float:
    return max(0.0, (clock.now() - oldest).total_seconds()) if oldest is not None else 0.0


def wait_until_stored(
    stream: UsageStream, timeout_s: float, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Returns once what the stream holds now is in the database; StreamDown after `timeout_s`."""
    mark, deadline = stream.mark(), time.monotonic() + timeout_s
    while not stream.is_stored(mark):
        if time.monotonic() > deadline:
            raise StreamDown(
                "Usage in the stream is not in the database yet.",
                next_step="Check that a worker runs (`tollhouse doctor`), or try again later.",
                retry_after_s=5.0,
            )
        sleep(0.05)
