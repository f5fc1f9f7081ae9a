"""Days of a time zone as moments in UTC: from local midnight to local midnight, like billing periods."""

from datetime import UTC, date, datetime, timedelta

from billing.periods import zone_of

HOUR = timedelta(hours=1)
QUARTER_S = 900  # in every zone of today local midnight is at a quarter of an hour of UTC


def midnight(day: date, zone: str) -> datetime:
    """Its first moment, also where a change of the clocks skips midnight or repeats it."""
    return datetime(day.year, day.month, day.day, tzinfo=zone_of(zone)).astimezone(UTC)


def midnights(start: datetime, end: datetime, zone: str, most: int) -> list[datetime]:
    """The bounds of the days that have a part of [start, end), at most `most` days."""
    day = start.astimezone(zone_of(zone)).date()
    found = [midnight(day, zone)]
    while found[-1] < end and len(found) <= most:
        day += timedelta(days=1)
        after = midnight(day, zone)
        if after > found[-1]:  # a zone that crosses the date line skips a day
            found.append(after)
    return found


def hour_of(moment: datetime) -> datetime:
    return moment.replace(minute=0, second=0, microsecond=0)
