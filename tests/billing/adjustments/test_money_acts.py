"""Acts on money: what each posts is on a hand sheet, the preview posts nothing, two persons are two.

The invoice of each test is 12.00 net (20 million output tokens at 0.60 a million).
"""

import pytest
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from billing.accounts.tables import BillingAccount
from billing.adjustments import money_acts, organisation_links
from billing.adjustments.act_requests import ActRequest, Kind
from billing.adjustments.money_acts import FourEyes, Preview
from billing.adjustments.tables import MoneyAct
from billing.invoicing.printing import credit_note_page
from billing.invoicing.tables import CreditNote, Invoice
from billing.ledger import credits
from billing.ledger.ledger import AccountKind, balance
from billing.ledger.tables import LedgerTransaction
from billing.payments.tables import Payment
from billing.subscriptions import add_ons, subscriptions
from billing.taxes import tax_rates
from core.errors import BadRequest, Conflict, Forbidden, NotFound
from core.money import units_of
from core.tenants.models import AuditEntry
from tests.billing.conftest import START, Deployment
from tests.billing.invoicing.test_invoices import clean
from tests.billing.payments.test_settlement import Customer

ANN, BOB = "operator:ann", "operator:bob"
NONE = FourEyes()
ABOVE_TEN = FourEyes(units_of("10"))


@pytest.fixture
def customer(lite: Deployment) -> Customer:
    return Customer(lite).invoiced()


@pytest.fixture
def each_customer(deployment: Deployment) -> Customer:
    """On both databases: what is posted, and taken back."""
    return Customer(deployment).invoiced()


def submit(customer: Customer, asked: ActRequest, rule: FourEyes = NONE, by: str = ANN) -> MoneyAct:
    with customer.deployment.database.transaction() as session:
        return money_acts.submit(session, customer.deployment.clock, asked, by, rule)


def preview(customer: Customer, asked: ActRequest) -> Preview:
    with customer.deployment.database.transaction() as session:
        return money_acts.preview(session, customer.deployment.clock, asked)


def confirm(customer: Customer, act: MoneyAct, by: str) -> MoneyAct:
    with customer.deployment.database.transaction() as session:
        return money_acts.confirm(session, customer.deployment.clock, act.id, by)


def count(customer: Customer, table: type) -> int:
    with customer.deployment.database.read() as session:
        return session.scalar(select(func.count()).select_from(table)) or 0


