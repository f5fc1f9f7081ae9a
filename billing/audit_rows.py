"""Sums of all rows of events, charges and receipts, for an audit of everything.

Each table is read once and grouped by the database. Most checks compare these sums; only where they
differ is a check's own query run, which names the request ids.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sqlalchemy import BigInteger, and_, bindparam, case, cast, func, or_, select, text
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.orm import Session

from billing import frozen_sums, partitions
from billing.archive.border import Border, border_of, not_moved
from billing.models import (
    Charge,
    ClosedCharges,
    ClosedDay,
    EngineReceipt,
    UsageBatch,
    UsageEventRow,
)
from billing.tables.columns import AMOUNT_COLUMNS, QUANTITY_COLUMNS
from core.events import CountedBy

E, C, R, B, F = UsageEventRow, Charge, EngineReceipt, UsageBatch, ClosedCharges
TOKENS = ("input_tokens", "cached_tokens", "output_tokens", "waived_tokens")
SUMS = (*QUANTITY_COLUMNS, *AMOUNT_COLUMNS)
_KEYS = len(frozen_sums.KEY)
# A hash join or a group by of a day's rows fits; each parallel worker may use as much.
_SETTINGS = {
    "work_mem": "128MB",
    "jit": "off",
    "statement_timeout": "3600s",
    # The planner expects many times the groups that there are, and would sort all rows in one process.
    "enable_sort": "off",
    "parallel_tuple_cost": "0.001",
}
_NO_EVENT = -1  # the day of a charge without an event

# Warm-up requests, and lines of a batch that run again: their tokens are waived.
UNBILLED = and_(
    func.coalesce(E.paid_by, "") == "operator",
    or_(E.batch_job.is_not(None), E.finish_reason == "warm_up"),
)
BY_GATEWAY = func.coalesce(E.counted_by, "") == CountedBy.GATEWAY.value
UNEQUAL = or_(
    *(getattr(C, name) != getattr(E, name) for name in (*TOKENS, "price_version", "tenant_id"))
)
WITHOUT_RECEIPT = and_(
    E.counted_by == CountedBy.GATEWAY.value,
    E.input_tokens + E.output_tokens > 0,
    func.coalesce(E.paid_by, "") != "operator",
)


class Group(NamedTuple):
    """The charges of a key with their sums, named as the columns of a charge."""

    tenant_id: str
    usage_period_id: str
    bill_period_id: str
    price_version: str
    tokens: bool
    sums: tuple[int, ...]

    def __getattr__(self, name: str) -> int:
        return self.sums[_PLACES[name]]


_PLACES = {name: place for place, name in enumerate(SUMS)}


@dataclass(frozen=True, slots=True)
class DaySums:
    """Events and charges of one day; the days are numbered from 0, and open ones are the last."""

    events: dict[str, int]
    charges: list[tuple[Any, ...]]  # as in `frozen_sums.Groups`
    charge_count: int


@dataclass(slots=True)
class RowSums:
    days: dict[int, DaySums] = field(default_factory=dict)
    groups: list[Group] = field(default_factory=list)  # of all days, and without a day
    moved: list[Group] = field(default_factory=list)  # frozen, of days whose rows are elsewhere
    charges: int = 0
    # Whether the rows agree, so that no query has to look for those that do not.
    every_charge_has_its_event: bool = True
    every_event_has_its_charge: bool = True
    receipts_agree: bool = True
    receipts_complete: bool = True

    def sums(self, day: int) -> dict[str, int]:
        """As `ClosedDay.sums`."""
        there = self.days.get(day, _EMPTY)
        units = sum(row[-1] for row in there.charges)
        return there.events | {"charges": there.charge_count, "units": units}

    def frozen(self, day: int) -> list[tuple[Any, ...]]:
        return self.days.get(day, _EMPTY).charges

    def every_group(self) -> list[Group]:
        """A key may have several."""
        return self.groups + self.moved

    def charge_sums(self) -> dict[str, int]:
        names = dict(zip((*TOKENS, "units"), (*TOKENS, "amount"), strict=True))
        found = {
            name: sum(getattr(each, column) for each in self.groups)
            for name, column in names.items()
        }
        return {"count": self.charges, **found}

    def event_sums(self) -> dict[str, int]:
        names = ("events", *TOKENS)
        found = {name: sum(day.events[name] for day in self.days.values()) for name in names}
        return {"count": found["events"], **{name: found[name] for name in TOKENS}}


_EMPTY = DaySums(dict.fromkeys(("events", *TOKENS), 0), [], 0)


def prepare(session: Session) -> None:
    """Memory and time for statements that read whole tables, until the transaction ends."""
    if session.get_bind().dialect.name != "postgresql":
        return
    for name, value in _SETTINGS.items():
        session.execute(text(f"set local {name} = '{value}'"))


def read(session: Session) -> RowSums:
    day = _day(session)
    border = border_of(session)
    here = not_moved(border)
    events, rated = _events(session, day, here)
    found = _charges(session, day, events, rated, here)
    if border is not None:
        _add_moved(session, found, border)
    _receipts(session, found)
    return found


def _day(session: Session) -> Any:
    """SQL for the number of closed days before that of an event's batch."""
    if session.get_bind().dialect.name != "postgresql":
        earlier = select(func.count()).where(ClosedDay.last_batch < E.batch_id)
        return earlier.correlate(E).scalar_subquery()
    last = session.scalars(select(ClosedDay.last_batch).order_by(ClosedDay.day)).all()
    # Unlike a subquery, this lets several processes share the work.
    bounds = cast(bindparam("bounds", [each + 1 for each in last], unique=True), ARRAY(BigInteger))
    return func.width_bucket(E.batch_id, bounds)


