"""Invoices, notes, prices, plans and measures as they are shown: every field of each."""

from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy.orm import Session

from billing.accounts.accounts import DEFAULT_SELLER_ID
from billing.accounts.tables import BillingAccount, Seller
from billing.audit.tables import AuditRun
from billing.invoicing import printing, views
from billing.invoicing.tables import CreditNote, Invoice, InvoiceLine
from billing.pricing.tables import PriceVersionRow
from billing.reports import measures, subscription_views
from billing.subscriptions.tables import Plan, Subscription
from billing.usage.tables import ParkedEvent, UsageBatch
from core.tenants.models import Project, Tenant
from tests.billing.conftest import START, Deployment
from tests.billing.payments.provider_rows import invoice_row

DAY, CENT = timedelta(days=1), 10**10


def minor(amount: int, text: str, exact: str) -> dict[str, Any]:
    return {
        "minor": amount,
        "text": text,
        "amount": exact,
        "units": str(amount * CENT),
        "currency": "USD",
    }


def money(units: int, exact: str) -> dict[str, Any]:
    return {"amount": exact, "units": str(units), "currency": "USD"}


@pytest.fixture
def drafted(session: Session) -> Session:
    session.get_one(Tenant, "acme").name = "Acme"
    session.add(Project(id="p1", tenant_id="acme", name="Search", created_at=START))
    account = session.get_one(BillingAccount, "acme")
    account.legal_name, account.address, account.email = "Acme Inc", "1 Road", "a@b.example"
    account.tax_id, account.tax_region = "DE136695976", "DE"
    seller = session.get_one(Seller, DEFAULT_SELLER_ID)
    seller.name, seller.footer = "Seller Ltd", "thanks"
    sums = {"subtotal_minor": 150, "promo_minor": 10, "tax_minor": 27, "total_minor": 167}
    sums |= {"prepaid_minor": 7, "due_minor": 160, "paid_minor": 40, "credited_minor": 20}
    invoice_row(session, 1, sent=False, status="draft", exact=1_495_000_000_000, **sums)
    for position, (kind, component, project, quantity, amount) in enumerate(
        (
            ("usage", "input", "p1", 100, 50),
            ("late_usage", "cached_input", "p1", 20, 40),
            ("usage", "output", "gone", 7, 60),
            ("usage", "waived", "", 3, 0),
            ("adjustment", "output", "p1", 900, -1),
            ("tax", "", "p1", 1, 27),
        ),
        1,
    ):
        names = {"component": component, "project_id": project, "kind": kind, "description": kind}
        line = InvoiceLine(
            invoice_id="inv_01",
            position=position,
            quantity=quantity,
            amount_minor=amount,
            exact=amount * CENT - 5,
            unit="token",
            starts_at=START,
            ends_at=START + DAY,
            details={"rate_ppm": 190_000, "taxable_minor": 140} if kind == "tax" else {},
            **names,
        )
        session.add(line)
    session.flush()
    return session


def test_an_invoice_in_full(drafted: Session) -> None:
    invoice = drafted.get_one(Invoice, "inv_01")
    shown = views.invoice_json(drafted, invoice)
    lines = shown.pop("lines")
    open_ = {"open": minor(0, "0.00", "0")}  # a draft is not owed yet
    assert shown == open_ | {
        "id": "inv_01",
        "number": "TH-01",
        "status": "draft",
        "tenant_id": "acme",
        "tenant": "Acme",
        "currency": "USD",
        "period_start": "2026-01-01T00:00:00+00:00",
        "period_end": "2026-02-01T00:00:00+00:00",
        "timezone": "UTC",
        "drafted_at": "2026-01-01T00:00:00+00:00",
        "final_at": None,
        "due_at": None,
        "seller": {
            "name": "Seller Ltd",
            "address": "",
            "tax_id": "",
            "bank_details": "",
            "footer": "thanks",
        },
        "billed_to": {
            "name": "Acme Inc",
            "address": "1 Road",
            "email": "a@b.example",
            "tax_id": "DE136695976",
            "tax_region": "DE",
            "tax_exempt": False,
        },
        "by_project": [
            {
                "project_id": "",
                "project": "",
                "exact": money(-5, "-0.000000000005"),
                "billed": minor(0, "0.00", "0"),
            },
            {
                "project_id": "gone",
                "project": "",
                "exact": money(599_999_999_995, "0.599999999995"),
                "billed": minor(60, "0.60", "0.6"),
            },
            {
                "project_id": "p1",
                "project": "Search",
                "exact": money(889_999_999_985, "0.889999999985"),
                "billed": minor(89, "0.89", "0.89"),
            },
        ],
        "usage": {
            "prompt_tokens": 120,
            "cached_tokens": 20,
            "completion_tokens": 7,
            "waived_tokens": 3,
        },
        "exact": money(1_495_000_000_000, "1.495"),
        "subtotal": minor(150, "1.50", "1.5"),
        "promotional_credit": minor(10, "0.10", "0.1"),
        "tax": minor(27, "0.27", "0.27"),
        "total": minor(167, "1.67", "1.67"),
        "prepaid": minor(7, "0.07", "0.07"),
        "due": minor(160, "1.60", "1.6"),
        "paid": minor(40, "0.40", "0.4"),
        "credited": minor(20, "0.20", "0.2"),
        "credit_notes": [],
        "payment_reference": views.payment_reference(invoice),
    }
    assert lines[0] == {
        "position": 1,
        "kind": "usage",
        "component": "input",
        "description": "usage",
        "project_id": "p1",
        "project": "Search",
        "model": "",
        "adapter": None,
        "price_version": None,
        "quantity": 100,
        "unit": "token",
        "unit_price": "",
        "calculation": "",
        "exact": money(499_999_999_995, "0.499999999995"),
        "billed": minor(50, "0.50", "0.5"),
        "rounding_units": "5",
        "starts_at": "2026-01-01T00:00:00+00:00",
        "ends_at": "2026-01-02T00:00:00+00:00",
        "details": {},
    }
    assert [each["position"] for each in lines] == [1, 2, 3, 4, 5, 6]


