"""A deployment with data in a real browser on a real server: every page, wide and narrow, light and dark;
axe; the playground streams; what is changed on a page holds.
"""

import re
from pathlib import Path

import pytest
from openai import OpenAI
from playwright.sync_api import Browser, Page, expect

from tests.browser.conftest import signed_in
from tests.browser.navigation import open_panel
from tests.browser.page_checks import OPERATOR_PATHS, TENANT_PATHS, check_page
from tests.gateway.deployment import MODEL, Deployment

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("path", TENANT_PATHS)
def test_a_page_fits_from_a_phone_to_4k_and_axe_finds_nothing(
    deployment: Deployment, page: Page, path: str
) -> None:
    check_page(page, f"{deployment.url}/dashboard{path}")


@pytest.mark.parametrize("path", OPERATOR_PATHS)
def test_an_operator_page_fits_and_axe_finds_nothing(
    deployment: Deployment, operator_page: Page, path: str
) -> None:
    check_page(operator_page, f"{deployment.url}/dashboard{path}")


@pytest.mark.parametrize("kind", ["requests", "invoices", "operator/tenants"])
def test_a_detail_fits_and_axe_finds_nothing(
    deployment: Deployment, operator_page: Page, kind: str
) -> None:
    operator_page.goto(f"{deployment.url}/dashboard/{kind}")
    operator_page.locator("tbody a").first.click()
    expect(operator_page.locator("h1")).to_be_visible()
    check_page(operator_page, operator_page.url)


def test_the_tile_the_table_and_the_file_agree(deployment: Deployment, page: Page) -> None:
    page.goto(f"{deployment.url}/dashboard/usage")
    tile = page.locator(".tile", has_text="Input tokens").locator("dd").inner_text()
    total = page.locator("tfoot td").nth(1).inner_text()
    assert tile.split("\n")[0] == total
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Download CSV").click()
    lines = Path(waiting.value.path()).read_text().splitlines()
    assert sum(int(line.split(",")[2]) for line in lines[1:]) == int(total.replace("\u202f", ""))


def test_everything_is_reached_by_the_keyboard_alone(deployment: Deployment, page: Page) -> None:
    page.goto(f"{deployment.url}/dashboard/")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    reached = set()
    for _ in range(page.locator("nav a, nav button").count() + 4):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.textContent.trim()"))
    assert {"Usage", "Costs", "Keys", "Sign out"} <= reached


def test_it_works_and_prints_without_script(
    deployment: Deployment, chromium: Browser, console_messages: list[str]
) -> None:
    context = chromium.new_context(java_script_enabled=False)
    page = signed_in(context, deployment.url, deployment.key, console_messages)
    page.goto(f"{deployment.url}/dashboard/usage?by=key_id")
    expect(page.locator("table").first).to_be_visible()
    page.emulate_media(media="print")
    expect(page.locator(".side")).to_be_hidden()
    context.close()


def test_an_invoice_opens_to_the_usage_behind_its_lines(deployment: Deployment, page: Page) -> None:
    page.goto(f"{deployment.url}/dashboard/invoices")
    page.get_by_role("link", name=re.compile("TH-")).first.click()
    expect(page.get_by_role("heading", name=re.compile("Invoice TH-"))).to_be_visible()
    page.locator("tbody a").first.click()
    expect(page.get_by_text("equals the line")).to_be_visible()


def test_a_key_made_on_the_page_works_in_the_sdk(deployment: Deployment, page: Page) -> None:
    page.goto(f"{deployment.url}/dashboard/keys")
    open_panel(page, "Create key")
    page.get_by_label("Name").fill("from the browser")
    page.get_by_role("button", name="Create key").click()
    secret = page.locator("#once").inner_text()
    with OpenAI(base_url=f"{deployment.url}/v1", api_key=secret, max_retries=0) as client:
        assert MODEL in [model.id for model in client.models.list()]


def test_a_removal_asks_for_the_name(deployment: Deployment, page: Page) -> None:
    page.goto(f"{deployment.url}/dashboard/team")
    row = page.get_by_role("row", name=re.compile("viewer@demo.example"))
    row.get_by_text("Change").first.click()
    row.get_by_label("Type “viewer@demo.example” to remove").fill("viewer@demo.example")
    row.get_by_role("button", name="Remove").click()
    expect(page.get_by_role("status")).to_contain_text("removed")
