"""Billing plans and tax rates: what there is, and forms to add one."""

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import select
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from billing.accounts.tax_ids import check_region
from billing.pricing.exchange_rates import check_currency
from billing.reports import subscription_views
from billing.subscriptions import add_ons, subscriptions
from billing.subscriptions.tables import Plan
from billing.taxes import tax_rates
from billing.taxes.tables import TaxRate
from core.clock import usual
from core.errors import BadRequest
from core.money import MINOR_DIGITS, units_of
from core.tenants import audit, plan_store
from dashboards.page_data import Form, Input, PageData, show
from dashboards.pages.common import (
    Fields,
    deps_of,
    form_handler,
    operator_of,
    redirect_with_notice,
)
from dashboards.tables import Column, Table

PATH = "/operator/plans"
_PLANS = [
    Column("name", "Plan"),
    Column("interval", "Interval"),
    Column("base_fee", "Base fee", "money"),
    Column("seat_fee", "Per seat", "money"),
    Column("included_usage", "Included usage", "money", "Per billing period."),
    Column("minimum_commitment", "Commitment", "money", "Per interval."),
    Column("payment_terms_days", "Days to pay", "whole"),
    Column("trial_days", "Trial, days", "whole"),
    Column("limits_plan", "Limits plan"),
]
_ADD_ONS = [
    Column("name", "Add-on"),
    Column("interval", "Interval"),
    Column("fee", "Fee per unit", "money"),
]
_RATES = [
    Column("region", "Region"),
    Column("name", "Tax"),
    Column("percent", "Percent", "figure"),
    Column("first", "From", "figure"),
    Column("last", "Until", "figure"),
]
_INTERVALS = [("month", "billing period"), ("year", "year")]
_NUMBERS = ("included_seats", "trial_days", "payment_terms_days")


def page_of(request: Request) -> Response:
    operator_of(request, "prices")
    deps = deps_of(request)
    with deps.database.read() as session:
        plans = [
            subscription_views.plan_json(each)
            for each in session.scalars(select(Plan).order_by(Plan.name))
        ]
        extras = [add_ons.describe(each) for each in add_ons.listed(session)]
        limits = sorted(plan_store.all_of(session))
        rates = session.scalars(
            select(TaxRate).order_by(TaxRate.region, TaxRate.name, TaxRate.effective_from)
        ).all()
    rows = [
        each | {name: int(each[name]["units"]) for name in subscriptions.AMOUNTS} for each in plans
    ]
    page_data = PageData(
        "Plans and taxes",
        "Billing plans that tenants subscribe to, and the tax rates of regions. A plan never changes; "
        "a contract's own amounts are set with the subscription.",
        tables=[
            Table(
                "Billing plans",
                _PLANS,
                rows,
                totals=False,
                empty="No billing plan yet. Without one, tenants pay for usage alone.",
                next_step=("#new-plan", "Create a plan"),
            ),
            Table(
                "Add-ons",
                _ADD_ONS,
                [each | {"fee": int(each["fee"]["units"])} for each in extras],
                totals=False,
                empty="No add-on yet. Tenants add them to a plan.",
                next_step=("#new-add-on", "Create an add-on"),
            ),
            Table(
                "Tax rates",
                _RATES,
                [_rate(each) for each in rates],
                totals=False,
                empty="No tax rate: invoices have no tax.",
                next_step=("#new-tax-rate", "Set a tax rate"),
            ),
        ],
        forms=[_plan_form(limits), _add_on_form(), _rate_form(deps.clock.now())],
    )
    return show(request, page_data)


def _rate(each: TaxRate) -> dict[str, Any]:
    return {
        "region": each.region,
        "name": each.name,
        "percent": f"{each.rate_ppm / 10_000:g} %",
        "first": f"{each.effective_from:%Y-%m-%d}",
        "last": f"{each.effective_to:%Y-%m-%d}" if each.effective_to else None,
    }


def _add_on_form() -> Form:
    inputs = [
        Input("add_on", "Name"),
        Input("currency", "Currency", "select", "USD", [(each, each) for each in MINOR_DIGITS]),
        Input("interval", "Fee per", "select", "month", _INTERVALS),
        Input("fee", "Fee per unit"),
    ]
    about = "Tenants add it to a plan of the same interval; it is billed like the plan."
    return Form(
        PATH,
        "Create add-on",
        inputs=inputs,
        title="New add-on",
        panel=True,
        about=about,
        act="add_on",
    )


def _plan_form(limits: list[str]) -> Form:
    inputs = [
        Input("name", "Name"),
        Input("currency", "Currency", "select", "USD", [(each, each) for each in MINOR_DIGITS]),
        Input("interval", "Fees per", "select", "month", _INTERVALS),
        Input(
            "in_advance", "Billed", "select", "no", [("no", "in arrears"), ("yes", "in advance")]
        ),
        Input("base_fee", "Base fee", value="0"),
        Input("seat_fee", "Fee per seat", value="0"),
        Input("included_seats", "Included seats", "number", "0"),
        Input("included_usage", "Included usage", value="0", hint="per billing period"),
        Input("minimum_commitment", "Commitment", value="0", hint="least usage per interval"),
        Input(
            "commitment_interval",
            "Commitment per",
            "select",
            "",
            [("", "as the fees"), *_INTERVALS],
            required=False,
        ),
        Input("trial_days", "Trial, days", "number", "0"),
        Input("payment_terms_days", "Days to pay", "number", "14"),
        Input(
            "limits_plan",
            "Limits plan",
            "select",
            "",
            [("", "unchanged"), *((each, each) for each in limits)],
            required=False,
        ),
    ]
    return Form(PATH, "Create plan", inputs=inputs, title="New plan", panel=True, act="plan")


