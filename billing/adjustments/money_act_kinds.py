"""The kinds of acts on money: what each concerns, and how it is posted.

Preview, posting at once and posting after a confirmation all call `perform`.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from billing.accounts.accounts import ensure_account
from billing.adjustments import act_reversals, billing_details
from billing.adjustments.act_requests import DETAILS, FEES, ActRequest, Kind, Subject, checked_terms
from billing.adjustments.tables import MoneyAct
from billing.amounts import minor, money
from billing.invoicing import credit_notes, invoices, open_amounts
from billing.invoicing.tables import Invoice
from billing.ledger import credits
from billing.payments import commands, settlement
from billing.payments.tables import Payment
from billing.payments.views import describe_refund
from billing.subscriptions import add_ons, subscriptions
from billing.subscriptions.tables import Plan
from core.errors import BadRequest, Conflict, NotFound
from core.money import Money, decimal_of, round_to_minor, units_of, units_of_minor
from core.tenants.models import Tenant


def find(session: Session, request: ActRequest, now: datetime) -> Subject:
    """What the act concerns. NotFound if there is no such thing."""
    checked = replace(request, terms=checked_terms(request))
    return _RESOLVED[request.kind](session, checked, now)


def resolve(session: Session, request: ActRequest, now: datetime) -> Subject:
    """The same; BadRequest for an amount that it cannot have."""
    found = find(session, request, now)
    whole = request.kind in (*FEES, Kind.GRANT, Kind.UNDO)  # these may be exact to the picounit
    free = (*FEES, *DETAILS, Kind.UNDO)  # what is undone may have had no amount
    if found.amount < 0 or (found.amount == 0 and request.kind not in free):
        raise BadRequest(
            f"The amount is {decimal_of(found.amount)} {found.currency}; it must be above zero.",
            next_step="Give the amount in major units, such as 12.50.",
            param="amount",
        )
    if not whole and round_to_minor(found.amount, found.currency)[1]:
        raise BadRequest(
            f"{decimal_of(found.amount)} {found.currency} has more decimals than the currency.",
            next_step="Round it.",
            param="amount",
        )
    return found


def perform(session: Session, act: MoneyAct, at: datetime) -> dict[str, Any]:
    """Posts the act and returns what to show of it."""
    return _PERFORMED[Kind(act.kind)](session, act, at)


def _tenant(session: Session, request: ActRequest, now: datetime) -> Subject:
    name = request.target
    tenant_id = session.scalar(select(Tenant.id).where(or_(Tenant.name == name, Tenant.id == name)))
    if tenant_id is None:
        raise NotFound(
            f"There is no tenant {name[:80]!r}.",
            next_step="List tenants with: tollhouse tenant list",
        )
    account = ensure_account(session, tenant_id, now)
    if request.amount is None and request.kind not in (*FEES, *DETAILS):
        raise BadRequest("There is no amount.", next_step="Give one.", param="amount")
    return Subject(tenant_id, tenant_id, account.currency, request.amount or 0)


def _plan(session: Session, request: ActRequest, now: datetime) -> Subject:
    """The amount is the new fee of a month or year, for the rule of the second person."""
    found, terms = _tenant(session, request, now), request.terms or {}
    plan = session.scalar(select(Plan).where(Plan.name == terms.get("plan", "")))
    if plan is None:
        raise NotFound(
            f"There is no plan {str(terms.get('plan', ''))[:80]!r}.",
            next_step="Create it with `tollhouse tenant plan-add`.",
        )
    starts_at = terms.get("starts_at")
    if starts_at and datetime.fromisoformat(starts_at) < now:
        raise BadRequest(
            f"starts_at is {starts_at}, which is past.",
            next_step="Leave it out to begin now, or give a later time.",
            param="starts_at",
        )
    agreed = _overrides(terms)
    seats = max(0, int(terms.get("seats", 0)) - plan.included_seats)
    base, seat = (agreed.get(name, getattr(plan, name)) for name in ("base_fee", "seat_fee"))
    return Subject(found.tenant_id, found.target, found.currency, base + seats * seat)


def _add_on(session: Session, request: ActRequest, now: datetime) -> Subject:
    """The amount is the fee of all units for a month or year, for the rule of the second person."""
    found, terms = _tenant(session, request, now), request.terms or {}
    add_on = add_ons.named(session, str(terms.get("add_on", "")))
    units = add_on.fee * int(terms.get("quantity", 0))
    return Subject(found.tenant_id, found.target, found.currency, units)


def _details(session: Session, request: ActRequest, now: datetime) -> Subject:
    """Nothing is posted, so the amount is 0."""
    if request.amount:
        raise BadRequest(
            f"{request.kind} has no amount.", next_step="Leave the amount out.", param="amount"
        )
    return _tenant(session, replace(request, amount=None), now)


def _invoice(session: Session, request: ActRequest, _now: datetime) -> Subject:
    row = invoices.get(session, request.target)
    usual = row.total_minor if request.kind is Kind.VOID else open_amounts.open_minor(row)
    given = request.amount
    units = units_of_minor(usual, row.currency) if given is None else given
    return Subject(row.tenant_id, row.id, row.currency, units)


def _wire(session: Session, request: ActRequest, now: datetime) -> Subject:
    if request.target.startswith("org_") or _is_tenant(session, request.target):
        return _tenant(session, request, now)
    return _invoice(session, request, now)


def _is_tenant(session: Session, name: str) -> bool:
    return session.scalar(select(Tenant.id).where(Tenant.name == name)) is not None


def _payment(session: Session, request: ActRequest, _now: datetime) -> Subject:
    row = session.get(Payment, request.target)
    if row is None:
        raise NotFound(
            f"There is no payment {request.target[:80]!r}.",
            next_step="List payments with: tollhouse payment list",
        )
    left = row.amount_minor - row.refunded_minor
    units = units_of_minor(left, row.currency) if request.amount is None else request.amount
    return Subject(row.tenant_id, row.id, row.currency, units)


def _undo(session: Session, request: ActRequest, _now: datetime) -> Subject:
    act = session.get(MoneyAct, request.target)
    if act is None:
        raise NotFound(
            f"There is no act {request.target[:80]!r}.",
            next_step="List acts with: tollhouse money list",
        )
    act_reversals.refuse(act)
    if request.amount not in (None, act.amount):
        raise BadRequest(
            f"An act is undone as a whole: {decimal_of(act.amount)} {act.currency}.",
            next_step="Leave the amount out.",
            param="amount",
        )
    return Subject(act.tenant_id, act.id, act.currency, act.amount)


def _post_undo(session: Session, act: MoneyAct, at: datetime) -> dict[str, Any]:
    original = session.get_one(MoneyAct, act.target)
    _refuse_undone(session, act)
    note = act.reason or f"undo of {original.reference}"
    return act_reversals.post(session, act_reversals.Undoing(act, original, at, note))


def _refuse_undone(session: Session, act: MoneyAct) -> None:
    undone = select(MoneyAct.id).where(
        MoneyAct.target == act.target,
        MoneyAct.kind == Kind.UNDO.value,
        MoneyAct.status == "posted",
        MoneyAct.id != act.id,
    )
    if session.scalar(undone) is not None:
        raise Conflict("The act is undone already.", next_step="List acts: tollhouse money list")


def _post_grant(session: Session, act: MoneyAct, at: datetime) -> dict[str, Any]:
    expires = act.terms.get("expires_at")
    created = credits.grant(
        session,
        tenant_id=act.tenant_id,
        kind=str(act.terms.get("kind", credits.PREPAID)),
        money=Money(act.amount, act.currency),
        reference=act.reference,
        at=at,
        priority=int(act.terms.get("priority", 100)),
        expires_at=datetime.fromisoformat(expires) if expires else None,
        note=act.reason,
    )
    granted = money(created.granted, created.currency)
    return {"id": created.id, "kind": created.kind, "granted": granted}


def _post_credit_note(session: Session, act: MoneyAct, at: datetime) -> dict[str, Any]:
    note = credit_notes.issue(
        session,
        invoice_id=act.target,
        net_minor=_minor(act),
        reason=act.reason,
        reference=act.reference,
        at=at,
        refund=bool(act.terms.get("refund", False)),
    )
    return {
        "number": note.label,
        "invoice": session.get_one(Invoice, note.invoice_id).label,
        "net": minor(note.net_minor, note.currency),
        "tax": minor(note.tax_minor, note.currency),
        "outcome": note.outcome,
    }


def _post_refund(session: Session, act: MoneyAct, at: datetime) -> dict[str, Any]:
    created = commands.request_refund(
        session, act.target, _minor(act), act.reference, at, reason=act.reason
    )
    return describe_refund(created)


def _post_void(session: Session, act: MoneyAct, at: datetime) -> dict[str, Any]:
    _refuse_other_amount(act, session.get_one(Invoice, act.target).total_minor)
    settlement.void(session, act.target, at, act.reason)
    return _settled(session, act)


def _post_write_off(session: Session, act: MoneyAct, at: datetime) -> dict[str, Any]:
    _refuse_other_amount(act, open_amounts.open_minor(session.get_one(Invoice, act.target)))
    settlement.write_off(session, act.target, at)
    return _settled(session, act)


def _post_wire(session: Session, act: MoneyAct, at: datetime) -> dict[str, Any]:
    to_invoice = act.target != act.tenant_id
    payment = settlement.begin_payment(
        session,
        tenant_id=act.tenant_id,
        invoice_id=act.target if to_invoice else None,
        amount_minor=_minor(act),
        currency=act.currency,
        provider="manual",
        reference=act.reference,
        at=at,
    )
    settlement.succeed(session, payment, at)
    shown = _settled(session, act) if to_invoice else {}
    return {"payment": payment.id} | shown


def _post_plan(session: Session, act: MoneyAct, at: datetime) -> dict[str, Any]:
    plan, seats = str(act.terms["plan"]), int(act.terms.get("seats", 0))
    agreed = _overrides(act.terms)
    starts_at = datetime.fromisoformat(act.terms.get("starts_at") or at.isoformat())
    held = subscriptions.subscribe(
        session, act.tenant_id, plan, max(at, starts_at), seats, agreed, now=at
    )
    shown = {name: decimal_of(units) for name, units in agreed.items()}
    return {
        "tenant_id": act.tenant_id,
        "plan": plan,
        "seats": seats,
        "overrides": shown,
        "from": held.starts_at.isoformat(),
    }


def _post_add_on(session: Session, act: MoneyAct, at: datetime) -> dict[str, Any]:
    name, quantity = str(act.terms.get("add_on", "")), int(act.terms.get("quantity", 0))
    add_ons.set_quantity(session, act.tenant_id, name, quantity, at)
    return {
        "tenant_id": act.tenant_id,
        "add_on": name,
        "quantity": quantity,
        "from": at.isoformat(),
    }


def _post_details(session: Session, act: MoneyAct, at: datetime) -> dict[str, Any]:
    return billing_details.change(session, act.tenant_id, act.terms, at)


def _overrides(terms: Mapping[str, Any]) -> dict[str, int]:
    """Amounts of the contract, decimals in the terms."""
    return {name: units_of(amount) for name, amount in terms.get("overrides", {}).items()}


def _minor(act: MoneyAct) -> int:
    return round_to_minor(act.amount, act.currency)[0]


def _refuse_other_amount(act: MoneyAct, now_minor: int) -> None:
    """The amount may have changed since the act was asked for."""
    if _minor(act) != now_minor:
        raise Conflict(
            f"The amount is {decimal_of(units_of_minor(now_minor, act.currency))} {act.currency} now, "
            f"not {decimal_of(act.amount)}.",
            next_step="Reject this act and ask for it again.",
        )


def _settled(session: Session, act: MoneyAct) -> dict[str, Any]:
    return act_reversals.settled_invoice(session, act.target)


_RESOLVED: dict[Kind, Callable[[Session, ActRequest, datetime], Subject]] = {
    Kind.GRANT: _tenant,
    Kind.CREDIT_NOTE: _invoice,
    Kind.REFUND: _payment,
    Kind.VOID: _invoice,
    Kind.WRITE_OFF: _invoice,
    Kind.WIRE: _wire,
    Kind.PLAN: _plan,
    Kind.ADD_ON: _add_on,
    Kind.TAX: _details,
    Kind.ADDRESS: _details,
    Kind.UNDO: _undo,
}
_PERFORMED: dict[Kind, Callable[[Session, MoneyAct, datetime], dict[str, Any]]] = {
    Kind.GRANT: _post_grant,
    Kind.CREDIT_NOTE: _post_credit_note,
    Kind.REFUND: _post_refund,
    Kind.VOID: _post_void,
    Kind.WRITE_OFF: _post_write_off,
    Kind.WIRE: _post_wire,
    Kind.PLAN: _post_plan,
    Kind.ADD_ON: _post_add_on,
    Kind.TAX: _post_details,
    Kind.ADDRESS: _post_details,
    Kind.UNDO: _post_undo,
}
