"""An injectable clock. Only this file reads the system clock."""

import time
from datetime import UTC, date, datetime, timedelta
from functools import partial
from typing import Protocol


class Clock(Protocol):
    def now(self) -> datetime:
        """Timezone-aware, in UTC."""
        ...

    def monotonic(self) -> float:
        """Seconds that never decrease; only differences are meaningful."""
        ...


class SystemClock:
    # Functions of C: a request reads the two two dozen times.
    now = staticmethod(partial(datetime.now, UTC))
    monotonic = staticmethod(time.monotonic)


class FakeClock:
    """A clock that moves only by `advance` and `set`, for demos, tests and simulations."""

    def __init__(self, start: datetime | None = None) -> None:
        self._now = start or datetime(2026, 1, 1, tzinfo=UTC)
        self._monotonic = 0.0

    def now(self) -> datetime:
        return self._now

    def monotonic(self) -> float:
        return self._monotonic

    def advance(self, seconds: float = 0.0, **units: float) -> None:
        """`advance(days=31)`, `advance(0.5)`. ValueError if negative; `set` may move backwards."""
        step = timedelta(seconds=seconds, **units)
        if step < timedelta(0):
            raise ValueError("a clock does not run backwards; use set()")
        self._now += step
        self._monotonic += step.total_seconds()

    def set(self, moment: datetime) -> None:
        self._now = moment.astimezone(UTC)


def usual(moment: datetime) -> datetime:
    """The moment in UTC. ValueError outside of the years 1970 to 2199: near the ends of the calendar a
    time cannot be moved to another zone or to the end of its period."""
    try:
        found = moment.astimezone(UTC)
    except OverflowError:
        raise ValueError(f"year {moment.year} is out of range") from None
    usual_day(found.date())
    return found


def usual_day(day: date) -> date:
    """As `usual`."""
    if not 1970 <= day.year < 2200:
        raise ValueError(f"year {day.year} is not one of 1970 to 2199")
    return day
