"""A counter that every change of tenants, keys, limits or roles increments.

Gateway processes poll it several times a second and clear their caches when it changes, so that a
revocation reaches all of them within a second without another server than the database.
"""

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from core.database import insert_new
from core.tenants.models import Epoch

_NAME = "tenants"


def advance(session: Session) -> None:
    """Increment the epoch in the transaction of the change. Locks the row until it commits."""
    advanced = session.execute(
        update(Epoch).where(Epoch.name == _NAME).values(number=Epoch.number + 1)
    )
    if advanced.rowcount == 0:  # type: ignore[attr-defined]
        insert_new(session, Epoch.__table__, [{"name": _NAME, "number": 0}], "name")  # type: ignore[arg-type]
        session.execute(update(Epoch).where(Epoch.name == _NAME).values(number=Epoch.number + 1))


def current(session: Session) -> int:
    return session.scalar(select(func.max(Epoch.number)).where(Epoch.name == _NAME)) or 0
