"""A range of days in UTC, both inclusive."""

from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta

from billing.usage.usage_buckets import Width


@dataclass(frozen=True, slots=True)
class Range:
    first: date
    last: date  # inclusive

    @property
    def start(self) -> datetime:
        return datetime(self.first.year, self.first.month, self.first.day, tzinfo=UTC)

    @property
    def end(self) -> datetime:
        return datetime(self.last.year, self.last.month, self.last.day, tzinfo=UTC) + timedelta(1)

    @property
    def days(self) -> int:
        return (self.last - self.first).days + 1

    @property
    def width(self) -> Width:
        return Width.HOUR if self.days <= 2 else Width.DAY
