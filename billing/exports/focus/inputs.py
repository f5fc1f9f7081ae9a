"""What the rows of some documents are made of, read with a fixed number of statements."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, TypeVar, cast

from sqlalchemy import select
from sqlalchemy.orm import InstrumentedAttribute, Session
from sqlalchemy.sql import coercions, roles, visitors

from billing.accounts.tables import BillingPeriod
from billing.exports.focus.commitments import Commitment, read_commitments
from billing.exports.focus.documents import Document
from billing.exports.focus.list_prices import ListPrices
from billing.invoicing.tables import InvoiceLine
from billing.pricing.pricing import Component, PriceBook
from billing.rating.tables import Rerate
from billing.rating.tiers import ONLY, scope_of
from billing.subscriptions.tables import AddOn, Plan, Subscription
from billing.usage.daily_sums import SUMS, is_divided, priced_sums
from billing.usage.rollups import ADJUSTMENT
from billing.usage.tables import DailyUsage, HourlyLabelUsage
from core.tenants.models import ApiKey, Project

_EARLIEST = datetime.min.replace(tzinfo=UTC)
_Row = TypeVar("_Row", Plan, AddOn, Rerate)
SLOT = {component.value: 2 * index for index, (component, _, _) in enumerate(SUMS)}
# Of daily usage: bill period, usage period, project, model, adapter, price version and kind.
DayKey = tuple[str, str, str, str, str, str, str]


@dataclass(frozen=True, slots=True)
class Day:
    at: datetime
    key_id: str
    sums: tuple[int, ...]  # quantity and picounits of each component, from `SLOT` on
    labels: str = ""  # of what was used, in their canonical form


@dataclass(frozen=True, slots=True)
class Key:
    name: str
    owner: str | None  # who answers for it, or created it


@dataclass(frozen=True, slots=True)
class Inputs:
    lines: dict[str, list[InvoiceLine]]  # by invoice
    days: dict[DayKey, list[Day]]
    projects: dict[str, str]
    keys: dict[str, Key]
    plans: dict[str, Plan]
    add_ons: dict[str, AddOn]
    subscriptions: dict[int, Subscription]
    commitments: dict[str, list[Commitment]]  # by tenant
    rerates: dict[str, Rerate]
    billed_from: dict[str, datetime]  # start of each bill period
    rerated: dict[str, list[DayKey]]  # of adjusted usage: by usage period, the keys of `days`
    book: PriceBook
    listed: ListPrices
    _before: dict[tuple[DayKey, str, datetime, str, str], int] = field(default_factory=dict)

    def before(self, key: DayKey, component: Component, day: Day) -> int:
        """Units of the component that the tenant's period had before under this price's scope: what was
        billed earlier, and then in the order of days. Usage most likely begins there on the tiers; what
        is billed later does not change it."""
        if not self._before:
            self._place()
        return self._before.get((key, component.value, day.at, day.key_id, day.labels), 0)

    def _place(self) -> None:
        """Number the usage of prices that depend on what was used before."""
        at: dict[tuple[object, ...], int] = defaultdict(int)
        ordered = sorted(
            ((key, day) for key, days in self.days.items() for day in days),
            key=lambda each: (
                self.billed_from.get(each[0][0], _EARLIEST),
                each[1].at,
                each[0],
                each[1].key_id,
                each[1].labels,
            ),
        )
        for key, day in ordered:
            version = self.book.by_id.get(key[5])
            if version is None:
                continue
            for component, rate in version.rates.items():
                quantity = day.sums[SLOT[component.value]]
                if rate.is_linear or not quantity or ONLY.get(key[6], component) is not component:
                    continue
                spot = (key[1], scope_of(version), component)
                spell = (key, component.value, day.at, day.key_id, day.labels)
                self._before[spell] = at[spot]
                at[spot] += quantity
        self._before.setdefault((("",) * 7, "", _EARLIEST, "", ""), 0)


def read(
    session: Session, documents: Sequence[Document], book: PriceBook, listed: ListPrices
) -> Inputs:
    invoices = {each.invoice.id: each.invoice for each in documents}
    row = InvoiceLine
    lines: dict[str, list[InvoiceLine]] = defaultdict(list)
    ordered = select(row).where(row.invoice_id.in_(invoices)).order_by(row.invoice_id, row.position)
    for line in session.scalars(ordered):
        lines[line.invoice_id].append(line)
    every = [line for found in lines.values() for line in found]
    tenants = {each.tenant_id for each in invoices.values()}
    bills = {each.period_id for each in invoices.values()}
    days = _days(session, book, DailyUsage.bill_period_id, bills)
    rerates = _by_id(session, Rerate, _named(every, "rerate"))
    corrected = {line.usage_period_id for line in every if line.details.get("rerate")}
    rerated: dict[str, list[DayKey]] = defaultdict(list)
    # Usage of the same periods that other bills have: late usage follows it on the tiers.
    late = {key[1] for key in days if key[1] != key[0]}
    days |= _days(session, book, DailyUsage.usage_period_id, corrected | late)
    for key in days:
        if key[1] in corrected:
            rerated[key[1]].append(key)
    if corrected:
        rerates |= _earlier(session, rerates.values())
    start = select(BillingPeriod.id, BillingPeriod.starts_at)
    billed = start.where(BillingPeriod.id.in_({key[0] for key in days} | bills))
    keys = {day.key_id for found in days.values() for day in found}
    owners = select(ApiKey.id, ApiKey.name, ApiKey.member_id, ApiKey.created_by)
    projects = select(Project.id, Project.name).where(Project.tenant_id.in_(tenants))
    subscribed = {int(each) for each in _named(every, "subscription")}
    held = select(Subscription).where(Subscription.id.in_(subscribed))
    return Inputs(
        lines,
        days,
        {each[0]: each[1] for each in session.execute(projects)},
        {
            key_id: Key(name, member or creator or None)
            for key_id, name, member, creator in session.execute(owners.where(ApiKey.id.in_(keys)))
        },
        _by_id(session, Plan, _named(every, "plan")),
        _by_id(session, AddOn, _named(every, "add_on")),
        {each.id: each for each in session.scalars(held)},
        read_commitments(session, tenants) if any(e.kind == "commitment" for e in every) else {},
        rerates,
        {row[0]: row[1] for row in session.execute(billed)},
        rerated,
        book,
        listed,
    )


def _named(lines: Iterable[InvoiceLine], name: str) -> set[str]:
    return {str(line.details[name]) for line in lines if line.details.get(name)}


def _by_id(session: Session, table: type[_Row], ids: set[str]) -> dict[str, _Row]:
    return {each.id: each for each in session.scalars(select(table).where(table.id.in_(ids)))}


def _earlier(session: Session, known: Iterable[Rerate]) -> dict[str, Rerate]:
    """All re-ratings of the same versions: what a later one reverses."""
    versions = {each.from_version for each in known}
    query = select(Rerate).where(Rerate.from_version.in_(versions))
    return {each.id: each for each in session.scalars(query)}


def _days(
    session: Session, book: PriceBook, period: InstrumentedAttribute[str], ids: set[str]
) -> dict[DayKey, list[Day]]:
    use = DailyUsage
    key = (
        *(use.bill_period_id, use.usage_period_id, use.project_id, use.model, use.adapter),
        *(use.price_version, use.kind),
    )
    sums = [column for _, count, amount in SUMS for column in (count, amount)]
    rows = session.execute(
        select(*key, use.at, use.key_id, *sums)
        .where(period.in_(ids), use.kind != ADJUSTMENT)
        .order_by(use.at, use.key_id)
    )
    found: dict[DayKey, list[Day]] = defaultdict(list)
    labelled = _labelled(session, period, ids)
    for row in rows:
        whole = Day(row[7], row[8], tuple(map(int, row[9:])))
        some = labelled.get((*row[:7], whole.at, whole.key_id), [])
        version = book.by_id.get(row[5])
        for day in (*_rest(whole, some), *some):
            if version is not None and is_divided(day.sums):
                day = replace(day, sums=priced_sums(day.sums, version.rates))
            found[row[:7]].append(day)
    return found


def _rest(day: Day, labelled: Sequence[Day]) -> list[Day]:
    """What of a day has no labels."""
    if not labelled:
        return [day]
    parts = zip(day.sums, *(each.sums for each in labelled), strict=True)
    left = tuple(whole - sum(own) for whole, *own in parts)
    return [Day(day.at, day.key_id, left)] if any(left) else []


def _labelled(
    session: Session, period: InstrumentedAttribute[str], ids: set[str]
) -> dict[tuple[object, ...], list[Day]]:
    """Days of usage that has labels, by the key, the day and the API key of the whole day."""
    use = HourlyLabelUsage
    key = (
        *(use.bill_period_id, use.usage_period_id, use.project_id, use.model, use.adapter),
        *(use.price_version, use.kind, use.key_id, use.at, use.labels),
    )
    sums = [_of_labels(each) for _, count, amount in SUMS for each in (count, amount)]
    rows = session.execute(select(*key, *sums).where(_of_labels(period).in_(ids)))
    found: dict[tuple[object, ...], dict[str, list[int]]] = defaultdict(dict)
    for row in rows:
        where = (*row[:7], row[8].replace(hour=0), row[7])
        own = found[where].setdefault(row[9], [0] * len(sums))
        for place, value in enumerate(row[10:]):
            own[place] += int(value)
    return {
        where: [
            Day(cast(datetime, where[7]), str(where[8]), tuple(values), text)
            for text, values in sorted(some.items())
        ]
        for where, some in found.items()
    }


def _of_labels(expression: Any) -> Any:
    """An expression of daily usage as one of the usage by labels, which has the same columns."""
    whole, labelled = DailyUsage.__table__, HourlyLabelUsage.__table__

    def _column(element: Any, **_: Any) -> Any:
        return labelled.c[element.name] if getattr(element, "table", None) is whole else None

    plain = coercions.expect(roles.ExpressionElementRole, expression)
    return visitors.replacement_traverse(plain, {}, _column)
