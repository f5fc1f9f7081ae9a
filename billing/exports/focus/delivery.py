"""The delivery of a FOCUS dataset by a schedule: one file for each billing period, which is overwritten
while the period is open. A closed period's file stays as it is: corrections are rows of a period that
is open. The union of the files is the dataset, and a reader never counts a row twice.
"""

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from billing.accounts.tables import BillingPeriod
from billing.exports.focus.documents import Bounds, Kind, Window, places
from billing.exports.focus.metadata import Sector, delivery_json
from billing.exports.focus.rows import rows_of
from billing.exports.focus.tables import COST_AND_USAGE, INVOICE_DETAIL, FocusTable
from billing.exports.formats import Format, Row, encode
from billing.invoicing.tables import DRAFT, Invoice
from core.tenants.scope import TenantScope

# A transaction that closes a period may commit a little after its moment.
_MARGIN = timedelta(hours=1)
_MOMENT = timedelta(microseconds=1)
BY_PERIOD = (COST_AND_USAGE, INVOICE_DETAIL)
Put = Callable[[str, Path, str, str], str]  # name, file, media type and SHA-256: its address


@dataclass(frozen=True, slots=True)
class Delivery:
    """`since` is when the schedule began, `before` what was delivered until then, by file name."""

    table: FocusTable
    form: Format
    scope: TenantScope | None
    instance: str  # the schedule's id
    since: datetime
    now: datetime
    delivered_at: datetime | None = None
    before: dict[str, dict[str, Any]] = field(default_factory=dict)

    def name(self, tail: str) -> str:
        owner = self.scope.tenant_id if self.scope is not None else "all"
        return f"focus-{self.table.version}-{self.table.dataset}-{owner}{tail}"


@dataclass(frozen=True, slots=True)
class Delivered:
    rows: int
    size: int
    sha256: str  # of the metadata
    address: str  # of the metadata
    files: dict[str, dict[str, Any]]  # all files so far


def deliver(session: Session, wanted: Delivery, put: Put) -> Delivered:
    """Write the files that may have changed since the last delivery, and then the metadata."""
    files = dict(wanted.before)
    rows = size = 0
    with tempfile.TemporaryDirectory(prefix="tollhouse-export-") as folder:
        path = Path(folder) / "export"
        for window, complete in _sectors(session, wanted):
            sector = _write(session, wanted, (window, complete), path, put)
            rows, size = rows + sector.rows, size + path.stat().st_size
            files[sector.file] = _stored(sector)
        known = [_read(name, stored) for name, stored in sorted(files.items())]
        text = json.dumps(delivery_json(wanted.table, wanted.instance, wanted.now, known), indent=1)
        path.write_text(text)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        address = put(wanted.name("-metadata.json"), path, "application/json", digest)
        return Delivered(rows, size + path.stat().st_size, digest, address, files)


def _write(
    session: Session, wanted: Delivery, sector: tuple[Window, bool], path: Path, put: Put
) -> Sector:
    """Write to a temporary file first, so that the store gets a complete file or none."""
    window, complete = sector
    count, digest = 0, hashlib.sha256()

    def _counted(source: Iterator[Row]) -> Iterator[Row]:
        nonlocal count
        for row in source:
            count += 1
            yield row

    with path.open("wb") as file:
        source = rows_of(session, wanted.table, wanted.scope, window, wanted.now)
        for chunk in encode(_counted(source), wanted.table.written, wanted.form):
            digest.update(chunk)
            file.write(chunk)
    tail = f"-{window.start:%Y%m%dT%H%M}-{window.end:%Y%m%dT%H%M}" if window.exact else ""
    name = wanted.name(f"{tail}.{wanted.form.value}")
    put(name, path, wanted.form.media_type, digest.hexdigest())
    return Sector(window.start, window.end, complete, name, count, digest.hexdigest(), wanted.now)


def _sectors(session: Session, wanted: Delivery) -> Iterator[tuple[Window, bool]]:
    """The billing periods whose files are written, and whether they are closed."""
    start, end = wanted.since, wanted.now + _MOMENT  # a period that begins now is running
    before = wanted.delivered_at - _MARGIN if wanted.delivered_at is not None else start
    if wanted.table.dataset not in BY_PERIOD:
        yield Window(start, end), True
        return
    found = places(session, wanted.scope, Window(start, end))
    changed = _changed(wanted, session)
    closed_at = _closed(session, wanted)
    for bounds in sorted({each.bounds for each in found}):
        moment = closed_at.get(bounds)
        delivered = wanted.delivered_at is not None and moment is not None and moment < before
        if delivered and bounds not in changed:
            continue
        yield Window(*bounds, exact=True), moment is not None


def _closed(session: Session, wanted: Delivery) -> dict[Bounds, datetime]:
    """When the last tenant's period with these bounds was closed; without those that are open."""
    row = BillingPeriod
    query = (
        select(row.starts_at, row.ends_at, row.closed_at, Invoice.status)
        .outerjoin(Invoice, Invoice.period_id == row.id)
        .where(row.ends_at > wanted.since)
    )
    if wanted.scope is not None:
        query = query.where(row.tenant_id == wanted.scope.tenant_id)
    found: dict[Bounds, datetime] = {}
    still_open = set()
    for start, end, closed_at, status in session.execute(query):
        bounds = Bounds(start, end)
        if closed_at is None or status == DRAFT:
            still_open.add(bounds)
        else:
            found[bounds] = max(found.get(bounds, closed_at), closed_at)
    return {bounds: at for bounds, at in found.items() if bounds not in still_open}


def _changed(wanted: Delivery, session: Session) -> set[Bounds]:
    """Periods whose Invoice Detail has lines that a void has changed since the last delivery."""
    if wanted.table.dataset != INVOICE_DETAIL or wanted.delivered_at is None:
        return set()
    before = wanted.delivered_at - _MARGIN
    later = places(session, wanted.scope, Window(before, wanted.now + _MOMENT))
    ids = {
        each.invoice_id
        for each in later
        if each.kind in (Kind.VOID, Kind.RESTORED) and each.at is not None and each.at >= before
    }
    query = select(Invoice.period_start, Invoice.period_end).where(Invoice.id.in_(ids))
    return {Bounds(*each) for each in session.execute(query)}


def _stored(sector: Sector) -> dict[str, Any]:
    return {
        "start": sector.starts_at.isoformat(),
        "end": sector.ends_at.isoformat(),
        "complete": sector.complete,
        "rows": sector.rows,
        "sha256": sector.sha256,
        "updated": sector.updated_at.isoformat(),
    }


def _read(name: str, stored: dict[str, Any]) -> Sector:
    return Sector(
        datetime.fromisoformat(stored["start"]),
        datetime.fromisoformat(stored["end"]),
        stored["complete"],
        name,
        stored["rows"],
        stored["sha256"],
        datetime.fromisoformat(stored["updated"]),
    )
