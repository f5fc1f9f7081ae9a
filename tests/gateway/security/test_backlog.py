"""Issue 14, part 12: `/readyz`, which needs no key, does not count the outbox's rows."""

import sqlite3
from pathlib import Path

import httpx
import pytest

from gateway.metering.spool import SpoolFile
from gateway.metering.spool_statements import (
    Statement,
    delete_shipped,
    insert_moderation,
    move_to_parked,
)
from tests.gateway.deployment import Deployment


def _rows(file: SpoolFile) -> int:
    [(count,)] = file.connection.execute("select count(*) from outbox")
    return int(count)


def test_readyz_reads_no_table(deployment: Deployment) -> None:
    seen: list[str] = []
    connection = deployment.services.spool.file.connection
    connection.set_trace_callback(seen.append)
    try:
        assert httpx.get(f"{deployment.url}/readyz", timeout=60).status_code in (200, 503)
    finally:
        connection.set_trace_callback(None)
    assert not [statement for statement in seen if "count(" in statement.lower()]


def test_the_count_is_that_of_the_rows(tmp_path: Path) -> None:
    file = SpoolFile(tmp_path / "spool.db")
    for number in range(1, 6):
        file.commit([insert_moderation(()), insert_moderation(())])
        assert file.waiting == _rows(file) == 2 * number
    file.commit([delete_shipped(3)])
    file.commit(move_to_parked(4, "refused"))
    file.commit(move_to_parked(4, "refused"))  # it is not there any more
    assert file.waiting == _rows(file) == 6
    with pytest.raises(sqlite3.Error):
        file.commit(
            [insert_moderation(()), Statement("insert into nowhere values (1)", (), outbox=1)]
        )
    assert file.waiting == _rows(file) == 6
    file.close()
    again = SpoolFile(tmp_path / "spool.db")
    assert again.waiting == 6
    again.close()
