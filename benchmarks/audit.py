"""How long the audit of a closed day takes on PostgreSQL: `python -m benchmarks.audit --events 1000000`.

A day of usage with its charges, receipts, roll-ups and ledger postings is made by the database itself,
then closed. The hourly audit reads every row of it before, and its frozen sums afterwards; the full one
reads every row. All must be clean: an audit that finds something is not timed. The disk holds about
1.5 GB for a million events.
"""

import argparse
import sys
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import func, select, text

from benchmarks.billing import START, Bench, bench_on, page_query
from benchmarks.billing_data import fill_history, tidy
from benchmarks.report import figure, progress
from billing.audit import reconcile
from billing.ledger import ledger
from billing.ledger.ledger import AccountKind, Transaction, transfer
from billing.usage.tables import Charge
from core.money import Money

_HOURLY = {"open_only": True, "closed_days": None}  # as the task billing.audit
_RECEIPTS = """
insert into engine_receipts (request_id, engine_id, prompt_tokens, cached_tokens, generated_tokens,
    received_at, busy_us)
select request_id, 'engine0', input_tokens, cached_tokens, output_tokens + waived_tokens, finished_at,
    busy_us
from usage_events
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--tenants", type=int, default=1_000)
    wanted = parser.parse_args()
    with bench_on(wanted.tenants) as bench:
        filled = _timed(lambda: _fill(bench, wanted.events))[0]
        progress(f"filled in {filled:.0f} s")
        told = {"events": wanted.events, "tenants": wanted.tenants, "fill_s": round(filled)}
        figure("audit.hourly_audit_open_day", _audit(bench, _HOURLY), "s", False, settings=told)
        bench.clock.set(START + timedelta(days=2))
        closed, days = _timed(lambda: reconcile.close_days(bench.database, bench.clock))
        progress(f"closed {len(days)} days in {closed:.0f} s")
        if len(days) < 1:
            raise SystemExit("no day could be closed")
        for name, least, aim, options in (
            ("full_audit_closed_day", 60, 15, {}),
            ("hourly_audit", None, None, _HOURLY),
        ):
            figure(
                f"audit.{name}",
                _audit(bench, options),
                "s",
                False,
                at_least=least,
                aim=aim,
                settings=told,
            )
        figure("audit.close_day", closed, "s", False, settings=told)
        p95 = page_query(bench)
        figure("audit.usage_page_p95", p95, "ms", False, at_least=150, aim=50, settings=told)
    return 0


def _fill(bench: Bench, events: int) -> None:
    def _told(done: int, of: int) -> None:
        progress(f"  {done:,} of {of:,} rated events")

    fill_history(bench.database, bench.version, START, bench.tenants, events, _told, days=1)
    with bench.database.transaction() as session:
        session.execute(text("set local statement_timeout = 0"))
        session.execute(text(_RECEIPTS))
    with bench.database.transaction() as session:
        session.execute(text("set local statement_timeout = 0"))
        query = select(Charge.tenant_id, func.sum(Charge.amount)).group_by(Charge.tenant_id)
        rows = session.execute(query).all()
        ledger.post_many(session, [_posting(row[0], int(row[1]), START) for row in rows])
    tidy(bench.database)


def _posting(tenant_id: str, units: int, at: datetime) -> Transaction:
    entries = transfer(AccountKind.RECEIVABLE, AccountKind.REVENUE, Money(units, "USD"))
    return Transaction(
        tenant_id, "usage", f"rate:1:{tenant_id}", at, tuple(entries), id=f"txn_{tenant_id}"
    )


def _audit(bench: Bench, options: dict[str, Any]) -> float:
    def _work() -> reconcile.AuditReport:
        with bench.database.snapshot() as session:
            session.execute(text("set local statement_timeout = 0"))
            return reconcile.audit(session, **options)

    spent, report = _timed(_work)
    if not report.clean:
        raise SystemExit(f"the audit finds: {[each.message for each in report.differences][:5]}")
    return spent


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    made = work()
    return time.perf_counter() - began, made


if __name__ == "__main__":
    sys.exit(main())
