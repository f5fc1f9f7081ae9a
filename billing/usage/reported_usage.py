"""Usage that Tollhouse did not serve, reported as CloudEvents and billed as usage events.

The operator reports for any tenant, an organisation for itself. An event is known by its source and
id, for good and for each of them apart: the table of reported events is not subject to retention. A
call is stored as a whole or refused as a whole, with the first event that is wrong.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

from sqlalchemy import or_, select, tuple_
from sqlalchemy.orm import Session

from billing.accounts.accounts import ensure_accounts
from billing.accounts.tables import BillingAccount
from billing.pricing.prices import load_price_book
from billing.pricing.pricing import ANY, UNIT_OF, Component, PriceBook, PriceVersion
from billing.usage import usage
from billing.usage.tables import ReportedEvent
from core.clock import Clock
from core.database import insert_new
from core.errors import BadRequest, Conflict, NotFound
from core.events import SettledBy, UsageEvent, UsageKind
from core.ids import KEY, REQUEST, new_id
from core.tenants.models import Project, Tenant
from core.tenants.scope import TenantScope

ROUTE = "/admin/v1/events"
_PRICE_MISSING = "The operator sets prices (POST /admin/v1/prices)"
_TOKENS = ("input_tokens", "cached_tokens", "output_tokens")
_MEASURES = {
    UsageKind.GENERATION: (*_TOKENS, "requests"),
    UsageKind.EMBEDDING: ("input_tokens", "cached_tokens", "requests"),
    UsageKind.MODERATION: ("requests",),
    UsageKind.CACHE_HIT: ("requests",),
    UsageKind.GPU_SECONDS: ("seconds",),
    UsageKind.AUDIO: (*_TOKENS, "requests", "seconds"),
    UsageKind.SPEECH: (*_TOKENS, "requests", "characters"),
    UsageKind.IMAGE: (*_TOKENS, "requests", "images"),
}
_UNITS = ("seconds", "characters", "images")
_LATER = ("characters", "images")  # events of older versions have a digest without them
_Key = tuple[str, str]  # source, id


@dataclass(frozen=True, slots=True)
class Report:
    """A CloudEvent with its measures. `requests` and the units are None if it does not state them."""

    source: str
    id: str
    kind: UsageKind
    subject: str  # id or name of the tenant; "": the one that reports
    at: datetime | None  # None: the time of arrival
    model: str
    adapter: str | None = None
    project: str = ""  # id or name
    input_tokens: int = 0  # includes cached_tokens
    cached_tokens: int = 0
    output_tokens: int = 0
    requests: int | None = None
    seconds: int | None = None
    characters: int | None = None
    images: int | None = None

    @property
    def key(self) -> _Key:
        return self.source, self.id

    @property
    def digest(self) -> str:
        left_out = {"at", *(name for name in _LATER if getattr(self, name) is None)}
        parts = [getattr(self, name) for name in self.__dataclass_fields__ if name not in left_out]
        moment = self.at.timestamp() if self.at else None
        return hashlib.sha256(json.dumps([*parts, moment]).encode()).hexdigest()

    def measures(self) -> dict[Component, int]:
        """What the event states, by component."""
        if self.kind is UsageKind.GPU_SECONDS:
            return {Component.GPU_SECOND: self.seconds or 0}
        if self.kind is UsageKind.MODERATION:
            return {Component.MODERATION: 1 if self.requests is None else self.requests}
        found = {
            Component.INPUT: self.input_tokens - self.cached_tokens,
            Component.CACHED_INPUT: self.cached_tokens,
            Component.OUTPUT: self.output_tokens,
            Component.REQUEST: self.requests or 0,
        }
        if self.kind in UNIT_OF:
            found[UNIT_OF[self.kind]] = self.units
        return {component: count for component, count in found.items() if count}

    def problem(self) -> str | None:
        """What is wrong with the measures; None if nothing is."""
        for name in (*_TOKENS, "requests", *_UNITS):
            if getattr(self, name) and name not in _MEASURES[self.kind]:
                return f"{self.kind.value} has no {name}"
        if self.cached_tokens > self.input_tokens:
            return f"{self.cached_tokens} cached_tokens exceed {self.input_tokens} input_tokens"
        if not any(self.measures().values()):
            return "it states no quantity"
        return None

    @property
    def units(self) -> int:
        """Seconds, characters or images, of the kinds that are counted so."""
        return (self.seconds or self.characters or self.images or 0) if self.kind in UNIT_OF else 0

    @property
    def quantity(self) -> int:
        if self.kind is UsageKind.GPU_SECONDS:
            return self.seconds or 0
        return 1 if self.requests is None else self.requests


@dataclass(frozen=True, slots=True)
class Reported:
    stored: int
    duplicates: int

    def __add__(self, other: "Reported") -> "Reported":
        return Reported(self.stored + other.stored, self.duplicates + other.duplicates)

    def describe(self) -> dict[str, int]:
        return {"stored": self.stored, "duplicates": self.duplicates}


def report(session: Session, clock: Clock, reports: Sequence[Report], actor: str) -> Reported:
    """Store the operator's events that are not known yet. BadRequest or Conflict refuses them all."""
    return _report(session, clock, reports, _Reporter(actor))


