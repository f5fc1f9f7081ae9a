"""Stores usage events in bulk, each once, and never drops one.

Events that cannot be stored or rated (refused by the database, in the future, unknown price, wrong
currency, invalid counts) are parked with the reason, listed by `parked`, and retried by `release`.
"""

import hashlib
import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from operator import attrgetter
from typing import Any

import msgspec
from msgspec import structs
from sqlalchemy import Table, bindparam, func, select, text, update
from sqlalchemy.exc import DataError, IntegrityError
from sqlalchemy.orm import Session

from billing.accounts.accounts import ensure_accounts
from billing.accounts.tables import BillingAccount
from billing.pricing.prices import load_price_book
from billing.pricing.pricing import MAX_COUNT, UNIT_OF, PriceBook
from billing.usage import label_sets
from billing.usage.event_components import encode_components
from billing.usage.late import MovedRequests, moved_requests
from billing.usage.shard_keys import shard_of
from billing.usage.tables import EngineReceipt, ParkedEvent, UsageBatch, UsageEventRow
from core import bulk_insert, lengths
from core.clock import Clock, SystemClock
from core.database import insert_new
from core.events import EngineCount, UsageEvent, UsageKind
from core.ids import REQUEST

log = logging.getLogger("tollhouse.billing")

# Tolerated clock difference between machines.
SKEW = timedelta(minutes=5)

EVENTS: Table = UsageEventRow.__table__  # type: ignore[assignment]
PARKED: Table = ParkedEvent.__table__  # type: ignore[assignment]
RECEIPTS: Table = EngineReceipt.__table__  # type: ignore[assignment]
_FIELDS = UsageEvent.__struct_fields__
_COLUMNS = (*_FIELDS, "batch_id")
_TENANT = _FIELDS.index("tenant_id")
_REFUSED_LENGTHS = tuple(
    (name, length) for name, length in lengths.EVENT.items() if name not in lengths.CUT
)
_CUT_LENGTHS = tuple((name, lengths.EVENT[name]) for name in lengths.CUT)
_values = attrgetter(*_FIELDS)
_PARTS = _FIELDS.index("components")
_KNOWN = text(
    "select 'account', tenant_id, currency from billing_accounts where tenant_id in :tenants"
    " union all select 'price', id, currency from price_versions where id in :versions"
    " union all select 'floor', '', max(floor_id) from usage_retention"
    " union all select 'moved', '', max(floor_id) from moved_days where moved_at is not null"
).bindparams(bindparam("tenants", expanding=True), bindparam("versions", expanding=True))
_DIVIDED = (UsageKind.GENERATION, UsageKind.EMBEDDING)  # kinds whose tokens have components
CURRENCY = "currency"  # the code of an event whose price is not in the account's currency
_PARKED_COLUMNS = ("request_id", "tenant_id", "code", "reason", "payload", "parked_at")


@dataclass(frozen=True, slots=True)
class ParkReason:
    code: str  # future | unknown_price | currency | invalid | refused | too_old | unchecked
    reason: str


def record(session: Session, events: Sequence[UsageEvent], clock: Clock | None = None) -> int:
    """Store or park new events; returns how many were new. Known events are ignored."""
    if not events:
        return 0
    now = (clock or SystemClock()).now()
    validator = _Validator.of(session, events, now)
    good: list[UsageEvent] = []
    bad: list[tuple[UsageEvent, ParkReason]] = []
    for event in events:
        if event.request_id in validator.moved.known:
            continue
        problem = validator.problem(event)
        if problem is None:
            good.append(event)
        else:
            bad.append((event, problem))
    new = _store(session, good, now)
    return new + _park(session, bad, now)


def _row(event: UsageEvent) -> tuple[Any, ...]:
    """Values of the table's columns."""
    values: tuple[Any, ...] = _values(event)
    if event.components is None:
        return values
    return (*values[:_PARTS], encode_components(event.components), *values[_PARTS + 1 :])


def _cut(event: UsageEvent) -> UsageEvent:
    """The event with its descriptions cut to their columns' lengths."""
    changes = {
        name: value[:length]
        for name, length in _CUT_LENGTHS
        if (value := getattr(event, name)) and len(value) > length
    }
    return structs.replace(event, **changes) if changes else event


def _too_long(event: UsageEvent) -> str | None:
    for name, length in _REFUSED_LENGTHS:
        value = getattr(event, name, None)
        if value and len(value) > length:
            return f"{name} is longer than {length} characters"
    return None


def park_refused(
    session: Session, events: Sequence[UsageEvent], reason: str, clock: Clock | None = None
) -> int:
    """Park events that the database refuses to store; returns how many are new. Texts are made
    storable: PostgreSQL stores no NUL."""
    problem = ParkReason("refused", reason.replace("\0", ""))
    return _park(session, [(event, problem) for event in events], (clock or SystemClock()).now())


