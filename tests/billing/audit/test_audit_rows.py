"""The sums that checks of an audit share, by hand; and checks of open days, which add frozen sums."""

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import insert, select, text, update
from sqlalchemy.orm import Session

from billing.accounts.accounts import DEFAULT_SELLER_ID
from billing.accounts.tables import BillingPeriod
from billing.archive.tables import ClosedUnits
from billing.audit import charges as audit_charges
from billing.audit import ledger as audit_ledger
from billing.audit import reconcile
from billing.closing import closing, row_sums
from billing.closing.row_sums import DaySums, Group, RowSums
from billing.differences import Difference, Since
from billing.invoicing.tables import Invoice, InvoiceLine
from billing.ledger import credits
from billing.ledger.tables import CreditUse, LedgerAccount, LedgerEntry
from billing.rating import rating
from billing.rating.tables import TierPosition
from billing.usage import rollups, usage
from billing.usage.tables import Adjustment, Charge, ClosedDay, UsageBatch
from core.events import CountedBy, EngineCount
from core.money import Money
from tests.billing.archive.test_closed_days import unguarded
from tests.billing.conftest import START, Deployment

DAY, AMOUNT = timedelta(days=1), 43_500_000
TOKENS = {"input_tokens": 100, "cached_tokens": 20, "output_tokens": 50, "waived_tokens": 3}


def used(session: Session, made: Deployment, **fields: Any) -> str:
    event = made.event(**({"engine_id": "engine"} | fields))
    usage.record(session, [event], made.clock)
    rating.rate(session, made.clock)
    return event.request_id


def receipt(session: Session, name: str, counts: tuple[int, int, int], busy: int = 0) -> None:
    usage.store_receipts(session, [EngineCount(name, "engine", *counts, START, busy)])


def flags(rows: RowSums) -> tuple[bool, bool, bool, bool]:
    """Whether charges have events, events charges, and receipts agree and are complete."""
    return (
        rows.every_charge_has_its_event,
        rows.every_event_has_its_charge,
        rows.receipts_agree,
        rows.receipts_complete,
    )


