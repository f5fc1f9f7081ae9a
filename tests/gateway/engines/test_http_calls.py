"""The client of OpenAI-compatible servers, against a server that answers as badly as servers do."""

import asyncio
import socket
import threading
import time
from collections.abc import Awaitable, Callable

import pytest

from gateway.engines.http_pool import HttpPool, ServerDisconnected

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Heard:
    def __init__(self) -> None:
        self.status, self.kind, self.body = 0, "", b""
        self.error: Exception | None = None
        self.over = asyncio.Event()

    def on_headers(self, status: int, content_type: str, retry_after: str) -> None:
        self.status, self.kind = status, content_type

    def on_data(self, data: bytes) -> None:
        self.body += data

    def on_end(self) -> None:
        self.over.set()

    def on_error(self, error: Exception) -> None:
        self.error = error
        self.over.set()


async def ask(pool: HttpPool, body: bytes = b"{}") -> Heard:
    heard = Heard()
    await pool.post("/v1/x", body, heard)
    await asyncio.wait_for(heard.over.wait(), 5)
    return heard


async def read(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    return head + await reader.readexactly(length)


def against(serve: Serve, test: Callable[[HttpPool], Awaitable[None]]) -> int:
    """Returns how many connections the server saw."""
    seen = 0

    async def _both() -> None:
        async def _one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal seen
            seen += 1
            try:
                await serve(reader, writer)
            except (asyncio.IncompleteReadError, ConnectionError):
                pass
            finally:
                writer.close()

        server = await asyncio.start_server(_one, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        pool = HttpPool(f"http://127.0.0.1:{port}/base", {"authorization": "Bearer k"})
        try:
            await test(pool)
        finally:
            pool.close()
            server.close()
            await server.wait_closed()

    asyncio.run(_both())
    return seen


WHOLE = b"HTTP/1.1 200 OK\r\nContent-Type: application/json; charset=utf-8\r\nContent-Length: 2\r\n\r\nhi"


def test_one_connection_serves_call_after_call() -> None:
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            asked.append(await read(reader))
            writer.write(WHOLE)

    async def test(pool: HttpPool) -> None:
        for _ in range(3):
            heard = await ask(pool, b'{"a": 1}')
            assert (heard.status, heard.kind, heard.body) == (200, "application/json", b"hi")

    assert against(serve, test) == 1
    assert asked[0].startswith(b"POST /base/v1/x HTTP/1.1\r\nhost: 127.0.0.1:")
    assert b"\r\nauthorization: Bearer k\r\n" in asked[0] and asked[0].endswith(b'\r\n\r\n{"a": 1}')


def test_a_kept_connection_that_was_closed_meanwhile_is_replaced() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read(reader)
        writer.write(WHOLE)  # without "connection: close", and then it closes

    async def test(pool: HttpPool) -> None:
        for _ in range(3):
            assert (await ask(pool)).body == b"hi"
            await asyncio.sleep(0.05)

    assert against(serve, test) == 3


def test_a_close_that_the_event_loop_has_not_read_yet_is_seen_before_a_request_is_written() -> None:
    """The server's close arrives while the loop is busy, so that no callback has told of it."""
    arrived: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        for _ in range(2):
            connection, _ = listener.accept()
            with connection:
                arrived.append(connection.recv(65536))
                connection.sendall(WHOLE)

    thread = threading.Thread(target=serve)
    thread.start()

    async def test() -> None:
        pool = HttpPool(f"http://127.0.0.1:{listener.getsockname()[1]}", {})
        assert (await ask(pool)).body == b"hi"
        time.sleep(0.2)  # the loop stands still while the server closes
        assert (await ask(pool)).body == b"hi"
        pool.close()

    asyncio.run(test())
    thread.join(10)
    listener.close()
    assert len(arrived) == 2


def test_a_request_that_a_server_read_is_never_sent_again() -> None:
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await read(reader))
        writer.write(WHOLE)
        asked.append(await read(reader))  # the second call on a kept connection: read, then closed

    async def test(pool: HttpPool) -> None:
        assert (await ask(pool)).body == b"hi"
        heard = await ask(pool, b'{"n": 2}')
        assert isinstance(heard.error, ServerDisconnected)
        await asyncio.sleep(0.1)

    assert against(serve, test) == 1
    assert len(asked) == 2, "the second request ran once"


def test_an_answer_in_pieces_of_any_size_is_the_same_answer() -> None:
    said = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    said += b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read(reader)
        for place in range(len(said)):
            writer.write(said[place : place + 1])
            await writer.drain()
            await asyncio.sleep(0)

    async def test(pool: HttpPool) -> None:
        heard = await ask(pool)
        assert (heard.status, heard.body, heard.error) == (200, b"onetwo", None)

    against(serve, test)


@pytest.mark.parametrize(
    ("said", "whole"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\nuntil it closes", True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nhalf", False),
        (b"", False),
        (b"SSH-2.0-OpenSSH_9.6\r\n", False),
    ],
    ids=["no length", "half", "nothing", "no HTTP"],
)
def test_a_connection_that_ends_early_is_told_from_an_answer_that_ends(
    said: bytes, whole: bool
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read(reader)
        writer.write(said)
        await writer.drain()

    async def test(pool: HttpPool) -> None:
        heard = await ask(pool)
        assert (heard.error is None) is whole
        assert whole or isinstance(heard.error, ServerDisconnected)

    assert against(serve, test) == 1


def test_a_call_that_is_broken_off_is_heard_of_no_more() -> None:
    gone = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read(reader)
        writer.write(WHOLE[:-1])
        gone.append(await reader.read(1))

    async def test(pool: HttpPool) -> None:
        heard = Heard()
        terminate = await pool.post("/v1/x", b"{}", heard)
        while not heard.body:
            await asyncio.sleep(0.001)
        terminate()
        await asyncio.sleep(0.05)
        assert not heard.over.is_set()

    against(serve, test)
    assert gone == [b""]


def test_nobody_there_is_an_error_at_once() -> None:
    async def test() -> None:
        pool = HttpPool("http://127.0.0.1:9", {})
        with pytest.raises(OSError):
            await pool.post("/v1/x", b"{}", Heard())

    asyncio.run(test())


def test_no_header_can_hold_another() -> None:
    with pytest.raises(ValueError, match="line break"):
        HttpPool("http://127.0.0.1:9", {"authorization": "Bearer a\r\nx: y"})
