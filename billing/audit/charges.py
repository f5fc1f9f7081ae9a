"""Audit checks of charges with prices and roll-ups."""

from collections import defaultdict
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import and_, func, select
from sqlalchemy.orm import Session

from billing.archive import frozen_sums
from billing.archive.tables import ClosedCharges
from billing.closing import row_sums
from billing.closing.row_sums import RowSums
from billing.differences import EVERYTHING, Difference, Since, amount
from billing.pricing.component_columns import AMOUNTS, amount_of, count_of
from billing.pricing.prices import version_of
from billing.pricing.pricing import Component, priced_as
from billing.pricing.tables import PriceVersionRow
from billing.rating.tables import TierPosition
from billing.rating.tiers import Scope, scope_of, total_of
from billing.usage import rollups
from billing.usage.tables import (
    Adjustment,
    Charge,
    DailyTenantUsage,
    DailyUsage,
    HourlyUsage,
    UsageEventRow,
)

E, C, F, A = UsageEventRow, Charge, ClosedCharges, Adjustment
Sums = dict[tuple[Any, ...], tuple[int, ...]]  # by tenant, usage period and bill period


def charges_and_prices(
    session: Session, since: Since = EVERYTHING, rows: RowSums | None = None
) -> list[Difference]:
    """The charges of a period sum to the price of its total quantity, by component. Versions of the
    same model and adapter share their tiers. Of open days: the periods in which they have charges.
    """
    groups = _priced_groups(session, since, rows)
    wanted = {row[1] for row in groups}
    stored = session.scalars(select(PriceVersionRow).where(PriceVersionRow.id.in_(wanted)))
    versions = {row.id: version_of(row) for row in stored}
    positions = _positions(session, {row[0] for row in groups})
    unknown: Scope = ("", "", "")
    used: dict[tuple[str, str, Component, Scope], dict[str, list[int]]] = {}
    for period_id, version_id, tenant_id, tokens, *values in groups:
        scope = scope_of(versions[version_id]) if version_id in versions else unknown
        for index, component in enumerate(Component):
            quantity, units = int(values[2 * index]), int(values[2 * index + 1])
            if not tokens and component not in (Component.GPU_SECOND, Component.MODERATION):
                quantity = 0  # counted but not priced
            rates = versions[version_id].rates if version_id in versions else {}
            for each, at, count in (
                (priced_as(rates, component), 0, quantity),
                (component, 1, units),
            ):
                place = used.setdefault((period_id, tenant_id, each, scope), {})
                place.setdefault(version_id, [0, 0])[at] += count
    found = []
    for (period_id, tenant_id, component, scope), by_version in used.items():
        priced = [(versions[v], sums[0]) for v, sums in by_version.items() if scope != unknown]
        expected = total_of(component, priced)
        if component is Component.WAIVED and expected:
            for version_id, free in _waived_by_failures(session, period_id, by_version).items():
                by_version[version_id][0] -= free
            priced = [(versions[v], sums[0]) for v, sums in by_version.items()]
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


def _waived_by_failures(
    session: Session, period_id: str, versions: Iterable[str]
) -> dict[str, int]:
    """By price version, what requests that were not answered waived: it is free at any price."""
    rows = session.execute(
        select(C.price_version, func.sum(C.waived_tokens))
        .where(
            C.usage_period_id == period_id,
            C.price_version.in_(versions),
            C.requests == 0,
            frozen_sums.generated(C),
        )
        .group_by(C.price_version)
    )
    return {version_id: int(count) for version_id, count in rows}


def _priced_groups(session: Session, since: Since, known: RowSums | None) -> list[tuple[Any, ...]]:
    """Usage period, price version, tenant, whether tokens are priced, then the quantity and the units
    of each component; a key may have several rows."""
    groups = (known or row_sums.read(session, since)).every_group()
    rows = [_priced(each) for each in groups]
    if since == EVERYTHING:
        return rows
    periods = {row[0] for row in rows}
    key, sums = _priced_columns()
    closed = frozen_sums.closed_charges(session, key, sums, (F.usage_period_id, periods))
    return [tuple(row) for row in (*rows, *closed)]


def _priced(group: row_sums.Group) -> tuple[Any, ...]:
    values: list[int] = []
    for component in Component:
        values += [count_of(component, group), amount_of(component, group)]
    key = (group.usage_period_id, group.price_version, group.tenant_id, group.tokens)
    return (*key, *values)


def _priced_columns() -> tuple[list[Any], list[Any]]:
    sums: list[Any] = []
    for component in Component:
        sums += [func.sum(count_of(component, F)), func.sum(amount_of(component, F))]
    return [F.usage_period_id, F.price_version, F.tenant_id, F.tokens], sums


def _positions(session: Session, periods: set[str]) -> dict[tuple[Any, ...], int]:
    found: dict[tuple[Any, ...], int] = {}
    for some in frozen_sums.chunks(periods):
        rows = session.execute(
            select(
                TierPosition.usage_period_id,
                TierPosition.price_version,
                TierPosition.component,
                TierPosition.quantity,
            ).where(TierPosition.usage_period_id.in_(some))
        )
        found |= {tuple(row[:3]): row[3] for row in rows}
    return found


