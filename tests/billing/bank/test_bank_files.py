"""Files of banks, read whole: every field of every line, and what is wrong with a refused file."""

from dataclasses import replace
from datetime import date

import pytest

from billing.accounts import references
from billing.bank import camt053, csv_file, lines, wires
from billing.bank.lines import StatementLine, minor_of
from core.errors import BadRequest

DAY = date(2026, 2, 10)


def camt(statements: str) -> bytes:
    return f"<Document><BkToCstmrStmt>{statements}</BkToCstmrStmt></Document>".encode()


def statement(*entries: str, account: str = "<IBAN>DE89</IBAN>", balances: str = "") -> str:
    owner = f"<Acct><Id>{account}</Id></Acct>"
    return f"<Stmt><Id>S-7</Id>{owner}{balances}{''.join(entries)}</Stmt>"


def entry(
    amount: str = "12.00",
    details: str = "",
    *,
    sign: str = "CRDT",
    currency: str = "USD",
    refs: str = "<AcctSvcrRef>A-1</AcctSvcrRef>",
    state: str = "<Sts><Cd>BOOK</Cd></Sts>",
    day: str = "<Dt>2026-02-10</Dt>",
    more: str = "",
) -> str:
    amounts = f'<Amt Ccy="{currency}">{amount}</Amt><CdtDbtInd>{sign}</CdtDbtInd>'
    told = f"<NtryDtls>{details}</NtryDtls>"
    return f"<Ntry>{amounts}{state}<BookgDt>{day}</BookgDt>{refs}{told}{more}</Ntry>"


def part(inner: str = "", amount: str = "", sign: str = "", currency: str = "USD") -> str:
    amounts = f'<Amt Ccy="{currency}">{amount}</Amt>' if amount else ""
    signs = f"<CdtDbtInd>{sign}</CdtDbtInd>" if sign else ""
    return f"<TxDtls>{inner}{amounts}{signs}</TxDtls>"


PARTIES = """<RltdPties><Dbtr><Pty><Nm> Acme
  Inc </Nm></Pty></Dbtr><DbtrAcct><Id><IBAN>DE12 3400</IBAN></Id></DbtrAcct>
<Cdtr><Nm>Payee</Nm></Cdtr><CdtrAcct><Id><Othr><Id>77 8</Id></Othr></Id></CdtrAcct></RltdPties>"""
TEXTS = "<Ustrd>for </Ustrd><Ustrd> January</Ustrd>"
ASKED = (
    f"""<RmtInf>{TEXTS}<Strd><CdtrRefInf><Ref>RF15 TH00 0001</Ref></CdtrRefInf></Strd></RmtInf>"""
)


def test_an_entry_says_who_paid_what_and_why() -> None:
    (found,) = camt053.parse(camt(statement(entry(details=part(PARTIES + ASKED)))))
    assert found == StatementLine(
        account="DE89",
        bank_id="A-1",
        booked_on=DAY,
        currency="USD",
        amount_minor=1200,
        payer="Acme Inc",
        payer_account="DE123400",
        reference="RF15TH000001",
        text="for January",
    )


