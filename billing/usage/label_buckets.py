"""Usage and costs by labels, in the buckets of `usage_buckets`.

What has no label of a name is the whole less what has one, so that all groupings have the same totals,
corrections included. Values beyond the largest are one row, `other`.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from billing.columns import AMOUNT_COLUMNS, QUANTITY_COLUMNS
from billing.usage import label_sets
from billing.usage.tables import Charge, HourlyLabelUsage, UsageEventRow
from billing.usage.usage_buckets import (
    Bucket,
    BucketPage,
    BucketQuery,
    BucketRow,
    Width,
    floor_to,
    usage_buckets,
)
from core import labels
from core.database import epoch_bucket
from core.tenants.scope import TenantScope

PREFIX = "label:"  # of a dimension: `label:team`
MOST_VALUES = 100  # of a label that are told apart
_ROLLED_UP = frozenset(("project_id", "key_id", "model", "adapter", "kind", "currency"))
_SUMS = (*QUANTITY_COLUMNS, *AMOUNT_COLUMNS)
_TABLE: Any = HourlyLabelUsage
_Key = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Labelled:
    """Sums of one bucket by the values of the dimensions and by set of labels."""

    start: datetime
    sums: Mapping[tuple[_Key, str], Mapping[str, int]]


def buckets_by_label(
    session: Session, scope: TenantScope, query: BucketQuery, wanted: tuple[str, ...] = ()
) -> BucketPage:
    """As `usage_buckets`, where `group_by` may have `label:<name>`. `wanted`: only usage with these
    labels, such as `team=search`; of several values of one name any."""
    names = tuple(each for each in query.group_by if each.startswith(PREFIX))
    if not names and not wanted:
        return usage_buckets(session, scope, query)
    plain = replace(query, group_by=tuple(each for each in query.group_by if each not in names))
    whole = usage_buckets(session, scope, plain)
    texts = label_sets.matching(session, scope, wanted) if wanted else None
    found = _read(session, scope, plain, whole, texts)
    keys = tuple(name.removeprefix(PREFIX) for name in names)
    shown = [_largest(found, key) for key in keys]
    buckets = []
    for bucket, labelled in zip(whole.buckets, found, strict=True):
        left = {} if wanted else {_key_of(row): row for row in bucket.rows}
        rows = _rows(plain, left, labelled, keys, shown)
        buckets.append(Bucket(bucket.start, bucket.end, rows))
    return BucketPage(buckets, whole.next_start)


def _read(
    session: Session,
    scope: TenantScope,
    plain: BucketQuery,
    whole: BucketPage,
    texts: tuple[str, ...] | None,
) -> list[_Labelled]:
    if texts == ():
        return [_Labelled(each.start, {}) for each in whole.buckets]
    known = _ROLLED_UP.issuperset(plain.group_by) and not plain.member_ids
    if not known or plain.needs_events or plain.width is Width.MINUTE or plain.is_zoned:
        return _from_events(session, scope, plain, texts)
    return _from_rollup(session, scope, plain, whole, texts)


def _from_events(
    session: Session, scope: TenantScope, plain: BucketQuery, texts: tuple[str, ...] | None
) -> list[_Labelled]:
    column = UsageEventRow.labels
    conditions = [*plain.conditions, column.is_not(None) if texts is None else column.in_(texts)]
    if plain.width is not Width.MINUTE and not plain.needs_events:
        # The whole is of the roll-ups, which have what is rated.
        conditions.append(Charge.transaction_id.is_not(None))
    query = replace(
        plain, group_by=(*plain.group_by, "labels"), conditions=tuple(conditions), charges=True
    )
    page = usage_buckets(session, scope, query)
    found = []
    for bucket in page.buckets:
        sums = {
            (_key_of(row, "labels"), str(row.group["labels"])): row.counts | row.amounts
            for row in bucket.rows
        }
        found.append(_Labelled(bucket.start, sums))
    return found


def _from_rollup(
    session: Session,
    scope: TenantScope,
    plain: BucketQuery,
    whole: BucketPage,
    texts: tuple[str, ...] | None,
) -> list[_Labelled]:
    seconds = plain.width.seconds
    bucket = epoch_bucket(_TABLE.at, session.get_bind().dialect.name, seconds)
    columns = [getattr(_TABLE, name) for name in plain.group_by]
    group = [bucket, *columns, _TABLE.labels]
    start = floor_to(plain.start, plain.width)
    end = start + timedelta(seconds=seconds) * len(whole.buckets)
    where = [
        *(_TABLE.tenant_id == scope.tenant_id, _TABLE.at >= start),
        _TABLE.at < min(end, plain.end),
    ]
    projects = (scope.project_id,) if scope.project_id else plain.project_ids
    for column, values in (
        (_TABLE.project_id, projects),
        (_TABLE.key_id, plain.key_ids),
        (_TABLE.model, plain.models),
        (_TABLE.kind, plain.kinds),
        (_TABLE.adapter, plain.adapters),
        (_TABLE.labels, texts or ()),
    ):
        if values:
            where.append(column.in_(values))
    sums = [func.sum(getattr(_TABLE, name)) for name in _SUMS]
    by_start: dict[datetime, dict[tuple[_Key, str], dict[str, int]]] = {}
    for row in session.execute(select(*group, *sums).where(*where).group_by(*group)):
        at = datetime.fromtimestamp(int(row[0]), UTC)
        key = tuple(str(value or "") for value in row[1 : 1 + len(columns)])
        counted = [int(value) for value in row[2 + len(columns) :]]
        own = by_start.setdefault(at, {})
        own[key, row[1 + len(columns)]] = dict(zip(_SUMS, counted, strict=True))
    return [_Labelled(each.start, by_start.get(each.start, {})) for each in whole.buckets]


def _rows(
    plain: BucketQuery,
    left: dict[_Key, BucketRow],
    labelled: _Labelled,
    keys: tuple[str, ...],
    shown: list[frozenset[str]],
) -> list[BucketRow]:
    """The rows of one bucket, those without labels last. `left` has the whole sums, from which what is
    labelled is taken; empty where only labelled usage is wanted."""
    grouped: dict[tuple[_Key, tuple[str, ...]], Counter[str]] = {}
    rest = {key: Counter(row.counts | row.amounts) for key, row in left.items()}
    for (key, text), sums in labelled.sums.items():
        given = labels.read(text)
        values = tuple(
            _shown(given.get(name, ""), some) for name, some in zip(keys, shown, strict=True)
        )
        if left and not any(values):
            continue  # it stays in the rest
        grouped.setdefault((key, values), Counter()).update(sums)
        if key in rest:
            rest[key].subtract(sums)
    rows = [
        _row(dict(zip(plain.group_by, key, strict=True)), keys, values, sums)
        for (key, values), sums in sorted(grouped.items())
    ]
    for key, sums in rest.items():
        if any(sums.values()):
            rows.append(_row(left[key].group, keys, ("",) * len(keys), sums))
    return rows


def _row(
    group: Mapping[str, str | None],
    keys: tuple[str, ...],
    values: tuple[str, ...],
    sums: Mapping[str, int],
) -> BucketRow:
    named = {f"{PREFIX}{key}": value or None for key, value in zip(keys, values, strict=True)}
    return BucketRow(
        {**group, **named},
        {name: sums.get(name, 0) for name in QUANTITY_COLUMNS},
        {name: sums.get(name, 0) for name in AMOUNT_COLUMNS},
    )


def _largest(found: list[_Labelled], key: str) -> frozenset[str]:
    """The values with the highest amounts, then the most tokens."""
    sizes: dict[str, tuple[int, int]] = {}
    for bucket in found:
        for (_, text), sums in bucket.sums.items():
            value = labels.read(text).get(key)
            if value is not None:
                amount, tokens = sizes.get(value, (0, 0))
                size = sums["input_tokens"] + sums["output_tokens"]
                sizes[value] = amount + sums["amount"], tokens + size
    ranked = sorted(sizes, key=lambda value: (*(-part for part in sizes[value]), value))
    return frozenset(ranked[:MOST_VALUES])


def _shown(value: str, some: frozenset[str]) -> str:
    return value if not value or value in some else labels.OTHER


def _key_of(row: BucketRow, *without: str) -> _Key:
    return tuple(str(value or "") for name, value in row.group.items() if name not in without)
