"""The query bar of Requests and Usage, a request's detail, and the keyboard."""

import csv
import re
from datetime import timedelta
from pathlib import Path

import pytest
from openai import OpenAI
from playwright.sync_api import Download, Page, expect

from tests.browser import navigation
from tests.browser.page_checks import check_page
from tests.gateway.deployment import MODEL, Deployment

pytestmark = pytest.mark.slow


def _rows(download: Download) -> list[dict[str, str]]:
    with Path(download.path()).open(newline="") as file:
        return list(csv.DictReader(file))


def test_page_file_and_url_hold_the_same_query(deployment: Deployment, page: Page) -> None:
    page.goto(f"{deployment.url}/dashboard/requests")
    page.get_by_role("searchbox").fill("model:llama-3.1-8b key:checkout -status:error since:2d")
    page.get_by_role("button", name="Show").click()
    assert "q=model" in page.url
    rows = page.locator("tbody tr")
    models = {row.locator("td").nth(2).inner_text() for row in rows.all()}
    assert models == {"llama-3.1-8b"}
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Download CSV").click()
    listed = _rows(waiting.value)
    assert len(listed) == rows.count() and {each["Status"] for each in listed} == {"200"}
    navigation.reload(page)
    expect(page.get_by_role("searchbox")).to_have_value(
        "model:llama-3.1-8b key:checkout -status:error since:2d"
    )


def test_a_filter_shows_its_count_and_is_set_and_unset(deployment: Deployment, page: Page) -> None:
    page.goto(f"{deployment.url}/dashboard/requests?q=since:30d")
    page.get_by_text("Filters", exact=True).click()
    failed = page.get_by_role("link", name=re.compile(r"^Server errors \d+$"))
    count = int(failed.inner_text().split()[-1])
    failed.click()
    expect(page.get_by_role("searchbox")).to_have_value("status:5xx since:30d")
    assert count > 0
    expect(page.locator("tbody tr")).to_have_count(min(count, 50))
    page.get_by_text("Filters", exact=True).click()
    page.get_by_role("link", name=re.compile(r"^Server errors")).click()
    expect(page.get_by_role("searchbox")).to_have_value("since:30d")


def test_a_wrong_query_stays_with_its_reason(
    deployment: Deployment, page: Page, console_messages: list[str]
) -> None:
    for path in ("requests", "usage"):
        page.goto(f"{deployment.url}/dashboard/{path}?q=modl:tiny+since:7d")
        expect(page.get_by_role("alert")).to_contain_text("There is no field 'modl'")
        expect(page.get_by_role("searchbox")).to_have_value("modl:tiny since:7d")
    assert all("400 (Bad Request)" in each for each in console_messages)
    console_messages.clear()


def test_usage_is_filtered_sorted_grouped_and_compared(deployment: Deployment, page: Page) -> None:
    page.goto(f"{deployment.url}/dashboard/usage?q=model:tiny+since:14d&by=key_id")
    expect(page.get_by_role("combobox", name="Group by")).to_have_value("key_id")
    page.locator("thead").first.get_by_role("link", name="Requests").click()
    cells = page.locator("table").first.locator("tbody td:nth-child(2)")
    counts = [int(each) for each in cells.all_inner_texts()]
    assert counts == sorted(counts, reverse=True) and len(counts) > 2
    page.locator("thead").first.get_by_role("link", name="Requests").click()
    first = int(page.locator("tbody td").nth(1).inner_text())
    assert first == min(counts)
    page.get_by_role("link", name="Compare with the period before").click()
    tile = page.locator(".tile", has_text="Requests").inner_text()
    found = re.search(r"([+-][\d.]+) % against (\d+) before", tile)
    assert found is not None
    page.goto(
        f"{deployment.url}/dashboard/usage?q=model:tiny+since:28d&by=key_id&compare="
    )  # both periods
    both = int(page.locator("tfoot td").first.inner_text().replace("\u202f", ""))
    assert both == sum(counts) + int(found[2])


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("path", ["usage", "requests", "costs"])
def test_a_period_of_ones_own_is_chosen(
    deployment: Deployment, page: Page, path: str, width: int
) -> None:
    page.set_viewport_size({"width": width, "height": 844})
    page.goto(f"{deployment.url}/dashboard/{path}")
    page.locator("summary", has_text="Custom").click()
    today = deployment.services.clock.now().date()
    first, last = today - timedelta(days=9), today - timedelta(days=4)
    page.get_by_role("textbox", name="From").fill(str(first))
    page.get_by_role("textbox", name="To (inclusive)").fill(str(last))
    wide = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
    assert wide <= 0, f"{wide} px too wide"
    page.get_by_role("button", name="Show period").click()
    words = f"{first:%d %b %Y} to {last:%d %b %Y}"
    expect(page.locator("summary", has_text=words)).to_be_visible()
    if path != "costs":
        query = page.get_by_role("searchbox", name=re.compile("Query"))
        expect(query).to_have_value(f"since:{first} until:{last}")
    page.locator("summary", has_text=words).click()
    expect(page.get_by_role("textbox", name="To (inclusive)")).to_have_value(str(last))


