"""Drained engines: running requests finish, no new ones are sent. Stored in the database, so that
every gateway process sees a change within a second."""

from datetime import datetime

from sqlalchemy import String, select
from sqlalchemy.orm import Mapped, Session, mapped_column

from core.clock import Clock
from core.database import Base, UtcDateTime
from core.tenants import audit


class EngineDrain(Base):
    __tablename__ = "engine_drains"

    engine_id: Mapped[str] = mapped_column(String(80), primary_key=True)
    since: Mapped[datetime] = mapped_column(UtcDateTime)
    by: Mapped[str] = mapped_column(String(120))


def drained(session: Session) -> dict[str, EngineDrain]:
    return {row.engine_id: row for row in session.scalars(select(EngineDrain))}


def drain(session: Session, clock: Clock, actor: str, engine_id: str) -> None:
    """No-op if the engine is already drained."""
    if session.get(EngineDrain, engine_id) is None:
        session.add(EngineDrain(engine_id=engine_id, since=clock.now(), by=actor))
        audit.record_operator(
            session, clock, actor, "engine.drain", engine_id, before=None, after={"drained": True}
        )


def resume(session: Session, clock: Clock, actor: str, engine_id: str) -> None:
    row = session.get(EngineDrain, engine_id)
    if row is not None:
        session.delete(row)
        audit.record_operator(
            session, clock, actor, "engine.resume", engine_id, before={"drained": True}, after=None
        )
