"""Usage that the engines' receipt files still hold and the database does not: after the database was
restored from a backup. Events are made of the receipts as recovery makes them of open requests.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import islice
from pathlib import Path

from sqlalchemy import select, union_all
from sqlalchemy.orm import Session

from billing.differences import MAX_REQUEST_IDS, Difference, lost
from billing.usage import usage
from billing.usage.reading import known_elsewhere
from billing.usage.retention import latest_retention
from billing.usage.tables import ParkedEvent, UsageEventRow
from core.clock import Clock
from core.database import Database
from core.errors import NotFound
from core.events import UsageEvent
from core.ids import REQUEST, floor_id
from core.settings import Settings
from core.tenants.models import Tenant
from engine.protocol import WHOLE, Receipt
from engine.receipts import read_receipts
from gateway.metering.engine_receipts import engine_count, opened_of
from gateway.metering.recovery import event_of_receipt
from gateway.metering.spool_watch import requests_in_spools
from gateway.request.receipts import merged_receipt

_BATCH = 1000
MIN_AGE_S = 600.0  # younger requests may run, or be in a spool of another machine


@dataclass(slots=True)
class Recovered:
    """Counts of requests. `without_payer` are warm-ups, guard models, and receipts of older engines."""

    in_files: int = 0
    known: int = 0  # in the database or in a spool of this machine
    too_old: int = 0  # of months whose events were dropped
    without_payer: list[str] = field(default_factory=list)
    unknown_tenant: list[str] = field(default_factory=list)
    stored: list[str] = field(default_factory=list)
    parked: list[str] = field(default_factory=list)


def receipt_files(settings: Settings, given: Iterable[str] = ()) -> list[Path]:
    """The given files, and those in given directories; else this machine's engines' own, if any."""
    places = [Path(each) for each in given]
    found = [] if places else sorted((settings.data_dir / "receipts").glob("*.log"))
    for place in places:
        found += sorted(place.glob("*.log")) if place.is_dir() else [place]
    missing = [str(path) for path in found if not path.is_file()]
    if missing:
        raise NotFound(
            f"There is no receipt file {missing[0]}.",
            next_step="Name the files of the engines' --receipts, or a directory with them.",
        )
    return found


def recover(
    database: Database,
    settings: Settings,
    clock: Clock,
    files: list[Path],
    *,
    dry_run: bool,
    min_age_s: float,
) -> Recovered:
    """Store what is missing. A second run finds it known."""
    total, newest = Recovered(), _newest(clock, min_age_s)
    waiting = requests_in_spools(settings)
    for path in files:
        for requests in _batches(path, newest):
            with database.transaction() as session:
                events = _missing(session, clock, requests, waiting, total)
                names = [event.request_id for event in events]
                if dry_run:
                    total.stored += names
                    continue
                usage.record(session, events, clock)
                receipts = [each for name in names for each in requests[name]]
                stored = [engine_count("", each, clock.now()) for each in receipts]
                usage.store_receipts(session, stored)
                parked = set(
                    session.scalars(
                        select(ParkedEvent.request_id).where(ParkedEvent.request_id.in_(names))
                    )
                )
                total.stored += [name for name in names if name not in parked]
                total.parked += sorted(parked)
    return total


def files_and_events(
    session: Session, settings: Settings, clock: Clock, files: list[Path]
) -> list[Difference]:
    """An audit's check: every billable receipt in the files has its usage event, and what the database
    keeps of a receipt is what the file says."""
    newest, missing, wrong = _newest(clock, MIN_AGE_S), list[str](), list[str]()
    waiting = requests_in_spools(settings)
    for path in files:
        for requests in _batches(path, newest):
            found = Recovered()
            events = _missing(session, clock, requests, waiting, found)
            missing += [event.request_id for event in events] + found.unknown_tenant
            wrong += _differing(session, requests)
    message = (
        "an engine's receipt file holds requests that the database lost; "
        "run tollhouse recover --from-receipts"
    )
    differences = lost("receipt files/events", message, missing)
    if wrong:
        message = "the token counts of an engine's receipt file and of the database differ"
        ids = tuple(sorted(wrong)[:MAX_REQUEST_IDS])
        differences.append(
            Difference("receipt files/receipts", "amount", message, len(wrong), 0, ids)
        )
    return differences


def _differing(session: Session, requests: dict[str, list[Receipt]]) -> list[str]:
    """Ids of receipts that the database has, but from no engine with the counts of the file. One that
    it lacks came with no answer, because its gateway died; its event is judged."""
    held = {each.request_id: each for receipts in requests.values() for each in receipts}
    stored: dict[str, set[tuple[int, int, int]]] = {}
    for each in usage.receipts_of(session, list(held)):
        counts = (each.prompt_tokens, each.cached_tokens, each.generated_tokens)
        stored.setdefault(each.request_id, set()).add(counts)
    wrong = {name for name, counts in stored.items() if _counts(held[name]) not in counts}
    return sorted(wrong - _replaced(session, [held[name] for name in wrong]))


def _replaced(session: Session, receipts: list[Receipt]) -> set[str]:
    """Ids of receipts without a whole answer whose request has one: another replica gave it, and the
    gateway that gave up the first attempt was gone before its receipt came."""
    attempts = {
        each.request_id: _gateway_id(each) for each in receipts if each.finish_reason not in WHOLE
    }
    if not attempts:
        return set()
    answered = select(UsageEventRow.request_id).where(
        UsageEventRow.request_id.in_(attempts.values()), UsageEventRow.finish_reason.in_(WHOLE)
    )
    elsewhere = set(session.scalars(answered))
    return {name for name, request_id in attempts.items() if request_id in elsewhere}


def _gateway_id(receipt: Receipt) -> str:
    """The request's id as the gateway knows it: of several prompts, the engine's has a number."""
    return receipt.request_id.partition(".")[0]


def _counts(receipt: Receipt) -> tuple[int, int, int]:
    return receipt.prompt, receipt.cached, receipt.generated


def _newest(clock: Clock, min_age_s: float) -> str:
    return floor_id(REQUEST, clock.now() - timedelta(seconds=min_age_s))


def _batches(path: Path, newest: str) -> Iterator[dict[str, list[Receipt]]]:
    """The receipts by the gateway's request id, of requests before `newest`."""
    found: dict[str, dict[str, Receipt]] = {}
    for receipt in read_receipts(path):
        found.setdefault(_gateway_id(receipt), {})[receipt.request_id] = receipt
    requests = ((name, list(parts.values())) for name, parts in found.items() if name < newest)
    while batch := dict(islice(requests, _BATCH)):
        yield batch


