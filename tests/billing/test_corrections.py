"""A correction of past usage is everywhere where the usage is: pages, costs, exports, budgets, books."""

from datetime import UTC, datetime, timedelta

from sqlalchemy import select

from billing import budgets, invoice_run, reconcile, rerating, rollups
from billing.buckets import BucketQuery, Width, usage_buckets
from billing.exports.focus import focus_rows
from billing.exports.focus_columns import COLUMNS
from billing.exports.subjects import Period
from billing.ledger import AccountKind, balance
from billing.models import Invoice, InvoiceLine
from core.clock import FakeClock
from core.money import Money, units_of
from core.tenants.scope import scope_of_operator
from tests.billing.conftest import House

JANUARY = datetime(2026, 1, 1, tzinfo=UTC)
FEBRUARY = datetime(2026, 2, 1, tzinfo=UTC)
MARCH = datetime(2026, 3, 1, tzinfo=UTC)


def wrongly_priced(house: House) -> rerating.Request:
    """Three dollars a million too much, on two million; and the request that puts it right."""
    house.clock.set(JANUARY + timedelta(days=3))
    wrong = house.price({"output": "5.00"}, model="slip")
    plain = {"model": "slip", "price_version": wrong.id, "output_tokens": 1_000_000}
    house.record(house.event(**plain), house.event(**plain, project_id="other"), house.event())
    house.rate()
    house.clock.advance(hours=1)
    right = house.price({"output": "2.00"}, model="slip")
    return rerating.Request(wrong.id, right.id, JANUARY, FEBRUARY)


def test_a_correction_is_on_page_costs_export_and_invoice_alike(house: House) -> None:
    wanted = wrongly_priced(house)
    with house.database.transaction() as session:
        changes = rerating.post_all(session, house.clock, wanted)
    assert sum(each.difference for each in changes) == -units_of("6")
    house.clock.set(FEBRUARY + timedelta(days=2))
    (invoice_id,) = invoice_run.run(house.database, house.clock, current=False).finalised
    scope = scope_of_operator("acme")
    with house.database.read() as session:
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
        names = [column.name for column in COLUMNS]
        rows = [
            dict(zip(names, row, strict=True))
            for row in focus_rows(session, scope, Period(JANUARY, FEBRUARY))
        ]
        sums["FOCUS"] = sum(row["EffectiveCost"] for row in rows)
        sums["ledger"] = -balance(session, "acme", AccountKind.REVENUE, "USD")
        assert len(set(sums.values())) == 1, sums
        assert {row["ChargeClass"] for row in rows if row["x_LineKind"] == "adjustment"} == {
            "Correction"
        }
        assert reconcile.audit(session).clean


def test_roll_ups_hold_corrections_also_when_made_anew(house: House) -> None:
    wanted = wrongly_priced(house)
    with house.database.transaction() as session:
        rerating.post_all(session, house.clock, wanted)
        before = rollups.stored(session, rollups.HOURLY)
        assert before == rollups.anew(session)
        assert sum(sums[-1] for key, sums in before.items() if key[6] == rollups.ADJUSTMENT) < 0
        rollups.rebuild(session)
        assert rollups.stored(session, rollups.HOURLY) == before
        assert rollups.stored(session, rollups.DAILY) == rollups.by_day(before)


def test_a_correction_that_is_not_in_the_roll_ups_is_found(house: House) -> None:
    wanted = wrongly_priced(house)
    with house.database.transaction() as session:
        rerating.post_all(session, house.clock, wanted)
        session.execute(rollups.DAILY.delete().where(rollups.DAILY.c.kind == rollups.ADJUSTMENT))
    with house.database.read() as session:
        report = reconcile.audit(session)
    assert not report.clean
    assert any("usage_daily" in each.message for each in report.differences)


def test_the_roll_up_of_the_house_holds_what_its_days_hold(house: House) -> None:
    with house.database.transaction() as session:
        rerating.post_all(session, house.clock, wrongly_priced(house))
        days = rollups.stored(session, rollups.DAILY)
        wanted = rollups.for_house(days)
        columns = [rollups.HOUSE.c[name] for name in (*rollups.HOUSE_KEY, *rollups.HOUSE_SUMS)]
        found = {tuple(row[:4]): list(row[4:]) for row in session.execute(select(*columns))}
        assert found == wanted
        assert sum(sums[-1] for sums in found.values()) == sum(sums[-1] for sums in days.values())
        session.execute(rollups.HOUSE.delete())
    with house.database.read() as session:
        report = reconcile.audit(session)
    assert any("usage_house_daily" in each.message for each in report.differences)


def test_a_budget_gives_back_what_a_correction_gives_back(house: House, clock: FakeClock) -> None:
    wanted = wrongly_priced(house)
    with house.database.transaction() as session:
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
        with house.database.read() as session:
            found = budgets.money_limits(session, "acme", project_id, "key", clock.now())
        return sorted((each.cap_units - each.spent_units, each.cap_units) for each in found)

    before = _left("other")
    with house.database.transaction() as session:
        rerating.post_all(session, clock, wanted)
    after = _left("other")
    gained = [now[0] - then[0] for then, now in zip(before, after, strict=True)]
    assert sorted(gained) == [0, units_of("3"), units_of("6")]
    assert all(now[1] >= then[1] for then, now in zip(before, after, strict=True))
    clock.set(FEBRUARY + timedelta(days=1))
    assert all(cap == units_of("10.5") for _, cap in _left("other")), "a new window begins anew"
