"""`tollhouse tenant`: the verbs for subscriptions to billing plans."""

import argparse
from datetime import UTC, datetime
from typing import Any

from sqlalchemy.orm import Session

from billing.accounts.accounts import ensure_account
from billing.adjustments import money_acts
from billing.adjustments.act_requests import ActRequest, Kind
from billing.pricing.exchange_rates import check_currency
from billing.reports import subscription_views
from billing.subscriptions import add_ons, subscriptions
from core.errors import BadRequest
from core.ids import new_id
from core.money import decimal_of, units_of
from core.tenants import audit
from gateway.admin.adjustments.command import submit
from gateway.admin.console import (
    ACTOR,
    CommandContext,
    add_tenant,
    command_context,
    scope_named,
    tenant_id_of,
    units_of_amount,
)
from gateway.admin.output import add_json, show


def add_add_ons(verbs: Any) -> None:
    new = verbs.add_parser("add-on-add", help="create an add-on to billing plans")
    new.add_argument("name")
    new.add_argument("--fee", required=True, metavar="AMOUNT", help="per unit and interval")
    new.add_argument("--currency", default="USD")
    new.add_argument("--interval", choices=[subscriptions.MONTH, subscriptions.YEAR])
    new.set_defaults(run=_create, interval=subscriptions.MONTH)
    listed = verbs.add_parser("add-ons", help="list the add-ons, or those of a tenant")
    listed.add_argument("--tenant", help="name or id")
    listed.set_defaults(run=_list_add_ons)
    change = verbs.add_parser("add-on", help="set how many units of an add-on a tenant has")
    change.add_argument("name")
    change.add_argument("--quantity", type=int, default=1, help="0 removes it; default: 1")
    add_tenant(change)
    change.set_defaults(run=_set)
    for each in (new, listed, change):
        add_json(each)


def _create(arguments: argparse.Namespace) -> int:
    with command_context() as tools, tools.database.transaction() as session:
        created = add_ons.create(
            session,
            tools.clock.now(),
            arguments.name,
            units_of_amount(arguments.fee),
            currency=check_currency(arguments.currency, "currency"),
            interval=arguments.interval,
        )
        row = add_ons.describe(created)
        audit.record_operator(
            session, tools.clock, ACTOR, "add_on.create", created.id, before=None, after=row
        )
    _show_add_ons([row], arguments)
    return 0


def _list_add_ons(arguments: argparse.Namespace) -> int:
    with command_context() as tools, tools.database.read() as session:
        if arguments.tenant:
            scope = scope_named(session, arguments.tenant)
            rows = add_ons.of_tenant(session, scope.tenant_id)
        else:
            rows = [add_ons.describe(each) for each in add_ons.listed(session)]
    _show_add_ons(rows, arguments)
    return 0


def _set(arguments: argparse.Namespace) -> int:
    terms = {"add_on": arguments.name, "quantity": arguments.quantity}
    with command_context() as tools:
        asked = ActRequest(Kind.ADD_ON, arguments.tenant, new_id("addon"), terms=terms)
        act = submit(tools, asked)
        if act.status == money_acts.POSTED:
            with tools.database.read() as session:
                _show_add_ons(add_ons.of_tenant(session, act.tenant_id), arguments)
    return 0


