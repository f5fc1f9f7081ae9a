"""The hourly sums on ClickHouse, and sums by bucket from them or from the rows."""

from typing import Any

from billing.archive.columns import HOURS, ROWS
from billing.archive.expressions import clickhouse_sql
from billing.columns import AMOUNT_COLUMNS, QUANTITY_COLUMNS
from billing.usage.raw_rows import Grouping, Wanted

_COUNTED = ("input_tokens", "cached_tokens", "output_tokens", "waived_tokens")
_CHARGED = tuple(name for name in QUANTITY_COLUMNS if name not in ("requests", *_COUNTED))
# As rating counts requests: not those that failed at our end, and not other kinds of usage.
_REQUESTS = "if(e.kind in ('gpu_seconds', 'moderation') or e.status >= 500, 0, e.quantity)"
_TEXTS = ("tenant_id", "project_id", "key_id", "model", "kind", "engine_id")
_NULLABLE = ("adapter", "member_id")
# Of the charge; null where there is none.
_OF_CHARGE = ("price_version", "usage_period_id", "bill_period_id", "currency")
_KEY = (*_TEXTS, *_NULLABLE, *_OF_CHARGE)
_SUMS = (*QUANTITY_COLUMNS, *AMOUNT_COLUMNS)
HOUR_COLUMNS = ("hour", *_KEY, "batch", "tokens", *_SUMS)
_IN_ROWS_ONLY = ("end_user", "labels")
_HOUR = 3600


def hour_definitions() -> list[str]:
    return [
        "hour DateTime('UTC')",
        *(f"{name} String" for name in _TEXTS),
        *(f"{name} Nullable(String)" for name in (*_NULLABLE, *_OF_CHARGE)),
        "batch Bool",
        "tokens Nullable(Bool)",
        *(f"{name} Int64" for name in QUANTITY_COLUMNS),
        *(f"{name} Decimal(38, 0)" for name in AMOUNT_COLUMNS),
    ]


def hours_query(day: str) -> str:
    """The hours of a day from its rows. `day` is an ISO date."""
    key = [f"e.{name}" for name in (*_TEXTS, *_NULLABLE)]
    key += [f"e.charge_{name}" for name in _OF_CHARGE]
    key += [
        "e.batch_job is not null",
        "toBool(e.charge_gpu_seconds + e.charge_moderation_calls = 0)",
    ]
    hour = "toStartOfHour(e.occurred_at)"
    shown = ", ".join([f"toDate('{day}')", f"toDateTime({hour}, 'UTC')", *key, *_row_sums()])
    return (
        f"select {shown} from {ROWS} e final where e.day = '{day}'"
        f" group by {', '.join([hour, *key])}"
    )


def bucket_query(
    where: str, parameters: dict[str, Any], wanted: Wanted, grouping: Grouping
) -> tuple[str, list[str]]:
    """The query and the names of its columns. Whole hours come from the hourly sums."""
    whole = not any(int(at.timestamp()) % _HOUR for at in (wanted.start, wanted.end))
    from_rows = (
        bool(grouping.width_s % _HOUR or grouping.conditions or not whole)
        or bool({*_IN_ROWS_ONLY} & {*grouping.by, *(name for name, _ in grouping.matching)})
        or any(at.microsecond for at in (wanted.start, wanted.end))
    )
    for number, (name, values) in enumerate(grouping.matching):
        column = f"e.{_checked(name)}"
        if "" in values:  # none
            column = f"coalesce({column}, '')"
        where += f" and {column} in {{m{number}:Array(String)}}"
        parameters[f"m{number}"] = list(values)
    batch = "e.batch_job is not null" if from_rows else "e.batch"
    if grouping.batch is not None:
        where += f" and {'' if grouping.batch else 'not '}({batch})"
    where += "".join(f" and ({clickhouse_sql(each)})" for each in grouping.conditions)
    at = "e.occurred_at" if from_rows else "e.hour"
    if not from_rows:
        where = where.replace("e.occurred_at", "e.hour")
    width = int(grouping.width_s)
    bucket = f"intDiv(toUnixTimestamp({at}), {width}) * {width}"
    by = [_group(name, batch, from_rows=from_rows) for name in grouping.by]
    sums = _row_sums() if from_rows else [f"sum(e.{name})" for name in _SUMS]
    keys = ", ".join([bucket, *by])
    source = f"{ROWS} e final" if from_rows else f"{HOURS} e"
    query = (
        f"select {', '.join([bucket, *by, *sums])} from {source} where {where}"
        f" group by {keys} order by {keys}"
    )
    return query, ["bucket", *grouping.by, *_SUMS]


def _row_sums() -> list[str]:
    """Counts are the event's, because one without a charge counts too."""
    quantities = {
        **{name: f"sum(e.{name})" for name in _COUNTED},
        **{name: f"sum(coalesce(e.charge_{name}, 0))" for name in _CHARGED},
        "requests": f"sum({_REQUESTS})",
    }
    return [
        *(quantities[name] for name in QUANTITY_COLUMNS),
        *(f"sum(coalesce(e.charge_{name}, toDecimal128(0, 0)))" for name in AMOUNT_COLUMNS),
    ]


def _group(name: str, batch: str, *, from_rows: bool) -> str:
    if name == "batch":
        return f"toBool({batch})"
    if name == "currency":
        return "e.charge_currency" if from_rows else "e.currency"
    return f"e.{_checked(name)}"


def _checked(name: str) -> str:
    if name not in (*_KEY, *_IN_ROWS_ONLY):
        raise ValueError(f"{name!r} is not stored")
    return name
