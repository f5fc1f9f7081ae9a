"""Rating: turns usage events into charges, ledger postings, roll-ups and credit draws.

One transaction rates a few whole batches and marks them as rated. A worker that dies leaves nothing
behind, and the next worker rates the batches again.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import Select, Table, select, update
from sqlalchemy.orm import Session

from billing import credits, expiry, rollups, service_rollups
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
from billing.pricing import UNIT_OF, Component, PriceVersion, counted
from billing.tables.columns import AMOUNT_COLUMNS, QUANTITY_COLUMNS
from billing.tiers import Positions, Versions, load_versions
from core import bulk_insert
from core.clock import Clock
from core.database import insert_new
from core.events import UsageKind
from core.ids import TRANSACTION, new_id
from core.money import Money

CHARGES: Table = Charge.__table__  # type: ignore[assignment]
_EVENT = UsageEventRow
MOST_EVENTS = 20_000  # of a transaction, about


class Event(NamedTuple):
    """A stored usage event, as far as its charge and the roll-ups depend on it."""

    request_id: str
    tenant_id: str
    project_id: str
    key_id: str
    kind: str
    model: str
    adapter: str | None
    price_version: str
    occurred_at: datetime
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    waived_tokens: int
    quantity: int
    status: int
    units: int


class ChargeHead(NamedTuple):
    """The first columns of a charge; its quantities and amounts follow."""

    request_id: str
    tenant_id: str
    price_version: str
    currency: str
    usage_period_id: str
    bill_period_id: str
    transaction_id: str


# Columns of the table, not of its class: rows of those pass through the object mapper.
_READ = tuple(_EVENT.__table__.c[name] for name in Event._fields)
_SLOT = {component: index for index, component in enumerate(Component)}
_CHARGE_COLUMNS = (*ChargeHead._fields, *QUANTITY_COLUMNS, *AMOUNT_COLUMNS)
_BILL_PERIOD = ChargeHead._fields.index("bill_period_id")
_TOTAL = len(_SLOT)  # index of the sum among the amounts


@dataclass(frozen=True, slots=True)
class Rated:
    batches: int = 0
    events: int = 0


@dataclass(slots=True)
class _PeriodCharge:
    """The amount that these batches add to one tenant's period."""

    period_id: str
    transaction_id: str
    currency: str
    amount: int = 0


@dataclass
class _RatingContext:
    """Shared state for rating the events of the batches."""

    accounts: dict[str, BillingAccount]
    periods: Periods
    versions: Versions
    positions: Positions
    now: datetime
    bills: dict[tuple[str, str], _PeriodCharge] = field(
        default_factory=dict
    )  # by tenant and period
    # By the period of the usage: its id, and the bill that the usage is on. Reading an attribute of a
    # mapped object for each event would take a tenth of rating.
    billed: dict[BillingPeriod, tuple[str, _PeriodCharge]] = field(default_factory=dict)
    ratable: dict[tuple[str, str], bool] = field(
        default_factory=dict
    )  # by tenant and price version


def rate(
    session: Session,
    clock: Clock,
    *,
    most_events: int = MOST_EVENTS,
    shards: Collection[int] | None = None,
) -> Rated:
    """Rate the oldest waiting batches, about `most_events` events, of these shards or of all; Rated(0, 0)
    if none waits."""
    waiting = [UsageBatch.rated_at.is_(None)]
    if shards is not None:
        waiting.append(UsageBatch.shard.in_(shards))
    batches = claim_batches(session, *waiting, most_events=most_events)
    if not batches:
        return Rated()
    events = _events(session, select(*_READ).where(_EVENT.batch_id.in_(batches)))
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
    events = _events(
        session,
        select(*_READ)
        .outerjoin(Charge, Charge.request_id == _EVENT.request_id)
        .where(
            _EVENT.request_id.in_(parked),
            _EVENT.price_version.in_(known),
            Charge.request_id.is_(None),
        ),
    )
    now = clock.now()
    done = _rate_events(session, events, now, new_id("late")) if events else 0
    service_rollups.add_released(session, [event.request_id for event in events])
    charged = select(Charge.request_id)
    session.execute(
        update(ParkedEvent)
        .where(ParkedEvent.released_at.is_(None), ParkedEvent.request_id.in_(charged))
        .values(released_at=now)
        .execution_options(synchronize_session=False)
    )
    return done


def _events(session: Session, query: Select[Any]) -> list[Event]:
    return [Event._make(row) for row in session.execute(query)]


def _rate_events(session: Session, events: list[Event], now: datetime, reference: str) -> int:
    context = _prepare(session, events, now)
    good = [event for event in events if _ratable(context, event)]
    charges = [_charge(context, event) for event in good]
    bulk_insert.insert_all(session, CHARGES, _CHARGE_COLUMNS, charges)
    context.positions.store()
    rollups.add_charges(session, zip(good, charges, strict=True))
    late = _late_credit(session, context, good, charges)
    _post(session, context, reference, late)
    if len(good) != len(events):
        _park(session, [event for event in events if not _ratable(context, event)], now)
    return len(good)


def _ratable(context: _RatingContext, event: Event) -> bool:
    key = event.tenant_id, event.price_version
    found = context.ratable.get(key)
    if found is None:
        version, account = context.versions.by_id.get(key[1]), context.accounts[key[0]]
        found = version is not None and version.currency == account.currency
        context.ratable[key] = found
    return found


