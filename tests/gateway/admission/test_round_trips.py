"""What requests ask of the servers beside the gateway: nothing of PostgreSQL, of Redis one round trip."""

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from core.counters_redis import RedisCounters
from tests.conftest import REDIS, need_redis
from tests.gateway.deployment import MODEL, Deployment, running_deployment
from tests.silent_proxy import Silence, ThreadedProxy, proxied

REQUESTS = 100
_OPERATION = re.compile(rb"\$\d+\r\n(reserve|keep|settle|extend)\r\n")


class Trips:
    """Batches of commands that requests cause, and the commands in them."""

    def __init__(self) -> None:
        self.batches = 0
        self.commands: Counter[bytes] = Counter()

    def seen(self, data: bytes, is_answer: bool) -> None:
        if not is_answer and (found := _OPERATION.findall(data)):
            self.batches += 1
            self.commands.update(found)


def _through(url: str, proxy: ThreadedProxy) -> str:
    parts = urlsplit(url)
    credentials, at, _ = parts.netloc.rpartition("@")
    return parts._replace(netloc=credentials + at + proxy.netloc).geturl()


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return parts.hostname or "127.0.0.1", parts.port or {"postgresql": 5432}.get(parts.scheme, 6379)


@contextmanager
def production(path: Path, postgres_url: str) -> Iterator[tuple[Deployment, ThreadedProxy, Trips]]:
    need_redis()
    trips = Trips()
    with (
        proxied(_address(postgres_url)) as postgres,
        proxied(_address(REDIS), trips.seen) as redis,
    ):
        settings = {
            "database_url": _through(postgres_url, postgres),
            "redis_url": _through(REDIS, redis),
        }
        with running_deployment(path, settings=settings) as deployment:
            assert isinstance(deployment.services.counters, RedisCounters)
            yield deployment, postgres, trips
            postgres.heal()


def ask(deployment: Deployment, requests: int) -> None:
    """One client, a request after the other."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    with httpx.Client(headers=deployment.headers, timeout=60) as client:
        for _ in range(requests):
            client.post(f"{deployment.url}/v1/chat/completions", json=body).raise_for_status()


def test_requests_are_answered_while_postgresql_says_nothing_and_by_one_trip_to_redis_each(
    tmp_path: Path, postgres_url: str
) -> None:
    with production(tmp_path, postgres_url) as (deployment, postgres, trips):
        ask(deployment, 2)  # views, connections and the script are there
        postgres.silence(Silence.HANG)
        before, commands = trips.batches, trips.commands.copy()
        ask(deployment, REQUESTS)
        commands = trips.commands - commands
        assert commands[b"reserve"] == REQUESTS
        assert commands[b"settle"] >= REQUESTS - 1, "the last may linger"
        # Where the client takes longer than a settlement lingers, that travels alone.
        assert trips.batches - before <= 1.1 * REQUESTS, commands