def test_of_a_debit_the_other_side_is_who_was_paid() -> None:
    (found,) = camt053.parse(camt(statement(entry(sign="DBIT", details=part(PARTIES)))))
    assert (found.amount_minor, found.payer, found.payer_account) == (-1200, "Payee", "778")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"day": "<DtTm>2026-02-10T23:59:59+01:00</DtTm>"}, {}),
        ({"state": "<Sts>BOOK</Sts>"}, {}),
        ({"refs": "<NtryRef>4</NtryRef>"}, {"bank_id": "S-7/4"}),
        ({"refs": "<NtryRef>4</NtryRef><AcctSvcrRef>B</AcctSvcrRef>"}, {"bank_id": "B"}),
        ({"more": "<AddtlNtryInf>a  fee</AddtlNtryInf>"}, {"text": "a fee"}),
        ({"amount": " 5 "}, {"amount_minor": 500}),
        ({"amount": "100"}, {"amount_minor": 10_000}),
        ({"amount": "5.1000000"}, {"amount_minor": 510}),
        ({"amount": "5.000"}, {"amount_minor": 500}),
        ({"amount": "700", "currency": "JPY"}, {"currency": "JPY", "amount_minor": 700}),
    ],
)
def test_ways_in_which_banks_write_an_entry(
    changes: dict[str, str], expected: dict[str, object]
) -> None:
    (found,) = camt053.parse(camt(statement(entry(**changes))))
    plain: dict[str, object] = {
        "account": "DE89",
        "bank_id": "A-1",
        "booked_on": DAY,
        "currency": "USD",
        "amount_minor": 1200,
    }
    assert found == StatementLine(**(plain | expected))  # type: ignore[arg-type]


def test_an_account_without_an_iban_and_long_texts_of_a_payer() -> None:
    names = (
        f"<RltdPties><Dbtr><Nm>{'n' * 300}</Nm></Dbtr><DbtrAcct><Id><IBAN>{'7' * 50}</IBAN></Id>"
    )
    told = f"{names}</DbtrAcct></RltdPties><RmtInf><Ustrd>{'t' * 3000}</Ustrd></RmtInf>"
    other = "<Othr><Id>4711</Id></Othr>"
    (found,) = camt053.parse(camt(statement(entry(details=part(told)), account=other)))
    assert (found.account, found.payer, found.payer_account, found.text) == (
        "4711",
        "n" * 200,
        "7" * 40,
        "t" * 2000,
    )


def _ids(*parts: str, amount: str = "9.00", refs: str = "<AcctSvcrRef>A-1</AcctSvcrRef>") -> object:
    found = camt053.parse(camt(statement(entry(amount, "".join(parts), refs=refs))))
    return [(each.bank_id, each.amount_minor) for each in found]


def test_an_entry_of_several_payments_is_divided_as_the_bank_says() -> None:
    first, second = part(amount="7.00"), part(amount="2.00")
    assert _ids(first, second) == [("A-1:1", 700), ("A-1:2", 200)]
    own = part("<Refs><AcctSvcrRef>P-2</AcctSvcrRef></Refs>", amount="2.00")
    assert _ids(first, own) == [("A-1:1", 700), ("P-2", 200)]
    assert _ids(first, own, refs="<NtryRef>4</NtryRef>") == [("S-7/4:1", 700), ("P-2", 200)]
    back = part(amount="3.00", sign="DBIT")
    assert _ids(part(amount="12.00"), back) == [("A-1:1", 1200), ("A-1:2", -300)]
    inside = part('<AmtDtls><TxAmt><Amt Ccy="USD">2.00</Amt></TxAmt></AmtDtls>')
    assert _ids(first, inside) == [("A-1:1", 700), ("A-1:2", 200)]


def test_an_entry_that_the_bank_does_not_divide_is_one_line() -> None:
    first = part(amount="7.00")
    assert _ids(first, part(amount="1.99")) == [("A-1", 900)], "it does not add up"
    assert _ids(first, part()) == [("A-1", 900)], "a part is missing"
    assert _ids(first, part(amount="2.00", currency="EUR")) == [("A-1", 900)]
    assert _ids(part(amount="1.00")) == [("A-1", 900)], "one payment is the whole entry"


def test_only_booked_entries_of_every_statement_count() -> None:
    pending = entry(state="<Sts><Cd>PDNG</Cd></Sts>")
    second = statement(pending, entry(refs="<AcctSvcrRef>A-2</AcctSvcrRef>"))
    found = camt053.parse(camt(statement(entry(), pending) + second))
    assert [each.bank_id for each in found] == ["A-1", "A-2"]


