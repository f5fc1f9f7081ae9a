"""What the database itself refuses, and that one tenant's failure stops nobody else."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY
from sqlalchemy import select, text
from sqlalchemy.exc import DBAPIError

from billing import tasks
from billing import tasks as payment_tasks
from billing.ledger import credits, ledger
from billing.ledger.ledger import AccountKind, Entry, Transaction
from billing.ledger.tables import CreditGrant, LedgerTransaction
from billing.notices import budgets
from billing.notices.tables import OutboxMessage
from billing.payments import top_ups
from billing.payments.tables import Payment
from billing.usage import partitions
from billing.usage.usage_buckets import BucketQuery, Width, usage_buckets
from core.database import Database
from core.errors import InvariantBroken
from core.money import Money
from core.queue import TaskContext
from core.settings import Settings
from core.tenants.scope import TenantScope, scope_of_operator
from gateway.cli.main import main
from migrations.run import current, upgrade
from tests.billing.conftest import START, Deployment

APPEND_ONLY = (
    *("ledger_transactions", "ledger_entries", "usage_events", "charges", "adjustments"),
    *("credit_uses", "credit_notes", "engine_receipts", "closed_days", "closed_charges"),
    *("closed_units", "reported_events"),
)


@pytest.fixture
def context(deployment: Deployment, tmp_path: Path) -> TaskContext:
    return TaskContext(Settings(data_dir=tmp_path), deployment.database, deployment.clock)


def failures(task: str) -> float:
    return REGISTRY.get_sample_value("tollhouse_tenant_failures_total", {"task": task}) or 0.0


@pytest.fixture
def two(deployment: Deployment) -> Iterator[Deployment]:
    """`aaa` comes first and is broken by the test, `zzz` is sound."""
    for name in ("aaa", "zzz"):
        deployment.tenant(name)
    yield deployment


def grant(deployment: Deployment, tenant_id: str) -> None:
    now = deployment.clock.now()
    with deployment.database.transaction() as session:
        credits.grant(
            session,
            tenant_id=tenant_id,
            kind="promo",
            money=Money(5_000_000, "USD"),
            reference=f"welcome:{tenant_id}",
            at=now,
            expires_at=now + timedelta(days=1),
        )


def test_credit_of_the_others_expires_when_one_tenant_fails(
    two: Deployment, context: TaskContext
) -> None:
    for name in ("aaa", "zzz"):
        grant(two, name)
    with two.database.transaction() as session:  # its wallet has less than its grant
        session.execute(text("update ledger_accounts set balance = 0 where tenant_id = 'aaa'"))
    two.clock.advance(days=2)
    before = failures("billing.expire_credit")
    assert tasks.expire_credit(context) == 1
    assert failures("billing.expire_credit") == before + 1
    with two.database.read() as session:
        expired = select(CreditGrant.tenant_id).where(CreditGrant.expired_at.is_not(None))
        assert session.scalars(expired).all() == ["zzz"]


def test_alerts_of_the_others_are_sent_when_one_tenant_fails(
    two: Deployment, context: TaskContext
) -> None:
    with two.database.transaction() as session:
        for name in ("aaa", "zzz"):
            budgets.create(
                session,
                two.clock,
                tenant_id=name,
                scope="tenant",
                scope_id=name,
                cap=Money(1, "USD"),
                emails=("finance@example.com",),
            )
    two.record(two.event(tenant_id="zzz"))
    two.rate()
    with two.database.transaction() as session:
        session.execute(
            text("update billing_accounts set timezone = 'No/Where' where tenant_id = 'aaa'")
        )
    tasks.watch_budgets(context)
    with two.database.read() as session:
        assert set(session.scalars(select(OutboxMessage.tenant_id))) == {"zzz"}


def test_wallets_of_the_others_are_topped_up_when_one_tenant_fails(
    two: Deployment, context: TaskContext
) -> None:
    with two.database.transaction() as session:
        for name in ("aaa", "zzz"):
            top_ups.configure(session, name, Money(10**13, "USD"), Money(10**13, "USD"))
        session.execute(text("update top_ups set currency = '?' where tenant_id = 'aaa'"))
    assert payment_tasks.top_up(context) == 1
    with two.database.read() as session:
        assert session.scalars(select(Payment.tenant_id)).all() == ["zzz"]


def test_an_invoice_run_that_leaves_out_a_tenant_is_counted(
    two: Deployment, context: TaskContext
) -> None:
    with two.database.transaction() as session:
        session.execute(
            text("update billing_accounts set timezone = 'No/Where' where tenant_id = 'aaa'")
        )
    before = REGISTRY.get_sample_value("tollhouse_invoice_failures_total") or 0.0
    assert tasks.run_invoices(context)["failed"] == 1
    assert REGISTRY.get_sample_value("tollhouse_invoice_failures_total") == before + 1


@pytest.mark.parametrize("kind", ["generation", "moderation", "gpu_seconds"])
def test_requests_are_the_same_by_the_minute_the_hour_and_the_day(
    deployment: Deployment, kind: str
) -> None:
    deployment.clock.set(START + timedelta(hours=1))
    deployment.record(
        deployment.event(kind=kind),
        deployment.event(kind=kind, status=503, output_tokens=0),
        deployment.event(kind=kind, status=500, output_tokens=0),
        deployment.event(kind=kind, status=400, quantity=0),
    )
    deployment.rate()
    start = deployment.clock.now()
    counts = {}
    with deployment.database.read() as session:
        for width in Width:
            query = BucketQuery(start, start + timedelta(minutes=1), width)
            page = usage_buckets(session, _scope(), query)
            counts[width] = [row.counts["requests"] for each in page.buckets for row in each.rows]
    wanted = [1] if kind == "generation" else [0]
    assert counts == dict.fromkeys(Width, wanted)


def _scope() -> TenantScope:
    return scope_of_operator("acme")


def test_postgresql_refuses_a_transaction_that_does_not_sum_to_zero(
    postgres_database: Database, clock: Any
) -> None:
    from tests.billing.conftest import deployment_of

    made = deployment_of(postgres_database, clock)
    made.record(made.event())
    made.rate()
    insert = text(
        "insert into ledger_entries (transaction_id, account_id, units, currency)"
        " select transaction_id, account_id, :units, currency from ledger_entries limit 1"
    )
    with (
        pytest.raises(DBAPIError, match="does not sum to zero"),
        postgres_database.transaction() as session,
    ):
        session.execute(insert, {"units": 5})
    with postgres_database.transaction() as session:  # checked at commit, not at each row
        session.execute(insert, {"units": 5})
        session.execute(insert, {"units": -5})


def test_postgresql_refuses_to_truncate_what_is_append_only(postgres_database: Database) -> None:
    with postgres_database.transaction() as session:
        from core.clock import SystemClock

        months = partitions.ensure_ahead(session, SystemClock().now())
    for table in (*APPEND_ONLY, "usage_events_default", *months):
        with (
            pytest.raises(DBAPIError, match="append-only"),
            postgres_database.transaction() as session,
        ):
            session.execute(text(f"truncate {table} cascade"))


def test_a_downgrade_is_confirmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"sqlite:///{tmp_path}/t.db"
    monkeypatch.setenv("TOLLHOUSE_DATABASE_URL", url)
    database = Database(url)
    upgrade(database)
    head = current(database)
    assert main(["migrate", "--down", "--to", "base"]) == 2
    assert "--yes" in capsys.readouterr().err and current(database) == head
    assert main(["migrate", "--down", "--to", "base", "--yes"]) == 0
    assert current(database) is None
    database.close()


def test_a_transaction_that_does_not_sum_to_zero_is_refused_before_it_is_written(
    lite: Deployment,
) -> None:
    """By the code too: SQLite has no deferred trigger that would."""
    now, usd, eur = lite.clock.now(), Money(5, "USD"), Money(-5, "EUR")
    for number, entries in enumerate(
        (
            (Entry(AccountKind.CASH, usd),),
            (Entry(AccountKind.CASH, usd), Entry(AccountKind.REVENUE, eur)),
            (),
        )
    ):
        wrong = Transaction("acme", "usage", f"wrong {number}", now, entries)
        with (
            pytest.raises(InvariantBroken, match="does not sum to zero"),
            lite.database.transaction() as session,
        ):
            ledger.post(session, wrong)
    with lite.database.read() as session:
        assert session.query(LedgerTransaction).count() == 0


@pytest.mark.parametrize(
    "task",
    ["expire_credit", "watch_budgets", "top_up", "recognise_revenue", "follow_subscriptions"],
)
def test_failures_of_a_task_are_counted_from_zero(task: str) -> None:
    """A counter that appears with its first failure shows an alert no increase."""
    labels = {"task": f"billing.{task}"}
    assert REGISTRY.get_sample_value("tollhouse_tenant_failures_total", labels) is not None
