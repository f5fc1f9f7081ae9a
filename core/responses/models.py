"""Tables of stored responses. What customers wrote and got is in `sealed`, encrypted."""

from datetime import datetime

from sqlalchemy import BigInteger, ForeignKey, Index, LargeBinary, String
from sqlalchemy.orm import Mapped, mapped_column

from core.database import Base, UtcDateTime

ID = String(80)


class ResponseRecord(Base):
    __tablename__ = "stored_responses"
    __table_args__ = (
        Index("ix_stored_responses_tenant_id", "tenant_id", "id"),
        Index("ix_stored_responses_expires_at", "expires_at"),
        Index("ix_stored_responses_lease_until", "lease_until"),
        Index("ix_stored_responses_stored_bytes", "tenant_id", "stored_bytes"),
        Index("ix_stored_responses_end_user_key", "tenant_id", "end_user_key"),
        Index("ix_stored_responses_safety_key", "tenant_id", "safety_key"),
    )

    id: Mapped[str] = mapped_column(ID, primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String(40))
    project_id: Mapped[str] = mapped_column(String(40))
    key_id: Mapped[str] = mapped_column(String(40))
    previous_id: Mapped[str | None] = mapped_column(ID)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    expires_at: Mapped[datetime] = mapped_column(UtcDateTime)
    sealed: Mapped[bytes] = mapped_column(LargeBinary)
    # Of a background response: queued or in_progress, and how long its process holds it.
    status: Mapped[str | None] = mapped_column(String(20))
    lease_until: Mapped[datetime | None] = mapped_column(UtcDateTime)
    stored_bytes: Mapped[int] = mapped_column(BigInteger, server_default="0")  # with its events
    end_user_key: Mapped[str | None] = mapped_column(String(64))  # see end_users.py
    safety_key: Mapped[str | None] = mapped_column(String(64))  # of a second name


class ResponseEventRecord(Base):
    """Stream events of a background response, numbered from `first`."""

    __tablename__ = "stored_response_events"

    response_id: Mapped[str] = mapped_column(
        ID, ForeignKey("stored_responses.id", ondelete="CASCADE"), primary_key=True
    )
    first: Mapped[int] = mapped_column(primary_key=True)
    count: Mapped[int]
    sealed: Mapped[bytes] = mapped_column(LargeBinary)


class ResponseItemRecord(Base):
    """Where an item is found that a later request names."""

    __tablename__ = "stored_response_items"

    response_id: Mapped[str] = mapped_column(
        ID, ForeignKey("stored_responses.id", ondelete="CASCADE"), primary_key=True
    )
    item_id: Mapped[str] = mapped_column(ID, primary_key=True, index=True)


class CompletionRecord(Base):
    __tablename__ = "stored_completions"
    __table_args__ = (
        Index("ix_stored_completions_tenant_created", "tenant_id", "created_at", "id"),
        Index("ix_stored_completions_expires_at", "expires_at"),
        Index("ix_stored_completions_stored_bytes", "tenant_id", "stored_bytes"),
        Index("ix_stored_completions_end_user_key", "tenant_id", "end_user_key"),
        Index("ix_stored_completions_safety_key", "tenant_id", "safety_key"),
    )

    id: Mapped[str] = mapped_column(ID, primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String(40))
    project_id: Mapped[str] = mapped_column(String(40))
    key_id: Mapped[str] = mapped_column(String(40))
    model: Mapped[str] = mapped_column(String(300))  # as the client named it
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    expires_at: Mapped[datetime] = mapped_column(UtcDateTime)
    sealed: Mapped[bytes] = mapped_column(LargeBinary)
    stored_bytes: Mapped[int] = mapped_column(BigInteger, server_default="0")
    end_user_key: Mapped[str | None] = mapped_column(String(64))  # see end_users.py
    safety_key: Mapped[str | None] = mapped_column(String(64))  # of a second name


class ConversationRecord(Base):
    __tablename__ = "conversations"
    __table_args__ = (
        Index("ix_conversations_tenant_id", "tenant_id", "id"),
        Index("ix_conversations_expires_at", "expires_at"),
        Index("ix_conversations_stored_bytes", "tenant_id", "stored_bytes"),
    )

    id: Mapped[str] = mapped_column(ID, primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String(40))
    project_id: Mapped[str] = mapped_column(String(40))
    key_id: Mapped[str] = mapped_column(String(40))
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    expires_at: Mapped[datetime] = mapped_column(UtcDateTime)
    sealed: Mapped[bytes] = mapped_column(LargeBinary)  # its metadata
    stored_bytes: Mapped[int] = mapped_column(BigInteger, server_default="0")  # with its items


class ConversationItemRecord(Base):
    __tablename__ = "conversation_items"
    __table_args__ = (
        Index("ix_conversation_items_item_id", "conversation_id", "item_id", unique=True),
        Index("ix_conversation_items_end_user_key", "end_user_key"),
        Index("ix_conversation_items_safety_key", "safety_key"),
    )

    conversation_id: Mapped[str] = mapped_column(
        ID, ForeignKey("conversations.id", ondelete="CASCADE"), primary_key=True
    )
    position: Mapped[int] = mapped_column(primary_key=True)
    item_id: Mapped[str] = mapped_column(ID)
    sealed: Mapped[bytes] = mapped_column(LargeBinary)
    end_user_key: Mapped[str | None] = mapped_column(String(64))  # see end_users.py
    safety_key: Mapped[str | None] = mapped_column(String(64))  # of a second name
