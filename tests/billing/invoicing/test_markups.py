"""A reseller earns its mark-up as its customer pays: the figures are worked out by hand.

The child's invoice of January is over 113.34: 100.75 of charges and 12.59 of mark-up, no tax. What
happens to it before the parent's invoice of January, of February and of March stands in a table.
"""

from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import update

from billing.audit import reconcile
from billing.invoicing import credit_notes
from billing.ledger import credits
from billing.ledger.tables import CreditGrant
from billing.payments import settlement, withdrawals
from billing.payments.tables import Payment
from billing.subscriptions.tables import Plan
from core.clock import FakeClock
from core.database import Database
from core.money import Money, units_of
from tests.billing.adjustments.test_organisations import link, pair_of, plan, run, shown, subscribe
from tests.billing.conftest import START, Deployment, deployment_of

Step = tuple[str, Any]
DUE, MARKUP = 11_334, 1_259

CASES: dict[str, tuple[list[list[Step]], list[int]]] = {
    "never paid": ([[], [], []], [0, 0, 0]),
    "paid at once": ([[("pay", DUE)], [], []], [MARKUP, 0, 0]),
    "paid late": ([[], [("pay", DUE)], []], [0, MARKUP, 0]),
    # 12.59 x 56.67 / 113.34 is 6.295
    "paid in halves": ([[("pay", 5_667)], [], [("pay", 5_667)]], [630, 0, 629]),
    "paid by a cent": ([[("pay", 1)], [("pay", DUE - 1)], []], [0, MARKUP, 0]),
    "written off": ([[], [("write off", None)], []], [0, 0, 0]),
    "written off after a half": ([[("pay", 5_667)], [("write off", None)], []], [630, 0, 0]),
    "recovered": ([[("write off", None)], [], [("pay", DUE)]], [0, 0, MARKUP]),
    "refunded": ([[("pay", DUE)], [("refund", DUE)], []], [MARKUP, -MARKUP, 0]),
    "a half refunded": ([[("pay", DUE)], [("refund", 5_667)], []], [MARKUP, 630 - MARKUP, 0]),
    "disputed": ([[("pay", DUE)], [("dispute", DUE)], []], [MARKUP, -MARKUP, 0]),
    "disputed and won": (
        [[("pay", DUE)], [("dispute", DUE)], [("won", DUE)]],
        [MARKUP, -MARKUP, MARKUP],
    ),
    "credited unpaid": ([[("credit", DUE)], [], []], [0, 0, 0]),
    "credited when paid": ([[("pay", DUE)], [("credit", DUE)], []], [MARKUP, -MARKUP, 0]),
    "void": ([[("void", None)], [], []], [0, 0, 0]),
    "void later": ([[], [("void", None)], []], [0, 0, 0]),
    "overpaid": ([[("pay", 2 * DUE)], [], []], [MARKUP, 0, 0]),
}


@pytest.fixture
def pair(lite: Deployment) -> Deployment:
    return pair_of(lite)


def act(made: Deployment, invoice_id: str, step: Step) -> None:
    kind, amount = step
    with made.database.transaction() as session:
        now = made.clock.now()
        payment = session.query(Payment).filter_by(invoice_id=invoice_id).first()
        if kind == "pay":
            begun = settlement.begin_payment(
                session,
                tenant_id="lab",
                invoice_id=invoice_id,
                amount_minor=amount,
                currency="USD",
                provider="manual",
                reference=f"{now:%Y-%m-%d}-{amount}",
                at=now,
            )
            settlement.succeed(session, begun, now)
        elif kind == "write off":
            settlement.write_off(session, invoice_id, now)
        elif kind == "void":
            settlement.void(session, invoice_id, now, "wrong")
        elif kind == "credit":
            credit_notes.issue(
                session,
                invoice_id=invoice_id,
                net_minor=amount,
                reason="wrong",
                reference="note",
                at=now,
            )
        elif kind == "refund":
            assert payment is not None
            settlement.refund(session, payment, amount, "back", now)
        elif kind == "dispute":
            assert payment is not None
            cause = withdrawals.Withdrawal("dispute:d", now, withdrawals.DISPUTE)
            withdrawals.withdraw(session, payment, amount, cause)
        elif kind == "won":
            assert payment is not None
            withdrawals.reverse_withdrawal(session, payment, amount, "dispute:d", now)


def earned(made: Deployment) -> list[int]:
    """Minor units by the parent's invoices, which its own fee makes one a month."""
    return [
        -sum(
            round(float(line["billed"]["text"]) * 100)
            for line in invoice["lines"]
            if line["kind"] == "child_markup"
        )
        for invoice in shown(made, "holding")
    ]


@pytest.mark.parametrize("name", CASES)
def test_a_parent_earns_what_the_child_has_paid(pair: Deployment, name: str) -> None:
    _earns_as_paid(pair, name)


def test_a_parent_earns_the_same_on_postgresql(postgres_database: Database) -> None:
    _earns_as_paid(pair_of(deployment_of(postgres_database, FakeClock())), "disputed and won")


def _earns_as_paid(pair: Deployment, name: str) -> None:
    months, expected = CASES[name]
    plan(pair, "small", "50")
    subscribe(pair, "holding", "small")
    link(pair, "lab", "holding", "self", "12.5")
    first = None
    for number, steps in enumerate(months):
        pair.clock.set(START + timedelta(days=31 * number + 36))
        if number == 0:
            run(pair, tenant_ids=["lab"])
            first = shown(pair, "lab")[0]["id"]
            with (
                pair.database.transaction() as session
            ):  # later months of the child have no charges
                session.execute(update(Plan).where(Plan.id == "fees").values(base_fee=0))
        assert first is not None
        for step in steps:
            act(pair, first, step)
        run(pair)
    run(pair)
    assert earned(pair)[:3] == expected
    with pair.database.read() as session:
        assert reconcile.audit(session).differences == ()


@pytest.mark.parametrize("pays", ["self", "parent"])
@pytest.mark.parametrize(
    ("promotion", "ends", "kept", "passed"),
    [
        # All of 113.34: nothing is money, and all of the mark-up passes on as what it was.
        ("200", START + timedelta(days=90), 0, "12.59"),
        ("200", None, 0, "12.59"),
        ("200", START + timedelta(days=35), 0, ""),  # has ended when the parent's invoice is made
        # 12.59 x 56.67 / 113.34 is 6.295
        ("56.67", None, 629, "6.3"),
    ],
)
def test_a_promotion_passes_on_as_a_promotion(
    pair: Deployment, pays: str, promotion: str, ends: datetime | None, kept: int, passed: str
) -> None:
    with pair.database.transaction() as session:
        credits.grant(
            session,
            tenant_id="lab",
            kind=credits.PROMO,
            money=Money(units_of(promotion), "USD"),
            reference="welcome",
            at=pair.clock.now(),
            expires_at=ends,
        )
    plan(pair, "small", "50")
    subscribe(pair, "holding", "small")
    link(pair, "lab", "holding", pays, "12.5")
    pair.rate()
    pair.clock.set(START + timedelta(days=36))
    run(pair, tenant_ids=["lab"])
    (child,) = shown(pair, "lab")
    if pays == "self" and kept:
        act(pair, child["id"], ("pay", DUE - 5_667))
    run(pair)
    if pays == "self":
        assert earned(pair) == [kept]
    with pair.database.read() as session:
        grants = session.query(CreditGrant).filter_by(tenant_id="holding").all()
        found = [(each.kind, each.granted, each.expires_at) for each in grants]
        wanted = [("promo", units_of(passed), ends)] if passed else []
        assert found == wanted
        assert reconcile.audit(session).differences == ()
