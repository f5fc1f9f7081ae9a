"""A TCP proxy whose connections fail as networks do: they go silent but stay open, as behind a balancer
whose other side is gone, or they pass one byte at a time, or end in the middle of an answer."""

import asyncio
import socket
import struct
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from typing import Any, TypeVar

Result = TypeVar("Result")
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER: on, for 0 s


Seen = Callable[[bytes, bool], None]
Changed = Callable[[bytes, int], bytes]


class Silence(Enum):
    HALF_OPEN = "half-open"  # connections so far pass nothing on; new ones work
    HANG = "accept-and-hang"  # no connection passes anything on, new ones included
    TRICKLE = "byte-by-byte"  # answers come one byte at a time
    RESET = "reset-in-mid-answer"  # a connection ends in the middle of its next answer


class SilentProxy:
    """Between `address` and a target, in the running event loop."""

    def __init__(
        self,
        target: tuple[str, int],
        *,
        pause_s: float = 0.3,
        seen: Seen | None = None,
        changed: Changed | None = None,
    ) -> None:
        """`pause_s` is the time between two bytes of a trickle. `seen` is told what passes, and whether
        it is an answer. `changed` gives what passes in place of an answer, at the proxy's port: for
        servers that name their own address."""
        self._changed = changed
        self._seen = seen
        self._target = target
        self._pause_s = pause_s
        self._mode: Silence | None = None
        self._silent_before = 0  # connections with a lower number pass nothing on
        self._number = 0
        self._server: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> tuple[str, int]:
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()[:2]
        return str(host), int(port)

    @property
    def connections(self) -> int:
        return self._number

    def silence(self, mode: Silence = Silence.HALF_OPEN) -> None:
        self._mode = mode
        if mode in (Silence.HALF_OPEN, Silence.HANG):
            self._silent_before = self._number

    def heal(self) -> None:
        """New connections work. Those that went silent stay so: what they carried is lost."""
        if self._mode is Silence.HANG:
            self._silent_before = self._number
        self._mode = None

    async def __aenter__(self) -> "SilentProxy":
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.sleep(0)  # the transports close

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        with suppress(asyncio.CancelledError):
            await self._serve(reader, writer)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number, self._number = self._number, self._number + 1
        self._writers.append(writer)
        try:
            inner_reader, inner = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        self._writers.append(inner)
        await asyncio.gather(
            self._pass(number, reader, inner),
            self._pass(number, inner_reader, writer, answers=True),
        )

    def _is_silent(self, number: int) -> bool:
        return number < self._silent_before or self._mode is Silence.HANG

    async def _pass(
        self,
        number: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        answers: bool = False,
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(65_536):
                if self._is_silent(number):
                    continue
                if self._seen is not None:
                    self._seen(data, answers)
                if answers and self._changed is not None:
                    data = self._changed(data, self.address[1])
                if answers and self._mode is Silence.RESET:
                    writer.write(data[: len(data) // 2])
                    _reset(writer)
                    return
                if answers:
                    data = await self._trickled(data, writer)
                writer.write(data)
                await writer.drain()
            if not self._is_silent(number):
                writer.close()

    async def _trickled(self, data: bytes, writer: asyncio.StreamWriter) -> bytes:
        """What is left of the data when the trickle ends."""
        while data and self._mode is Silence.TRICKLE:
            writer.write(data[:1])
            await writer.drain()
            data = data[1:]
            await asyncio.sleep(self._pause_s)
        return data


def _reset(writer: asyncio.StreamWriter) -> None:
    opened: socket.socket = writer.get_extra_info("socket")
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    writer.close()


class LoopThread:
    """An event loop in a thread of its own, for tests that block."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Result], timeout_s: float = 60.0) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def call(self, act: Any, *arguments: Any) -> None:
        """Call a function in the loop, and wait until it has returned."""

        async def _act() -> None:
            act(*arguments)

        self.run(_act())

    def close(self) -> None:
        self.run(asyncio.sleep(0.2))  # aborted connections close
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


class ThreadedProxy:
    """A proxy in a thread, for clients that block."""

    def __init__(self, thread: LoopThread, proxy: SilentProxy) -> None:
        self._thread, self._proxy = thread, proxy
        self.host, self.port = proxy.address

    @property
    def netloc(self) -> str:
        return f"{self.host}:{self.port}"

    def silence(self, mode: Silence = Silence.HALF_OPEN) -> None:
        self._thread.call(self._proxy.silence, mode)

    def heal(self) -> None:
        self._thread.call(self._proxy.heal)


@contextmanager
def proxied(
    target: tuple[str, int], seen: Seen | None = None, changed: Changed | None = None
) -> Iterator[ThreadedProxy]:
    thread, proxy = LoopThread(), SilentProxy(target, seen=seen, changed=changed)
    try:
        thread.run(proxy.__aenter__())
        yield ThreadedProxy(thread, proxy)
        thread.run(proxy.__aexit__())
    finally:
        thread.close()
