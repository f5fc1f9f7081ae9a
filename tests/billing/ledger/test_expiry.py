"""Credit and its expiry: what was used in time is paid by it, whenever it is rated or invoiced."""

from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from billing.invoicing import invoice_run
from billing.invoicing.tables import Invoice
from billing.ledger import credits, expiry, ledger
from billing.ledger.ledger import AccountKind
from billing.ledger.tables import CreditGrant, CreditUse
from billing.payments import settlement
from billing.rating import rating
from billing.subscriptions.subscriptions import subscribe
from billing.subscriptions.tables import Plan
from core.money import Money, units_of
from tests.billing.conftest import START, Deployment
from tests.billing.invoicing.test_invoices import clean

FEBRUARY = START + timedelta(days=31)


def grant(deployment: Deployment, dollars: str, reference: str = "gift", **fields: Any) -> None:
    with deployment.database.transaction() as session:
        credits.grant(
            session,
            tenant_id="acme",
            kind=fields.pop("kind", credits.PROMO),
            money=Money(units_of(dollars)),
            reference=reference,
            at=deployment.clock.now(),
            **fields,
        )


def use(deployment: Deployment, tokens: int, at: datetime) -> None:
    deployment.clock.set(max(at, deployment.clock.now()))
    deployment.record(
        deployment.event(
            input_tokens=0, cached_tokens=0, waived_tokens=0, output_tokens=tokens, occurred_at=at
        )
    )


def expire(deployment: Deployment) -> None:
    with deployment.database.transaction() as session:
        expiry.expire(session, deployment.clock.now())


def balances(deployment: Deployment) -> dict[str, int]:
    kinds = ("receivable", "promo", "prepaid", "promotion", "revenue")
    with deployment.database.read() as session:
        found = {k: ledger.balance(session, "acme", AccountKind(k), "USD") for k in kinds}
    clean(deployment)
    return {kind: units for kind, units in found.items() if units}


def test_it_says_how_many_grants_expired(lite: Deployment) -> None:
    for reference, days in (("a", 5), ("b", 5), ("c", 7)):
        grant(lite, "1", reference, expires_at=START + timedelta(days=days))
    for days, count in ((5, 2), (6, 0), (7, 1)):
        with lite.database.transaction() as session:
            assert expiry.expire(session, START + timedelta(days=days)) == count


@pytest.mark.parametrize("expired_first", [True, False])
def test_credit_that_was_used_in_time_pays_though_it_is_rated_after_its_expiry(
    deployment: Deployment, expired_first: bool
) -> None:
    grant(deployment, "10", expires_at=START + timedelta(days=5))
    use(deployment, 5_000_000, START + timedelta(days=4))  # 3.00
    deployment.clock.set(START + timedelta(days=6))
    if expired_first:
        expire(deployment)
    deployment.rate()
    expire(deployment)
    # The charge of 3.00 is paid; the other 7.00 have expired.
    assert balances(deployment) == {"promotion": units_of("3"), "revenue": -units_of("3")}


def test_usage_after_the_expiry_is_not_paid_by_it_nor_at_its_very_moment(
    lite: Deployment,
) -> None:
    until = START + timedelta(days=5)
    grant(lite, "10", expires_at=until)
    for at, tokens in (
        (until, 1_000_000),
        (until - timedelta(microseconds=1), 2_000_000),
        (until + timedelta(hours=1), 4_000_000),
    ):
        lite.clock.set(until + timedelta(days=1))
        use(lite, tokens, at)
    lite.rate()
    expire(lite)
    # 7 million are charged, 2 million of them are paid.
    assert balances(lite) == {
        "receivable": units_of("3"),
        "promotion": units_of("1.20"),
        "revenue": -units_of("4.20"),
    }


def test_expired_credit_that_comes_back_pays_no_more_than_was_left_and_expires_again(
    lite: Deployment,
) -> None:
    grant(lite, "2", kind=credits.PREPAID, expires_at=START + timedelta(days=5))
    late_at = START + timedelta(days=4)
    for _ in range(3):
        lite.clock.advance(days=7)
        expire(lite)
        use(lite, 2_000_000, late_at)  # 1.20
        with lite.database.transaction() as session:
            rating.rate(session, lite.clock)
    expire(lite)
    # 3.60 are charged, the 2.00 pay their part; nothing is left to become revenue of its own.
    paid = {"receivable": units_of("1.60"), "revenue": -units_of("3.60")}
    assert balances(lite) == paid
    with lite.database.read() as session:
        (row,) = session.scalars(select(CreditGrant))
        assert row.remaining == 0


