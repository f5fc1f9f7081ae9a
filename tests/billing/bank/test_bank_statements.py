"""Wires of bank statements: matched by reference, booked once, to the cent.

The invoice of each test is 12.00 USD (20 million output tokens at 0.60 a million), numbered TH-000001.
Its reference is worked out by hand: TH000001RF00 is 2917000001271500, which is 83 modulo 97, and
98 - 83 = 15.
"""

from dataclasses import replace
from datetime import date
from typing import Any

import pytest

from billing.accounts import references
from billing.accounts.tables import BillingAccount
from billing.adjustments import money_acts
from billing.adjustments.money_acts import FourEyes
from billing.adjustments.tables import MoneyAct
from billing.bank import wires
from billing.bank.lines import StatementLine, checked
from billing.bank.tables import BankLine
from billing.bank.wires import Clerk, Imported
from billing.invoicing.tables import Invoice
from billing.invoicing.views import invoice_json
from core.errors import BadRequest, Conflict
from core.money import units_of
from tests.billing.adjustments.test_money_acts import balances
from tests.billing.invoicing.test_invoices import clean
from tests.billing.payments.test_settlement import Customer

REFERENCE = "RF15TH000001"
HEAD = "id,date,amount,currency,payer,reference,text\n"
CAMT = """<?xml version="1.0" encoding="UTF-8"?>
<Document xmlns="urn:iso:std:iso:20022:tech:xsd:camt.053.001.08"><BkToCstmrStmt><Stmt>
<Id>S-7</Id><Acct><Id><IBAN>DE89370400440532013000</IBAN></Id></Acct>
{entries}
</Stmt></BkToCstmrStmt></Document>"""
ENTRY = """<Ntry><Amt Ccy="USD">{amount}</Amt><CdtDbtInd>{sign}</CdtDbtInd><Sts><Cd>{state}</Cd></Sts>
<BookgDt><Dt>2026-02-10</Dt></BookgDt><AcctSvcrRef>{name}</AcctSvcrRef><NtryDtls>{details}</NtryDtls>
</Ntry>"""
DETAIL = """<TxDtls><Refs><EndToEndId>E1</EndToEndId></Refs>{amount}<RltdPties><Dbtr><Pty><Nm>Acme
 Inc</Nm></Pty></Dbtr></RltdPties><RmtInf><Strd><CdtrRefInf><Ref>{reference}</Ref></CdtrRefInf></Strd>
</RmtInf></TxDtls>"""


@pytest.fixture
def customer(lite: Any) -> Customer:
    return Customer(lite).invoiced()


def clerk(customer: Customer, above: str = "") -> Clerk:
    rule = FourEyes(units_of(above) if above else None)
    return Clerk(customer.deployment.clock, "operator:ann", rule)


def load(customer: Customer, content: str | bytes, above: str = "", **columns: str) -> Imported:
    data = content if isinstance(content, bytes) else content.encode()
    lines = wires.parse(data, columns)
    with customer.deployment.database.transaction() as session:
        return wires.import_lines(session, lines, clerk(customer, above))


def row(amount: str, text: str, name: str = "b-1", currency: str = "USD", field: str = "") -> str:
    return f"{HEAD}{name},2026-02-10,{amount},{currency},Acme Inc,{field},{text}\n"


def only_line(customer: Customer) -> dict[str, Any]:
    with customer.deployment.database.read() as session:
        (line,) = wires.listed(session)
        return wires.describe(session, line)


def invoice(customer: Customer) -> Invoice:
    with customer.deployment.database.read() as session:
        return session.query(Invoice).one()


@pytest.mark.parametrize(
    "valid", ["RF18539007547034", "RF712348231", "RF18000000000539007547034", "RF45G72UUR"]
)
def test_published_references_are_valid_and_with_another_digit_are_not(valid: str) -> None:
    assert references.is_valid(valid)
    other = valid[:-1] + ("0" if valid[-1] != "0" else "1")
    assert not references.is_valid(other)
    assert valid in references.found_in(f"Invoice {references.printed(valid)}, thanks")[0]
    assert references.found_in(f"Invoice {other}!")[0] == []


def test_the_reference_is_on_the_invoice_and_follows_the_standard(customer: Customer) -> None:
    assert references.of_invoice("TH-000001") == REFERENCE
    assert references.is_valid(references.of_customer("org_01"))
    long = references.of_invoice("A-VERY-LONG-PREFIX-2-0123456")
    assert len(long) == 25 and long.endswith("0123456") and references.is_valid(long)
    with customer.deployment.database.read() as session:
        shown = invoice_json(session, session.query(Invoice).one())
        assert shown["payment_reference"] == REFERENCE
        account = session.get_one(BillingAccount, "acme")
        assert account.payment_reference == references.of_customer("acme")


