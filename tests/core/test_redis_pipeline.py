"""A kept connection: answers belong to their questions, whatever broke off before."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
import redis.asyncio
from redis.exceptions import RedisError, ResponseError

from core.redis_pipeline import ConnectionPipeline
from tests.conftest import REDIS, need_redis


@pytest.fixture
async def line() -> AsyncIterator[ConnectionPipeline]:
    need_redis()
    client = redis.asyncio.Redis.from_url(REDIS, protocol=2)
    made = ConnectionPipeline(client)
    yield made
    await made.close()
    await client.aclose()


async def test_answers_come_in_order_and_an_error_is_one_of_them(line: ConnectionPipeline) -> None:
    first, wrong, last = await line.execute([("ECHO", "a"), ("NO_SUCH_COMMAND",), ("ECHO", b"b")])
    assert (first, last) == (b"a", b"b")
    assert isinstance(wrong, ResponseError)
    assert await line.execute([("ECHO", "again")]) == [b"again"]


async def test_who_broke_off_leaves_no_answer_for_the_next(line: ConnectionPipeline) -> None:
    await line.ping()
    waiting = asyncio.create_task(line.execute([("BLPOP", "no-such-list", "5")]))
    await asyncio.sleep(0.05)
    waiting.cancel()
    with suppress(asyncio.CancelledError):
        await waiting
    assert await line.execute([("ECHO", "mine")]) == [b"mine"]


@pytest.mark.parametrize("quiet_s", [0.0, 0.1])
async def test_a_connection_that_the_server_closed_is_made_anew(
    line: ConnectionPipeline, quiet_s: float
) -> None:
    (own,) = await line.execute([("CLIENT", "ID")])
    other = redis.asyncio.Redis.from_url(REDIS)
    await other.client_kill_filter(_id=str(own))
    await other.aclose()
    await asyncio.sleep(quiet_s)
    if not quiet_s:  # found out by the call, which may have been done: its caller decides
        with suppress(RedisError, OSError):
            await line.ping()
    (new,) = await line.execute([("CLIENT", "ID")])
    assert new != own


async def test_a_server_that_is_not_there_is_an_error() -> None:
    client = redis.asyncio.Redis.from_url("redis://127.0.0.1:1", protocol=2)
    with pytest.raises((RedisError, OSError)):
        await ConnectionPipeline(client).ping()
    await client.aclose()
