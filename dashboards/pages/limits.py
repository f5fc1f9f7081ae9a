"""Limits and budgets: those in force, their use, and the requests they rejected or delayed."""

from datetime import timedelta
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from billing import budgets
from billing.models import BillingAccount, Budget
from core.errors import BadRequest, NotFound
from core.money import Money, units_of
from core.tenants import audit, keys, limits, organisations, refusals
from core.tenants.models import Tenant
from core.tenants.plans import LimitRule, Scope, Unit
from core.tenants.scope import TenantScope
from dashboards import charts
from dashboards.formats import money
from dashboards.pages.common import (
    Fields,
    acting,
    back_to,
    confirmed,
    house_of,
    viewer_of,
    wants_csv,
)
from dashboards.ports import Used
from dashboards.render import svg
from dashboards.scales import grouped, short
from dashboards.sheets import Form, Input, Sheet, Tile, show
from dashboards.tables import Column, Table
from dashboards.viewer import Viewer

PATH = "/limits"
PERIODS = {60: "minute", 3600: "hour", 86400: "day"}
RULES = [
    Column("scope", "Scope"),
    Column("unit", "Unit"),
    Column("per", "Per"),
    Column("limit", "Limit", "whole"),
    Column(
        "used",
        "Used now",
        "whole",
        "Currently taken from the bucket, which refills continuously.",
    ),
    Column("set_by", "Set by"),
    Column("mode", "Mode", "badge", "Shadow limits are counted and reported but reject nothing."),
]
BUDGETS = [
    Column("name", "Budget"),
    Column("of", "Applies to"),
    Column("window", "Window"),
    Column(
        "spent",
        "Spent",
        "money",
        "Rated usage of the current window, minus corrections.",
    ),
    Column("cap", "Cap", "money"),
    Column("share", "Used", "figure"),
    Column(
        "kind",
        "Kind",
        about="A hard budget rejects requests over its cap; a soft budget only alerts.",
    ),
    Column("alerts", "Alerts at"),
]
REFUSED = [
    Column("reason", "Reason"),
    Column("refused", "Rejected", "whole"),
    Column(
        "waited",
        "Waited",
        "whole",
        "Requests that waited in the plan's queue and were then served.",
    ),
    Column("mean", "Mean wait, ms", "whole"),
]


def page_of(request: Request) -> Response:
    viewer, house = viewer_of(request, "limits"), house_of(request)
    now = house.clock.now()
    sees_money = house.doorman.may(viewer, "budgets", "read")
    with house.database.read() as session:
        tenant = session.get_one(Tenant, viewer.scope.tenant_id)
        plan = limits.plan_of(session, tenant)
        own = {rule.slot for rule in limits.own_rules(session, viewer.scope)}
        tally = [
            {**row, "reason": _why(row["reason"])}
            for row in refusals.since(session, viewer.scope, now - timedelta(days=7))
        ]
        spent = _budgets(session, viewer, house.clock.now()) if sees_money else []
        targets = _targets(session, viewer.scope)
    used = {each.rule: each for each in house.gatehouse.used(viewer.scope, plan.rules)}
    may_set = house.doorman.may(viewer, "limits", "write")
    may_spend = house.doorman.may(viewer, "budgets", "write")
    rules = [_rule(rule, used, rule.slot in own, may_set) for rule in plan.rules]
    columns = [*RULES, Column("acts", "Change", "acts")] if may_set else RULES
    table = Table("Limits in force", columns, rules, totals=False)
    if wants_csv(request):
        return table.csv("limits")
    tables = [
        table,
        Table(
            "Rejected and delayed requests, last seven days",
            REFUSED,
            tally,
            totals=False,
            empty=_NONE,
        ),
    ]
    if sees_money:
        for each in spent:
            each["acts"] = _ending(each) if may_spend else []
        columns = [*BUDGETS, Column("acts", "Change", "acts")] if may_spend else BUDGETS
        empty = "No budgets: spend is limited by credit only. Set a budget below."
        tables.insert(
            1, Table("Budgets", columns, spent, viewer.currency, totals=False, empty=empty)
        )
    forms = [*([_new_rule()] if may_set else []), *([_new_budget(targets)] if may_spend else [])]
    sheet = Sheet(
        "Limits and budgets",
        f"Plan {plan.name}. Rate limits are token buckets that refill continuously.",
        tiles=[*_rate_tiles(used), *_budget_tiles(spent, viewer.currency)],
        tables=tables,
        forms=forms,
    )
    return show(request, sheet)


_NONE = "No request was rejected or delayed in the last seven days."


