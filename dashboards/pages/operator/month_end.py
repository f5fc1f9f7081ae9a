"""The end of a month: its checklist with a link to each task, and the signatures."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from billing.reports import month_end
from dashboards.page_data import Form, Input, PageData, Tile, show
from dashboards.pages.common import (
    Fields,
    deps_of,
    form_handler,
    operator_of,
    redirect_with_notice,
    require_confirmation,
    root_of,
    wants_csv,
)
from dashboards.tables import Column, Table

PATH = "/operator/month-end"
_CHECKS = [
    Column("name", "Check", link="href"),
    Column("state", "State", "badge"),
    Column("says", "Details"),
]
_SIGNED = [
    Column("month", "Month"),
    Column("by", "Signed by"),
    Column("at", "Signed", "moment"),
    Column("ledger", "Ledger since", "badge", "Whether entries reached the month after it."),
    Column("note", "Note"),
]


def page_of(request: Request) -> Response:
    viewer, deps = operator_of(request, "money"), deps_of(request)
    now, root = deps.clock.now(), root_of(request)
    sent = getattr(request.state, "rejected", None)
    written = sent.fields.get("month", "") if sent else request.query_params.get("month", "")
    month = month_end.known_month(written or month_end.last_month(now), now)
    with deps.database.read() as session:
        checks = month_end.checklist(session, now, month)
        signed = month_end.signatures(session)
        rows = [
            {
                "month": each.month,
                "by": each.signed_by.removeprefix("operator:"),
                "at": each.signed_at,
                "ledger": "differs" if month_end.changed(session, each) else "clean",
                "note": each.note,
            }
            for each in signed[:60]
        ]
    table = Table(
        f"Checklist of {month}",
        _CHECKS,
        [
            {
                "name": each.name,
                "href": root + each.path if each.path else "",
                "state": each.state,
                "says": each.summary,
            }
            for each in checks
        ],
        totals=False,
    )
    if wants_csv(request):
        return table.csv(f"month-end-{month}")
    bad = [each for each in checks if each.state == month_end.BAD]
    own = any(each.month == month and each.signed_by == viewer.scope.actor for each in signed)
    by = [each for each in signed if each.month == month]
    page_data = PageData(
        "Month end",
        "What must be done before a month's books are final, in its order. A signature keeps the "
        "checklist and the trial balance as they were.",
        tiles=[
            Tile("Month", month),
            Tile("To do", str(len(bad)), state="bad" if bad else "good"),
            Tile("Signatures", str(len(by)), state="good" if by else ""),
        ],
        actions=[
            Form(
                PATH,
                "Show",
                inputs=[Input("month", "Month", value=month, hint="such as 2026-01, in UTC")],
                method="get",
            )
        ],
        tables=[table],
        remarks=[_BLOCKED] if bad else [],
        forms=[] if bad or own else [_form(month)],
        after=[Table("Signatures", _SIGNED, rows, totals=False, empty="No month is signed.")],
    )
    return show(request, page_data)


_BLOCKED = "It can be signed when no check is bad. Each check leads to the page that settles it."


def _form(month: str) -> Form:
    note = Input("note", "Note", "area", required=False)
    return Form(
        PATH, "Sign off", {"month": month}, [note], confirm=month, title="Sign off", act="sign"
    )


def _sign(request: Request, form_fields: Fields) -> Response:
    viewer, deps = operator_of(request, "money", "write"), deps_of(request)
    month = form_fields.get("month", "")
    require_confirmation(form_fields, month)
    with deps.database.transaction() as session:
        month_end.sign(session, deps.clock, month, viewer.scope.actor, form_fields.get("note", ""))
    return redirect_with_notice(request, PATH, "month-signed")


ROUTES = [
    Route(PATH, page_of, methods=["GET"]),
    Route(PATH, form_handler(page_of, sign=_sign), methods=["POST"]),
]
