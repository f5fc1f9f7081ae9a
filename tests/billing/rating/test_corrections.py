"""A correction of past usage is everywhere where the usage is: pages, costs, exports, budgets, books."""

from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import select

from billing.audit import reconcile
from billing.exports.subjects import Period
from billing.invoicing import invoice_run
from billing.invoicing.tables import Invoice, InvoiceLine
from billing.ledger import credits
from billing.ledger.ledger import AccountKind, balance
from billing.ledger.tables import CreditGrant
from billing.notices import budgets
from billing.rating import rerating
from billing.rating.unrated import UnratedUsage
from billing.usage import rollups
from billing.usage.usage_buckets import BucketQuery, Width, usage_buckets
from core.clock import FakeClock
from core.errors import BadRequest
from core.money import Money, units_of
from core.tenants.scope import scope_of_operator
from tests.billing.conftest import Deployment
from tests.billing.exports.focus_reading import focus_of
from tests.billing.invoicing.test_invoices import clean

JANUARY = datetime(2026, 1, 1, tzinfo=UTC)
FEBRUARY = datetime(2026, 2, 1, tzinfo=UTC)
MARCH = datetime(2026, 3, 1, tzinfo=UTC)


def wrongly_priced(deployment: Deployment) -> rerating.Request:
    """Three dollars a million too much, on two million; and the request that puts it right."""
    deployment.clock.set(JANUARY + timedelta(days=3))
    wrong = deployment.price({"output": "5.00"}, model="slip")
    plain = {"model": "slip", "price_version": wrong.id, "output_tokens": 1_000_000}
    deployment.record(
        deployment.event(**plain), deployment.event(**plain, project_id="other"), deployment.event()
    )
    deployment.rate()
    deployment.clock.advance(hours=1)
    right = deployment.price({"output": "2.00"}, model="slip")
    return rerating.Request(wrong.id, right.id, JANUARY, FEBRUARY)


def test_a_correction_is_on_page_costs_export_and_invoice_alike(deployment: Deployment) -> None:
    wanted = wrongly_priced(deployment)
    with deployment.database.transaction() as session:
        changes = rerating.post_all(session, deployment.clock, wanted)
    assert sum(each.difference for each in changes) == -units_of("6")
    deployment.clock.set(FEBRUARY + timedelta(days=2))
    (invoice_id,) = invoice_run.run(deployment.database, deployment.clock, current=False).finalised
    scope = scope_of_operator("acme")
    with deployment.database.read() as session:
        sums = {}
        for width in (Width.DAY, Width.HOUR):
            total, at = 0, JANUARY
            while at < FEBRUARY:
                query = BucketQuery(at, FEBRUARY, width, ("model", "project_id"), width.most)
                page = usage_buckets(session, scope, query)
                total += sum(row.amounts["amount"] for each in page.buckets for row in each.rows)
                at = page.next_start or FEBRUARY
            sums[width.label] = total
        lines = session.scalars(select(InvoiceLine).where(InvoiceLine.invoice_id == invoice_id))
        sums["invoice"] = sum(line.exact for line in lines)
        sums["draft sum"] = session.get_one(Invoice, invoice_id).exact
        rows = focus_of(session, scope, Period(JANUARY, FEBRUARY), "1.2")
        sums["FOCUS"] = sum(row["EffectiveCost"] for row in rows)
        sums["ledger"] = -balance(session, "acme", AccountKind.REVENUE, "USD")
        assert len(set(sums.values())) == 1, sums
        again = [row for row in rows if row["x_LineKind"] == "adjustment"]
        assert again and {row["ChargeClass"] for row in again} == {None}, "its period is open"
        assert sum(row["ConsumedQuantity"] for row in again) == 0, "reversed and entered again"
        assert reconcile.audit(session).clean


def test_roll_ups_hold_corrections_also_when_made_anew(deployment: Deployment) -> None:
    wanted = wrongly_priced(deployment)
    with deployment.database.transaction() as session:
        rerating.post_all(session, deployment.clock, wanted)
        before = rollups.stored(session, rollups.HOURLY)
        assert before == rollups.recompute(session)
        assert sum(sums[-1] for key, sums in before.items() if key[6] == rollups.ADJUSTMENT) < 0
        rollups.rebuild(session)
        assert rollups.stored(session, rollups.HOURLY) == before
        assert rollups.stored(session, rollups.DAILY) == rollups.by_day(before)


