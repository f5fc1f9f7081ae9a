"""Windows of budgets in every time zone, to the microsecond, against the standard library's zones."""

from datetime import UTC, date, datetime, timedelta
from itertools import pairwise
from typing import Any
from zoneinfo import ZoneInfo, available_timezones

import pytest

from billing.accounts.accounts import ensure_account
from billing.notices import budgets
from billing.pricing import prices
from billing.rating.unrated import UnratedUsage
from core.money import Money, units_of
from tests.billing.conftest import Deployment

INSTANT, DAY = timedelta(microseconds=1), timedelta(days=1)
ZONES = sorted(available_timezones() - {"Factory", "localtime", "posixrules"})
# Offsets of halves and quarters of an hour, and clocks that change by half an hour or at midnight.
SOME = {
    "Asia/Kolkata": date(2026, 8, 1),
    "Asia/Kathmandu": date(2026, 8, 3),
    "America/St_Johns": date(2026, 3, 8),
    "Australia/Adelaide": date(2026, 4, 5),
    "Australia/Lord_Howe": date(2026, 10, 4),
    "Pacific/Chatham": date(2026, 9, 27),
    "America/Havana": date(2026, 3, 8),
    "Africa/Cairo": date(2026, 4, 24),
    "Asia/Beirut": date(2026, 10, 25),
    "America/Santiago": date(2026, 9, 6),
    "Asia/Tokyo": date(2026, 8, 1),
}


def first_moment(day: date, zone: str) -> datetime:
    """The first moment of a local day, by halving the hours around it: its date is that day, and just
    before it is not."""
    noon = datetime(day.year, day.month, day.day, 12, tzinfo=UTC)
    low, high = noon - timedelta(hours=40), noon + timedelta(hours=14)
    here = ZoneInfo(zone)
    while high - low > INSTANT:
        middle = low + (high - low) / 2
        if middle.astimezone(here).date() >= day:
            high = middle
        else:
            low = middle
    return high


def bounds(kind: str, day: date, zone: str) -> tuple[datetime, datetime]:
    if kind == "month":
        first = day.replace(day=1)
        after = (first + 32 * DAY).replace(day=1)
    else:
        first = day - (timedelta(days=day.weekday()) if kind == "week" else timedelta())
        after = first + (7 * DAY if kind == "week" else DAY)
    return first_moment(first, zone), first_moment(after, zone)


def check_windows(zone: str, days: list[date]) -> None:
    for day in days:
        for kind in ("day", "week", "month"):
            start, end = bounds(kind, day, zone)
            inside = first_moment(day, zone)
            for at in (inside, max(inside, end - INSTANT), start):
                found = budgets.window_of(kind, at, zone)
                assert (found.starts_at, found.ends_at) == (start, end), (zone, kind, at)
            assert budgets.window_of(kind, start - INSTANT, zone).ends_at == start
            assert budgets.window_of(kind, end, zone).starts_at == end


@pytest.mark.parametrize("zone", SOME)
def test_windows_begin_and_end_with_local_days(zone: str) -> None:
    check_windows(zone, [SOME[zone], SOME[zone] - DAY, SOME[zone] + DAY])


@pytest.mark.proof
def test_windows_of_every_zone_on_the_days_when_clocks_change() -> None:
    assert len(ZONES) > 400
    for zone in ZONES:
        here, days = ZoneInfo(zone), [date(2026, 1, 1), date(2026, 2, 28)]
        noons = [datetime(2026, 1, 1, 12, tzinfo=UTC) + DAY * number for number in range(365)]
        for before, after in pairwise(noons):
            if before.astimezone(here).utcoffset() != after.astimezone(here).utcoffset():
                days += [before.astimezone(here).date(), after.astimezone(here).date()]
        check_windows(zone, days)


def spent_at(made: Deployment, at: datetime) -> dict[str, int]:
    """By window: what is spent, rated and waiting together."""
    with made.database.read() as session:
        unrated = UnratedUsage()
        unrated.refresh(session, frozenset(("acme",)), prices.load_price_book(session))
        found = budgets.LimitReader(session, at, unrated).of_key("acme", "proj", "key")
    return {f"{each.cap_units} {each.key.split(':')[1]}": each.spent_units for each in found}


def check_spending(made: Deployment, zone: str, day: date) -> None:
    """Usage at the borders of each window, and at those of the hours of UTC around them, waiting and
    rated. Each event costs another power of two, so a sum tells which events it has."""
    kinds, scopes = ("day", "week", "month"), {"tenant": "acme", "project": "proj", "key": "key"}
    start, end = bounds("day", day, zone)
    moments = sorted(
        {
            edge + away
            for kind in kinds
            for edge in bounds(kind, day, zone)
            for hour in [edge.replace(minute=0, second=0, microsecond=0)]
            for away in (
                *(-INSTANT, timedelta(), hour - edge, hour - edge - INSTANT),
                *(hour - edge + timedelta(hours=1), hour - edge + timedelta(hours=1) - INSTANT),
            )
        }
    )
    made.clock.set(moments[0] - 40 * DAY)
    with made.database.transaction() as session:
        ensure_account(session, "acme", made.clock.now()).timezone = zone
        for number, (kind, (scope, scope_id)) in enumerate(
            (kind, each) for kind in kinds for each in scopes.items()
        ):
            cap = Money(units_of(number + 1), "USD")
            where: dict[str, Any] = {"scope": scope, "scope_id": scope_id, "window": kind}
            budgets.create(session, made.clock, tenant_id="acme", cap=cap, **where)
    version = made.price({"gpu_second": "0.000000000001"}, tenant_id="acme")
    usage: dict[str, Any] = {"kind": "gpu_seconds", "price_version": version.id}
    none = {"input_tokens": 0, "cached_tokens": 0, "output_tokens": 0, "waived_tokens": 0}
    made.clock.set(moments[-1] + DAY)
    made.record(
        *[
            made.event(occurred_at=at, finished_at=at, quantity=1 << place, **usage, **none)
            for place, at in enumerate(moments)
        ]
    )
    for _ in range(2):  # waiting, then rated
        for at in (start, end - INSTANT):
            expected = {}
            for number, (kind, _scope) in enumerate((k, s) for k in kinds for s in scopes):
                first, after = bounds(kind, day, zone)
                name = first.astimezone(ZoneInfo(zone)) + timedelta(hours=2)
                shown = f"{name:%Y-%m}" if kind == "month" else f"{name:%Y-%m-%d}"
                expected[f"{units_of(number + 1)} {shown}"] = sum(
                    1 << place for place, each in enumerate(moments) if first <= each < after
                )
            assert spent_at(made, at) == expected, (zone, at)
        made.rate()


@pytest.mark.parametrize("zone", ["Asia/Kathmandu", "Australia/Lord_Howe", "America/Havana"])
def test_a_budget_counts_its_window_to_the_microsecond(deployment: Deployment, zone: str) -> None:
    check_spending(deployment, zone, SOME[zone])


@pytest.mark.proof
@pytest.mark.parametrize("zone", SOME)
def test_a_budget_counts_its_window_in_odd_zones(lite: Deployment, zone: str) -> None:
    check_spending(lite, zone, SOME[zone])
