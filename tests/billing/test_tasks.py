"""When billing's tasks run, and what each says that it did."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY
from sqlalchemy import select, text
from sqlalchemy.orm import Session

from billing import per_tenant, tasks
from billing import tasks as payment_tasks
from billing.accounts.accounts import ensure_account
from billing.ledger import credits
from billing.payments import top_ups
from billing.payments.base import PaymentProvider
from billing.payments.fake import FakePayments
from billing.payments.manual import ManualPayments
from billing.payments.tables import PaymentCommand, TopUp
from billing.rating import rating_worker
from billing.usage import partitions, retention
from core.database import Database
from core.money import Money
from core.queue import TASKS, TaskContext
from core.settings import Settings
from tests.billing.conftest import Deployment

# Name: queue, seconds between runs, seconds that one may take.
SCHEDULE: dict[str, tuple[str, float | None, float]] = {
    "billing.apply_webhooks": ("payments", 5, 600),
    "billing.audit": ("invoices", 3600, 3600),
    "billing.audit_all": ("invoices", 86_400, 3600),
    "billing.close_days": ("invoices", 3600, 3600),
    "billing.deliver_messages": ("messages", 15, 300),
    "billing.drop_old_usage": ("rating", 86_400, 300),
    "billing.seal_secrets": ("messages", 600, 300),
    "billing.stream_audit_log": ("messages", 15, 300),
    "billing.waive_late": ("rating", 1800, 600),
    "billing.dunning": ("payments", 60, 600),
    "billing.expire_credit": ("rating", 600, 300),
    "billing.finalise": ("invoices", None, 300),
    "billing.follow_subscriptions": ("rating", 60, 300),
    "billing.mark_position": ("payments", 30, 300),
    "billing.make_partitions": ("rating", 86_400, 300),
    "billing.move_days": ("invoices", 3600, 3600),
    "billing.push_payments": ("payments", 15, 600),
    "billing.rate_events": ("rating", 5, 600),
    "billing.rebuild_roll_ups": ("rating", None, 3600),
    "billing.recognise_revenue": ("invoices", 3600, 3600),
    "billing.release_parked": ("rating", 300, 300),
    "billing.report_usage": ("payments", 600, 600),
    "billing.run_exports": ("exports", 300, 3600),
    "billing.run_invoices": ("invoices", 3600, 3600),
    "billing.sum_service": ("rating", 10, 600),
    "billing.top_up": ("payments", 60, 300),
    "billing.watch_budgets": ("rating", 15, 300),
}


@pytest.fixture
def context(lite: Deployment, tmp_path: Path) -> TaskContext:
    return TaskContext(Settings(data_dir=tmp_path), lite.database, lite.clock)


def _schedule(module: Any) -> dict[str, tuple[str, float | None, float]]:
    found = [each for each in vars(module).values() if type(each).__name__ == "Task"]
    return {each.name: (each.queue, each.every_s, each.time_limit_s) for each in found}


def test_when_each_task_runs_and_how_long_it_may(context: TaskContext) -> None:
    assert _schedule(tasks) | _schedule(payment_tasks) == SCHEDULE
    assert {name for name in TASKS if name.startswith("billing.")} >= SCHEDULE.keys()
    assert tasks.drop_old_usage(context, months=0) == 0
    assert isinstance(payment_tasks.provider_of(context), ManualPayments)


def test_tasks_say_how_much_they_did(lite: Deployment, context: TaskContext) -> None:
    lite.record(lite.event(), lite.event())
    assert (tasks.rate_events(context), tasks.rate_events(context)) == (2, 0)
    assert (tasks.sum_service(context), tasks.sum_service(context)) == (1, 0)  # batches
    assert tasks.release_parked(context) == 0
    assert tasks.make_partitions(context) == []
    assert tasks.move_days(context) == {"moved": 0, "dropped": 0}
    lite.clock.advance(days=40)
    assert tasks.run_invoices(context, tenant_ids=["acme"]) == {"final": 1, "failed": 0}
    assert tasks.run_invoices(context) == {"final": 0, "failed": 0}
    assert tasks.audit(context) is True and tasks.audit_all(context) is True


def test_an_audit_with_differences_is_not_clean(lite: Deployment, context: TaskContext) -> None:
    lite.record(lite.event())
    lite.clock.advance(minutes=10)
    assert tasks.audit(context) is True, "usage of the last ten minutes may wait"
    lite.clock.advance(microseconds=1)
    assert tasks.audit(context) is False


def test_roll_ups_are_built_anew(lite: Deployment, context: TaskContext) -> None:
    lite.record(lite.event(), lite.event())
    lite.rate()
    tasks.sum_service(context)
    tables = ("usage_hourly", "service_hourly")
    with lite.database.transaction() as session:
        before = [session.execute(text(f"select * from {name}")).all() for name in tables]
        for name in tables:
            session.execute(text(f"delete from {name}"))
    assert all(before)
    tasks.rebuild_roll_ups(context)
    with lite.database.read() as session:
        assert [session.execute(text(f"select * from {name}")).all() for name in tables] == before


def test_without_a_provider_that_collects_nothing_is_pushed(
    lite: Deployment, tmp_path: Path
) -> None:
    class Idle(FakePayments):
        def open_customer(self, *_: Any) -> str:
            raise AssertionError("nothing is asked")

    idle = Idle(collects=False)
    services: dict[type, object] = {PaymentProvider: idle}
    context = TaskContext(Settings(data_dir=tmp_path), lite.database, lite.clock, services)
    assert payment_tasks.provider_of(context) is idle
    assert payment_tasks.push_payments(context) == 0
    assert payment_tasks.apply_webhooks(context) == 0
    assert payment_tasks.report_usage(context) == 0
    assert payment_tasks.top_up(context) == 0
    assert payment_tasks.remind_and_suspend(context) == 0


def _failures(task: str) -> float:
    return REGISTRY.get_sample_value("tollhouse_tenant_failures_total", {"task": task}) or 0.0


def test_a_tenant_that_fails_leaves_out_itself_alone(sqlite_database: Database) -> None:
    done: list[str] = []
    before = _failures("test.each")

    def _work(_session: Session, tenant_id: str) -> int:
        if tenant_id == "b":
            raise ValueError("of this one")
        done.append(tenant_id)
        return 2

    assert per_tenant.each_tenant(sqlite_database, "test.each", ["a", "b", "c"], _work) == 4
    assert done == ["a", "c"]
    assert _failures("test.each") == before + 1


@pytest.mark.parametrize(
    "name",
    ["expire_credit", "watch_budgets", "top_up", "recognise_revenue", "follow_subscriptions"],
)
def test_counters_of_failures_are_there_before_the_first(name: str) -> None:
    found = REGISTRY.get_sample_value(
        "tollhouse_tenant_failures_total", {"task": f"billing.{name}"}
    )
    assert found is not None


def test_a_top_up_is_asked_for_and_charged_where_the_provider_collects(
    lite: Deployment, tmp_path: Path
) -> None:
    with lite.database.transaction() as session:
        for tenant in ("acme", "birch"):
            ensure_account(session, tenant, lite.clock.now())
            top_ups.configure(session, tenant, Money(1), Money(5 * 10**12))

    def _run(provider: FakePayments) -> int:
        services: dict[type, object] = {PaymentProvider: provider}
        context = TaskContext(Settings(data_dir=tmp_path), lite.database, lite.clock, services)
        return int(payment_tasks.top_up(context))

    assert (_run(FakePayments(name="hand", collects=False)), _run(FakePayments())) == (2, 0)
    with lite.database.transaction() as session:
        assert session.scalars(select(PaymentCommand)).all() == []
        for each in session.scalars(select(TopUp)):
            each.pending_reference = None
    lite.clock.advance(hours=1)
    assert _run(FakePayments()) == 2
    with lite.database.read() as session:
        queued = session.scalars(select(PaymentCommand).order_by(PaymentCommand.tenant_id)).all()
        assert [(each.provider, each.kind, each.tenant_id) for each in queued] == [
            ("fake", "charge", "acme"),
            ("fake", "charge", "birch"),
        ]


def test_credit_that_expires_is_counted(lite: Deployment, context: TaskContext) -> None:
    now = lite.clock.now()
    with lite.database.transaction() as session:
        for name, days in (("a", 1), ("b", 1), ("c", 9)):
            credits.grant(
                session,
                tenant_id="acme",
                kind="promo",
                money=Money(5 * 10**12),
                reference=name,
                at=now,
                expires_at=now + timedelta(days=days),
            )
    assert tasks.expire_credit(context) == 0
    lite.clock.advance(days=2)
    assert (tasks.expire_credit(context), tasks.expire_credit(context)) == (2, 0)
    assert tasks.recognise_revenue(context) == tasks.watch_budgets(context) == 0
    assert tasks.follow_subscriptions(context) == tasks.deliver_messages(context) == 0


@pytest.mark.parametrize(
    ("year", "month", "after", "name"),
    [(2026, 11, (2026, 12), "charges_2026_11"), (2026, 12, (2027, 1), "charges_2026_12")],
)
def test_months_of_partitions(year: int, month: int, after: tuple[int, int], name: str) -> None:
    found = partitions.Month(year, month)
    assert found.next() == partitions.Month(*after) and found.of("charges") == name
    assert found.starts_at == datetime(year, month, 1, tzinfo=UTC)
    assert partitions.month_of(datetime(year, month, 30, 23, tzinfo=UTC)) == found
    assert partitions.Month(2026, 3).of("charges") == "charges_2026_03"


def test_no_partition_is_made_or_dropped_on_sqlite(lite: Deployment) -> None:
    lite.record(lite.event())
    now = lite.clock.now() + timedelta(days=90)
    with lite.database.transaction() as session:
        assert partitions.ensure_ahead(session, now) == []
        assert partitions.drop_before(session, now, now) == 0
        assert retention.latest_retention(session) is None


def test_a_worker_waits_for_the_lease_of_another_and_five_seconds() -> None:
    assert rating_worker.TAKE_OVER_S == 20.0
