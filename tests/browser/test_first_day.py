"""Every page of a house where nothing was asked yet, in a real browser on a real server."""

import pytest
from playwright.sync_api import Page

from tests.browser.looking import OPERATORS, OWN, look_at
from tests.gateway.served import House

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("path", [*OWN, *OPERATORS])
def test_an_empty_page_fits_and_tells_the_next_step(
    empty_house: House, empty_page: Page, path: str
) -> None:
    look_at(empty_page, f"{empty_house.url}/dashboard{path}")
