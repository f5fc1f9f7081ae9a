"""Low-overhead pipelining to Redis: commands sent as one batch, replies in order.

A redis-py pipeline takes a connection from the pool, checks its health and returns it, with a timer
at each step, which costs more than the counters' script runs. A caller that sends one batch at a
time can keep one connection instead; it must enforce its own time-out.
"""

import math
import time
from collections.abc import Sequence
from typing import Any, Protocol

import redis.asyncio
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as ConnectionLost
from redis.exceptions import ResponseError

from core.redis_client import Client

Command = tuple[Any, ...]
# After this idle time the server or a proxy may have closed the connection.
_QUIET_S = 0.05


class Line(Protocol):
    """Used by one caller at a time, which may be cancelled at any point."""

    async def ask(self, commands: Sequence[Command]) -> list[Any]:
        """Returns a reply per command, in order; a failed command's reply is its exception.
        RedisError or OSError if the server cannot be reached: commands may have been executed."""

    async def ping(self) -> None: ...

    async def close(self) -> None: ...


def line_to(client: Client) -> Line:
    if isinstance(client, redis.asyncio.Redis):
        return KeptLine(client)
    return ClusterLine(client)


class KeptLine:
    """One connection, opened on first use and reopened after a failure."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        pool = client.connection_pool
        self._make = pool.connection_class
        self._settings = {**pool.connection_kwargs, "socket_timeout": None}
        self._kept: AbstractConnection | None = None
        self._asked_at = 0.0

    async def ask(self, commands: Sequence[Command]) -> list[Any]:
        connection = await self._ready()
        self._kept = None  # never reuse a connection with unread replies
        try:
            await connection.send_packed_command(
                connection.pack_commands(commands), check_health=False
            )
            answers = [await _answer(connection) for _ in commands]
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        self._kept, self._asked_at = connection, time.monotonic()
        return answers

    async def ping(self) -> None:
        await self.ask([("PING",)])

    async def close(self) -> None:
        kept, self._kept = self._kept, None
        if kept is not None:
            await kept.disconnect(nowait=True)

    async def _ready(self) -> AbstractConnection:
        kept = self._kept
        if kept is not None and time.monotonic() - self._asked_at < _QUIET_S:
            return kept
        if kept is not None:
            try:
                if not await kept.can_read():
                    return kept
            except (ConnectionLost, OSError):
                pass
            await self.close()
        made: AbstractConnection = self._make(**self._settings)
        await made.connect()  # type: ignore[no-untyped-call]
        return made


class ClusterLine:
    """Uses the cluster client's pipelines, which send each command to its slot's node."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def ask(self, commands: Sequence[Command]) -> list[Any]:
        pipe = self._client.pipeline(transaction=False)
        for command in commands:
            pipe.execute_command(*command)
        return list(await pipe.execute(raise_on_error=False))

    async def ping(self) -> None:
        await self._client.ping()

    async def close(self) -> None:
        """No-op: the client owns the connections."""


async def _answer(connection: AbstractConnection) -> Any:
    try:
        return await connection.read_response(timeout=math.inf)
    except ResponseError as error:
        return error