def balance(code: str, amount: str, sign: str = "CRDT", currency: str = "USD") -> str:
    kind = f"<Tp><CdOrPrtry><Cd>{code}</Cd></CdOrPrtry></Tp>"
    return f'<Bal>{kind}<Amt Ccy="{currency}">{amount}</Amt><CdtDbtInd>{sign}</CdtDbtInd></Bal>'


def test_the_first_opening_balance_counts_and_entries_of_another_currency_do_not() -> None:
    several = balance("PRCD", "50.00") + balance("OPBD", "1.00") + balance("OPBD", "2.00")
    ends = balance("CLBD", "13.00") + balance("CLBD", "14.00")
    euros = entry("3.00", currency="EUR", refs="<AcctSvcrRef>A-2</AcctSvcrRef>")
    assert len(camt053.parse(camt(statement(entry(), euros, balances=several + ends)))) == 2
    for one in (balance("OPBD", "1.00"), balance("CLBD", "1.00")):
        assert len(camt053.parse(camt(statement(entry(), balances=one)))) == 1
    wrong = balance("OPBD", "1.00") + balance("CLBD", "12.00")
    with pytest.raises(BadRequest) as told:
        camt053.parse(camt(statement() + statement(entry(), balances=wrong)))
    assert str(told.value).startswith(
        "Statement S-7 opens with 1.00, its 1 entries sum to 12.00, and it closes with 12.00 USD: "
        "-1.00 USD are missing."
    )


AMOUNT, ONE = (f'<Amt Ccy="USD">{each}</Amt>' for each in ("12.00", "1.00"))
LONG = f"Statement {'S' * 40} opens with 1.00, its 1 entries sum to 12.00"
OPENING, CLOSING = balance("OPBD", "1.00"), balance("CLBD", "1.00")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"<Documents><BkToCstmrStmt/></Documents>", "The document is a 'Documents' without"),
        (camt(statement(entry(sign="ODD"))), "Entry 1 of S-7 says neither CRDT nor DBIT"),
        (camt(statement(entry(), entry("x"))), "Entry 2 of S-7 has the amount 'x'"),
        (camt(statement(entry("0"))), "Entry 1 of S-7 has the amount 0 in minor units"),
        (camt(statement(entry("", currency=""))), "Entry 1 of S-7 is in ''"),
        (camt(statement(entry().replace(AMOUNT, ""))), "Entry 1 of S-7 has the amount 0 in minor"),
        (
            camt(statement(balances=OPENING.replace(ONE, "") + CLOSING)),
            "opening balance of S-7 has no",
        ),
        (
            camt(statement(balances=OPENING + CLOSING.replace(ONE, ""))),
            "closing balance of S-7 has no",
        ),
        (camt(statement(entry(day=f"<Dt>{'9' * 40}</Dt>"))), f"booking date '{'9' * 30}'"),
        (
            camt(statement(entry(), entry().replace(AMOUNT, ""), balances=OPENING + CLOSING)),
            "Entry 2 of",
        ),
        (camt(statement(entry("x")).replace("S-7", "S" * 50)), f"Entry 1 of {'S' * 40} has"),
        (camt(statement(entry(), balances=OPENING + CLOSING).replace("S-7", "S" * 50)), LONG),
        (f"<{'a' * 50}/>".encode(), f"The document is a '{'a' * 40}' without"),
    ],
)
def test_a_document_that_is_refused_names_its_entry(content: bytes, problem: str) -> None:
    with pytest.raises(BadRequest, match=problem):
        camt053.parse(content)


def test_forty_levels_and_ten_thousand_bookings_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    deep = "<a>" * 38 + "</a>" * 38
    assert camt053.parse(camt(deep)) == []
    with pytest.raises(BadRequest, match="more than 40 levels or 2,000,000 elements"):
        camt053.parse(camt(f"<a>{deep}</a>"))
    many = "".join(entry(refs=f"<AcctSvcrRef>{n}</AcctSvcrRef>") for n in range(3))
    monkeypatch.setattr(camt053, "MOST_LINES", 3)
    assert len(camt053.parse(camt(statement(many)))) == 3
    monkeypatch.setattr(camt053, "MOST_LINES", 2)
    with pytest.raises(BadRequest, match=r"has 3 bookings. Import at most 2 at once"):
        camt053.parse(camt(statement(many)))
    monkeypatch.setattr(camt053, "_MOST_ELEMENTS", 4)
    assert camt053.parse(camt("<a/><b/>")) == []
    with pytest.raises(BadRequest, match="more than 40 levels or 4 elements"):
        camt053.parse(camt("<a/><b/><c/>"))


