"""Connections to one Redis, or to a Redis Cluster: `redis+cluster://` (`rediss+cluster://` by TLS)."""

from typing import Any

import redis.asyncio
from redis.asyncio.cluster import RedisCluster

from core.errors import SettingError

Client = redis.asyncio.Redis | RedisCluster
_CLUSTER = "+cluster://"


def is_cluster(url: str) -> bool:
    return _CLUSTER in url


def node_url(url: str) -> str:
    """Of the node that the setting names: the way to it alone."""
    return url.replace(_CLUSTER, "://", 1)


def connect(url: str, *, timeout_s: float, connections: int) -> Client:
    """Nothing is sent yet."""
    options: dict[str, Any] = {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": 1.0,
        "protocol": 2,
        "max_connections": connections,
    }
    if is_cluster(url):
        return RedisCluster.from_url(node_url(url), **options)
    return redis.asyncio.Redis.from_url(url, **options)


async def check_kind(client: Client) -> None:
    """RedisError where it does not answer; SettingError of a cluster's node under a plain address:
    it would refuse every tenant whose counters lie on another."""
    if isinstance(client, RedisCluster):
        await client.initialize()
        return
    told = await client.info("cluster")
    if told.get("cluster_enabled"):
        raise SettingError(
            "TOLLHOUSE_REDIS_URL names one node of a Redis Cluster.",
            next_step="Write redis+cluster:// instead of redis://, or name a Redis of its own.",
        )
