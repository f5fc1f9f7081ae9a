"""A drawn year as FOCUS: every rule on every dataset, and the union of what a schedule delivers, read as
the standard says, is the books."""

import csv
import io
import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from random import Random

import pytest

from billing.exports import schedules
from billing.exports.encoding import chunks_of, export_of
from billing.exports.focus.tables import FocusTable, table_of
from billing.exports.formats import Format
from billing.exports.subjects import Period
from billing.invoicing import invoice_run
from billing.stores import DirectoryStore
from core.clock import FakeClock
from core.database import Database
from core.money import decimal_of
from core.tenants.scope import scope_of_operator
from tests.billing.conftest import START, Deployment, deployment_of
from tests.billing.exports import focus_rules as rules
from tests.billing.exports.focus_year import METERS, Year
from tests.migrated import migrated

END = START + timedelta(days=365)
_NONE = (
    '{"Elements":[{"ContractId":"x","ContractCommitmentId":"y","ContractCommitmentAppliedCost":0,'
    '"ContractCommitmentAppliedQuantity":null,"ContractCommitmentAppliedUnit":null}]}'
)
WHOLE = Period(START - timedelta(days=31), END + timedelta(days=31))
Line = dict[str, str]


def lines_of(text: str) -> list[Line]:
    return list(csv.DictReader(io.StringIO(text)))


@dataclass
class Played:
    """A year that is over; each export of it is made and read once."""

    year: Year
    reader: "Reader"
    _exports: dict[tuple[str, str], list[Line]] = field(default_factory=dict)

    def exported(self, version: str, dataset: str) -> list[Line]:
        if (version, dataset) not in self._exports:
            export = export_of("focus", version, dataset)
            with self.year.deployment.database.read() as session:
                text = b"".join(chunks_of(session, export, Format.CSV, None, WHOLE)).decode()
            self._exports[version, dataset] = lines_of(text)
        return self._exports[version, dataset]


@dataclass
class Reader:
    """Reads a folder as the standard says: the union of its files. It remembers which were complete."""

    folder: Path
    complete: dict[str, str] = field(default_factory=dict)  # name and SHA-256

    def read(self, dataset: str) -> list[Line]:
        about = json.loads((self.folder / f"focus-1.4-{dataset}-all-metadata.json").read_text())
        found = []
        for sector in about["Recency"]["TimeSectors"]:
            name, digest = sector["x_File"], sector["x_Sha256"]
            if dataset == "cost-and-usage":
                assert self.complete.get(name, digest) == digest, "a closed period's file changed"
            if sector["TimeSectorComplete"]:
                self.complete[name] = digest
            lines = lines_of((self.folder / name).read_text())
            assert len(lines) == sector["x_Rows"]
            found += lines
        return found


def sums_of(lines: list[Line]) -> dict[str, Decimal]:
    found: dict[str, Decimal] = defaultdict(Decimal)
    for line in lines:
        found[line["InvoiceId"]] += Decimal(line["BilledCost"])
    return dict(found)


def books_of(year: Year) -> dict[str, Decimal]:
    return {number: Decimal(decimal_of(units)) for number, units in year.books().items()}


def play(made: Deployment, folder: Path, seed: int, days: int = 365) -> Played:
    """Delivers on some days, and then looks at the union."""
    year, reader = Year(made, Random(seed)), Reader(folder)
    with made.database.transaction() as session:
        for dataset in ("cost-and-usage", "invoice-detail", "billing-period"):
            schedules.schedule(
                session,
                made.clock,
                lambda _: DirectoryStore(folder),
                what=export_of("focus", "1.4", dataset),
                form="csv",
                destination="x",
                every="day",
                delay_hours=0,
            )
    for number, now in enumerate(year.days(days)):
        if number % 5 == 0:
            invoice_run.run(made.database, made.clock, current=False)
        if number % 41 and number < days - 2:
            continue
        with made.database.transaction() as session:
            schedules.create_due_jobs(session, now)
        _, failed = schedules.run_waiting(
            made.database, made.clock, lambda _: DirectoryStore(folder), scope_of_operator
        )
        assert not failed
        expected = {number: amount for number, amount in books_of(year).items() if amount}
        for dataset in ("cost-and-usage", "invoice-detail"):
            found = {key: each for key, each in sums_of(reader.read(dataset)).items() if each}
            assert found == expected, f"on {now}"
    return Played(year, reader)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    folder = tmp_path_factory.mktemp("delivered")
    database = migrated(f"sqlite:///{folder / 'books.db'}")
    yield play(deployment_of(database, FakeClock()), folder, seed=5)
    database.close()