def _rate_form(now: datetime) -> Form:
    inputs = [
        Input("region", "Region", hint="such as DE or US-NY"),
        Input("tax_name", "Tax", value="VAT"),
        Input("percent", "Percent", hint="such as 19"),
        Input("from", "From", "date", f"{now:%Y-%m-%d}", hint="00:00 UTC"),
    ]
    about = "The rate before it ends on that day; each line is taxed at the rate of its own time."
    return Form(
        PATH, "Set rate", inputs=inputs, title="New tax rate", panel=True, about=about, act="rate"
    )


def _create(request: Request, form_fields: Fields) -> Response:
    viewer, deps = operator_of(request, "prices", "write"), deps_of(request)
    given = form_fields.get
    fields: dict[str, Any] = {name: _units(name, given(name, "")) for name in subscriptions.AMOUNTS}
    fields |= {name: _whole(name, given(name, "")) for name in _NUMBERS}
    for name, known in (("currency", tuple(MINOR_DIGITS)), ("interval", ("month", "year"))):
        if given(name) not in known:
            raise BadRequest(f"Choose the {name}.", param=name)
    if not 0 < len(given("name", "")) <= 120:
        raise BadRequest("A plan needs a name of up to 120 characters.", param="name")
    fields |= {name: form_fields[name] for name in ("name", "currency", "interval")}
    fields["in_advance"] = given("in_advance") == "yes"
    fields["limits_plan"] = given("limits_plan") or None
    if given("commitment_interval", "") not in ("", "month", "year"):
        raise BadRequest("Choose the interval of the commitment.", param="commitment_interval")
    fields["commitment_interval"] = given("commitment_interval") or None
    with deps.database.transaction() as session:
        created = subscriptions.create_plan(session, deps.clock.now(), fields)
        after = subscription_views.plan_json(created)
        actor = viewer.scope.actor
        audit.record_operator(
            session, deps.clock, actor, "plan.create", created.id, before=None, after=after
        )
    return redirect_with_notice(request, PATH, "plan-made")


def _create_add_on(request: Request, form_fields: Fields) -> Response:
    viewer, deps = operator_of(request, "prices", "write"), deps_of(request)
    fee = _units("fee", form_fields.get("fee", ""))
    currency = check_currency(form_fields.get("currency", ""), "currency")
    interval, name = form_fields.get("interval", ""), form_fields.get("add_on", "")
    with deps.database.transaction() as session:
        created = add_ons.create(
            session, deps.clock.now(), name, fee, currency=currency, interval=interval
        )
        after = add_ons.describe(created)
        actor = viewer.scope.actor
        audit.record_operator(
            session, deps.clock, actor, "add_on.create", created.id, before=None, after=after
        )
    return redirect_with_notice(request, PATH, "add-on-made")


def _set_rate(request: Request, form_fields: Fields) -> Response:
    viewer, deps = operator_of(request, "prices", "write"), deps_of(request)
    ppm = _units("percent", form_fields.get("percent", "")) // 10**8
    if not 0 <= ppm < 1_000_000:
        raise BadRequest("The percent must be from 0 to 99.9999.", param="percent")
    try:
        start = usual(
            datetime.strptime(form_fields.get("from", ""), "%Y-%m-%d").replace(tzinfo=UTC)
        )
    except ValueError:
        raise BadRequest("Choose the first day of the rate.", param="from") from None
    name = form_fields.get("tax_name", "")[:120]
    with deps.database.transaction() as session:
        region = check_region(form_fields.get("region", ""))
        created = tax_rates.add_rate(session, region, name, ppm, start)
        actor, target = viewer.scope.actor, f"{region} {name}"
        audit.record_operator(
            session, deps.clock, actor, "tax.set", target, before=None, after=_rate(created)
        )
    return redirect_with_notice(request, PATH, "tax-set")


def _units(name: str, written: str) -> int:
    try:
        return units_of(written or "0")
    except ValueError as error:
        raise BadRequest(f"{error}.", next_step="Write it as 12.50.", param=name) from None


def _whole(name: str, written: str) -> int:
    if not (written.isascii() and written.isdecimal()) or int(written) > 1_000_000:
        raise BadRequest(f"{written[:20]!r} is not a whole number.", param=name)
    return int(written)


ROUTES = [
    Route(PATH, page_of, methods=["GET"]),
    Route(
        PATH,
        form_handler(page_of, plan=_create, add_on=_create_add_on, rate=_set_rate),
        methods=["POST"],
    ),
]
