"""Billing tasks with their queues and schedules. Every task is idempotent."""

import logging
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from typing import Any, cast

from prometheus_client import Counter
from sqlalchemy.orm import Session

from billing.accounts.accounts import lock_account
from billing.audit import reconcile
from billing.closing import closing, late_receipts, moving
from billing.exports import schedules
from billing.invoicing import invoice_run, invoices, recognition
from billing.ledger import expiry
from billing.notices import audit_streams, budgets, outbox, sealing
from billing.payments import commands, compare, dunning, inbox, meters, push, top_ups
from billing.payments.base import PaymentProvider, TryLater
from billing.payments.manual import ManualPayments
from billing.payments.provider_snapshot import ProviderSnapshot, fetch
from billing.per_tenant import each_tenant
from billing.rating import rating, rating_worker, repair
from billing.recovery import guard, marks
from billing.stores import Store, open_store
from billing.subscriptions import subscriptions
from billing.taxes.tax_quotes import with_taxes
from billing.taxes.taxes import TaxService
from billing.usage import partitions, service_rollups, usage
from billing.usage.border import archive_of
from billing.usage.in_transit import UsageInTransit
from core import metrics
from core.clock import Clock
from core.database import Database
from core.queue import TaskContext, task
from core.tenants.scope import scope_of_operator

log = logging.getLogger("tollhouse.billing")
_RATED_WITHIN = timedelta(minutes=10)  # usage that waits longer makes an audit unclean
# Present from the start: an alert on the increase of a counter does not see its first sample.
for _name in (
    "billing.expire_credit",
    "billing.watch_budgets",
    "billing.top_up",
    "billing.recognise_revenue",
    "billing.follow_subscriptions",
):
    metrics.tenant_failures.labels(_name)


@task("billing.rate_events", queue="rating", every_s=5.0, time_limit_s=600)
def rate_events(context: TaskContext) -> int:
    return rating_worker.rate_all(context.database, context.clock)


@task("billing.sum_service", queue="rating", every_s=10.0, time_limit_s=600)
def sum_service(context: TaskContext) -> int:
    return service_rollups.sum_all(context.database, context.clock)


@task("billing.release_parked", queue="rating", every_s=300.0)
def release_parked(context: TaskContext) -> int:
    with context.database.transaction() as session:
        rating.release_refused(session)
        released = usage.release(session, context.clock)
        return released + rating.release_stored(session, context.clock)


@task("billing.follow_subscriptions", queue="rating", every_s=60.0)
def follow_subscriptions(context: TaskContext) -> int:
    """Limits of tenants whose subscription began or ended by itself since."""
    now = context.clock.now()
    with context.database.read() as session:
        tenants = subscriptions.tenants_with_limits(session)

    def _follow(session: Session, tenant_id: str) -> int:
        return int(subscriptions.entitle(session, lock_account(session, tenant_id), now))

    return each_tenant(context.database, "billing.follow_subscriptions", tenants, _follow)


@task("billing.make_partitions", queue="rating", every_s=86_400.0)
def make_partitions(context: TaskContext) -> list[str]:
    with context.database.transaction() as session:
        return partitions.ensure_ahead(session, context.clock.now())


@task("billing.drop_old_usage", queue="rating", every_s=86_400.0)
def drop_old_usage(context: TaskContext, months: int | None = None) -> int:
    """Keep the last whole months of events and drop older ones whose days are closed; 0 months keep
    everything."""
    months = context.settings.usage_retention_months if months is None else months
    if months == 0:
        return 0
    now = context.clock.now()
    with context.database.transaction() as session:
        return closing.drop_old_usage(session, months, now)


@task("billing.move_days", queue="invoices", every_s=3600.0, time_limit_s=3600)
def move_days(context: TaskContext) -> dict[str, int]:
    """Move closed days to TOLLHOUSE_EVENTS_URL, and drop those that were moved earlier."""
    with context.database.read() as session:
        archive = archive_of(session)
    if archive is None:
        return {"moved": 0, "dropped": 0}
    now = context.clock.now()
    dropped = moving.drop_moved(context.database, archive, now)
    moved = moving.move_days(context.database, archive, now, context.settings.events_days)
    return {"moved": len(moved), "dropped": dropped}


@task("billing.mark_position", queue="payments", every_s=30.0)
def mark_position(context: TaskContext) -> int:
    """Notice a restore, or keep outside the database what happened since the last time."""
    if guard.check(context.database, context.settings, context.clock, everywhere=True) is not None:
        return 0
    mark = marks.note(context.database, context.settings, context.clock)
    return mark.position if mark is not None else 0


