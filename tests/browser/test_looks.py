"""Navigation, theme, tiles and charts on a phone and on a wide screen."""

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser.conftest import signed_in
from tests.gateway.deployment import Deployment

pytestmark = pytest.mark.slow


def test_a_phone_shows_the_page_first_and_the_menu_opens_without_script(
    deployment: Deployment, chromium: Browser, console_messages: list[str]
) -> None:
    context = chromium.new_context(
        java_script_enabled=False, viewport={"width": 360, "height": 780}
    )
    page = signed_in(context, deployment.url, deployment.key, console_messages)
    heading = page.get_by_role("heading", name="Overview").bounding_box()
    assert heading is not None and heading["y"] < 120
    expect(page.get_by_role("link", name="Invoices")).to_be_hidden()
    page.get_by_role("button", name="Menu").click()
    page.get_by_role("link", name="Invoices").click()
    expect(page.get_by_role("heading", name="Invoices", level=1)).to_be_visible()
    expect(page.get_by_role("link", name="Team")).to_be_hidden()
    context.close()


def test_the_navigation_has_groups(deployment: Deployment, page: Page) -> None:
    page.goto(f"{deployment.url}/dashboard/")
    for group, section in (
        ("Use", "Requests"),
        ("Money", "Costs"),
        ("Safety", "Safety"),
        ("Admin", "Keys"),
    ):
        listed = page.get_by_role("list", name=group)
        expect(listed.get_by_role("link", name=section, exact=True)).to_be_visible()


@pytest.mark.parametrize("script", [True, False])
def test_a_theme_is_chosen_and_stays(
    deployment: Deployment, chromium: Browser, console_messages: list[str], script: bool
) -> None:
    context = chromium.new_context(java_script_enabled=script, color_scheme="light")
    page = signed_in(context, deployment.url, deployment.key, console_messages)
    page.goto(f"{deployment.url}/dashboard/usage?by=key_id")
    light = _paper(page)
    page.get_by_role("button", name="Dark").click()
    assert page.url.endswith("/dashboard/usage?by=key_id")
    dark = _paper(page)
    assert sum(dark) < 150 < 600 < sum(light)
    page.goto(f"{deployment.url}/dashboard/keys")
    assert _paper(page) == dark
    page.emulate_media(color_scheme="dark")
    page.get_by_role("button", name="Light").click()
    assert _paper(page) == light
    context.close()


def _paper(page: Page) -> list[int]:
    colour = page.locator("body").evaluate("it => getComputedStyle(it).backgroundColor")
    return [int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]


@pytest.mark.parametrize("path", ["", "usage", "costs", "limits"])
def test_tiles_fill_even_rows(deployment: Deployment, page: Page, path: str) -> None:
    page.goto(f"{deployment.url}/dashboard/{path}")
    for width in (360, 800, 1280):
        page.set_viewport_size({"width": width, "height": 900})
        rows: dict[float, list[dict[str, float]]] = {}
        for each in page.locator("main .tiles > .tile").all():
            box = each.bounding_box()
            assert box is not None
            rows.setdefault(round(box["y"]), []).append(dict(box))
        counts = [len(row) for row in rows.values()]
        assert max(counts) - min(counts) <= 1, f"{width}: {counts}"
        ends = [round(row[-1]["x"] + row[-1]["width"]) for row in rows.values()]
        assert max(ends) - min(ends) <= 2, f"{width}: {ends}"
        assert max(counts) <= 5, f"{width}: {counts} are too narrow for their labels"
        sizes = page.locator("main .tile dd").evaluate_all(
            "all => [...new Set(all.map(it => getComputedStyle(it).fontSize))]"
        )
        assert len(sizes) == 1, f"{path}: {sizes}"


_BROKEN = """all => all.filter((it) => {
  const value = document.createRange();
  value.selectNodeContents(it.querySelector("a") ?? it);
  if (!it.querySelector("a")) value.setEnd(it.firstChild, it.firstChild.length);
  return value.getClientRects().length > 1;
}).map((it) => it.textContent)"""


def test_a_figure_stays_on_one_line(deployment: Deployment, page: Page) -> None:
    page.goto(f"{deployment.url}/dashboard/requests")
    page.locator("tbody a").first.click()
    page.wait_for_url("**/requests/req_*")
    for path in ("", "/", "/usage", "/costs", "/limits"):
        if path:
            page.goto(f"{deployment.url}/dashboard{path}")
        for width in (360, 1280):
            page.set_viewport_size({"width": width, "height": 900})
            assert page.locator(".tile dd").evaluate_all(_BROKEN) == [], (path, width)


def test_the_title_of_a_wide_table_stays_in_view(deployment: Deployment, page: Page) -> None:
    page.set_viewport_size({"width": 360, "height": 780})
    page.goto(f"{deployment.url}/dashboard/requests")
    region, title = page.locator(".scroll").first, page.locator("caption > span").first
    assert region.evaluate("it => it.scrollWidth - it.clientWidth") > 100, "it scrolls"
    for left in (0, 100):
        region.evaluate(f"it => {{ it.scrollLeft = {left}; }}")
        box = title.bounding_box()
        assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= 360


