"""The audit compares receipts, events, charges, ledger and invoices, each with the step before it.

Every difference names its first request ids. The audit
repairs nothing.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from billing import audit_ledger, audit_usage, closing
from billing.differences import EVERYTHING, Difference, Since
from billing.models import (
    Adjustment,
    AuditRun,
    Charge,
    EngineReceipt,
    Invoice,
    LedgerEntry,
    ParkedEvent,
    UsageBatch,
    UsageEventRow,
)
from core.clock import Clock
from core.database import Database
from core.money import decimal_of

Check = Callable[[Session], list[Difference]]
Steps = dict[str, dict[str, int]]  # counts and sums by step
# These compare row by row, and can be limited to usage that is not closed.
ROW_CHECKS = (
    audit_usage.receipts_and_events,
    audit_usage.batches_and_events,
    audit_usage.events_and_charges,
)
CHECKS: tuple[Check, ...] = (
    *ROW_CHECKS,
    closing.closed_days_are_unchanged,
    audit_usage.charges_and_prices,
    audit_usage.charges_and_roll_ups,
    audit_ledger.transactions_sum_to_zero,
    audit_ledger.balances_are_sums,
    audit_ledger.charges_and_ledger,
    audit_ledger.wallets_and_grants,
    audit_ledger.charges_and_invoices,
    audit_ledger.invoices_add_up,
    audit_ledger.receivables_are_open_amounts,
    audit_ledger.numbers_have_no_gap,
)


@dataclass(frozen=True, slots=True)
class AuditReport:
    steps: dict[str, dict[str, int]]  # counts and sums by step
    differences: tuple[Difference, ...]
    pending: int  # events that should have been rated; the report is not clean
    parked: int  # events that need attention; the report is not clean
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def lost(self) -> int:
        return sum(each.count for each in self.differences if each.kind == "lost")

    @property
    def duplicated(self) -> int:
        return sum(each.count for each in self.differences if each.kind == "duplicated")

    @property
    def ledger_error(self) -> int:
        """Sum of all differences in picounits."""
        return sum(abs(each.units) for each in self.differences)

    @property
    def clean(self) -> bool:
        return not self.differences and not self.pending and not self.parked

    def as_json(self) -> dict[str, Any]:
        return {
            "clean": self.clean,
            "lost": self.lost,
            "duplicated": self.duplicated,
            "ledger_error": decimal_of(self.ledger_error),
            "ledger_error_units": self.ledger_error,
            "pending": self.pending,
            "parked": self.parked,
            "steps": self.steps,
            "differences": [asdict(each) for each in self.differences],
            **self.more,
        }


def audit(
    session: Session,
    *,
    more: tuple[Check, ...] = (),
    steps: Steps | None = None,
    pending_before: datetime | None = None,
    open_only: bool = False,
) -> AuditReport:
    """Compare every step; the session should be a snapshot. `more` adds checks, such as the payment
    provider's, and `steps` adds their counts. Usage that was recorded since `pending_before` does not
    count as pending. `open_only` compares only the rows of days that are not closed, and leaves out
    the rows of closed days.
    """
    since = closing.open_usage(session) if open_only else EVERYTHING
    differences = row_differences(session, since)
    for check in (*CHECKS, *more):
        if check in ROW_CHECKS or (open_only and check is closing.closed_days_are_unchanged):
            continue
        differences += check(session)
    unrated = select(func.coalesce(func.sum(UsageBatch.events), 0)).where(
        UsageBatch.rated_at.is_(None)
    )
    if pending_before is not None:
        unrated = unrated.where(UsageBatch.recorded_at < pending_before)
    pending = session.scalar(unrated)
    waiting = session.scalar(
        select(func.count())
        .select_from(ParkedEvent)
        .where(ParkedEvent.released_at.is_(None), ParkedEvent.dismissed_by.is_(None))
    )
    counted = _steps(session) | (steps or {})
    return AuditReport(counted, tuple(differences), int(pending or 0), int(waiting or 0))


def row_differences(session: Session, since: Since) -> list[Difference]:
    return [each for check in ROW_CHECKS for each in check(session, since)]


def close_days(database: Database, clock: Clock) -> list[datetime]:
    """Close the days whose rows agree; a day with a difference stays open until it is mended."""
    with database.transaction() as session:
        if row_differences(session, closing.open_usage(session)):
            return []
        return closing.close_days(session, clock.now())


def audit_and_store(
    database: Database,
    clock: Clock,
    *,
    more: tuple[Check, ...] = (),
    steps: Steps | None = None,
    pending_before: datetime | None = None,
    open_only: bool = False,
) -> AuditReport:
    """Audit one snapshot, then store the report."""
    with database.snapshot() as session:
        report = audit(
            session, more=more, steps=steps, pending_before=pending_before, open_only=open_only
        )
    with database.transaction() as session:
        session.add(AuditRun(at=clock.now(), clean=report.clean, report=report.as_json()))
    return report


def _steps(session: Session) -> dict[str, dict[str, int]]:
    receipt, event, charge = EngineReceipt, UsageEventRow, Charge
    return {
        "receipts": _sums(
            session,
            receipt,
            input_tokens=receipt.prompt_tokens,
            cached_tokens=receipt.cached_tokens,
            generated_tokens=receipt.generated_tokens,
        ),
        "events": _sums(
            session,
            event,
            input_tokens=event.input_tokens,
            cached_tokens=event.cached_tokens,
            output_tokens=event.output_tokens,
            waived_tokens=event.waived_tokens,
        ),
        "charges": _sums(
            session,
            charge,
            input_tokens=charge.input_tokens,
            cached_tokens=charge.cached_tokens,
            output_tokens=charge.output_tokens,
            waived_tokens=charge.waived_tokens,
            units=charge.amount,
        ),
        "adjustments": _sums(session, Adjustment, units=Adjustment.amount),
        "ledger": _sums(session, LedgerEntry, units=LedgerEntry.units),
        "invoices": _sums(session, Invoice, units=Invoice.exact),
    }


def _sums(session: Session, table: Any, **columns: Any) -> dict[str, int]:
    sums = [func.coalesce(func.sum(column), 0) for column in columns.values()]
    row = session.execute(select(func.count(), *sums).select_from(table)).one()
    names = ("count", *columns)
    return {name: int(value) for name, value in zip(names, row, strict=True)}
