"""Days of another time zone, against a sheet that knows only the events and the calendar."""

import random
from collections import defaultdict
from datetime import UTC, date, datetime, timedelta
from fractions import Fraction
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest
from sqlalchemy import select

from billing.accounts import accounts
from billing.accounts.accounts import lock_account
from billing.invoicing import invoice_run
from billing.invoicing.tables import Invoice, InvoiceLine
from billing.usage.day_range import Range
from billing.usage.usage_buckets import Bucket, BucketQuery, Width, usage_buckets
from core.clock import FakeClock
from core.database import Database
from core.tenants.scope import TenantScope, scope_of_operator
from dashboards import usage_totals
from tests.billing.conftest import Deployment, deployment_of

ZONES = (
    "Asia/Kolkata",
    "Asia/Kathmandu",
    "America/St_Johns",
    "Australia/Lord_Howe",
    "Africa/Cairo",
    "Pacific/Auckland",
    "America/New_York",
)
PICO = 10**12
INSTANT = timedelta(microseconds=1)
Sheet = dict[tuple[date, str], Fraction]


def moments(zone: ZoneInfo, seed: int) -> list[datetime]:
    """Each local midnight of spring and autumn, an instant before, half an hour after, and others."""
    drawn = random.Random(seed)
    found = []
    for month, days in ((2, 28), (3, 31), (4, 6), (10, 31), (11, 5)):
        for day in range(1, days + 1, 1 if month == 3 else 6):
            at = datetime(2026, month, day, tzinfo=zone).astimezone(UTC)
            found += [at, at - INSTANT, at + timedelta(minutes=30)]
            found.append(at + timedelta(seconds=drawn.randrange(86_400)))
    return sorted(found)


def use(made: Deployment, zone: ZoneInfo) -> Sheet:
    """Dollars by local day and model."""
    versions = {
        model: made.price({"output": price}, tenant_id="acme", model=model)
        for model, price in (("one", "0.37"), ("two", "1.1"))
    }
    made.clock.set(datetime(2026, 12, 20, tzinfo=UTC))
    sheet: Sheet = defaultdict(Fraction)
    for number, at in enumerate(moments(zone, 7)):
        model = ("one", "two")[number % 2]
        tokens = 1 + number * 7919 % 100_003
        event = made.event(
            price_version=versions[model].id,
            model=model,
            occurred_at=at,
            finished_at=at,
            output_tokens=tokens,
            input_tokens=0,
            cached_tokens=0,
            waived_tokens=0,
        )
        made.record(event)
        price = {"one": Fraction(37, 10**8), "two": Fraction(11, 10**7)}[model]
        sheet[at.astimezone(zone).date(), model] += tokens * price
    return sheet


def days(made: Deployment, zone: str, first: date, number: int, **more: object) -> list[Bucket]:
    start = datetime(first.year, first.month, first.day, 12, tzinfo=ZoneInfo(zone))
    last = first + timedelta(days=number)
    end = datetime(last.year, last.month, last.day, tzinfo=ZoneInfo(zone))
    fields: dict[str, object] = {"group_by": ("model",), "limit": 180, "zone": zone} | more
    query = BucketQuery(start.astimezone(UTC), end.astimezone(UTC), Width.DAY, **fields)  # type: ignore[arg-type]
    with made.database.read() as session:
        page = usage_buckets(session, scope(), query)
    assert page.next_start is None
    return page.buckets


def scope() -> TenantScope:
    return scope_of_operator("acme")


def read(buckets: list[Bucket], zone: str) -> Sheet:
    return {
        (each.start.astimezone(ZoneInfo(zone)).date(), str(row.group["model"])): Fraction(
            row.amounts["amount"], PICO
        )
        for each in buckets
        for row in each.rows
    }


@pytest.mark.slow
@pytest.mark.parametrize("zone", ZONES)
def test_days_of_a_zone_are_those_of_the_sheet_and_march_is_the_invoice(
    lite: Deployment, zone: str
) -> None:
    _days_are_the_sheet(lite, zone)


@pytest.mark.slow
def test_days_of_a_zone_on_postgresql(postgres_database: Database) -> None:
    _days_are_the_sheet(deployment_of(postgres_database, FakeClock()), "Asia/Kathmandu")


