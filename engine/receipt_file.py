"""The file of receipts: lines that are appended, and now and then replaced as a whole.

A disk that is full ends no request: lines that it refuses are kept in memory, in their order, and are
written once it takes them. A line is in the file whole or not at all.
"""

import errno
import logging
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

log = logging.getLogger("tollhouse.engine")

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_RETRY_S = 1.0


class ReceiptFile:
    """Each line is given to the kernel at once, so it survives the death of the process."""

    def __init__(self, path: Path, lines: Iterable[bytes], most_unwritten: int) -> None:
        """Replaces what the path holds with `lines`, unless there is no room: they must be in the
        file already. Of more lines than `most_unwritten`, memory drops the oldest. Raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file: int | None = None
        self._size = 0  # bytes of whole lines
        self._unwritten: deque[bytes] = deque(maxlen=max(1, most_unwritten))
        self._next_try = 0.0
        self.lines = self.replaced_lines = 0  # in the file: now, and after it was replaced
        try:
            self._replace(lines)
        except OSError as error:
            if error.errno not in _NO_ROOM or not path.exists():
                raise
            log.error("%s is used as it is: %s", path, error)
            self._reopen()

    @property
    def unwritten(self) -> int:
        """Lines that the disk refused."""
        return len(self._unwritten)

    def append(self, line: bytes) -> None:
        """`line` ends with a newline."""
        self._unwritten.append(line)
        self._flush()

    def retry(self) -> None:
        """Write what the disk refused, at most once a second."""
        if self._unwritten and time.monotonic() >= self._next_try:
            self._flush()

    def replace(self, lines: Iterable[bytes]) -> None:
        """Hold these lines alone. Without room the file stays as it is until it has grown more."""
        try:
            self._replace(lines)
        except OSError as error:
            log.error("%s cannot be rewritten: %s", self._path, error)
            self.replaced_lines = self.lines

    def close(self) -> None:
        if self._file is None:
            return
        self._flush()
        if self._unwritten:
            log.error("%d lines of %s were never written", len(self._unwritten), self._path)
        os.close(self._file)
        self._file = None

    def _flush(self) -> None:
        """Like a log: what is refused waits, and what follows waits behind it."""
        if self._file is None:
            return
        waited = len(self._unwritten)
        try:
            while self._unwritten:
                self._size += _write(self._file, self._unwritten[0], self._size)
                self.lines += 1
                self._unwritten.popleft()
        except OSError as error:
            if waited == 1 or time.monotonic() >= self._next_try:
                log.error("%s cannot be written, %d lines wait: %s", self._path, waited, error)
            self._next_try = time.monotonic() + _RETRY_S

    def _replace(self, lines: Iterable[bytes]) -> None:
        fresh = self._path.with_name(self._path.name + ".new")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
        file, size, count = os.open(fresh, flags, 0o600), 0, 0
        try:
            for line in lines:
                size += _write(file, line, size)
                count += 1
            os.replace(fresh, self._path)
        except BaseException:
            os.close(file)
            fresh.unlink(missing_ok=True)
            raise
        if self._file is not None:
            os.close(self._file)
        self._file, self._size = file, size
        self.lines = self.replaced_lines = count

    def _reopen(self) -> None:
        """Go on behind the last whole line of the file."""
        content = self._path.read_bytes()
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        self._size = content.rfind(b"\n") + 1
        os.ftruncate(self._file, self._size)
        self.lines = self.replaced_lines = content.count(b"\n")


def whole_lines(path: Path) -> Iterator[bytes]:
    """Also while an engine writes; without the partial last line of a killed process, whose receipt
    was not sent."""
    with path.open("rb") as file:
        yield from (line for line in file if line.endswith(b"\n"))


def _write(file: int, line: bytes, size: int) -> int:
    """The bytes written: all of them, or OSError, and then the file is cut to `size` again."""
    written = -1
    try:
        written = os.write(file, line)
        if written != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        if written > 0:
            os.ftruncate(file, size)
        raise
    return written
