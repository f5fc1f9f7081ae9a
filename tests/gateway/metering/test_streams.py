"""Usage through a real NATS JetStream: connections that break, processes that die, what is shown."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from sqlalchemy import select

from billing import tasks as billing_tasks
from billing.usage.tables import UsageEventRow
from core import metrics
from core.clock import FakeClock, SystemClock
from core.database import Database
from core.errors import Conflict, SettingError
from core.queue import TaskContext
from core.settings import Settings
from gateway.cli.doctor import dependencies
from gateway.cli.doctor.check import Health
from gateway.cli.main import main
from gateway.metering.spool_records import OutboxBatch
from gateway.metering.streams import storing
from gateway.metering.streams.base import StreamDown
from gateway.metering.streams.consumer import StreamConsumer, measure
from gateway.metering.streams.messages import MESSAGE_BYTES, batch_of
from gateway.metering.streams.opening import make_sink, open_stream
from gateway.metering.streams.storing import StreamStore
from gateway.metering.usage_sink import SqlUsageSink
from gateway.serving.payments import make_payments, task_services
from tests.conftest import NATS, need_nats
from tests.contracts.usage_streams import Proxy, nats_url, opened, store_waiting
from tests.gateway.deployment import MODEL, running_deployment
from tests.gateway.metering.test_refusals import event, price_of, stored


@pytest.fixture
def url() -> Iterator[str]:
    need_nats()
    with nats_url() as made:
        yield made


def events(price: str, count: int) -> OutboxBatch:
    made = (
        event(f"req_{number:05}", price, tenant_id=f"org_{number % 9}") for number in range(count)
    )
    return batch_of(("usage", each) for each in made)


def store_all(url: str, database: Database) -> int:
    clock = SystemClock()
    with opened(url) as stream:
        return store_waiting(StreamStore(stream, SqlUsageSink(database, clock), database, clock))


def until(holds: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def test_a_connection_that_is_cut_within_a_batch(url: str, sqlite_database: Database) -> None:
    """Part of the batch has arrived; the batch is sent again, and the server keeps one copy."""
    server = urlsplit(NATS)
    proxy = Proxy(server.hostname or "", server.port or 4222)
    batch = events(price_of(sqlite_database), 2000)
    through = url.replace(f":{server.port}", f":{proxy.port}")
    with opened(through, timeout_s=2.0) as stream, opened(url) as direct:
        sink = make_sink(sqlite_database, SystemClock(), stream)
        assert stream.lag().messages == 0
        proxy.cut_after = 4 * MESSAGE_BYTES
        with pytest.raises(StreamDown, match="does not answer"):
            sink.record(batch)
        arrived = direct.lag().messages
        with pytest.raises(StreamDown):
            sink.record(batch)
        assert not stored(sqlite_database)
        proxy.mend()
        sink.record(batch)
        assert 0 < arrived < direct.lag().messages
        sent = direct.lag().messages
        sink.record(batch)
        assert direct.lag().messages == sent  # the same content is kept once
    proxy.cut()
    assert store_all(url, sqlite_database) == sent
    assert stored(sqlite_database) == [each.request_id for each in batch.usage]


def test_a_consumer_that_is_killed_after_its_commit(url: str, sqlite_database: Database) -> None:
    """The process dies with its messages stored and not acknowledged: they come again."""
    from gateway.metering.streams.nats import NatsStream

    name = url.partition("=")[2]
    # The consumer is made by whoever comes first, with this test's short time to acknowledge.
    hasty = NatsStream([NATS], name, ack_wait_s=2.0)
    assert hasty.lag().messages == 0
    hasty.close()
    with opened(url) as stream:
        make_sink(sqlite_database, SystemClock(), stream).record(
            events(price_of(sqlite_database), 300)
        )
        waiting = stream.lag().messages
    script = f"""
import os, signal
from core.clock import SystemClock
from core.database import Database
from gateway.metering.streams.nats import NatsStream
from gateway.metering.streams.storing import StreamStore
from gateway.metering.usage_sink import SqlUsageSink
class Dying(NatsStream):
    def acknowledge(self, deliveries):
        os.kill(os.getpid(), signal.SIGKILL)