def record_raw(session: Session, payloads: Iterable[Any], clock: Clock | None = None) -> int:
    """Record events given as JSON values; values that are not usage events are parked."""
    events, broken = [], []
    for payload in payloads:
        try:
            events.append(_from_json(payload))
        except ValueError as error:
            broken.append((payload, f"not a usage event: {error}"))
    new = record(session, events, clock)
    now = (clock or SystemClock()).now()
    return new + _insert_parked(
        session, [(*_ids_of(one), "invalid", why, one, now) for one, why in broken]
    )


def park_payload(session: Session, payload: dict[str, Any], reason: str, clock: Clock) -> None:
    """Park something that is no usage event as it is, once."""
    row = (*_ids_of(payload), "invalid", reason.replace("\0", ""), payload, clock.now())
    _insert_parked(session, [row])


def _ids_of(payload: Any) -> tuple[str, str]:
    """Request and tenant id of a payload; a missing request id is derived from its digest."""
    given = payload if isinstance(payload, dict) else {}
    request_id, tenant_id = given.get("request_id"), given.get("tenant_id")
    if not isinstance(request_id, str) or not 0 < len(request_id) <= 40:
        digest = hashlib.sha256(json.dumps(payload, sort_keys=True).encode()).hexdigest()
        request_id = f"invalid-{digest[:32]}"
    return request_id, str(tenant_id or "")[:40]


def store_receipts(session: Session, receipts: Sequence[EngineCount]) -> int:
    """Store receipts for the audit. Returns how many are new."""
    rows = [structs.astuple(each) for each in receipts]
    columns = EngineCount.__struct_fields__
    return bulk_insert.insert_new(session, RECEIPTS, columns, rows, "request_id", "engine_id")


def receipts_of(session: Session, request_ids: Sequence[str]) -> Sequence[EngineReceipt]:
    """The stored receipts with these ids, in their order."""
    found = select(EngineReceipt).where(EngineReceipt.request_id.in_(request_ids))
    return session.scalars(found.order_by(EngineReceipt.request_id)).all()


def parked(session: Session) -> list[ParkedEvent]:
    """Parked events that are neither released nor dismissed, oldest first."""
    waiting = ParkedEvent.released_at.is_(None) & ParkedEvent.dismissed_by.is_(None)
    return list(session.scalars(select(ParkedEvent).where(waiting).order_by(ParkedEvent.parked_at)))


def release(session: Session, clock: Clock) -> int:
    """Retry every parked event; returns how many were stored. One that the database refuses stays."""
    now, book = clock.now(), load_price_book(session)
    waiting: list[tuple[ParkedEvent, UsageEvent]] = []
    for row in parked(session):
        try:
            event = _from_json(row.payload)
        except ValueError:
            continue
        event = _priced(session, row, event, book)
        validator = _Validator.of(session, [event], now)
        if event.request_id in validator.moved.known:
            row.released_at = now
        elif validator.problem(event) is None:
            waiting.append((row, event))
    try:
        return _release(session, waiting, now)
    except (DataError, IntegrityError):
        return sum(_release_one(session, row, event, now) for row, event in waiting)


def _priced(session: Session, row: ParkedEvent, event: UsageEvent, book: PriceBook) -> UsageEvent:
    """An event that was priced in another currency than its account's gets the price in the
    account's: the one in force when it occurred, else the first that came into force since."""
    account = session.get(BillingAccount, event.tenant_id) if row.code == CURRENCY else None
    if account is None:
        return event
    where = (event.tenant_id, event.model, event.adapter, event.occurred_at, account.currency)
    version = book.pin_from(*where)
    return structs.replace(event, price_version=version.id) if version is not None else event


def _release_one(session: Session, row: ParkedEvent, event: UsageEvent, now: datetime) -> int:
    try:
        return _release(session, [(row, event)], now)
    except (DataError, IntegrityError) as error:
        log.warning("the parked event %s cannot be released: %s", row.request_id, error.orig)
        return 0


def _release(
    session: Session, waiting: Sequence[tuple[ParkedEvent, UsageEvent]], now: datetime
) -> int:
    with session.begin_nested():
        stored = _store(session, [event for _, event in waiting], now)
        session.execute(
            update(ParkedEvent)
            .where(ParkedEvent.request_id.in_([row.request_id for row, _ in waiting]))
            .values(released_at=now)
        )
    return stored


def dismiss(session: Session, request_id: str, actor: str) -> None:
    """Mark a parked event as not to be billed; the row is kept."""
    session.execute(
        update(ParkedEvent).where(ParkedEvent.request_id == request_id).values(dismissed_by=actor)
    )


