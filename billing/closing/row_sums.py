"""Sums of events, charges and receipts: of all of them, or of those that are not closed.

Each event is read once, with its charge and its receipt, and the database sums them by day and by the
key of frozen groups. Most checks compare these sums; only where they differ is a check's own query run,
which names the request ids.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import add
from typing import Any, NamedTuple

from sqlalchemy import BigInteger, and_, bindparam, case, cast, func, literal, or_, select
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.orm import Session

from billing.archive import frozen_sums
from billing.archive.tables import ClosedCharges
from billing.closing import row_ranges
from billing.closing.row_ranges import Part
from billing.columns import AMOUNT_COLUMNS, PART_QUANTITIES, QUANTITY_COLUMNS
from billing.differences import EVERYTHING, Since
from billing.usage import retention
from billing.usage.border import Border, border_of, not_moved
from billing.usage.tables import Charge, ClosedDay, EngineReceipt, UsageBatch, UsageEventRow
from core.events import WARM_UP, CountedBy

E, C, R, B, F = UsageEventRow, Charge, EngineReceipt, UsageBatch, ClosedCharges
TOKENS = ("input_tokens", "cached_tokens", "output_tokens", "waived_tokens")
SUMS = (*QUANTITY_COLUMNS, *AMOUNT_COLUMNS)
_RECEIPT = ("prompt_tokens", "cached_tokens", "generated_tokens", "busy_us")
_KEYS = len(frozen_sums.KEY)
_ELSEWHERE = -1  # the day of an event that is not audited here: it is closed, or moved
_NO_EVENT = -2  # the day of a charge without an event

# Warm-up requests, and lines of a batch that run again: their tokens are waived.
UNBILLED = and_(
    func.coalesce(E.paid_by, "") == "operator",
    or_(E.batch_job.is_not(None), E.finish_reason == WARM_UP),
)
# Requests that failed before anything was delivered: the prompt is not charged, though it was computed.
FAILED = and_(
    E.status >= 400,
    E.status != 499,
    E.input_tokens == 0,
    E.cached_tokens == 0,
    E.output_tokens == 0,
)
BY_GATEWAY = func.coalesce(E.counted_by, "") == CountedBy.GATEWAY.value
UNEQUAL = or_(
    *(getattr(C, name) != getattr(E, name) for name in (*TOKENS, "price_version", "tenant_id"))
)
DIVIDED = or_(
    E.components.is_not(None),
    *(func.coalesce(getattr(C, name), 0) != 0 for name in PART_QUANTITIES),
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
    receipts: tuple[int, ...] = (0, 0, 0, 0)  # their number, and the sums of `_RECEIPT`
    # Whether the rows agree, so that no query has to look for those that do not.
    every_charge_has_its_event: bool = True
    every_event_has_its_charge: bool = True
    receipts_agree: bool = True
    receipts_complete: bool = True
    divided: bool = False  # whether an event or a charge has components

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

    def receipt_sums(self) -> dict[str, int]:
        names = ("count", "input_tokens", "cached_tokens", "generated_tokens")
        return dict(zip(names, self.receipts, strict=True))

    def event_sums(self) -> dict[str, int]:
        names = ("events", *TOKENS)
        found = {name: sum(day.events[name] for day in self.days.values()) for name in names}
        return {"count": found["events"], **{name: found[name] for name in TOKENS}}


_EMPTY = DaySums(dict.fromkeys(("events", *TOKENS), 0), [], 0)


prepare = row_ranges.prepare


def read(
    session: Session, since: Since = EVERYTHING, bounds: Sequence[int] | None = None
) -> RowSums:
    """The sums of all rows by closed day, or of open usage; or by days that end with these batches."""
    border = border_of(session)
    if bounds is None and since == EVERYTHING:
        bounds = session.scalars(select(ClosedDay.last_batch).order_by(ClosedDay.day)).all()
    dropped = retention.latest_retention(session)
    how = _How(since, tuple(bounds or ()), border, dropped.floor_id if dropped else "")
    parts = row_ranges.parts_of(session, since)
    found = RowSums()
    by_day: dict[int, _Day] = defaultdict(_Day)
    by_key: dict[tuple[Any, ...], tuple[int, ...]] = {}
    for rows in row_ranges.read_parts(session, parts, lambda s, part: _read_part(s, part, how)):
        found.receipts_agree &= rows.receipts_agree
        found.receipts_complete &= rows.receipts_complete
        found.every_charge_has_its_event &= rows.every_charge_has_its_event
        found.every_event_has_its_charge &= rows.every_event_has_its_charge
        found.receipts = _added(found.receipts, rows.receipts)
        found.divided |= rows.divided
        for number, events, key, sums, charges in rows.groups:
            day = by_day[number]
            day.events = _added(day.events, events)
            if key is None:
                continue
            day.charges += charges
            day.groups[key] = _added(day.groups.get(key, _NOTHING), sums)
            by_key[key] = _added(by_key.get(key, _NOTHING), sums)
            found.charges += charges
    found.groups = [Group._make((*key, sums)) for key, sums in by_key.items()]
    for number, day in by_day.items():
        if number >= 0:
            rows_of_day = [(*key, *sums) for key, sums in day.groups.items()]
            counts = dict(zip(("events", *TOKENS), day.events, strict=True))
            found.days[number] = DaySums(counts, rows_of_day, day.charges)
    if border is not None and since == EVERYTHING:
        _add_moved(session, found, border)
    return found


@dataclass(frozen=True, slots=True)
class _How:
    since: Since
    bounds: tuple[int, ...]  # last batch of each day
    border: Border | None
    floor: str


@dataclass(slots=True)
class _Day:
    events: tuple[int, ...] = (0,) * (1 + len(TOKENS))
    charges: int = 0
    groups: dict[tuple[Any, ...], tuple[int, ...]] = field(default_factory=dict)


@dataclass(slots=True)
class _PartRows:
    """Number of the day, sums of events, key and sums of charges or None, and how many charges."""

    groups: list[tuple[int, tuple[int, ...], tuple[Any, ...] | None, tuple[int, ...], int]]
    receipts: tuple[int, ...]
    every_charge_has_its_event: bool = True
    every_event_has_its_charge: bool = True
    receipts_agree: bool = True
    receipts_complete: bool = True
    divided: bool = False


_NOTHING = (0,) * len(SUMS)
_WIDTH = 1 + _KEYS + len(SUMS) + 1 + len(TOKENS)  # of a row, before its counts


def _read_part(session: Session, part: Part, how: _How) -> _PartRows:
    receipts, numbered = _receipts_of(session, part)
    found = _PartRows([], receipts)
    matched = received = 0
    for row in session.execute(_query(session, part, how, numbered=numbered)):
        number, *columns = row[: 1 + _KEYS + len(SUMS)]
        events = tuple(map(int, row[1 + _KEYS + len(SUMS) : _WIDTH]))
        charges, uncharged, unequal, taken, wrong, without, parts = map(int, row[_WIDTH:])
        matched += charges
        received += taken
        if number == _ELSEWHERE:
            continue
        if session.get_bind().dialect.name != "postgresql":
            number = bisect_left(how.bounds, number)
        key = sums = None
        if charges:
            values = frozen_sums.charge_row(columns)
            key, sums = values[:_KEYS], values[_KEYS:]
        found.groups.append((int(number), events, key, sums or _NOTHING, charges))
        found.every_event_has_its_charge &= not uncharged
        found.every_charge_has_its_event &= not unequal
        found.receipts_agree &= not wrong
        found.receipts_complete &= not without
        found.divided |= bool(parts)
    if part.ids:  # late usage, whose receipts and charges are not sought by their ids
        found.receipts = (0,) * len(receipts)
        return found
    found.receipts_agree &= received == receipts[0]
    if matched != session.scalar(select(func.count()).select_from(C).where(*part.of(C.request_id))):
        _add_charges_alone(session, part, how, found)
    return found


def _query(session: Session, part: Part, how: _How, *, numbered: bool) -> Any:
    receipt = _summed_receipts(session, part) if numbered else _plain_receipts(part)
    missing = receipt.c.request_id.is_(None)
    prompt_differs = or_(
        receipt.c.prompt_tokens != E.input_tokens, receipt.c.cached_tokens != E.cached_tokens
    )
    output_differs = receipt.c.generated_tokens != E.output_tokens + E.waived_tokens
    differ = or_(
        and_(~FAILED, prompt_differs),
        output_differs,
        receipt.c.busy_us != E.busy_us,
    )
    wrong = and_(
        ~UNBILLED,
        or_(
            and_(missing, E.counted_by.is_not(None), ~BY_GATEWAY),
            and_(~missing, ~BY_GATEWAY, differ),
            and_(~missing, BY_GATEWAY, output_differs),
        ),
    )
    uncharged = and_(C.request_id.is_(None), B.rated_at.is_not(None))
    counts = (func.count(C.request_id), *_filtered(uncharged, UNEQUAL))
    taken = func.coalesce(func.sum(receipt.c.receipts), 0)
    counts += (taken, *_filtered(wrong, and_(missing, WITHOUT_RECEIPT), DIVIDED))
    key = _key_of_charges()
    return (
        select(
            _day(session, how).label("day"),
            *key,
            *(func.sum(getattr(C, name)) for name in SUMS),
            func.count(),
            *(func.sum(getattr(E, name)) for name in TOKENS),
            *counts,
        )
        .select_from(E)
        .outerjoin(C, and_(C.request_id == E.request_id, *part.of(C.request_id)))
        .outerjoin(
            receipt,
            and_(receipt.c.request_id == E.request_id, receipt.c.engine_id == E.engine_id),
        )
        .outerjoin(B, B.id == E.batch_id)
        .where(*part.of(E.request_id))
        .group_by("day", *key[:-1], "tokens")
    )


def _key_of_charges() -> list[Any]:
    key: list[Any] = [C.tenant_id, C.usage_period_id, C.bill_period_id, C.price_version]
    return [*key, frozen_sums.generated(C).label("tokens")]


def _day(session: Session, how: _How) -> Any:
    """SQL for the number of days that end before an event's batch; on SQLite for the batch."""
    number: Any = E.batch_id
    if session.get_bind().dialect.name == "postgresql":
        first: Any = bindparam("bounds", [each + 1 for each in how.bounds], unique=True)
        number = func.width_bucket(E.batch_id, cast(first, ARRAY(BigInteger)))
    elsewhere = [E.batch_id <= how.since.batch] if how.since.batch else []
    elsewhere += [~each for each in not_moved(how.border)]
    return case((or_(*elsewhere), _ELSEWHERE), else_=number) if elsewhere else number


