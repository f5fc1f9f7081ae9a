"""Bank statements as camt.053 (ISO 20022, BankToCustomerStatement), versions 2 to 13.

Only booked entries count. An entry of several transactions gives a line for each. Where a statement has
its opening and its closing balance, the entries must lead from one to the other. The file comes from
outside, so a document type declaration, on which entity bombs and external entities rest, is refused
before it is read, and depth and number of elements are bounded.
"""

from collections.abc import Iterator
from datetime import date, datetime
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

from billing.bank.lines import MOST_LINES, StatementLine, checked, clipped, minor_of
from core.errors import BadRequest
from core.money import format_minor

_MOST_DEPTH = 40
_MOST_ELEMENTS = 2_000_000
_MESSAGE = "BkToCstmrStmt"


def parse(content: bytes) -> list[StatementLine]:
    """BadRequest for what is not a whole, plain camt.053 document."""
    root = _tree(content)
    message = root.find(_MESSAGE)
    if root.tag != "Document" or message is None:
        raise BadRequest(
            f"The document is a {root.tag[:40]!r} without {_MESSAGE}.",
            next_step="Export the statement as camt.053; camt.052 and camt.054 have no final bookings.",
        )
    for statement in message.findall("Stmt"):
        _check_balances(statement)
    lines = [
        line
        for statement in message.findall("Stmt")
        for number, entry in enumerate(statement.findall("Ntry"), 1)
        if _text(entry, "Sts/Cd", "Sts") == "BOOK"
        for line in _lines(statement, entry, f"Entry {number} of {_text(statement, 'Id')[:40]}")
    ]
    if len(lines) > MOST_LINES:
        raise BadRequest(
            f"The document has {len(lines)} bookings.",
            next_step=f"Import at most {MOST_LINES} at once.",
        )
    return lines


def _check_balances(statement: Element) -> None:
    """The opening balance and the booked entries make the closing one. A page of a longer statement, and
    one of a bank that sends no balances, lacks one of them."""
    opening, closing = _balance(statement, "OPBD", "PRCD"), _balance(statement, "CLBD")
    if opening is None or closing is None:
        return
    name = _text(statement, "Id")[:40]
    currency, begins = _signed(opening, f"The opening balance of {name}")
    other, ends = _signed(closing, f"The closing balance of {name}")
    entries = [
        (number, entry)
        for number, entry in enumerate(statement.findall("Ntry"), 1)
        if _text(entry, "Sts/Cd", "Sts") == "BOOK"
    ]
    booked = 0
    for number, entry in entries:
        own, minor = _signed(entry, f"Entry {number} of {name}")
        booked += minor if own == currency else 0
    difference = ends - begins - booked
    if difference or other != currency:
        shown = [format_minor(each, currency) for each in (begins, booked, ends, difference)]
        raise BadRequest(
            f"Statement {name} opens with {shown[0]}, its {len(entries)} entries sum to {shown[1]}, and "
            f"it closes with {shown[2]} {other}: {shown[3]} {currency} are missing.",
            next_step="Nothing is imported: export the statement again, with all of its entries.",
        )


def _balance(statement: Element, *codes: str) -> Element | None:
    """The first balance of the first of these types that there is one of."""
    found = {_text(each, "Tp/CdOrPrtry/Cd"): each for each in reversed(statement.findall("Bal"))}
    return next((found[code] for code in codes if code in found), None)


def _signed(element: Element, where: str) -> tuple[str, int]:
    """Currency and minor units of an entry or a balance."""
    minor = _amount(element, element, where)
    if minor is None:
        raise BadRequest(f"{where} has no amount.", next_step="Export it again.")
    return _currency(element), minor


