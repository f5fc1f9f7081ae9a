"""Receipts that no gateway has acknowledged yet, in memory and optionally in an append-only file.

The file survives the death of the process (each line is written to the kernel at once). The next
start, and the engine itself when the file has doubled, rewrites it without the acknowledged receipts
that are older than `kept_days`: younger ones can be recovered from, if the gateways' database is
restored from a backup. Receipts are given to gateways also while the disk is full; those are written
once there is room.
"""

import json
import logging
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from engine.protocol import FinishReason, Receipt
from engine.receipt_file import ReceiptFile, whole_lines

log = logging.getLogger("tollhouse.engine")

_DAY_S = 86_400
_SLACK_LINES = 10_000  # added to the file, besides doubling it, before it is rewritten


@dataclass(slots=True)
class _Kept:
    origin: str
    receipt: Receipt
    at: float  # when it was written, in seconds since 1970
    readers: set[str] = field(default_factory=set)  # other gateways that have looked it up


class Receipts:
    """Bounded: beyond `kept` receipts, the oldest are dropped and counted in `lost`."""

    def __init__(self, kept: int, path: str | None = None, kept_days: float = 0.0) -> None:
        self._kept = kept
        self._kept_s = kept_days * _DAY_S
        self._open: OrderedDict[str, _Kept] = OrderedDict()
        self._path = None if path is None else Path(path)
        self._file: ReceiptFile | None = None
        self.lost = 0
        if self._path is not None:
            try:
                self._open, settled = self._load(self._path)
                self._file = ReceiptFile(self._path, self._all_lines(settled), kept)
            except (OSError, KeyError, TypeError, ValueError) as error:
                raise ConfigError(f"receipts_file {path} cannot be used: {error}") from error

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    def add(self, origin: str, receipt: Receipt) -> None:
        kept = self._open[receipt.request_id] = _Kept(origin, receipt, time.time())
        self._write(_receipt_line(kept))
        self._compact()
        while len(self._open) > self._kept:
            self._open.popitem(last=False)
            self.lost += 1

    def find(self, request_id: str, reader: str) -> Receipt | None:
        """A receipt, for the gateway `reader`: one that recovers another's requests may then
        acknowledge it."""
        kept = self._open.get(request_id)
        if kept is None:
            return None
        kept.readers.add(reader)
        return kept.receipt

    def of(self, origin: str) -> list[Receipt]:
        """The receipts that this gateway has not acknowledged, oldest first."""
        return [kept.receipt for kept in self._open.values() if kept.origin == origin]

    def acknowledge(self, request_ids: list[str], gateway: str) -> None:
        """Forget the receipts of these requests that the gateway has been given: those of its own
        requests, and those that it has looked up."""
        known = []
        for request_id in request_ids:
            kept = self._open.get(request_id)
            if kept is None:
                continue
            if gateway != kept.origin and gateway not in kept.readers:
                log.warning(
                    "gateway %s acknowledged the receipt of %s, which it was never given: kept",
                    gateway, request_id,
                )  # fmt: skip
                continue
            del self._open[request_id]
            known.append(request_id)
        if known:
            self._write(_line({"acknowledged": known}))

    def retry(self) -> None:
        """Write what a full disk refused, if it takes it by now."""
        if self._file is not None:
            self._file.retry()

    @property
    def unwritten(self) -> int:
        """Lines of the file that a full disk refused: they are in memory alone."""
        return 0 if self._file is None else self._file.unwritten

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, line: bytes) -> None:
        if self._file is not None:
            self._file.append(line)

    def _compact(self) -> None:
        file = self._file
        if self._path is None or file is None or file.unwritten:
            return
        if file.lines <= _SLACK_LINES + 2 * file.replaced_lines:
            return
        unacknowledged, settled = self._load(self._path)
        oldest = time.time() - self._kept_s
        # What memory had no room for stays in the file as long as what was acknowledged.
        settled += [
            kept for i, kept in unacknowledged.items() if i not in self._open and kept.at > oldest
        ]
        file.replace(self._all_lines(settled))

    def _load(self, path: Path) -> tuple["OrderedDict[str, _Kept]", list[_Kept]]:
        """The file's receipts that are not acknowledged, and those that are but young enough to be
        kept."""
        open_: OrderedDict[str, _Kept] = OrderedDict()
        settled: list[_Kept] = []
        if not path.exists():
            return open_, settled
        oldest = time.time() - self._kept_s
        for record in _records(path):
            if "receipt" in record:
                receipt = _receipt_of(record)
                kept = _Kept(record["origin"], receipt, record.get("at", 0))
                open_[receipt.request_id] = kept
            for request_id in record.get("acknowledged", ()):
                done = open_.pop(request_id, None)
                if done is not None and done.at > oldest:
                    settled.append(done)
        return open_, settled

    def _all_lines(self, settled: list[_Kept]) -> Iterator[bytes]:
        yield from map(_receipt_line, settled)
        if settled:
            yield _line({"acknowledged": [kept.receipt.request_id for kept in settled]})
        yield from map(_receipt_line, self._open.values())


def read_receipts(path: Path) -> Iterator[Receipt]:
    """Every receipt of a file, acknowledged or not; also while an engine writes to it."""
    for record in _records(path):
        if "receipt" in record:
            yield _receipt_of(record)


def _records(path: Path) -> Iterator[dict[str, Any]]:
    for line in whole_lines(path):
        yield json.loads(line)


def _receipt_line(kept: _Kept) -> bytes:
    return _line({"origin": kept.origin, "at": int(kept.at), "receipt": asdict(kept.receipt)})


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"


def _receipt_of(record: dict[str, Any]) -> Receipt:
    fields = record["receipt"]
    return Receipt(**{**fields, "finish_reason": FinishReason(fields["finish_reason"])})