def balances(customer: Customer) -> dict[str, int]:
    """Cents by account, debits positive."""
    with customer.deployment.database.read() as session:
        found = {kind.value: balance(session, "acme", kind, "USD") for kind in AccountKind}
    return {kind: units // 10**10 for kind, units in found.items() if units}


def sheet(seen: Preview) -> list[tuple[str, int]]:
    return sorted((each.account, each.units // 10**10) for each in seen.postings)


# What each act posts, in cents, and the balances after it. Before it the tenant owes 1,200, earned as
# revenue; for a refund the invoice is paid.
SHEET = [
    (
        ActRequest(Kind.GRANT, "acme", "g", units_of("7.50"), terms={"kind": "promo"}),
        [("promo", -750), ("promotion", 750)],
        {"receivable": 1200, "revenue": -1200, "promo": -750, "promotion": 750},
    ),
    (
        ActRequest(Kind.GRANT, "acme", "g", units_of("7.50")),
        [("cash", 750), ("prepaid", -750)],
        {"receivable": 1200, "revenue": -1200, "prepaid": -750, "cash": 750},
    ),
    (
        ActRequest(Kind.CREDIT_NOTE, "TH-000001", "c", units_of("2.25"), "late"),
        [("receivable", -225), ("revenue", 225)],
        {"receivable": 975, "revenue": -975},
    ),
    (
        ActRequest(Kind.VOID, "TH-000001", "v", reason="in error"),
        [("receivable", -1200), ("revenue", 1200)],
        {},
    ),
    (
        ActRequest(Kind.WRITE_OFF, "TH-000001", "w"),
        [("bad_debt", 1200), ("receivable", -1200)],
        {"bad_debt": 1200, "revenue": -1200},
    ),
    (
        ActRequest(Kind.WIRE, "TH-000001", "manual:1", units_of("5")),
        [("cash", 500), ("receivable", -500)],
        {"cash": 500, "receivable": 700, "revenue": -1200},
    ),
    (
        ActRequest(Kind.WIRE, "TH-000001", "manual:1", units_of("15")),
        [("cash", 300), ("cash", 1200), ("prepaid", -300), ("receivable", -1200)],
        {"cash": 1500, "prepaid": -300, "revenue": -1200},
    ),
    (
        ActRequest(Kind.WIRE, "acme", "manual:1", units_of("4")),
        [("cash", 400), ("prepaid", -400)],
        {"cash": 400, "prepaid": -400, "receivable": 1200, "revenue": -1200},
    ),
]


@pytest.mark.parametrize(("asked", "posted", "after"), SHEET)
def test_a_preview_is_what_is_posted_and_the_books_are_the_sheet_s(
    each_customer: Customer,
    asked: ActRequest,
    posted: list[tuple[str, int]],
    after: dict[str, int],
) -> None:
    before, transactions = balances(each_customer), count(each_customer, LedgerTransaction)
    assert before == {"receivable": 1200, "revenue": -1200}
    assert sheet(preview(each_customer, asked)) == posted
    assert (balances(each_customer), count(each_customer, LedgerTransaction)) == (
        before,
        transactions,
    )
    assert count(each_customer, MoneyAct) == 0
    assert submit(each_customer, asked).status == "posted"
    assert balances(each_customer) == after
    assert submit(each_customer, asked).status == "posted", "the same reference"
    assert balances(each_customer) == after
    clean(each_customer.deployment)


@pytest.mark.parametrize(
    "asked",
    [asked for asked, _, _ in SHEET if asked.kind not in (Kind.VOID, Kind.REFUND, Kind.PLAN)],
)
def test_an_undone_act_leaves_the_books_as_before(customer: Customer, asked: ActRequest) -> None:
    act, before = submit(customer, asked), count(customer, LedgerTransaction)
    undo = ActRequest(Kind.UNDO, act.id, "undo-1", reason="booked on the wrong tenant")
    seen = preview(customer, undo)
    assert seen.postings and sum(each.units for each in seen.postings) == 0
    assert submit(customer, undo).status == "posted"
    assert balances(customer) == {"receivable": 1200, "revenue": -1200}
    assert count(customer, LedgerTransaction) > before, "by entries of its own"
    clean(customer.deployment)
    again = ActRequest(Kind.UNDO, act.id, "undo-2", reason="twice")
    with pytest.raises(Conflict):
        submit(customer, again)
    assert submit(customer, undo).status == "posted", "the same reference"
    assert balances(customer) == {"receivable": 1200, "revenue": -1200}


def test_a_grant_that_is_drawn_from_cannot_be_undone(customer: Customer) -> None:
    act = submit(customer, ActRequest(Kind.GRANT, "acme", "g", units_of("7.50")))
    made = customer.deployment
    made.record(made.event(output_tokens=10**6))
    made.rate()
    before = balances(customer)
    with pytest.raises(Conflict, match="of this credit are used"):
        submit(customer, ActRequest(Kind.UNDO, act.id, "u", reason="wrong"))
    assert balances(customer) == before


def test_only_a_posted_grant_or_wire_is_undone_and_as_a_whole(customer: Customer) -> None:
    grant = ActRequest(Kind.GRANT, "acme", "g", units_of("20"))
    waiting = submit(customer, grant, ABOVE_TEN)
    with pytest.raises(Conflict, match="waiting"):
        submit(customer, ActRequest(Kind.UNDO, waiting.id, "u1", reason="wrong"))
    posted = confirm(customer, waiting, BOB)
    with pytest.raises(BadRequest, match="as a whole"):
        submit(customer, ActRequest(Kind.UNDO, posted.id, "u2", units_of("1"), "wrong"))
    with pytest.raises(NotFound, match="no act"):
        submit(customer, ActRequest(Kind.UNDO, "act_none", "u3", reason="wrong"))
    second = submit(customer, ActRequest(Kind.UNDO, posted.id, "u4", reason="x"), ABOVE_TEN)
    assert second.status == "waiting", "an undo needs a second person like the act itself"
    assert confirm(customer, second, BOB).status == "posted"
    with pytest.raises(Conflict, match="is a undo") as refused:
        submit(customer, ActRequest(Kind.UNDO, second.id, "u5", reason="wrong"))
    assert refused.value.next_step == "Ask for the act itself again."


def test_a_wire_that_is_refunded_in_part_is_not_undone(customer: Customer) -> None:
    wire = submit(customer, ActRequest(Kind.WIRE, "TH-000001", "manual:1", units_of("5")))
    payment = str(wire.result["payment"])
    submit(customer, ActRequest(Kind.REFUND, payment, "r", units_of("1"), "goodwill"))
    with pytest.raises(Conflict, match="refunded already"):
        submit(customer, ActRequest(Kind.UNDO, wire.id, "u", reason="wrong"))


def test_a_refund_takes_the_payment_back(customer: Customer) -> None:
    payment = customer.pay(1200, "wire")
    asked = ActRequest(Kind.REFUND, payment, "r", units_of("2"), "goodwill")
    assert sheet(preview(customer, asked)) == [("cash", -200), ("receivable", 200)]
    assert submit(customer, asked).result["status"] == "succeeded"
    assert balances(customer) == {"cash": 1000, "receivable": 200, "revenue": -1200}


def test_a_preview_says_what_becomes_of_the_invoice(customer: Customer) -> None:
    seen = preview(customer, ActRequest(Kind.WIRE, "TH-000001", "manual:1"))
    assert seen.remarks == ["Invoice TH-000001: final → paid", "To pay: 12.00 USD → 0.00 USD"]


def test_a_change_of_plan_shows_the_draft_and_takes_effect(customer: Customer) -> None:
    with customer.deployment.database.transaction() as session:
        now = customer.deployment.clock.now()
        subscriptions.create_plan(session, now, {"name": "pro", "currency": "USD"})
        fields = {"name": "big", "currency": "USD", "base_fee": units_of("31")}
        subscriptions.create_plan(session, now, fields)
    terms = {"plan": "big", "seats": "2", "overrides": {"base_fee": "62"}}
    asked = ActRequest(Kind.PLAN, "acme", "p", terms=terms)
    seen = preview(customer, asked)
    assert seen.subject.amount == units_of("62") and seen.postings == []
    # On February 10 at 00:00, 19 of the 28 days are left of 62.00: 42.07.
    assert seen.remarks == ["Draft of this period: 0.00 USD → 42.07 USD"]
    assert submit(customer, asked).result["overrides"] == {"base_fee": "62"}
    with customer.deployment.database.read() as session:
        held = subscriptions.read_subscriptions(session, ["acme"])["acme"]
    assert [(plan.name, plan.base_fee, row.seats) for row, plan in held] == [
        ("big", units_of("62"), 2)
    ]


def test_above_the_amount_a_second_person_confirms(customer: Customer) -> None:
    asked = ActRequest(Kind.WRITE_OFF, "TH-000001", "w", reason="insolvent")
    act = submit(customer, asked, ABOVE_TEN)
    assert act.status == "waiting"
    assert balances(customer) == {"receivable": 1200, "revenue": -1200}
    with pytest.raises(Forbidden, match="cannot confirm it"):
        confirm(customer, act, ANN)
    assert confirm(customer, act, BOB).status == "posted"
    assert balances(customer) == {"bad_debt": 1200, "revenue": -1200}
    with pytest.raises(Conflict, match="posted already"):
        confirm(customer, act, BOB)
    with customer.deployment.database.read() as session:
        rows = session.scalars(select(AuditEntry).order_by(AuditEntry.id)).all()
        said = [(each.actor, each.action) for each in rows]
    assert said == [(ANN, "invoice.write_off.requested"), (BOB, "invoice.write_off")]


def test_the_amount_itself_needs_one_person_only(customer: Customer) -> None:
    asked = ActRequest(Kind.GRANT, "acme", "g", units_of("10"))
    assert submit(customer, asked, ABOVE_TEN).status == "posted"
    more = ActRequest(Kind.GRANT, "acme", "g2", units_of("10.01"))
    assert submit(customer, more, ABOVE_TEN).status == "waiting"


def test_a_rejected_act_posts_nothing_and_keeps_its_reference(customer: Customer) -> None:
    asked = ActRequest(Kind.GRANT, "acme", "g", units_of("11"))
    act = submit(customer, asked, ABOVE_TEN)
    with customer.deployment.database.transaction() as session:
        money_acts.reject(session, customer.deployment.clock, act.id, ANN, "a typing error")
    with pytest.raises(Conflict, match="rejected"):
        submit(customer, asked, ABOVE_TEN)
    with pytest.raises(Conflict, match="rejected already"):
        confirm(customer, act, BOB)
    assert balances(customer) == {"receivable": 1200, "revenue": -1200}


def test_what_cannot_be_posted_is_refused_before_it_waits(customer: Customer) -> None:
    customer.pay(1200, "wire")
    for asked in (
        ActRequest(Kind.VOID, "TH-000001", "v", reason="late"),
        ActRequest(Kind.CREDIT_NOTE, "TH-000001", "c", units_of("12.01"), "much"),
    ):
        with pytest.raises(Conflict):
            submit(customer, asked, ABOVE_TEN)
    assert count(customer, MoneyAct) == 0


def test_an_invoice_that_was_paid_in_part_meanwhile_is_not_written_off(customer: Customer) -> None:
    act = submit(customer, ActRequest(Kind.WRITE_OFF, "TH-000001", "w"), ABOVE_TEN)
    customer.pay(200, "wire")
    with pytest.raises(Conflict, match="10 USD now, not 12"):
        confirm(customer, act, BOB)
    with customer.deployment.database.read() as session:
        assert session.scalars(select(Invoice.status)).one() == "final"
        assert session.get_one(MoneyAct, act.id).status == "waiting"


def test_one_reference_is_not_used_for_two_acts(customer: Customer) -> None:
    submit(customer, ActRequest(Kind.GRANT, "acme", "same", units_of("1")))
    for asked in (
        ActRequest(Kind.GRANT, "acme", "same", units_of("2")),
        ActRequest(Kind.WRITE_OFF, "TH-000001", "same"),
    ):
        with pytest.raises(Conflict, match="another act"):
            submit(customer, asked)


def test_one_reference_is_not_used_for_other_terms(customer: Customer) -> None:
    with customer.deployment.database.transaction() as session:
        for name in ("small", "big"):
            now = customer.deployment.clock.now()
            subscriptions.create_plan(session, now, {"name": name, "currency": "USD"})
    first = submit(customer, ActRequest(Kind.PLAN, "acme", "same", terms={"plan": "small"}))
    again = ActRequest(Kind.PLAN, "acme", "same", terms={"plan": "small", "seats": None})
    assert submit(customer, again).id == first.id
    with pytest.raises(Conflict, match="another act"):
        submit(customer, ActRequest(Kind.PLAN, "acme", "same", terms={"plan": "big"}))


def test_references_of_any_length_are_kept_apart_and_posted_once(customer: Customer) -> None:
    """The longest that the API takes is longer than the ledger's column, with what is put before it."""
    payment = customer.pay(1200, "paid")
    for kind, target in ((Kind.GRANT, "acme"), (Kind.REFUND, payment)):
        names = [f"admin:{target}:{kind}:{'r' * 150}{end}" for end in ("", "a", "b")]
        acts = [submit(customer, ActRequest(kind, target, each, units_of("1"))) for each in names]
        again = [submit(customer, ActRequest(kind, target, each, units_of("1"))) for each in names]
        assert [act.id for act in again] == [act.id for act in acts]
        assert len({act.id for act in acts}) == 3
    assert count(customer, MoneyAct) == 6
    clean(customer.deployment)


def test_terms_without_a_value_are_as_terms_that_are_left_out(customer: Customer) -> None:
    with customer.deployment.database.transaction() as session:
        now = customer.deployment.clock.now()
        subscriptions.create_plan(session, now, {"name": "free", "currency": "USD"})
    terms = {"plan": "free", "seats": None, "overrides": None}
    act = submit(customer, ActRequest(Kind.PLAN, "acme", "p", terms=terms))
    assert (act.amount, act.terms, act.status) == (0, {"plan": "free"}, "posted")
    assert act.result["seats"] == 0


def test_a_wire_to_an_invoice_says_what_is_left_and_one_to_a_tenant_is_credit(
    customer: Customer,
) -> None:
    to_invoice = submit(customer, ActRequest(Kind.WIRE, "TH-000001", "w1", units_of("5")))
    assert to_invoice.result["open"]["minor"] == 700
    assert to_invoice.result["status"] == "final"
    to_tenant = submit(customer, ActRequest(Kind.WIRE, "acme", "w2", units_of("5")))
    assert set(to_tenant.result) == {"payment"}
    with customer.deployment.database.read() as session:
        paid = [
            session.get_one(Payment, each.result["payment"]) for each in (to_invoice, to_tenant)
        ]
        assert [(row.invoice_id, row.amount_minor) for row in paid] == [
            (customer.invoice_id, 500),
            (None, 500),
        ]


def test_seats_of_the_plan_are_in_the_amount_above_those_included(customer: Customer) -> None:
    with customer.deployment.database.transaction() as session:
        fields = {"base_fee": units_of("10"), "seat_fee": units_of("3"), "included_seats": 2}
        now = customer.deployment.clock.now()
        subscriptions.create_plan(session, now, {"name": "team", "currency": "USD"} | fields)
    for seats, dollars in ((0, "10"), (2, "10"), (5, "19")):
        asked = ActRequest(Kind.PLAN, "acme", "t", terms={"plan": "team", "seats": seats})
        assert preview(customer, asked).subject.amount == units_of(dollars)


@pytest.mark.parametrize(
    ("asked", "match"),
    [
        (ActRequest(Kind.GRANT, "nobody", "g", units_of("1")), "no tenant 'nobody'"),
        (ActRequest(Kind.REFUND, "pay_none", "r", units_of("1")), "no payment 'pay_none'"),
        (ActRequest(Kind.WIRE, "TH-999999", "w", units_of("1")), "TH-999999"),
        (ActRequest(Kind.PLAN, "acme", "p", terms={"plan": "none"}), "no plan 'none'"),
        (ActRequest(Kind.UNDO, "act_none", "u", reason="x"), "act_none"),
    ],
)
def test_what_is_not_there_is_named(customer: Customer, asked: ActRequest, match: str) -> None:
    with pytest.raises(NotFound, match=match):
        submit(customer, asked)
    assert count(customer, MoneyAct) == 0


def test_a_kind_of_act_is_one_of_the_known() -> None:
    assert money_acts.kind_of("refund") is Kind.REFUND
    with pytest.raises(BadRequest, match="no act 'bribe'"):
        money_acts.kind_of("bribe")


def test_acts_are_listed_newest_first_by_state_and_target(customer: Customer) -> None:
    first = submit(customer, ActRequest(Kind.GRANT, "acme", "a", units_of("1")))
    customer.deployment.clock.advance(hours=1)
    waits = submit(customer, ActRequest(Kind.WRITE_OFF, "TH-000001", "b"), ABOVE_TEN)
    with customer.deployment.database.read() as session:

        def _ids(**where: str) -> list[str]:
            return [act.id for act in money_acts.listed(session, **where)]

        assert _ids() == [waits.id, first.id]
        assert _ids(status="waiting") == [waits.id]
        assert _ids(target=customer.invoice_id) == [waits.id]
        assert _ids(target="acme") == [waits.id, first.id]
        assert _ids(target="nobody") == []


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        (ActRequest(Kind.GRANT, "acme", "g", units_of("1"), terms={"colour": 1}), "terms"),
        (ActRequest(Kind.GRANT, "acme", "g", units_of("1"), terms={"priority": "x"}), "terms"),
        (
            ActRequest(Kind.GRANT, "acme", "g", 1, terms={"expires_at": "2026-03-01T00:00:00"}),
            "terms",
        ),
        (ActRequest(Kind.GRANT, "acme", "g"), "amount"),
        (ActRequest(Kind.WIRE, "TH-000001", "w", units_of("0.001")), "amount"),
        (ActRequest(Kind.WIRE, "TH-000001", "w", units_of("5.001")), "amount"),
        (ActRequest(Kind.WIRE, "TH-000001", "w", 0), "amount"),
    ],
)
def test_bad_input_is_named(customer: Customer, asked: ActRequest, param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        submit(customer, asked)
    assert refused.value.param == param


def undo(customer: Customer, act: MoneyAct, reference: str = "undo") -> MoneyAct:
    return submit(customer, ActRequest(Kind.UNDO, act.id, reference, reason="in error"))


def test_a_cancelled_note_has_a_number_of_its_own_and_the_invoice_can_be_credited_again(
    customer: Customer,
) -> None:
    act = submit(customer, ActRequest(Kind.CREDIT_NOTE, "TH-000001", "c", units_of("12"), "late"))
    assert balances(customer) == {} and act.result["number"] == "TH-CN-000001"
    made = undo(customer, act)
    assert made.result["number"] == "TH-CN-000002"
    with customer.deployment.database.read() as session:
        invoice = session.query(Invoice).one()
        assert (invoice.status, invoice.credited_minor) == ("final", 0)
        _, second = session.query(CreditNote).order_by(CreditNote.number)
        assert (second.net_minor, second.outcome) == (-1200, "cancels")
        assert second.reason == "Cancels TH-CN-000001: in error"
        assert "An earlier credit note is taken back" in credit_note_page(session, second)
    with pytest.raises(Conflict, match="undone already"):
        undo(customer, act, "again")
    submit(customer, ActRequest(Kind.CREDIT_NOTE, "TH-000001", "c2", units_of("12"), "late"))
    assert balances(customer) == {}
    clean(customer.deployment)


def test_a_cancelled_note_returns_its_tax(lite: Deployment) -> None:
    with lite.database.transaction() as session:
        session.get_one(BillingAccount, "acme").tax_region = "DE"
        tax_rates.add_rate(session, "DE", "VAT", 190_000, START)
    customer = Customer(lite).invoiced()
    before = balances(customer)
    act = submit(customer, ActRequest(Kind.CREDIT_NOTE, "TH-000001", "c", units_of("5"), "late"))
    with lite.database.read() as session:
        assert session.query(Invoice).one().credited_minor == 595
    undo(customer, act)
    assert balances(customer) == before
    with lite.database.read() as session:
        assert session.query(Invoice).one().credited_minor == 0
        _, second = session.query(CreditNote).order_by(CreditNote.number)
        assert (second.net_minor, second.tax_minor) == (-500, -95)
    clean(lite)


def test_a_note_that_became_credit_is_taken_back_while_all_of_it_is_left(
    customer: Customer,
) -> None:
    submit(customer, ActRequest(Kind.WIRE, "TH-000001", "manual:1"))
    note = ActRequest(Kind.CREDIT_NOTE, "TH-000001", "c", units_of("2.25"), "late")
    act = submit(customer, note)
    assert balances(customer) == {"cash": 1200, "prepaid": -225, "revenue": -975}
    undo(customer, act)
    assert balances(customer) == {"cash": 1200, "revenue": -1200}
    used = submit(
        customer, ActRequest(Kind.CREDIT_NOTE, "TH-000001", "d", units_of("2.25"), "late")
    )
    with customer.deployment.database.transaction() as session:
        grants = credits.open_grants(session, ["acme"], customer.deployment.clock.now())
        credits.draw(grants["acme"], units_of("1"))
        before = balances(customer)
        with pytest.raises(Conflict, match="of this credit are used"):
            preview_in(session, customer, used)
        session.rollback()
    assert balances(customer) == before


def preview_in(session: Session, customer: Customer, act: MoneyAct) -> None:
    asked = ActRequest(Kind.UNDO, act.id, "undo-2", reason="in error")
    money_acts.preview(session, customer.deployment.clock, asked)


def test_a_write_off_is_undone_written_off_again_and_undone(customer: Customer) -> None:
    first = submit(customer, ActRequest(Kind.WRITE_OFF, "TH-000001", "w"))
    undo(customer, first)
    second = submit(customer, ActRequest(Kind.WRITE_OFF, "TH-000001", "w2"))
    assert balances(customer) == {"bad_debt": 1200, "revenue": -1200}
    with pytest.raises(Conflict, match="undone already"):
        undo(customer, first, "again")
    submit(customer, ActRequest(Kind.WIRE, "TH-000001", "manual:1", units_of("3")))
    assert balances(customer) == {"bad_debt": 900, "cash": 300, "revenue": -1200}
    undo(customer, second, "u2")
    assert balances(customer) == {"cash": 300, "receivable": 900, "revenue": -1200}
    with customer.deployment.database.read() as session:
        assert session.query(Invoice).one().status == "final"
    clean(customer.deployment)


def test_what_a_provider_knows_is_not_undone_here(customer: Customer) -> None:
    note = ActRequest(Kind.CREDIT_NOTE, "TH-000001", "c", units_of("2"), "late")
    noted = submit(customer, note)
    lost = submit(customer, ActRequest(Kind.WRITE_OFF, "TH-000001", "w"))
    with customer.deployment.database.transaction() as session:
        session.query(Invoice).one().external_id = "in_1"
    with pytest.raises(Conflict, match="cannot be opened again"):
        undo(customer, lost)
    with pytest.raises(Conflict, match="at the payment provider"):
        undo(customer, noted, "u2")


def test_a_void_is_undone_and_void_again(customer: Customer) -> None:
    first = submit(customer, ActRequest(Kind.VOID, "TH-000001", "v", reason="wrong"))
    assert balances(customer) == {}
    undo(customer, first)
    assert balances(customer) == {"receivable": 1200, "revenue": -1200}
    with customer.deployment.database.read() as session:
        invoice = session.query(Invoice).one()
        assert (invoice.status, invoice.settled_at) == ("final", None)
    with pytest.raises(Conflict, match="undone already"):
        undo(customer, first, "again")
    second = submit(customer, ActRequest(Kind.VOID, "TH-000001", "v2", reason="wrong"))
    assert balances(customer) == {}
    clean(customer.deployment)
    undo(customer, second, "u2")
    submit(customer, ActRequest(Kind.WIRE, "TH-000001", "manual:1"))
    assert balances(customer) == {"cash": 1200, "revenue": -1200}
    clean(customer.deployment)


def test_the_credit_of_an_undone_void_is_taken_back_while_all_of_it_is_left(
    deployment: Deployment,
) -> None:
    customer = Customer(deployment)
    submit(customer, ActRequest(Kind.GRANT, "acme", "g", units_of("5"), terms={"kind": "prepaid"}))
    customer.invoiced()
    before = balances(customer)
    assert before == {"cash": 500, "receivable": 700, "revenue": -1200}
    act = submit(customer, ActRequest(Kind.VOID, "TH-000001", "v", reason="wrong"))
    assert balances(customer) == {"cash": 500, "prepaid": -500}
    undo(customer, act)
    assert balances(customer) == before
    clean(deployment)
    again = submit(customer, ActRequest(Kind.VOID, "TH-000001", "v2", reason="wrong"))
    with deployment.database.transaction() as session:
        grants = credits.open_grants(session, ["acme"], deployment.clock.now())
        credits.draw(grants["acme"], units_of("1"))
        with pytest.raises(Conflict, match="of this credit are used"):
            preview_in(session, customer, again)
        session.rollback()


def test_a_void_that_a_provider_knows_of_is_not_undone(customer: Customer) -> None:
    act = submit(customer, ActRequest(Kind.VOID, "TH-000001", "v", reason="wrong"))
    with customer.deployment.database.transaction() as session:
        session.query(Invoice).one().external_id = "in_1"
    with pytest.raises(Conflict, match="provider has closed its copy"):
        undo(customer, act)
    assert balances(customer) == {}


def test_a_void_of_fees_that_were_billed_ahead_is_not_undone(lite: Deployment) -> None:
    customer = Customer(lite)
    with lite.database.transaction() as session:
        now, fee = lite.clock.now(), units_of("31")
        fields = {"name": "ahead", "currency": "USD", "base_fee": fee, "in_advance": True}
        subscriptions.create_plan(session, now, fields)
        subscriptions.subscribe(session, "acme", "ahead", now)
    act = submit(customer.invoiced(), ActRequest(Kind.VOID, "TH-000001", "v", reason="wrong"))
    with pytest.raises(Conflict, match="billed ahead"):
        undo(customer, act)


def test_a_void_of_what_passed_to_a_parent_is_not_undone(lite: Deployment) -> None:
    lite.tenant("holding")
    with lite.database.transaction() as session:
        draft = organisation_links.LinkDraft("acme", "holding", "self", "12.5")
        organisation_links.set_parent(session, lite.clock, draft)
    customer = Customer(lite).invoiced()
    act = submit(customer, ActRequest(Kind.VOID, "TH-000001", "v", reason="wrong"))
    with pytest.raises(Conflict, match="parent organisation"):
        undo(customer, act)


def test_a_refund_by_hand_that_never_left_is_undone_and_one_of_a_provider_is_not(
    customer: Customer,
) -> None:
    wired = submit(customer, ActRequest(Kind.WIRE, "TH-000001", "manual:1"))
    payment = str(wired.result["payment"])
    sent = submit(customer, ActRequest(Kind.REFUND, payment, "r", units_of("5"), "asked for it"))
    assert balances(customer) == {"cash": 700, "receivable": 500, "revenue": -1200}
    with pytest.raises(Conflict, match="refunded already"):
        undo(customer, wired)
    undo(customer, sent, "u2")
    assert balances(customer) == {"cash": 1200, "revenue": -1200}
    with customer.deployment.database.read() as session:
        assert session.query(Invoice).one().status == "paid"
        assert session.get_one(Payment, payment).refunded_minor == 0
    clean(customer.deployment)
    told = submit(customer, ActRequest(Kind.REFUND, payment, "r2", units_of("5"), "asked again"))
    with customer.deployment.database.transaction() as session:
        row = session.get_one(Payment, payment)
        row.provider, row.external_id = "stripe", "pi_1"
    with pytest.raises(Conflict, match="stripe was asked"):
        undo(customer, told, "u3")


def test_an_add_on_above_the_amount_waits_for_a_second_person(customer: Customer) -> None:
    deployment = customer.deployment
    with deployment.database.transaction() as session:
        now = deployment.clock.now()
        add_ons.create(session, now, "support", units_of("4"), currency="USD")
        fields = {"name": "pro", "currency": "USD", "base_fee": 0}
        subscriptions.create_plan(session, now, fields)
        subscriptions.subscribe(session, "acme", "pro", now)

    def _asked(quantity: int) -> ActRequest:
        terms = {"add_on": "support", "quantity": quantity}
        return ActRequest(Kind.ADD_ON, "acme", f"add-on-{quantity}", terms=terms)

    def _held() -> list[int]:
        with deployment.database.read() as session:
            return [each["quantity"] for each in add_ons.of_tenant(session, "acme")]

    act = submit(customer, _asked(3), ABOVE_TEN)
    assert (act.status, act.amount, _held()) == ("waiting", units_of("12"), [])
    with pytest.raises(Forbidden):
        confirm(customer, act, ANN)
    confirm(customer, act, BOB)
    assert _held() == [3]
    deployment.clock.advance(seconds=1)
    assert submit(customer, _asked(0), ABOVE_TEN).status == "posted"
    with pytest.raises(NotFound, match="no add-on"):
        terms = {"add_on": "gold", "quantity": 1}
        submit(customer, ActRequest(Kind.ADD_ON, "acme", "other", terms=terms))
    with pytest.raises(Conflict, match="add on, posted") as refused:
        undo(customer, act)
    assert "Set the earlier quantity" in refused.value.next_step


@pytest.mark.parametrize("units", [0, -1])
@pytest.mark.parametrize("kind", [Kind.GRANT, Kind.WIRE])
def test_money_that_is_given_is_above_zero(customer: Customer, kind: Kind, units: int) -> None:
    with pytest.raises(BadRequest, match="it must be above zero") as refused:
        submit(customer, ActRequest(kind, "acme", "nothing", units))
    assert refused.value.param == "amount" and count(customer, MoneyAct) == 0
