"""What is fetched of a provider to compare with, and what usage is reported to it."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from billing.accounts.accounts import DEFAULT_SELLER_ID
from billing.accounts.tables import BillingAccount
from billing.differences import Difference
from billing.invoicing import metered
from billing.invoicing.tables import CreditNote
from billing.payments import meters
from billing.payments.base import (
    DisputeState,
    Gone,
    InvoiceState,
    PaymentState,
    Record,
    RefundState,
    Status,
    TryLater,
    Window,
)
from billing.payments.fake import FakePayments
from billing.payments.provider_snapshot import ProviderSnapshot, default_window, fetch
from billing.payments.tables import Dispute, Payment, PaymentCommand, Refund
from billing.usage.tables import HourlyUsage
from tests.billing.conftest import START, Deployment
from tests.billing.payments.provider_rows import command_row, invoice_row, payment_row, refund_row

DAY = timedelta(days=1)
FROM, TO = START + 10 * DAY, START + 20 * DAY
WINDOW = Window(FROM, TO)
BEFORE, AFTER = FROM - timedelta(seconds=1), TO
ALL = (BEFORE, FROM, TO - timedelta(seconds=1), AFTER)


class Answers(FakePayments):
    """Has every object that it is asked for, but those named `gone`."""

    def __init__(self, *records: Record) -> None:
        super().__init__(name="stripe")
        self.given, self.asked = records, list[str]()

    def records(self, window: Window) -> Iterator[Record]:
        assert window == WINDOW
        return iter(self.given)

    def _asked(self, name: str) -> str:
        self.asked.append(name)
        if name.startswith("gone"):
            raise Gone(name)
        return name

    def invoice(self, external_id: str) -> InvoiceState:
        return InvoiceState(self._asked(external_id), "inv", "open", "USD", 1, 1)

    def payment(self, external_id: str) -> PaymentState:
        return PaymentState(self._asked(external_id), Status.SUCCEEDED, 5, "USD")

    def refund_state(self, external_id: str) -> RefundState:
        return RefundState(self._asked(external_id), "pi_own", Status.SUCCEEDED, 5, "USD")

    def dispute(self, external_id: str) -> DisputeState:
        return DisputeState(self._asked(external_id), "pi_own", "open", 5, "USD", True)


def _fetch(lite: Deployment, provider: Answers) -> ProviderSnapshot:
    return fetch(lite.database, provider, START + 30 * DAY, WINDOW)


def test_what_is_expected_of_the_window_or_still_open(lite: Deployment) -> None:
    done = {"status": "paid", "final_at": BEFORE, "settled_at": BEFORE}
    with lite.database.transaction() as session:
        for number, fields in enumerate(
            (
                {**done, "status": "final"},
                done,
                {**done, "final_at": FROM},
                {**done, "final_at": AFTER},
                {**done, "settled_at": FROM},
                {**done, "settled_at": AFTER},
                done,  # paid
                done,  # settled
                done,  # credited
                {**done, "status": "final", "external_id": None},
                done,  # failed to pay within it, which counts as well
            ),
            1,
        ):
            invoice_row(session, number, **fields)
        invoice_row(session, 12, sent=False, status="final")
        invoice_row(session, 13, sent=False, status="final")
        command_row(session, "inv_13", provider="fake")
        for name, number, created, settled in (
            ("a", 7, FROM, None),
            ("b", 8, BEFORE, FROM),
            ("c", 2, BEFORE, AFTER),
            ("d", 11, FROM, None),
        ):
            row = {"provider": "manual", "invoice_id": f"inv_{number:02}", "settled_at": settled}
            payment_row(session, name, **row)
            session.get_one(Payment, f"pay_{name}").created_at = created
        for number, invoice, at in ((1, 9, FROM), (2, 2, BEFORE)):
            note = {
                "tenant_id": "acme",
                "seller_id": DEFAULT_SELLER_ID,
                "label": "",
                "currency": "USD",
            }
            sums = {"net_minor": 1, "tax_minor": 0, "outcome": "due", "reason": ""}
            session.add(
                CreditNote(
                    id=f"n{number}",
                    number=number,
                    invoice_id=f"inv_{invoice:02}",
                    reference=f"n{number}",
                    transaction_id="t",
                    issued_at=at,
                    **note,
                    **sums,
                )
            )
    provider = Answers()
    found = _fetch(lite, provider)
    names = {f"in_{number:02}" for number in (1, 3, 5, 7, 8, 9, 11)}
    assert found.expected_ids == names == set(provider.asked) == set(found.invoices)
    assert len(provider.asked) == 7


@pytest.mark.parametrize("kind", ["payment", "refund"])
def test_payments_and_refunds_of_the_window_or_pending(lite: Deployment, kind: str) -> None:
    table: Any = Payment if kind == "payment" else Refund
    make, stem = (payment_row, "pi") if kind == "payment" else (refund_row, "re")
    with lite.database.transaction() as session:
        if kind == "refund":
            payment_row(session, "own", provider="manual", external_id="x")
        for number, at in enumerate(ALL):
            for status in ("succeeded", "pending", "failed"):
                make(session, f"{status}{number}", status=status)
                session.execute(
                    update(table)
                    .where(table.external_id == f"{stem}_{status}{number}")
                    .values(created_at=at)
                )
        make(session, "other", status="pending", provider="fake")
        make(session, "none", status="pending", external_id=None)
        make(session, "gone", status="pending", external_id="gone_1")
    provider = Answers()
    found = _fetch(lite, provider)
    own = {f"{stem}_succeeded1", f"{stem}_succeeded2", *(f"{stem}_pending{n}" for n in range(4))}
    missing = "pay_none" if kind == "payment" else "ref_none"
    assert found.expected_ids == own | {missing, "gone_1"}
    assert set(provider.asked) == own | {"gone_1"}
    assert set(found.payments) == (own if kind == "payment" else set())


def test_disputes_that_are_open_or_of_the_window(lite: Deployment) -> None:
    with lite.database.transaction() as session:
        payment_row(session, "own", external_id="pi_own")
        session.get_one(Payment, "pay_own").created_at = BEFORE
        for number, at in enumerate(ALL):
            for name, closed in (("open", None), ("closed", AFTER)):
                fields = {"payment_id": "pay_own", "tenant_id": "acme", "currency": "USD"}
                row = Dispute(
                    id=f"{name}{number}",
                    provider="stripe",
                    external_id=f"dp_{name}{number}",
                    amount_minor=5,
                    status=name,
                    opened_at=at,
                    closed_at=closed,
                    **fields,
                )
                session.add(row)
    found = _fetch(lite, Answers())
    expected = {*(f"dp_open{n}" for n in range(4)), "dp_closed1", "dp_closed2"}
    assert found.expected_ids == expected == set(found.disputes)


def test_records_of_other_uses_of_the_account_are_left_out(lite: Deployment) -> None:
    with lite.database.transaction() as session:
        payment_row(session, "old", external_id="pi_old")
        session.get_one(Payment, "pay_old").created_at = BEFORE
        payment_row(session, "fake", external_id="pi_fake", provider="fake")
    part = PaymentState("pi_part", Status.SUCCEEDED, 700, "USD")
    ours = InvoiceState("in_1", "inv_1", "paid", "USD", 700, 0, (part,))
    foreign = replace(
        ours, external_id="in_2", invoice_id="", payments=(replace(part, external_id="q"),)
    )
    charge = PaymentState("pi_top", Status.SUCCEEDED, 5, "JPY", payment_id="pay_1")
    failed = replace(charge, external_id="pi_bad", status=Status.FAILED)
    loose = replace(part, external_id="pi_loose")
    same = replace(part, payment_id="pay_2", amount_minor=1)
    back = [
        RefundState(f"re_{name}", f"pi_{name}", Status.SUCCEEDED, 1, "USD")
        for name in ("part", "top", "old", "fake", "loose")
    ]
    lost = [
        DisputeState(f"dp_{name}", f"pi_{name}", "open", 1, "USD", True)
        for name in ("old", "loose")
    ]
    found = _fetch(lite, Answers(ours, foreign, charge, failed, loose, same, *back, *lost))
    assert found.invoices == {"in_1": ours}
    assert found.payments == {"pi_part": part, "pi_top": charge, "pi_bad": failed}
    assert list(found.refunds) == ["re_part", "re_top", "re_old"]
    assert list(found.disputes) == ["dp_old"]
    assert found.steps() == {
        "stripe invoices": {"count": 1},
        "stripe payments": {"count": 2, "units": 700 * 10**10 + 5 * 10**12},
        "stripe refunds": {"count": 3},
        "stripe disputes": {"count": 1},
    }
    assert default_window(START) == Window(START - 35 * DAY, START + DAY)


def test_a_window_is_half_open() -> None:
    assert [WINDOW.holds(at) for at in (*ALL, None)] == [False, True, True, False, True]
    assert TryLater("x").after_s is None and str(TryLater("x", 3.0)) == "x"


def _used(session: Session, at: datetime, tenant_id: str = "acme", **counts: int) -> None:
    names = [each.name for each in HourlyUsage.__table__.columns]
    row: dict[str, Any] = dict.fromkeys(names, 0)
    texts = ("project_id", "key_id", "model", "adapter", "kind", "price_version")
    row |= dict.fromkeys((*texts, "usage_period_id", "bill_period_id"), "x")
    row |= {"tenant_id": tenant_id, "at": at, "currency": "USD", **counts}
    session.execute(HourlyUsage.__table__.insert().values(**row))  # type: ignore[attr-defined]


def _reports(session: Session) -> list[tuple[str, Any, str]]:
    rows = session.scalars(
        select(PaymentCommand)
        .where(PaymentCommand.subject_id != "start")
        .order_by(PaymentCommand.id)
    )
    return [(r.subject_id, r.payload["value"], r.payload["at"]) for r in rows]


NOON = START + timedelta(hours=12, minutes=30)


def _by_meters(session: Session) -> None:
    account = session.get_one(BillingAccount, "acme")
    account.collection = "stripe_meters"
    metered.follow(session, account, NOON)


def test_ended_hours_are_reported_once_and_what_comes_late_too(lite: Deployment) -> None:
    lite.tenant("birch")
    with lite.database.transaction() as session:
        _by_meters(session)
        hour = START + timedelta(hours=12)
        _used(session, hour - timedelta(hours=1), requests=9)  # before the first report
        _used(session, hour, requests=2, input_tokens=100, cached_tokens=40, output_tokens=7)
        _used(session, hour, "birch", requests=5)
    assert meters.report_all(lite.database, "stripe", NOON) == 0, "from this hour on, once it ended"
    ended = START + timedelta(hours=13)
    assert meters.report_all(lite.database, "stripe", ended - timedelta(microseconds=1)) == 0
    assert meters.report_all(lite.database, "stripe", ended) == 4
    assert meters.report_all(lite.database, "stripe", ended) == 0
    at = "2026-01-01T12:00:00+00:00"
    first = [
        ("tollhouse_cached_input_tokens@" + at, 40, at),
        ("tollhouse_input_tokens@" + at, 60, at),
        ("tollhouse_output_tokens@" + at, 7, at),
        ("tollhouse_requests@" + at, 2, at),
    ]
    with lite.database.transaction() as session:
        assert _reports(session) == first
        keys = session.scalars(
            select(PaymentCommand.idempotency_key).order_by(PaymentCommand.id)
        ).all()
        assert keys[3] == "usage:acme:tollhouse_requests:20260101T12:0"
        session.execute(update(HourlyUsage).where(HourlyUsage.at == hour).values(requests=5))
    assert meters.report_all(lite.database, "stripe", ended) == 1
    with lite.database.transaction() as session:
        assert _reports(session) == [*first, ("tollhouse_requests@" + at, 3, at)]
        session.execute(update(HourlyUsage).where(HourlyUsage.at == hour).values(requests=4))
    assert meters.report_all(lite.database, "stripe", ended) == 0, "nothing is taken back"


def test_the_hours_that_differ_from_what_was_reported(lite: Deployment) -> None:
    hour = START + timedelta(hours=12)
    with lite.database.transaction() as session:
        _by_meters(session)
        assert meters.differences(session, "stripe", NOON) == []
    meters.report_all(lite.database, "stripe", NOON)
    with lite.database.transaction() as session:
        _used(session, hour, requests=2)
        _used(session, hour + timedelta(hours=1), output_tokens=3)
        due = hour + timedelta(hours=3)
        assert meters.differences(session, "stripe", due - timedelta(microseconds=1)) == []
        message = "tollhouse_requests of 2026-01-01 12:00 is 2, but 0 is reported"
        missing = Difference("usage/stripe", "amount", message, 1, 0, (), "acme")
        assert meters.differences(session, "stripe", due) == [missing]
    meters.report_all(lite.database, "stripe", due)
    with lite.database.transaction() as session:
        assert meters.differences(session, "stripe", due + timedelta(hours=9)) == []


def test_what_is_too_old_is_not_reported_and_old_reports_are_forgotten(lite: Deployment) -> None:
    with lite.database.transaction() as session:
        _by_meters(session)
    meters.report_all(lite.database, "stripe", START)
    now = START + 100 * DAY
    with lite.database.transaction() as session:
        _used(session, now - 60 * DAY - timedelta(hours=1), requests=1)
        _used(session, now - 60 * DAY, requests=2)
        _used(session, now - 34 * DAY, requests=3)
        for name, at in (("a", now - 120 * DAY), ("b", now - 120 * DAY - timedelta(seconds=1))):
            payload = {"value": 1, "at": ""}
            command_row(
                session, f"m@{at.isoformat()}", "usage", done_at=at, key=name, payload=payload
            )
    assert meters.report_all(lite.database, "stripe", now) == 2
    oldest = (now - 34 * DAY).isoformat()
    with lite.database.read() as session:
        found = _reports(session)
    kept = (f"m@{(now - 120 * DAY).isoformat()}", 1, "")
    assert found[0] == kept, "what was reported longer ago is forgotten"
    assert [each[1:] for each in found[1:]] == [(2, oldest), (3, oldest)]
