"""The hash chain of the audit log: each entry has a digest over itself and the digest before it.

Each tenant has a chain, and the operator's own entries have one. The digest covers what an entry
changed by a salted hash, so that an erasure can empty the content and the chain still holds; the salt
goes with the content, so that the hash tells nothing about it afterwards.
"""

import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC
from hashlib import sha256
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from core.database import insert_new
from core.tenants.models import AuditChain, AuditEntry

OPERATOR_CHAIN = ""  # in place of a tenant's id
_PAGE = 1_000
_MOST_FAULTS = 100


def append(session: Session, entry: AuditEntry) -> None:
    """Add the entry at the end of its chain. Locks the chain until the transaction ends, so that ids
    and digests have the order of commits."""
    name = entry.tenant_id or OPERATOR_CHAIN
    row = {"tenant_id": name, "entries": 0, "digest": ""}
    insert_new(session, AuditChain.__table__, [row], "tenant_id")  # type: ignore[arg-type]
    query = select(AuditChain).where(AuditChain.tenant_id == name).with_for_update()
    chain = session.scalars(query.execution_options(populate_existing=True)).one()
    entry.request_id = entry.request_id or ""
    entry.salt = secrets.token_hex(16)
    entry.content_sha256 = _content(entry)
    entry.digest = chain.digest = _link(chain.digest, entry)
    chain.entries += 1
    session.add(entry)
    session.flush()


@dataclass(slots=True)
class Verification:
    """`entries` are those of the chain; those before it were written before there was one."""

    entries: int = 0
    unchained: int = 0
    emptied: int = 0  # by an erasure
    digest: str = ""  # of the last entry: kept elsewhere, it shows later that none was taken away
    faults: list[str] = field(default_factory=list)
    fault_count: int = 0

    def fault(self, text: str) -> None:
        self.fault_count += 1
        if len(self.faults) < _MOST_FAULTS:
            self.faults.append(text)


def verify(session: Session, tenant_id: str | None, expected: str = "") -> Verification:
    """Every entry against its digest, and the last against the end that the database keeps apart.
    `expected` is a digest that was the last one once."""
    done, seen = Verification(), not expected
    for entry in _entries(session, tenant_id):
        if not entry.digest:
            if done.entries:
                done.fault(f"Entry {entry.id} has no digest.")
            done.unchained += 1
            continue
        if not entry.salt and entry.before is None and entry.after is None:
            done.emptied += 1
        elif entry.content_sha256 != _content(entry):
            done.fault(f"The content of entry {entry.id} ({entry.action}) was changed.")
        if entry.digest != _link(done.digest, entry):
            done.fault(f"Entry {entry.id} ({entry.action}) does not follow the one before it.")
        done.digest = entry.digest
        done.entries += 1
        seen = seen or entry.digest == expected
    kept = session.get(AuditChain, tenant_id or OPERATOR_CHAIN)
    count, end = (kept.entries, kept.digest) if kept is not None else (0, "")
    if (count, end) != (done.entries, done.digest):
        done.fault(f"The chain has {done.entries} entries, and {count} were written.")
    if not seen:
        done.fault(f"No entry has the expected digest {expected[:64]}.")
    return done


def _entries(session: Session, tenant_id: str | None) -> Iterator[AuditEntry]:
    own, last = AuditEntry.tenant_id == tenant_id, 0
    while True:
        query = select(AuditEntry).where(own, AuditEntry.id > last).order_by(AuditEntry.id)
        rows = session.scalars(query.limit(_PAGE)).all()
        if not rows:
            return
        yield from rows
        last = rows[-1].id
        session.expunge_all()


def _content(entry: AuditEntry) -> str:
    written = [entry.salt, entry.target, _plain(entry.before), _plain(entry.after)]
    return _sha256(written)


def _link(previous: str, entry: AuditEntry) -> str:
    at = entry.at.astimezone(UTC).isoformat()
    who = [entry.tenant_id or OPERATOR_CHAIN, at, entry.actor, entry.action, entry.request_id]
    return _sha256([previous, *who, entry.content_sha256])


def _sha256(parts: list[Any]) -> str:
    return sha256(json.dumps(parts, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


def _plain(value: Any) -> Any:
    """As every database gives it back: PostgreSQL writes 1.0 and 1e2 as other numbers."""
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value