def test_the_size_of_a_file_and_its_kind() -> None:
    with pytest.raises(BadRequest, match=r"has 16777217 bytes. Import at most 16 MiB"):
        wires.parse(b"<" + b" " * 16_777_216)
    with pytest.raises(BadRequest, match="not complete XML"):
        wires.parse(b"<" + b" " * 16_777_215)
    assert wires.parse(b"\xef\xbb\xbf \r\n" + camt("").replace(b"><", b"> <")) == []
    with pytest.raises(BadRequest, match="neither XML nor UTF-8: byte 3 is wrong"):
        wires.parse(b"id,\xff")


HEAD = "id,date,amount,currency,account,payer,payer_account,reference,text"


def test_every_field_of_a_line_of_csv() -> None:
    row = f"b-1,2026-02-10,-1.5,usd,DE 89,{'p' * 250},DE 12,RF15,{'t' * 2500}"
    (found,) = csv_file.parse(f"\ufeff{HEAD}\n\n , \n{row}\n".replace(" , ", " " + "," * 8))
    assert found == StatementLine(
        "DE89", "b-1", DAY, "USD", -150, "p" * 200, "DE12", "RF15", "t" * 2000
    )
    (bare,) = csv_file.parse("ID;Date;Amount;Currency\nb;10/02/2026;7,1;EUR")
    assert bare == StatementLine("", "b", DAY, "EUR", 710)
    (tabs,) = csv_file.parse("id\tdate\tamount\tcurrency\nb\t20260210\t7\tEUR")
    assert tabs == StatementLine("", "b", DAY, "EUR", 700)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (f"{HEAD}\nb,2026-02-10\n", "Line 2 has 2 fields, and the header has 9"),
        ("id,date,amount,currency\n\nb,2026-02-10,x,USD\n", "Line 3 has the amount 'x'"),
        (f"id,date\n{'x' * 20_001},1", "Line 2 of the file is not CSV"),
        (
            f"id,date,{'x' * 300}\n",
            "The file has no column amount, currency; it has id, date, x{190}\\.",
        ),
        (f"id,date,amount,currency\nb,{'1' * 30},1,USD", f"Line 2 has the date '{'1' * 20}'"),
        (f"id,date,amount,currency\nb,2026-02-10,{'x' * 50},USD", f"the amount '{'x' * 40}',"),
        (f"id,date,amount,currency\nb,2026-02-10,1,{'q' * 20}", f"is in '{'Q' * 10}'"),
    ],
)
def test_a_file_of_csv_that_is_refused_names_its_line(content: str, problem: str) -> None:
    with pytest.raises(BadRequest, match=problem):
        csv_file.parse(content)


def test_a_field_that_is_mapped_has_to_be_one() -> None:
    with pytest.raises(BadRequest, match=f"There is no field '{'f' * 40}'") as told:
        csv_file.parse(HEAD, {"f" * 50: "x"})
    assert told.value.param == "columns"
    with pytest.raises(BadRequest, match="no column nr") as told:
        csv_file.parse(f"{HEAD}\n", {"id": " Nr "})
    assert told.value.param == "columns"


