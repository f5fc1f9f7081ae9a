"""The table of the task queues' last heartbeats."""

from datetime import datetime

from sqlalchemy import String
from sqlalchemy.orm import Mapped, mapped_column

from core.database import Base, UtcDateTime


class QueueHeartbeat(Base):
    __tablename__ = "queue_heartbeats"

    queue: Mapped[str] = mapped_column(String(40), primary_key=True)
    at: Mapped[datetime] = mapped_column(UtcDateTime)
