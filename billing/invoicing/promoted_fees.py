"""Fees billed ahead that promotional credit paid: as far as it did, they return as that credit.

Of what returns, the share is the promotional credit that the invoice used, by what it billed.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Protocol

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from billing.invoicing.tables import VOID, Invoice, InvoiceLine
from billing.ledger import credits
from billing.ledger.ledger import AccountKind
from billing.ledger.tables import CreditGrant, CreditUse
from core.errors import Conflict

RETURNED = "returned_promo"  # of a line's details: picounits by the invoice that billed the fee


class _Line(Protocol):
    @property
    def details(self) -> dict[str, object]: ...


class PromotedInvoices:
    """By invoice id: picounits of promotional credit used, and billed; and what has returned, of which
    so much as credit. `take` counts on."""

    def __init__(
        self,
        used: Mapping[str, int],
        billed: Mapping[str, int],
        returned: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        self._used, self._billed, self._returned = used, billed, dict(returned or {})

    def copy(self) -> "PromotedInvoices":
        return PromotedInvoices(self._used, self._billed, self._returned)

    def take(self, invoice_id: str, units: int) -> int:
        """Picounits of `units` that return as promotional credit. The share is of all that returns: a
        debt that was held back before asks again, and has had its part."""
        billed = self._billed.get(invoice_id, 0)
        if billed <= 0:
            return 0
        before, given = self._returned.get(invoice_id, (0, 0))
        most = min((before + units) * self._used[invoice_id] // billed, self._used[invoice_id])
        part = min(units, max(0, most - given))
        self._returned[invoice_id] = before + units, given + part
        return part


def read(session: Session, rows: Iterable[tuple[InvoiceLine, Invoice]]) -> PromotedInvoices:
    """Of the invoices of these lines, which hold every fee that they have."""
    billed: dict[str, int] = {}
    periods: dict[str, str] = {}
    tenants = set()
    returned: dict[str, tuple[int, int]] = {}
    for line, invoice in rows:
        if invoice.status == VOID:
            continue
        gifts, parts = of_line(line), line.details.get("returned", ())
        for source_id, units in parts:
            before, given = returned.get(source_id, (0, 0))
            returned[source_id] = before + units, given + gifts.get(source_id, 0)
        if invoice.final_at is not None and (invoice.promo_minor or gifts):
            billed.setdefault(invoice.id, invoice.exact)
            # What it returned of earlier invoices is no part of what it billed.
            billed[invoice.id] += sum(part[1] for part in parts)
            periods[invoice.period_id] = invoice.id
            tenants.add(invoice.tenant_id)
    if not periods:
        return PromotedInvoices({}, {})
    used = dict.fromkeys(billed, 0)
    uses = session.execute(
        select(CreditUse.bill_period_id, func.sum(CreditUse.units))
        .where(
            CreditUse.bill_period_id.in_(periods),
            CreditUse.kind == credits.PROMO,
            CreditUse.purpose == "usage",
        )
        .group_by(CreditUse.bill_period_id)
    )
    for period_id, units in uses:
        used[periods[str(period_id)]] = int(units)
    for reference, units in _surplus(session, tenants):
        invoice_id = reference.removeprefix(credits.SURPLUS_PROMO).split(":")[0]
        if invoice_id in used:
            used[invoice_id] -= units
    return PromotedInvoices(used, billed, returned)


def of_line(line: _Line) -> dict[str, int]:
    """Picounits of promotional credit that return by a line, by the invoice that billed the fee."""
    found = line.details.get(RETURNED, {})
    assert isinstance(found, dict)
    return found


def of_lines(lines: Sequence[_Line]) -> dict[str, int]:
    found: dict[str, int] = defaultdict(int)
    for line in lines:
        for invoice_id, units in of_line(line).items():
            found[invoice_id] += units
    return found


def give_back(session: Session, invoice: Invoice, lines: Sequence[_Line], at: datetime) -> None:
    """Grant what returns by the lines of a final invoice, with the expiry that it had."""
    for source_id, units in of_lines(lines).items():
        source = session.get_one(Invoice, source_id)
        used = credits.uses_in(
            session,
            CreditUse.bill_period_id == source.period_id,
            CreditUse.kind == credits.PROMO,
            CreditUse.purpose == "usage",
        )
        used = credits.less_returned(session, used, source.id)
        reference = f"{credits.FEE_PROMO}{source.id}:{invoice.id}"
        note = f"paid fees of invoice {source.label} that are not used"
        cause = credits.Return(reference, at, note, AccountKind.RECEIVABLE)
        credits.give_back(session, used, cause, units)


def refuse_void(session: Session, invoice: Invoice) -> None:
    """Conflict if promotional credit has returned by this invoice, or of its fees."""
    lines = session.scalars(select(InvoiceLine).where(InvoiceLine.invoice_id == invoice.id)).all()
    stem = f"{credits.FEE_PROMO}{invoice.id}:"
    of_it = select(CreditGrant.id).where(CreditGrant.reference.startswith(stem))
    if of_lines(lines) or session.scalars(of_it).first() is not None:
        raise Conflict(
            f"Fees that promotional credit paid have returned by or from invoice {invoice.label}; it "
            "cannot be voided.",
            next_step="Issue a credit note over the rest instead.",
        )


def _surplus(session: Session, tenants: set[str]) -> list[tuple[str, int]]:
    rows = session.execute(
        select(CreditGrant.reference, CreditGrant.granted).where(
            CreditGrant.tenant_id.in_(tenants),
            CreditGrant.reference.startswith(credits.SURPLUS_PROMO),
        )
    )
    return [(str(reference), int(units)) for reference, units in rows]
