"""The tiers that the settings name."""

import hashlib
from collections.abc import Callable
from pathlib import Path

from engine.batch import Runner
from engine.cache.blocks import BlockPool
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.extras import imports_of
from engine.metrics import Metrics
from engine.scheduling.sequence_keys import SequenceKeys
from engine.tiers.disk import DiskTier
from engine.tiers.memory import MemoryTier
from engine.tiers.sealing import checked, read_key, with_checksum
from engine.tiers.store import SealedTier, TierStore
from engine.tiers.tier import Tier
from engine.tiers.transfers import Transfers

_FORMAT = "1"  # of what is stored; another one finds nothing


def open_transfers(
    config: EngineConfig,
    runner: Runner,
    pool: BlockPool,
    keys: SequenceKeys,
    metrics: Metrics,
    clock: Callable[[], float],
) -> Transfers:
    """Raises ConfigError, which names the setting at fault."""
    store = open_tiers(config, runner)
    return Transfers(store, runner, pool, keys, metrics, wait_s=config.tier_wait_s, clock=clock)


def open_tiers(config: EngineConfig, runner: Runner) -> TierStore:
    """Without tiers where none is set. Raises ConfigError, which names the setting at fault."""
    tiers = []
    if config.tier_ram_bytes:
        memory = MemoryTier(config.tier_ram_bytes, config.tier_ttl_s)
        tiers.append(SealedTier(memory, with_checksum, checked))
    if config.tier_disk or config.tier_remote:
        if config.tier_key_file is None:
            raise ConfigError(
                "tier_disk and tier_remote need tier_key_file, the key that their blocks are "
                "encrypted with: openssl rand -hex 32 > FILE"
            )
        with imports_of("engine", "An encrypted tier"):
            from engine.tiers.cipher import Cipher
        cipher = Cipher(read_key(Path(config.tier_key_file)))
        if config.tier_disk:
            disk = DiskTier(Path(config.tier_disk), config.tier_disk_bytes, config.tier_ttl_s)
            tiers.append(SealedTier(disk, cipher.seal, cipher.open))
        if config.tier_remote:
            remote = open_remote(config.tier_remote, config.tier_ttl_s)
            tiers.append(SealedTier(remote, cipher.seal, cipher.open))
    return TierStore(tiers, scope_of(runner))


def open_remote(url: str, ttl_s: float) -> Tier:
    """In S3 or Redis, as the address says. Raises ConfigError."""
    if url.startswith("s3:"):
        from engine.tiers.s3_tier import S3Tier

        return S3Tier(url, ttl_s)
    with imports_of("engine", "A tier in Redis"):
        from engine.tiers.redis_tier import RedisTier
    return RedisTier(url, ttl_s)


def scope_of(runner: Runner) -> str:
    """What blocks must have in common to be exchanged: the keys have the rest."""
    info = runner.info
    parts = (_FORMAT, info.base_digest, info.dtype, str(info.block_size), runner.layout)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
