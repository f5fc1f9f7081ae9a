"""The counters that the settings ask for: this process's own, or those that processes share in Redis.

Apart from the composition, so that `serve` refuses wrong settings before it imports the gateway.
"""

from core.clock import Clock
from core.counters import Counters
from core.counters_memory import MemoryCounters
from core.errors import SettingError
from core.settings import Settings


def make_counters(settings: Settings, clock: Clock, *, timeout_s: float | None = None) -> Counters:
    if settings.redis_url:
        # Its client takes 0.3 s to import, which a gateway without Redis need not wait for.
        from core.counters_redis import TIMEOUT_S, RedisCounters

        return RedisCounters(settings.redis_url, timeout_s=timeout_s or TIMEOUT_S)
    if settings.workers > 1:
        raise SettingError(
            f"TOLLHOUSE_WORKERS is {settings.workers}, but without Redis each worker would count "
            "limits separately.",
            next_step="Set TOLLHOUSE_REDIS_URL, or run one worker.",
        )
    return MemoryCounters(clock)
