"""The tables of moderation. None of them stores text of prompts or answers."""

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, Index, String, Text, UniqueConstraint, text
from sqlalchemy.orm import Mapped, mapped_column

from core.database import Base, BigKey, Json, UtcDateTime

ID = String(40)
ACTED = text("(action <> 'allow' or unscanned)")  # of a decision, as its index has it


class PolicyVersion(Base):
    """A version of the policy document of a tenant, a project or a key."""

    __tablename__ = "moderation_policies"
    __table_args__ = (Index("ix_moderation_policies_place", "tenant_id", "level", "target"),)

    id: Mapped[int] = mapped_column(BigKey, primary_key=True, autoincrement=True)
    tenant_id: Mapped[str] = mapped_column(ID)
    level: Mapped[str] = mapped_column(String(20))  # tenant | project | key
    target: Mapped[str] = mapped_column(ID)  # the tenant's, project's or key's id
    version: Mapped[str] = mapped_column(ID)
    document: Mapped[dict[str, Any]] = mapped_column(Json)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    created_by: Mapped[str] = mapped_column(ID, default="")
    retired_at: Mapped[datetime | None] = mapped_column(UtcDateTime)


class Decision(Base):
    """One verdict on the input or the output of a request."""

    __tablename__ = "moderation_decisions"
    __table_args__ = (
        UniqueConstraint("request_id", "direction"),
        Index("ix_moderation_decisions_tenant_at", "tenant_id", "at"),
        Index("ix_moderation_decisions_at", "at"),
        # Pages show and count these; allowed decisions are a hundred times as many.
        Index(
            "ix_moderation_decisions_acted",
            "tenant_id",
            "at",
            postgresql_where=ACTED,
            sqlite_where=ACTED,
        ),
    )

    id: Mapped[int] = mapped_column(BigKey, primary_key=True, autoincrement=True)
    request_id: Mapped[str] = mapped_column(ID)
    tenant_id: Mapped[str] = mapped_column(ID)
    project_id: Mapped[str] = mapped_column(ID)
    key_id: Mapped[str] = mapped_column(ID)
    at: Mapped[datetime] = mapped_column(UtcDateTime)
    direction: Mapped[str] = mapped_column(String(10))  # input | output
    action: Mapped[str] = mapped_column(String(10))
    policy_version: Mapped[str] = mapped_column(ID)
    text_sha256: Mapped[str] = mapped_column(String(64))
    categories: Mapped[list[str]] = mapped_column(Json)
    scores: Mapped[dict[str, float]] = mapped_column(Json)
    spans: Mapped[list[list[Any]]] = mapped_column(Json)  # [start, end, label]
    view: Mapped[str] = mapped_column(String(10))
    unscanned: Mapped[bool]


class DailyDecisions(Base):
    """How many decisions of a project acted on a day. Kept when decisions are deleted."""

    __tablename__ = "moderation_daily"

    tenant_id: Mapped[str] = mapped_column(ID, primary_key=True)
    at: Mapped[datetime] = mapped_column(UtcDateTime, primary_key=True)  # start of the day, UTC
    project_id: Mapped[str] = mapped_column(ID, primary_key=True)
    action: Mapped[str] = mapped_column(String(10), primary_key=True)
    # Sorted and separated by commas; "" for a text that could not be scanned.
    categories: Mapped[str] = mapped_column(String(500), primary_key=True)
    decisions: Mapped[int] = mapped_column(BigInteger, default=0)


class Strike(Base):
    """A blocked request that counts against its key. A granted appeal voids it."""

    __tablename__ = "moderation_strikes"
    __table_args__ = (Index("ix_moderation_strikes_key_at", "key_id", "at"),)

    request_id: Mapped[str] = mapped_column(ID, primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ID)
    key_id: Mapped[str] = mapped_column(ID)
    at: Mapped[datetime] = mapped_column(UtcDateTime)
    category: Mapped[str] = mapped_column(String(64))
    voided_at: Mapped[datetime | None] = mapped_column(UtcDateTime)


class Suspension(Base):
    """The suspension of a key by the strike rule, and who lifted it."""

    __tablename__ = "moderation_suspensions"
    __table_args__ = (Index("ix_moderation_suspensions_key", "key_id"),)

    id: Mapped[int] = mapped_column(BigKey, primary_key=True, autoincrement=True)
    tenant_id: Mapped[str] = mapped_column(ID)
    key_id: Mapped[str] = mapped_column(ID)
    at: Mapped[datetime] = mapped_column(UtcDateTime)
    strikes: Mapped[int]
    lifted_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    lifted_by: Mapped[str] = mapped_column(ID, default="")


class Appeal(Base):
    """A tenant's appeal against a decision, and its ruling."""

    __tablename__ = "moderation_appeals"
    __table_args__ = (
        UniqueConstraint("request_id", "direction"),
        Index("ix_moderation_appeals_tenant", "tenant_id", "status"),
    )

    id: Mapped[str] = mapped_column(ID, primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ID)
    request_id: Mapped[str] = mapped_column(ID)
    direction: Mapped[str] = mapped_column(String(10))
    reason: Mapped[str] = mapped_column(Text)
    status: Mapped[str] = mapped_column(String(10))  # open | granted | denied
    opened_at: Mapped[datetime] = mapped_column(UtcDateTime)
    opened_by: Mapped[str] = mapped_column(ID)
    decided_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    decided_by: Mapped[str] = mapped_column(ID, default="")
    answer: Mapped[str] = mapped_column(Text, default="")
