"""The adapter registry: which adapters are known, which are on the device, and how many sequences
use them. No torch: the runner copies the weights, the block pool provides device memory, and
`host_tier.py` keeps the copies in host memory.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from functools import partial

from engine.adapters.adapter import Adapter, AdapterStatus, Shortage
from engine.adapters.host_tier import HostTier, Submit
from engine.batch import AdapterHandle, Runner
from engine.cache.blocks import BlockPool
from engine.config import EngineConfig
from engine.errors import AdapterError, IntegrityError
from engine.metrics import Metrics
from engine.protocol import AdapterState

log = logging.getLogger("tollhouse.engine")

OWNER = "\x00adapters"  # the owner of the adapters' blocks in the pool; never a tenant


class AdapterRegistry:
    """Known adapters and the device slots, whose memory comes from the block pool."""

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        pool: BlockPool,
        metrics: Metrics,
        submit: Submit,
    ) -> None:
        self._runner = runner
        self._pool = pool
        self._metrics = metrics
        self._slots: list[Adapter | None] = [None] * config.max_adapter_slots
        self._generations = [0] * config.max_adapter_slots
        self._drain_s = config.adapter_drain_s
        self._reading: dict[str, Adapter] = {}  # absent adapters being read for a request
        self._failed: list[Adapter] = []
        self._slot_wait_since: dict[
            str, float
        ] = {}  # digest -> time from which a request lacks a slot
        self._reported: dict[str, tuple[AdapterStatus, int, str]] = {}
        self.host = HostTier(runner, config.host_adapter_bytes, submit)
        self.known: dict[str, Adapter] = {}

    # Registration.

    def register(self, path: str, state: AdapterState) -> Adapter:
        """Record an adapter that the runner has just read from `path` into host memory."""
        adapter = self.known.get(state.digest)
        if adapter is None:
            size = self._runner.adapter_host_bytes(state.digest)
            blocks_needed = self._runner.adapter_blocks(state.digest)
            adapter = Adapter(state.digest, path, state.rank, size, blocks_needed)
            self.known[state.digest] = adapter
        adapter.path, adapter.retired, adapter.failure = path, False, ""
        if adapter.status is AdapterStatus.ABSENT:
            self.host.add(adapter)
        return adapter

    def find(self, digest: str) -> Adapter:
        """An adapter that new requests may use. Raises AdapterError."""
        adapter = self.known.get(digest)
        if adapter is None or adapter.retired:
            raise AdapterError(
                "adapter_not_found", f"adapter {digest[:12]} is not loaded: load it first"
            )
        return adapter

    def accept(self, digest: str) -> None:
        """Count an accepted request for this adapter, which stays known until `request_ended`."""
        self.find(digest).open_requests += 1

    def request_ended(self, digest: str) -> None:
        adapter = self.known[digest]
        adapter.open_requests -= 1
        if not adapter.open_requests:
            self._slot_wait_since.pop(digest, None)
        self._remove_if_unused(adapter)

    def retire(self, digest: str) -> AdapterState:
        """Unload: no new requests; running ones keep the weights that they started with."""
        adapter = self.find(digest)
        adapter.retired = True
        self._remove_if_unused(adapter)
        return adapter.state()

    # Use.

    def slot_available(self) -> bool:
        """Whether a slot is free or held by an adapter that no sequence uses."""
        return any(a is None or a.sequences == 0 for a in self._slots)

    def usable(self, digest: str | None, slot_available: bool) -> bool:
        """Whether a request with this adapter is worth trying now."""
        if digest is None:
            return True
        adapter = self.known[digest]
        if adapter.status is AdapterStatus.RESIDENT:
            return True
        return (
            slot_available
            and adapter.status is not AdapterStatus.DRAINING
            and digest not in self._reading
        )

    def loadable(self, digest: str | None) -> bool:
        """Whether a request with this adapter lacks at most a slot and blocks."""
        return digest is None or self.known[digest].status in (
            AdapterStatus.HOST, AdapterStatus.RESIDENT,
        )  # fmt: skip

    def room(self, digest: str | None, released: Iterable[AdapterHandle | None]) -> int | None:
        """Blocks that idle adapters could give up beyond those that this one needs, after the
        handles in `released` are released; below zero when it needs more. None: no slot."""
        adapter = None if digest is None else self.known[digest]
        uses = Counter(handle.slot for handle in released if handle is not None)
        idle = [
            each
            for slot, each in enumerate(self._slots)
            if each is not None and each is not adapter and each.sequences == uses[slot]
        ]
        blocks = sum(each.blocks_needed for each in idle)
        if adapter is None or adapter.status is AdapterStatus.RESIDENT:
            return blocks
        return blocks - adapter.blocks_needed if idle or None in self._slots else None

    def users(self, handle: AdapterHandle) -> int:
        """How many sequences hold this handle."""
        return self._adapter_of(handle).sequences

    def acquire(self, digest: str, spare: int, force: bool = False) -> AdapterHandle | Shortage:
        """A handle for one more sequence; loads the weights if needed.

        `spare` blocks must stay available in addition to the adapter's own, for the sequence's KV;
        `force` also takes blocks below other tenants' cache floors.
        """
        adapter = self.known[digest]
        if adapter.status is not AdapterStatus.RESIDENT:
            shortage = self._make_resident(adapter, spare, force)
            if shortage is not None:
                return shortage
        if adapter.handle is None:
            raise IntegrityError(f"adapter {digest[:12]} is resident without a slot")
        adapter.sequences += 1
        self._slot_wait_since.pop(digest, None)
        self.host.touch(adapter)
        return adapter.handle

    def retain(self, handle: AdapterHandle) -> None:
        """Count one more sequence (a fork) on a handle that is already in use."""
        self._adapter_of(handle).sequences += 1

    def release(self, handle: AdapterHandle) -> None:
        adapter = self._adapter_of(handle)
        adapter.sequences -= 1
        if adapter.sequences == 0 and adapter.status is AdapterStatus.DRAINING:
            self._leave_slot(adapter)
        self._remove_if_unused(adapter)

    def check(self, handle: AdapterHandle) -> None:
        """Raise IntegrityError unless the slot holds the weights that the sequence started with."""
        adapter = self._slots[handle.slot]
        if adapter is None or adapter.handle != handle:
            raise IntegrityError(
                f"slot {handle.slot} no longer holds generation {handle.generation} of adapter "
                f"{handle.digest[:12]}"
            )

    def note_slot_wait(self, digest: str, now: float) -> None:
        """Note that a request waits only for this adapter's slot. Its weights are read meanwhile,
        if they fit into host memory with those that other requests wait for."""
        self._slot_wait_since.setdefault(digest, now)
        adapter = self.known[digest]
        unread = adapter.status is AdapterStatus.ABSENT and digest not in self._reading
        if unread and self.host.fits((*self._reading.values(), adapter)):
            self._read(adapter)

    def drain_for_waiting(self, now: float) -> None:
        """Drain one busy adapter for every adapter that has waited `adapter_drain_s`, at most half
        of the slots at once. A draining adapter takes no new sequences, so it frees its slot."""
        overdue = sum(now - since >= self._drain_s for since in self._slot_wait_since.values())
        if not overdue:
            return
        statuses = [a.status for a in self._slots if a is not None]
        limit = min(overdue, max(1, len(self._slots) // 2))
        busy = [a for a in self._slots if a is not None and a.status is AdapterStatus.RESIDENT]
        busy.sort(key=lambda a: (a.sequences, a.last_used))
        for adapter in busy[: max(0, limit - statuses.count(AdapterStatus.DRAINING))]:
            self._drain(adapter)

    def evict_idle(self) -> bool:
        """Free the slot and blocks of the least recently used adapter that no sequence uses."""
        idle = [
            a for a in self._slots if a and a.status is AdapterStatus.RESIDENT and a.sequences == 0
        ]
        if not idle:
            return False
        self._drain(min(idle, key=lambda a: a.last_used))
        self._metrics.add("adapter_evictions")
        return True

    def poll(self) -> list[Adapter]:
        """Process finished host reads; returns the adapters that could not be read or loaded."""
        self.host.poll()
        failed, self._failed = self._failed, []
        return failed

    # Reporting.

    def states(self) -> list[AdapterState]:
        return [a.state() for a in list(self.known.values())]

    def changes(self) -> list[AdapterState]:
        """The states that changed since the last call; a removed adapter has the state `gone`."""
        now = {d: (a.status, a.generation, a.failure) for d, a in list(self.known.items())}
        changed = [
            self.known[d].state() for d, current in now.items() if self._reported.get(d) != current
        ]
        gone = [AdapterState(d, "gone", 0, 0) for d in self._reported if d not in now]
        self._reported = now
        return changed + gone

    def blocks_held(self) -> Iterator[int]:
        for adapter in self._slots:
            if adapter is not None:
                yield from adapter.blocks or ()

    def check_integrity(self, sequences: dict[str, int]) -> None:
        """`sequences` counts the sequences that hold a handle, by adapter digest."""
        for slot, adapter in enumerate(self._slots):
            if adapter is None:
                continue
            if adapter.handle is None or adapter.handle.slot != slot:
                raise IntegrityError(f"slot {slot} and its adapter disagree")
            if adapter.handle.generation != self._generations[slot]:
                raise IntegrityError(f"slot {slot} holds a stale generation")
        for adapter in self.known.values():
            name = adapter.digest[:12]
            if adapter.sequences != sequences.get(adapter.digest, 0):
                raise IntegrityError(
                    f"adapter {name} counts {adapter.sequences} users, "
                    f"has {sequences.get(adapter.digest, 0)}"
                )
            in_slot = adapter.status in (AdapterStatus.RESIDENT, AdapterStatus.DRAINING)
            if in_slot != (adapter.handle is not None) or in_slot != (adapter in self._slots):
                raise IntegrityError(f"adapter {name} must not be {adapter.status} now")
        self.host.check_integrity(self.known.values())

    # Transitions.

    def _make_resident(self, adapter: Adapter, spare: int, force: bool) -> Shortage | None:
        if adapter.status is AdapterStatus.ABSENT:
            self._read(adapter)
            return Shortage.WEIGHTS
        if adapter.status is not AdapterStatus.HOST:
            return Shortage.ADAPTER_SLOT
        self.host.touch(adapter)
        self.host.protected = adapter
        if None not in self._slots and not self.evict_idle():
            return Shortage.ADAPTER_SLOT
        while self._pool.available(OWNER, force) < adapter.blocks_needed + spare:
            if not self.evict_idle():
                return Shortage.BLOCKS
        blocks = self._pool.allocate(adapter.blocks_needed, OWNER, force)
        if blocks is None:
            return Shortage.BLOCKS
        return None if self._load(adapter, blocks) else Shortage.WEIGHTS

    def _load(self, adapter: Adapter, blocks: list[int]) -> bool:
        slot = self._slots.index(None)
        self._generations[slot] += 1
        handle = AdapterHandle(adapter.digest, slot, self._generations[slot])
        adapter.transition_to(AdapterStatus.LOADING)
        try:
            self._runner.load_adapter(handle, blocks)
        except IntegrityError:
            raise
        except Exception as error:
            log.exception("adapter %s could not be moved to the device", adapter.digest[:12])
            self._pool.release(reversed(blocks))
            adapter.transition_to(AdapterStatus.HOST)
            self._fail(adapter, f"the adapter could not be moved to the device: {error}")
            return False
        adapter.handle, adapter.blocks, adapter.generation = handle, blocks, handle.generation
        self._slots[slot] = adapter
        adapter.transition_to(AdapterStatus.RESIDENT)
        self._metrics.add("adapter_loads")
        return True

    def _drain(self, adapter: Adapter) -> None:
        adapter.transition_to(AdapterStatus.DRAINING)
        if adapter.sequences == 0:
            self._leave_slot(adapter)

    def _leave_slot(self, adapter: Adapter) -> None:
        handle, blocks = adapter.handle, adapter.blocks
        if handle is None or blocks is None:
            raise IntegrityError(f"adapter {adapter.digest[:12]} has no slot to leave")
        self._runner.unload_adapter(handle)
        self._pool.release(reversed(blocks))
        self._slots[handle.slot] = None
        adapter.handle = adapter.blocks = None
        adapter.transition_to(AdapterStatus.HOST)
        self.host.trim()

    def _remove_if_unused(self, adapter: Adapter) -> None:
        """Remove a retired adapter once its last accepted request has ended."""
        if (
            not adapter.retired
            or adapter.open_requests
            or adapter.sequences
            or adapter.digest in self._reading
        ):
            return
        if adapter.status is AdapterStatus.RESIDENT:
            self._drain(adapter)
        if adapter.status is AdapterStatus.HOST:
            self.host.drop(adapter)
        self.known.pop(adapter.digest, None)
        self._metrics.forget_adapter(adapter.digest)
        self._slot_wait_since.pop(adapter.digest, None)

    # Reading.

    def _read(self, adapter: Adapter) -> None:
        if adapter.digest not in self._reading:
            self._reading[adapter.digest] = adapter
            self.host.read(adapter.path, partial(self._read_done, adapter))

    def _read_done(self, adapter: Adapter, future: "Future[AdapterState]") -> None:
        del self._reading[adapter.digest]
        error = future.exception()
        if error is not None:
            self._fail(adapter, str(error))
        elif future.result().digest != adapter.digest:
            if future.result().digest not in self.known:
                self._runner.drop_adapter(future.result().digest)
            self._fail(adapter, f"{adapter.path} now holds other weights: load it again")
        elif adapter.status is AdapterStatus.ABSENT:  # otherwise a gateway loaded it meanwhile
            adapter.failure = ""
            self.host.add(adapter)
        self._remove_if_unused(adapter)

    def _fail(self, adapter: Adapter, why: str) -> None:
        adapter.failure = why
        self._failed.append(adapter)

    def _adapter_of(self, handle: AdapterHandle) -> Adapter:
        self.check(handle)
        adapter = self._slots[handle.slot]
        if adapter is None:
            raise IntegrityError(f"slot {handle.slot} is empty")
        return adapter
