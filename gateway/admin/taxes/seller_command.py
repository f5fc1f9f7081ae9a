"""`tollhouse seller`: what invoices state about their issuer, and how they are numbered."""

import argparse
from pathlib import Path

from billing.accounts.accounts import ensure_seller
from billing.invoicing import sellers
from core.errors import BadRequest
from core.tenants import audit
from gateway.admin.console import command_context
from gateway.admin.output import add_json, show

HELP = "show and change the issuer of invoices"
_TEXTS = {
    "name": "the company's name",
    "address": "postal address; lines separated by \\n",
    "tax-id": "validated for the country of the tax region",
    "tax-region": "ISO 3166 code of a country or region, such as DE or US-NY",
    "bank-details": "bank account for payments; lines separated by \\n",
    "footer": "printed below every invoice",
    "number-prefix": "prefix of invoice numbers: TH gives TH-000001",
}


def configure(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(metavar="verb", required=True)
    shown = verbs.add_parser("show", help="show the issuer of invoices")
    shown.set_defaults(run=_show)
    change = verbs.add_parser(
        "set", help="change the issuer of later invoices; final invoices stay as they are"
    )
    for name, words in _TEXTS.items():
        change.add_argument(f"--{name}", help=words)
    change.add_argument(
        "--next-number",
        type=int,
        help="number of the first invoice; can be set only before there is one",
    )
    change.add_argument("--logo", type=Path, metavar="FILE", help="a PNG or JPEG")
    change.add_argument("--no-logo", action="store_true", help="remove the logo")
    change.set_defaults(run=_set)
    for each in (shown, change):
        add_json(each)


def _show(arguments: argparse.Namespace) -> int:
    with command_context() as tools, tools.database.transaction() as session:
        shown = sellers.describe(ensure_seller(session))
    show(shown, as_json=arguments.json, title="seller")
    return 0


def _set(arguments: argparse.Namespace) -> int:
    fields = [name.replace("-", "_") for name in _TEXTS]
    changes = {name: value for name in fields if (value := getattr(arguments, name)) is not None}
    for name in ("address", "bank_details"):
        if name in changes:
            changes[name] = changes[name].replace("\\n", "\n")
    if arguments.next_number is not None:
        changes["next_number"] = arguments.next_number
    if arguments.logo is not None:
        changes["logo"] = _read(arguments.logo)
    elif arguments.no_logo:
        changes["logo"] = None
    if not changes:
        raise BadRequest("Nothing to change.", next_step="Give an option; see --help.")
    with command_context() as tools, tools.database.transaction() as session:
        before = sellers.describe(ensure_seller(session))
        seller = sellers.change(session, changes)
        shown = sellers.describe(seller)
        audit.record_operator(
            session,
            tools.clock,
            "cli",
            "seller.change",
            seller.id,
            before=before,
            after=shown,
        )
    show(shown, as_json=arguments.json, title="seller")
    return 0


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise BadRequest(
            f"--logo: {file} cannot be read: {error.strerror}.", next_step="Name a PNG or JPEG."
        ) from None
