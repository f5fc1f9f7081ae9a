"""Acts on money that a person asks for: previewed, posted once per reference, written to the audit log,
and above an amount posted only when a second person confirms.
"""

from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from hashlib import sha256
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from billing.accounts.accounts import Periods, lock_account
from billing.adjustments import billing_details
from billing.adjustments.act_requests import (
    ACTIONS,
    DETAILS,
    FEES,
    ActRequest,
    Kind,
    Subject,
    checked_terms,
)
from billing.adjustments.money_act_kinds import find, perform, resolve
from billing.adjustments.tables import MoneyAct
from billing.amounts import money
from billing.invoicing import invoices
from billing.invoicing.open_amounts import open_minor
from billing.invoicing.tables import Invoice
from billing.ledger import ledger
from core.clock import Clock
from core.errors import BadRequest, Conflict, Forbidden, NotFound
from core.ids import new_id
from core.money import format_minor, units_of
from core.tenants import audit_chain
from core.tenants.models import AuditEntry

WAITING, POSTED, REJECTED = "waiting", "posted", "rejected"
_LONGEST_REFERENCE = 140  # the ledger puts up to 18 characters before it, in a column of 160


@dataclass(frozen=True, slots=True)
class FourEyes:
    """`above` is in picounits of the account's currency; None: one person suffices for all acts."""

    above: int | None = None

    @classmethod
    def of(cls, setting: Decimal | None) -> "FourEyes":
        return cls(None if setting is None else units_of(setting))

    def needs_second(self, units: int) -> bool:
        return self.above is not None and units > self.above


@dataclass(frozen=True, slots=True)
class Posting:
    kind: str  # of the transaction
    account: str
    units: int  # positive is a debit


@dataclass(frozen=True, slots=True)
class Preview:
    subject: Subject
    postings: list[Posting]
    remarks: list[str]  # what else changes


def preview(session: Session, clock: Clock, request: ActRequest) -> Preview:
    """What the act would post as of now, by doing it and rolling it back."""
    now = clock.now()
    subject = resolve(session, request, now)
    act = _row(request, subject, "", now)
    savepoint = session.begin_nested()
    try:
        before = _state(session, clock, act)
        with ledger.recorded(session) as posted:
            perform(session, act, now)
        remarks = [
            f"{name}: {before[name]} → {value}"
            for name, value in _state(session, clock, act).items()
            if before[name] != value
        ]
    finally:
        savepoint.rollback()
    postings = [
        Posting(each.kind, entry.account.value, entry.money.units)
        for each in posted
        for entry in each.entries
    ]
    return Preview(subject, postings, remarks)


def submit(
    session: Session, clock: Clock, request: ActRequest, actor: str, rule: FourEyes
) -> MoneyAct:
    """Posts the act, or stores it for a second person. The same reference returns the first act."""
    now = clock.now()
    names = (request.reference, _key(request.reference))
    known = session.scalar(select(MoneyAct).where(MoneyAct.reference.in_(names)))
    if known is not None:
        return _same(known, request, find(session, request, now))
    subject = resolve(session, request, now)
    act = _row(request, subject, actor, now)
    if rule.needs_second(subject.amount):
        preview(session, clock, request)  # what cannot be posted is refused at once
        act.status = WAITING
        _record(session, act, actor, now, ".requested")
    else:
        _post(session, act, actor, now)
    session.add(act)
    session.flush()
    return act


def confirm(session: Session, clock: Clock, act_id: str, actor: str) -> MoneyAct:
    act = _waiting(session, act_id)
    if act.requested_by == actor:
        raise Forbidden(
            f"{actor} asked for this act and cannot confirm it.",
            next_step="Another operator confirms it, with their own token.",
        )
    act.decided_by, act.decided_at = actor, clock.now()
    _post(session, act, actor, clock.now())
    session.flush()
    return act


def reject(session: Session, clock: Clock, act_id: str, actor: str, why: str = "") -> MoneyAct:
    """By anyone who may act on money, also by who asked for it."""
    act = _waiting(session, act_id)
    act.status, act.decided_by, act.decided_at = REJECTED, actor, clock.now()
    act.decision = why
    _record(session, act, actor, clock.now(), ".rejected")
    session.flush()
    return act


def listed(
    session: Session, *, status: str = "", target: str = "", limit: int = 100
) -> list[MoneyAct]:
    """The newest first; `target` is the id of a tenant, invoice or payment."""
    query = select(MoneyAct).order_by(MoneyAct.requested_at.desc(), MoneyAct.id.desc())
    if status:
        query = query.where(MoneyAct.status == status)
    if target:
        query = query.where((MoneyAct.target == target) | (MoneyAct.tenant_id == target))
    return list(session.scalars(query.limit(limit)))


