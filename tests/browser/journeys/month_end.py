"""The end of a month: what is parked, paid, audited and signed."""

from datetime import timedelta
from random import Random

from msgspec import structs
from playwright.sync_api import Browser, Page, expect
from sqlalchemy import select

from billing.accounts.accounts import ensure_account
from billing.invoicing.invoice_run import run
from billing.pricing.tables import PriceVersionRow
from billing.usage import usage
from core.tenants import organisations
from core.tenants.scope import scope_of_operator
from tests.browser import seed
from tests.browser.conftest import signed_in
from tests.browser.journeys.film import WIDE, Film, MovedClock
from tests.browser.navigation import open_panel
from tests.gateway.deployment import Deployment


def play(
    browser: Browser, deployment: Deployment, clock: MovedClock, film: Film, messages: list[str]
) -> None:
    seed.fill(deployment.services, deployment.tenant_id)
    _usage_without_a_price(deployment)
    now = clock.now()
    clock.ahead = (now.replace(day=28) + timedelta(days=9)).replace(day=4) - now
    run(deployment.services.database, clock)
    page = signed_in(
        browser.new_context(viewport=WIDE),
        deployment.url,
        deployment.services.operator_token,
        messages,
    )
    _read_the_checklist(page, film)
    _price_the_parked_usage(page, film)
    _match_the_wires(page, film)
    _give_credit_back(page, film)
    _audit(page, film)
    _sign(page, film)


def _read_the_checklist(page: Page, film: Film) -> None:
    page.get_by_role("link", name="Month end").click()
    todo = page.get_by_role("region", name="Checklist")
    expect(todo.get_by_role("row", name="No usage is parked")).to_contain_text("bad")
    expect(todo.get_by_role("row", name="The audit is clean")).to_contain_text("bad")
    expect(page.get_by_role("button", name="Sign off")).to_have_count(0)
    film.take(page, "The checklist of the month that has ended names what is left to do.")


def _price_the_parked_usage(page: Page, film: Film) -> None:
    page.get_by_role("link", name="No usage is parked").click()
    expect(page.get_by_role("region", name="Parked events")).to_contain_text("sud-atelier")
    film.take(page, "One request is parked: its customer pays in euros, its price was in dollars.")
    page.get_by_role("link", name="Models and prices").click()
    open_panel(page, "Test and save")
    page.locator('main [name="model"]').select_option("tiny")
    page.locator('main [name="currency"]').fill("EUR")
    page.get_by_role("button", name="Test and save").click()
    expect(page.get_by_role("region", name="Price versions")).to_contain_text("EUR")
    film.take(page, "A price in euros is tested and saved.")
    page.get_by_role("link", name="Parked usage").click()
    expect(page.locator("main")).to_contain_text("Nothing is parked")
    film.take(page, "With the price the request was released, and it will be billed.")


def _match_the_wires(page: Page, film: Film) -> None:
    page.get_by_role("link", name="All invoices").click()
    rows = page.get_by_role("region", name="Invoices, newest first").get_by_role("row")
    row = rows.filter(has_text="harbour-freight").filter(has_text="final").first.inner_text()
    number, _, _, _, total = row.split("\t")[:5]
    page.get_by_role("link", name="Bank statements").click()
    lines = (
        f"w-1,2026-01-04,{total.split()[0]},USD,Harbour Freight,for {number}",
        "w-2,2026-01-04,20.00,USD,Quill Books,thank you",
    )
    statement = "id,date,amount,currency,payer,text\n" + "\n".join(lines) + "\n"
    page.locator('[name="statement"]').set_input_files(
        [{"name": "statement.csv", "mimeType": "text/csv", "buffer": statement.encode()}]
    )
    page.get_by_role("button", name="Import").click()
    expect(page.get_by_role("row", name="Harbour Freight")).to_contain_text("matched")
    unknown = page.get_by_role("row", name="Quill Books")
    expect(unknown).to_contain_text("unmatched")
    film.take(page, "Of two wires, one names its invoice; the other waits for a person.")
    unknown.get_by_text("Change").click()
    unknown.locator('[name="target"]').fill("quill-books")
    unknown.get_by_role("button", name="Assign").click()
    expect(page.get_by_role("row", name="Quill Books")).to_contain_text("matched")
    film.take(page, "Assigned to the customer, it pays the oldest invoice first.")


def _give_credit_back(page: Page, film: Film) -> None:
    page.get_by_role("link", name="All invoices").click()
    rows = page.get_by_role("region", name="Invoices, newest first").get_by_role("row")
    rows.filter(has_text="north-clinic").filter(has_text="final").get_by_role("link").first.click()
    page.get_by_role("link", name="Credit note…").click()
    page.get_by_label("Amount").fill("3.20")
    page.get_by_label("Reason").fill("slow answers on the 12th")
    page.get_by_role("button", name="Preview").click()
    expect(page.get_by_role("heading", name="Confirm by the amount")).to_be_visible()
    film.take(page, "A credit note shows its postings before it is confirmed.")
    page.locator('main [name="confirm"]').fill("3.20")
    page.get_by_role("button", name="Post", exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("Invoice")


def _audit(page: Page, film: Film) -> None:
    page.get_by_role("link", name="Reconciliation", exact=True).click()
    page.get_by_role("button", name="Audit now").click()
    expect(
        page.get_by_role("region", name="Latest runs").get_by_role("row").nth(1)
    ).to_contain_text("clean", timeout=60_000)
    film.take(page, "The audit compares each step with the one before it, and finds no difference.")
    page.get_by_role("link", name="Ledger", exact=True).click()
    expect(page.get_by_role("region", name="Trial balance")).to_be_visible()
    film.take(page, "The trial balance of all accounts.")


def _sign(page: Page, film: Film) -> None:
    page.get_by_role("link", name="Month end").click()
    sign = page.locator("form", has=page.get_by_role("button", name="Sign off"))
    month = sign.locator('[name="month"]').input_value()
    sign.locator('[name="note"]').fill("all tasks done")
    sign.locator('[name="confirm"]').fill(month)
    sign.get_by_role("button", name="Sign off").click()
    expect(page.get_by_role("region", name="Signatures")).to_contain_text("all tasks done")
    film.take(page, f"Nothing is left to do in {month}: the month is signed.")


def _usage_without_a_price(deployment: Deployment) -> None:
    """A customer in euros, whose event was priced in dollars."""
    services = deployment.services
    with services.database.transaction() as session:
        tenant = organisations.create_tenant(
            session, services.clock, name="sud-atelier", plan="standard", currency="EUR"
        )
        ensure_account(session, tenant.id, services.clock.now())
        version = session.scalars(
            select(PriceVersionRow.id).where(PriceVersionRow.model == "tiny")
        ).first()
        assert version
        scope = scope_of_operator(tenant.id)
        project = organisations.create_project(session, scope, services.clock, name="default").id
    seeder = seed.Seeder(services, tenant.id, Random(3))
    places, versions = [(project, "key_atelier")], dict.fromkeys(seed.MODELS, version)
    event = seed.event_of(seeder, tenant.id, places, [], versions, services.clock.now())
    with services.database.transaction() as session:
        usage.record(session, [structs.replace(event, model="tiny", adapter=None)], services.clock)
