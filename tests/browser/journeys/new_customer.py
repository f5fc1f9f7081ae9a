"""A new customer: from the operator's form to the first paid invoice."""

import re
from datetime import timedelta

from playwright.sync_api import Browser, Page, expect

from billing.invoicing.invoice_run import run
from tests.browser import navigation
from tests.browser.conftest import listening, signed_in
from tests.browser.journeys.film import WIDE, Film, MovedClock
from tests.gateway.deployment import Deployment

OWNER, PASSWORD = "hank@globex.example", "a long enough password"


def play(
    browser: Browser, deployment: Deployment, clock: MovedClock, film: Film, messages: list[str]
) -> None:
    office = signed_in(
        browser.new_context(viewport=WIDE),
        deployment.url,
        deployment.services.operator_token,
        messages,
    )
    _offer_a_plan(office, deployment, film)
    tenant_page = _create_the_customer(office, deployment, film)
    _subscribe(office, tenant_page, film)
    customer = listening(browser.new_context(viewport=WIDE), deployment.url, messages)
    _use(customer, deployment, film)
    _end_the_month(deployment, clock)
    amount, reference = _read_the_invoice(customer, deployment, film)
    office = signed_in(
        browser.new_context(viewport=WIDE),
        deployment.url,
        deployment.services.operator_token,
        messages,
    )
    _import_the_statement(office, amount, reference, film)
    navigation.reload(customer)
    expect(customer.locator("main")).to_contain_text("paid")
    film.take(customer, "The customer sees that the invoice is paid.")


def _offer_a_plan(page: Page, deployment: Deployment, film: Film) -> None:
    page.goto(f"{deployment.url}/dashboard/operator/plans")
    navigation.open_panel(page, "Create plan")
    form = page.locator("form", has=page.get_by_role("button", name="Create plan"))
    form.get_by_label("Name").fill("team")
    form.get_by_label("Base fee").fill("49")
    form.get_by_label("Included usage").fill("10")
    form.get_by_role("button", name="Create plan").click()
    expect(page.get_by_role("region", name="Billing plans")).to_contain_text("team")
    film.take(page, "The operator offers a plan: 49 a month, of which 10 of usage are included.")


def _create_the_customer(page: Page, deployment: Deployment, film: Film) -> str:
    page.goto(f"{deployment.url}/dashboard/operator/tenants")
    navigation.open_panel(page, "Create tenant")
    form = page.locator("form", has=page.get_by_role("button", name="Create tenant"))
    for name, value in (
        ("name", "globex"),
        ("display_name", "Globex"),
        ("legal_name", "Globex GmbH"),
        ("owner", OWNER),
        ("password", PASSWORD),
    ):
        form.locator(f'[name="{name}"]').fill(value)
    form.locator('[name="plan"]').select_option("premium")
    form.scroll_into_view_if_needed()
    film.take(page, "One form creates the customer: account, owner, first project, first key.")
    form.get_by_role("button", name="Create tenant").click()
    expect(page.locator("#once")).to_contain_text("th_")
    film.take(page, "The first key is shown once.")
    return page.url.partition("?")[0]


def _subscribe(page: Page, tenant_page: str, film: Film) -> None:
    page.goto(f"{tenant_page}/billing")
    page.get_by_role("link", name="Change the plan…").click()
    page.locator('[name="plan"]').select_option(label="team")
    page.get_by_role("button", name="Preview").click()
    expect(page.get_by_role("heading", name="Confirm by the amount")).to_be_visible()
    film.take(page, "A change of plan is previewed before it is confirmed.")
    page.locator('main [name="confirm"]').fill("49.00")
    page.get_by_role("button", name="Change", exact=True).click()
    expect(page.get_by_role("region", name="Subscriptions")).to_contain_text("team")


def _use(page: Page, deployment: Deployment, film: Film) -> None:
    _sign_in(page, deployment)
    page.get_by_role("link", name="Playground").click()
    page.locator('[name="prompt"]').fill("How are tokens counted?")
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_role("button", name="Send")).to_be_enabled(timeout=30_000)
    film.take(page, "The owner signs in and asks a model, without pasting a key.")


def _sign_in(page: Page, deployment: Deployment) -> None:
    page.goto(f"{deployment.url}/dashboard/")
    page.get_by_label("E-mail").fill(OWNER)
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Sign in with the password").click()
    expect(page.get_by_role("heading", name="Overview", level=1)).to_be_visible()


def _end_the_month(deployment: Deployment, clock: MovedClock) -> None:
    """What the scheduled tasks do once the month and its grace period for late usage are over."""
    deployment.last_event()
    now = clock.now()
    clock.ahead = (now.replace(day=28) + timedelta(days=9)).replace(day=4) - now
    run(deployment.services.database, clock)


def _read_the_invoice(page: Page, deployment: Deployment, film: Film) -> tuple[str, str]:
    """The amount to pay and the reference for the transfer, as the page states them."""
    _sign_in(page, deployment)
    page.get_by_role("link", name="Invoices").click()
    page.get_by_role("region", name="Invoices").locator("tbody a").last.click()
    page.wait_for_url("**/dashboard/invoices/*")
    text = page.locator("main").inner_text()
    film.take(
        page, "A month later the session has ended. Signed in again, the owner reads the invoice."
    )
    to_pay = re.search(r"To pay\s+([\d.]+) USD", text)
    reference = re.search(r"state the reference ([A-Z0-9 ]+)\.", text)
    assert to_pay and float(to_pay[1]) > 0 and reference, text
    document = page.get_by_role("link", name="Download PDF").get_attribute("href") or ""
    assert page.request.get(deployment.url + document).body().startswith(b"%PDF")
    return to_pay[1], reference[1].replace(" ", "")


def _import_the_statement(page: Page, amount: str, reference: str, film: Film) -> None:
    page.get_by_role("link", name="Bank statements").click()
    line = f"bank-1,2026-01-05,{amount},USD,Globex GmbH,{reference}"
    statement = f"id,date,amount,currency,payer,reference\n{line}\n".encode()
    page.locator('[name="statement"]').set_input_files(
        [{"name": "statement.csv", "mimeType": "text/csv", "buffer": statement}]
    )
    page.get_by_role("button", name="Import").click()
    lines = page.get_by_role("region", name="Lines")
    expect(lines.get_by_role("row", name="Globex GmbH")).to_contain_text("matched")
    film.take(page, "The bank's statement is imported: the reference finds the invoice.")
    page.get_by_role("link", name="All invoices").click()
    expect(page.get_by_role("row", name="TH-000001")).to_contain_text("paid")
    film.take(page, "Among the invoices of all tenants it is paid.")
