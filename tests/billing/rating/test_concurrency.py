"""Many at once on PostgreSQL: no negative wallet, no gap in numbers, no event rated twice."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from billing.accounts.tables import BillingPeriod
from billing.audit import reconcile
from billing.invoicing import invoice_run, invoices
from billing.invoicing.tables import Invoice
from billing.ledger import credits
from billing.ledger.ledger import AccountKind, Transaction, balance, post, transfer
from billing.ledger.tables import CreditGrant, LedgerAccount, LedgerEntry
from billing.rating import rating
from billing.usage.tables import Charge
from core.clock import FakeClock
from core.database import Database
from core.errors import Conflict, InsufficientQuota
from core.money import Money
from tests.billing.conftest import Deployment, deployment_of


@pytest.fixture
def busy(postgres_database: Database, clock: FakeClock) -> Deployment:
    return deployment_of(postgres_database, clock)


def at_once(count: int, call: Any) -> list[Any]:
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(call, range(count)))


def summed(session: Session, kind: AccountKind) -> int:
    """Acme's balance, summed from the entries."""
    query = select(func.coalesce(func.sum(LedgerEntry.units), 0)).join(
        LedgerAccount, LedgerAccount.id == LedgerEntry.account_id
    )
    own = (LedgerAccount.tenant_id == "acme", LedgerAccount.kind == kind.value)
    return int(session.scalar(query.where(*own)) or 0)


def test_sixty_four_spenders_cannot_overdraw_a_wallet(busy: Deployment) -> None:
    now = busy.clock.now()

    def _entries(kind: AccountKind, units: int) -> Any:
        return transfer(kind, AccountKind.PREPAID, Money(units))

    with busy.database.transaction() as session:
        entries = _entries(AccountKind.CASH, 40)
        post(session, Transaction("acme", "grant", "fill", now, entries))

    def _spend(number: int) -> bool:
        try:
            with busy.database.transaction() as session:
                entries = transfer(AccountKind.PREPAID, AccountKind.RECEIVABLE, Money(1))
                post(session, Transaction("acme", "usage", f"spend {number}", now, entries))
        except InsufficientQuota:
            return False
        return True

    spent = at_once(64, _spend)
    assert sum(spent) == 40
    with busy.database.read() as session:
        assert balance(session, "acme", AccountKind.PREPAID, "USD") == 0
        assert summed(session, AccountKind.PREPAID) == 0


def test_the_same_cause_posted_by_many_is_posted_once(busy: Deployment) -> None:
    now = busy.clock.now()

    def _post(_: int) -> str:
        from sqlalchemy.exc import IntegrityError

        try:
            with busy.database.transaction() as session:
                entries = transfer(AccountKind.CASH, AccountKind.PREPAID, Money(7))
                return post(session, Transaction("acme", "grant", "one cause", now, entries))
        except IntegrityError:
            return "refused"

    at_once(16, _post)
    with busy.database.read() as session:
        assert balance(session, "acme", AccountKind.PREPAID, "USD") == -7


def test_workers_share_batches_and_close_tenants_side_by_side(busy: Deployment) -> None:
    tenants = [f"t{number}" for number in range(12)]
    for name in tenants:
        busy.tenant(name)
    for _ in range(16):
        busy.record(*[busy.event(tenant_id=name, output_tokens=999) for name in tenants])

    def _rate(_: int) -> int:
        total = 0
        while True:
            with busy.database.transaction() as session:
                rated = rating.rate(session, busy.clock, most_events=30)
            if not rated.batches:
                return total
            total += rated.events

    assert sum(at_once(6, _rate)) == 16 * 12
    with busy.database.read() as session:
        assert session.scalar(select(func.count()).select_from(Charge)) == 16 * 12
        periods = list(session.scalars(select(BillingPeriod.id)))
    busy.clock.advance(days=40)

    def _close(number: int) -> None:
        with busy.database.transaction() as session:
            invoices.finalise(session, busy.clock, periods[number % len(periods)])

    at_once(24, _close)
    with busy.database.read() as session:
        numbers = list(session.scalars(select(Invoice.number).order_by(Invoice.number)))
        report = reconcile.audit(session)
    assert numbers == list(range(1, 13))
    assert report.clean, report.differences
    assert invoice_run.run(busy.database, busy.clock).finalised == []


def test_a_grant_that_was_used_meanwhile_is_not_taken_back(busy: Deployment) -> None:
    now = busy.clock.now()
    with busy.database.transaction() as session:
        whole = Money(100, "USD")
        made = credits.grant(
            session, tenant_id="acme", kind="promo", money=whole, reference="gift", at=now
        ).id
    with busy.database.transaction() as session:
        read = session.get_one(CreditGrant, made)  # as by a page
        assert read.remaining == 100
        busy.record(busy.event())
        busy.rate()
        with pytest.raises(Conflict, match="are used"):
            credits.take_back(session, made, now, "in error")
        assert read.remaining < 100
