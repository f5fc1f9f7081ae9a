"""Money of a payment that leaves again, by a refund or a dispute, and its return.

The postings of a payment say where its money lies: on the invoice, in the wallet, or nowhere because
it was withdrawn before.
"""

from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from billing.invoicing.open_amounts import cover, locked_invoice, open_minor, uncover
from billing.ledger import credits
from billing.ledger.credits import Draw
from billing.ledger.ledger import AccountKind, Entry, Transaction, post, posted_to, transfer
from billing.ledger.tables import CreditGrant, LedgerAccount, LedgerEntry, LedgerTransaction
from billing.payments.tables import Dispute, Payment, Refund
from core.errors import Conflict
from core.money import Money, units_of_minor

REFUND, DISPUTE = "refund", "dispute"


@dataclass(frozen=True, slots=True)
class Withdrawal:
    """Why money leaves. With `beyond_wallet` (it has left already) the part that neither the invoice
    nor the wallet holds is written off as bad debt; without it such a withdrawal is refused.
    """

    reference: str
    at: datetime
    kind: str = REFUND
    reason: str = ""
    beyond_wallet: bool = False


def withdraw(session: Session, payment: Payment, amount_minor: int, cause: Withdrawal) -> None:
    """Post the withdrawal once per reference. It takes, in this order, what the invoice was paid too
    much after a credit note, what the payment brought into the wallet, and what it paid of the
    invoice, which becomes open again. Hold the account's lock.
    """
    invoice = locked_invoice(session, payment.invoice_id) if payment.invoice_id else None
    placed = _placed(session, payment)
    on_invoice, in_wallet = _minor_of(payment, placed)
    unit = units_of_minor(1, payment.currency)
    grants = _grants(session, payment, cause.at)
    wallet = sum(each.remaining for each in grants if each.kind == credits.PREPAID)
    surplus = min(amount_minor, on_invoice, max(0, -open_minor(invoice)) if invoice else 0)
    from_wallet = min(amount_minor - surplus, in_wallet, wallet // unit)
    from_invoice = min(amount_minor - from_wallet, on_invoice)
    rest = amount_minor - from_wallet - from_invoice
    if rest and not cause.beyond_wallet:
        raise Conflict(
            f"The invoice and the wallet hold {amount_minor - rest} of {amount_minor} minor units to "
            "be refunded.",
            next_step="Refund at most that amount: the rest of the payment is spent.",
        )
    left = units_of_minor(rest, payment.currency)
    more = min(left, wallet - from_wallet * unit, (in_wallet - from_wallet) * unit)
    draws = credits.draw(grants, from_wallet * unit + more, (credits.PREPAID,))
    entries = list(uncover(invoice, from_invoice, cause.at)) if invoice else []
    for account, units in (
        (AccountKind.PREPAID, from_wallet * unit + more),
        (AccountKind.BAD_DEBT, left - more),
    ):
        if units:
            entries += transfer(account, AccountKind.CASH, Money(units, payment.currency))
    _post(session, payment, cause, entries, draws)


def reverse_withdrawal(
    session: Session, payment: Payment, amount_minor: int, reference: str, at: datetime
) -> None:
    """The money of the withdrawal is back: a bad debt of it is recovered first, then the invoice is
    paid as far as it is open, and the rest goes to the wallet. Hold the account's lock.
    """
    currency, again = payment.currency, f"back:{reference}"
    units = units_of_minor(amount_minor, currency)
    placed = _placed(session, payment)
    beyond = max(0, placed[AccountKind.RECEIVABLE] + placed[AccountKind.BAD_DEBT])
    lost = min(posted_to(session, reference, AccountKind.BAD_DEBT), beyond)
    entries: list[Entry] = []
    if lost:
        entries += transfer(AccountKind.CASH, AccountKind.BAD_DEBT, Money(lost, currency))
    from_wallet = posted_to(session, reference, AccountKind.PREPAID)
    to_invoice = (units - lost - from_wallet) // units_of_minor(1, currency)
    covered = 0
    if payment.invoice_id is not None and to_invoice > 0:
        invoice = locked_invoice(session, payment.invoice_id)
        part, paid = cover(invoice, to_invoice, at)
        covered = units_of_minor(part, currency)
        entries += paid
    if entries:
        post(session, Transaction(payment.tenant_id, "reversal", again, at, tuple(entries)))
    rest = units - lost - covered
    if rest:
        credits.grant(
            session,
            tenant_id=payment.tenant_id,
            kind=credits.PREPAID,
            money=Money(rest, currency),
            reference=again,
            at=at,
            note="withdrawn payment returned",
        )


def _post(
    session: Session,
    payment: Payment,
    cause: Withdrawal,
    entries: list[Entry],
    draws: list[Draw],
) -> None:
    tenant_id = payment.tenant_id
    record = post(
        session,
        Transaction(tenant_id, cause.kind, cause.reference, cause.at, tuple(entries), cause.reason),
    )
    uses = credits.uses_of(
        draws,
        tenant_id=tenant_id,
        purpose=cause.kind,
        bill_period_id=None,
        transaction_id=record,
        at=cause.at,
    )
    credits.insert_uses(session, uses)


def _grants(session: Session, payment: Payment, at: datetime) -> list[CreditGrant]:
    """Open grants in order of use, those that the payment brought first."""
    own = f"payment:{payment.id}"
    grants = credits.open_grants(session, [payment.tenant_id], at).get(payment.tenant_id, [])
    return sorted(grants, key=lambda each: each.reference != own)


def _minor_of(payment: Payment, placed: dict[AccountKind, int]) -> tuple[int, int]:
    """Minor units of the payment on the invoice and in the wallet."""
    unit = units_of_minor(1, payment.currency)
    on_invoice = -placed[AccountKind.RECEIVABLE] - placed[AccountKind.BAD_DEBT]
    return max(0, on_invoice) // unit, max(0, -placed[AccountKind.PREPAID]) // unit


def _placed(session: Session, payment: Payment) -> dict[AccountKind, int]:
    """Picounits that the payment, its refunds and its disputes posted to each kind of account."""
    refunds = select(Refund.reference).where(Refund.payment_id == payment.id)
    disputes = select(Dispute.external_id).where(Dispute.payment_id == payment.id)
    out = [f"refund:{name}" for name in session.scalars(refunds)]
    out += [f"dispute:{name}" for name in session.scalars(disputes)]
    names = [f"payment:{payment.id}", f"grant:payment:{payment.id}"]
    for name in out:
        names += [name, f"back:{name}", f"grant:back:{name}"]
    rows = session.execute(
        select(LedgerAccount.kind, func.sum(LedgerEntry.units))
        .join(LedgerEntry, LedgerEntry.account_id == LedgerAccount.id)
        .join(LedgerTransaction, LedgerTransaction.id == LedgerEntry.transaction_id)
        .where(LedgerTransaction.reference.in_(names))
        .group_by(LedgerAccount.kind)
    )
    found: dict[AccountKind, int] = defaultdict(int)
    for kind, units in rows:
        found[AccountKind(kind)] += int(units)
    return found
