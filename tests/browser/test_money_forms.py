"""Acts on money in a real browser: previewed, confirmed by the amount typed, without script as well."""

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser import navigation
from tests.browser.conftest import signed_in
from tests.browser.page_checks import check_page
from tests.gateway.deployment import Deployment

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("script", [True, False])
def test_credit_is_granted_after_a_preview_and_the_amount_typed(
    deployment: Deployment, chromium: Browser, console_messages: list[str], script: bool
) -> None:
    context = chromium.new_context(java_script_enabled=script)
    page = signed_in(context, deployment.url, deployment.services.operator_token, console_messages)
    page.goto(f"{deployment.url}/dashboard/operator/tenants/{deployment.tenant_id}/billing")
    page.get_by_role("link", name="Grant credit…").click()
    page.get_by_label("Amount").fill("7.25")
    page.get_by_label("Reason").fill(f"goodwill, script {script}")
    page.get_by_role("button", name="Preview").click()
    table = page.get_by_role("region", name="What will be posted")
    expect(table.get_by_role("row", name="promotion")).to_contain_text("7.25")
    page.get_by_label("Type “7.25” to post").fill("7.25")
    page.get_by_role("button", name="Post").click()
    expect(page.get_by_role("status")).to_have_text("It is posted.")
    navigation.reload(page)
    given = page.get_by_role("region", name="Acts on money")
    expect(given.get_by_role("cell", name=f"goodwill, script {script}")).to_have_count(1)
    context.close()


def test_a_wire_is_booked_on_an_invoice(
    deployment: Deployment, operator_page: Page, console_messages: list[str]
) -> None:
    page = operator_page
    page.goto(f"{deployment.url}/dashboard/operator/invoices?state=final")
    page.locator("tbody a").first.click()
    page.get_by_role("link", name="Book a wire…").click()
    page.get_by_label("Amount").fill("0.01")
    page.get_by_label("Bank reference").fill("MT940 1")
    page.get_by_role("button", name="Preview").click()
    check_page(page, page.url)
    page.get_by_label("Type “0.01” to post").fill("1")
    page.get_by_role("button", name="Post", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text("does not match")
    assert all("400" in each for each in console_messages), "the browser tells of the refusal"
    console_messages.clear()
    page.get_by_label("Type “0.01” to post").fill("0.01")
    page.get_by_role("button", name="Post", exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("Invoice")
    check_page(page, page.url.partition("?")[0])


def test_the_billing_page_of_a_tenant_fits(deployment: Deployment, operator_page: Page) -> None:
    path = f"/dashboard/operator/tenants/{deployment.tenant_id}/billing"
    check_page(operator_page, f"{deployment.url}{path}")
    expect(operator_page.get_by_role("link", name="Change the plan…")).to_be_visible()
