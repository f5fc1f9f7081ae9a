"""Options for the period of the payment provider's records to compare with the ledger."""

import argparse
from dataclasses import replace

from billing.payments import provider_snapshot
from billing.payments.base import PaymentProvider, Window
from core.errors import BadRequest
from gateway.admin.console.context import CommandContext
from gateway.edge.datetimes import parse_datetime


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--from",
        dest="since",
        help="first day of the payment provider's records to compare, besides our open items; "
        f"default: {provider_snapshot.DEFAULT_DAYS} days ago",
    )
    parser.add_argument("--to", dest="until", help="day after the last; default: tomorrow")


def fetch(
    tools: CommandContext, provider: PaymentProvider, arguments: argparse.Namespace
) -> provider_snapshot.ProviderSnapshot:
    now = tools.clock.now()
    return provider_snapshot.fetch(
        tools.database, provider, now, window_of(arguments, provider_snapshot.default_window(now))
    )


def window_of(arguments: argparse.Namespace, usual: Window) -> Window:
    """The period of the options. Raises BadRequest if it is empty."""
    window = usual
    if arguments.since:
        window = replace(window, since=parse_datetime(arguments.since, "--from"))
    if arguments.until:
        window = replace(window, until=parse_datetime(arguments.until, "--to"))
    if window.since >= window.until:
        raise BadRequest("--from is not before --to.", next_step="Give an earlier --from.")
    return window