@pytest.mark.parametrize(
    "text",
    [
        "RF15 TH00 0001",
        "inv rf15th000001 of january",
        "RF150000000000000TH000001",
        "Invoice TH-000001 thanks",
    ],
)
def test_a_wire_is_matched_by_what_it_names(customer: Customer, text: str) -> None:
    assert load(customer, row("12.00", text)).matched == 1
    assert invoice(customer).status == "paid"
    assert balances(customer) == {"cash": 1200, "revenue": -1200}
    clean(customer.deployment)


def test_a_part_leaves_the_rest_open_and_too_much_is_credit(customer: Customer) -> None:
    load(customer, row("5.00", REFERENCE))
    assert balances(customer) == {"cash": 500, "receivable": 700, "revenue": -1200}
    assert invoice(customer).status == "final"
    load(customer, row("9.50", REFERENCE, name="b-2"))
    assert balances(customer) == {"cash": 1450, "prepaid": -250, "revenue": -1200}
    assert invoice(customer).status == "paid"
    clean(customer.deployment)


def test_the_same_line_is_booked_once(deployment: Any) -> None:
    customer = Customer(deployment).invoiced()
    text = row("5.00", REFERENCE)
    first, again = load(customer, text), load(customer, text)
    assert (first.matched, first.known, again.matched, again.known) == (1, 0, 0, 1)
    assert balances(customer) == {"cash": 500, "receivable": 700, "revenue": -1200}
    with pytest.raises(Conflict, match=r"amount 500, and the file says 600"):
        load(customer, row("6.00", REFERENCE) + "b-9,2026-02-10,1.00,USD,,,TH-000001\n")
    with pytest.raises(BadRequest, match="twice"):
        load(customer, text + "b-1,2026-02-11,7.00,USD,,,\n")
    assert balances(customer) == {"cash": 500, "receivable": 700, "revenue": -1200}


@pytest.mark.parametrize(
    ("content", "note"),
    [
        (row("12.00", "RF16TH000001"), "RF16 TH00 0001 has wrong check digits"),
        (row("12.00", REFERENCE, currency="EUR"), "in EUR, and the account is in USD"),
        (row("12.00", "with thanks"), "no known reference"),
        (row("12.00", "TH-000009"), "no known reference"),
    ],
)
def test_what_matches_nothing_waits_with_its_reason(
    customer: Customer, content: str, note: str
) -> None:
    result = load(customer, content)
    assert (result.matched, result.unmatched) == (0, 1)
    assert note in only_line(customer)["note"]
    assert balances(customer) == {"receivable": 1200, "revenue": -1200}


def test_a_person_assigns_unassigns_and_assigns_again(customer: Customer) -> None:
    load(customer, row("12.00", "with thanks"))
    line, database = only_line(customer)["id"], customer.deployment.database
    with database.transaction() as session:
        wires.assign(session, line, "TH-000001", clerk(customer))
    assert only_line(customer)["status"] == "matched" and invoice(customer).status == "paid"
    with database.transaction() as session, pytest.raises(Conflict, match="Unassign it first"):
        wires.assign(session, line, "TH-000001", clerk(customer))
    with database.transaction() as session:
        wires.unassign(session, line, clerk(customer), "another customer's")
    assert balances(customer) == {"receivable": 1200, "revenue": -1200}
    assert only_line(customer)["status"] == "unmatched"
    with database.read() as session:
        assert [each.id for each in wires.listed(session, "unmatched")] == [line]
    with database.transaction() as session:
        wires.assign(session, line, "acme", clerk(customer))  # the oldest open invoice
    assert balances(customer) == {"cash": 1200, "revenue": -1200}
    clean(customer.deployment)


def test_a_customer_s_reference_pays_open_invoices_and_the_rest_is_credit(
    customer: Customer,
) -> None:
    load(customer, row("20.00", "", field=references.of_customer("acme")))
    assert balances(customer) == {"cash": 2000, "prepaid": -800, "revenue": -1200}
    assert [act["invoice"] for act in only_line(customer)["acts"]] == ["TH-000001", None]
    clean(customer.deployment)


def test_a_line_that_is_no_payment_is_ignored_or_dismissed(customer: Customer) -> None:
    result = load(customer, row("-3.00", "fee") + "b-2,2026-02-11,4.00,USD,,,interest\n")
    assert (result.ignored, result.unmatched) == (1, 1)
    with customer.deployment.database.transaction() as session:
        (waits,) = wires.listed(session, "unmatched")
        wires.dismiss(session, waits.id, "operator:ann", "interest of the bank")
        assert wires.listed(session, "unmatched") == []
        assert wires.unmatched_count(session) == 0