def test_what_a_final_invoice_keeps(drafted: Session) -> None:
    invoice = drafted.get_one(Invoice, "inv_01")
    invoice.issued_by, invoice.billed_to = {"name": "Old"}, {"name": "Older"}
    invoice.final_at, invoice.due_at, invoice.status = START + DAY, START + 2 * DAY, "final"
    drafted.flush()
    shown = views.invoice_json(drafted, invoice)
    assert (shown["seller"], shown["billed_to"]) == ({"name": "Old"}, {"name": "Older"})
    assert (shown["final_at"], shown["due_at"]) == (
        "2026-01-02T00:00:00+00:00",
        "2026-01-03T00:00:00+00:00",
    )
    assert shown["open"] == minor(100, "1.00", "1")
    assert views.invoice_summary(invoice) == {
        "id": "inv_01",
        "number": "TH-01",
        "tenant_id": "acme",
        "status": "final",
        "period_start": "2026-01-01",
        "period_end": "2026-02-01",
        "total": "1.67",
        "open": "1.00",
        "currency": "USD",
    }
    for number in (2, 1):
        names = {
            "tenant_id": "acme",
            "seller_id": DEFAULT_SELLER_ID,
            "currency": "USD",
            "outcome": "due",
        }
        note = CreditNote(
            id=f"n{number}",
            invoice_id="inv_01",
            number=number,
            label=f"CN-{number}",
            net_minor=100,
            tax_minor=19,
            reason="late",
            reference=f"n{number}",
            transaction_id="t",
            issued_at=START,
            **names,
        )
        drafted.add(note)
    drafted.flush()
    first, second = views.invoice_json(drafted, invoice)["credit_notes"]
    assert second["number"] == "CN-2" and first == {
        "id": "n1",
        "number": "CN-1",
        "net": minor(100, "1.00", "1"),
        "tax": minor(19, "0.19", "0.19"),
        "total": minor(119, "1.19", "1.19"),
        "outcome": "due",
        "reason": "late",
        "issued_at": "2026-01-01T00:00:00+00:00",
    }


def test_a_draft_without_a_number_and_a_price(drafted: Session) -> None:
    invoice = drafted.get_one(Invoice, "inv_01")
    invoice.label = None
    assert views.invoice_summary(invoice)["number"] == "draft"
    assert views.payment_reference(invoice) == ""
    row = PriceVersionRow(
        id="pv",
        tenant_id="",
        model="demo",
        adapter="*",
        currency="USD",
        effective_from=START,
        terms={"a": 1},
        note="n",
    )
    shown = {
        "id": "pv",
        "tenant_id": None,
        "model": "demo",
        "adapter": "*",
        "currency": "USD",
        "effective_from": "2026-01-01T00:00:00+00:00",
        "effective_to": None,
        "terms": {"a": 1},
        "note": "n",
    }
    assert views.price_json(row) == shown
    row.tenant_id, row.effective_to = "acme", START + DAY
    ended = {"tenant_id": "acme", "effective_to": "2026-01-02T00:00:00+00:00"}
    assert views.price_json(row) == shown | ended


def test_amounts_and_days_as_they_are_printed(drafted: Session) -> None:
    assert [printing._less(each) for each in ("-1.50", "1.50")] == ["1.50", "−1.50"]
    day = printing._day_in("Europe/Berlin")
    days = [day(each) for each in (None, "", "2026-01-01T23:30:00+00:00", "2026-01-01T22:30:00Z")]
    assert days == ["–", "–", "2026-01-02", "2026-01-01"]
    page = printing.invoice_page(drafted, drafted.get_one(Invoice, "inv_01"))
    assert "Seller Ltd" in page and "Acme Inc" in page and "data:image" not in page
    drafted.get_one(Seller, DEFAULT_SELLER_ID).logo = b"\xff\xd8\xff1"
    page = printing.invoice_page(drafted, drafted.get_one(Invoice, "inv_01"))
    assert "data:image/jpeg;base64,/9j/MQ==" in page


