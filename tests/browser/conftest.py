"""Deployments with and without data, and a browser."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
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

from billing.rating.rating_worker import rate_all
from billing.usage import service_rollups
from tests.browser.seed import fill
from tests.gateway.deployment import MODEL, Deployment, running_deployment

# The shell without windows of its own takes a third of the processor time for a page.
CHROMIUM = shutil.which("chromium-headless-shell") or shutil.which("chromium") or ""
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]


@contextmanager
def busy_deployment(folder: Path) -> Iterator[Deployment]:
    """Six weeks of data, and some requests that were really served."""
    with running_deployment(folder, token_delay_s=0.01) as made:
        fill(made.services, made.tenant_id)
        with OpenAI(base_url=f"{made.url}/v1", api_key=made.key, max_retries=0) as client:
            for words in ("Hello there", "How are tokens counted?", "Tell me of tolls"):
                for _ in range(3):
                    asked = [{"role": "user", "content": words}]
                    client.chat.completions.create(model=MODEL, messages=asked, max_tokens=20)
        made.last_event()
        rate_all(made.services.database, made.services.clock)
        service_rollups.sum_all(made.services.database, made.services.clock)
        yield made


@pytest.fixture(scope="session")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a busy deployment that has stopped, and its tenant's key."""
    folder = tmp_path_factory.mktemp("filled")
    with busy_deployment(folder) as made:
        return folder, made.key


@pytest.fixture(scope="module")
def deployment(
    filled: tuple[Path, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    """On a copy of those data: what one file of tests changes no other one meets."""
    written, key = filled
    folder = tmp_path_factory.mktemp("browser")
    shutil.copytree(written, folder, dirs_exist_ok=True)
    with running_deployment(folder, token_delay_s=0.01) as made:
        yield replace(made, key=key)


@pytest.fixture(scope="module")
def empty_deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """On its first day: nothing was asked yet."""
    with running_deployment(tmp_path_factory.mktemp("empty")) as made:
        yield made


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """Of one file: while it lives, an event loop runs, and asyncio tests would meet it."""
    if not CHROMIUM:
        pytest.skip("no Chromium; Debian's package `chromium-headless-shell` has it")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def console_messages() -> Iterator[list[str]]:
    """Console messages and requests to other hosts: there must be none."""
    heard: list[str] = []
    yield heard
    assert heard == []


Visit = Callable[[Deployment, str], Page]


@pytest.fixture(scope="module")
def cookies() -> dict[tuple[str, str], StorageState]:
    """Sessions by deployment and secret, so that each signs in once."""
    return {}


@pytest.fixture
def open_page(
    chromium: Browser, console_messages: list[str], cookies: dict[tuple[str, str], StorageState]
) -> Iterator[Visit]:
    """A fresh browser context, signed in."""
    opened: list[BrowserContext] = []

    def _visit(deployment: Deployment, secret: str) -> Page:
        known = cookies.get((deployment.url, secret))
        context = chromium.new_context(viewport={"width": 1280, "height": 900}, storage_state=known)
        opened.append(context)
        if known is not None:
            return listening(context, deployment.url, console_messages)
        page = signed_in(context, deployment.url, secret, console_messages)
        cookies[deployment.url, secret] = context.storage_state()
        return page

    yield _visit
    for context in opened:
        context.close()


@pytest.fixture
def page(deployment: Deployment, open_page: Visit) -> Page:
    """Of the tenant's owner."""
    return open_page(deployment, deployment.key)


@pytest.fixture
def operator_page(deployment: Deployment, open_page: Visit) -> Page:
    return open_page(deployment, deployment.services.operator_token)


@pytest.fixture
def empty_page(empty_deployment: Deployment, open_page: Visit) -> Page:
    return open_page(empty_deployment, empty_deployment.services.operator_token)


def listening(context: BrowserContext, url: str, console_messages: list[str]) -> Page:
    page = context.new_page()
    page.on("console", lambda message: console_messages.append(message.text))
    page.on("pageerror", lambda error: console_messages.append(str(error)))
    page.on(
        "request",
        lambda r: None if r.url.startswith((url, "data:")) else console_messages.append(r.url),
    )
    return page


def signed_in(context: BrowserContext, url: str, secret: str, console_messages: list[str]) -> Page:
    page = listening(context, url, console_messages)
    page.goto(f"{url}/dashboard/")
    page.get_by_label("API key, or the operator's token").fill(secret)
    page.get_by_role("button", name="Sign in with the key").click()
    expect(page.get_by_role("heading", name="Overview", level=1)).to_be_visible()
    return page