def _rate_tiles(used: dict[str, Used]) -> list[Tile]:
    return [
        Tile(
            f"{_words(each.rule)}",
            f"{short(each.used)} of {short(each.limit)}",
            f"full in {each.full_again_s:.0f} s" if each.used else "unused",
            meter=svg(charts.meter(_words(each.rule), each.used, each.limit)),
        )
        for each in used.values()
    ]


def _budget_tiles(spent: list[dict[str, Any]], currency: str) -> list[Tile]:
    return [
        Tile(
            each["name"],
            money(each["spent"], currency),
            f"of {money(each['cap'], currency)} {each['window']}",
            state="bad" if each["spent"] >= each["cap"] else "",
            meter=svg(charts.meter(each["name"], each["spent"] / 1e12, each["cap"] / 1e12)),
        )
        for each in spent
    ]


def _words(rule: str) -> str:
    """`tenant:requests:60` -> `Requests per minute`."""
    _scope, unit, *period = rule.split(":")
    name = unit.replace("_", " ").capitalize()
    return f"{name} per {PERIODS.get(int(period[0]), period[0] + ' s')}" if period else name


def _why(reason: str) -> str:
    """`key:requests:60` -> `Requests per minute, per key`; other reasons are already words."""
    scope, *rest = reason.split(":")
    return f"{_words(reason)}, per {scope}" if rest else reason.replace("_", " ").capitalize()


def _rule(rule: LimitRule, used: dict[str, Used], own: bool, may_set: bool) -> dict[str, Any]:
    state = used.get(rule.name) if rule.scope is Scope.TENANT else None
    at_once = rule.unit is Unit.CONCURRENT
    fields = {"scope": rule.scope.value, "unit": rule.unit.value, "period": str(rule.slot[2])}
    fields |= {"target": rule.target, "act": "drop"}
    return {
        "scope": f"{rule.scope} {rule.target}".strip(),
        "unit": rule.unit.value.replace("_", " "),
        "per": "concurrent" if at_once else PERIODS.get(rule.period_s, f"{rule.period_s} s"),
        "limit": rule.limit,
        "used": state.used if state else None,
        "set_by": "you or the operator" if own else "the plan",
        "mode": "shadow" if rule.shadow else "in force",
        "acts": [Form(PATH, "Remove", fields, confirm=rule.name)] if own and may_set else [],
    }


def _budgets(session: Session, viewer: Viewer, now: Any) -> list[dict[str, Any]]:
    account = session.get(BillingAccount, viewer.scope.tenant_id)
    zone = account.timezone if account else "UTC"
    rows = session.scalars(
        select(Budget)
        .where(Budget.tenant_id == viewer.scope.tenant_id, Budget.ended_at.is_(None))
        .order_by(Budget.created_at)
    ).all()
    targets = _targets(session, viewer.scope)
    found = []
    for each in rows:
        window = budgets.window_of(each.window, now, zone)
        used, back = budgets.spent_in(session, each, window)
        spent = used - back
        of = targets.get(f"{each.scope}:{each.scope_id}", each.scope_id)
        alerts = [f"{percent} %" for percent in each.thresholds]
        found.append(
            {
                "id": each.id,
                "name": each.name or f"Budget of {of}",
                "of": of,
                "window": "in total" if each.window == "total" else f"per {each.window}",
                "spent": spent,
                "cap": each.cap,
                "share": f"{100 * spent / each.cap:.1f} %",
                "kind": "hard" if each.hard else "soft",
                "alerts": ", ".join(alerts)
                if each.webhooks or each.emails
                else "no recipient is set",
            }
        )
    return found


def _ending(each: dict[str, Any]) -> list[Form]:
    fields = {"act": "end", "budget": each["id"]}
    return [Form(PATH, "End", fields, confirm=each["name"], danger=True)]


def _targets(session: Session, scope: TenantScope) -> dict[str, str]:
    """`scope:id` -> display name of everything that a budget can apply to."""
    found = {f"tenant:{scope.tenant_id}": "the organisation"}
    for project in organisations.projects(session, scope):
        found[f"project:{project.id}"] = f"project {project.name}"
    for key in keys.all_of(session, scope):
        if key.revoked_at is None:
            found[f"key:{key.id}"] = f"key {key.name}"
    return found


def _new_rule() -> Form:
    inputs = [
        Input(
            "unit",
            "Unit",
            "select",
            "requests",
            [(u.value, u.value.replace("_", " ")) for u in Unit],
        ),
        Input("scope", "Scope", "select", "tenant", [(s.value, s.value) for s in Scope]),
        Input("period", "Per", "select", "60", [(str(s), words) for s, words in PERIODS.items()]),
        Input("limit", "Limit", "number"),
        Input("mode", "Mode", "select", "force", [("force", "in force"), ("trial", "shadow")]),
    ]
    about = "A limit may be lower than the plan's. Only the operator can raise a limit of the plan."
    return Form(PATH, "Set the limit", {"act": "set"}, inputs, title="New limit", about=about)


