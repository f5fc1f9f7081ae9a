"""Formatting of values: money, times, shares, and the colours of states."""

import re
from datetime import UTC, datetime

from markupsafe import Markup, escape

from core.money import decimal_of, format_minor, round_to_minor
from dashboards.scales import grouped


def money(units: int, currency: str) -> str:
    """Rounded to the minor unit, for tiles and tables; titles and CSV have the exact amount."""
    rounded, _left = round_to_minor(units, currency)
    return f"{_grouped_decimal(format_minor(rounded, currency))} {currency}"


def exact(units: int) -> str:
    return decimal_of(units)


def minor(amount: int, currency: str) -> str:
    return f"{_grouped_decimal(format_minor(amount, currency))} {currency}"


def moment(value: datetime | None) -> str:
    return value.astimezone(UTC).isoformat(" ", "seconds")[:19] if value else "–"


def day(value: datetime | None) -> str:
    return value.astimezone(UTC).strftime("%Y-%m-%d") if value else "–"


def share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "–"


def markup_code(text: object) -> Markup:
    """HTML-escaped, with text between backticks as <code>."""
    said = str(escape(text))
    return Markup(_CODE.sub(r"<code>\1</code>", said) if "`" in said else said)


_CODE = re.compile(r"`([^`]+)`")


def badge_class(state: str) -> str:
    """The colour class of a badge with this state."""
    return _BADGE_CLASSES.get(state, "")


_BADGE_CLASSES = {
    state: colour
    for colour, states in {
        "good": "active paid healthy ready good clean granted done succeeded delivered closed resident",
        "warn": "ending open pending draft final warn past_due shadow running paused half_open loading",
        "bad": "uncollectible revoked expired parked disabled suspended failed bad denied "
        "differs disputed",
    }.items()
    for state in states.split()
}


def _grouped_decimal(text: str) -> str:
    whole, point, fraction = text.partition(".")
    return grouped(int(whole)) + point + fraction if whole not in ("-0",) else text
