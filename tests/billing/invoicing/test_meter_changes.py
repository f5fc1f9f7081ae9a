"""Changes between our invoices and Stripe's meters: each unit is collected exactly once.

A token costs 0.00001. The right side of each row is written by hand: the tokens that Stripe's meter has,
and the totals of the invoices that Stripe has in cents.
"""

from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import update

from billing.accounts.accounts import lock_account
from billing.adjustments import account_changes
from billing.audit import reconcile
from billing.invoicing import invoice_run
from billing.invoicing.tables import Invoice
from billing.payments import meters
from billing.payments.tables import PaymentCommand
from tests.billing.conftest import START, Deployment
from tests.billing.payments.stripe_deployment import Till

METERS, STRIPE, MANUAL = "stripe_meters", "stripe", "manual"
NONE = {"input_tokens": 0, "cached_tokens": 0, "waived_tokens": 0}
Step = tuple[str, Any]

# By row: what is done at which day and hour of the year ("set", "use" or "run"); tokens that the meter
# has; cents of the invoices at Stripe.
CASES: dict[str, tuple[list[tuple[str, str, Any]], int, list[int]]] = {
    "metered for a part of January, then cards, then metered": (
        [
            ("01-10 00", "set", METERS),
            ("01-11 00", "use", 1_000),
            ("01-20 00", "set", STRIPE),
            ("02-03 00", "run", None),
            ("02-10 00", "use", 1_000_000),
            ("03-03 00", "run", None),
            ("03-10 00", "set", METERS),
            ("03-10 03", "run", None),
        ],
        1_000,
        [1_000],
    ),
    "changed to cards before January is final": (
        [
            ("01-01 00", "set", METERS),
            ("01-11 00", "use", 1_000_000),
            ("02-01 12", "set", STRIPE),
            ("02-03 00", "run", None),
        ],
        1_000_000,
        [],
    ),
    "changed to meters in the evening of January's last day": (
        [
            ("01-01 00", "set", STRIPE),
            ("01-11 00", "use", 1_000_000),
            ("01-31 18", "set", METERS),
            ("01-31 19", "use", 500_000),
            ("02-03 00", "run", None),
            ("02-04 00", "run", None),
        ],
        500_000,
        [1_000],
    ),
    "metered for three months, then cards": (
        [
            ("01-01 00", "set", METERS),
            ("01-11 00", "use", 1_000_000),
            ("02-03 00", "run", None),
            ("02-11 00", "use", 2_000_000),
            ("03-03 00", "run", None),
            ("03-11 00", "use", 3_000_000),
            ("04-03 00", "run", None),
            ("04-10 00", "set", STRIPE),
            ("04-11 00", "use", 400_000),
            ("05-03 00", "run", None),
        ],
        6_000_000,
        [400],
    ),
    "the hour of the change to cards is the cards'": (
        [
            ("01-01 00", "set", METERS),
            ("01-11 04", "use", 100_000),
            ("01-11 05", "use", 200_000),
            ("01-11 05", "set", STRIPE),
            ("01-11 06", "use", 400_000),
            ("02-03 00", "run", None),
        ],
        100_000,
        [600],
    ),
    "the hour of the change to meters is the meters'": (
        [
            ("01-01 00", "set", STRIPE),
            ("01-11 04", "use", 100_000),
            ("01-11 05", "use", 200_000),
            ("01-11 05", "set", METERS),
            ("01-11 06", "use", 400_000),
            ("02-03 00", "run", None),
        ],
        600_000,
        [100],
    ),
    "there and back in an hour": (
        [
            ("01-01 00", "set", STRIPE),
            ("01-11 05", "set", METERS),
            ("01-11 05", "use", 200_000),
            ("01-11 05", "set", STRIPE),
            ("01-11 05", "set", METERS),
            ("01-11 07", "set", STRIPE),
            ("02-03 00", "run", None),
        ],
        200_000,
        [],
    ),
    "late usage of a metered hour, on a month of cards": (
        [
            ("01-01 00", "set", METERS),
            ("02-01 00", "set", STRIPE),
            ("02-03 00", "run", None),
            ("02-04 00", "late", ("01-20 00", 300_000)),
            ("02-05 00", "use", 100_000),
            ("03-03 00", "run", None),
        ],
        300_000,
        [100],
    ),
    "late usage of an hour of cards, on a metered month": (
        [
            ("01-01 00", "set", STRIPE),
            ("02-01 00", "set", METERS),
            ("02-03 00", "run", None),
            ("02-04 00", "late", ("01-20 00", 300_000)),
            ("02-05 00", "use", 100_000),
            ("03-03 00", "run", None),
        ],
        100_000,
        [300],
    ),
    "metered, then by hand": (
        [
            ("01-01 00", "set", METERS),
            ("01-11 00", "use", 1_000_000),
            ("02-03 00", "run", None),
            ("02-03 01", "set", MANUAL),
            ("02-11 00", "use", 1_000_000),
            ("03-03 00", "run", None),
        ],
        1_000_000,
        [],
    ),
    "by hand, then metered in the month": (
        [
            ("01-01 00", "set", MANUAL),
            ("01-11 00", "use", 1_000_000),
            ("01-15 00", "set", METERS),
            ("01-16 00", "use", 700_000),
            ("02-03 00", "run", None),
        ],
        700_000,
        [1_000],
    ),
}


