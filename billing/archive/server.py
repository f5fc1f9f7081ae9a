"""A ClickHouse server as the archive's client, by clickhouse-connect."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

import clickhouse_connect
from clickhouse_connect.driver.exceptions import ClickHouseError

from billing.usage.raw_rows import Rows
from core.errors import DependencyDown
from core.waiting import while_alive, within

T = TypeVar("T")
log = logging.getLogger("tollhouse.archive")
_PING_S, _ANSWER_S, _COMMAND_S = 2, 20, 3600
_FAILURES = (ClickHouseError, OSError)  # a TimeoutError is an OSError


class ServerClient:
    """Connects at the first use. Several threads may use it at once."""

    def __init__(self, url: str, *, timeout_s: int = 10, answer_s: int = _ANSWER_S) -> None:
        """`answer_s` is the longest silence within an answer: a server that works on a query sends its
        progress meanwhile."""
        self._url = url
        self._timeout_s = timeout_s
        self._answer_s = answer_s
        self._clients: dict[int, Any] = {}  # by the longest silence

    def ping(self) -> None:
        """On a connection of its own, with time-outs that a scrape can wait for."""
        try:
            within(self._look, 2 * _PING_S, "a connection to it")
        except _FAILURES as error:
            raise self._down(error) from None

    def command(self, statement: str) -> None:
        """As long as the server answers on another connection: it says nothing while it rewrites rows."""
        self._while_alive(partial(self._command, statement))

    def insert(self, table: str, columns: Sequence[str], rows: Rows) -> None:
        def _insert() -> None:
            self._connected().insert(table, rows, column_names=list(columns))

        self._while_alive(_insert)

    def rows(self, query: str, parameters: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
        def _asked() -> Any:
            return self._connected().query_row_block_stream(query, parameters=dict(parameters))

        with self._while_alive(_asked) as blocks:
            while (block := self._while_alive(partial(next, blocks, None))) is not None:
                yield from map(tuple, block)

    def _look(self) -> None:
        client = self._connect(_PING_S, _PING_S)
        with suppress(*_FAILURES):
            client.close()

    def _while_alive(self, work: Callable[[], T]) -> T:
        """The result. Each of the work's reads is bounded, and a server may send a byte now and then for
        ever: it is given up when it does not answer on another connection either."""
        try:
            return while_alive(work, self.ping, self._answer_s)
        except DependencyDown:
            self._clients.clear()
            raise
        except _FAILURES as error:
            raise self._down(error) from None

    def _command(self, statement: str) -> None:
        self._connected(_COMMAND_S).command(statement)

    def _connected(self, answer_s: int | None = None) -> Any:
        silent_s = self._answer_s if answer_s is None else answer_s
        if silent_s not in self._clients:
            self._clients[silent_s] = self._connect(self._timeout_s, silent_s)
        return self._clients[silent_s]

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
        self._clients.clear()
        host = urlsplit(self._url).hostname
        reason = str(error).strip().partition("\n")[0][:300]
        log.warning("ClickHouse on %s does not answer: %s", host, reason)
        return DependencyDown(
            f"ClickHouse on {host} does not answer: {reason}.",
            next_step="Check TOLLHOUSE_EVENTS_URL and the ClickHouse server.",
            retry_after_s=5.0,
        )
