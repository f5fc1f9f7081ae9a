"""Every long-lived connection x every way in which a network goes silent.

A row is a kind of connection and one use of it. Behind a half-open connection a use succeeds again with
no help; while nothing answers, each use ends in a clear error; once the network heals, uses succeed. A
broker's workers have their rows in `test_queue.py`, an upstream's whole behaviour in `tests/gateway`.
"""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import httpx
import pytest
from sqlalchemy import text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import OperationalError

from billing.archive.server import ServerClient
from billing.notices.outbox import NetworkSender, Outgoing
from billing.stores import Store, open_store
from core.clock import SystemClock
from core.counters_redis import RedisCounters
from core.database import Database, Limits
from core.errors import DependencyDown, Unauthenticated, Unavailable
from core.settings import Settings
from engine.errors import ConnectionLost
from engine.worker.client import EngineClient
from gateway.edge.auth.open_id_connect import OpenIdConnect
from gateway.edge.auth.single_sign_on import IssuerClient
from gateway.metering.streams.base import Message, StreamDown
from tests.billing.notices.mailbox import Mailbox
from tests.conftest import NATS, POSTGRES, REDIS, need_nats, need_postgres, need_redis
from tests.contracts.clickhouse_http import clickhouse_server
from tests.contracts.usage_streams import kafka_url, nats_url
from tests.engine.helpers import ask
from tests.engine.worker.test_server import Worker, gather
from tests.gateway.deployment import MODEL, running_deployment
from tests.gateway.fake_upstream import upstream
from tests.pooler import pgbouncer
from tests.s3_server import s3_server
from tests.silent_proxy import LoopThread, Silence, ThreadedProxy, proxied

Use = Callable[[], None]
LIMITS = Limits(connect_s=1, answer_s=0.5, statement_s=1.0)
ENDS_S = 60.0  # within which a use has to end, whatever the network does
CHAT = "/v1/chat/completions"


class Unanswered(Exception):
    """A use that ended without its result and with a reason that a client sees."""


def _address(url: str, port: int) -> tuple[str, int]:
    parts = urlsplit(url)
    return parts.hostname or "127.0.0.1", parts.port or port


def _behind(url: str, proxy: ThreadedProxy) -> str:
    parts = urlsplit(url)
    credentials, at, _ = parts.netloc.rpartition("@")
    return parts._replace(netloc=credentials + at + proxy.netloc).geturl()


@contextmanager
def _postgres(_path: Path) -> Iterator[tuple[ThreadedProxy, Use]]:
    need_postgres()
    with proxied(_address(POSTGRES, 5432)) as proxy:
        database = Database(_behind(POSTGRES, proxy), limits=LIMITS)
        yield proxy, database.ping
        database.close()


@contextmanager
def _postgres_statement(_path: Path) -> Iterator[tuple[ThreadedProxy, Use]]:
    """A transaction that is open when the silence begins."""
    need_postgres()
    with proxied(_address(POSTGRES, 5432)) as proxy:
        database = Database(_behind(POSTGRES, proxy), limits=LIMITS)

        def _use() -> None:
            with database.read() as session:
                session.execute(text("select 1"))
                session.execute(text("select 2"))

        yield proxy, _use
        database.close()


@contextmanager
def _postgres_long(_path: Path) -> Iterator[tuple[ThreadedProxy, Use]]:
    """A statement that may take minutes: the server is asked whether it works on it."""
    need_postgres()
    with proxied(_address(POSTGRES, 5432)) as proxy:
        limits = Limits(connect_s=1, answer_s=0.5, look_s=0.25)
        database = Database(_behind(POSTGRES, proxy), limits=limits)

        def _use() -> None:
            with database.read() as session:
                session.execute(text("select 1"))
                session.execute(text("select 2"))

        yield proxy, _use
        database.close()


def _pooled(port: int) -> Database:
    name = make_url(POSTGRES).database
    url = f"postgresql://root@127.0.0.1:{port}/{name}?pooler=transaction"
    return Database(url, limits=LIMITS)


