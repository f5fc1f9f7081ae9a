"""What the API stores for a tenant, in bytes, and the quota of its plan.

The sizes are those of the rows, so they are right no matter which process writes or deletes them. A
process may rely on a sum that is some seconds old: processes together may pass a quota by what a tenant
stores meanwhile.
"""

from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from core.batches.models import StoredFile
from core.clock import Clock
from core.errors import InsufficientQuota
from core.idempotency import StoredResponseRow
from core.responses.models import CompletionRecord, ConversationRecord, ResponseRecord
from core.tenants.models import Adapter
from core.tenants.plans import Plan

_FRESH_S = 5.0
_NEAR = 0.9  # of the quota, from which on each sum is a new one
_MOST_TENANTS = 10_000
_SIZES: dict[str, tuple[Any, ...]] = {
    "files": (StoredFile.bytes, StoredFile.tenant_id),
    "conversations": (ConversationRecord.stored_bytes, ConversationRecord.tenant_id),
    "responses": (ResponseRecord.stored_bytes, ResponseRecord.tenant_id),
    "completions": (CompletionRecord.stored_bytes, CompletionRecord.tenant_id),
    "idempotency": (StoredResponseRow.stored_bytes, StoredResponseRow.tenant_id),
    "adapters": (Adapter.bytes, Adapter.tenant_id, Adapter.removed_at.is_(None)),
}


def quota_of(plan: Plan) -> int:
    """In bytes."""
    return plan.storage_mb << 20


def used(session: Session, tenant_id: str) -> dict[str, int]:
    """Bytes by kind."""
    sums = [
        select(func.coalesce(func.sum(size), 0))
        .where(tenant == tenant_id, *where)
        .scalar_subquery()
        for size, tenant, *where in _SIZES.values()
    ]
    return {
        name: int(size)
        for name, size in zip(_SIZES, session.execute(select(*sums)).one(), strict=True)
    }


class StorageQuotas:
    """The quotas of a process's tenants."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._sums: dict[str, tuple[float, int]] = {}  # when it was read, and the bytes

    def has_room(self, tenant_id: str, plan: Plan, adding: int) -> bool:
        """Whether it is known to fit, without a query."""
        read_at, size = self._sums.get(tenant_id, (float("-inf"), 0))
        fresh = self._clock.monotonic() - read_at <= _FRESH_S
        return fresh and size + adding <= _NEAR * quota_of(plan)

    def add(self, tenant_id: str, size: int) -> None:
        """Counts what was stored without a check, because its size was not known before."""
        read_at, known = self._sums.get(tenant_id, (float("-inf"), 0))
        self._sums[tenant_id] = read_at, known + size

    def check(self, session: Session, tenant_id: str, plan: Plan, adding: int) -> None:
        """Counts what is about to be stored. InsufficientQuota if it does not fit."""
        quota, now = quota_of(plan), self._clock.monotonic()
        read_at, size = self._sums.get(tenant_id, (float("-inf"), 0))
        if now - read_at > _FRESH_S or size + adding > _NEAR * quota:
            read_at, size = now, sum(used(session, tenant_id).values())
        if len(self._sums) >= _MOST_TENANTS:
            self._sums.clear()
        if size + adding > quota:
            self._sums[tenant_id] = read_at, size
            raise storage_is_full(size, adding, plan)
        self._sums[tenant_id] = read_at, size + adding


def storage_is_full(size: int, adding: int, plan: Plan) -> InsufficientQuota:
    return InsufficientQuota(
        f"The organisation stores {size / 2**20:.1f} MiB, and {adding / 2**20:.1f} MiB more would pass "
        f"the {plan.storage_mb} MiB of its plan.",
        next_step="Delete files, conversations, stored responses or adapters, set store to false, or "
        "ask the operator for a plan with more storage_mb.",
        code="storage_quota_exceeded",
    )
