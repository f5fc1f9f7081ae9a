"""The postings that make an invoice final: fees, tax, rounding, credit, and what goes back."""

from datetime import datetime

from sqlalchemy.orm import Session

from billing import credits
from billing.credits import Draw
from billing.ledger import AccountKind, Entry, Transaction, post, transfer
from billing.lines import Line
from billing.models import Invoice
from billing.totals import Totals
from core.ids import TRANSACTION, new_id
from core.money import Money, units_of_minor

# Rating and re-rating have posted these already.
POSTED_BEFORE = ("usage", "late_usage", "adjustment")


def close_books(
    session: Session,
    invoice: Invoice,
    built: list[Line],
    totals: Totals,
    draws: list[Draw],
    now: datetime,
) -> None:
    """After this the tenant owes for the period exactly what the invoice says is due."""
    currency = invoice.currency
    fees = sum(line.exact for line in built if line.kind not in POSTED_BEFORE)
    entries: list[Entry] = []
    for account, units in (
        (AccountKind.REVENUE, fees),
        (AccountKind.TAX, units_of_minor(totals.tax_minor, currency)),
        (AccountKind.ROUNDING, totals.rounding),
    ):
        if units:
            entries += transfer(AccountKind.RECEIVABLE, account, Money(units, currency))
    entries += credits.draw_entries(draws, currency)
    transaction_id = new_id(TRANSACTION)
    if entries:
        transaction_id = post(
            session,
            Transaction(
                invoice.tenant_id,
                "invoice",
                f"invoice:{invoice.id}",
                now,
                tuple(entries),
                id=transaction_id,
            ),
        )
    credits.keep_uses(
        session,
        draws,
        tenant_id=invoice.tenant_id,
        purpose="usage",
        bill_period_id=invoice.period_id,
        transaction_id=transaction_id,
        at=now,
    )
    session.flush()
    if totals.due_minor < 0:
        _give_back(session, invoice, totals, now)


def _give_back(session: Session, invoice: Invoice, totals: Totals, now: datetime) -> None:
    """More credit than debt: gifts return as a gift, the rest goes to the wallet."""
    surplus = -units_of_minor(totals.due_minor, invoice.currency)
    gift = min(surplus, units_of_minor(max(0, totals.net.promo_minor), invoice.currency))
    for kind, units in ((credits.PROMO, gift), (credits.PREPAID, surplus - gift)):
        if units:
            credits.grant(
                session,
                tenant_id=invoice.tenant_id,
                kind=kind,
                money=Money(units, invoice.currency),
                reference=f"surplus:{kind}:{invoice.id}",
                at=now,
                note="more credit than debt on an invoice",
                funded_by=AccountKind.RECEIVABLE,
            )
    invoice.prepaid_minor += totals.due_minor
    invoice.due_minor = 0
    session.flush()
