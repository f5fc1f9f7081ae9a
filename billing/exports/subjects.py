"""The exportable subjects (usage, charges, invoices, ledger), each with its columns and query.

A TenantScope limits a subject to one tenant; None, for the operator, exports all tenants.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Select, select
from sqlalchemy.orm import Session

from billing.columns import AMOUNT_COLUMNS, QUANTITY_COLUMNS
from billing.exports.formats import Column, Kind, Row
from billing.invoicing.tables import Invoice, InvoiceLine
from billing.ledger.tables import LedgerAccount, LedgerEntry, LedgerTransaction
from billing.usage.raw_rows import Reading, Wanted
from billing.usage.reading import read_rows
from billing.usage.tables import Charge, UsageEventRow
from core.database import Units, UtcDateTime
from core.tenants.scope import TenantScope

FETCH_ROWS = 5_000


@dataclass(frozen=True, slots=True)
class Period:
    start: datetime
    end: datetime  # exclusive


@dataclass(frozen=True, slots=True)
class Subject:
    name: str
    columns: tuple[Column, ...]
    # Raw rows are read through their port.
    query: Callable[[TenantScope | None, Period], Select[Any]] | Reading

    def rows(self, session: Session, scope: TenantScope | None, period: Period) -> Iterator[Row]:
        """Rows in a stable order, streamed."""
        if isinstance(self.query, Reading):
            yield from read_rows(session, wanted_of(scope, period), self.query)
            return
        statement = self.query(scope, period).execution_options(yield_per=FETCH_ROWS)
        yield from session.execute(statement)


def wanted_of(scope: TenantScope | None, period: Period) -> Wanted:
    tenant_id, project_id = (scope.tenant_id, scope.project_id or "") if scope else ("", "")
    return Wanted(period.start, period.end, tenant_id, project_id)


def _column(attribute: Any, name: str | None = None) -> Column:
    kind = attribute.property.columns[0].type
    label = name or attribute.key
    if isinstance(kind, Units):
        return Column(label, Kind.UNITS)
    if isinstance(kind, UtcDateTime):
        return Column(label, Kind.MOMENT)
    python = kind.python_type
    if python is bool:
        return Column(label, Kind.FLAG)
    return Column(label, Kind.WHOLE if python is int else Kind.TEXT)


def _fields(table: Any, *names: str) -> tuple[Any, ...]:
    return tuple(getattr(table, name) for name in names)


def _scoped(statement: Select[Any], table: Any, scope: TenantScope | None) -> Select[Any]:
    if scope is None:
        return statement
    statement = statement.where(table.tenant_id == scope.tenant_id)
    if scope.project_id and hasattr(table, "project_id"):
        statement = statement.where(table.project_id == scope.project_id)
    return statement


_USAGE = _fields(
    UsageEventRow,
    *("request_id", "tenant_id", "project_id", "key_id", "member_id", "end_user"),
    *("client_request_id", "kind", "route", "model", "adapter", "adapter_digest"),
    *("price_version", "occurred_at", "finished_at", "input_tokens", "cached_tokens"),
    *("output_tokens", "waived_tokens", "quantity", "finish_reason", "status", "settled_by"),
    *("streamed", "first_token_ms", "duration_ms", "queue_ms", "engine_id", "moderation"),
    *("prompt_order", "reordered_cached_tokens", "truncated", "batch_job", "routed"),
    *("paid_by", "counted_by", "units", "components", "labels"),
)
_CHARGES = (
    *_fields(Charge, "request_id", "tenant_id"),
    *_fields(UsageEventRow, "project_id", "key_id", "model", "adapter", "occurred_at"),
    *_fields(Charge, "price_version", "currency", *QUANTITY_COLUMNS, *AMOUNT_COLUMNS),
    *_fields(Charge, "usage_period_id", "bill_period_id", "transaction_id"),
)
_INVOICES = (
    *_fields(Invoice, "id", "label", "tenant_id", "status", "currency"),
    *_fields(Invoice, "period_start", "period_end", "final_at", "due_at"),
    *_fields(Invoice, "subtotal_minor", "promo_minor", "tax_minor", "total_minor"),
    *_fields(Invoice, "prepaid_minor", "due_minor", "paid_minor", "credited_minor"),
    *_fields(InvoiceLine, "position", "kind", "component", "description", "project_id"),
    *_fields(InvoiceLine, "model", "adapter", "price_version", "usage_period_id"),
    *_fields(InvoiceLine, "quantity", "unit", "exact", "amount_minor"),
)
_LEDGER = (
    *_fields(LedgerEntry, "id", "transaction_id"),
    *_fields(LedgerTransaction, "tenant_id", "kind", "reference", "at", "reverses_id", "memo"),
    LedgerAccount.kind,
    *_fields(LedgerEntry, "units", "currency"),
)


def _invoices(scope: TenantScope | None, period: Period) -> Select[Any]:
    joined = select(*_INVOICES).join(InvoiceLine, InvoiceLine.invoice_id == Invoice.id)
    inside = (Invoice.period_end > period.start, Invoice.period_start < period.end)
    ordered = (Invoice.period_start, Invoice.id, InvoiceLine.position)
    return _scoped(joined.where(*inside), Invoice, scope).order_by(*ordered)


def _ledger(scope: TenantScope | None, period: Period) -> Select[Any]:
    joined = (
        select(*_LEDGER)
        .join(LedgerTransaction, LedgerTransaction.id == LedgerEntry.transaction_id)
        .join(LedgerAccount, LedgerAccount.id == LedgerEntry.account_id)
    )
    inside = (LedgerTransaction.at >= period.start, LedgerTransaction.at < period.end)
    return _scoped(joined.where(*inside), LedgerTransaction, scope).order_by(LedgerEntry.id)


def _named(attributes: tuple[Any, ...], **renamed: Any) -> tuple[Column, ...]:
    new_names = {id(attribute): name for name, attribute in renamed.items()}
    return tuple(_column(each, new_names.get(id(each))) for each in attributes)


SUBJECTS = {
    subject.name: subject
    for subject in (
        Subject("usage", _named(_USAGE), Reading(_USAGE, (UsageEventRow.request_id,))),
        Subject(
            "charges",
            _named(_CHARGES),
            Reading(
                _CHARGES,
                (UsageEventRow.request_id,),
                conditions=(Charge.transaction_id.is_not(None),),
            ),
        ),
        Subject(
            "invoices", _named(_INVOICES, invoice_id=_INVOICES[0], invoice=_INVOICES[1]), _invoices
        ),
        Subject("ledger", _named(_LEDGER, entry_id=_LEDGER[0], account=_LEDGER[8]), _ledger),
    )
}
