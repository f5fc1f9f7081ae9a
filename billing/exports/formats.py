"""Encodes rows as CSV (RFC 4180), JSON Lines or Parquet. Output is streamed, so memory use is bounded
by one batch.
"""

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from enum import StrEnum
from itertools import islice
from typing import Any

import msgspec

from core.extras import imports_of
from core.money import decimal_of

BATCH_ROWS = 5_000
_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # prefixes that spreadsheets run as formulas


class Format(StrEnum):
    CSV = "csv"
    JSONL = "jsonl"
    PARQUET = "parquet"

    @property
    def media_type(self) -> str:
        return _MEDIA_TYPES[self]


_MEDIA_TYPES = {
    Format.CSV: "text/csv; charset=utf-8",
    Format.JSONL: "application/x-ndjson",
    Format.PARQUET: "application/vnd.apache.parquet",
}


class Kind(StrEnum):
    TEXT = "text"
    WHOLE = "whole"
    DECIMAL = (
        "decimal"  # in 10^-12; always with a decimal point, so that readers do not see a whole
    )
    FLAG = "flag"
    UNITS = "units"  # picounits, written as a decimal of major units
    MOMENT = "moment"  # written in UTC as 2026-11-21T00:00:00Z


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    kind: Kind = Kind.TEXT


Row = Sequence[Any]


def encode(rows: Iterable[Row], columns: Sequence[Column], form: Format) -> Iterator[bytes]:
    """Chunks whose concatenation is a valid file, even without rows."""
    encoder = {Format.CSV: _csv, Format.JSONL: _jsonl, Format.PARQUET: _parquet}[form]
    yield from encoder(_batches(rows), columns)


def _batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    source = iter(rows)
    while batch := list(islice(source, BATCH_ROWS)):
        yield batch


def _written(
    batch: list[Row],
    columns: Sequence[Column],
    writers: dict[Kind, Callable[[Any], Any]],
    none: Any,
) -> Iterator[tuple[Any, ...]]:
    """The rows of a batch with formatted values. Works by column, so that each distinct value is
    formatted once: most columns have few distinct values.
    """
    by_column = []
    for column, values in zip(columns, zip(*batch, strict=True), strict=True):
        write = writers[column.kind]
        known = {value: none if value is None else write(value) for value in set(values)}
        by_column.append([known[value] for value in values])
    return zip(*by_column, strict=True)


def _csv(batches: Iterator[list[Row]], columns: Sequence[Column]) -> Iterator[bytes]:
    buffer = io.StringIO(newline="")
    out = csv.writer(buffer, lineterminator="\r\n")
    out.writerow([column.name for column in columns])
    for batch in batches:
        out.writerows(_written(batch, columns, _CSV_VALUES, ""))
        yield _drain(buffer)
    if buffer.tell():
        yield _drain(buffer)


def _drain(buffer: io.StringIO) -> bytes:
    data = buffer.getvalue().encode()
    buffer.seek(0)
    buffer.truncate()
    return data


def _jsonl(batches: Iterator[list[Row]], columns: Sequence[Column]) -> Iterator[bytes]:
    names = [column.name for column in columns]
    encoder = msgspec.json.Encoder()
    for batch in batches:
        rows = _written(batch, columns, _JSON_VALUES, None)
        yield encoder.encode_lines([dict(zip(names, row, strict=True)) for row in rows])


def _parquet(batches: Iterator[list[Row]], columns: Sequence[Column]) -> Iterator[bytes]:
    with imports_of("parquet", "An export as Parquet"):
        import pyarrow as pa
        import pyarrow.parquet as pq

    types = {
        Kind.TEXT: pa.string(),
        Kind.WHOLE: pa.int64(),
        Kind.DECIMAL: pa.decimal128(38, 12),
        Kind.FLAG: pa.bool_(),
        Kind.UNITS: pa.decimal128(38, 12),
        Kind.MOMENT: pa.timestamp("us", tz="UTC"),
    }
    schema = pa.schema([(column.name, types[column.kind]) for column in columns])
    sink = _Sink()
    with pq.ParquetWriter(pa.PythonFile(sink, mode="w"), schema) as writer:
        for batch in batches:
            by_column = list(zip(*batch, strict=True))
            arrays = [
                pa.array(_parquet_values(values, column.kind), types[column.kind])
                for values, column in zip(by_column, columns, strict=True)
            ]
            writer.write_batch(pa.record_batch(arrays, schema=schema))
            yield sink.take()
    yield sink.take()


class _Sink(io.RawIOBase):
    """A write-only buffer; `take` returns the bytes written since its last call."""

    def __init__(self) -> None:
        self._written: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._written.append(bytes(data))
        return len(data)

    def take(self) -> bytes:
        data, self._written = b"".join(self._written), []
        return data


def _parquet_values(values: Sequence[Any], kind: Kind) -> Sequence[Any]:
    if kind not in (Kind.UNITS, Kind.DECIMAL):
        return values
    return [None if value is None else Decimal(value).scaleb(-12) for value in values]


def _moment(value: datetime) -> str:
    moment = value.astimezone(UTC).replace(tzinfo=None)
    return moment.isoformat(timespec="seconds" if not moment.microsecond else "microseconds") + "Z"


def _guarded(value: Any) -> str:
    text = str(value)
    return "'" + text if text.startswith(_FORMULA) else text


def _decimal(value: int) -> str:
    text = decimal_of(value)
    return text if "." in text else f"{text}.0"


def _flag(value: Any) -> str:
    return "true" if value else "false"


_CSV_VALUES: dict[Kind, Callable[[Any], str]] = {
    Kind.TEXT: _guarded,
    Kind.WHOLE: str,
    Kind.DECIMAL: _decimal,
    Kind.FLAG: _flag,
    Kind.UNITS: decimal_of,
    Kind.MOMENT: _moment,
}
_JSON_VALUES: dict[Kind, Callable[[Any], Any]] = {
    Kind.TEXT: str,
    Kind.WHOLE: int,
    Kind.DECIMAL: _decimal,
    Kind.FLAG: bool,
    Kind.UNITS: decimal_of,
    Kind.MOMENT: _moment,
}