def report_own(
    session: Session, scope: TenantScope, clock: Clock, reports: Sequence[Report]
) -> Reported:
    """As `report`, of an organisation that reports its own usage: `subject` may be left out, and is
    otherwise the organisation itself. A key of one project reports for that project alone."""
    return _report(session, clock, reports, _Reporter(scope.actor, scope))


@dataclass(frozen=True, slots=True)
class _Reporter:
    actor: str
    scope: TenantScope | None = None  # None: the operator

    @property
    def name(self) -> str:
        return self.scope.tenant_id if self.scope is not None else ""

    @property
    def key_id(self) -> str:
        """The API key that reports; members and the operator have none."""
        return self.actor if self.scope is not None and self.actor.startswith(KEY) else ""

    @property
    def own_project(self) -> str:
        return (self.scope.project_id or "") if self.scope is not None else ""

    def may_report_for(self, tenant_id: str) -> bool:
        return self.scope is None or self.scope.tenant_id == tenant_id


def _report(
    session: Session, clock: Clock, reports: Sequence[Report], reporter: _Reporter
) -> Reported:
    first: dict[_Key, Report] = {}
    for each in reports:
        if first.setdefault(each.key, each).digest != each.digest:
            raise _differs(each)
    now = clock.now()
    events = _usage_events(session, first, now, reporter)
    rows = [
        {
            "reporter": reporter.name,
            "source": key[0],
            "event_id": key[1],
            "request_id": events[key].request_id,
            "tenant_id": events[key].tenant_id,
            "digest": first[key].digest,
            "reported_by": reporter.actor,
            "reported_at": now,
        }
        for key in sorted(first)  # always in the same order, to avoid deadlocks
    ]
    table: Any = ReportedEvent.__table__
    insert_new(session, table, rows, "reporter", "source", "event_id")
    known = select(ReportedEvent).where(
        ReportedEvent.reporter == reporter.name,
        tuple_(ReportedEvent.source, ReportedEvent.event_id).in_(list(first)),
    )
    new = []
    for row in session.scalars(known):
        key = row.source, row.event_id
        if row.digest != first[key].digest:
            raise _differs(first[key])
        if row.request_id == events[key].request_id:
            new.append(events[key])
    stored = usage.record(session, new, clock)
    return Reported(stored, len(reports) - stored)


