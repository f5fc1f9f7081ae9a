"""The adapter registry: which adapters are known, which are on the device, and how many sequences
use them. No torch: the runner copies the weights, the block pool provides device memory, and
`host_tier.py` keeps the copies in host memory.
"""

import logging
import os
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial

from engine.adapter import Adapter, Lack, Place
from engine.batch import AdapterHandle, Runner
from engine.blocks import BlockPool
from engine.config import EngineConfig
from engine.errors import AdapterError, IntegrityError
from engine.host_tier import HostTier, Submit
from engine.metrics import Metrics
from engine.protocol import AdapterState

log = logging.getLogger("tollhouse.engine")

OWNER = "\x00adapters"  # the owner of the adapters' blocks in the pool; never a tenant


class Adapters:
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
        self._wanted: dict[str, float] = {}  # digest -> time from which a request lacks a slot
        self._told: dict[str, tuple[Place, int, str]] = {}
        self.host = HostTier(runner, config.host_adapter_bytes, submit)
        self.known: dict[str, Adapter] = {}

    # Registration.

    def register(self, path: str, state: AdapterState) -> Adapter:
        """Record an adapter that the runner has just read from `path` into host memory."""
        adapter = self.known.get(state.digest)
        if adapter is None:
            size = os.path.getsize(os.path.join(path, "adapter_model.safetensors"))
            need = self._runner.adapter_blocks(state.digest)
            adapter = Adapter(state.digest, path, state.rank, size, need)
            self.known[state.digest] = adapter
        adapter.path, adapter.retired, adapter.failure = path, False, ""
        if adapter.place is Place.ABSENT:
            self.host.take(adapter)
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
        """Count an accepted request for this adapter, which stays known until `settle`."""
        self.find(digest).accepted += 1

    def settle(self, digest: str) -> None:
        adapter = self.known[digest]
        adapter.accepted -= 1
        if not adapter.accepted:
            self._wanted.pop(digest, None)
        self._bury(adapter)

    def retire(self, digest: str) -> AdapterState:
        """Unload: no new requests; running ones keep the weights that they started with."""
        adapter = self.find(digest)
        adapter.retired = True
        self._bury(adapter)
        return adapter.state()

    # Use.

    def slot_to_have(self) -> bool:
        """Whether a slot is free or held by an adapter that no sequence uses."""
        return any(a is None or a.users == 0 for a in self._slots)

    def usable(self, digest: str | None, slot_to_have: bool) -> bool:
        """Whether a request with this adapter is worth trying now."""
        if digest is None:
            return True
        adapter = self.known[digest]
        if adapter.place is Place.RESIDENT:
            return True
        return slot_to_have and adapter.place is not Place.DRAINING and digest not in self._reading

    def acquire(self, digest: str, spare: int, force: bool = False) -> AdapterHandle | Lack:
        """A handle for one more sequence; loads the weights if needed.

        `spare` blocks must stay available beside the adapter's own, for the sequence's KV;
        `force` also takes blocks below other tenants' cache floors.
        """
        adapter = self.known[digest]
        if adapter.place is not Place.RESIDENT:
            lack = self._make_resident(adapter, spare, force)
            if lack is not None:
                return lack
        if adapter.handle is None:
            raise IntegrityError(f"adapter {digest[:12]} is resident without a slot")
        adapter.users += 1
        self._wanted.pop(digest, None)
        self.host.touch(adapter)
        return adapter.handle

    def hold(self, handle: AdapterHandle) -> None:
        """Count one more sequence (a fork) on a handle that is already in use."""
        self._of(handle).users += 1

    def release(self, handle: AdapterHandle) -> None:
        adapter = self._of(handle)
        adapter.users -= 1
        if adapter.users == 0 and adapter.place is Place.DRAINING:
            self._leave_slot(adapter)
        self._bury(adapter)

    def check(self, handle: AdapterHandle) -> None:
        """Raise IntegrityError unless the slot holds the weights that the sequence started with."""
        adapter = self._slots[handle.slot]
        if adapter is None or adapter.handle != handle:
            raise IntegrityError(
                f"slot {handle.slot} no longer holds generation {handle.generation} of adapter "
                f"{handle.digest[:12]}"
            )

    def want(self, digest: str, now: float) -> None:
        """Note that a request waits only for this adapter's slot. Its weights are read meanwhile,
        if they fit into host memory beside those that other requests wait for."""
        self._wanted.setdefault(digest, now)
        adapter = self.known[digest]
        unread = adapter.place is Place.ABSENT and digest not in self._reading
        if unread and self.host.has_room((*self._reading.values(), adapter)):
            self._read(adapter)

    def drain_for_waiting(self, now: float) -> None:
        """Drain one busy adapter for every adapter that has waited `adapter_drain_s`, at most half
        of the slots at once. A draining adapter takes no new sequences, so it frees its slot."""
        aged = sum(now - since >= self._drain_s for since in self._wanted.values())
        if not aged:
            return
        places = [a.place for a in self._slots if a is not None]
        most = min(aged, max(1, len(self._slots) // 2))
        busy = [a for a in self._slots if a is not None and a.place is Place.RESIDENT]
        busy.sort(key=lambda a: (a.users, a.last_used))
        for adapter in busy[: max(0, most - places.count(Place.DRAINING))]:
            self._drain(adapter)

    def evict_idle(self) -> bool:
        """Free the slot and blocks of the least recently used adapter that no sequence uses."""
        idle = [a for a in self._slots if a and a.place is Place.RESIDENT and a.users == 0]
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
        now = {d: (a.place, a.generation, a.failure) for d, a in list(self.known.items())}
        changed = [self.known[d].state() for d, told in now.items() if self._told.get(d) != told]
        gone = [AdapterState(d, "gone", 0, 0) for d in self._told if d not in now]
        self._told = now
        return changed + gone

    def blocks_held(self) -> Iterator[int]:
        for adapter in self._slots:
            if adapter is not None:
                yield from adapter.blocks or ()

    def check_integrity(self, users: dict[str, int]) -> None:
        """`users` counts the sequences that hold a handle, by adapter digest."""
        for slot, adapter in enumerate(self._slots):
            if adapter is None:
                continue
            if adapter.handle is None or adapter.handle.slot != slot:
                raise IntegrityError(f"slot {slot} and its adapter disagree")
            if adapter.handle.generation != self._generations[slot]:
                raise IntegrityError(f"slot {slot} holds a stale generation")
        for adapter in self.known.values():
            name = adapter.digest[:12]
            if adapter.users != users.get(adapter.digest, 0):
                raise IntegrityError(
                    f"adapter {name} counts {adapter.users} users, "
                    f"has {users.get(adapter.digest, 0)}"
                )
            in_slot = adapter.place in (Place.RESIDENT, Place.DRAINING)
            if in_slot != (adapter.handle is not None) or in_slot != (adapter in self._slots):
                raise IntegrityError(f"adapter {name} must not be {adapter.place} now")
        self.host.check_integrity(self.known.values())

    # Transitions.

    def _make_resident(self, adapter: Adapter, spare: int, force: bool) -> Lack | None:
        if adapter.place is Place.ABSENT:
            self._read(adapter)
            return Lack.WEIGHTS
        if adapter.place is not Place.HOST:
            return Lack.SLOT
        self.host.touch(adapter)
        self.host.spared = adapter
        if None not in self._slots and not self.evict_idle():
            return Lack.SLOT
        while self._pool.available(OWNER, force) < adapter.need + spare:
            if not self.evict_idle():
                return Lack.BLOCKS
        blocks = self._pool.allocate(adapter.need, OWNER, force)
        if blocks is None:
            return Lack.BLOCKS
        return None if self._load(adapter, blocks) else Lack.WEIGHTS

    def _load(self, adapter: Adapter, blocks: list[int]) -> bool:
        slot = self._slots.index(None)
        self._generations[slot] += 1
        handle = AdapterHandle(adapter.digest, slot, self._generations[slot])
        adapter.move(Place.LOADING)
        try:
            self._runner.load_adapter(handle, blocks)
        except IntegrityError:
            raise
        except Exception as error:
            log.exception("adapter %s could not be moved to the device", adapter.digest[:12])
            self._pool.release(reversed(blocks))
            adapter.move(Place.HOST)
            self._fail(adapter, f"the adapter could not be moved to the device: {error}")
            return False
        adapter.handle, adapter.blocks, adapter.generation = handle, blocks, handle.generation
        self._slots[slot] = adapter
        adapter.move(Place.RESIDENT)
        self._metrics.add("adapter_loads")
        return True

    def _drain(self, adapter: Adapter) -> None:
        adapter.move(Place.DRAINING)
        if adapter.users == 0:
            self._leave_slot(adapter)

    def _leave_slot(self, adapter: Adapter) -> None:
        handle, blocks = adapter.handle, adapter.blocks
        if handle is None or blocks is None:
            raise IntegrityError(f"adapter {adapter.digest[:12]} has no slot to leave")
        self._runner.unload_adapter(handle)
        self._pool.release(reversed(blocks))
        self._slots[handle.slot] = None
        adapter.handle = adapter.blocks = None
        adapter.move(Place.HOST)
        self.host.trim()

    def _bury(self, adapter: Adapter) -> None:
        """Remove a retired adapter once its last accepted request has ended."""
        if (
            not adapter.retired
            or adapter.accepted
            or adapter.users
            or adapter.digest in self._reading
        ):
            return
        if adapter.place is Place.RESIDENT:
            self._drain(adapter)
        if adapter.place is Place.HOST:
            self.host.drop(adapter)
        self.known.pop(adapter.digest, None)
        self._wanted.pop(adapter.digest, None)

    # Reading.

    def _read(self, adapter: Adapter) -> None:
        if adapter.digest not in self._reading:
            self._reading[adapter.digest] = adapter
            self.host.read(adapter.path, partial(self._take_in, adapter))

    def _take_in(self, adapter: Adapter, future: "Future[AdapterState]") -> None:
        del self._reading[adapter.digest]
        error = future.exception()
        if error is not None:
            self._fail(adapter, str(error))
        elif future.result().digest != adapter.digest:
            if future.result().digest not in self.known:
                self._runner.drop_adapter(future.result().digest)
            self._fail(adapter, f"{adapter.path} now holds other weights: load it again")
        elif adapter.place is Place.ABSENT:  # otherwise a gateway loaded it meanwhile
            adapter.failure = ""
            self.host.take(adapter)
        self._bury(adapter)

    def _fail(self, adapter: Adapter, why: str) -> None:
        adapter.failure = why
        self._failed.append(adapter)

    def _of(self, handle: AdapterHandle) -> Adapter:
        self.check(handle)
        adapter = self._slots[handle.slot]
        if adapter is None:
            raise IntegrityError(f"slot {handle.slot} is empty")
        return adapter
