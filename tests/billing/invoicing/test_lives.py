"""The life of invoices x subscriptions x collections: each amount is a fraction worked out by hand."""

from datetime import datetime, timedelta
from fractions import Fraction
from typing import Any

import pytest
from markupsafe import escape
from sqlalchemy import select

from billing.accounts import accounts
from billing.accounts.accounts import lock_account
from billing.accounts.tables import BillingAccount
from billing.invoicing import invoice_run, invoices
from billing.invoicing.printing import invoice_page
from billing.invoicing.tables import InvoiceLine
from billing.ledger import credits
from billing.ledger.tables import CreditGrant
from billing.notices.tables import OutboxMessage
from billing.payments import dunning
from billing.payments.manual import ManualPayments
from billing.pricing import prices
from billing.rating import price_changes
from billing.reports.subscription_views import subscriptions_json
from billing.subscriptions import subscriptions
from core.errors import Conflict, NotFound
from core.money import Money, units_of
from core.tenants.models import Tenant
from tests.billing.conftest import Deployment
from tests.billing.invoicing.lives import Life, moment, shown

YEAR = Fraction(1200)
UNUSED = YEAR * 266 / 365  # from April 10 on


@pytest.fixture
def life(lite: Deployment) -> Life:
    return Life(lite)


def subscribe(life: Life, plan: str, when: str | None = None, **fields: Any) -> None:
    if when is not None:
        life.at(when)
    with life.change() as session:
        subscriptions.subscribe(session, "acme", plan, life.now, **fields)


def cancel(life: Life, when: str, **fields: Any) -> None:
    life.at(when)
    with life.change() as session:
        subscriptions.cancel(session, "acme", life.now, **fields)


