"""Rating: turns usage events into charges, ledger postings, roll-ups and credit draws.

One transaction rates a few whole batches and marks them as rated. A worker that dies leaves nothing
behind, and the next worker rates the batches again.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import Table, select, update
from sqlalchemy.orm import Session

from billing import credits, rollups, service_rollups
from billing.accounts import Periods, ensure_accounts, lock_accounts
from billing.batch_claims import claim_batches
from billing.ledger import AccountKind, Transaction, post_many, transfer
from billing.models import (
    BillingAccount,
    BillingPeriod,
    Charge,
    ParkedEvent,
    PriceVersionRow,
    UsageBatch,
    UsageEventRow,
)
from billing.prices import version_of
from billing.pricing import Component, PriceVersion, counted
from billing.tables.columns import AMOUNT_COLUMNS, QUANTITY_COLUMNS
from billing.tiers import Positions
from core import bulk_insert
from core.clock import Clock
from core.database import insert_new
from core.events import UsageKind
from core.ids import TRANSACTION, new_id
from core.money import Money

CHARGES: Table = Charge.__table__  # type: ignore[assignment]
_EVENT = UsageEventRow
_READ = (
    _EVENT.request_id,
    _EVENT.tenant_id,
    _EVENT.project_id,
    _EVENT.key_id,
    _EVENT.kind,
    _EVENT.model,
    _EVENT.adapter,
    _EVENT.price_version,
    _EVENT.occurred_at,
    _EVENT.input_tokens,
    _EVENT.cached_tokens,
    _EVENT.output_tokens,
    _EVENT.waived_tokens,
    _EVENT.quantity,
    _EVENT.status,
)
_SLOT = {component: index for index, component in enumerate(Component)}
_CHARGE_COLUMNS = (
    "request_id",
    "tenant_id",
    "price_version",
    "currency",
    "usage_period_id",
    "bill_period_id",
    "transaction_id",
    *QUANTITY_COLUMNS,
    *AMOUNT_COLUMNS,
)


@dataclass(frozen=True, slots=True)
class Rated:
    batches: int = 0
    events: int = 0

    def __add__(self, other: "Rated") -> "Rated":
        return Rated(self.batches + other.batches, self.events + other.events)


@dataclass(slots=True)
class _PeriodCharge:
    """The amount that these batches add to one tenant's period."""

    transaction_id: str
    currency: str
    amount: int = 0


@dataclass
class _RatingContext:
    """Shared state for rating the events of the batches."""

    accounts: dict[str, BillingAccount]
    periods: Periods
    versions: dict[str, PriceVersion]
    positions: Positions
    now: datetime
    bills: dict[tuple[str, str], _PeriodCharge] = field(default_factory=dict)
    billed_in: dict[str, BillingPeriod] = field(default_factory=dict)


def rate(session: Session, clock: Clock, *, most_events: int = 20_000) -> Rated:
    """Rate the oldest waiting batches, about `most_events` events; Rated(0, 0) if none waits."""
    batches = claim_batches(session, UsageBatch.rated_at.is_(None), most_events=most_events)
    if not batches:
        return Rated()
    events: list[Any] = list(session.execute(select(*_READ).where(_EVENT.batch_id.in_(batches))))
    _rate_events(session, events, clock.now(), f"{batches[0]}")
    session.execute(
        update(UsageBatch).where(UsageBatch.id.in_(batches)).values(rated_at=clock.now())
    )
    return Rated(len(batches), len(events))


def release_stored(session: Session, clock: Clock) -> int:
    """Rate parked events of rated batches whose price version is now known."""
    parked = select(ParkedEvent.request_id).where(
        ParkedEvent.released_at.is_(None), ParkedEvent.dismissed_by.is_(None)
    )
    known = select(PriceVersionRow.id)
    events: list[Any] = list(
        session.execute(
            select(*_READ)
            .outerjoin(Charge, Charge.request_id == _EVENT.request_id)
            .where(
                _EVENT.request_id.in_(parked),
                _EVENT.price_version.in_(known),
                Charge.request_id.is_(None),
            )
        )
    )
    now = clock.now()
    done = _rate_events(session, events, now, new_id("late")) if events else 0
    service_rollups.add_released(session, [event[0] for event in events])
    charged = select(Charge.request_id)
    session.execute(
        update(ParkedEvent)
        .where(ParkedEvent.released_at.is_(None), ParkedEvent.request_id.in_(charged))
        .values(released_at=now)
        .execution_options(synchronize_session=False)
    )
    return done


def _rate_events(session: Session, events: list[Any], now: datetime, reference: str) -> int:
    context = _prepare(session, events, now)
    good = [event for event in events if _ratable(context, event)]
    charges = [_charge(context, event) for event in good]
    bulk_insert.insert_all(session, CHARGES, _CHARGE_COLUMNS, charges)
    context.positions.store(session)
    rollups.add_charges(session, zip(good, charges, strict=True))
    _post(session, context, reference)
    if len(good) != len(events):
        _park(session, [event for event in events if not _ratable(context, event)], now)
    return len(good)