def _park(session: Session, events: list[Event], now: datetime) -> None:
    """Park events whose price is unknown or in another currency, so that the others are rated."""
    rows = [
        {
            "request_id": event.request_id,
            "tenant_id": event.tenant_id,
            "code": "unknown_price",
            "reason": f"price version {event.price_version!r} is unknown, or not in the account's "
            "currency",
            "payload": {"request_id": event.request_id},
            "parked_at": now,
        }
        for event in events
    ]
    insert_new(session, ParkedEvent.__table__, rows, "request_id")  # type: ignore[arg-type]


def _prepare(session: Session, events: Iterable[Event], now: datetime) -> _RatingContext:
    tenants = {event.tenant_id for event in events}
    ensure_accounts(session, tenants, now)
    accounts = lock_accounts(session, tenants)
    periods = Periods(session)
    periods.load(tenants, min((event.occurred_at for event in events), default=now))
    versions = load_versions(session, {event.price_version for event in events}, tenants)
    return _RatingContext(accounts, periods, versions, Positions(session, versions), now)


def _charge(context: _RatingContext, event: Event) -> tuple[Any, ...]:
    tenant_id, kind, quantity = event.tenant_id, event.kind, event.quantity
    account = context.accounts[tenant_id]
    usage = context.periods.around(account, event.occurred_at)
    version = context.versions.by_id[event.price_version]
    usage_id, bill = context.billed.get(usage) or _bill_of(context, account, usage, version)
    tokens = event[9:13]
    adapter, answered = bool(event.adapter), 0 if event.status >= 500 else quantity
    amounts = [0] * (_TOTAL + 1)
    linear = context.versions.linear(tenant_id, version)
    units = event.units
    used = counted(kind, tokens, answered=answered, adapter=adapter, quantity=quantity, units=units)
    for component, count in used:
        if count == 0:
            continue
        unit = linear.get(component)
        if unit is None:
            cost = context.positions.charge(tenant_id, usage_id, version, component, count)
        else:
            cost = unit * count
        amounts[_SLOT[component]] = cost
        amounts[_TOTAL] += cost
    bill.amount += amounts[_TOTAL]
    return (
        event.request_id,
        tenant_id,
        version.id,
        version.currency,
        usage_id,
        bill.period_id,
        bill.transaction_id,
        *_quantities(kind, tokens, answered, adapter=adapter, quantity=quantity),
        *(_units(kind, units) if units else _NO_UNITS),
        *amounts,
    )


def _bill_of(
    context: _RatingContext, account: BillingAccount, usage: BillingPeriod, version: PriceVersion
) -> tuple[str, _PeriodCharge]:
    billed = context.periods.billed_in(account, usage, context.now)
    key = account.tenant_id, billed.id
    bill = context.bills.get(key)
    if bill is None:
        bill = context.bills[key] = _PeriodCharge(billed.id, new_id(TRANSACTION), version.currency)
    found = context.billed[usage] = usage.id, bill
    return found


def _quantities(
    kind: str, tokens: tuple[int, ...], answered: int, *, adapter: bool, quantity: int
) -> tuple[int, ...]:
    """In the order of QUANTITY_COLUMNS, up to the units. A 5xx request does not count as a billable
    request."""
    if kind == UsageKind.GPU_SECONDS:
        return (0, *tokens, 0, quantity, 0)
    if kind == UsageKind.MODERATION:
        return (0, *tokens, 0, 0, answered)
    return (answered, *tokens, answered if adapter else 0, 0, 0)


_UNITS = (Component.AUDIO_SECOND, Component.IMAGE, Component.CHARACTER)  # as QUANTITY_COLUMNS end
_NO_UNITS = (0, 0, 0)


def _units(kind: str, units: int) -> tuple[int, ...]:
    counted_by = UNIT_OF.get(kind)
    return tuple(units if component is counted_by else 0 for component in _UNITS)


_Timed = dict[tuple[str, str], list[tuple[datetime, int]]]


def _late_credit(
    session: Session, context: _RatingContext, events: list[Event], charges: list[tuple[Any, ...]]
) -> _Timed:
    """Brings back credit that expired after usage of these events. Returns the tenants' amounts with
    their times, by tenant and bill period; empty, as almost always, if no such credit has expired.
    """
    tenants = {tenant_id for tenant_id, _ in context.bills}
    first = min((event.occurred_at for event in events), default=context.now)
    expired = expiry.expired_since(session, tenants, first, context.now)
    expiry.revive(session, expired, context.now)
    timed: _Timed = {}
    if expired:
        for event, charge in zip(events, charges, strict=True):
            if event.tenant_id in expired:
                key = (event.tenant_id, charge[_BILL_PERIOD])
                timed.setdefault(key, []).append((event.occurred_at, charge[-1]))
    return timed


def _post(session: Session, context: _RatingContext, first_batch: str, late: _Timed) -> None:
    tenants = {tenant_id for tenant_id, _ in context.bills}
    earliest = min((at for usage in late.values() for at, _ in usage), default=context.now)
    grants = credits.open_grants(session, tenants, earliest)
    transactions: list[Transaction] = []
    uses: list[dict[str, object]] = []
    for (tenant_id, period_id), bill in context.bills.items():
        if bill.amount == 0:
            continue
        money = Money(bill.amount, bill.currency)
        entries = list(transfer(AccountKind.RECEIVABLE, AccountKind.REVENUE, money))
        usage = late.get((tenant_id, period_id))
        if usage is None:
            draws = credits.draw(grants.get(tenant_id, []), max(0, bill.amount))
        else:
            draws = credits.draw_in_time(grants.get(tenant_id, []), usage)
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
