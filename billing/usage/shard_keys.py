"""The shard of a tenant: shards are rated by one worker each."""

from functools import lru_cache
from zlib import crc32

SHARDS = 16  # the most workers that can rate at once


@lru_cache(maxsize=10_000)
def shard_of(tenant_id: str) -> int:
    """Stored with each batch; another number of shards would change new batches only."""
    return crc32(tenant_id.encode()) % SHARDS
