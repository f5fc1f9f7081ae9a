"""Rows of the dataset Cost and Usage: one for each day, key and SKU price of a line."""

import json
from collections.abc import Iterator
from functools import lru_cache

from sqlalchemy.orm import Session

from billing.exports.focus import charges, documents, inputs
from billing.exports.focus.charges import Charge
from billing.exports.focus.documents import Window
from billing.exports.focus.inputs import Inputs
from billing.exports.focus.list_prices import ListPrices
from billing.exports.focus.skus import Details
from billing.exports.focus.tables import FocusTable
from billing.exports.formats import Row
from billing.pricing.prices import load_price_book
from core import labels
from core.tenants.scope import TenantScope

DOCUMENTS_AT_ONCE = 50
# Versions in which EffectiveCost is the exact cost rather than what is billed.
_EXACT_EFFECTIVE = ("1.2", "1.3")
_OWN_NAMES = ("1.2", "1.3", "1.4")  # versions without names for models and tokens
# Columns that differ between the shares of a charge.
_OF_SHARES = (
    "BilledCost",
    "ChargePeriodStart",
    "ChargePeriodEnd",
    "ConsumedQuantity",
    "ContractedCost",
    "ContractedUnitPrice",
    "EffectiveCost",
    "ListCost",
    "ListUnitPrice",
    "PricingCurrencyContractedUnitPrice",
    "PricingCurrencyEffectiveCost",
    "PricingCurrencyListUnitPrice",
    "PricingQuantity",
    "Tags",
    "x_KeyId",
    "CredentialId",
    "PrincipalId",
)


def rows(
    session: Session, table: FocusTable, scope: TenantScope | None, window: Window
) -> Iterator[Row]:
    """Rows of every document whose billing period overlaps the time. A draft's InvoiceId is
    provisional."""
    for data, some in batches(session, scope, window):
        writer = _Writer(table, data)
        for document in some:
            for charge in charges.charges_of(data, document):
                yield from writer.rows(charge)


def batches(
    session: Session, scope: TenantScope | None, window: Window
) -> Iterator[tuple[Inputs, list[documents.Document]]]:
    """The documents and their inputs, some at once, so that memory use is bounded."""
    found = documents.places(session, scope, window)
    book = load_price_book(session)
    listed = ListPrices(book)
    for first in range(0, len(found), DOCUMENTS_AT_ONCE):
        some = documents.read(session, found[first : first + DOCUMENTS_AT_ONCE])
        yield inputs.read(session, some, book, listed), some
        session.expunge_all()


class _Writer:
    """Writes rows of one table from a template of the columns that a charge's shares have in common."""

    def __init__(self, table: FocusTable, data: Inputs) -> None:
        self._names, self._data = table.names, data
        self._exact = table.version in _EXACT_EFFECTIVE
        self._prefix = "x_" if table.version in _OWN_NAMES else ""
        index = {name: place for place, name in enumerate(table.names)}
        self._places = [(index[name], at) for at, name in enumerate(_OF_SHARES) if name in index]

    def rows(self, charge: Charge) -> Iterator[Row]:
        common = self._common(charge)
        template = [common.get(name) for name in self._names]
        usage = charge.category == "Usage"
        project = str(common["SubAccountName"] or "")
        for share in charge.shares:
            prices = share.prices
            listed, contracted = (prices.listed, prices.contracted) if prices else (None, None)
            known = share.quantity is not None and prices is not None
            effective = share.exact if self._exact and known else share.billed
            key = self._data.keys.get(share.key_id or "")
            values = (
                share.billed,
                share.starts_at,
                share.ends_at,
                share.consumed if usage else None,
                share.contracted,
                contracted,
                effective,
                share.listed,
                listed,
                contracted,  # prices are in the currency of the bill
                effective,
                listed,
                share.quantity,
                _tags(key.name if key else share.key_id or "", project, share.labels),
                share.key_id,
                share.key_id,
                key.owner if key else None,
            )
            row = template.copy()
            for place, at in self._places:
                row[place] = values[at]
            yield row

    def _common(self, charge: Charge) -> dict[str, object]:
        document, line, sku = charge.document, charge.line, charge.sku
        invoice = document.invoice
        frozen = invoice.billed_to.get("projects") or {}
        project = frozen.get(line.project_id) or self._data.projects.get(line.project_id)
        resource = charge.resource or (None, None, None)
        usage = charge.category == "Usage"
        return {
            "BillingAccountId": invoice.tenant_id,
            "BillingAccountName": document.customer,
            "BillingAccountType": "Organization",
            "BillingCurrency": invoice.currency,
            "BillingPeriodStart": document.bounds.starts_at,
            "BillingPeriodEnd": document.bounds.ends_at,
            "ChargeCategory": charge.category,
            "ChargeClass": "Correction" if charge.corrects else None,
            "ChargeDescription": line.description,
            "ChargeFrequency": charge.frequency,
            "ConsumedUnit": sku.consumed_unit if usage and sku else None,
            "ContractApplied": charge.contract_applied,
            "HostProviderName": document.issuer,
            "InvoiceDetailId": charge.detail_id,
            "InvoiceId": document.number,
            "InvoiceIssuerName": document.issuer,
            "PricingCategory": "Standard" if sku else None,
            "PricingCurrency": invoice.currency,
            "PricingUnit": sku.pricing_unit if sku else None,
            "ProviderName": document.issuer,
            "PublisherName": document.issuer,
            "ResourceId": resource[0],
            "ResourceName": resource[1],
            "ResourceType": resource[2],
            "ServiceCategory": "AI and Machine Learning",
            "ServiceName": "Tollhouse inference",
            "ServiceProviderName": document.issuer,
            "ServiceSubcategory": "Generative AI",
            "SkuId": sku.id if sku else None,
            "SkuMeter": sku.meter if sku else None,
            "SkuPriceDetails": _details(sku.details, sku.own_details, self._prefix)
            if sku
            else None,
            "SkuPriceId": sku.price_id if sku else None,
            "SubAccountId": line.project_id or None,
            "SubAccountName": (project or line.project_id) or None,
            "SubAccountType": "Project" if line.project_id else None,
            "x_CorrectsInvoiceId": document.corrects,
            "x_InvoiceStatus": "draft" if document.is_draft else "final",
            "x_LineKind": line.kind,
            "x_LinePosition": line.position,
            "x_PriceVersionId": charge.price_version or None,
        }


@lru_cache(maxsize=4096)
def _details(named: Details, own: Details, prefix: str) -> str | None:
    found = {f"{prefix}{name}": value for name, value in named}
    found |= {f"x_{name}": value for name, value in own}
    return json.dumps(found, separators=(",", ":")) if found else None


@lru_cache(maxsize=65_536)
def _tags(key: str, project: str, given: str) -> str:
    """`key` and `project` are names of ours, which a label of the same name does not replace."""
    tags = labels.read(given)
    tags |= {name: value for name, value in (("key", key), ("project", project)) if value}
    return json.dumps(tags, separators=(",", ":"))
