"""The ledger postings of a final invoice: fees, tax, rounding, credit used and surplus credit."""

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy.orm import Session

from billing import credits
from billing.invoice_builder import InvoiceDraft
from billing.invoice_totals import Totals
from billing.ledger import AccountKind, Entry, Transaction, post_many, transfer
from billing.models import CreditUse, Invoice
from core.ids import TRANSACTION, new_id
from core.money import Money, units_of_minor

# Rating and re-rating post these kinds of lines.
ALREADY_POSTED = ("usage", "late_usage", "adjustment")


def post_invoices(session: Session, drafts: Sequence[InvoiceDraft], now: datetime) -> None:
    """Post what is missing, so that each tenant owes exactly the amount due of its invoice."""
    transactions: list[Transaction] = []
    uses: list[dict[str, object]] = []
    for draft in drafts:
        invoice = draft.invoice
        entries = tuple(_entries(draft))
        transaction_id = new_id(TRANSACTION)
        if entries:
            reference = f"invoice:{invoice.id}"
            transactions.append(
                Transaction(
                    invoice.tenant_id, "invoice", reference, now, entries, id=transaction_id
                )
            )
        uses += credits.uses_of(
            draft.draws,
            tenant_id=invoice.tenant_id,
            purpose="usage",
            bill_period_id=invoice.period_id,
            transaction_id=transaction_id,
            at=now,
        )
    post_many(session, transactions)
    credits.insert_uses(session, uses)
    session.flush()
    for draft in drafts:
        if draft.totals.due_minor < 0:
            _return_surplus(session, draft.invoice, draft.totals, now)


def _entries(draft: InvoiceDraft) -> list[Entry]:
    currency, totals = draft.invoice.currency, draft.totals
    fees = sum(line.exact for line in draft.computed_lines if line.kind not in ALREADY_POSTED)
    entries: list[Entry] = []
    for account, units in (
        (AccountKind.REVENUE, fees),
        (AccountKind.TAX, units_of_minor(totals.tax_minor, currency)),
        (AccountKind.ROUNDING, totals.rounding),
    ):
        if units:
            entries += transfer(AccountKind.RECEIVABLE, account, Money(units, currency))
    return entries + credits.draw_entries(draft.draws, currency)


def _return_surplus(session: Session, invoice: Invoice, totals: Totals, now: datetime) -> None:
    """Return surplus credit: promotional credit first, then prepaid credit, each with its expiry; what
    is left was paid in money, and is new prepaid credit.
    """
    currency = invoice.currency
    surplus = -units_of_minor(totals.due_minor, currency)
    gift = min(surplus, units_of_minor(max(0, totals.net.promo_minor), currency))
    note = "credit exceeded the invoice amount"
    period = CreditUse.bill_period_id == invoice.period_id
    returned = 0
    for kind, most in ((credits.PROMO, gift), (credits.PREPAID, surplus)):
        used = credits.uses_in(session, period, CreditUse.kind == kind)
        cause = credits.Return(f"surplus:{kind}:{invoice.id}", now, note, AccountKind.RECEIVABLE)
        returned += credits.give_back(session, used, cause, min(most, surplus - returned))
    if surplus > returned:
        credits.grant(
            session,
            tenant_id=invoice.tenant_id,
            kind=credits.PREPAID,
            money=Money(surplus - returned, currency),
            reference=f"surplus:{invoice.id}",
            at=now,
            note=note,
            funded_by=AccountKind.RECEIVABLE,
        )
    invoice.prepaid_minor += totals.due_minor
    invoice.due_minor = 0
    session.flush()
