"""Billing's tasks, their queues and their schedule, in one place. Each may run twice: twice is once."""

import logging
from typing import Any, cast

from billing import (
    budgets,
    credits,
    invoice_run,
    invoices,
    outbox,
    partitions,
    rating,
    reconcile,
    rollups,
    top_ups,
    usage,
)
from billing.payments.base import PaymentProvider
from billing.payments.manual import ManualPayments
from core import metrics
from core.queue import TaskContext, task

log = logging.getLogger("tollhouse.billing")


@task("billing.rate_events", queue="rating", every_s=5.0, time_limit_s=600)
def rate_events(context: TaskContext) -> int:
    return invoice_run.rate_all(context.database, context.clock)


@task("billing.release_parked", queue="rating", every_s=300.0)
def release_parked(context: TaskContext) -> int:
    with context.database.transaction() as session:
        released = usage.release(session, context.clock)
        return released + rating.release_stored(session, context.clock)


@task("billing.make_partitions", queue="rating", every_s=86_400.0)
def make_partitions(context: TaskContext) -> list[str]:
    with context.database.transaction() as session:
        return partitions.ensure_ahead(session, context.clock.now())


@task("billing.drop_old_usage", queue="rating")
def drop_old_usage(context: TaskContext, months: int = 13) -> int:
    """On demand: keep so many whole months of events and drop those before."""
    now = context.clock.now()
    with context.database.transaction() as session:
        return partitions.drop_before(session, partitions.retention_start(now, months), now)


@task("billing.expire_credit", queue="rating", every_s=600.0)
def expire_credit(context: TaskContext) -> int:
    with context.database.transaction() as session:
        return credits.expire(session, context.clock.now())


@task("billing.rebuild_roll_ups", queue="rating", time_limit_s=3600)
def rebuild_roll_ups(context: TaskContext) -> None:
    with context.database.transaction() as session:
        rollups.rebuild(session)


@task("billing.run_invoices", queue="invoices", every_s=3600.0, time_limit_s=3600)
def run_invoices(context: TaskContext, tenant_ids: list[str] | None = None) -> dict[str, Any]:
    result = invoice_run.run(context.database, context.clock, tenant_ids, current=False)
    for tenant_id, reason in result.failed.items():
        log.warning("no invoice for %s: %s", tenant_id, reason)
    return {"final": len(result.finalised), "failed": len(result.failed)}


@task("billing.finalise", queue="invoices")
def finalise(context: TaskContext, period_id: str) -> str | None:
    with context.database.transaction() as session:
        invoice = invoices.finalise(session, context.clock, period_id)
        return invoice.id if invoice else None


@task("billing.audit", queue="invoices", every_s=3600.0, time_limit_s=3600)
def audit(context: TaskContext) -> bool:
    with context.database.transaction() as session:
        report = reconcile.audit_and_keep(session, context.clock)
    metrics.audit_differences.set(len(report.differences))
    metrics.parked_events.set(report.parked)
    if not report.clean:
        log.error(
            "the audit found %d differences: lost %d, duplicated %d, ledger error %d units",
            len(report.differences),
            report.lost,
            report.duplicated,
            report.ledger_error,
        )
    return report.clean


@task("billing.watch_budgets", queue="rating", every_s=60.0)
def watch_budgets(context: TaskContext) -> int:
    with context.database.transaction() as session:
        return budgets.send_alerts(session, context.clock)


@task("billing.deliver_messages", queue="default", every_s=15.0)
def deliver_messages(context: TaskContext) -> int:
    sender = outbox.NetworkSender(
        context.settings.smtp_url, networks=context.settings.webhook_networks
    )
    return outbox.deliver(context.database, context.clock, sender)


@task("billing.top_up", queue="payments", every_s=60.0)
def top_up(context: TaskContext) -> int:
    provider = cast(PaymentProvider, context.services.get(PaymentProvider, ManualPayments()))
    with context.database.transaction() as session:
        now = context.clock.now()
        begun = top_ups.due(session, provider.name, now)
        for payment in begun:
            provider.collect(session, payment, now)
    return len(begun)