def _receipts_of(session: Session, part: Part) -> tuple[tuple[int, ...], bool]:
    """How many there are with the sums of their tokens, and whether some are of numbered prompts."""
    sums = [func.coalesce(func.sum(getattr(R, name)), 0) for name in _RECEIPT[:3]]
    numbered = func.count().filter(R.request_id.contains("."))
    row = session.execute(select(func.count(), *sums, numbered).where(*part.of(R.request_id))).one()
    return tuple(map(int, row[:-1])), bool(row[-1])


def _plain_receipts(part: Part) -> Any:
    columns = [getattr(R, name) for name in _RECEIPT]
    one = literal(1).label("receipts")
    query = select(R.request_id, R.engine_id, one, *columns).where(*part.of(R.request_id))
    return query.subquery("receipts")


def _summed_receipts(session: Session, part: Part) -> Any:
    """By request and engine, where some are of numbered prompts."""
    request = request_of(session)
    sums = [func.sum(getattr(R, name)).label(name) for name in _RECEIPT]
    return (
        select(request.label("request_id"), R.engine_id, func.count().label("receipts"), *sums)
        .where(*part.of(R.request_id))
        .group_by(request, R.engine_id)
        .subquery("receipts")
    )


def request_of(session: Session) -> Any:
    """SQL for the request of a receipt: of several prompts, a number follows a dot."""
    if session.get_bind().dialect.name == "postgresql":
        return func.split_part(R.request_id, ".", 1)
    return func.substr(R.request_id, 1, func.instr(R.request_id + ".", ".") - 1)


def _add_charges_alone(session: Session, part: Part, how: _How, found: _PartRows) -> None:
    """Charges without an event: retention has dropped those below the floor, no other may be."""
    key = _key_of_charges()
    unknown = func.count().filter(C.request_id >= how.floor)
    query = (
        select(*key, *(func.sum(getattr(C, name)) for name in SUMS), func.count(), unknown)
        .outerjoin(E, and_(E.request_id == C.request_id, *part.of(E.request_id)))
        .where(E.request_id.is_(None), *part.of(C.request_id))
        .group_by(*key)
    )
    for *columns, charges, alone in session.execute(query):
        row = frozen_sums.charge_row(columns)
        if how.since == EVERYTHING:
            events = (0,) * (1 + len(TOKENS))
            found.groups.append((_NO_EVENT, events, row[:_KEYS], row[_KEYS:], int(charges)))
        found.every_charge_has_its_event &= not alone


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


def _added(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(add, first, second))


def _filtered(*conditions: Any) -> tuple[Any, ...]:
    return tuple(func.count().filter(condition) for condition in conditions)
