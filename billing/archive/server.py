"""A ClickHouse server as the archive's client, by clickhouse-connect."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import clickhouse_connect
from clickhouse_connect.driver.exceptions import ClickHouseError

from billing.usage.raw_rows import Rows
from core.errors import DependencyDown

_PING_S = 2
_FAILURES = (ClickHouseError, OSError)


class ServerClient:
    """Connects at the first use. Several threads may use it at once."""

    def __init__(self, url: str, *, timeout_s: int = 10) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._client: Any = None

    def ping(self) -> None:
        """On a connection of its own, with time-outs that a scrape can wait for."""
        try:
            client = self._connect(_PING_S, _PING_S)
            with suppress(*_FAILURES):
                client.close()
        except _FAILURES as error:
            raise self._down(error) from None

    def command(self, statement: str) -> None:
        try:
            self._connected().command(statement)
        except _FAILURES as error:
            raise self._down(error) from None

    def insert(self, table: str, columns: Sequence[str], rows: Rows) -> None:
        try:
            self._connected().insert(table, rows, column_names=list(columns))
        except _FAILURES as error:
            raise self._down(error) from None

    def rows(self, query: str, parameters: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
        try:
            with self._connected().query_rows_stream(query, parameters=dict(parameters)) as found:
                for row in found:
                    yield tuple(row)
        except _FAILURES as error:
            raise self._down(error) from None

    def _connected(self) -> Any:
        if self._client is None:
            self._client = self._connect(self._timeout_s, 300)
        return self._client

    def _connect(self, connect_s: int, answer_s: int) -> Any:
        """Asks the server for its version. Without a session: a server refuses the second of two
        queries that run in the same one at once (SESSION_IS_LOCKED), as those of two pages may."""
        return clickhouse_connect.get_client(
            dsn=self._url,
            connect_timeout=connect_s,
            send_receive_timeout=answer_s,
            autogenerate_session_id=False,
        )

    def _down(self, error: Exception) -> DependencyDown:
        self._client = None
        host = urlsplit(self._url).hostname
        reason = str(error).strip().partition("\n")[0][:300]
        return DependencyDown(
            f"ClickHouse on {host} does not answer: {reason}.",
            next_step="Check TOLLHOUSE_EVENTS_URL and the ClickHouse server.",
            retry_after_s=5.0,
        )
