"""Rows of Invoice Detail, Billing Period and Contract Commitment."""

import json
from collections.abc import Iterator
from datetime import datetime

from sqlalchemy import select
from sqlalchemy.orm import Session

from billing.accounts.tables import BillingAccount, BillingPeriod, Seller
from billing.exports.focus import charges
from billing.exports.focus.charges import DetailLine
from billing.exports.focus.commitments import Commitment, read_commitments, terms_of
from billing.exports.focus.cost_and_usage import batches
from billing.exports.focus.documents import Bounds, Kind, Window
from billing.exports.focus.tables import FocusTable
from billing.exports.formats import Row
from billing.invoicing.tables import DRAFT, Invoice
from billing.subscriptions.tables import Subscription
from core.money import units_of_minor
from core.tenants.scope import TenantScope

Fields = dict[str, object]


def invoice_details(
    session: Session, table: FocusTable, scope: TenantScope | None, window: Window
) -> Iterator[Row]:
    """A record for each line of each invoice, credit note and void."""
    for data, some in batches(session, scope, window):
        for document in some:
            for detail in charges.details_of(data, document):
                yield _row(table, _detail(detail))


def billing_periods(
    session: Session, table: FocusTable, scope: TenantScope | None, window: Window
) -> Iterator[Row]:
    """A period is closed once its invoice is issued, and then never open again."""
    row = BillingPeriod
    query = (
        select(row, Invoice, Seller.name)
        .join(BillingAccount, BillingAccount.tenant_id == row.tenant_id)
        .join(Seller, Seller.id == BillingAccount.seller_id)
        .outerjoin(Invoice, Invoice.period_id == row.id)
        .where(row.ends_at > window.start, row.starts_at < window.end)
        .order_by(row.starts_at, row.tenant_id)
    )
    if scope is not None:
        query = query.where(row.tenant_id == scope.tenant_id)
    for found, invoice, seller in session.execute(query):
        if not window.has(Bounds(found.starts_at, found.ends_at)):
            continue
        issuer = (invoice.issued_by.get("name") if invoice is not None else None) or seller
        updated_at = found.starts_at
        if invoice is not None:
            updated_at = max(updated_at, invoice.final_at or invoice.drafted_at)
        yield _row(
            table,
            {
                "BillingPeriodCreated": found.starts_at,
                "BillingPeriodStart": found.starts_at,
                "BillingPeriodEnd": found.ends_at,
                "BillingPeriodLastUpdated": max(updated_at, found.closed_at or updated_at),
                "BillingPeriodStatus": "Closed" if is_closed(found, invoice) else "Open",
                "InvoiceIssuerName": issuer,
                "x_BillingAccountId": found.tenant_id,
            },
        )


def is_closed(period: BillingPeriod, invoice: Invoice | None) -> bool:
    return period.closed_at is not None and (invoice is None or invoice.status != DRAFT)


def contract_commitments(
    session: Session,
    table: FocusTable,
    scope: TenantScope | None,
    window: Window,
    now: datetime,
) -> Iterator[Row]:
    """The minimum commitments that are in force in the time."""
    tenants = (
        {scope.tenant_id}
        if scope is not None
        else set(session.scalars(select(Subscription.tenant_id).distinct()))
    )
    sellers = {
        row[0]: row[1]
        for row in session.execute(
            select(BillingAccount.tenant_id, Seller.name)
            .join(Seller, Seller.id == BillingAccount.seller_id)
            .where(BillingAccount.tenant_id.in_(tenants))
        )
    }
    for tenant_id, found in sorted(read_commitments(session, tenants).items()):
        for each in found:
            if each.starts_at < window.end and (each.ends_at or window.end) > window.start:
                fields = _commitment(session, each, now)
                issuer = sellers.get(tenant_id, "")
                fields |= {"InvoiceIssuerName": issuer, "ServiceProviderName": issuer}
                yield _row(table, fields)


