"""Webhooks: endpoints and their events, the messages sent, and resending of failed ones."""

from typing import Any

from sqlalchemy import select
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from billing.notices import webhooks
from billing.notices.message_shapes import FORMATS, JSON, PAGERDUTY_URL, Shape
from billing.notices.tables import Budget, OutboxMessage, WebhookEndpoint
from core.errors import BadRequest, NotFound
from dashboards.once import redirect_with_secret
from dashboards.page_data import Form, Input, PageData, show
from dashboards.pages.common import (
    Fields,
    deps_of,
    form_handler,
    redirect_with_notice,
    require_confirmation,
    viewer_of,
    wants_csv,
)
from dashboards.tables import Column, Table

PATH = "/webhooks"
PAGE_ROWS = 50
ENDPOINTS = [
    Column("url", "URL"),
    Column("format", "Format"),
    Column("events", "Events"),
    Column("at", "Added", "moment"),
    Column("last", "Last message", "badge"),
]
TARGETS = [
    Column("budget", "Budget"),
    Column("kind", "By"),
    Column("target", "To"),
    Column("at", "Thresholds"),
]
MESSAGES = [
    Column("at", "Queued", "moment"),
    Column("event", "Event"),
    Column("subject", "Subject"),
    Column("kind", "By"),
    Column("target", "To"),
    Column("state", "State", "badge"),
    Column("attempts", "Attempts", "whole"),
    Column("error", "Last error"),
]
_ALL = "all"
_NO_ENDPOINTS = "No endpoints. An endpoint gets signed messages, and a test message first."
_NO_ALERTS = (
    "None. A budget can alert a webhook or an e-mail address at each threshold: see Limits."
)


def page_of(request: Request) -> Response:
    viewer, deps = viewer_of(request, "exports"), deps_of(request)
    can_edit = deps.auth.may(viewer, "exports", "write")
    before = request.query_params.get("before", "")
    if before and not (before.isascii() and before.isdecimal() and len(before) < 19):
        raise BadRequest(
            f"before is {before[:40]!r}, which is not a cursor of this list.",
            next_step="Remove it to start with the newest message.",
        )
    with deps.database.read() as session:
        endpoints = webhooks.of_tenant(session, viewer.scope)
        last = webhooks.last_states(session, viewer.scope)
        messages = webhooks.deliveries(
            session, viewer.scope, int(before[:18]) if before else None, PAGE_ROWS + 1
        )
        budgets_with_alerts = session.scalars(
            select(Budget).where(
                Budget.tenant_id == viewer.scope.tenant_id, Budget.ended_at.is_(None)
            )
        ).all()
    sent = [_message(each, can_edit) for each in messages[:PAGE_ROWS]]
    acts = [Column("acts", "Change", "acts")] if can_edit else []
    messages_table = Table("Messages", [*MESSAGES, *acts], sent, totals=False, empty="None yet.")
    if wants_csv(request):
        return messages_table.csv("messages")
    endpoint_rows = [_endpoint(each, last.get(each.id), can_edit) for each in endpoints]
    page_data = PageData(
        "Webhooks",
        "Messages are signed as specified by standardwebhooks.com and retried for a day with back-off.",
        forms=[_new()] if can_edit else [],
        tables=[
            Table(
                "Endpoints",
                [*ENDPOINTS, *acts],
                endpoint_rows,
                totals=False,
                empty=_NO_ENDPOINTS,
                next_step=("#new-endpoint", "Add an endpoint") if acts else None,
            )
        ],
        after=[
            messages_table,
            Table(
                "Budget alerts",
                TARGETS,
                _targets(budgets_with_alerts),
                totals=False,
                empty=_NO_ALERTS,
            ),
        ],
        pager=_pager(before, messages),
    )
    return show(request, page_data)


def _pager(before: str, messages: list[OutboxMessage]) -> list[tuple[str, str]]:
    links = [("Newest messages", "?")] if before else []
    if len(messages) > PAGE_ROWS:
        links.append(("Older messages", f"?before={messages[PAGE_ROWS - 1].id}"))
    return links


def _new() -> Form:
    inputs = [
        Input("url", "URL", "url", hint=f"of PagerDuty: {PAGERDUTY_URL}"),
        Input("format", "Format", "select", JSON, list(FORMATS.items())),
        Input("routing_key", "Routing key of PagerDuty", required=False),
        Input("events", "Events", "select", _ALL, [(_ALL, "everything"), *_kinds()]),
    ]
    about = "The signing secret is shown once, after the endpoint is added."
    return Form(
        PATH, "Add endpoint", {"act": "add"}, inputs, title="New endpoint", panel=True, about=about
    )