def _usage_events(
    session: Session, reports: dict[_Key, Report], now: datetime, reporter: _Reporter
) -> dict[_Key, UsageEvent]:
    tenants = _tenants(session, {each.subject for each in reports.values()})
    if reporter.name:
        tenants = {name: id_ for name, id_ in tenants.items() if reporter.may_report_for(id_)}
        tenants[""] = reporter.name
    for each in reports.values():
        problem = each.problem()
        if problem is not None:
            raise _refusal(each, problem, "data")
        if each.subject not in tenants:
            raise _refusal(each, f"there is no tenant {each.subject!r}", "subject")
    ids = set(tenants.values())
    ensure_accounts(session, ids, now)
    accounts = select(BillingAccount.tenant_id, BillingAccount.currency)
    found = session.execute(accounts.where(BillingAccount.tenant_id.in_(ids)))
    currencies = {row[0]: row[1] for row in found}
    book, projects = load_price_book(session), _projects(session, ids)
    events = {}
    for key, each in reports.items():
        tenant_id = tenants[each.subject]
        if each.project and (tenant_id, each.project) not in projects:
            raise _refusal(each, f"the tenant has no project {each.project!r}", "data.project")
        at = (each.at or now).astimezone(UTC)
        if at > now + usage.SKEW:
            raise _refusal(each, f"its time {at.isoformat()} is in the future", "time")
        version = _price(book, each, tenant_id, at, currencies[tenant_id])
        project_id = projects.get((tenant_id, each.project), reporter.own_project)
        if reporter.own_project not in ("", project_id):
            problem = f"the key is of another project than {each.project!r}"
            raise _refusal(each, problem, "data.project")
        owner = _Owner(tenant_id, project_id, reporter.key_id)
        events[key] = _usage_event(each, owner, version, at)
    return events


def _price(
    book: PriceBook, each: Report, tenant_id: str, at: datetime, currency: str
) -> PriceVersion:
    """The version in force at the time of use. It must name the model: the price of all models would
    hide a misspelt name, and a measure without a price would be free.
    """
    try:
        version = book.pin(tenant_id, each.model, each.adapter, at, currency)
    except NotFound:
        version = None
    if version is None or version.model == ANY:
        problem = f"no price of {each.model!r} in {currency} is in force on {at:%Y-%m-%d %H:%M} UTC"
        raise _refusal(each, problem, "data.model", _PRICE_MISSING)
    for component, count in each.measures().items():
        if count and component not in version.rates:
            problem = f"the price {version.id} of {each.model!r} has no rate for {component.value}"
            raise _refusal(each, problem, "data", _PRICE_MISSING)
    return version


class _Owner(NamedTuple):
    tenant_id: str
    project_id: str
    key_id: str


def _usage_event(each: Report, owner: _Owner, version: PriceVersion, at: datetime) -> UsageEvent:
    return UsageEvent(
        request_id=new_id(REQUEST),
        tenant_id=owner.tenant_id,
        project_id=owner.project_id,
        key_id=owner.key_id,
        kind=each.kind,
        route=ROUTE,
        model=each.model,
        adapter=each.adapter,
        adapter_digest=None,
        price_version=version.id,
        occurred_at=at,
        finished_at=at,
        input_tokens=each.input_tokens,
        cached_tokens=each.cached_tokens,
        output_tokens=each.output_tokens,
        waived_tokens=0,
        finish_reason="reported",
        status=200,
        settled_by=SettledBy.REPORTED,
        quantity=each.quantity,
        units=each.units,
        client_request_id=each.id,
    )


def _tenants(session: Session, subjects: set[str]) -> dict[str, str]:
    """Ids by name and by id."""
    wanted = or_(Tenant.name.in_(subjects), Tenant.id.in_(subjects))
    rows = session.execute(select(Tenant.id, Tenant.name).where(wanted)).all()
    return {row[1]: row[0] for row in rows} | {row[0]: row[0] for row in rows}


def _projects(session: Session, tenants: set[str]) -> dict[tuple[str, str], str]:
    """Ids by tenant and name or id."""
    rows = session.execute(
        select(Project.tenant_id, Project.id, Project.name).where(Project.tenant_id.in_(tenants))
    ).all()
    found = {(row[0], row[2]): row[1] for row in rows}
    return found | {(row[0], row[1]): row[1] for row in rows}


def _refusal(each: Report, problem: str, param: str, next_step: str = "") -> BadRequest:
    return BadRequest(
        f"Event {each.id!r} of {each.source!r} is refused: {problem}.",
        next_step=f"{next_step or 'Correct it'}. Send the whole call again: none of it is stored.",
        param=param,
        code="event_refused",
    )


def _differs(each: Report) -> Conflict:
    return Conflict(
        f"Event {each.id!r} of {each.source!r} was sent before with other contents.",
        next_step="Give every event an id of its own.",
        code="event_differs",
    )
