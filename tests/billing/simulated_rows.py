"""Rows and times of a simulation's books, as SQLite has them."""

import sqlite3
from datetime import UTC, datetime
from typing import Any


def moment_of(stored: str) -> datetime:
    return datetime.fromisoformat(stored).replace(tzinfo=UTC)


def rows_of(books: sqlite3.Connection, query: str, *keys: str) -> list[dict[str, Any]]:
    found = books.execute(query, keys)
    names = [column[0] for column in found.description]
    return [dict(zip(names, row, strict=True)) for row in found]
