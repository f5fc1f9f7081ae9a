"""Changes of a tenant's billing details, for the API and the page."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from sqlalchemy.orm import Session

from billing.accounts.accounts import set_anchor, set_timezone
from billing.accounts.tables import BillingAccount
from billing.accounts.tax_ids import check_region, check_tax_id
from billing.invoicing import metered
from billing.payments import methods

_DATES = ("anchor_day", "timezone")


def change(
    session: Session, account: BillingAccount, changes: Mapping[str, Any], now: datetime
) -> None:
    """Set the named fields of the locked account. BadRequest names a wrong one."""
    if "anchor_day" in changes:
        set_anchor(session, account, changes["anchor_day"], now)
    if "timezone" in changes:
        set_timezone(session, account, changes["timezone"], now)
    for name, value in changes.items():
        if name not in _DATES:
            setattr(account, name, value)
    metered.follow(session, account, now)
    if "payment_methods" in changes:
        account.payment_methods = methods.checked(account.payment_methods, account.currency)
    if "tax_region" in changes and account.tax_region:
        account.tax_region = check_region(account.tax_region)
    if "tax_region" in changes or "tax_id" in changes:
        account.tax_id = check_tax_id(account.tax_id, account.tax_region)


def describe(account: BillingAccount) -> dict[str, Any]:
    names = (
        "tenant_id",
        "currency",
        "timezone",
        "anchor_day",
        "legal_name",
        "address",
        "email",
        "tax_id",
        "tax_region",
        "postal_code",
        "tax_exempt",
        "collection",
        "status",
        "prepaid_only",
        "payment_reference",
        "payment_terms_days",
        "payment_methods",
    )
    return {"opened": True} | {name: getattr(account, name) for name in names}
