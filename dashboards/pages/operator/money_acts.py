"""Acts on money: those that wait for a second operator, the latest, and the form of each with a preview
of its postings."""

from typing import Any
from urllib.parse import urlencode

from sqlalchemy.orm import Session
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from billing.adjustments import money_acts
from billing.adjustments.act_requests import DETAILS, FEES, Kind, Subject
from billing.adjustments.act_reversals import can_be_undone
from billing.adjustments.money_acts import FourEyes, Preview
from billing.adjustments.tables import MoneyAct
from billing.invoicing.tables import Invoice
from billing.payments import dunning
from billing.payments.tables import Payment
from core.errors import TollhouseError
from core.ids import new_id
from core.money import decimal_of, format_minor, round_to_minor
from core.tenants.models import Tenant
from dashboards.page_data import Form, Input, PageData, Rejected, Tile, show
from dashboards.pages.common import (
    Fields,
    deps_of,
    form_handler,
    operator_of,
    redirect_with_notice,
    require_confirmation,
    root_of,
)
from dashboards.pages.operator.money_act_choice import choice_page
from dashboards.pages.operator.money_act_forms import (
    asked_for,
    complete,
    inputs_of,
    prefilled,
)
from dashboards.tables import Column, Table

_NO_ACT = "No act yet. Grants, credit notes and the others are made on a tenant's page."
_TENANTS = ("/operator/tenants", "Open tenants")
PATH = "/operator/money-acts"
NEW = f"{PATH}/new"
TITLES = {
    Kind.GRANT: "Grant credit",
    Kind.CREDIT_NOTE: "Issue a credit note",
    Kind.REFUND: "Refund a payment",
    Kind.VOID: "Void an invoice",
    Kind.WRITE_OFF: "Write off an invoice",
    Kind.WIRE: "Book a wire",
    Kind.PLAN: "Change the plan",
    Kind.ADD_ON: "Set an add-on",
    Kind.TAX: "Change tax details",
    Kind.ADDRESS: "Change the billing address",
    Kind.UNDO: "Undo an act",
}
_ACTS = [
    Column("at", "Asked", "moment"),
    Column("what", "Act"),
    Column("about", "Of", link="href"),
    Column("amount", "Amount", "money"),
    Column("reason", "Reason"),
    Column("status", "State", "badge"),
    Column("by", "Asked by"),
    Column("decided", "Decided by"),
]
_POSTINGS = [
    Column("transaction", "Transaction"),
    Column("account", "Account"),
    Column("debit", "Debit", "money"),
    Column("credit", "Credit", "money"),
]


def start(kind: Kind, target: str, words: str) -> Form:
    """A button that opens the form of an act."""
    return Form(NEW, words, {"kind": kind.value, "target": target}, method="get")


def link(kind: Kind, target: str, words: str, amount: str = "") -> tuple[str, str]:
    """The same as a link."""
    fields = {"kind": kind.value, "target": target} | ({"amount": amount} if amount else {})
    return f"{NEW}?{urlencode(fields)}", words


def acts_table(session: Session, target: str, root: str) -> Table:
    rows = [_row(session, each, root) for each in money_acts.listed(session, target=target)]
    return Table("Acts on money", _ACTS, rows, totals=False, empty="None yet.")


def page_of(request: Request) -> Response:
    viewer, deps = operator_of(request, "money"), deps_of(request)
    root = root_of(request)
    with deps.database.read() as session:
        waiting = money_acts.listed(session, status=money_acts.WAITING)
        waits = [
            _row(session, each, root) | {"acts": _decisions(each, viewer.scope.actor)}
            for each in waiting
        ]
        latest = [
            _row(session, each, root) | {"acts": _undo(each)}
            for each in money_acts.listed(session)
            if each.status != money_acts.WAITING
        ]
    above = deps.four_eyes_above
    rule = f"above {above}" if above is not None else "off"
    page_data = PageData(
        "Acts on money",
        "Grants, credit notes, refunds, voids, write-offs, wires and changes of plan, tax and address, "
        "and who confirmed them.",
        tiles=[
            Tile("Waiting", str(len(waits)), state="warn" if waits else ""),
            Tile(
                "Second person",
                rule,
                about="TOLLHOUSE_FOUR_EYES_ABOVE, in the account's currency.",
            ),
            Tile("You are", viewer.scope.actor.removeprefix("operator:")),
        ],
        links=[(NEW, "New act…")],
        tables=[
            Table(
                "Waiting for a second operator",
                [*_ACTS[:-1], Column("acts", "Decide", "acts")],
                waits,
                totals=False,
                empty="Nothing waits.",
            ),
            Table(
                "The latest acts",
                [*_ACTS, Column("acts", "Change", "acts")],
                latest,
                totals=False,
                empty=_NO_ACT,
                next_step=_TENANTS,
            ),
        ],
    )
    return show(request, page_data)


