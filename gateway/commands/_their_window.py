"""Options for the period of the payment provider's records to compare with the ledger."""

import argparse
from dataclasses import replace

from billing.payments import theirs
from billing.payments.base import PaymentProvider, Window
from core.errors import BadRequest
from gateway.moments import moment_of
from gateway.toolbox import Toolbox


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--from",
        dest="since",
        help="first day of the payment provider's records to compare, besides our open items; "
        f"default: {theirs.USUAL_DAYS} days ago",
    )
    parser.add_argument("--to", dest="until", help="day after the last; default: tomorrow")


def fetch(
    tools: Toolbox, provider: PaymentProvider, arguments: argparse.Namespace
) -> theirs.Theirs:
    now = tools.clock.now()
    return theirs.fetch(
        tools.database, provider, now, window_of(arguments, theirs.usual_window(now))
    )


def window_of(arguments: argparse.Namespace, usual: Window) -> Window:
    """The period of the options. Raises BadRequest if it is empty."""
    window = usual
    if arguments.since:
        window = replace(window, since=moment_of(arguments.since, "--from"))
    if arguments.until:
        window = replace(window, until=moment_of(arguments.until, "--to"))
    if window.since >= window.until:
        raise BadRequest("--from is not before --to.", next_step="Give an earlier --from.")
    return window
