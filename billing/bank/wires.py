"""Imported lines of bank statements, and their booking as wires by acts on money.

A line is stored once by the bank's id and the account. What its references name is booked in the same
transaction, each part as an act on money, so that the rule of the second person, the audit log and undo
hold. A line whose acts are undone or rejected can be assigned again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import func, or_, select
from sqlalchemy.orm import Session, aliased

from billing.accounts.accounts import ensure_account
from billing.adjustments import money_acts
from billing.adjustments.act_requests import ActRequest, Kind
from billing.adjustments.money_acts import POSTED, REJECTED, WAITING, FourEyes
from billing.adjustments.tables import MoneyAct
from billing.amounts import minor
from billing.bank import camt053, csv_file
from billing.bank.lines import MOST_BYTES, StatementLine
from billing.bank.matching import Match, allocated, match
from billing.bank.tables import BankLine
from billing.invoicing import invoices
from billing.invoicing.tables import Invoice
from core.clock import Clock
from core.database import insert_new
from core.errors import BadRequest, Conflict, NotFound, TollhouseError
from core.ids import new_id
from core.money import units_of_minor
from core.tenants.organisations import tenant_named

MATCHED, UNMATCHED, IGNORED, DISMISSED = "matched", "unmatched", "ignored", "dismissed"
STATES = (UNMATCHED, MATCHED, IGNORED, DISMISSED)
_PREFIX = "bank:"  # of the references of acts
_SAME = ("booked_on", "currency", "amount_minor")


@dataclass(slots=True)
class Imported:
    """Counts of one import. `known` lines were imported before and change nothing."""

    matched: int = 0
    unmatched: int = 0
    ignored: int = 0
    known: int = 0
    lines: list[str] = field(default_factory=list)  # ids of the new ones


@dataclass(frozen=True, slots=True)
class Clerk:
    """Who books, and from which amount on a second person has to confirm."""

    clock: Clock
    actor: str
    rule: FourEyes


def parse(content: bytes, columns: Mapping[str, str] | None = None) -> list[StatementLine]:
    """XML is camt.053, everything else CSV in UTF-8. BadRequest says what is wrong with it."""
    if len(content) > MOST_BYTES:
        raise BadRequest(
            f"The file has {len(content)} bytes.",
            next_step=f"Import at most {MOST_BYTES // 2**20} MiB at once.",
        )
    start = content.lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
    if start == b"<":
        return camt053.parse(content)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadRequest(
            f"The file is neither XML nor UTF-8: byte {error.start} is wrong.",
            next_step="Export it as CSV in UTF-8, or as camt.053.",
        ) from None
    return csv_file.parse(text, columns)


def import_lines(session: Session, lines: Sequence[StatementLine], clerk: Clerk) -> Imported:
    """Store and book the new lines. Conflict if the bank's id of a line is known with another amount, day
    or currency: then nothing is stored."""
    _refuse_doubles(lines)
    now, result = clerk.clock.now(), Imported()
    rows = [
        {name: getattr(each, name) for name in StatementLine.__slots__}
        | {
            "id": new_id("bl"),
            "status": UNMATCHED,
            "note": "",
            "acts": [],
            "imported_at": now,
            "imported_by": clerk.actor,
        }
        for each in lines
    ]
    insert_new(session, BankLine.__table__, rows, "account", "bank_id")  # type: ignore[arg-type]
    made = {str(row["id"]) for row in rows}
    for each in lines:
        line = session.scalars(
            select(BankLine).where(
                BankLine.account == each.account, BankLine.bank_id == each.bank_id
            )
        ).one()
        if line.id not in made:
            _refuse_other(line, each)
            result.known += 1
            continue
        _book(session, line, clerk)
        result.lines.append(line.id)
        setattr(result, line.status, getattr(result, line.status) + 1)
    return result


def assign(session: Session, line_id: str, target: str, clerk: Clerk) -> BankLine:
    """Book an unmatched line for an invoice (id or number) or a tenant (id or name)."""
    line = get(session, line_id, lock=True)
    if state(session, line) != UNMATCHED:
        raise Conflict(
            f"The line is {state(session, line)}.",
            next_step="Unassign it first."
            if line.status == MATCHED
            else "Only unmatched lines can be assigned.",
        )
    found = _target(session, line, target)
    if not found.parts:
        raise Conflict(found.note, next_step="Choose an invoice in the line's currency.")
    _post(session, line, found, clerk)
    line.decided_by = clerk.actor
    return line


def unassign(session: Session, line_id: str, clerk: Clerk, reason: str) -> BankLine:
    """Undo the acts of a matched line, which is unmatched then."""
    line = get(session, line_id, lock=True)
    live = [each for each in _acts(session, line) if each.id not in _dead(session, line.acts)]
    if line.status != MATCHED or not live:
        raise Conflict(
            f"The line is {state(session, line)}: nothing is booked for it.",
            next_step="Choose a matched line.",
        )
    for act in live:
        if act.status == WAITING:
            money_acts.reject(session, clerk.clock, act.id, clerk.actor, reason)
            continue
        undo = ActRequest(Kind.UNDO, act.id, f"{act.reference}:undo", None, reason)
        money_acts.submit(session, clerk.clock, undo, clerk.actor, clerk.rule)
    line.note, line.decided_by = f"unassigned: {reason}", clerk.actor
    return line


def dismiss(session: Session, line_id: str, actor: str, reason: str) -> BankLine:
    """Mark a line that pays no invoice as handled."""
    line = get(session, line_id, lock=True)
    if state(session, line) != UNMATCHED:
        raise Conflict(
            f"The line is {state(session, line)}.", next_step="Only unmatched lines are dismissed."
        )
    line.status, line.note, line.decided_by = DISMISSED, reason, actor
    return line


def get(session: Session, line_id: str, *, lock: bool = False) -> BankLine:
    query = select(BankLine).where(BankLine.id == line_id)
    found = session.scalar(query.with_for_update() if lock else query)
    if found is None:
        raise NotFound(
            f"There is no bank line {line_id[:80]!r}.",
            next_step="List them with: tollhouse payment lines",
        )
    return found


def state(session: Session, line: BankLine) -> str:
    """Its status; unmatched too if all its acts are undone or rejected."""
    if line.status == MATCHED and set(line.acts) <= _dead(session, line.acts):
        return UNMATCHED
    return line.status


def listed(session: Session, status: str = "", limit: int = 200) -> list[BankLine]:
    """The newest first."""
    query = select(BankLine).order_by(BankLine.booked_on.desc(), BankLine.id.desc())
    if status not in ("", *STATES):
        raise BadRequest(
            f"There is no status {status[:20]!r}.",
            next_step=f"Use one of {', '.join(STATES)}.",
            param="status",
        )
    if status == UNMATCHED:
        query = query.where(
            or_(BankLine.status == UNMATCHED, BankLine.id.in_(_lines_with_dead_acts(session)))
        )
    elif status:
        query = query.where(BankLine.status == status)
    rows = session.scalars(query.limit(limit))
    return [each for each in rows if not status or state(session, each) == status]


def unmatched_count(session: Session) -> int:
    """Of lines that wait for a person, those whose acts are all undone or rejected included."""
    query = select(func.count()).where(BankLine.status == UNMATCHED)
    again = select(BankLine).where(
        BankLine.status == MATCHED, BankLine.id.in_(_lines_with_dead_acts(session))
    )
    freed = [each for each in session.scalars(again) if state(session, each) == UNMATCHED]
    return int(session.scalar(query) or 0) + len(freed)


def describe(session: Session, line: BankLine) -> dict[str, Any]:
    names = ("id", "account", "bank_id", "currency", "payer", "payer_account", "reference", "text")
    acts = _acts(session, line)
    labels = {
        each.id: each.label
        for each in session.scalars(
            select(Invoice).where(Invoice.id.in_({act.target for act in acts}))
        )
    }
    return {name: getattr(line, name) for name in names} | {
        "booked_on": line.booked_on.isoformat(),
        "amount": minor(line.amount_minor, line.currency),
        "status": state(session, line),
        "note": line.note,
        "tenant_id": line.tenant_id,
        "acts": [
            {
                "id": act.id,
                "status": act.status,
                "invoice": labels.get(act.target),
                "units": str(act.amount),
            }
            for act in acts
        ],
        "imported_at": line.imported_at.isoformat(),
        "imported_by": line.imported_by,
        "decided_by": line.decided_by,
    }


def _book(session: Session, line: BankLine, clerk: Clerk) -> None:
    if line.amount_minor < 0:
        line.status, line.note = IGNORED, "a debit"
        return
    found = match(session, line)
    line.note = found.note
    if not found.parts:
        return
    savepoint = session.begin_nested()
    try:
        _post(session, line, found, clerk)
        savepoint.commit()
    except TollhouseError as error:
        savepoint.rollback()
        session.refresh(line)
        line.note = str(error)[:500]
    session.flush()


def _post(session: Session, line: BankLine, found: Match, clerk: Clerk) -> None:
    made = []
    for number, part in enumerate(found.parts, len(line.acts)):
        asked = ActRequest(
            Kind.WIRE,
            part.target,
            f"{_PREFIX}{line.id}:{number}",
            units_of_minor(part.minor, line.currency),
            f"{line.bank_id} of {line.booked_on}, {line.payer}".strip(", ")[:500],
        )
        act = money_acts.submit(session, clerk.clock, asked, clerk.actor, clerk.rule)
        made.append(act.id)
    line.acts = [*line.acts, *made]
    line.status, line.note, line.tenant_id = MATCHED, found.note, found.tenant_id
    session.flush()


def _target(session: Session, line: BankLine, target: str) -> Match:
    try:
        invoice = invoices.get(session, target)
    except NotFound:
        tenant = tenant_named(session, target)
        ensure_account(session, tenant.id, line.imported_at)
        return allocated(session, line, tenant.id, [])
    if invoice.label is None:
        raise Conflict(
            "The invoice is a draft.", next_step="Assign the line to its tenant, as credit."
        )
    return allocated(session, line, invoice.tenant_id, [invoice])


def _acts(session: Session, line: BankLine) -> list[MoneyAct]:
    if not line.acts:
        return []
    rows = select(MoneyAct).where(MoneyAct.id.in_(line.acts)).order_by(MoneyAct.reference)
    return list(session.scalars(rows))


def _dead(session: Session, ids: Sequence[str]) -> set[str]:
    """Of these acts, those that are rejected or undone."""
    if not ids:
        return set()
    rejected = select(MoneyAct.id).where(MoneyAct.id.in_(ids), MoneyAct.status == REJECTED)
    undone = select(MoneyAct.target).where(
        MoneyAct.target.in_(ids), MoneyAct.kind == Kind.UNDO.value, MoneyAct.status == POSTED
    )
    return set(session.scalars(rejected)) | set(session.scalars(undone))


def _lines_with_dead_acts(session: Session) -> set[str]:
    undo = aliased(MoneyAct)
    rows = session.scalars(
        select(MoneyAct.reference)
        .outerjoin(undo, (undo.target == MoneyAct.id) & (undo.kind == Kind.UNDO.value))
        .where(
            MoneyAct.kind == Kind.WIRE.value,
            MoneyAct.reference.startswith(_PREFIX),
            or_(MoneyAct.status == REJECTED, undo.status == POSTED),
        )
    )
    return {each.split(":")[1] for each in rows}


def _refuse_doubles(lines: Sequence[StatementLine]) -> None:
    seen = set()
    for each in lines:
        if (each.account, each.bank_id) in seen:
            raise BadRequest(
                f"The id {each.bank_id} is in the file twice.",
                next_step="Choose the column that tells the bookings apart.",
            )
        seen.add((each.account, each.bank_id))


def _refuse_other(line: BankLine, given: StatementLine) -> None:
    for name in _SAME:
        if getattr(line, name) != getattr(given, name):
            raise Conflict(
                f"The line {given.bank_id} was imported with the {name.partition('_')[0]} "
                f"{getattr(line, name)}, and the file says {getattr(given, name)}.",
                next_step="Nothing is imported: compare the file with the one of before.",
            )
