"""Stored chat completions: kept for 30 days, visible to their own project only, encrypted at rest."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import orjson
from sqlalchemy import and_, delete, or_, select
from sqlalchemy.orm import Session

from core.errors import NotFound
from core.responses.end_users import end_users_of, keys_of
from core.responses.models import CompletionRecord
from core.responses.records import KEPT, is_visible
from core.sealing import Sealer
from core.tenants.keys import Principal
from core.tenants.scope import TenantScope

_AT_ONCE = 100  # rows that are read and decrypted together


@dataclass(frozen=True, slots=True)
class Listing:
    after: str | None = None  # id of the last one of the page before
    limit: int = 20
    newest_first: bool = False
    model: str | None = None
    metadata: Mapping[str, str] | None = None  # all of these labels


@dataclass(frozen=True)
class Completions:
    """The stored completions that a scope may see."""

    session: Session
    sealer: Sealer
    scope: TenantScope
    now: datetime

    def get(self, completion_id: str) -> dict[str, Any]:
        return self._opened(self._row(completion_id))["completion"]  # type: ignore[no-any-return]

    def messages(self, completion_id: str) -> list[dict[str, Any]]:
        """Of the request, each with an id."""
        found = self._opened(self._row(completion_id))["messages"]
        return [{"id": f"{completion_id}-{number}", **each} for number, each in enumerate(found)]

    def update(self, completion_id: str, metadata: Mapping[str, str]) -> dict[str, Any]:
        row = self._row(completion_id)
        content = self._opened(row)
        content["completion"]["metadata"] = dict(metadata)
        row.sealed = self.sealer.seal(row.tenant_id, row.id, orjson.dumps(content))
        row.stored_bytes = len(row.sealed)
        return content["completion"]  # type: ignore[no-any-return]

    def remove(self, completion_id: str) -> None:
        self.session.delete(self._row(completion_id))

    def page(self, wanted: Listing) -> tuple[list[dict[str, Any]], bool]:
        """Completions, oldest first unless asked otherwise, and whether more follow. Labels are
        encrypted, so they are compared here."""
        found: list[dict[str, Any]] = []
        last = self._row(wanted.after) if wanted.after else None
        while True:
            rows = self.session.scalars(self._query(wanted, last)).all()
            for row in rows:
                completion = self._opened(row)["completion"]
                labels = completion.get("metadata") or {}
                if (wanted.metadata or {}).items() <= labels.items():
                    if len(found) == wanted.limit:
                        return found, True
                    found.append(completion)
            if len(rows) < _AT_ONCE:
                return found, False
            last = rows[-1]

    def _query(self, wanted: Listing, last: CompletionRecord | None) -> Any:
        row = CompletionRecord
        where = [row.tenant_id == self.scope.tenant_id, row.expires_at > self.now]
        if self.scope.project_id is not None:
            where.append(row.project_id == self.scope.project_id)
        if wanted.model is not None:
            where.append(row.model == wanted.model)
        if last is not None:
            at, same = row.created_at, row.created_at == last.created_at
            if wanted.newest_first:
                where.append(or_(at < last.created_at, and_(same, row.id < last.id)))
            else:
                where.append(or_(at > last.created_at, and_(same, row.id > last.id)))
        order = (
            (row.created_at.desc(), row.id.desc())
            if wanted.newest_first
            else (row.created_at, row.id)
        )
        return select(row).where(*where).order_by(*order).limit(_AT_ONCE)

    def _row(self, completion_id: str) -> CompletionRecord:
        row = self.session.get(CompletionRecord, completion_id)
        if row is not None and is_visible(row, self.scope, self.now):
            return row
        raise NotFound(
            f"There is no stored completion {completion_id[:80]!r}.",
            next_step="Completions are stored for 30 days, when the request has store: true.",
            code="completion_not_found",
        )

    def _opened(self, row: CompletionRecord) -> dict[str, Any]:
        return orjson.loads(self.sealer.open(row.tenant_id, row.id, row.sealed))  # type: ignore[no-any-return]


def save(
    session: Session,
    sealer: Sealer,
    principal: Principal,
    content: dict[str, Any],
    now: datetime,
) -> None:
    """`content`: the `completion` in OpenAI's format, and the `messages` of its request with its
    `safety_identifier`."""
    completion = content["completion"]
    sealed = sealer.seal(principal.tenant_id, completion["id"], orjson.dumps(content))
    session.add(
        CompletionRecord(
            id=completion["id"],
            tenant_id=principal.tenant_id,
            project_id=principal.project_id,
            key_id=principal.key_id,
            model=completion["model"],
            created_at=now,
            expires_at=now + KEPT,
            sealed=sealed,
            stored_bytes=len(sealed),
            **keys_of(sealer, principal.tenant_id, end_users_in(content)),
        )
    )


def end_users_in(content: dict[str, Any]) -> tuple[str, ...]:
    """Of a stored completion."""
    names = {"user": content["completion"].get("input_user")}
    return end_users_of("", names | {"safety_identifier": content.get("safety_identifier")})


def drop_expired(session: Session, now: datetime) -> None:
    row = CompletionRecord
    expired = list(session.scalars(select(row.id).where(row.expires_at <= now).limit(10_000)))
    session.execute(delete(row).where(row.id.in_(expired)))
