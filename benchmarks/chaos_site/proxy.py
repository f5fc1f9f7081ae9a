"""A TCP proxy before a server that others use too: here its connections are cut, stalled or refused,
and the server itself is left in peace.
"""

import asyncio
import contextlib
import threading
from types import TracebackType


class Proxy:
    """Listens on a port of 127.0.0.1 from `with` on, in a thread of its own."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._links: set[asyncio.StreamWriter] = set()
        self._flows = asyncio.Event()
        self._refuses = False
        self.port = 0

    def __enter__(self) -> "Proxy":
        self._thread.start()
        self.port = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def cut(self) -> None:
        """Every connection breaks; new ones are let through."""
        self._loop.call_soon_threadsafe(self._cut)

    def down(self) -> None:
        """Every connection breaks, and new ones are closed at once."""
        self._refuses = True
        self.cut()

    def stall(self) -> None:
        """Connections stay, and nothing passes."""
        self._loop.call_soon_threadsafe(self._flows.clear)

    def up(self) -> None:
        self._refuses = False
        self._loop.call_soon_threadsafe(self._flows.set)

    async def _listen(self) -> int:
        self._flows.set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def _close(self) -> None:
        self._server.close()
        self._cut()
        served = asyncio.all_tasks() - {asyncio.current_task()}
        for task in served:
            task.cancel()
        await asyncio.gather(*served, return_exceptions=True)

    def _cut(self) -> None:
        for link in self._links:
            link.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refuses:
            writer.transport.abort()
            return
        self._links.add(writer)
        far: asyncio.StreamWriter | None = None
        try:
            await self._flows.wait()
            far_reader, far = await asyncio.open_connection(*self._target)
            self._links.add(far)
            await asyncio.gather(self._pump(reader, far), self._pump(far_reader, writer))
        except (OSError, asyncio.CancelledError):
            pass  # one side is gone, so the other goes too; or the proxy ends
        finally:
            for link in (writer, far):
                if link is not None:
                    self._links.discard(link)
                    link.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            await self._flows.wait()
            writer.write(data)
            await writer.drain()
        with contextlib.suppress(OSError, RuntimeError):
            writer.write_eof()