def _commitment(session: Session, each: Commitment, now: datetime) -> Fields:
    term = terms_of(session, each, now)
    ends_at = each.ends_at or term.ends_at
    interval = "Annual" if each.yearly else "Monthly"
    changed = [part.starts_at for part in each.parts if part.starts_at <= now]
    if each.ends_at is not None and each.ends_at <= now:
        changed.append(each.ends_at)
    return {
        "BillingCurrency": each.plan.currency,
        "ContractCommitmentApplicability": '{"IsGlobalScope":true}',
        "ContractCommitmentBenefitCategory": "Other",
        "ContractCommitmentCategory": "Spend",
        "ContractCommitmentCost": each.plan.minimum_commitment,
        "ContractCommitmentCreated": each.parts[0].starts_at,
        "ContractCommitmentDescription": f"Minimum commitment of plan {each.plan.name}, "
        f"by {'year' if each.yearly else 'billing period'}",
        "ContractCommitmentDiscountPercentage": 0,
        "ContractCommitmentDurationType": "1 Year" if each.yearly else "1 Month",
        "ContractCommitmentFulfillmentInterval": interval,
        "ContractCommitmentId": each.id,
        "ContractCommitmentLastUpdated": max(changed, default=each.parts[0].starts_at),
        "ContractCommitmentLifecycleStatus": _status(each, now),
        "ContractCommitmentModel": "Discontinuous",
        "ContractCommitmentOfferCategory": "Negotiated" if each.negotiated else "Public",
        "ContractCommitmentPaymentInterval": interval,
        "ContractCommitmentPaymentModel": "No Upfront",
        "ContractCommitmentPeriodEnd": ends_at,
        "ContractCommitmentPeriodStart": each.starts_at,
        "ContractCommitmentType": "Minimum commitment",
        "ContractId": each.contract_id,
        "ContractPeriodEnd": ends_at,
        "ContractPeriodStart": each.starts_at,
        "x_BillingAccountId": each.tenant_id,
    }


def _status(each: Commitment, now: datetime) -> str:
    if now < each.starts_at:
        return "Pending"
    if each.ends_at is None or now < each.ends_at:
        return "Active"
    return "Superseded" if each.superseded else "Canceled"


def _detail(detail: DetailLine) -> Fields:
    document, line = detail.document, detail.line
    invoice, note = document.invoice, document.note
    status = "Voided" if document.voided else "Open" if document.is_draft else "Issued"
    own = document.kind is Kind.INVOICE
    due = invoice.due_minor if own else 0
    paid = invoice.prepaid_minor if own else 0
    if note is not None:
        due = -(note.net_minor + note.tax_minor)
    grain = {"SubAccountId": line.project_id, "SkuId": detail.sku_id, "x_LineKind": line.kind}
    return {
        "BilledCost": detail.billed,
        "BillingAccountId": invoice.tenant_id,
        "BillingCurrency": invoice.currency,
        "BillingPeriodEnd": document.bounds.ends_at,
        "BillingPeriodStart": document.bounds.starts_at,
        "ChargeCategory": detail.category,
        "InvoiceDetailCreated": document.issued_at or invoice.drafted_at,
        "InvoiceDetailDescription": line.description,
        "InvoiceDetailGrain": json.dumps(
            {name: value for name, value in grain.items() if value}, separators=(",", ":")
        ),
        "InvoiceDetailId": detail.detail_id,
        "InvoiceDetailLastUpdated": document.updated_at,
        "InvoiceId": document.number,
        "InvoiceIssueDate": document.issued_at,
        "InvoiceIssueStatus": status,
        "InvoiceIssuerName": document.issuer,
        "PaymentDueDate": invoice.due_at if own else None,
        "PaymentTerms": f"Net {document.terms_days}",
        "ReferenceInvoiceId": document.corrects or document.number,
        "x_InvoiceAmountDue": units_of_minor(due, invoice.currency),
        "x_InvoicePrepaidApplied": units_of_minor(paid, invoice.currency),
        "x_LineKind": line.kind,
    }


def _row(table: FocusTable, fields: Fields) -> Row:
    return [fields.get(name) for name in table.names]
