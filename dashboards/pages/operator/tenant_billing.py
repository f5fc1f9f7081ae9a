"""A tenant's billing: details on its invoices, credit, subscription, and the acts on its money."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from billing.accounts import accounts
from billing.accounts.references import printed
from billing.accounts.tables import BillingAccount
from billing.adjustments import account_changes, organisation_links
from billing.adjustments.act_requests import Kind
from billing.invoicing.tables import Invoice
from billing.ledger.tables import CreditGrant
from billing.organisations import organisations as parents
from billing.organisations.tables import OrganisationLink
from billing.payments.methods import METHODS
from billing.reports import subscription_views
from billing.subscriptions import subscriptions
from core.clock import usual
from core.errors import BadRequest
from core.tenants import audit, organisations
from core.tenants.models import Tenant
from dashboards.page_data import Form, Input, PageData, Tile, show
from dashboards.pages.common import (
    Fields,
    deps_of,
    form_handler,
    operator_of,
    redirect_with_notice,
    require_confirmation,
    root_of,
    scope_of,
)
from dashboards.pages.operator import tenant_add_ons
from dashboards.pages.operator.money_acts import acts_table, link
from dashboards.pages.operator.tenants import PATH as TENANTS
from dashboards.pages.operator.tenants import subscriptions_table
from dashboards.tables import Column, Table

PATH = f"{TENANTS}/{{tenant_id}}/billing"
_GRANTS = [
    Column("at", "Granted", "moment"),
    Column("kind", "Kind"),
    Column("granted", "Amount", "money"),
    Column("left", "Left", "money"),
    Column("expires", "Expires", "figure"),
    Column("note", "Reason"),
]


def page_of(request: Request) -> Response:
    operator_of(request, "tenants")
    deps = deps_of(request)
    with deps.database.transaction() as session:
        tenant = organisations.tenant_named(session, request.path_params["tenant_id"])
        account = accounts.ensure_account(session, tenant.id, deps.clock.now())
        held = subscription_views.subscriptions_json(session, tenant.id, deps.clock.now())
        grants = _grants(session, tenant.id)
        acts = acts_table(session, tenant.id, root_of(request))
        extras = tenant_add_ons.table(session, tenant.id, account.currency)
        extra_forms = tenant_add_ons.forms(session, PATH.format(tenant_id=tenant.id))
        link_above = session.get(OrganisationLink, tenant.id)
        above = parents.describe(session, link_above) if link_above else None
    page_data = PageData(
        f"Billing of {tenant.display_name}",
        f"{tenant.name} · {account.currency} · {account.status} · collected by {account.collection}",
        tiles=[
            Tile(
                "Legal name", account.legal_name or "none", ", ".join(account.address.splitlines())
            ),
            Tile("Tax", account.tax_region or "none", account.tax_id),
            Tile("Billing plan", held[-1]["plan"] if held else "none"),
            Tile("Payment reference", printed(account.payment_reference or "none")),
            Tile("Parent", above["parent"] if above else "none", _terms(above) if above else ""),
        ],
        links=[
            link(Kind.GRANT, tenant.id, "Grant credit…"),
            link(Kind.WIRE, tenant.id, "Book a wire on account…"),
            link(Kind.PLAN, tenant.id, "Change the plan…"),
            link(Kind.TAX, tenant.id, "Change tax details…"),
            link(Kind.ADDRESS, tenant.id, "Change the address…"),
        ],
        tables=[
            subscriptions_table(held, account.currency),
            extras,
            Table("Credit", _GRANTS, grants, account.currency, totals=False, empty="No credit."),
            acts,
        ],
        forms=[
            _details(tenant, account),
            *extra_forms,
            *_subscription_forms(tenant, held),
            *_parent_forms(tenant, above),
            _finalise_form(tenant),
        ],
        back=(f"{TENANTS}/{tenant.id}", tenant.display_name),
        link=(f"/operator/invoices?q={tenant.name}", "Its invoices"),
    )
    return show(request, page_data)


def _grants(session: Session, tenant_id: str) -> list[dict[str, Any]]:
    rows = session.scalars(
        select(CreditGrant)
        .where(CreditGrant.tenant_id == tenant_id)
        .order_by(CreditGrant.granted_at.desc())
        .limit(100)
    )
    return [
        {
            "at": each.granted_at,
            "kind": each.kind,
            "granted": each.granted,
            "left": each.remaining,
            "expires": f"{each.expires_at:%Y-%m-%d}" if each.expires_at else None,
            "note": each.note,
        }
        for each in rows
    ]


def _details(tenant: Tenant, account: BillingAccount) -> Form:
    yes_no = [("no", "no"), ("yes", "yes")]
    ways = [(each, each) for each in ("manual", "stripe", "stripe_meters")]
    inputs = [
        _choice("prepaid_only", "Prepaid only", account.prepaid_only, yes_no),
        Input("collection", "Collected by", "select", account.collection, ways),
        Input(
            "payment_methods",
            "Payment methods at Stripe",
            value=", ".join(account.payment_methods or ()),
            required=False,
            hint=", ".join(METHODS) + "; empty: as Stripe chooses",
        ),
        Input(
            "payment_terms_days",
            "Days to pay",
            "number",
            "" if account.payment_terms_days is None else str(account.payment_terms_days),
            required=False,
            hint="empty: the plan's",
        ),
    ]
    path = PATH.format(tenant_id=tenant.id)
    return Form(path, "Save", inputs=inputs, title="Payment", act="details")


def _choice(name: str, label: str, value: bool, options: list[tuple[str, str]]) -> Input:
    return Input(name, label, "select", "yes" if value else "no", options)


def _subscription_forms(tenant: Tenant, held: list[dict[str, Any]]) -> list[Form]:
    path = PATH.format(tenant_id=tenant.id)
    state = held[-1]["state"] if held else "none"
    ends = [("term", "at the end of its month or year"), ("now", "now")]
    waits = state in ("paused", "scheduled")
    if not waits and state not in ("active", "trial"):
        return []
    return [
        Form(path, "Resume now", act="resume", title="Subscription")
        if waits
        else Form(
            path,
            "Pause",
            inputs=[Input("until", "Until", "date", hint="00:00 UTC")],
            act="pause",
            title="Subscription",
        ),
        Form(
            path,
            "End the subscription",
            inputs=[Input("when", "Ends", "select", "term", ends)],
            act="cancel",
            confirm=tenant.name,
            danger=True,
        ),
    ]


def _terms(above: dict[str, Any]) -> str:
    payer = "pays" if above["pays"] == parents.PARENT else "does not pay"
    return f"{payer}, mark-up {above['markup_percent']} %"


def _parent_forms(tenant: Tenant, above: dict[str, Any] | None) -> list[Form]:
    path = PATH.format(tenant_id=tenant.id)
    ways = [(parents.SELF, "this organisation"), (parents.PARENT, "its parent")]
    held = above or {"parent": "", "pays": parents.SELF, "markup_percent": "0"}
    inputs = [
        Input("parent", "Parent organisation", value=held["parent"], hint="its name"),
        Input("pays", "Paid by", "select", held["pays"], ways),
        Input("markup_percent", "Mark-up in percent", value=held["markup_percent"]),
    ]
    forms = [
        Form(
            path,
            "Save",
            inputs=inputs,
            act="parent",
            title="Parent organisation",
            about="The parent sees this organisation's usage. The mark-up is added to its charges.",
        )
    ]
    if above is not None:
        forms.append(Form(path, "Remove the parent", act="no_parent"))
    return forms


def _finalise_form(tenant: Tenant) -> Form:
    return Form(
        PATH.format(tenant_id=tenant.id),
        "Finalise now",
        act="finalise",
        title="Ended periods",
        about="Makes the invoices of ended periods final without waiting for late usage, which is then "
        "on the next invoice. A final invoice never changes.",
        confirm=tenant.name,
    )


def _finalise(request: Request, form_fields: Fields) -> Response:
    viewer, deps = operator_of(request, "money", "write"), deps_of(request)
    with deps.database.read() as session:
        tenant = organisations.tenant_named(session, request.path_params["tenant_id"])
    require_confirmation(form_fields, tenant.name)
    made = deps.backend.finalise_invoices(tenant.id)
    with deps.database.transaction() as session:
        scope = scope_of(viewer, tenant.id)
        for each in made:
            number = session.get_one(Invoice, each).label
            audit.record(
                session,
                scope,
                deps.clock,
                "invoice.finalise",
                each,
                before=None,
                after={"number": number},
            )
    return redirect_with_notice(request, PATH.format(tenant_id=tenant.id), "invoices-final")


def _set_parent(request: Request, form_fields: Fields) -> Response:
    def _act(session: Session, tenant: Tenant, actor: str) -> OrganisationLink:
        parent = organisations.tenant_named(session, form_fields.get("parent", ""))
        pays = form_fields.get("pays", "")
        markup = form_fields.get("markup_percent") or "0"
        draft = organisation_links.LinkDraft(tenant.id, parent.id, pays, markup, actor)
        return organisation_links.set_parent(session, deps_of(request).clock, draft)

    return _change_parent(request, "organisation.link", _act)


def _remove_parent(request: Request, _fields: Fields) -> Response:
    return _change_parent(
        request,
        "organisation.unlink",
        lambda session, tenant, _: organisation_links.remove_parent(session, tenant.id),
    )


def _change_parent(
    request: Request, name: str, act: Callable[[Session, Tenant, str], OrganisationLink]
) -> Response:
    viewer, deps = operator_of(request, "prices", "write"), deps_of(request)
    with deps.database.transaction() as session:
        tenant = organisations.tenant_named(session, request.path_params["tenant_id"])
        after = parents.describe(session, act(session, tenant, viewer.scope.actor))
        scope = scope_of(viewer, tenant.id)
        audit.record(session, scope, deps.clock, name, after["parent"], before=None, after=after)
    return redirect_with_notice(request, PATH.format(tenant_id=tenant.id), "parent-changed")


def _save(request: Request, form_fields: Fields) -> Response:
    viewer, deps = operator_of(request, "prices", "write"), deps_of(request)
    changes: dict[str, Any] = {"prepaid_only": form_fields.get("prepaid_only") == "yes"}
    changes["collection"] = form_fields.get("collection", "")
    if changes["collection"] not in ("manual", "stripe", "stripe_meters"):
        raise BadRequest("Choose how invoices are collected.", param="collection")
    days = form_fields.get("payment_terms_days", "")
    if days and (not (days.isascii() and days.isdecimal()) or int(days) > 365):
        raise BadRequest("Days to pay are 0 to 365, or empty.", param="payment_terms_days")
    changes["payment_terms_days"] = int(days) if days else None
    chosen = form_fields.get("payment_methods", "").replace(",", " ").split()
    changes["payment_methods"] = chosen or None
    with deps.database.transaction() as session:
        tenant = organisations.tenant_named(session, request.path_params["tenant_id"])
        account = accounts.lock_account(session, tenant.id)
        before = {name: getattr(account, name) for name in changes}
        account_changes.change(session, account, changes, deps.clock.now())
        after = {name: getattr(account, name) for name in changes}
        scope = scope_of(viewer, tenant.id)
        audit.record(
            session, scope, deps.clock, "billing.change", tenant.id, before=before, after=after
        )
    return redirect_with_notice(request, PATH.format(tenant_id=tenant.id), "account-saved")


def _set_add_on(request: Request, form_fields: Fields) -> Response:
    return tenant_add_ons.change(request, form_fields, PATH)


def _pause(request: Request, form_fields: Fields) -> Response:
    try:
        until = usual(
            datetime.strptime(form_fields.get("until", ""), "%Y-%m-%d").replace(tzinfo=UTC)
        )
    except ValueError:
        raise BadRequest("Choose the day on which it begins again.", param="until") from None
    return _subscription(request, "pause", {"until": until})


def _resume(request: Request, _fields: Fields) -> Response:
    return _subscription(request, "resume", {})


def _cancel(request: Request, form_fields: Fields) -> Response:
    at_end = form_fields.get("when") != "now"
    return _subscription(request, "cancel", {"at_term_end": at_end}, form_fields)


def _subscription(
    request: Request, name: str, terms: dict[str, Any], ask: Fields | None = None
) -> Response:
    viewer, deps = operator_of(request, "prices", "write"), deps_of(request)
    act = getattr(subscriptions, name)
    with deps.database.transaction() as session:
        tenant = organisations.tenant_named(session, request.path_params["tenant_id"])
        if ask is not None:
            require_confirmation(ask, tenant.name)
        act(session, tenant.id, deps.clock.now(), **terms)
        rows = subscription_views.subscriptions_json(session, tenant.id, deps.clock.now())
        audit.record(
            session,
            scope_of(viewer, tenant.id),
            deps.clock,
            f"subscription.{name}",
            tenant.id,
            before=None,
            after=rows[-1],
        )
    return redirect_with_notice(request, PATH.format(tenant_id=tenant.id), "subscription-changed")


ROUTES = [
    Route(PATH, page_of, methods=["GET"]),
    Route(
        PATH,
        form_handler(
            page_of,
            details=_save,
            add_on=_set_add_on,
            pause=_pause,
            resume=_resume,
            cancel=_cancel,
            parent=_set_parent,
            finalise=_finalise,
            no_parent=_remove_parent,
        ),
        methods=["POST"],
    ),
]
