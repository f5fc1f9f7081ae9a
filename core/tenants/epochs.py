"""A number that moves with every change of tenants, keys, limits or roles.

Workers poll it several times a second and drop what they had cached: a revocation reaches all of
them within a second, with no other server than the database.
"""

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from core.database import insert_new
from core.tenants.models import Epoch

_NAME = "tenants"


def move(session: Session) -> None:
    """In the transaction of the change. Holds the row until that commits."""
    moved = session.execute(
        update(Epoch).where(Epoch.name == _NAME).values(number=Epoch.number + 1)
    )
    if moved.rowcount == 0:  # type: ignore[attr-defined]
        insert_new(session, Epoch.__table__, [{"name": _NAME, "number": 0}], "name")  # type: ignore[arg-type]
        session.execute(update(Epoch).where(Epoch.name == _NAME).values(number=Epoch.number + 1))


def current(session: Session) -> int:
    return session.scalar(select(func.max(Epoch.number)).where(Epoch.name == _NAME)) or 0