def _undo(act: Any) -> list[Form]:
    return [start(Kind.UNDO, act.id, "Undo…")] if can_be_undone(act) else []


def _row(session: Session, act: Any, root: str) -> dict[str, Any]:
    invoice = session.get(Invoice, act.target)
    tenant = session.get(Tenant, act.tenant_id)
    path = f"/operator/invoices/{invoice.id}" if invoice else f"/operator/tenants/{act.tenant_id}"
    name = tenant.name if tenant else act.tenant_id
    return {
        "at": act.requested_at,
        "what": TITLES[Kind(act.kind)],
        "about": f"{name}, {invoice.label}" if invoice else name,
        "href": root + path,
        "amount": act.amount if act.amount or act.kind in FEES else None,
        "currency": act.currency,
        "reason": act.reason,
        "status": act.status,
        "by": act.requested_by.removeprefix("operator:"),
        "decided": (act.decided_by or "").removeprefix("operator:"),
    }


def _decisions(act: Any, viewer: str) -> list[Form]:
    amount = _typed(act.amount, act.currency)
    fields = {"id": act.id}
    post = Form(PATH, "Confirm", fields, confirm=amount, act="confirm")
    words = "Withdraw" if act.requested_by == viewer else "Reject"
    why = Input("reason", "Why", required=False)
    no = Form(PATH, words, fields, [why], act="reject", danger=True)
    return [no] if act.requested_by == viewer else [post, no]


def _confirm(request: Request, form_fields: Fields) -> Response:
    viewer, deps = operator_of(request, "money", "write"), deps_of(request)
    with deps.database.transaction() as session:
        act = money_acts.get(session, form_fields.get("id", ""))
        require_confirmation(form_fields, _typed(act.amount, act.currency))
        money_acts.confirm(session, deps.clock, act.id, viewer.scope.actor)
    dunning.settle(deps.database, deps.clock)
    return redirect_with_notice(request, PATH, "act-posted")


def _reject(request: Request, form_fields: Fields) -> Response:
    viewer, deps = operator_of(request, "money", "write"), deps_of(request)
    with deps.database.transaction() as session:
        act_id, why = form_fields.get("id", ""), form_fields.get("reason", "")[:500]
        money_acts.reject(session, deps.clock, act_id, viewer.scope.actor, why)
    return redirect_with_notice(request, PATH, "act-rejected")


def new_page(request: Request) -> Response:
    """The form of one act; with its amount, also the preview and the confirmation."""
    operator_of(request, "money", "write")
    if request.method == "GET" and not (
        request.query_params.get("kind") in list(Kind) and request.query_params.get("target")
    ):
        return choice_page(request, NEW, PATH, TITLES)
    deps, problem = deps_of(request), ""
    rejected: Rejected | None = getattr(request.state, "rejected", None)
    given = rejected.fields if rejected else dict(request.query_params)
    kind = money_acts.kind_of(given.get("kind", ""))
    seen: Preview | None = None
    status = 200
    with deps.database.transaction() as session:
        about, path = _about(session, given.get("target", ""))
        if complete(kind, given):
            try:
                seen = money_acts.preview(session, deps.clock, asked_for(kind, given))
            except TollhouseError as error:
                problem, status = str(error), error.status
        inputs = inputs_of(session, kind, prefilled(session, kind, given))
        typed = _confirmation(session, kind, seen.subject) if seen else ""
    fields = {"kind": kind.value, "target": given.get("target", "")}
    ask = Form(NEW, "Preview", fields, inputs, method="get", act="preview", problem=problem)
    rule = FourEyes.of(deps.four_eyes_above)
    page_data = PageData(
        TITLES[kind],
        f"{about}. Preview shows what will be posted; nothing is posted before you confirm.",
        actions=[ask],
        tables=[_postings(seen)] if seen else [],
        remarks=seen.remarks if seen else [],
        forms=[_post_form(kind, given, seen, (typed, rule))] if seen else [],
        back=(path, "Back"),
    )
    return show(request, page_data, status)


