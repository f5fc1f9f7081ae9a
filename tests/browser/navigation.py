"""Opening and reloading a page that may be on its way to another one, such as after a form's redirect.

While Chromium replaces the frame of a page it refuses `Page.reload` of the DevTools protocol ("Not
attached to an active page"), and a navigation that is under way ends one that begins. Both are asked for
again.
"""

from collections.abc import Callable

from playwright.sync_api import Error, Page

_REPLACED = (
    "Not attached to an active page",
    "interrupted by another navigation",
    "net::ERR_ABORTED",
)
_ATTEMPTS, _PAUSE_MS = 20, 100


def visit(page: Page, url: str) -> None:
    _asked_again(page, lambda: page.goto(url))


def reload(page: Page) -> None:
    _asked_again(page, page.reload)


def open_panel(page: Page, button: str) -> None:
    """Open the side panel with the form that `button` sends."""
    page.locator("details.panel > summary", has_text=button).click()


def _asked_again(page: Page, act: Callable[[], object]) -> None:
    """Raises any other error, and the last of these. Pauses let what the page itself asks for be
    answered, which a sleep would not."""
    for left in reversed(range(_ATTEMPTS)):
        try:
            act()
            return
        except Error as error:
            if left == 0 or not any(words in error.message for words in _REPLACED):
                raise
        page.wait_for_timeout(_PAUSE_MS)
