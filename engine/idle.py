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
        self._kept: dict[str, OrderedDict[int, None]] = defaultdict(OrderedDict)
        self._open_of: dict[str, OrderedDict[int, None]] = defaultdict(OrderedDict)
        self._open: OrderedDict[int, str] = OrderedDict()
        self._owner: dict[int, str] = {}
        self.kept_total = 0

    def __len__(self) -> int:
        return len(self._owner)

    def __contains__(self, block: int) -> bool:
        return block in self._owner

    def usable_by(self, owner: str, force: bool) -> int:
        """Blocks that an allocation for `owner` may take."""
        if force:
            return len(self._owner)
        return len(self._open) + len(self._kept.get(owner, ()))

    def add(self, block: int, owner: str) -> int | None:
        """Add a block as the newest; returns a block that exceeds the owner's cap, or None."""
        self._owner[block] = owner
        if self._floor > 0:
            self._kept[owner][block] = None
            self.kept_total += 1
            if len(self._kept[owner]) > self._floor or self.kept_total > self._floor_total:
                self._unkeep(owner)
        else:
            self._make_open(block, owner)
        if self._cap is None or self.count(owner) <= self._cap:
            return None
        return self._oldest_of(owner)

    def count(self, owner: str) -> int:
        return len(self._kept.get(owner, ())) + len(self._open_of.get(owner, ()))

    def remove(self, block: int) -> None:
        owner = self._owner.pop(block)
        if block in self._open:
            del self._open[block]
            _drop(self._open_of, owner, block)
            return
        _drop(self._kept, owner, block)
        self.kept_total -= 1

    def victim(self, owner: str, force: bool) -> int | None:
        """The block that an allocation for `owner` takes next; it is not removed."""
        if self._open:
            return next(iter(self._open))
        own = self._kept.get(owner)
        if own:
            return next(iter(own))
        if force and self._owner:
            return next(iter(self._owner))
        return None

    def _oldest_of(self, owner: str) -> int:
        own = self._open_of.get(owner) or self._kept[owner]
        return next(iter(own))

    def _unkeep(self, owner: str) -> None:
        block, _ = self._kept[owner].popitem(last=False)
        if not self._kept[owner]:
            del self._kept[owner]
        self.kept_total -= 1
        self._make_open(block, owner)

    def _make_open(self, block: int, owner: str) -> None:
        self._open[block] = owner
        self._open_of[owner][block] = None


def _drop(table: dict[str, OrderedDict[int, None]], owner: str, block: int) -> None:
    del table[owner][block]
    if not table[owner]:
        del table[owner]