def test_a_plan_and_the_subscriptions_of_a_tenant(session: Session) -> None:
    plan = Plan(
        id="plan_1",
        name="team",
        currency="USD",
        base_fee=100,
        seat_fee=5,
        minimum_commitment=1000,
        created_at=START,
    )
    session.add(plan)
    session.flush()
    amounts = {
        "base_fee": money(100, "0.0000000001"),
        "seat_fee": money(5, "0.000000000005"),
        "included_usage": money(0, "0"),
        "minimum_commitment": money(1000, "0.000000001"),
    }
    shown = subscription_views.plan_json(plan)
    assert {name: shown.pop(name) for name in amounts} == amounts
    assert shown == {
        "id": "plan_1",
        "name": "team",
        "currency": "USD",
        "interval": "month",
        "commitment_interval": "month",
        "in_advance": False,
        "trial_days": 0,
        "included_seats": 0,
        "grace_hours": 24,
        "payment_terms_days": 14,
        "suspend_after_days": None,
        "limits_plan": None,
    }
    assert subscription_views.subscriptions_json(session, "nobody", START) == []
    held = Subscription(tenant_id="acme", plan_id="plan_1", seats=3, starts_at=START, overrides={})
    session.add(held)
    session.flush()

    def _shown(now: datetime) -> dict[str, Any]:
        (found,) = subscription_views.subscriptions_json(session, "acme", now)
        return found

    active = _shown(START)
    assert active == amounts | {
        "plan": "team",
        "interval": "month",
        "in_advance": False,
        "seats": 3,
        "state": "active",
        "from": "2026-01-01T00:00:00+00:00",
        "to": None,
        "fees_from": "2026-01-01T00:00:00+00:00",
        "overrides": [],
        "commitment": {
            "from": "2026-01-01T00:00:00+00:00",
            "to": "2026-02-01T00:00:00+00:00",
            "used": money(0, "0"),
            "left": money(1000, "0.000000001"),
        },
    }
    moment = timedelta(microseconds=1)
    assert _shown(START - moment)["state"] == "scheduled"
    held.ends_at, held.billed_from = START + 9 * DAY, START + DAY
    session.flush()
    times = (START, START + DAY - moment, START + DAY, START + 9 * DAY - moment, START + 9 * DAY)
    states = [_shown(at)["state"] for at in times]
    assert states == ["trial", "trial", "active", "active", "ended"]
    assert "commitment" not in _shown(START) and _shown(START)["to"] == "2026-01-10T00:00:00+00:00"


def test_the_figures_of_alerts(lite: Deployment) -> None:
    now = START + DAY

    def _read() -> dict[str, float]:
        with lite.database.read() as session:
            return measures.read(session, now, 7)

    nothing = dict.fromkeys(measures._GAUGES, 0.0)
    assert _read() == nothing and set(nothing) == {
        "tollhouse_unrated_age_seconds",
        "tollhouse_audit_age_seconds",
        "tollhouse_audit_differences",
        "tollhouse_clickhouse_down",
        "tollhouse_unmoved_age_seconds",
        "tollhouse_parked_events",
        "tollhouse_parked_exports",
        "tollhouse_dead_letters_waiting",
        "tollhouse_database_behind",
    }
    with lite.database.transaction() as session:
        hours = {"recorded_at": now - timedelta(hours=3), "events": 1, "shard": 0}
        session.add(UsageBatch(id=1, rated_at=now, **hours))
        session.add(UsageBatch(id=2, **hours | {"recorded_at": now - timedelta(hours=2)}))
        session.add(UsageBatch(id=3, **hours | {"recorded_at": now - timedelta(hours=1)}))
        plain = {"tenant_id": "acme", "code": "x", "reason": "", "payload": {}, "parked_at": START}
        for name, fields in (
            ("a", {}),
            ("b", {}),
            ("c", {"released_at": START}),
            ("d", {"dismissed_by": "ann"}),
        ):
            session.add(ParkedEvent(request_id=name, **plain, **fields))
    waits = {"tollhouse_unrated_age_seconds": 7200.0, "tollhouse_parked_events": 2}
    assert _read() == nothing | waits | {"tollhouse_audit_age_seconds": 10_800.0}
    with lite.database.transaction() as session:
        for at, count in ((now - timedelta(minutes=5), 2), (now - timedelta(hours=9), 7)):
            session.add(AuditRun(at=at, clean=False, report={"differences": [{}] * count}))
    run = {"tollhouse_audit_age_seconds": 300.0, "tollhouse_audit_differences": 2}
    assert _read() == nothing | waits | run
    with lite.database.transaction() as session:
        session.add(AuditRun(at=now + DAY, clean=True, report={}))
    ahead = {"tollhouse_audit_age_seconds": 0.0, "tollhouse_audit_differences": 0}
    assert _read() == nothing | waits | ahead
