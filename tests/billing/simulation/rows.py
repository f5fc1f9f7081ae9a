"""Rows and times of a simulation's books, as SQLite has them."""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Protocol


class Found(Protocol):
    @property
    def description(self) -> Any: ...

    def fetchall(self) -> list[Any]: ...

    def fetchone(self) -> Any: ...

    def __iter__(self) -> Iterator[Any]: ...


class Books(Protocol):
    """A connection to the books; its rows are as those of `sqlite3.Connection`."""

    def execute(self, query: str, keys: Any = ..., /) -> Found: ...

    def close(self) -> None: ...


def moment_of(stored: str) -> datetime:
    return datetime.fromisoformat(stored).replace(tzinfo=UTC)


def rows_of(books: Books, query: str, *keys: str) -> list[dict[str, Any]]:
    found = books.execute(query, keys)
    names = [column[0] for column in found.description]
    return [dict(zip(names, row, strict=True)) for row in found]
