"""Tenants: the list with usage and spend of this month, and the details of one tenant."""

from datetime import timedelta
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from billing.accounts.tables import BillingAccount
from billing.adjustments.onboarding import BillingDetails, Customer, Owner, onboard
from billing.reports import subscription_views
from billing.usage.day_range import Range
from billing.usage.tables import DailyTenantUsage
from core.errors import NotFound
from core.money import MINOR_DIGITS
from core.tenants import keys, limits, members, organisations, plan_store
from core.tenants.models import ApiKey, Member, Tenant
from dashboards import charts, usage_totals
from dashboards.formats import money, money_label
from dashboards.navigation import SECTIONS
from dashboards.once import redirect_with_secret
from dashboards.page_data import Chart, Form, Input, PageData, Tile, show
from dashboards.pages.common import (
    Fields,
    deps_of,
    form_handler,
    operator_of,
    redirect_with_notice,
    require_confirmation,
    root_of,
    scope_of,
    wants_csv,
)
from dashboards.pages.costs import amount_axis, costs_table
from dashboards.render import svg
from dashboards.scales import grouped
from dashboards.tables import Column, Table

PATH = "/operator/tenants"
CLOSED = "closed"
_PASSWORD_HINT = "empty: single sign-on only"
COLUMNS = [
    Column("tenant", "Tenant", link="href"),
    Column("plan", "Plan"),
    Column("state", "State", "badge"),
    Column("account", "Account", "badge", "Status of the billing account."),
    Column("members", "Members", "whole"),
    Column("keys", "Keys", "whole", "Keys that are not revoked."),
    Column("requests", "Requests", "whole", "Rated requests of this month."),
    Column("tokens", "Tokens", "whole", "Input and output tokens of this month."),
    Column("spend", "Spend", "money", "This month's charges, before tax and credits."),
    Column("last", "Last used", "figure"),
]


def tenant_list(request: Request) -> Response:
    operator_of(request, "tenants")
    deps = deps_of(request)
    now = deps.clock.now()
    with deps.database.read() as session:
        rows = _rows(session, now.replace(day=1, hour=0, minute=0, second=0, microsecond=0))
        plans = sorted(plan_store.all_of(session))
    for row in rows:
        row["href"] = f"{root_of(request)}{PATH}/{row['id']}"
    table = Table(
        "Tenants",
        COLUMNS,
        rows,
        totals=False,
        empty="No tenants yet.",
        next_step=("#new-tenant", "Create a tenant"),
    )
    if wants_csv(request):
        return table.csv(f"tenants-{now:%Y-%m-%d}")
    by_state = {state: sum(row["state"] == state for row in rows) for state in ("active",)}
    used = sum(row["requests"] > 0 for row in rows)
    page_data = PageData(
        "Tenants",
        "All organisations, with usage and spend of this month.",
        tiles=[
            Tile("Tenants", grouped(len(rows)), f"{by_state['active']} active"),
            Tile("Active this month", grouped(used), about="Tenants with a rated request."),
            Tile("Requests", grouped(sum(row["requests"] for row in rows))),
        ],
        tables=[table],
        forms=[_new(plans)],
    )
    return show(request, page_data)


def _rows(session: Session, since: Any) -> list[dict[str, Any]]:
    table = DailyTenantUsage
    used = {
        row[0]: row[1:]
        for row in session.execute(
            select(
                table.tenant_id,
                func.sum(table.requests),
                func.sum(table.input_tokens + table.output_tokens),
                func.sum(table.amount),
                func.max(table.at),
            )
            .where(table.at >= since)
            .group_by(table.tenant_id)
        )
    }
    members = _count(session, Member, Member.disabled_at.is_(None))
    live = _count(session, ApiKey, ApiKey.revoked_at.is_(None))
    accounts = {
        row[0]: row[1]
        for row in session.execute(select(BillingAccount.tenant_id, BillingAccount.status))
    }
    found = []
    for tenant in organisations.all_tenants(session):
        requests, tokens, amount, last = used.get(tenant.id, (0, 0, 0, None))
        found.append(
            {
                "id": tenant.id,
                "tenant": tenant.name,
                "plan": tenant.plan,
                "state": tenant.status,
                "account": accounts.get(tenant.id, "unopened"),
                "members": members.get(tenant.id, 0),
                "keys": live.get(tenant.id, 0),
                "requests": int(requests),
                "tokens": int(tokens),
                "spend": int(amount),
                "currency": tenant.currency,
                "last": f"{last:%Y-%m-%d}" if last else None,
            }
        )
    return found


def _count(session: Session, table: Any, condition: Any) -> dict[str, int]:
    query = select(table.tenant_id, func.count()).where(condition).group_by(table.tenant_id)
    return {row[0]: int(row[1]) for row in session.execute(query)}


