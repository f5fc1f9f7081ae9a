"""Marks: points in the history of the database that are also kept outside of it.

A mark has a position, a random token and, in a file of its own, what was done since earlier marks that
the world outside knows of: invoices, payments, commands to the provider, changes of keys. A database
whose marks do not include the latest one outside was restored from a backup: what came after is lost.
The mark is committed before its file is written, so a crash between the two only leaves an old file.
"""

import hashlib
import json
import logging
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import delete, func, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from billing.accounts.tables import Seller
from billing.ledger.tables import LedgerEntry
from billing.payments.tables import PaymentCommand
from billing.recovery import acts, places
from billing.recovery.places import Place
from billing.restores.restores import open_recovery
from billing.restores.tables import RestoreMark
from core.clock import Clock
from core.database import Database
from core.settings import Settings
from core.tenants.models import AuditEntry

log = logging.getLogger("tollhouse.restores")
LATEST, ACTS = "latest.json", "acts"
KEPT = timedelta(days=60)  # marks in the database
# Acts are stated by several marks: an id may be given before one and committed after it.
OVERLAP = timedelta(minutes=10)


@dataclass(frozen=True, slots=True)
class FiledMark:
    """The latest mark of a place outside the database."""

    position: int
    epoch: int
    token: str
    at: datetime
    numbers: dict[str, list[int]]


def note(database: Database, settings: Settings, clock: Clock) -> RestoreMark | None:
    """Mark the present, if anything happened since the last mark. None if a recovery is open, or
    another process does the same."""
    now = clock.now()
    try:
        with database.transaction() as session:
            if open_recovery(session) is not None:
                return None
            last = latest(session)
            found = _present(session, now)
            if last is not None and _same(last, found):
                return last
            found.position = last.position + 1 if last is not None else 1
            found.epoch = last.epoch if last is not None else 1
            stated = acts.read(session, _baseline(session, now))
            body = _body(found, stated)
            found.acts_sha256 = hashlib.sha256(body[1]).hexdigest()
            unchanged = last is not None and last.acts_sha256 == found.acts_sha256
            session.add(found)
            session.execute(
                delete(RestoreMark).where(
                    RestoreMark.at < now - KEPT, RestoreMark.position < found.position - 1
                )
            )
            session.flush()
    except IntegrityError:
        return None
    _file(settings, found, None if unchanged or not any(stated.values()) else body[0])
    return found


def start_epoch(session: Session, epoch: int, position: int, now: datetime) -> RestoreMark:
    """The first mark after a recovery, later than all earlier ones."""
    found = _present(session, now)
    found.position, found.epoch, found.acts_sha256 = position, epoch, ""
    session.add(found)
    session.flush()
    return found


def file_mark(settings: Settings, mark: RestoreMark) -> None:
    _file(settings, mark, None)


def latest(session: Session) -> RestoreMark | None:
    return session.scalar(select(RestoreMark).order_by(RestoreMark.position.desc()).limit(1))


def filed(places_: Iterable[Place]) -> list[FiledMark]:
    """The latest mark of each place that has one."""
    found = []
    for place in places_:
        body = place.read(LATEST)
        if body is not None:
            found.append(_filed(json.loads(body)))
    return found


def lost_since(session: Session, mark: FiledMark) -> str:
    """Why a mark outside shows that the database lost something; empty if it does not."""
    last = latest(session)
    seen = f"mark {mark.position} of {mark.at:%Y-%m-%d %H:%M:%S} UTC"
    if last is None:
        return f"It has no mark, and {seen} exists outside of it."
    if mark.epoch < last.epoch:
        return ""
    if mark.epoch > last.epoch or mark.position > last.position:
        own_last = f"mark {last.position} of {last.at:%Y-%m-%d %H:%M:%S} UTC"
        return f"Its latest one is {own_last}, and {seen} exists."
    own = session.get(RestoreMark, mark.position)
    if own is None:
        first = session.scalar(select(func.min(RestoreMark.position)))
        return "" if first is not None and mark.position < first else f"It lacks {seen}."
    return "" if own.token == mark.token else f"It has another mark {mark.position} than {seen}."


def _present(session: Session, now: datetime) -> RestoreMark:
    sellers = session.execute(select(Seller.id, Seller.next_number, Seller.next_credit_note))
    return RestoreMark(
        token=secrets.token_hex(16),
        at=now,
        entry_id=session.scalar(select(func.max(LedgerEntry.id))) or 0,
        audit_id=session.scalar(select(func.max(AuditEntry.id))) or 0,
        command_id=session.scalar(select(func.max(PaymentCommand.id))) or 0,
        numbers={name: [number, note_] for name, number, note_ in sellers},
    )


def _same(last: RestoreMark, found: RestoreMark) -> bool:
    names = ("entry_id", "audit_id", "command_id", "numbers")
    return all(getattr(last, name) == getattr(found, name) for name in names)


def _baseline(session: Session, now: datetime) -> RestoreMark | None:
    """The latest mark that is old enough, or the first one."""
    old = select(RestoreMark).where(RestoreMark.at < now - OVERLAP)
    found = session.scalar(old.order_by(RestoreMark.position.desc()).limit(1))
    first = select(RestoreMark).order_by(RestoreMark.position).limit(1)
    return found or session.scalar(first)


def _body(mark: RestoreMark, stated: acts.Acts) -> tuple[bytes, bytes]:
    """The file of acts, and its part that is the same while nothing new is stated."""
    plain = json.dumps(stated, sort_keys=True).encode()
    whole = {"mark": _json(mark)} | stated
    return json.dumps(whole, sort_keys=True).encode(), plain


def _file(settings: Settings, mark: RestoreMark, stated: bytes | None) -> None:
    """Acts first: a mark outside says that its acts are there, too. The shared place may be down: the
    local one then has the mark alone."""
    latest_body = json.dumps(_json(mark), sort_keys=True).encode()
    for place in (places.local(settings), places.shared(settings)):
        if place is None:
            continue
        try:
            if stated is not None:
                place.write(f"{ACTS}/{acts.file_name(mark.position, mark.token)}", stated)
            place.write(LATEST, latest_body)
        except Exception as error:
            log.error("mark %d cannot be kept outside the database: %s", mark.position, error)


def _json(mark: RestoreMark) -> dict[str, Any]:
    names = ("position", "epoch", "token", "numbers")
    return {name: getattr(mark, name) for name in names} | {"at": mark.at.isoformat()}


def _filed(written: dict[str, Any]) -> FiledMark:
    return FiledMark(
        int(written["position"]),
        int(written["epoch"]),
        str(written["token"]),
        datetime.fromisoformat(written["at"]),
        {name: [int(each) for each in pair] for name, pair in written["numbers"].items()},
    )
