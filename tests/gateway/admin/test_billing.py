"""The admin routes on money: what they answer agrees with the books."""

import json

import httpx

from billing.audit import reconcile
from billing.invoicing import invoice_run
from tests.gateway.admin.conftest import OPERATORS, Town


def test_prices_plans_credit_and_taxes_reach_the_invoice(town: Town) -> None:
    acme = town.acme
    bad = town.as_operator(
        "POST", "/admin/v1/prices", json={"model": "m", "terms": {"input": "-1"}}
    )
    assert bad.status_code == 400 and "it is negative" in bad.json()["error"]["message"]
    price = {"model": "m", "terms": {"input": "2"}}
    assert town.as_operator("POST", "/admin/v1/prices", json=price).status_code == 201
    listed = town.as_operator("GET", "/admin/v1/prices", params={"model": "m"}).json()["data"]
    assert len(listed) == 1
    plan = {"name": "pro", "base_fee": "31", "minimum_commitment": "100"}
    assert town.as_operator("POST", "/admin/v1/billing-plans", json=plan).status_code == 201
    assert town.as_operator("POST", "/admin/v1/billing-plans", json=plan).status_code == 409
    path = f"/admin/v1/tenants/{acme.name}"
    made = town.as_operator("POST", f"{path}/subscription", json={"plan": "pro", "seats": 2})
    assert made.status_code == 201, made.text
    paused = town.as_operator(
        "POST", f"{path}/subscription/pause", json={"until": "2099-01-01T00:00:00Z"}
    )
    assert [each["state"] for each in paused.json()["data"]] == ["ended", "paused"]
    resumed = town.as_operator("POST", f"{path}/subscription/resume")
    assert [each["state"] for each in resumed.json()["data"]] == ["ended", "active"]
    ending = town.as_operator("POST", f"{path}/subscription/cancel", json={"at_term_end": True})
    assert ending.json()["data"][-1]["to"] is not None
    own = town.call("GET", "/admin/v1/subscription", acme.keys["finance"]).json()["data"]
    assert own[-1]["commitment"]["left"]["amount"] == "100"
    assert town.as_operator("GET", f"{path}/subscription").json()["data"] == own
    gift = {"kind": "promo", "amount": "12.50", "reference": "welcome"}
    first = town.as_operator("POST", f"{path}/credits", json=gift)
    again = town.as_operator("POST", f"{path}/credits", json=gift)
    assert first.json()["id"] == again.json()["id"]
    change = {"tax_region": "DE", "legal_name": "Acme GmbH"}
    assert town.as_operator("PATCH", f"{path}/billing", json=change).json()["tax_region"] == "DE"
    rate = {"region": "DE", "name": "VAT", "percent": "19"}
    assert town.as_operator("POST", "/admin/v1/tax-rates", json=rate).json()["rate_ppm"] == 190_000
    account = town.call("GET", "/admin/v1/billing", acme.keys["finance"]).json()
    assert account["legal_name"] == "Acme GmbH"
    assert account["credit"][0]["remaining"]["amount"] == "12.5"
    invoice_run.run(town.services.database, town.services.clock, [acme.id])
    (row,) = town.call("GET", "/admin/v1/invoices", acme.keys["owner"]).json()["data"]
    shown = town.call("GET", f"/admin/v1/invoices/{row['id']}", acme.keys["owner"]).json()
    assert {line["kind"] for line in shown["lines"]} >= {"base_fee", "commitment"}
    page = town.call("GET", f"/admin/v1/invoices/{row['id']}/page", acme.keys["owner"])
    assert page.status_code == 200 and shown["total"]["text"] in page.text
    foreign = town.call("GET", f"/admin/v1/invoices/{row['id']}", town.rival.keys["owner"])
    assert foreign.status_code == 404
    balances = town.as_operator("GET", "/admin/v1/trial-balance").json()["data"]
    assert sum(int(each["balance"]["units"]) for each in balances) == 0 and balances
    naive = {"at": "2026-01-01T00:00:00"}
    assert town.as_operator("GET", "/admin/v1/trial-balance", params=naive).status_code == 400
    found = town.as_operator("GET", "/admin/v1/ledger", params={"search": "welcome"}).json()["data"]
    assert [each["tenant"] for each in found] == [acme.name]
    month = {"month": "2026-01", "shape": "xero", "accounts": ["revenue=4010"]}
    written = town.as_operator("GET", "/admin/v1/journal", params=month)
    assert written.text.startswith("*Narration,*Date,") and written.status_code == 200
    bad = town.as_operator("GET", "/admin/v1/journal", params=month | {"accounts": ["revenue"]})
    assert bad.status_code == 400 and "revenue=4000" in bad.text
    assert town.as_operator("GET", "/admin/v1/revenue-schedule").json()["data"] == []
    with town.services.database.read() as session:
        assert reconcile.audit(session).clean