def _new(plans: list[str]) -> Form:
    currencies = [(each, each) for each in MINOR_DIGITS]
    return Form(
        PATH,
        "Create tenant",
        {"act": "create"},
        [
            Input("name", "Name", hint="lower-case letters, digits, hyphens"),
            Input("display_name", "Display name", required=False),
            Input("plan", "Plan", "select", "standard", [(each, each) for each in plans]),
            Input("currency", "Currency", "select", "USD", currencies),
            Input("timezone", "Time zone", value="UTC", hint="of the billing periods"),
            Input("legal_name", "Legal name", required=False, hint="on invoices"),
            Input("address", "Address", required=False),
            Input("email", "E-mail for invoices", "email", required=False),
            Input("tax_region", "Tax region", required=False, hint="such as DE or US-NY"),
            Input("tax_id", "Tax id", required=False),
            Input("owner", "Owner's e-mail", "email", required=False),
            Input("password", "Owner's password", "password", required=False, hint=_PASSWORD_HINT),
            Input("project", "First project", value="default"),
            Input("key", "First key", value="first", required=False, hint="empty: no key"),
        ],
        title="New tenant",
        panel=True,
        about="Creates the tenant with its billing account, owner, first project and first key, "
        "which is shown once.",
    )


def tenant_page(request: Request) -> Response:
    """A tenant's last 30 days, its limits, and forms to change it."""
    viewer, deps = operator_of(request, "tenants"), deps_of(request)
    now = deps.clock.now()
    span = Range(now.date() - timedelta(29), now.date())
    with deps.database.read() as session:
        tenant = session.get(Tenant, request.path_params["tenant_id"])
        if tenant is None:
            raise NotFound("There is no such tenant.", next_step="Choose one from the list.")
        scope = scope_of(viewer, tenant.id)
        models = usage_totals.read(session, scope, span, now, "model")
        by_key = usage_totals.read(session, scope, span, now, "key_id")
        rules = [limits.describe(rule) for rule in limits.plan_of(session, tenant).rules]
        live = sum(key.revoked_at is None for key in keys.all_of(session, scope))
        plans = sorted(plan_store.all_of(session))
        held = subscription_views.subscriptions_json(session, tenant.id, now)
    value = money_label(tenant.currency)
    drawn = charts.stacked_bars("Spend", models.labels, models.series("amount"), amount_axis, value)
    page_data = PageData(
        tenant.display_name,
        f"{tenant.name} · {tenant.id} · {tenant.status} · plan {tenant.plan}",
        tiles=[
            Tile("Spend, 30 days", money(models.total("amount"), tenant.currency)),
            Tile("Requests", grouped(models.total("requests"))),
            Tile("Tokens in", grouped(models.total("input_tokens"))),
            Tile("Tokens out", grouped(models.total("output_tokens"))),
            Tile("Active keys", grouped(live)),
        ],
        charts=[Chart("Spend by model", svg(drawn))],
        tables=[
            costs_table(models, tenant.currency),
            costs_table(by_key, tenant.currency),
            Table("Limits in force", _LIMITS, rules, totals=False),
            subscriptions_table(held, tenant.currency),
        ],
        forms=_changes(tenant, plans),
        back=(PATH, "All tenants"),
        link=(f"{PATH}/{tenant.id}/billing", "Billing details, credit, plan and payments"),
    )
    return show(request, page_data)


def subscriptions_table(held: list[dict[str, Any]], currency: str) -> Table:
    columns = [
        Column("plan", "Plan"),
        Column("interval", "Interval"),
        Column("state", "State", "badge"),
        Column("seats", "Seats", "whole"),
        Column("first", "From"),
        Column("last", "To"),
        Column("fee", "Fee", "money"),
        Column("committed", "Commitment", "money"),
        Column("used", "Used", "money", "Usage that counts towards the commitment of this term."),
    ]
    rows = [
        {
            **each,
            "first": each["from"][:10],
            "last": each["to"][:10] if each["to"] else None,
            "fee": int(each["base_fee"]["units"]),
            "committed": int(each["minimum_commitment"]["units"]),
            "used": int(each["commitment"]["used"]["units"]) if "commitment" in each else None,
            "currency": currency,
        }
        for each in held
    ]
    return Table("Subscriptions", columns, rows, totals=False, empty="No billing plan.")


_LIMITS = [
    Column("scope", "Scope"),
    Column("unit", "Unit"),
    Column("period_s", "Period, seconds", "whole"),
    Column("limit", "Limit", "whole"),
]