def test_above_an_amount_a_second_person_confirms_a_wire(customer: Customer) -> None:
    assert load(customer, row("12.00", REFERENCE), above="10").matched == 1
    assert balances(customer) == {"receivable": 1200, "revenue": -1200}
    database, clock = customer.deployment.database, customer.deployment.clock
    with database.transaction() as session:
        act = session.query(MoneyAct).one()
        money_acts.confirm(session, clock, act.id, "operator:bob")
    assert balances(customer) == {"cash": 1200, "revenue": -1200}
    load(customer, row("11.00", REFERENCE, name="b-2"), above="10")
    with database.transaction() as session:
        act = session.query(MoneyAct).filter_by(status="waiting").one()
        money_acts.reject(session, clock, act.id, "operator:bob")
    with database.read() as session:
        assert [each.bank_id for each in wires.listed(session, "unmatched")] == ["b-2"]


def test_columns_of_a_bank_are_mapped(customer: Customer) -> None:
    text = "Nr;Buchung;Betrag;W\u00e4hrung;Zweck\n7;10.02.2026;1.012,50;USD;TH-000001\n"
    columns = {"id": "Nr", "date": "Buchung", "amount": "Betrag", "text": "Zweck"}
    assert load(customer, text, currency="W\u00e4hrung", **columns).matched == 1
    with customer.deployment.database.read() as session:
        line = session.query(BankLine).one()
        assert (line.amount_minor, line.booked_on) == (101_250, date(2026, 2, 10))


def camt(*entries: str) -> str:
    return CAMT.format(entries="".join(entries))


def entry(amount: str, reference: str, *, sign: str = "CRDT", state: str = "BOOK") -> str:
    details = DETAIL.format(reference=reference, amount="")
    return ENTRY.format(amount=amount, sign=sign, state=state, name="A-1", details=details)


def test_camt_053_is_matched_and_only_what_is_booked_counts(customer: Customer) -> None:
    fee = ENTRY.format(amount="1", sign="DBIT", state="BOOK", name="A-2", details="")
    pending = entry("99.00", REFERENCE, state="PDNG")
    result = load(customer, camt(entry("12.0", REFERENCE), fee, pending))
    assert (result.matched, result.ignored) == (1, 1)
    with customer.deployment.database.read() as session:
        line = session.query(BankLine).filter_by(bank_id="A-1").one()
        assert (line.account, line.payer) == ("DE89370400440532013000", "Acme Inc")
    assert balances(customer) == {"cash": 1200, "revenue": -1200}


def test_a_payment_that_is_its_entry_alone_has_the_entry_s_id(customer: Customer) -> None:
    own = DETAIL.format(reference=REFERENCE, amount="").replace(
        "<Refs>", "<Refs><AcctSvcrRef>P-1</AcctSvcrRef>"
    )
    one = ENTRY.format(amount="12.00", sign="CRDT", state="BOOK", name="A-1", details=own)
    assert load(customer, camt(one)).matched == 1
    assert only_line(customer)["bank_id"] == "A-1"
    assert load(customer, camt(entry("12.00", REFERENCE))).known == 1


BALANCE = """<Bal><Tp><CdOrPrtry><Cd>{code}</Cd></CdOrPrtry></Tp><Amt Ccy="{currency}">{amount}</Amt>
<CdtDbtInd>{sign}</CdtDbtInd><Dt><Dt>2026-02-10</Dt></Dt></Bal>"""


def balance(code: str, amount: str, sign: str = "CRDT", currency: str = "USD") -> str:
    return BALANCE.format(code=code, amount=amount, sign=sign, currency=currency)


@pytest.mark.parametrize("opening", ["OPBD", "PRCD"])
def test_entries_lead_from_the_opening_to_the_closing_balance(
    customer: Customer, opening: str
) -> None:
    """3.50 overdrawn, 12.00 in and 1.25 out, is 7.25."""
    fee = ENTRY.format(amount="1.25", sign="DBIT", state="BOOK", name="A-2", details="")
    whole = [
        balance(opening, "3.50", "DBIT"),
        balance("ITAV", "99.00"),
        balance("CLBD", "7.25"),
        entry("12.00", REFERENCE),
        fee,
        entry("99.00", REFERENCE, state="PDNG"),
    ]
    missing = (
        r"S-7 opens with -3.50, its 1 entries sum to 12.00, and it closes with 7.25 USD: -1.25 USD"
    )
    with pytest.raises(BadRequest, match=missing):
        load(customer, camt(*whole[:4]))
    with pytest.raises(BadRequest, match=r"0\.00 USD are missing"):
        load(customer, camt(*whole[:2], balance("CLBD", "7.25", currency="EUR"), *whole[3:]))
    assert balances(customer) == {"receivable": 1200, "revenue": -1200}
    assert load(customer, camt(*whole)).matched == 1
    assert balances(customer) == {"cash": 1200, "revenue": -1200}


def test_a_page_of_a_longer_statement_has_no_closing_balance(customer: Customer) -> None:
    part = [balance("OPBD", "1.00"), balance("ITBD", "500.00"), entry("12.00", REFERENCE)]
    assert load(customer, camt(*part)).matched == 1


