"""Re-rating: prices past usage again and posts adjustments. Charges are never changed.

The difference is computed per tenant, billing period and component, on the total quantity that was
pinned to the wrong version. Earlier re-ratings of the same usage count as charged, so repeating a
request posts nothing.
"""

from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import func, insert, select
from sqlalchemy.orm import Session

from billing import rollups
from billing.accounts import Periods, lock_accounts
from billing.ledger import AccountKind, Transaction, post_many, transfer
from billing.models import Adjustment, BillingPeriod, Charge, Rerate, UsageEventRow
from billing.prices import get_version
from billing.pricing import Component, PriceVersion
from billing.tables.columns import AMOUNT_COLUMNS
from core.clock import Clock
from core.errors import BadRequest
from core.ids import TRANSACTION, new_id
from core.money import Money

_C, _E = Charge, UsageEventRow
_COUNTS = {
    Component.INPUT: _C.input_tokens - _C.cached_tokens,
    Component.CACHED_INPUT: _C.cached_tokens,
    Component.OUTPUT: _C.output_tokens,
    Component.WAIVED: _C.waived_tokens,
    Component.REQUEST: _C.requests,
    Component.ADAPTER: _C.adapter_requests,
    Component.GPU_SECOND: _C.gpu_seconds,
    Component.MODERATION: _C.moderation_calls,
}
_ONLY = {"gpu_seconds": Component.GPU_SECOND, "moderation": Component.MODERATION}


@dataclass(frozen=True, slots=True)
class Request:
    from_version: str
    to_version: str
    starts_at: datetime
    ends_at: datetime
    tenant_id: str = ""  # "" is every tenant
    reason: str = ""
    actor: str = ""


@dataclass(frozen=True, slots=True)
class Change:
    tenant_id: str
    project_id: str
    model: str
    usage_period_id: str
    component: Component
    quantity: int
    before: int  # picounits charged so far, including earlier re-ratings
    after: int
    currency: str

    @property
    def difference(self) -> int:
        return self.after - self.before


def plan(session: Session, wanted: Request) -> list[Change]:
    """The changes per tenant, project, model, period and component. Writes nothing."""
    wrong, right = (get_version(session, each) for each in (wanted.from_version, wanted.to_version))
    if wrong.currency != right.currency:
        raise BadRequest(
            f"{wrong.id} is in {wrong.currency}, {right.id} in {right.currency}.",
            next_step="Choose a version in the same currency.",
            code="currency_mismatch",
        )
    if wanted.ends_at <= wanted.starts_at:
        raise BadRequest(
            f"ends_at {wanted.ends_at:%Y-%m-%d} is not after starts_at {wanted.starts_at:%Y-%m-%d}.",
            next_step="Swap the dates.",
        )
    _refuse_half_overlaps(session, wanted)
    return _changes(session, wanted, right)


def post_all(session: Session, clock: Clock, wanted: Request) -> list[Change]:
    """Post an adjustment for each change, on the open period of each tenant."""
    changes = [each for each in plan(session, wanted) if each.difference]
    accounts = lock_accounts(session, {each.tenant_id for each in changes})
    changes = [each for each in plan(session, wanted) if each.difference]  # again, under the locks
    if not changes:
        return []
    now = clock.now()
    rerate = Rerate(
        id=new_id("rr"),
        from_version=wanted.from_version,
        to_version=wanted.to_version,
        starts_at=wanted.starts_at,
        ends_at=wanted.ends_at,
        tenant_id=wanted.tenant_id,
        posted_at=now,
        posted_by=wanted.actor,
        note=wanted.reason,
    )
    session.add(rerate)
    session.flush()
    periods = Periods(session)
    transactions, rows = [], []
    for number, change in enumerate(changes):
        account = accounts[change.tenant_id]
        usage = session.get_one(BillingPeriod, change.usage_period_id)
        billed = periods.billed_in(account, usage, now)
        money = Money(change.difference, change.currency)
        transaction = Transaction(
            change.tenant_id,
            "adjustment",
            f"rerate:{rerate.id}:{number}",
            now,
            transfer(AccountKind.RECEIVABLE, AccountKind.REVENUE, money),
            wanted.reason,
            id=new_id(TRANSACTION),
        )
        transactions.append(transaction)
        rows.append(_row(change, rerate, usage, billed, transaction.id, now, wanted.reason))
    post_many(session, transactions)
    session.execute(insert(Adjustment), rows)
    rollups.add_adjustments(session, rows)
    return changes