def _missing(
    session: Session,
    clock: Clock,
    requests: dict[str, list[Receipt]],
    waiting: frozenset[str],
    total: Recovered,
) -> list[UsageEvent]:
    total.in_files += len(requests)
    ids = list(requests)
    known = set(
        session.scalars(
            union_all(
                select(UsageEventRow.request_id).where(UsageEventRow.request_id.in_(ids)),
                select(ParkedEvent.request_id).where(ParkedEvent.request_id.in_(ids)),
            )
        )
    )
    known |= known_elsewhere(session, [each for each in ids if each not in known])
    retention = latest_retention(session)
    floor = retention.floor_id if retention is not None else ""
    names = {receipts[0].namespace for receipts in requests.values()}
    tenants = set(session.scalars(select(Tenant.id).where(Tenant.id.in_(names))))
    events = []
    for request_id, receipts in requests.items():
        opened = opened_of(request_id, receipts, "")
        if request_id in known or request_id in waiting:
            total.known += 1
        elif opened is None:
            total.without_payer.append(request_id)
        elif request_id < floor:
            total.too_old += 1
        elif opened.tenant_id not in tenants:
            total.unknown_tenant.append(request_id)
        else:
            whole = merged_receipt(request_id, receipts)
            events.append(event_of_receipt(opened, whole, clock.now()))
    return events