def cents(amount: Fraction) -> Fraction:
    """Rounded half away from zero."""
    sign = 1 if amount >= 0 else -1
    return Fraction(sign * ((abs(amount) * 200 + 1) // 2), 100)


def a_year_ahead(life: Life) -> None:
    life.plan("y", base_fee="1200", interval="year", in_advance=True)
    subscribe(life, "y")
    assert shown(life.run("2026-02-03")) == [[("base_fee", "1200.00")]]


def gift(life: Life, amount: int, expires: str = "") -> None:
    with life.change() as session:
        credits.grant(
            session,
            tenant_id="acme",
            kind="promo",
            money=Money(units_of(str(amount)), "USD"),
            reference=f"campaign {life.now.isoformat()}",
            at=life.now,
            expires_at=moment(expires) if expires else None,
        )


@pytest.mark.parametrize("promoted", [1200, 600, 900, 2000], ids=["all", "half", "most", "more"])
@pytest.mark.parametrize("paid", ["paid", "open", "lost"])
def test_a_fee_that_promotional_credit_paid_returns_as_that_credit(
    life: Life, promoted: int, paid: str
) -> None:
    """Each dollar returns as what it was; what nobody paid returns as nothing."""
    gift(life, promoted)
    a_year_ahead(life)
    part = min(Fraction(promoted), YEAR)
    if part < YEAR:
        life.pay() if paid == "paid" else life.write_off() if paid == "lost" else None
    cancel(life, "2026-04-10")
    life.run("2026-05-03")
    share = part / YEAR * UNUSED
    left = {"paid": Fraction(0), "open": (YEAR - part) * 99 / 365, "lost": Fraction(0)}[paid]
    money = UNUSED - share if paid == "paid" else Fraction(0)
    if paid == "lost":  # the debt is more than what returns of it
        assert YEAR - part >= UNUSED - share
    near = Fraction(1, 50)
    assert abs(-life.balance("promo") - (promoted - part) - share) <= near
    assert abs(-life.balance("prepaid") - money) <= near
    assert abs(life.balance("receivable") - left) <= near
    label = next(iter(life.run("2026-06-03")), None)
    assert label is None, "nothing is left to bill"


def test_returned_promotional_credit_keeps_its_end_and_money_pays_usage(
    life: Life,
) -> None:
    """900 of 1,200 by credit until June: 300 in money. Of what returns a quarter is money: it pays the
    usage of 100 of the same invoice, and the rest of 3/4 is credit as it was."""
    gift(life, 900, "2026-06-01")
    a_year_ahead(life)
    life.pay()
    life.run("2026-04-03")
    life.at("2026-04-05")
    life.use(100)
    cancel(life, "2026-04-10")
    (document,) = life.run("2026-05-03")
    share = UNUSED * 3 / 4
    assert document["due"]["minor"] == 0
    assert document["promotional_credit"]["minor"] == -round(share * 100)
    assert abs(-life.balance("promo") - share) <= Fraction(1, 100)
    assert abs(-life.balance("prepaid") - (UNUSED / 4 - 100)) <= Fraction(1, 100)
    for number in ("TH-000001", document["number"]):
        with pytest.raises(Conflict, match="cannot be"):
            life.void(number)
    with pytest.raises(Conflict, match="net left"):
        life.credit(30_000, "TH-000001")
    with life.read() as session:
        ends = session.scalars(select(CreditGrant.expires_at).where(CreditGrant.kind == "promo"))
        assert set(ends) == {moment("2026-06-01")}


@pytest.mark.parametrize(
    ("act", "returned", "receivable", "prepaid"),
    [
        (lambda life: None, UNUSED, YEAR - UNUSED, Fraction(0)),
        (lambda life: life.pay(), UNUSED, Fraction(0), UNUSED),
        (lambda life: life.pay(60_000), UNUSED, Fraction(0), UNUSED - 600),
        (lambda life: life.write_off(), Fraction(0), Fraction(0), Fraction(0)),
        (lambda life: life.credit(), Fraction(0), Fraction(0), Fraction(0)),
        (lambda life: (life.pay(), life.credit()), Fraction(0), Fraction(0), YEAR),
        (lambda life: (life.pay(), life.credit(60_000)), UNUSED - 600, Fraction(0), UNUSED),
        (
            lambda life: (life.pay(60_000), life.write_off()),
            UNUSED - 600,
            Fraction(0),
            UNUSED - 600,
        ),
    ],
    ids=["open", "paid", "half", "lost", "credited", "paid+credited", "part credited", "half lost"],
)
def test_a_fee_billed_ahead_returns_as_far_as_it_was_paid(
    life: Life, act: Any, returned: Fraction, receivable: Fraction, prepaid: Fraction
) -> None:
    a_year_ahead(life)
    act(life)
    cancel(life, "2026-04-10")
    amounts = [Fraction(each["total"]["text"]) for each in life.run("2026-05-03")]
    assert amounts == ([-cents(returned)] if returned else [])
    assert life.balance("receivable") == cents(receivable)
    assert -life.balance("prepaid") == cents(prepaid)


@pytest.mark.parametrize("later", ["write_off", "void", "credit"])
def test_what_came_back_of_an_unpaid_fee_does_not_come_back_again(life: Life, later: str) -> None:
    a_year_ahead(life)
    cancel(life, "2026-04-10")
    life.run("2026-05-03")
    if later == "write_off":
        life.write_off("TH-000001")
    elif later == "void":
        with pytest.raises(Conflict, match="cannot be voided"):
            life.void("TH-000001")
    else:
        with pytest.raises(Conflict, match="has 32548 minor units net left to credit"):
            life.credit(number="TH-000001")
        life.credit(32_548, "TH-000001")
    left = Fraction(0) if later != "void" else cents(YEAR - UNUSED)
    assert (life.balance("prepaid"), life.balance("receivable")) == (0, left)
    assert life.run("2026-06-03") == []


def test_a_fee_of_a_void_invoice_is_billed_again_where_the_service_goes_on(life: Life) -> None:
    a_year_ahead(life)
    life.void()
    assert shown(life.run("2026-03-03")) == [[("base_fee", "1200.00")]]
    assert life.run("2026-04-03") == []
    cancel(life, "2026-04-10")
    assert shown(life.run("2026-05-03")) == [[("base_fee", f"-{float(cents(UNUSED)):.2f}")]]
    assert (life.balance("prepaid"), life.balance("receivable")) == (0, cents(YEAR - UNUSED))


def test_a_fee_of_a_void_invoice_is_billed_for_the_time_before_the_cancellation(life: Life) -> None:
    a_year_ahead(life)
    life.void()
    cancel(life, "2026-04-10")
    assert [each["total"]["text"] for each in life.run("2026-05-03")] == ["325.48"]
    assert life.run("2026-06-03") == []


def test_months_of_a_void_invoice_are_billed_again_once_however_late(life: Life) -> None:
    life.plan("m", base_fee="28", in_advance=True)
    subscribe(life, "m")
    assert shown(life.run("2026-02-03")) == [[("base_fee", "28.00")] * 2]
    assert shown(life.run("2026-03-03")) == [[("base_fee", "28.00")]]
    life.void("TH-000001")  # January stays cancelled, February was billed ahead
    again = life.run("2026-04-03")
    assert shown(again) == [[("base_fee", "28.00")] * 2]
    assert again[0]["lines"][0]["description"].endswith(", 2026-02-01 to 2026-03-01, billed again")
    assert shown(life.run("2026-05-03")) == [[("base_fee", "28.00")]]


@pytest.mark.parametrize(("act", "short"), [("void", "1200.00"), ("", "200.00")])
def test_usage_of_a_void_invoice_is_no_use_of_the_commitment(
    life: Life, act: str, short: str
) -> None:
    life.plan("c", minimum_commitment="1200", interval="year")
    subscribe(life, "c")
    life.use(1000, "2026-01-01")
    life.run("2026-02-03")
    if act:
        life.void()
    with life.read() as session:
        (held,) = subscriptions_json(session, "acme", life.now)
    assert held["commitment"]["left"]["amount"] == short.partition(".")[0]
    life.run("2026-06-03")
    assert shown(life.run("2027-01-03")) == [[("commitment", short)]]


def test_credit_of_a_void_invoice_returns_once_although_part_had_returned(life: Life) -> None:
    """50 of the wallet pay for usage; a correction of 20 returns; the void returns the other 30."""
    with life.change() as session:
        money = Money(units_of("50"), "USD")
        credits.grant(
            session, tenant_id="acme", kind="prepaid", money=money, reference="w", at=life.now
        )
    life.plan("m", included_usage="20")
    life.use(50)
    subscribe(life, "m", "2026-01-02")
    (first,) = life.run("2026-02-03")
    included = 20 - cents(Fraction(20, 31))
    assert Fraction(first["prepaid"]["text"]) == 50 - included
    assert abs(Fraction(600, 31) + life.balance("prepaid")) <= Fraction(1, 10**12)
    life.void()
    assert -life.balance("prepaid") == 50


SHORT = {
    # plan, change: (from, to, share of a month, dollars a month)
    "anchor": (lambda s, a, now: accounts.set_anchor(s, a, 15, now), Fraction(14, 31)),
    "west": (
        lambda s, a, now: accounts.set_timezone(s, a, "America/Los_Angeles", now),
        Fraction(8, 31 * 24),
    ),
    "east": (
        lambda s, a, now: accounts.set_timezone(s, a, "Asia/Tokyo", now),
        Fraction(28 * 24 - 9, 28 * 24),
    ),
}


@pytest.mark.parametrize("in_advance", [False, True])
@pytest.mark.parametrize("what", list(SHORT))
def test_a_shortened_period_costs_its_time(life: Life, what: str, in_advance: bool) -> None:
    act, part = SHORT[what]
    life.plan(
        "m", base_fee="100", minimum_commitment="1000", included_usage="9", in_advance=in_advance
    )
    subscribe(life, "m")
    life.at("2026-01-10")
    with life.change() as session:
        act(session, lock_account(session, "acme"), life.now)
    life.at("2026-02-01T01:00:00").use(5)
    covered = min(9 * part, Fraction(5))
    documents = [each for _ in range(20) for each in life.run(life.now + timedelta(days=4))]
    fees, short, included = [], [], []
    for each in documents[:3]:
        for line in each["lines"]:
            amount = Fraction(line["exact"]["amount"])
            if line["kind"] == "base_fee" and line["starts_at"] < "2026-02-28T16":
                fees.append(amount)
            short += [amount] if line["kind"] == "commitment" else []
            included += [amount] if line["kind"] == "included" else []
    picounit = Fraction(1, 10**12)
    assert fees[0] == 100 and abs(fees[1] - 100 * part) <= picounit
    assert abs(included[0] + covered) <= picounit
    assert abs(short[1] - (1000 * part - (5 - covered))) <= 2 * picounit
    if what != "east":
        assert fees[2] == 100


def test_a_paused_subscription_can_be_cancelled_changed_and_moved(life: Life) -> None:
    life.plan("m", base_fee="31", in_advance=True)
    life.plan("n", base_fee="62")
    subscribe(life, "m", seats=1)
    life.at("2026-01-11")
    with life.change() as session:
        subscriptions.pause(session, "acme", life.now, moment("2026-06-01"))
    subscribe(life, "m", "2026-01-12", seats=4)
    assert life.subscriptions()[1:] == [("m", "2026-06-01", "", 4)]
    subscribe(life, "n", "2026-01-13")
    assert life.subscriptions()[1:] == [("n", "2026-06-01", "", 0)]
    cancel(life, "2026-02-01")
    assert life.subscriptions()[1:] == [("n", "2026-06-01", "2026-06-01", 0)]
    with life.read() as session:
        states = [each["state"] for each in subscriptions_json(session, "acme", life.now)]
    assert states == ["ended", "ended"]
    with life.change() as session, pytest.raises(NotFound, match="has no subscription now"):
        subscriptions.cancel(session, "acme", life.now)
    totals = [
        each["total"]["text"]
        for month in range(2, 9)
        for each in life.run(datetime(2026, month, 3, tzinfo=life.now.tzinfo))
    ]
    assert totals == ["10.00"]  # ten days of January
    subscribe(life, "n", "2026-08-04")
    assert life.subscriptions()[-1] == ("n", "2026-08-04", "", 0)


@pytest.mark.parametrize(
    ("until", "held"),
    [
        ("2026-03-01", [("m", "2026-01-01", "2026-01-12", 0)]),
        ("2026-02-01", [("m", "2026-01-01", "2026-01-12", 0)]),
        (
            "2026-01-22",
            [("m", "2026-01-01", "2026-01-12", 0), ("m", "2026-01-22", "2026-02-01", 0)],
        ),
    ],
)
def test_a_pause_does_not_undo_a_cancellation(
    life: Life, until: str, held: list[tuple[str, str, str, int]]
) -> None:
    life.plan("m", base_fee="31")
    subscribe(life, "m")
    cancel(life, "2026-01-10", at_term_end=True)
    life.at("2026-01-12")
    with life.change() as session:
        subscriptions.pause(session, "acme", life.now, moment(until))
    assert life.subscriptions() == held
    billed = sum(
        Fraction(each["total"]["text"])
        for month in (2, 3, 4)
        for each in life.run(datetime(2026, month, 3, tzinfo=life.now.tzinfo))
    )
    assert billed == 11 + (10 if len(held) > 1 else 0)


def test_a_change_of_seats_keeps_the_end_and_a_resumption_takes_it_back(life: Life) -> None:
    life.plan("m", seat_fee="10")
    life.plan("n", seat_fee="10")
    subscribe(life, "m", seats=2, overrides={"seat_fee": units_of("8")})
    cancel(life, "2026-01-10", at_term_end=True)
    subscribe(life, "m", "2026-01-12", seats=3)
    assert life.subscriptions()[-1] == ("m", "2026-01-12", "2026-02-01", 3)
    with life.change() as session:
        subscriptions.resume(session, "acme", life.now)
    assert life.subscriptions()[-1] == ("m", "2026-01-12", "", 3)
    (only,) = life.run("2026-02-03")
    assert Fraction(only["total"]["text"]) == cents(Fraction(8 * (2 * 11 + 3 * 20), 31))
    cancel(life, "2026-02-10", at_term_end=True)
    subscribe(life, "n", "2026-02-12", seats=3)
    assert life.subscriptions()[-1] == ("n", "2026-02-12", "", 3)


@pytest.mark.parametrize("changed", [False, True])
def test_a_change_of_seats_does_not_restart_the_year_of_a_commitment(
    life: Life, changed: bool
) -> None:
    life.plan("c", minimum_commitment="3650", interval="year")
    subscribe(life, "c", seats=1)
    billed = Fraction(0)
    for month in range(1, 14):
        if month in (1, 2, 3):
            life.use(1000)
        if month == 6:
            life.use(650)
        if changed and month == 4:
            subscribe(life, "c", seats=2)
        after = datetime(2026 + month // 12, month % 12 + 1, 3, tzinfo=life.now.tzinfo)
        billed += sum(Fraction(each["total"]["text"]) for each in life.run(after))
    assert billed == 3650


def test_seats_of_a_yearly_plan_change_within_its_year(life: Life) -> None:
    """2 seats for the year; 5 more for the 275 days from April 1 on; the year renews in January."""
    life.plan("y", seat_fee="365", interval="year", in_advance=True)
    subscribe(life, "y", seats=2)
    life.run("2026-02-03")
    subscribe(life, "y", "2026-04-01", seats=7)
    changes = life.run("2026-04-03")
    assert sum(Fraction(each["total"]["text"]) for each in changes) == 1375
    (renewed,) = life.run("2027-02-03")
    assert renewed["total"]["text"] == "2555.00"


@pytest.mark.parametrize("leave", ["cancel", "pause"])
def test_who_leaves_with_an_unpaid_invoice_is_suspended_all_the_same(
    life: Life, leave: str
) -> None:
    life.plan("p", base_fee="100", suspend_after_days=5, payment_terms_days=1, grace_hours=0)
    subscribe(life, "p")
    life.run("2026-02-02")
    with life.change() as session:
        if leave == "cancel":
            subscriptions.cancel(session, "acme", life.now)
        else:
            subscriptions.pause(session, "acme", life.now, moment("2027-01-01"))
    states = []
    for day in (7, 8):
        life.at(f"2026-02-{day:02}")
        dunning.run(life.deployment.database, life.deployment.clock, ManualPayments())
        with life.read() as session:
            states.append(session.get_one(Tenant, "acme").status)
    assert states == ["active", "unpaid"]


@pytest.mark.parametrize(
    ("zone", "first"),
    [("Asia/Tokyo", "2025-12-31T15:00"), ("America/Los_Angeles", "2026-01-01T08:00")],
)
def test_texts_of_an_invoice_have_the_dates_of_the_tenant_s_zone(
    life: Life, zone: str, first: str
) -> None:
    with life.change() as session:
        session.get_one(BillingAccount, "acme").timezone = zone
        session.get_one(BillingAccount, "acme").email = "x@acme.invalid"
    life.plan("p", base_fee="31", grace_hours=0)
    life.plan("y", minimum_commitment="365", interval="year", grace_hours=0)
    half = moment(first) + timedelta(days=15)
    life.at(half)
    with life.change() as session:
        subscriptions.subscribe(session, "acme", "p", life.now)
    life.at(moment(first) + timedelta(days=31, hours=1))
    (one,) = life.run()
    assert [line["description"] for line in one["lines"]] == ["Plan p, 2026-01-16 to 2026-02-01"]
    life.at(datetime.fromisoformat(one["due_at"]))
    dunning.run(life.deployment.database, life.deployment.clock, ManualPayments())
    with life.read() as session:
        rows = session.query(OutboxMessage).all()
    due = {row.payload["due"] for row in rows if row.payload.get("event") == "invoice.reminder"}
    assert due == {"2026-02-15"}


def test_a_line_shows_how_its_amount_comes_about(life: Life) -> None:
    life.plan(
        "p",
        base_fee="31",
        seat_fee="3.10",
        included_usage="62",
        minimum_commitment="9300",
        commitment_interval="month",
    )
    life.at("2026-01-06").use(40)
    subscribe(life, "p", "2026-01-16", seats=2)
    (one,) = life.run("2026-02-03")
    found = {line["kind"]: (line["unit_price"], line["calculation"]) for line in one["lines"]}
    assert found == {
        "usage": ("10 per 1,000,000", "4,000,000 × 10 per 1,000,000 = 40"),
        "base_fee": ("31", "1 × 31 a month × 16 of 31 days = 16"),
        "seats": ("3.1", "2 × 3.1 a month × 16 of 31 days = 3.2"),
        "included": (
            "",
            "62 × 16 of 31 days = 32, for all usage of the period; used 40; the lesser is included",
        ),
        "commitment": (
            "",
            "9300 × 16 of 31 days = 4800; used, less included, 8; this line 4792",
        ),
    }
    with life.read() as session:
        page = invoice_page(session, invoices.get(session, one["number"]))
    for _, calculation in found.values():
        assert escape(calculation) in page


def test_a_fee_that_returns_shows_what_was_billed_and_owed(life: Life) -> None:
    a_year_ahead(life)
    life.pay()
    life.credit(60_000)
    cancel(life, "2026-04-10")
    ((line,),) = (each["lines"] for each in life.run("2026-05-03"))
    assert line["calculation"] == (
        "1 × 1200 a year × 99 of 365 days = 325.479452054794; billed before 1200, of which credit notes "
        "returned 600; this line -274.520547945206"
    )


@pytest.mark.parametrize(
    ("written", "shown_as"),
    [
        ({"scheme": "flat", "price": "2", "free": 1000}, "1,000 free, then 2 per 1,000,000"),
        ({"scheme": "package", "price": "2", "size": 500}, "2 per started 500"),
        (
            {
                "scheme": "graduated",
                "tiers": [{"up_to": 1000, "price": "2"}, {"up_to": None, "price": "1"}],
            },
            "graduated, to 1,000: 2 per 1,000,000; above: 1 per 1,000,000",
        ),
    ],
)
def test_tiers_of_a_price_are_on_the_invoice(life: Life, written: Any, shown_as: str) -> None:
    made = life.deployment
    life.price = made.price({"output": written}, tenant_id="acme", model="other")
    made.record(made.event(model="other", price_version=life.price.id, output_tokens=5000))
    (one,) = life.run("2026-02-03")
    (line,) = [each for each in one["lines"] if each["component"] == "output"]
    assert line["unit_price"] == shown_as


def test_the_fee_may_be_by_the_month_and_the_commitment_by_the_year(life: Life) -> None:
    life.plan("p", base_fee="200", minimum_commitment="6000", commitment_interval="year")
    subscribe(life, "p")
    life.use(1000)
    totals = []
    for month in range(2, 14):
        when = datetime(2026 + (month - 1) // 12, (month - 1) % 12 + 1, 3, tzinfo=life.now.tzinfo)
        totals += [Fraction(each["total"]["text"]) for each in life.run(when)]
    assert totals == [1200, *[200] * 10, 200 + 5000]


def test_a_subscription_may_start_later_and_be_moved_or_cancelled(life: Life) -> None:
    life.plan("p", base_fee="31", trial_days=5)
    life.plan("q", base_fee="62")
    with life.change() as session:
        subscriptions.subscribe(session, "acme", "p", moment("2026-02-11"), now=life.now, seats=1)
        subscriptions.subscribe(session, "acme", "p", moment("2026-03-11"), now=life.now, seats=1)
    assert life.subscriptions() == [
        ("p", "2026-02-11", "2026-03-11", 1),
        ("p", "2026-03-11", "", 1),
    ]
    cancel(life, "2026-01-02")
    assert [row[1] == row[2] for row in life.subscriptions()] == [True, True]
    subscribe(life, "q", "2026-01-03")
    with life.change() as session:
        subscriptions.subscribe(session, "acme", "p", moment("2026-01-20"), now=life.now)
        subscriptions.subscribe(session, "acme", "q", life.now + timedelta(hours=1), 5)
    assert life.subscriptions()[:3] == [
        ("q", "2026-01-03", "2026-01-03", 0),
        ("q", "2026-01-03", "2026-01-20", 5),
        ("p", "2026-01-20", "", 0),
    ]


def test_an_ended_period_is_final_now_where_one_says_so(life: Life) -> None:
    life.use(40)
    life.at("2026-02-01T00:00:01")
    made = life.deployment
    assert invoice_run.run(made.database, made.clock).finalised == []
    assert len(invoice_run.run(made.database, made.clock, grace=False).finalised) == 1


def test_a_new_price_keeps_the_rates_that_it_does_not_name(life: Life) -> None:
    made = life.deployment
    made.price({"input": "1", "moderation": "0.5", "gpu_second": "2"}, model="kept")
    made.clock.advance(days=1)
    with life.change() as session:
        terms = {"input": "3", "gpu_second": None}
        draft = prices.PriceDraft("kept", terms, made.clock.now())
        stays = price_changes.kept(session, draft)
        version = price_changes.save(session, made.clock, draft)
    assert [each.value for each in stays] == ["moderation"]
    assert sorted(each.value for each in version.rates) == ["input", "moderation"]


@pytest.mark.parametrize("in_advance", [False, True], ids=["arrears", "advance"])
@pytest.mark.parametrize("first", ["usage", "calendar"])
def test_a_month_without_an_invoice_run_is_billed_although_a_later_period_exists(
    life: Life, first: str, in_advance: bool
) -> None:
    life.plan("m", base_fee="31", in_advance=in_advance)
    subscribe(life, "m")
    life.run("2026-02-03")
    life.at("2026-05-10")
    if first == "usage":
        life.use(1)
    else:
        with life.change() as session:
            accounts.set_timezone(session, lock_account(session, "acme"), "Asia/Kolkata", life.now)
    life.run()
    periods = life.periods()
    assert [end for _, end in periods[:-1]] == [start for start, _ in periods[1:]], "no gap"
    cancel(life, "2026-05-31 12:00")
    life.run("2026-06-05")
    life.run("2026-07-05")
    with life.read() as session:
        rows = select(InvoiceLine.exact).where(InvoiceLine.kind == "base_fee")
        billed = Fraction(sum(session.scalars(rows)), 10**12)
    months = 31 * 4 + 31 * Fraction(30 * 24 + 12, 31 * 24)
    assert abs(billed - months) < Fraction(1, 10**9) if first == "usage" else billed >= 31 * 4
