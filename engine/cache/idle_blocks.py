"""The order in which idle cached blocks are evicted: least recently used, except that a tenant's
newest blocks are protected from other tenants (floor) and that no tenant keeps more than its cap.
"""

from collections import OrderedDict, defaultdict


class IdleBlocks:
    """Cached blocks that no sequence uses. Every operation is O(1).

    A tenant's newest `floor` blocks are protected: only it can take them. Its other blocks can be
    taken by all.
    """

    def __init__(self, floor: int, cap: int | None, floor_total: int) -> None:
        self._floor = floor
        self._cap = cap
        self._floor_total = floor_total  # most protected blocks over all tenants
        self._protected: dict[str, OrderedDict[int, None]] = defaultdict(OrderedDict)
        self._evictable_of: dict[str, OrderedDict[int, None]] = defaultdict(OrderedDict)
        self._evictable: OrderedDict[int, str] = OrderedDict()
        self._owner: dict[int, str] = {}
        self.protected_total = 0

    def __len__(self) -> int:
        return len(self._owner)

    def __contains__(self, block: int) -> bool:
        return block in self._owner

    def usable_by(self, owner: str, force: bool) -> int:
        """Blocks that an allocation for `owner` may take."""
        if force:
            return len(self._owner)
        return len(self._evictable) + len(self._protected.get(owner, ()))

    def add(self, block: int, owner: str) -> int | None:
        """Add a block as the newest; returns a block that exceeds the owner's cap, or None."""
        self._owner[block] = owner
        if self._floor > 0:
            self._protected[owner][block] = None
            self.protected_total += 1
            if (
                len(self._protected[owner]) > self._floor
                or self.protected_total > self._floor_total
            ):
                self._unprotect(owner)
        else:
            self._make_evictable(block, owner)
        if self._cap is None or self.count(owner) <= self._cap:
            return None
        return self._oldest_of(owner)

    def count(self, owner: str) -> int:
        return len(self._protected.get(owner, ())) + len(self._evictable_of.get(owner, ()))

    def remove(self, block: int) -> None:
        owner = self._owner.pop(block)
        if block in self._evictable:
            del self._evictable[block]
            _drop(self._evictable_of, owner, block)
            return
        _drop(self._protected, owner, block)
        self.protected_total -= 1

    def victim(self, owner: str, force: bool) -> int | None:
        """The block that an allocation for `owner` takes next; it is not removed."""
        if self._evictable:
            return next(iter(self._evictable))
        own = self._protected.get(owner)
        if own:
            return next(iter(own))
        if force and self._owner:
            return next(iter(self._owner))
        return None

    def _oldest_of(self, owner: str) -> int:
        own = self._evictable_of.get(owner) or self._protected[owner]
        return next(iter(own))

    def _unprotect(self, owner: str) -> None:
        block, _ = self._protected[owner].popitem(last=False)
        if not self._protected[owner]:
            del self._protected[owner]
        self.protected_total -= 1
        self._make_evictable(block, owner)

    def _make_evictable(self, block: int, owner: str) -> None:
        self._evictable[block] = owner
        self._evictable_of[owner][block] = None


def _drop(table: dict[str, OrderedDict[int, None]], owner: str, block: int) -> None:
    del table[owner][block]
    if not table[owner]:
        del table[owner]