def at(written: str) -> datetime:
    month, day, hour = int(written[:2]), int(written[3:5]), int(written[6:])
    return datetime(START.year, month, day, hour, tzinfo=UTC)


def play(till: Till, steps: list[tuple[str, str, Any]]) -> None:
    made: Deployment = till.deployment
    version = made.price({"output": "10"}, tenant_id="acme")

    def _use(when: datetime, tokens: int) -> None:
        fields = {"occurred_at": when, "finished_at": when, "price_version": version.id}
        made.record(made.event(**fields, **NONE, output_tokens=tokens))
        made.rate()

    for when, what, value in steps:
        made.clock.set(max(at(when), made.clock.now()))
        now = made.clock.now()
        if what == "set":
            with made.database.transaction() as session:
                account = lock_account(session, "acme")
                account_changes.change(session, account, {"collection": value}, now)
        if what == "use":
            _use(now, value)
        if what == "late":
            _use(at(value[0]), value[1])
        if what == "run":
            assert not invoice_run.run(made.database, made.clock, current=False).failed
        meters.report_all(made.database, "stripe", now)
        till.settle()
    made.clock.advance(hours=3)
    meters.report_all(made.database, "stripe", made.clock.now())
    till.settle()


def differences(till: Till) -> list[str]:
    with till.deployment.database.read() as session:
        found = meters.differences(session, "stripe", till.deployment.clock.now())
    return [each.message for each in found]


@pytest.mark.parametrize("name", CASES)
def test_each_unit_is_collected_once(till: Till, name: str) -> None:
    steps, tokens, cents = CASES[name]
    till.leave_card()
    till.settle()
    play(till, steps)
    delivered = sum(
        int(each["payload"]["value"])
        for each in till.stripe.books.objects.get("meter_event", {}).values()
        if each["event_name"] == "tollhouse_output_tokens"
    )
    totals = sorted(each["total"] for each in till.stripe.books.objects.get("invoice", {}).values())
    assert (delivered, totals) == (tokens, cents)
    assert differences(till) == []
    with till.deployment.database.read() as session:
        assert reconcile.audit(session).differences == ()


@pytest.mark.parametrize(
    ("seeded", "message"),
    [
        ("the report of an hour is lost", "but 0 is reported"),
        ("an hour of cards is reported", "is 0, but 9 is reported"),
        ("an invoice for comparison is sent", "is for comparison only and was sent"),
        ("a metered invoice is collected", "bills usage that stripe meters"),
        ("an invoice of cards is not", "has usage that nobody collects"),
    ],
)
def test_a_seeded_difference_is_found(till: Till, seeded: str, message: str) -> None:
    till.leave_card()
    till.settle()
    play(
        till,
        [
            ("01-01 00", "set", METERS),
            ("01-31 00", "use", 1_000_000),
            ("02-01 00", "set", STRIPE),
            ("02-01 12", "use", 1_000_000),
            ("02-03 00", "run", None),
            ("03-03 00", "run", None),
        ],
    )
    assert differences(till) == []
    with till.deployment.database.transaction() as session:
        first, second = session.query(Invoice).order_by(Invoice.number)
        hour = datetime(START.year, 2, 1, 12, tzinfo=UTC)
        command = session.query(PaymentCommand).filter_by(kind="usage").all()
        if seeded == "the report of an hour is lost":
            for each in command:
                session.delete(each)
        elif seeded == "an hour of cards is reported":
            moved = update(PaymentCommand).where(PaymentCommand.id == command[0].id)
            subject = f"tollhouse_output_tokens@{hour.isoformat()}"
            payload = {"value": 9}
            session.execute(moved.values(subject_id=subject, payload=payload))
        elif seeded == "an invoice for comparison is sent":
            first.external_id = "in_1"
        elif seeded == "a metered invoice is collected":
            first.metered = False
        else:
            second.metered = True
    assert any(message in each for each in differences(till)), differences(till)
