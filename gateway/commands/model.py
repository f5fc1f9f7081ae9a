"""`tollhouse model`: what this house serves, and at which price."""

import argparse
from typing import Any

from core.errors import TollhouseError
from core.settings import Settings
from gateway.console import add_json, show
from gateway.model_files import model_directory, model_name, served_model
from gateway.toolbox import toolbox
from gateway.upstreams import read_upstreams

HELP = "show the models that this house serves"


def configure(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(metavar="verb", required=True)
    listing = verbs.add_parser("list", help="every model, where it runs, and its price")
    add_json(listing)
    listing.set_defaults(run=_list)


def _list(arguments: argparse.Namespace) -> int:
    from billing.prices import load_price_book

    with toolbox() as tools:
        with tools.database.read() as session:
            book = load_price_book(session)
        rows = []
        for name, where, context in _served(tools.settings):
            try:
                price = book.pin("", name, None, tools.clock.now()).id
            except TollhouseError:
                price = None
            rows.append({"model": name, "engine": where, "context": context, "price": price})
    show(rows, as_json=arguments.json, title="models")
    return 0


def _served(settings: Settings) -> list[tuple[str, str, Any]]:
    if settings.upstreams:
        return [
            (each.model or model_name(settings), each.url, each.context_length)
            for each in read_upstreams(settings.upstreams)
        ]
    directory = model_directory(settings)
    model = served_model(settings, directory)
    return [(model.name, str(directory), model.context_length)]
