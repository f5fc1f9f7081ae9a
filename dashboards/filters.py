"""Filters in the URL: date range, grouping and choices. BadRequest for an invalid value."""

from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal, InvalidOperation

from starlette.requests import Request

from billing.periods import zone_of
from billing.usage.day_range import Range
from core.clock import usual_day
from core.errors import BadRequest

MAX_DAYS = 180


def date_range(request: Request, now: datetime, default_days: int = 30, zone: str = "UTC") -> Range:
    """`from` and `to` of the query string, inclusive, as days of the zone; by default the last
    `default_days`."""
    last = _day(request, "to") or now.astimezone(zone_of(zone)).date()
    first = _day(request, "from") or last - timedelta(default_days - 1)
    if first > last:
        raise BadRequest(
            f"The range starts on {first}, after its end on {last}.", next_step="Swap the dates."
        )
    if (last - first).days >= MAX_DAYS:
        raise BadRequest(
            f"The range has {(last - first).days + 1} days; the maximum is {MAX_DAYS}.",
            next_step="Choose a shorter range, or export the usage.",
        )
    return Range(first, last, zone)


def choice(request: Request, name: str, known: tuple[str, ...], default: str) -> str:
    value = request.query_params.get(name) or default
    if value not in known:
        raise BadRequest(f"{name} is {value[:40]!r}.", next_step=f"Use one of {', '.join(known)}.")
    return value


def decimal_field(
    request: Request, name: str, usual: str, accepts: Callable[[Decimal], bool], next_step: str
) -> Decimal:
    """A number from the URL. BadRequest, with `next_step`, for one that is not accepted."""
    text = request.query_params.get(name) or usual
    try:
        value = Decimal(text)
    except InvalidOperation:
        value = Decimal("NaN")
    if not value.is_finite() or not accepts(value):
        raise BadRequest(f"{name} is {text[:20]!r}.", next_step=next_step, param=name)
    return value


def _day(request: Request, name: str) -> date | None:
    return day_of(name, request.query_params.get(name) or "")


def day_of(name: str, text: str) -> date | None:
    if not text:
        return None
    try:
        return usual_day(date.fromisoformat(text))
    except ValueError:
        raise BadRequest(
            f"{name} is {text[:40]!r}, which is not a date like 2026-11-21.", param=name
        ) from None


def start_of_day(name: str, text: str) -> datetime | None:
    """The start of a day in UTC; None for an empty text."""
    day = day_of(name, text)
    return datetime(day.year, day.month, day.day, tzinfo=UTC) if day else None
