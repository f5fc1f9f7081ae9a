"""The cached answers of all tenants in the memory of this process: bounded, expiring, erasable.

When the memory is full, the tenant that holds the most loses its answer that was used least recently.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from core import metrics
from gateway.response_cache.rules import CachedAnswer

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
