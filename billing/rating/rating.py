"""Rating: turns usage events into charges, ledger postings, roll-ups and credit draws.

One transaction rates a few whole batches and marks them as rated. A worker that dies leaves nothing
behind, and the next worker rates the batches again. An event that cannot be rated is parked with the
reason, whatever the reason is, and all others are rated: what fails together is rated in halves.
"""

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import astuple
from sqlalchemy import Select, Table, func, select, update
from sqlalchemy.exc import DataError, IntegrityError
from sqlalchemy.orm import Session

from billing.accounts.accounts import Periods, ensure_accounts, lock_accounts
from billing.accounts.tables import BillingAccount, BillingPeriod
from billing.columns import (
    AMOUNT_COLUMNS,
    PLAIN_AMOUNTS,
    PLAIN_SUMS,
    QUANTITY_COLUMNS,
)
from billing.ledger import credits, expiry
from billing.ledger.ledger import AccountKind, Transaction, largest_balances, post_many, transfer
from billing.pricing.pricing import (
    UNIT_OF,
    Component,
    PriceVersion,
    counted,
    parts_of,
    priced_quantities,
)
from billing.pricing.tables import PriceVersionRow
from billing.rating.tiers import Positions, Versions, load_versions
from billing.usage import rollups, service_rollups
from billing.usage.batch_claims import claim_batches
from billing.usage.event_components import decode_components
from billing.usage.tables import Charge, ParkedEvent, UsageBatch, UsageEventRow
from core import bulk_insert
from core.clock import Clock
from core.database import MOST_UNITS, insert_new
from core.errors import TollhouseError
from core.events import Components, UsageKind
from core.ids import TRANSACTION, new_id
from core.money import Money, decimal_of

CHARGES: Table = Charge.__table__  # type: ignore[assignment]
_EVENT = UsageEventRow
MOST_EVENTS = 20_000  # of a transaction, about
# Errors of an event's or its tenant's values. A lost database or a deadlock stops the whole transaction.
_OF_AN_EVENT = (
    TollhouseError,
    ArithmeticError,
    AssertionError,
    DataError,
    IntegrityError,
    LookupError,
    TypeError,
    ValueError,
)
log = logging.getLogger("tollhouse.billing")


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
    components: str | None  # as `event_components` writes them
    batch_id: int


class ChargeHead(Struct, frozen=True, gc=False):
    """The first columns of a charge; its quantities and amounts follow."""

    request_id: str
    tenant_id: str
    price_version: str
    currency: str
    usage_period_id: str
    bill_period_id: str
    transaction_id: str


# Columns of the table, not of its class: rows of those pass through the object mapper.
_STORED = _EVENT.__table__.c
_READ = tuple(_STORED[name] for name in Event._fields)
_SLOT = {component: index for index, component in enumerate(Component)}
_PLAIN = len(PLAIN_AMOUNTS)  # components before the units and the parts
# Most usage has neither units nor parts, and its charges are written without their columns.
_HEAD = ChargeHead.__struct_fields__
_PLAIN_COLUMNS = (*_HEAD, *PLAIN_SUMS)
_CHARGE_COLUMNS = (*_HEAD, *QUANTITY_COLUMNS, *AMOUNT_COLUMNS)


class RatedCharge(Struct, frozen=True, gc=False):
    """`sums` are those of PLAIN_SUMS, or else of QUANTITY_COLUMNS and AMOUNT_COLUMNS."""

    head: ChargeHead
    sums: tuple[int, ...]
    is_plain: bool

    @property
    def amount(self) -> int:
        return self.sums[-1]


@dataclass(frozen=True, slots=True)
class Rated:
    batches: int = 0  # rated or refused
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
    # By tenant: how many picounits the ledger and the roll-ups can still take.
    room: dict[str, int]
    bills: dict[tuple[str, str], _PeriodCharge] = field(
        default_factory=dict
    )  # by tenant and period
    # By the period of the usage: its id, and the bill that the usage is on. Reading an attribute of a
    # mapped object for each event would take a tenth of rating.
    billed: dict[BillingPeriod, tuple[str, _PeriodCharge]] = field(default_factory=dict)
    ratable: dict[tuple[str, str], bool] = field(
        default_factory=dict
    )  # by tenant and price version
    parked: list[tuple[Event, str, str]] = field(default_factory=list)  # with code and reason


