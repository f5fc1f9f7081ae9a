"""ClickHouse of moved days that fails is seen: by the metrics, the alerts and `tollhouse doctor`."""

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from billing.archive.clickhouse import ClickHouseArchive
from billing.archive.server import ServerClient
from billing.reports import measures
from billing.usage.raw_rows import RawArchive
from core.errors import DependencyDown
from core.settings import Settings
from core.tenants.scope import scope_of_operator
from dashboards.alerts.catalog import ALERTS
from gateway.cli.doctor import storage
from gateway.cli.doctor.check import Health
from gateway.serving.background.responses import with_charged_usage
from tests.billing.conftest import Deployment
from tests.contracts.clickhouse_http import clickhouse_server
from tests.contracts.test_moved_days import days_of_usage, drop, move

KEPT = 1


def raised(made: Deployment, archive: RawArchive | None) -> set[str]:
    """Alerts about moved days whose condition holds, with this store in the settings."""
    made.database._sessions.kw["info"] = {RawArchive: archive} if archive is not None else {}
    with made.database.read() as session:
        found = measures.read(session, made.clock.now(), KEPT)
    values = {f"max({name})": value for name, value in found.items()}
    return {
        alert.name
        for alert in ALERTS
        if alert.name in ("ClickHouseDown", "DaysNotMoved") and alert.holds(values[alert.measure])
    }


def server(port: int) -> ClickHouseArchive:
    return ClickHouseArchive(ServerClient(f"clickhouse://user:secret@127.0.0.1:{port}/db"))


def test_a_clickhouse_that_fails_raises_its_alert(
    with_archive: Deployment, archive: ClickHouseArchive, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("clickhouse_connect")
    made = with_archive
    assert raised(made, None) == set(), "no day is moved, and none is to be"
    days_of_usage(made)
    assert move(made, archive, KEPT) == 2
    assert raised(made, archive) == set()
    assert raised(made, server(1)) == {"ClickHouseDown"}, "refused"
    assert raised(made, None) == {"ClickHouseDown"}, "not set"
    with monkeypatch.context() as patch:
        patch.setattr(ClickHouseArchive, "identity", lambda _: "of another deployment")
        assert raised(made, archive) == {"ClickHouseDown"}, "answers, and is another one"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        assert raised(made, server(silent.getsockname()[1])) == {"ClickHouseDown"}
        assert time.monotonic() - began < 30, "a scrape waits for it"
    assert raised(made, archive) == set()


def test_a_day_that_is_not_moved_raises_its_alert_and_doctor_names_it(
    with_archive: Deployment, archive: ClickHouseArchive, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = with_archive
    first = made.clock.now()
    days_of_usage(made)
    monkeypatch.setattr(storage, "make_archive", lambda _settings: archive)
    settings = Settings(database_url=made.database.url, events_days=KEPT)
    assert raised(made, archive) == set(), "they have just been closed"
    made.clock.advance(hours=7)
    assert raised(made, archive) == {"DaysNotMoved"}
    finding = storage.archive(settings, made.clock)
    assert finding.health is Health.WARN
    assert f"2 closed days wait to be moved, the oldest is {first:%Y-%m-%d}" in finding.says
    move(made, archive, KEPT)
    assert raised(made, archive) == set()
    made.clock.set(first + timedelta(days=4))
    assert storage.archive(settings, made.clock).health is Health.GOOD


def test_a_failed_response_of_a_moved_day_shows_what_was_charged(
    with_archive: Deployment, archive: ClickHouseArchive
) -> None:
    made = with_archive
    events = days_of_usage(made)
    move(made, archive, KEPT)
    assert drop(made, archive) == 4
    scope = scope_of_operator("acme")

    def _shown(request_id: str) -> object:
        failed = {"id": f"resp_{request_id.partition('_')[2]}", "status": "failed", "usage": None}
        with made.database.read() as session:
            return with_charged_usage(session, scope, failed)["usage"]

    for event in (events[1], events[-1]):  # on either side
        found = _shown(event.request_id)
        assert isinstance(found, dict)
        assert found["input_tokens"] == event.input_tokens
        assert found["output_tokens"] == event.output_tokens
    made.database._sessions.kw["info"] = {RawArchive: server(1)}
    assert _shown(events[1].request_id) is None, "shown without it while ClickHouse does not answer"
    assert _shown(events[-1].request_id) is not None


@pytest.fixture
def http_server() -> Iterator[int]:
    with clickhouse_server() as port:
        yield port


def test_several_threads_may_ask_at_once(http_server: int) -> None:
    client = ServerClient(f"clickhouse://127.0.0.1:{http_server}/default?compress=false")
    client.ping()
    assert list(client.rows("select 7", {})) == [(7,)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda number: list(client.rows(f"select {number}", {})), range(4)))
    assert found == [[(0,)], [(1,)], [(2,)], [(3,)]]


def test_rows_that_a_server_refuses_are_not_taken_as_written(http_server: int) -> None:
    client = ServerClient(f"clickhouse://127.0.0.1:{http_server}/default?compress=false")
    with pytest.raises(DependencyDown, match=r"127.0.0.1 does not answer"):
        client.insert("no_such_table", ("name",), [("one",)])
    with pytest.raises(DependencyDown, match=r"127.0.0.1 does not answer"):
        client.command("insert into no_such_table values (1)")
