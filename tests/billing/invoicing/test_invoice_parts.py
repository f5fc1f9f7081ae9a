"""The parts of an invoice by themselves: totals, lines of usage and of children. Every number is worked
out by hand."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from billing.accounts.tables import BillingPeriod
from billing.invoicing import child_invoices, invoice_totals
from billing.invoicing.invoice_inputs import InvoiceInputs
from billing.invoicing.invoice_lines import Line, adjustment_lines, usage_lines
from billing.invoicing.invoice_totals import (
    Net,
    Totals,
    drift_lines,
    net_of,
    over_drawn,
    supplies_of,
    totals_of,
)
from billing.invoicing.tables import ChildInvoice, Invoice
from billing.organisations.tables import OrganisationLink
from billing.periods import Span
from billing.pricing.pricing import PARTS
from billing.taxes.taxes import Supply, Tax
from billing.usage.tables import Adjustment
from core.errors import Conflict
from tests.billing.conftest import START

CENT, DAY, INSTANT = 10**10, timedelta(days=1), timedelta(microseconds=1)
FEBRUARY, MARCH = datetime(2026, 2, 1, tzinfo=UTC), datetime(2026, 3, 1, tzinfo=UTC)
PERIOD = BillingPeriod(id="per_1", tenant_id="acme", starts_at=START, ends_at=FEBRUARY)


def line(minor: int, ends_at: datetime = FEBRUARY, kind: str = "usage", **fields: Any) -> Line:
    return Line(kind, "x", minor * CENT, minor, START, ends_at, **fields)


@pytest.mark.parametrize(
    ("exact", "promo", "prepaid", "drift", "shown"),
    [
        ([CENT // 2, CENT // 2], 0, 0, 0, (0, 0, 2)),  # each is billed at a cent
        ([CENT // 2, CENT // 2], CENT, 0, -1, (1, 0, 0)),
        ([CENT // 2, CENT // 2], CENT // 2, 0, 0, (1, 0, 1)),
        ([300 * CENT], 100 * CENT + 4, 0, 0, (100, 0, 200)),
        ([300 * CENT], 100 * CENT + CENT // 2 + 1, 0, 0, (101, 0, 199)),
        ([CENT * 2 // 5] * 2, 0, CENT // 10, 1, (0, 0, 1)),
        ([CENT * 2 // 5] * 100, 0, 40 * CENT, 40, (0, 40, 0)),
        ([CENT * 2 // 5] * 100, 15 * CENT, 25 * CENT, 40, (15, 25, 0)),
    ],
)
def test_credit_is_shown_as_it_left_the_wallet_and_the_drift_of_the_lines_is_a_line(
    exact: list[int],
    promo: int,
    prepaid: int,
    drift: int,
    shown: tuple[int, int, int],
) -> None:
    """`shown` is the promotional credit, the prepaid credit, and what they leave, in cents."""
    lines = [Line("usage", "x", u, (2 * u + CENT) // (2 * CENT), START, FEBRUARY) for u in exact]
    added = drift_lines(net_of(lines, promo, prepaid, "USD"), (START, FEBRUARY))
    assert [(each.kind, each.exact, each.minor) for each in added] == (
        [("rounding", 0, drift)] if drift else []
    )
    net = net_of(lines + added, promo, prepaid, "USD")
    assert (net.promo_minor, net.prepaid_minor, net.left_minor) == shown
    assert 0 <= net.left_minor <= net.taxable_minor


@pytest.mark.parametrize(
    ("exact", "promo", "prepaid", "back"),
    [
        (100, 60, 40, (0, 0)),
        (100, 60, 41, (1, 0)),
        (30, 60, 40, (60, 10)),
        (0, 60, 40, (60, 40)),
        (-50, 60, 40, (60, 40)),
        (100, 0, 0, (0, 0)),
    ],
)
def test_credit_that_is_not_needed_returns_the_promotional_first(
    exact: int, promo: int, prepaid: int, back: tuple[int, int]
) -> None:
    lines = [Line("usage", "x", exact, 0, START, FEBRUARY)]
    assert over_drawn(lines, promo, prepaid) == back


def test_totals_are_net_and_tax_less_what_credit_pays_of_each() -> None:
    """3.00 and a quarter cent, 1.00 of it promotional; 0.38 of tax; then 1.50 prepaid."""
    tax = [Tax("VAT", 190_000, 200, 30), Tax("City", 40_000, 200, 8)]

    def totals(prepaid: int, taxes: list[Tax], tax_minor: int = 0) -> Totals:
        net = Net(300 * CENT + CENT // 4, 100 * CENT, "USD", 300, 100, prepaid)
        return totals_of(net, taxes, tax_minor)

    plain = totals(0, tax)
    assert (plain.tax_minor, plain.total_minor, plain.due_minor) == (38, 238, 238)
    assert (plain.prepaid_minor, plain.rounding) == (0, -CENT // 4)
    partly = totals(150 * CENT, tax)
    assert (partly.prepaid_minor, partly.due_minor, partly.rounding) == (150, 88, -CENT // 4)
    whole = totals(200 * CENT + CENT // 4, tax, 38)
    assert (whole.prepaid_minor, whole.due_minor, whole.rounding) == (238, 0, 0)
    assert totals(150 * CENT, [], 7).prepaid_minor == 157


def test_a_supply_is_of_the_last_moment_of_its_lines_and_credit_lowers_it_in_proportion() -> None:
    lines = [line(100), line(50), line(200, MARCH), line(-30, FEBRUARY - DAY)]
    ends = {"jan": FEBRUARY - INSTANT, "feb": MARCH - INSTANT, "before": FEBRUARY - DAY - INSTANT}
    now = MARCH + DAY
    assert supplies_of(lines, 0, now) == (
        Supply(ends["before"], -30),
        Supply(ends["jan"], 150),
        Supply(ends["feb"], 200),
    )
    assert supplies_of(lines, 35, now) == (
        Supply(ends["before"], -30),
        Supply(ends["jan"], 135),  # 35 · 150 / 350
        Supply(ends["feb"], 180),
    )
    assert supplies_of(lines, 350, now) == (Supply(ends["before"], -30),)
    assert supplies_of(lines[:2], 0, START) == (Supply(START, 150),)
    back = line(-10, details={"taxed_at": "2026-01-02T00:00:00+00:00"})
    assert supplies_of([back], 5, now) == (Supply(START + DAY, -10),)
    assert supplies_of([line(0)], 0, now) == ()
    assert invoice_totals.supplies_of([], 0, now) == ()


def row(kind: str, version: str = "v", period: str = "per_1", **sums: int) -> tuple[Any, ...]:
    """As `InvoiceInputs.usage` has it: the count and the cents of each component."""
    names = ("input", "cached", "output", "waived", "request", "adapter", "gpu", "moderation")
    names += ("audio", "image", "character", *PARTS)
    pairs = (value for n in names for value in (sums.get(n, 0), sums.get(f"{n}_cents", 0) * CENT))
    return ("proj", "demo", sums.pop("adapter_of", ""), kind, version, period, *pairs)


def test_a_line_of_usage_has_its_quantity_price_and_place() -> None:
    inputs = InvoiceInputs(
        usage={"per_1": [row("generation", input=40, input_cents=3, request=2)]},
        spans={"per_1": Span.whole(START, FEBRUARY)},
    )
    assert usage_lines(inputs, PERIOD, "USD") == [
        Line(
            kind="usage",
            description="demo, input tokens",
            exact=3 * CENT,
            minor=3,
            starts_at=START,
            ends_at=FEBRUARY,
            component="input",
            project_id="proj",
            model="demo",
            adapter="",
            price_version="v",
            usage_period_id="per_1",
            quantity=40,
            unit="tokens",
            details={"kind": "generation"},
        )
    ]
    other = BillingPeriod(id="per_2", starts_at=FEBRUARY, ends_at=MARCH)
    assert usage_lines(inputs, other, "USD") == []


@pytest.mark.parametrize(
    ("kind", "sums", "shown"),
    [
        ("generation", {"input": 1, "request": 1, "waived": 1}, ["input", "waived"]),
        ("generation", {"request": 1, "request_cents": 1}, ["request"]),
        ("embedding", {"input": 1, "request": 1}, ["input"]),
        ("cache_hit", {"input": 1, "request": 1}, ["request"]),
        ("cache_hit", {"input": 1, "input_cents": 1}, ["input"]),
        ("gpu_seconds", {"gpu": 1, "input": 1}, ["gpu_second"]),
        ("moderation", {"moderation": 1}, ["moderation"]),
        ("audio", {"audio": 9, "request": 1, "input": 5}, ["audio_second"]),
        ("audio", {"audio": 9, "request": 1, "request_cents": 1}, ["request", "audio_second"]),
        ("speech", {"character": 9, "image": 1}, ["character"]),
        ("image", {"image": 1, "input": 9, "input_cents": 1}, ["input", "image"]),
        ("generation", {"input": 1, "reasoning": 1}, ["input", "reasoning"]),
        ("generation", {"search": 1}, []),
        ("generation", {"search": 1, "search_cents": 1}, ["search"]),
        ("generation", {}, []),
    ],
)
def test_what_costs_nothing_is_shown_where_its_kind_counts_it(
    kind: str, sums: dict[str, int], shown: list[str]
) -> None:
    inputs = InvoiceInputs(
        usage={"per_1": [row(kind, **sums)]}, spans={"per_1": Span.whole(START, FEBRUARY)}
    )
    assert [each.component for each in usage_lines(inputs, PERIOD, "USD")] == shown


def test_late_usage_tiers_and_the_response_cache_are_named() -> None:
    inputs = InvoiceInputs(
        usage={"per_1": [row("cache_hit", "fast", "per_0", request=1, request_cents=-5)]},
        spans={"per_0": Span.whole(START - 31 * DAY, START)},
        tiers={"fast": "priority"},
    )
    (found,) = usage_lines(inputs, PERIOD, "USD")
    assert (found.kind, found.minor, found.unit) == ("late_usage", -5, "requests")
    assert found.description == (
        "demo, requests answered from the response cache, priority tier, late, used 2025-12-01 to "
        "2026-01-01"
    )


def test_a_line_of_an_adjustment_has_the_time_that_it_corrects() -> None:
    made = Adjustment(
        id=7, rerate_id="rr", project_id="p", model="m", component="output", quantity=4,
        amount=-5 * CENT, usage_period_id="per_0", reason="A slip.",
    )  # fmt: skip
    plain = Adjustment(
        id=8, project_id="", model="", component="", quantity=0, amount=CENT,
        usage_period_id="per_1", reason="Goodwill.",
    )  # fmt: skip
    inputs = InvoiceInputs(
        adjustments={"per_1": [made, plain]},
        spans={
            "per_0": Span.whole(START - DAY, START),
            "per_1": Span.whole(START, FEBRUARY),
        },
    )
    assert adjustment_lines(inputs, PERIOD, "USD") == [
        Line(
            "adjustment", "A slip.", -5 * CENT, -5, START - DAY, START, "output", "p", "m",
            usage_period_id="per_0", quantity=4, unit="tokens",
            details={"adjustment": 7, "rerate": "rr"},
        ),
        Line(
            "adjustment", "Goodwill.", CENT, 1, START, FEBRUARY, usage_period_id="per_1",
            details={"adjustment": 8, "rerate": None},
        ),
    ]  # fmt: skip


def test_what_earlier_invoices_drew_ends_after_one_moment_and_up_to_the_other() -> None:
    inputs = InvoiceInputs(
        drawn=[
            ("acme", START, START, 1),
            ("acme", START + INSTANT, START + INSTANT, 2),
            ("acme", FEBRUARY, FEBRUARY, 4),
            ("acme", FEBRUARY, START, 8),  # a correction of what was used before
            ("acme", FEBRUARY + INSTANT, FEBRUARY, 16),
            ("beta", FEBRUARY, FEBRUARY, 32),
        ],
        billed={"per_1": [(START, 1), (FEBRUARY - INSTANT, 2), (FEBRUARY, 4)]},
    )
    assert inputs.drawn_between("acme", START, FEBRUARY) == 2 + 4
    assert (inputs.settled("per_1", FEBRUARY), inputs.settled("per_2", FEBRUARY)) == (3, 0)


def link(pays: str = "parent", markup_ppm: int = 125_000) -> OrganisationLink:
    return OrganisationLink(tenant_id="kid", parent_id="acme", pays=pays, markup_ppm=markup_ppm)


def test_a_mark_up_is_exact_and_left_out_where_it_is_nothing() -> None:
    lines = [line(100), line(60)]
    expected = Line("markup", "Mark-up 12.5 %", 20 * CENT, 20, START, FEBRUARY)
    assert child_invoices.markup_lines(link(), lines, PERIOD, "USD") == [expected]
    for above, charged in ((None, lines), (link(markup_ppm=0), lines), (link(), [])):
        assert child_invoices.markup_lines(above, charged, PERIOD, "USD") == []
    assert child_invoices.markup_lines(link(), [line(5), line(-5)], PERIOD, "USD") == []


def test_a_parent_takes_over_what_the_child_s_own_credit_leaves() -> None:
    net = Net(300 * CENT, 100 * CENT, "USD", 300, 100)
    (found,) = child_invoices.transfer_lines(link(), net, PERIOD)
    assert (found.kind, found.minor, found.exact) == ("transfer", -200, -200 * CENT)
    assert found.details == {"parent": "acme"}
    half, whole = (replace(net, prepaid=cents * CENT) for cents in (150, 200))
    (rest,) = child_invoices.transfer_lines(link(), half, PERIOD)
    assert rest.minor == -50
    assert child_invoices.transfer_lines(link(), whole, PERIOD) == []
    assert child_invoices.transfer_lines(link("self"), net, PERIOD) == []
    assert child_invoices.transfer_lines(None, net, PERIOD) == []


@pytest.mark.parametrize(
    ("pays", "charged", "markup", "kind", "minor"),
    [
        ("parent", 80, 20, "child", 80),
        ("self", 0, 20, "child_markup", -20),
        ("parent", 0, 20, "", 0),
        ("self", 80, 0, "", 0),
    ],
)
def test_an_invoice_of_a_child_passes_on_its_charges_or_its_mark_up(
    pays: str, charged: int, markup: int, kind: str, minor: int
) -> None:
    made = ChildInvoice(
        invoice_id="inv_1", child_id="kid", pays=pays, period_start=START, period_end=FEBRUARY,
        charged_minor=charged, markup_minor=markup, passed_minor=0, markup_promo_minor=0,
        promo_passed_minor=0,
    )  # fmt: skip
    what = "charges" if kind == "child" else "mark-up"
    text = f"Kid, {what} of 2026-01-01 to 2026-02-01"
    details = {"child": "kid", "child_name": "Kid", "invoice": "inv_1"}
    expected = Line(kind, text, minor * CENT, minor, START, FEBRUARY, details=details)
    earned = markup if pays == "self" else 0
    assert child_invoices._passed(made, "Kid", earned, "USD") == ([expected] if kind else [])


def kept(session: Session) -> list[tuple[Any, ...]]:
    rows = session.scalars(select(ChildInvoice))
    return [(r.parent_id, r.child_id, r.pays, r.charged_minor, r.markup_minor) for r in rows]


def test_what_a_child_passes_on_is_kept_once_and_released_before_it_is_billed(
    session: Session,
) -> None:
    invoice = Invoice(
        id="inv_1", tenant_id="kid", period_start=START, period_end=FEBRUARY, promo_minor=0
    )
    lines = [line(80), line(20, kind="markup"), line(-100, kind="transfer")]
    for above, expected in (
        (link(), ("acme", "kid", "parent", 80, 20)),
        (link("self"), ("acme", "kid", "self", 0, 20)),
    ):
        child_invoices.keep(session, above, invoice, lines)
        session.flush()
        assert kept(session) == [expected]
    child_invoices.keep(session, link("self"), invoice, lines[:1])
    session.flush()
    assert kept(session) == []
    child_invoices.keep(session, link(), invoice, [line(-80, kind="transfer")])
    session.flush()
    assert kept(session) == [("acme", "kid", "parent", 80, 0)]
    parents = Invoice(id="inv_2", tenant_id="acme")
    billed = [line(80, kind="child", details={"invoice": "inv_1"}), line(5)]
    child_invoices.mark_billed(session, parents, billed)
    session.expire_all()
    with pytest.raises(Conflict, match="is on an invoice of the parent organisation"):
        child_invoices.release(session, Invoice(id="inv_1", label="TH-1"))
    gone = [line(1, kind="child_markup", details={"invoice": "inv_9"})]
    with pytest.raises(Conflict, match="has become void meanwhile"):
        child_invoices.mark_billed(session, parents, gone)
    child_invoices.mark_billed(session, parents, [line(1)])
    session.get_one(ChildInvoice, "inv_1").billed_by = None
    child_invoices.release(session, Invoice(id="inv_1", label="TH-1"))
    child_invoices.release(session, Invoice(id="inv_3", label="TH-3"))
    session.flush()
    assert kept(session) == []
