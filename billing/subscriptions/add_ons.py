"""Add-ons: fees per unit in addition to a tenant's plan, billed like it (in advance or in arrears)."""

from datetime import datetime
from typing import Any

from sqlalchemy import select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from billing.accounts.accounts import lock_account
from billing.amounts import money
from billing.subscriptions.subscriptions import MONTH, YEAR, read_add_ons, running_plan
from billing.subscriptions.tables import AddOn, AddOnHolding
from core.errors import BadRequest, Conflict, NotFound
from core.ids import new_id

MOST = 1_000_000  # units


def create(
    session: Session, now: datetime, name: str, fee: int, *, currency: str, interval: str = MONTH
) -> AddOn:
    """Store an add-on; the fee is in picounits. The transaction is lost if the name is taken."""
    if fee <= 0 or interval not in (MONTH, YEAR) or not 0 < len(name) <= 120:
        raise BadRequest(
            f"The add-on {name[:40]!r} by the {interval[:10]} for {fee} picounits is not valid.",
            next_step="Give a name, a fee above 0, and month or year.",
            param="fee",
        )
    created = AddOn(
        id=new_id("addon"), name=name, currency=currency, fee=fee, interval=interval, created_at=now
    )
    session.add(created)
    try:
        session.flush()
    except IntegrityError:
        raise Conflict(
            f"An add-on called {name!r} already exists.", next_step="Choose another name."
        ) from None
    return created


def listed(session: Session) -> list[AddOn]:
    return list(session.scalars(select(AddOn).order_by(AddOn.name)))


def named(session: Session, name: str) -> AddOn:
    add_on = session.scalar(select(AddOn).where(AddOn.name == name))
    if add_on is None:
        raise NotFound(
            f"There is no add-on {name[:80]!r}.",
            next_step="Create it with `tollhouse tenant add-on-add`.",
        )
    return add_on


def set_quantity(session: Session, tenant_id: str, name: str, quantity: int, at: datetime) -> AddOn:
    """The tenant has this many units from `at` on; 0 removes the add-on. Prorated by the microsecond."""
    account = lock_account(session, tenant_id)
    add_on = named(session, name)
    if not 0 <= quantity <= MOST:
        raise BadRequest(f"quantity is {quantity}; it must be 0 to {MOST:,}.", param="quantity")
    if add_on.currency != account.currency:
        raise BadRequest(
            f"Add-on {name} is in {add_on.currency}, the account in {account.currency}.",
            next_step=f"Choose an add-on in {account.currency}.",
            code="currency_mismatch",
        )
    plan = running_plan(session, tenant_id, at)
    if quantity and plan.interval != add_on.interval:
        raise Conflict(
            f"Add-on {name} is by the {add_on.interval}, the plan {plan.name} by the {plan.interval}.",
            next_step="Choose an add-on with the plan's interval.",
        )
    _change(session, tenant_id, add_on, quantity, at)
    session.flush()
    return add_on


def _change(session: Session, tenant_id: str, add_on: AddOn, quantity: int, at: datetime) -> None:
    held = [
        holding
        for holding, each in read_add_ons(session, [tenant_id]).get(tenant_id, [])
        if each.id == add_on.id and (holding.ends_at is None or holding.ends_at > at)
    ]
    if held and held[-1].starts_at > at:
        raise Conflict(
            f"The latest change of {add_on.name} is at {held[-1].starts_at:%Y-%m-%d %H:%M} UTC.",
            next_step="Choose a later time.",
        )
    if held and held[-1].quantity == quantity:
        held[-1].ends_at = None
        return
    for holding in held:
        holding.ends_at = at
        if holding.starts_at == at:
            session.delete(holding)
    if quantity:
        session.add(
            AddOnHolding(tenant_id=tenant_id, add_on_id=add_on.id, quantity=quantity, starts_at=at)
        )


def describe(add_on: AddOn) -> dict[str, Any]:
    return {
        "id": add_on.id,
        "name": add_on.name,
        "currency": add_on.currency,
        "interval": add_on.interval,
        "fee": money(add_on.fee, add_on.currency),
    }


def of_tenant(session: Session, tenant_id: str) -> list[dict[str, Any]]:
    """All that the tenant has or had, the earliest first."""
    return [
        {
            "add_on": add_on.name,
            "quantity": holding.quantity,
            "fee": money(add_on.fee * holding.quantity, add_on.currency),
            "interval": add_on.interval,
            "from": holding.starts_at.isoformat(),
            "to": holding.ends_at.isoformat() if holding.ends_at else None,
        }
        for holding, add_on in read_add_ons(session, [tenant_id]).get(tenant_id, [])
    ]