@task("billing.expire_credit", queue="rating", every_s=600.0)
def expire_credit(context: TaskContext) -> int:
    now = context.clock.now()
    with context.database.read() as session:
        tenants = expiry.tenants_with_expired(session, now)
    return each_tenant(
        context.database,
        "billing.expire_credit",
        tenants,
        lambda session, tenant_id: expiry.expire(session, now, tenant_id),
    )


@task("billing.rebuild_roll_ups", queue="rating", time_limit_s=3600)
def rebuild_roll_ups(context: TaskContext) -> None:
    late_receipts.waive_late(context.database, context.clock)
    repair.repair(context.database, context.clock)


@task("billing.run_invoices", queue="invoices", every_s=3600.0, time_limit_s=3600)
def run_invoices(context: TaskContext, tenant_ids: list[str] | None = None) -> dict[str, Any]:
    guard.is_behind(context)  # the run then only drafts
    try:
        result = invoice_run.run(
            context.database, context.clock, tenant_ids, current=False, taxes=_taxes(context)
        )
    except Exception:
        metrics.invoice_failures.inc()
        raise
    marks.note(context.database, context.settings, context.clock)
    metrics.invoice_failures.inc(len(result.failed))
    for tenant_id, reason in result.failed.items():
        log.error("no invoice for %s: %s", tenant_id, reason)
    return {"final": len(result.finalised), "failed": len(result.failed)}


@task("billing.recognise_revenue", queue="invoices", every_s=3600.0, time_limit_s=3600)
def recognise_revenue(context: TaskContext) -> int:
    """Defer fees that were billed ahead, and post what each ended month has earned of them."""
    now = context.clock.now()
    with context.database.read() as session:
        tenants = recognition.tenants_with_deferred(session)
    return each_tenant(
        context.database,
        "billing.recognise_revenue",
        tenants,
        lambda session, tenant_id: recognition.recognise(session, now, tenant_id),
    )


@task("billing.finalise", queue="invoices")
def finalise(context: TaskContext, period_id: str) -> str | None:
    def _build(session: Session, taxes: TaxService) -> str | None:
        invoice = invoices.finalise(session, context.clock, period_id, taxes)
        return invoice.id if invoice else None

    return with_taxes(context.database, context.clock, _taxes(context), _build)


@task("billing.run_exports", queue="exports", every_s=300.0, time_limit_s=3600)
def run_exports(context: TaskContext) -> int:
    with context.database.transaction() as session:
        schedules.create_due_jobs(session, context.clock.now())

    def _store_of(destination: str) -> Store:
        return open_store(destination, context.settings)

    done, _ = schedules.run_waiting(context.database, context.clock, _store_of, scope_of_operator)
    return done


@task("billing.waive_late", queue="rating", every_s=1800.0, time_limit_s=600)
def waive_late(context: TaskContext) -> int:
    return late_receipts.waive_late(context.database, context.clock)


@task("billing.audit", queue="invoices", every_s=3600.0, time_limit_s=3600)
def audit(context: TaskContext, whole: bool = False) -> bool:
    """Hourly: the days that are not closed. `whole`: the signatures of all closed days too, and the
    rows of the last week and of a thirtieth of the earlier ones, so that the time is bounded."""
    snapshot = _snapshot(context)
    transit = cast(UsageInTransit | None, context.services.get(UsageInTransit))
    more = (partial(compare.differences, snapshot=snapshot),) if snapshot else ()
    report = reconcile.audit_and_store(
        context.database,
        context.clock,
        more=more,
        steps=snapshot.steps() if snapshot else None,
        pending_before=context.clock.now() - _RATED_WITHIN,
        in_transit=transit.late(_RATED_WITHIN) if transit is not None else 0,
        open_only=True,
        closed_days=_closed_days(context) if whole else None,
    )
    if not report.clean:
        log.error(
            "the audit found %d differences: lost %d, duplicated %d, ledger error %d units;"
            " %d events are not rated, %d are parked",
            len(report.differences),
            report.lost,
            report.duplicated,
            report.ledger_error,
            report.pending,
            report.parked,
        )
    return report.clean


@task("billing.audit_all", queue="invoices", every_s=86_400.0, time_limit_s=3600)
def audit_all(context: TaskContext) -> bool:
    return bool(audit(context, whole=True))


@task("billing.close_days", queue="invoices", every_s=3600.0, time_limit_s=3600)
def close_days(context: TaskContext) -> int:
    keys = context.settings.closing_keys
    return len(reconcile.close_days(context.database, context.clock, keys))


def _closed_days(context: TaskContext) -> reconcile.Check:
    keys, today = context.settings.closing_keys, context.clock.now()
    return partial(closing.signed_days_are_unchanged, keys=keys, today=today)