def _new_budget(targets: dict[str, str]) -> Form:
    windows = [("day", "day"), ("week", "week"), ("month", "month"), ("total", "in total")]
    inputs = [
        Input("name", "Name"),
        Input("target", "Applies to", "select", "", list(targets.items())),
        Input("cap", "Cap", "number"),
        Input("window", "Window", "select", "month", windows),
        Input(
            "hard", "Kind", "select", "hard", [("hard", "hard: reject"), ("soft", "soft: alert")]
        ),
        Input("thresholds", "Alert at, percent", value="50, 80, 100"),
        Input("webhook", "Webhook", "url", required=False),
        Input("email", "E-mail", "email", required=False),
    ]
    return Form(PATH, "Set the budget", {"act": "budget"}, inputs, title="New budget")


def _set(request: Request, given: Fields) -> Response:
    viewer, house = viewer_of(request, "limits", "write"), house_of(request)
    with house.database.transaction() as session:
        limits.set_rule(session, viewer.scope, house.clock, _rule_of(given))
    return back_to(request, PATH, "limit-set")


def _drop(request: Request, given: Fields) -> Response:
    viewer, house = viewer_of(request, "limits", "write"), house_of(request)
    rule = _rule_of(given | {"limit": "1"})
    confirmed(given, rule.name)
    with house.database.transaction() as session:
        limits.remove_rule(session, viewer.scope, house.clock, rule)
    return back_to(request, PATH, "limit-removed")


def _rule_of(given: Fields) -> LimitRule:
    try:
        return LimitRule(
            Scope(given.get("scope", "")),
            Unit(given.get("unit", "")),
            int(given.get("limit", "")),
            int(given.get("period", "")) or 60,
            given.get("target", ""),
            given.get("mode") == "trial",
        )
    except ValueError:
        raise BadRequest(
            "The limit is not valid.",
            next_step="Choose a scope, a unit and a period, and give a whole number.",
        ) from None


def _budget(request: Request, given: Fields) -> Response:
    viewer, house = viewer_of(request, "budgets", "write"), house_of(request)
    try:
        units = units_of(given.get("cap", ""))
        thresholds = tuple(
            int(each) for each in given.get("thresholds", "").split(",") if each.strip()
        )
    except ValueError:
        raise BadRequest(
            "The cap or a threshold is not a number.",
            next_step="Write the cap as an amount and thresholds as whole percentages.",
            param="cap",
        ) from None
    with house.database.transaction() as session:
        if given.get("target", "") not in _targets(session, viewer.scope):
            raise NotFound(
                "There is no such project or key.", next_step="Choose one from the list."
            )
        kind, _, target = given["target"].partition(":")
        made = budgets.create(
            session,
            house.clock,
            tenant_id=viewer.scope.tenant_id,
            scope=kind,
            scope_id=target,
            cap=Money(units, viewer.currency),
            window=given.get("window", "month"),
            hard=given.get("hard") != "soft",
            thresholds=thresholds,
            webhooks=(given["webhook"],) if given.get("webhook") else (),
            emails=(given["email"],) if given.get("email") else (),
            name=given.get("name", "")[:120],
        )
        after = {"name": made.name, "cap": given["cap"], "window": made.window, "hard": made.hard}
        audit.record(session, viewer.scope, house.clock, "budget.create", made.id, None, after)
    return back_to(request, PATH, "budget-set")


def _end(request: Request, given: Fields) -> Response:
    viewer, house = viewer_of(request, "budgets", "write"), house_of(request)
    with house.database.transaction() as session:
        found = session.get(Budget, given.get("budget", ""))
        if found is None or found.tenant_id != viewer.scope.tenant_id or found.ended_at:
            raise NotFound("There is no such open budget.", next_step="Choose one from the list.")
        of = _targets(session, viewer.scope).get(f"{found.scope}:{found.scope_id}", found.scope_id)
        confirmed(given, found.name or f"Budget of {of}")
        found.ended_at = house.clock.now()
        before = {"name": found.name, "cap": grouped(found.cap)}
        audit.record(session, viewer.scope, house.clock, "budget.end", found.id, before, None)
    return back_to(request, PATH, "budget-ended")


ROUTES = [
    Route(PATH, page_of, methods=["GET"]),
    Route(PATH, acting(set=_set, drop=_drop, budget=_budget, end=_end), methods=["POST"]),
]