def _about(session: Session, target: str) -> tuple[str, str]:
    """What the act concerns, and the page that it was opened from."""
    act = session.get(MoneyAct, target)
    if act is not None:
        return f"{TITLES[Kind(act.kind)]}, {act.reference}", PATH
    payment = session.get(Payment, target)
    invoice_id = payment.invoice_id if payment else target
    invoice = session.get(Invoice, invoice_id) if invoice_id else None
    row = invoice or payment
    tenant = session.get(Tenant, row.tenant_id if row else target)
    name = tenant.name if tenant else target
    if invoice is not None:
        return f"Invoice {invoice.label or '(draft)'} of {name}", f"/operator/invoices/{invoice.id}"
    return (
        f"Tenant {name}",
        f"/operator/tenants/{tenant.id}/billing" if tenant else "/operator/invoices",
    )


def _postings(seen: Preview) -> Table:
    rows = [
        {
            "transaction": each.kind.replace("_", " "),
            "account": each.account.replace("_", " "),
            "debit": each.units if each.units > 0 else None,
            "credit": -each.units if each.units < 0 else None,
        }
        for each in seen.postings
    ]
    empty = "No posting now; the next invoice follows the change."
    currency = seen.subject.currency
    return Table("What will be posted", _POSTINGS, rows, currency, totals=False, empty=empty)


def _post_form(kind: Kind, given: Fields, seen: Preview, asked: tuple[str, FourEyes]) -> Form:
    """`asked` is what confirms the act, and the rule of the second person."""
    typed, rule = asked
    second = rule.needs_second(seen.subject.amount)
    kept = {name: value for name, value in given.items() if name not in ("act", "confirm")}
    fields = kept | {"reference": given.get("reference") or new_id("form")}
    amount = _typed(seen.subject.amount, seen.subject.currency)
    if second:
        about = f"{amount} {seen.subject.currency} needs a second operator, who confirms it later."
    elif kind is Kind.PLAN or not seen.subject.amount:
        about = "Changes it at once, and writes your name to the audit log."
    else:
        about = f"Posts {amount} {seen.subject.currency} at once, and writes your name to the audit log."
    words = "Ask for confirmation" if second else ("Change" if kind in _CHANGES else "Post")
    danger = kind in (Kind.VOID, Kind.WRITE_OFF, Kind.UNDO)
    return Form(
        NEW,
        words,
        fields,
        confirm=typed,
        act="post",
        title="Confirm by the amount" if typed == amount else "Confirm by the tenant's name",
        about=about,
        danger=danger,
    )


_CHANGES = (Kind.PLAN, *DETAILS)


def _confirmation(session: Session, kind: Kind, subject: Subject) -> str:
    """What is typed to confirm: the amount, or the tenant's name where there is none."""
    if kind in FEES or subject.amount:
        return _typed(subject.amount, subject.currency)
    return session.get_one(Tenant, subject.tenant_id).name


def _typed(units: int, currency: str) -> str:
    """The amount that confirms an act: 12.50, or all digits of a part of the minor unit."""
    whole, left = round_to_minor(units, currency)
    return decimal_of(units) if left else format_minor(whole, currency)


def _post(request: Request, form_fields: Fields) -> Response:
    viewer, deps = operator_of(request, "money", "write"), deps_of(request)
    kind = money_acts.kind_of(form_fields.get("kind", ""))
    rule = FourEyes.of(deps.four_eyes_above)
    with deps.database.transaction() as session:
        asked = asked_for(kind, form_fields)
        seen = money_acts.preview(session, deps.clock, asked)
        require_confirmation(form_fields, _confirmation(session, kind, seen.subject))
        act = money_acts.submit(session, deps.clock, asked, viewer.scope.actor, rule)
        path = _about(session, form_fields.get("target", ""))[1]
    dunning.settle(deps.database, deps.clock)
    waits = act.status == money_acts.WAITING
    return redirect_with_notice(request, path, "act-waits" if waits else "act-posted")


ROUTES = [
    Route(PATH, page_of, methods=["GET"]),
    Route(PATH, form_handler(page_of, confirm=_confirm, reject=_reject), methods=["POST"]),
    Route(NEW, new_page, methods=["GET"]),
    Route(NEW, form_handler(new_page, post=_post), methods=["POST"]),
]