def test_tax_ids_and_certificates_are_checked_listed_and_ended(town: Town) -> None:
    path = f"/admin/v1/tenants/{town.rival.name}"
    wrong = {"tax_region": "FR", "tax_id": "FR40303265046"}
    refused = town.as_operator("PATCH", f"{path}/billing", json=wrong)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tax_id")
    right = {"tax_region": "fr", "tax_id": "fr 40 303 265 045"}
    shown = town.as_operator("PATCH", f"{path}/billing", json=right).json()
    assert (shown["tax_region"], shown["tax_id"]) == ("FR", "FR40303265045")
    home = {"tax_region": "DE", "tax_id": "DE136695976", "name": "Tollhouse GmbH"}
    assert town.as_operator("PATCH", "/admin/v1/seller", json=home).status_code == 200
    assert town.as_operator("GET", "/admin/v1/seller").json()["tax_id"] == "DE136695976"
    held = {"number": "EX-1", "region": "FR"}
    made = town.as_operator("POST", f"{path}/tax-exemptions", json=held)
    assert made.status_code == 201, made.text
    one = f"{path}/tax-exemptions/{made.json()['id']}"
    assert town.as_operator("DELETE", one).json()["valid_to"]
    (listed,) = town.as_operator("GET", f"{path}/tax-exemptions").json()["data"]
    assert listed["number"] == "EX-1" and listed["valid_to"]
    foreign = f"/admin/v1/tenants/{town.acme.name}/tax-exemptions/{made.json()['id']}"
    assert town.as_operator("DELETE", foreign).status_code == 404
    owner = town.rival.keys["owner"]
    assert town.call("GET", f"{path}/tax-exemptions", owner).status_code == 403
    rates = town.as_operator("GET", "/admin/v1/tax-rates", params={"region": "DE"}).json()["data"]
    assert [each["rate_ppm"] for each in rates] == [190_000]


def test_exports_are_scheduled_paused_and_ended_by_who_may(town: Town) -> None:
    path, finance, rival = "/admin/v1/export-schedules", town.acme.keys["finance"], town.rival
    wanted = {"what": "usage", "every": "day", "destination": "books/daily"}
    assert town.call("POST", path, town.acme.keys["developer"], json=wanted).status_code == 403
    outside = {**wanted, "destination": "/tmp"}
    refused = town.call("POST", path, finance, json=outside)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "destination")
    made = town.call("POST", path, finance, json=wanted)
    assert made.status_code == 201, made.text
    assert made.json()["destination"] == f"tenants/{town.acme.id}/books/daily"
    one = f"{path}/{made.json()['id']}"
    assert town.call("PATCH", one, rival.keys["owner"], json={"paused": True}).status_code == 404
    assert town.call("DELETE", one, rival.keys["owner"]).status_code == 404
    assert town.call("GET", path, rival.keys["owner"]).json()["data"] == []
    assert town.call("PATCH", one, finance, json={"paused": True}).json()["paused_at"]
    (shown,) = town.call("GET", path, finance).json()["data"]
    assert shown["paused_at"] is not None
    assert town.call("PATCH", one, finance, json={"paused": False}).json()["paused_at"] is None
    assert town.call("DELETE", one, finance).status_code == 200
    assert town.call("GET", path, finance).json()["data"] == []
    log = town.call("GET", "/admin/v1/audit", town.acme.keys["owner"]).json()["data"]
    acts = [each["action"] for each in log if each["target"] == made.json()["id"]]
    assert sorted(acts) == [
        f"export_schedule.{act}" for act in ("create", "end", "pause", "resume")
    ]
    chosen = {**wanted, "destination": "anywhere"}
    asked = {"params": {"tenant": town.acme.name}, "json": chosen}
    assert town.as_operator("POST", path, **asked).json()["destination"] == "anywhere"


