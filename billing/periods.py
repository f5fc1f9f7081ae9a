"""Bounds of billing periods: local midnight of the anchor day. Pure functions."""

from calendar import monthrange
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo
from functools import lru_cache
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from core.errors import BadRequest


@dataclass(frozen=True, slots=True)
class Span:
    """A billing period, and the whole month of the anchor day to which amounts by the month refer."""

    starts_at: datetime
    ends_at: datetime
    whole_from: datetime
    whole_to: datetime

    @classmethod
    def whole(cls, starts_at: datetime, ends_at: datetime) -> "Span":
        return cls(starts_at, ends_at, starts_at, ends_at)


def local_day(at: datetime, timezone: str) -> str:
    """The date of a moment as the tenant's calendar shows it."""
    return f"{at.astimezone(zone_of(timezone)):%Y-%m-%d}"


def days(starts_at: datetime, ends_at: datetime, timezone: str) -> str:
    return f"{local_day(starts_at, timezone)} to {local_day(ends_at, timezone)}"


def zone_of(name: str) -> tzinfo:
    if name == "UTC":
        return UTC
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError):
        raise BadRequest(
            f"There is no time zone {name!r}.",
            next_step="Use an IANA name such as Europe/Berlin.",
        ) from None


def period_around(at: datetime, anchor_day: int, timezone: str) -> tuple[datetime, datetime]:
    """Start and end, in UTC, of the anchor-day month that contains `at`."""
    zone = zone_of(timezone)
    local = at.astimezone(zone)
    start = _anchor(local.year, local.month, anchor_day, timezone)
    if at >= start:
        return start, _anchor(*_next_month(local.year, local.month), anchor_day, timezone)
    before = (local.year, local.month - 1) if local.month > 1 else (local.year - 1, 12)
    return _anchor(*before, anchor_day, timezone), start


@lru_cache(maxsize=4096)
def _anchor(year: int, month: int, anchor_day: int, timezone: str) -> datetime:
    """Midnight of the anchor day; in a shorter month, of its last day."""
    day = min(anchor_day, monthrange(year, month)[1])
    return datetime(year, month, day, tzinfo=zone_of(timezone)).astimezone(UTC)


def _next_month(year: int, month: int) -> tuple[int, int]:
    return (year, month + 1) if month < 12 else (year + 1, 1)
