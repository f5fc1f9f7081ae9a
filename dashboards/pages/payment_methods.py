"""Payment methods: those on file with the provider, and a link to its page for adding one.

The Content-Security-Policy forbids forms that lead to another site, so the page first shows a link.
"""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from billing.accounts.tables import BillingAccount
from billing.payments.methods import TRANSFER
from billing.payments.tables import PaymentCustomer, PaymentMethod
from dashboards.once import redirect_with_secret, secret_of
from dashboards.page_data import Form, PageData, Tile, show
from dashboards.pages.common import Fields, deps_of, form_handler, viewer_of
from dashboards.tables import Column, Table
from dashboards.viewer import DashboardDeps, Viewer

PATH = "/payment-methods"
METHODS = [
    Column("label", "On file"),
    Column("provider", "Provider"),
    Column(
        "state",
        "Use",
        about="The default method is charged for every invoice until it is replaced.",
    ),
    Column("at", "Added", "moment"),
]
_TRANSFER = [Column("name", "Detail"), Column("value", "Value", "code")]
_BY_HAND = "Invoices are paid by bank transfer and recorded by the operator. No cards are stored."
_NONE = "None yet. Invoices are paid by bank transfer until you add a card."


def page_of(request: Request) -> Response:
    viewer, deps = viewer_of(request, "payments"), deps_of(request)
    address = secret_of(request)
    away = (address, "Continue to the provider's page") if address.startswith("http") else None
    tables = []
    if request.query_params.get("transfer") == "show":
        rows = deps.backend.bank_instructions(viewer.scope)
        shown = [{"name": name, "value": value} for name, value in rows]
        tables = [Table("Account for bank transfers", _TRANSFER, shown, totals=False)]
    return show(request, _sheet(viewer, deps, away, tables))


def _sheet(
    viewer: Viewer,
    deps: DashboardDeps,
    away: tuple[str, str] | None,
    tables: Sequence[Table] = (),
) -> PageData:
    tenant_id, provider = viewer.scope.tenant_id, deps.backend.collects_by()
    with deps.database.read() as session:
        account = session.get(BillingAccount, tenant_id)
        rows = _methods(session, tenant_id)
    may_add = bool(provider) and deps.auth.may(viewer, "payments", "write")
    by = account.collection if account else "manual"
    chosen = (account.payment_methods if account else None) or ()
    return PageData(
        "How invoices are paid",
        "Card numbers are entered on the provider's page and never reach this server.",
        tiles=[
            Tile(
                "Invoices are collected",
                "by bank transfer" if by == "manual" else f"by {by}",
                about="After you add a card, the provider collects from the next invoice on.",
            )
        ],
        tables=[
            Table("On file", METHODS, rows, totals=False, empty=_NONE if provider else _BY_HAND),
            *tables,
        ],
        forms=_ways(provider, TRANSFER in chosen) if may_add and away is None else [],
        back=("/invoices", "Invoices and payments"),
        away=away,
        remarks=["The provider's page leads back here."] if away else [],
    )


def _methods(session: Session, tenant_id: str) -> list[dict[str, Any]]:
    customers = session.scalars(
        select(PaymentCustomer).where(PaymentCustomer.tenant_id == tenant_id)
    )
    usual = {each.default_method for each in customers}
    found = session.scalars(
        select(PaymentMethod)
        .where(PaymentMethod.tenant_id == tenant_id, PaymentMethod.detached_at.is_(None))
        .order_by(PaymentMethod.created_at.desc())
    )
    return [
        {
            "label": each.label,
            "provider": each.provider,
            "state": "default" if each.external_id in usual else "not used",
            "at": each.created_at,
        }
        for each in found
    ]


def _ways(provider: str, by_transfer: bool) -> list[Form]:
    about = "A new card is charged at once for invoices that the last card was declined for."
    title = f"Payment methods with {provider}"
    forms = [
        Form(PATH, "Add a card or account", {"act": "add"}, title=title, about=about),
        Form(PATH, "Open the billing portal", {"act": "portal"}),
    ]
    if by_transfer:
        shown = {"transfer": "show"}
        forms.append(Form(PATH, "Show the account for bank transfers", shown, method="get"))
    return forms


def _start_setup(request: Request, _given: Fields) -> Response:
    viewer, deps = viewer_of(request, "payments", "write"), deps_of(request)
    address = deps.backend.card_page(viewer.scope)
    return redirect_with_secret(request, PATH, "card-page", address)


def _open_portal(request: Request, _given: Fields) -> Response:
    viewer, deps = viewer_of(request, "payments", "write"), deps_of(request)
    return redirect_with_secret(request, PATH, "card-page", deps.backend.portal_page(viewer.scope))


ROUTES = [
    Route(PATH, page_of, methods=["GET"]),
    Route(PATH, form_handler(page_of, add=_start_setup, portal=_open_portal), methods=["POST"]),
]