def test_usage_of_single_requests_agrees_with_the_log(deployment: Deployment, page: Page) -> None:
    page.goto(f"{deployment.url}/dashboard/usage?q=output>30000+status:200+since:2d&by=end_user")
    total = int(page.locator("tfoot td").first.inner_text())
    with page.expect_download() as waiting:
        page.goto(f"{deployment.url}/dashboard/requests?q=output>30000+status:200+since:2d")
        page.get_by_role("button", name="Download CSV").click()
    assert total == len(_rows(waiting.value)) > 0


def test_a_request_has_its_timeline_and_its_command(deployment: Deployment, page: Page) -> None:
    page.goto(f"{deployment.url}/dashboard/requests")
    page.locator("tbody a").first.click()
    timeline = page.locator("svg.timeline").get_attribute("aria-label") or ""
    assert re.search(r"limits( and guard)? \d+ ms, queue \d+ ms, processing", timeline)
    page.goto(f"{deployment.url}/dashboard/requests?q=status:200+first>0+since:7d")
    page.locator("tbody a").first.click()
    parts = page.locator("svg.timeline").get_attribute("aria-label") or ""
    found = re.search(r"queue (\d+) ms, prefill (\d+) ms, decode (\d+) ms$", parts)
    assert found is not None, parts
    duration = page.locator(".tile", has_text="Duration").locator("dd").inner_text()
    assert sum(int(ms) for ms in found.groups()) == int(duration.split()[0])
    expect(page.get_by_text("Prefill: from its first step to the first token")).to_be_visible()
    page.goto(f"{deployment.url}/dashboard/requests")
    page.locator("tbody a").first.click()
    command = page.locator("pre code").inner_text()
    assert command.startswith(f"curl {deployment.url}/v1/chat/completions")
    assert f'"model": "{MODEL}"' in command
    expect(page.get_by_role("row", name=re.compile("^Key "))).to_contain_text("key_")
    check_page(page, page.url)


def test_the_list_follows_live(deployment: Deployment, page: Page) -> None:
    page.goto(f"{deployment.url}/dashboard/requests")
    newest = page.locator("tbody a").first.get_attribute("href")
    page.get_by_role("button", name="Live").click()
    with OpenAI(base_url=f"{deployment.url}/v1", api_key=deployment.key, max_retries=0) as client:
        asked = [{"role": "user", "content": "Anything new?"}]
        client.chat.completions.create(model=MODEL, messages=asked, max_tokens=3)  # type: ignore[arg-type]
    expect(page.locator("tbody a").first).not_to_have_attribute("href", str(newest), timeout=30_000)


def test_every_column_of_the_log_sorts_over_pages(deployment: Deployment, page: Page) -> None:
    page.goto(f"{deployment.url}/dashboard/requests?q=since:30d")
    heads = page.locator("thead th a")
    assert heads.count() == page.locator("thead th").count() == 11
    heads.filter(has_text="Output").click()
    expect(page.locator('th[aria-sort="descending"]')).to_have_text("Output")
    cells = page.locator("tbody td:nth-child(8)")
    first = [int(each.replace("\u202f", "")) for each in cells.all_inner_texts()]
    page.get_by_role("link", name="Next").click()
    expect(page.get_by_role("link", name="Previous")).to_be_visible()
    second = [int(each.replace("\u202f", "")) for each in cells.all_inner_texts()]
    assert first + second == sorted(first + second, reverse=True) and len(first) == 50
    page.get_by_role("link", name="Previous").click()
    expect(cells.first).to_have_text(f"{first[0]:,}".replace(",", "\u202f"))
    expect(cells).to_have_count(50)
    assert [int(each.replace("\u202f", "")) for each in cells.all_inner_texts()] == first
    check_page(page, page.url)


def test_a_request_shows_its_blocks_and_opens_in_the_playground(
    deployment: Deployment, page: Page
) -> None:
    page.goto(
        f"{deployment.url}/dashboard/requests?q=since:1d+engine:{deployment.engine.engine_id}"
    )
    page.locator("tbody a").first.click()
    said = page.locator("svg.blocks").get_attribute("aria-label") or ""
    found = re.fullmatch(r"(\d+) of (\d+) blocks of (\d+) tokens were in the prefix cache", said)
    assert found is not None and int(found[3]) == deployment.engine.info().block_size  # type: ignore[union-attr]
    assert page.locator("svg.blocks rect").count() == int(found[2]) > 0
    check_page(page, page.url)
    page.get_by_role("link", name="Replay in playground").click()
    expect(page.get_by_label("Model or adapter")).to_have_value(MODEL)
    expect(page.locator("p.lead")).to_contain_text("its text is not stored")


def test_the_palette_and_the_help_open_by_keys(deployment: Deployment, page: Page) -> None:
    page.goto(f"{deployment.url}/dashboard/")
    page.keyboard.press("Control+k")
    page.get_by_role("searchbox", name="Go to").fill("invo")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Invoices", level=1)).to_be_visible()
    page.keyboard.press("Control+k")
    page.get_by_role("searchbox", name="Go to").fill("status:5xx")
    page.keyboard.press("Enter")
    expect(page.get_by_role("searchbox", name=re.compile("Query"))).to_have_value("status:5xx")
    page.keyboard.press("Escape")
    page.locator("h1").click()
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Shortcuts")).to_be_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("/")
    expect(page.get_by_role("searchbox", name=re.compile("Query"))).to_be_focused()
