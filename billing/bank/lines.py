"""Lines of a bank statement, as CSV or camt.053 brings them."""

import re
from dataclasses import dataclass
from datetime import date

from core.errors import BadRequest
from core.money import MINOR_DIGITS

MOST_LINES = 10_000
MOST_BYTES = 16 * 2**20
_LENGTHS = {"bank_id": 140, "account": 40, "payer": 200, "payer_account": 40, "reference": 140}
_MOST_TEXT = 2000
_MOST_MINOR = 10**15
_PLAIN = re.compile(r"([+-]?)(\d+)(?:[.,](\d{1,2}))?")
_GROUPED = re.compile(
    r"([+-]?)(\d{1,3}(?:\.\d{3})+)(?:,(\d{1,2}))|([+-]?)(\d{1,3}(?:,\d{3})+)(?:\.(\d{1,2}))"
)


@dataclass(frozen=True, slots=True)
class StatementLine:
    """`bank_id` is the bank's own id of the line in the account. Debits are below zero."""

    account: str  # IBAN or number of the seller's account; "" if the file does not tell
    bank_id: str
    booked_on: date
    currency: str
    amount_minor: int
    payer: str = ""
    payer_account: str = ""
    reference: str = ""  # structured
    text: str = ""  # what the payer wrote


def checked(line: StatementLine, where: str) -> StatementLine:
    """BadRequest, which names the line, for what cannot be stored."""
    if not line.bank_id:
        raise BadRequest(
            f"{where} has no id of the bank.",
            next_step="Without one a second import would book it again: export the id too.",
        )
    for name, most in _LENGTHS.items():
        if len(getattr(line, name)) > most:
            raise BadRequest(
                f"{where} has a {name} of {len(getattr(line, name))} characters.",
                next_step=f"At most {most} are possible.",
            )
    if not line.amount_minor or abs(line.amount_minor) > _MOST_MINOR:
        raise BadRequest(f"{where} has the amount {line.amount_minor} in minor units.")
    return line


def clipped(text: str) -> str:
    return " ".join(text.split())[:_MOST_TEXT]


def minor_of(written: str, currency: str, where: str) -> int:
    """Minor units of an amount with a decimal point or comma, as `1234.50`, `1.234,50`, `-12`."""
    if currency not in MINOR_DIGITS:
        raise BadRequest(
            f"{where} is in {currency[:10]!r}.",
            next_step=f"The known currencies: {', '.join(sorted(MINOR_DIGITS))}.",
        )
    text = written.strip().replace(" ", "").replace("'", "").replace("\u00a0", "")
    plain, grouped = _PLAIN.fullmatch(text), _GROUPED.fullmatch(text)
    if plain:
        sign, whole, fraction = plain.groups()
    elif grouped:
        parts = grouped.groups()
        sign, whole, fraction = parts[:3] if parts[1] else parts[3:]
        whole = whole.replace(".", "").replace(",", "")
    else:
        sign = whole = fraction = None
    digits = MINOR_DIGITS[currency]
    if whole is None or len((fraction or "").rstrip("0")) > digits or len(whole) > 15:
        raise BadRequest(
            f"{where} has the amount {written[:40]!r}, which cannot be read in {currency}.",
            next_step="Write it as 1234.50.",
        )
    value = int(whole + (fraction or "").rstrip("0").ljust(digits, "0"))
    return -value if sign == "-" else value
