"""The seller: what invoices state about their issuer, and how they are numbered."""

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from billing.accounts.accounts import DEFAULT_SELLER_ID, ensure_seller
from billing.accounts.tables import Seller
from billing.invoicing import sellers
from core.errors import BadRequest, Conflict
from core.tenants import audit
from dashboards.page_data import Form, Input, PageData, Rejected, Tile, show
from dashboards.pages.common import deps_of, operator_of, redirect_with_notice

PATH = "/operator/seller"
_TEXTS = ("name", "address", "tax_region", "tax_id", "bank_details", "footer", "number_prefix")


def page_of(request: Request) -> Response:
    operator_of(request, "prices")
    with deps_of(request).database.transaction() as session:
        seller = sellers.describe(ensure_seller(session))
    page_data = PageData(
        "Seller",
        "The issuer shown on invoices and credit notes. Final invoices do not change.",
        tiles=[
            Tile("Next invoice", seller["next_label"], about="Numbers run without a gap."),
            Tile("Logo", "set" if seller["logo"] else "none"),
            Tile("Tax id", seller["tax_id"] or "none"),
        ],
        forms=[_form(seller)],
    )
    return show(request, page_data)


def _form(seller: dict[str, str]) -> Form:
    inputs = [
        Input("name", "Name", value=seller["name"]),
        Input("address", "Address", "area", seller["address"], required=False),
        Input(
            "tax_region",
            "Tax region",
            value=seller["tax_region"],
            required=False,
            hint="such as DE or US-NY",
        ),
        Input("tax_id", "Tax id", value=seller["tax_id"], required=False),
        Input("bank_details", "Bank details", "area", seller["bank_details"], required=False),
        Input("footer", "Footer of invoices", "area", seller["footer"], required=False),
        Input("number_prefix", "Number prefix", value=seller["number_prefix"]),
        Input(
            "next_number",
            "Next number",
            "number",
            str(seller["next_number"]),
            hint="can be chosen before the first invoice",
        ),
        Input("logo", "Logo", "file", required=False, hint="PNG or JPEG, at most 256 KiB"),
    ]
    also = (("remove_logo", "Save without a logo"),) if seller["logo"] else ()
    return Form(PATH, "Save", inputs=inputs, title="Profile", act="save", also=also)


async def change(request: Request) -> Response:
    async with request.form(max_files=1, max_fields=12, max_part_size=2**20) as form:
        fields = {name: str(form.get(name, "")).strip() for name in (*_TEXTS, "next_number", "act")}
        part = form.get("logo")
        logo = await part.read(sellers.MAX_LOGO + 1) if isinstance(part, UploadFile) else b""
    try:
        return await run_in_threadpool(_save, request, fields, logo)
    except (BadRequest, Conflict) as error:
        request.state.rejected = Rejected(fields, error)
        return await run_in_threadpool(page_of, request)


def _save(request: Request, fields: dict[str, str], logo: bytes) -> Response:
    viewer, deps = operator_of(request, "prices", "write"), deps_of(request)
    changes: dict[str, object] = {name: fields[name].replace("\r\n", "\n") for name in _TEXTS}
    number = fields["next_number"]
    changes["next_number"] = int(number) if (number.isascii() and number.isdecimal()) else number
    if logo or fields["act"] == "remove_logo":
        changes["logo"] = logo
    with deps.database.transaction() as session:
        before = session.get(Seller, DEFAULT_SELLER_ID)
        shown = sellers.describe(before) if before is not None else None
        seller = sellers.change(session, changes)
        audit.record_operator(
            session,
            deps.clock,
            viewer.scope.actor,
            "seller.change",
            seller.id,
            before=shown,
            after=sellers.describe(seller),
        )
    return redirect_with_notice(request, PATH, "seller-saved")


ROUTES = [Route(PATH, page_of, methods=["GET"]), Route(PATH, change, methods=["POST"])]
