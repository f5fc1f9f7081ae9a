"""Health shows the last audit, whoever ran it, and a dead worker by its silence and its backlog."""

from collections.abc import Iterator
from contextlib import closing
from datetime import datetime, timedelta
from pathlib import Path

import httpx
import pytest
from sqlalchemy import delete, select, update

from billing.audit.tables import AuditRun
from billing.usage.tables import UsageBatch
from core.clock import SystemClock
from core.heartbeat_models import QueueHeartbeat
from core.queue import QUEUES
from gateway.cli.main import main
from tests.dashboards.browser_client import browser
from tests.gateway.deployment import Deployment, running_deployment

HEALTH = "/dashboard/operator/health"
AUDITS = "/dashboard/operator/reconciliation"
NEVER = "has not run yet"


class MovedClock(SystemClock):
    """The system's clock, moved ahead."""

    ahead = timedelta()

    def now(self) -> datetime:
        return super().now() + self.ahead


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Started five minutes ago, without its own scheduled tasks, so that heartbeats, audits and rating
    are the tests' alone."""
    clock = MovedClock()
    with running_deployment(tmp_path_factory.mktemp("health"), clock=clock) as made:
        made.services.tasks.stop()
        clock.ahead = timedelta(minutes=5)
        yield made


def state_of(operator: httpx.Client, component: str) -> tuple[str, str]:
    """The state and the details of a component, from the page's file."""
    for line in operator.get(f"{HEALTH}?format=csv").text.splitlines():
        name, state, details = (*line.split(",", 2), "", "")[:3]
        if name == component:
            return state, details
    raise AssertionError(f"{component} is not on the page")


@pytest.mark.parametrize("way", ["command", "page"])
def test_an_audit_is_shown_whoever_ran_it(
    deployment: Deployment, operator: httpx.Client, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    services = deployment.services
    with services.database.transaction() as session:
        session.execute(delete(AuditRun))
    assert NEVER in operator.get(HEALTH).text and state_of(operator, "audit")[0] == "warn"
    assert "No audit has run yet" in operator.get(AUDITS).text
    if way == "command":
        monkeypatch.setenv("TOLLHOUSE_DATA_DIR", str(services.settings.data_dir))
        assert main(["audit", "--json"]) == 0
    else:
        said = operator.post(AUDITS, data={"act": "audit"})
        assert "The audit has run." in said.text
    with services.database.read() as session:
        (run,) = session.scalars(select(AuditRun)).all()
    assert NEVER not in operator.get(HEALTH).text
    state, details = state_of(operator, "audit")
    assert state == "good" and f"{run.at:%Y-%m-%d %H:%M} UTC: no differences" in details
    page = operator.get(AUDITS).text
    assert "No audit has run yet" not in page and f"{run.at:%Y-%m-%d %H:%M}" in page


def test_a_dead_worker_is_seen_by_its_silence(
    deployment: Deployment, operator: httpx.Client
) -> None:
    services = deployment.services

    def _last_seen(**ago: timedelta) -> None:
        with services.database.transaction() as session:
            for queue in QUEUES:
                at = services.clock.now() - ago.get(queue, timedelta(0))
                session.merge(QueueHeartbeat(queue=queue, at=at))

    _last_seen()
    assert state_of(operator, "tasks") == ("good", "every queue has a worker,")
    _last_seen(rating=timedelta(minutes=10))
    state, details = state_of(operator, "tasks")
    assert state == "bad" and "no worker: rating silent for" in details
    assert "tollhouse worker" in details, "what to do"


def test_a_gateway_that_starts_has_no_dead_worker_yet(tmp_path: Path) -> None:
    """Neither for queues that have no heartbeat, nor for heartbeats of the run before."""
    clock = MovedClock()
    with running_deployment(tmp_path, clock=clock) as made:
        services = made.services
        services.tasks.stop()
        with services.database.transaction() as session:
            session.execute(delete(QueueHeartbeat))
            session.add(QueueHeartbeat(queue="rating", at=clock.now() - timedelta(days=1)))
        with closing(browser(made, services.operator_token)) as client:
            state, details = state_of(client, "tasks")
            assert state == "good" and "starting: first heartbeats due for" in details
            clock.ahead = timedelta(minutes=2)
            state, details = state_of(client, "tasks")
            assert state == "bad" and "exports never seen" in details


def test_a_worker_that_does_not_keep_up_is_seen_by_its_backlog(
    deployment: Deployment, operator: httpx.Client
) -> None:
    services = deployment.services
    late = services.clock.now() - timedelta(minutes=6)
    with services.database.transaction() as session:
        session.add(UsageBatch(recorded_at=late, events=3))
    state, details = state_of(operator, "rating")
    assert state == "bad" and "3 events waiting, the oldest for 36" in details, details
    assert "tollhouse worker" in details
    with services.database.transaction() as session:
        session.execute(update(UsageBatch).values(rated_at=services.clock.now()))
    assert state_of(operator, "rating")[0] == "good"
