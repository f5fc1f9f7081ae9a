"""Every page of a deployment without requests yet, in a real browser on a real server."""

import pytest
from playwright.sync_api import Page

from tests.browser.page_checks import OPERATOR_PATHS, TENANT_PATHS, check_page
from tests.gateway.deployment import Deployment

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("path", [*TENANT_PATHS, *OPERATOR_PATHS])
def test_an_empty_page_fits_and_tells_the_next_step(
    empty_deployment: Deployment, empty_page: Page, path: str
) -> None:
    check_page(empty_page, f"{empty_deployment.url}/dashboard{path}")
