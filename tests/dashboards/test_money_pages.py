"""Acts on money, invoices of all tenants, billing details, plans, taxes and parked usage by page."""

import re
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta

import httpx
import pytest
from sqlalchemy import select

from billing.accounts.accounts import ensure_account
from billing.accounts.tables import BillingAccount
from billing.adjustments.tables import MoneyAct
from billing.invoicing.tables import Invoice
from billing.subscriptions.subscriptions import create_plan, subscribe
from billing.subscriptions.tables import Plan
from billing.taxes.tables import TaxRate
from billing.usage import usage
from billing.usage.tables import ParkedEvent
from core.money import units_of
from core.tenants import operators
from core.tenants.models import AuditEntry
from core.tenants.organisations import create_tenant
from tests.dashboards.billed import bill_a_fee, whole_invoice
from tests.dashboards.browser_client import browser
from tests.gateway.deployment import Deployment, running_deployment

NEW = "/dashboard/operator/money-acts/new"


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """With a final invoice of 100.00 and the rule of a second person above 50."""
    settings = {"four_eyes_above": "50"}
    with running_deployment(tmp_path_factory.mktemp("money"), settings=settings) as made:
        bill_a_fee(made)
        yield made


@pytest.fixture(scope="module")
def ann(deployment: Deployment) -> str:
    services = deployment.services
    with services.database.transaction() as session:
        return operators.add(session, services.clock, "operator", "ann", "accountant")[1]


def reference(page: str) -> str:
    found = re.search(r'name="reference" value="([^"]+)"', page)
    assert found is not None, page[-3000:]
    return found[1]


def test_without_a_kind_the_acts_are_offered(
    operator: httpx.Client, deployment: Deployment
) -> None:
    assert "New act…" in operator.get("/dashboard/operator/money-acts").text
    offered = operator.get(NEW)
    assert offered.status_code == 200 and "Grant credit" in offered.text
    unknown = operator.get(NEW, params={"kind": "bribe"})
    assert unknown.status_code == 400 and "There is no act" in unknown.text
    nobody = operator.get(NEW, params={"kind": "grant", "of": "nobody"})
    assert nobody.status_code == 400 and 'value="nobody"' in nobody.text
    chosen = operator.get(NEW, params={"kind": "grant", "of": "demo"})
    assert chosen.status_code == 200 and chosen.url.params["target"] == deployment.tenant_id
    number = whole_invoice(deployment).label
    assert f"Invoice {number}" in operator.get(NEW, params={"kind": "void", "of": number}).text


def test_an_act_is_previewed_confirmed_by_its_amount_and_posted_once(
    operator: httpx.Client, deployment: Deployment
) -> None:
    fields = {"kind": "grant", "target": deployment.tenant_id, "amount": "12.50"}
    fields |= {"credit": "promo", "reason": "an outage"}
    seen = operator.get(NEW, params=fields)
    assert seen.status_code == 200 and "What will be posted" in seen.text
    for words in ("promotion", "promo", "12.50 USD"):
        assert words in seen.text
    sent = fields | {"act": "post", "reference": reference(seen.text)}
    refused = operator.post(NEW, data=sent | {"confirm": "12"})
    assert refused.status_code == 400 and "does not match" in refused.text
    assert 'value="an outage"' in refused.text, "what was typed is kept"
    posted = operator.post(NEW, data=sent | {"confirm": "12.50"})
    assert "It is posted." in posted.text and posted.request.method == "GET"
    operator.post(NEW, data=sent | {"confirm": "12.50"})
    with deployment.services.database.read() as session:
        acts = session.scalars(select(MoneyAct).where(MoneyAct.reason == "an outage")).all()
        rows = session.scalars(select(AuditEntry).where(AuditEntry.action == "credit.grant")).all()
        logged = [(each.actor, each.tenant_id) for each in rows]
    assert [each.status for each in acts] == ["posted"]
    assert logged == [("operator", deployment.tenant_id)]


def test_a_grant_is_undone_with_a_preview_and_the_amount_typed(
    operator: httpx.Client, deployment: Deployment
) -> None:
    grant = {"kind": "grant", "target": deployment.tenant_id, "amount": "3.25", "reason": "a slip"}
    seen = operator.get(NEW, params=grant).text
    operator.post(
        NEW, data=grant | {"act": "post", "reference": reference(seen), "confirm": "3.25"}
    )
    with deployment.services.database.read() as session:
        act = session.scalars(select(MoneyAct).where(MoneyAct.reason == "a slip")).one()
    assert "Undo…" in operator.get("/dashboard/operator/money-acts").text
    undo = {"kind": "undo", "target": act.id, "reason": "wrong tenant"}
    seen = operator.get(NEW, params=undo).text
    assert "Grant credit, " in seen and "promotion" in seen and "3.25" in seen
    sent = undo | {"act": "post", "reference": reference(seen), "confirm": "3.25"}
    assert operator.post(NEW, data=sent | {"confirm": "3"}).status_code == 400
    assert "It is posted." in operator.post(NEW, data=sent).text
    again = operator.get(NEW, params=undo)
    assert again.status_code == 409 and "undone already" in again.text


