"""The audit compares receipts, events, charges, ledger and invoices, each with the step before it.

Every difference names its first request ids. The audit
repairs nothing.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from billing.audit import (
    charges as audit_charges,
)
from billing.audit import (
    ledger as audit_ledger,
)
from billing.audit import (
    receipts as audit_receipts,
)
from billing.audit import (
    usage as audit_usage,
)
from billing.audit.tables import AuditRun
from billing.closing import closing, row_sums
from billing.closing.row_sums import RowSums
from billing.differences import EVERYTHING, MAX_REQUEST_IDS, Difference, Since
from billing.invoicing import reserved_numbers as numbers
from billing.invoicing.tables import Invoice
from billing.ledger.tables import LedgerEntry
from billing.usage.tables import Adjustment, ParkedEvent, UsageBatch
from core.clock import Clock
from core.database import Database
from core.money import decimal_of

Check = Callable[..., list[Difference]]  # of the session, and of Since unless it is in `WHOLE`
Steps = dict[str, dict[str, int]]  # counts and sums by step
_ENDS_WITHIN = timedelta(minutes=10)  # a client may read the rest after the engine's receipt
# These compare row by row.
ROW_CHECKS = (
    audit_receipts.receipts_and_events,
    audit_usage.batches_and_events,
    audit_usage.events_and_charges,
)
CHECKS: tuple[Check, ...] = (
    *ROW_CHECKS,
    closing.closed_days_are_unchanged,
    audit_charges.charges_and_prices,
    audit_charges.charges_and_roll_ups,
    audit_ledger.transactions_sum_to_zero,
    audit_ledger.balances_are_sums,
    audit_ledger.charges_and_ledger,
    audit_ledger.wallets_and_grants,
    audit_ledger.charges_and_invoices,
    audit_ledger.invoices_add_up,
    audit_ledger.receivables_are_open_amounts,
    numbers.numbers_have_no_gap,
    numbers.restored_invoices,
)
# These compare sums of the rows, which an audit reads once for all of them.
SUMMED = (
    audit_usage.events_and_charges,
    audit_charges.charges_and_prices,
    audit_charges.charges_and_roll_ups,
    audit_ledger.charges_and_invoices,
)
# These read sums of invoices, accounts and days, and are the same for open days.
WHOLE = (
    closing.closed_days_are_unchanged,
    audit_ledger.invoices_add_up,
    audit_ledger.receivables_are_open_amounts,
    numbers.numbers_have_no_gap,
    numbers.restored_invoices,
)


@dataclass(frozen=True, slots=True)
class AuditReport:
    steps: dict[str, dict[str, int]]  # counts and sums by step
    differences: tuple[Difference, ...]
    pending: int  # events that should have been rated; the report is not clean
    parked: int  # events that need attention; the report is not clean
    # Generations that are billed by the gateway's count alone. An engine that was killed leaves some,
    # so the report may be clean; many of them tell that the gateways and an engine disagree.
    without_receipt: tuple[str, ...] = ()
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
            "without_receipt": {
                "count": len(self.without_receipt),
                "request_ids": self.without_receipt[:MAX_REQUEST_IDS],
            },
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
    closed_days: Check | None = closing.closed_days_are_unchanged,
    in_transit: int = 0,
) -> AuditReport:
    """Compare every step; the session should be a snapshot. `more` adds checks, such as the payment
    provider's, and `steps` adds their counts. Usage that was recorded since `pending_before` does not
    count as pending, and a receipt that came since may still lack its event. `open_only` reads only
    the rows of days that are not closed, and the frozen sums of the others; `closed_days` compares
    those with their rows. `in_transit` is usage that should have reached the database, and is pending.
    """
    row_sums.prepare(session)
    since = closing.open_usage(session) if open_only else EVERYTHING
    rows = row_sums.read(session, since)
    received_before = pending_before - _ENDS_WITHIN if pending_before is not None else None
    differences = row_differences(session, since, received_before, rows)
    if closed_days is not None:
        differences += closed_days(session, rows=None if open_only else rows)
    for check in CHECKS:
        if check in (*ROW_CHECKS, closing.closed_days_are_unchanged):
            continue
        given = () if check in WHOLE else (since, rows) if check in SUMMED else (since,)
        differences += check(session, *given)
    for check in more:
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
    return AuditReport(
        _steps(session, since, rows) | (steps or {}),
        tuple(differences),
        int(pending or 0) + in_transit,
        int(waiting or 0),
        tuple(audit_receipts.billed_without_receipt(session, since, rows)),
    )


def row_differences(
    session: Session,
    since: Since,
    received_before: datetime | None = None,
    rows: RowSums | None = None,
) -> list[Difference]:
    found = audit_receipts.receipts_and_events(session, since, received_before, rows)
    found += audit_usage.batches_and_events(session, since)
    return found + audit_usage.events_and_charges(session, since, rows)


def close_days(database: Database, clock: Clock, keys: closing.Keys = ()) -> list[datetime]:
    """Close the days whose rows agree, signed with the first key; a day with a difference stays open
    until it is fixed."""
    with database.transaction() as session:
        now = clock.now()
        days = closing.whole_days(session, now)
        if not days:
            return []
        row_sums.prepare(session)
        since = closing.open_usage(session)
        rows = row_sums.read(session, since, [last for _, last in days])
        if row_differences(session, since, now - closing.SETTLED, rows):
            return []
        return closing.close_days(session, now, keys, rows)


def audit_and_store(database: Database, clock: Clock, **options: Any) -> AuditReport:
    """Audit one snapshot, then store the report. The options are those of `audit`."""
    with database.snapshot() as session:
        report = audit(session, **options)
    with database.transaction() as session:
        session.add(AuditRun(at=clock.now(), clean=report.clean, report=report.as_json()))
    return report


def _steps(session: Session, since: Since, rows: RowSums) -> dict[str, dict[str, int]]:
    """Counts and sums; of open days, with the closed days as one step."""
    entry, whole = LedgerEntry, since == EVERYTHING
    found = {
        "receipts": rows.receipt_sums(),
        "events": rows.event_sums(),
        "charges": rows.charge_sums(),
        "adjustments": _sums(session, Adjustment, (), units=Adjustment.amount),
        "ledger": _sums(
            session, entry, () if whole else (entry.id > since.entry,), units=entry.units
        ),
        "invoices": _sums(session, Invoice, (), units=Invoice.exact),
    }
    return found if whole else found | {"closed days": closing.sums_of_closed_days(session)}


def _sums(session: Session, table: Any, where: tuple[Any, ...], **columns: Any) -> dict[str, int]:
    sums = [func.coalesce(func.sum(column), 0) for column in columns.values()]
    row = session.execute(select(func.count(), *sums).select_from(table).where(*where)).one()
    names = ("count", *columns)
    return {name: int(value) for name, value in zip(names, row, strict=True)}