def get(session: Session, act_id: str) -> MoneyAct:
    found = session.get(MoneyAct, act_id)
    if found is None:
        raise NotFound(
            f"There is no act {act_id[:80]!r}.", next_step="List them: tollhouse money list"
        )
    return found


def describe(act: MoneyAct) -> dict[str, Any]:
    plain = ("id", "kind", "tenant_id", "target", "terms", "reason", "reference", "status")
    decided = act.decided_at
    return {name: getattr(act, name) for name in plain} | {
        "amount": money(act.amount, act.currency),
        "requested_by": act.requested_by,
        "requested_at": act.requested_at.isoformat(),
        "decided_by": act.decided_by,
        "decided_at": decided.isoformat() if decided else None,
        "decision": act.decision,
        "result": act.result,
    }


def _row(request: ActRequest, subject: Subject, actor: str, now: datetime) -> MoneyAct:
    return MoneyAct(
        id=new_id("act"),
        kind=request.kind.value,
        tenant_id=subject.tenant_id,
        target=subject.target,
        currency=subject.currency,
        amount=subject.amount,
        terms=checked_terms(request),
        reason=request.reason,
        reference=_key(request.reference),
        status=POSTED,
        requested_by=actor,
        requested_at=now,
        decision="",
        result={},
    )


def _post(session: Session, act: MoneyAct, actor: str, now: datetime) -> None:
    act.result = perform(session, act, now)
    act.status = POSTED
    _record(session, act, actor, now)


def _record(session: Session, act: MoneyAct, actor: str, now: datetime, step: str = "") -> None:
    audit_chain.append(
        session,
        AuditEntry(
            tenant_id=act.tenant_id,
            at=now,
            actor=actor,
            action=ACTIONS[Kind(act.kind)] + step,
            target=act.target,
            before=None,
            after=describe(act),
        ),
    )


def _key(reference: str) -> str:
    """As it is, or short enough for what postings put before it."""
    if len(reference) <= _LONGEST_REFERENCE:
        return reference
    digest = sha256(reference.encode()).hexdigest()[:32]
    return f"{reference[: _LONGEST_REFERENCE - 33]}:{digest}"


def _same(known: MoneyAct, request: ActRequest, subject: Subject) -> MoneyAct:
    asked = (request.kind.value, subject.target, checked_terms(request))
    same = (known.kind, known.target, known.terms) == asked
    if not same or request.amount not in (None, known.amount):
        raise Conflict(
            f"The reference {request.reference[:80]!r} belongs to another act ({known.id}).",
            next_step="Use a new reference.",
            param="reference",
        )
    if known.status == REJECTED:
        raise Conflict(
            f"The act {known.id} with this reference was rejected.",
            next_step="Ask again with a new reference.",
            param="reference",
        )
    return known


def _waiting(session: Session, act_id: str) -> MoneyAct:
    lock_account(session, get(session, act_id).tenant_id)
    act = session.get_one(MoneyAct, act_id, populate_existing=True)
    if act.status != WAITING:
        raise Conflict(
            f"The act {act.id} is {act.status} already.", next_step="Choose one that waits."
        )
    return act


def _state(session: Session, clock: Clock, act: MoneyAct) -> dict[str, str]:
    """What a preview compares: the invoice's state, or the draft of a tenant whose plan or details change
    and those details."""
    undone = session.get(MoneyAct, act.target) if act.kind == Kind.UNDO else None
    kind = Kind(undone.kind if undone else act.kind)
    if kind in (*FEES, *DETAILS):
        account = lock_account(session, act.tenant_id)
        period = Periods(session).around(account, clock.now())
        session.flush()
        draft = invoices.draft(session, clock, period.id)
        total = format_minor(draft.total_minor if draft else 0, account.currency)
        shown = billing_details.said(account) if kind in DETAILS else {}
        return shown | {"Draft of this period": f"{total} {account.currency}"}
    invoice = session.get(Invoice, undone.target if undone else act.target)
    if invoice is None:
        return {}
    return {
        f"Invoice {invoice.label}": invoice.status,
        "To pay": f"{format_minor(open_minor(invoice), invoice.currency)} {invoice.currency}",
    }


def kind_of(name: str) -> Kind:
    try:
        return Kind(name)
    except ValueError:
        raise BadRequest(
            f"There is no act {name[:40]!r}.",
            next_step=f"Name one of {', '.join(Kind)}.",
            param="kind",
        ) from None