def test_a_correction_that_is_not_in_the_roll_ups_is_found(deployment: Deployment) -> None:
    wanted = wrongly_priced(deployment)
    with deployment.database.transaction() as session:
        rerating.post_all(session, deployment.clock, wanted)
        session.execute(rollups.DAILY.delete().where(rollups.DAILY.c.kind == rollups.ADJUSTMENT))
    with deployment.database.read() as session:
        report = reconcile.audit(session)
    assert not report.clean
    assert any("usage_daily" in each.message for each in report.differences)


def test_the_daily_roll_up_by_tenant_equals_the_daily_roll_up(deployment: Deployment) -> None:
    with deployment.database.transaction() as session:
        rerating.post_all(session, deployment.clock, wrongly_priced(deployment))
        days = rollups.stored(session, rollups.DAILY)
        wanted = rollups.by_tenant_day(days)
        columns = [
            rollups.TENANT_DAILY.c[name]
            for name in (*rollups.TENANT_DAILY_KEY, *rollups.TENANT_DAILY_SUMS)
        ]
        found = {tuple(row[:4]): list(row[4:]) for row in session.execute(select(*columns))}
        assert found == wanted
        assert sum(sums[-1] for sums in found.values()) == sum(sums[-1] for sums in days.values())
        session.execute(rollups.TENANT_DAILY.delete())
    with deployment.database.read() as session:
        report = reconcile.audit(session)
    assert any("usage_tenant_daily" in each.message for each in report.differences)


def test_a_budget_gives_back_what_a_correction_gives_back(
    deployment: Deployment, clock: FakeClock
) -> None:
    wanted = wrongly_priced(deployment)
    with deployment.database.transaction() as session:
        for scope, scope_id in (("tenant", "acme"), ("project", "other"), ("key", "key")):
            budgets.create(
                session,
                clock,
                tenant_id="acme",
                scope=scope,
                scope_id=scope_id,
                cap=Money(units_of("10.5")),
            )

    def _left(project_id: str) -> list[tuple[int, int]]:
        with deployment.database.read() as session:
            reader = budgets.LimitReader(session, clock.now(), UnratedUsage())
            found = reader.of_key("acme", project_id, "key")
        return sorted((each.cap_units - each.spent_units, each.cap_units) for each in found)

    before = _left("other")
    with deployment.database.transaction() as session:
        rerating.post_all(session, clock, wanted)
    after = _left("other")
    gained = [now[0] - then[0] for then, now in zip(before, after, strict=True)]
    assert sorted(gained) == [0, units_of("3"), units_of("6")]
    assert all(now[1] >= then[1] for then, now in zip(before, after, strict=True))
    clock.set(FEBRUARY + timedelta(days=1))
    assert all(cap == units_of("10.5") for _, cap in _left("other")), "a new window begins anew"


def returned(deployment: Deployment) -> set[tuple[str, int, datetime | None]]:
    """What the wallet holds: kind, picounits and expiry of each grant with something left."""
    with deployment.database.read() as session:
        rows = session.scalars(select(CreditGrant).where(CreditGrant.remaining > 0))
        return {(row.kind, row.remaining, row.expires_at) for row in rows}


def credit(deployment: Deployment, kind: str, dollars: str, expires_at: datetime) -> None:
    with deployment.database.transaction() as session:
        credits.grant(
            session,
            tenant_id="acme",
            kind=kind,
            money=Money(units_of(dollars)),
            reference=f"{kind} {dollars}",
            at=deployment.clock.now(),
            expires_at=expires_at,
        )


def correct(deployment: Deployment, wrong: str, right: str) -> None:
    """Re-rates all usage of the version `wrong`."""
    with deployment.database.transaction() as session:
        wanted = rerating.Request(wrong, right, JANUARY, deployment.clock.now())
        rerating.post_all(session, deployment.clock, wanted)


