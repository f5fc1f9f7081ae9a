"""Bank statements: their import, and the wires that match no invoice."""

from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from billing.adjustments.money_acts import FourEyes
from billing.bank import wires
from billing.bank.lines import MOST_BYTES
from billing.bank.wires import Clerk
from billing.payments import dunning
from core.errors import BadRequest, Conflict, NotFound
from dashboards.filters import choice
from dashboards.page_data import Form, Input, PageData, Rejected, Tile, show
from dashboards.pages.common import (
    Fields,
    deps_of,
    form_handler,
    operator_of,
    redirect_with_notice,
    root_of,
    wants_csv,
)
from dashboards.tables import Column, Table

PATH = "/operator/bank-lines"
IMPORT = f"{PATH}/import"
_COLUMNS = [
    Column("day", "Booked", "figure"),
    Column("payer", "Payer"),
    Column("text", "Text"),
    Column("amount", "Amount", "minor"),
    Column("status", "State", "badge"),
    Column("note", "Why"),
    Column("invoices", "Booked for", link="href"),
    Column("bank_id", "Id at the bank"),
]


def page_of(request: Request) -> Response:
    viewer, deps = operator_of(request, "money"), deps_of(request)
    status = choice(request, "status", ("", *wires.STATES), "")
    may_write = deps.auth.may(viewer, "money", "write")
    with deps.database.read() as session:
        waiting = wires.unmatched_count(session)
        rows = [
            _row(wires.describe(session, each), root_of(request))
            for each in wires.listed(session, status)
        ]
    empty = "No line has this state." if status else "No statement is imported yet."
    columns = [*_COLUMNS, Column("acts", "Change", "acts")] if may_write else _COLUMNS
    step = (PATH, "Show all") if status else ("#import", "Import a statement")
    table = Table("Lines, newest first", columns, rows, totals=False, empty=empty, next_step=step)
    if wants_csv(request):
        return Table("", _COLUMNS, rows, totals=False).csv("bank-lines")
    states = [("", "any"), *((each, each) for each in wires.STATES)]
    page_data = PageData(
        "Bank statements",
        "Each wire is booked for the invoice or customer whose reference or number it names. What names "
        "nothing waits here for a person.",
        tiles=[Tile("Unmatched", str(waiting), state="warn" if waiting else "")],
        actions=[
            Form(
                PATH,
                "Show",
                inputs=[Input("status", "State", "select", status, states, required=False)],
                method="get",
            )
        ],
        tables=[table],
        forms=[_import_form()] if may_write else [],
        link=(f"{PATH}?status={status}&format=csv", "Download CSV"),
    )
    return show(request, page_data)


def _row(line: dict[str, Any], root: str) -> dict[str, Any]:
    booked = [each["invoice"] or "credit" for each in line["acts"]]
    first = next((each["invoice"] for each in line["acts"] if each["invoice"]), None)
    return {
        "day": line["booked_on"],
        "payer": line["payer"] or line["payer_account"],
        "text": f"{line['reference']} {line['text']}".strip(),
        "amount": line["amount"]["minor"],
        "currency": line["currency"],
        "status": line["status"],
        "note": line["note"],
        "invoices": ", ".join(booked),
        "href": f"{root}/operator/invoices/{first}" if first else "",
        "bank_id": line["bank_id"],
        "acts": _forms(line["id"], line["status"]),
    }


def _forms(line_id: str, status: str) -> list[Form]:
    why = Input("reason", "Why")
    if status == wires.MATCHED:
        return [Form(PATH, "Unassign", {"id": line_id}, [why], act="unassign", danger=True)]
    if status != wires.UNMATCHED:
        return []
    target = Input("target", "Invoice or tenant", hint="number or name")
    return [
        Form(PATH, "Assign", {"id": line_id}, [target], act="assign"),
        Form(PATH, "Ignore", {"id": line_id}, [why], act="ignore"),
    ]


def _import_form() -> Form:
    file = Input("statement", "Statement", "file", hint="camt.053, or CSV with a header")
    about = "A line that was imported before changes nothing."
    return Form(IMPORT, "Import", inputs=[file], title="Import", about=about, act="import")


async def load(request: Request) -> Response:
    async with request.form(max_files=1, max_fields=5, max_part_size=2**20) as form:
        part = form.get("statement")
        content = await part.read(MOST_BYTES + 1) if isinstance(part, UploadFile) else b""
    try:
        return await run_in_threadpool(_load, request, content)
    except (BadRequest, Conflict) as error:
        request.state.rejected = Rejected({"act": "import"}, error)
        return await run_in_threadpool(page_of, request)


def _load(request: Request, content: bytes) -> Response:
    deps, clerk = deps_of(request), _clerk(request)
    if not content:
        raise BadRequest("No file was chosen.", next_step="Choose a statement.", param="statement")
    lines = wires.parse(content)
    with deps.database.transaction() as session:
        wires.import_lines(session, lines, clerk)
    dunning.settle(deps.database, deps.clock)
    return redirect_with_notice(request, PATH, "statement-imported")


def _assign(request: Request, form_fields: Fields) -> Response:
    return _change(
        request,
        lambda session, clerk: wires.assign(
            session, form_fields.get("id", ""), form_fields.get("target", ""), clerk
        ),
    )


def _unassign(request: Request, form_fields: Fields) -> Response:
    return _change(
        request,
        lambda session, clerk: wires.unassign(
            session, form_fields.get("id", ""), clerk, _reason(form_fields)
        ),
    )


def _ignore(request: Request, form_fields: Fields) -> Response:
    return _change(
        request,
        lambda session, clerk: wires.dismiss(
            session, form_fields.get("id", ""), clerk.actor, _reason(form_fields)
        ),
    )


def _reason(form_fields: Fields) -> str:
    reason = form_fields.get("reason", "")[:500]
    if not reason:
        raise BadRequest("There is no reason.", next_step="Say why.", param="reason")
    return reason


def _change(request: Request, act: Any) -> Response:
    deps, clerk = deps_of(request), _clerk(request)
    try:
        with deps.database.transaction() as session:
            act(session, clerk)
    except NotFound as error:  # of what was typed, so that the form is shown again
        raise BadRequest(str(error), next_step=error.next_step, param="target") from None
    dunning.settle(deps.database, deps.clock)
    return redirect_with_notice(request, PATH, "line-changed")


def _clerk(request: Request) -> Clerk:
    viewer, deps = operator_of(request, "money", "write"), deps_of(request)
    return Clerk(deps.clock, viewer.scope.actor, FourEyes.of(deps.four_eyes_above))


ROUTES = [
    Route(PATH, page_of, methods=["GET"]),
    Route(
        PATH,
        form_handler(page_of, assign=_assign, unassign=_unassign, ignore=_ignore),
        methods=["POST"],
    ),
    Route(IMPORT, load, methods=["POST"]),
]
