"""/docs: everything comes from the gateway, and a request is tried with a key."""

import gzip

import httpx
import pytest
from playwright.sync_api import Browser, expect

from tests.browser.conftest import listening
from tests.gateway.deployment import MODEL, Deployment

pytestmark = pytest.mark.slow


def test_a_call_is_tried_with_a_key_and_nothing_is_fetched_from_elsewhere(
    empty_deployment: Deployment, chromium: Browser, console_messages: list[str]
) -> None:
    """Scripts that the policy of the page refuses are messages of the console."""
    context = chromium.new_context(viewport={"width": 1280, "height": 900})
    page = listening(context, empty_deployment.url, console_messages)
    page.goto(f"{empty_deployment.url}/docs")
    expect(page.get_by_role("heading", name="Tollhouse")).to_be_visible(timeout=60_000)
    page.get_by_role("button", name="Authorize").first.click()
    page.locator(".modal-ux input").fill(empty_deployment.key)
    page.get_by_role("button", name="Apply credentials").click()
    page.get_by_role("button", name="Close").click()
    page.locator('[id$="list_models_v1_models_get"] .opblock-summary-control').click()
    page.get_by_role("button", name="Execute").click()
    answer = page.locator(".live-responses-table")
    expect(answer).to_contain_text(f'"id": "{MODEL}"', timeout=60_000)
    context.close()


def test_scripts_are_the_same_compressed_or_not(empty_deployment: Deployment) -> None:
    for name in ("swagger-ui-bundle.js", "swagger-ui.css", "start.js"):
        url = f"{empty_deployment.url}/docs/{name}"
        whole = httpx.get(url, headers={"accept-encoding": "identity"})
        assert "content-encoding" not in whole.headers
        packed = httpx.get(url, headers={"accept-encoding": "gzip"})
        assert packed.content == whole.content, "httpx decompresses"
        assert len(gzip.compress(whole.content)) < 500_000
    for name in ("README.md", "LICENSE", "..%2Fopenapi.py", "swagger-ui.css.gz"):
        assert httpx.get(f"{empty_deployment.url}/docs/{name}").status_code == 404
