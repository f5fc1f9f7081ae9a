"""The queue: priorities in order, within a priority tenants by fairness, then by arrival.

A tenant's requests are grouped by adapter, so that a request which must wait for an adapter's slot
does not block requests that need not.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from engine.fairness import FairOrder, Levels
from engine.sequence import Sequence, Stage

OVERTAKES = 16  # most times that later requests of a tenant go before an older one
TENANTS = 10_000  # counters kept before those of idle tenants are pruned
LOOK = 4  # tenants, and requests per tenant and adapter, that locality compares


class TenantQueue:
    """One tenant's waiting sequences: by adapter, each list sorted by arrival."""

    def __init__(self) -> None:
        self.size = 0
        self._lists: dict[str | None, list[tuple[float, int, Sequence]]] = {}

    def push(self, seq: Sequence) -> None:
        entries = self._lists.setdefault(seq.request.ask.adapter, [])
        insort(entries, (seq.request.arrived, seq.number, seq))
        self.size += 1

    def remove(self, seq: Sequence) -> None:
        adapter = seq.request.ask.adapter
        entries = self._lists[adapter]
        # Numbers are unique, so this finds the entry itself.
        del entries[bisect_left(entries, (seq.request.arrived, seq.number))]
        if not entries:
            del self._lists[adapter]
        self.size -= 1

    def by_arrival(self, usable: Callable[[str | None], bool], depth: int) -> list[Sequence]:
        """The oldest `depth` of each usable adapter, oldest first."""
        found = []
        for adapter, entries in self._lists.items():
            if usable(adapter):
                found.extend(entries[:depth])
        if len(found) > 1:
            found.sort()
        return [seq for _, _, seq in found]

    def note_overtaken(self, seq: Sequence) -> None:
        """`seq` is admitted: if an older one with its adapter waits, count that as overtaken."""
        eldest = self._lists[seq.request.ask.adapter][0][2]
        if eldest is not seq:
            eldest.overtaken += 1

    def __iter__(self) -> Iterator[Sequence]:
        for entries in self._lists.values():
            yield from (seq for _, _, seq in entries)


class Lane:
    def __init__(self, levels: Levels) -> None:
        self.order = FairOrder(levels)
        self.tenants: dict[str, TenantQueue] = {}


class Waiting:
    """All waiting sequences, and the order in which to try them."""

    def __init__(self, levels: Levels, *, fair: bool, quantum: float) -> None:
        self._levels = levels
        self._fair = fair
        self._quantum = quantum
        self._lanes: dict[int, Lane] = {}
        self.size = 0
        self.tokens = 0
        self.by_tenant: dict[str, int] = {}
        self._prune_at = TENANTS

    def share_of(self, seq: Sequence) -> str:
        """The counter that a sequence is charged to: its tenant's, or "" for all when first come,
        first served."""
        return seq.request.ask.namespace if self._fair else ""

    def push(self, seq: Sequence, *, lift: bool) -> None:
        """Add a sequence; `lift` is True for new arrivals and False for preempted sequences."""
        ask, share = seq.request.ask, self.share_of(seq)
        lane = self._lanes.get(ask.priority)
        if lane is None:
            lane = self._lanes[ask.priority] = Lane(self._levels)
        lane.order.join(share, lift=lift)
        lane.tenants.setdefault(share, TenantQueue()).push(seq)
        if len(self._levels) > self._prune_at:
            self._prune(lane)
        seq.stage = Stage.WAITING
        self.size += 1
        self.tokens += len(seq.history)
        self.by_tenant[ask.namespace] = self.by_tenant.get(ask.namespace, 0) + 1

    def _prune(self, lane: Lane) -> None:
        least = self._levels.of(lane.order.first(1)[0])
        self._levels.prune({s for each in self._lanes.values() for s in each.tenants}, least)
        self._prune_at = max(TENANTS, 2 * len(self._levels))

    def remove(self, seq: Sequence, stage: Stage) -> None:
        """Remove a waiting sequence and set its new status."""
        ask, share = seq.request.ask, self.share_of(seq)
        lane = self._lanes[ask.priority]
        queue = lane.tenants[share]
        seq.stage = stage
        if stage is Stage.RUNNING:
            queue.note_overtaken(seq)
        queue.remove(seq)
        if queue.size == 0:
            del lane.tenants[share]
            lane.order.leave(share)
            if not lane.tenants:
                del self._lanes[ask.priority]
        self.size -= 1
        self.tokens -= len(seq.history)
        self.by_tenant[ask.namespace] -= 1
        if self.by_tenant[ask.namespace] == 0:
            del self.by_tenant[ask.namespace]

    def charge(self, seq: Sequence, cost: float) -> None:
        if cost:
            self._levels.charge(self.share_of(seq), cost, seq.request.ask.weight)

    def refund(self, seq: Sequence, cost: float) -> None:
        share = self.share_of(seq)
        self._levels.charge(share, -cost, seq.request.ask.weight)
        for lane in self._lanes.values():
            lane.order.lowered(share)

    def turn(self, seq: Sequence) -> tuple[int, float, float]:
        """Sort key of the admission order: highest priority, least served tenant, oldest."""
        ask = seq.request.ask
        return (-ask.priority, self._levels.of(self.share_of(seq)), seq.request.arrived)

    def first_turn(self) -> tuple[int, float] | None:
        """The sort key of the first tenant, without the arrival of its requests."""
        if not self._lanes:
            return None
        priority = max(self._lanes)
        share = self._lanes[priority].order.first(1)[0]
        return (-priority, self._levels.of(share))

    def __iter__(self) -> Iterator[Sequence]:
        for lane in self._lanes.values():
            for queue in lane.tenants.values():
                yield from queue

    def candidates(
        self, usable: Callable[[str | None], bool], hits: Callable[[Sequence], int]
    ) -> Iterator[Sequence]:
        """Sequences in the order in which to try them. The caller may change the queue only if it
        then stops iterating."""
        for priority in sorted(self._lanes, reverse=True):
            lane = self._lanes[priority]
            shares = lane.order.first(LOOK)
            near = self._near(shares)
            if near:
                yield from self._by_prefix(lane, near, usable, hits)
            for share in shares:
                yield from lane.tenants[share].by_arrival(usable, depth=1)
            if len(lane.order) > len(shares):
                for share in lane.order.first(len(lane.order))[len(shares) :]:
                    yield from lane.tenants[share].by_arrival(usable, depth=1)

    def _near(self, shares: list[str]) -> list[str]:
        """The tenants within `quantum` of the least served, among which locality may choose."""
        if not self._quantum:
            return []
        least = self._levels.of(shares[0])
        return [s for s in shares[:LOOK] if self._levels.of(s) <= least + self._quantum]

    def _by_prefix(
        self,
        lane: Lane,
        near: list[str],
        usable: Callable[[str | None], bool],
        hits: Callable[[Sequence], int],
    ) -> Iterator[Sequence]:
        """Deficit and longest prefix (arXiv 2501.14312): the longest cached prefix first."""
        best: Sequence | None = None
        best_hits = 0
        elders: list[Sequence] = []
        for share in near:
            queue = lane.tenants[share].by_arrival(usable, depth=LOOK)[: LOOK * LOOK]
            if not queue:
                continue
            if queue[0].overtaken >= OVERTAKES:
                queue = queue[:1]
            elders.append(queue[0])
            for seq in queue:
                count = hits(seq)
                if count > best_hits:
                    best, best_hits = seq, count
        if best is None or best is elders[0]:
            return
        yield best
