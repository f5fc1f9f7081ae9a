"""Tables that show whether a database was restored from a backup."""

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from core.database import Base, BigKey, Json, UtcDateTime


class RestoreMark(Base):
    """A point in the history of this database. The latest one is also kept outside of it; a database
    without it has lost what came after its own latest mark."""

    __tablename__ = "restore_marks"

    position: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    token: Mapped[str] = mapped_column(String(40))  # random: two histories never share one
    epoch: Mapped[int]  # one more after each recovery
    at: Mapped[datetime] = mapped_column(UtcDateTime)
    entry_id: Mapped[int] = mapped_column(
        BigInteger
    )  # highest ids of ledger entries, entries of the
    audit_id: Mapped[int] = mapped_column(BigInteger)  # audit log and commands to the provider
    command_id: Mapped[int] = mapped_column(BigInteger)
    numbers: Mapped[dict[str, Any]] = mapped_column(
        Json
    )  # by seller: next invoice, next credit note
    acts_sha256: Mapped[str] = mapped_column(String(64), default="")


class Recovery(Base):
    """A restore that was noticed, and what `tollhouse recover` did about it."""

    __tablename__ = "recoveries"

    id: Mapped[int] = mapped_column(BigKey, primary_key=True, autoincrement=True)
    found_at: Mapped[datetime] = mapped_column(UtcDateTime)
    reason: Mapped[str] = mapped_column(Text)
    finished_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    report: Mapped[dict[str, Any]] = mapped_column(Json, default=dict)
