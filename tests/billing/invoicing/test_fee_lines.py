"""Fees of subscriptions and add-ons, line by line with every field, and the parts of their terms."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from billing.accounts.tables import BillingAccount, BillingPeriod
from billing.invoicing import fee_lines
from billing.invoicing.fee_lines import Term
from billing.invoicing.invoice_inputs import BilledFee, InvoiceInputs
from billing.invoicing.invoice_lines import Line
from billing.invoicing.tables import InvoiceLine
from billing.periods import Span
from billing.subscriptions import subscriptions
from billing.subscriptions.tables import AddOn, AddOnHolding, Plan, Subscription

DOLLAR, TICK = 10**12, timedelta(microseconds=1)


def day(month: int, number: int, year: int = 2026) -> datetime:
    return datetime(year, month, number, tzinfo=UTC)


JANUARY = BillingPeriod(starts_at=day(1, 1), ends_at=day(2, 1))
FEBRUARY = BillingPeriod(starts_at=day(2, 1), ends_at=day(3, 1))
ACCOUNT = BillingAccount(tenant_id="acme", currency="USD", timezone="UTC", anchor_day=1)


def plan(**fields: Any) -> Plan:
    plain = {"id": "plan_1", "name": "pro", "currency": "USD", "interval": "month"}
    amounts = dict.fromkeys(("base_fee", "seat_fee", "included_seats"), 0)
    return Plan(**(plain | amounts | {"in_advance": False} | fields))


def held(made: Plan, start: datetime, end: datetime | None = None, **fields: Any) -> Any:
    plain = {"id": 7, "tenant_id": "acme", "plan_id": made.id, "seats": 0, "billed_from": None}
    return Subscription(starts_at=start, ends_at=end, **(plain | fields)), made


def add_on(start: datetime, end: datetime | None = None, **fields: Any) -> Any:
    quantity = fields.pop("quantity", 1)
    plain = {"id": "addon_1", "name": "support", "fee": 31 * DOLLAR, "interval": "month"}
    holding = AddOnHolding(id=5, quantity=quantity, starts_at=start, ends_at=end)
    return holding, AddOn(**(plain | fields))


def line(kind: str, text: str, dollars: int, start: datetime, end: datetime, **more: Any) -> Line:
    plain: dict[str, Any] = {"quantity": 1, "unit": "plan"}
    plain["details"] = {"plan": "plan_1", "seats": 0, "subscription": 7} | more.pop("details", {})
    return Line(kind, text, dollars * DOLLAR, dollars * 100, start, end, **(plain | more))


def billed(
    start: datetime, end: datetime, dollars: int, at: datetime, **details: Any
) -> list[BilledFee]:
    made = InvoiceLine(
        invoice_id="inv_1", exact=dollars * DOLLAR, starts_at=start, ends_at=end, details=details
    )
    return [BilledFee(made, at, at)]


def inputs(before: list[BilledFee], kind: str = "base_fee", holding: int = 0) -> InvoiceInputs:
    return InvoiceInputs(fees={(7, kind, holding): before})


def test_a_month_in_arrears_has_a_line_a_fee_and_part() -> None:
    made = plan(base_fee=31 * DOLLAR, seat_fee=31 * DOLLAR, included_seats=2)
    team = {"details": {"seats": 4}}
    seats = {"quantity": 2, "unit": "seats"} | team
    cut, partial = (day(1, 11), day(2, 1)), "2026-01-11 to 2026-02-01"
    (term,) = fee_lines.terms([held(made, day(1, 11), seats=4)], [])
    assert fee_lines.monthly([term], JANUARY, ACCOUNT) == [
        line("base_fee", f"Plan pro, {partial}", 21, *cut, **team),
        line("seats", f"Plan pro, 2 seats, {partial}", 42, *cut, **seats),
    ]
    (whole,) = fee_lines.terms([held(made, day(1, 1), seats=2)], [])
    assert fee_lines.monthly([whole], JANUARY, ACCOUNT) == [
        line("base_fee", "Plan pro", 31, day(1, 1), day(2, 1), details={"seats": 2})
    ]
    (ends,) = fee_lines.terms([held(made, day(1, 1), day(2, 1) - TICK)], [])
    (almost,) = fee_lines.monthly([ends], JANUARY, ACCOUNT)
    assert almost.description == "Plan pro, 2026-01-01 to 2026-01-31"
    for other in (plan(base_fee=1, in_advance=True), plan(base_fee=1, interval="year")):
        assert (
            fee_lines.monthly(fee_lines.terms([held(other, day(1, 1))], []), JANUARY, ACCOUNT) == []
        )
    assert fee_lines.monthly(fee_lines.terms([held(made, day(2, 1))], []), JANUARY, ACCOUNT) == []


def test_an_add_on_is_owed_while_it_and_the_subscription_run() -> None:
    made = plan()
    subscribed = held(made, day(1, 1), day(3, 1), billed_from=day(1, 11))

    def found(*args: Any, **fields: Any) -> list[tuple[datetime, datetime | None]]:
        terms = fee_lines.terms([subscribed], [add_on(*args, **fields)])
        assert (terms[0].starts_at, terms[0].ends_at, terms[0].holding) == (
            day(1, 11),
            day(3, 1),
            0,
        )
        return [(each.starts_at, each.ends_at) for each in terms[1:]]

    assert found(day(1, 5)) == [(day(1, 11), day(3, 1))]
    assert found(day(1, 20), day(2, 1)) == [(day(1, 20), day(2, 1))]
    assert found(day(1, 20), day(4, 1)) == [(day(1, 20), day(3, 1))]
    assert found(day(1, 5), day(1, 11)) == []
    assert found(day(1, 5), day(1, 11) + TICK) == [(day(1, 11), day(1, 11) + TICK)]
    assert found(day(1, 5), interval="year") == []
    _, one = fee_lines.terms([subscribed], [add_on(day(1, 11))])
    _, two = fee_lines.terms([subscribed], [add_on(day(1, 11), quantity=2)])
    more = {"unit": "units", "details": {"add_on": "addon_1", "holding": 5}}
    cut, partial = (day(1, 11), day(2, 1)), "2026-01-11 to 2026-02-01"
    assert fee_lines.monthly([one, two], JANUARY, ACCOUNT) == [
        line("add_on", f"Add-on support, {partial}", 21, *cut, **more),
        line("add_on", f"Add-on support, 2 units, {partial}", 42, *cut, quantity=2, **more),
    ]
    assert (one.holding, two.holding) == (5, 5)


def ahead(term: Term, known: InvoiceInputs) -> list[Line]:
    return fee_lines.in_advance(known, [term], FEBRUARY, ACCOUNT)


def test_a_month_in_advance_bills_the_next_one_and_what_is_not_billed_yet() -> None:
    made = plan(base_fee=56 * DOLLAR, in_advance=True)
    (term,) = fee_lines.terms([held(made, day(1, 1))], [])
    march = line("base_fee", "Plan pro", 56, day(3, 1), day(4, 1))
    february = line("base_fee", "Plan pro", 56, day(2, 1), day(3, 1))
    assert ahead(term, InvoiceInputs()) == [february, march]
    assert ahead(term, inputs(billed(day(2, 1), day(3, 1), 56, day(2, 1)))) == [march]
    # Of another month, before or after, or of an invoice that is of this period itself.
    for other in (
        billed(day(2, 1) - TICK, day(2, 1), 56, day(2, 1)),
        billed(day(3, 1), day(4, 1), 56, day(2, 1)),
        billed(day(2, 1), day(3, 1), 56, day(2, 1) + TICK),
    ):
        assert ahead(term, inputs(other)) == [february, march]
    for other_plan in (plan(base_fee=1), plan(base_fee=1, interval="year", in_advance=True)):
        (term,) = fee_lines.terms([held(other_plan, day(1, 1))], [])
        assert ahead(term, InvoiceInputs()) == []


@pytest.mark.parametrize(
    ("ends", "fee", "change", "since", "taxed"),
    [
        (day(2, 15), 56, -28, day(2, 15), True),
        (day(1, 20), 56, -56, day(1, 20), True),
        (day(3, 1), 56, 0, day(3, 1), False),
        (None, 84, 28, day(2, 1), False),
        (None, 28, -28, day(2, 1), True),
    ],
)
def test_what_was_billed_in_advance_changes_with_the_fee_and_its_end(
    ends: datetime | None, fee: int, change: int, since: datetime, taxed: bool
) -> None:
    made = plan(base_fee=fee * DOLLAR, in_advance=True)
    (term,) = fee_lines.terms([held(made, day(1, 1), ends)], [])
    text = "Plan pro, change of what was billed in advance"
    details: dict[str, Any] = {}
    if taxed:
        details["taxed_at"] = "2026-01-04T00:00:00+00:00"
        details["returned"] = [["inv_1", -change * DOLLAR]]
    expected = [line("base_fee", text, change, since, day(3, 1), details=details)]
    following = [line("base_fee", "Plan pro", fee, day(3, 1), day(4, 1))] if ends is None else []
    found = ahead(term, inputs(billed(day(2, 1), day(3, 1), 56, day(1, 4))))
    assert found == (expected if change else []) + following


def test_a_returned_fee_is_taxed_as_of_no_later_than_its_own_end() -> None:
    made = plan(base_fee=56 * DOLLAR, in_advance=True)
    (term,) = fee_lines.terms([held(made, day(1, 1), day(2, 15))], [])
    known = billed(day(2, 1), day(2, 1) + TICK, 56, day(2, 1))
    (found,) = ahead(term, inputs([BilledFee(known[0].line, day(2, 1), day(2, 9))]))
    assert found.details["taxed_at"] == "2026-02-01T00:00:00+00:00"


def yearly(term: Term, known: InvoiceInputs, end: datetime) -> list[Line]:
    period = BillingPeriod(starts_at=end - timedelta(days=1), ends_at=end)
    return fee_lines.yearly(known, [term], period, ACCOUNT)


def test_a_year_in_advance_is_billed_where_it_begins_and_changed_where_it_ends() -> None:
    made = plan(base_fee=365 * DOLLAR, interval="year", in_advance=True)
    (term,) = fee_lines.terms([held(made, day(2, 1))], [])
    bounds = (day(2, 1), day(2, 1, 2027))
    first = line(
        "base_fee", "Plan pro, 2026-02-01 to 2027-02-01", 365, *bounds, details={"year": 0}
    )
    assert yearly(term, InvoiceInputs(), day(2, 1) - TICK) == []
    assert yearly(term, InvoiceInputs(), day(2, 1)) == [first]
    known = billed(*bounds, 365, day(1, 2), year=0)
    assert yearly(term, inputs(known), day(1, 1, 2027)) == []
    second = yearly(term, inputs(known), day(2, 1, 2027))
    assert [(each.starts_at, each.details["year"], each.minor) for each in second] == [
        (day(2, 1, 2027), 1, 36500)
    ]
    (ended,) = fee_lines.terms([held(made, day(2, 1), day(2, 11))], [])
    details = {
        "year": 0,
        "taxed_at": "2026-01-02T00:00:00+00:00",
        "returned": [["inv_1", 355 * DOLLAR]],
    }
    text = "Plan pro, 2026-02-11 to 2027-02-01"
    assert yearly(ended, inputs(known), day(1, 1, 2027)) == [
        line("base_fee", text, -355, day(2, 11), bounds[1], details=details)
    ]
    other = billed(*bounds, 365, day(1, 2), year=3)
    assert yearly(ended, inputs(other), day(1, 1, 2027)) == [
        line(
            "base_fee",
            "Plan pro, 2026-02-01 to 2026-02-11",
            10,
            day(2, 1),
            day(2, 11),
            details={"year": 0},
        )
    ]


def test_a_year_in_arrears_is_billed_where_it_or_the_fee_ends() -> None:
    made = plan(base_fee=365 * DOLLAR, interval="year")
    (term,) = fee_lines.terms([held(made, day(2, 1))], [])
    assert yearly(term, InvoiceInputs(), day(2, 1, 2027) - TICK) == []
    (whole,) = yearly(term, InvoiceInputs(), day(2, 1, 2027))
    assert (whole.minor, whole.starts_at, whole.ends_at) == (36500, day(2, 1), day(2, 1, 2027))
    (ended,) = fee_lines.terms([held(made, day(2, 1), day(2, 11))], [])
    assert yearly(ended, InvoiceInputs(), day(2, 11) - TICK) == []
    (part,) = yearly(ended, InvoiceInputs(), day(2, 11))
    assert (part.minor, part.starts_at, part.ends_at) == (1000, day(2, 1), day(2, 11))
    (monthly,) = fee_lines.terms([held(plan(base_fee=1), day(2, 1))], [])
    assert yearly(monthly, InvoiceInputs(), day(2, 1, 2027)) == []
    (_, late) = fee_lines.terms(
        [held(made, day(2, 1), day(2, 11))],
        [add_on(day(2, 6), interval="year", fee=365 * DOLLAR)],
    )
    (part,) = yearly(late, InvoiceInputs(), day(2, 11))
    assert (part.kind, part.minor, part.starts_at) == ("add_on", 500, day(2, 6))


def test_contract_years_follow_each_other_up_to_the_end() -> None:
    start = datetime(2024, 2, 29, 10, tzinfo=UTC)

    def found(until: datetime, end: datetime | None = None) -> list[tuple[int, str, str]]:
        subscription, _ = held(plan(), start, end)
        rows = fee_lines.years(subscription, ACCOUNT, until)
        return [(number, f"{one:%y-%m-%d %H}", f"{two:%y-%m-%d %H}") for number, one, two in rows]

    first, second = (0, "24-02-29 10", "25-02-28 10"), (1, "25-02-28 10", "26-02-28 10")
    assert found(start - TICK) == []
    assert found(start) == [first]
    assert found(datetime(2025, 2, 28, 10, tzinfo=UTC)) == [first, second]
    assert found(day(1, 1, 2026), datetime(2025, 2, 28, 10, tzinfo=UTC)) == [first]
    assert found(day(1, 1, 2026), datetime(2025, 2, 28, 10, tzinfo=UTC) + TICK) == [first, second]


def test_segments_of_a_period_are_its_parts_to_the_microsecond() -> None:
    small, large = plan(id="small"), plan(id="large")
    rows = [
        held(small, day(1, 1), day(1, 1)),
        held(small, day(1, 1), day(1, 11), billed_from=day(1, 6), seats=3),
        held(large, day(1, 11), None, id=8),
    ]
    micros = 86_400 * 1_000_000

    def shown(**options: Any) -> list[tuple[Any, ...]]:
        found = subscriptions.segments(rows, Span.whole(day(1, 1), day(2, 1)), **options)
        assert {each.whole for each in found} == {31 * micros}
        return [
            (s.plan.id, s.seats, s.starts_at, s.ends_at, *bounds, s.subscription_id)
            for s in found
            for bounds in [(s.begin // micros, s.end // micros)]
        ]

    after = ("large", 0, day(1, 11), day(2, 1), 10, 31, 8)
    assert shown() == [("small", 3, day(1, 1), day(1, 11), 0, 10, 7), after]
    assert shown(with_trial=False) == [("small", 3, day(1, 6), day(1, 11), 5, 10, 7), after]
    assert subscriptions.segments(rows, Span.whole(day(1, 1) - TICK, day(1, 1))) == []
    parts = subscriptions.segments(rows, Span.whole(day(1, 1), day(2, 1)))
    assert [each.share(100) for each in parts] == [32, 68]


def test_a_segment_is_of_no_subscription_unless_it_is_said() -> None:
    made = subscriptions.Segment(plan(), 1, day(1, 1), day(2, 1), 0, 3, 4)
    assert (made.subscription_id, made.share(10)) == (0, 7)
    assert subscriptions.anniversary(day(2, 28, 2027), 1, "UTC") == day(2, 28, 2028)


def test_an_add_on_of_a_later_year_is_not_of_the_years_before() -> None:
    made = plan(base_fee=0, interval="year", in_advance=True)
    year, later = {"interval": "year", "fee": 365 * DOLLAR}, day(3, 1, 2027)
    (_, term) = fee_lines.terms([held(made, day(2, 1))], [add_on(later, **year)])
    (found,) = yearly(term, InvoiceInputs(), day(4, 1, 2027))
    assert (found.starts_at, found.ends_at) == (later, day(2, 1, 2028))
    assert (found.details["year"], found.minor) == (1, (365 - 28) * 100)