_LABELS = """() => [...document.querySelectorAll("svg:is(.chart, .heat)")].flatMap((chart) => {
  const shown = [...chart.querySelectorAll("text")]
    .map((text) => ({ text: text.textContent, box: text.getBoundingClientRect() }))
    .filter(({ box }) => box.width > 0);
  const top = chart.getBoundingClientRect().top - 3;
  const outside = shown.filter(
    ({ box }) => box.left < 0 || box.right > innerWidth || box.top < top);
  const faults = outside.map(({ text }) => `clipped: ${text}`);
  shown.forEach((one, index) => shown.slice(index + 1).forEach((other) => {
    const [a, b] = [one.box, other.box];
    const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    if (wide > 1 && high > 3) faults.push(`${one.text} covers ${other.text}`);
  }));
  return faults;
})"""


def test_no_label_of_a_chart_is_clipped_or_covered(
    deployment: Deployment, page: Page, operator_page: Page
) -> None:
    charts = ("", "usage", "usage?from=2020-01-01&to=2020-01-02", "costs", "safety")
    shown = [(page, each) for each in charts] + [(operator_page, "operator/cohorts")]
    for one, path in shown:
        one.goto(f"{deployment.url}/dashboard/{path}")
        for width in (320, 360, 1280):
            one.set_viewport_size({"width": width, "height": 800})
            assert one.evaluate(_LABELS) == [], (path, width)
    expect(operator_page.locator("svg.heat")).to_be_visible()


@pytest.mark.parametrize("size", [(1280, 900), (390, 844)])
def test_a_long_table_scrolls_under_its_head(
    deployment: Deployment, page: Page, size: tuple[int, int]
) -> None:
    page.set_viewport_size({"width": size[0], "height": size[1]})
    page.goto(f"{deployment.url}/dashboard/requests?q=since:30d")
    region = page.locator(".scroll").first
    head = region.locator("thead th").first
    region.evaluate("it => { it.scrollTop = it.scrollHeight; it.scrollIntoView(); }")
    assert region.evaluate("it => it.scrollTop") > 500
    expect(head).to_be_in_viewport()
    expect(region.locator("tbody tr").last).to_be_in_viewport()
    assert region.evaluate("it => getComputedStyle(it).overflowY") == "auto"
    page.emulate_media(media="print")
    assert region.evaluate("it => getComputedStyle(it).maxHeight") == "none"


def test_the_menu_and_the_head_of_a_table_stay_in_view_on_a_phone(
    deployment: Deployment, page: Page
) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(f"{deployment.url}/dashboard/requests?q=since:30d")
    region = page.locator(".scroll").first
    region.evaluate("it => { it.scrollIntoView(); it.scrollTop = it.scrollHeight; }")
    bar, head = page.locator(".bar").bounding_box(), region.locator("thead").bounding_box()
    assert bar is not None and bar["y"] == 0
    cell = region.locator("thead th").first.bounding_box()
    assert cell is not None and head is not None
    assert bar["height"] <= cell["y"] < 200, "right below the menu, not behind it"
    page.get_by_role("button", name="Menu").click()
    expect(page.get_by_role("link", name="Invoices", exact=True)).to_be_in_viewport()


def test_the_parameters_of_the_playground_are_one_row(deployment: Deployment, page: Page) -> None:
    page.goto(f"{deployment.url}/dashboard/playground")
    names = ("model", "other", "max_tokens", "temperature", "top_p", "seed")
    boxes = [page.locator(f'[name="{name}"]').bounding_box() for name in names]
    assert len({round(box["y"]) for box in boxes if box is not None}) == 1


def test_a_short_name_stays_on_one_line(deployment: Deployment, page: Page) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(f"{deployment.url}/dashboard/costs")
    cell = page.locator("tbody td", has_text="qwen-2.5-32b").first
    box = cell.bounding_box()
    assert box is not None and box["height"] < 45


def test_tables_of_many_columns_fit_a_laptop(deployment: Deployment, operator_page: Page) -> None:
    least = {
        "traffic": 1024, "margin": 1024, "margin?by=tenant-model": 1280,
        "margin?by=tenant-adapter": 1280, "prices": 1280,  # fourteen columns
    }  # fmt: skip
    for path, narrowest in least.items():
        operator_page.goto(f"{deployment.url}/dashboard/operator/{path}")
        for width in (each for each in (1024, 1152, 1280, 1366, 1440) if each >= narrowest):
            operator_page.set_viewport_size({"width": width, "height": 900})
            found = operator_page.locator(".scroll").evaluate_all(
                "all => all.map(it => [it.ariaLabel, it.scrollWidth - it.clientWidth])"
            )
            assert found and [each for each in found if each[1] > 0] == [], (path, width)
