"""ClickHouse's own engine in this process, as the archive's client: the SQL is the server's."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import orjson

from billing.usage.raw_rows import Rows


class ChdbClient:
    def __init__(self, folder: Path) -> None:
        from chdb.session import Session

        self.session = Session(str(folder))
        # A query of a few rows on a thread for each core costs more than it reads.
        self.session.query("set max_threads = 1, max_insert_threads = 1")

    def ping(self) -> None:
        self.session.query("select 1")

    def command(self, statement: str) -> None:
        self.session.query(statement)

    def insert(self, table: str, columns: Sequence[str], rows: Rows) -> None:
        lines = b"\n".join(
            orjson.dumps(dict(zip(columns, map(_plain, row), strict=True))) for row in rows
        )
        self.session.query(
            f"insert into {table} ({', '.join(columns)}) format JSONEachRow {lines.decode()}"
        )

    def rows(self, query: str, parameters: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
        given = {name: _parameter(value) for name, value in parameters.items()}
        table = self.session.query(query, "ArrowTable", params=given)
        columns = [column.to_pylist() for column in table.columns]
        yield from zip(*columns, strict=True)

    def close(self) -> None:
        self.session.close()


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.strftime("%Y-%m-%d %H:%M:%S.%f")
    return str(value) if isinstance(value, Decimal) or type(value) is int else value


def _parameter(value: Any) -> Any:
    """A list as ClickHouse's literal."""
    if not isinstance(value, list):
        return value
    quoted = (each.replace("\\", "\\\\").replace("'", "\\'") for each in value)
    return "[" + ", ".join(f"'{each}'" for each in quoted) + "]"


@contextmanager
def chdb_client(folder: Path) -> Iterator[ChdbClient]:
    client = ChdbClient(folder)
    yield client
    client.close()
