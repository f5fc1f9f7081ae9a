"""Which adapters are known, where their weights are, and who uses them. No torch: the runner moves
the bytes, the block pool gives the memory.

The life of an adapter: absent -> host -> loading -> resident -> draining -> host -> absent.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum

from engine.batch import AdapterHandle, Runner
from engine.blocks import BlockPool
from engine.errors import AdapterError, IntegrityError
from engine.protocol import AdapterState

OWNER = "\x00adapters"  # the pool's name for what adapters hold; never a tenant


class Lack(StrEnum):
    """Why there is no handle now."""

    SLOT = "slot"
    BLOCKS = "blocks"
    WEIGHTS = "weights"  # still on their way from disk


class Place(StrEnum):
    ABSENT = "absent"
    HOST = "host"
    LOADING = "loading"
    RESIDENT = "resident"
    DRAINING = "draining"


_MOVES = {
    (Place.ABSENT, Place.HOST),
    (Place.HOST, Place.ABSENT),
    (Place.HOST, Place.LOADING),
    (Place.LOADING, Place.RESIDENT),
    (Place.LOADING, Place.HOST),
    (Place.RESIDENT, Place.DRAINING),
    (Place.DRAINING, Place.HOST),
}


@dataclass(eq=False, slots=True)
class Adapter:
    digest: str
    path: str
    rank: int
    bytes: int
    place: Place = Place.ABSENT
    handle: AdapterHandle | None = None
    blocks: list[int] | None = None
    users: int = 0  # running sequences on the handle
    accepted: int = 0  # requests taken and not over: they may still need it
    retired: bool = False  # unloaded by a gateway: no new requests
    reading: "Future[AdapterState] | None" = None
    failure: str = ""
    generation: int = 0

    def move(self, place: Place) -> None:
        if (self.place, place) not in _MOVES:
            raise IntegrityError(f"adapter {self.digest[:12]} cannot go {self.place} -> {place}")
        self.place = place

    def state(self) -> AdapterState:
        return AdapterState(self.digest, self.place.value, self.rank, self.generation, self.failure)


Submit = Callable[[Callable[[], AdapterState]], "Future[AdapterState]"]


def read_now(work: Callable[[], AdapterState]) -> "Future[AdapterState]":
    """Host reads without a thread: for simulations and tests."""
    future: Future[AdapterState] = Future()
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)
    return future


class Adapters:
    """The registry. `known` is ordered by last use, oldest first."""

    def __init__(
        self,
        runner: Runner,
        pool: BlockPool,
        *,
        slots: int,
        host_bytes: int,
        drain_s: float,
        submit: Submit = read_now,
    ) -> None:
        self._runner = runner
        self._pool = pool
        self._slots: list[Adapter | None] = [None] * slots
        self._generations = [0] * slots
        self._host_bytes = host_bytes
        self._drain_s = drain_s
        self._submit = submit
        self._wanted: dict[str, float] = {}  # digest -> since when a request has lacked a slot
        self.known: dict[str, Adapter] = {}
        self.loads = 0
        self.evictions = 0

    # Registration.

    def register(self, path: str, state: AdapterState) -> Adapter:
        """Record what the runner has just read from `path` into the host tier."""
        adapter = self.known.get(state.digest)
        if adapter is None:
            size = os.path.getsize(os.path.join(path, "adapter_model.safetensors"))
            adapter = Adapter(state.digest, path, state.rank, size)
            self.known[state.digest] = adapter
        adapter.path, adapter.rank, adapter.retired, adapter.failure = path, state.rank, False, ""
        if adapter.place is Place.ABSENT:
            adapter.move(Place.HOST)
        self._touch(adapter)
        self._trim_host()
        return adapter

    def accept(self, digest: str) -> None:
        """A request for this adapter was taken; keeps its weights findable until `settle`."""
        adapter = self.known.get(digest)
        if adapter is None or adapter.retired:
            raise AdapterError(
                "adapter_not_found", f"adapter {digest[:12]} is not loaded: load it first"
            )
        adapter.accepted += 1

    def settle(self, digest: str) -> None:
        adapter = self.known[digest]
        adapter.accepted -= 1
        if not adapter.accepted:
            self._wanted.pop(digest, None)
        self._bury(adapter)

    def retire(self, digest: str) -> AdapterState:
        """Unload: no new requests; those under way keep the weights that they began with."""
        adapter = self.known.get(digest)
        if adapter is None or adapter.retired:
            raise AdapterError("adapter_not_found", f"adapter {digest[:12]} is not loaded")
        adapter.retired = True
        self._bury(adapter)
        return adapter.state()

    # Slots.

    def usable(self, digest: str | None) -> bool:
        """Whether a request with this adapter is worth trying now."""
        if digest is None:
            return True
        adapter = self.known[digest]
        if adapter.place is Place.RESIDENT:
            return True
        if adapter.place is Place.DRAINING:
            return False
        if adapter.place is Place.ABSENT and adapter.reading is not None:
            return False
        return any(a is None or a.users == 0 for a in self._slots)

    def acquire(self, digest: str, spare: int, force: bool = False) -> AdapterHandle | Lack:
        """A handle for one more sequence, loading the weights if needed.

        `spare` blocks must stay available beside the adapter's own, for the sequence's KV;
        `force` takes blocks that are spared for other tenants' caches.
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
        self._touch(adapter)
        return adapter.handle

    def hold(self, handle: AdapterHandle) -> None:
        """One more sequence on a handle that is held already (a fork)."""
        self.check(handle)
        self._of(handle).users += 1

    def release(self, handle: AdapterHandle) -> None:
        adapter = self._of(handle)
        adapter.users -= 1
        if adapter.users == 0 and adapter.place is Place.DRAINING:
            self._leave_slot(adapter)
        self._bury(adapter)

    def check(self, handle: AdapterHandle) -> None:
        """The step's guard: the slot must hold exactly the weights that the sequence began with."""
        adapter = self._slots[handle.slot]
        if adapter is None or adapter.handle != handle:
            raise IntegrityError(
                f"slot {handle.slot} no longer holds generation {handle.generation} of adapter "
                f"{handle.digest[:12]}"
            )

    def want(self, digest: str, now: float) -> None:
        """A request waits only for a slot. When it has waited long enough, one adapter is drained:
        it takes no new sequences, so a busy adapter cannot keep its slot for ever."""
        since = self._wanted.setdefault(digest, now)
        if now - since < self._drain_s:
            return
        draining = sum(a is not None and a.place is Place.DRAINING for a in self._slots)
        aged = sum(now - t >= self._drain_s for t in self._wanted.values())
        if draining >= aged:
            return
        busy = [a for a in self._slots if a is not None and a.place is Place.RESIDENT]
        if not busy:
            return
        victim = min(busy, key=lambda a: a.users)  # the first is the least recently used
        self._drain(victim)

    def evict_idle(self) -> bool:
        """Free the slot and blocks of the least recently used adapter that nobody runs on."""
        for adapter in self.known.values():
            if adapter.place is Place.RESIDENT and adapter.users == 0:
                self._drain(adapter)
                self.evictions += 1
                return True
        return False

    def poll(self) -> list[Adapter]:
        """Take in finished host reads; returns the adapters whose read failed."""
        failed = []
        for adapter in [a for a in self.known.values() if a.reading and a.reading.done()]:
            if not self._take_in(adapter):
                failed.append(adapter)
        return failed

    @property
    def reading(self) -> bool:
        return any(a.reading is not None for a in self.known.values())

    def states(self) -> list[AdapterState]:
        return [a.state() for a in list(self.known.values())]

    def blocks_held(self) -> Iterator[int]:
        for adapter in self._slots:
            if adapter is not None:
                yield from adapter.blocks or ()

    def blocks_for(self, digest: str) -> int:
        adapter = self.known[digest]
        if adapter.blocks is not None:
            return len(adapter.blocks)
        return 0 if adapter.place is Place.ABSENT else self._runner.adapter_blocks(digest)

    def check_integrity(self, users: dict[str, int]) -> None:
        """`users` counts the running sequences by adapter digest."""
        for slot, adapter in enumerate(self._slots):
            if adapter is None:
                continue
            if adapter.handle is None or adapter.handle.slot != slot:
                raise IntegrityError(f"slot {slot} and its adapter disagree")
            if adapter.handle.generation != self._generations[slot]:
                raise IntegrityError(f"slot {slot} holds a stale generation")
        for adapter in self.known.values():
            if adapter.users != users.get(adapter.digest, 0):
                raise IntegrityError(
                    f"adapter {adapter.digest[:12]} counts {adapter.users} users, "
                    f"has {users.get(adapter.digest, 0)}"
                )
            in_slot = adapter.place in (Place.RESIDENT, Place.DRAINING)
            if in_slot != (adapter.handle is not None) or in_slot != (adapter in self._slots):
                raise IntegrityError(f"adapter {adapter.digest[:12]} is {adapter.place} wrongly")

    # The moves.

    def _make_resident(self, adapter: Adapter, spare: int, force: bool) -> Lack | None:
        if adapter.place is Place.ABSENT:
            self._read(adapter)
            return Lack.WEIGHTS
        if adapter.place is not Place.HOST:
            return Lack.SLOT
        slot = self._free_slot()
        if slot is None:
            return Lack.SLOT
        need = self._runner.adapter_blocks(adapter.digest)
        while self._pool.available(OWNER, force) < need + spare and self.evict_idle():
            slot = self._free_slot()
        if slot is None or self._pool.available(OWNER, force) < need + spare:
            return Lack.BLOCKS
        blocks = self._pool.allocate(need, OWNER, force)
        if blocks is None:
            return Lack.BLOCKS
        self._generations[slot] += 1
        adapter.move(Place.LOADING)
        handle = AdapterHandle(adapter.digest, slot, self._generations[slot])
        try:
            self._runner.load_adapter(handle, blocks)
        except Exception:
            self._pool.release(reversed(blocks))
            adapter.move(Place.HOST)
            raise
        adapter.handle, adapter.blocks, adapter.generation = handle, blocks, handle.generation
        self._slots[slot] = adapter
        adapter.move(Place.RESIDENT)
        self.loads += 1
        return None

    def _free_slot(self) -> int | None:
        if None not in self._slots and not self.evict_idle():
            return None
        return self._slots.index(None)

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
        self._trim_host()

    def _bury(self, adapter: Adapter) -> None:
        """A retired adapter goes when the last request that was taken for it is over."""
        if not adapter.retired or adapter.accepted or adapter.users or adapter.reading:
            return
        if adapter.place is Place.RESIDENT:
            self._drain(adapter)
        if adapter.place is Place.HOST:
            self._runner.drop_adapter(adapter.digest)
            adapter.move(Place.ABSENT)
        self.known.pop(adapter.digest, None)
        self._wanted.pop(adapter.digest, None)

    def _read(self, adapter: Adapter) -> None:
        if adapter.reading is None:
            adapter.reading = self._submit(lambda: self._runner.register_adapter(adapter.path))

    def _take_in(self, adapter: Adapter) -> bool:
        future, adapter.reading = adapter.reading, None
        if future is None:
            return True
        error = future.exception()
        if error is None and future.result().digest != adapter.digest:
            self._runner.drop_adapter(future.result().digest)
            error = AdapterError("adapter_changed", f"{adapter.path} now holds other weights")
        if error is not None:
            adapter.failure = str(error)
            return False
        adapter.failure = ""
        adapter.move(Place.HOST)
        self._touch(adapter)
        self._trim_host(spared=adapter)
        return True

    def _trim_host(self, spared: Adapter | None = None) -> None:
        """Host memory is bounded: the least recently used copies go, their paths stay known."""
        on_host = [a for a in self.known.values() if a.place is not Place.ABSENT]
        total = sum(a.bytes for a in on_host)
        for adapter in on_host:
            if total <= self._host_bytes:
                return
            if adapter.place is Place.HOST and adapter is not spared:
                self._runner.drop_adapter(adapter.digest)
                adapter.move(Place.ABSENT)
                total -= adapter.bytes

    def _touch(self, adapter: Adapter) -> None:
        self.known.pop(adapter.digest)
        self.known[adapter.digest] = adapter

    def _of(self, handle: AdapterHandle) -> Adapter:
        self.check(handle)
        adapter = self._slots[handle.slot]
        assert adapter is not None
        return adapter
