"""Receipts that no gateway has acknowledged yet, in memory and optionally in an append-only file.

The file survives the death of the process (each line is written to the kernel at once); the next
start rewrites it without the acknowledged receipts.
"""

import json
import os
from collections import OrderedDict
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from engine.protocol import FinishReason, Receipt


class Receipts:
    """Bounded: beyond `kept` receipts, the oldest are dropped and counted in `lost`."""

    def __init__(self, kept: int, path: str | None = None) -> None:
        self._kept = kept
        self._open: OrderedDict[str, tuple[str, Receipt]] = OrderedDict()
        self._file: int | None = None
        self.lost = 0
        if path is not None:
            try:
                self._load(Path(path))
                self._file = self._rewrite(Path(path))
            except (OSError, KeyError, TypeError, ValueError) as error:
                raise ConfigError(f"receipts_file {path} cannot be used: {error}") from error

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    def add(self, origin: str, receipt: Receipt) -> None:
        self._open[receipt.request_id] = (origin, receipt)
        self._write({"origin": origin, "receipt": asdict(receipt)})
        while len(self._open) > self._kept:
            self._open.popitem(last=False)
            self.lost += 1

    def find(self, request_id: str) -> Receipt | None:
        entry = self._open.get(request_id)
        return entry[1] if entry else None

    def of(self, origin: str) -> list[Receipt]:
        """The receipts that this gateway has not acknowledged, oldest first."""
        return [receipt for owner, receipt in self._open.values() if owner == origin]

    def acknowledge(self, request_ids: list[str]) -> None:
        known = [i for i in request_ids if self._open.pop(i, None) is not None]
        if known:
            self._write({"acknowledged": known})

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _write(self, record: dict[str, Any]) -> None:
        if self._file is not None:
            os.write(self._file, json.dumps(record, separators=(",", ":")).encode() + b"\n")

    def _load(self, path: Path) -> None:
        if not path.exists():
            return
        for line in path.read_bytes().splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue  # the partial last line of a killed process: its receipt was not sent
            if "receipt" in record:
                fields = record["receipt"]
                fields["finish_reason"] = FinishReason(fields["finish_reason"])
                receipt = Receipt(**fields)
                self._open[receipt.request_id] = (record["origin"], receipt)
            for request_id in record.get("acknowledged", ()):
                self._open.pop(request_id, None)

    def _rewrite(self, path: Path) -> int:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(path.name + ".new")
        file = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        self._file = file
        for origin, receipt in self._open.values():
            self._write({"origin": origin, "receipt": asdict(receipt)})
        os.replace(fresh, path)
        return file
