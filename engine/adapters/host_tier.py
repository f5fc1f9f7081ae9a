"""Adapters in host memory, within a budget of bytes, and the reads that bring them from disk."""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass

from engine.adapters.adapter import Adapter, AdapterStatus
from engine.batch import Runner
from engine.errors import IntegrityError
from engine.protocol import AdapterState

Submit = Callable[[Callable[[], AdapterState]], "Future[AdapterState]"]
OnRead = Callable[["Future[AdapterState]"], None]


def read_inline(work: Callable[[], AdapterState]) -> "Future[AdapterState]":
    """Runs `work` in the calling thread: for simulations and tests."""
    future: Future[AdapterState] = Future()
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)
    return future


@dataclass(frozen=True, slots=True)
class PendingRead:
    """A read of an adapter from disk into host memory."""

    path: str
    future: "Future[AdapterState]"
    drop_count: int  # the tier's count of dropped copies when the read began
    on_read: OnRead


class HostTier:
    """Decides which copies the runner keeps; evicts the least recently used first."""

    def __init__(self, runner: Runner, max_bytes: int, submit: Submit) -> None:
        self._runner = runner
        self._max_bytes = max_bytes
        self._submit = submit
        self._copies: OrderedDict[str, Adapter] = OrderedDict()  # least recently used first
        self._bytes = 0
        self._reads: list[PendingRead] = []
        self._queued: deque[tuple[str, OnRead]] = deque()  # for the read that goes on to end
        # Called with the path of each read before it begins.
        self.on_begin: Callable[[str], None] | None = None
        self._drop_count = 0
        self._dropped_at: dict[
            str, int
        ] = {}  # digest -> `_drop_count` after its copy was last dropped
        self._use_count = 0
        self.protected: Adapter | None = None  # about to be used: never evicted, even over budget

    @property
    def reading(self) -> bool:
        return bool(self._reads)

    def read(self, path: str, on_read: OnRead) -> None:
        """Read a PEFT directory into host memory on a thread, after those asked for before; a later
        `poll` calls `on_read` with the finished future."""
        if self._reads:
            self._queued.append((path, on_read))
            return
        if self.on_begin is not None:
            self.on_begin(path)
        future = self._submit(lambda: self._runner.register_adapter(path))
        self._reads.append(PendingRead(path, future, self._drop_count, on_read))

    def poll(self) -> None:
        for read in [read for read in self._reads if read.future.done()]:
            self._reads.remove(read)
            if self._is_stale(read):
                self.read(read.path, read.on_read)
            else:
                read.on_read(read.future)
        while self._queued and not self._reads:
            self.read(*self._queued.popleft())
        if not self._reads:
            self._dropped_at.clear()

    def fits(self, incoming: Iterable[Adapter]) -> bool:
        """Whether these fit together with the copies that requests need."""
        needed = [
            a
            for a in self._copies.values()
            if a.open_requests or a.status is not AdapterStatus.HOST
        ]
        return sum(a.bytes for a in (*needed, *incoming)) <= self._max_bytes

    def add(self, adapter: Adapter) -> None:
        adapter.transition_to(AdapterStatus.HOST)
        self._copies[adapter.digest] = adapter
        self._bytes += adapter.bytes
        self.touch(adapter)
        self.protected = adapter
        self.trim()

    def touch(self, adapter: Adapter) -> None:
        self._use_count += 1
        adapter.last_used = self._use_count
        self._copies.move_to_end(adapter.digest)

    def drop(self, adapter: Adapter) -> None:
        self._runner.drop_adapter(adapter.digest)
        del self._copies[adapter.digest]
        self._bytes -= adapter.bytes
        self._drop_count += 1
        if self._reads:  # only a read that has begun can be stale
            self._dropped_at[adapter.digest] = self._drop_count
        adapter.transition_to(AdapterStatus.ABSENT)

    def trim(self) -> None:
        """Drop copies until the budget holds, first those that no request waits for. Dropped
        adapters stay known by their path."""
        if self._bytes <= self._max_bytes:
            return
        for adapter in sorted(self._copies.values(), key=lambda a: a.open_requests > 0):
            if adapter.status is AdapterStatus.HOST and adapter is not self.protected:
                self.drop(adapter)
            if self._bytes <= self._max_bytes:
                return

    def check_integrity(self, known: Iterable[Adapter]) -> None:
        for adapter in known:
            if (adapter.status is AdapterStatus.ABSENT) == (adapter.digest in self._copies):
                raise IntegrityError(
                    f"adapter {adapter.digest[:12]} is {adapter.status}, which the host tier's "
                    "copies contradict"
                )
        total = sum(a.bytes for a in self._copies.values())
        if self._bytes != total:
            raise IntegrityError(f"the host tier counts {self._bytes} bytes, its copies {total}")

    def _is_stale(self, read: PendingRead) -> bool:
        """Whether the adapter's copy was dropped after this read began: it must be read again."""
        if read.future.exception() is not None:
            return False
        return self._dropped_at.get(read.future.result().digest, 0) > read.drop_count
