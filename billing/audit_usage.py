"""Audit checks of receipts, batches, events, charges, prices and roll-ups."""

from typing import Any

from sqlalchemy import and_, func, or_, select
from sqlalchemy.orm import Session

from billing import partitions, rollups
from billing.differences import EVERYTHING, Difference, Since, amount, duplicated, lost
from billing.models import (
    Adjustment,
    Charge,
    DailyTenantUsage,
    DailyUsage,
    EngineReceipt,
    HourlyUsage,
    ParkedEvent,
    PriceVersionRow,
    TierPosition,
    UsageBatch,
    UsageEventRow,
)
from billing.prices import version_of
from billing.pricing import Component
from billing.tables.columns import AMOUNT_COLUMNS
from billing.tiers import Scope, scope_of, total_of

E, C, R, A = UsageEventRow, Charge, EngineReceipt, Adjustment
# The quantity of each component in a row of charges or of a roll-up.
_COUNTS: dict[Component, Any] = {
    Component.INPUT: lambda table: table.input_tokens - table.cached_tokens,
    Component.CACHED_INPUT: lambda table: table.cached_tokens,
    Component.OUTPUT: lambda table: table.output_tokens,
    Component.WAIVED: lambda table: table.waived_tokens,
    Component.REQUEST: lambda table: table.requests,
    Component.ADAPTER: lambda table: table.adapter_requests,
    Component.GPU_SECOND: lambda table: table.gpu_seconds,
    Component.MODERATION: lambda table: table.moderation_calls,
}
_AMOUNT = dict(zip(Component, AMOUNT_COLUMNS, strict=False))


def receipts_and_events(session: Session, since: Since = EVERYTHING) -> list[Difference]:
    """Each receipt has an event with the same token counts."""
    orphans = session.scalars(
        select(R.request_id)
        .outerjoin(E, E.request_id == R.request_id)
        .outerjoin(ParkedEvent, ParkedEvent.request_id == R.request_id)
        .where(
            E.request_id.is_(None),
            ParkedEvent.request_id.is_(None),
            R.request_id >= _first_id(session, since),
        )
    )
    found = lost(
        "receipts/events", "the engine has a receipt, but there is no usage event", orphans
    )
    unequal = session.execute(
        select(R.request_id)
        .join(E, E.request_id == R.request_id)
        .where(
            E.batch_id > since.batch,
            or_(
                R.prompt_tokens != E.input_tokens,
                R.cached_tokens != E.cached_tokens,
                R.generated_tokens != E.output_tokens + E.waived_tokens,
            ),
        )
    ).all()
    if unequal:
        message = "the token counts of the engine's receipt and of the event differ"
        ids = [row[0] for row in unequal]
        found.append(Difference("receipts/events", "amount", message, len(ids), 0, tuple(ids[:20])))
    return found


def _first_id(session: Session, since: Since) -> str:
    """Events below the retention floor are dropped."""
    dropped = partitions.latest_retention(session)
    return max(since.id, dropped.floor_id if dropped else "")


def batches_and_events(session: Session, since: Since = EVERYTHING) -> list[Difference]:
    """Each batch has as many events as it was stored with."""
    counted = (
        select(E.batch_id, func.count().label("events"))
        .where(E.batch_id > since.batch)
        .group_by(E.batch_id)
        .subquery("counted")
    )
    rows = session.execute(
        select(UsageBatch.id, UsageBatch.events, func.coalesce(counted.c.events, 0))
        .outerjoin(counted, counted.c.batch_id == UsageBatch.id)
        .where(UsageBatch.id > since.batch, UsageBatch.events != func.coalesce(counted.c.events, 0))
    )
    found = []
    for batch_id, stored, there in rows:
        kind = "lost" if there < stored else "duplicated"
        message = f"batch {batch_id} was stored with {stored} events, it has {there}"
        found.append(Difference("batches/events", kind, message, abs(stored - there)))
    return found


def events_and_charges(session: Session, since: Since = EVERYTHING) -> list[Difference]:
    """Each event of a rated batch has one charge with the same counts, and vice versa."""
    missing = session.scalars(
        select(E.request_id)
        .join(UsageBatch, UsageBatch.id == E.batch_id)
        .outerjoin(C, C.request_id == E.request_id)
        .outerjoin(ParkedEvent, ParkedEvent.request_id == E.request_id)
        .where(
            C.request_id.is_(None),
            ParkedEvent.request_id.is_(None),
            UsageBatch.rated_at.is_not(None),
            UsageBatch.id > since.batch,
        )
    )
    found = lost("events/charges", "the event is in a rated batch but has no charge", missing)
    alone = session.scalars(
        select(C.request_id)
        .outerjoin(E, E.request_id == C.request_id)
        .where(E.request_id.is_(None), C.request_id >= _first_id(session, since))
    )
    found += duplicated("events/charges", "the charge has no event", alone)
    unequal = session.scalars(
        select(C.request_id)
        .join(E, E.request_id == C.request_id)
        .where(
            E.batch_id > since.batch,
            or_(
                C.input_tokens != E.input_tokens,
                C.cached_tokens != E.cached_tokens,
                C.output_tokens != E.output_tokens,
                C.waived_tokens != E.waived_tokens,
                C.price_version != E.price_version,
                C.tenant_id != E.tenant_id,
            ),
        )
    ).all()
    if unequal:
        message = "the counts of the charge differ from those of its event"
        found.append(
            Difference("events/charges", "amount", message, len(unequal), 0, tuple(unequal[:20]))
        )
    return found


