"""Receipts that no gateway has acknowledged yet, in memory and optionally in an append-only file.

The file survives the death of the process (each line is written to the kernel at once). The next
start, and the engine itself when the file has doubled, rewrites it without the acknowledged receipts
that are older than `kept_days`: younger ones can be recovered from, if the gateways' database is
restored from a backup.
"""

import json
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from engine.protocol import FinishReason, Receipt

log = logging.getLogger("tollhouse.engine")

_DAY_S = 86_400
_SLACK_LINES = 10_000  # written to the file, beside as many as it had, before it is rewritten


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
        self._file: int | None = None
        self._lines = self._rewritten = 0  # in the file: now, and after it was rewritten
        self.lost = 0
        if self._path is not None:
            try:
                self._open, settled = self._load(self._path)
                self._rewrite(self._path, settled)
            except (OSError, KeyError, TypeError, ValueError) as error:
                raise ConfigError(f"receipts_file {path} cannot be used: {error}") from error

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    def add(self, origin: str, receipt: Receipt) -> None:
        kept = self._open[receipt.request_id] = _Kept(origin, receipt, time.time())
        self._write_receipt(kept)
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
            self._write({"acknowledged": known})

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _write_receipt(self, kept: _Kept) -> None:
        at, fields = int(kept.at), asdict(kept.receipt)
        self._write({"origin": kept.origin, "at": at, "receipt": fields})

    def _write(self, record: dict[str, Any]) -> None:
        if self._file is not None:
            os.write(self._file, json.dumps(record, separators=(",", ":")).encode() + b"\n")
            self._lines += 1

    def _compact(self) -> None:
        if self._path is None or self._lines <= _SLACK_LINES + 2 * self._rewritten:
            return
        unacknowledged, settled = self._load(self._path)
        oldest = time.time() - self._kept_s
        # What memory had no room for stays in the file as long as what was acknowledged.
        settled += [
            kept for i, kept in unacknowledged.items() if i not in self._open and kept.at > oldest
        ]
        self.close()
        self._rewrite(self._path, settled)

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

    def _rewrite(self, path: Path, settled: list[_Kept]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(path.name + ".new")
        self._file = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        self._lines = 0
        for kept in settled:
            self._write_receipt(kept)
        if settled:
            self._write({"acknowledged": [kept.receipt.request_id for kept in settled]})
        for kept in self._open.values():
            self._write_receipt(kept)
        os.replace(fresh, path)
        self._rewritten = self._lines


def read_receipts(path: Path) -> Iterator[Receipt]:
    """Every receipt of a file, acknowledged or not; also while an engine writes to it."""
    for record in _records(path):
        if "receipt" in record:
            yield _receipt_of(record)


def _records(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for line in file:
            try:
                yield json.loads(line)
            except ValueError:
                continue  # the partial last line of a killed process: its receipt was not sent


def _receipt_of(record: dict[str, Any]) -> Receipt:
    fields = record["receipt"]
    return Receipt(**{**fields, "finish_reason": FinishReason(fields["finish_reason"])})
