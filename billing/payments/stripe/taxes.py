"""The tax service of Stripe Tax: one calculation for each time of supply.

Stripe knows the rates, the seller's registrations and reverse charge; exemption certificates are ours,
and go as an override. A refused request (an address without a postal code) fails that tenant only.
"""

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import stripe

from billing.accounts.tax_ids import EU, country_of
from billing.payments.base import Refused
from billing.payments.stripe.client import ask, make_client
from billing.taxes.taxes import Supply, Tax, TaxRequest, Treatment, merged
from core.clock import Clock
from core.errors import Conflict

_TAX_CODE = "txcd_10103001"  # software as a service, for business
_OLDEST = timedelta(days=30)  # Stripe takes a tax date of at most 31 days ago
_ID_TYPES = {
    **dict.fromkeys(EU, "eu_vat"),
    "AU": "au_abn",
    "CA": "ca_bn",
    "CH": "ch_vat",
    "GB": "gb_vat",
    "IN": "in_gst",
    "NO": "no_vat",
    "US": "us_ein",
}
_NAMES = {"vat": "VAT", "gst": "GST", "hst": "HST", "pst": "PST", "qst": "QST"}
_TREATMENTS = {
    "customer_exempt": Treatment.EXEMPT,
    "reverse_charge": Treatment.REVERSE_CHARGE,
}
_NO_TAX = ("not_collecting", "not_subject_to_tax", "not_supported")


class StripeTaxes:
    def __init__(self, clock: Clock, api_key: str, api_base: str = "") -> None:
        self._clock = clock
        self._client = make_client(api_key, api_base)

    def taxes(self, request: TaxRequest) -> list[Tax]:
        if not request.buyer.region:
            return []
        asked = [each for each in request.supplies if each.net_minor]
        return merged(tax for each in asked for tax in self._of(request, each))

    def _of(self, request: TaxRequest, supply: Supply) -> list[Tax]:
        """Stripe takes positive amounts, so what is taken back is asked for as if it was supplied."""
        treatment, proof = request.treatment(supply.at)
        form: Any = {
            "currency": request.currency.lower(),
            "line_items": [
                {
                    "amount": abs(supply.net_minor),
                    "reference": "net",
                    "tax_behavior": "exclusive",
                    "tax_code": _TAX_CODE,
                }
            ],
            "customer_details": _customer(request, exempt=treatment is Treatment.EXEMPT),
            "tax_date": int(max(supply.at, self._oldest()).timestamp()),
        }
        try:
            found = ask(lambda: self._client.v1.tax.calculations.create(form))
        except Refused as error:
            raise Conflict(
                f"Stripe Tax refuses the address in {request.buyer.region}: {error}",
                next_step="Correct tax_region, postal_code and tax_id of the billing account.",
            ) from error
        parts = [_tax(each, supply.net_minor, proof) for each in found.tax_breakdown or ()]
        return [each for each in parts if each is not None]

    def _oldest(self) -> datetime:
        return self._clock.now().astimezone(UTC) - _OLDEST


def _customer(request: TaxRequest, *, exempt: bool) -> dict[str, Any]:
    buyer = request.buyer
    country, _, state = buyer.region.partition("-")
    address = {"country": country, "state": state, "postal_code": buyer.postal_code}
    made: dict[str, Any] = {
        "address": {name: value for name, value in address.items() if value},
        "address_source": "billing",
        "taxability_override": "customer_exempt" if exempt else "none",
    }
    kind = _ID_TYPES.get(country_of(buyer.region))
    if buyer.tax_id and kind:
        made["tax_ids"] = [{"type": kind, "value": buyer.tax_id}]
    return made


def _tax(part: stripe.tax.Calculation.TaxBreakdown, net_minor: int, proof: str) -> Tax | None:
    """None where Stripe collects no tax, because the seller is not registered there."""
    if part.taxability_reason in _NO_TAX:
        return None
    treatment = _TREATMENTS.get(part.taxability_reason, Treatment.STANDARD)
    details = part.tax_rate_details
    kind = str(details.tax_type or "tax")
    name = _NAMES.get(kind, kind.replace("_", " ").capitalize())
    if treatment is not Treatment.STANDARD:
        return Tax(name, 0, net_minor, 0, treatment, proof)
    ppm = int(Decimal(details.percentage_decimal) * 10_000)
    sign = 1 if net_minor > 0 else -1
    return Tax(name, ppm, sign * part.taxable_amount, sign * part.amount)
