"""A ClickHouse server as the archive's client, by clickhouse-connect."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import clickhouse_connect
from clickhouse_connect.driver.exceptions import ClickHouseError

from billing.archive.base import Rows
from core.errors import DependencyDown


class ServerClient:
    """Connects at the first use."""

    def __init__(self, url: str, *, timeout_s: int = 10) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._client: Any = None

    def command(self, statement: str) -> None:
        try:
            self._connected().command(statement)
        except (ClickHouseError, OSError) as error:
            raise self._down(error) from None

    def insert(self, table: str, columns: Sequence[str], rows: Rows) -> None:
        try:
            self._connected().insert(table, rows, column_names=list(columns))
        except (ClickHouseError, OSError) as error:
            raise self._down(error) from None

    def rows(self, query: str, parameters: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
        try:
            with self._connected().query_rows_stream(query, parameters=dict(parameters)) as found:
                for row in found:
                    yield tuple(row)
        except (ClickHouseError, OSError) as error:
            raise self._down(error) from None

    def _connected(self) -> Any:
        if self._client is None:
            self._client = clickhouse_connect.get_client(
                dsn=self._url, connect_timeout=self._timeout_s, send_receive_timeout=300
            )
        return self._client

    def _down(self, error: Exception) -> DependencyDown:
        self._client = None
        host = urlsplit(self._url).hostname
        reason = str(error).strip().partition("\n")[0][:300]
        return DependencyDown(
            f"ClickHouse on {host} does not answer: {reason}.",
            next_step="Check TOLLHOUSE_EVENTS_URL and the ClickHouse server.",
            retry_after_s=5.0,
        )
