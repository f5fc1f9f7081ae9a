"""What of each running stream was written to its client, where a killed process leaves it.

A file of slots next to the spool is mapped into memory: a stream has one from its first write to the
end of its record, and notes its count there with a single store, which costs no call of the system.
The pages of a killed process stay with the file, so recovery bills what the client was sent and waives
the rest. A power failure may lose them; then nothing of the stream counts as delivered.
"""

import logging
import mmap
import os
from pathlib import Path

log = logging.getLogger("tollhouse.spool")

_SLOT = 64  # bytes: an id, then the count in the last eight
_ID = 56
_SLOTS = 1_024  # of one mapping
_WORDS = _SLOT // 8


def delivered_path(spool: Path) -> Path:
    """`spool` is the SQLite file's."""
    return spool.with_name(f"{spool.name}.delivered")


def read_delivered(spool: Path) -> dict[str, int] | None:
    """What a dead process left: counts by request, or None if it kept none."""
    try:
        data = delivered_path(spool).read_bytes()
    except FileNotFoundError:
        return None
    found = {}
    for at in range(0, len(data) - _SLOT + 1, _SLOT):
        if name := data[at : at + _ID].rstrip(b"\0"):
            count = int.from_bytes(data[at + _ID : at + _SLOT], "little")
            found[name.decode("ascii", "replace")] = count
    return found


class StreamCount:
    """The slot of one stream."""

    __slots__ = ("_at", "_of", "_words")

    def __init__(self, of: "DeliveredCounts", words: memoryview, at: int) -> None:
        self._of = of
        self._words = words
        self._at = at

    def note(self, count: int) -> None:
        """So much is with the client's connection."""
        self._words[self._at] = count

    def end(self) -> None:
        self._of.free(self._words, self._at)


class DeliveredCounts:
    """The file of this process; without room on the disk it keeps nothing."""

    def __init__(self, spool: Path) -> None:
        path = delivered_path(spool)
        flags = os.O_CREAT | os.O_TRUNC | os.O_RDWR
        self._file = os.open(path, flags, 0o600)
        self._maps: list[mmap.mmap] = []
        self._views: list[memoryview] = []
        self._free: list[tuple[memoryview, int]] = []  # by the place of the count

    def begin(self, request_id: str) -> StreamCount | None:
        """None if there is no room."""
        name = request_id.encode()
        if len(name) > _ID or not (self._free or self._grow()):
            return None
        words, at = self._free.pop()
        words[at] = 0
        name = name.ljust(_ID, b"\0")
        for place in range(_WORDS - 1):
            word = name[place * 8 : place * 8 + 8]
            words[at - _WORDS + 1 + place] = int.from_bytes(word, "little")
        return StreamCount(self, words, at)

    def free(self, words: memoryview, at: int) -> None:
        for place in range(at - _WORDS + 1, at):
            words[place] = 0
        self._free.append((words, at))

    def close(self) -> None:
        self._free.clear()
        for view in self._views:
            view.release()
        for each in self._maps:
            each.close()
        os.close(self._file)

    def _grow(self) -> bool:
        """Whether there are free slots now. The bytes are allocated first: a page that the disk has
        no room for would kill the process."""
        size, begin = _SLOTS * _SLOT, len(self._maps) * _SLOTS * _SLOT
        try:
            os.posix_fallocate(self._file, begin, size)
            mapped = mmap.mmap(self._file, size, offset=begin)
        except OSError as error:
            log.warning("streams are billed by the engine if this process is killed: %s", error)
            return False
        view = memoryview(mapped).cast("Q")
        self._maps.append(mapped)
        self._views.append(view)
        last = _WORDS - 1
        self._free += [(view, slot * _WORDS + last) for slot in reversed(range(_SLOTS))]
        return True
