"""A deployment with a month of usage for the pages benchmark, made by PostgreSQL itself.

Events, charges of the last day (pages join them for the newest requests only), and the roll-ups
that the events sum to.
"""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import text
from sqlalchemy.orm import Session

from billing.accounts.accounts import ensure_accounts
from billing.columns import AMOUNT_COLUMNS, QUANTITY_COLUMNS
from billing.usage import origin_rollups, partitions
from billing.usage.rollups import TENANT_DAILY_SUMS
from billing.usage.tables import FIRST_COLUMNS, FIRST_TOKEN_MS, SPEED_COLUMNS, TOKENS_A_SECOND
from core.clock import Clock
from core.database import Database
from core.tenants import organisations

DAYS = 30
TENANTS = 100  # the first has three tenths of everything
Progress = Callable[[str], None]
_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_MILLIS = " || ".join(
    f"substr('{_ALPHABET}', (ms >> {shift} & 31)::int + 1, 1)" for shift in range(45, -1, -5)
)
# While the rows come, their indexes are away: built once at the end they take a tenth of the time.
_BEFORE = (
    "drop index ix_usage_events_batch",
    "drop index ix_usage_events_tenant_occurred",
    "drop index ix_usage_events_wrong",
    "alter table usage_events drop constraint pk_usage_events",
)
_AFTER = (
    "alter table usage_events add constraint pk_usage_events primary key (request_id)",
    "create index ix_usage_events_batch on usage_events (batch_id)",
    "create index ix_usage_events_tenant_occurred on usage_events (tenant_id, occurred_at)",
    "create index ix_usage_events_wrong on usage_events (tenant_id, occurred_at) where status >= 400",
)
_EVENTS = f"""
insert into usage_events (request_id, batch_id, tenant_id, project_id, key_id, kind, route, model,
    adapter, price_version, occurred_at, finished_at, input_tokens, cached_tokens, output_tokens,
    waived_tokens, finish_reason, status, settled_by, quantity, streamed, first_token_ms,
    duration_ms, queue_ms, engine_id, member_id, reordered_cached_tokens, end_user)
select 'req_' || {_MILLIS} || substr(md5(n::text), 1, 16), 1, t.id, t.id || '_p' || h % 2,
    t.id || '_k' || h % 6, 'generation', '/v1/chat/completions', 'model-' || (h >> 4) % 4,
    case when (h >> 4) % 4 = 0 then 'adapter-' || (h >> 8) % 3 end, 'price_bench', at, at,
    500 + h % 1000, (h >> 3) % 400, (h >> 5) % 300, h % 3, 'stop',
    case when h % 500 = 0 then 503 when h % 90 = 0 then 400 else 200 end, 'gateway', 1, true,
    40 + (h >> 7) % 900, 1000 + (h >> 9) % 9000, case when h % 20 = 0 then 50 else 0 end,
    'gpu-' || h % 4,
    case when h % 3 = 0 then t.id || '_m' || h % 6 end, h % 50,
    case when h % 7 > 0 then 'user-' || (h >> 6) % 2000 end
from (select n, at, (extract(epoch from at) * 1000)::bigint as ms, h,
        case when h % 10 < 3 then 0 else 1 + (h >> 11) % (:tenants - 1) end as place
    from (select n, cast(:start as timestamptz) + n * (:seconds * interval '1 second') as at,
            abs(hashint8(n + :seed)::bigint) as h
        from generate_series(0, cast(:events as bigint) - 1) n) moments) numbered
    join bench_tenants t on t.place = numbered.place
"""
_COUNTED = ("input_tokens", "cached_tokens", "output_tokens", "waived_tokens")
_CHARGED = {
    **dict.fromkeys((*QUANTITY_COLUMNS, *AMOUNT_COLUMNS), "0"),
    **{name: name for name in _COUNTED},
    "requests": "1",
    "output_amount": "600000",
    "amount": "600000",
}
_CHARGES = f"""
insert into charges (request_id, tenant_id, price_version, currency, usage_period_id,
    bill_period_id, transaction_id, {", ".join(_CHARGED)})
select request_id, tenant_id, price_version, 'USD', 'per', 'per', 'txn_bench',
    {", ".join(_CHARGED.values())}
from usage_events where occurred_at >= :since
"""
_INPUT, _CACHED, _OUTPUT = 150_000, 75_000, 600_000  # picounits a token
_AMOUNTS = {
    "input_amount": f"sum((input_tokens - cached_tokens)::bigint * {_INPUT})",
    "cached_amount": f"sum(cached_tokens::bigint * {_CACHED})",
    "output_amount": f"sum(output_tokens::bigint * {_OUTPUT})",
    "amount": f"sum((input_tokens - cached_tokens)::bigint * {_INPUT}"
    f" + cached_tokens::bigint * {_CACHED} + output_tokens::bigint * {_OUTPUT})",
}


