"""Uploaded files: stored in chunks, visible to their own project only, deleted when they expire."""

from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta

from sqlalchemy import delete, insert, select
from sqlalchemy.orm import Session

from core.batches.models import FileChunk, StoredFile
from core.clock import Clock
from core.errors import BadRequest, NotFound, PayloadTooLarge
from core.ids import new_id
from core.tenants.scope import TenantScope

CHUNK_BYTES = 1 << 20  # bytes
MAX_FILES = 1_000  # per tenant


def store(
    session: Session,
    clock: Clock,
    *,
    tenant_id: str,
    project_id: str,
    key_id: str,
    filename: str,
    purpose: str,
    content: Iterable[bytes],
    max_bytes: int | None = None,
    lifetime_s: int | None = None,
) -> StoredFile:
    """PayloadTooLarge past `max_bytes`."""
    existing = session.scalars(
        select(StoredFile.id).where(StoredFile.tenant_id == tenant_id).limit(MAX_FILES)
    ).all()
    if len(existing) >= MAX_FILES and purpose == "batch":
        raise BadRequest(
            f"The organisation already stores {MAX_FILES} files, the maximum.",
            next_step="Delete files with DELETE /v1/files/{file_id} and upload again.",
            code="too_many_files",
        )
    now = clock.now()
    stored = StoredFile(
        id=new_id("file"),
        tenant_id=tenant_id,
        project_id=project_id,
        key_id=key_id,
        purpose=purpose,
        filename=filename,
        bytes=0,
        created_at=now,
        expires_at=now + timedelta(seconds=lifetime_s) if lifetime_s else None,
    )
    session.add(stored)
    session.flush()
    _write(session, stored, content, max_bytes)
    return stored


def replace_content(session: Session, file: StoredFile, content: Iterable[bytes]) -> None:
    """`content` is read before the old one is deleted."""
    parts = list(content)
    session.execute(delete(FileChunk).where(FileChunk.file_id == file.id))
    file.bytes = 0
    _write(session, file, parts, None)


def _write(
    session: Session, file: StoredFile, content: Iterable[bytes], max_bytes: int | None
) -> None:
    for number, chunk in enumerate(_chunks(content)):
        file.bytes += len(chunk)
        if max_bytes is not None and file.bytes > max_bytes:
            raise PayloadTooLarge(
                f"The file is larger than {max_bytes >> 20} MiB.",
                next_step="Split the file, or ask the operator to raise TOLLHOUSE_MAX_FILE_MB.",
                param="file",
            )
        row = {"file_id": file.id, "number": number, "content": chunk}
        session.execute(insert(FileChunk), [row])
    session.flush()


def get(session: Session, scope: TenantScope, file_id: str, now: datetime) -> StoredFile:
    """NotFound if the file does not exist, has expired or belongs to another project."""
    stored = session.get(StoredFile, file_id)
    foreign = stored is None or stored.tenant_id != scope.tenant_id
    if (
        stored is None
        or foreign
        or (scope.project_id is not None and stored.project_id != scope.project_id)
        or (stored.expires_at is not None and stored.expires_at <= now)
    ):
        raise NotFound(
            f"There is no file {file_id[:80]!r}.",
            next_step="GET /v1/files lists them.",
            param="file_id",
        )
    return stored


def all_of(
    session: Session,
    scope: TenantScope,
    now: datetime,
    *,
    purpose: str | None = None,
    after: str | None = None,
    limit: int = 100,
    newest_first: bool = True,
) -> list[StoredFile]:
    query = select(StoredFile).where(StoredFile.tenant_id == scope.tenant_id)
    query = query.where(StoredFile.expires_at.is_(None) | (StoredFile.expires_at > now))
    if scope.project_id is not None:
        query = query.where(StoredFile.project_id == scope.project_id)
    if purpose is not None:
        query = query.where(StoredFile.purpose == purpose)
    if after is not None:
        query = query.where(StoredFile.id < after if newest_first else StoredFile.id > after)
    order = StoredFile.id.desc() if newest_first else StoredFile.id
    return list(session.scalars(query.order_by(order).limit(limit)))


def content(session: Session, file: StoredFile) -> Iterator[bytes]:
    """Yields the content chunk by chunk, so that the file need not fit into memory."""
    number = 0
    while True:
        chunk = session.scalar(
            select(FileChunk.content).where(
                FileChunk.file_id == file.id, FileChunk.number == number
            )
        )
        if chunk is None:
            return
        yield chunk
        number += 1


def lines(session: Session, file: StoredFile, longest: int) -> Iterator[bytes]:
    """Of a line of more than `longest` bytes only the beginning, longer than `longest`."""
    parts: list[bytes] = []
    size = 0
    for chunk in content(session, file):
        *complete, rest = chunk.split(b"\n")
        for each in complete:
            yield b"".join([*parts, each])
            parts, size = [], 0
        if size <= longest:
            parts.append(rest)
            size += len(rest)
    if size:
        yield b"".join(parts)


def remove(session: Session, scope: TenantScope, file_id: str, now: datetime) -> None:
    stored = get(session, scope, file_id, now)
    _delete(session, [stored.id])


def drop_expired(session: Session, now: datetime) -> int:
    expired = session.scalars(
        select(StoredFile.id).where(StoredFile.expires_at <= now).limit(100)
    ).all()
    _delete(session, expired)
    return len(expired)


def _delete(session: Session, ids: Iterable[str]) -> None:
    ids = list(ids)
    session.execute(delete(FileChunk).where(FileChunk.file_id.in_(ids)))
    session.execute(delete(StoredFile).where(StoredFile.id.in_(ids)))


def _chunks(content: Iterable[bytes]) -> Iterator[bytes]:
    existing = b""
    for part in content:
        existing += part
        while len(existing) >= CHUNK_BYTES:
            yield existing[:CHUNK_BYTES]
            existing = existing[CHUNK_BYTES:]
    if existing:
        yield existing
