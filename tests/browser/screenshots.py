"""Takes the pictures of docs/screenshots: ten pages with data, light, dark and on a phone.

python -m tests.browser.screenshots
"""

import base64
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Browser, Page, ViewportSize, sync_playwright

from tests.browser.conftest import CHROMIUM, FLAGS, busy_deployment, signed_in
from tests.gateway.deployment import Deployment

FOLDER = Path(__file__).parents[2] / "docs" / "screenshots"
TENANT_PAGES = {
    "overview": "/",
    "usage": "/usage",
    "requests": "/requests",
    "request": "/requests",
    "playground": "/playground",
    "costs": "/costs",
    "invoices": "/invoices",
    "limits": "/limits",
}
OPERATOR_PAGES = {"health": "/operator/health", "engines": "/operator/engines"}
WIDE: ViewportSize = {"width": 1280, "height": 860}
PHONE: ViewportSize = {"width": 360, "height": 780}
MODES = {"light": (WIDE, "light"), "dark": (WIDE, "dark"), "phone": (PHONE, "light")}


def main() -> int:
    FOLDER.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        busy_deployment(Path(folder)) as deployment,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        _take_all(browser, deployment, deployment.key, TENANT_PAGES)
        _take_all(browser, deployment, deployment.services.operator_token, OPERATOR_PAGES)
        browser.close()
    size = sum(path.stat().st_size for path in FOLDER.glob("*.webp"))
    sys.stderr.write(f"{len(list(FOLDER.glob('*.webp')))} pictures, {size / 1e6:.2f} MB\n")
    return 0


def _take_all(browser: Browser, deployment: Deployment, secret: str, pages: dict[str, str]) -> None:
    context = browser.new_context(viewport=WIDE)
    page = signed_in(context, deployment, secret, [])
    for name, path in pages.items():
        page.set_viewport_size(WIDE)
        page.goto(f"{deployment.url}/dashboard{path}")
        if name == "request":
            page.locator("tbody a").first.click()
            page.wait_for_url("**/requests/req_*")
        for mode, (size, scheme) in MODES.items():
            page.set_viewport_size(size)
            page.emulate_media(color_scheme=scheme, reduced_motion="reduce")  # type: ignore[arg-type]
            _take(page, FOLDER / f"{name}-{mode}.webp")
    context.close()


def _take(page: Page, target: Path) -> None:
    """WebP, a third of PNG's size, which only the browser's own protocol writes."""
    protocol = page.context.new_cdp_session(page)
    taken = protocol.send("Page.captureScreenshot", {"format": "webp", "quality": 80})
    target.write_bytes(base64.b64decode(taken["data"]))
    protocol.detach()


if __name__ == "__main__":
    sys.exit(main())