def test_a_large_act_waits_for_the_accountant_and_not_for_who_asked(
    operator: httpx.Client, deployment: Deployment, ann: str
) -> None:
    invoice = whole_invoice(deployment)
    page = operator.get(f"/dashboard/operator/invoices/{invoice.id}").text
    assert "Write off…" in page and "Book a wire…" in page
    fields = {"kind": "write_off", "target": invoice.id, "reason": "insolvent"}
    seen = operator.get(NEW, params=fields).text
    assert "bad debt" in seen and "final → uncollectible" in seen and "second operator" in seen
    amount = re.search(r"Type “([^”]+)” to", seen)
    assert amount is not None
    sent = fields | {"act": "post", "reference": reference(seen), "confirm": amount[1]}
    assert "waits for a second operator" in operator.post(NEW, data=sent).text
    acts = operator.get("/dashboard/operator/money-acts").text
    assert "Withdraw" in acts and ">Confirm<" not in acts
    with deployment.services.database.read() as session:
        act = session.scalars(select(MoneyAct).where(MoneyAct.reason == "insolvent")).one()
    own = {"act": "confirm", "id": act.id, "confirm": amount[1]}
    assert operator.post("/dashboard/operator/money-acts", data=own).status_code == 403
    with closing(browser(deployment, ann)) as second:
        assert ">Confirm<" in second.get("/dashboard/operator/money-acts").text
        done = second.post("/dashboard/operator/money-acts", data=own)
        assert "It is posted." in done.text
        assert second.get("/dashboard/operator/safety").status_code == 403
        prices = second.post("/dashboard/operator/plans", data={"act": "plan", "name": "x"})
        assert prices.status_code == 403
    shown = operator.get(f"/dashboard/operator/invoices/{invoice.id}").text
    assert "uncollectible" in shown and "ann" in shown


def test_a_refused_preview_keeps_the_form(operator: httpx.Client, deployment: Deployment) -> None:
    fields = {"kind": "grant", "target": deployment.tenant_id, "amount": "much", "reason": "why"}
    answer = operator.get(NEW, params=fields)
    assert answer.status_code == 400
    assert 'value="much"' in answer.text and "not an amount" in answer.text
    assert operator.get(NEW, params={"kind": "gift", "target": "x"}).status_code == 400


def test_invoices_of_all_tenants_are_searched_and_written(
    operator: httpx.Client, deployment: Deployment
) -> None:
    invoice = whole_invoice(deployment)
    page = operator.get("/dashboard/operator/invoices", params={"q": invoice.label}).text
    assert str(invoice.label) in page and "Over 90 days" not in page.split("<table")[1]
    none = operator.get("/dashboard/operator/invoices", params={"q": "nothing"}).text
    assert "No invoice matches." in none
    lines = operator.get("/dashboard/operator/invoices?format=csv").text.splitlines()
    assert lines[0].startswith("Invoice,Tenant,Period") and len(lines) >= 2
    assert operator.get("/dashboard/operator/payments?format=csv").text.startswith("Started,Tenant")


def test_ended_periods_are_final_at_once_if_asked(
    operator: httpx.Client, deployment: Deployment
) -> None:
    """By page and by API, where the plan would wait four weeks for late usage."""
    services = deployment.services
    long_ago = services.clock.now() - timedelta(days=40)
    tenants = []
    with services.database.transaction() as session:
        create_plan(
            session,
            long_ago,
            {"name": "slow", "currency": "USD", "base_fee": units_of("7"), "grace_hours": 24 * 28},
        )
        for name in ("by-page", "by-api"):
            tenant = create_tenant(session, services.clock, name=name)
            ensure_account(session, tenant.id, long_ago)
            subscribe(session, tenant.id, "slow", long_ago)
            tenants.append(tenant.id)
    path = f"/dashboard/operator/tenants/{tenants[0]}/billing"
    unconfirmed = operator.post(path, data={"act": "finalise", "confirm": "by"})
    assert unconfirmed.status_code == 400 and "does not match" in unconfirmed.text
    form = {"act": "finalise", "confirm": "by-page"}
    assert "The ended periods are final." in operator.post(path, data=form).text
    refused = operator.post(path, data=form)
    assert refused.status_code == 409 and "No ended period has anything to bill" in refused.text
    route = "/admin/v1/tenants/by-api/invoices/finalise"
    made = operator.post(route)
    assert made.status_code == 201, made.text
    assert {each["status"] for each in made.json()["data"]} == {"final"}
    again = operator.post(route)
    assert again.status_code == 409 and "running period ends" in again.json()["error"]["message"]
    assert operator.post("/admin/v1/tenants/nobody/invoices/finalise").status_code == 404
    with services.database.read() as session:
        for tenant_id in tenants:
            own = session.scalars(select(Invoice).where(Invoice.tenant_id == tenant_id)).all()
            assert own and all(each.number is not None for each in own)
            said = session.scalars(
                select(AuditEntry.target).where(
                    AuditEntry.action == "invoice.finalise", AuditEntry.tenant_id == tenant_id
                )
            )
            assert sorted(said) == sorted(each.id for each in own)


