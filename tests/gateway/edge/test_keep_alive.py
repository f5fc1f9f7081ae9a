"""Connections between requests: kept while they are used, closed once they are idle for too long."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from uvicorn import Config
from uvicorn.server import Server

from gateway.edge.http_protocol import BoundedHttp

IDLE_S = 2
_REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


async def _app(scope: Any, receive: Any, send: Any) -> None:
    headers = [(b"content-length", b"2")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"ok"})


@pytest.fixture
async def port() -> AsyncIterator[int]:
    config = Config(_app, port=0, http=BoundedHttp, lifespan="off", timeout_keep_alive=IDLE_S)
    server = Server(config)
    running = asyncio.ensure_future(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    await running


async def test_a_connection_in_use_outlives_its_idle_time_and_an_idle_one_is_closed(
    port: int,
) -> None:
    loop = asyncio.get_running_loop()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(4):  # longer together than the idle time
        writer.write(_REQUEST)
        await asyncio.wait_for(reader.readuntil(b"ok"), 20)
        await asyncio.sleep(IDLE_S / 3)
    writer.write(_REQUEST)
    await asyncio.wait_for(reader.readuntil(b"ok"), 20)
    answered = loop.time()
    assert await asyncio.wait_for(reader.read(), 20) == b""
    assert loop.time() - answered > IDLE_S / 2
    writer.close()