@pytest.mark.parametrize(
    ("written", "currency", "minor"),
    [
        ("1234.50", "USD", 123_450),
        ("1234,5", "USD", 123_450),
        ("+7", "USD", 700),
        ("-7.01", "USD", -701),
        ("1.234,50", "EUR", 123_450),
        ("-1.234.567,05", "EUR", -123_456_705),
        ("1,234.50", "USD", 123_450),
        ("-12,345,678.90", "USD", -1_234_567_890),
        ("1 234'5\u00a067.00 ", "USD", 123_456_700),
        ("12.00", "JPY", 12),
        ("12.30", "USD", 1230),
        ("9" * 15, "USD", int("9" * 15 + "00")),
    ],
)
def test_amounts_as_banks_write_them(written: str, currency: str, minor: int) -> None:
    assert minor_of(written, currency, "Line 1") == minor


@pytest.mark.parametrize(
    ("written", "currency"),
    [
        ("12.30", "JPY"),
        ("1.234", "USD"),
        ("12,34.50", "USD"),
        ("1,23,456.00", "USD"),
        ("1.234,567", "USD"),
        ("1-", "USD"),
        ("", "USD"),
        ("1" * 16, "USD"),
    ],
)
def test_amounts_that_may_mean_two_things_or_nothing(written: str, currency: str) -> None:
    with pytest.raises(BadRequest, match=f"cannot be read in {currency}"):
        minor_of(written, currency, "Line 1")


def test_what_a_line_may_hold() -> None:
    assert (lines.MOST_LINES, lines.MOST_BYTES) == (10_000, 16_777_216)
    plain = StatementLine("", "b", DAY, "USD", 1)
    for name, most in (
        ("bank_id", 140),
        ("account", 40),
        ("payer", 200),
        ("payer_account", 40),
        ("reference", 140),
    ):
        longest = replace(plain, **{name: "x" * most})
        assert lines.checked(longest, "Line 1") is longest
        with pytest.raises(BadRequest, match=f"Line 1 has a {name} of {most + 1} characters"):
            lines.checked(replace(plain, **{name: "x" * (most + 1)}), "Line 1")
    with pytest.raises(BadRequest, match="Line 1 has no id of the bank"):
        lines.checked(replace(plain, bank_id=""), "Line 1")
    for minor in (10**15, -(10**15)):
        assert lines.checked(replace(plain, amount_minor=minor), "Line 1").amount_minor == minor
    for minor in (10**15 + 1, -(10**15) - 1, 0):
        with pytest.raises(BadRequest, match=f"has the amount {minor} in minor units"):
            lines.checked(replace(plain, amount_minor=minor), "Line 1")


def test_references_by_hand() -> None:
    """Of `C` and twelve characters for the customer; 97-10 of TH000001RF00 is worked out elsewhere."""
    own = references.of_customer("acme")
    assert len(own) == 17 and own[4] == "C" and references.is_valid(own)
    assert set(own[5:]) <= set("0123456789ABCDEFGHJKMNPQRSTVWXYZ")
    assert own != references.of_customer("birch")
    assert references.printed("RF15TH000001X") == "RF15 TH00 0001 X"
    assert references.plain("RF15000TH0100") == "RF15TH0100"
    longest = references.of_invoice("9" * 30)
    assert len(longest) == 25 and references.is_valid(longest)
    assert not references.is_valid(longest + "0")
    assert not references.is_valid("RF15")
    assert references.of_invoice("th-000.001") == "RF15TH000001"


def test_references_are_found_among_words() -> None:
    assert references.found_in("pay rf15 th00 0001 today") == (["RF15TH000001"], [])
    assert references.found_in("XRF15TH000001") == ([], [])
    assert references.found_in("RF16TH000001.") == ([], ["RF16 TH00 0001"])
    assert references.found_in("RF15TH000001, RF16TH000001") == (
        ["RF15TH000001"],
        ["RF16 TH00 0001"],
    )
    assert references.found_in("RF18 5390 0754 7034; RF15TH000001")[0] == [
        "RF18539007547034",
        "RF15TH000001",
    ]
    wrong = f"RF16{'7' * 30}"
    assert references.found_in(wrong)[1] == [references.printed(wrong[:25])]
