"""`tollhouse audit`: compares usage, charges, ledger, invoices, payments and, with Redis, the money
that limits hold; exits 1 on a difference."""

import argparse
import asyncio
from dataclasses import asdict
from datetime import timedelta
from functools import partial

from sqlalchemy.orm import Session

from billing.audit import reconcile
from billing.audit.reconcile import Check
from billing.closing import closing
from billing.differences import MAX_REQUEST_IDS, Difference
from billing.notices import budgets
from billing.payments import compare
from billing.payments.base import TryLater
from billing.payments.provider_snapshot import ProviderSnapshot
from billing.rating.rating_worker import rate_all
from core.errors import DependencyDown
from gateway.admin.console import (
    CommandContext,
    add_provider_window,
    command_context,
    fetched_from_provider,
)
from gateway.admin.output import add_json, say, show
from gateway.admission.held_money import held_money_differences
from gateway.metering.receipt_files import files_and_events, receipt_files
from gateway.metering.spool_watch import wait_until_shipped
from gateway.metering.streams.storing import stream_state
from gateway.serving.payments import make_payments

_COUNTERS_S = 10.0  # a tenant with many running requests takes longer than a request may wait
_RUNNING_WITHIN = timedelta(minutes=10)
HELP = "check that usage, charges, ledger, invoices and Stripe agree; exit 1 if they do not"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--as-is", action="store_true", help="do not rate pending usage first")
    parser.add_argument(
        "--open",
        action="store_true",
        help="check only open days and the frozen sums of closed ones",
    )
    add_provider_window(parser)
    parser.add_argument("--no-provider", action="store_true", help="skip the payment provider")
    parser.add_argument(
        "--receipts",
        action="append",
        default=[],
        metavar="PATH",
        help="receipt files of engines on other machines; default: this machine's engines' own",
    )
    add_json(parser)
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    with command_context() as tools:
        spool = wait_until_shipped(tools.settings)
        if not arguments.as_is:
            rate_all(tools.database, tools.clock)
        snapshot = None if arguments.no_provider else _provider_snapshot(tools, arguments)
        files = receipt_files(tools.settings, arguments.receipts)
        stream = stream_state(tools.settings, tools.clock)
        late = stream.messages if stream.age_s > _RUNNING_WITHIN.total_seconds() else 0
        more: tuple[Check, ...] = ()
        if not late and not stream.problem:  # else the events may lie in the stream
            more += (
                partial(files_and_events, settings=tools.settings, clock=tools.clock, files=files),
            )
        if snapshot is not None:
            more += (partial(compare.differences, snapshot=snapshot),)
        if tools.settings.redis_url:  # counters in memory are those of the server's process alone
            more += (partial(_held_money, tools),)
        steps = snapshot.steps() if snapshot else None
        # A receipt comes before its event, so requests that run have one without an event.
        busy = spool.running or spool.unshipped or stream.messages
        before = tools.clock.now() - _RUNNING_WITHIN if busy else None
        report = reconcile.audit_and_store(
            tools.database,
            tools.clock,
            more=more,
            steps=steps,
            pending_before=before,
            open_only=arguments.open,
            in_transit=late,
            closed_days=None
            if arguments.open
            else partial(closing.signed_days_are_unchanged, keys=tools.settings.closing_keys),
        )
    shown = report.as_json()
    clean = report.clean and not spool.parked and not stream.problem
    shown["clean"] = clean
    shown["spool"] = {
        "running": spool.running,
        "unshipped": spool.unshipped,
        "parked": spool.parked,
    }
    shown["stream"] = asdict(stream)
    if arguments.json:
        show(shown, as_json=True)
        return 0 if clean else 1
    show([{"step": name, **sums} for name, sums in _fill_columns(report.steps)], as_json=False)
    for each in report.differences:
        ids = ", ".join(each.request_ids)
        say(f"{each.check}: {each.message} ({each.count}). {ids}")
    if report.without_receipt:
        ids = ", ".join(report.without_receipt[:MAX_REQUEST_IDS])
        say(f"billed without a receipt of the engine: {len(report.without_receipt)}. {ids}")
    say(
        f"lost {report.lost}, duplicated {report.duplicated}, ledger error "
        f"{shown['ledger_error']}; waiting {report.pending}, parked {report.parked}, "
        f"parked in spools {spool.parked}"
    )
    if stream.messages or stream.problem:
        say(f"in the stream {stream.messages} messages. {stream.problem}".strip())
    return 0 if clean else 1


def _held_money(tools: CommandContext, session: Session) -> list[Difference]:
    from gateway.admission.counters import make_counters

    keys = budgets.hard_limit_keys(session, tools.clock.now())

    async def _compare() -> list[Difference]:
        counters = make_counters(tools.settings, tools.clock, timeout_s=_COUNTERS_S)
        await counters.start()
        try:
            return await held_money_differences(counters, keys)
        finally:
            await counters.close()

    return asyncio.run(_compare()) if keys else []


def _provider_snapshot(
    tools: CommandContext, arguments: argparse.Namespace
) -> ProviderSnapshot | None:
    provider = make_payments(tools.settings)
    if not provider.collects:
        return None
    try:
        return fetched_from_provider(tools, provider, arguments)
    except TryLater as error:
        raise DependencyDown(
            f"{provider.name} does not answer: {error}",
            next_step="Check TOLLHOUSE_STRIPE_API_KEY and TOLLHOUSE_STRIPE_API_BASE, or use "
            "--no-provider.",
        ) from None


def _fill_columns(steps: dict[str, dict[str, int]]) -> list[tuple[str, dict[str, object]]]:
    """Give every row all columns, for one table."""
    names = list(dict.fromkeys(name for sums in steps.values() for name in sums))
    return [(step, {name: sums.get(name, "") for name in names}) for step, sums in steps.items()]
