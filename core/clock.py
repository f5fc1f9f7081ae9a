"""The time, as a thing that can be handed in. Only this file reads the system's clock."""

import time
from datetime import UTC, datetime, timedelta
from typing import Protocol


class Clock(Protocol):
    def now(self) -> datetime:
        """UTC, with its zone."""
        ...

    def monotonic(self) -> float:
        """Seconds that never run back; only differences mean anything."""
        ...


class SystemClock:
    def now(self) -> datetime:
        return datetime.now(UTC)

    monotonic = staticmethod(time.monotonic)  # a request asks it sixteen times


class FakeClock:
    """Stands still until it is told to move. Ships with the product for demos, tests, simulation."""

    def __init__(self, start: datetime | None = None) -> None:
        self._now = start or datetime(2026, 1, 1, tzinfo=UTC)
        self._monotonic = 0.0

    def now(self) -> datetime:
        return self._now

    def monotonic(self) -> float:
        return self._monotonic

    def advance(self, seconds: float = 0.0, **units: float) -> None:
        """`advance(days=31)`, `advance(0.5)`. Backwards is refused: tests of skew set `now`."""
        step = timedelta(seconds=seconds, **units)
        if step < timedelta(0):
            raise ValueError("a clock does not run backwards; use set()")
        self._now += step
        self._monotonic += step.total_seconds()

    def set(self, moment: datetime) -> None:
        self._now = moment.astimezone(UTC)
