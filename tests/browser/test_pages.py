"""A real browser on a real server: every page, wide and narrow, light and dark; the playground streams.

With TOLLHOUSE_TEST_PICTURE set to a path, the picture of the README is taken into it.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from billing.invoice_run import rate_all
from tests.gateway.served import MODEL, House, served

PAGES = (
    *("", "usage", "costs", "requests", "keys", "adapters", "limits", "invoices", "safety"),
    *("playground", "team"),
)
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

pytestmark = pytest.mark.skipif(
    not Path(CHROMIUM).exists(), reason="no Chromium; Debian's package `chromium` has it"
)


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """With some usage to show."""
    with served(tmp_path_factory.mktemp("browser"), token_delay_s=0.01) as made:
        with OpenAI(base_url=f"{made.url}/v1", api_key=made.key, max_retries=0) as client:
            for words in ("Hello there", "How are tokens counted?", "Tell me of tolls"):
                for _ in range(3):
                    asked = [{"role": "user", "content": words}]
                    client.chat.completions.create(model=MODEL, messages=asked, max_tokens=20)
        made.events(9)
        rate_all(made.services.database, made.services.clock)
        yield made


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def said() -> list[str]:
    """Console messages and requests that leave the house: there must be none."""
    return []


@pytest.fixture
def page(house: House, chromium: Browser, said: list[str]) -> Iterator[Page]:
    context = chromium.new_context(viewport={"width": 1280, "height": 900})
    yield _signed_in(context, house, said)
    context.close()
    assert said == []


def _signed_in(context: BrowserContext, house: House, said: list[str]) -> Page:
    page = context.new_page()
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on(
        "request", lambda r: None if r.url.startswith((house.url, "data:")) else said.append(r.url)
    )
    page.goto(f"{house.url}/dashboard/")
    page.get_by_label("API key, or the operator's token").fill(house.key)
    page.get_by_role("button", name="Sign in with the key").click()
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    return page


@pytest.mark.parametrize("name", PAGES)
def test_a_page_fits_from_a_phone_to_4k_in_light_and_dark(
    house: House, page: Page, name: str
) -> None:
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        for width in (320, 1280, 3840):
            page.set_viewport_size({"width": width, "height": 900})
            page.goto(f"{house.url}/dashboard/{name}")
            expect(page.locator("h1")).to_be_visible()
            assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), width


def test_the_tile_the_table_and_the_file_agree(house: House, page: Page) -> None:
    page.goto(f"{house.url}/dashboard/usage")
    tile = page.locator(".tile", has_text="Input tokens").locator("dd").inner_text()
    total = page.locator("tfoot td").nth(1).inner_text()
    assert tile.split("\n")[0] == total
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Download CSV").click()
    lines = Path(waiting.value.path()).read_text().splitlines()
    assert sum(int(line.split(",")[2]) for line in lines[1:]) == int(total.replace("\u202f", ""))


def test_the_playground_streams_an_answer_with_its_figures(house: House, page: Page) -> None:
    page.goto(f"{house.url}/dashboard/playground")
    page.get_by_label("Key").fill(house.key)
    page.get_by_role("button", name="Send").click()
    output = page.locator('[data-figure="output"]')
    expect(output).not_to_have_text("–", timeout=20_000)
    assert int(output.inner_text()) > 0
    assert page.locator("#answer").inner_text().strip()


def test_everything_is_reached_by_the_keyboard_alone(house: House, page: Page) -> None:
    page.goto(f"{house.url}/dashboard/")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    reached = set()
    for _ in range(20):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.textContent.trim()"))
    assert {"Usage", "Costs", "Keys", "Sign out"} <= reached


def test_it_works_and_prints_without_script(
    house: House, chromium: Browser, said: list[str]
) -> None:
    context = chromium.new_context(java_script_enabled=False)
    page = _signed_in(context, house, said)
    page.goto(f"{house.url}/dashboard/usage?by=key_id")
    expect(page.locator("table")).to_be_visible()
    page.emulate_media(media="print")
    expect(page.locator(".side")).to_be_hidden()
    context.close()


def test_the_picture_of_the_readme(house: House, page: Page) -> None:
    page.goto(f"{house.url}/dashboard/costs")
    expect(page.locator("svg.chart").first).to_be_visible()
    target = os.environ.get("TOLLHOUSE_TEST_PICTURE")
    page.screenshot(path=target) if target else page.screenshot()