def rate(
    session: Session,
    clock: Clock,
    *,
    most_events: int = MOST_EVENTS,
    shards: Collection[int] | None = None,
) -> Rated:
    """Rate the oldest waiting batches, about `most_events` events, of these shards or of all; Rated(0, 0)
    if none waits. A batch whose events are not all there is refused: rating it would bill the rest to
    nobody."""
    waiting = [UsageBatch.rated_at.is_(None), UsageBatch.refused_at.is_(None)]
    if shards is not None:
        waiting.append(UsageBatch.shard.in_(shards))
    batches = claim_batches(session, *waiting, most_events=most_events)
    if not batches:
        return Rated()
    events, refused = _whole_batches(session, batches, now=clock.now())
    _rate_whatever_can_be(session, events, clock.now(), f"{batches[0]}")
    session.execute(
        update(UsageBatch)
        .where(UsageBatch.id.in_([each for each in batches if each not in refused]))
        .values(rated_at=clock.now())
    )
    return Rated(len(batches), len(events))


def _whole_batches(
    session: Session, batches: Sequence[int], now: datetime
) -> tuple[list[Event], set[int]]:
    """The events of the batches that have as many as they were stored with, and the other batches,
    which are marked. Those are read twice: a statement that was planned before a partition was attached
    does not see its rows."""
    stored = _stored_counts(session, batches)
    events = _events_of(session, batches)
    wrong = _differ(stored, events)
    if wrong:
        again = _events_of(session, sorted(wrong))
        events = [event for event in events if event.batch_id not in wrong] + again
        wrong = _differ(stored, events)
    if not wrong:
        return events, set()
    log.error(
        "batches %s of usage are not rated: they have fewer or more events than they were stored with;"
        " `tollhouse audit` counts them, `tollhouse usage rebuild` rates them once they are whole",
        ", ".join(map(str, sorted(wrong))),
    )
    marked = update(UsageBatch).where(UsageBatch.id.in_(wrong)).values(refused_at=now)
    session.execute(marked)
    return [event for event in events if event.batch_id not in wrong], wrong


def _stored_counts(session: Session, batches: Sequence[int]) -> dict[int, int]:
    rows = session.execute(
        select(UsageBatch.id, UsageBatch.events).where(UsageBatch.id.in_(batches))
    )
    return {row[0]: row[1] for row in rows}


def _differ(stored: dict[int, int], events: list[Event]) -> set[int]:
    there = Counter(event.batch_id for event in events)
    return {batch for batch, count in stored.items() if there[batch] != count}


def release_refused(session: Session) -> int:
    """Let refused batches whose events are all there be rated; returns how many."""
    refused = (UsageBatch.refused_at.is_not(None), UsageBatch.rated_at.is_(None))
    batches = session.scalars(select(UsageBatch.id).where(*refused).with_for_update()).all()
    if not batches:
        return 0
    there = dict(
        session.execute(
            select(_EVENT.batch_id, func.count())
            .where(_EVENT.batch_id.in_(batches))
            .group_by(_EVENT.batch_id)
        ).all()
    )
    stored = _stored_counts(session, batches)
    whole = [batch for batch in batches if there.get(batch, 0) == stored[batch]]
    session.execute(update(UsageBatch).where(UsageBatch.id.in_(whole)).values(refused_at=None))
    return len(whole)


def rate_missed(session: Session, clock: Clock) -> int:
    """Rate events of rated batches that have neither a charge nor a reason to have none; returns how
    many were rated."""
    events = _events(
        session,
        select(*_READ)
        .join(UsageBatch, UsageBatch.id == _EVENT.batch_id)
        .outerjoin(Charge, Charge.request_id == _EVENT.request_id)
        .outerjoin(ParkedEvent, ParkedEvent.request_id == _EVENT.request_id)
        .where(
            UsageBatch.rated_at.is_not(None),
            Charge.request_id.is_(None),
            ParkedEvent.request_id.is_(None),
        )
        .order_by(_EVENT.request_id),
    )
    done = 0
    for start in range(0, len(events), MOST_EVENTS):
        part = events[start : start + MOST_EVENTS]
        done += _rate_whatever_can_be(session, part, clock.now(), new_id("missed"))
    service_rollups.add_released(session, [event.request_id for event in events])
    return done


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
        )
        .order_by(func.random())  # each gets its turn, however many cannot be rated
        .limit(MOST_EVENTS),
    )
    events.sort(key=lambda event: event.request_id)
    now = clock.now()
    done = _rate_whatever_can_be(session, events, now, new_id("late")) if events else 0
    service_rollups.add_released(session, [event.request_id for event in events])
    charged = select(Charge.request_id)
    session.execute(
        update(ParkedEvent)
        .where(ParkedEvent.released_at.is_(None), ParkedEvent.request_id.in_(charged))
        .values(released_at=now)
        .execution_options(synchronize_session=False)
    )
    return done


