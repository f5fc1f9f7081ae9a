"""Tables of export schedules and their jobs."""

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, Index, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from billing.columns import ID
from core.database import Base, Json, UtcDateTime


class ExportJob(Base):
    __tablename__ = "export_jobs"
    __table_args__ = (
        Index("ix_export_jobs_tenant", "tenant_id", "created_at"),
        Index("ix_export_jobs_due", "status", "next_at"),
    )

    id: Mapped[str] = mapped_column(ID, primary_key=True)
    tenant_id: Mapped[str | None] = mapped_column(ID)  # None: the operator's, over all tenants
    what: Mapped[str] = mapped_column(String(20))  # usage | charges | invoices | ledger | focus
    format: Mapped[str] = mapped_column(String(20))  # csv | jsonl | parquet
    starts_at: Mapped[datetime] = mapped_column(UtcDateTime)
    ends_at: Mapped[datetime] = mapped_column(UtcDateTime)
    destination: Mapped[str] = mapped_column(String(1024))
    schedule_id: Mapped[str | None] = mapped_column(ID)
    status: Mapped[str] = mapped_column(String(20))  # pending | running | done | parked
    attempts: Mapped[int] = mapped_column(default=0)
    next_at: Mapped[datetime] = mapped_column(UtcDateTime)  # next attempt, or end of the lease
    rows: Mapped[int | None] = mapped_column(BigInteger)
    bytes: Mapped[int | None] = mapped_column(BigInteger)
    sha256: Mapped[str | None] = mapped_column(String(64))
    address: Mapped[str | None] = mapped_column(String(1200))  # where the file is
    error: Mapped[str | None] = mapped_column(Text)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    done_at: Mapped[datetime | None] = mapped_column(UtcDateTime)


class ExportSchedule(Base):
    __tablename__ = "export_schedules"

    id: Mapped[str] = mapped_column(ID, primary_key=True)
    tenant_id: Mapped[str | None] = mapped_column(ID)
    what: Mapped[str] = mapped_column(String(20))
    format: Mapped[str] = mapped_column(String(20))
    destination: Mapped[str] = mapped_column(String(1024))
    options: Mapped[dict[str, Any]] = mapped_column(Json, default=dict)
    every: Mapped[str] = mapped_column(String(20))  # day | week | month
    next_at: Mapped[datetime] = mapped_column(UtcDateTime)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    paused_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    ended_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    last_error: Mapped[str | None] = mapped_column(Text)
