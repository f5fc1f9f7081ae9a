"""The span of the payment provider's records that a command compares with the ledger."""

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
        help="look at what the payment provider has from this day on, and at what of ours is still "
        f"open; the last {theirs.USUAL_DAYS} days without it",
    )
    parser.add_argument("--to", dest="until", help="until this day, not included")


def fetch(
    tools: Toolbox, provider: PaymentProvider, arguments: argparse.Namespace
) -> theirs.Theirs:
    now = tools.clock.now()
    return theirs.fetch(
        tools.database, provider, now, window_of(arguments, theirs.usual_window(now))
    )


def window_of(arguments: argparse.Namespace, usual: Window) -> Window:
    """BadRequest if it is none."""
    window = usual
    if arguments.since:
        window = replace(window, since=moment_of(arguments.since, "--from"))
    if arguments.until:
        window = replace(window, until=moment_of(arguments.until, "--to"))
    if window.since >= window.until:
        raise BadRequest("--from is not before --to.")
    return window