@contextmanager
def _pooler(_path: Path) -> Iterator[tuple[ThreadedProxy, Use]]:
    need_postgres()
    user = make_url(POSTGRES).username or ""
    with (
        pgbouncer(_address(POSTGRES, 5432), user) as port,
        proxied(("127.0.0.1", port)) as proxy,
    ):
        database = _pooled(proxy.port)
        yield proxy, database.ping
        database.close()


@contextmanager
def _pooler_server(_path: Path) -> Iterator[tuple[ThreadedProxy, Use]]:
    """PgBouncer answers, and the PostgreSQL behind it does not."""
    need_postgres()
    user = make_url(POSTGRES).username or ""
    with (
        proxied(_address(POSTGRES, 5432)) as proxy,
        pgbouncer((proxy.host, proxy.port), user) as port,
    ):
        database = _pooled(port)
        yield proxy, database.ping
        database.close()


@contextmanager
def _bucket(path: Path) -> Iterator[tuple[ThreadedProxy, Use]]:
    boto3 = pytest.importorskip("boto3", reason="install tollhouse[s3]")
    keys = {
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with (
        s3_server() as url,
        proxied(_address(url, 80)) as proxy,
        pytest.MonkeyPatch.context() as environment,
    ):
        for name, value in keys.items():
            environment.setenv(name, value)
        environment.setattr("billing.stores._READ_S", 1)
        environment.setattr("billing.stores._SHORT_S", 2)
        boto3.client("s3", endpoint_url=url).create_bucket(Bucket="silent")
        store = open_store("s3://silent", Settings(export_store_url=f"http://{proxy.netloc}"))
        file = path / "export.csv"
        file.write_bytes(b"1")
        yield proxy, lambda: _put(store, file)


def _put(store: Store, file: Path) -> None:
    store.put(file.name, file, "text/csv", "0" * 64)


@contextmanager
def _replica(_path: Path) -> Iterator[tuple[ThreadedProxy, Use]]:
    """Reports are read from the primary while the replica is silent."""
    need_postgres()
    with proxied(_address(POSTGRES, 5432)) as proxy:
        database = Database(POSTGRES, read_url=_behind(POSTGRES, proxy), limits=LIMITS)

        def _use() -> None:
            with database.report() as session:
                assert session.scalar(text("select 1")) == 1

        yield proxy, _use
        database.close()


@contextmanager
def _redis(_path: Path) -> Iterator[tuple[ThreadedProxy, Use]]:
    need_redis()
    thread = LoopThread()
    with proxied(_address(REDIS, 6379)) as proxy:
        counters = RedisCounters(_behind(REDIS, proxy), prefix=f"test_{uuid4().hex}")
        thread.run(counters.start())
        yield proxy, lambda: thread.run(counters.renew("g", ["r"], 1000))
        thread.run(counters.close())
    thread.close()


@contextmanager
def _webhook(_path: Path) -> Iterator[tuple[ThreadedProxy, Use]]:
    with upstream() as server, proxied(_of(server)) as proxy:
        server.answers["/hook"] = {}
        server.also = frozenset(["hello"])
        sender = NetworkSender("", networks=("127.0.0.0/8",), timeout_s=1.0)
        url = f"http://{proxy.netloc}/hook"
        message = Outgoing(1, "acme", "webhook", url, "s", {"hello": 1}, "d", 1)
        yield proxy, lambda: sender.send(message)


@contextmanager
def _smtp(_path: Path) -> Iterator[tuple[ThreadedProxy, Use]]:
    mailbox = Mailbox()
    with proxied(_address(mailbox.url, 25)) as proxy:
        sender = NetworkSender(_behind(mailbox.url, proxy), timeout_s=1.0)
        message = Outgoing(1, "acme", "email", "a@b.example", "s", {}, "d", 1)
        yield proxy, lambda: sender.send(message)
    mailbox.close()


class _Issuer(BaseHTTPRequestHandler):
    """Answers with its server's pages, and accepts no code."""

    pages: dict[str, Any]

    def do_GET(self) -> None:
        self._send(200, self.pages[self.path])

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self._send(400, {"error": "invalid_grant"})

    def log_message(self, *_words: object) -> None:
        return

    def _send(self, status: int, page: Any) -> None:
        body = json.dumps(page).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def _sign_on(path: Path, *, tokens_only: bool) -> Iterator[tuple[ThreadedProxy, Use]]:
    handler = type("Handler", (_Issuer,), {"pages": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    serving = threading.Thread(target=server.serve_forever, daemon=True)
    serving.start()
    with proxied(_of(server)) as proxy:
        tokens = f"http://{proxy.netloc}"
        issuer = f"http://127.0.0.1:{server.server_port}" if tokens_only else tokens
        handler.pages["/.well-known/openid-configuration"] = {  # type: ignore[attr-defined]
            "issuer": issuer,
            "authorization_endpoint": f"{issuer}/authorize",
            "token_endpoint": f"{tokens}/token",
            "jwks_uri": f"{tokens}/keys",
        }
        yield proxy, lambda: _sign_in(path, issuer)
    server.shutdown()
    serving.join(10)
    server.server_close()


def _issuer(path: Path) -> AbstractContextManager[tuple[ThreadedProxy, Use]]:
    return _sign_on(path, tokens_only=False)


def _issuer_tokens(path: Path) -> AbstractContextManager[tuple[ThreadedProxy, Use]]:
    """The sign-in has begun, and the exchange of its code goes unanswered."""
    return _sign_on(path, tokens_only=True)


def _sign_in(path: Path, issuer: str) -> None:
    settings = Settings(data_dir=path, oidc_issuer=issuer, oidc_client_id="c")
    sign_on = OpenIdConnect(IssuerClient.of(settings), SystemClock(), "secret", timeout_s=1.0)
    flow = sign_on.begin("http://localhost/back")
    state = flow.url.partition("state=")[2].partition("&")[0]
    with pytest.raises(Unauthenticated):  # the issuer answered, and knows no such code
        sign_on.finish("http://localhost/back", state, "code", flow.cookie)


@contextmanager
def _stream(_path: Path) -> Iterator[tuple[ThreadedProxy, Use]]:
    from gateway.metering.streams.nats import NatsStream

    need_nats()
    with nats_url() as url, proxied(_address(NATS, 4222)) as proxy:
        name = url.rpartition("=")[2]
        stream = NatsStream([f"nats://{proxy.netloc}"], name, timeout_s=1.0)
        yield proxy, lambda: stream.publish([Message(uuid4().hex, "acme", b"{}")])
        stream.close()


def _consume_one(source: Any, stream: Any) -> None:
    """A message of `source` arrives at `stream`, another client of the same stream."""
    source.publish([Message(uuid4().hex, "acme", b"{}")])
    found = stream.fetch(10, 0.5)
    if not found:
        raise Unanswered("no message came")
    stream.acknowledge(found)


@contextmanager
def _stream_consumer(_path: Path) -> Iterator[tuple[ThreadedProxy, Use]]:
    """Messages come from elsewhere, and a consumer waits for them."""
    from gateway.metering.streams.nats import NatsStream

    need_nats()
    with nats_url() as url, proxied(_address(NATS, 4222)) as proxy:
        name = url.rpartition("=")[2]
        source = NatsStream([NATS], name, timeout_s=30.0)
        stream = NatsStream([f"nats://{proxy.netloc}"], name, timeout_s=1.0, ack_wait_s=2.0)

        yield proxy, partial(_consume_one, source, stream)
        stream.close()
        source.close()


@contextmanager
def _behind_kafka() -> Iterator[tuple[ThreadedProxy, str, str]]:
    """A proxy before a broker, the broker's own address and the topic."""
    pytest.importorskip("confluent_kafka")
    with kafka_url() as url:
        servers, _, topic = url.removeprefix("kafka://").partition("?topic=")
        host, port = _address(f"kafka://{servers}", 9092)

        def _named_here(answer: bytes, own: int) -> bytes:
            """Clients connect to the address that the broker names."""
            named = host.encode()
            return answer.replace(named + port.to_bytes(4, "big"), named + own.to_bytes(4, "big"))

        with proxied((host, port), changed=_named_here) as proxy:
            yield proxy, servers, topic


@contextmanager
def _kafka(_path: Path) -> Iterator[tuple[ThreadedProxy, Use]]:
    with _behind_kafka() as (proxy, _, topic):
        from gateway.metering.streams.kafka import KafkaStream

        stream = KafkaStream(proxy.netloc, topic, timeout_s=1.0)
        yield proxy, lambda: stream.publish([Message(uuid4().hex, "acme", b"{}")])
        stream.close()


@contextmanager
def _kafka_consumer(_path: Path) -> Iterator[tuple[ThreadedProxy, Use]]:
    """Messages come from elsewhere, and a consumer waits for them."""
    with _behind_kafka() as (proxy, servers, topic):
        from gateway.metering.streams.kafka import KafkaStream

        source = KafkaStream(servers, topic, timeout_s=30.0)
        stream = KafkaStream(proxy.netloc, topic, timeout_s=1.0)

        yield proxy, partial(_consume_one, source, stream)
        stream.close()
        source.close()


@contextmanager
def _kafka_lag(_path: Path) -> Iterator[tuple[ThreadedProxy, Use]]:
    """A scrape asks how many messages wait."""
    with _behind_kafka() as (proxy, servers, topic):
        from gateway.metering.streams.kafka import KafkaStream

        source = KafkaStream(servers, topic, timeout_s=30.0)
        source.publish([Message(uuid4().hex, "acme", b"{}")])
        stream = KafkaStream(proxy.netloc, topic, timeout_s=1.0)

        def _use() -> None:
            assert stream.lag().messages >= 1

        yield proxy, _use
        stream.close()
        source.close()


@contextmanager
def _clickhouse(_path: Path, *, used: str) -> Iterator[tuple[ThreadedProxy, Use]]:
    with clickhouse_server() as port, proxied(("127.0.0.1", port)) as proxy:
        url = f"clickhouse://{proxy.netloc}/default?compress=false"
        client = ServerClient(url, timeout_s=2, answer_s=1)

        def _rows() -> None:
            assert list(client.rows("select 7", {})) == [(7,)]

        yield proxy, {"rows": _rows, "ping": client.ping}[used]


def _clickhouse_rows(path: Path) -> AbstractContextManager[tuple[ThreadedProxy, Use]]:
    return _clickhouse(path, used="rows")


def _clickhouse_ping(path: Path) -> AbstractContextManager[tuple[ThreadedProxy, Use]]:
    return _clickhouse(path, used="ping")


@contextmanager
def _engine(_path: Path) -> Iterator[tuple[ThreadedProxy, Use]]:
    worker, thread = Worker(), LoopThread()
    host, port = worker.server.address.removeprefix("tcp://").split(":")
    with proxied((host, int(port))) as proxy:
        near = f"tcp://{proxy.netloc}"

        async def _open() -> EngineClient:
            return EngineClient(near, heartbeat_s=0.1, unanswered_s=0.5, grace_s=0.2)

        client = thread.run(_open())

        async def _ask() -> None:
            await client.connect(3)
            await gather(client, ask(uuid4().hex, [1, 2, 3], max_tokens=2))

        yield proxy, lambda: thread.run(_ask(), ENDS_S)
        thread.run(client.close())
    thread.close()
    worker.stop()


@contextmanager
def _upstream(path: Path) -> Iterator[tuple[ThreadedProxy, Use]]:
    with upstream() as server, proxied(_of(server)) as proxy:
        message = {"role": "assistant", "content": "Yes"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 3, "completion_tokens": 1}
        server.answers[CHAT] = {"choices": [choice], "usage": usage}
        entry = {"url": f"http://{proxy.netloc}", "name": "u", "model": MODEL}
        settings = {"upstreams": json.dumps([entry])}
        with running_deployment(path, engines=None, settings=settings) as deployment:
            body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
            headers = deployment.headers | {"x-request-timeout-ms": "2000"}

            def _use() -> None:
                url = deployment.url + CHAT
                answer = httpx.post(url, json=body, headers=headers, timeout=ENDS_S)
                if answer.status_code != 200:
                    error = answer.json()["error"]
                    assert answer.status_code in (502, 503, 504) and error["code"], answer.text
                    raise Unanswered(error["message"])

            yield proxy, _use


def _of(server: ThreadingHTTPServer) -> tuple[str, int]:
    return "127.0.0.1", server.server_address[1]


Made = Callable[[Path], AbstractContextManager[tuple[ThreadedProxy, Use]]]
CONNECTIONS: dict[str, tuple[Made, tuple[type[Exception], ...]]] = {
    "postgresql": (_postgres, (DependencyDown,)),
    "postgresql-statement": (_postgres_statement, (OperationalError,)),
    "postgresql-long": (_postgres_long, (OperationalError,)),
    "pgbouncer": (_pooler, (DependencyDown,)),
    "postgresql-behind-pgbouncer": (_pooler_server, (DependencyDown,)),
    "read-replica": (_replica, ()),
    "redis": (_redis, (DependencyDown,)),
    "bucket": (_bucket, (Exception,)),
    "webhook": (_webhook, (Unavailable,)),
    "smtp": (_smtp, (Unavailable, OSError)),
    "issuer": (_issuer, (Unavailable,)),
    "issuer-tokens": (_issuer_tokens, (Unavailable,)),
    "nats": (_stream, (StreamDown,)),
    "nats-consumer": (_stream_consumer, (StreamDown, Unanswered)),
    "kafka": (_kafka, (StreamDown,)),
    "kafka-consumer": (_kafka_consumer, (StreamDown, Unanswered)),
    "kafka-lag": (_kafka_lag, (StreamDown,)),
    "clickhouse-rows": (_clickhouse_rows, (DependencyDown,)),
    "clickhouse-ping": (_clickhouse_ping, (DependencyDown,)),
    "engine": (_engine, (ConnectionLost,)),
    "upstream": (_upstream, (Unanswered,)),
}


def _ended(use: Use) -> "Future[None]":
    """The use, in a thread of its own, once it has ended."""
    ended: Future[None] = Future()

    def _run() -> None:
        try:
            ended.set_result(use())
        except BaseException as error:
            ended.set_exception(error)

    threading.Thread(target=_run, daemon=True).start()
    ended.exception(ENDS_S)
    return ended


def _use_until_it_succeeds(use: Use, errors: tuple[type[Exception], ...]) -> None:
    deadline = time.monotonic() + ENDS_S
    while (error := _ended(use).exception()) is not None:
        assert isinstance(error, errors), error
        assert time.monotonic() < deadline, error
        time.sleep(0.05)


ROWS = [
    pytest.param(name, silence, id=f"{name}-{silence.value}")
    for name in CONNECTIONS
    for silence in Silence
]


def test_a_clickhouse_that_accepts_and_hangs_is_named_within_seconds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        client = ServerClient(f"clickhouse+http://{host}:{port}", timeout_s=1, answer_s=1)
        for use in (
            lambda: client.command("select 1"),
            lambda: list(client.rows("select 1", {})),
            lambda: client.insert("t", ["a"], [(1,)]),
            client.ping,
        ):
            began = time.monotonic()
            with pytest.raises(DependencyDown, match=r"ClickHouse on .* does not answer"):
                use()
            assert time.monotonic() - began < ENDS_S
    assert "ClickHouse on 127.0.0.1 does not answer" in caplog.text


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("name", "silence"), ROWS)
def test_a_connection_survives_a_silence(name: str, silence: Silence, tmp_path: Path) -> None:
    make, errors = CONNECTIONS[name]
    with make(tmp_path) as (proxy, use):
        _use_until_it_succeeds(use, errors)
        proxy.silence(silence)
        if silence is Silence.HALF_OPEN:  # no one heals it
            _use_until_it_succeeds(use, errors)
            return
        for _ in range(2):
            error: Any = _ended(use).exception()
            assert error is None or (isinstance(error, errors) and str(error)), error
        proxy.heal()
        _use_until_it_succeeds(use, errors)


def test_a_slow_statement_is_not_a_silent_connection() -> None:
    need_postgres()
    database = Database(POSTGRES, limits=Limits(look_s=0.2))
    with database.read() as session:
        session.execute(text("select pg_sleep(2.5)"))
    with database.read() as holding, database.read() as waiting:  # a lock is work too
        holding.execute(text("select pg_advisory_xact_lock(7)"))
        waiting.execute(text("set local statement_timeout = '2500'"))
        with pytest.raises(OperationalError, match="statement timeout"):
            waiting.execute(text("select pg_advisory_xact_lock(7)"))
    database.close()
