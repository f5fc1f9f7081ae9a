"""What each kind of act on money concerns, what it shows when it is posted, and what the log keeps."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from billing.adjustments import money_acts
from billing.adjustments.act_requests import ActRequest, Kind, Subject
from billing.adjustments.money_act_kinds import find, resolve
from billing.adjustments.money_acts import FourEyes
from billing.adjustments.tables import MoneyAct
from billing.ledger.ledger import AccountKind, Transaction, post, transfer
from billing.ledger.tables import CreditGrant
from billing.payments.tables import Payment
from billing.subscriptions import add_ons, subscriptions
from core.clock import FakeClock
from core.errors import BadRequest, Conflict, NotFound
from core.money import Money, units_of
from core.tenants.models import AuditEntry, Tenant
from tests.billing.conftest import START, Deployment
from tests.billing.payments.provider_rows import invoice_row, payment_row

CENT = 10**10  # picounits
NOW = START + timedelta(days=9)
CLOCK = FakeClock(NOW)
NONE = FourEyes()


@pytest.fixture
def books(lite: Deployment) -> Any:
    """An invoice of 10.00, 1.00 of it paid, a plan with seats, an add-on and a payment of 5.00."""
    with lite.database.transaction() as session:
        session.get_one(Tenant, "acme").name = "Acme Inc"
        invoice_row(session, 1, paid_minor=100, total_minor=1300, sent=False)
        payment_row(session, "a", provider="manual", refunded_minor=150)
        fees = {"base_fee": units_of("10"), "seat_fee": units_of("3"), "included_seats": 2}
        subscriptions.create_plan(session, START, {"name": "team", "currency": "USD", **fees})
        add_ons.create(session, START, "support", units_of("0.5"), currency="USD")
        money = Money(1300 * CENT, "USD")
        owed = transfer(AccountKind.RECEIVABLE, AccountKind.REVENUE, money)
        post(session, Transaction("acme", "invoice", "invoice:inv_01", START, owed))
        yield session


@pytest.mark.parametrize(
    ("kind", "target", "amount", "terms", "found", "units"),
    [
        (Kind.GRANT, "Acme Inc", "0.001", None, "acme", "0.001"),
        (Kind.GRANT, "acme", "5", {"kind": "promo"}, "acme", "5"),
        (Kind.CREDIT_NOTE, "inv_01", None, None, "inv_01", "9"),
        (Kind.CREDIT_NOTE, "TH-01", "2", None, "inv_01", "2"),
        (Kind.VOID, "inv_01", None, None, "inv_01", "13"),
        (Kind.VOID, "inv_01", "4", None, "inv_01", "4"),
        (Kind.WRITE_OFF, "inv_01", None, None, "inv_01", "9"),
        (Kind.WIRE, "inv_01", None, None, "inv_01", "9"),
        (Kind.WIRE, "Acme Inc", "3", None, "acme", "3"),
        (Kind.REFUND, "pay_a", None, None, "pay_a", "3.5"),
        (Kind.REFUND, "pay_a", "1", None, "pay_a", "1"),
        (Kind.PLAN, "acme", None, {"plan": "team"}, "acme", "10"),
        (Kind.PLAN, "acme", None, {"plan": "team", "seats": 3}, "acme", "13"),
        (
            Kind.PLAN,
            "acme",
            None,
            {"plan": "team", "seats": 4, "overrides": {"base_fee": "0.001", "seat_fee": "1"}},
            "acme",
            "2.001",
        ),
        (Kind.ADD_ON, "acme", None, {"add_on": "support", "quantity": 3}, "acme", "1.5"),
        (Kind.ADD_ON, "acme", None, {"add_on": "support", "quantity": 0}, "acme", "0"),
        (Kind.ADD_ON, "acme", None, {"add_on": "support"}, "acme", "0"),
        (Kind.TAX, "acme", None, {"tax_id": "DE1"}, "acme", "0"),
        (Kind.ADDRESS, "acme", "0", {"email": "a@b.example"}, "acme", "0"),
    ],
)
def test_what_an_act_concerns(
    books: Session,
    *,
    kind: Kind,
    target: str,
    amount: str | None,
    terms: Mapping[str, Any] | None,
    found: str,
    units: str,
) -> None:
    given = None if amount is None else units_of(amount)
    request = ActRequest(kind, target, "r", given, terms=terms)
    expected = Subject("acme", found, "USD", units_of(units))
    assert find(books, request, NOW) == expected
    assert resolve(books, request, NOW) == expected


@pytest.mark.parametrize(
    ("kind", "target", "amount", "said"),
    [
        (Kind.GRANT, "acme", "-0.01", "The amount is -0.01 USD; it must be above zero."),
        (Kind.GRANT, "acme", "0", "The amount is 0 USD; it must be above zero."),
        (Kind.WIRE, "Acme Inc", None, "There is no amount."),
        (Kind.WIRE, "Acme Inc", "0.005", "0.005 USD has more decimals than the currency."),
        (Kind.CREDIT_NOTE, "inv_01", "1.001", "1.001 USD has more decimals than the currency."),
        (Kind.REFUND, "pay_a", "0.001", "0.001 USD has more decimals than the currency."),
        (Kind.VOID, "inv_01", "-1", "The amount is -1 USD; it must be above zero."),
        (Kind.TAX, "acme", "0.01", "tax has no amount."),
        (Kind.ADDRESS, "acme", "-1", "address has no amount."),
    ],
)
def test_an_amount_that_an_act_cannot_have(
    books: Session, kind: Kind, target: str, amount: str | None, said: str
) -> None:
    request = ActRequest(kind, target, "r", None if amount is None else units_of(amount))
    with pytest.raises(BadRequest) as told:
        resolve(books, request, NOW)
    assert (str(told.value).startswith(said), told.value.param) == (True, "amount")


@pytest.mark.parametrize(
    ("kind", "target", "terms", "said"),
    [
        (Kind.GRANT, "t" * 90, None, f"There is no tenant '{'t' * 80}'."),
        (Kind.WIRE, "org_none", None, "There is no tenant 'org_none'."),
        (Kind.REFUND, "p" * 90, None, f"There is no payment '{'p' * 80}'."),
        (Kind.UNDO, "a" * 90, None, f"There is no act '{'a' * 80}'."),
        (Kind.PLAN, "acme", {"plan": "p" * 90}, f"There is no plan '{'p' * 80}'."),
        (Kind.PLAN, "acme", {}, "There is no plan ''."),
    ],
)
def test_what_is_not_there_is_named_in_part(
    books: Session, kind: Kind, target: str, terms: Mapping[str, Any] | None, said: str
) -> None:
    with pytest.raises(NotFound) as told:
        find(books, ActRequest(kind, target, "r", CENT, terms=terms), NOW)
    assert str(told.value).startswith(said)


def _submit(session: Session, request: ActRequest, rule: FourEyes = NONE) -> MoneyAct:
    return money_acts.submit(session, CLOCK, request, "operator:ann", rule)


def test_what_a_posted_act_shows(books: Session) -> None:
    terms = {"kind": "promo", "priority": 7, "expires_at": "2026-03-01T00:00:00+00:00"}
    grant = _submit(books, ActRequest(Kind.GRANT, "acme", "g", units_of("5"), "a gift", terms))
    row = books.scalars(select(CreditGrant)).one()
    assert grant.result == {
        "id": row.id,
        "kind": "promo",
        "granted": {"amount": "5", "units": "5000000000000", "currency": "USD"},
    }
    assert (row.priority, row.note, row.expires_at) == (7, "a gift", START + timedelta(days=59))
    plain = _submit(books, ActRequest(Kind.GRANT, "acme", "g2", units_of("1")))
    other = books.get_one(CreditGrant, plain.result["id"])
    assert (other.kind, other.priority, other.expires_at, other.note) == ("prepaid", 100, None, "")

    plan = {"plan": "team", "seats": 3, "overrides": {"seat_fee": "1.5"}}
    changed = _submit(books, ActRequest(Kind.PLAN, "acme", "p", terms=plan))
    assert changed.result == {
        "tenant_id": "acme",
        "plan": "team",
        "seats": 3,
        "overrides": {"seat_fee": "1.5"},
        "from": NOW.isoformat(),
    }
    more = _submit(
        books, ActRequest(Kind.ADD_ON, "acme", "a", terms={"add_on": "support", "quantity": 2})
    )
    assert more.result == {
        "tenant_id": "acme",
        "add_on": "support",
        "quantity": 2,
        "from": NOW.isoformat(),
    }
    (holding,) = add_ons.of_tenant(books, "acme")
    assert (holding["add_on"], holding["quantity"]) == ("support", 2)
    ((held, plan_row),) = subscriptions.read_subscriptions(books, ["acme"])["acme"]
    assert (held.seats, held.starts_at, plan_row.seat_fee) == (3, NOW, units_of("1.5"))
    wire = _submit(books, ActRequest(Kind.WIRE, "inv_01", "w", units_of("2")))
    paid = books.scalars(select(Payment).where(Payment.reference == "w")).one()
    assert (paid.amount_minor, paid.provider, paid.status) == (200, "manual", "succeeded")
    assert wire.result == {
        "payment": paid.id,
        "invoice": "TH-01",
        "status": "final",
        "open": {
            "minor": 700,
            "text": "7.00",
            "amount": "7",
            "units": "7000000000000",
            "currency": "USD",
        },
    }


def test_an_invoice_of_another_amount_now_is_not_written_off(books: Session) -> None:
    act = _submit(books, ActRequest(Kind.WRITE_OFF, "inv_01", "w"), FourEyes(units_of("8")))
    _submit(books, ActRequest(Kind.WIRE, "inv_01", "paid", units_of("2")))
    with pytest.raises(Conflict, match=r"The amount is 7 USD now, not 9\."):
        money_acts.confirm(books, CLOCK, act.id, "operator:bob")


def test_the_log_and_the_description_of_an_act(books: Session) -> None:
    request = ActRequest(Kind.GRANT, "acme", "g", units_of("5"), "a gift")
    act = _submit(books, request, FourEyes(units_of("4.99")))
    assert _submit(books, request, FourEyes(units_of("4.99"))) is act
    described = money_acts.describe(act)
    assert described == {
        "id": act.id,
        "kind": "grant",
        "tenant_id": "acme",
        "target": "acme",
        "terms": {},
        "reason": "a gift",
        "reference": "g",
        "status": "waiting",
        "amount": {"amount": "5", "units": "5000000000000", "currency": "USD"},
        "requested_by": "operator:ann",
        "requested_at": NOW.isoformat(),
        "decided_by": None,
        "decided_at": None,
        "decision": "",
        "result": {},
    }
    assert money_acts.reject(books, CLOCK, act.id, "operator:bob", "no") is act
    decided = {"decided_by": "operator:bob", "decided_at": NOW.isoformat(), "decision": "no"}
    after = described | decided | {"status": "rejected"}
    assert money_acts.describe(act) == after
    books.flush()
    logged = books.scalars(select(AuditEntry).order_by(AuditEntry.id)).all()
    kept = [(each.actor, each.action, each.target, each.before, each.after) for each in logged]
    assert kept == [
        ("operator:ann", "credit.grant.requested", "acme", None, described),
        ("operator:bob", "credit.grant.rejected", "acme", None, after),
    ]
    assert {(each.tenant_id, each.at) for each in logged} == {("acme", NOW)}


def test_long_references_and_names_of_acts(books: Session) -> None:
    plain = _submit(books, ActRequest(Kind.GRANT, "acme", "r" * 140, CENT))
    assert plain.reference == "r" * 140
    long = _submit(books, ActRequest(Kind.GRANT, "acme", "r" * 141, CENT))
    assert len(long.reference) == 140 and long.reference.startswith("r" * 107 + ":")
    with pytest.raises(Conflict) as told:
        _submit(books, ActRequest(Kind.GRANT, "acme", "r" * 141, 2 * CENT))
    assert str(told.value).startswith(
        f"The reference '{'r' * 80}' belongs to another act ({long.id})"
    )
    assert told.value.param == "reference"
    with pytest.raises(NotFound) as absent:
        money_acts.get(books, "a" * 90)
    assert str(absent.value).startswith(f"There is no act '{'a' * 80}'.")
    with pytest.raises(BadRequest, match=f"There is no act '{'k' * 40}'"):
        money_acts.kind_of("k" * 50)
    fields = {each.key: getattr(plain, each.key) for each in MoneyAct.__table__.columns}
    for number in range(100):
        books.add(MoneyAct(**fields | {"id": f"act_{number}", "reference": f"n{number}"}))
    books.flush()
    assert len(money_acts.listed(books)) == 100 and len(money_acts.listed(books, limit=1)) == 1


def test_a_rule_of_a_second_person() -> None:
    assert FourEyes.of(None) == FourEyes(None) and not FourEyes.of(None).needs_second(10**20)
    rule = FourEyes(units_of("10"))
    assert not rule.needs_second(units_of("10")) and rule.needs_second(units_of("10") + 1)
