"""Rows of any FOCUS dataset."""

from collections.abc import Iterator
from datetime import datetime

from sqlalchemy.orm import Session

from billing.exports.focus import cost_and_usage, other_datasets
from billing.exports.focus.documents import Window
from billing.exports.focus.tables import (
    BILLING_PERIOD,
    COST_AND_USAGE,
    INVOICE_DETAIL,
    FocusTable,
)
from billing.exports.formats import Row
from core.tenants.scope import TenantScope


def rows_of(
    session: Session,
    table: FocusTable,
    scope: TenantScope | None,
    window: Window,
    now: datetime | None = None,
) -> Iterator[Row]:
    """Rows of the billing periods that overlap the time, of one tenant or of all. `now` decides the
    state of commitments; by default it is the end of the time."""
    if table.dataset == COST_AND_USAGE:
        return cost_and_usage.rows(session, table, scope, window)
    if table.dataset == INVOICE_DETAIL:
        return other_datasets.invoice_details(session, table, scope, window)
    if table.dataset == BILLING_PERIOD:
        return other_datasets.billing_periods(session, table, scope, window)
    return other_datasets.contract_commitments(session, table, scope, window, now or window.end)
