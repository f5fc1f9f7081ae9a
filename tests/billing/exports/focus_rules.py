"""The rules of FOCUS as one table of checks over files as a reader gets them: CSV, text and decimals.

It knows nothing of the product but the columns of each dataset. Each finding names the rule, the row and
the values. Sources: the requirements that the specification states for these columns, in our words.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from decimal import Decimal

from billing.exports.focus.tables import FocusTable

Line = dict[str, str]
_MOMENT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z")
_UNIT = re.compile(r"(\d+ )?[A-Z][A-Za-z]*(-(Months|Years))?")
_EXACT = Decimal("0.000000000001")
_PRICES = ("ListUnitPrice", "ContractedUnitPrice")
_CURRENCIES = {"USD", "EUR", "GBP", "JPY"}


def of_columns(table: FocusTable, lines: Sequence[Line]) -> Iterator[str]:
    """Types, null and values of every cell."""
    for number, line in enumerate(lines):
        for column in table.columns:
            text, where = line[column.name], f"row {number}, {column.name}"
            if not text:
                if not column.nullable:
                    yield f"{where} is null"
                continue
            if column.values and text not in column.values:
                yield f"{where} is {text!r}"
            if column.type in ("money", "quantity"):
                Decimal(text)
            elif column.type == "moment" and not _MOMENT.fullmatch(text):
                yield f"{where} is no moment in UTC: {text!r}"
            elif column.type == "json" and not isinstance(json.loads(text), dict):
                yield f"{where} is no JSON object: {text!r}"
            elif column.name.endswith("Currency") and text not in _CURRENCIES:
                yield f"{where} is no currency: {text!r}"


def of_costs(version: str, lines: Sequence[Line]) -> Iterator[str]:
    """Cost and Usage, row by row."""
    for number, line in enumerate(lines):
        for rule in _row(version, line):
            yield f"row {number} of {line['InvoiceId']}, {line['x_LineKind']}: {rule}"


def _row(version: str, line: Line) -> Iterator[str]:
    category, priced = line["ChargeCategory"], bool(line["SkuPriceId"])
    own = not line["ChargeClass"]
    billed, effective = Decimal(line["BilledCost"]), Decimal(line["EffectiveCost"])
    for name in (*_PRICES, "PricingQuantity", "PricingUnit", "PricingCategory"):
        if bool(line[name]) != priced:
            yield f"{name} is {line[name]!r} where SkuPriceId is {line['SkuPriceId']!r}"
    if bool(line["SkuId"]) != priced or bool(line["SkuMeter"]) != priced:
        yield "a SKU without a price, or a price without a SKU"
    if category in ("Usage", "Purchase") and own and not priced:
        yield f"{category} without a SKU price"
    if category in ("Tax", "Credit", "Adjustment") and priced:
        yield f"{category} has a SKU price"
    for price, cost in zip(_PRICES, ("ListCost", "ContractedCost"), strict=True):
        if not priced:
            if Decimal(line[cost]) != billed:
                yield f"{cost} {line[cost]} is not BilledCost {billed}, without a unit price"
            continue
        if Decimal(line[price]) < 0:
            yield f"{price} is below zero"
        product = Decimal(line[price]) * Decimal(line["PricingQuantity"])
        if abs(product - Decimal(line[cost])) > _EXACT:
            yield f"{price} {line[price]} x {line['PricingQuantity']} is not {cost} {line[cost]}"
    if version not in ("1.2", "1.3") and effective != billed:
        yield f"EffectiveCost {effective} is not BilledCost {billed}, where nothing covers"
    metered = bool(line["ConsumedQuantity"]), bool(line["ConsumedUnit"])
    if metered != ((category == "Usage"),) * 2:
        yield f"{category} with ConsumedQuantity {line['ConsumedQuantity']!r}"
    for name in ("ConsumedUnit", "PricingUnit"):
        if line[name] and not _UNIT.fullmatch(line[name]):
            yield f"{name} is {line[name]!r}"
    charged = _moment(line["ChargePeriodStart"]), _moment(line["ChargePeriodEnd"])
    period = _moment(line["BillingPeriodStart"]), _moment(line["BillingPeriodEnd"])
    if charged[0] >= charged[1] or period[0] >= period[1]:
        yield "a period ends before it starts"
    if category == "Usage" and own and not (period[0] < charged[1] and charged[0] < period[1]):
        yield "usage outside of its billing period that is no correction"
    if not own and charged[0] >= period[0]:
        yield "a correction of a period that was not closed"
    if bool(line["ResourceName"] or line["ResourceType"]) and not line["ResourceId"]:
        yield "a resource without an id"
    if bool(line["SubAccountId"]) != bool(line["SubAccountName"]):
        yield "a sub-account without a name, or a name without one"
    for name in ("Tags", "SkuPriceDetails"):
        if line.get(name) and not all(
            isinstance(each, str | int | bool) for each in json.loads(line[name]).values()
        ):
            yield f"{name} has values that are not primitive"


def of_skus(lines: Sequence[Line]) -> Iterator[str]:
    """A SKU price is of one SKU, and has one pricing unit and one set of details."""
    for name in ("SkuId", "PricingUnit", "SkuPriceDetails", "SkuMeter"):
        known: dict[str, set[str]] = defaultdict(set)
        for line in lines:
            if line["SkuPriceId"]:
                known[line["SkuPriceId"]].add(line[name])
        for price, found in known.items():
            if len(found) > 1:
                yield f"{price} has several {name}: {sorted(found)}"


def of_invoices(costs: Sequence[Line], details: Sequence[Line]) -> Iterator[str]:
    """Both datasets agree by document, by line, in period, account, currency and category."""
    for names in (("InvoiceId",), ("InvoiceId", "InvoiceDetailId")):
        sums: dict[tuple[str, ...], Decimal] = defaultdict(Decimal)
        for sign, lines in ((1, costs), (-1, details)):
            for line in lines:
                sums[tuple(line[name] for name in names)] += sign * Decimal(line["BilledCost"])
        yield from (f"{key} differs by {rest}" for key, rest in sums.items() if rest)
    shared = ("BillingPeriodStart", "BillingPeriodEnd", "BillingAccountId", "BillingCurrency")
    for names, keys in (
        ((*shared, "InvoiceIssuerName"), ("InvoiceId",)),
        (("ChargeCategory",), ("InvoiceId", "InvoiceDetailId")),
    ):
        found: dict[tuple[str, ...], set[tuple[str, ...]]] = defaultdict(set)
        for line in (*costs, *details):
            found[tuple(line[key] for key in keys)].add(tuple(line[name] for name in names))
        yield from (f"{key} has {each}" for key, each in found.items() if len(each) > 1)
    ids = [
        (line["InvoiceIssuerName"], line["InvoiceId"], line["InvoiceDetailId"]) for line in details
    ]
    if len(set(ids)) < len(ids):
        yield "a line of Invoice Detail is there twice"
    known = {line["InvoiceId"] for line in details}
    for line in details:
        if line["ReferenceInvoiceId"] not in known:
            yield f"{line['InvoiceId']} refers to {line['ReferenceInvoiceId']}, which is not there"
        issued = line["InvoiceIssueStatus"] != "Open"
        if issued != bool(line["InvoiceIssueDate"]):
            yield f"{line['InvoiceId']} is {line['InvoiceIssueStatus']} at {line['InvoiceIssueDate']}"


def of_commitments(costs: Sequence[Line], commitments: Sequence[Line]) -> Iterator[str]:
    known = {(line["ContractId"], line["ContractCommitmentId"]) for line in commitments}
    if len(known) < len(commitments):
        yield "a commitment is there twice"
    for line in costs:
        if not line["ContractApplied"]:
            if line["x_LineKind"] == "commitment":
                yield "a shortfall of no contract"
            continue
        applied = json.loads(line["ContractApplied"], parse_float=Decimal)["Elements"]
        for each in applied:
            if (each["ContractId"], each["ContractCommitmentId"]) not in known:
                yield f"{each} is of no commitment"
        if sum(each["ContractCommitmentAppliedCost"] for each in applied) != Decimal(
            line["BilledCost"]
        ):
            yield f"{applied} is not {line['BilledCost']}"


def of_periods(costs: Sequence[Line], periods: Sequence[Line]) -> Iterator[str]:
    """Periods are there once; those that run before any of their rows is a record are open."""
    keys = [(line["x_BillingAccountId"], line["BillingPeriodStart"]) for line in periods]
    if len(set(keys)) < len(keys):
        yield "a billing period is there twice"
    closed = {
        (line["x_BillingAccountId"], line["BillingPeriodStart"], line["BillingPeriodEnd"])
        for line in periods
        if line["BillingPeriodStatus"] == "Closed"
    }
    for line in costs:
        period = (line["BillingAccountId"], line["BillingPeriodStart"], line["BillingPeriodEnd"])
        if line["x_InvoiceStatus"] == "draft" and period in closed:
            yield f"a draft in a closed period: {period}"


def _moment(text: str) -> datetime:
    moment = datetime.fromisoformat(text)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)  # a rule of its own refuses it
