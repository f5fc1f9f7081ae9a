"""Every page of a deployment without requests yet, in a real browser on a real server."""

import pytest
from playwright.sync_api import Page

from tests.browser.page_checks import OPERATOR_PATHS, TENANT_PATHS, check_page
from tests.gateway.deployment import Deployment

pytestmark = pytest.mark.slow
# Empty tables with nothing to do: they fill by themselves, or nothing in them is good news.
NOTHING_TO_DO = {
    "Payments", "Export runs", "Messages", "Budget alerts", "Appeals", "Versions", "Signatures",
    "Adapters in quarantine", "Rejected and delayed requests, last seven days", "Decisions",
    "By category", "Open appeals", "Suspended keys", "Usage by organisation",
    "Parked events, oldest first", "Differences", "Alerts that hold now", "Errors by cause",
    "Errors by cause, last hour", "On file", "Models", "Engines", "Adapters", "Adapters by state",
    "Use by tenant, yesterday and today", "Waiting for a second operator",
    "Outstanding by age, in days past due", "Revenue by currency", "Trial balance",
    "Fees billed ahead, by the month that earns them", "The newest 200 transactions",
    "Margin by model", "The oldest 0 of 0",
}  # fmt: skip


@pytest.mark.parametrize("path", [*TENANT_PATHS, *OPERATOR_PATHS])
def test_an_empty_page_fits_and_each_empty_table_has_one_button_for_the_next_step(
    empty_deployment: Deployment, empty_page: Page, path: str
) -> None:
    """In one scheme: what is there beside text is of the filled page too, which is looked at in both."""
    check_page(empty_page, f"{empty_deployment.url}/dashboard{path}", schemes=("light",))
    tables = empty_page.locator(".empty:not(noscript *)").evaluate_all(
        """all => all.map((it) => [it.previousElementSibling?.textContent ?? "",
          [...it.querySelectorAll("a.button")].map((link) => link.getAttribute("href"))])"""
    )
    for caption, links in tables:
        assert caption in NOTHING_TO_DO or len(links) == 1, caption
        for link in links:
            assert link[0] != "#" or empty_page.locator(f"form{link}").count() == 1, link
