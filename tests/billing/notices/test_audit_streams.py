"""A stream of the audit log: every entry once, in order, from where it was asked to begin."""

import hashlib
import json
from pathlib import Path

import pytest
from sqlalchemy import select

from billing.notices import audit_streams
from billing.notices.tables import OutboxMessage
from core.clock import FakeClock
from core.database import Database
from core.errors import BadRequest
from core.tenants import audit
from core.tenants.organisations import create_tenant
from core.tenants.scope import TenantScope, scope_of_operator

URL = "https://siem.example.com/in"


class Shelf:
    """A store in memory that fails as often as it is told."""

    def __init__(self, failures: int = 0) -> None:
        self.objects: dict[str, bytes] = {}
        self.failures = failures

    def put(self, name: str, file: Path, media_type: str, sha256: str) -> str:
        if self.failures:
            self.failures -= 1
            raise OSError("the store is down")
        assert media_type == "application/jsonl"
        self.objects[name] = file.read_bytes()
        assert hashlib.sha256(self.objects[name]).hexdigest() == sha256
        return name

    def probe(self) -> None: ...


@pytest.fixture
def scope(database: Database, clock: FakeClock) -> TenantScope:
    with database.transaction() as session:
        made = [create_tenant(session, clock, name=name).id for name in ("acme", "bolt")]
    for each in made:
        record(database, clock, scope_of_operator(each), 2)
    return scope_of_operator(made[0])


def record(database: Database, clock: FakeClock, scope: TenantScope, count: int) -> None:
    with database.transaction() as session:
        for number in range(count):
            after = {"n": number}
            audit.record(session, scope, clock, "x.add", f"x{number}", before=None, after=after)


def set_stream(
    database: Database, clock: FakeClock, scope: TenantScope, url: str, whole: bool
) -> None:
    with database.transaction() as session:
        audit_streams.set_stream(session, scope, clock, url, whole=whole)


def logged(database: Database, scope: TenantScope) -> list[int]:
    with database.read() as session:
        return [each.id for each in audit.entries(session, scope, limit=1000)][::-1]


def queued(database: Database) -> list[list[int]]:
    with database.read() as session:
        messages = session.scalars(select(OutboxMessage).order_by(OutboxMessage.id)).all()
    assert all(each.target == URL and each.endpoint_id for each in messages)
    return [[entry["id"] for entry in each.payload["entries"]] for each in messages]


def test_a_webhook_gets_every_entry_once_in_batches(
    database: Database, clock: FakeClock, scope: TenantScope, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_streams, "BATCH", 3)
    set_stream(database, clock, scope, URL, whole=True)
    own = logged(database, scope)
    assert audit_streams.send(database, clock, lambda url: Shelf()) == len(own) == 4
    assert queued(database) == [own[:3], own[3:]]
    assert audit_streams.send(database, clock, lambda url: Shelf()) == 0
    record(database, clock, scope, 1)
    assert audit_streams.send(database, clock, lambda url: Shelf()) == 1
    assert queued(database)[-1] == logged(database, scope)[-1:]
    with database.transaction() as session:
        assert audit_streams.remove_stream(session, scope, clock)
    record(database, clock, scope, 1)
    assert audit_streams.send(database, clock, lambda url: Shelf()) == 0


def test_a_stream_begins_with_the_next_entry_unless_it_is_to_be_whole(
    database: Database, clock: FakeClock, scope: TenantScope
) -> None:
    before = logged(database, scope)
    set_stream(database, clock, scope, URL, whole=False)
    record(database, clock, scope, 1)
    audit_streams.send(database, clock, lambda url: Shelf())
    (sent,) = queued(database)
    assert sent == [each for each in logged(database, scope) if each not in before]


def test_a_bucket_that_was_down_misses_nothing(
    database: Database, clock: FakeClock, scope: TenantScope
) -> None:
    """And holds nobody else up."""
    set_stream(database, clock, scope, "s3://logs/audit", whole=True)
    with database.transaction() as session:
        other = scope_of_operator(create_tenant(session, clock, name="cargo").id)
    set_stream(database, clock, other, URL, whole=True)
    shelf = Shelf(failures=1)
    with pytest.raises(OSError, match="down"):
        audit_streams.send(database, clock, lambda url: shelf)
    assert [len(each) for each in queued(database)] == [2]
    assert audit_streams.send(database, clock, lambda url: shelf) == 4
    ((name, body),) = shelf.objects.items()
    entries = [json.loads(line) for line in body.splitlines()]
    assert [each["id"] for each in entries] == logged(database, scope)
    assert all(each["digest"] for each in entries)
    first, last = entries[0]["id"], entries[-1]["id"]
    day = f"{clock.now():%Y/%m/%d}"
    assert name == f"{scope.tenant_id}/{day}/{first:012}-{last:012}.jsonl"


@pytest.mark.parametrize("url", ["ftp://a.example/b", "s3://", "not a url", "s3://UPPER/x"])
def test_an_address_that_is_none_is_refused(
    database: Database, clock: FakeClock, scope: TenantScope, url: str
) -> None:
    with pytest.raises(BadRequest):
        set_stream(database, clock, scope, url, whole=False)