database, clock = Database({sqlite_database.url!r}), SystemClock()
stream = Dying([{NATS!r}], {url.partition("=")[2]!r})
StreamStore(stream, SqlUsageSink(database, clock), database, clock).store_next(5.0)
"""
    killed = subprocess.run([sys.executable, "-c", script], timeout=60, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(stored(sqlite_database)) == 300
    with opened(url) as stream:
        assert stream.lag().messages == waiting
        clock = SystemClock()
        store = StreamStore(stream, SqlUsageSink(sqlite_database, clock), sqlite_database, clock)
        assert store.store_next(20.0) == waiting
        assert stream.lag().messages == 0
    assert len(stored(sqlite_database)) == 300


def test_the_consumer_process_stores_and_is_started_again(
    url: str, tmp_path: Path, sqlite_database: Database
) -> None:
    settings = Settings(
        data_dir=tmp_path, database_url=sqlite_database.url, stream_url=url, log_level="error"
    )
    batch = events(price_of(sqlite_database), 20)
    consumer = StreamConsumer(settings)
    consumer.start()
    with opened(url) as stream:
        sink = make_sink(sqlite_database, SystemClock(), stream)
        sink.record(batch_of(("usage", each) for each in batch.usage[:10]))
        until(lambda: len(stored(sqlite_database)) == 10)
        # What is stored and not acknowledged would come again only after the time to acknowledge.
        until(lambda: stream.lag().messages == 0)
        first = consumer.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        until(lambda: consumer.pid != first)
        sink.record(batch)
        until(lambda: len(stored(sqlite_database)) == 20)
        consumer.stop()
        until(lambda: stream.lag().messages == 0)


def test_a_request_s_usage_passes_the_stream(url: str, tmp_path: Path) -> None:
    settings = {"stream_url": url, "log_level": "error"}
    with running_deployment(tmp_path, settings=settings) as gateway:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
        answer = httpx.post(
            f"{gateway.url}/v1/chat/completions", json=body, headers=gateway.headers, timeout=60
        )
        assert answer.status_code == 200
        row = gateway.event(answer.headers["x-request-id"])
        assert row["output_tokens"] == answer.json()["usage"]["completion_tokens"] == 3
        assert row["input_tokens"] == answer.json()["usage"]["prompt_tokens"]


@pytest.fixture
def command_line(
    url: str, tmp_path: Path, sqlite_database: Database, monkeypatch: pytest.MonkeyPatch
) -> Settings:
    monkeypatch.setenv("TOLLHOUSE_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("TOLLHOUSE_DATABASE_URL", sqlite_database.url)
    monkeypatch.setenv("TOLLHOUSE_STREAM_URL", url)
    with opened(url) as stream:
        make_sink(sqlite_database, SystemClock(), stream).record(
            events(price_of(sqlite_database), 3)
        )
    return Settings(data_dir=tmp_path, database_url=sqlite_database.url, stream_url=url)


def test_what_lies_in_the_stream_is_shown(
    command_line: Settings, sqlite_database: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    now, later = SystemClock(), FakeClock()
    later.set(now.now())
    later.advance(minutes=11)
    assert dependencies.stream(command_line, now).health is Health.GOOD
    late = dependencies.stream(command_line, later)
    assert late.health is Health.BAD and "3 messages" in late.says
    assert main(["audit", "--as-is", "--json", "--no-provider"]) == 0  # it is not late yet
    assert json.loads(capsys.readouterr().out)["stream"]["messages"] == 3
    services = task_services(command_line, later, make_payments(command_line))
    context = TaskContext(command_line, sqlite_database, later, services)
    assert billing_tasks.audit(context) is False
    with opened(command_line.stream_url) as stream:
        measure(stream, later)
    assert metrics.stream_messages._value.get() == 3
    assert metrics.stream_age_seconds._value.get() > 600
    with pytest.raises(Conflict, match="3 messages of usage lie in the stream"):
        _recover()
    store_all(command_line.stream_url, sqlite_database)
    assert dependencies.stream(command_line, later).says == "0 messages to store"
    assert billing_tasks.rate_events(context) == 3
    assert billing_tasks.audit(context) is True


def _recover() -> None:
    from argparse import Namespace

    from gateway.admin.usage import recover_command as recover

    recover._run(Namespace(from_receipts=[], dry_run=False, min_age=600.0, json=True))


def test_a_stream_that_does_not_answer_makes_no_audit_clean(
    command_line: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(storing, "_TIMEOUT_S", 0.5)
    away = Settings(data_dir=command_line.data_dir, stream_url="nats://user:secret@127.0.0.1:1")
    finding = dependencies.stream(away, SystemClock())
    assert finding.health is Health.BAD and "does not answer" in finding.says
    assert "secret" not in finding.says
    monkeypatch.setenv("TOLLHOUSE_STREAM_URL", "nats://127.0.0.1:1")
    assert main(["audit", "--as-is", "--json", "--no-provider"]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert not shown["clean"] and "does not answer" in shown["stream"]["problem"]


def test_a_stream_that_would_delete_usage_is_refused(url: str) -> None:
    import asyncio

    import nats

    name = url.partition("=")[2]

    async def _make() -> None:
        client = await nats.connect(NATS)
        await client.jetstream().add_stream(name=name, subjects=[f"{name}.>"], max_age=60)
        await client.close()

    asyncio.run(_make())
    with opened(url) as stream, pytest.raises(SettingError, match=r"retention .*not workqueue"):
        stream.lag()


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("redis://127.0.0.1", "'redis' is not nats or kafka"),
        ("nats://", "names no server"),
        ("nats://a?replicas=9", "replicas is '9'"),
        ("nats://a?retention=1", "'retention' is not a parameter"),
        ("nats://a?replicas=", "replicas is ''"),
        ("kafka://user:secret@a", "sasl.username"),
    ],
)
def test_a_wrong_address_is_refused_by_name(url: str, reason: str) -> None:
    pytest.importorskip("nats"), pytest.importorskip("confluent_kafka")
    with pytest.raises(SettingError, match=f"TOLLHOUSE_STREAM_URL is wrong: .*{reason}") as caught:
        open_stream(url)
    assert "secret" not in str(caught.value)


def test_a_tenant_cannot_reach_another_subject() -> None:
    pytest.importorskip("nats")
    from gateway.metering.streams.nats import subject_part

    assert subject_part("org_1") == "org_1"
    assert subject_part("a.b>* c\r\n") == "a_b___c__"
    assert subject_part("") == "_"


def test_ids_of_events_are_kept(url: str, sqlite_database: Database) -> None:
    batch = events(price_of(sqlite_database), 5)
    with opened(url) as stream:
        make_sink(sqlite_database, SystemClock(), stream).record(batch)
    store_all(url, sqlite_database)
    with sqlite_database.read() as session:
        rows = session.scalars(select(UsageEventRow).order_by(UsageEventRow.request_id)).all()
        for row, sent in zip(rows, batch.usage, strict=True):
            for name in sent.__struct_fields__:
                assert getattr(row, name) == getattr(sent, name), name
