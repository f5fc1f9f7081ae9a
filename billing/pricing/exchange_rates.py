"""Exchange rates of the day, for reports in one currency. The ledger, invoices and prices never use them.

An amount is converted at the rate of its own day: the one recorded for that day, or else for the latest
day of the week before it, since no rates are published on weekends and holidays. A pair that is recorded
the other way round is divided by.
"""

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import date, timedelta
from typing import Any

from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from billing.pricing.tables import ExchangeRate
from core.clock import Clock
from core.errors import BadRequest, Conflict
from core.money import MINOR_DIGITS, PICO, decimal_of, round_half_away, units_of

REACH = timedelta(days=7)
HEADER = ("day", "base", "quote", "rate")
MOST = 10**9  # units of `quote` for one of `base`


@dataclass(frozen=True, slots=True)
class RateDraft:
    """A rate as it was given: a decimal with at most 12 places. `day` is an ISO date."""

    day: str
    base: str
    quote: str
    rate: str


def record(
    session: Session,
    clock: Clock,
    drafts: Iterable[RateDraft],
    recorded_by: str,
    *,
    replace: bool = False,
) -> list[ExchangeRate]:
    """Store all of them or none. Conflict if a day has another rate already, unless `replace`."""
    return [_record(session, clock, each, recorded_by, replace) for each in drafts]


def _record(
    session: Session, clock: Clock, draft: RateDraft, recorded_by: str, replace: bool
) -> ExchangeRate:
    day, rate = _day(draft.day, clock), _rate(draft.rate)
    base, quote = check_currency(draft.base, "base"), check_currency(draft.quote, "quote")
    if base == quote:
        raise BadRequest(
            f"The base and the quote are both {base}.",
            next_step="Name two different currencies.",
            param="quote",
        )
    row = session.get(ExchangeRate, (day, base, quote))
    if row is not None and row.rate != rate and not replace:
        raise Conflict(
            f"The rate of {base} to {quote} on {day} is {decimal_of(row.rate)} already.",
            next_step="Ask to replace it if it was wrong: reports of that day change.",
            param="rate",
        )
    if row is None:
        row = ExchangeRate(day=day, base=base, quote=quote)
        session.add(row)
    row.rate, row.recorded_at, row.recorded_by = rate, clock.now(), recorded_by
    session.flush()
    return row


def parse_csv(text: str) -> list[RateDraft]:
    """Rates from CSV with the header day,base,quote,rate."""
    try:
        rows = list(csv.reader(io.StringIO(text.lstrip("\ufeff"))))
    except csv.Error as error:
        raise BadRequest(
            f"The file cannot be read as CSV: {error}.",
            next_step="Write one rate a line, such as 2026-01-30,EUR,USD,1.0834.",
        ) from None
    if not rows or tuple(each.strip().lower() for each in rows[0]) != HEADER:
        raise BadRequest(
            "The file does not begin with the line day,base,quote,rate.",
            next_step="Write one rate a line, such as 2026-01-30,EUR,USD,1.0834.",
        )
    drafts = []
    for number, row in enumerate(rows[1:], 2):
        if not row:
            continue
        if len(row) != len(HEADER):
            raise BadRequest(
                f"Line {number} has {len(row)} fields instead of {len(HEADER)}.",
                next_step="Write one rate a line, such as 2026-01-30,EUR,USD,1.0834.",
            )
        drafts.append(RateDraft(*(each.strip() for each in row)))
    if not drafts:
        raise BadRequest("The file has no rates.", next_step="Write one rate a line.")
    return drafts


def check_currency(written: str, param: str) -> str:
    currency = written.upper()
    if currency not in MINOR_DIGITS:
        raise BadRequest(
            f"The currency {written[:10]!r} is unknown.",
            next_step=f"Use one of {', '.join(sorted(MINOR_DIGITS))}.",
            param=param,
        )
    return currency


def _day(written: str, clock: Clock) -> date:
    try:
        day = date.fromisoformat(written)
    except ValueError:
        raise BadRequest(
            f"day is {written[:20]!r}.", next_step="Write it as 2026-01-30.", param="day"
        ) from None
    if day > clock.now().date():
        raise BadRequest(
            f"The day {day} is in the future.", next_step="Record its rate then.", param="day"
        )
    return day


def _rate(written: str) -> int:
    try:
        rate = units_of(written)
    except ValueError:
        rate = 0
    if not 0 < rate <= MOST * PICO:
        raise BadRequest(
            f"The rate {written[:40]!r} is not a number above 0 with at most 12 decimals.",
            next_step="Write what one unit of the base is worth, such as 1.0834.",
            param="rate",
        )
    return rate


def listed(session: Session, limit: int = 500) -> list[ExchangeRate]:
    """The newest first."""
    order = (ExchangeRate.day.desc(), ExchangeRate.base, ExchangeRate.quote)
    return list(session.scalars(select(ExchangeRate).order_by(*order).limit(limit)))


def describe(row: ExchangeRate) -> dict[str, Any]:
    return {
        "day": row.day.isoformat(),
        "base": row.base,
        "quote": row.quote,
        "rate": decimal_of(row.rate),
        "recorded_at": row.recorded_at.isoformat(),
        "recorded_by": row.recorded_by,
    }


@dataclass(slots=True)
class Converter:
    """Converts picounits into one currency, and notes each rate that it used."""

    currency: str
    rows: Sequence[ExchangeRate]
    used: dict[tuple[date, str, str], ExchangeRate] = field(default_factory=dict)
    _found: dict[tuple[str, date], ExchangeRate] = field(default_factory=dict)

    @classmethod
    def load(cls, session: Session, currency: str, start: date, end: date) -> "Converter":
        """For amounts of the days from `start` to `end`, both inclusive."""
        wanted = check_currency(currency, "reporting")
        rows = session.scalars(
            select(ExchangeRate)
            .where(
                ExchangeRate.day >= start - REACH,
                ExchangeRate.day <= end,
                or_(ExchangeRate.base == wanted, ExchangeRate.quote == wanted),
            )
            .order_by(ExchangeRate.day.desc())
        )
        return cls(wanted, list(rows))

    def convert(self, units: int, currency: str, day: date) -> int:
        """Rounded to a picounit, half away from zero. BadRequest without a rate."""
        if currency == self.currency or not units:
            return units
        row = self._found.get((currency, day))
        if row is None:
            row = self._found[currency, day] = self._find(currency, day)
            self.used[row.day, row.base, row.quote] = row
        if row.base == currency:
            return round_half_away(units * row.rate, PICO)
        return round_half_away(units * PICO, row.rate)

    def _find(self, currency: str, day: date) -> ExchangeRate:
        near = [
            row
            for row in self.rows
            if day - REACH <= row.day <= day and currency in (row.base, row.quote)
        ]
        if not near:
            raise BadRequest(
                f"There is no rate of {currency} to {self.currency} for {day} or the week before.",
                next_step=f"Record it: tollhouse price exchange-rate {currency} {self.currency} RATE "
                f"--day {day}",
                param="reporting",
                code="exchange_rate_missing",
            )
        newest = [row for row in near if row.day == near[0].day]
        return next((row for row in newest if row.base == currency), newest[0])

    def rates_used(self) -> list[dict[str, Any]]:
        return [
            {"day": day.isoformat(), "base": base, "quote": quote, "rate": decimal_of(row.rate)}
            for (day, base, quote), row in sorted(self.used.items())
        ]
