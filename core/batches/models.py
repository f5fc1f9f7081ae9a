"""Tables of uploaded files, batches and their lines. File contents are stored in the database, in
chunks, so that every gateway process can read them and a restart loses none."""

from datetime import datetime
from typing import Any

from sqlalchemy import ForeignKey, Index, LargeBinary, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from core.database import Base, Json, UtcDateTime

ID = String(40)


class StoredFile(Base):
    __tablename__ = "files"
    __table_args__ = (Index("ix_files_tenant_id", "tenant_id", "id"),)

    id: Mapped[str] = mapped_column(ID, primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ID)
    project_id: Mapped[str] = mapped_column(ID)
    key_id: Mapped[str] = mapped_column(ID)
    purpose: Mapped[str] = mapped_column(String(20))  # batch | batch_output
    filename: Mapped[str] = mapped_column(String(255))
    bytes: Mapped[int]
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    expires_at: Mapped[datetime | None] = mapped_column(UtcDateTime)


class FileChunk(Base):
    __tablename__ = "file_chunks"

    file_id: Mapped[str] = mapped_column(ID, ForeignKey("files.id"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    content: Mapped[bytes] = mapped_column(LargeBinary)


class Batch(Base):
    """`lease_until` is set while a gateway process runs the batch; after it, another may claim it."""

    __tablename__ = "batches"
    __table_args__ = (
        Index("ix_batches_tenant_id", "tenant_id", "id"),
        Index("ix_batches_status", "status"),
    )

    id: Mapped[str] = mapped_column(ID, primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ID)
    project_id: Mapped[str] = mapped_column(ID)
    key_id: Mapped[str] = mapped_column(ID)
    endpoint: Mapped[str] = mapped_column(String(80))
    input_file_id: Mapped[str] = mapped_column(ID)
    completion_window: Mapped[str] = mapped_column(String(10))
    status: Mapped[str] = mapped_column(String(20))  # OpenAI's names
    labels: Mapped[dict[str, Any]] = mapped_column(Json)  # `metadata` of the API
    errors: Mapped[list[dict[str, Any]]] = mapped_column(
        Json
    )  # validation errors of the input file
    model: Mapped[str | None] = mapped_column(String(300))
    total: Mapped[int] = mapped_column(default=0)
    completed: Mapped[int] = mapped_column(default=0)
    failed: Mapped[int] = mapped_column(default=0)
    input_tokens: Mapped[int] = mapped_column(default=0)
    cached_tokens: Mapped[int] = mapped_column(default=0)
    output_tokens: Mapped[int] = mapped_column(default=0)
    output_file_id: Mapped[str | None] = mapped_column(ID)
    error_file_id: Mapped[str | None] = mapped_column(ID)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    expires_at: Mapped[datetime] = mapped_column(UtcDateTime)
    in_progress_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    finalizing_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    cancelling_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    ended_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    lease_owner: Mapped[str | None] = mapped_column(String(80))
    lease_until: Mapped[datetime | None] = mapped_column(UtcDateTime)


class BatchLine(Base):
    """One request of a batch. `result` is the line to write to the output or error file, once known."""

    __tablename__ = "batch_lines"
    __table_args__ = (Index("ix_batch_lines_state", "batch_id", "state", "number"),)

    batch_id: Mapped[str] = mapped_column(ID, ForeignKey("batches.id"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    custom_id: Mapped[str] = mapped_column(String(512))
    body: Mapped[str] = mapped_column(Text)
    state: Mapped[str] = mapped_column(String(10), default="waiting")  # waiting | done | failed
    result: Mapped[str | None] = mapped_column(Text)