def charges_and_prices(session: Session) -> list[Difference]:
    """The charges of a period sum to the price of its total quantity, by component. Versions of the
    same model and adapter share their tiers.
    """
    counts = {name: count(C) for name, count in _COUNTS.items()}
    sums: list[Any] = []
    for component in Component:
        sums += [func.sum(counts[component]), func.sum(getattr(C, _AMOUNT[component]))]
    generated = C.gpu_seconds + C.moderation_calls == 0
    key = (C.usage_period_id, C.price_version, C.tenant_id, generated)
    rows = session.execute(select(*key, *sums).group_by(*key)).all()
    wanted = {row[1] for row in rows}
    stored = session.scalars(select(PriceVersionRow).where(PriceVersionRow.id.in_(wanted)))
    versions = {row.id: version_of(row) for row in stored}
    placed = session.execute(
        select(
            TierPosition.usage_period_id,
            TierPosition.price_version,
            TierPosition.component,
            TierPosition.quantity,
        )
    )
    positions = {tuple(row[:3]): row[3] for row in placed}
    unknown = ("", "")
    used: dict[tuple[str, str, Component, Scope], dict[str, list[int]]] = {}
    for period_id, version_id, tenant_id, tokens, *values in rows:
        scope = scope_of(versions[version_id]) if version_id in versions else unknown
        for index, component in enumerate(Component):
            quantity, units = int(values[2 * index]), int(values[2 * index + 1])
            if not tokens and component not in (Component.GPU_SECOND, Component.MODERATION):
                quantity = 0  # counted but not priced
            place = used.setdefault((period_id, tenant_id, component, scope), {})
            entry = place.setdefault(version_id, [0, 0])
            entry[0] += quantity
            entry[1] += units
    found = []
    for (period_id, tenant_id, component, scope), by_version in used.items():
        priced = [(versions[v], sums[0]) for v, sums in by_version.items() if scope != unknown]
        expected = total_of(component, priced)
        units = sum(sums[1] for sums in by_version.values())
        placed_right = all(
            positions.get((period_id, version_id, component.value), quantity) == quantity
            for version_id, (quantity, _) in by_version.items()
        )
        if expected == units and placed_right:
            continue
        ids = session.scalars(
            select(C.request_id)
            .where(and_(C.usage_period_id == period_id, C.price_version.in_(by_version)))
            .order_by(C.request_id)
            .limit(20)
        )
        quantity = sum(sums[0] for sums in by_version.values())
        message = (
            f"{quantity} {component} at {', '.join(sorted(by_version))} cost {expected}, "
            f"but {units} is charged"
        )
        found.append(amount("charges/prices", message, units - expected, ids, tenant_id))
    return found


def charges_and_roll_ups(session: Session) -> list[Difference]:
    """Both roll-ups equal charges plus adjustments, per tenant and pair of periods."""
    expected = _by_bill(session, C)
    changed = (A.tenant_id, A.usage_period_id, A.bill_period_id, A.component)
    for row in session.execute(select(*changed, func.sum(A.amount)).group_by(*changed)):
        where = (row[0], row[1], row[2])
        sums = list(expected.get(where, [0] * len(rollups.SUMS)))
        for name in (_AMOUNT[Component(row[3])], "amount"):
            sums[rollups.SUMS.index(name)] += int(row[4])
        expected[where] = tuple(sums)
    found = []
    for table in (HourlyUsage, DailyUsage):
        there = _by_bill(session, table)
        for key in expected.keys() | there.keys():
            want, have = expected.get(key, ()), there.get(key, ())
            if want != have:
                message = f"{table.__tablename__} sums to {have}, charges and adjustments to {want}"
                units = (have[-1] if have else 0) - (want[-1] if want else 0)
                found.append(amount("charges/roll-ups", message, units, tenant_id=key[0]))
    return found + _tenant_days_and_days(session)


def _tenant_days_and_days(session: Session) -> list[Difference]:
    """The daily tenant roll-up equals the daily roll-up, per tenant."""
    days, tenant_days = (_by_tenant(session, table) for table in (DailyUsage, DailyTenantUsage))
    found = []
    for tenant_id in days.keys() | tenant_days.keys():
        want, have = days.get(tenant_id, ()), tenant_days.get(tenant_id, ())
        if want != have:
            message = f"usage_tenant_daily sums to {have}, usage_daily to {want}"
            units = (have[-1] if have else 0) - (want[-1] if want else 0)
            found.append(amount("charges/roll-ups", message, units, tenant_id=tenant_id))
    return found


def _by_tenant(session: Session, table: Any) -> dict[str, tuple[int, ...]]:
    sums = [func.sum(getattr(table, name)) for name in rollups.TENANT_DAILY_SUMS]
    rows = session.execute(select(table.tenant_id, *sums).group_by(table.tenant_id))
    return {row[0]: tuple(int(value) for value in row[1:]) for row in rows}


def _by_bill(session: Session, table: Any) -> dict[tuple[str, str, str], tuple[int, ...]]:
    key = (table.tenant_id, table.usage_period_id, table.bill_period_id)
    sums = [func.sum(getattr(table, name)) for name in rollups.SUMS]
    rows = session.execute(select(*key, *sums).group_by(*key))
    return {tuple(row[:3]): tuple(int(value) for value in row[3:]) for row in rows}