def test_a_correction_returns_each_kind_of_credit_with_its_own_expiry(lite: Deployment) -> None:
    """5.00 were paid with 1.00 promotional and 4.00 prepaid credit, and 1.00 was right."""
    credit(lite, credits.PROMO, "1", MARCH)
    credit(lite, credits.PREPAID, "9", MARCH + timedelta(days=9))
    wrong = lite.price({"output": "5.00"}, model="slip").id
    lite.record(
        lite.event(model="slip", price_version=wrong, output_tokens=1_000_000, waived_tokens=0)
    )
    lite.rate()
    lite.clock.advance(hours=1)
    correct(lite, wrong, lite.price({"output": "1.00"}, model="slip").id)
    lite.clock.set(FEBRUARY + timedelta(days=2))
    invoice_run.run(lite.database, lite.clock, current=False)
    assert returned(lite) == {
        (credits.PROMO, units_of("1"), MARCH),
        (credits.PREPAID, units_of("5"), MARCH + timedelta(days=9)),  # never used
        (credits.PREPAID, units_of("3"), MARCH + timedelta(days=9)),
    }
    clean(lite)


def test_a_correction_of_what_was_paid_in_money_is_new_credit_beside_what_returns(
    lite: Deployment,
) -> None:
    """January's 5.00 are owed in money. February's 1.00 is paid from the wallet, and 3.00 of January
    are taken back: 1.00 returns to the grant's kind and expiry, 2.00 are new credit."""
    wrong = lite.price({"output": "5.00"}, model="slip").id
    lite.record(
        lite.event(model="slip", price_version=wrong, output_tokens=1_000_000, waived_tokens=0)
    )
    lite.rate()
    lite.clock.set(FEBRUARY + timedelta(days=2))
    invoice_run.run(lite.database, lite.clock, current=False)
    credit(lite, credits.PREPAID, "1", MARCH + timedelta(days=9))
    right = lite.price({"output": "2.00"}, model="slip").id
    lite.record(
        lite.event(model="slip", price_version=right, output_tokens=500_000, waived_tokens=0)
    )
    lite.rate()
    correct(lite, wrong, right)
    lite.clock.set(MARCH + timedelta(days=2))
    invoice_run.run(lite.database, lite.clock, current=False)
    assert returned(lite) == {
        (credits.PREPAID, units_of("1"), MARCH + timedelta(days=9)),
        (credits.PREPAID, units_of("2"), None),
    }
    clean(lite)


DAY = timedelta(days=1)
BEGIN, END = JANUARY + 2 * DAY, JANUARY + 12 * DAY  # the usage is of the fourth day


@pytest.mark.parametrize(
    ("start", "end", "tenant_id", "refused"),
    [
        (JANUARY, FEBRUARY, "", False),  # all of it
        (BEGIN, END, "", False),
        (END, FEBRUARY, "", False),  # nothing of it
        (JANUARY, BEGIN, "", False),
        (BEGIN + DAY, FEBRUARY, "", True),
        (JANUARY, END - DAY, "", True),
        (BEGIN + DAY, END - DAY, "", True),
        (JANUARY, END - DAY, "acme", True),
        (JANUARY, END - DAY, "globex", False),  # whose usage the earlier one left alone
    ],
)
def test_an_earlier_correction_is_in_the_range_or_out_of_it(
    lite: Deployment, start: datetime, end: datetime, tenant_id: str, refused: bool
) -> None:
    """Of a part of it nobody could say what it has corrected already."""
    lite.tenant("globex")
    whole = wrongly_priced(lite)
    with lite.database.transaction() as session:
        earlier = replace(whole, starts_at=BEGIN, ends_at=END, tenant_id="acme")
        assert rerating.post_all(session, lite.clock, earlier)
    wanted = replace(whole, starts_at=start, ends_at=end, tenant_id=tenant_id)
    expected = pytest.raises(BadRequest, match="partly overlaps") if refused else nullcontext()
    with expected, lite.database.transaction() as session:
        rerating.post_all(session, lite.clock, wanted)
