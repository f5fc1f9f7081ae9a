"""Usage for the billing benchmark: events as the gateway makes them, and a rated history made by the
database itself, because millions of rows would take longer to send than to measure.
"""

import random
from collections.abc import Callable
from datetime import datetime, timedelta

from sqlalchemy import text

from billing.accounts.accounts import Periods, ensure_accounts, lock_accounts
from billing.columns import PLAIN_QUANTITIES
from billing.usage import partitions, rollups
from core.database import Database
from core.events import UsageEvent, UsageKind
from core.ids import REQUEST, new_id

DAYS = 20  # of history
Progress = Callable[[int, int], None]  # events there, events in all


def make_events(count: int, tenants: int, version: str, now: datetime) -> list[UsageEvent]:
    chance = random.Random(7)
    return [
        UsageEvent(
            request_id=new_id(REQUEST),
            tenant_id=f"org_{chance.randrange(tenants)}",
            project_id="proj_1",
            key_id=f"key_{chance.randrange(3)}",
            kind=UsageKind.GENERATION,
            route="/v1/chat/completions",
            model="demo",
            adapter="lora" if chance.random() < 0.2 else None,
            adapter_digest=None,
            price_version=version,
            occurred_at=now - timedelta(seconds=chance.randrange(3600)),
            finished_at=now,
            input_tokens=(prompt := chance.randrange(50, 2000)),
            cached_tokens=chance.randrange(prompt),
            output_tokens=chance.randrange(500),
            waived_tokens=chance.randrange(3),
            finish_reason="stop",
            status=200,
            streamed=True,
            duration_ms=900,
        )
        for _ in range(count)
    ]


