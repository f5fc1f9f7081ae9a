"""Plans by the year and in advance, trials, cancellation, pauses, contracts and commitments; every
amount is worked out by hand.
"""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from billing.accounts import accounts
from billing.accounts.accounts import lock_account
from billing.invoicing import invoice_run, invoices
from billing.invoicing.views import invoice_json
from billing.reports import subscription_views
from billing.subscriptions import subscriptions
from billing.subscriptions.tables import Plan
from core.errors import BadRequest, Conflict, NotFound
from core.money import units_of
from tests.billing.conftest import Deployment
from tests.billing.invoicing.test_invoices import clean
from tests.billing.subscriptions.test_plans import plan, subscribe

Shown = list[tuple[str, str, str]]  # kind, from and to, amount


@pytest.fixture
def deployment(lite: Deployment) -> Deployment:
    """Years, pauses and commitments have `on_each`: PostgreSQL, too."""
    return lite


def at(deployment: Deployment, month: int, day: int, year: int = 2026) -> None:
    deployment.clock.set(datetime(year, month, day, tzinfo=UTC))


def final(deployment: Deployment, month: int, year: int = 2026) -> list[Shown]:
    """Invoices that become final on the third of the month."""
    at(deployment, month, 3, year)
    result = invoice_run.run(deployment.database, deployment.clock)
    assert not result.failed
    with deployment.database.read() as session:
        documents = [invoice_json(session, invoices.get(session, one)) for one in result.finalised]
    clean(deployment)
    return [
        [_shown(line) for line in each["lines"] if line["kind"] != "usage"] for each in documents
    ]


def _shown(line: dict[str, Any]) -> tuple[str, str, str]:
    starts, ends = line["starts_at"][:10], line["ends_at"][:10]
    return line["kind"], f"{starts} {ends}", line["billed"]["text"]


def test_a_year_in_advance_is_billed_once_and_returns_what_is_cancelled(
    on_each: Deployment,
) -> None:
    plan(on_each, "year", base_fee=units_of("365"), interval="year", in_advance=True)
    subscribe(on_each, "year")
    assert final(on_each, 2) == [[("base_fee", "2026-01-01 2027-01-01", "365.00")]]
    assert final(on_each, 3) == []
    at(on_each, 3, 2)
    with on_each.database.transaction() as session:
        subscriptions.cancel(session, "acme", on_each.clock.now())
    # January, February and one day of March are 60 days; 305 of 365 dollars return.
    assert final(on_each, 4) == [[("base_fee", "2026-03-02 2027-01-01", "-305.00")]]
    assert final(on_each, 2, 2027) == []


def test_a_second_year_is_billed_where_it_begins(deployment: Deployment) -> None:
    plan(deployment, "year", base_fee=units_of("120"), interval="year", in_advance=True)
    at(deployment, 2, 15)
    subscribe(deployment, "year")
    assert final(deployment, 3) == [[("base_fee", "2026-02-15 2027-02-15", "120.00")]]
    assert final(deployment, 2, 2027) == []
    assert final(deployment, 3, 2027) == [[("base_fee", "2027-02-15 2028-02-15", "120.00")]]


def test_a_year_in_arrears_is_billed_where_it_ends(deployment: Deployment) -> None:
    plan(deployment, "year", base_fee=units_of("120"), interval="year")
    subscribe(deployment, "year")
    assert final(deployment, 12) == []
    assert final(deployment, 1, 2027) == [[("base_fee", "2026-01-01 2027-01-01", "120.00")]]


def test_months_in_advance_are_billed_with_the_month_before(deployment: Deployment) -> None:
    plan(deployment, "ahead", base_fee=units_of("31"), in_advance=True)
    at(deployment, 1, 16)
    subscribe(deployment, "ahead")
    january = ("base_fee", "2026-01-16 2026-02-01", "16.00")
    assert final(deployment, 2) == [[january, ("base_fee", "2026-02-01 2026-03-01", "31.00")]]
    assert final(deployment, 3) == [[("base_fee", "2026-03-01 2026-04-01", "31.00")]]
    at(deployment, 3, 11)
    with deployment.database.transaction() as session:
        subscriptions.cancel(session, "acme", deployment.clock.now())
    # 21 of the 31 days of March return.
    assert final(deployment, 4) == [[("base_fee", "2026-03-11 2026-04-01", "-21.00")]]


