"""Lines of bank statements against invoices that are written here: what each pays, and its whole life."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import date, timedelta
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from billing.accounts import references
from billing.adjustments import money_acts
from billing.adjustments.money_acts import FourEyes
from billing.adjustments.tables import MoneyAct
from billing.bank import wires
from billing.bank.lines import StatementLine
from billing.bank.tables import BankLine
from billing.bank.wires import Clerk
from billing.invoicing.tables import Invoice
from core.clock import FakeClock
from core.errors import BadRequest, Conflict, NotFound
from core.money import units_of
from core.tenants.models import Tenant
from tests.billing.conftest import START, Deployment
from tests.billing.payments.provider_rows import invoice_row

CENT = 10**10  # picounits
DAY = date(2026, 1, 10)
LINE = StatementLine("DE89", "b-1", DAY, "USD", 1000, "Acme Inc", "DE12")


@pytest.fixture
def clerk() -> Clerk:
    return Clerk(FakeClock(START + timedelta(days=20)), "operator:ann", FourEyes(units_of("1000")))


@pytest.fixture
def books(lite: Deployment, clerk: Clerk) -> Any:
    """Of acme 10.00 under TH-000001, due last, 5.00 under TH-000002 and 7.00 under TH-000003; of birch
    4.00 under TH-000004."""
    lite.tenant("birch")
    with lite.database.transaction() as session:
        for number, tenant, due, days in (
            (1, "acme", 1000, 30),
            (2, "acme", 500, 10),
            (3, "acme", 700, 10),
            (4, "birch", 400, 20),
        ):
            _owed(session, number, tenant_id=tenant, due_minor=due, days=days)
        _owed(session, 5, days=1, status="draft")
        _owed(session, 6, days=1, status="paid", paid_minor=1000)
        _owed(session, 7, days=1, currency="EUR")
        yield session


def _owed(session: Session, number: int, *, days: int, **fields: Any) -> None:
    due_at = START + timedelta(days=days)
    label = f"TH-{number:06}"
    invoice_row(session, number, sent=False, external_id=None, due_at=due_at, label=label, **fields)


def _import(session: Session, clerk: Clerk, *lines: StatementLine) -> list[BankLine]:
    done = wires.import_lines(session, lines, clerk)
    return [wires.get(session, each) for each in done.lines]


def _paid(session: Session, line: BankLine) -> list[tuple[str, int]]:
    acts = session.scalars(select(MoneyAct).where(MoneyAct.id.in_(line.acts)))
    return [(each.target, each.amount // CENT) for each in sorted(acts, key=lambda a: a.reference)]


ACME = references.of_customer("acme")


@pytest.mark.parametrize(
    ("reference", "text", "minor", "note", "paid"),
    [
        ("", "TH-000002 and TH-000001", 1500, "TH-000001, TH-000002", [(1, 1000), (2, 500)]),
        ("", "TH-000001 TH-000002", 1200, "TH-000001, TH-000002", [(1, 1000), (2, 200)]),
        ("", "TH-000001 TH-000002", 1000, "TH-000001, TH-000002", [(1, 1000)]),
        ("", "TH-000001 TH-000002", 1501, "TH-000001, TH-000002", [(1, 1000), (2, 501)]),
        ("", "TH-000006", 30, "TH-000006", [(6, 30)]),
        ("", "XTH-000001", 30, "It names no known reference or invoice number.", []),
        (
            "",
            "TH-000004 TH-000001",
            30,
            "It names invoices or references of more than one customer.",
            [],
        ),
        (ACME, "TH-000004", 30, "It names invoices or references of more than one customer.", []),
        (ACME, "TH-000001", 30, "TH-000001", [(1, 30)]),
        (ACME, "", 600, "reference of the customer", [(2, 500), (3, 100)]),
        (
            ACME,
            "",
            2300,
            "reference of the customer",
            [(2, 500), (3, 700), (1, 1000), ("acme", 100)],
        ),
        (ACME, "", 2200, "reference of the customer", [(2, 500), (3, 700), (1, 1000)]),
        ("RF16TH000001", "", 5, "The reference RF16 TH00 0001 has wrong check digits.", []),
        ("RF16TH000001", "TH-000002", 5, "TH-000002", [(2, 5)]),
        ("RF15TH000001", "TH-000002", 5, "TH-000001", [(1, 5)]),
        ("", "TH-000007", 5, "The line is in USD, and the account is in USD.", []),
    ],
)
def test_what_a_line_pays(
    books: Session,
    clerk: Clerk,
    *,
    reference: str,
    text: str,
    minor: int,
    note: str,
    paid: Sequence[tuple[int | str, int]],
) -> None:
    (line,) = _import(
        books, clerk, replace(LINE, reference=reference, text=text, amount_minor=minor)
    )
    named = [(f"inv_{each:02}" if isinstance(each, int) else each, part) for each, part in paid]
    assert _paid(books, line) == named
    assert line.note == note
    assert line.status == ("matched" if paid else "unmatched")
    assert line.tenant_id == ("acme" if paid else None)


def test_everything_that_is_shown_of_a_line(books: Session, clerk: Clerk) -> None:
    (line,) = _import(books, clerk, replace(LINE, reference=ACME, text="thanks", amount_minor=2300))
    acts = books.scalars(select(MoneyAct).order_by(MoneyAct.reference)).all()
    labels = ["TH-000002", "TH-000003", "TH-000001", None]
    units = [units_of(each) for each in ("5", "7", "10", "1")]
    assert wires.describe(books, line) == {
        "id": line.id,
        "account": "DE89",
        "bank_id": "b-1",
        "currency": "USD",
        "payer": "Acme Inc",
        "payer_account": "DE12",
        "reference": ACME,
        "text": "thanks",
        "booked_on": "2026-01-10",
        "amount": {
            "minor": 2300,
            "text": "23.00",
            "amount": "23",
            "units": "23000000000000",
            "currency": "USD",
        },
        "status": "matched",
        "note": "reference of the customer",
        "tenant_id": "acme",
        "acts": [
            {"id": act.id, "status": "posted", "invoice": label, "units": str(unit)}
            for act, label, unit in zip(acts, labels, units, strict=True)
        ],
        "imported_at": "2026-01-21T00:00:00+00:00",
        "imported_by": "operator:ann",
        "decided_by": line.decided_by,
    }
    assert not line.decided_by
    assert [each.reference for each in acts] == [f"bank:{line.id}:{n}" for n in range(4)]
    assert {each.reason for each in acts} == {"b-1 of 2026-01-10, Acme Inc"}
    assert books.get_one(Invoice, "inv_01").paid_minor == 1000


def test_the_counts_of_an_import_and_what_was_known(books: Session, clerk: Clerk) -> None:
    lines = [
        replace(LINE, text="TH-000001"),
        replace(LINE, bank_id="b-2", payer="", text="TH-000001"),
        replace(LINE, bank_id="b-3"),
        replace(LINE, bank_id="b-4", amount_minor=-1, text="TH-000001"),
        replace(LINE, account="DE90"),
    ]
    first = wires.import_lines(books, lines, clerk)
    counts = (first.matched, first.unmatched, first.ignored, first.known, len(first.lines))
    assert counts == (2, 2, 1, 0, 5)
    made = [wires.get(books, each) for each in first.lines]
    assert [each.bank_id for each in made] == ["b-1", "b-2", "b-3", "b-4", "b-1"]
    assert (made[3].status, made[3].note) == ("ignored", "a debit")
    reasons = select(MoneyAct.reason).order_by(MoneyAct.id)
    assert list(books.scalars(reasons)) == ["b-1 of 2026-01-10, Acme Inc", "b-2 of 2026-01-10"]
    again = wires.import_lines(books, [*lines, replace(LINE, bank_id="b-5")], clerk)
    assert (again.known, again.unmatched, len(again.lines)) == (5, 1, 1)
    for change, said in (
        ({"amount_minor": 1001}, "with the amount 1000, and the file says 1001"),
        (
            {"booked_on": date(2026, 1, 11)},
            "with the booked 2026-01-10, and the file says 2026-01-11",
        ),
        ({"currency": "EUR"}, "with the currency USD, and the file says EUR"),
    ):
        with pytest.raises(Conflict, match=f"The line b-1 was imported {said}"):
            wires.import_lines(books, [replace(LINE, **change)], clerk)
    with pytest.raises(BadRequest, match="The id b-9 is in the file twice"):
        wires.import_lines(books, [replace(LINE, bank_id="b-9")] * 2, clerk)


def test_lines_are_listed_by_what_became_of_them(books: Session, clerk: Clerk) -> None:
    days = (9, 11, 10, 12, 8)
    texts = ("TH-000001", "", "TH-000002", "TH-000003", "")
    _import(
        books,
        clerk,
        *(
            replace(
                LINE, bank_id=f"b-{n}", booked_on=date(2026, 1, day), text=text, amount_minor=100
            )
            for n, (day, text) in enumerate(zip(days, texts, strict=True))
        ),
        replace(LINE, bank_id="b-5", booked_on=date(2026, 1, 7), amount_minor=-5),
    )

    def _ids(status: str = "", **limit: int) -> list[str]:
        return [each.bank_id for each in wires.listed(books, status, **limit)]

    def _line(name: str) -> str:
        return str(books.scalar(select(BankLine.id).where(BankLine.bank_id == name)))

    assert _ids() == ["b-3", "b-1", "b-2", "b-0", "b-4", "b-5"]
    assert _ids(limit=2) == ["b-3", "b-1"]
    assert _ids("matched") == ["b-3", "b-2", "b-0"]
    assert (_ids("unmatched"), _ids("ignored")) == (["b-1", "b-4"], ["b-5"])
    freed = wires.unassign(books, _line("b-2"), clerk, "another's")
    assert (freed.bank_id, freed.note) == ("b-2", "unassigned: another's")
    gone = wires.dismiss(books, _line("b-4"), "operator:bob", "a gift")
    assert (gone.bank_id, gone.note, gone.decided_by) == ("b-4", "a gift", "operator:bob")
    assert (_ids("matched"), _ids("unmatched")) == (["b-3", "b-0"], ["b-1", "b-2"])
    assert (_ids("dismissed"), wires.unmatched_count(books)) == (["b-4"], 2)
    undone = wires.describe(books, wires.get(books, _line("b-2")))
    assert (undone["status"], undone["note"]) == ("unmatched", "unassigned: another's")
    assert undone["decided_by"] == "operator:ann"
    with pytest.raises(BadRequest, match=f"There is no status '{'s' * 20}'") as told:
        wires.listed(books, "s" * 30)
    assert told.value.param == "status"


def test_an_unassigned_line_is_assigned_anew_under_new_references(
    books: Session, clerk: Clerk
) -> None:
    (line,) = _import(books, clerk, replace(LINE, text="TH-000001", amount_minor=100))
    wires.unassign(books, line.id, clerk, "x")
    with pytest.raises(Conflict, match="The line is unmatched: nothing is booked for it"):
        wires.unassign(books, line.id, clerk, "x")
    with pytest.raises(Conflict, match="The line is in USD, and the account is in USD"):
        wires.assign(books, line.id, "TH-000007", clerk)
    assert wires.assign(books, line.id, "birch", clerk) is line
    assert (line.tenant_id, line.status) == ("birch", "matched")
    first, second = line.acts
    assert _paid(books, line) == [("inv_01", 100), ("inv_04", 100)]
    references_ = [books.get_one(MoneyAct, each).reference for each in (first, second)]
    assert references_ == [f"bank:{line.id}:0", f"bank:{line.id}:1"]
    assert books.get_one(MoneyAct, second).target == "inv_04"
    wires.unassign(books, line.id, clerk, "again")
    assert wires.state(books, line) == "unmatched"
    wires.assign(books, line.id, "inv_03", clerk)
    assert books.get_one(MoneyAct, line.acts[2]).target == "inv_03"


def test_what_cannot_be_assigned_says_why(books: Session, clerk: Clerk) -> None:
    matched, debit, waits = _import(
        books,
        clerk,
        replace(LINE, text="TH-000001"),
        replace(LINE, bank_id="b-2", amount_minor=-5),
        replace(LINE, bank_id="b-3", currency="EUR"),
    )
    books.get_one(Invoice, "inv_05").label = None
    books.flush()
    for line, target, said in (
        (matched, "inv_02", "The line is matched. Unassign it first."),
        (debit, "inv_02", "The line is ignored. Only unmatched lines can be assigned."),
        (waits, "inv_02", "The line is in EUR, and the account is in USD."),
        (waits, "inv_05", "The invoice is a draft."),
    ):
        with pytest.raises(Conflict) as told:
            wires.assign(books, line.id, target, clerk)
        assert str(told.value).startswith(said)
    books.add(Tenant(id="cedar", name="cedar", display_name="Cedar", created_at=START))
    with pytest.raises(Conflict, match="The line is in EUR, and the account is in USD"):
        wires.assign(books, waits.id, "cedar", clerk)
    for target in ("nobody", "TH-000099"):
        with pytest.raises(NotFound):
            wires.assign(books, waits.id, target, clerk)
    with pytest.raises(Conflict, match=r"The line is matched\. Only unmatched lines are dismissed"):
        wires.dismiss(books, matched.id, "operator:ann", "x")
    with pytest.raises(Conflict, match="The line is ignored: nothing is booked for it"):
        wires.unassign(books, debit.id, clerk, "x")
    with pytest.raises(NotFound, match=f"There is no bank line '{'x' * 80}'"):
        wires.get(books, "x" * 90)


def test_acts_that_wait_for_a_second_person_are_rejected_with_their_line(
    books: Session, clerk: Clerk
) -> None:
    careful = replace(clerk, rule=FourEyes(units_of("5")))
    (line,) = _import(books, careful, replace(LINE, reference=ACME, amount_minor=1900))
    states = {each.target: each.status for each in books.scalars(select(MoneyAct))}
    assert states == {"inv_02": "posted", "inv_03": "waiting", "inv_01": "waiting"}
    (act,) = [each for each in line.acts if books.get_one(MoneyAct, each).target == "inv_03"]
    money_acts.reject(books, clerk.clock, act, "operator:bob", "no")
    assert wires.state(books, line) == "matched", "as long as one of them lives"
    wires.unassign(books, line.id, careful, "not theirs")
    assert wires.state(books, line) == "unmatched"
    done = books.scalars(select(MoneyAct).order_by(MoneyAct.id))
    assert [(each.kind, each.status) for each in done] == [
        ("wire", "posted"),
        ("wire", "rejected"),
        ("wire", "rejected"),
        ("undo", "posted"),
    ]