@dataclass(frozen=True, slots=True)
class _Validator:
    latest: datetime
    dropped_below: str
    price_currency: dict[str, str]
    account_currency: dict[str, str]
    moved: MovedRequests

    @staticmethod
    def of(session: Session, events: Sequence[UsageEvent], now: datetime) -> "_Validator":
        tenants = {event.tenant_id for event in events}
        versions = {event.price_version for event in events}
        known = _known(session, tenants, versions)
        if tenants - known["account"].keys():
            ensure_accounts(session, tenants, now)
            known = _known(session, tenants, versions)
        moved = moved_requests(
            session, known["moved"][""] or "", [event.request_id for event in events]
        )
        return _Validator(
            now + SKEW, known["floor"][""] or "", known["price"], known["account"], moved
        )

    def problem(self, event: UsageEvent) -> ParkReason | None:
        if event.occurred_at > self.latest:
            return ParkReason(
                "future", f"occurred_at {event.occurred_at:%Y-%m-%d %H:%M:%S} UTC is in the future"
            )
        currency = self.price_currency.get(event.price_version)
        if currency is None:
            return ParkReason("unknown_price", f"there is no price version {event.price_version!r}")
        billed_in = self.account_currency[event.tenant_id]
        if currency != billed_in:
            return ParkReason(CURRENCY, f"its price is in {currency}, the account in {billed_in}")
        too_long = _too_long(event)
        if too_long is not None:
            return ParkReason("invalid", too_long)
        for name, count in (("quantity", event.quantity), ("units", event.units)):
            if not 0 <= count <= MAX_COUNT:
                limits = f"it must be 0 to {MAX_COUNT}"
                return ParkReason("invalid", f"{name} is {count}; {limits}")
        if event.units and event.kind not in UNIT_OF:
            return ParkReason(
                "invalid", f"{event.kind.value} has no units, but {event.units} are given"
            )
        if event.components is not None and event.kind not in _DIVIDED:
            return ParkReason("invalid", f"{event.kind.value} has no components")
        if event.request_id < self.dropped_below and event.request_id.startswith(REQUEST):
            return ParkReason(
                "too_old", "events of its month were dropped, so it may be a duplicate"
            )
        if event.request_id in self.moved.unchecked:
            return ParkReason("unchecked", self.moved.reason)
        return None


def _known(session: Session, tenants: set[str], versions: set[str]) -> dict[str, dict[str, str]]:
    """Currencies of prices and accounts, and the floors of retention and moved days, in one query."""
    found: dict[str, dict[str, str]] = {"account": {}, "price": {}, "floor": {}, "moved": {}}
    wanted = {"tenants": list(tenants), "versions": list(versions)}
    for what, name, value in session.execute(_KNOWN, wanted):
        found[what][name] = value
    return found


def _store(session: Session, events: list[UsageEvent], now: datetime) -> int:
    if not events:
        return 0
    rows = [_row(_cut(event)) for event in label_sets.bounded(session, events, now)]
    by_shard: dict[int, list[tuple[Any, ...]]] = {}
    for row in rows:
        by_shard.setdefault(shard_of(row[_TENANT]), []).append(row)
    batches = [
        (UsageBatch(recorded_at=now, shard=shard, events=len(some)), some)
        for shard, some in sorted(by_shard.items())
    ]
    session.add_all(batch for batch, _ in batches)
    session.flush()
    numbered = [(*row, batch.id) for batch, some in batches for row in some]
    new = bulk_insert.insert_new(session, EVENTS, _COLUMNS, numbered, "request_id")
    if new != len(rows):
        _recount(session, [batch for batch, _ in batches])
    return new


def _recount(session: Session, batches: Sequence[UsageBatch]) -> None:
    """After an insert that left known events out."""
    event = UsageEventRow
    counted = select(event.batch_id, func.count()).where(
        event.batch_id.in_([batch.id for batch in batches])
    )
    stored = dict(session.execute(counted.group_by(event.batch_id)).all())
    for batch in batches:
        batch.events = stored.get(batch.id, 0)
        if batch.events == 0:
            session.delete(batch)
    session.flush()


def _park(session: Session, refused: list[tuple[UsageEvent, ParkReason]], now: datetime) -> int:
    rows = [
        (
            event.request_id[: lengths.ID].replace("\0", ""),
            event.tenant_id[: lengths.ID].replace("\0", ""),
            problem.code,
            problem.reason,
            _to_json(event),
            now,
        )
        for event, problem in refused
    ]
    return _insert_parked(session, rows)


def _insert_parked(session: Session, rows: list[tuple[Any, ...]]) -> int:
    made = [dict(zip(_PARKED_COLUMNS, row, strict=True)) for row in rows]
    return insert_new(session, PARKED, made, "request_id")


def _to_json(event: UsageEvent) -> dict[str, Any]:
    shown = structs.asdict(event)
    for name in ("occurred_at", "finished_at"):
        shown[name] = shown[name].isoformat()
    if event.components is not None:
        shown["components"] = msgspec.to_builtins(event.components)
    return {
        name: value.replace("\0", "") if isinstance(value, str) else value
        for name, value in shown.items()
    }


def _from_json(payload: Any) -> UsageEvent:
    """Raises ValueError for a wrong type, a missing field, or a text too long for its column."""
    event = msgspec.convert(payload, UsageEvent)
    for name in ("occurred_at", "finished_at"):
        if getattr(event, name).tzinfo is None:
            raise ValueError(f"{name} has no time zone")
    too_long = _too_long(event)
    if too_long is not None:
        raise ValueError(too_long)
    if not event.request_id:
        raise ValueError("request_id is empty")
    return event
