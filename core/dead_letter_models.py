"""The table of dead letters: tasks that exhausted their retries."""

from datetime import datetime
from typing import Any

from sqlalchemy import Index, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from core.database import Base, BigKey, Json, UtcDateTime


class DeadLetter(Base):
    __tablename__ = "dead_letters"
    __table_args__ = (Index("ix_dead_letters_open", "replayed_at", "died_at"),)

    id: Mapped[int] = mapped_column(BigKey, primary_key=True, autoincrement=True)
    task: Mapped[str] = mapped_column(String(120))
    queue: Mapped[str] = mapped_column(String(40))
    arguments: Mapped[dict[str, Any]] = mapped_column(Json)
    error: Mapped[str] = mapped_column(Text)
    attempts: Mapped[int]
    died_at: Mapped[datetime] = mapped_column(UtcDateTime)
    replayed_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
