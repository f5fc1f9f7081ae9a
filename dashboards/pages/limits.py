"""Limits and budgets: those in force, their use, and the requests they rejected or delayed."""

from datetime import timedelta
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from billing.accounts.tables import BillingAccount
from billing.notices import budgets
from billing.notices.tables import Budget
from billing.usage import label_sets
from core import storage
from core.errors import BadRequest, NotFound
from core.money import Money, units_of
from core.tenants import audit, keys, limits, organisations, rejections
from core.tenants.models import Tenant
from core.tenants.plans import LimitRule, Scope, Unit, limit_in_words
from core.tenants.scope import TenantScope
from dashboards import charts
from dashboards.backend import LimitUsage
from dashboards.formats import money
from dashboards.once import redirect_with_secret
from dashboards.page_data import Form, Input, PageData, Tile, show
from dashboards.pages.common import (
    Fields,
    deps_of,
    form_handler,
    redirect_with_notice,
    require_confirmation,
    viewer_of,
    wants_csv,
)
from dashboards.render import svg
from dashboards.scales import grouped, short
from dashboards.tables import Column, Table
from dashboards.viewer import Viewer

PATH = "/limits"
PERIODS = {60: "minute", 3600: "hour", 86400: "day"}
RULES = [
    Column("scope", "Scope"),
    Column("limit", "Limit"),
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
REJECTED = [
    Column("reason", "Reason"),
    Column("rejected", "Rejected", "whole"),
    Column(
        "queued",
        "Waited",
        "whole",
        "Requests that waited in the plan's queue and were then served.",
    ),
    Column("mean", "Mean wait, ms", "whole"),
]


def page_of(request: Request) -> Response:
    viewer, deps = viewer_of(request, "limits"), deps_of(request)
    now = deps.clock.now()
    sees_money = deps.auth.may(viewer, "budgets", "read")
    with deps.database.read() as session:
        tenant = session.get_one(Tenant, viewer.scope.tenant_id)
        plan = limits.plan_of(session, tenant)
        own = {rule.slot for rule in limits.own_rules(session, viewer.scope)}
        tally = [
            {**row, "reason": _reason_label(row["reason"])}
            for row in rejections.since(session, viewer.scope, now - timedelta(days=7))
        ]
        spent = _budgets(session, viewer, deps.clock.now()) if sees_money else []
        targets = _targets(session, viewer.scope)
        stored = storage.used(session, viewer.scope.tenant_id)
    used = {each.rule: each for each in deps.backend.used(viewer.scope, plan.rules)}
    may_set = deps.auth.may(viewer, "limits", "write")
    may_spend = deps.auth.may(viewer, "budgets", "write")
    rules = [_rule(rule, used, targets, rule.slot in own, may_set) for rule in plan.rules]
    columns = [*RULES, Column("acts", "Change", "acts")] if may_set else RULES
    table = Table("Limits in force", columns, rules, totals=False)
    if wants_csv(request):
        return table.csv("limits")
    tables = [
        table,
        Table(
            "Rejected and delayed requests, last seven days",
            REJECTED,
            tally,
            totals=False,
            empty=_NONE,
        ),
    ]
    if sees_money:
        for each in spent:
            each["acts"] = _end_form(each) if may_spend else []
        columns = [*BUDGETS, Column("acts", "Change", "acts")] if may_spend else BUDGETS
        empty = "No budgets: spend is limited by credit only."
        tables.insert(
            1,
            Table(
                "Budgets",
                columns,
                spent,
                viewer.currency,
                totals=False,
                empty=empty,
                next_step=("#new-budget", "Set a budget") if may_spend else None,
            ),
        )
    forms = [
        *([_new_rule()] if may_set else []),
        *([_new_budget(targets, viewer.currency)] if may_spend else []),
    ]
    page_data = PageData(
        "Limits and budgets",
        f"Plan {plan.name}. Rate limits are token buckets that refill continuously.",
        tiles=[
            *_rate_tiles(used),
            _storage_tile(stored, storage.quota_of(plan)),
            *_budget_tiles(spent, viewer.currency),
        ],
        tables=tables,
        forms=forms,
    )
    return show(request, page_data)


_NONE = "No request was rejected or delayed in the last seven days."


def _rate_tiles(used: dict[str, LimitUsage]) -> list[Tile]:
    return [
        Tile(
            f"{_rule_label(each.rule)}",
            f"{short(each.used)} of {short(each.limit)}",
            f"full in {each.full_again_s:.0f} s" if each.used else "unused",
            meter=svg(charts.meter(_rule_label(each.rule), each.used, each.limit)),
        )
        for each in used.values()
    ]


def _storage_tile(stored: dict[str, int], quota: int) -> Tile:
    total = sum(stored.values())
    largest = max(stored, key=stored.__getitem__)
    return Tile(
        "Storage",
        f"{total / 2**20:,.1f} MiB",
        f"of {quota / 2**20:,.0f} MiB, most of it {_STORED[largest]}"
        if total
        else f"of {quota / 2**20:,.0f} MiB",
        state="bad" if total >= quota else "",
        meter=svg(charts.meter("Storage", total / 2**20, quota / 2**20)),
    )


_STORED = {
    "files": "files",
    "conversations": "conversations",
    "responses": "stored responses",
    "completions": "stored completions",
    "idempotency": "answers to Idempotency-Keys",
    "adapters": "adapters",
}


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


def _rule_label(rule: str) -> str:
    """`tenant:requests:60` -> `Requests per minute`."""
    _scope, unit, *period = rule.split(":")
    name = unit.replace("_", " ").capitalize()
    return f"{name} per {PERIODS.get(int(period[0]), period[0] + ' s')}" if period else name


def _reason_label(reason: str) -> str:
    """`key:requests:60` -> `Requests per minute, per key`; other reasons are already words."""
    scope, *rest = reason.split(":")
    return f"{_rule_label(reason)}, per {scope}" if rest else reason.replace("_", " ").capitalize()


def _rule(
    rule: LimitRule,
    used: dict[str, LimitUsage],
    targets: dict[str, str],
    own: bool,
    may_set: bool,
) -> dict[str, Any]:
    state = used.get(rule.name) if rule.scope is Scope.TENANT else None
    fields = {"scope": rule.scope.value, "unit": rule.unit.value, "period": str(rule.slot[2])}
    fields |= {"target": rule.target, "act": "drop"}
    return {
        "scope": targets.get(f"{rule.scope}:{rule.target}")
        or f"{rule.scope} {rule.target}".strip(),
        "limit": limit_in_words(rule.unit.value, rule.limit, rule.period_s),
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


def _end_form(each: dict[str, Any]) -> list[Form]:
    fields = {"act": "end", "budget": each["id"]}
    return [Form(PATH, "End", fields, confirm=each["name"], danger=True)]


def _targets(session: Session, scope: TenantScope) -> dict[str, str]:
    """`scope:id` -> display name of everything that a budget or a limit can apply to. A key that was
    rotated is listed once, with the id of the first one and the name of the last."""
    found = {f"tenant:{scope.tenant_id}": "the organisation"}
    for project in organisations.projects(session, scope):
        found[f"project:{project.id}"] = f"project {project.name}"
    for first_id, name in keys.current_names(session, scope).items():
        found[f"key:{first_id}"] = f"key {name}"
    for label in label_sets.names(session, scope):
        found[f"label:{label}"] = f"label {label}"
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
        Input("label", "Label", required=False, hint="of the scope label, such as team=search"),
        Input("mode", "Mode", "select", "force", [("force", "in force"), ("trial", "shadow")]),
    ]
    about = "A limit may be lower than the plan's. Only the operator can raise a limit of the plan."
    return Form(
        PATH, "Set the limit", {"act": "set"}, inputs, title="New limit", panel=True, about=about
    )


def _new_budget(targets: dict[str, str], currency: str) -> Form:
    windows = [("day", "day"), ("week", "week"), ("month", "month"), ("total", "in total")]
    inputs = [
        Input("name", "Name"),
        Input("target", "Applies to", "select", "", list(targets.items())),
        Input("cap", f"Cap, {currency}", "number"),
        Input("window", "Window", "select", "month", windows),
        Input(
            "hard",
            "Kind",
            "select",
            "soft",
            [("soft", "alert: send a message"), ("hard", "hard: refuse requests over it")],
        ),
        Input("thresholds", "Alert at, percent", value="50, 80, 100"),
        Input("webhook", "Webhook", "url", required=False),
        Input("email", "E-mail", "email", required=False),
    ]
    return Form(PATH, "Set the budget", {"act": "budget"}, inputs, title="New budget", panel=True)


def _set(request: Request, form_fields: Fields) -> Response:
    viewer, deps = viewer_of(request, "limits", "write"), deps_of(request)
    with deps.database.transaction() as session:
        limits.set_rule(session, viewer.scope, deps.clock, _rule_of(form_fields))
    return redirect_with_notice(request, PATH, "limit-set")


def _drop(request: Request, form_fields: Fields) -> Response:
    viewer, deps = viewer_of(request, "limits", "write"), deps_of(request)
    rule = _rule_of(form_fields | {"limit": "1"})
    require_confirmation(form_fields, rule.name)
    with deps.database.transaction() as session:
        limits.remove_rule(session, viewer.scope, deps.clock, rule)
    return redirect_with_notice(request, PATH, "limit-removed")


def _rule_of(form_fields: Fields) -> LimitRule:
    try:
        return LimitRule(
            Scope(form_fields.get("scope", "")),
            Unit(form_fields.get("unit", "")),
            int(form_fields.get("limit", "")),
            int(form_fields.get("period", "")) or 60,
            form_fields.get("label", "") or form_fields.get("target", ""),
            form_fields.get("mode") == "trial",
        )
    except ValueError:
        raise BadRequest(
            "The limit is not valid.",
            next_step="Choose a scope, a unit and a period, and give a whole number.",
        ) from None


def _budget(request: Request, form_fields: Fields) -> Response:
    viewer, deps = viewer_of(request, "budgets", "write"), deps_of(request)
    try:
        units = units_of(form_fields.get("cap", ""))
        thresholds = tuple(
            int(each) for each in form_fields.get("thresholds", "").split(",") if each.strip()
        )
    except ValueError:
        raise BadRequest(
            "The cap or a threshold is not a number.",
            next_step="Write the cap as an amount and thresholds as whole percentages.",
            param="cap",
        ) from None
    hooks, emails = (
        (form_fields[name],) if form_fields.get(name) else () for name in ("webhook", "email")
    )
    deps.alert_targets.check(hooks, emails)
    with deps.database.transaction() as session:
        if form_fields.get("target", "") not in _targets(session, viewer.scope):
            raise NotFound(
                "There is no such project or key.", next_step="Choose one from the list."
            )
        kind, _, target = form_fields["target"].partition(":")
        created = budgets.create(
            session,
            deps.clock,
            tenant_id=viewer.scope.tenant_id,
            scope=kind,
            scope_id=target,
            cap=Money(units, viewer.currency),
            window=form_fields.get("window", "month"),
            hard=form_fields.get("hard") != "soft",
            thresholds=thresholds,
            webhooks=hooks,
            emails=emails,
            name=form_fields.get("name", "")[:120],
        )
        after = {
            "name": created.name,
            "cap": form_fields["cap"],
            "window": created.window,
            "hard": created.hard,
        }
        audit.record(
            session, viewer.scope, deps.clock, "budget.create", created.id, before=None, after=after
        )
        secret = created.webhook_secret
    if secret:
        return redirect_with_secret(request, PATH, "budget-signed", secret)
    return redirect_with_notice(request, PATH, "budget-set")


def _end(request: Request, form_fields: Fields) -> Response:
    viewer, deps = viewer_of(request, "budgets", "write"), deps_of(request)
    with deps.database.transaction() as session:
        found = session.get(Budget, form_fields.get("budget", ""))
        if found is None or found.tenant_id != viewer.scope.tenant_id or found.ended_at:
            raise NotFound("There is no such open budget.", next_step="Choose one from the list.")
        of = _targets(session, viewer.scope).get(f"{found.scope}:{found.scope_id}", found.scope_id)
        require_confirmation(form_fields, found.name or f"Budget of {of}")
        found.ended_at = deps.clock.now()
        before = {"name": found.name, "cap": grouped(found.cap)}
        audit.record(
            session, viewer.scope, deps.clock, "budget.end", found.id, before=before, after=None
        )
    return redirect_with_notice(request, PATH, "budget-ended")


ROUTES = [
    Route(PATH, page_of, methods=["GET"]),
    Route(
        PATH,
        form_handler(page_of, set=_set, drop=_drop, budget=_budget, end=_end),
        methods=["POST"],
    ),
]
