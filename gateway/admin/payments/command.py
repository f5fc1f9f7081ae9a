"""`tollhouse payment`: payments, refunds, and the queue between the ledger and the provider."""

import argparse
from typing import Any

from sqlalchemy import select

from billing.accounts.tables import BillingAccount
from billing.adjustments import money_acts
from billing.adjustments.act_requests import ActRequest, Kind
from billing.invoicing.tables import Invoice
from billing.payments import compare, dunning, inbox, push, views
from billing.payments.base import PaymentProvider, Refused, TryLater
from billing.payments.methods import saved
from billing.payments.provider_bills import methods_of
from billing.payments.tables import DunningCase, Payment, PaymentCommand, PaymentWebhook
from core.errors import Conflict, DependencyDown
from gateway.admin.adjustments.command import submit
from gateway.admin.bank import command as _bank_lines
from gateway.admin.console import (
    CommandContext,
    add_provider_window,
    command_context,
    fetched_from_provider,
    tenant_id_of,
    units_of_amount,
)
from gateway.admin.output import add_json, show
from gateway.serving.payments import make_payments

HELP = "show and refund payments, import bank statements; retry commands to Stripe and its events"


def configure(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(metavar="verb", required=True)
    found = verbs.add_parser("list", help="list payments, newest first")
    found.add_argument("--tenant", help="name or id; default: all tenants")
    found.set_defaults(run=_list)
    setup = verbs.add_parser("setup", help="create a link for a tenant to add a payment method")
    setup.add_argument("--tenant", required=True)
    setup.add_argument("--return-url", help="where the page redirects afterwards")
    setup.add_argument("--portal", action="store_true", help="the billing portal instead")
    setup.set_defaults(run=_setup)
    refund = verbs.add_parser("refund", help="refund a payment, in full or in part")
    refund.add_argument("payment", help="the payment's id")
    refund.add_argument("--amount", help="in major units; default: the amount not refunded yet")
    refund.add_argument(
        "--reference", required=True, help="your reference; a repeated one is ignored"
    )
    refund.add_argument("--reason", default="")
    refund.set_defaults(run=_refund)
    sync = verbs.add_parser("sync", help="send commands and fetch missed events now")
    sync.set_defaults(run=_sync)
    add_provider_window(sync)
    outbox = verbs.add_parser("outbox", help="list commands that were not sent to the provider yet")
    outbox.add_argument("--all", action="store_true", help="also those that were sent")
    outbox.set_defaults(run=_outbox)
    events = verbs.add_parser("events", help="list events that are pending or parked")
    events.add_argument("--all", action="store_true", help="also those that were applied")
    events.set_defaults(run=_events)
    retry = verbs.add_parser("retry", help="retry a refused command or a parked event")
    retry.add_argument("name", help="the command's key or the event's id")
    retry.set_defaults(run=_retry)
    dismiss = verbs.add_parser("dismiss", help="close a parked event without applying it")
    dismiss.add_argument("event", help="the event's id")
    dismiss.set_defaults(run=_dismiss)
    cases = verbs.add_parser("dunning", help="list overdue invoices and the dunning steps taken")
    cases.add_argument("--all", action="store_true", help="also closed cases")
    cases.set_defaults(run=_dunning)
    _bank_lines.add_bank_lines(verbs)
    for each in (found, setup, refund, sync, outbox, events, retry, dismiss, cases):
        add_json(each)


def _list(arguments: argparse.Namespace) -> int:
    with command_context() as tools, tools.database.read() as session:
        query = select(Payment).order_by(Payment.created_at.desc()).limit(500)
        if arguments.tenant:
            query = query.where(Payment.tenant_id == tenant_id_of(session, arguments.tenant))
        rows = [views.describe_payment(session, each) for each in session.scalars(query)]
        if not arguments.json:
            rows = [
                row | {"amount": row["amount"]["text"], "refunded": row["refunded"]["text"]}
                for row in rows
            ]
        show(rows, as_json=arguments.json, title="payments")
    return 0


def _setup(arguments: argparse.Namespace) -> int:
    with command_context() as tools:
        provider = make_payments(tools.settings)
        with tools.database.read() as session:
            tenant_id = tenant_id_of(session, arguments.tenant)
            chosen = methods_of(session.get(BillingAccount, tenant_id))
        back = arguments.return_url or tools.settings.public_url or "https://example.com"
        try:
            customer = push.customer_of(tools.database, tools.clock, provider, tenant_id)
            if arguments.portal:
                link = provider.portal_link(customer, back)
            else:
                link = provider.setup_link(customer, back, saved(chosen))
        except Refused as error:
            raise Conflict(str(error), next_step="Set TOLLHOUSE_STRIPE_API_KEY.") from None
        except TryLater as error:
            raise _provider_down(provider, error) from None
        show({"customer": customer, "url": link}, as_json=arguments.json, title="setup")
    return 0


def _refund(arguments: argparse.Namespace) -> int:
    units = units_of_amount(arguments.amount) if arguments.amount else None
    reference = f"cli:{arguments.reference}"
    asked = ActRequest(Kind.REFUND, arguments.payment, reference, units, arguments.reason)
    with command_context() as tools:
        act = submit(tools, asked)
    if act.status == money_acts.POSTED:
        show(act.result, as_json=arguments.json, title="refund")
    return 0


def _sync(arguments: argparse.Namespace) -> int:
    with command_context() as tools:
        provider = _require_provider(tools)
        try:
            pushed = push.push(tools.database, tools.clock, provider)
            applied = inbox.apply(tools.database, tools.clock, provider)
            recovered = compare.catch_up(
                tools.database, tools.clock, fetched_from_provider(tools, provider, arguments)
            )
        except TryLater as error:
            raise _provider_down(provider, error) from None
        settled = dunning.settle(tools.database, tools.clock)
        report = {
            "commands_sent": pushed.done,
            "commands_waiting": pushed.later,
            "refused": pushed.refused,
            "events_applied": applied.done,
            "events_parked": applied.parked,
            "found_without_event": recovered,
            "cases_closed": settled,
        }
        show(report, as_json=arguments.json, title=provider.name)
    return 1 if pushed.refused or applied.parked else 0


def _outbox(arguments: argparse.Namespace) -> int:
    with command_context() as tools, tools.database.read() as session:
        query = select(PaymentCommand).order_by(PaymentCommand.id.desc()).limit(500)
        if not arguments.all:
            query = query.where(PaymentCommand.done_at.is_(None))
        rows = [views.describe_command(each) for each in session.scalars(query)]
        show(rows, as_json=arguments.json, title="commands")
    return 0


def _events(arguments: argparse.Namespace) -> int:
    with command_context() as tools, tools.database.read() as session:
        query = select(PaymentWebhook).order_by(PaymentWebhook.received_at.desc()).limit(500)
        if not arguments.all:
            query = query.where(PaymentWebhook.done_at.is_(None))
        rows = [views.describe_event(each) for each in session.scalars(query)]
        show(rows, as_json=arguments.json, title="events")
    return 0


def _retry(arguments: argparse.Namespace) -> int:
    shown: dict[str, Any]
    with command_context() as tools, tools.database.transaction() as session:
        now = tools.clock.now()
        command = session.scalar(
            select(PaymentCommand).where(PaymentCommand.idempotency_key == arguments.name)
        )
        if command is not None and command.failed:
            command.failed, command.next_at = False, now
            shown = views.describe_command(command)
        else:
            name = make_payments(tools.settings).name
            shown = views.describe_event(inbox.release(session, name, arguments.name, now))
    show(shown, as_json=arguments.json, title="again")
    return 0


def _dismiss(arguments: argparse.Namespace) -> int:
    with command_context() as tools, tools.database.transaction() as session:
        name = make_payments(tools.settings).name
        found = inbox.dismiss(session, name, arguments.event, "operator", tools.clock.now())
        shown = views.describe_event(found)
    show(shown, as_json=arguments.json, title="dismissed")
    return 0


def _dunning(arguments: argparse.Namespace) -> int:
    with command_context() as tools, tools.database.read() as session:
        query = (
            select(DunningCase, Invoice.label)
            .join(Invoice, Invoice.id == DunningCase.invoice_id)
            .order_by(DunningCase.opened_at.desc())
            .limit(500)
        )
        if not arguments.all:
            query = query.where(DunningCase.closed_at.is_(None))
        rows = [views.describe_case(case, label) for case, label in session.execute(query)]
        show(rows, as_json=arguments.json, title="cases")
    return 0


def _require_provider(tools: CommandContext) -> PaymentProvider:
    provider = make_payments(tools.settings)
    if not provider.collects:
        raise Conflict(
            "No payment provider is configured; payments are recorded manually.",
            next_step="Set TOLLHOUSE_STRIPE_API_KEY.",
        )
    return provider


def _provider_down(provider: PaymentProvider, error: TryLater) -> DependencyDown:
    return DependencyDown(
        f"{provider.name} does not answer: {error}",
        next_step="Check TOLLHOUSE_STRIPE_API_KEY and TOLLHOUSE_STRIPE_API_BASE.",
    )
