"""Small things on pages: copying, refused forms, times and empty pages."""

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from tests.browser.navigation import open_panel
from tests.gateway.deployment import Deployment

pytestmark = pytest.mark.slow


@pytest.fixture
def refused(console_messages: list[str], page: Page) -> Iterator[None]:
    """Chromium logs the status of the refused page itself."""
    yield
    said = [each for each in console_messages if "400 (Bad Request)" in each]
    assert len(said) == 1
    console_messages.remove(said[0])


def test_an_id_is_copied_by_its_button(deployment: Deployment, page: Page) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.goto(f"{deployment.url}/dashboard/requests")
    page.locator("tbody a").first.click()
    request_id = page.locator("p.lead code").inner_text()
    page.get_by_role("button", name=f"Copy {request_id}").click()
    expect(page.get_by_role("status")).to_have_text("Copied.")
    assert page.evaluate("navigator.clipboard.readText()") == request_id


def test_a_refused_form_stays_with_its_reason(
    deployment: Deployment, page: Page, refused: None
) -> None:
    page.goto(f"{deployment.url}/dashboard/keys")
    open_panel(page, "Create key")
    name = page.get_by_label("Name")
    name.evaluate("it => it.removeAttribute('required')")
    name.fill("x" * 200)
    page.get_by_role("button", name="Create key").click()
    alarm = page.get_by_role("alert")
    expect(alarm).to_have_count(1)
    expect(alarm).to_contain_text("The name has 200 characters.")
    expect(page.get_by_label("Name")).to_have_value("x" * 200)
    expect(page.get_by_label("Name")).to_have_attribute("aria-invalid", "true")
    expect(page.get_by_label("Name")).to_be_focused()


def test_a_refused_form_of_a_row_stays_open(
    deployment: Deployment, page: Page, refused: None
) -> None:
    page.goto(f"{deployment.url}/dashboard/keys")
    row = page.get_by_role("row", name=re.compile("checkout"))
    row.get_by_text("Change").click()
    row.get_by_label("Type “checkout” to revoke").fill("chekout")
    row.get_by_role("button", name="Revoke").click()
    row = page.get_by_role("row", name=re.compile("checkout"))
    expect(row.get_by_role("alert")).to_contain_text("does not match")
    expect(row.get_by_label("Type “checkout” to revoke")).to_be_visible()


def test_a_time_is_relative_with_the_instant_behind_it(deployment: Deployment, page: Page) -> None:
    page.goto(f"{deployment.url}/dashboard/requests")
    first = page.locator("tbody time").first
    expect(first).to_have_text(re.compile(r"^\d+ (s|minutes?|hours?|days?) ago$"))
    expect(first).to_have_attribute("title", re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC$"))


def test_a_small_charge_is_not_shown_as_nothing(deployment: Deployment, page: Page) -> None:
    page.goto(f"{deployment.url}/dashboard/requests")
    served = page.locator("tbody tr", has_text="tiny").first.locator("td").last
    shown = re.fullmatch(r"([0-9.]+) USD", served.inner_text())
    assert shown is not None and 0 < float(shown[1]) < 0.01


def test_an_empty_page_offers_one_next_step(empty_deployment: Deployment, empty_page: Page) -> None:
    empty_page.goto(f"{empty_deployment.url}/dashboard/usage")
    empty_page.locator(".empty").get_by_role("link", name="Send a request").click()
    expect(empty_page.get_by_role("heading", name="Playground")).to_be_visible()


def test_a_wrong_filter_leads_back_to_its_page(
    deployment: Deployment, page: Page, refused: None
) -> None:
    with page.expect_response(lambda answer: "from=soon" in answer.url):
        page.goto(f"{deployment.url}/dashboard/costs?from=soon")
    page.get_by_role("link", name="Open the page without filters").click()
    expect(page.get_by_role("heading", name="Costs", level=1)).to_be_visible()


def test_health_says_first_what_fails_and_what_to_do(
    deployment: Deployment, operator_page: Page
) -> None:
    operator_page.goto(f"{deployment.url}/dashboard/operator/health")
    states = operator_page.locator("tbody .badge").all_inner_texts()
    order = {"bad": 0, "warn": 1, "good": 2}
    places = [order.get(state, 3) for state in states]
    assert places == sorted(places) and places[0] == 0
    first = operator_page.locator("tbody tr").first
    assert first.locator("td").first.inner_text() == "dead letters"
    said = operator_page.get_by_text("dead letters: 1 waiting. Fix the cause, then replay them.")
    expect(said).to_be_visible()
    status = operator_page.locator(".tile").first
    expect(status).to_contain_text(f"{states.count('bad')} failing")
