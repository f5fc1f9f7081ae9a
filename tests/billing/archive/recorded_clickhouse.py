"""A ClickHouse that notes what it is asked and answers as a test says. What its SQL finds is tested on
its own engine, in `tests/contracts`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from billing.archive.clickhouse import ClickHouseArchive


class Recorded:
    """Answers by the beginning of the query, the longest first; `tables` are those that are there."""

    def __init__(self, answers: Mapping[str, list[tuple[Any, ...]]] | None = None) -> None:
        self.answers = dict(answers or {})
        self.commands: list[str] = []
        self.inserts: list[tuple[str, tuple[str, ...], list[tuple[Any, ...]]]] = []
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.pings = 0

    def ping(self) -> None:
        self.pings += 1

    def command(self, statement: str) -> None:
        self.commands.append(statement)

    def insert(self, table: str, columns: Sequence[str], rows: Any) -> None:
        self.inserts.append((table, tuple(columns), [tuple(row) for row in rows]))

    def rows(self, query: str, parameters: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
        self.asked.append((query, dict(parameters)))
        names = [name for name in self.answers if query.startswith(name)]
        yield from self.answers[max(names, key=len)] if names else ()


def archive_on(client: Recorded) -> ClickHouseArchive:
    """With its tables made."""
    made = ClickHouseArchive(client)
    made._layout._identity = "store-1"
    return made
