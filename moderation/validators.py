"""Validators that tell card numbers, IBANs and the like from look-alikes."""

import ipaddress
import re

# Lengths by country, from the IBAN registry (SWIFT, ISO 13616).
_IBAN_COUNTRIES = {
    15: "NO",
    16: "BE",
    18: "DK FI FO GL NL",
    19: "MK SI",
    20: "AT BA EE KZ LT LU XK",
    21: "CH HR LI LV",
    22: "BG BH CR DE GB GE IE ME RS VA",
    23: "AE GI IL IQ TL",
    24: "AD CZ ES MD PK RO SA SE SK TN VG",
    25: "LY PT ST",
    26: "IS TR",
    27: "FR GR IT MC MR SM",
    28: "AL AZ BY CY DO GT HU LB PL SV",
    29: "BR EG PS QA UA",
    30: "JO KW MU",
    31: "MT SC",
    32: "LC",
}


_NOT_DIGITS = re.compile(r"[^0-9]+")
# What Luhn's checksum adds for every second digit: twice the digit, less 9 where that has two.
_DOUBLED = dict(zip("0123456789", (0, 2, 4, 6, 8, 1, 3, 5, 7, 9), strict=True))


def digits_of(text: str) -> str:
    return _NOT_DIGITS.sub("", text)


def luhn_holds(number: str) -> bool:
    backwards = number[::-1]
    doubled = sum([_DOUBLED[digit] for digit in backwards[1::2]])
    return (sum(map(int, backwards[::2])) + doubled) % 10 == 0


def is_card(candidate: str) -> bool:
    """Luhn checksum, a length and first digit that issuers use, and not a single repeated digit."""
    number = digits_of(candidate)
    if not 13 <= len(number) <= 19 or number[0] not in "23456" or len(set(number)) < 2:
        return False
    return luhn_holds(number)


def is_iban(candidate: str) -> bool:
    """The country's length, and ISO 7064 mod 97."""
    compact = "".join(candidate.split()).upper()
    if compact[:2] not in _IBAN_COUNTRIES.get(len(compact), "").split():
        return False
    moved = compact[4:] + compact[:4]
    return int("".join(str(int(c, 36)) for c in moved)) % 97 == 1


def is_us_ssn(candidate: str) -> bool:
    """Refuses the ranges that the Social Security Administration never issues."""
    number = digits_of(candidate)
    area, group, serial = number[:3], number[3:5], number[5:]
    if len(number) != 9 or area in {"000", "666"} or area >= "900":
        return False
    published_in_error = number in {"078051120", "219099999", "123456789"}
    return group != "00" and serial != "0000" and not published_in_error


def is_ip(candidate: str) -> bool:
    """The address of a host: not unspecified, and not a version number."""
    try:
        address = ipaddress.ip_address(candidate)
    except ValueError:
        return False
    return not address.is_unspecified


def is_phone(candidate: str) -> bool:
    """Common formats of telephone numbers: E.164 with +, a trunk 0, or North American 3-3-4."""
    number = digits_of(candidate)
    if len(set(number)) < 3:
        return False
    if candidate.startswith("+"):
        return 8 <= len(number) <= 15
    groups = [len(group) for group in re.split(r"[^0-9]+", candidate) if group]
    if groups in ([3, 3, 4], [1, 3, 3, 4]):
        return True
    return len(groups) > 1 and number.startswith("0") and len(number) in {10, 11}


def is_email(candidate: str) -> bool:
    local, _, domain = candidate.rpartition("@")
    edges_fine = not local.startswith(".") and not local.endswith(".") and ".." not in candidate
    return bool(local) and edges_fine and not domain.startswith("-")


def looks_random(candidate: str) -> bool:
    """Whether it is a key and no placeholder: letters and digits, and many different characters."""
    body = candidate.rsplit("_", 1)[-1].rsplit("-", 1)[-1] or candidate
    mixed = any(c.isdigit() for c in candidate) and any(c.isalpha() for c in candidate)
    return mixed and len(set(body)) >= 8