def fill_history(
    database: Database,
    version: str,
    start: datetime,
    tenants: int,
    events: int,
    progress: Progress,
    *,
    days: int = DAYS,
    raw: bool = True,
) -> None:
    """So many rated events over these days of all tenants, with charges and roll-ups, and vacuumed
    as a table that grew for that long is. Ids are of their time, so they lie in the month's partition.
    Without `raw`, events and charges are as if retention had dropped them: only roll-ups stay.
    """
    with database.transaction() as session:
        partitions.ensure_ahead(session, start)
        names = [f"org_{n}" for n in range(tenants)]
        ensure_accounts(session, names, start)
        accounts = lock_accounts(session, names)
        periods = Periods(session)
        periods.load(names, start - timedelta(days=31))
        for name in names:
            periods.around(accounts[name], start + timedelta(days=1))
    a_day = max(1, events // days)
    for day in range(days):
        with database.transaction() as session:
            values = {
                "events": a_day,
                "tenants": tenants,
                "version": version,
                "start": start + timedelta(days=day),
                "seconds": 86_400 / a_day,
            }
            session.execute(text("set local work_mem = '256MB'"))
            session.execute(text("set local statement_timeout = 0"))
            values["batch"] = session.execute(text(_BATCH), values).scalar_one()
            if raw:
                session.execute(text(_EVENTS), values)
                session.execute(text(_CHARGES), values)
            session.execute(text(_HOURLY.format(rows=_KEPT if raw else _MADE)), values)
            session.execute(text(_DAILY), values)
            session.execute(text(_TENANT_DAYS), {"day": values["start"]})
        progress((day + 1) * a_day, events)
    tidy(database)


def tidy(database: Database) -> None:
    """What autovacuum and the checkpointer do over days, now: else they work beside what is timed."""
    with database.db_engine.connect() as connection:
        plain = connection.execution_options(isolation_level="AUTOCOMMIT")
        plain.execute(text("set statement_timeout = 0"))
        plain.execute(text("vacuum (analyze)"))
        plain.execute(text("checkpoint"))


_BATCH = """
insert into usage_batches (recorded_at, events, rated_at)
values (:start, :events, :start) returning id
"""
_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_MILLIS = " || ".join(
    f"substr('{_ALPHABET}', (ms >> {shift} & 31)::int + 1, 1)" for shift in range(45, -1, -5)
)
_COLUMNS = (
    "request_id, batch_id, tenant_id, project_id, key_id, kind, route, model, price_version,"
    " occurred_at, finished_at, input_tokens, cached_tokens, output_tokens, waived_tokens,"
    " finish_reason, status, settled_by, quantity, streamed, duration_ms, queue_ms, engine_id,"
    " reordered_cached_tokens"
)
_MADE = f"""
select 'req_' || {_MILLIS} || substr(md5(n::text), 1, 16) as request_id, :batch as batch_id,
    'org_' || n % :tenants as tenant_id, 'proj_1' as project_id, 'key_' || n % 3 as key_id,
    'generation' as kind, '/v1/chat/completions' as route, 'demo' as model,
    :version as price_version, at as occurred_at, at as finished_at, 500 + n % 1000 as input_tokens,
    n % 400 as cached_tokens, n % 300 as output_tokens, n % 3 as waived_tokens,
    'stop' as finish_reason, 200 as status, 'gateway' as settled_by, 1 as quantity, true as streamed,
    900 as duration_ms, 0 as queue_ms, 'engine0' as engine_id, 0 as reordered_cached_tokens
from (select n, at, (extract(epoch from at) * 1000)::bigint as ms from
    (select n, cast(:start as timestamptz) + n * (:seconds * interval '1 second') as at
     from generate_series(0, cast(:events as bigint) - 1) n) moments) numbered
"""
_EVENTS = f"insert into usage_events ({_COLUMNS}) {_MADE}"
_INPUT = "(e.input_tokens - e.cached_tokens) * 150000::bigint"
_CACHED = "e.cached_tokens * 75000::bigint"
_OUTPUT = "e.output_tokens * 600000::bigint"
_CHARGED = {
    "requests": "1",
    **{name: f"e.{name}" for name in PLAIN_QUANTITIES if name.endswith("_tokens")},
    "input_amount": _INPUT,
    "cached_amount": _CACHED,
    "output_amount": _OUTPUT,
    "amount": f"{_INPUT} + {_CACHED} + {_OUTPUT}",
}
_PERIOD = """ join billing_periods p
    on p.tenant_id = e.tenant_id and e.occurred_at >= p.starts_at and e.occurred_at < p.ends_at"""
_CHARGES = (
    "insert into charges (request_id, tenant_id, price_version, currency, usage_period_id,"
    f" bill_period_id, transaction_id, {', '.join(rollups.SUMS)})"
    " select e.request_id, e.tenant_id, e.price_version, 'USD', p.id, p.id, 'txn_' || e.tenant_id, "
    + ", ".join(_CHARGED.get(name, "0") for name in rollups.SUMS)
    + f" from usage_events e {_PERIOD} where e.batch_id = :batch order by e.request_id"
)
_KEY = "project_id, key_id, model, adapter, kind, price_version, usage_period_id, bill_period_id"
_HOURLY = (
    f"insert into usage_hourly (tenant_id, at, {_KEY}, currency, {', '.join(rollups.SUMS)})"
    " select e.tenant_id, date_trunc('hour', e.occurred_at), e.project_id, e.key_id, e.model, '',"
    " e.kind, e.price_version, p.id, p.id, 'USD', "
    + ", ".join(f"sum({_CHARGED.get(name, '0')})" for name in rollups.SUMS)
    + f" from ({{rows}}) e {_PERIOD} group by 1, 2, 3, 4, 5, 7, 8, 9"
)
_KEPT = "select * from usage_events where batch_id = :batch"
_DAILY = (
    f"insert into usage_daily (tenant_id, at, {_KEY}, currency, {', '.join(rollups.SUMS)})"
    f" select tenant_id, date_trunc('day', at), {_KEY}, currency, "
    + ", ".join(f"sum({name})" for name in rollups.SUMS)
    + f" from usage_hourly where date_trunc('day', at) = date_trunc('day', cast(:start as timestamptz))"
    f" group by tenant_id, date_trunc('day', at), {_KEY}, currency"
)
_TENANT_DAY_SUMS = ", ".join(f"sum({name})" for name in rollups.TENANT_DAILY_SUMS)
_TENANT_DAYS = (
    f"insert into usage_tenant_daily ({', '.join(rollups.TENANT_DAILY_KEY)},"
    f" {', '.join(rollups.TENANT_DAILY_SUMS)})"
    f" select {', '.join(rollups.TENANT_DAILY_KEY)}, {_TENANT_DAY_SUMS} from usage_daily"
    " where at = date_trunc('day', cast(:day as timestamptz)) group by 1, 2, 3, 4"
)
