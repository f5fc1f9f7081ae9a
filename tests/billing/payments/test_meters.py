"""Usage that Stripe prices itself: every token once, whatever is repeated, late or refused."""

from datetime import timedelta

from sqlalchemy import select, update

from billing.accounts.accounts import lock_account
from billing.payments import dunning, meters
from billing.payments.fake_stripe.faults import Fault
from billing.payments.tables import DunningCase, PaymentCommand
from tests.billing.payments.stripe_deployment import Till


def _metered(till: Till) -> None:
    with till.deployment.database.transaction() as session:
        lock_account(session, "acme").collection = dunning.METERED
    _report(till)


def _report(till: Till) -> int:
    return meters.report_all(till.deployment.database, "stripe", till.deployment.clock.now())


def _use(till: Till, **tokens: int) -> None:
    till.deployment.record(till.deployment.event(**tokens))
    till.deployment.rate()


def _delivered(till: Till) -> dict[str, int]:
    sums: dict[str, int] = {}
    for each in till.stripe.books.objects.get("meter_event", {}).values():
        name = each["event_name"].removeprefix("tollhouse_")
        sums[name] = sums.get(name, 0) + int(each["payload"]["value"])
    return sums


def _differences(till: Till) -> list[str]:
    with till.deployment.database.read() as session:
        found = meters.differences(session, "stripe", till.deployment.clock.now())
    return [each.message for each in found]


def test_whole_hours_are_reported_once(both: Till) -> None:
    till = both
    _use(till, output_tokens=7)  # before it was asked for: billed by us
    till.deployment.clock.advance(hours=1)
    _metered(till)
    _use(till, input_tokens=100, cached_tokens=30, output_tokens=50)
    assert _report(till) == 0, "the hour has not ended"
    till.deployment.clock.advance(hours=1)
    assert _report(till) == 4
    assert _report(till) == 0
    till.settle()
    wanted = {"requests": 1, "input_tokens": 70, "cached_input_tokens": 30, "output_tokens": 50}
    assert _delivered(till) == wanted
    events = till.stripe.books.objects["meter_event"].values()
    assert {each["payload"]["stripe_customer_id"] for each in events} == {till.customer()}


def test_late_usage_is_reported_as_what_came_on_top(till: Till) -> None:
    _metered(till)
    late = till.deployment.event(output_tokens=5)
    _use(till, output_tokens=50)
    till.deployment.clock.advance(hours=3)
    _report(till)
    till.settle()
    till.deployment.record(late)
    till.deployment.rate()
    _report(till)
    till.settle()
    assert _delivered(till)["output_tokens"] == 55
    till.deployment.clock.advance(hours=1)
    assert _differences(till) == []


def test_an_identifier_that_stripe_has_counts_as_delivered(till: Till) -> None:
    _metered(till)
    _use(till, output_tokens=50)
    till.deployment.clock.advance(hours=1)
    _report(till)
    till.stripe.faults.plan("meter_events", *[Fault.TIMEOUT_AFTER] * 4, Fault.LIMITED, Fault.BUSY)
    till.settle()
    assert _delivered(till)["output_tokens"] == 50
    with till.deployment.database.read() as session:
        rows = session.scalars(select(PaymentCommand).where(PaymentCommand.kind == "usage")).all()
    assert all(each.done_at and not each.failed for each in rows)
    refused = [call for call in till.stripe.calls if "meter_events" in call]
    assert len(refused) > 4, "some were sent again and refused as duplicates"


def test_after_a_lost_outbox_the_same_identifiers_come_again(till: Till) -> None:
    _metered(till)
    _use(till, output_tokens=50)
    till.deployment.clock.advance(hours=1)
    _report(till)
    till.settle()
    with till.deployment.database.transaction() as session:  # restored from before it was sent
        session.execute(
            update(PaymentCommand)
            .where(PaymentCommand.kind == "usage", PaymentCommand.subject_id != "start")
            .values(done_at=None, attempts=0, next_at=till.deployment.clock.now())
        )
    till.settle()
    assert _delivered(till)["output_tokens"] == 50


def test_what_was_not_reported_is_a_difference(till: Till) -> None:
    _metered(till)
    _use(till, output_tokens=50)
    till.deployment.clock.advance(hours=4)
    assert any(
        "output_tokens" in each and "but 0 is reported" in each for each in _differences(till)
    )
    _report(till)
    assert _differences(till) == []


def test_old_usage_is_dated_into_what_stripe_takes(till: Till) -> None:
    _metered(till)
    _use(till, output_tokens=50)
    till.deployment.clock.advance(timedelta(days=40).total_seconds())
    _report(till)
    till.settle()
    assert _delivered(till)["output_tokens"] == 50


def test_invoices_of_metered_accounts_are_neither_sent_nor_dunned(till: Till) -> None:
    _metered(till)
    till.invoice(12)
    till.deployment.clock.advance(days=60)
    dunning.run(till.deployment.database, till.deployment.clock, till.provider)
    till.settle()
    assert till.stripe.books.all("invoice") == []
    with till.deployment.database.read() as session:
        assert session.scalars(select(DunningCase)).all() == []
