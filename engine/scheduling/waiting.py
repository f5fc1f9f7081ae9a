"""The queue: priorities in order, within a priority tenants by fairness, then by arrival.

A tenant's requests are grouped by adapter, so that a request which must wait for an adapter's slot
does not block requests that need not.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterator

from engine.scheduling.fairness import FairOrder, ServiceCounters
from engine.scheduling.sequence import Sequence, SequenceStatus

MAX_OVERTAKES = 16  # most times that later requests of a tenant go before an older one
PRUNE_AT = 10_000  # counters kept before those of idle tenants are pruned
LOCALITY_DEPTH = 4  # tenants, and requests per tenant and adapter, that locality compares


class TenantQueue:
    """One tenant's waiting sequences: by adapter, each list sorted by arrival."""

    def __init__(self) -> None:
        self.size = 0
        self._lists: dict[str | None, list[tuple[float, int, Sequence]]] = {}

    def push(self, seq: Sequence) -> None:
        entries = self._lists.setdefault(seq.request.inputs.adapter, [])
        insort(entries, (seq.request.arrived, seq.number, seq))
        self.size += 1

    def remove(self, seq: Sequence) -> None:
        adapter = seq.request.inputs.adapter
        entries = self._lists[adapter]
        # Numbers are unique, so this finds the entry itself.
        del entries[bisect_left(entries, (seq.request.arrived, seq.number))]
        if not entries:
            del self._lists[adapter]
        self.size -= 1

    def by_arrival(self, usable: Callable[[str | None], bool], depth: int) -> list[Sequence]:
        """The oldest `depth` of each usable adapter, oldest first."""
        entries_by_arrival = []
        for adapter, entries in self._lists.items():
            if usable(adapter):
                entries_by_arrival.extend(entries[:depth])
        if len(entries_by_arrival) > 1:
            entries_by_arrival.sort()
        return [seq for _, _, seq in entries_by_arrival]

    def note_overtaken(self, seq: Sequence) -> None:
        """`seq` is admitted: if an older one with its adapter waits, count that as overtaken."""
        oldest = self._lists[seq.request.inputs.adapter][0][2]
        if oldest is not seq:
            oldest.overtaken += 1

    def __iter__(self) -> Iterator[Sequence]:
        for entries in self._lists.values():
            yield from (seq for _, _, seq in entries)


class PriorityLevel:
    def __init__(self, counters: ServiceCounters) -> None:
        self.order = FairOrder(counters)
        self.tenants: dict[str, TenantQueue] = {}