def test_a_batched_entry_is_a_line_for_each_payment(customer: Customer) -> None:
    own = '<Amt Ccy="USD">{}</Amt><CdtDbtInd>CRDT</CdtDbtInd>'
    details = DETAIL.format(reference=REFERENCE, amount=own.format("7.00"))
    details += DETAIL.format(reference="", amount=own.format("2.00"))
    batch = ENTRY.format(amount="9.00", sign="CRDT", state="BOOK", name="A-1", details=details)
    result = load(customer, camt(batch))
    assert (result.matched, result.unmatched) == (1, 1)
    assert balances(customer) == {"cash": 700, "receivable": 500, "revenue": -1200}


BOMB = """<?xml version="1.0"?><!DOCTYPE d [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;">]>
<Document><BkToCstmrStmt>&b;</BkToCstmrStmt></Document>"""
OUTSIDE = '<!DOCTYPE d [<!ENTITY x SYSTEM "file:///etc/passwd">]><Document>&x;</Document>'


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (BOMB, "document type declaration"),
        (OUTSIDE, "document type declaration"),
        (camt(entry("12.00", REFERENCE))[:-60], "not complete XML"),
        ("<a>" * 50, "more than 40 levels"),
        ("<Document><BkToCstmrAcctRpt/></Document>", "without BkToCstmrStmt"),
        (camt(entry("12.00", "").replace("A-1", "")), "no id of the bank"),
        (camt(entry("12.345", "")), "cannot be read in USD"),
        (camt(entry("12.00", "").replace("2026-02-10", "soon")), "booking date 'soon'"),
        (b"\xff\xfe\x00", "neither XML nor UTF-8"),
        ("", "The file is empty"),
        ("id,date\n", "no column amount, currency"),
        (row("1,234", ""), "8 fields, and the header has 7"),
        (row('"1,234"', ""), "cannot be read in USD"),
        (row("much", ""), "cannot be read in USD"),
        (row("0", ""), "the amount 0"),
        (row("9" * 16, ""), "cannot be read"),
        (row("1.00", "", currency="ABC"), "is in 'ABC'"),
        (row("1.00", "", name=""), "no id of the bank"),
        (row("1.00", "").replace("2026-02-10", "10th"), "the date '10th'"),
        (HEAD + 'b-1,2026-02-10,1.00,USD,Acme,,"cut', "not CSV"),
    ],
)
def test_a_bad_file_is_refused_as_a_whole(content: str | bytes, problem: str) -> None:
    with pytest.raises(BadRequest, match=problem):
        wires.parse(content if isinstance(content, bytes) else content.encode())


@pytest.mark.parametrize(
    ("field", "most"), [("name", 140), ("account", 40), ("payer_account", 40), ("field", 140)]
)
def test_a_field_may_be_as_long_as_its_column(field: str, most: int) -> None:
    def _file(length: int) -> bytes:
        values = dict.fromkeys(("account", "payer_account", "field"), "") | {"name": "b-1"}
        values[field] = "x" * length
        line = "{name},2026-02-10,1.00,USD,Acme,{field},,{account},{payer_account}\n"
        return f"{HEAD.strip()},account,payer_account\n{line.format(**values)}".encode()

    (line,) = wires.parse(_file(most))
    names = {"name": "bank_id", "field": "reference"}
    assert getattr(line, names.get(field, field)) == "x" * most
    with pytest.raises(BadRequest, match=f"of {most + 1} characters"):
        wires.parse(_file(most + 1))


def test_a_file_has_at_most_ten_thousand_lines() -> None:
    lines = [f"b-{n},2026-02-10,1.00,USD,,,\n" for n in range(10_001)]
    assert len(wires.parse((HEAD + "".join(lines[:-1])).encode())) == 10_000
    with pytest.raises(BadRequest, match="The file has 10001 lines"):
        wires.parse((HEAD + "".join(lines)).encode())


def test_the_greatest_amount_is_a_quadrillion_of_minor_units() -> None:
    line = StatementLine("", "b", date(2026, 2, 10), "USD", 10**15)
    assert checked(line, "Line 1") is line
    for minor in (10**15 + 1, -(10**15) - 1, 0):
        with pytest.raises(BadRequest, match=f"the amount {minor} in minor"):
            checked(replace(line, amount_minor=minor), "Line 1")


def test_days_to_pay_of_a_customer_go_before_the_plan_s(lite: Any) -> None:
    customer = Customer(lite)
    with lite.database.transaction() as session:
        session.get_one(BillingAccount, "acme").payment_terms_days = 45
    customer.invoiced()
    made = invoice(customer)
    assert made.due_at is not None and made.final_at is not None
    assert (made.due_at - made.final_at).days == 45