def test_an_upgrade_in_advance_returns_the_rest_of_the_smaller_plan(
    deployment: Deployment,
) -> None:
    plan(deployment, "small", base_fee=units_of("28"), in_advance=True)
    plan(deployment, "large", base_fee=units_of("56"), seat_fee=units_of("2.80"), in_advance=True)
    subscribe(deployment, "small")
    final(deployment, 2)
    at(deployment, 2, 15)
    subscribe(deployment, "large", seats=2)
    assert final(deployment, 3) == [
        [
            ("base_fee", "2026-02-15 2026-03-01", "-14.00"),
            ("base_fee", "2026-02-15 2026-03-01", "28.00"),
            ("base_fee", "2026-03-01 2026-04-01", "56.00"),
            ("seats", "2026-02-15 2026-03-01", "2.80"),
            ("seats", "2026-03-01 2026-04-01", "5.60"),
        ]
    ]


def test_a_trial_waives_fees_once_and_a_change_does_not_renew_it(deployment: Deployment) -> None:
    fields = {"base_fee": units_of("31"), "minimum_commitment": units_of("62"), "trial_days": 10}
    plan(deployment, "pro", **fields)
    plan(deployment, "other", **fields)
    subscribe(deployment, "pro")
    at(deployment, 1, 6)
    subscribe(deployment, "other")
    # Fees and commitment from January 11 on: 21 of 31 days.
    assert final(deployment, 2) == [
        [
            ("base_fee", "2026-01-11 2026-02-01", "21.00"),
            ("commitment", "2026-01-01 2026-02-01", "42.00"),
        ]
    ]


def test_a_cancellation_at_the_end_of_the_term(deployment: Deployment) -> None:
    plan(deployment, "month", base_fee=units_of("10"))
    subscribe(deployment, "month")
    at(deployment, 1, 20)
    with deployment.database.transaction() as session:
        ended = subscriptions.cancel(session, "acme", deployment.clock.now(), at_term_end=True)
        assert ended.ends_at == datetime(2026, 2, 1, tzinfo=UTC)
    assert final(deployment, 2) == [[("base_fee", "2026-01-01 2026-02-01", "10.00")]]
    assert final(deployment, 3) == []
    with deployment.database.transaction() as session, pytest.raises(NotFound):
        subscriptions.cancel(session, "acme", deployment.clock.now())


@pytest.mark.parametrize("zone", ["UTC", "Asia/Kolkata"])
def test_a_term_that_began_before_a_new_anchor_day_ends_where_its_period_ends(
    deployment: Deployment, zone: str
) -> None:
    """Periods start on the new day after the current one, so a cancelled month is billed whole."""
    fields = {"base_fee": units_of("10"), "minimum_commitment": units_of("28")}
    plan(deployment, "month", **fields)
    subscribe(deployment, "month")
    bills = final(deployment, 2)
    at(deployment, 2, 10)
    march = datetime(2026, 3, 1, tzinfo=UTC)
    with deployment.database.transaction() as session:
        account, now = lock_account(session, "acme"), deployment.clock.now()
        accounts.set_anchor(session, account, 31, now)
        accounts.set_timezone(session, account, zone, now)
        (shown,) = subscription_views.subscriptions_json(session, "acme", now)
        assert shown["commitment"]["to"][:10] == "2026-03-01"
        ended = subscriptions.cancel(session, "acme", now, at_term_end=True)
        assert ended.ends_at == march
    bills += final(deployment, 3) + final(deployment, 5)
    assert [[row[2] for row in rows] for rows in bills] == [["10.00", "28.00"]] * 2


def test_a_pause_costs_nothing_and_can_end_early(on_each: Deployment) -> None:
    plan(on_each, "month", base_fee=units_of("31"))
    subscribe(on_each, "month", seats=3)
    at(on_each, 1, 11)
    with on_each.database.transaction() as session:
        now = on_each.clock.now()
        with pytest.raises(BadRequest, match="is past"):
            subscriptions.pause(session, "acme", now, now)
        subscriptions.pause(session, "acme", now, datetime(2026, 6, 1, tzinfo=UTC))
    at(on_each, 1, 22)
    with on_each.database.transaction() as session:
        resumed = subscriptions.resume(session, "acme", on_each.clock.now())
        assert resumed.seats == 3
        with pytest.raises(Conflict, match="No subscription is paused"):
            subscriptions.resume(session, "acme", on_each.clock.now())
    assert final(on_each, 2) == [
        [
            ("base_fee", "2026-01-01 2026-01-11", "10.00"),
            ("base_fee", "2026-01-22 2026-02-01", "10.00"),
        ]
    ]


