"""Tables of budgets, the message outbox and webhook endpoints."""

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, CheckConstraint, Index, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from billing.columns import CURRENCY, ID, NAME
from core import lengths
from core.database import Base, BigKey, Json, Units, UtcDateTime
from core.sealed_columns import SealedText


class Budget(Base):
    """A spending cap of a tenant, project or key per time window."""

    __tablename__ = "budgets"
    __table_args__ = (
        CheckConstraint("cap > 0", name="cap_positive"),
        Index("ix_budgets_tenant", "tenant_id"),
    )

    id: Mapped[str] = mapped_column(ID, primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ID)
    scope: Mapped[str] = mapped_column(String(20))  # tenant | project | key | label
    scope_id: Mapped[str] = mapped_column(NAME)  # an id, or a label such as team=search
    name: Mapped[str] = mapped_column(NAME, default="")
    currency: Mapped[str] = mapped_column(CURRENCY)
    cap: Mapped[int] = mapped_column(Units)
    window: Mapped[str] = mapped_column(String(20))  # day | week | month | total
    hard: Mapped[bool]  # soft budgets only alert
    thresholds: Mapped[list[int]] = mapped_column(Json, default=list)  # percent of the cap
    webhooks: Mapped[list[str]] = mapped_column(Json, default=list)
    emails: Mapped[list[str]] = mapped_column(Json, default=list)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    ended_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    # Signs the messages to `webhooks`.
    webhook_secret: Mapped[str | None] = mapped_column(SealedText("budgets.webhook_secret"))


class OutboxMessage(Base):
    """A webhook or email, queued with its cause and retried until it is delivered or has failed."""

    __tablename__ = "outbox"
    __table_args__ = (
        Index("ix_outbox_due", "done_at", "next_at"),
        Index("ix_outbox_tenant", "tenant_id", "id"),
    )

    id: Mapped[int] = mapped_column(BigKey, primary_key=True, autoincrement=True)
    tenant_id: Mapped[str | None] = mapped_column(ID)
    endpoint_id: Mapped[str | None] = mapped_column(ID)  # whose secret signs it
    channel: Mapped[str] = mapped_column(String(20))  # webhook | email
    target: Mapped[str] = mapped_column(String(1024))
    subject: Mapped[str] = mapped_column(String(200))
    payload: Mapped[dict[str, Any]] = mapped_column(Json)
    dedupe: Mapped[str] = mapped_column(String(lengths.DEDUPE), unique=True)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    next_at: Mapped[datetime] = mapped_column(UtcDateTime)
    attempts: Mapped[int] = mapped_column(default=0)
    done_at: Mapped[datetime | None] = mapped_column(UtcDateTime)  # delivered, or given up
    failed: Mapped[bool] = mapped_column(default=False)
    last_error: Mapped[str | None] = mapped_column(Text)
    leased_until: Mapped[datetime | None] = mapped_column(UtcDateTime)  # while it is being sent


class WebhookEndpoint(Base):
    """A tenant's webhook URL. Its secret signs each message."""

    __tablename__ = "webhook_endpoints"
    __table_args__ = (Index("ix_webhook_endpoints_tenant", "tenant_id"),)

    id: Mapped[str] = mapped_column(ID, primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ID)
    url: Mapped[str] = mapped_column(String(1024))
    secret: Mapped[str] = mapped_column(SealedText("webhook_endpoints.secret"))
    events: Mapped[list[str]] = mapped_column(Json, default=list)  # empty: all events
    # Of a receiver of request records: records or otlp, and a key of its own for the header.
    format: Mapped[str] = mapped_column(String(20), server_default="records")
    sample_percent: Mapped[int] = mapped_column(server_default="100")
    authorization: Mapped[str | None] = mapped_column(SealedText("webhook_endpoints.authorization"))
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    ended_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    # Of a stream of the audit log: the last entry that was sent.
    sent_id: Mapped[int | None] = mapped_column(BigInteger)
