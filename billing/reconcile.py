"""The audit compares receipts, events, charges, ledger and invoices, each with the step before it.

Every check queries its whole tables, and every difference names its first request ids. The audit
repairs nothing.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from billing import audit_ledger, audit_usage
from billing.differences import Difference
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
from core.money import decimal_of

Check = Callable[[Session], list[Difference]]
Steps = dict[str, dict[str, int]]  # counts and sums by step
CHECKS: tuple[Check, ...] = (
    audit_usage.receipts_and_events,
    audit_usage.batches_and_events,
    audit_usage.events_and_charges,
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
    pending: int  # events that are not rated yet
    parked: int  # events that need attention
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
        return not self.differences

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
    session: Session, *, more: tuple[Check, ...] = (), steps: Steps | None = None
) -> AuditReport:
    """Compare every step. `more` adds checks, such as the payment provider's, and `steps` adds
    their counts.
    """
    differences = [each for check in (*CHECKS, *more) for each in check(session)]
    pending = session.scalar(
        select(func.coalesce(func.sum(UsageBatch.events), 0)).where(UsageBatch.rated_at.is_(None))
    )
    waiting = session.scalar(
        select(func.count())
        .select_from(ParkedEvent)
        .where(ParkedEvent.released_at.is_(None), ParkedEvent.dismissed_by.is_(None))
    )
    counted = _steps(session) | (steps or {})
    return AuditReport(counted, tuple(differences), int(pending or 0), int(waiting or 0))


def audit_and_store(
    session: Session,
    clock: Clock,
    *,
    more: tuple[Check, ...] = (),
    steps: Steps | None = None,
) -> AuditReport:
    report = audit(session, more=more, steps=steps)
    session.add(AuditRun(at=clock.now(), clean=report.clean, report=report.as_json()))
    session.flush()
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
