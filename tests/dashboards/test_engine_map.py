"""The engine map: each engine's sequences, adapters and tenants, by hand and on the page."""

import re
from contextlib import closing
from datetime import timedelta

import httpx
import pytest

from billing.usage.tables import DailyEngineTime
from core.tenants.models import Adapter
from dashboards.backend import EngineView
from dashboards.engine_map import _shares_of, cards, sequences
from engine.protocol import AdapterState, EngineStats
from tests.dashboards.browser_client import browser, with_role
from tests.gateway.deployment import Deployment

PAGE = "/dashboard/operator/engines"
DIGESTS = [f"{number:064x}" for number in range(11)]


@pytest.mark.parametrize(
    ("running", "waiting", "filled", "outlined", "rest"),
    [
        (0, 0, 0, 0, ""),
        (3, 2, 3, 2, ""),
        (40, 8, 40, 8, ""),
        (47, 30, 47, 1, "29"),
        (60, 1, 48, 0, "13"),
    ],
)
def test_each_sequence_is_a_square_and_the_rest_is_counted(
    running: int, waiting: int, filled: int, outlined: int, rest: str
) -> None:
    drawn = sequences(running, waiting)
    assert (drawn.count('class="run"'), drawn.count('class="wait"')) == (filled, outlined)
    assert f"{running} running, {waiting} waiting" in drawn
    assert re.findall(r"and (\d+) more", drawn) == ([rest] if rest else [])


@pytest.mark.parametrize(("tenants", "said"), [(5, None), (6, "1 other"), (7, "2 others")])
def test_the_tenants_that_are_not_named_are_counted(tenants: int, said: str | None) -> None:
    shares = _shares_of({f"t{number}": 10 for number in range(tenants)}, {})
    rest = [each.tenant for each in shares if "other" in each.tenant]
    assert rest == ([said] if said else [])


def test_a_card_names_adapters_and_the_tenants_whose_time_it_was(deployment: Deployment) -> None:
    services = deployment.services
    now = services.clock.now()
    today = now.replace(hour=0, minute=0, second=0, microsecond=0)
    busy = {deployment.tenant_id: 40, **{f"t{number}": 10 for number in range(5)}, "z": 10}
    made = Adapter(
        id="lora_map",
        tenant_id=deployment.tenant_id,
        name="support-tone",
        base_model="tiny",
        digest=DIGESTS[0],
        path="x",
        rank=8,
        bytes=1,
        created_at=now,
    )
    with services.database.transaction() as session:
        session.add(made)
        for tenant, us in busy.items():
            for at, count in ((today, us), (today - timedelta(days=2), 1_000_000)):
                session.add(
                    DailyEngineTime(
                        at=at,
                        tenant_id=tenant,
                        model="tiny",
                        adapter="",
                        engine_id="gpu-1",
                        currency="USD",
                        answers=1,
                        busy_us=count,
                    )
                )
    states = ["resident"] * 9 + ["loading", "host"]
    held = list(zip(DIGESTS, states, strict=True))
    views = [
        EngineView("gpu-1", "tiny", "healthy", held=held, blocks_used=30, blocks_total=40),
        EngineView("gpu-2", "tiny", "silent"),
    ]
    with services.database.read() as session:
        first, second = cards(session, views, now)
    [name] = [name for name, _ in first.adapters if "support-tone" in name]
    assert name == "support-tone (demo)" and len(first.adapters) == 8 and first.more_adapters == 2
    shown = [(each.tenant, round(each.percent)) for each in first.shares]
    assert shown == [("demo", 40), *((f"t{number}", 10) for number in range(4)), ("2 others", 20)]
    assert sum(each.percent for each in first.shares) == pytest.approx(100)
    assert first.kv_words == "75.0 %" and "40" in first.kv
    assert second.kv_words == "not reported" and not second.shares and not second.adapters


def test_the_map_is_the_heartbeat_s_and_drains_from_its_card(
    deployment: Deployment, operator: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = {DIGESTS[0]: AdapterState(DIGESTS[0], "resident", 8, 1)}
    monkeypatch.setattr(deployment.engine, "stats", lambda: EngineStats(5, 2, 10, 100, 900))
    monkeypatch.setattr(deployment.engine, "adapters", lambda: loaded)
    for path in (PAGE, f"{PAGE}/map"):
        card = operator.get(path).text
        assert "5 running, 2 waiting" in card and "90.0 %" in card and "support-tone" in card
        assert 'aria-label="Drain fake"' in card
    answer = operator.get(f"{PAGE}/map")
    assert (
        "<html" not in answer.text
        and "script-src 'self'" in answer.headers["content-security-policy"]
    )
    drained = operator.post(PAGE, data={"act": "drain", "engine": "fake"})
    assert 'class="engine draining"' in drained.text and "Resume fake" in drained.text
    operator.post(PAGE, data={"act": "resume", "engine": "fake"})
    with closing(browser(deployment, with_role(deployment, "owner"))) as owner:
        assert owner.get(f"{PAGE}/map").status_code == 403
