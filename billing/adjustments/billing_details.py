"""A tenant's tax details and billing address, as acts that say what they changed and can be undone."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from sqlalchemy.orm import Session

from billing.accounts.accounts import lock_account
from billing.accounts.tables import BillingAccount
from billing.adjustments import account_changes
from core.errors import BadRequest, Conflict

_NAMES = {
    "legal_name": "Legal name",
    "address": "Address",
    "email": "E-mail for invoices",
    "tax_region": "Tax region",
    "tax_id": "Tax id",
    "postal_code": "Postal code",
    "tax_exempt": "Exempt from tax",
}


def change(
    session: Session, tenant_id: str, changes: Mapping[str, Any], at: datetime
) -> dict[str, Any]:
    """Sets the named details and returns them as they were and are. BadRequest names a wrong one."""
    account = lock_account(session, tenant_id)
    before = {name: getattr(account, name) for name in changes}
    account_changes.change(session, account, changes, at)
    after = {name: getattr(account, name) for name in changes}
    if before == after:
        raise BadRequest("This changes nothing.", next_step="Change a field.")
    session.flush()
    return {"tenant_id": tenant_id, "before": before, "after": after}


def change_back(
    session: Session, tenant_id: str, changed: Mapping[str, Any], at: datetime
) -> dict[str, Any]:
    """Sets what `change` returned to what it was. Conflict if it was changed again since."""
    account = lock_account(session, tenant_id)
    for name, value in changed["after"].items():
        if getattr(account, name) != value:
            raise Conflict(
                f"{_NAMES[name]} was changed again since.",
                next_step="Set it as it should be by another act.",
            )
    return change(session, tenant_id, changed["before"], at)


def said(account: BillingAccount) -> dict[str, str]:
    """Each detail by its name, on one line."""
    return {words: _line(getattr(account, name)) for name, words in _NAMES.items()}


def _line(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(str(value or "none").splitlines())