def _changes(tenant: Tenant, plans: list[str]) -> list[Form]:
    path = f"{PATH}/{tenant.id}"
    options = [(each, each) for each in plans]
    stop = "suspended" if tenant.status == "active" else "active"
    words = "Suspend" if stop == "suspended" else "Reinstate"
    return [
        Form(
            "/operator/look",
            "View pages",
            {"act": "look", "tenant": tenant.id},
            title="Tenant pages",
            about="Shows usage, costs, requests and all other pages as the tenant's owner sees them.",
        ),
        Form(
            path,
            "Change plan",
            {"act": "plan"},
            [Input("plan", "Plan", "select", tenant.plan, options)],
            title="Plan and status",
        ),
        Form(
            path,
            words,
            {"act": "status", "status": stop},
            confirm=tenant.name,
            danger=stop == "suspended",
            about="Requests of a suspended tenant are rejected. Its members can still sign in.",
        ),
        _end(tenant, path),
    ]


def _end(tenant: Tenant, path: str) -> Form:
    if tenant.status != CLOSED:
        return Form(
            path,
            "Close",
            {"act": "status", "status": CLOSED},
            confirm=tenant.name,
            danger=True,
            title="Close the tenant",
            about="Nobody of a closed tenant can send requests or sign in. It can then be erased.",
        )
    return Form(
        path,
        "Erase",
        {"act": "erase"},
        confirm=tenant.name,
        danger=True,
        title="Erase the tenant",
        about="Deletes all that is stored of it, and the names in what remains: invoices, the ledger and "
        "counts of usage, which the law asks to keep. It cannot be undone. Export it first.",
    )


def _create(request: Request, form_fields: Fields) -> Response:
    viewer, deps = operator_of(request, "tenants", "write"), deps_of(request)
    given = form_fields.get
    email, password = given("owner", ""), given("password")
    hashed = members.hash_for(deps.database, email, password) if email and password else None
    owner = Owner(email, password_hash=hashed)
    plain = ("name", "display_name", "plan", "currency", "timezone", "project", "key")
    customer = Customer(
        **{name: form_fields[name] for name in plain if name in form_fields},
        billing=BillingDetails(
            given("legal_name", ""),
            given("address", ""),
            given("email", ""),
            given("tax_id", ""),
            given("tax_region", ""),
        ),
        owner=owner if owner.email else None,
    )
    with deps.database.transaction() as session:
        made = onboard(session, deps.clock, customer, viewer.scope.actor)
        path = f"{PATH}/{made.tenant.id}"
    if made.key is None:
        return redirect_with_notice(request, path, "tenant-made")
    return redirect_with_secret(request, path, "tenant-made", made.key.secret)


def _view_tenant(request: Request, form_fields: Fields) -> Response:
    """Show the tenant's pages; return to the current page if the tenant has it."""
    viewer, deps = operator_of(request, "tenants"), deps_of(request)
    with deps.database.transaction() as session:
        name = form_fields.get("tenant", "")
        deps.auth.look_at(session, viewer, request.state.cookie, name)
    own = {section.path for section in SECTIONS if not section.operator}
    path = form_fields.get("page", "")
    return redirect_with_notice(request, path if path in own else "/", "tenant-shown")


def _plan(request: Request, form_fields: Fields) -> Response:
    return _change(request, plan=form_fields.get("plan", ""))


def _status(request: Request, form_fields: Fields) -> Response:
    return _change(request, form_fields, status=form_fields.get("status", ""))


def _erase(request: Request, form_fields: Fields) -> Response:
    viewer, deps = operator_of(request, "tenants", "write"), deps_of(request)
    tenant_id = request.path_params["tenant_id"]
    scope = scope_of(viewer, tenant_id)
    deps.backend.erase_tenant(scope, form_fields.get("confirm", ""))
    return redirect_with_notice(request, f"{PATH}/{tenant_id}", "tenant-erased")


def _change(request: Request, ask: Fields | None = None, **changes: str) -> Response:
    viewer, deps = operator_of(request, "tenants", "write"), deps_of(request)
    tenant_id = request.path_params["tenant_id"]
    with deps.database.transaction() as session:
        tenant = organisations.tenant_named(session, tenant_id)
        if ask is not None:
            require_confirmation(ask, tenant.name)
        organisations.change_tenant(session, scope_of(viewer, tenant.id), deps.clock, **changes)  # type: ignore[arg-type]
    return redirect_with_notice(request, f"{PATH}/{tenant_id}", "tenant-changed")


ROUTES = [
    Route(PATH, tenant_list, methods=["GET"]),
    Route(PATH, form_handler(tenant_list, create=_create), methods=["POST"]),
    Route("/operator/look", form_handler(tenant_list, look=_view_tenant), methods=["POST"]),
    Route(f"{PATH}/{{tenant_id}}", tenant_page, methods=["GET"]),
    Route(
        f"{PATH}/{{tenant_id}}",
        form_handler(tenant_page, plan=_plan, status=_status, erase=_erase),
        methods=["POST"],
    ),
]
