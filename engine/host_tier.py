"""Adapters in host memory, within a budget of bytes, and the reads that bring them from disk."""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass

from engine.adapter import Adapter, Place
from engine.batch import Runner
from engine.errors import IntegrityError
from engine.protocol import AdapterState

Submit = Callable[[Callable[[], AdapterState]], "Future[AdapterState]"]
Then = Callable[["Future[AdapterState]"], None]


def read_now(work: Callable[[], AdapterState]) -> "Future[AdapterState]":
    """Runs `work` in the calling thread: for simulations and tests."""
    future: Future[AdapterState] = Future()
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)
    return future


@dataclass(frozen=True, slots=True)
class Read:
    """A read of an adapter from disk into host memory."""

    path: str
    future: "Future[AdapterState]"
    drops: int  # the tier's count of dropped copies when the read began
    then: Then


class HostTier:
    """Decides which copies the runner keeps; evicts the least recently used first."""

    def __init__(self, runner: Runner, most_bytes: int, submit: Submit) -> None:
        self._runner = runner
        self._most_bytes = most_bytes
        self._submit = submit
        self._kept: OrderedDict[str, Adapter] = OrderedDict()  # least recently used first
        self._bytes = 0
        self._reads: list[Read] = []
        self._drops = 0
        self._dropped: dict[str, int] = {}  # digest -> `_drops` after its copy was last dropped
        self._uses = 0
        self.spared: Adapter | None = None  # about to be used: never evicted, even over budget

    @property
    def reading(self) -> bool:
        return bool(self._reads)

    def read(self, path: str, then: Then) -> None:
        """Read a PEFT directory into host memory beside the loop; a later `poll` calls `then` with
        the finished future."""
        future = self._submit(lambda: self._runner.register_adapter(path))
        self._reads.append(Read(path, future, self._drops, then))

    def poll(self) -> None:
        for read in [read for read in self._reads if read.future.done()]:
            self._reads.remove(read)
            if self._outdated(read):
                self.read(read.path, read.then)
            else:
                read.then(read.future)

    def has_room(self, coming: Iterable[Adapter]) -> bool:
        """Whether these fit beside the copies that requests need."""
        needed = [a for a in self._kept.values() if a.accepted or a.place is not Place.HOST]
        return sum(a.bytes for a in (*needed, *coming)) <= self._most_bytes

    def take(self, adapter: Adapter) -> None:
        adapter.move(Place.HOST)
        self._kept[adapter.digest] = adapter
        self._bytes += adapter.bytes
        self.touch(adapter)
        self.spared = adapter
        self.trim()

    def touch(self, adapter: Adapter) -> None:
        self._uses += 1
        adapter.last_used = self._uses
        self._kept.move_to_end(adapter.digest)

    def drop(self, adapter: Adapter) -> None:
        self._runner.drop_adapter(adapter.digest)
        del self._kept[adapter.digest]
        self._bytes -= adapter.bytes
        self._drops += 1
        self._dropped[adapter.digest] = self._drops
        adapter.move(Place.ABSENT)

    def trim(self) -> None:
        """Drop copies until the budget holds, first those that no request waits for. Dropped
        adapters stay known by their path."""
        if self._bytes <= self._most_bytes:
            return
        for adapter in sorted(self._kept.values(), key=lambda a: a.accepted > 0):
            if adapter.place is Place.HOST and adapter is not self.spared:
                self.drop(adapter)
            if self._bytes <= self._most_bytes:
                return

    def check_integrity(self, known: Iterable[Adapter]) -> None:
        for adapter in known:
            if (adapter.place is Place.ABSENT) == (adapter.digest in self._kept):
                raise IntegrityError(
                    f"adapter {adapter.digest[:12]} is {adapter.place}, which the host tier's "
                    "copies contradict"
                )
        total = sum(a.bytes for a in self._kept.values())
        if self._bytes != total:
            raise IntegrityError(f"the host tier counts {self._bytes} bytes, its copies {total}")

    def _outdated(self, read: Read) -> bool:
        """Whether the adapter's copy was dropped after this read began: it must be read again."""
        if read.future.exception() is not None:
            return False
        return self._dropped.get(read.future.result().digest, 0) > read.drops