def _events_of(session: Session, batches: Sequence[int]) -> list[Event]:
    return _events(session, select(*_READ).where(_STORED.batch_id.in_(batches)))


def _events(session: Session, query: Select[Any]) -> list[Event]:
    return [Event._make(row) for row in session.execute(query)]


def _rate_whatever_can_be(
    session: Session, events: list[Event], now: datetime, reference: str
) -> int:
    """Rate the events, and park those that cannot be rated; returns how many were rated."""
    try:
        with session.begin_nested():
            return _rate_events(session, events, now, reference)
    except _OF_AN_EVENT as error:
        if len(events) == 1:
            ours = isinstance(error, TollhouseError | DataError | IntegrityError)
            event_id, reason = events[0].request_id, _reason_of(error)
            log.error("event %s is parked: %s", event_id, reason, exc_info=not ours)
            _park(session, [(events[0], "unratable", reason)], now)
            return 0
    by_tenant = sorted(events, key=lambda event: event.tenant_id)  # the order of a tenant's stays
    middle = len(events) // 2
    return _rate_whatever_can_be(
        session, by_tenant[:middle], now, f"{reference}.0"
    ) + _rate_whatever_can_be(session, by_tenant[middle:], now, f"{reference}.1")


def _reason_of(error: Exception) -> str:
    cause = error.orig if isinstance(error, DataError | IntegrityError) else error
    text = f"{type(cause).__name__}: {cause}".replace("\0", "")
    return error.message if isinstance(error, TollhouseError) else text


def _rate_events(session: Session, events: list[Event], now: datetime, reference: str) -> int:
    context = _prepare(session, events, now)
    good: list[Event] = []
    charges: list[RatedCharge] = []
    for event in events:
        charge = _charge(context, event) if _ratable(context, event) else None
        if charge is not None:
            good.append(event)
            charges.append(charge)
    for is_plain, columns in ((True, _PLAIN_COLUMNS), (False, _CHARGE_COLUMNS)):
        rows = [(*astuple(each.head), *each.sums) for each in charges if each.is_plain is is_plain]
        bulk_insert.insert_all(session, CHARGES, columns, rows)
    context.positions.store()
    rollups.add_charges(session, zip(good, charges, strict=True))
    late = _late_credit(session, context, good, charges)
    _post(session, context, reference, late)
    _park(session, context.parked, now)
    return len(good)


def _ratable(context: _RatingContext, event: Event) -> bool:
    key = event.tenant_id, event.price_version
    found = context.ratable.get(key)
    if found is None:
        version, account = context.versions.by_id.get(key[1]), context.accounts[key[0]]
        found = version is not None and version.currency == account.currency
        context.ratable[key] = found
    if not found:
        reason = f"price version {key[1]!r} is unknown, or not in the account's currency"
        context.parked.append((event, "unknown_price", reason))
    return found


def _park(session: Session, events: list[tuple[Event, str, str]], now: datetime) -> None:
    if not events:
        return
    rows = [
        {
            "request_id": event.request_id,
            "tenant_id": event.tenant_id,
            "code": code,
            "reason": reason,
            "payload": {"request_id": event.request_id},
            "parked_at": now,
        }
        for event, code, reason in events
    ]
    insert_new(session, ParkedEvent.__table__, rows, "request_id")  # type: ignore[arg-type]


