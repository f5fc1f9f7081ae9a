"""What an entry of the audit log changed, in words, and which entries a filter chooses."""

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy.orm import Session

from core.clock import FakeClock
from core.database import Database
from core.tenants import audit
from core.tenants.audit import AuditFilter
from core.tenants.audit_words import changes
from core.tenants.models import AuditEntry
from core.tenants.plans import limit_in_words
from core.tenants.scope import scope_of_operator

LIMIT = {"scope": "key", "unit": "requests", "period_s": 60, "target": "key_1", "shadow": False}


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (
            LIMIT | {"limit": 60},
            LIMIT | {"limit": 3},
            ["limit 60 requests a minute → 3 requests a minute"],
        ),
        (
            {"role": "viewer", "disabled": False},
            {"role": "admin", "disabled": False},
            ["role viewer → admin"],
        ),
        ({"project_id": "p1"}, {"project_id": "p2"}, ["project Search → p2"]),
        ({"label_keys": []}, {"label_keys": ["a", "b"]}, ["label keys nothing → a, b"]),
        (None, {"id": "x", "name": "ci", "expires_at": None}, ["name ci"]),
        ({"name": "ci"}, None, ["name ci"]),
        ({"on": False}, {"on": True}, ["on no → yes"]),
    ],
)
def test_what_differs_is_said(
    before: dict[str, Any] | None, after: dict[str, Any] | None, said: list[str]
) -> None:
    assert changes(AuditEntry(before=before, after=after), {"p1": "Search"}) == said


def test_limits_in_words() -> None:
    assert limit_in_words("concurrent", 256, 0) == "256 at once"
    assert limit_in_words("total_tokens", 3_000_000, 86_400) == "3,000,000 total tokens a day"
    assert limit_in_words("requests", 1, 3_600) == "1 request an hour"


def test_entries_by_person_object_act_and_time(sqlite_database: Database) -> None:
    clock = FakeClock()
    with sqlite_database.transaction() as session:
        _record(session, clock)
        scope = scope_of_operator("acme")
        start = clock.now()

        def _found(**wanted: Any) -> list[str]:
            entries = audit.entries(session, scope, wanted=AuditFilter(**wanted))
            return [each.target for each in reversed(entries)]

        assert _found() == ["a", "b", "c"]
        assert _found(actor="ann") == ["a", "c"]
        assert _found(target="b") == ["b"]
        assert _found(action="key.revoke") == ["b", "c"]
        assert _found(actor="ann", action="key.revoke") == ["c"]
        assert _found(since=start - timedelta(hours=1)) == ["c"]
        assert _found(until=start - timedelta(hours=1)) == ["a", "b"]


def _record(session: Session, clock: FakeClock) -> None:
    for actor, action, target in (
        ("ann", "key.create", "a"),
        ("bob", "key.revoke", "b"),
        ("ann", "key.revoke", "c"),
    ):
        clock.advance(hours=2)
        scope = scope_of_operator("acme", actor)
        audit.record(session, scope, clock, action, target, before=None, after=None)
