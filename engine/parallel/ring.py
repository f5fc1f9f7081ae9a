"""A ring of messages in memory that all ranks share: the first rank writes, each other one reads all."""

import threading

import numpy as np
from numpy.typing import NDArray

from engine.backends.compiled.linear import compiled
from engine.errors import RankError

_SLOTS, _SLOT = 32, 32 << 10  # pieces of messages, and their bytes
_LINE, _HEAD = 64, 4096
_FIELDS = (
    8  # bytes at the beginning of a piece: its length, and whether more of the message follows
)
_SPIN_S = 0.002  # a rank that waits for a step looks for so long before it sleeps
_SLICE_S = 1.0  # of a sleep, after which it is looked whether the group is over


def ring_bytes() -> int:
    return _HEAD + _SLOTS * _SLOT


class _Ring:
    """Counts of pieces: at line 0 those written, at line n those that rank n has read."""

    def __init__(self, memory: NDArray[np.uint8], size: int, over: int) -> None:
        """`over`: the address of a number that is not 0 when the group is over."""
        self._counts = memory[:_HEAD].view(np.uint64)
        self._base = memory.ctypes.data
        self._slots = memory[_HEAD : _HEAD + _SLOTS * _SLOT].reshape(_SLOTS, _SLOT)
        self._size = size
        self._over = over

    def _await(self, line: int, least: int, patience_s: float) -> int:
        times = int(_SPIN_S * 1e9), int(patience_s * 1e9)
        return int(compiled().await_post(self._base + line * _LINE, least, self._over, *times))


class RingWriter(_Ring):
    """`write` may be called from several threads."""

    def __init__(self, memory: NDArray[np.uint8], size: int, over: int, patience_s: float) -> None:
        """`patience_s`: how long a rank may leave a full ring unread; 0: for ever."""
        super().__init__(memory, size, over)
        self._patience_s = patience_s or 1e9
        self._written = 0
        self._lock = threading.Lock()

    def write(self, data: bytes) -> None:
        """Raises RankError, naming the rank that does not read."""
        most = _SLOT - _FIELDS
        with self._lock:
            for first in range(0, len(data), most):
                piece = data[first : first + most]
                self._make_room()
                slot = self._slots[self._written % _SLOTS]
                more = first + most < len(data)
                head = len(piece).to_bytes(4, "little") + int(more).to_bytes(4, "little")
                slot[: _FIELDS + len(piece)] = np.frombuffer(head + piece, np.uint8)
                self._written += 1
                compiled().post(self._base, self._written)

    def _make_room(self) -> None:
        least = self._written - _SLOTS + 1
        for rank in range(1, self._size) if least > 0 else ():
            state = self._await(rank, least, self._patience_s)
            if state == 1:
                raise RankError(
                    f"rank {rank} has not read a message for {self._patience_s:g} s: it hangs"
                )
            if state:
                raise RankError("another rank ended the group")


class RingReader(_Ring):
    def __init__(self, memory: NDArray[np.uint8], size: int, over: int, rank: int) -> None:
        super().__init__(memory, size, over)
        self._rank = rank
        self._seen = 0

    def read(self) -> bytes | None:
        """The next message, however long that takes; None: the group is over."""
        pieces, more = [], 1
        while more:
            while state := self._await(0, self._seen + 1, _SLICE_S):
                if state == 2:
                    return None
            slot = self._slots[self._seen % _SLOTS]
            length, more = (int(each) for each in slot[:_FIELDS].view(np.uint32))
            pieces.append(slot[_FIELDS : _FIELDS + length].tobytes())
            self._seen += 1
            compiled().post(self._base + self._rank * _LINE, self._seen)
        return b"".join(pieces)
