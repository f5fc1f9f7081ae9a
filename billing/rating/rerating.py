"""Re-rating: prices past usage again and posts adjustments. Charges are never changed.

The difference is computed per tenant, billing period and component, on all usage that shares a position
with the usage in question (`rerating_totals`), and split over projects and models. What earlier
re-ratings posted counts as charged, so repeating a request posts nothing.
"""

from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import func, insert, select
from sqlalchemy.orm import Session

from billing.accounts.accounts import Periods, lock_accounts
from billing.accounts.tables import BillingPeriod
from billing.ledger.ledger import AccountKind, Transaction, post_many, transfer
from billing.pricing.component_columns import amount_of, count_of
from billing.pricing.prices import get_version
from billing.pricing.pricing import Component, PriceVersion, priced_as
from billing.rating.rerating_totals import Move, differences
from billing.rating.tables import Rerate
from billing.rating.tiers import ONLY
from billing.usage import rollups
from billing.usage.reading import charged_sums
from billing.usage.tables import Adjustment, Charge, UsageEventRow
from core.clock import Clock
from core.errors import BadRequest
from core.ids import TRANSACTION, new_id
from core.money import Money

_C, _E = Charge, UsageEventRow
# Tenant, project, model, usage period and component.
_Place = tuple[str, str, str, str, Component]


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
        rows.append(
            {
                **_row(change, usage, wanted.reason),
                "rerate_id": rerate.id,
                "bill_period_id": billed.id,
                "transaction_id": transaction.id,
                "created_at": now,
            }
        )
    post_many(session, transactions)
    session.execute(insert(Adjustment), rows)
    rollups.add_adjustments(session, rows)
    return changes


@dataclass(slots=True)
class _Usage:
    """What one project used of a model in a period, as charged and at the right version."""

    quantity: int = 0
    charged: int = 0  # picounits
    after: int = 0

    def add(self, quantity: int, charged: int, after: int) -> None:
        self.quantity += quantity
        self.charged += charged
        self.after += after


def _changes(session: Session, wanted: Request, right: PriceVersion) -> list[Change]:
    usage = _usage(session, wanted, right)
    earlier = _earlier(session, wanted)
    move = Move(
        wanted.from_version,
        wanted.to_version,
        wanted.starts_at,
        wanted.ends_at,
        wanted.tenant_id,
    )
    owed = differences(session, move, {(where[0], where[3]) for where in usage})
    groups: dict[tuple[str, str, Component], list[_Place]] = defaultdict(list)
    for where in usage:
        groups[(where[0], where[3], where[4])].append(where)
    found = []
    for group, places in groups.items():
        largest = max(places, key=lambda each: usage[each].quantity)
        known = {each: usage[each].charged + earlier.get(each, 0) for each in places}
        # A tier shared by several projects leaves a remainder.
        rest = owed.get(group, 0) - sum(usage[each].after - known[each] for each in places)
        for each in places:
            after = usage[each].after + (rest if each == largest else 0)
            if after != known[each]:
                found.append(
                    Change(*each, usage[each].quantity, known[each], after, right.currency)
                )
    return found


def _usage(session: Session, wanted: Request, right: PriceVersion) -> dict[_Place, _Usage]:
    key = (_C.tenant_id, _E.project_id, _E.model, _C.usage_period_id, _E.kind)
    sums = []
    for component in Component:
        sums += [count_of(component, _C), amount_of(component, _C)]
    where = [
        _C.price_version == wanted.from_version,
        _E.occurred_at >= wanted.starts_at,
        _E.occurred_at < wanted.ends_at,
    ]
    if wanted.tenant_id:
        where.append(_C.tenant_id == wanted.tenant_id)
    position: dict[tuple[str, str, Component], int] = defaultdict(int)
    found: dict[_Place, _Usage] = {}
    for tenant_id, project_id, model, period_id, kind, *values in charged_sums(
        session, key, sums, where
    ):
        for index, component in enumerate(Component):
            quantity, units = int(values[2 * index]), int(values[2 * index + 1])
            if not (quantity or units) or ONLY.get(kind, component) is not component:
                continue
            priced = priced_as(right.rates, component)
            place = (tenant_id, period_id, priced)
            after = right.marginal(priced, position[place], quantity)
            position[place] += quantity
            spot = (tenant_id, project_id, model, period_id)
            found.setdefault((*spot, priced), _Usage()).add(quantity, 0, after)
            found.setdefault((*spot, component), _Usage()).add(0, units, 0)
    return found


def _refuse_half_overlaps(session: Session, wanted: Request) -> None:
    """Earlier adjustments can be deducted only if their range lies inside this one."""
    for each in session.scalars(select(Rerate).where(Rerate.from_version == wanted.from_version)):
        apart = each.ends_at <= wanted.starts_at or each.starts_at >= wanted.ends_at
        other = each.tenant_id and wanted.tenant_id and each.tenant_id != wanted.tenant_id
        inside = each.starts_at >= wanted.starts_at and each.ends_at <= wanted.ends_at
        if not (apart or other or inside):
            raise BadRequest(
                f"Re-rating {each.id} from {each.starts_at:%Y-%m-%d} to {each.ends_at:%Y-%m-%d} "
                "partly overlaps this range.",
                next_step="Choose a range that contains all of it or none of it.",
            )


def _earlier(session: Session, wanted: Request) -> dict[_Place, int]:
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


def _row(change: Change, usage: BillingPeriod, reason: str) -> dict[str, object]:
    text = f"{change.model}, {change.component.value.replace('_', ' ')}: price corrected"
    text += f" for {usage.starts_at:%Y-%m-%d} to {usage.ends_at:%Y-%m-%d}"
    return {
        "tenant_id": change.tenant_id,
        "project_id": change.project_id,
        "model": change.model,
        "component": change.component.value,
        "quantity": change.quantity,
        "currency": change.currency,
        "amount": change.difference,
        "usage_period_id": change.usage_period_id,
        "reason": f"{text}. {reason}".strip(". ") + ".",
    }
