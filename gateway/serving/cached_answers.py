"""The cached answers of all tenants in the memory of this process: bounded, expiring, erasable.

When the memory is full, the tenant that holds the most loses its answer that was used least recently.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from msgspec import Struct

from core import metrics
from core.tenants.response_cache import CacheRule


class CachedAnswer(Struct, frozen=True):
    """An engine's whole output, which is streamed or sent whole like a new one."""

    chunks: bytes  # encoded, all of them
    text: bool  # TextChunks; otherwise TokenChunks
    request_id: str  # of the request that generated it
    stored_s: float  # monotonic: when its request was admitted
    expires_s: float  # monotonic
    epoch: str  # the tenant's last erasure when it was stored


class Lookup:
    """The use that one request makes of the cache."""

    def __init__(self, rule: CacheRule | None, store: "AnswerStore") -> None:
        self.store = store
        self.rule = rule  # None: the request asked to leave the cache alone
        self.refresh = False  # generate again, and keep that
        self.key: bytes | None = None  # None while unknown, and where the request is not cached
        self.epoch = ""
        self.at = 0.0  # monotonic, after admission
        self.hit: CachedAnswer | None = None
        self.note = "off"  # the response header
        self.source = ""  # of a hit, for the usage event


_OVERHEAD = 400  # bytes of an entry besides its chunks, roughly


@dataclass(slots=True)
class _Share:
    """The answers of one tenant, the least recently used first."""

    answers: OrderedDict[bytes, CachedAnswer] = field(default_factory=OrderedDict)
    size: int = 0

    def remove(self, key: bytes) -> int:
        """The bytes that it held."""
        answer = self.answers.pop(key, None)
        freed = _size(answer) if answer is not None else 0
        self.size -= freed
        return freed


class AnswerStore:
    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._shares: dict[str, _Share] = {}
        self._size = 0

    @property
    def size(self) -> int:
        return self._size

    @property
    def tenants(self) -> list[str]:
        return list(self._shares)

    def get(self, tenant_id: str, key: bytes, now: float) -> CachedAnswer | None:
        share = self._shares.get(tenant_id)
        answer = share.answers.get(key) if share is not None else None
        if share is None or answer is None:
            return None
        if answer.expires_s <= now:
            self._remove(tenant_id, [key])
            return None
        share.answers.move_to_end(key)
        return answer

    def put(self, tenant_id: str, key: bytes, answer: CachedAnswer) -> None:
        self._remove(tenant_id, [key])
        if _size(answer) > self.max_bytes // 4:
            return
        share = self._shares.setdefault(tenant_id, _Share())
        share.answers[key] = answer
        share.size += _size(answer)
        self._size += _size(answer)
        while self._size > self.max_bytes:
            largest = max(self._shares, key=lambda each: self._shares[each].size)
            self._remove(largest, [next(iter(self._shares[largest].answers))])
        metrics.response_cache_bytes.set(self._size)

    def drop(self, tenant_id: str, epoch: str | None = None) -> None:
        """Drop the tenant's answers; with `epoch`, those of other epochs."""
        share = self._shares.get(tenant_id)
        if share is not None:
            old = [key for key, each in share.answers.items() if each.epoch != epoch]
            self._remove(tenant_id, old)

    def drop_expired(self, now: float) -> None:
        for tenant_id, share in list(self._shares.items()):
            self._remove(
                tenant_id, [k for k, each in share.answers.items() if each.expires_s <= now]
            )

    def _remove(self, tenant_id: str, keys: Iterable[bytes]) -> None:
        share = self._shares.get(tenant_id)
        if share is None:
            return
        self._size -= sum([share.remove(key) for key in keys])
        if not share.answers:
            del self._shares[tenant_id]
        metrics.response_cache_bytes.set(self._size)


def _size(answer: CachedAnswer) -> int:
    return len(answer.chunks) + _OVERHEAD
