"""`tollhouse audit`: compares usage, charges, ledger, invoices and payments; exits 1 on a difference."""

import argparse
from functools import partial

from billing import reconcile
from billing.invoice_run import rate_all
from billing.payments import compare
from billing.payments.base import TryLater
from billing.payments.provider_snapshot import ProviderSnapshot
from core.errors import DependencyDown
from gateway.cli.commands import _provider_window as provider_window
from gateway.cli.context import CommandContext, command_context
from gateway.cli.output import add_json, say, show
from gateway.metering.spool_watch import wait_until_shipped
from gateway.payments import make_payments

HELP = "check that usage, charges, ledger, invoices and Stripe agree; exit 1 if they do not"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--keep", action="store_true", help="store the report for the dashboard")
    parser.add_argument("--as-is", action="store_true", help="do not rate unrated usage first")
    provider_window.add_arguments(parser)
    parser.add_argument("--no-provider", action="store_true", help="skip the payment provider")
    add_json(parser)
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    with command_context() as tools:
        spool = wait_until_shipped(tools.settings)
        if not arguments.as_is:
            rate_all(tools.database, tools.clock)
        snapshot = None if arguments.no_provider else _provider_snapshot(tools, arguments)
        more = (partial(compare.differences, snapshot=snapshot),) if snapshot else ()
        steps = snapshot.steps() if snapshot else None
        if arguments.keep:
            report = reconcile.audit_and_store(tools.database, tools.clock, more=more, steps=steps)
        else:
            with tools.database.snapshot() as session:
                report = reconcile.audit(session, more=more, steps=steps)
    shown = report.as_json()
    clean = report.clean and not spool.parked
    shown["clean"] = clean
    shown["spool"] = {
        "running": spool.running,
        "unshipped": spool.unshipped,
        "parked": spool.parked,
    }
    if arguments.json:
        show(shown, as_json=True)
        return 0 if clean else 1
    show([{"step": name, **sums} for name, sums in _fill_columns(report.steps)], as_json=False)
    for each in report.differences:
        ids = ", ".join(each.request_ids)
        say(f"{each.check}: {each.message} ({each.count}). {ids}")
    say(
        f"lost {report.lost}, duplicated {report.duplicated}, ledger error "
        f"{shown['ledger_error']}; waiting {report.pending}, parked {report.parked}, "
        f"parked in spools {spool.parked}"
    )
    return 0 if clean else 1


def _provider_snapshot(
    tools: CommandContext, arguments: argparse.Namespace
) -> ProviderSnapshot | None:
    provider = make_payments(tools.settings)
    if not provider.collects:
        return None
    try:
        return provider_window.fetch(tools, provider, arguments)
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
