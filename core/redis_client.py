"""Connections to Redis or a Redis Cluster: `redis+cluster://`, with TLS `rediss+cluster://`."""

from typing import Any

import redis.asyncio
from redis.asyncio.cluster import RedisCluster

from core.errors import SettingError

Client = redis.asyncio.Redis | RedisCluster
_CLUSTER = "+cluster://"


def is_cluster(url: str) -> bool:
    return _CLUSTER in url


def node_url(url: str) -> str:
    """The plain URL of the node named in a cluster URL."""
    return url.replace(_CLUSTER, "://", 1)


def connect(url: str, *, timeout_s: float, connections: int) -> Client:
    """A client; it connects on first use."""
    options: dict[str, Any] = {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "socket_keepalive": True,
        "protocol": 2,
        "max_connections": connections,
    }
    if is_cluster(url):
        return RedisCluster.from_url(node_url(url), **options)
    return redis.asyncio.Redis.from_url(url, **options)


async def check_mode(client: Client) -> None:
    """RedisError if the server does not answer. SettingError if a plain URL names a cluster node,
    which rejects every key of another node."""
    if isinstance(client, RedisCluster):
        await client.initialize()
        return
    info = await client.info("cluster")
    if info.get("cluster_enabled"):
        raise SettingError(
            "TOLLHOUSE_REDIS_URL names one node of a Redis Cluster.",
            next_step="Use redis+cluster:// instead of redis://, or a Redis without cluster mode.",
        )