def _ratable(context: _RatingContext, event: Any) -> bool:
    version = context.versions.get(event[7])
    return version is not None and version.currency == context.accounts[event[1]].currency


def _park(session: Session, events: list[Any], now: datetime) -> None:
    """Park events whose price is unknown or in another currency, so that the others are rated."""
    rows = [
        {
            "request_id": event[0],
            "tenant_id": event[1],
            "code": "unknown_price",
            "reason": f"price version {event[7]!r} is unknown, or not in the account's currency",
            "payload": {"request_id": event[0]},
            "parked_at": now,
        }
        for event in events
    ]
    insert_new(session, ParkedEvent.__table__, rows, "request_id")  # type: ignore[arg-type]


def _prepare(session: Session, events: Iterable[Any], now: datetime) -> _RatingContext:
    tenants = {event.tenant_id for event in events}
    ensure_accounts(session, tenants, now)
    accounts = lock_accounts(session, tenants)
    periods = Periods(session)
    periods.load(tenants, min((event.occurred_at for event in events), default=now))
    version_ids = {event.price_version for event in events}
    rows = session.scalars(select(PriceVersionRow).where(PriceVersionRow.id.in_(version_ids)))
    versions = {row.id: version_of(row) for row in rows}
    return _RatingContext(accounts, periods, versions, Positions(session), now)


def _charge(context: _RatingContext, event: Any) -> tuple[Any, ...]:
    request_id, tenant_id, _, _, kind, _, adapter, version_id, at = event[:9]
    input_tokens, cached, output, waived, quantity, status = event[9:]
    counts = (input_tokens, cached, output, waived)
    account = context.accounts[tenant_id]
    usage = context.periods.around(account, at)
    billed = context.billed_in.get(usage.id)
    if billed is None:
        billed = context.billed_in[usage.id] = context.periods.billed_in(
            account, usage, context.now
        )
    version = context.versions[version_id]
    bill = context.bills.get((tenant_id, billed.id))
    if bill is None:
        bill = _PeriodCharge(new_id(TRANSACTION), version.currency)
        context.bills[(tenant_id, billed.id)] = bill
    quantities = _quantities(kind, counts, bool(adapter), quantity, status)
    amounts = [0] * 9
    used = counted(kind, input_tokens, cached, output, waived, bool(adapter), quantity, status)
    for component, count in used:
        if count == 0:
            continue
        unit = version.linear.get(component)
        if unit is None:
            units = context.positions.charge(tenant_id, usage.id, version, component, count)
        else:
            units = unit * count
        amounts[_SLOT[component]] = units
        amounts[8] += units
    bill.amount += amounts[8]
    return (
        request_id,
        tenant_id,
        version_id,
        version.currency,
        usage.id,
        billed.id,
        bill.transaction_id,
        *quantities,
        *amounts,
    )


def _quantities(
    kind: str, counts: tuple[int, ...], adapter: bool, quantity: int, status: int
) -> tuple[int, ...]:
    """In the order of QUANTITY_COLUMNS. A 5xx request does not count as a billable request."""
    answered = 0 if status >= 500 else quantity
    if kind == UsageKind.GPU_SECONDS:
        return (0, *counts, 0, quantity, 0)
    if kind == UsageKind.MODERATION:
        return (0, *counts, 0, 0, answered)
    return (answered, *counts, answered if adapter else 0, 0, 0)


def _post(session: Session, context: _RatingContext, first_batch: str) -> None:
    tenants = {tenant_id for tenant_id, _ in context.bills}
    grants = credits.open_grants(session, tenants, context.now)
    transactions: list[Transaction] = []
    uses: list[dict[str, object]] = []
    for (tenant_id, period_id), bill in context.bills.items():
        if bill.amount == 0:
            continue
        money = Money(bill.amount, bill.currency)
        entries = list(transfer(AccountKind.RECEIVABLE, AccountKind.REVENUE, money))
        draws = credits.draw(grants.get(tenant_id, []), max(0, bill.amount))
        entries += credits.draw_entries(draws, bill.currency)
        reference = f"rate:{first_batch}:{tenant_id}:{period_id}"
        transactions.append(
            Transaction(
                tenant_id, "usage", reference, context.now, tuple(entries), id=bill.transaction_id
            )
        )
        uses += credits.uses_of(
            draws,
            tenant_id=tenant_id,
            purpose="usage",
            bill_period_id=period_id,
            transaction_id=bill.transaction_id,
            at=context.now,
        )
    post_many(session, transactions)
    credits.insert_uses(session, uses)