def _show_add_ons(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    if not arguments.json:
        rows = [row | {"fee": f"{row['fee']['amount']} {row['fee']['currency']}"} for row in rows]
    show(rows, as_json=arguments.json, title="add-ons")


def add_subscriptions(verbs: Any) -> None:
    shown = verbs.add_parser("subscriptions", help="list a tenant's subscriptions to billing plans")
    shown.set_defaults(run=_list)
    begin = verbs.add_parser(
        "subscribe", help="move a tenant to a billing plan, now or from a date on"
    )
    begin.add_argument(
        "--from", dest="start", metavar="DATE", help="ISO 8601 with a time zone; default: now"
    )
    begin.add_argument("billing_plan", metavar="plan")
    begin.add_argument("--seats", type=int, default=0)
    begin.add_argument(
        "--override",
        action="append",
        default=[],
        metavar="NAME=AMOUNT",
        help=f"an amount of this contract: {', '.join(subscriptions.AMOUNTS)}",
    )
    begin.set_defaults(run=_subscribe)
    end = verbs.add_parser("unsubscribe", help="end a tenant's subscription")
    end.add_argument("--at-term-end", action="store_true", help="at the end of the month or year")
    end.set_defaults(run=_cancel)
    pause = verbs.add_parser("pause", help="pause a tenant's subscription until a date")
    pause.add_argument("--until", required=True, metavar="DATE", help="ISO 8601 with a time zone")
    pause.set_defaults(run=_pause)
    resume = verbs.add_parser(
        "resume",
        help="begin a paused subscription now, or take back a cancellation to the term's end",
    )
    resume.set_defaults(run=_resume)
    for each in (shown, begin, end, pause, resume):
        add_tenant(each)
        add_json(each)


def _list(arguments: argparse.Namespace) -> int:
    with command_context() as tools, tools.database.read() as session:
        _show(arguments, tools, session, tenant_id_of(session, arguments.tenant))
    return 0


def _subscribe(arguments: argparse.Namespace) -> int:
    agreed = dict(_override(each) for each in arguments.override)
    terms: dict[str, Any] = {
        "plan": arguments.billing_plan,
        "seats": arguments.seats,
        "overrides": agreed,
    }
    if arguments.start:
        terms["starts_at"] = _moment("--from", arguments.start).isoformat()
    with command_context() as tools:
        act = submit(
            tools, ActRequest(Kind.PLAN, arguments.tenant, new_id("subscribe"), terms=terms)
        )
        if act.status == money_acts.POSTED:
            with tools.database.read() as session:
                _show(arguments, tools, session, act.tenant_id)
    return 0


def _override(given: str) -> tuple[str, str]:
    name, _, amount = given.partition("=")
    try:
        return name, decimal_of(units_of(amount))
    except ValueError as error:
        raise BadRequest(
            f"--override {given}: {error}.", next_step="Write it as base_fee=100."
        ) from None


def _cancel(arguments: argparse.Namespace) -> int:
    with command_context() as tools, tools.database.transaction() as session:
        tenant_id, now = _account(arguments, tools, session), tools.clock.now()
        subscriptions.cancel(session, tenant_id, now, at_term_end=arguments.at_term_end)
        _show(arguments, tools, session, tenant_id)
    return 0


def _moment(option: str, written: str) -> datetime:
    try:
        found = datetime.fromisoformat(written)
    except ValueError as error:
        raise BadRequest(f"{option}: {error}.") from None
    if found.tzinfo is None:
        raise BadRequest(
            f"{option} {written} has no time zone.", next_step="Append +00:00 for UTC."
        )
    return found.astimezone(UTC)


def _pause(arguments: argparse.Namespace) -> int:
    until = _moment("--until", arguments.until)
    with command_context() as tools, tools.database.transaction() as session:
        tenant_id = _account(arguments, tools, session)
        subscriptions.pause(session, tenant_id, tools.clock.now(), until)
        _show(arguments, tools, session, tenant_id)
    return 0


def _resume(arguments: argparse.Namespace) -> int:
    with command_context() as tools, tools.database.transaction() as session:
        tenant_id = _account(arguments, tools, session)
        subscriptions.resume(session, tenant_id, tools.clock.now())
        _show(arguments, tools, session, tenant_id)
    return 0


def _account(arguments: argparse.Namespace, tools: CommandContext, session: Session) -> str:
    tenant_id = tenant_id_of(session, arguments.tenant)
    ensure_account(session, tenant_id, tools.clock.now())
    return tenant_id


def _show(
    arguments: argparse.Namespace, tools: CommandContext, session: Session, tenant_id: str
) -> None:
    rows = subscription_views.subscriptions_json(session, tenant_id, tools.clock.now())
    if not arguments.json:
        names = ("plan", "interval", "seats", "state", "from", "to")
        rows = [{name: row[name] for name in names} for row in rows]
    show(rows, as_json=arguments.json, title="subscriptions")
