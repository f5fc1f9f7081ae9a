"""Stored responses by Idempotency-Key, so that a request that is sent twice runs once.

Keys are scoped to a tenant and project. The digest of route and body distinguishes a retry from a
reused key. Stored responses are limited in size, number and age.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import (
    BigInteger,
    Index,
    LargeBinary,
    String,
    and_,
    delete,
    func,
    or_,
    select,
    update,
)
from sqlalchemy.orm import Mapped, Session, mapped_column

from core.database import Base, Json, UtcDateTime, insert_new
from core.errors import BadRequest, Conflict, RateLimited

RETENTION = timedelta(hours=24)
MAX_KEYS = 100_000  # per tenant, unless the setting says otherwise
MAX_RESPONSE_BYTES = 4 << 20  # per response; a larger one is not stored


class StoredResponseRow(Base):
    __tablename__ = "idempotency_records"
    __table_args__ = (
        Index("ix_idempotency_records_tenant_id", "tenant_id", "claimed_at"),
        Index("ix_idempotency_records_expires_at", "expires_at"),
        Index("ix_idempotency_records_stored_bytes", "tenant_id", "stored_bytes"),
        Index("ix_idempotency_records_end_user_key", "tenant_id", "end_user_key"),
        Index("ix_idempotency_records_safety_key", "tenant_id", "safety_key"),
    )

    id: Mapped[str] = mapped_column(String(64), primary_key=True)  # SHA-256 of tenant and key
    tenant_id: Mapped[str] = mapped_column(String(40))
    body_sha256: Mapped[str] = mapped_column(String(64))
    claimed_at: Mapped[datetime] = mapped_column(UtcDateTime)
    expires_at: Mapped[datetime] = mapped_column(UtcDateTime)
    status: Mapped[int | None]  # None while the first request runs
    headers: Mapped[list[list[str]]] = mapped_column(Json)
    response: Mapped[bytes | None] = mapped_column(LargeBinary)
    stored_bytes: Mapped[int] = mapped_column(BigInteger, server_default="0")
    # Whose it is, as core/responses/end_users.py says; NULL while the first request runs.
    end_user_key: Mapped[str | None] = mapped_column(String(64))
    safety_key: Mapped[str | None] = mapped_column(String(64))  # of a second name


@dataclass(frozen=True, slots=True)
class StoredResponse:
    status: int
    headers: list[tuple[str, str]]
    answer: bytes


def claim(
    session: Session,
    *,
    tenant_id: str,
    project_id: str,
    key: str,
    route: str,
    body: bytes,
    now: datetime,
    longest: timedelta,
    max_keys: int = MAX_KEYS,
) -> tuple[str, StoredResponse | None]:
    """Returns (claim id, None) for the first request and (claim id, stored response) for a retry.

    Conflict while the first request is running; BadRequest if the key was used with another body or
    route. A claim older than `longest` belongs to a request that died, and is taken over."""
    name = hashlib.sha256("\0".join((tenant_id, project_id, key)).encode()).hexdigest()
    digest = hashlib.sha256(route.encode() + b"\0" + body).hexdigest()
    session.execute(
        delete(StoredResponseRow).where(
            StoredResponseRow.id == name, StoredResponseRow.expires_at <= now
        )
    )
    stored = session.get(StoredResponseRow, name)
    if stored is None:
        _enforce_key_limit(session, tenant_id, now, max_keys)
        row: dict[str, Any] = {
            "id": name,
            "tenant_id": tenant_id,
            "body_sha256": digest,
            "claimed_at": now,
            "expires_at": now + RETENTION,
            "status": None,
            "headers": [],
            "response": None,
        }
        if insert_new(session, StoredResponseRow.__table__, [row], "id"):  # type: ignore[arg-type]
            return name, None
        stored = session.get_one(StoredResponseRow, name)
    if stored.body_sha256 != digest:
        raise BadRequest(
            "This Idempotency-Key was already used with a different body or route.",
            next_step="Use a new key for a new request.",
            param="Idempotency-Key",
            code="idempotency_key_reused",
        )
    if stored.status is not None:
        headers = [(name, value) for name, value in stored.headers]
        return stored.id, StoredResponse(stored.status, headers, stored.response or b"")
    reclaimed = session.execute(
        update(StoredResponseRow)
        .where(StoredResponseRow.id == name, StoredResponseRow.claimed_at <= now - longest)
        .where(StoredResponseRow.status.is_(None))
        .values(claimed_at=now)
        .returning(StoredResponseRow.id)
    ).all()
    if reclaimed:
        return name, None
    raise Conflict(
        "A request with this Idempotency-Key is still running.",
        next_step="Retry after it has finished.",
        param="Idempotency-Key",
        code="idempotency_in_progress",
    )


def store_response(
    session: Session, claim_id: str, response: StoredResponse, whose: Mapping[str, str | None]
) -> None:
    """`whose`: the columns of the end users, as `keys_of` makes them."""
    session.execute(
        update(StoredResponseRow)
        .where(StoredResponseRow.id == claim_id)
        .values(
            status=response.status,
            headers=[[name, value] for name, value in response.headers],
            response=response.answer,
            stored_bytes=len(response.answer),
            **whose,
        )
    )


def release(session: Session, claim_id: str) -> None:
    """Release the claim of a request whose response is not stored; the next request runs."""
    session.execute(
        delete(StoredResponseRow).where(
            StoredResponseRow.id == claim_id, StoredResponseRow.status.is_(None)
        )
    )


def erase(session: Session, tenant_id: str, end_user_key: str, generation: str) -> int:
    """Deletes the responses of an end user, so that a repetition runs as new; the number of rows.
    Those of which nobody can say whose they are go with them: they are not encrypted, and their
    key was made with another operator token, or before there were keys."""
    key = StoredResponseRow.end_user_key
    unknown = or_(key.is_(None), and_(key != "", key.not_like(f"{generation}%")))
    gone = delete(StoredResponseRow).where(
        StoredResponseRow.tenant_id == tenant_id,
        StoredResponseRow.status.is_not(None),
        or_(key == end_user_key, StoredResponseRow.safety_key == end_user_key, unknown),
    )
    return len(session.execute(gone.returning(StoredResponseRow.id)).all())


def drop_expired(session: Session, now: datetime) -> None:
    session.execute(delete(StoredResponseRow).where(StoredResponseRow.expires_at <= now))


def _enforce_key_limit(session: Session, tenant_id: str, now: datetime, max_keys: int) -> None:
    count = select(func.count()).where(StoredResponseRow.tenant_id == tenant_id)
    if (session.scalar(count) or 0) < max_keys:
        return
    session.execute(
        delete(StoredResponseRow).where(
            StoredResponseRow.tenant_id == tenant_id, StoredResponseRow.expires_at <= now
        )
    )
    if (session.scalar(count) or 0) < max_keys:
        return
    first = select(func.min(StoredResponseRow.expires_at)).where(
        StoredResponseRow.tenant_id == tenant_id
    )
    expires_at = session.scalar(first) or now
    raise RateLimited(
        f"The organisation used {max_keys} idempotency keys in the last 24 hours, the maximum.",
        next_step="Send the request without an Idempotency-Key, or ask the operator to raise "
        "TOLLHOUSE_IDEMPOTENCY_KEYS.",
        code="too_many_idempotency_keys",
        retry_after_s=max(1.0, (expires_at - now).total_seconds()),
    )