def _kinds() -> list[tuple[str, str]]:
    """Event groups by prefix: `invoice.final` belongs to invoices."""
    kinds = dict.fromkeys(name.partition(".")[0] for name in webhooks.EVENTS)
    return [(kind, f"{kind}s only") for kind in kinds]


def _endpoint(each: WebhookEndpoint, last: OutboxMessage | None, can_edit: bool) -> dict[str, Any]:
    fields = {"endpoint": each.id}
    acts = [
        Form(PATH, "Send a test", {"act": "test", **fields}),
        Form(PATH, "Remove", {"act": "remove", **fields}, confirm=each.url, danger=True),
    ]
    return {
        "url": each.url,
        "format": FORMATS.get(each.format, each.format),
        "events": ", ".join(each.events) or "everything",
        "at": each.created_at,
        "last": _state(last) if last else None,
        "acts": acts if can_edit else [],
    }


def _state(message: OutboxMessage) -> str:
    return "failed" if message.failed else "delivered" if message.done_at else "pending"


def _targets(budgets: Any) -> list[dict[str, Any]]:
    return [
        {
            "budget": each.name or each.id,
            "kind": kind,
            "target": target,
            "at": ", ".join(f"{percent} %" for percent in each.thresholds),
        }
        for each in budgets
        for kind, targets in (("webhook", each.webhooks), ("mail", each.emails))
        for target in targets
    ]


def _message(each: OutboxMessage, can_edit: bool) -> dict[str, Any]:
    again = Form(PATH, "Send again", {"act": "resend", "message": str(each.id)})
    return {
        "at": each.created_at,
        "kind": "mail" if each.channel == "email" else each.channel,
        "target": each.target,
        "event": each.payload.get("event", ""),
        "subject": each.subject,
        "state": _state(each),
        "attempts": each.attempts,
        "error": each.last_error,
        "acts": [again] if can_edit and each.failed else [],
    }


def _add(request: Request, form_fields: Fields) -> Response:
    viewer, deps = viewer_of(request, "exports", "write"), deps_of(request)
    kind = form_fields.get("events") or _ALL
    events = [name for name in webhooks.EVENTS if name.startswith(f"{kind}.")]
    if kind != _ALL and not events:
        raise BadRequest(
            f"There are no events of the kind {kind[:40]!r}.", next_step="Choose one from the list."
        )
    url = form_fields.get("url", "")
    deps.alert_targets.check([url])
    with deps.database.transaction() as session:
        shape = Shape(form_fields.get("format") or JSON, form_fields.get("routing_key") or None)
        created = webhooks.add(session, viewer.scope, deps.clock, url, events, shape=shape)
        webhooks.test(session, viewer.scope, deps.clock, created.id)
        secret = created.secret
    return redirect_with_secret(request, PATH, "endpoint-added", secret)


def _remove(request: Request, form_fields: Fields) -> Response:
    viewer, deps = viewer_of(request, "exports", "write"), deps_of(request)
    with deps.database.transaction() as session:
        found = webhooks.get(session, viewer.scope, form_fields.get("endpoint", ""))
        require_confirmation(form_fields, found.url)
        webhooks.remove(session, viewer.scope, deps.clock, found.id)
    return redirect_with_notice(request, PATH, "endpoint-removed")


def _test(request: Request, form_fields: Fields) -> Response:
    viewer, deps = viewer_of(request, "exports", "write"), deps_of(request)
    with deps.database.transaction() as session:
        webhooks.test(session, viewer.scope, deps.clock, form_fields.get("endpoint", ""))
    return redirect_with_notice(request, PATH, "test-sent")


def _resend(request: Request, form_fields: Fields) -> Response:
    viewer, deps = viewer_of(request, "exports", "write"), deps_of(request)
    number = form_fields.get("message", "")
    if not (number.isascii() and number.isdecimal() and len(number) < 19):
        raise NotFound("There is no such message.", next_step="Choose one from the list.")
    with deps.database.transaction() as session:
        webhooks.send_again(session, viewer.scope, deps.clock, int(number[:18]))
    return redirect_with_notice(request, PATH, "resent")


ROUTES = [
    Route(PATH, page_of, methods=["GET"]),
    Route(
        PATH,
        form_handler(page_of, add=_add, remove=_remove, test=_test, resend=_resend),
        methods=["POST"],
    ),
]