def _changes(session: Session, wanted: Request, right: PriceVersion) -> list[Change]:
    key = (_C.tenant_id, _E.project_id, _E.model, _C.usage_period_id, _E.kind)
    sums = []
    for component, column in zip(Component, AMOUNT_COLUMNS, strict=False):
        sums += [func.sum(_COUNTS[component]), func.sum(getattr(_C, column))]
    query = (
        select(*key, *sums)
        .join(_E, _E.request_id == _C.request_id)
        .where(
            _C.price_version == wanted.from_version,
            _E.occurred_at >= wanted.starts_at,
            _E.occurred_at < wanted.ends_at,
        )
        .group_by(*key)
        .order_by(*key)
    )
    if wanted.tenant_id:
        query = query.where(_C.tenant_id == wanted.tenant_id)
    earlier = _earlier(session, wanted)
    position: dict[tuple[str, str, Component], int] = defaultdict(int)
    found: dict[tuple[str, str, str, str, Component], list[int]] = {}
    for tenant_id, project_id, model, period_id, kind, *values in session.execute(query):
        for index, component in enumerate(Component):
            quantity, units = int(values[2 * index]), int(values[2 * index + 1])
            only = _ONLY.get(kind)
            if quantity == 0 or (only is not None and component is not only):
                continue
            place = (tenant_id, period_id, component)
            after = right.marginal(component, position[place], quantity)
            position[place] += quantity
            sums_of = found.setdefault(
                (tenant_id, project_id, model, period_id, component), [0] * 3
            )
            for slot, value in enumerate((quantity, units, after)):
                sums_of[slot] += value
    return [
        Change(
            *where,
            quantity,
            units + earlier.get(where, 0),
            after,
            right.currency,
        )
        for where, (quantity, units, after) in found.items()
        if units + earlier.get(where, 0) != after
    ]


def _refuse_half_overlaps(session: Session, wanted: Request) -> None:
    """Earlier adjustments can be deducted only if their range lies inside this one."""
    for each in session.scalars(select(Rerate).where(Rerate.from_version == wanted.from_version)):
        apart = each.ends_at <= wanted.starts_at or each.starts_at >= wanted.ends_at
        other = each.tenant_id and wanted.tenant_id and each.tenant_id != wanted.tenant_id
        inside = each.starts_at >= wanted.starts_at and each.ends_at <= wanted.ends_at
        within = not wanted.tenant_id or each.tenant_id in ("", wanted.tenant_id)
        if not (apart or other or (inside and within)):
            raise BadRequest(
                f"Re-rating {each.id} from {each.starts_at:%Y-%m-%d} to {each.ends_at:%Y-%m-%d} "
                "partly overlaps this range.",
                next_step="Choose a range that contains all of it or none of it.",
            )


def _earlier(session: Session, wanted: Request) -> dict[tuple[str, str, str, str, Component], int]:
    """Picounits that earlier re-ratings of the same usage added."""
    key = (
        Adjustment.tenant_id,
        Adjustment.project_id,
        Adjustment.model,
        Adjustment.usage_period_id,
        Adjustment.component,
    )
    rows = session.execute(
        select(*key, func.sum(Adjustment.amount))
        .join(Rerate, Rerate.id == Adjustment.rerate_id)
        .where(
            Rerate.from_version == wanted.from_version,
            Rerate.starts_at >= wanted.starts_at,
            Rerate.ends_at <= wanted.ends_at,
        )
        .group_by(*key)
    )
    return {(row[0], row[1], row[2], row[3], Component(row[4])): int(row[5]) for row in rows}


def _row(
    change: Change,
    rerate: Rerate,
    usage: BillingPeriod,
    billed: BillingPeriod,
    transaction_id: str,
    now: datetime,
    reason: str,
) -> dict[str, object]:
    text = f"{change.model}, {change.component.value.replace('_', ' ')}: price corrected"
    text += f" for {usage.starts_at:%Y-%m-%d} to {usage.ends_at:%Y-%m-%d}"
    return {
        "rerate_id": rerate.id,
        "tenant_id": change.tenant_id,
        "project_id": change.project_id,
        "model": change.model,
        "component": change.component.value,
        "quantity": change.quantity,
        "currency": change.currency,
        "amount": change.difference,
        "usage_period_id": change.usage_period_id,
        "bill_period_id": billed.id,
        "transaction_id": transaction_id,
        "reason": f"{text}. {reason}".strip(". ") + ".",
        "created_at": now,
    }