def fill(database: Database, clock: Clock, events: int, progress: Progress) -> str:
    """Returns the id of the largest tenant."""
    now = clock.now()
    start = datetime(now.year, now.month, now.day, tzinfo=UTC) - timedelta(days=DAYS - 1)
    with database.transaction() as session:
        partitions.ensure_ahead(session, start)
        largest = _tenants(session, clock)
        _run(session, *_BEFORE)
    span = (now - start).total_seconds()
    a_day = max(1, events // DAYS)
    for day in range(DAYS):
        values: dict[str, Any] = {"events": a_day, "tenants": TENANTS, "seed": day * a_day}
        values["start"] = start + timedelta(seconds=span / DAYS * day)
        values["seconds"] = span / DAYS / a_day
        with database.transaction() as session:
            _run(session, "set local synchronous_commit = off")
            session.execute(text(_EVENTS), values)
        progress(f"day {day + 1} of {DAYS}")
    for step in (*_AFTER, *_roll_ups()):
        progress(step[:60])
        with database.transaction() as session:
            _run(session, *_ROOM, step)
    progress("charges of the last day, and decisions")
    with database.transaction() as session:
        session.execute(text(_CHARGES), {"since": now - timedelta(days=1)})
        session.execute(text(_DECISIONS), {"events": max(1000, events // 10), "now": now})
        session.execute(text(_DECIDED))
    return largest


_ROOM = ("set local work_mem = '512MB'", "set local maintenance_work_mem = '1GB'",
         "set local statement_timeout = 0", "set local synchronous_commit = off")  # fmt: skip
_DECISIONS = """
insert into moderation_decisions (request_id, tenant_id, project_id, key_id, at, direction, action,
    policy_version, text_sha256, categories, scores, spans, view, unscanned)
select 'req_bench' || n, t.id, t.id || '_p0', t.id || '_k0',
    cast(:now as timestamptz) - n % 2592000 * interval '1 second', 'input',
    case when n % 10 > 0 then 'allow' else (array['annotate', 'redact', 'block'])[n / 10 % 3 + 1] end,
    'pol_bench', repeat('0', 64),
    (array['["hate"]', '["violence"]', '["prompt_attack"]'])[n % 3 + 1]::jsonb,
    '{"hate": 0.9}'::jsonb, '[]'::jsonb, 'plain', false
from generate_series(1, cast(:events as bigint)) n
    join bench_tenants t on t.place = case when n / 10 % 10 < 3 then 0 else n / 10 % 100 end
"""
_DECIDED = """
insert into moderation_daily (tenant_id, at, project_id, action, categories, decisions)
select tenant_id, date_trunc('day', at), project_id, action, categories ->> 0, count(*)
from moderation_decisions where action <> 'allow' group by 1, 2, 3, 4, 5
"""


def _tenants(session: Session, clock: Clock) -> str:
    rows: list[dict[str, Any]] = []
    for place in range(TENANTS):
        made = organisations.create_tenant(session, clock, name=f"tenant-{place}")
        rows.append({"place": place, "id": made.id})
    ensure_accounts(session, [row["id"] for row in rows], clock.now())
    session.execute(text("create table bench_tenants (place bigint primary key, id text)"))
    session.execute(text("insert into bench_tenants values (:place, :id)"), rows)
    return str(rows[0]["id"])


def _roll_ups() -> list[str]:
    """The hours from the events, the days and the other roll-ups from the hours."""
    keys = "tenant_id, at, project_id, key_id, member_id, model, adapter, kind, price_version, currency"
    sums = _sums()
    names = ", ".join(sums)
    added = ", ".join(f"sum({name})" for name in sums)
    hourly = (
        f"insert into service_hourly ({keys}, {names}) select tenant_id,"
        " date_trunc('hour', occurred_at), project_id, key_id, coalesce(member_id, ''), model,"
        f" coalesce(adapter, ''), kind, price_version, 'USD', {', '.join(sums.values())}"
        " from usage_events group by 1, 2, 3, 4, 5, 6, 7, 8, 9"
    )
    daily = (
        f"insert into service_daily ({keys}, {names}) select tenant_id, date_trunc('day', at),"
        f" project_id, key_id, member_id, model, adapter, kind, price_version, currency, {added}"
        " from service_hourly group by 1, 2, 3, 4, 5, 6, 7, 8, 9, 10"
    )
    by_tenant = (
        "insert into usage_tenant_daily (at, tenant_id, model, currency,"
        f" {', '.join(TENANT_DAILY_SUMS)})"
        " select at, tenant_id, model, currency,"
        f" {', '.join(f'sum({name})' for name in TENANT_DAILY_SUMS)}"
        " from usage_daily group by 1, 2, 3, 4"
    )
    usage = [_usage(table, source) for table, source in _USAGE]
    return [hourly, daily, *usage, by_tenant, *(_by_origin(name) for name in origin_rollups.TABLES)]


def _by_origin(name: str) -> str:
    sums = {key: each for key, each in _sums().items() if key in origin_rollups.SUMS}
    return (
        f"insert into {origin_rollups.TABLES[name].__tablename__} (tenant_id, at, project_id, {name},"
        f" {', '.join(sums)}) select tenant_id, date_trunc('day', occurred_at), project_id,"
        f" coalesce({name}, ''), {', '.join(sums.values())} from usage_events group by 1, 2, 3, 4"
    )


_USAGE = (("usage_hourly", "service_hourly"), ("usage_daily", "service_daily"))


def _usage(table: str, source: str) -> str:
    names = ", ".join((*QUANTITY_COLUMNS, *AMOUNT_COLUMNS))
    added = ", ".join(f"sum({name})" for name in (*QUANTITY_COLUMNS, *AMOUNT_COLUMNS))
    return (
        f"insert into {table} (tenant_id, at, project_id, key_id, model, adapter, kind, price_version,"
        f" usage_period_id, bill_period_id, currency, {names}) select tenant_id, at, project_id,"
        f" key_id, model, adapter, kind, price_version, 'per', 'per', currency, {added} from {source}"
        " group by 1, 2, 3, 4, 5, 6, 7, 8, 11"
    )


def _sums() -> dict[str, str]:
    found = dict.fromkeys((*QUANTITY_COLUMNS, *AMOUNT_COLUMNS), "0") | _AMOUNTS
    found["requests"] = found["answers"] = "count(*)"
    plain = ("input_tokens", "cached_tokens", "output_tokens", "waived_tokens", "queue_ms")
    for name in (*plain, "reordered_cached_tokens"):
        found[name] = f"sum({name})"
    found["refused"] = "count(*) filter (where status between 400 and 499)"
    found["failed"] = "count(*) filter (where status >= 500)"
    found |= _classes(FIRST_COLUMNS, FIRST_TOKEN_MS, "first_token_ms", "1")
    speed = "nullif(duration_ms - first_token_ms, 0)"
    return found | _classes(SPEED_COLUMNS, TOKENS_A_SECOND, "1000 * output_tokens", speed)


def _classes(
    columns: tuple[str, ...], bounds: tuple[int, ...], value: str, divisor: str
) -> dict[str, str]:
    edges = [-(10**9), *bounds, 10**9]
    return {
        name: f"count(*) filter (where {value} / {divisor} > {low} and {value} / {divisor} <= {high})"
        for name, low, high in zip(columns, edges[:-1], edges[1:], strict=True)
    }


def _run(session: Session, *statements: str) -> None:
    for statement in statements:
        session.execute(text(statement))
