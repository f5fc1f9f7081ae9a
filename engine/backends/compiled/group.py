"""The ranks that compute parts of one model on one host, and what they tell each other: sums of
tensors, and small records. All ranks make the same calls in the same order."""

import marshal
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.backends.compiled.linear import DTYPES, compiled, has_kernel
from engine.errors import ConfigError, RankError

_LINE, _HEAD = 64, 4096  # bytes, as `peers.h` has them
_ROOM = 1 << 20  # bytes that a rank gives the others at once
_RANK, _CALLS, _PATIENCE, _FAILED = 1, 4, 5, 6  # in `Peers`
MOST_RANKS = 32
_LENGTH = 8  # bytes before a record


def group_bytes(size: int) -> int:
    """Bytes of the memory that `size` ranks share."""
    return _HEAD + 2 * size * _ROOM


def check_ranks() -> None:
    """Raises ConfigError where ranks cannot meet."""
    if not has_kernel() or not hasattr(compiled(), "sum_ranks"):
        raise ConfigError(
            "tp above 1 needs the engine's compiled kernels: install a C compiler, then this again"
        )


class Group:
    """One rank's view of the group. `memory`: zeros that all ranks share, `group_bytes` of them."""

    def __init__(self, memory: NDArray[np.uint8], rank: int, size: int, patience_s: float) -> None:
        """`patience_s`: of a wait for another rank; 0: it has no end."""
        self.rank, self.size = rank, size
        self.reason = ""  # why the group ended, if this rank knows
        self._memory = memory
        self._over = memory[:4].view(np.uint32)
        base = memory.ctypes.data
        self._peers = np.array([base, rank, size, _ROOM, 0, 0, -1], np.int64)
        self.patience_s = patience_s
        self.address: int = self._peers.ctypes.data

    @property
    def patience_s(self) -> float:
        return float(self._peers[_PATIENCE]) / 1e9

    @patience_s.setter
    def patience_s(self, seconds: float) -> None:
        self._peers[_PATIENCE] = int(seconds * 1e9)

    @property
    def over(self) -> bool:
        """Whether a rank has ended the group."""
        return bool(self._over[0])

    @property
    def over_address(self) -> int:
        return self._memory.ctypes.data

    def end(self, reason: str) -> None:
        """No rank waits for another any more; each raises RankError instead."""
        self.reason = self.reason or reason
        self._over[0] = 1

    def sum_(self, x: torch.Tensor) -> torch.Tensor:
        """x becomes the sum of all ranks' x, which have one shape, in the order of the ranks: all have
        the same bits. float32 or bfloat16, added in float32. Raises RankError."""
        if x.dtype not in DTYPES:
            raise TypeError(f"{x.dtype} is not summed over ranks")
        y = x.contiguous()
        bf16 = x.dtype is torch.bfloat16
        if not compiled().sum_ranks(self.address, y.data_ptr(), y.numel(), bf16):
            self.failed("a sum")
        return x if y is x else x.copy_(y)

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's value, by rank: of numbers, texts, bytes, lists and tuples. Raises RankError."""
        data = marshal.dumps(value)
        record = np.frombuffer(len(data).to_bytes(_LENGTH, "little") + data, np.uint8)
        return [
            marshal.loads(part[_LENGTH : _LENGTH + int.from_bytes(part[:_LENGTH], "little")])
            for part in map(np.ndarray.tobytes, self._meet(record))
        ]

    def columns(self, x: torch.Tensor, widths: list[int]) -> torch.Tensor:
        """Every rank's x, side by side: [rows, sum of widths], `widths` being those of all ranks' x."""
        each = max(1, _ROOM // (max(widths) * x.element_size()))
        found = []
        for part in torch.split(x.contiguous(), each) if len(x) else ():
            views = self._meet(part.view(torch.uint8).numpy().reshape(-1))
            parts = [
                torch.from_numpy(view[: len(part) * width * x.element_size()].copy())
                .view(x.dtype)
                .view(len(part), width)
                for view, width in zip(views, widths, strict=True)
            ]
            found.append(torch.cat(parts, 1))
        return torch.cat(found) if found else x.new_empty(0, sum(widths))

    def check(self, doing: str) -> None:
        """Raises RankError if a rank did not come to what the kernels waited for."""
        if self._peers[_FAILED] != -1:
            self.failed(doing)

    def failed(self, doing: str) -> None:
        """Raises RankError, which names the rank that did not come."""
        late = int(self._peers[_FAILED])
        why = self.reason or "another rank ended the group"
        if late >= 0:
            why = (
                f"rank {late} did not come within {self.patience_s:g} s to {doing} (number "
                f"{self._peers[_CALLS]} of rank {self.rank}): it hangs, or has no processor"
            )
        self.end(why)
        raise RankError(why)

    def _meet(self, record: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
        """The memory of every rank, until the next but one call."""
        if not compiled().meet_ranks(self.address, record.ctypes.data, record.nbytes):
            self.failed("an exchange")
        turn = int(self._peers[_CALLS]) & 1
        firsts = [_HEAD + (2 * rank + turn) * _ROOM for rank in range(self.size)]
        return [self._memory[first : first + _ROOM] for first in firsts]