def test_a_contract_replaces_amounts_of_the_plan(deployment: Deployment) -> None:
    plan(deployment, "list", base_fee=units_of("100"), seat_fee=units_of("5"))
    with deployment.database.transaction() as session:
        agreed = {"base_fee": units_of("80")}
        now = deployment.clock.now()
        with pytest.raises(BadRequest, match="cannot be agreed"):
            subscriptions.subscribe(session, "acme", "list", now, overrides={"name": 1})
        subscriptions.subscribe(session, "acme", "list", now, 2, agreed)
        assert session.get_one(Plan, "list").base_fee == units_of("100")
    assert final(deployment, 2) == [
        [
            ("base_fee", "2026-01-01 2026-02-01", "80.00"),
            ("seats", "2026-01-01 2026-02-01", "10.00"),
        ]
    ]


def test_a_contract_may_waive_a_fee_and_never_goes_below_zero(deployment: Deployment) -> None:
    plan(deployment, "list", base_fee=units_of("100"), seat_fee=units_of("5"))
    with deployment.database.transaction() as session:
        now = deployment.clock.now()
        with pytest.raises(BadRequest, match="'seat_fee' with -1 picounits"):
            subscriptions.subscribe(session, "acme", "list", now, overrides={"seat_fee": -1})
        subscriptions.subscribe(session, "acme", "list", now, 2, {"base_fee": 0})
    assert final(deployment, 2) == [[("seats", "2026-01-01 2026-02-01", "10.00")]]


def test_a_yearly_commitment_is_drawn_down_and_trued_up_once(on_each: Deployment) -> None:
    on_each.price({"output": "10"})
    version = on_each.price({"output": "100"}, tenant_id="acme")
    plan(on_each, "commit", minimum_commitment=units_of("1000"), interval="year")
    subscribe(on_each, "commit")
    for month in (1, 5, 12):  # two million tokens are 200 dollars
        at(on_each, month, 10)
        event = on_each.event(
            price_version=version.id,
            input_tokens=0,
            cached_tokens=0,
            output_tokens=2_000_000,
            waived_tokens=0,
        )
        on_each.record(event)
    assert all(lines == [] for lines in final(on_each, 12))
    assert final(on_each, 1, 2027) == [[("commitment", "2026-12-01 2027-01-01", "400.00")]]
    assert final(on_each, 6, 2027) == []


def test_included_seats_cost_nothing_and_the_others_are_counted(deployment: Deployment) -> None:
    plan(deployment, "team", seat_fee=units_of("3"), included_seats=2)
    subscribe(deployment, "team", 2)
    assert final(deployment, 2) == []
    at(deployment, 3, 1)
    subscribe(deployment, "team", 5)
    at(deployment, 4, 1)
    subscribe(deployment, "team", 0)
    assert final(deployment, 4) == [[("seats", "2026-03-01 2026-04-01", "9.00")]]


def test_a_line_of_a_year_names_the_time_that_it_is_of(deployment: Deployment) -> None:
    plan(deployment, "year", base_fee=units_of("365"), interval="year", in_advance=True)
    subscribe(deployment, "year")
    at(deployment, 2, 3)
    (invoice_id,) = invoice_run.run(deployment.database, deployment.clock, current=False).finalised
    with deployment.database.read() as session:
        (line,) = invoices.lines_of(session, invoice_id)
    assert line.description == "Plan year, 2026-01-01 to 2027-01-01"


@pytest.mark.parametrize(("used", "short"), [(999_999, ["0.0000006"]), (1_000_000, [])])
def test_a_yearly_shortfall_is_billed_to_the_last_unit(
    lite: Deployment, used: int, short: list[str]
) -> None:
    """The commitment of 0.60 is one million output tokens; one fewer is short of 0.0000006."""
    plan(lite, "committed", interval="year", minimum_commitment=units_of("0.60"))
    subscribe(lite, "committed")
    lite.record(lite.event(input_tokens=0, cached_tokens=0, output_tokens=used, waived_tokens=0))
    at(lite, 1, 3, 2027)
    result = invoice_run.run(lite.database, lite.clock, current=False)
    with lite.database.read() as session:
        lines = [line for one in result.finalised for line in invoices.lines_of(session, one)]
    exact = [line.exact for line in lines if line.kind == "commitment"]
    assert exact == [units_of(dollars) for dollars in short]


