"""A server in this process without sockets: its clients and its upstream are transports that answer at
once. So a number of requests always does the same work, which can be counted.
"""

import asyncio
import contextlib
import importlib
import json
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import uvloop
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from benchmarks.gateway_load.mock import _answer, _stream
from benchmarks.gateway_load.own import MODEL, _open_wide
from engine.demo.paths import MODEL_DIR

CONNECTIONS = 16
_READ = 65_536  # bytes that an upstream's connection gives at a time
_UPSTREAM = "http://127.0.0.1:9"  # never connected to
_PATH = b"/v1/chat/completions"
_HEAD = b"HTTP/1.1 200 OK\r\nserver: mock\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b"
Make = Callable[[], asyncio.Protocol]


def _answered(kind: bytes, body: str) -> bytes:
    raw = body.encode()
    return _HEAD % (kind, len(raw), raw)


_WHOLE = _answered(b"application/json", json.dumps(_answer()))
_STREAM = _answered(b"text/event-stream", _stream())


class Transport(asyncio.Transport):
    """Gives what is written to a function. Its socket is one that nothing uses."""

    def __init__(self, protocol: asyncio.BaseProtocol, written: Callable[[bytes], None]) -> None:
        super().__init__()
        self._protocol = protocol
        self._written = written
        self._pair = socket.socketpair()
        self._known: dict[str, Any] = {
            "socket": self._pair[0],
            "peername": ("127.0.0.1", 5),
            "sockname": ("127.0.0.1", 6),
        }

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._known.get(name, default)

    def write(self, data: Any) -> None:
        self._written(bytes(data))

    def is_closing(self) -> bool:
        return self._pair[0].fileno() < 0

    def close(self) -> None:
        for each in self._pair:
            each.close()

    abort = close

    def pause_reading(self) -> None:
        return

    resume_reading = pause_reading

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_write_buffer_size(self) -> int:
        return 0


class Loop(uvloop.Loop):
    """One whose connections lead to the upstream."""

    async def create_connection(  # type: ignore[override]
        self, factory: Any, *_: Any, **__: Any
    ) -> Any:
        protocol = factory()

        def _written(data: bytes) -> None:
            if data.startswith(b"POST "):
                self.call_soon(_read, b'"stream":true' in data or b'"stream": true' in data)

        def _read(streams: bool) -> None:
            answer = _STREAM if streams else _WHOLE
            for at in range(0, len(answer), _READ):
                protocol.data_received(answer[at : at + _READ])

        transport = Transport(protocol, _written)
        protocol.connection_made(transport)
        return transport, protocol


class Client:
    """One connection of the load, which sends a request when the one before is answered."""

    def __init__(self, make: Make, key: str, headers: bytes = b"") -> None:
        self._loop = asyncio.get_running_loop()
        self._protocol = make()
        self._head = (
            b"POST %b HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            b"Authorization: Bearer %b\r\n%bContent-Length: " % (_PATH, key.encode(), headers)
        )
        self._bodies: Iterator[bytes] = iter(())
        self._done: asyncio.Future[None] | None = None
        self._answer = b""
        self._protocol.connection_made(Transport(self._protocol, self._read))

    async def load(self, bodies: Iterator[bytes]) -> None:
        """Until none is left. RuntimeError with an answer that is not 200."""
        self._bodies, self._done = bodies, self._loop.create_future()
        self._next()
        await self._done

    def _next(self) -> None:
        assert self._done is not None
        body = next(self._bodies, None)
        if body is None:
            self._done.set_result(None)
            return
        self._protocol.data_received(self._head + b"%d\r\n\r\n" % len(body) + body)

    def _read(self, data: bytes) -> None:
        assert self._done is not None
        self._answer += data
        head, _, body = self._answer.partition(b"\r\n\r\n")
        if not _is_whole(head, body):
            return
        if not head.startswith(b"HTTP/1.1 200"):
            self._done.set_exception(RuntimeError(self._answer[:500].decode()))
            return
        self._answer = b""
        self._loop.call_soon(self._next)


def _is_whole(head: bytes, body: bytes) -> bool:
    if b"transfer-encoding: chunked" in head:
        return body.endswith(b"0\r\n\r\n")
    _, name, rest = head.partition(b"content-length: ")
    return bool(name) and len(body) >= int(rest.partition(b"\r\n")[0])


@contextlib.asynccontextmanager
async def own(home: Path) -> AsyncIterator[tuple[Make, str]]:
    """Our gateway with everything on and the collector as in service, without what runs beside requests:
    its protocols, and a key."""
    entry = {"url": _UPSTREAM, "model": MODEL, "tokenizer": str(MODEL_DIR), "name": "mock"}
    for name in [each for each in os.environ if each.startswith("TOLLHOUSE_")]:
        del os.environ[name]
    os.environ["TOLLHOUSE_DATA_DIR"] = str(home)
    os.environ["TOLLHOUSE_UPSTREAMS"] = json.dumps([{**entry, "context_length": 8192}])
    os.environ["TOLLHOUSE_TRUSTED_PROXIES"] = "127.0.0.1"
    from core import collector
    from core.clock import SystemClock
    from core.database import Database
    from core.settings import load_settings
    from gateway.app import create_app
    from gateway.cli.serve.serving import _config
    from gateway.cli.serve.startup import prepare
    from gateway.edge.http_protocol import BoundedHttp
    from gateway.wiring import build

    settings, url = load_settings(), f"sqlite:///{home}/tollhouse.db"
    database = Database(url)
    key = prepare(settings, database, SystemClock()).key
    database.close()
    _open_wide(url)
    services: Any = build(settings)
    services.shipper.start = services.tasks.start = lambda: None
    services.shipper.catch_up = _nothing
    await services.start()
    await services.recovery.first_round_done.wait()
    for engine in services.router.engines():
        engine._checker.cancel()  # it finds no server
        engine._healthy = True
    await asyncio.sleep(0.1)  # those that wait for the first round have begun their own work
    for task in services._tasks:
        task.cancel()
    collector.spare_all()
    yield _protocols(BoundedHttp, _config(create_app(services), 1)), key


async def _nothing() -> None:
    return


@contextlib.asynccontextmanager
async def bare(_home: Path) -> AsyncIterator[tuple[Make, str]]:
    """The forwarder of FastAPI and aiohttp."""
    os.environ["UPSTREAM"] = _UPSTREAM
    from benchmarks.gateway_load import forwarder

    async def _connected(*_: Any, **__: Any) -> socket.socket:
        return socket.socketpair()[0]

    happy: Any = importlib.import_module("aiohappyeyeballs")  # by which aiohttp connects
    happy.start_connection = _connected
    config = Config(
        forwarder.app, http="httptools", log_config=None, access_log=False, lifespan="off"
    )
    yield _protocols(HttpToolsProtocol, config), "none"


def _protocols(kind: Any, config: Config) -> Make:
    config.load()
    state, loop = ServerState(), asyncio.get_running_loop()
    return lambda: kind(config=config, server_state=state, app_state={}, _loop=loop)
