"""What plans must come to on an invoice of a simulation, worked out without code of the product."""

from collections import defaultdict
from collections.abc import Iterator
from datetime import datetime, timedelta
from fractions import Fraction
from typing import Any

from tests.billing.simulation.rows import Books, moment_of, rows_of


def of_plan(
    books: Books, invoice: dict[str, Any], net: list[dict[str, Any]], name: str
) -> Iterator[str]:
    """Fees by the share of the period's time; shares are whole picounits, so one may be off by one."""
    bounds = tuple(moment_of(invoice[each]) for each in ("period_start", "period_end"))
    own: dict[str, int] = defaultdict(int)
    earlier: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for line in net:
        behind = line["usage_period_id"] not in ("", invoice["period_id"])
        if behind and line["kind"] != "late_usage":
            earlier[line["usage_period_id"]][line["kind"]] += line["exact"]
        else:
            own[line["kind"]] += line["exact"]
    share, parts = _shares(books, invoice["tenant_id"], *bounds)
    spent = own["usage"] + own["late_usage"] + own["adjustment"]
    wanted = {"base_fee": share["base_fee"]} | _settled(share, spent)
    for kind, units in wanted.items():
        if abs(own[kind] - units) > 2 * parts:
            yield f"{name}: {kind} is {own[kind]}, by hand {float(units)}"
    for period_id, kinds in earlier.items():
        before = _billed_before(books, period_id, invoice["period_start"])
        (period,) = rows_of(books, "select * from billing_periods where id = ?", period_id)
        times = moment_of(period["starts_at"]), moment_of(period["ends_at"])
        share, parts = _shares(books, invoice["tenant_id"], *times)
        was, now = (_settled(share, units) for units in (before, before + kinds["adjustment"]))
        for kind in ("included", "commitment"):
            if abs(kinds[kind] - (now[kind] - was[kind])) > 2 * parts:
                yield f"{name}: the corrected {kind} is {kinds[kind]}, was {was}, is {now}"


def parts_of(books: Books, invoice: dict[str, Any]) -> int:
    """How many plans the invoice's period is of."""
    times = moment_of(invoice["period_start"]), moment_of(invoice["period_end"])
    return _shares(books, invoice["tenant_id"], *times)[1]


def _shares(
    books: Books, tenant: str, start: datetime, end: datetime
) -> tuple[dict[str, Fraction], int]:
    """Amounts of the plans for this time, and how many plans they are of."""
    share: dict[str, Fraction] = defaultdict(Fraction)
    parts = 0
    for held in rows_of(
        books,
        "select p.*, s.starts_at, s.ends_at from subscriptions s join plans p on p.id = s.plan_id"
        " where s.tenant_id = ?",
        tenant,
    ):
        until = moment_of(held["ends_at"]) if held["ends_at"] else end
        time = min(end, until) - max(start, moment_of(held["starts_at"]))
        if time > timedelta(0):
            parts += 1
            for column in ("base_fee", "included_usage", "minimum_commitment"):
                share[column] += (
                    Fraction(time / timedelta(microseconds=1))
                    * held[column]
                    / Fraction((end - start) / timedelta(microseconds=1))
                )
    return share, parts


def _settled(share: dict[str, Fraction], spent: int) -> dict[str, Fraction]:
    covered = max(Fraction(0), min(share["included_usage"], Fraction(spent)))
    short = max(Fraction(0), share["minimum_commitment"] - (spent - covered))
    if not share["minimum_commitment"]:
        short = Fraction(0)  # what is taken back is no shortfall
    return {"included": -covered, "commitment": short}


def _billed_before(books: Books, period_id: str, moment: str) -> int:
    """The period's charges, and the corrections of it that earlier invoices have."""
    charges = rows_of(books, "select amount from charges where bill_period_id = ?", period_id)
    corrections = rows_of(
        books,
        "select a.amount from adjustments a join billing_periods p on p.id = a.bill_period_id"
        " where a.usage_period_id = ? and p.starts_at < ?",
        period_id,
        moment,
    )
    return sum(int(row["amount"]) for row in [*charges, *corrections])