def test_the_union_of_all_files_is_what_an_export_of_the_year_has(
    played: Played,
) -> None:
    """Also of periods that were closed months ago, under names that have changed since."""
    reader = played.reader
    whole = played.exported("1.4", "cost-and-usage")

    def _sorted(lines: list[Line]) -> list[tuple[str, ...]]:
        return sorted(tuple(line.values()) for line in lines)

    assert _sorted(reader.read("cost-and-usage")) == _sorted(whole)
    assert len(whole) > 1000


@pytest.mark.parametrize("version", ["1.2", "1.3", "1.4", "1.5-draft"])
def test_no_row_breaks_a_rule(played: Played, version: str) -> None:
    costs = played.exported(version, "cost-and-usage")
    found = [*rules.of_columns(table(version, "cost-and-usage"), costs)]
    found += [*rules.of_costs(version, costs), *rules.of_skus(costs)]
    assert sums_of(costs) == books_of(played.year)
    if version != "1.2":
        commitments = played.exported(version, "contract-commitment")
        found += rules.of_columns(table(version, "contract-commitment"), commitments)
        found += rules.of_commitments(costs, commitments)
        assert len(commitments) == 3
    if version not in ("1.2", "1.3"):
        details = played.exported(version, "invoice-detail")
        periods = played.exported(version, "billing-period")
        found += rules.of_columns(table(version, "invoice-detail"), details)
        found += rules.of_columns(table(version, "billing-period"), periods)
        found += [*rules.of_invoices(costs, details), *rules.of_periods(costs, periods)]
    assert found == []


def table(version: str, dataset: str) -> FocusTable:
    found = table_of(version, dataset)
    assert found is not None
    return found


def test_the_year_has_everything_that_the_rules_are_about(played: Played) -> None:
    costs = played.exported("1.4", "cost-and-usage")
    kinds = {line["x_LineKind"] for line in costs}
    assert kinds >= {
        *("usage", "late_usage", "adjustment", "base_fee", "seats", "add_on", "commitment"),
        *("included", "promo", "tax", "credit_note", "markup", "transfer", "child"),
    }
    prices = {line["SkuPriceId"] for line in costs}
    assert prices >= {
        *("demo3/output/free", "demo3/output/tier-1", "demo3/output/tier-2"),
        *("demo3/output/tier-2-entry", "demo3/output/volume-1", "demo3/output/volume-2"),
        *("demo3/request/package-50", "demo3/waived/standard", "demo3:pirate/output/standard"),
        *("demo3/output/priority/standard", "plan/pro/base-fee/month", "add-on/support/month"),
    }
    numbers = {line["InvoiceId"] for line in costs}
    assert {number for number, _, _ in played.year.taken_back} <= numbers
    assert any("-RESTORED" in number for number in numbers)
    assert {line["BillingCurrency"] for line in costs} == {"USD", "EUR"}
    assert {line["InvoiceIssuerName"] for line in costs} >= {"Renamed Seller GmbH"}
    assert len({line["InvoiceIssuerName"] for line in costs}) == 2
    statuses = {line["InvoiceIssueStatus"] for line in played.exported("1.4", "invoice-detail")}
    assert statuses == {"Open", "Issued", "Voided"}


def test_every_unit_that_was_used_is_consumed_by_its_key_on_its_day(
    played: Played,
) -> None:
    found: dict[tuple[str, str, str, str], Decimal] = defaultdict(Decimal)
    for line in played.exported("1.4", "cost-and-usage"):
        taken_back = line["InvoiceId"].partition("-VOID")[1] or "-RESTORED" in line["InvoiceId"]
        if line["SkuMeter"] in METERS and not taken_back and line["x_LineKind"] != "adjustment":
            day = line["ChargePeriodStart"][:10]
            key = (line["BillingAccountId"], day, line["x_KeyId"], line["SkuMeter"])
            found[key] += Decimal(line["ConsumedQuantity"])
    assert {key: units for key, units in found.items() if units} == {
        key: units for key, units in played.year.used.items() if units
    }


