"""Payment references in the form of ISO 11649: `RF`, two check digits, up to 21 letters and digits.

An invoice's reference is made of its number, a customer's of a hash of the tenant's id; neither needs a
table of its own. The check digits are those of ISO 7064 MOD 97-10, as in an IBAN.
"""

import re
from hashlib import sha256

MOST = 21  # characters after the check digits
CUSTOMER = "C"  # first character of a customer's reference
_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_SHAPE = re.compile(r"RF\d\d[0-9A-Z]{1,21}")
_FOUND = re.compile(r"(?<![0-9A-Z])RF ?\d ?\d(?: ?[0-9A-Z]){1,40}")


def of_invoice(label: str) -> str:
    """The reference of a printed number, such as `TH-000042`. Long numbers keep their end."""
    return _with_digits("".join(each for each in label.upper() if each.isalnum())[-MOST:])


def of_customer(tenant_id: str) -> str:
    number = int.from_bytes(sha256(tenant_id.encode()).digest()[:8])
    digits = "".join(_ALPHABET[number >> 5 * place & 31] for place in range(12))
    return _with_digits(CUSTOMER + digits)


def is_valid(reference: str) -> bool:
    """Whether the form and the check digits are right; spaces are not expected."""
    return bool(_SHAPE.fullmatch(reference)) and _number(reference[4:] + reference[:4]) % 97 == 1


def plain(reference: str) -> str:
    """Without the zeros that banks put before the reference to fill it up."""
    return reference[:4] + reference[4:].lstrip("0")


def printed(reference: str) -> str:
    """In groups of four, as people read it."""
    return " ".join(reference[at : at + 4] for at in range(0, len(reference), 4))


def found_in(text: str) -> tuple[list[str], list[str]]:
    """(valid references, what looks like one with wrong check digits). A reference may be followed by
    other words, so that each of its beginnings with right check digits counts."""
    valid: list[str] = []
    wrong: list[str] = []
    for match in _FOUND.finditer(text.upper()):
        whole = match.group().replace(" ", "")
        starts = [whole[:size] for size in range(min(len(whole), 4 + MOST), 4, -1)]
        good = [each for each in starts if is_valid(each)]
        valid += good
        if not good:
            wrong.append(printed(whole[: 4 + MOST]))
    return valid, wrong


def _with_digits(payload: str) -> str:
    return f"RF{98 - _number(payload + 'RF00') % 97:02d}{payload}"


def _number(text: str) -> int:
    return int("".join(str(int(each, 36)) for each in text))
