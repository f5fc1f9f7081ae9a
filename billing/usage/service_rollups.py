"""Service roll-ups by hour and day: usage by member and outcome, with histograms of time to first
token and decoding speed; engines' busy time by day; and usage by origin. Each rated batch is summed
once, in the database, separately from rating.
"""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, case, delete, func, literal, or_, select, update
from sqlalchemy.orm import Session

from billing.columns import AMOUNT_COLUMNS, QUANTITY_COLUMNS
from billing.usage import label_rollups, origin_rollups, retention, rollup_writes
from billing.usage.batch_claims import claim_batches
from billing.usage.border import border_of
from billing.usage.tables import (
    FIRST_COLUMNS,
    FIRST_TOKEN_MS,
    SPEED_COLUMNS,
    TOKENS_A_SECOND,
    Charge,
    DailyEngineTime,
    DailyService,
    HourlyService,
    UsageBatch,
    UsageEventRow,
)
from core.clock import Clock
from core.database import Database

MAX_EVENTS = 20_000
KEY = (
    *("tenant_id", "at", "project_id", "key_id", "member_id", "model", "adapter", "kind"),
    "price_version",
)
_OUTCOMES = ("answers", "refused", "failed", "queue_ms", "reordered_cached_tokens")
_OF_EVENTS = (*_OUTCOMES, *FIRST_COLUMNS, *SPEED_COLUMNS)
SUMS = (*QUANTITY_COLUMNS, *AMOUNT_COLUMNS, *_OF_EVENTS)
_TIME_KEY = ("at", "tenant_id", "model", "adapter", "engine_id", "currency")
_EVENT: Any = UsageEventRow


def sum_all(database: Database, clock: Clock) -> int:
    """Sum every rated batch not summed yet; returns the number of batches."""
    batches = 0
    while True:
        with database.transaction() as session:
            taken = claim_batches(
                session,
                UsageBatch.summed_at.is_(None),
                UsageBatch.rated_at.is_not(None),
                most_events=MAX_EVENTS,
            )
            if not taken:
                return batches
            _add(session, _EVENT.batch_id.in_(taken))
            _mark(session, taken, clock.now())
        batches += len(taken)


def add_released(session: Session, request_ids: Sequence[str]) -> None:
    """Add events that were charged after their batch was summed."""
    summed = select(UsageBatch.id).where(UsageBatch.summed_at.is_not(None))
    _add(session, _EVENT.request_id.in_(request_ids) & _EVENT.batch_id.in_(summed))


def rebuild(session: Session, clock: Clock) -> None:
    """Rebuild all tables from all charges whose events are not dropped or moved: from the second kept
    day on, as the first may lack events."""
    rated = session.scalars(  # locked, so that no worker sums one of them at the same time
        select(UsageBatch.id)
        .where(UsageBatch.rated_at.is_not(None))
        .order_by(UsageBatch.id)
        .with_for_update()
    ).all()
    dropped, border = retention.latest_retention(session), border_of(session)
    start = dropped.kept_from + timedelta(days=1) if dropped else datetime.min.replace(tzinfo=UTC)
    start = max(start, border.whole_from) if border is not None else start
    summed = (HourlyService, DailyService, DailyEngineTime, label_rollups.TABLE)
    for table in (*summed, *origin_rollups.TABLES.values()):
        session.execute(delete(table).where(table.at >= start))
    new = select(UsageBatch.id).where(UsageBatch.summed_at.is_(None))
    again = or_(_EVENT.occurred_at >= start, _EVENT.batch_id.in_(new))
    _add(session, _EVENT.batch_id.in_(rated) & again)
    _mark(session, rated, clock.now())


def _mark(session: Session, batches: Sequence[int], now: datetime) -> None:
    session.execute(update(UsageBatch).where(UsageBatch.id.in_(batches)).values(summed_at=now))


def _add(session: Session, chosen: ColumnElement[bool]) -> None:
    contents = rollup_writes.contents_of(session, chosen)
    columns, sums = contents.columns, (*contents.columns, *_OF_EVENTS)
    for table, width in ((HourlyService, "hour"), (DailyService, "day")):
        rows = _sums(chosen, rollup_writes.start_of(width, session), columns)
        rollup_writes.add_from(session, table, KEY, ("currency",), sums, rows)
    rows = _engine_time(chosen, rollup_writes.start_of("day", session))
    rollup_writes.add_from(session, DailyEngineTime, _TIME_KEY, (), ("answers", "busy_us"), rows)
    origin_rollups.add(session, chosen, columns)
    if contents.labels:
        label_rollups.add(session, chosen, columns)


def _engine_time(chosen: ColumnElement[bool], day: Any) -> Any:
    adapter = func.coalesce(_EVENT.adapter, literal(""))
    group = [
        *(day, _EVENT.tenant_id, _EVENT.model, adapter, _EVENT.engine_id),
        Charge.currency,
    ]
    return (
        select(*group, func.count(), func.sum(_EVENT.busy_us))
        .join(Charge, Charge.request_id == _EVENT.request_id)
        .where(chosen, _EVENT.busy_us > 0)
        .group_by(*group)
        .order_by(*group)
    )


def _sums(chosen: ColumnElement[bool], start: Any, columns: Sequence[str]) -> Any:
    event, charge = _EVENT, Charge
    group = [
        event.tenant_id,
        start,
        event.project_id,
        event.key_id,
        func.coalesce(event.member_id, literal("")),
        event.model,
        func.coalesce(event.adapter, literal("")),
        event.kind,
        event.price_version,
        charge.currency,
    ]
    speed = (event.output_tokens - 1) * 1000
    streamed = (
        event.first_token_ms.is_not(None)
        & (event.output_tokens > 1)
        & (event.duration_ms > event.first_token_ms)
    )
    sums = [
        *(getattr(charge, name) for name in columns),
        literal(1),
        _one_if(event.status.between(400, 499)),
        _one_if(event.status >= 500),
        event.queue_ms,
        event.reordered_cached_tokens,
        *_classes(event.first_token_ms, 1, FIRST_TOKEN_MS, event.first_token_ms.is_not(None)),
        *_classes(speed, event.duration_ms - event.first_token_ms, TOKENS_A_SECOND, streamed),
    ]
    return (
        select(*group, *(func.sum(each) for each in sums))
        .join(charge, charge.request_id == event.request_id)
        .where(chosen)
        .group_by(*group)
        .order_by(*group)  # always in the same order, to avoid deadlocks
    )


def _classes(value: Any, divisor: Any, bounds: tuple[int, ...], counted: Any) -> list[Any]:
    """One-hot columns for the bucket of value / divisor; upper bounds are inclusive."""
    found = []
    for index in range(len(bounds) + 1):
        inside = counted
        if index:
            inside = inside & (value > bounds[index - 1] * divisor)
        if index < len(bounds):
            inside = inside & (value <= bounds[index] * divisor)
        found.append(_one_if(inside))
    return found


def _one_if(condition: Any) -> Any:
    return case((condition, 1), else_=0)


def percentile(counts: Sequence[int], bounds: Sequence[int], share: float) -> float | None:
    """Percentile of a histogram, interpolated linearly inside its bucket; None if it is empty. In the
    unbounded last bucket it is the last bound."""
    total = sum(counts)
    if not total:
        return None
    wanted, below, low = share * total, 0, 0
    for count, high in zip(counts, bounds, strict=False):  # the last bucket has no bound
        if count and below + count >= wanted:
            return low + (high - low) * (wanted - below) / count
        below, low = below + count, high
    return float(bounds[-1])
