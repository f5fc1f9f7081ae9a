"""Automatic top-ups: when a wallet falls below its threshold, request one payment, and no other until
it is settled.
"""

from datetime import datetime

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from billing.accounts.accounts import lock_account
from billing.payments import settlement
from billing.payments.tables import Payment, TopUp
from core.errors import BadRequest
from core.money import Money, round_to_minor


def configure(session: Session, tenant_id: str, threshold: Money, amount: Money) -> TopUp:
    """Request a payment of `amount` whenever the wallet is below `threshold`."""
    account = lock_account(session, tenant_id)
    if {threshold.currency, amount.currency} != {account.currency}:
        raise BadRequest(
            f"The account is in {account.currency}.",
            next_step=f"Give both amounts in {account.currency}.",
            code="currency_mismatch",
        )
    minor, left = round_to_minor(amount.units, amount.currency)
    if minor <= 0 or left or threshold.units < 0:
        raise BadRequest(
            "The amount must be above zero and in whole minor units, the threshold not negative.",
            param="amount",
        )
    rule = session.get(TopUp, tenant_id)
    if rule is None:
        rule = TopUp(tenant_id=tenant_id, enabled=True)
        session.add(rule)
    rule.threshold, rule.amount, rule.currency = threshold.units, amount.units, amount.currency
    rule.enabled = True
    session.flush()
    return rule


def tenants_with_rules(session: Session) -> list[str]:
    enabled = select(TopUp.tenant_id).where(TopUp.enabled.is_(True))
    return list(session.scalars(enabled.order_by(TopUp.tenant_id)))


def due(
    session: Session, provider: str, at: datetime, tenant_id: str | None = None
) -> list[Payment]:
    """Create the pending payments that wallets of one tenant or of all need now; the provider
    collects them."""
    begun = []
    rules = select(TopUp).where(TopUp.enabled.is_(True)).order_by(TopUp.tenant_id)
    if tenant_id is not None:
        rules = rules.where(TopUp.tenant_id == tenant_id)
    for rule in session.scalars(rules).all():
        lock_account(session, rule.tenant_id)
        session.refresh(rule)
        if _waits(session, rule) or not _low(session, rule):
            continue
        reference = _next_reference(session, rule.tenant_id)
        minor, _ = round_to_minor(rule.amount, rule.currency)
        begun.append(
            settlement.begin_payment(
                session,
                tenant_id=rule.tenant_id,
                invoice_id=None,
                amount_minor=minor,
                currency=rule.currency,
                provider=provider,
                reference=reference,
                at=at,
            )
        )
        rule.pending_reference, rule.last_at, rule.last_error = reference, at, None
    session.flush()
    return begun


def references_of(tenant_id: str) -> str:
    """What the references of a tenant's top-ups begin with."""
    return f"top-up:{tenant_id}:"


def _next_reference(session: Session, tenant_id: str) -> str:
    """By the number of top-ups before, not by time: the payment has the same id, and the provider gets
    the same key, if a restored database requests it once more."""
    start = references_of(tenant_id)
    made = select(func.count()).where(Payment.reference.startswith(start, autoescape=True))
    return f"{start}{(session.scalar(made) or 0) + 1}"


def _low(session: Session, rule: TopUp) -> bool:
    return settlement.wallet(session, rule.tenant_id, rule.currency) < rule.threshold


def _waits(session: Session, rule: TopUp) -> bool:
    """Whether the rule must not request a payment now. A failed payment disables the rule, so that
    an invalid card is not charged repeatedly.
    """
    if rule.pending_reference is None:
        return False
    payment = session.scalar(select(Payment).where(Payment.reference == rule.pending_reference))
    if payment is None or payment.status == settlement.SUCCEEDED:
        rule.pending_reference = None
        return False
    if payment.status == settlement.FAILED:
        rule.pending_reference, rule.enabled = None, False
        rule.last_error = (payment.failure or "the payment failed")[:120]
        return True
    return True
