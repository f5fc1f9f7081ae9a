"""What a person meets in an hour of use: where one is, what to do next, and nothing said twice."""

import re

import pytest
from playwright.sync_api import Page, expect

from tests.gateway.deployment import Deployment

pytestmark = pytest.mark.slow


def test_a_long_navigation_shows_the_page(deployment: Deployment, operator_page: Page) -> None:
    page = operator_page
    page.set_viewport_size({"width": 1280, "height": 720})
    for path, name in (("ledger", "Ledger"), ("reconciliation", "Reconciliation")):
        page.goto(f"{deployment.url}/dashboard/operator/{path}")
        expect(page.locator(".side").get_by_role("link", name=name)).to_be_in_viewport(ratio=1)
        assert page.evaluate("window.scrollY") == 0


def test_the_palette_shows_what_is_chosen(deployment: Deployment, operator_page: Page) -> None:
    page = operator_page
    page.goto(f"{deployment.url}/dashboard/operator/health")
    page.keyboard.press("Control+k")
    for _ in range(30):
        page.keyboard.press("ArrowDown")
    expect(page.locator('dialog [aria-selected="true"]')).to_be_in_viewport(ratio=0.9)


def test_the_palette_acts(deployment: Deployment, operator_page: Page) -> None:
    page = operator_page
    page.goto(f"{deployment.url}/dashboard/operator/ledger")
    page.keyboard.press("Control+k")
    page.keyboard.type("scheme: dark")
    page.keyboard.press("Enter")
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    assert page.url.endswith("/operator/ledger")
    page.keyboard.press("Control+k")
    page.keyboard.type("north-clinic")
    page.keyboard.press("Enter")
    expect(page.locator(".side .tenant")).to_contain_text("north-clinic")
    page.keyboard.press("Control+k")
    page.keyboard.type("keyboard")
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog", name="Shortcuts")).to_be_visible()


def test_the_code_is_of_the_request_that_was_sent(deployment: Deployment, page: Page) -> None:
    page.goto(f"{deployment.url}/dashboard/playground")
    page.get_by_label("Maximum output tokens").fill("5")
    page.locator('[name="prompt"]').fill("How are tokens counted?")
    page.get_by_role("button", name="Send").click()
    expect(page.locator('[name="prompt"]')).to_have_value("")
    page.get_by_text("As curl, Python and Node").click()
    for place in ("#curl", "#python", "#node"):
        code = page.locator(place).inner_text()
        assert code.count("How are tokens counted?") == 1 and "assistant" not in code, place
    page.locator('[name="prompt"]').fill("And then?")
    code = page.locator("#python").inner_text()
    assert code.index("How are") < code.index("assistant") < code.index("And then?")


def test_a_failed_request_keeps_what_was_typed(
    deployment: Deployment, page: Page, console_messages: list[str]
) -> None:
    page.goto(f"{deployment.url}/dashboard/playground")
    wrong = '{"error": {"message": "The model is overloaded."}}'
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=503, body=wrong))
    page.locator('[name="prompt"]').fill("A long question")
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".answer .problem").first).to_have_text("The model is overloaded.")
    expect(page.locator('[name="prompt"]')).to_have_value("A long question")
    assert all("503" in each for each in console_messages), "the browser tells of the refusal"
    console_messages.clear()


@pytest.mark.parametrize("width", [390, 1280, 1440])
def test_figures_of_two_answers_stay_on_one_line(
    deployment: Deployment, page: Page, width: int
) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(f"{deployment.url}/dashboard/playground")
    page.get_by_label("Compare with").select_option(index=1)
    page.get_by_role("button", name="Send").click()
    costs = page.locator('[data-figure="cost"]')
    for cost in costs.all():
        expect(cost).to_have_text(re.compile(r"^0\.0*[1-9]\d? USD$"), timeout=30_000)
    expect(page.get_by_role("button", name="Send")).to_be_enabled(timeout=30_000)
    outside = page.locator(".pane .tile").evaluate_all(
        """all => all.filter((it) => it.scrollWidth > it.clientWidth
          || it.querySelector("dd span").getClientRects().length > 1).map((it) => it.innerText)"""
    )
    assert outside == []


def test_a_decision_leads_to_its_request(deployment: Deployment, page: Page) -> None:
    page.goto(f"{deployment.url}/dashboard/safety")
    decisions = page.get_by_role("region", name=re.compile("latest"))
    link = decisions.locator("tbody a").first
    request_id = link.get_attribute("title")
    expect(decisions.locator("tbody summary").first).to_have_text("Appeal")
    link.click()
    expect(page.locator("p.lead code")).to_have_text(str(request_id))


def test_the_button_of_an_empty_table_leads_to_its_form(
    empty_deployment: Deployment, empty_page: Page
) -> None:
    empty_page.goto(f"{empty_deployment.url}/dashboard/operator/plans")
    empty_page.get_by_role("link", name="Set a tax rate").click()
    expect(empty_page.get_by_label("Region")).to_be_in_viewport()
    empty_page.keyboard.press("Tab")
    expect(empty_page.get_by_label("Region")).to_be_focused()


def test_fields_of_a_long_form_stand_below_each_other(
    deployment: Deployment, operator_page: Page
) -> None:
    operator_page.set_viewport_size({"width": 1440, "height": 900})
    operator_page.goto(f"{deployment.url}/dashboard/operator/tenants")
    left = operator_page.locator("#new-tenant > label").evaluate_all(
        "all => all.map(it => Math.round(it.getBoundingClientRect().left))"
    )
    assert len(left) > 10 and len(set(left)) <= 5