def _taxes(context: TaskContext) -> TaxService | None:
    return cast(TaxService | None, context.services.get(TaxService))


def _snapshot(context: TaskContext) -> ProviderSnapshot | None:
    """A snapshot of the provider's records, after posting those whose events were lost. None if no
    provider collects, or if it does not answer; the audit then runs without it and logs that.
    """
    provider = provider_of(context)
    if not provider.collects:
        return None
    with context.database.read() as session:
        window = guard.window(session, context.clock.now())
    try:
        snapshot = fetch(context.database, provider, context.clock.now(), window)
    except TryLater as error:
        log.error("the audit runs without %s, which does not answer: %s", provider.name, error)
        return None
    posted = compare.catch_up(context.database, context.clock, snapshot)
    if posted:
        log.warning("posted %d records of %s whose events were missing", posted, provider.name)
        dunning.settle(context.database, context.clock)
    return snapshot


@task("billing.watch_budgets", queue="rating", every_s=15.0)
def watch_budgets(context: TaskContext) -> int:
    with context.database.read() as session:
        tenants = budgets.tenants_with_budgets(session)
    return each_tenant(
        context.database,
        "billing.watch_budgets",
        tenants,
        lambda session, tenant_id: budgets.send_alerts(session, context.clock, tenant_id),
    )


@task("billing.seal_secrets", queue="messages", every_s=600.0)
def seal_secrets(context: TaskContext) -> int:
    return sealing.seal_secrets(context.database)


@task("billing.deliver_messages", queue="messages", every_s=15.0)
def deliver_messages(context: TaskContext) -> int:
    sender = outbox.NetworkSender(
        context.settings.smtp_url, networks=context.settings.webhook_networks
    )
    return outbox.deliver(context.database, context.clock, sender)


@task("billing.stream_audit_log", queue="messages", every_s=15.0)
def stream_audit_log(context: TaskContext) -> int:
    return audit_streams.send(
        context.database, context.clock, lambda url: open_store(url, context.settings)
    )


_Work = Callable[[Database, Clock, PaymentProvider], push.Pushed | inbox.Applied]


def provider_of(context: TaskContext) -> PaymentProvider:
    return cast(PaymentProvider, context.services.get(PaymentProvider) or ManualPayments())


@task("billing.top_up", queue="payments", every_s=60.0)
def top_up(context: TaskContext) -> int:
    if guard.is_behind(context):
        return 0
    provider = provider_of(context)
    now = context.clock.now()
    with context.database.read() as session:
        tenants = top_ups.tenants_with_rules(session)

    def _due(session: Session, tenant_id: str) -> int:
        begun = top_ups.due(session, provider.name, now, tenant_id)
        if provider.collects:
            for payment in begun:
                commands.charge(session, payment, now)
        return len(begun)

    return each_tenant(context.database, "billing.top_up", tenants, _due)


@task("billing.push_payments", queue="payments", every_s=15.0, time_limit_s=600)
def push_payments(context: TaskContext) -> int:
    marking = partial(marks.note, context.database, context.settings, context.clock)
    return _with_provider(context, partial(push.push, planned=marking), metrics.payment_commands)


@task("billing.apply_webhooks", queue="payments", every_s=5.0, time_limit_s=600)
def apply_webhooks(context: TaskContext) -> int:
    return _with_provider(context, inbox.apply, metrics.payment_events)


@task("billing.dunning", queue="payments", every_s=60.0, time_limit_s=600)
def remind_and_suspend(context: TaskContext) -> int:
    if guard.is_behind(context):  # what is paid at the provider may be unknown here
        return 0
    own = context.settings.dunning == "own"
    ran = dunning.run(context.database, context.clock, provider_of(context), retries=own)
    if ran.suspended:
        log.warning("%d tenants were suspended for unpaid invoices", ran.suspended)
    return ran.opened + ran.reminded + ran.suspended + ran.closed


@task("billing.report_usage", queue="payments", every_s=600.0, time_limit_s=600)
def report_usage(context: TaskContext) -> int:
    provider = provider_of(context)
    if not provider.collects or guard.is_behind(context):
        return 0
    return meters.report_all(context.database, provider.name, context.clock.now())


def _with_provider(context: TaskContext, work: _Work, counted: Counter) -> int:
    """Run `work` if the provider collects, count its outcomes, and settle dunning cases."""
    provider = provider_of(context)
    if not provider.collects or guard.is_behind(context):
        return 0
    result = work(context.database, context.clock, provider)
    if result.done:
        dunning.settle(context.database, context.clock)
    for outcome, count in asdict(result).items():
        counted.labels(outcome).inc(count)
    return result.done