def test_what_cannot_be_subscribed_is_refused_and_changes_nothing(lite: Deployment) -> None:
    plan(lite, "pro", base_fee=units_of("9"))
    subscribe(lite, "pro")
    now = lite.clock.now()
    for refused, match, asked in (
        (NotFound, "no plan 'none'", ("none", now + timedelta(days=1), 0, None)),
        (BadRequest, "seats is -1", ("pro", now + timedelta(days=1), -1, None)),
        (BadRequest, "'grace_hours' with", ("pro", now + timedelta(days=1), 0, {"grace_hours": 1})),
        (BadRequest, "'base_fee' with -1", ("pro", now + timedelta(days=1), 0, {"base_fee": -1})),
        (Conflict, "starts at 2026-01-01", ("pro", now, 0, None)),
    ):
        with pytest.raises(refused, match=match), lite.database.transaction() as session:
            subscriptions.subscribe(session, "acme", *asked)
    with pytest.raises(BadRequest, match="base_fee is negative"), lite.database.transaction() as s:
        subscriptions.create_plan(s, now, {"name": "x", "currency": "USD", "base_fee": -1})
    with lite.database.read() as session:
        ((held, _),) = subscriptions.read_subscriptions(session, ["acme"])["acme"]
    assert held.ends_at is None


def test_the_term_is_the_contract_year_around_a_moment_to_the_microsecond(
    lite: Deployment,
) -> None:
    plan(lite, "year", base_fee=units_of("365"), interval="year")
    at(lite, 2, 29, 2028)
    subscribe(lite, "year")
    last = datetime(2029, 2, 28, tzinfo=UTC) - timedelta(microseconds=1)
    with lite.database.transaction() as session:
        ((held, made),) = subscriptions.read_subscriptions(session, ["acme"])["acme"]
        account = lock_account(session, "acme")
        found = [
            [
                f"{bound:%Y-%m-%d}"
                for bound in subscriptions.term_around(session, (held, made), account, moment)
            ]
            for moment in (held.starts_at, last, last + timedelta(microseconds=1))
        ]
    first, second = ["2028-02-29", "2029-02-28"], ["2029-02-28", "2030-02-28"]
    assert found == [first, first, second]


def test_a_plan_holds_from_its_first_moment_until_before_its_last(lite: Deployment) -> None:
    plan(lite, "small", base_fee=units_of("1"))
    plan(lite, "big", base_fee=units_of("2"))
    subscribe(lite, "small")
    at(lite, 1, 10)
    subscribe(lite, "big")
    at(lite, 1, 20)
    with lite.database.transaction() as session:
        assert subscriptions.cancel(session, "acme", lite.clock.now()).ends_at == lite.clock.now()
    tick = timedelta(microseconds=1)
    with lite.database.read() as session:
        held = subscriptions.read_subscriptions(session, ["acme"])["acme"]

    def _name(day: int, less: timedelta = timedelta(0)) -> str:
        found = subscriptions.plan_at(held, datetime(2026, 1, day, tzinfo=UTC) - less)
        return found.name if found else ""

    assert [_name(1, tick), _name(1), _name(10, tick), _name(10)] == ["", "small", "small", "big"]
    assert [_name(20, tick), _name(20)] == ["big", ""]
    with (
        pytest.raises(NotFound, match="no subscription now"),
        lite.database.transaction() as session,
    ):
        subscriptions.cancel(session, "acme", lite.clock.now())


def test_one_commitment_shows_what_is_drawn_and_what_is_left(lite: Deployment) -> None:
    plan(lite, "committed", interval="year", minimum_commitment=units_of("100"))
    subscribe(lite, "committed")
    for tokens, used, left in ((20_000_000, "12", "88"), (200_000_000, "132", "0")):
        lite.record(
            lite.event(input_tokens=0, cached_tokens=0, waived_tokens=0, output_tokens=tokens)
        )
        lite.rate()
        with lite.database.read() as session:
            (shown,) = subscription_views.subscriptions_json(session, "acme", lite.clock.now())
        drawn = shown["commitment"]
        assert [int(drawn[name]["units"]) for name in ("used", "left")] == [
            units_of(used),
            units_of(left),
        ]
        assert (drawn["from"][:10], drawn["to"][:10]) == ("2026-01-01", "2027-01-01")
