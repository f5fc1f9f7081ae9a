"""Tasks that call the payment provider. Every task is idempotent."""

import logging
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import cast

from prometheus_client import Counter
from sqlalchemy.orm import Session

from billing import dunning, top_ups
from billing.payments import commands, inbox, meters, push
from billing.payments.base import PaymentProvider
from billing.payments.manual import ManualPayments
from billing.per_tenant import each_tenant
from billing.restores import guard, marks
from core import metrics
from core.clock import Clock
from core.database import Database
from core.queue import TaskContext, task

log = logging.getLogger("tollhouse.billing")
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
