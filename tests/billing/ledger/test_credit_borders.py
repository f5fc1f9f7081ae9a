"""Credit at its borders: which grant pays for what, in which order, and how it returns."""

from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from billing.invoicing import credit_notes
from billing.invoicing.tables import Invoice
from billing.ledger import credits, ledger
from billing.ledger.credits import Draw, Return
from billing.ledger.ledger import AccountKind
from billing.ledger.tables import CreditGrant, CreditUse
from core.errors import BadRequest, Conflict, NotFound
from core.money import Money
from tests.billing.archive.test_closed_days import unguarded
from tests.billing.conftest import START, Deployment
from tests.billing.payments.test_settlement import Customer, customer

__all__ = ["customer"]
DAY, INSTANT = timedelta(days=1), timedelta(microseconds=1)


def grant(session: Session, name: str, units: int = 100, **fields: Any) -> CreditGrant:
    plain = {"tenant_id": "acme", "kind": "promo", "at": START, "reference": name}
    return credits.grant(session, money=Money(units), **(plain | fields))


def row(name: str, left: int, **fields: Any) -> CreditGrant:
    plain = {"tenant_id": "acme", "kind": "promo", "priority": 100, "granted_at": START}
    plain |= {"currency": "USD", "granted": 100, "reference": name}
    return CreditGrant(id=name, remaining=left, **(plain | fields))


def left(grants: list[CreditGrant]) -> list[int]:
    return [each.remaining for each in grants]


def balances(session: Session) -> dict[str, int]:
    kinds = ("prepaid", "promo", "cash", "promotion", "receivable", "bad_debt")
    found = {k: ledger.balance(session, "acme", AccountKind(k), "USD") for k in kinds}
    return {kind: units for kind, units in found.items() if units}


def test_grants_pay_by_priority_expiry_kind_and_age_until_they_expire(
    lite: Deployment, session: Session
) -> None:
    made = {
        "last": grant(session, "last", priority=101),
        "bought": grant(session, "bought", kind="prepaid"),
        "younger": grant(session, "younger", at=START + INSTANT),
        "given": grant(session, "given"),
        "bought, expires": grant(session, "d", kind="prepaid", expires_at=START + 2 * DAY),
        "given, expires": grant(session, "e", expires_at=START + 2 * DAY),
        "next": grant(session, "next", expires_at=START + DAY),
        "first": grant(session, "first", priority=99),
        "used up": grant(session, "used"),
    }
    made["used up"].remaining = 0
    session.flush()
    names = {each.id: name for name, each in made.items()}

    def found(at: datetime) -> list[str]:
        by_tenant = credits.open_grants(session, ["acme", "beta"], at)
        assert by_tenant.keys() == {"acme"}
        return [names[each.id] for each in by_tenant["acme"]]

    without = ["first", "given, expires", "bought, expires", "given", "younger", "bought", "last"]
    assert found(START + DAY - INSTANT) == ["first", "next", *without[1:]]
    assert found(START + DAY) == without
    assert credits.open_grants(session, ["beta"], START) == {}


def test_a_draw_takes_what_each_grant_has_and_no_more_than_is_owed() -> None:
    grants = [row("a", 30), row("empty", 0), row("b", 50, kind="prepaid"), row("c", 20)]
    assert credits.draw(grants, 0) == []
    assert credits.draw(grants, 40) == [Draw("a", "promo", 30), Draw("b", "prepaid", 10)]
    assert left(grants) == [0, 0, 40, 20]
    assert credits.draw(grants, 100, ("promo",)) == [Draw("c", "promo", 20)]
    assert credits.draw_whole(grants, 41, "prepaid") == []
    assert credits.draw_whole(grants, 40, "promo") == []
    assert left(grants) == [0, 0, 40, 0]
    assert credits.draw_whole(grants, 40, "prepaid") == [Draw("b", "prepaid", 40)]
    assert credits.draw(grants, 1) == []


def test_a_grant_pays_for_what_was_used_before_it_expired_the_earliest_first() -> None:
    usage = [(START + 2 * DAY, 50), (START, 30), (START + DAY, 20)]
    grants = [
        row("early", 40, expires_at=START + DAY),  # of the first 30 alone
        row("second", 25, expires_at=START + DAY + INSTANT),  # of the 20 that are left there
        row("open", 45),
        row("open too", 45),
    ]
    assert credits.draw_in_time(grants, usage) == [
        Draw("early", "promo", 30),
        Draw("second", "promo", 20),
        Draw("open", "promo", 45),
        Draw("open too", "promo", 5),
    ]
    assert left(grants) == [10, 5, 0, 40]
    late = [row("over", 40, expires_at=START)]
    assert credits.draw_in_time(late, usage) == [] and left(late) == [40]


