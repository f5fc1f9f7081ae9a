"""An incident: an engine hangs and dies, is drained, comes back, and the books agree."""

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from playwright.sync_api import Browser, Page, expect

from tests.browser import navigation
from tests.browser.conftest import signed_in
from tests.browser.journeys.film import WIDE, Film
from tests.journeys.deployments import Command, RunningGateway, serve


@contextmanager
def two_engines(folder: Path) -> Iterator[tuple[RunningGateway, str]]:
    """A gateway with two engine processes, and the operator's token."""
    gateway = serve(Command(folder, {"TOLLHOUSE_ENGINES": "2"}))
    try:
        yield gateway, (folder / "admin-token").read_text().strip()
    finally:
        gateway.stop()


def play(
    browser: Browser, gateway: RunningGateway, token: str, film: Film, messages: list[str]
) -> None:
    page = signed_in(browser.new_context(viewport=WIDE), gateway.url, token, messages)
    with _traffic(gateway) as statuses:
        victim = _hang_one_engine(page, gateway, film)
        _drain(page, film)
        os.kill(victim, signal.SIGKILL)
        _resume(page, film)
        served = statuses[200]
        _wait_until(lambda: statuses[200] >= served + 5)
    _read_the_traffic(page, statuses, film)
    _audit(page, film)


@contextmanager
def _traffic(gateway: RunningGateway) -> Iterator[Counter[int]]:
    """Requests of three clients, one after another, counted by status; 0 is a broken connection, and 599
    a 503 that the client may not try again."""
    statuses: Counter[int] = Counter()
    ended = threading.Event()

    def _client(number: int) -> None:
        with httpx.Client(base_url=gateway.url, headers=gateway.headers, timeout=60) as client:
            while not ended.is_set():
                body = {
                    "model": "tollhouse-demo",
                    "max_tokens": 40,
                    "messages": [{"role": "user", "content": f"What is a tenant? {number}"}],
                }
                try:
                    answer = client.post("/v1/chat/completions", json=body)
                    final = answer.headers.get("x-should-retry") == "false"
                    statuses[599 if final else answer.status_code] += 1
                except httpx.TransportError:
                    statuses[0] += 1

    clients = [threading.Thread(target=_client, args=(number,)) for number in range(3)]
    for each in clients:
        each.start()
    try:
        yield statuses
    finally:
        ended.set()
        for each in clients:
            each.join()


def _hang_one_engine(page: Page, gateway: RunningGateway, film: Film) -> int:
    page.get_by_role("link", name="Engines").click()
    expect(page.locator("main")).to_contain_text("2 of 2")
    film.take(page, "Two engines are healthy.")
    victim = gateway.children()[-1]
    os.kill(victim, signal.SIGSTOP)
    _reload_until(page, "silent")
    film.take(page, "One hangs: no heartbeat arrives, and new requests go to the other.")
    return victim


def _reload_until(page: Page, text: str) -> None:
    def _seen() -> bool:
        navigation.visit(page, address)
        return text in page.locator("main").inner_text()

    page.wait_for_load_state()
    address = page.url
    _wait_until(_seen)


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "it did not happen within two minutes"
        time.sleep(0.5)


def _drain(page: Page, film: Film) -> None:
    page.locator(".engine.silent").get_by_role("button", name="Drain").click()
    expect(page.locator(".notice")).to_contain_text("gets no new requests")
    film.take(page, "The operator drains it, so that nothing is sent to it when it comes back.")


def _resume(page: Page, film: Film) -> None:
    _reload_until(page, "draining")
    film.take(page, "Killed, it is started again, and still gets no requests.")
    page.locator(".engine.draining").get_by_role("button", name="Resume").click()
    expect(page.locator(".notice")).to_be_visible()  # the form's redirect has ended
    _reload_until(page, "2 of 2")
    film.take(page, "Resumed, both serve again.")


def _read_the_traffic(page: Page, statuses: Counter[int], film: Film) -> None:
    # What an engine had begun when it hung is not tried again: at most one request of each client.
    assert set(statuses) <= {200, 599} and statuses[599] <= 3, statuses
    page.get_by_role("link", name="Traffic").click()
    film.take(page, "Requests that waited for the hung engine were answered by the other.")
    page.get_by_role("link", name="Health").click()
    film.take(page, "Health lists each component, and what to do where one does not work.")


def _audit(page: Page, film: Film) -> None:
    page.get_by_role("link", name="Reconciliation", exact=True).click()
    page.get_by_role("button", name="Audit now").click()
    runs = page.get_by_role("region", name="Latest runs").get_by_role("row")
    expect(runs.nth(1)).to_contain_text("clean", timeout=60_000)
    film.take(page, "The audit finds every token of both engines in the books.")
