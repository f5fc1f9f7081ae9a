"""Health: the state of each component, as this gateway process sees it, the service in the last hour, and
what to do."""

from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from billing.audit.tables import AuditRun
from billing.notices.tables import OutboxMessage
from billing.payments.tables import PaymentCommand
from billing.restores import restores
from billing.usage.tables import ParkedEvent, UsageBatch
from core import heartbeats
from core.dead_letter_models import DeadLetter
from dashboards import capacity_advice
from dashboards.backend import ComponentStatus
from dashboards.page_data import PageData, Tile, show
from dashboards.pages.common import deps_of, operator_of, root_of, wants_csv
from dashboards.pages.operator import service_now
from dashboards.tables import Column, Table

PATH = "/operator/health"
LATE = timedelta(minutes=5)
_ORDER = {"bad": 0, "warn": 1, "good": 2}
_MOST_REMARKS = 3
AUDIT_LATE = timedelta(hours=3)
_STARTING = timedelta(seconds=2 * heartbeats.EVERY_S)  # in which each queue beats once
COLUMNS = [
    Column("part", "Component", link="href"),
    Column("state", "State", "badge"),
    Column("says", "Details"),
    Column("next_step", "What to do"),
]


def page_of(request: Request) -> Response:
    operator_of(request, "operations")
    deps = deps_of(request)
    now = deps.clock.now()
    with deps.database.read() as session:
        began = deps.clock.monotonic()
        tasks = _tasks(session, now, deps.tasks_since)
        checks = [tasks, *(check(session, now) for check in _CHECKS)]
        took_ms = (deps.clock.monotonic() - began) * 1000
    parts = [
        *deps.backend.parts(),
        ComponentStatus("database", "good", f"{len(checks)} checks in {took_ms:.0f} ms"),
        *checks,
    ]
    parts.sort(key=lambda each: _ORDER.get(each.state, len(_ORDER)))  # what hurts first
    root = root_of(request)
    links = {"audit": "reconciliation", "dead letters": "dead-letters"}
    links |= {each.name: "engines" for each in parts if each.name.startswith("engine ")}
    rows: list[dict[str, Any]] = [
        {
            "part": each.name,
            "href": f"{root}/operator/{links[each.name]}" if each.name in links else "",
            "state": each.state,
            "says": each.summary,
            "next_step": each.next_step,
        }
        for each in parts
    ]
    table = Table("Components", COLUMNS, rows, totals=False)
    if wants_csv(request):
        return table.csv("health")
    bad = sum(each.state == "bad" for each in parts)
    warn = sum(each.state == "warn" for each in parts)
    with deps.database.report() as session:
        service = service_now.read(session, deps, now)
        advised = capacity_advice.advice(session, service.engines, now)
    words = f"{bad} failing" if bad else f"{warn} to check" if warn else "healthy"
    page_data = PageData(
        "Health",
        "Is it well, where does it hurt, what to do: as of this moment, and in the last hour. "
        "`tollhouse doctor` also checks the disk, the clock, the broker and payments of a machine.",
        tiles=[
            Tile(
                "Status",
                words,
                f"{warn} with warnings, of {len(parts)} components",
                state="bad" if bad else "warn" if warn else "good",
            ),
            *service_now.tiles(service, root),
        ],
        links=_LINKS,
        remarks=[
            f"{each.name}: {each.summary}. {each.next_step}"
            for each in parts
            if each.state in ("bad", "warn")
        ][:_MOST_REMARKS],
        tables=[table, *service_now.tables(service, root), capacity_advice.table(advised)],
    )
    return show(request, page_data)


_LINKS = [
    ("/operator/traffic", "Traffic"),
    ("/operator/engines", "Engines: drain, resume"),
    ("/operator/plan", "Capacity plan"),
    ("/operator/engines/upstreams", "Reload upstreams"),
    ("/operator/dead-letters", "Dead letters"),
    ("/operator/reconciliation", "Audit now"),
    ("/operator/configuration", "Configuration in force"),
]


def _tasks(session: Session, now: datetime, since: datetime | None) -> ComponentStatus:
    """`since`: when this gateway began to run the tasks; None if workers do."""
    silent = heartbeats.silent_queues(session, now)
    if not silent:
        return ComponentStatus("tasks", "good", "every queue has a worker")
    if since is not None and now - since < _STARTING:
        waits = ", ".join(silent)
        return ComponentStatus("tasks", "good", f"starting: first heartbeats due for {waits}")
    dead = any(at is not None for at in silent.values())
    return ComponentStatus(
        "tasks",
        "bad" if dead else "warn",
        f"no worker: {heartbeats.summary_of(silent, now)}",
        "With a broker, start `tollhouse worker` for these queues, with the schedule. Without one, the "
        "gateway runs them, and they are seen within a minute of its start.",
    )


