"""Virtual token counters: each tenant's service divided by its weight, and the resulting order.

After "Fairness in Serving Large Language Models" (arXiv 2401.00588), with the changes that the
README lists: keyed by tenant, charged per chunk, no credit for idling even when alone.
"""

import heapq
import itertools
from collections.abc import Collection


class ServiceCounters:
    """The weighted service that each tenant has had, in fairness units. Shared by all
    priorities."""

    def __init__(self) -> None:
        self._level: dict[str, float] = {}
        self._last_to_leave = ""  # the tenant that stopped waiting last

    def of(self, tenant: str) -> float:
        return self._level.get(tenant, 0.0)

    def charge(self, tenant: str, cost: float, weight: float) -> None:
        self._level[tenant] = self.of(tenant) + cost / weight

    def lift(self, tenant: str, floor: float | None) -> None:
        """Raise an idle tenant to the level of the waiting or running ones; `floor` is None when there
        are none."""
        self._level[tenant] = max(
            self.of(tenant), self.of(self._last_to_leave) if floor is None else floor
        )

    def note_left(self, tenant: str) -> None:
        self._last_to_leave = tenant

    def __len__(self) -> int:
        return len(self._level)

    def prune(self, keep: set[str], floor: float) -> None:
        """Forget idle tenants whose level the next `lift` would replace anyway."""
        keep = keep | {self._last_to_leave}
        self._level = {t: v for t, v in self._level.items() if t in keep or v > floor}


class FairOrder:
    """Waiting tenants, least served first. The heap is lazy: an entry whose level has risen is
    corrected when it is popped, so that charging costs nothing here."""

    def __init__(self, levels: ServiceCounters) -> None:
        self._counters = levels
        self._heap: list[tuple[float, int, str]] = []
        self._entry: dict[str, int] = {}  # tenant -> serial of its one valid heap entry
        self._serial = itertools.count()

    def __len__(self) -> int:
        return len(self._entry)

    def join(self, tenant: str, *, lift: bool, running: Collection[str] = ()) -> None:
        """`running`: the other tenants that are served now, whose level counts where none waits."""
        if tenant in self._entry:
            return
        if lift:
            level = min(map(self._counters.of, self.first(1) or running), default=None)
            self._counters.lift(tenant, level)
        self._push(tenant)

    def leave(self, tenant: str) -> None:
        del self._entry[tenant]
        self._counters.note_left(tenant)

    def lowered(self, tenant: str) -> None:
        """Call after a refund lowered this tenant's level; increases need no call."""
        if tenant in self._entry:
            self._push(tenant)

    def first(self, count: int) -> list[str]:
        """The `count` least served tenants, in order."""
        popped: list[tuple[float, int, str]] = []
        while self._heap and len(popped) < count:
            level, serial, tenant = heapq.heappop(self._heap)
            if self._entry.get(tenant) != serial:
                continue
            if self._counters.of(tenant) > level:
                self._push(tenant)
                continue
            popped.append((level, serial, tenant))
        for entry in popped:
            heapq.heappush(self._heap, entry)
        return [tenant for _, _, tenant in popped]

    def _push(self, tenant: str) -> None:
        serial = next(self._serial)
        self._entry[tenant] = serial
        heapq.heappush(self._heap, (self._counters.of(tenant), serial, tenant))
