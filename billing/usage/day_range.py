"""A range of days of a time zone, both inclusive."""

from dataclasses import dataclass, replace
from datetime import date, datetime, timedelta

from billing.periods import zone_of
from billing.usage import local_days
from billing.usage.usage_buckets import Width


@dataclass(frozen=True, slots=True)
class Range:
    first: date
    last: date  # inclusive
    zone: str = "UTC"

    @classmethod
    def month_of(cls, now: datetime, zone: str) -> "Range":
        """The days of the month so far."""
        today = now.astimezone(zone_of(zone)).date()
        return cls(today.replace(day=1), today, zone)

    def of(self, zone: str) -> "Range":
        """The days of the same dates in another zone."""
        return replace(self, zone=zone)

    @property
    def start(self) -> datetime:
        return local_days.midnight(self.first, self.zone)

    @property
    def end(self) -> datetime:
        return local_days.midnight(self.last + timedelta(days=1), self.zone)

    @property
    def month_end(self) -> datetime:
        """Of the month of the first day."""
        after = (self.first.replace(day=1) + timedelta(days=32)).replace(day=1)
        return local_days.midnight(after, self.zone)

    @property
    def days(self) -> int:
        return (self.last - self.first).days + 1

    @property
    def width(self) -> Width:
        """Hours are those of UTC: they make no days where local midnight is inside one."""
        whole = all(local_days.hour_of(each) == each for each in (self.start, self.end))
        return Width.HOUR if self.days <= 2 and whole else Width.DAY

    @property
    def buckets(self) -> int:
        """A day on which clocks change has 23 or 25 hours."""
        if self.width is Width.DAY:
            return self.days
        return int((self.end - self.start).total_seconds()) // self.width.seconds