def charges_and_roll_ups(
    session: Session, since: Since = EVERYTHING, rows: RowSums | None = None
) -> list[Difference]:
    """Both roll-ups equal charges plus adjustments, per tenant and pair of periods. Of open days: the
    periods to which they add, by day, and the hours of the days on which they have usage.
    """
    charged: Sums = {}
    for group in (rows or row_sums.read(session, since)).every_group():
        _add(charged, (*group[:3], *(getattr(group, name) for name in rollups.SUMS)))
    if since != EVERYTHING:
        return _open_roll_ups(session, since, charged)
    expected = _adjusted(session, charged, None)
    found = []
    for table in (HourlyUsage, DailyUsage):
        found += _roll_up_differences(table, expected, _by_bill(session, table))
    return found + _tenant_days_and_days(session)


def _open_roll_ups(session: Session, since: Since, expected: Sums) -> list[Difference]:
    """`expected`: the sums of open charges."""
    changed = session.execute(select(A.bill_period_id).where(A.created_at >= since.day).distinct())
    periods = {each[2] for each in expected} | {row[0] for row in changed}
    key, sums = _bill_columns(F)
    for row in frozen_sums.closed_charges(session, key, sums, (F.bill_period_id, periods)):
        _add(expected, row)
    there: Sums = {}
    for some in frozen_sums.chunks(periods):
        there |= _by_bill(session, DailyUsage, DailyUsage.bill_period_id.in_(some))
    expected = _adjusted(session, expected, periods)
    found = _roll_up_differences(DailyUsage, expected, there)
    return found + _open_hours(session, since)


def _open_hours(session: Session, since: Since) -> list[Difference]:
    """The hours and the tenant's sum of each day with open usage equal the day."""
    at = E.occurred_at
    day: Any = (
        func.date_trunc("day", at)
        if session.get_bind().dialect.name == "postgresql"
        else func.strftime("%Y-%m-%d 00:00:00.000000", at)
    )
    days = session.execute(select(E.tenant_id, day).where(E.batch_id > since.batch).distinct())
    by_day: dict[datetime, set[str]] = defaultdict(set)
    for tenant_id, start in days:
        moment = start if isinstance(start, datetime) else datetime.fromisoformat(start)
        by_day[moment.replace(tzinfo=UTC)].add(tenant_id)
    found = []
    for start, tenants in sorted(by_day.items()):
        for some in frozen_sums.chunks(tenants):
            found += _day_differences(session, start, some)
    return found


def _day_differences(session: Session, start: datetime, tenants: list[str]) -> list[Difference]:
    days, hours, tenant_days = (
        _by_tenant(
            session,
            table,
            table.tenant_id.in_(tenants),
            table.at >= start,
            table.at < start + timedelta(days=1),
        )
        for table in (DailyUsage, HourlyUsage, DailyTenantUsage)
    )
    found = []
    for table, there in ((HourlyUsage, hours), (DailyTenantUsage, tenant_days)):
        for tenant_id in days.keys() | there.keys():
            want, have = days.get(tenant_id, ()), there.get(tenant_id, ())
            if want != have:
                name = f"{table.__tablename__} of {start:%Y-%m-%d}"
                message = f"{name} sums to {have}, usage_daily to {want}"
                units = (have[-1] if have else 0) - (want[-1] if want else 0)
                found.append(amount("charges/roll-ups", message, units, tenant_id=tenant_id))
    return found


def _adjusted(session: Session, expected: Sums, periods: set[str] | None) -> Sums:
    """With the adjustments of these bill periods; of all, if None."""
    changed = (A.tenant_id, A.usage_period_id, A.bill_period_id, A.component)
    query = select(*changed, func.sum(A.amount)).group_by(*changed)
    rows = (
        list(session.execute(query))
        if periods is None
        else [
            row
            for some in frozen_sums.chunks(periods)
            for row in session.execute(query.where(A.bill_period_id.in_(some)))
        ]
    )
    for row in rows:
        where = (row[0], row[1], row[2])
        sums = list(expected.get(where, [0] * len(rollups.SUMS)))
        for name in (AMOUNTS[Component(row[3])], "amount"):
            sums[rollups.SUMS.index(name)] += int(row[4])
        expected[where] = tuple(sums)
    return expected


def _add(sums: Sums, row: Any) -> None:
    key, values = tuple(row[:3]), tuple(int(value) for value in row[3:])
    before = sums.get(key)
    sums[key] = values if before is None else tuple(map(sum, zip(before, values, strict=True)))


def _roll_up_differences(table: Any, expected: Sums, there: Sums) -> list[Difference]:
    found = []
    for key in expected.keys() | there.keys():
        want, have = expected.get(key, ()), there.get(key, ())
        if want != have:
            message = f"{table.__tablename__} sums to {have}, charges and adjustments to {want}"
            units = (have[-1] if have else 0) - (want[-1] if want else 0)
            found.append(amount("charges/roll-ups", message, units, tenant_id=key[0]))
    return found


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


def _by_tenant(session: Session, table: Any, *where: Any) -> dict[str, tuple[int, ...]]:
    sums = [func.sum(getattr(table, name)) for name in rollups.TENANT_DAILY_SUMS]
    rows = session.execute(select(table.tenant_id, *sums).where(*where).group_by(table.tenant_id))
    return {row[0]: tuple(int(value) for value in row[1:]) for row in rows}


def _by_bill(session: Session, table: Any, *where: Any) -> Sums:
    key, sums = _bill_columns(table)
    rows = session.execute(select(*key, *sums).where(*where).group_by(*key))
    return {tuple(row[:3]): tuple(int(value) for value in row[3:]) for row in rows}


def _bill_columns(table: Any) -> tuple[list[Any], list[Any]]:
    key = [table.tenant_id, table.usage_period_id, table.bill_period_id]
    return key, [func.sum(getattr(table, name)) for name in rollups.SUMS]