def _prepare(session: Session, events: Iterable[Event], now: datetime) -> _RatingContext:
    tenants = {event.tenant_id for event in events}
    ensure_accounts(session, tenants, now)
    accounts = lock_accounts(session, tenants)
    periods = Periods(session)
    periods.load(tenants, min((event.occurred_at for event in events), default=now))
    versions = load_versions(session, {event.price_version for event in events}, tenants)
    dialect = session.get_bind().dialect.name
    room = dict.fromkeys(tenants, MOST_UNITS[dialect])
    if dialect == "sqlite":  # PostgreSQL's 38 digits are beyond what periods of any events come to
        for tenant_id, units in largest_balances(session, tenants).items():
            room[tenant_id] -= units
    return _RatingContext(accounts, periods, versions, Positions(session, versions), now, room)


def _charge(context: _RatingContext, event: Event) -> RatedCharge | None:
    """The event's charge. None if it is more than the database holds: the event is parked."""
    tenant_id, kind, quantity = event.tenant_id, event.kind, event.quantity
    account = context.accounts[tenant_id]
    usage = context.periods.around(account, event.occurred_at)
    version = context.versions.by_id[event.price_version]
    usage_id, bill = context.billed.get(usage) or _bill_of(context, account, usage, version)
    tokens = event.input_tokens, event.cached_tokens, event.output_tokens, event.waived_tokens
    adapter, answered = bool(event.adapter), 0 if event.status >= 500 else quantity
    linear = context.versions.linear(tenant_id, version)
    units = event.units
    parts = None if event.components is None else decode_components(event.components)
    plain = tokens if parts is None else _without(tokens, parts)
    used = counted(kind, plain, answered=answered, adapter=adapter, quantity=quantity, units=units)
    is_plain = parts is None and units == 0
    amounts = [0] * (_PLAIN if is_plain else len(_SLOT))
    if parts is not None:
        used = tuple(priced_quantities(version.rates, (*used, *parts_of(parts))).items())
    cost = 0
    for component, count in used:
        if count == 0:
            continue
        unit = linear.get(component)
        if unit is None:
            priced = context.positions.charge(tenant_id, usage_id, version, component, count)
        else:
            priced = unit * count
        amounts[_SLOT[component]] = priced
        cost += priced
    if abs(cost) > context.room[tenant_id]:
        for component, count in used:
            if count and linear.get(component) is None:
                context.positions.charge(tenant_id, usage_id, version, component, -count)
        reason = f"it costs {decimal_of(cost)} {version.currency}, more than the database can add"
        context.parked.append((event, "amount_too_large", reason))
        return None
    context.room[tenant_id] -= abs(cost)
    bill.amount += cost
    head = ChargeHead(
        event.request_id,
        tenant_id,
        version.id,
        version.currency,
        usage_id,
        bill.period_id,
        bill.transaction_id,
    )
    quantities = _quantities(kind, tokens, answered, adapter=adapter, quantity=quantity)
    if is_plain:
        return RatedCharge(head, (*quantities, *amounts, cost), is_plain)
    others = (*_units(kind, units), *astuple(_NO_PARTS if parts is None else parts))
    return RatedCharge(head, (*quantities, *others, *amounts, cost), is_plain)


def _without(tokens: tuple[int, int, int, int], parts: Components) -> tuple[int, int, int, int]:
    """Tokens less those that are in the parts."""
    given, cached, delivered, waived = tokens
    return given - parts.input_tokens, cached, delivered - parts.output_tokens, waived


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
    """In the order of PLAIN_QUANTITIES. A 5xx request does not count as a billable
    request."""
    if kind == UsageKind.GPU_SECONDS:
        return (0, *tokens, 0, quantity, 0)
    if kind == UsageKind.MODERATION:
        return (0, *tokens, 0, 0, answered)
    return (answered, *tokens, answered if adapter else 0, 0, 0)


_UNITS = (Component.AUDIO_SECOND, Component.IMAGE, Component.CHARACTER)  # as UNIT_QUANTITIES
_NO_PARTS = Components()


def _units(kind: str, units: int) -> tuple[int, ...]:
    counted_by = UNIT_OF.get(kind)
    return tuple(units if component is counted_by else 0 for component in _UNITS)


_Timed = dict[tuple[str, str], list[tuple[datetime, int]]]


def _late_credit(
    session: Session, context: _RatingContext, events: list[Event], charges: list[RatedCharge]
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
                key = (event.tenant_id, charge.head.bill_period_id)
                timed.setdefault(key, []).append((event.occurred_at, charge.amount))
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
