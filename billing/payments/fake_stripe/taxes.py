"""Tax calculations by the rates and registrations that are set in the state."""

from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

from billing.payments.fake_stripe.objects import ApiError, Object
from billing.payments.fake_stripe.state import StripeState

_MONTH_S = 31 * 86_400
_EUROPE = frozenset(
    (
        *("AT", "BE", "BG", "CY", "CZ", "DE", "DK", "EE", "ES", "FI", "FR", "GR", "HR", "HU"),
        *("IE", "IT", "LT", "LU", "LV", "MT", "NL", "PL", "PT", "RO", "SE", "SI", "SK"),
    )
)


@dataclass(frozen=True, slots=True)
class Rate:
    """A rate of a place, in percent, between two Unix seconds."""

    place: str  # "DE", "US-NY"
    kind: str  # "vat", "sales_tax"
    percent: str
    since: int = 0
    until: int = 1 << 40


def calculate(state: StripeState, form: dict[str, Any]) -> Object:
    customer, [item] = form["customer_details"], form["line_items"]
    address = customer["address"]
    amount, at = int(item["amount"]), int(form.get("tax_date") or state.now)
    if amount <= 0:
        raise ApiError(400, "This value must be greater than or equal to 1.", param="line_items")
    if abs(at - state.now) > _MONTH_S:
        raise ApiError(400, "The tax date is more than 31 days away.", param="tax_date")
    if address["country"] == "US" and not address.get("postal_code"):
        message = "We could not determine the customer's tax location."
        raise ApiError(400, message, code="customer_tax_location_invalid")
    place = "-".join(each for each in (address["country"], address.get("state")) if each)
    rates = [each for each in state.tax_rates if each.place == place]
    parts = [
        _part(each, amount, _reason(state, customer))
        for each in rates
        if each.since <= at < each.until
    ]
    return {
        "id": None,
        "object": "tax.calculation",
        "amount_total": amount + sum(part["amount"] for part in parts),
        "currency": form["currency"],
        "customer_details": customer,
        "livemode": False,
        "tax_amount_exclusive": sum(part["amount"] for part in parts),
        "tax_amount_inclusive": 0,
        "tax_breakdown": parts,
        "tax_date": at,
    }


def _reason(state: StripeState, customer: dict[str, Any]) -> str:
    if customer.get("taxability_override") == "customer_exempt":
        return "customer_exempt"
    country = customer["address"]["country"]
    both = {country, state.tax_origin} <= _EUROPE and country != state.tax_origin
    if both and any(each["type"] == "eu_vat" for each in customer.get("tax_ids", ())):
        return "reverse_charge"
    return "standard_rated"


def _part(rate: Rate, amount: int, reason: str) -> Object:
    taxed = reason == "standard_rated"
    exact = Decimal(amount) * Decimal(rate.percent) / 100
    return {
        "amount": int(exact.quantize(Decimal(1), ROUND_HALF_UP)) if taxed else 0,
        "inclusive": False,
        "tax_rate_details": {
            "country": rate.place[:2],
            "flat_amount": None,
            "percentage_decimal": rate.percent if taxed else "0.0",
            "rate_type": "percentage",
            "state": rate.place[3:] or None,
            "tax_type": rate.kind,
        },
        "taxability_reason": reason,
        "taxable_amount": amount if taxed else 0,
    }