@pytest.mark.parametrize("expired_first", [True, False])
def test_credit_that_lasts_until_the_end_of_the_period_pays_the_fees_of_it(
    lite: Deployment, expired_first: bool
) -> None:
    with lite.database.transaction() as session:
        session.add(
            Plan(id="p", name="p", currency="USD", base_fee=units_of("31"), created_at=START)
        )
        session.flush()
        subscribe(session, "acme", "p", START)
    grant(lite, "40", expires_at=FEBRUARY)
    grant(lite, "40", "too short", expires_at=FEBRUARY - timedelta(microseconds=1))
    lite.clock.set(FEBRUARY + timedelta(days=2))
    if expired_first:
        expire(lite)
    (first,) = invoice_run.run(lite.database, lite.clock, current=False).finalised
    expire(lite)
    with lite.database.read() as session:
        invoice = session.get_one(Invoice, first)
        assert (invoice.promo_minor, invoice.due_minor, invoice.status) == (3100, 0, "paid")
    assert balances(lite) == {"promotion": units_of("31"), "revenue": -units_of("31")}


def test_credit_without_a_priority_has_that_of_a_hundred(lite: Deployment) -> None:
    grant(lite, "1")
    lite.clock.advance(hours=1)
    grant(lite, "2", "later", priority=100)
    grant(lite, "3", "last", priority=101)
    with lite.database.read() as session:
        (found,) = credits.open_grants(session, ["acme"], lite.clock.now()).values()
        assert [(each.granted, each.priority) for each in found] == [
            (units_of("1"), 100), (units_of("2"), 100), (units_of("3"), 101),
        ]  # fmt: skip


def test_a_void_returns_credit_with_its_expiry_and_priority(lite: Deployment) -> None:
    end = START + timedelta(days=100)
    grant(lite, "2", expires_at=end, priority=3)
    grant(lite, "3", "bought", kind=credits.PREPAID, expires_at=end + timedelta(days=1))
    use(lite, 10_000_000, START + timedelta(days=1))  # 6.00: 2 given, 3 bought, 1 due
    lite.clock.set(FEBRUARY + timedelta(days=2))
    (first,) = invoice_run.run(lite.database, lite.clock, current=False).finalised
    with lite.database.transaction() as session:
        settlement.void(session, first, lite.clock.now(), "in error")
        open_ = credits.open_grants(session, ["acme"], lite.clock.now())["acme"]
        assert [(g.kind, g.remaining, g.expires_at, g.priority) for g in open_] == [
            ("promo", units_of("2"), end, 3),
            ("prepaid", units_of("3"), end + timedelta(days=1), 100),
        ]
    lite.clock.set(end + timedelta(days=2))
    expire(lite)
    assert balances(lite) == {"revenue": -units_of("3")}  # the 3.00 bought have expired


def test_surplus_credit_returns_with_its_expiry(lite: Deployment) -> None:
    """A plan includes what the credit has paid for already."""
    with lite.database.transaction() as session:
        session.add(
            Plan(id="p", name="p", currency="USD", included_usage=units_of("4"), created_at=START)
        )
        session.flush()
        subscribe(session, "acme", "p", START)
    end = START + timedelta(days=100)
    grant(lite, "6", expires_at=end)
    use(lite, 10_000_000, START + timedelta(days=1))  # 6.00, paid by the credit
    lite.rate()
    lite.clock.set(FEBRUARY + timedelta(days=2))
    invoice_run.run(lite.database, lite.clock, current=False)
    with lite.database.read() as session:
        open_ = credits.open_grants(session, ["acme"], lite.clock.now())["acme"]
        assert [(g.kind, g.remaining, g.expires_at) for g in open_] == [
            ("promo", units_of("4"), end)
        ]
    clean(lite)


def test_usage_at_the_moment_of_expiry_moves_no_credit(lite: Deployment) -> None:
    until = START + timedelta(days=5)
    grant(lite, "10", expires_at=until)
    lite.clock.set(until)
    expire(lite)
    use(lite, 1_000_000, until)
    lite.rate()
    with lite.database.read() as session:
        moved = session.scalars(
            select(CreditUse.units).where(CreditUse.purpose == expiry.EXPIRY)
        ).all()
    assert list(moved) == [units_of("10")], "it expired once and was not brought back"


def test_the_last_picounit_of_a_grant_expires_as_any_other(lite: Deployment) -> None:
    until = START + timedelta(days=5)
    with lite.database.transaction() as session:
        credits.grant(
            session,
            tenant_id="acme",
            kind=credits.PROMO,
            money=Money(1),
            reference="gift",
            at=START,
            expires_at=until,
        )
    lite.clock.set(until)
    expire(lite)
    with lite.database.read() as session:
        (row,) = session.scalars(select(CreditGrant))
    assert (row.remaining, row.expired_at) == (0, until)


def test_credit_that_is_used_up_while_expiry_waits_for_the_lock_does_not_expire(
    lite: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    grant(lite, "10", expires_at=START + timedelta(days=5))
    lite.clock.set(START + timedelta(days=6))

    def _used_before_the_lock(session: Session, tenant_id: str) -> None:
        session.execute(update(CreditGrant).values(remaining=0))

    monkeypatch.setattr(expiry, "lock_account", _used_before_the_lock)
    expire(lite)
    with lite.database.read() as session:
        assert session.scalars(select(CreditUse)).all() == []
        assert session.scalars(select(CreditGrant.expired_at)).one() is None