def test_budgets_are_set_and_ended_by_who_may(town: Town) -> None:
    finance = town.acme.keys["finance"]
    wanted = {"cap": "25.00", "scope": "project", "scope_id": town.acme.project_id}
    made = town.call("POST", "/admin/v1/budgets", finance, json=wanted)
    assert made.status_code == 201, made.text
    assert made.json()["cap"]["amount"] == "25"
    stolen = {**wanted, "scope_id": town.rival.project_id}
    assert town.call("POST", "/admin/v1/budgets", finance, json=stolen).status_code == 400
    listed = town.call("GET", "/admin/v1/budgets", finance).json()["data"]
    assert [each["id"] for each in listed] == [made.json()["id"]]
    assert town.call("GET", "/admin/v1/budgets", town.rival.keys["finance"]).json()["data"] == []
    path = f"/admin/v1/budgets/{made.json()['id']}"
    assert town.call("DELETE", path, town.rival.keys["finance"]).status_code == 404
    assert town.call("DELETE", path, finance).status_code == 200
    assert town.call("GET", "/admin/v1/budgets", finance).json()["data"] == []


def test_cloud_events_are_billed_one_by_one_or_in_batches(town: Town) -> None:
    price = {"model": "pages", "terms": {"request": "0.01"}}
    assert town.as_operator("POST", "/admin/v1/prices", json=price).status_code == 201
    plain = {"specversion": "1.0", "type": "generation", "id": "1", "source": "scanner"}
    event = plain | {"subject": town.rival.name, "data": {"model": "pages", "requests": 7}}

    def _send(body: object, form: str) -> httpx.Response:
        headers = {
            "authorization": f"Bearer {OPERATORS}",
            "content-type": f"application/{form}+json",
        }
        return town.client.post("/admin/v1/events", content=json.dumps(body), headers=headers)

    assert _send(event, "cloudevents").json() == {"stored": 1, "duplicates": 0}
    other = event | {"id": "2", "data": {"model": "pages", "project": "default", "requests": 3}}
    assert _send([event, other], "cloudevents-batch").json() == {"stored": 1, "duplicates": 1}
    changed = _send(event | {"data": {"model": "pages", "requests": 8}}, "cloudevents")
    assert changed.status_code == 409 and changed.json()["error"]["code"] == "event_differs"
    misspelt = _send(event | {"id": "3", "data": {"model": "pgs", "requests": 1}}, "cloudevents")
    assert (
        misspelt.status_code == 400 and "no price of 'pgs'" in misspelt.json()["error"]["message"]
    )
    old = _send(event | {"specversion": "0.3"}, "cloudevents")
    assert old.status_code == 400 and "specversion" in old.json()["error"]["param"]
    forbidden = town.call("POST", "/admin/v1/events", town.rival.keys["owner"], json=event)
    assert forbidden.status_code == 403
    invoice_run.run(town.services.database, town.services.clock, [town.rival.id])
    (row,) = town.call("GET", "/admin/v1/invoices", town.rival.keys["owner"]).json()["data"]
    shown = town.call("GET", f"/admin/v1/invoices/{row['id']}", town.rival.keys["owner"]).json()
    assert sorted(line["quantity"] for line in shown["lines"]) == [3, 7]
    with town.services.database.read() as session:
        assert reconcile.audit(session).clean


def test_an_amount_that_the_database_cannot_store_is_refused(town: Town) -> None:
    """SQLite's integers end at 9.2 million major units, counted in picounits."""
    most = {"name": "whale", "minimum_commitment": "9223372.03"}
    assert town.as_operator("POST", "/admin/v1/billing-plans", json=most).status_code == 201
    for field in ("minimum_commitment", "base_fee", "included_usage"):
        plan = {"name": "leviathan", field: "679500289.68367"}
        refused = town.as_operator("POST", "/admin/v1/billing-plans", json=plan)
        error = refused.json()["error"]
        assert refused.status_code == 400, refused.text
        assert error["code"] == "amount_too_large"
        assert "679500289.68367" in error["message"]
        assert "9,223,372" in error["message"]
