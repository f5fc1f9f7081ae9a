"""Counters between processes: no race admits one too many, and no dead holder keeps its place."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from core.counters import BucketGrant, BucketRequest, Cap, Denial, Hold, Slot
from core.counters_redis import RedisCounters
from tests.conftest import REDIS, need_redis
from tests.contracts.counter_worker import CAP, CAPACITY
from tests.contracts.redis_keys import forget, new_prefix

WORKER = "tests.contracts.counter_worker"
ROOT = Path(__file__).parents[2]


@pytest.fixture
def prefix() -> Iterator[str]:
    need_redis()
    made = new_prefix()
    yield made
    forget(made)


@pytest.fixture
async def counters(prefix: str) -> AsyncIterator[RedisCounters]:
    made = RedisCounters(REDIS, prefix=prefix, timeout_s=10)
    yield made
    await made.close()


@pytest.fixture
def spawn(prefix: str) -> Iterator["Spawn"]:
    spawner = Spawn(prefix)
    yield spawner
    spawner.stop()


class Spawn:
    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._children: list[subprocess.Popen[str]] = []

    def __call__(self, what: str, number: int) -> "subprocess.Popen[str]":
        child = subprocess.Popen(
            [sys.executable, "-m", WORKER, what, REDIS, self._prefix, str(number)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._children.append(child)
        return child

    def stop(self) -> None:
        for child in self._children:
            child.kill()
            child.communicate(timeout=10)


def test_eight_processes_admit_exactly_the_limit(spawn: Spawn) -> None:
    """10,000 attempts on one key: the bucket's 700 get in, and their money is within the cap."""
    children = [spawn("burst", 1_250) for _ in range(8)]
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    admitted = [int(child.communicate(timeout=60)[0]) for child in children]
    # A day's bucket refills one unit in two minutes: none during this test.
    assert sum(admitted) == CAPACITY
    assert CAPACITY * 60 <= CAP


async def test_money_under_the_same_race_stops_at_the_cap(counters: RedisCounters) -> None:
    requests = [
        BucketRequest("org", f"req_{n}", 60_000, hold=Hold(7, 7, (Cap("b", 1_000, 0),)))
        for n in range(300)
    ]
    answers = await asyncio.gather(
        *(counters.reserve(bucket_request) for bucket_request in requests)
    )
    assert sum(isinstance(answer, BucketGrant) for answer in answers) == 1_000 // 7


async def test_a_killed_holder_gives_its_slot_back_within_the_lease(
    counters: RedisCounters, spawn: Spawn
) -> None:
    lease_ms = 1_500
    holder = spawn("hold", lease_ms)
    assert holder.stdout is not None
    assert await asyncio.to_thread(holder.stdout.readline) == "held\n"
    only = (Slot("only", 1),)
    await asyncio.sleep(2 * lease_ms / 1000)  # renewed, it outlives its first lease
    assert isinstance(
        await counters.reserve(BucketRequest("org_race", "a", 1_000, slots=only)), Denial
    )
    os.kill(holder.pid, signal.SIGKILL)
    killed = asked = time.monotonic()
    while isinstance(
        await counters.reserve(BucketRequest("org_race", "b", 1_000, slots=only)), Denial
    ):
        assert asked - killed < lease_ms / 1000 + 0.1, "asked after the lease's end, and refused"
        await asyncio.sleep(0.02)
        asked = time.monotonic()