def _events(session: Session, day: Any, here: list[Any]) -> tuple[dict[int, dict[str, int]], int]:
    """Sums by day, and how many events are in rated batches."""
    sums = [func.sum(getattr(E, name)) for name in TOKENS]
    rated = func.count(B.rated_at)
    query = select(day.label("day"), rated, func.count(), *sums)
    query = query.select_from(E).outerjoin(B, B.id == E.batch_id).where(*here).group_by("day")
    by_day, in_rated = {}, 0
    for number, count, *values in session.execute(query):
        in_rated += count
        by_day[int(number)] = dict(zip(("events", *TOKENS), map(int, values), strict=True))
    return by_day, in_rated


def _charges(
    session: Session,
    day: Any,
    events: dict[int, dict[str, int]],
    in_rated: int,
    here: list[Any],
) -> RowSums:
    dropped = partitions.latest_retention(session)
    alone = and_(E.request_id.is_(None), C.request_id >= (dropped.floor_id if dropped else ""))
    counts = (func.count(), func.count(B.rated_at), *_filtered(alone, UNEQUAL))
    key: list[Any] = [C.tenant_id, C.usage_period_id, C.bill_period_id, C.price_version]
    key.append(frozen_sums.generated(C).label("tokens"))
    sums = [func.sum(getattr(C, name)) for name in SUMS]
    number = case((E.batch_id.is_(None), _NO_EVENT), else_=day).label("day")
    query = (
        select(number, *key, *sums, *counts)
        .select_from(C)
        .outerjoin(E, E.request_id == C.request_id)
        .outerjoin(B, B.id == E.batch_id)
        .where(*(or_(E.batch_id.is_(None), each) for each in here))
        .group_by("day", *key[:-1], "tokens")
    )
    found = RowSums()
    by_day: dict[int, list[tuple[Any, ...]]] = defaultdict(list)
    count_by_day: dict[int, int] = defaultdict(int)
    by_key: dict[tuple[Any, ...], tuple[int, ...]] = {}
    matched = 0
    for at, *values in session.execute(query):
        *columns, count, in_rated_batch, without_event, unequal = values
        row = frozen_sums.charge_row(columns)
        if at != _NO_EVENT:
            by_day[int(at)].append(row)
            count_by_day[int(at)] += count
        before = by_key.get(row[:_KEYS], (0,) * len(SUMS))
        by_key[row[:_KEYS]] = tuple(map(sum, zip(before, row[_KEYS:], strict=True)))
        found.charges += count
        matched += in_rated_batch
        if without_event or unequal:
            found.every_charge_has_its_event = False
    found.every_event_has_its_charge = matched == in_rated
    found.groups = [Group._make((*where, values)) for where, values in by_key.items()]
    for each in events.keys() | by_day.keys():
        there_then = events.get(each, _EMPTY.events)
        found.days[each] = DaySums(there_then, by_day[each], count_by_day[each])
    return found


def _add_moved(session: Session, found: RowSums, border: Border) -> None:
    """The frozen charges of moved days, whose rows are in their store."""
    rows = session.execute(
        select(
            *(getattr(F, name) for name in frozen_sums.KEY), *(getattr(F, name) for name in SUMS)
        ).where(F.day >= border.first_day, F.day <= border.last_day)
    )
    for row in rows:
        *key, tokens = row[:_KEYS]
        found.moved.append(Group._make((*key, bool(tokens), tuple(map(int, row[_KEYS:])))))


def _receipts(session: Session, found: RowSums) -> None:
    """A request has one receipt, as long as its prompts are not numbered: then every receipt meets an
    event, and an event that meets none has none."""
    missing = R.request_id.is_(None)
    differ = or_(
        R.prompt_tokens != E.input_tokens,
        R.cached_tokens != E.cached_tokens,
        R.generated_tokens != E.output_tokens + E.waived_tokens,
        R.busy_us != E.busy_us,
    )
    wrong = or_(
        and_(
            R.engine_id == E.engine_id,
            or_(and_(~BY_GATEWAY, differ), and_(BY_GATEWAY, E.output_tokens > R.generated_tokens)),
            ~UNBILLED,
        ),
        and_(missing, E.counted_by.is_not(None), ~BY_GATEWAY, ~UNBILLED),
    )
    joined = select(
        func.count(R.request_id), *_filtered(wrong, and_(missing, WITHOUT_RECEIPT))
    ).select_from(E)
    row = session.execute(joined.outerjoin(R, R.request_id == E.request_id)).one()
    stored = session.scalar(select(func.count()).select_from(R))
    found.receipts_agree = row[0] == stored and not row[1]
    found.receipts_complete = not row[2]


def _filtered(*conditions: Any) -> Iterable[Any]:
    return (func.count().filter(condition) for condition in conditions)
