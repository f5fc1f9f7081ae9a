"""The short way of many small calls to Redis: all of a moment at once, their answers in order.

A pipeline of redis-py takes a connection from its pool, looks at its health and gives it back, with
a timer at each step; that costs more than a script of ours runs. Whoever asks one thing after the
other keeps a connection, and watches the time himself.
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
# What was quiet for so long may have been closed by its server, or by what lies between.
_QUIET_S = 0.05


class Line(Protocol):
    """For one caller at a time, who may be cancelled at any point."""

    async def ask(self, commands: Sequence[Command]) -> list[Any]:
        """An answer each, in order; what one failed with is its answer. RedisError or OSError where
        the server cannot be reached: any of the commands may then have been done."""

    async def ping(self) -> None: ...

    async def close(self) -> None: ...


def line_to(client: Client) -> Line:
    if isinstance(client, redis.asyncio.Redis):
        return KeptLine(client)
    return ClusterLine(client)


class KeptLine:
    """One connection, made when it is first needed, and anew after any that broke off."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        pool = client.connection_pool
        self._make = pool.connection_class
        self._settings = {**pool.connection_kwargs, "socket_timeout": None}
        self._kept: AbstractConnection | None = None
        self._asked_at = 0.0

    async def ask(self, commands: Sequence[Command]) -> list[Any]:
        connection = await self._ready()
        self._kept = None  # nobody finds one with answers to somebody else's questions on it
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
    """By its client's pipes, which send each command to its slot's node."""

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
        """The client closes what it opened."""


async def _answer(connection: AbstractConnection) -> Any:
    try:
        return await connection.read_response(timeout=math.inf)
    except ResponseError as error:
        return error
