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
from hiredis import pack_command
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as ConnectionLost
from redis.exceptions import ResponseError

from core.redis_client import Client

Command = tuple[Any, ...]
# After this idle time the server or a proxy may have closed the connection.
_IDLE_S = 0.05


class Pipeline(Protocol):
    """Used by one caller at a time, which may be cancelled at any point."""

    async def execute(self, commands: Sequence[Command]) -> list[Any]:
        """Returns a reply per command, in order; a failed command's reply is its exception.
        RedisError or OSError if the server cannot be reached: commands may have been executed."""

    async def ping(self) -> None: ...

    async def close(self) -> None: ...


def pipeline_for(client: Client) -> Pipeline:
    if isinstance(client, redis.asyncio.Redis):
        return ConnectionPipeline(client)
    return ClusterPipeline(client)


class ConnectionPipeline:
    """One connection, opened on first use and reopened after a failure."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        pool = client.connection_pool
        self._connection_class = pool.connection_class
        self._settings = {**pool.connection_kwargs, "socket_timeout": None}
        self._connection: AbstractConnection | None = None
        self._used_at = 0.0

    async def execute(self, commands: Sequence[Command]) -> list[Any]:
        connection = await self._ready()
        self._connection = None  # never reuse a connection with unread replies
        try:
            packed = [pack_command(each) for each in commands]  # redis-py's own is in Python
            await connection.send_packed_command(packed, check_health=False)
            replies = [await _read_reply(connection) for _ in commands]
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        self._connection, self._used_at = connection, time.monotonic()
        return replies

    async def ping(self) -> None:
        await self.execute([("PING",)])

    async def close(self) -> None:
        current, self._connection = self._connection, None
        if current is not None:
            await current.disconnect(nowait=True)

    async def _ready(self) -> AbstractConnection:
        current = self._connection
        if current is not None and time.monotonic() - self._used_at < _IDLE_S:
            return current
        if current is not None:
            try:
                if not await current.can_read():
                    return current
            except (ConnectionLost, OSError):
                pass
            await self.close()
        opened: AbstractConnection = self._connection_class(**self._settings)
        await opened.connect()  # type: ignore[no-untyped-call]
        return opened


class ClusterPipeline:
    """Uses the cluster client's pipelines, which send each command to its slot's node."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def execute(self, commands: Sequence[Command]) -> list[Any]:
        pipe = self._client.pipeline(transaction=False)
        for command in commands:
            pipe.execute_command(*command)
        return list(await pipe.execute(raise_on_error=False))

    async def ping(self) -> None:
        await self._client.ping()

    async def close(self) -> None:
        """No-op: the client owns the connections."""


async def _read_reply(connection: AbstractConnection) -> Any:
    try:
        return await connection.read_response(timeout=math.inf)
    except ResponseError as error:
        return error
