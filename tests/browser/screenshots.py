"""Takes the pictures of docs/screenshots: ten pages with data, light, dark and on a phone, and the film
strips of docs/journeys.md.

python -m tests.browser.screenshots [--only pages|journeys]
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from openai import OpenAI
from playwright.sync_api import Browser, ViewportSize, sync_playwright

from tests.browser.conftest import CHROMIUM, FLAGS, busy_deployment, signed_in
from tests.browser.journeys import incident, month_end, new_customer
from tests.browser.journeys.film import WIDE, Film, MovedClock, picture
from tests.gateway.deployment import MODEL, Deployment, running_deployment

DOCS = Path(__file__).parents[2] / "docs"
FOLDER, FILMS = DOCS / "screenshots", DOCS / "screenshots" / "journeys"
TENANT_PAGES = {
    "overview": "/",
    "usage": "/usage",
    "requests": "/requests",
    "request": "/requests?q=first>0",
    "playground": "/playground",
    "costs": "/costs",
    "invoices": "/invoices",
    "limits": "/limits",
}
OPERATOR_PAGES = {"health": "/operator/health", "engines": "/operator/engines"}
PHONE: ViewportSize = {"width": 360, "height": 780}
MODES = {"light": (WIDE, "light"), "dark": (WIDE, "dark"), "phone": (PHONE, "light")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("pages", "journeys"), default="")
    only = parser.parse_args().only
    FILMS.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        if only != "journeys":
            _take_pages(browser)
        if only != "pages":
            _take_journeys(browser)
        browser.close()
    taken = list(FOLDER.rglob("*.webp"))
    size = sum(path.stat().st_size for path in taken)
    sys.stderr.write(f"{len(taken)} pictures, {size / 1e6:.2f} MB\n")
    return 0


def _take_pages(browser: Browser) -> None:
    with tempfile.TemporaryDirectory() as folder, busy_deployment(Path(folder)) as deployment:
        _stream(deployment)
        _take_all(browser, deployment, deployment.key, TENANT_PAGES)
        _take_all(browser, deployment, deployment.services.operator_token, OPERATOR_PAGES)


def _stream(deployment: Deployment) -> None:
    """One streamed answer, whose detail tells prefill from decode."""
    asked: list[Any] = [{"role": "user", "content": "How is a stream metered?"}]
    with OpenAI(base_url=f"{deployment.url}/v1", api_key=deployment.key, max_retries=0) as client:
        chunks = client.chat.completions.create(
            model=MODEL, messages=asked, max_tokens=20, stream=True
        )
        assert list(chunks)
    deployment.last_event()


def _take_journeys(browser: Browser) -> None:
    for path in FILMS.glob("*.webp"):
        path.unlink()
    films = []
    for story in (new_customer, month_end):
        clock, film = MovedClock(), Film(story.__name__.rpartition(".")[2], FILMS)
        with (
            tempfile.TemporaryDirectory() as folder,
            running_deployment(Path(folder), token_delay_s=0.01, clock=clock) as deployment,
        ):
            story.play(browser, deployment, clock, film, [])
        films.append((story, film))
    film = Film("incident", FILMS)
    with (
        tempfile.TemporaryDirectory() as folder,
        incident.two_engines(Path(folder)) as (gateway, token),
    ):
        incident.play(browser, gateway, token, film, [])
    films.append((incident, film))
    strips = [_strip(story.__doc__ or "", film) for story, film in films]
    (DOCS / "journeys.md").write_text(_LEAD + "\n".join(strips))


_LEAD = """# Three journeys on pages alone
`tests/browser/test_journeys.py` plays them in Chromium; `make screenshots` takes the pictures and
writes this page.

"""


def _strip(about: str, film: Film) -> str:
    title, _, rest = about.strip().partition(": ")
    lines = [f"## {title}", rest[:1].upper() + rest[1:].replace("\n", " "), ""]
    for number, caption in enumerate(film.captions, 1):
        lines += [f"{number}. {caption}", ""]
        lines += [f"   ![{caption}](screenshots/journeys/{film.name}-{number:02}.webp)", ""]
    return "\n".join(lines)


def _take_all(browser: Browser, deployment: Deployment, secret: str, pages: dict[str, str]) -> None:
    context = browser.new_context(viewport=WIDE)
    page = signed_in(context, deployment.url, secret, [])
    for name, path in pages.items():
        page.set_viewport_size(WIDE)
        page.goto(f"{deployment.url}/dashboard{path}")
        if name == "request":
            page.locator("tbody a").first.click()
            page.wait_for_url("**/requests/req_*")
        for mode, (size, scheme) in MODES.items():
            page.set_viewport_size(size)
            page.emulate_media(color_scheme=scheme, reduced_motion="reduce")  # type: ignore[arg-type]
            (FOLDER / f"{name}-{mode}.webp").write_bytes(picture(page))
    context.close()


if __name__ == "__main__":
    sys.exit(main())
