"""Advice on Health, from engine time that is recorded, with its evidence."""

import re
from datetime import timedelta

import httpx
import pytest
from sqlalchemy import delete

from billing.usage.tables import DailyEngineTime
from dashboards.backend import EngineView
from dashboards.capacity_advice import advice
from tests.gateway.deployment import Deployment

HEALTH = "/dashboard/operator/health"


def _record(deployment: Deployment, shares: list[float], adapters: float = 0.0) -> None:
    """A day for each share, the last one yesterday, of two engines."""
    services = deployment.services
    today = services.clock.now().replace(hour=0, minute=0, second=0, microsecond=0)
    with services.database.transaction() as session:
        session.execute(delete(DailyEngineTime))
        for place, share in enumerate(shares):
            for engine in ("gpu-1", "gpu-2"):
                for adapter, part in (("", 1 - adapters), ("law", adapters)):
                    session.add(
                        DailyEngineTime(
                            at=today - timedelta(days=len(shares) - place),
                            tenant_id=deployment.tenant_id,
                            model="tiny",
                            adapter=adapter,
                            engine_id=engine,
                            currency="USD",
                            answers=1,
                            busy_us=round(share * part * 86_400e6),
                        )
                    )


def _text(operator: httpx.Client) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", operator.get(HEALTH).text))


def test_use_growth_and_adapters_have_their_evidence(
    deployment: Deployment, operator: httpx.Client
) -> None:
    _record(deployment, [0.56, 0.58, 0.60, 0.62], adapters=0.18)
    text = _text(operator)
    assert "62 % of the engines' time" in text.replace("&#39;", "'")
    assert "107,136 s of 2 × 86,400 s" in text
    assert "2.0 points a day" in text
    # (85 − 62) / 2 = 11.5 days after yesterday
    day = deployment.services.clock.now() + timedelta(days=10.5)
    assert f"Plan the next replica for {day:%Y-%m-%d}" in text or "at 85 %" in text
    assert "adapters take 18 %" in text


def test_a_full_day_says_add_a_replica(deployment: Deployment, operator: httpx.Client) -> None:
    _record(deployment, [0.9])
    assert "Add a replica" in _text(operator)


def test_without_engine_time_nothing_is_said(
    deployment: Deployment, operator: httpx.Client
) -> None:
    _record(deployment, [])
    assert "No engine time of a whole day" in _text(operator)


@pytest.mark.parametrize(("used", "said"), [(80, True), (60, False)])
def test_a_pressed_cache_names_int8(deployment: Deployment, used: int, said: bool) -> None:
    engines = [EngineView("gpu-1", "tiny", "healthy", blocks_used=used, blocks_total=100)]
    services = deployment.services
    with services.database.read() as session:
        found = advice(session, engines, services.clock.now() - timedelta(days=400))
    assert bool(found) is said
    if said:
        assert "1.9 times" in found[0].does and "80 of 100 blocks" in found[0].evidence
