"""The ledger postings of a final invoice: fees, tax, rounding, credit used and surplus credit."""

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy.orm import Session

from billing.invoicing import promoted_fees, returned_fees
from billing.invoicing.invoice_builder import InvoiceDraft
from billing.ledger import credits
from billing.ledger.ledger import AccountKind, Entry, Transaction, post_many, transfer
from billing.ledger.tables import CreditUse
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
        _return_credit(session, draft, now)


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


def _return_credit(session: Session, draft: InvoiceDraft, now: datetime) -> None:
    """Credit that was drawn and is not needed returns to where it came from, with its expiry. A negative
    amount was paid in money, or is still unpaid: it lowers what is unpaid of the invoices that billed
    it, and is new prepaid credit."""
    invoice = draft.invoice
    note = "credit exceeded the invoice amount"
    period = CreditUse.bill_period_id == invoice.period_id
    for kind, most in zip((credits.PROMO, credits.PREPAID), draft.back, strict=True):
        if most:
            used = credits.uses_in(session, period, CreditUse.kind == kind)
            reference = f"surplus:{kind}:{invoice.id}"
            cause = credits.Return(reference, now, note, AccountKind.RECEIVABLE)
            credits.give_back(session, used, cause, most)
    promoted_fees.give_back(session, invoice, draft.computed_lines, now)
    if draft.totals.due_minor >= 0:
        return
    surplus = units_of_minor(-draft.totals.due_minor, invoice.currency)
    granted = credits.grant(
        session,
        tenant_id=invoice.tenant_id,
        kind=credits.PREPAID,
        money=Money(surplus, invoice.currency),
        reference=f"surplus:{invoice.id}",
        at=now,
        note=note,
        funded_by=AccountKind.RECEIVABLE,
    )
    invoice.prepaid_minor += draft.totals.due_minor
    invoice.due_minor = 0
    session.flush()
    lines = [line.details.get("returned", ()) for line in draft.computed_lines]
    sources = {str(part[0]): None for returned in lines for part in returned}
    returned_fees.lower_unpaid(session, invoice, granted, list(sources), now)
