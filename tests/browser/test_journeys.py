"""Three journeys on pages alone, in a real browser. `make screenshots` keeps their pictures."""

from pathlib import Path
from types import ModuleType

import pytest
from playwright.sync_api import Browser

from tests.browser.journeys import incident, month_end, new_customer
from tests.browser.journeys.film import Film, MovedClock
from tests.gateway.deployment import running_deployment

PROTECTS = ("dashboards", "gateway/admin/dashboard.py")
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("story", [new_customer, month_end], ids=["new_customer", "month_end"])
def test_a_story_of_money_is_played_to_its_end(
    story: ModuleType, chromium: Browser, console_messages: list[str], tmp_path: Path
) -> None:
    clock = MovedClock()
    with running_deployment(tmp_path, clock=clock) as deployment:
        story.play(chromium, deployment, clock, Film(story.__name__), console_messages)


@pytest.mark.proof
def test_an_incident_until_both_engines_serve_and_the_books_agree(
    chromium: Browser, console_messages: list[str], tmp_path: Path
) -> None:
    with incident.two_engines(tmp_path) as (gateway, token):
        incident.play(chromium, gateway, token, Film("incident"), console_messages)