def test_a_refunding_correction_lowers_what_a_grant_pays() -> None:
    grants = [row("a", 100)]
    usage = [(START, -10), (START + DAY, 30)]
    assert credits.draw_in_time(grants, usage) == [Draw("a", "promo", 20)]


def test_credit_is_granted_once_and_says_who_pays_for_it(
    lite: Deployment, session: Session
) -> None:
    made = grant(session, "gift", 7, note="welcome", expires_at=START + DAY)
    assert (made.priority, made.granted, made.remaining, made.note) == (100, 7, 7, "welcome")
    assert (made.granted_at, made.expires_at) == (START, START + DAY)
    assert grant(session, "gift", 9) is made
    grant(session, "bought", 20, kind="prepaid")
    grant(session, "returned", 300, funded_by=AccountKind.RECEIVABLE)
    assert balances(session) == {
        "promo": -307,
        "prepaid": -20,
        "promotion": 7,
        "cash": 20,
        "receivable": 300,
    }
    for fields, reason in (
        ({"kind": "gift"}, "kind 'gift' over 1 units"),
        ({"units": 0}, "kind 'promo' over 0 units"),
    ):
        with pytest.raises(BadRequest, match=reason):
            grant(session, "none", **({"units": 1} | fields))
    with pytest.raises(BadRequest, match="The account is in USD, the credit in EUR"):
        credits.grant(
            session, tenant_id="acme", kind="promo", money=Money(1, "EUR"), reference="e", at=START
        )


def test_a_whole_grant_is_taken_back_and_a_used_one_is_not(
    lite: Deployment, session: Session
) -> None:
    made, used = grant(session, "gift", 50), grant(session, "used", 50)
    used.remaining = 49
    session.flush()
    with pytest.raises(Conflict, match="USD of this credit are used"):
        credits.take_back(session, used.id, START, "error")
    assert credits.take_back(session, made.id, START + DAY, "error").remaining == 0
    assert balances(session) == {"promo": -50, "promotion": 50}
    (use,) = session.scalars(select(CreditUse))
    assert (use.grant_id, use.tenant_id, use.kind, use.units) == (made.id, "acme", "promo", 50)
    assert (use.purpose, use.bill_period_id, use.at) == ("undo", None, START + DAY)


@pytest.mark.parametrize(
    ("most", "given"),
    [
        (None, [(40, "prepaid", 7, None), (30, "promo", 9, START + DAY)]),
        (40, [(40, "prepaid", 7, None)]),
        (41, [(40, "prepaid", 7, None), (1, "promo", 9, START + DAY)]),
        (0, []),
    ],
)
def test_what_was_used_last_returns_first(
    lite: Deployment, session: Session, most: int | None, given: list[tuple[Any, ...]]
) -> None:
    first = grant(session, "a", priority=9, expires_at=START + DAY)
    last = grant(session, "b", priority=7, kind="prepaid")
    used = [Draw(first.id, "promo", 30), Draw(last.id, "prepaid", 40)]
    cause = Return("void:1", START, "again", AccountKind.RECEIVABLE)
    assert credits.give_back(session, used, cause, most) == sum(each[0] for each in given)
    rows = session.scalars(
        select(CreditGrant)
        .where(CreditGrant.reference.startswith("void:1"))
        .order_by(CreditGrant.reference)
    ).all()
    assert [(r.remaining, r.kind, r.priority, r.expires_at) for r in rows] == given
    assert [r.reference for r in rows] == [f"void:1:{n}" for n in range(len(given))]
    assert {r.note for r in rows} <= {"again"}


@pytest.mark.parametrize(
    ("due", "paid", "credited", "gross", "refund", "shares"),
    [
        (100, 0, 0, 30, True, (30, 0, 0)),
        (100, 100, 0, 30, True, (0, 30, 0)),
        (100, 100, 0, 30, False, (0, 0, 30)),
        (100, 60, 0, 50, True, (40, 10, 0)),
        (100, 60, 0, 50, False, (40, 0, 10)),
        (30, 30, 0, 50, True, (0, 30, 20)),
        (100, 100, 30, 90, True, (0, 70, 20)),  # an earlier note left 30 to refunds
        (0, 0, 0, 10, True, (0, 0, 10)),
    ],
)
def test_a_note_lowers_what_is_open_then_repays_then_is_credit(
    due: int, paid: int, credited: int, gross: int, refund: bool, shares: tuple[int, int, int]
) -> None:
    invoice = Invoice(status="final", due_minor=due, paid_minor=paid, credited_minor=credited)
    assert credit_notes._shares(invoice, gross, refund) == shares


