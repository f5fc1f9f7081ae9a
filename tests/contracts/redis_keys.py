"""Prefixes of a test's own on the shared Redis, and nothing left under them after it."""

import uuid

import redis

from tests.conftest import REDIS


def new_prefix() -> str:
    return f"tollhouse-test-{uuid.uuid4().hex[:12]}"


def forget(prefix: str) -> None:
    with redis.Redis.from_url(REDIS, socket_timeout=10) as client:
        keys = list(client.scan_iter(match=f"{{{prefix}:*", count=1000))
        if keys:
            client.delete(*keys)
