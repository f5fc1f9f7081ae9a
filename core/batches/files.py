"""Uploaded files: stored in chunks, visible to their own project only, deleted when they expire."""

from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta

from sqlalchemy import delete, insert, select
from sqlalchemy.orm import Session

from core.batches.models import FilePiece, StoredFile
from core.clock import Clock
from core.errors import BadRequest, NotFound, PayloadTooLarge
from core.ids import new_id
from core.tenants.scope import TenantScope

PIECE = 1 << 20  # bytes
MOST_FILES = 1_000  # per tenant


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
    most_bytes: int | None = None,
    lifetime_s: int | None = None,
) -> StoredFile:
    """PayloadTooLarge past `most_bytes`."""
    held = session.scalars(
        select(StoredFile.id).where(StoredFile.tenant_id == tenant_id).limit(MOST_FILES)
    ).all()
    if len(held) >= MOST_FILES and purpose == "batch":
        raise BadRequest(
            f"The organisation already stores {MOST_FILES} files, the maximum.",
            next_step="Delete files with DELETE /v1/files/{file_id} and upload again.",
            code="too_many_files",
        )
    now = clock.now()
    made = StoredFile(
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
    session.add(made)
    session.flush()
    for number, piece in enumerate(_pieces(content)):
        made.bytes += len(piece)
        if most_bytes is not None and made.bytes > most_bytes:
            raise PayloadTooLarge(
                f"The file is larger than {most_bytes >> 20} MiB.",
                next_step="Split the file, or ask the operator to raise TOLLHOUSE_MAX_FILE_MB.",
                param="file",
            )
        row = {"file_id": made.id, "number": number, "content": piece}
        session.execute(insert(FilePiece), [row])
    session.flush()
    return made


def get(session: Session, scope: TenantScope, file_id: str, now: datetime) -> StoredFile:
    """NotFound if the file does not exist, has expired or belongs to another project."""
    found = session.get(StoredFile, file_id)
    foreign = found is None or found.tenant_id != scope.tenant_id
    if (
        found is None
        or foreign
        or (scope.project_id is not None and found.project_id != scope.project_id)
        or (found.expires_at is not None and found.expires_at <= now)
    ):
        raise NotFound(
            f"There is no file {file_id[:80]!r}.",
            next_step="GET /v1/files lists them.",
            param="file_id",
        )
    return found


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
        piece = session.scalar(
            select(FilePiece.content).where(
                FilePiece.file_id == file.id, FilePiece.number == number
            )
        )
        if piece is None:
            return
        yield piece
        number += 1


def lines(session: Session, file: StoredFile) -> Iterator[bytes]:
    left = b""
    for piece in content(session, file):
        *whole, left = (left + piece).split(b"\n")
        yield from whole
    if left:
        yield left


def remove(session: Session, scope: TenantScope, file_id: str, now: datetime) -> None:
    found = get(session, scope, file_id, now)
    _drop(session, [found.id])


def drop_expired(session: Session, now: datetime) -> int:
    gone = session.scalars(
        select(StoredFile.id).where(StoredFile.expires_at <= now).limit(100)
    ).all()
    _drop(session, gone)
    return len(gone)


def _drop(session: Session, ids: Iterable[str]) -> None:
    ids = list(ids)
    session.execute(delete(FilePiece).where(FilePiece.file_id.in_(ids)))
    session.execute(delete(StoredFile).where(StoredFile.id.in_(ids)))


def _pieces(content: Iterable[bytes]) -> Iterator[bytes]:
    held = b""
    for part in content:
        held += part
        while len(held) >= PIECE:
            yield held[:PIECE]
            held = held[PIECE:]
    if held:
        yield held
