"""Usage for the billing benchmark: events as the gateway makes them, and a rated history made by the
database itself, because millions of rows would take longer to send than to measure.
"""

import random
from collections.abc import Callable
from datetime import datetime, timedelta

from sqlalchemy import text

from billing import partitions, rollups
from billing.accounts import Periods, ensure_accounts, lock_accounts
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
            if not raw:
                for statement in _PASSING:
                    session.execute(text(statement))
            batch = session.execute(text(_BATCH), values).scalar_one()
            session.execute(text("set local work_mem = '256MB'"))
            session.execute(text("set local statement_timeout = 0"))
            session.execute(text(_EVENTS), {**values, "batch": batch})
            session.execute(text(_CHARGES), {"batch": batch})
            for table, unit in (("usage_hourly", "hour"), ("usage_daily", "day")):
                roll_up = _ROLL_UP.format(table=table, unit=unit)
                session.execute(text(roll_up), {"batch": batch})
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


# Tables of this transaction, which the names mean while it lasts.
_PASSING = [
    f"create temporary table {table} (like {table} including defaults) on commit drop"
    for table in ("usage_events", "charges")
]
_BATCH = """
insert into usage_batches (recorded_at, events, rated_at)
values (:start, :events, :start) returning id
"""
_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_MILLIS = " || ".join(
    f"substr('{_ALPHABET}', (ms >> {shift} & 31)::int + 1, 1)" for shift in range(45, -1, -5)
)
_EVENTS = f"""
insert into usage_events (request_id, batch_id, tenant_id, project_id, key_id, kind, route, model,
    price_version, occurred_at, finished_at, input_tokens, cached_tokens, output_tokens,
    waived_tokens, finish_reason, status, settled_by, quantity, streamed, duration_ms, queue_ms,
    engine_id, reordered_cached_tokens)
select 'req_' || {_MILLIS} || substr(md5(n::text), 1, 16), :batch, 'org_' || n % :tenants,
    'proj_1', 'key_' || n % 3, 'generation', '/v1/chat/completions', 'demo', :version, at, at,
    500 + n % 1000, n % 400, n % 300, n % 3, 'stop', 200, 'gateway', 1, true, 900, 0, 'engine0', 0
from (select n, at, (extract(epoch from at) * 1000)::bigint as ms from
    (select n, cast(:start as timestamptz) + n * (:seconds * interval '1 second') as at
     from generate_series(0, cast(:events as bigint) - 1) n) moments) numbered
"""
_CHARGES = """
insert into charges (request_id, tenant_id, price_version, currency, usage_period_id,
    bill_period_id, transaction_id, requests, input_tokens, cached_tokens, output_tokens,
    waived_tokens, adapter_requests, gpu_seconds, moderation_calls, input_amount, cached_amount,
    output_amount, waived_amount, request_amount, adapter_amount, gpu_amount, moderation_amount,
    amount)
select e.request_id, e.tenant_id, e.price_version, 'USD', p.id, p.id, 'txn_' || e.tenant_id, 1,
    e.input_tokens, e.cached_tokens, e.output_tokens, e.waived_tokens, 0, 0, 0,
    (e.input_tokens - e.cached_tokens) * 150000::bigint, e.cached_tokens * 75000::bigint,
    e.output_tokens * 600000::bigint, 0, 0, 0, 0, 0,
    (e.input_tokens - e.cached_tokens) * 150000::bigint + e.cached_tokens * 75000::bigint
    + e.output_tokens * 600000::bigint
from usage_events e join billing_periods p
    on p.tenant_id = e.tenant_id and e.occurred_at >= p.starts_at and e.occurred_at < p.ends_at
where e.batch_id = :batch
order by e.request_id
"""
_SUMS = ", ".join(f"sum(c.{name})" for name in rollups.SUMS)
_ROLL_UP = (
    "insert into {table} (tenant_id, at, project_id, key_id, model, adapter, kind, price_version,"
    f" usage_period_id, bill_period_id, currency, {', '.join(rollups.SUMS)})"
    " select e.tenant_id, date_trunc('{unit}', e.occurred_at), e.project_id, e.key_id, e.model, '',"
    " e.kind, e.price_version, c.usage_period_id, c.bill_period_id, c.currency, "
    + _SUMS
    + " from usage_events e join charges c using (request_id) where e.batch_id = :batch"
    " group by 1, 2, 3, 4, 5, 7, 8, 9, 10, 11"
)
_TENANT_DAY_SUMS = ", ".join(f"sum({name})" for name in rollups.TENANT_DAILY_SUMS)
_TENANT_DAYS = (
    f"insert into usage_tenant_daily ({', '.join(rollups.TENANT_DAILY_KEY)},"
    f" {', '.join(rollups.TENANT_DAILY_SUMS)})"
    f" select {', '.join(rollups.TENANT_DAILY_KEY)}, {_TENANT_DAY_SUMS} from usage_daily"
    " where at = date_trunc('day', cast(:day as timestamptz)) group by 1, 2, 3, 4"
)
