"""The end of a month: what must be done before its books are final, and who signed them off.

A signature stores the trial balance at the month's end. Entries that reach the month later show as a
difference from what was signed.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from billing.adjustments.money_acts import WAITING
from billing.adjustments.tables import MoneyAct
from billing.audit.tables import AuditRun
from billing.invoicing import recognition
from billing.invoicing.invoices import DRAFT
from billing.invoicing.tables import Invoice
from billing.ledger import journal
from billing.ledger.tables import LedgerTransaction
from billing.reports import receivables
from billing.reports.tables import SignedMonth
from billing.usage.tables import ParkedEvent, UsageBatch
from core.clock import Clock
from core.errors import BadRequest, Conflict
from core.money import format_minor
from core.tenants import audit_chain
from core.tenants.models import AuditEntry

GOOD, WARN, BAD = "good", "warn", "bad"  # a bad check prevents the signature
_AUDIT_AGE = timedelta(hours=26)


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    state: str
    summary: str
    path: str = ""  # of the dashboard's page that helps


def checklist(session: Session, now: datetime, month: str) -> list[Check]:
    """The checks of a month, in the order in which they are worked off."""
    end = journal.month_of(month)[1]
    return [check(session, now, end) for check in _CHECKS]


def sign(session: Session, clock: Clock, month: str, actor: str, note: str = "") -> SignedMonth:
    """Once per month and person. Conflict while a check is bad."""
    now = clock.now()
    checks = checklist(session, now, month)
    wrong = [each for each in checks if each.state == BAD]
    if wrong:
        raise Conflict(
            f"{month} cannot be signed off: {wrong[0].name}: {wrong[0].summary}.",
            next_step="Work off what the checklist names, then sign.",
        )
    if session.get(SignedMonth, (month, actor)) is not None:
        raise Conflict(f"{actor} has signed {month} already.", next_step="Another person may sign.")
    signed = SignedMonth(
        month=month,
        signed_by=actor,
        signed_at=now,
        note=note[:2000],
        checklist=[asdict(each) for each in checks],
        balances=balances(session, month),
    )
    session.add(signed)
    audit_chain.append(
        session,
        AuditEntry(
            tenant_id=None,
            at=now,
            actor=actor,
            action="month.sign",
            target=month,
            before=None,
            after={"note": signed.note, "balances": signed.balances},
        ),
    )
    session.flush()
    return signed


def signatures(session: Session, month: str = "") -> list[SignedMonth]:
    """The newest month first."""
    query = select(SignedMonth).order_by(SignedMonth.month.desc(), SignedMonth.signed_at)
    return list(session.scalars(query.where(SignedMonth.month == month) if month else query))


def balances(session: Session, month: str) -> dict[str, dict[str, str]]:
    """Picounits by currency and account of all entries before the month's end."""
    found: dict[str, dict[str, str]] = {}
    for line in journal.trial_balance(session, journal.month_of(month)[1]):
        found.setdefault(line["currency"], {})[line["account"]] = line["balance"]["units"]
    return found


def changed(session: Session, signed: SignedMonth) -> bool:
    """Whether entries reached the month after it was signed."""
    return balances(session, signed.month) != signed.balances


def describe(session: Session, signed: SignedMonth) -> dict[str, Any]:
    names = ("month", "signed_by", "note", "checklist", "balances")
    return {name: getattr(signed, name) for name in names} | {
        "signed_at": signed.signed_at.isoformat(),
        "changed": changed(session, signed),
    }


def last_month(now: datetime) -> str:
    return f"{now.replace(day=1) - timedelta(days=1):%Y-%m}"


def known_month(written: str, now: datetime) -> str:
    """A month that has begun. BadRequest for anything else."""
    if journal.month_of(written)[0] > now:
        raise BadRequest(f"{written} has not begun.", param="month")
    return written


def _over(_session: Session, now: datetime, end: datetime) -> Check:
    if now >= end:
        return Check("The month is over", GOOD, f"since {end:%Y-%m-%d} 00:00 UTC")
    return Check("The month is over", BAD, f"it ends on {end:%Y-%m-%d} at 00:00 UTC")


