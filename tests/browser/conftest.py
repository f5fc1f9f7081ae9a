"""Houses to look at, full and empty, and a browser to look with."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from openai import OpenAI
from playwright.sync_api import (
    Browser,
    BrowserContext,
    Page,
    StorageState,
    expect,
    sync_playwright,
)

from billing import service_levels
from billing.invoice_run import rate_all
from tests.browser.seed import fill
from tests.gateway.served import MODEL, House, served

CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """With six weeks behind it, and some requests that really went through the door."""
    with served(tmp_path_factory.mktemp("browser"), token_delay_s=0.01) as made:
        fill(made.services, made.tenant_id)
        with OpenAI(base_url=f"{made.url}/v1", api_key=made.key, max_retries=0) as client:
            for words in ("Hello there", "How are tokens counted?", "Tell me of tolls"):
                for _ in range(3):
                    asked = [{"role": "user", "content": words}]
                    client.chat.completions.create(model=MODEL, messages=asked, max_tokens=20)
        made.last_event()
        rate_all(made.services.database, made.services.clock)
        service_levels.sum_all(made.services.database, made.services.clock)
        yield made


@pytest.fixture(scope="module")
def empty_house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """On its first day: nothing was asked yet."""
    with served(tmp_path_factory.mktemp("empty")) as made:
        yield made


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """Of one file of tests: while it lives, an event loop runs, and asyncio tests would meet it."""
    if not Path(CHROMIUM).exists():
        pytest.skip("no Chromium; Debian's package `chromium` has it")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def said() -> Iterator[list[str]]:
    """Console messages and requests that leave the house: there must be none."""
    heard: list[str] = []
    yield heard
    assert heard == []


Visit = Callable[[House, str], Page]


@pytest.fixture(scope="module")
def cookies() -> dict[tuple[str, str], StorageState]:
    """By house and secret: whoever has signed in once comes in by the session from then on."""
    return {}


@pytest.fixture
def visit(
    chromium: Browser, said: list[str], cookies: dict[tuple[str, str], StorageState]
) -> Iterator[Visit]:
    """A fresh browser context, signed in."""
    opened: list[BrowserContext] = []

    def _visit(house: House, secret: str) -> Page:
        known = cookies.get((house.url, secret))
        context = chromium.new_context(viewport={"width": 1280, "height": 900}, storage_state=known)
        opened.append(context)
        if known is not None:
            return listening(context, house, said)
        page = signed_in(context, house, secret, said)
        cookies[house.url, secret] = context.storage_state()
        return page

    yield _visit
    for context in opened:
        context.close()


@pytest.fixture
def page(house: House, visit: Visit) -> Page:
    """Of the tenant's owner."""
    return visit(house, house.key)


@pytest.fixture
def operator_page(house: House, visit: Visit) -> Page:
    return visit(house, house.services.operator_token)


@pytest.fixture
def empty_page(empty_house: House, visit: Visit) -> Page:
    return visit(empty_house, empty_house.services.operator_token)


def listening(context: BrowserContext, house: House, said: list[str]) -> Page:
    page = context.new_page()
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on(
        "request", lambda r: None if r.url.startswith((house.url, "data:")) else said.append(r.url)
    )
    return page


def signed_in(context: BrowserContext, house: House, secret: str, said: list[str]) -> Page:
    page = listening(context, house, said)
    page.goto(f"{house.url}/dashboard/")
    page.get_by_label("API key, or the operator's token").fill(secret)
    page.get_by_role("button", name="Sign in with the key").click()
    expect(page.get_by_role("heading", name="Overview", level=1)).to_be_visible()
    return page