def test_tiers_fill_up_as_the_price_says(played: Played) -> None:
    """The lower tiers of a billing period are full before the next one has anything."""
    found: dict[tuple[str, str], dict[str, Decimal]] = defaultdict(lambda: defaultdict(Decimal))
    for line in played.exported("1.4", "cost-and-usage"):
        if line["BillingAccountId"] == "elm" and line["x_LineKind"] == "usage":
            if "-" in line["InvoiceId"][3:]:
                continue
            key = (line["InvoiceId"], line["SkuId"])
            found[key][line["SkuPriceId"]] += Decimal(line["ConsumedQuantity"])
    seen = 0
    for (_, sku), tiers in found.items():
        if sku == "demo3/output" and tiers.get("demo3/output/tier-2"):
            assert (tiers["demo3/output/free"], tiers["demo3/output/tier-1"]) == (20_000, 200_000)
            assert tiers["demo3/output/tier-2"] <= 300_000
            seen += 1
    assert seen >= 6


_FAULTS: list[tuple[str, Callable[[Line], bool], dict[str, str]]] = [
    ("is null", lambda line: True, {"InvoiceIssuerName": ""}),
    ("ChargeCategory is 'Gift'", lambda line: True, {"ChargeCategory": "Gift"}),
    ("is no moment", lambda line: True, {"ChargePeriodStart": "2026-01-01"}),
    ("is no currency", lambda line: True, {"BillingCurrency": "Dollars"}),
    ("is not ContractedCost", lambda line: bool(line["SkuPriceId"]), {"ContractedCost": "7"}),
    ("is not ListCost", lambda line: bool(line["SkuPriceId"]), {"ListUnitPrice": "7"}),
    ("without a unit price", lambda line: not line["SkuPriceId"], {"ListCost": "7"}),
    ("where nothing covers", lambda line: True, {"EffectiveCost": "7"}),
    ("where SkuPriceId is", lambda line: not line["SkuPriceId"], {"PricingQuantity": "1"}),
    ("Usage without a SKU price", lambda line: _own_usage(line), {"SkuPriceId": ""}),
    ("has several SkuId", lambda line: bool(line["SkuPriceId"]), {"SkuId": "other"}),
    ("has several PricingUnit", lambda line: bool(line["SkuPriceId"]), {"PricingUnit": "Units"}),
    ("PricingUnit is 'tokens'", lambda line: bool(line["SkuPriceId"]), {"PricingUnit": "tokens"}),
    ("differs by", lambda line: True, {"BilledCost": "7"}),
    ("differs by", lambda line: True, {"InvoiceDetailId": "elsewhere"}),
    ("not closed", lambda line: line["ChargeClass"] == "", {"ChargeClass": "Correction"}),
    ("has {", lambda line: True, {"BillingPeriodStart": "2020-01-01T00:00:00Z"}),
    ("is of no commitment", lambda line: bool(line["ContractApplied"]), {"ContractApplied": _NONE}),
]


def _own_usage(line: Line) -> bool:
    return line["ChargeCategory"] == "Usage" and not line["ChargeClass"]


@pytest.mark.parametrize(("told", "chosen", "change"), _FAULTS)
def test_each_rule_finds_its_fault(
    played: Played, told: str, chosen: Callable[[Line], bool], change: dict[str, str]
) -> None:
    """A row of the year is broken, and the rule that is meant says so."""
    costs = list(played.exported("1.4", "cost-and-usage"))
    place = next(number for number, line in enumerate(costs) if chosen(line))
    costs[place] = costs[place] | change
    details = played.exported("1.4", "invoice-detail")
    commitments = played.exported("1.4", "contract-commitment")
    checks = (
        rules.of_columns(table("1.4", "cost-and-usage"), costs),
        rules.of_costs("1.4", costs),
        rules.of_skus(costs),
        rules.of_invoices(costs, details),
        rules.of_commitments(costs, commitments),
    )
    assert any(told in each for check in checks for each in check)


@pytest.mark.slow
def test_on_postgresql_the_files_are_the_books_too(
    postgres_database: Database, tmp_path: Path
) -> None:
    """With notes, voids, one that is taken back, and re-ratings of open and closed months."""
    made = deployment_of(postgres_database, FakeClock())
    played = play(made, tmp_path, seed=8, days=133)
    assert played.reader.complete and len(played.year.taken_back) >= 3
