"""How browser tests reload: also while the page is being replaced by a form's redirect."""

import ast
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Error, Page, Route, expect

from tests.browser import navigation

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
SITE = "http://page.test/"
FORM = (
    "<!doctype html><title>Form</title><h1>Form</h1><form method=post><button>Send</button></form>"
)


@pytest.fixture
def form_page(chromium: Browser) -> Page:
    page = chromium.new_context().new_page()

    def _answer(route: Route) -> None:
        route.fulfill(content_type="text/html", body=FORM)

    page.route("**/*", _answer)
    page.goto(SITE)
    return page


@pytest.mark.parametrize("words", navigation._REPLACED)
def test_a_refused_reload_is_asked_for_again(
    words: str, form_page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    truly, refused = form_page.reload, [Error(words), Error(words)]

    def _reload() -> object:
        if refused:
            raise refused.pop()
        return truly()

    monkeypatch.setattr(form_page, "reload", _reload)
    navigation.reload(form_page)
    assert not refused
    expect(form_page.get_by_role("heading", name="Form")).to_be_visible()


def test_another_error_is_raised_at_once(form_page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def _reload() -> object:
        asked.append(1)
        raise Error("Target crashed")

    monkeypatch.setattr(form_page, "reload", _reload)
    with pytest.raises(Error, match="Target crashed"):
        navigation.reload(form_page)
    assert len(asked) == 1


def test_a_page_is_reloaded_and_opened_right_after_a_form_was_sent(form_page: Page) -> None:
    for turn in range(40):
        form_page.evaluate("document.querySelector('button').click()")
        if turn % 2:
            navigation.reload(form_page)
        else:
            navigation.visit(form_page, SITE)
        expect(form_page.get_by_role("heading", name="Form")).to_be_visible()


def test_no_other_browser_test_reloads_by_itself() -> None:
    for path in HERE.rglob("*.py"):
        if path.stem in ("navigation", "test_navigation"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr == "reload":
                assert ast.unparse(node.value) == "navigation", f"{path.name}:{node.lineno}"