class WaitingQueue:
    """All waiting sequences, and the order in which to try them."""

    def __init__(self, counters: ServiceCounters, *, fair: bool, quantum: float) -> None:
        self._counters = counters
        self.fair = fair
        self._quantum = quantum
        self._priorities: dict[int, PriorityLevel] = {}
        self.size = 0
        self.tokens = 0
        self.by_tenant: dict[str, int] = {}
        self.choices: dict[str, int] = {}  # those that the tenant's sequences will have, by tenant
        self.weights: dict[str, float] = {}  # of the tenants in `by_tenant`
        self._prune_at = PRUNE_AT

    def counter_key(self, seq: Sequence) -> str:
        """The counter that a sequence is charged to: its tenant's, or "" for all when first come,
        first served."""
        return seq.request.inputs.namespace if self.fair else ""

    def push(self, seq: Sequence, *, lift: bool, running: Collection[Sequence] = ()) -> None:
        """Add a sequence; `lift` is True for new arrivals and False for preempted sequences. A new
        arrival of a tenant that did not wait starts no lower than the least served of those that do,
        or that have sequences in `running`."""
        inputs, key = seq.request.inputs, self.counter_key(seq)
        level = self._priorities.get(inputs.priority)
        if level is None:
            level = self._priorities[inputs.priority] = PriorityLevel(self._counters)
        others = {self.counter_key(each) for each in running} - {key}
        level.order.join(key, lift=lift, running=others)
        level.tenants.setdefault(key, TenantQueue()).push(seq)
        if len(self._counters) > self._prune_at:
            self._prune(level)
        seq.status = SequenceStatus.WAITING
        self.size += 1
        self.tokens += len(seq.history)
        tenant = inputs.namespace
        self.by_tenant[tenant] = self.by_tenant.get(tenant, 0) + 1
        self.choices[tenant] = self.choices.get(tenant, 0) + seq.choices
        self.weights[tenant] = inputs.weight

    def _prune(self, level: PriorityLevel) -> None:
        least = self._counters.of(level.order.first(1)[0])
        self._counters.prune({s for each in self._priorities.values() for s in each.tenants}, least)
        self._prune_at = max(PRUNE_AT, 2 * len(self._counters))

    def remove(self, seq: Sequence, status: SequenceStatus) -> None:
        """Remove a waiting sequence and set its new status."""
        inputs, key = seq.request.inputs, self.counter_key(seq)
        level = self._priorities[inputs.priority]
        queue = level.tenants[key]
        seq.status = status
        if status is SequenceStatus.RUNNING:
            queue.note_overtaken(seq)
        queue.remove(seq)
        if queue.size == 0:
            del level.tenants[key]
            level.order.leave(key)
            if not level.tenants:
                del self._priorities[inputs.priority]
        self.size -= 1
        self.tokens -= len(seq.history)
        tenant = inputs.namespace
        self.by_tenant[tenant] -= 1
        self.choices[tenant] -= seq.choices
        if self.by_tenant[tenant] == 0:
            del self.by_tenant[tenant], self.choices[tenant], self.weights[tenant]

    def charge(self, seq: Sequence, cost: float) -> None:
        if cost:
            self._counters.charge(self.counter_key(seq), cost, seq.request.inputs.weight)

    def refund(self, seq: Sequence, cost: float) -> None:
        key = self.counter_key(seq)
        self._counters.charge(key, -cost, seq.request.inputs.weight)
        for level in self._priorities.values():
            level.order.lowered(key)

    def level(self, tenant: str) -> float:
        """The tenant's service so far, over its weight."""
        return self._counters.of(tenant if self.fair else "")

    def oldest(self, tenant: str, usable: Callable[[str | None], bool]) -> Sequence | None:
        """The tenant's first sequence of its highest priority whose adapter is usable."""
        for priority in sorted(self._priorities, reverse=True):
            queue = self._priorities[priority].tenants.get(tenant if self.fair else "")
            for seq in queue.by_arrival(usable, depth=1) if queue is not None else ():
                return seq
        return None

    def sort_key(self, seq: Sequence) -> tuple[int, float, float]:
        """Sort key of the admission order: highest priority, least served tenant, oldest."""
        inputs = seq.request.inputs
        return (-inputs.priority, self._counters.of(self.counter_key(seq)), seq.request.arrived)

    def first_sort_key(self) -> tuple[int, float] | None:
        """The sort key of the first tenant, without the arrival of its requests."""
        if not self._priorities:
            return None
        priority = max(self._priorities)
        key = self._priorities[priority].order.first(1)[0]
        return (-priority, self._counters.of(key))

    def __iter__(self) -> Iterator[Sequence]:
        for level in self._priorities.values():
            for queue in level.tenants.values():
                yield from queue

    def candidates(
        self, usable: Callable[[str | None], bool], hits: Callable[[Sequence], int]
    ) -> Iterator[Sequence]:
        """Sequences in the order in which to try them. The caller may change the queue only if it
        then stops iterating."""
        for priority in sorted(self._priorities, reverse=True):
            level = self._priorities[priority]
            keys = level.order.first(LOCALITY_DEPTH)
            near_keys = self._within_quantum(keys)
            if near_keys:
                yield from self._by_prefix(level, near_keys, usable, hits)
            for key in keys:
                yield from level.tenants[key].by_arrival(usable, depth=1)
            if len(level.order) > len(keys):
                for key in level.order.first(len(level.order))[len(keys) :]:
                    yield from level.tenants[key].by_arrival(usable, depth=1)

    def _within_quantum(self, keys: list[str]) -> list[str]:
        """The tenants within `quantum` of the least served, among which locality may choose."""
        if not self._quantum:
            return []
        least = self._counters.of(keys[0])
        return [s for s in keys[:LOCALITY_DEPTH] if self._counters.of(s) <= least + self._quantum]

    def _by_prefix(
        self,
        level: PriorityLevel,
        near_keys: list[str],
        usable: Callable[[str | None], bool],
        hits: Callable[[Sequence], int],
    ) -> Iterator[Sequence]:
        """Deficit and longest prefix (arXiv 2501.14312): the longest cached prefix first."""
        best: Sequence | None = None
        best_hits = 0
        oldest_of_each: list[Sequence] = []
        for key in near_keys:
            queue = level.tenants[key].by_arrival(usable, depth=LOCALITY_DEPTH)[
                : LOCALITY_DEPTH * LOCALITY_DEPTH
            ]
            if not queue:
                continue
            if queue[0].overtaken >= MAX_OVERTAKES:
                queue = queue[:1]
            oldest_of_each.append(queue[0])
            for seq in queue:
                count = hits(seq)
                if count > best_hits:
                    best, best_hits = seq, count
        if best is None or best is oldest_of_each[0]:
            return
        yield best
