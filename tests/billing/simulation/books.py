"""What the books of a simulated world must say, worked out anew from what happened in it, in plain
arithmetic and without any code of the product.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

from tests.billing.simulation.organisations import (
    CENT,
    MILLION,
    Since,
    cents,
    in_force,
    of_add_ons,
    of_child,
    of_parents,
)
from tests.billing.simulation.plans import of_plan, parts_of
from tests.billing.simulation.rows import Books, moment_of, rows_of
from tests.billing.simulation.statements import Transfer, of_transfers

PER_MILLION = ("input", "cached_input", "output", "waived", "character")
UNITS = {"audio": "audio_second", "speech": "character", "image": "image"}


class Outcome(NamedTuple):
    input: int
    cached: int
    output: int
    waived: int
    status: int
    quantity: int
    units: int = 0  # seconds, characters or images, by kind


GIVEN_UP = Outcome(0, 0, 0, 0, 500, 1)
_LEFT = 499  # the client closed the connection


def ended(prompt: int, cached: int, delivered: int, generated: int, status: int) -> Outcome:
    """By the table of charges in `docs/customer.md`: an error before anything is delivered is free."""
    if status >= 400 and status != _LEFT and not delivered:
        return Outcome(0, 0, 0, generated, status, 0)
    return Outcome(prompt, cached, delivered, generated - delivered, status, 1)


@dataclass
class Request:
    tenant: str
    kind: str
    adapter: str | None
    version: str
    at: datetime
    outcomes: list[Outcome] = field(default_factory=list)  # what its event may say


class Price(NamedTuple):
    written: dict[str, Any]
    discount: Fraction
    tenant: str  # "" is everybody
    since: datetime


class Move(NamedTuple):
    """A re-rating: usage of one version costs what another says."""

    wrong: str
    right: str
    since: datetime
    until: datetime
    tenant: str


Event = tuple[Request, Outcome]


@dataclass
class Happened:
    """Told by the world as it goes."""

    zones: dict[str, str]  # of the tenants
    requests: dict[str, Request] = field(default_factory=dict)
    prices: dict[str, Price] = field(default_factory=dict)
    rates: dict[str, list[tuple[datetime, int]]] = field(default_factory=dict)  # tenant: since, ppm
    moves: list[Move] = field(default_factory=list)
    corrected: dict[tuple[str, datetime, str], int] = field(default_factory=dict)
    links: dict[str, Since] = field(default_factory=lambda: defaultdict(list))  # of children
    # By tenant and add-on: quantities since; and fees in picounits.
    add_ons: dict[tuple[str, str], Since] = field(default_factory=lambda: defaultdict(list))
    fees: dict[str, int] = field(default_factory=dict)
    transfers: list[Transfer] = field(default_factory=list)

    def opened(self, opened: Any) -> None:
        self.requests[opened.request_id] = Request(
            opened.tenant_id,
            str(opened.kind),
            opened.adapter,
            opened.price_version,
            opened.opened_at,
        )

    def may_be(self, request_id: str, outcome: Outcome) -> None:
        self.requests[request_id].outcomes.append(outcome)

    def was_given_up(self, request_id: str) -> None:
        self.may_be(request_id, GIVEN_UP)

    def rerated(self, move: Move, rated: list[tuple[str, Outcome]]) -> None:
        """Each component of a tenant's month in which there is usage of the wrong version is priced
        anew as a whole; of several re-ratings of the same usage the last one counts."""
        self.moves.append(move)
        events = [(self.requests[name], outcome) for name, outcome in rated]
        hit = {
            (request.tenant, self.month(request)[0], component)
            for request, outcome in events
            if self._hits(move, request)
            for component, count in counts(request, outcome)
            if count
        }
        for tenant, month, component in hit:
            there = [
                (request, outcome)
                for request, outcome in events
                if request.tenant == tenant and self.month(request)[0] == month
            ]
            meant = self.price(((e, self._meant(e[0])) for e in there), component)
            pinned = self.price(((e, e[0].version) for e in there), component)
            self.corrected[(tenant, month, component)] = meant - pinned

    def month(self, request: Request) -> tuple[datetime, datetime]:
        return month_around(request.at, self.zones[request.tenant])

    def usage(self, events: Iterable[Event]) -> int:
        """Picounits of the tenants' months at the prices that were pinned."""
        return self.price((event, event[0].version) for event in events)

    def price(self, events: Iterable[tuple[Event, str]], only: str = "") -> int:
        """In a month the versions of a tenant follow each other on one count of each component."""
        counted: dict[tuple[str, datetime, str], dict[str, int]] = defaultdict(
            lambda: defaultdict(int)
        )
        for (request, outcome), version in events:
            for component, count in counts(request, outcome):
                if count and only in ("", component):
                    month = self.month(request)[0]
                    counted[(request.tenant, month, component)][version] += count
        total = 0
        for (_, _, component), by_version in counted.items():
            before, whole = 0, sum(by_version.values())
            for version in sorted(by_version, key=lambda name: (self.prices[name].since, name)):
                total += self._part(version, component, (before, by_version[version], whole))
                before += by_version[version]
        return total

    def _part(self, version: str, component: str, place: tuple[int, int, int]) -> int:
        before, count, whole = place
        price = self.prices[version]
        rule = price.written.get(component)
        per = MILLION if component in PER_MILLION else 1
        if rule is None:
            return 0
        if isinstance(rule, dict) and rule["scheme"] == "volume":
            one = Fraction(tier_at(rule["tiers"], whole)["price"]) / per
            return less(count * one, price.discount)
        upto, start = (price_of(rule, n, per) for n in (before + count, before))
        return less(upto, price.discount) - less(start, price.discount)

    def _hits(self, move: Move, request: Request) -> bool:
        return (
            request.version == move.wrong
            and move.since <= request.at < move.until
            and move.tenant in ("", request.tenant)
        )

    def _meant(self, request: Request) -> str:
        for move in reversed(self.moves):
            if self._hits(move, request):
                return move.right
        return request.version


