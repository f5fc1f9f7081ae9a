"""The tier in Redis, shared by engines: bounded by the server's own memory limit and a time to live."""

import redis

from engine.errors import ConfigError
from engine.tiers.tier import RemoteTier

_PREFIX = "tollhouse:kv:"
_TIMEOUT_S = 2.0
_SCAN = 1000  # keys that one call looks at
_AT_ONCE = 16  # blocks in one answer


class RedisTier(RemoteTier):
    """Implements `engine.tiers.tier.Tier`. Reading extends a block's life."""

    def __init__(self, url: str, ttl_s: float, prefix: str = _PREFIX) -> None:
        try:
            self._redis = redis.Redis.from_url(
                url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S
            )
        except ValueError as error:
            raise ConfigError(f"tier_remote is {url!r}: {error}") from None
        self._ttl_ms = max(1, int(ttl_s * 1000))
        self._prefix = prefix

    def read(self, names: list[str]) -> list[bytes]:
        found: list[bytes] = []
        names = names[:_AT_ONCE]
        for data in self._redis.mget([self._prefix + name for name in names]):
            if not isinstance(data, bytes):
                break
            found.append(data)
        with self._redis.pipeline(transaction=False) as calls:
            for name in names[: len(found)]:
                calls.pexpire(self._prefix + name, self._ttl_ms)
            calls.execute()
        return found

    def write(self, name: str, data: bytes) -> list[str]:
        self._redis.set(self._prefix + name, data, px=self._ttl_ms)
        return []

    def erase(self, prefix: str) -> list[str]:
        pattern = f"{self._prefix}{prefix}*"
        for key in self._redis.scan_iter(pattern, count=_SCAN):
            self._redis.unlink(key)
        return []

    def discard(self, name: str) -> None:
        self._redis.unlink(self._prefix + name)

    def close(self) -> None:
        self._redis.close()
