"""A counter that every change of tenants, keys, limits or roles increments.

Gateway processes poll it several times a second and drop what changed from their caches, so that a
revocation reaches all of them within a second without another server than the database. Beside the
counter, each tenant's row has the counter's value at the tenant's last change, so that one tenant's
changes leave the others' cached keys alone.
"""

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from core.database import insert_new
from core.tenants.models import Epoch

_NAME = "tenants"
_ALL = "*"  # changes that belong to no tenant, such as plans


def advance(session: Session, tenant_id: str | None = None) -> None:
    """Increment the epoch in the transaction of the change. Locks the row until it commits. Without
    a tenant, the change concerns all of them."""
    number = _increment(session)
    name = tenant_id or _ALL
    changed = session.execute(update(Epoch).where(Epoch.name == name).values(number=number))
    if changed.rowcount == 0:  # type: ignore[attr-defined]
        insert_new(session, Epoch.__table__, [{"name": name, "number": number}], "name")  # type: ignore[arg-type]


def current(session: Session) -> int:
    return session.scalar(select(func.max(Epoch.number)).where(Epoch.name == _NAME)) or 0


def changed_since(session: Session, epoch: int) -> set[str] | None:
    """The tenants that changed after `epoch`; None for all of them."""
    query = select(Epoch.name).where(Epoch.number > epoch, Epoch.name != _NAME)
    names = set(session.scalars(query))
    return None if _ALL in names else names


def _increment(session: Session) -> int:
    statement = update(Epoch).where(Epoch.name == _NAME).values(number=Epoch.number + 1)
    number = session.scalar(statement.returning(Epoch.number))
    if number is None:
        insert_new(session, Epoch.__table__, [{"name": _NAME, "number": 0}], "name")  # type: ignore[arg-type]
        number = session.scalar(statement.returning(Epoch.number))
    return int(number or 0)