def counts(request: Request, outcome: Outcome) -> list[tuple[str, int]]:
    answered = 0 if outcome.status >= 500 else outcome.quantity
    if request.kind == "gpu_seconds":
        return [("gpu_second", outcome.quantity)]
    if request.kind == "moderation":
        return [("moderation", answered)]
    return [
        ("input", outcome.input - outcome.cached),
        ("cached_input", outcome.cached),
        ("output", outcome.output),
        ("waived", outcome.waived if answered else 0),  # of a failure it is free at any price
        ("request", answered),
        ("adapter", answered if request.adapter else 0),
        *([(UNITS[request.kind], outcome.units)] if request.kind in UNITS else []),
    ]


def price_of(written: Any, count: int, per: int) -> Fraction:
    """Major units for a count that starts at the first unit of a month."""
    if not isinstance(written, dict):
        return count * Fraction(written) / per
    count = max(0, count - written.get("free", 0))
    if written["scheme"] == "package":
        return -(-count // written["size"]) * Fraction(written["price"])
    total, begins = Fraction(0), 0
    for tier in written["tiers"]:
        inside = count - begins if tier["up_to"] is None else min(count, tier["up_to"]) - begins
        if inside > 0:
            total += inside * Fraction(tier["price"]) / per + Fraction(tier.get("flat", 0))
        begins = tier["up_to"] or begins
    return total


def tier_at(tiers: list[dict[str, Any]], count: int) -> dict[str, Any]:
    return next(each for each in tiers if each["up_to"] is None or count <= each["up_to"])


def less(major: Fraction, discount: Fraction) -> int:
    units = major * 10**12
    assert units.denominator == 1
    return int(units) - int(units * discount)


def month_around(at: datetime, zone: str) -> tuple[datetime, datetime]:
    """The calendar month of the zone."""
    local = at.astimezone(ZoneInfo(zone))
    after = (local.year + 1, 1) if local.month == 12 else (local.year, local.month + 1)
    starts = [
        datetime(y, m, 1, tzinfo=ZoneInfo(zone)) for y, m in ((local.year, local.month), after)
    ]
    return starts[0].astimezone(UTC), starts[1].astimezone(UTC)


def stored_outcomes(books: Books, *, rated: bool) -> list[tuple[str, Outcome]]:
    rows = books.execute(
        "select e.request_id, input_tokens, cached_tokens, output_tokens, waived_tokens, status,"
        " quantity, units from usage_events e join usage_batches b on b.id = e.batch_id"
        + (" where b.rated_at is not null" if rated else "")
    )
    return [(row[0], Outcome(*row[1:])) for row in rows]


def problems(books: Books, happened: Happened) -> Iterator[str]:
    """What the books say otherwise, once everything is shipped, rated and invoiced."""
    stored = dict(stored_outcomes(books, rated=True))
    for name, request in happened.requests.items():
        if name not in stored:
            yield f"{name} is lost"
        elif stored[name] not in request.outcomes:
            yield f"{name} is {stored[name]}, not one of {request.outcomes}"
    yield from (f"{name} is invented" for name in stored.keys() - happened.requests.keys())
    events = [(happened.requests[n], stored[n]) for n in stored if n in happened.requests]
    for tenant in happened.zones:
        yield from _of_tenant(books, happened, tenant, [e for e in events if e[0].tenant == tenant])
    yield from of_parents(books, happened.links)
    yield from of_transfers(books, happened.transfers)


def _of_tenant(books: Books, happened: Happened, tenant: str, events: list[Event]) -> Iterator[str]:
    used = happened.usage(events)
    fixed = sum(units for key, units in happened.corrected.items() if key[0] == tenant)
    posted = dict.fromkeys(("usage", "adjustment"), 0) | dict(
        books.execute(
            "select t.kind, -sum(e.units) from ledger_transactions t join ledger_entries e"
            " on e.transaction_id = t.id join ledger_accounts a on a.id = e.account_id"
            " where a.kind = 'revenue' and a.tenant_id = ? group by t.kind",
            (tenant,),
        ).fetchall()
    )
    lines: dict[str, int] = defaultdict(int)
    for kind, units in books.execute(
        "select l.kind, l.exact from invoice_lines l join invoices i on i.id = l.invoice_id"
        " where i.tenant_id = ?",
        (tenant,),
    ):
        lines[kind] += units
    for what, expected, found in (
        ("usage in the ledger", used, posted["usage"]),
        ("usage on invoices", used, lines["usage"] + lines["late_usage"]),
        ("corrections in the ledger", fixed, posted["adjustment"]),
        ("corrections on invoices", fixed, lines["adjustment"]),
    ):
        if expected != found:
            yield f"{tenant}: {what} is {found}, by hand {expected}"
    for invoice in rows_of(books, "select * from invoices where tenant_id = ?", tenant):
        yield from _of_invoice(books, happened, invoice)
    yield from _of_wallet(books, tenant)


def _of_invoice(books: Books, happened: Happened, invoice: dict[str, Any]) -> Iterator[str]:
    name, tenant = f"invoice {invoice['label'] or invoice['id']}", invoice["tenant_id"]
    lines = rows_of(books, "select * from invoice_lines where invoice_id = ?", invoice["id"])
    net = [line for line in lines if line["kind"] != "tax"]
    sold = [line for line in net if line["kind"] != "rounding"]
    for line in sold:
        if line["amount_minor"] != cents(line["exact"]):
            yield f"{name}: {line['exact']} is rounded to {line['amount_minor']}"
    yield from of_plan(books, invoice, net, name)
    subtotal = sum(line["amount_minor"] for line in net)
    held = [(fee, happened.add_ons[(tenant, each)]) for each, fee in happened.fees.items()]
    yield from of_add_ons(held, invoice, net, parts_of(books, invoice))
    gifts, paid = (_credit(books, invoice, kind) for kind in ("promo", "prepaid"))
    gift = cents(gifts)
    drift = (
        0  # credit and rest are rounded once each, and a line says what separates the lines from it
    )
    if gifts or paid:
        left = cents(sum(line["exact"] for line in sold) - gifts - paid)
        drift = left + gift + cents(paid) - sum(line["amount_minor"] for line in sold)
    shown = [(row["exact"], row["amount_minor"]) for row in net if row["kind"] == "rounding"]
    if shown != ([(0, drift)] if drift else []):
        yield f"{name}: lines of rounding are {shown}, by hand {drift}"
    if invoice["status"] == "draft":
        return
    link = in_force(happened.links[tenant], moment_of(invoice["final_at"]))
    yield from of_child(link, invoice, net, (gifts, paid))
    tax = _tax(happened.rates.get(tenant, []), invoice, net, gift)
    if subtotal == gift and any(line["kind"] == "transfer" for line in net):
        tax = 0  # the parent's invoice has it
    total = subtotal - gift + tax
    expected = (subtotal, gift, tax, total, total - invoice["prepaid_minor"])
    columns = ("subtotal_minor", "promo_minor", "tax_minor", "total_minor", "due_minor")
    found = tuple(invoice[column] for column in columns)
    if found != expected:
        yield f"{name}: {columns} are {found}, by hand {expected}"


def _tax(
    rates: list[tuple[datetime, int]], invoice: dict[str, Any], net: list[dict[str, Any]], gift: int
) -> int:
    """Of each moment of supply at its rate; gifts lower what is positive, in proportion."""
    supplied: dict[datetime, int] = defaultdict(int)
    for line in net:
        last = moment_of(line["ends_at"]) - timedelta(microseconds=1)
        supplied[min(last, moment_of(invoice["final_at"]))] += line["amount_minor"]
    positive = sum(max(0, minor) for minor in supplied.values())
    bases: dict[int, int] = defaultdict(int)
    before = 0
    for at, minor in sorted(supplied.items()):
        lowered = 0
        if minor > 0:
            lowered = gift * (before + minor) // positive - gift * before // positive
            before += minor
        rate = [ppm for since, ppm in rates if since <= at][-1:]
        if rate:
            bases[rate[0]] += minor - lowered
    return sum(cents(CENT // MILLION * base * ppm) for ppm, base in bases.items())


def _credit(books: Books, invoice: dict[str, Any], kind: str) -> int:
    found = books.execute(
        "select coalesce(sum(units), 0) from credit_uses where bill_period_id = ? and kind = ?"
        " and purpose = 'usage'",
        (invoice["period_id"], kind),
    )
    return int(found.fetchone()[0])


def _of_wallet(books: Books, tenant: str) -> Iterator[str]:
    """What was granted is there or was used, and the ledger owes what is there."""
    for kind in ("prepaid", "promo"):
        granted, left = books.execute(
            "select coalesce(sum(granted), 0), coalesce(sum(remaining), 0) from credit_grants"
            " where tenant_id = ? and kind = ?",
            (tenant, kind),
        ).fetchone()
        for what, query in (
            ("used", "select coalesce(sum(units), 0) from credit_uses"),
            ("owed", "select coalesce(sum(-balance), 0) from ledger_accounts"),
        ):
            (units,) = books.execute(
                f"{query} where tenant_id = ? and kind = ?", (tenant, kind)
            ).fetchone()
            expected = granted - left if what == "used" else left
            if units != expected:
                yield f"{tenant}: {kind} credit {what} is {units}, by hand {expected}"
