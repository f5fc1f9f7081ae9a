"""Usage for the billing benchmark: events as the gateway makes them, and a rated history made by the
database itself, because millions of rows would take longer to send than to measure.
"""

import random
from datetime import datetime, timedelta

from sqlalchemy import text

from billing import partitions, rollups
from billing.accounts import Periods, ensure_accounts, lock_accounts
from core.database import Database
from core.events import UsageEvent, UsageKind
from core.ids import REQUEST, new_id


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
    database: Database, version: str, start: datetime, tenants: int, events: int
) -> None:
    """So many rated events over a month of all tenants, with charges, roll-ups and postings."""
    with database.transaction() as session:
        partitions.ensure_ahead(session, start)
        names = [f"org_{n}" for n in range(tenants)]
        ensure_accounts(session, names, start)
        accounts = lock_accounts(session, names)
        periods = Periods(session)
        for name in names:
            periods.around(accounts[name], start + timedelta(days=1))
    step = 500_000
    for first in range(0, events, step):
        with database.transaction() as session:
            values = {
                "first": first,
                "last": min(first + step, events) - 1,
                "tenants": tenants,
                "version": version,
                "start": start,
                "seconds": 20 * 86_400 / events,
            }
            batch = session.execute(text(_BATCH), values).scalar_one()
            session.execute(text(_EVENTS), {**values, "batch": batch})
            session.execute(text(_CHARGES), {"batch": batch})
    with database.transaction() as session:
        for table, unit in (("usage_hourly", "hour"), ("usage_daily", "day")):
            session.execute(text(_ROLL_UP.format(table=table, unit=unit)))
    with database.db_engine.connect() as connection:
        connection.execution_options(isolation_level="AUTOCOMMIT").execute(text("analyze"))


_BATCH = """
insert into usage_batches (recorded_at, events, rated_at)
values (:start, :last - :first + 1, :start) returning id
"""
_EVENTS = """
insert into usage_events (request_id, batch_id, tenant_id, project_id, key_id, kind, route, model,
    price_version, occurred_at, finished_at, input_tokens, cached_tokens, output_tokens,
    waived_tokens, finish_reason, status, settled_by, quantity, streamed, duration_ms, queue_ms,
    engine_id, reordered_cached_tokens)
select 'req_01k' || lpad(n::text, 23, '0'), :batch, 'org_' || n % :tenants, 'proj_1',
    'key_' || n % 3, 'generation', '/v1/chat/completions', 'demo', :version,
    :start + n * (:seconds * interval '1 second'), :start + n * (:seconds * interval '1 second'),
    500 + n % 1000, n % 400, n % 300, n % 3, 'stop', 200, 'gateway', 1, true, 900, 0, '', 0
from generate_series(cast(:first as bigint), cast(:last as bigint)) n
"""
_CHARGES = """
insert into charges (request_id, tenant_id, price_version, currency, usage_period_id,
    bill_period_id, transaction_id, requests, input_tokens, cached_tokens, output_tokens,
    waived_tokens, adapter_requests, gpu_seconds, moderation_calls, input_amount, cached_amount,
    output_amount, waived_amount, request_amount, adapter_amount, gpu_amount, moderation_amount,
    amount)
select e.request_id, e.tenant_id, e.price_version, 'USD', p.id, p.id, 'txn_history', 1,
    e.input_tokens, e.cached_tokens, e.output_tokens, e.waived_tokens, 0, 0, 0,
    (e.input_tokens - e.cached_tokens) * 150000::bigint, e.cached_tokens * 75000::bigint,
    e.output_tokens * 600000::bigint, 0, 0, 0, 0, 0,
    (e.input_tokens - e.cached_tokens) * 150000::bigint + e.cached_tokens * 75000::bigint
    + e.output_tokens * 600000::bigint
from usage_events e join billing_periods p
    on p.tenant_id = e.tenant_id and e.occurred_at >= p.starts_at and e.occurred_at < p.ends_at
where e.batch_id = :batch
"""
_SUMS = ", ".join(f"sum(c.{name})" for name in rollups.SUMS)
_ROLL_UP = (
    "insert into {table} (tenant_id, at, project_id, key_id, model, adapter, kind, price_version,"
    " usage_period_id, bill_period_id, currency, requests, input_tokens, cached_tokens,"
    " output_tokens, waived_tokens, adapter_requests, gpu_seconds, moderation_calls, input_amount,"
    " cached_amount, output_amount, waived_amount, request_amount, adapter_amount, gpu_amount,"
    " moderation_amount, amount)"
    " select e.tenant_id, date_trunc('{unit}', e.occurred_at), e.project_id, e.key_id, e.model, '',"
    " e.kind, e.price_version, c.usage_period_id, c.bill_period_id, c.currency, "
    + _SUMS
    + " from usage_events e join charges c using (request_id) where c.transaction_id = 'txn_history'"
    " group by 1, 2, 3, 4, 5, 7, 8, 9, 10, 11 on conflict do nothing"
)
