"""Trial balance, transactions, journals and statements in full, of four postings made by hand."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy.orm import Session

from billing.ledger import account_statement, journal, ledger
from billing.ledger.account_statement import StatementQuery
from billing.ledger.journal import Shape
from billing.ledger.ledger import AccountKind, Entry, Transaction, transfer
from core.errors import BadRequest, InsufficientQuota, InvariantBroken, NotFound
from core.money import Money
from tests.billing.conftest import START, Deployment

K = AccountKind
DAY, INSTANT = timedelta(days=1), timedelta(microseconds=1)
FEBRUARY = datetime(2026, 2, 1, tzinfo=UTC)
DOLLAR, CENT = 10**12, 10**10


def post(session: Session, name: str, at: datetime, *entries: Entry, **fields: Any) -> str:
    tenant_id, memo = fields.pop("tenant_id", "acme"), f"about {name}"
    return ledger.post(session, Transaction(tenant_id, "usage", name, at, entries, memo, **fields))


def money(units: int, currency: str = "USD") -> dict[str, str]:
    whole, rest = divmod(abs(units), DOLLAR)
    digits = f"{rest:012}".rstrip("0")
    sign = "-" if units < 0 else ""
    return {
        "amount": f"{sign}{whole}.{digits}" if digits else f"{sign}{whole}",
        "units": str(units),
        "currency": currency,
    }


@pytest.fixture
def posted(lite: Deployment, session: Session) -> Session:
    """12.344 dollars of usage, paid but 0.004 which is rounded, 5.00 of another tenant, 3 euros, and
    one posting of February."""
    owed = Money(12 * DOLLAR + 344 * DOLLAR // 1000)
    paid = Money(12 * DOLLAR + 34 * CENT)
    post(session, "one", START, *transfer(K.RECEIVABLE, K.REVENUE, owed))
    post(
        session,
        "two",
        START + DAY,
        Entry(K.CASH, paid),
        Entry(K.ROUNDING, owed - paid),
        Entry(K.RECEIVABLE, -owed),
    )
    five = transfer(K.RECEIVABLE, K.TAX, Money(5 * DOLLAR))
    post(session, "three", START + DAY, *five, tenant_id="beta")
    euros = transfer(K.RECEIVABLE, K.REVENUE, Money(3 * DOLLAR, "EUR"))
    post(session, "four", FEBRUARY - INSTANT, *euros)
    post(session, "five", FEBRUARY, *transfer(K.BAD_DEBT, K.RECEIVABLE, Money(CENT)))
    return session


def test_a_trial_balance_has_debits_and_credits_by_account(posted: Session) -> None:
    def found(*args: Any) -> list[tuple[str, ...]]:
        rows = journal.trial_balance(posted, *args)
        for row in rows:
            debit, credit, balance = (
                int(row[name]["units"]) for name in ("debit", "credit", "balance")
            )
            assert balance == debit - credit
        return [
            (r["currency"], r["code"], r["account"], r["debit"]["amount"], r["credit"]["amount"])
            for r in rows
        ]

    euros = [("EUR", "1100", "receivable", "3", "0"), ("EUR", "4000", "revenue", "0", "3")]
    dollars = [
        ("USD", "1000", "cash", "12.34", "0"),
        ("USD", "1100", "receivable", "17.344", "12.344"),
        ("USD", "2200", "tax", "0", "5"),
        ("USD", "4000", "revenue", "0", "12.344"),
        ("USD", "6900", "rounding", "0.004", "0"),
    ]
    assert found(FEBRUARY) == euros + dollars
    last = found()
    assert last[3] == ("USD", "1100", "receivable", "17.344", "12.354")
    assert last[6] == ("USD", "6200", "bad_debt", "0.01", "0")
    assert found(FEBRUARY - INSTANT) == dollars
    assert found(FEBRUARY, "beta") == [
        ("USD", "1100", "receivable", "5", "0"),
        ("USD", "2200", "tax", "0", "5"),
    ]
    assert found(START) == []


def test_transactions_are_listed_newest_first_with_their_entries(posted: Session) -> None:
    names = [each["reference"] for each in journal.transactions(posted, limit=9)]
    assert names[:2] == ["five", "four"] and names[-1] == "one"
    assert sorted(names[2:4]) == ["three", "two"]
    assert [t["reference"] for t in journal.transactions(posted, limit=2)] == ["five", "four"]
    (third,) = journal.transactions(posted, limit=9, tenant_id="beta")
    assert (third["tenant"], third["tenant_id"]) == ("beta", "beta"), "no tenant of the name"
    assert journal.transactions(posted, limit=9, search="bet") == [third]
    assert journal.transactions(posted, limit=9, search="ABOUT THR") == [third]
    assert [t["reference"] for t in journal.transactions(posted, limit=1, search="usage")] == [
        "five"
    ]
    assert journal.transactions(posted, limit=9, tenant_id="acme", search="three") == []
    (one,) = journal.transactions(posted, limit=9, search="one")
    units = 12_344 * 10**9
    assert one == {
        "id": one["id"],
        "at": START.isoformat(),
        "tenant_id": "acme",
        "tenant": "acme",
        "kind": "usage",
        "reference": "one",
        "memo": "about one",
        "entries": [
            {"account": "receivable", "amount": money(units)},
            {"account": "revenue", "amount": money(-units)},
        ],
    }


def test_a_journal_is_in_minor_units_and_sums_to_zero(posted: Session) -> None:
    """12.344 of revenue is 12.34; what rounding the lines leaves is of the rounding account."""
    assert journal.journal(posted, "2026-01").split("\r\n") == [
        "date,account,code,currency,debit,credit,memo",
        '2026-01-31,receivable,1100,EUR,3.00,,"receivable, 2026-01"',
        '2026-01-31,revenue,4000,EUR,,3.00,"revenue, 2026-01"',
        '2026-01-31,cash,1000,USD,12.34,,"cash, 2026-01"',
        '2026-01-31,receivable,1100,USD,5.00,,"receivable, 2026-01"',
        '2026-01-31,tax,2200,USD,,5.00,"tax, 2026-01"',
        '2026-01-31,revenue,4000,USD,,12.34,"revenue, 2026-01"',
        "",
    ]
    february = {
        Shape.PLAIN: '2026-02-28,bad_debt,B-1,USD,0.01,,"bad debt, 2026-02"',
        Shape.NETSUITE: 'TH-2026-02-USD,02/28/2026,USD,B-1,0.01,,"bad debt, 2026-02"',
        Shape.XERO: 'TH-2026-02-USD,28/02/2026,"bad debt, 2026-02",B-1,Tax Exempt,0.01',
        Shape.QUICKBOOKS: 'TH-2026-02-USD,02/28/2026,USD,B-1,0.01,,"bad debt, 2026-02"',
    }
    for shape, line in february.items():
        text = journal.journal(posted, "2026-02", shape, {"bad_debt": "B-1"})
        assert text.split("\r\n")[2] == line
    xero = journal.journal(posted, "2026-02", Shape.XERO).split("\r\n")
    assert xero[0] == "*Narration,*Date,Description,*AccountCode,*TaxRate,*Amount"
    assert xero[1].endswith(",1100,Tax Exempt,-0.01") and xero[3:] == [""]
    with pytest.raises(BadRequest, match="There is no account 'cashbox'"):
        journal.journal(posted, "2026-02", codes={"cashbox": "1"})


def test_a_month_ends_where_the_next_begins() -> None:
    assert journal.month_of("2026-11")[1] == datetime(2026, 12, 1, tzinfo=UTC)
    assert journal.month_of("2026-12") == (
        datetime(2026, 12, 1, tzinfo=UTC),
        datetime(2027, 1, 1, tzinfo=UTC),
    )
    for wrong in ("2026-13", "2026", "x"):
        with pytest.raises(BadRequest, match="is not a month"):
            journal.month_of(wrong)


def test_lines_that_round_apart_leave_the_rest_to_the_rounding_account() -> None:
    thirds = [("cash", "USD", 2 * CENT + CENT // 2, 0), ("revenue", "USD", 0, CENT + CENT // 4)]
    thirds += [("tax", "USD", 0, CENT + CENT // 4), ("rounding", "JPY", 3 * DOLLAR, 0)]
    assert journal._rounded(thirds) == {
        "USD": {"cash": 3, "revenue": -1, "tax": -1, "rounding": -1},
        "JPY": {"rounding": 0},
    }


def test_a_statement_has_each_line_in_full_and_pages_of_any_length(posted: Session) -> None:
    query = StatementQuery("receivable")
    whole = account_statement.read(posted, query)
    units = 12_344 * 10**9
    assert whole["data"][0] == {
        "entry": whole["data"][0]["entry"],
        "at": START.isoformat(),
        "tenant_id": "acme",
        "tenant": "acme",
        "kind": "usage",
        "reference": "one",
        "memo": "about one",
        "debit": money(units),
        "credit": money(0),
        "balance": money(units),
    }
    assert (whole["data"][1]["debit"], whole["data"][1]["credit"]) == (money(0), money(units))
    head = {"object": "list", "account": "receivable", "currency": "USD", "next": None}
    bounds = {"opening": money(0), "closing": money(5 * DOLLAR - CENT)}
    assert {name: whole[name] for name in (*head, *bounds)} == head | bounds
    names = [line["reference"] for line in whole["data"]]
    assert names == ["one", "two", "three", "five"]
    assert list(account_statement.all_lines(posted, query)) == whole["data"]
    after, pages = 0, []
    while after is not None:
        page = account_statement.read(posted, query, after=after, limit=2)
        pages.append((page["opening"]["amount"], len(page["data"]), page["closing"]["amount"]))
        after = page["next"]
    assert pages == [("0", 2, "0"), ("0", 2, "4.99")]
    exact = account_statement.read(posted, query, limit=4)
    assert (len(exact["data"]), exact["next"]) == (4, None)
    shorter = account_statement.read(posted, query, limit=3)
    assert shorter["next"] == whole["data"][2]["entry"]
    with pytest.raises(BadRequest, match="There is no entry 999"):
        account_statement.read(posted, query, after=999)


def test_a_statement_is_of_its_account_tenant_currency_and_time(posted: Session) -> None:
    def found(**fields: Any) -> list[str]:
        query = account_statement.check(StatementQuery(**({"account": "receivable"} | fields)))
        return [line["reference"] for line in account_statement.all_lines(posted, query)]

    assert found(currency="EUR") == ["four"]
    assert found(tenant_id="beta") == ["three"]
    assert found(account="cash") == ["two"]
    assert found(start=START + DAY) == ["two", "three", "five"]
    assert found(start=START + DAY + INSTANT) == ["five"]
    assert found(end=FEBRUARY) == ["one", "two", "three"]
    assert found(start=START, end=START + INSTANT) == ["one"]
    late = StatementQuery("receivable", start=FEBRUARY)
    assert account_statement.balance_before(posted, late, None) == 0
    assert account_statement.balance_before(posted, late, START + DAY) == 12_344 * 10**9
    assert account_statement.read(posted, late)["opening"] == money(5 * DOLLAR)
    for fields, error in (
        ({"account": "vault"}, "There is no account 'vault'"),
        ({"currency": "XYZ"}, "The currency 'XYZ' is unknown"),
        ({"start": datetime(2026, 1, 1)}, "from has no time zone"),  # noqa: DTZ001
        ({"end": datetime(2026, 1, 1)}, "to has no time zone"),  # noqa: DTZ001
        ({"start": START, "end": START}, "from is not before to"),
    ):
        with pytest.raises((BadRequest, NotFound), match=error):
            found(**fields)


def test_a_page_of_a_statement_has_at_most_500_lines(lite: Deployment, session: Session) -> None:
    pair = transfer(K.RECEIVABLE, K.REVENUE, Money(1))
    ledger.post_many(
        session, [Transaction("acme", "usage", f"{n}", START, pair) for n in range(1001)]
    )
    page = account_statement.read(session, StatementQuery("receivable"))
    assert (len(page["data"]), page["closing"]["units"]) == (500, "500")
    whole = list(account_statement.all_lines(session, StatementQuery("receivable")))
    assert [line["balance"]["units"] for line in whole] == [str(n) for n in range(1, 1002)]


def test_a_posting_is_balanced_and_posted_once(posted: Session) -> None:
    first = post(posted, "six", START, *transfer(K.RECEIVABLE, K.REVENUE, Money(7)))
    assert post(posted, "six", START, *transfer(K.RECEIVABLE, K.REVENUE, Money(9))) == first
    assert ledger.posted_to(posted, "six", K.RECEIVABLE) == 7
    assert ledger.posted_to(posted, "six", K.CASH) == 0
    for entries in (
        (),
        (Entry(K.CASH, Money(1)),),
        (Entry(K.CASH, Money(1)), Entry(K.REVENUE, Money(-1, "EUR"))),
    ):
        with pytest.raises(InvariantBroken, match="does not sum to zero"):
            post(posted, "seven", START, *entries)
    before = ledger.balance(posted, "acme", K.RECEIVABLE, "USD")
    again = ledger.reverse(posted, first, START + DAY, "in error")
    assert ledger.reverse(posted, first, START + DAY, "twice") == again
    assert ledger.balance(posted, "acme", K.RECEIVABLE, "USD") == before - 7
    (shown,) = journal.transactions(posted, limit=9, search="reverse:")
    assert (shown["kind"], shown["memo"]) == ("reversal", "in error")
    assert shown["reference"] == f"reverse:{first}"
    assert ledger.balance(posted, "nobody", K.CASH, "USD") == 0
    with pytest.raises(NotFound, match="There is no ledger transaction 'txn_0'"):
        ledger.reverse(posted, "txn_0", START, "")
    with ledger.recorded(posted) as seen:
        post(posted, "eight", START, *transfer(K.CASH, K.REVENUE, Money(1)))
    assert [each.reference for each in seen] == ["eight"]
    post(posted, "nine", START, *transfer(K.CASH, K.REVENUE, Money(1)))
    assert len(seen) == 1


def test_a_wallet_is_not_overdrawn(posted: Session) -> None:
    post(posted, "bought", START, *transfer(K.CASH, K.PREPAID, Money(5)))
    post(posted, "used", START, *transfer(K.PREPAID, K.REVENUE, Money(5)))
    with pytest.raises(InsufficientQuota, match="too low"), posted.begin_nested():
        post(posted, "more", START, *transfer(K.PREPAID, K.REVENUE, Money(1)))
