"""The engine map in Chromium: it follows the engine without a reload, and leaves what has the focus."""

import pytest
from playwright.sync_api import Page, expect

from billing.usage.tables import DailyEngineTime
from engine.protocol import AdapterState, EngineStats
from tests.browser.page_checks import check_page
from tests.gateway.deployment import Deployment

pytestmark = pytest.mark.slow
DIGEST = "ab" * 32


def load(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, running: int, waiting: int
) -> None:
    states = {DIGEST: AdapterState(DIGEST, "resident", 8, 1)}
    stats = EngineStats(running, waiting, 300, 1024, 12_345)
    monkeypatch.setattr(deployment.engine, "stats", lambda: stats)
    monkeypatch.setattr(deployment.engine, "adapters", lambda: states)


def test_the_map_follows_the_engine_and_leaves_what_has_the_focus(
    deployment: Deployment, operator_page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(deployment, monkeypatch, 3, 1)
    operator_page.goto(f"{deployment.url}/dashboard/operator/engines")
    card = operator_page.locator(".engine")
    expect(card).to_contain_text("3 running, 1 waiting")
    load(deployment, monkeypatch, 7, 4)
    expect(card).to_contain_text("7 running, 4 waiting", timeout=60_000)
    card.get_by_role("button", name="Drain fake").focus()
    load(deployment, monkeypatch, 9, 0)
    operator_page.wait_for_timeout(7_000)
    expect(card).to_contain_text("7 running, 4 waiting")
    operator_page.evaluate("document.activeElement.blur()")
    expect(card).to_contain_text("9 running, 0 waiting", timeout=60_000)


def test_a_full_map_fits_and_axe_finds_nothing(
    deployment: Deployment, operator_page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(deployment, monkeypatch, 60, 30)
    today = deployment.services.clock.now().replace(hour=0, minute=0, second=0, microsecond=0)
    with deployment.services.database.transaction() as session:
        for number in range(7):
            session.add(
                DailyEngineTime(
                    at=today,
                    tenant_id=f"tenant-with-a-name-{number}",
                    model="tiny",
                    adapter="",
                    engine_id="fake",
                    currency="USD",
                    answers=1,
                    busy_us=10 + number,
                )
            )
    check_page(operator_page, f"{deployment.url}/dashboard/operator/engines")
    expect(operator_page.locator(".shares rect")).to_have_count(6)
