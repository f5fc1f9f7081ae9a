"""Moves blocks between the pool and the tiers while steps run.

A block that enters the prefix cache is copied out at one of the next steps, and a thread stores it.
Before a waiting sequence is admitted, its next blocks that are not in the pool are read by a thread and
entered in the prefix cache, where the admission finds them like any others: what it counts as cached,
and which tenants share, follows the same rules. Nothing here can change a token: a block that is late,
lost or wrong is computed.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import takewhile

from engine.batch import Runner
from engine.cache.blocks import BlockPool
from engine.metrics import Metrics
from engine.protocol import KvEvent
from engine.scheduling.sequence import Sequence
from engine.scheduling.sequence_keys import SequenceKeys
from engine.tiers.store import Owned, TierStore

log = logging.getLogger("tollhouse.engine")

STEP_BYTES = 8 << 20  # copied out of the pool before a step: a few milliseconds
QUEUE_BYTES = 256 << 20  # copied out and not stored yet
READ_BYTES = 64 << 20  # of one read
CLOSE_S = 10.0  # that the end of the engine waits for writes


@dataclass(slots=True)
class Loading:
    """The reads of one waiting sequence."""

    since: float
    namespace: str
    keys: list[bytes] = field(default_factory=list)  # of its leading blocks, up to the last wanted
    first: int = 0  # the first of them that is read
    wanted: list[Owned] = field(default_factory=list)
    future: "Future[list[bytes]] | None" = None
    done: bool = False  # nothing more is read for it


class Transfers:
    """Called by the engine's thread only."""

    def __init__(
        self,
        store: TierStore,
        runner: Runner,
        pool: BlockPool,
        keys: SequenceKeys,
        metrics: Metrics,
        *,
        wait_s: float,
        clock: Callable[[], float],
    ) -> None:
        """`wait_s`: the longest that a sequence waits for its reads."""
        self._store = store
        self._runner = runner
        self._pool = pool
        self._keys = keys
        self._metrics = metrics
        self._wait_s = wait_s
        self._clock = clock
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="tier-writer")
        self._readers = ThreadPoolExecutor(2, thread_name_prefix="tier-reader")
        self._writes: list[tuple[int, Future[None]]] = []  # (bytes, write)
        self._loads: dict[int, Loading] = {}  # by sequence
        self._late: list[Future[list[bytes]]] = []  # reads that nobody waits for
        if store:
            pool.fresh, keys.fetching = [], self.fetching

    @property
    def busy(self) -> bool:
        return bool(self._pool.fresh or self._writes or self._loads)

    def poll(self, *, idle: bool) -> None:
        """Enter what was read in the cache, and copy out what is new there. `idle`: no step waits."""
        for load in self._loads.values():
            if load.future is not None and load.future.done():
                self._enter(load)
        self._late = [each for each in self._late if not each.done()]
        self._writes = [each for each in self._writes if not each[1].done()]
        self._copy_out(QUEUE_BYTES if idle else STEP_BYTES)
        self._take_notes()

    def fetching(self, seq: Sequence, hits: int) -> bool:
        """Whether the sequence, whose first `hits` blocks are in the pool, waits for more of them."""
        load = self._loads.get(seq.number)
        if load is None:
            load = Loading(self._clock(), seq.request.inputs.namespace)
        if load.done or self._late:
            return False
        if self._clock() - load.since > self._wait_s:
            self._give_up(load)
            return False
        if load.future is None:
            # What was read and does not help is not read again: it has left the pool, or layers with
            # a window lack their parts.
            load.done = bool(load.wanted) and hits <= load.first
        if load.future is None and not load.done:
            self._begin(load, seq, hits)
        if load.future is not None:
            self._loads[seq.number] = load
        return load.future is not None

    def forget(self, seq: Sequence) -> None:
        load = self._loads.pop(seq.number, None)
        if load is not None and load.future is not None:
            load.future.cancel()

    def residency(self) -> list[KvEvent]:
        """What the prefix cache and the tiers hold now, for a router that begins to listen."""
        cached = [key.hex() for key in self._pool.cached_keys()]
        below = [
            KvEvent("stored", [_key(name) for name in names], tier=label)
            for label, names in self._store.names().items()
            if names
        ]
        return [KvEvent("stored", cached), *below] if cached else below

    def close(self) -> None:
        """Store what is still to be stored, for at most `CLOSE_S`."""
        self._copy_out(QUEUE_BYTES)
        deadline = self._clock() + CLOSE_S
        for _, write in self._writes:
            try:
                write.result(max(0.0, deadline - self._clock()))
            except TimeoutError:
                log.warning("the tiers are slow: blocks that were not stored yet are lost")
                break
        self._writer.shutdown(wait=False, cancel_futures=True)
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._store.close()

    def _begin(self, load: Loading, seq: Sequence, hits: int) -> None:
        most = max(1, READ_BYTES // self._runner.block_bytes)
        count = min(self._keys.limit(seq) - hits, most, self._pool.available(load.namespace))
        if count <= 0:
            return
        self._keys.extend(seq, hits + count)
        wanted = [(self._keys.owner(seq, n), seq.keys[n]) for n in range(hits, hits + count)]
        if not self._store.holds(wanted[0]) and not self._store.asks_others:
            return
        load.keys, load.first, load.wanted = seq.keys[: hits + count], hits, wanted
        load.future = self._readers.submit(self._store.fetch, wanted)

    def _give_up(self, load: Loading) -> None:
        if load.future is not None and not load.future.cancel():
            self._late.append(load.future)
        load.future, load.done = None, True
        self._metrics.add("tier_timeouts")
        log.warning("the tiers took longer than %g s: a prompt is computed", self._wait_s)

    def _enter(self, load: Loading) -> None:
        assert load.future is not None
        found = [] if load.future.exception() else load.future.result()
        load.future = None
        load.done = len(found) < len(load.wanted)
        before = [self._pool.find(key) for key in load.keys[: load.first]]
        held = [block for block in before if block is not None]
        if len(held) < load.first:
            load.done = True  # what came before them has left the pool
            return
        for block in held:
            self._pool.share(block)
        sizes = (self._runner.block_bytes, self._runner.bare_bytes)
        fitting = list(takewhile(lambda data: len(data) in sizes, found))
        count = min(len(fitting), self._pool.available(load.namespace))
        blocks = self._pool.allocate(count, load.namespace) or []
        self._runner.write_blocks(blocks, fitting[:count])
        bare = [b for b, each in zip(blocks, fitting, strict=False) if len(each) < sizes[0]]
        self._pool.release_parts(bare)
        known = len(self._pool.fresh or ())
        for number, block in enumerate(blocks, load.first):
            parent = load.keys[number - 1] if number else None
            owner = load.wanted[number - load.first][0]
            self._pool.cache(block, load.keys[number], owner, parent)
        if self._pool.fresh is not None:
            del self._pool.fresh[known:]  # the tiers have them
        self._metrics.add("tier_tokens", len(blocks) * self._pool.block_size)
        self._pool.release(reversed(held + blocks))

    def _copy_out(self, budget: int) -> None:
        fresh = self._pool.fresh
        if not fresh:
            return
        queued = sum(size for size, _ in self._writes)
        size = self._runner.block_bytes
        count = max(0, min(budget, QUEUE_BYTES - queued) // size)
        if not queued:
            count = max(1, count)
        now, self._pool.fresh = fresh[:count], fresh[count:]
        kept = [(block, key) for block, key in now if self._pool.keys[block] == key]
        if not kept:
            return
        owned = [(self._pool.owners[block], key) for block, key in kept]
        data = self._runner.read_blocks([block for block, _ in kept])

        def write() -> None:
            self._store.save(list(zip(owned, data(), strict=True)))

        self._writes.append((size * len(kept), self._writer.submit(write)))

    def _take_notes(self) -> None:
        while self._store.notes:
            note = self._store.notes.popleft()
            self._metrics.add_tier(note.label, note.kind, max(1, len(note.names)))
            told = note.kind in ("stored", "removed") and note.label in self._store.listed
            if told and self._pool.events is not None and note.names:
                keys = [_key(name) for name in note.names]
                self._pool.events.append(KvEvent(note.kind, keys, tier=note.label))


def _key(name: str) -> str:
    return name.rpartition("/")[2]
