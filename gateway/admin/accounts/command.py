"""`tollhouse tenant billing`: shows and changes a tenant's billing details."""

import argparse
from typing import Any

from billing.accounts.accounts import ensure_account, lock_account
from billing.adjustments import account_changes
from billing.payments.methods import METHODS
from core.errors import BadRequest
from core.tenants import audit
from gateway.admin.console import add_tenant, command_context, scope_named
from gateway.admin.output import add_json, show

_TEXTS = ("legal_name", "address", "email", "tax_region", "tax_id", "postal_code")
_DEFAULT = "default"


def add_billing_account(verbs: Any) -> None:
    parser = verbs.add_parser("billing", help="show or change a tenant's billing details")
    add_tenant(parser)
    for name in _TEXTS:
        parser.add_argument(f"--{name.replace('_', '-')}")
    parser.add_argument("--collection", choices=("manual", "stripe", "stripe_meters"))
    parser.add_argument(
        "--payment-terms", metavar="DAYS", help=f"days to pay; `{_DEFAULT}` is the plan's"
    )
    parser.add_argument(
        "--payment-method",
        action="append",
        choices=(*METHODS, _DEFAULT),
        help=f"at Stripe, may be repeated; `{_DEFAULT}` leaves the choice to Stripe",
    )
    parser.set_defaults(run=_billing)
    add_json(parser)


def _billing(arguments: argparse.Namespace) -> int:
    changes = _changes(arguments)
    with command_context() as tools, tools.database.transaction() as session:
        scope = scope_named(session, arguments.tenant)
        ensure_account(session, scope.tenant_id, tools.clock.now())
        account = lock_account(session, scope.tenant_id)
        before = {name: getattr(account, name) for name in changes}
        if changes:
            account_changes.change(session, account, changes, tools.clock.now())
            after = {name: getattr(account, name) for name in changes}
            audit.record(
                session,
                scope,
                tools.clock,
                "billing.change",
                scope.tenant_id,
                before=before,
                after=after,
            )
        shown = account_changes.describe(account)
    show(shown, as_json=arguments.json, title="billing")
    return 0


def _changes(arguments: argparse.Namespace) -> dict[str, Any]:
    changes: dict[str, Any] = {
        name: getattr(arguments, name).replace("\\n", "\n")
        for name in _TEXTS
        if getattr(arguments, name) is not None
    }
    if arguments.collection:
        changes["collection"] = arguments.collection
    if arguments.payment_terms:
        changes["payment_terms_days"] = _days(arguments.payment_terms)
    if arguments.payment_method:
        chosen = arguments.payment_method
        changes["payment_methods"] = None if _DEFAULT in chosen else chosen
    return changes


def _days(written: str) -> int | None:
    if written == _DEFAULT:
        return None
    if not (written.isascii() and written.isdecimal()) or int(written) > 365:
        raise BadRequest(
            f"--payment-terms is {written[:20]!r}.", next_step="Give 0 to 365 days, or `default`."
        )
    return int(written)