def _rating(session: Session, now: datetime) -> ComponentStatus:
    refused = session.scalar(
        select(func.count()).where(
            UsageBatch.rated_at.is_(None), UsageBatch.refused_at.is_not(None)
        )
    )
    if refused:
        return ComponentStatus(
            "rating",
            "bad",
            f"{refused} batches are not rated, as their events are not all there",
            "Reconciliation counts what is missing; `tollhouse usage rebuild` rates them once they are "
            "whole.",
        )
    waiting = UsageBatch.rated_at.is_(None)
    row: Any = session.execute(
        select(func.min(UsageBatch.recorded_at), func.sum(UsageBatch.events)).where(waiting)
    ).one()
    oldest, events = row
    if oldest is None:
        return ComponentStatus("rating", "good", "no events waiting")
    late = now - oldest
    state = "bad" if late > LATE else "good"
    summary = f"{events} events waiting, the oldest for {late.total_seconds():.0f} s"
    return ComponentStatus(
        "rating", state, summary, "Start `tollhouse worker`." if state == "bad" else ""
    )


def _audit(session: Session, now: datetime) -> ComponentStatus:
    last = session.scalar(select(AuditRun).order_by(AuditRun.id.desc()).limit(1))
    if last is None:
        return ComponentStatus(
            "audit",
            "warn",
            "has not run yet",
            "It runs every hour; Reconciliation runs it now.",
        )
    summary = f"{last.at:%Y-%m-%d %H:%M} UTC: {'no differences' if last.clean else 'differences'}"
    if not last.clean:
        return ComponentStatus(
            "audit",
            "bad",
            summary,
            "Open Reconciliation, and send no invoices until the audit is clean.",
        )
    late = now - last.at > AUDIT_LATE
    return ComponentStatus(
        "audit",
        "warn" if late else "good",
        summary,
        "Check that `tollhouse worker` runs." if late else "",
    )


def _dead(session: Session, now: datetime) -> ComponentStatus:
    count = session.scalar(select(func.count()).where(DeadLetter.replayed_at.is_(None))) or 0
    does = "Fix the cause, then replay them." if count else ""
    return ComponentStatus("dead letters", "bad" if count else "good", f"{count} waiting", does)


def _parked(session: Session, now: datetime) -> ComponentStatus:
    open_ = (ParkedEvent.released_at.is_(None), ParkedEvent.dismissed_by.is_(None))
    count = session.scalar(select(func.count()).where(*open_)) or 0
    does = (
        "`tollhouse usage parked list` shows the reason; `tollhouse usage parked release` retries."
        if count
        else ""
    )
    return ComponentStatus(
        "parked events", "warn" if count else "good", f"{count} need attention", does
    )


def _messages(session: Session, now: datetime) -> ComponentStatus:
    failed = session.scalar(select(func.count()).where(OutboxMessage.failed)) or 0
    waiting = session.scalar(select(func.count()).where(OutboxMessage.done_at.is_(None))) or 0
    summary = f"{waiting} webhooks and mails waiting, {failed} failed permanently"
    does = "Check the failing endpoints." if failed else ""
    return ComponentStatus("messages", "warn" if failed else "good", summary, does)


def _payments(session: Session, now: datetime) -> ComponentStatus:
    failed = session.scalar(select(func.count()).where(PaymentCommand.failed)) or 0
    waiting = session.scalar(select(func.count()).where(PaymentCommand.done_at.is_(None))) or 0
    summary = f"{waiting} commands to the provider waiting, {failed} failed permanently"
    return ComponentStatus(
        "payments",
        "warn" if failed else "good",
        summary,
        "`tollhouse doctor` shows them." if failed else "",
    )


def _restore(session: Session, now: datetime) -> ComponentStatus:
    found = restores.open_recovery(session)
    if found is None:
        return ComponentStatus("history", "good", "the database has everything that was marked")
    summary = (
        f"the database was restored from a backup, noticed {found.found_at:%Y-%m-%d %H:%M} UTC; "
        f"nothing is numbered or collected. {found.reason}"
    )
    return ComponentStatus("history", "bad", summary, restores.NEXT_STEP)


_CHECKS = (_restore, _rating, _audit, _dead, _parked, _messages, _payments)

ROUTES = [Route(PATH, page_of)]
