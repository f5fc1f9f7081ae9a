"""A whole gateway on a free port, in a thread: real sockets, real database, real spool."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from sqlalchemy import text

from billing.pricing.prices import ensure_default_prices
from core.clock import SystemClock
from core.settings import Settings
from core.tenants.bootstrap import ensure_demo_tenant
from engine.demo.paths import MODEL_DIR
from gateway.app import create_app
from gateway.catalog.catalog import ServedModel
from gateway.catalog.codec.tokenizing import load_codec
from gateway.cli.serve.serving import Server
from gateway.edge.http_protocol import BoundedHttp
from gateway.engines.clients import Engines
from gateway.engines.fake import FakeEngine
from gateway.serving.services import Services
from gateway.wiring import build
from tests.migrated import migrated

MODEL = "tiny"


@dataclass
class Deployment:
    services: Services
    engine: FakeEngine
    url: str
    key: str  # empty where the data directory had its tenant already
    tenant_id: str
    loop: asyncio.AbstractEventLoop
    app: FastAPI
    worker: Any = None  # of the built-in engine, where a test runs it in this process

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"}

    def call(self, act: Callable[[], object]) -> None:
        """In the gateway's event loop."""
        self.loop.call_soon_threadsafe(act)

    def events(self, count: int, timeout_s: float = 60, **columns: object) -> list[dict[str, Any]]:
        """The usage events with these values, once there are at least so many.

        Events of earlier tests may still arrive: name the request or the batch that is meant.
        """
        deadline = time.monotonic() + timeout_s
        query = "select * from usage_events"
        if columns:
            query += " where " + " and ".join(f"{name} = :{name}" for name in columns)
        while True:
            with self.services.database.read() as session:
                found = session.execute(text(f"{query} order by request_id"), columns)
                rows = [dict(row) for row in found.mappings()]
            if len(rows) >= count:
                return rows
            assert time.monotonic() < deadline, (
                f"{len(rows)} usage events {columns or ''}, {count} were expected"
            )
            time.sleep(0.02)

    def event(self, request_id: str | None) -> dict[str, Any]:
        return self.events(1, request_id=request_id)[0]

    def last_event(self) -> dict[str, Any]:
        """Of the request that reached the engine last."""
        return self.event(self.engine.submitted[-1].request_id)

    def steps(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """Fills with the names of the pipeline's steps as requests pass them."""
        pipeline = self.services.pipeline
        passed: list[str] = []
        for owner, name in (
            (pipeline.auth, "principal"),
            (pipeline.admission, "reserve"),
            (pipeline.moderator, "screen"),
            (pipeline.metering.spool, "open"),
            (pipeline.metering.spool, "close"),
        ):
            plain = getattr(owner, name)

            def _seen(*given: Any, _plain: Any = plain, _name: str = name, **named: Any) -> Any:
                passed.append(_name)
                return _plain(*given, **named)

            monkeypatch.setattr(owner, name, _seen)
        return passed


@contextmanager
def running_deployment(
    tmp_path: Path,
    *,
    token_delay_s: float = 0.0,
    send_buffer: int = 0,
    drain_s: float = 5.0,
    **wiring: Any,
) -> Iterator[Deployment]:
    """`send_buffer` bounds the kernel's share of an answer that nobody reads, in bytes. Requests that
    still run at the end get `drain_s`."""
    settings = Settings(data_dir=tmp_path, **wiring.pop("settings", {}))
    database = migrated(settings.effective_database_url)
    with database.transaction() as session:
        demo = ensure_demo_tenant(session, SystemClock())
        ensure_default_prices(session, SystemClock(), MODEL)
    database.close()
    codec = load_codec(MODEL_DIR)
    engine = FakeEngine(
        vocab_size=codec.vocab_size,
        eos_token_ids=codec.eos_token_ids,
        token_delay_s=token_delay_s,
        context_length=512,
    )
    model = ServedModel(MODEL, codec, 512, 0)
    wiring.setdefault("engines", Engines({MODEL: [engine]}, [model]))
    services = build(settings, **wiring)
    app = create_app(services)
    server = Server(_config(app), services.pipeline, drain_s)
    with _listening(server, send_buffer) as (url, loop):
        yield Deployment(services, engine, url, demo.secret or "", demo.tenant_id, loop, app)


def _config(app: FastAPI) -> uvicorn.Config:
    return uvicorn.Config(
        app, http=BoundedHttp, proxy_headers=False, log_config=None, timeout_graceful_shutdown=15
    )


@contextmanager
def _listening(
    server: uvicorn.Server, send_buffer: int
) -> Iterator[tuple[str, asyncio.AbstractEventLoop]]:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    if send_buffer:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    listener.bind(("127.0.0.1", 0))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(
        target=lambda: loop.run_until_complete(server.serve(sockets=[listener])), daemon=True
    )
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    deadline = time.monotonic() + 60
    try:
        while not server.started:
            assert thread.is_alive() and time.monotonic() < deadline, "the server did not start"
            time.sleep(0.01)
        assert httpx.get(f"{url}/healthz", timeout=60).status_code == 200
        yield url, loop
    finally:  # also where a test fails: its database is dropped next
        server.should_exit = True
        thread.join(60)
        listener.close()
        stopped = not thread.is_alive()
        if stopped:
            loop.close()
    assert stopped, "the server did not stop"