def test_billing_details_and_the_subscription_are_changed(
    operator: httpx.Client, deployment: Deployment
) -> None:
    path = f"/dashboard/operator/tenants/{deployment.tenant_id}/billing"
    fields = {"act": "details", "collection": "manual", "prepaid_only": "no"}
    refused = operator.post(path, data=fields | {"payment_terms_days": "999"})
    assert refused.status_code == 400 and 'value="999"' in refused.text
    saved = operator.post(path, data=fields | {"payment_terms_days": "45"})
    assert "billing details are saved" in saved.text, saved.text[-2000:]
    with deployment.services.database.read() as session:
        account = session.get_one(BillingAccount, deployment.tenant_id)
        assert account.payment_terms_days == 45
        rows = session.scalars(select(AuditEntry).where(AuditEntry.action == "billing.change"))
        assert [each.after["payment_terms_days"] for each in rows if each.after] == [45]
    paused = operator.post(path, data={"act": "pause", "until": "2099-01-01"})
    assert "Resume now" in paused.text
    assert "End the subscription" in operator.post(path, data={"act": "resume"}).text
    wrong = operator.post(path, data={"act": "cancel", "when": "now", "confirm": "x"})
    assert wrong.status_code == 400
    ended = operator.post(path, data={"act": "cancel", "when": "now", "confirm": "demo"})
    assert "The subscription was changed." in ended.text


def test_a_plan_and_a_tax_rate_are_added(operator: httpx.Client, deployment: Deployment) -> None:
    path = "/dashboard/operator/plans"
    plan = {"act": "plan", "name": "pro", "currency": "USD", "interval": "year"}
    plan |= {"in_advance": "yes", "base_fee": "1200", "seat_fee": "10", "included_seats": "2"}
    plan |= {"trial_days": "0", "payment_terms_days": "30"}
    assert operator.post(path, data=plan | {"seat_fee": "ten"}).status_code == 400
    assert "plan was created" in operator.post(path, data=plan).text
    rate = {"act": "rate", "region": "DE", "tax_name": "VAT", "percent": "19", "from": "2026-01-01"}
    assert operator.post(path, data=rate | {"percent": "200"}).status_code == 400
    assert "in force" in operator.post(path, data=rate).text
    with deployment.services.database.read() as session:
        made = session.scalars(select(Plan).where(Plan.name == "pro")).one()
        assert (made.base_fee, made.in_advance, made.payment_terms_days) == (
            units_of("1200"),
            True,
            30,
        )
        assert session.scalars(select(TaxRate.rate_ppm)).all() == [190_000]


def test_parked_usage_is_listed_released_and_closed(
    operator: httpx.Client, deployment: Deployment
) -> None:
    services = deployment.services
    with services.database.transaction() as session:
        session.add(
            ParkedEvent(
                request_id="req_parked",
                tenant_id=deployment.tenant_id,
                code="invalid",
                reason="a reason to read",
                payload={"tenant_id": deployment.tenant_id, "model": "tiny"},
                parked_at=services.clock.now(),
            )
        )
    path = "/dashboard/operator/parked"
    assert "a reason to read" in operator.get(path).text
    assert "The rest is below" in operator.post(path, data={"act": "release"}).text
    drop = {"act": "drop", "id": "req_parked"}
    assert operator.post(path, data=drop | {"confirm": "x"}).status_code == 400
    assert "Nothing is parked." in operator.post(path, data=drop | {"confirm": "parked"}).text
    with services.database.read() as session:
        assert usage.parked(session) == []
        actions = session.scalars(select(AuditEntry.action)).all()
    assert {"usage.release", "usage.dismiss"} <= set(actions)
