"""Formatting of values: money, times, shares, and the colours of states."""

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Context, Decimal

from markupsafe import Markup, escape

from core.money import decimal_of, format_minor, minor_digits, round_to_minor, units_of_minor
from dashboards.scales import Label, grouped


def money(units: int, currency: str) -> str:
    """Rounded, for tiles and tables; titles and CSV have the exact amount. An amount below ten minor
    units has two significant digits, so that a fraction of a cent does not read as nothing."""
    rounded, left = round_to_minor(units, currency)
    if left and abs(units) < units_of_minor(10, currency):
        few = Decimal(decimal_of(units)).normalize(_TWO_DIGITS)
        places = max(minor_digits(currency), -int(few.as_tuple().exponent))
        return f"{few:.{places}f} {currency}"
    return f"{_grouped_decimal(format_minor(rounded, currency))} {currency}"


def money_label(currency: str) -> Label:
    """What the pointer shows of a chart of picounits."""
    return lambda units: money(int(units), currency)


_TWO_DIGITS = Context(prec=2)


def exact(units: int, currency: str = "") -> str:
    """Every digit, thousands grouped; of a currency at least its minor digits. Files have it plain."""
    whole, _, fraction = decimal_of(units).partition(".")
    fraction = fraction.ljust(minor_digits(currency) if currency else 0, "0")
    return _grouped_decimal(f"{whole}.{fraction}" if fraction else whole)


def minor(amount: int, currency: str) -> str:
    return f"{_grouped_decimal(format_minor(amount, currency))} {currency}"


def moment(value: datetime | None) -> str:
    return value.astimezone(UTC).isoformat(" ", "seconds")[:19] if value else "–"


def since(value: datetime, now: datetime) -> str:
    """`3 minutes ago`; the date after a week, and whatever is in the future as an instant."""
    gone = now - value
    if gone < timedelta(0):
        return moment(value)
    if gone >= timedelta(days=7):
        return day(value)
    seconds = int(gone.total_seconds())
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            return f"{seconds // length} {unit}{'s' if seconds >= 2 * length else ''} ago"
    return f"{seconds} s ago"


def time_html(value: datetime, now: datetime) -> Markup:
    """How long ago, with the instant for hover and for machines."""
    instant = value.astimezone(UTC)
    return Markup('<time datetime="{}" title="{} UTC">{}</time>').format(
        instant.isoformat("T", "seconds"), moment(value), since(value, now)
    )


def counted(count: int, noun: str) -> str:
    """`1 request`, `2 requests`."""
    return f"{grouped(count)} {noun}{'' if count == 1 else 's'}"


def day(value: datetime | None) -> str:
    return value.astimezone(UTC).strftime("%Y-%m-%d") if value else "–"


def share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "–"


def change(now: int, before: int, shown: Callable[[int], str] = grouped) -> str:
    """`+12 % against 1 200 before`."""
    if before == 0:
        return f"{shown(0)} before"
    return f"{100 * (now - before) / abs(before):+.1f} % against {shown(before)} before"


def markup_code(text: object) -> Markup:
    """HTML-escaped, with text between backticks as <code>."""
    said = str(escape(text))
    return Markup(_CODE.sub(r"<code>\1</code>", said) if "`" in said else said)


def markup_links(text: str, root: str) -> Markup:
    """As `markup_code`, with `[words](/path)` as a link to that page of the dashboard, and `[words](#id)`
    as one within the page."""

    def _link(found: re.Match[str]) -> str:
        site = escape(root) if found[2].startswith("/") else ""
        return f'<a href="{site}{found[2]}">{found[1]}</a>'

    return Markup(LINK.sub(_link, str(markup_code(text))))


LINK = re.compile(r"\[([^\]]+)\]\(([/#][\w/-]*)\)")
_CODE = re.compile(r"`([^`]+)`")


def badge_class(state: str) -> str:
    """The colour class of a badge with this state."""
    return _BADGE_CLASSES.get(state, "")


_BADGE_CLASSES = {
    state: colour
    for colour, states in {
        "good": "active paid healthy ready good clean granted done succeeded delivered closed resident "
        "clear",
        "warn": "ending open pending draft final warn past_due shadow running paused half_open loading",
        "bad": "uncollectible revoked expired parked disabled suspended failed bad denied "
        "differs disputed holds",
    }.items()
    for state in states.split()
}


def _grouped_decimal(text: str) -> str:
    whole, point, fraction = text.partition(".")
    return grouped(int(whole)) + point + fraction if whole not in ("-0",) else text
