"""What a line of a bank statement pays: by the references and invoice numbers that it names.

An amount alone never decides. Without a reference a person assigns the line.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from billing.accounts import references
from billing.accounts.tables import BillingAccount
from billing.bank.tables import BankLine
from billing.invoicing.invoices import FINAL
from billing.invoicing.open_amounts import unpaid_minor
from billing.invoicing.tables import Invoice

_LABEL = re.compile(r"[0-9A-Z][0-9A-Z-]*\d{6,}")
_MOST_DIGITS = 12  # of an invoice number


@dataclass(frozen=True, slots=True)
class Part:
    """Minor units for an invoice, or for the wallet of a tenant."""

    target: str
    minor: int


@dataclass(frozen=True, slots=True)
class Match:
    """What a line pays; without parts, `note` says why nothing."""

    note: str
    parts: tuple[Part, ...] = ()
    tenant_id: str | None = None


def match(session: Session, line: BankLine) -> Match:
    text = f"{line.reference} / {line.text}"
    valid, wrong = references.found_in(text)
    invoices = _named_invoices(session, valid, text)
    accounts = _named_accounts(session, valid)
    tenants = {each.tenant_id for each in invoices} | {each.tenant_id for each in accounts}
    if len(tenants) > 1:
        return Match("It names invoices or references of more than one customer.")
    if not tenants:
        if wrong:
            return Match(f"The reference {wrong[0]} has wrong check digits.")
        return Match("It names no known reference or invoice number.")
    (tenant_id,) = tenants
    return allocated(session, line, tenant_id, invoices)


def allocated(
    session: Session, line: BankLine, tenant_id: str, invoices: Sequence[Invoice]
) -> Match:
    """The line's amount over these invoices, else over the open ones of the tenant, the first due first;
    what exceeds them is credit."""
    account = session.get_one(BillingAccount, tenant_id)
    named = list(invoices)
    currency = named[0].currency if named else account.currency
    if line.currency != currency or account.currency != currency:
        return Match(f"The line is in {line.currency}, and the account is in {account.currency}.")
    left, parts = line.amount_minor, list[Part]()
    for each in named or _open_invoices(session, tenant_id, currency):
        part = min(left, max(0, unpaid_minor(each)))
        if part:
            parts.append(Part(each.id, part))
            left -= part
    if left and named:  # an overpayment is that of the last invoice, whose refunds then return it
        last = parts.pop() if parts else Part(named[-1].id, 0)
        parts.append(Part(last.target, last.minor + left))
    elif left:
        parts.append(Part(tenant_id, left))
    labels = ", ".join(each.label or each.id for each in named)
    return Match(labels or "reference of the customer", tuple(parts), tenant_id)


def _named_invoices(session: Session, valid: Sequence[str], text: str) -> list[Invoice]:
    """By reference, else by printed number, in the order of their numbers."""
    wanted = {references.plain(each) for each in valid}
    found = [
        each
        for each in _numbered(session, wanted)
        if references.plain(references.of_invoice(each.label or "")) in wanted
    ]
    if found:
        return found
    labels = set(_LABEL.findall(text.upper()))
    return [each for each in _numbered(session, labels) if (each.label or "").upper() in labels]


def _numbered(session: Session, names: set[str]) -> list[Invoice]:
    """Invoices whose number the digits at the end of a name may be: the unique index finds them."""
    numbers = set()
    for name in names:
        digits = re.search(r"\d*$", name)
        tail = digits.group()[-_MOST_DIGITS:] if digits else ""
        numbers |= {int(tail[at:]) for at in range(len(tail))}
    if not numbers:
        return []
    rows = select(Invoice).where(Invoice.number.in_(numbers)).order_by(Invoice.number)
    return list(session.scalars(rows))


def _named_accounts(session: Session, valid: Sequence[str]) -> list[BillingAccount]:
    wanted = {each for each in valid if each[4] == references.CUSTOMER}
    if not wanted:
        return []
    rows = select(BillingAccount).where(BillingAccount.payment_reference.in_(wanted))
    return list(session.scalars(rows))


def _open_invoices(session: Session, tenant_id: str, currency: str) -> list[Invoice]:
    rows = session.scalars(
        select(Invoice)
        .where(
            Invoice.tenant_id == tenant_id, Invoice.status == FINAL, Invoice.currency == currency
        )
        .order_by(Invoice.due_at, Invoice.number)
    )
    return list(rows)
