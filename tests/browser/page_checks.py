"""What every page is looked at for: it fits from a phone to 4k and axe finds nothing serious, in light
and dark."""

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from dashboards.navigation import SECTIONS

TENANT_PATHS = [section.path for section in SECTIONS if not section.operator]
TENANT_PATHS += ["/safety/policy", "/payment-methods"]
OPERATOR_PATHS = [section.path for section in SECTIONS if section.operator]
OPERATOR_PATHS += ["/operator/money-acts/new", "/operator/engines/upstreams"]
WIDTHS = (320, 3840, 1280)  # axe looks at the last
# The rest would be told at length. Between the schemes only colours differ, and so can only these rules.
_RULES = {
    "light": '{resultTypes: ["violations"]}',
    "dark": '{resultTypes: ["violations"], runOnly: ["cat.color"]}',
}


def check_page(page: Page, url: str, *, schemes: tuple[str, ...] = ("light", "dark")) -> None:
    page.goto(url)
    expect(page.locator("h1")).to_be_visible()
    page.evaluate(Axe().axe_script)
    for width in WIDTHS:  # of either scheme: only their colours differ
        page.set_viewport_size({"width": width, "height": 900})
        wide = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
        assert wide <= 0, f"{width}: {wide} px too wide"
    for scheme in schemes:
        # The stylesheet alone answers to both, so nothing need be loaded again; without motion, for
        # a colour on its way to the other scheme is neither's.
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")  # type: ignore[arg-type]
        found = page.evaluate(f"axe.run(document, {_RULES[scheme]})")["violations"]
        serious = [
            f"{each['id']}: {node['html'][:200]} {node['failureSummary'][:300]}"
            for each in found
            if each["impact"] in ("serious", "critical")
            for node in each["nodes"][:3]
        ]
        assert not serious, f"{scheme}: " + "\n".join(serious)
