"""The fields of each act on money, and the act that they ask for."""

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from billing.accounts.tables import BillingAccount
from billing.adjustments.act_requests import DETAILS, ActRequest, Kind
from billing.subscriptions.tables import Plan
from core.clock import usual
from core.errors import BadRequest
from core.money import units_of
from dashboards.page_data import Input
from dashboards.pages.common import Fields

_TAX = ("tax_region", "tax_id", "postal_code")
_ADDRESS = ("legal_name", "address", "email")


def complete(kind: Kind, given: Fields) -> bool:
    if kind is Kind.PLAN:
        return bool(given.get("plan"))
    if kind in (Kind.VOID, Kind.WRITE_OFF, Kind.UNDO, *DETAILS):
        return bool(given.get("reason"))
    return bool(given.get("amount") and given.get("reason"))


def prefilled(session: Session, kind: Kind, given: Fields) -> Fields:
    """The fields, with the details as they are where none were sent yet."""
    account = session.get(BillingAccount, given.get("target", "")) if kind in DETAILS else None
    if account is None or "reason" in given:
        return given
    held = {name: getattr(account, name) for name in (*_TAX, *_ADDRESS)}
    return held | {"tax_exempt": "yes" if account.tax_exempt else "no"} | given


def inputs_of(session: Session, kind: Kind, given: Fields) -> list[Input]:
    value = given.get
    amount = Input("amount", "Amount", value=value("amount", ""), hint="in major units, as 12.50")
    reason = Input("reason", "Reason", value=value("reason", ""), hint="for the audit log")
    if kind is Kind.GRANT:
        kinds = [("promo", "promotional: our cost"), ("prepaid", "prepaid: cash received")]
        expires = value("expires_on", "")
        return [
            amount,
            Input("credit", "Kind", "select", value("credit", "promo"), kinds),
            Input("expires_on", "Expires on", "date", expires, required=False, hint="00:00 UTC"),
            reason,
        ]
    if kind is Kind.CREDIT_NOTE:
        ways = [("no", "to the wallet"), ("yes", "left to a refund")]
        paid = Input("refund", "What was paid goes", "select", value("refund", "no"), ways)
        return [_labelled(amount, "Net amount"), paid, reason]
    if kind is Kind.WIRE:
        name = value("reason", "")
        return [amount, Input("reason", "Bank reference", value=name, hint="booked once")]
    if kind is Kind.TAX:
        return [*_tax_inputs(given), reason]
    if kind is Kind.ADDRESS:
        return [*_address_inputs(given), reason]
    if kind is Kind.PLAN:
        options = [(each, each) for each in session.scalars(select(Plan.name).order_by(Plan.name))]
        return [
            Input("plan", "Plan", "select", value("plan", ""), options),
            Input("seats", "Seats", "number", value("seats", "0")),
            Input(
                "base_fee",
                "Agreed base fee",
                value=value("base_fee", ""),
                required=False,
                hint="empty: the plan's",
            ),
            _labelled(reason, "Reason", required=False),
        ]
    return [amount, reason] if kind is Kind.REFUND else [reason]


def _tax_inputs(given: Fields) -> list[Input]:
    value, yes_no = given.get, [("no", "no"), ("yes", "yes")]
    return [
        Input(
            "tax_region",
            "Tax region",
            value=value("tax_region", ""),
            required=False,
            hint="such as DE or US-NY",
        ),
        Input("tax_id", "Tax id", value=value("tax_id", ""), required=False),
        Input("postal_code", "Postal code", value=value("postal_code", ""), required=False),
        Input("tax_exempt", "Exempt from tax", "select", value("tax_exempt", "no"), yes_no),
    ]


def _address_inputs(given: Fields) -> list[Input]:
    value = given.get
    return [
        Input("legal_name", "Legal name", value=value("legal_name", ""), required=False),
        Input("address", "Address", "area", value("address", ""), required=False),
        Input("email", "E-mail for invoices", "email", value("email", ""), required=False),
    ]


def _labelled(each: Input, label: str, required: bool = True) -> Input:
    return Input(each.name, label, each.kind, each.value, required=required, hint=each.hint)


def asked_for(kind: Kind, given: Fields) -> ActRequest:
    terms: dict[str, Any] = {}
    if kind is Kind.GRANT:
        terms = {"kind": given.get("credit", "promo")}
        if given.get("expires_on"):
            day = _day(given["expires_on"])
            terms["expires_at"] = day.isoformat()
    elif kind is Kind.CREDIT_NOTE:
        terms = {"refund": given.get("refund", "no")}
    elif kind is Kind.PLAN:
        agreed = {"base_fee": given["base_fee"]} if given.get("base_fee") else {}
        seats = given.get("seats") or "0"
        terms = {"plan": given.get("plan", ""), "seats": seats, "overrides": agreed}
    elif kind is Kind.TAX:
        terms = {name: given.get(name, "")[:200] for name in (*_TAX, "tax_exempt")}
    elif kind is Kind.ADDRESS:
        terms = {name: given.get(name, "").replace("\r\n", "\n")[:2000] for name in _ADDRESS}
    wire = kind is Kind.WIRE
    reason = given.get("reason", "")[:500]
    reference = f"manual:{reason[:120]}" if wire else f"page:{given.get('reference', '')[:60]}"
    without = (Kind.PLAN, *DETAILS)
    amount = given.get("amount") if "amount" in given and kind not in without else None
    target = given.get("target", "")[:120]
    return ActRequest(kind, target, reference, _units(amount), reason, terms)


def _day(written: str) -> datetime:
    try:
        return usual(datetime.strptime(written, "%Y-%m-%d").replace(tzinfo=UTC))
    except ValueError:
        raise BadRequest(f"{written[:20]!r} is not a date.", param="expires_on") from None


def _units(amount: str | None) -> int | None:
    if not amount:
        return None
    try:
        return units_of(amount)
    except ValueError as error:
        raise BadRequest(f"{error}.", next_step="Write it as 12.50.", param="amount") from None