def _days_are_the_sheet(deployment: Deployment, zone: str) -> None:
    with deployment.database.transaction() as session:
        account = lock_account(session, "acme")
        accounts.set_timezone(session, account, zone, deployment.clock.now())
    sheet = use(deployment, ZoneInfo(zone))
    deployment.rate()
    for first, number in ((date(2026, 3, 1), 31), (date(2026, 10, 1), 40), (date(2026, 2, 20), 60)):
        wanted = {
            key: amount
            for key, amount in sheet.items()
            if first <= key[0] < first + timedelta(days=number)
        }
        found = days(deployment, zone, first, number)
        assert len(found) == number
        assert all(a.end == b.start for a, b in pairwise(found))
        assert read(found, zone) == wanted
        assert read(days(deployment, zone, first, number, batch=False), zone) == wanted  # by events
    result = invoice_run.run(deployment.database, deployment.clock, ["acme"])
    assert not result.failed
    start = datetime(2026, 3, 1, tzinfo=ZoneInfo(zone)).astimezone(UTC)
    with deployment.database.read() as session:
        exact = session.scalars(
            select(InvoiceLine.exact)
            .join(Invoice, Invoice.id == InvoiceLine.invoice_id)
            .where(Invoice.period_start == start, InvoiceLine.kind == "usage")
        ).all()
    march = read(days(deployment, zone, date(2026, 3, 1), 31), zone)
    assert Fraction(sum(exact), PICO) == sum(march.values()) > 0


def test_a_range_of_days_is_that_of_its_zone() -> None:
    now = datetime(2026, 3, 31, 19, tzinfo=UTC)  # April in Kolkata
    month = Range.month_of(now, "Asia/Kolkata")
    assert (month.first, month.last) == (date(2026, 4, 1), date(2026, 4, 1))
    assert month.start == datetime(2026, 3, 31, 18, 30, tzinfo=UTC)
    assert month.month_end == datetime(2026, 4, 30, 18, 30, tzinfo=UTC)
    assert (month.width, month.buckets) == (Width.DAY, 1)  # its midnight is inside an hour
    changed = Range(date(2026, 3, 29), date(2026, 3, 29), "Europe/Berlin")
    assert (changed.width, changed.buckets) == (Width.HOUR, 23)


def test_a_page_s_totals_are_those_of_the_tenant_s_month(lite: Deployment) -> None:
    sheet = use(lite, ZoneInfo("Asia/Kathmandu"))
    lite.rate()
    span = Range(date(2026, 3, 1), date(2026, 3, 31), "Asia/Kathmandu")
    with lite.database.read() as session:
        found = usage_totals.read(session, scope(), span, lite.clock.now(), "model")
    march = [amount for (day, _), amount in sheet.items() if day.month == 3]
    assert Fraction(found.total("amount"), PICO) == sum(march)
    assert (found.labels[0], found.labels[-1], len(found.labels)) == ("01 Mar", "31 Mar", 31)


def test_a_page_ends_at_a_local_midnight_and_the_next_one_begins_there(lite: Deployment) -> None:
    zone = "Asia/Kolkata"
    sheet = use(lite, ZoneInfo(zone))
    lite.rate()
    start, found = datetime(2026, 2, 28, 18, 30, tzinfo=UTC), []
    end = datetime(2026, 3, 31, 18, 30, tzinfo=UTC)
    at: datetime | None = start
    while at is not None:
        query = BucketQuery(at, end, Width.DAY, ("model",), 5, zone=zone)
        with lite.database.read() as session:
            page = usage_buckets(session, scope(), query)
        assert len(page.buckets) <= 5
        found += page.buckets
        at = page.next_start
    march = {key: amount for key, amount in sheet.items() if key[0].month == 3}
    assert read(found, zone) == march
    assert (found[0].start, found[-1].end, len(found)) == (start, end, 31)


def test_hours_are_those_of_utc_in_every_zone(lite: Deployment) -> None:
    use(lite, ZoneInfo("Asia/Kolkata"))
    lite.rate()
    at = datetime(2026, 3, 1, tzinfo=UTC)
    span = (at, at + timedelta(days=2), Width.HOUR, ("model",), 48)
    with lite.database.read() as session:
        pages = [
            usage_buckets(session, scope(), BucketQuery(*span, zone=zone))
            for zone in ("UTC", "Asia/Kolkata")
        ]
    assert pages[0] == pages[1]