def test_a_note_is_numbered_and_has_the_tax_of_its_net(customer: Customer) -> None:
    """Of 12.00 net, with 2.28 of tax set on the invoice: a third of it is 0.76."""
    made = customer.deployment
    with made.database.transaction() as session:
        unguarded(session)
        invoice = session.get_one(Invoice, customer.invoice_id)
        invoice.tax_minor, invoice.total_minor, invoice.due_minor = 228, 1428, 1428
    for name, minor, tax, label in (
        ("a", 400, 76, "TH-CN-000001"),
        ("b", 799, 152, "TH-CN-000002"),
    ):
        note = customer.note(minor, name=name)
        assert (note.net_minor, note.tax_minor, note.label) == (minor, tax, label)
        assert (note.number, note.outcome) == (int(label[-1]), "due")
        assert customer.note(9999, name=name).id == note.id, "once a reference"
    assert customer.invoice.credited_minor == 400 + 76 + 799 + 152
    for minor, left_over in ((2, 1), (0, 1), (-1, 1)):
        with pytest.raises(
            Conflict, match=f"net_minor is {minor}; invoice .* has {left_over} minor"
        ):
            customer.note(minor, name="c")
    assert customer.note(1, name="c").tax_minor == 0
    assert customer.invoice.status == "paid"
    with pytest.raises(Conflict, match="has 0 minor units net left") as refused:
        customer.note(1, name="d")
    assert refused.value.next_step == "Nothing is left to credit."


def test_what_has_no_credit_note_says_so(customer: Customer) -> None:
    note = customer.note(300)
    with customer.deployment.database.transaction() as session:
        assert credit_notes.get(session, note.id) is credit_notes.get(session, note.label)
        with pytest.raises(NotFound, match="There is no credit note 'CN-9'"):
            credit_notes.get(session, "CN-9")
        with pytest.raises(NotFound, match="There is no invoice 'inv_9'"):
            credit_notes.issue(
                session, invoice_id="inv_9", net_minor=1, reason="", reference="x", at=START
            )
    customer.write_off()
    with pytest.raises(Conflict, match="is uncollectible; only final and paid invoices"):
        customer.note(1, name="late")


def cancel(customer: Customer, note_id: str) -> str:
    with customer.deployment.database.transaction() as session:
        note = credit_notes.get(session, note_id)
        made = credit_notes.cancel(session, note, "slip", customer.deployment.clock.now())
        return made.id


@pytest.mark.parametrize(("paid", "outcome"), [(0, "due"), (1200, "balance")])
def test_a_note_is_taken_back_by_one_of_its_own_number(
    customer: Customer, paid: int, outcome: str
) -> None:
    if paid:
        customer.pay(paid, "wire")
    note = customer.note(500)
    assert note.outcome == outcome
    second = cancel(customer, note.id)
    with customer.deployment.database.read() as session:
        found = credit_notes.get(session, second)
        assert (found.net_minor, found.tax_minor, found.number) == (-500, 0, 2)
        assert (found.outcome, found.reason) == ("cancels", f"Cancels {note.label}: slip")
        assert found.reference == f"cancel:{note.id}"
    assert customer.invoice.credited_minor == 0
    assert customer.invoice.status == ("paid" if paid else "final")
    customer.has(**({"cash": "12"} if paid else {"receivable": "12"}))
    for again, reason in (
        (note.id, "is cancelled by TH-CN-000002"),
        (second, "cancellation itself"),
    ):
        with pytest.raises(Conflict, match=reason):
            cancel(customer, again)


def test_a_note_on_an_invoice_that_is_closed_or_elsewhere_is_not_taken_back(
    customer: Customer,
) -> None:
    note = customer.note(500)
    for fields in ({"external_id": "in_1"}, {"external_id": None, "status": "uncollectible"}):
        with customer.deployment.database.transaction() as session:
            for name, value in fields.items():
                setattr(session.get_one(Invoice, customer.invoice_id), name, value)
        with pytest.raises(Conflict, match="its credit notes cannot be taken back"):
            cancel(customer, note.id)
