"""Open amounts by age, and the search over all tenants, against a hand sheet."""

from datetime import timedelta
from typing import Any

from sqlalchemy import select

from billing.invoicing import invoice_run
from billing.invoicing.tables import Invoice
from billing.reports import receivables
from core.clock import FakeClock
from tests.billing.conftest import Deployment
from tests.billing.payments.test_settlement import Customer

# Days past due of each invoice -> its bucket; the boundary belongs to the younger one.
AGES = {
    -1: "not due",
    0: "not due",
    1: "1-30 days",
    30: "1-30 days",
    31: "31-60 days",
    60: "31-60 days",
    90: "61-90 days",
    91: "over 90 days",
}


def test_each_open_amount_is_in_one_bucket(deployment: Deployment, clock: FakeClock) -> None:
    customer = Customer(deployment).invoiced()
    for days, name in AGES.items():
        with deployment.database.transaction() as session:
            invoice = session.get_one(Invoice, customer.invoice_id)
            assert invoice.due_at is not None
            now = invoice.due_at + timedelta(days=days)
            (line,) = receivables.ageing(session, now)
            listed = {
                each
                for each in receivables.BUCKETS
                if receivables.invoices(session, now, bucket=each)
            }
        wanted = dict.fromkeys(receivables.BUCKETS, 0) | {name: 1200, "total": 1200}
        assert line == {"currency": "USD"} | wanted, days
        assert listed == {name}, days
    customer.pay(500, "part")
    with deployment.database.read() as session:
        assert receivables.ageing(session, clock.now())[0]["total"] == 700
    customer.pay(700, "rest")
    with deployment.database.read() as session:
        assert receivables.ageing(session, clock.now()) == []


def test_invoices_and_payments_are_found_and_paged(deployment: Deployment) -> None:
    deployment.tenant("zeta")
    for tenant_id in ("acme", "zeta"):
        tokens = {"input_tokens": 0, "cached_tokens": 0, "output_tokens": 20_000_000}
        deployment.record(deployment.event(tenant_id=tenant_id, **tokens))
    deployment.rate()
    deployment.clock.advance(days=40)
    invoice_run.run(deployment.database, deployment.clock)
    now = deployment.clock.now()
    with deployment.database.transaction() as session:
        every = receivables.invoices(session, now)
        names = [name for _, name in receivables.invoices(session, now, search="zet")]
        pages = [every[0], *receivables.invoices(session, now, before=every[0][0].id)]
        assert [each.id for each, _ in pages] == [each.id for each, _ in every]
        assert set(names) == {"zeta"} and {name for _, name in every} == {"acme", "zeta"}
        assert receivables.invoices(session, now, state="paid") == []


def test_payments_are_found_by_what_a_bank_statement_says_and_paged(
    deployment: Deployment,
) -> None:
    customer = Customer(deployment).invoiced()
    for number in range(3):
        deployment.clock.advance(hours=1)
        customer.pay(100 + number, f"bank 471{number}", invoice=number < 2)
    with deployment.database.read() as session:

        def _found(**where: Any) -> list[tuple[int, str, str | None]]:
            rows = receivables.payments(session, **where)
            return [(payment.amount_minor, name, label) for payment, name, label in rows]

        every = [(102, "acme", None), (101, "acme", "TH-000001"), (100, "acme", "TH-000001")]
        assert _found() == every, "the newest first"
        assert _found(search="4711") == every[1:2]
        assert _found(search="th-0000") == every[1:]
        assert _found(state="succeeded") == every and _found(state="failed") == []
        newest = receivables.payments(session)[0][0]
        assert _found(before=newest.id) == every[1:]
        assert _found(limit=1) == every[:1]


def test_drafts_of_ended_periods_wait_for_their_run(deployment: Deployment) -> None:
    deployment.record(deployment.event())
    invoice_run.run(deployment.database, deployment.clock)
    with deployment.database.read() as session:
        end = session.scalars(select(Invoice.period_end)).one()
        assert receivables.drafts(session, end - timedelta(microseconds=1)) == 0
        assert receivables.drafts(session, end) == 1
