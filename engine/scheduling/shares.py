"""What each tenant holds of the batch, and its share while others wait: places, blocks and slots.

The virtual counters say who is admitted next. They say nothing of a tenant whose long answers hold all
places, so a tenant below its share that was not admitted for a while may take what another holds above
its own. Who gives up something keeps its share, so that it cannot take it back, and shares are whole
numbers: no two tenants preempt each other in turn.
"""

from collections import Counter
from collections.abc import Callable

from engine.config import EngineConfig
from engine.scheduling.sequence import Sequence
from engine.scheduling.waiting import WaitingQueue


class Shares:
    """Reads the scheduler's running sequences and its queue."""

    def __init__(
        self, config: EngineConfig, running: list[Sequence], waiting: WaitingQueue, blocks: int
    ) -> None:
        self._config = config
        self._running = running
        self._waiting = waiting
        self._blocks = blocks
        self._since: dict[str, float] = {}  # from when a waiting tenant was not admitted in turn

    def starved(self, now: float) -> list[str]:
        """The tenants that wait while others run and were not admitted for
        `share_wait_s`, least served first. Call it in every step."""
        waiting = self._waiting.by_tenant
        if not waiting or not self._waiting.fair:
            self._since.clear()
            return []
        self._since = {tenant: self._since.get(tenant, now) for tenant in waiting}
        begun = now - self._config.share_wait_s
        overdue = [t for t, since in self._since.items() if since <= begun and self._others_run(t)]
        return sorted(overdue, key=self._waiting.level)

    def note_turn(self, seq: Sequence, now: float) -> None:
        """The tenant was admitted in its turn, or could not take what it may have."""
        if seq.request.inputs.namespace in self._since:
            self._since[seq.request.inputs.namespace] = now

    def choices_at_once(self, parent: Sequence) -> int:
        """The choices of a running request that begin when it forks; further ones wait for places."""
        tenant = parent.request.inputs.namespace
        free = self._config.max_running - len(self._running) + 1
        if self._waiting.fair and any(each != tenant for each in self._waiting.by_tenant):
            own = sum(each.request.inputs.namespace == tenant for each in self._running)
            free = min(free, self._share_of(self._config.max_running)(tenant) - own + 1)
        return max(1, min(parent.request.inputs.sampling.n, free))

    # Whose sequences a waiting one may replace.

    def place_holders(self, seq: Sequence) -> list[Sequence]:
        """Sequences of tenants with more places than their share, if its own has fewer."""
        held = Counter(each.request.inputs.namespace for each in self._running)
        return self._replaceable(seq, held, 1, self._config.max_running)

    def slot_holders(self, seq: Sequence) -> list[Sequence]:
        """Sequences with adapters of tenants with more adapter slots than their share."""
        slots = {
            (each.request.inputs.namespace, each.handle) for each in self._running if each.handle
        }
        held = Counter(tenant for tenant, _ in slots)
        replaceable = self._replaceable(seq, held, 1, self._config.max_adapter_slots)
        return [each for each in replaceable if each.handle is not None]

    def block_holders(self, seq: Sequence, need: int) -> list[Sequence]:
        """Sequences of tenants with more blocks than their share, if its own stays within its share
        with `need` more."""
        return self._replaceable(seq, self._held_blocks(), need, self._blocks)

    def first_to_give_blocks(self) -> list[Sequence]:
        """Of the sequences of the lowest priority, those of tenants with more blocks than their share;
        all sequences where there are none."""
        running = self._running
        if not self._waiting.fair or not self._others_run(running[0].request.inputs.namespace):
            return running
        lowest = min(each.request.inputs.priority for each in running)
        held, share = self._held_blocks(), self._share_of(self._blocks)
        above = {tenant for tenant, count in held.items() if count > share(tenant)}
        return [
            each
            for each in running
            if each.request.inputs.priority == lowest and each.request.inputs.namespace in above
        ] or running

    def may_take_blocks(self, seq: Sequence, need: int) -> bool:
        """Whether the tenant runs nothing, or stays within its share of blocks with `need` more."""
        tenant = seq.request.inputs.namespace
        if not self._waiting.fair or all(
            each.request.inputs.namespace != tenant for each in self._running
        ):
            return True
        return self._held_blocks()[tenant] + need <= self._share_of(self._blocks)(tenant)

    def _replaceable(
        self, seq: Sequence, held: Counter[str], need: int, total: int
    ) -> list[Sequence]:
        tenant, priority = seq.request.inputs.namespace, seq.request.inputs.priority
        share = self._share_of(total)
        if held[tenant] + need > share(tenant):
            return []
        level = self._waiting.level(tenant)
        above = {
            other
            for other, count in held.items()
            if other != tenant and count > share(other) and self._waiting.level(other) >= level
        }
        return [
            each
            for each in self._running
            if each.request.inputs.namespace in above and each.request.inputs.priority <= priority
        ]

    def _held_blocks(self) -> Counter[str]:
        blocks: dict[str, set[int]] = {}
        for each in self._running:
            blocks.setdefault(each.request.inputs.namespace, set()).update(each.held_blocks)
        return Counter({tenant: len(held) for tenant, held in blocks.items()})

    def _share_of(self, total: int) -> Callable[[str], int]:
        """Of so many places, blocks or slots, for each tenant that waits or runs."""
        weights = self._waiting.weights | {
            each.request.inputs.namespace: each.request.inputs.weight for each in self._running
        }
        per_weight = total / sum(weights.values())
        return lambda tenant: max(1, int(weights.get(tenant, 1.0) * per_weight))

    def _others_run(self, tenant: str) -> bool:
        return any(each.request.inputs.namespace != tenant for each in self._running)