def test_rows_are_summed_by_day_and_by_key(lite: Deployment, session: Session) -> None:
    for number in range(3):
        used(session, lite, project_id=f"p{number}")
    usage.record(session, [lite.event()], lite.clock)  # is not rated yet
    rows = row_sums.read(session, bounds=[1, 3])
    assert flags(rows) == (True, True, True, True)
    once, twice = ({n: count * v for n, v in TOKENS.items()} for count in (1, 2))
    assert rows.sums(0) == {"events": 1} | once | {"charges": 1, "units": AMOUNT}
    assert rows.sums(1) == {"events": 2} | twice | {"charges": 2, "units": 2 * AMOUNT}
    assert rows.sums(2) == {"events": 1} | once | {"charges": 0, "units": 0}
    assert rows.sums(3) == dict.fromkeys(("events", *TOKENS, "charges", "units"), 0)
    assert (rows.frozen(2), rows.frozen(3), rows.moved) == ([], [], [])
    (group,) = rows.groups
    period = session.scalars(select(BillingPeriod.id)).one()
    assert group[:5] == ("acme", period, period, lite.version.id, True)
    assert (group.requests, group.input_tokens, group.amount) == (3, 300, 3 * AMOUNT)
    assert rows.every_group() == [group]
    assert rows.frozen(1) == [(*group[:5], *(2 * value // 3 for value in group.sums))]
    assert rows.charge_sums() == {
        "count": 3,
        **{name: 3 * value for name, value in TOKENS.items()},
        "units": 3 * AMOUNT,
    }
    assert rows.event_sums() == {"count": 4, **{n: 4 * v for n, v in TOKENS.items()}}
    assert rows.receipt_sums() == dict.fromkeys(
        ("count", "input_tokens", "cached_tokens", "generated_tokens"), 0
    )
    later = row_sums.read(session, Since(batch=2))
    assert later.event_sums()["count"] == 2 and later.charges == 1
    assert later.days.keys() == {0}


def test_sums_of_nothing_are_zero(session: Session) -> None:
    rows = row_sums.read(session)
    assert (rows.days, rows.groups, rows.charges, rows.receipts) == ({}, [], 0, (0, 0, 0, 0))
    assert flags(rows) == (True, True, True, True)
    made = RowSums()
    assert made == rows and made.event_sums()["count"] == 0
    day = DaySums({"events": 2}, [("a", 5), ("b", 7)], 3)
    assert RowSums({4: day}).sums(4) == {"events": 2, "charges": 3, "units": 12}
    moved = Group("t", "u", "b", "v", False, (1,) * len(row_sums.SUMS))
    assert RowSums(moved=[moved]).every_group() == [moved]


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("update charges set tenant_id = 'x'", (False, True, True, True)),
        ("update charges set price_version = 'x'", (False, True, True, True)),
        ("update charges set waived_tokens = 4", (False, True, True, True)),
        ("update charges set requests = 4", (True, True, True, True)),
        ("delete from charges", (True, False, True, True)),
        ("delete from usage_events", (False, True, False, True)),
        ("update engine_receipts set prompt_tokens = 99", (True, True, False, True)),
        ("update engine_receipts set cached_tokens = 21", (True, True, False, True)),
        ("update engine_receipts set generated_tokens = 52", (True, True, False, True)),
        ("update engine_receipts set busy_us = 1", (True, True, False, True)),
        ("update engine_receipts set engine_id = 'other'", (True, True, False, True)),
        ("delete from engine_receipts", (True, True, False, True)),
        ("update usage_batches set rated_at = null", (True, True, True, True)),
    ],
)
def test_each_disagreement_is_noticed_by_its_own_flag(
    lite: Deployment, session: Session, statement: str, expected: tuple[bool, ...]
) -> None:
    unguarded(session)
    receipt(session, used(session, lite, counted_by=CountedBy.ENGINE), (100, 20, 53))
    rows = row_sums.read(session)
    assert flags(rows) == (True,) * 4
    assert rows.receipt_sums() == {
        "count": 1,
        "input_tokens": 100,
        "cached_tokens": 20,
        "generated_tokens": 53,
    }
    session.execute(text(statement))
    assert flags(row_sums.read(session)) == expected


@pytest.mark.parametrize(
    ("fields", "counts", "agree", "complete"),
    [
        ({"counted_by": CountedBy.GATEWAY}, None, True, False),
        ({"counted_by": CountedBy.GATEWAY, "paid_by": "operator"}, None, True, True),
        ({"counted_by": CountedBy.GATEWAY}, (1, 1, 53), True, True),
        ({"counted_by": CountedBy.GATEWAY}, (1, 1, 54), False, True),
        ({"counted_by": CountedBy.GATEWAY}, (100, 20, 49), False, True),
        ({"counted_by": CountedBy.ENGINE}, None, False, True),
        ({}, None, True, True),
        ({"paid_by": "operator", "finish_reason": "warm_up"}, (1, 1, 1), True, True),
        ({"paid_by": "operator", "batch_job": "b"}, (1, 1, 1), True, True),
        ({"paid_by": "operator"}, (1, 1, 1), False, True),
    ],
)
def test_receipts_are_compared_as_events_were_counted(
    lite: Deployment,
    session: Session,
    fields: dict[str, Any],
    counts: tuple[int, int, int] | None,
    agree: bool,
    complete: bool,
) -> None:
    name = used(session, lite, **fields)
    if counts is not None:
        receipt(session, name, counts)
    assert flags(row_sums.read(session)) == (True, True, agree, complete)


def test_numbered_prompts_are_summed_and_a_receipt_alone_is_noticed(
    lite: Deployment, session: Session
) -> None:
    name = used(session, lite, counted_by=CountedBy.ENGINE)
    receipt(session, f"{name}.0", (60, 15, 30))
    receipt(session, f"{name}.1", (40, 5, 23))
    rows = row_sums.read(session)
    assert flags(rows) == (True,) * 4 and rows.receipts[0] == 2
    receipt(session, "req_nobody", (1, 0, 1))
    assert flags(row_sums.read(session)) == (True, True, False, True)


@pytest.fixture
def tiered(lite: Deployment) -> Deployment:
    """600,000 output tokens on a closed day and as many on an open one, at 4 a million up to a million
    and then at 2; with credit of 1.00 that was drawn on each."""
    tiers = [{"up_to": 1_000_000, "price": "4"}, {"up_to": None, "price": "2"}]
    terms = {"output": {"scheme": "graduated", "tiers": tiers}}
    lite.version = lite.price(terms, model="tiered")
    fields = {"model": "tiered", "output_tokens": 600_000, "waived_tokens": 0}
    with lite.database.transaction() as session:
        _grant(session, "first")
        used(session, lite, **fields)
    lite.clock.advance(days=1, hours=1)
    assert len(reconcile.close_days(lite.database, lite.clock)) == 1
    lite.clock.advance(days=1)
    assert len(reconcile.close_days(lite.database, lite.clock)) == 1, "and what the first one saw"
    with lite.database.transaction() as session:
        _grant(session, "second")
        used(session, lite, **fields)
    return lite


def _grant(session: Session, name: str) -> None:
    money = Money(10**12)
    credits.grant(session, tenant_id="acme", kind="promo", money=money, reference=name, at=START)


@pytest.mark.parametrize("open_only", [True, False])
def test_an_open_charge_is_priced_after_those_of_closed_days(
    tiered: Deployment, open_only: bool
) -> None:
    cost = 1_000_000 * 4_000_000 + 200_000 * 2_000_000
    with tiered.database.transaction() as session:
        unguarded(session)
        since = closing.open_usage(session) if open_only else Since()
        assert (since.batch > 0, since.entry > 0, since.use > 0) == (open_only,) * 3
        assert audit_charges.charges_and_prices(session, since) == []
        last = session.scalars(select(Charge.request_id).order_by(Charge.request_id.desc())).all()
        one = update(Charge).where(Charge.request_id == last[0])
        session.execute(one.values(output_amount=Charge.output_amount + 3))
        (found,) = audit_charges.charges_and_prices(session, since)
        name = tiered.version.id
        message = f"1200000 output at {name} cost {cost}, but {cost + 3} is charged"
        ids = tuple(sorted(last))
        assert found == Difference("charges/prices", "amount", message, 1, 3, ids, "acme")
        session.execute(one.values(output_amount=Charge.output_amount - 3))
        session.execute(update(TierPosition).values(quantity=TierPosition.quantity - 1))
        (found,) = audit_charges.charges_and_prices(session, since)
        assert (found.units, found.message) == (
            0,
            f"1200000 output at {name} cost {cost}, but {cost} is charged",
        )


@pytest.mark.parametrize("open_only", [True, False])
def test_open_uses_of_a_grant_are_added_to_the_frozen_ones(
    tiered: Deployment, open_only: bool
) -> None:
    with tiered.database.transaction() as session:
        unguarded(session)
        since = closing.open_usage(session) if open_only else Since()
        assert audit_ledger.wallets_and_grants(session, since) == []
        assert audit_ledger.balances_are_sums(session, since) == []
        last = session.scalars(select(CreditUse).order_by(CreditUse.id.desc())).first()
        assert last is not None
        last.units += 9
        session.flush()
        lower = 10**12
        message = f"grant {last.grant_id} is {lower} lower, its uses sum to {lower + 9}"
        assert audit_ledger.wallets_and_grants(session, since) == [
            Difference("grants/uses", "amount", message, 1, -9, (), "acme")
        ]
        last.units -= 9
        _grant(session, "unused")
        assert audit_ledger.wallets_and_grants(session, since) == []


def test_frozen_units_are_added_to_open_entries_and_uses_alone(
    lite: Deployment, session: Session
) -> None:
    _grant(session, "gift")
    used(session, lite)
    use = session.scalars(select(CreditUse)).one()
    query = select(LedgerEntry).join(LedgerAccount).where(LedgerAccount.kind == "revenue")
    entry = session.scalars(query.with_only_columns(LedgerEntry)).one()
    frozen = {"day": START, "units": 1000}
    session.add(ClosedUnits(kind="account", key=str(entry.account_id), **frozen))
    session.add(ClosedUnits(kind="grant", key=use.grant_id, **frozen))
    session.flush()
    assert audit_ledger.balances_are_sums(session) == []
    assert audit_ledger.wallets_and_grants(session) == []
    off = audit_ledger.balances_are_sums(session, Since(entry=entry.id - 1))
    (found,) = (each for each in off if "account revenue" in each.message)
    assert (found.units, found.message) == (
        -1000,
        f"account revenue has balance {-AMOUNT}, its entries sum to {1000 - AMOUNT}",
    )
    (found,) = audit_ledger.wallets_and_grants(session, Since(use=use.id - 1, batch=1))
    message = f"grant {use.grant_id} is {AMOUNT} lower, its uses sum to {AMOUNT + 1000}"
    assert (found.units, found.message) == (-1000, message)
    last = Since(entry=10**6, use=use.id)
    assert audit_ledger.balances_are_sums(session, last) == []
    assert audit_ledger.wallets_and_grants(session, last) == []


@pytest.mark.parametrize("table", [rollups.DAILY, rollups.HOURLY, rollups.TENANT_DAILY])
@pytest.mark.parametrize("open_only", [True, False])
def test_each_roll_up_is_compared_with_the_charges(
    tiered: Deployment, table: Any, open_only: bool
) -> None:
    with tiered.database.transaction() as session:
        since = closing.open_usage(session) if open_only else Since()
        assert audit_charges.charges_and_roll_ups(session, since) == []
        if open_only and table is not rollups.DAILY:  # what is closed is not looked at again
            first = select(table.c.at).order_by(table.c.at).limit(1).scalar_subquery()
            session.execute(update(table).where(table.c.at == first).values(amount=0))
            assert audit_charges.charges_and_roll_ups(session, since) == []
        last = select(table.c.at).order_by(table.c.at.desc()).limit(1).scalar_subquery()
        chosen = update(table).where(table.c.at == last)
        session.execute(chosen.values(amount=table.c.amount + 5))
        found = audit_charges.charges_and_roll_ups(session, since)
    names = {each.message.split()[0]: each.units for each in found}
    if table is rollups.DAILY:
        both = {"usage_daily": 5, "usage_tenant_daily": -5}
        assert names == both | ({"usage_hourly": -5} if open_only else {})
    else:
        assert names == {table.name: 5}
    assert {(each.check, each.kind, each.count, each.tenant_id) for each in found} == {
        ("charges/roll-ups", "amount", 1, "acme")
    }


def test_adjustments_are_added_to_the_charges_of_their_periods(tiered: Deployment) -> None:
    with tiered.database.transaction() as session:
        since = closing.open_usage(session)
        period = session.scalars(select(BillingPeriod.id)).one()
        fields = dict.fromkeys(("transaction_id", "reason"), "x")
        session.add(
            Adjustment(
                tenant_id="acme", component="output", currency="USD", amount=-7,
                usage_period_id=period, bill_period_id=period, created_at=START + 3 * DAY, **fields,
            )
        )  # fmt: skip
        session.flush()
        for part, tables in ((since, {"usage_daily"}), (Since(), {"usage_hourly", "usage_daily"})):
            found = audit_charges.charges_and_roll_ups(session, part)
            assert {(each.message.split()[0], each.units) for each in found} == {
                (name, 7) for name in tables
            }
        (found_in_ledger,) = audit_ledger.charges_and_ledger(session)
        assert found_in_ledger.message == "transaction x has revenue 0, its charges sum to -7"
        session.rollback()


def test_a_day_without_usage_ends_with_the_batch_of_the_day_before(tiered: Deployment) -> None:
    with tiered.database.read() as session:
        days = session.scalars(select(ClosedDay).order_by(ClosedDay.day)).all()
        batches = session.scalars(select(UsageBatch.id).order_by(UsageBatch.id)).all()
        whole = row_sums.read(session)
        since = row_sums.read(session, closing.open_usage(session))
        assert [whole.sums(day)["events"] for day in range(4)] == [1, 0, 1, 0]
        assert [since.sums(day)["events"] for day in range(4)] == [1, 0, 0, 0]
    assert [(each.last_batch, each.sums["events"]) for each in days] == [
        (batches[0], 1),
        (batches[0], 0),
    ]


@pytest.mark.parametrize("gone", ["charges", "lines"])
def test_an_invoice_or_charges_alone_are_told_with_all_that_the_other_lacks(
    lite: Deployment, session: Session, gone: str
) -> None:
    used(session, lite)
    period = session.scalars(select(BillingPeriod)).one()
    fields = {
        "tenant_id": "acme",
        "seller_id": DEFAULT_SELLER_ID,
        "currency": "USD",
        "timezone": "UTC",
    }
    session.add(
        Invoice(
            id="inv_1", period_id=period.id, status="final", period_start=START,
            period_end=START, drafted_at=START, **fields,
        )
    )  # fmt: skip
    draft = {"invoice_id": "inv_1", "position": 1, "kind": "usage", "description": ""}
    bounds = {"starts_at": START, "ends_at": START, "exact": AMOUNT, "amount_minor": 0}
    unguarded(session)
    session.execute(insert(InvoiceLine), [draft | bounds])
    period.closed_at = START
    session.flush()
    assert audit_ledger.charges_and_invoices(session) == []
    session.execute(
        text("delete from charges" if gone == "charges" else "delete from invoice_lines")
    )
    (found,) = audit_ledger.charges_and_invoices(session)
    bills, charged = (AMOUNT, 0) if gone == "charges" else (0, AMOUNT)
    message = f"the invoice of period {period.id} bills {bills}, its charges sum to {charged}"
    assert (found.message, found.units) == (message, bills - charged)
    period.closed_at = None
    session.flush()
    if gone == "lines":
        assert audit_ledger.charges_and_invoices(session) == [], "it is not invoiced yet"
    period.closed_at = START
    session.flush()
    later = Since(day=START + DAY)
    assert audit_ledger.charges_and_invoices(session, later) == []
    assert len(audit_ledger.charges_and_invoices(session, Since(day=START))) == 1
