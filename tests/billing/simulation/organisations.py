"""What organisations and add-ons must come to on invoices of a simulation, worked out without code of the
product. Whose parent pays, and how many units of an add-on a tenant has, the world tells as it goes.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from fractions import Fraction
from typing import Any, NamedTuple

from tests.billing.simulation.rows import Books, moment_of, rows_of

MILLION = 1_000_000
CENT = 10**10  # picounits
BETWEEN = ("markup", "transfer")  # lines between a child and its parent
Since = list[tuple[datetime, Any]]  # what is in force from each moment on
Found = tuple[str, int, str, str]  # kind, minor units, start and end of a line


class Link(NamedTuple):
    parent: str
    pays: str
    markup_ppm: int


def in_force(timeline: Iterable[tuple[datetime, Any]], at: datetime) -> Any:
    return next((each for since, each in reversed([*timeline]) if since <= at), None)


def cents(units: int) -> int:
    """Half a cent rounds away from zero."""
    rounded = (2 * abs(units) + CENT) // (2 * CENT)
    return rounded if units >= 0 else -rounded


def of_child(
    link: Link | None, invoice: dict[str, Any], net: list[dict[str, Any]], credit: tuple[int, int]
) -> Iterator[str]:
    """The parent's mark-up, exactly, and that a child owes nothing before tax if its parent pays.
    `credit` is the promotional and the prepaid one that paid for the invoice."""
    name, (promo, prepaid) = f"invoice {invoice['label']}", credit
    own = [line for line in net if line["kind"] not in BETWEEN]
    charged = sum(line["exact"] for line in own)
    ppm = link.markup_ppm if link else 0
    markup = (2 * abs(charged) * ppm + MILLION) // (2 * MILLION) * (1 if charged >= 0 else -1)
    found = {kind: [line for line in net if line["kind"] == kind] for kind in BETWEEN}
    if sum(line["exact"] for line in found["markup"]) != markup:
        yield f"{name}: the mark-up is {found['markup']}, by hand {markup}"
    minor = sum(line["amount_minor"] for line in own) + cents(markup)
    net_of_promo = charged + markup - promo
    for_net = min(prepaid, max(0, net_of_promo))  # more of it paid for tax
    rest = cents(net_of_promo - for_net) if promo or prepaid else minor
    owed = rest if link is not None and link.pays == "parent" else 0
    moved = -sum(line["amount_minor"] for line in found["transfer"])
    if moved != owed:
        yield f"{name}: {moved} cents move to the parent, by hand {owed}"


def of_parents(books: Books, links: dict[str, Since]) -> Iterator[str]:
    """What a child's invoice passes on is on one invoice of the parent: on its first that is final no
    earlier, of a period that ends no earlier."""
    invoices = rows_of(
        books,
        "select * from invoices where status <> 'draft' order by final_at, period_start",
    )
    lines: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in rows_of(books, "select * from invoice_lines"):
        lines[line["invoice_id"]].append(line)
    expected: dict[str, Counter[Found]] = defaultdict(Counter)
    for child in invoices:
        link = in_force(links.get(child["tenant_id"], []), moment_of(child["final_at"]))
        if link is None or child["status"] == "void":
            continue
        target = next((each for each in invoices if _can_bill(each, link.parent, child)), None)
        passed = _passed(link, lines[child["id"]])
        if target is not None and passed[1] and passed[0] == "child":
            expected[target["id"]][(*passed, child["period_start"], child["period_end"])] += 1
    yield from _of_mark_ups(books, lines)
    for invoice in invoices:
        found = Counter(
            (line["kind"], line["amount_minor"], line["starts_at"], line["ends_at"])
            for line in lines[invoice["id"]]
            if line["kind"] == "child"
        )
        if found != expected[invoice["id"]]:
            wanted = dict(expected[invoice["id"]])
            yield f"invoice {invoice['label']}: of children {dict(found)}, by hand {wanted}"


def _of_mark_ups(books: Books, lines: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    """Of each mark-up its parent has at most what there is, and never less than nothing."""
    earned: Counter[str] = Counter()
    for line in (each for some in lines.values() for each in some):
        if line["kind"] == "child_markup":
            details = (
                json.loads(line["details"]) if isinstance(line["details"], str) else line["details"]
            )
            earned[details["invoice"]] -= line["amount_minor"]
    for invoice_id, minor in earned.items():
        whole = sum(each["amount_minor"] for each in lines[invoice_id] if each["kind"] == "markup")
        if not min(0, whole) <= minor <= max(0, whole):
            yield f"invoice {invoice_id}: {minor} of the mark-up {whole} are the parent's"


def _can_bill(invoice: dict[str, Any], parent: str, child: dict[str, Any]) -> bool:
    return bool(
        invoice["tenant_id"] == parent
        and invoice["final_at"] >= child["final_at"]
        and invoice["period_end"] >= child["period_end"]
    )


def _passed(link: Link, lines: list[dict[str, Any]]) -> tuple[str, int]:
    sums = {
        kind: sum(line["amount_minor"] for line in lines if line["kind"] == kind)
        for kind in BETWEEN
    }
    if link.pays == "parent":
        return "child", -sums["transfer"] - sums["markup"]
    return "child_markup", -sums["markup"]


def of_add_ons(
    held: Iterable[tuple[int, Since]],
    invoice: dict[str, Any],
    net: list[dict[str, Any]],
    parts: int,
) -> Iterator[str]:
    """Fee and quantity by the share of the period's time; `held` are fees in picounits, with the
    quantities since. Each of the plan's `parts` is a line, and its share is in whole picounits."""
    start, end = (moment_of(invoice[each]) for each in ("period_start", "period_end"))
    expected, pieces = Fraction(0), 0
    for fee, timeline in held:
        bounds = [since for since, _ in timeline if start < since < end]
        for first, last in zip([start, *bounds], [*bounds, end], strict=True):
            quantity = in_force(timeline, first) or 0
            micros = Fraction((last - first) / timedelta(microseconds=1))
            expected += (
                fee * quantity * micros / Fraction((end - start) / timedelta(microseconds=1))
            )
            pieces += 1
    found = sum(line["exact"] for line in net if line["kind"] == "add_on")
    if abs(found - expected) > 2 * (pieces + 1) * (parts + 1):
        yield f"invoice {invoice['label']}: add-ons are {found}, by hand {float(expected)}"