def _lines(statement: Element, entry: Element, where: str) -> Iterator[StatementLine]:
    account = _text(statement, "Acct/Id/IBAN", "Acct/Id/Othr/Id")
    booked_on = _day(_text(entry, "BookgDt/Dt", "BookgDt/DtTm"), where)
    usual = _text(entry, "AcctSvcrRef", "NtryRef")
    if not _text(entry, "AcctSvcrRef") and usual:
        usual = f"{_text(statement, 'Id')}/{usual}"  # a number within the statement only
    parts = entry.findall("NtryDtls/TxDtls")
    whole = _amount(entry, entry, where)
    amounts = [_amount(part, entry, where) for part in parts]
    if len(parts) > 1 and (None in amounts or sum(amounts) != whole):  # type: ignore[arg-type]
        parts = []  # the bank does not say how it divides
    for number, part in enumerate(parts or [None], 1):
        own = _text(part, "Refs/AcctSvcrRef") if part is not None and len(parts) > 1 else ""
        name = own or (f"{usual}:{number}" if usual and len(parts) > 1 else usual)
        amount = amounts[number - 1] if len(parts) > 1 else whole
        yield checked(
            StatementLine(
                account,
                name,
                booked_on,
                _currency(entry),
                amount or 0,
                *_payer(part, whole or 0),
                _text(part, "RmtInf/Strd/CdtrRefInf/Ref").replace(" ", ""),
                clipped(" ".join(_all(part, "RmtInf/Ustrd") or [_text(entry, "AddtlNtryInf")])),
            ),
            where,
        )


def _amount(element: Element, entry: Element, where: str) -> int | None:
    """Minor units in the currency of the account; debits are below zero."""
    found = element.find("Amt")
    if found is None:
        found = element.find("AmtDtls/TxAmt/Amt")
    currency = _currency(entry)
    if found is None or found.get("Ccy") != currency:
        return None
    written = (found.text or "").strip()
    if "." in written:
        written = written.rstrip("0").rstrip(".")
    sign = _text(element, "CdtDbtInd") or _text(entry, "CdtDbtInd")
    if sign not in ("CRDT", "DBIT"):
        raise BadRequest(f"{where} says neither CRDT nor DBIT.", next_step="Export it again.")
    minor = minor_of(written or "0", currency, where)
    return -minor if sign == "DBIT" else minor


def _currency(entry: Element) -> str:
    amount = entry.find("Amt")
    return (amount.get("Ccy") or "") if amount is not None else ""


def _payer(part: Element | None, amount: int) -> tuple[str, str]:
    side = "Dbtr" if amount > 0 else "Cdtr"
    name = _text(part, f"RltdPties/{side}/Pty/Nm", f"RltdPties/{side}/Nm")
    account = _text(part, f"RltdPties/{side}Acct/Id/IBAN", f"RltdPties/{side}Acct/Id/Othr/Id")
    return clipped(name)[:200], account.replace(" ", "")[:40]


def _day(written: str, where: str) -> date:
    try:
        return datetime.fromisoformat(written).date()
    except ValueError:
        raise BadRequest(
            f"{where} has the booking date {written[:30]!r}.", next_step="Export it again."
        ) from None


def _text(element: Element | None, *paths: str) -> str:
    """The first of the paths that has a text."""
    return next((found for path in paths for found in _all(element, path)), "")


def _all(element: Element | None, path: str) -> list[str]:
    if element is None:
        return []
    return [each.text.strip() for each in element.findall(path) if each.text and each.text.strip()]


def _tree(content: bytes) -> Element:
    """The document without namespaces. Expat is driven by hand, as ElementTree's parser has no handler
    for document types."""
    builder, parser = TreeBuilder(), expat.ParserCreate()
    parser.buffer_text = True
    depth = count = 0

    def _start(tag: str, attributes: dict[str, str]) -> None:
        nonlocal depth, count
        depth, count = depth + 1, count + 1
        if depth > _MOST_DEPTH or count > _MOST_ELEMENTS:
            raise BadRequest(
                f"The document has more than {_MOST_DEPTH} levels or {_MOST_ELEMENTS:,} elements.",
                next_step="Export a shorter time.",
            )
        builder.start(tag.rpartition(":")[2], attributes)

    def _end(tag: str) -> None:
        nonlocal depth
        depth -= 1
        builder.end(tag.rpartition(":")[2])

    def _doctype(*_: object) -> None:
        raise BadRequest(
            "The document has a document type declaration, which bank statements do not have.",
            next_step="Export the statement again from the bank.",
        )

    parser.StartElementHandler, parser.EndElementHandler = _start, _end
    parser.CharacterDataHandler = builder.data
    parser.StartDoctypeDeclHandler = _doctype
    try:
        parser.Parse(content, True)
        return builder.close()
    except (expat.ExpatError, AssertionError, LookupError, ValueError) as error:
        raise BadRequest(
            f"The document is not complete XML: {error}.",
            next_step="Export it again; the file may be cut off.",
        ) from None
