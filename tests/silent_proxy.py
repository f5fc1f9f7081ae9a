"""A TCP proxy whose connections can go silent: they stay open and acknowledge, and pass nothing on, as a
balancer does whose other side is gone."""

import asyncio
from contextlib import suppress


class SilentProxy:
    """Between `address` and a target, in the running event loop."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._silent_before = 0  # connections with a lower number pass nothing on
        self._number = 0
        self._server: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []

    @property
    def address(self) -> tuple[str, int]:
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()[:2]
        return str(host), int(port)

    @property
    def connections(self) -> int:
        return self._number

    def silence(self) -> None:
        """All connections so far go silent; new ones are passed on."""
        self._silent_before = self._number

    async def __aenter__(self) -> "SilentProxy":
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number, self._number = self._number, self._number + 1
        inner_reader, inner = await asyncio.open_connection(*self._target)
        self._writers += [writer, inner]
        await asyncio.gather(
            self._pass(number, reader, inner), self._pass(number, inner_reader, writer)
        )

    async def _pass(
        self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(65_536):
                if number >= self._silent_before:
                    writer.write(data)
                    await writer.drain()
            if number >= self._silent_before:
                writer.close()
