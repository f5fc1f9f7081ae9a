"""Table of the audit's runs."""

from datetime import datetime
from typing import Any

from sqlalchemy.orm import Mapped, mapped_column

from core.database import Base, BigKey, Json, UtcDateTime


class AuditRun(Base):
    """The report of one audit, for the pages and alerts."""

    __tablename__ = "audit_runs"

    id: Mapped[int] = mapped_column(BigKey, primary_key=True, autoincrement=True)
    at: Mapped[datetime] = mapped_column(UtcDateTime, index=True)
    clean: Mapped[bool]
    report: Mapped[dict[str, Any]] = mapped_column(Json)