def _late(session: Session, _now: datetime, end: datetime) -> Check:
    waiting = (UsageBatch.rated_at.is_(None), UsageBatch.recorded_at < end)
    count = session.scalar(select(func.coalesce(func.sum(UsageBatch.events), 0)).where(*waiting))
    return _none("Usage is rated", int(count or 0), "events wait for rating", "/operator/health")


def _parked(session: Session, _now: datetime, end: datetime) -> Check:
    open_ = (ParkedEvent.released_at.is_(None), ParkedEvent.dismissed_by.is_(None))
    query = select(func.count()).select_from(ParkedEvent).where(ParkedEvent.parked_at < end, *open_)
    count = session.scalar(query) or 0
    return _none("No usage is parked", count, "events are parked", "/operator/parked")


def _drafts(session: Session, _now: datetime, end: datetime) -> Check:
    query = select(func.count()).where(Invoice.status == DRAFT, Invoice.period_end <= end)
    count = session.scalar(query) or 0
    path = "/operator/invoices?state=draft"
    return _none("Invoices are final", count, "drafts of ended periods", path)


def _acts(session: Session, _now: datetime, end: datetime) -> Check:
    waiting = (MoneyAct.status == WAITING, MoneyAct.requested_at < end)
    count = session.scalar(select(func.count()).where(*waiting)) or 0
    path = "/operator/money-acts"
    return _none("Acts on money are decided", count, "wait for a second operator", path)


def _earned(session: Session, _now: datetime, end: datetime) -> Check:
    """Every deferred line has the postings of the months that have ended."""
    wanted = {
        f"recognition:{each.line.id}:{part.month}"
        for each in recognition.deferred_lines(session)
        for part in each.parts()
        if part.ends_at <= end and part.units
    }
    posted = set(
        session.scalars(
            select(LedgerTransaction.reference).where(
                LedgerTransaction.kind == recognition.RECOGNITION
            )
        )
    )
    return _none(
        "Fees billed ahead are earned", len(wanted - posted), "shares are not posted", _LEDGER
    )


def _unpaid(session: Session, now: datetime, _end: datetime) -> Check:
    """A warning only: a month ends with open invoices."""
    late = [
        f"{format_minor(overdue, line['currency'])} {line['currency']}"
        for line in receivables.ageing(session, now)
        if (overdue := line["total"] - line["not due"])
    ]
    words = f"{', '.join(late)} past due" if late else "nothing is past due"
    return Check("Overdue invoices", WARN if late else GOOD, words, "/operator/invoices")


def _audit(session: Session, now: datetime, end: datetime) -> Check:
    name, path = "The audit is clean", "/operator/reconciliation"
    last = session.scalar(select(AuditRun).order_by(AuditRun.id.desc()).limit(1))
    if last is None:
        return Check(name, BAD, "no audit has run", path)
    said = f"{last.at:%Y-%m-%d %H:%M} UTC"
    if not last.clean:
        return Check(name, BAD, f"differences on {said}", path)
    if last.at < end or now - last.at > _AUDIT_AGE:
        return Check(name, BAD, f"the last one ran on {said}; run it now", path)
    return Check(name, GOOD, said, path)


def _balanced(session: Session, _now: datetime, end: datetime) -> Check:
    sums: dict[str, int] = {}
    for line in journal.trial_balance(session, end):
        units = int(line["balance"]["units"])
        sums[line["currency"]] = sums.get(line["currency"], 0) + units
    wrong = sorted(currency for currency, units in sums.items() if units)
    words = f"does not sum to zero in {', '.join(wrong)}" if wrong else "sums to zero"
    return Check("The trial balance", BAD if wrong else GOOD, words, _LEDGER)


def _none(name: str, count: int, words: str, path: str) -> Check:
    return Check(name, BAD if count else GOOD, f"{count} {words}", path)


_LEDGER = "/operator/ledger"
_CHECKS: tuple[Callable[[Session, datetime, datetime], Check], ...] = (
    _over,
    _late,
    _parked,
    _drafts,
    _acts,
    _earned,
    _audit,
    _balanced,
    _unpaid,
)
