"""Exports agree with the ledger and the invoices to the last unit; FOCUS is as specified."""

import csv
from collections import defaultdict
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import func, select

from billing.exports.encoding import chunks_of, export_of
from billing.exports.formats import Format, Kind
from billing.exports.subjects import SUBJECTS, Period
from billing.invoicing import invoice_run
from billing.invoicing.tables import Invoice
from billing.ledger import credits
from billing.ledger.tables import LedgerEntry
from billing.usage.tables import Charge, UsageEventRow
from billing.usage.usage_buckets import BucketQuery, Width, usage_buckets
from core.clock import FakeClock
from core.database import Database
from core.errors import BadRequest
from core.money import PICO, Money, units_of_minor
from core.tenants.scope import TenantScope, scope_of_key, scope_of_operator
from tests.billing.conftest import Deployment, deployment_of
from tests.billing.exports.focus_reading import focus_of
from tests.conftest import SPECS

JANUARY = Period(datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 2, 1, tzinfo=UTC))
YEAR = Period(datetime(2026, 1, 1, tzinfo=UTC), datetime(2027, 1, 1, tzinfo=UTC))


def rows(
    deployment: Deployment, name: str, scope: TenantScope | None, period: Period = YEAR
) -> list[Any]:
    subject = SUBJECTS[name]
    with deployment.database.read() as session:
        names = [column.name for column in subject.columns]
        return [dict(zip(names, row, strict=True)) for row in subject.rows(session, scope, period)]


def focus(
    deployment: Deployment, period: Period = YEAR, version: str = "1.2"
) -> list[dict[str, Any]]:
    with deployment.database.read() as session:
        return focus_of(session, None, period, version)


@pytest.fixture
def busy(lite: Deployment) -> Deployment:
    return make_busy(lite)


def make_busy(deployment: Deployment) -> Deployment:
    """Two months, two tenants, several keys, late usage and a promotional credit."""
    deployment.tenant("birch")
    with deployment.database.transaction() as session:
        credits.grant(
            session,
            tenant_id="acme",
            kind=credits.PROMO,
            money=Money(10**11, "USD"),
            reference="welcome",
            at=deployment.clock.now(),
        )
    late = []
    for day in range(40):
        deployment.record(
            *(
                deployment.event(
                    tenant_id=tenant,
                    key_id=f"key{n}",
                    input_tokens=100_003 + day * 7,
                    output_tokens=33_331,
                    adapter="pirate" if n else None,
                )
                for n, tenant in enumerate(("acme", "acme", "birch"))
            )
        )
        if day == 30:
            late.append(deployment.event(input_tokens=999_999))
        deployment.clock.advance(days=1)
    deployment.rate()
    invoice_run.run(deployment.database, deployment.clock, final=True)
    deployment.record(*late)
    deployment.clock.advance(days=30)
    invoice_run.run(deployment.database, deployment.clock, final=True)
    return deployment


def test_both_databases_export_alike(database: Database) -> None:
    deployment = make_busy(deployment_of(database, FakeClock()))
    final = [row for row in focus(deployment) if row["x_InvoiceStatus"] != "draft"]
    billed = sum(row["BilledCost"] for row in final)
    with database.read() as session:
        totals = session.scalars(select(Invoice.total_minor).where(Invoice.label.is_not(None)))
        assert billed == sum(units_of_minor(total, "USD") for total in totals)
    assert sum(row["units"] for row in rows(deployment, "ledger", None)) == 0


def test_the_billed_cost_of_an_invoice_id_adds_up_to_that_invoice(busy: Deployment) -> None:
    sums: dict[str | None, int] = defaultdict(int)
    for row in focus(busy):
        sums[row["InvoiceId"]] += row["BilledCost"]
    with busy.database.read() as session:
        final = session.scalars(select(Invoice).where(Invoice.label.is_not(None))).all()
    assert len(final) >= 4
    for invoice in final:
        assert sums.pop(invoice.label) == units_of_minor(invoice.total_minor, invoice.currency)
    with busy.database.read() as session:
        drafts = set(session.scalars(select(Invoice.id).where(Invoice.label.is_(None))))
    assert set(sums) <= drafts, "a draft's id is provisional"


def test_effective_cost_is_exact_and_equal_to_the_charges(busy: Deployment) -> None:
    usage = [row for row in focus(busy) if row["ChargeCategory"] == "Usage"]
    with busy.database.read() as session:
        charged = session.scalar(select(func.sum(Charge.amount)))
    assert sum(row["EffectiveCost"] for row in usage) == charged


def test_rows_of_usage_name_the_key_that_used_it(busy: Deployment) -> None:
    found: dict[tuple[str, str | None], int] = defaultdict(int)
    for row in focus(busy):
        if row["ChargeCategory"] == "Usage" and row["SkuMeter"] == "Output Tokens":
            found[row["BillingAccountId"], row["x_KeyId"]] += row["ConsumedQuantity"] // PICO
    event = UsageEventRow
    query = select(event.tenant_id, event.key_id, func.sum(event.output_tokens))
    with busy.database.read() as session:
        used = {
            (row[0], row[1]): int(row[2])
            for row in session.execute(query.group_by(event.tenant_id, event.key_id))
        }
    assert found == used and len(used) > 3


def test_late_usage_is_a_correction_in_its_own_time(busy: Deployment) -> None:
    late = [row for row in focus(busy) if row["x_LineKind"] == "late_usage"]
    assert late
    for row in late:
        assert row["ChargeClass"] == "Correction"
        assert row["ChargePeriodEnd"] <= row["BillingPeriodStart"]


KINDS_OF_FOCUS = {
    "Decimal": (Kind.UNITS, Kind.WHOLE, Kind.DECIMAL),
    "Date/Time": (Kind.MOMENT,),
}


def test_focus_is_what_its_specification_says(busy: Deployment) -> None:
    path = SPECS / "focus-1.2-columns.csv"
    if not path.exists():
        pytest.skip(f"no FOCUS columns at {path}; TOLLHOUSE_SPECS_DIR names their folder")
    specified = {row["column"]: row for row in csv.DictReader(path.read_text().splitlines())}
    ours = {column.name: column for column in export_of("focus", "1.2").columns}
    for name, spec in specified.items():
        if spec["feature_level"] == "Mandatory":
            assert name in ours, f"{name} is mandatory"
    for name in ours:
        assert name in specified or name.startswith("x_")
    found = focus(busy)
    assert found
    for name, column in ours.items():
        spec = specified.get(name)
        if spec is None:
            continue
        allowed = [value.strip() for value in spec["allowed_values"].split(";") if value.strip()]
        kind = KINDS_OF_FOCUS.get(spec["data_type"])
        assert kind is None or column.kind in kind, name
        for row in found:
            if row[name] is None:
                assert spec["allows_nulls"] == "True", f"{name} is null"
            elif allowed and name != "ServiceSubcategory":
                assert row[name] in allowed, f"{name} is {row[name]}"


def test_exports_agree_with_the_tables_and_with_each_other(busy: Deployment) -> None:
    usage, charges = rows(busy, "usage", None), rows(busy, "charges", None)
    with busy.database.read() as session:
        assert len(usage) == session.scalar(select(func.count()).select_from(UsageEventRow))
        charged = session.scalar(select(func.sum(Charge.amount)))
    assert sum(row["amount"] for row in charges) == charged
    assert {row["request_id"] for row in charges} == {row["request_id"] for row in usage}
    assert sum(row["units"] for row in rows(busy, "ledger", None)) == 0
    lines = rows(busy, "invoices", None)
    for label in {row["invoice"] for row in lines}:
        of_it = [row for row in lines if row["invoice"] == label]
        assert sum(row["amount_minor"] for row in of_it) == (
            of_it[0]["subtotal_minor"] + of_it[0]["tax_minor"]
        )
    with busy.database.read() as session:
        entries = session.scalar(select(func.count()).select_from(LedgerEntry))
    assert len(rows(busy, "ledger", None)) == entries


@pytest.mark.parametrize("name", sorted(SUBJECTS))
def test_a_tenant_exports_its_own_rows_only(busy: Deployment, name: str) -> None:
    own = rows(busy, name, scope_of_operator("birch"))
    assert own
    assert {row["tenant_id"] for row in own} == {"birch"}
    assert not rows(busy, name, scope_of_operator("nobody"))


@pytest.mark.parametrize("width", list(Width))
def test_buckets_of_every_width_hold_the_same_usage(busy: Deployment, width: Width) -> None:
    scope = scope_of_operator("acme")
    day = JANUARY.start + timedelta(days=3)
    query = BucketQuery(
        day, day + timedelta(days=1), width, ("key_id",), limit=min(width.most, 1440)
    )
    with busy.database.read() as session:
        page = usage_buckets(session, scope, query)
        wanted = session.execute(
            select(func.count(), func.sum(UsageEventRow.input_tokens), func.sum(Charge.amount))
            .join(Charge, Charge.request_id == UsageEventRow.request_id)
            .where(
                UsageEventRow.tenant_id == "acme",
                UsageEventRow.occurred_at >= query.start,
                UsageEventRow.occurred_at < query.end,
            )
        ).one()
    found = [row for bucket in page.buckets for row in bucket.rows]
    assert len(page.buckets) == 86400 // width.seconds
    assert sum(row.counts["requests"] for row in found) == wanted[0]
    assert sum(row.counts["input_tokens"] for row in found) == wanted[1]
    assert sum(row.amounts["amount"] for row in found) == wanted[2]
    assert {row.group["key_id"] for row in found} == {"key0", "key1"}


def test_pages_of_buckets_follow_each_other_without_a_gap(busy: Deployment) -> None:
    scope = scope_of_operator("acme")
    start, seen, total = JANUARY.start, [], 0
    while True:
        query = BucketQuery(start, JANUARY.end, Width.DAY, limit=9)
        with busy.database.read() as session:
            page = usage_buckets(session, scope, query)
        seen += [bucket.start for bucket in page.buckets]
        total += sum(row.counts["requests"] for bucket in page.buckets for row in bucket.rows)
        if page.next_start is None:
            break
        start = page.next_start
    assert seen == [JANUARY.start + timedelta(days=n) for n in range(31)]
    assert total == 62 + 1


def test_a_key_of_one_project_sees_that_project_only(busy: Deployment) -> None:
    with busy.database.read() as session:
        scope = scope_of_key("acme", "elsewhere", "k", "finance")
        page = usage_buckets(
            session, scope, BucketQuery(JANUARY.start, JANUARY.end, Width.DAY, limit=31)
        )
    assert not any(bucket.rows for bucket in page.buckets)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"end": JANUARY.start}, "end_time"),
        ({"limit": 0}, "limit"),
        ({"limit": 10_000}, "limit"),
        ({"group_by": ("mood",)}, "group_by"),
    ],
)
def test_a_wrong_query_names_its_field(
    lite: Deployment, change: dict[str, Any], field: str
) -> None:
    given = {"start": JANUARY.start, "end": JANUARY.end, "width": Width.DAY, **change}
    with pytest.raises(BadRequest) as refused, lite.database.read() as session:
        usage_buckets(session, scope_of_operator("acme"), BucketQuery(**given))
    assert refused.value.param == field


TIERS = [{"up_to": 1_000_000, "price": "2.00"}, {"up_to": None, "price": "1.00"}]


def test_a_tenant_that_crosses_a_volume_tier_ends_nobodys_export(lite: Deployment) -> None:
    """The day that reaches the cheaper tier charges less than nothing."""
    lite.tenant("birch")
    version = lite.price({"output": {"scheme": "volume", "tiers": TIERS}}, model="bulk")
    plain = {"model": "bulk", "price_version": version.id, "input_tokens": 0, "cached_tokens": 0}
    for tokens in (900_000, 200_000):  # 1.80, then 1.10 in all
        lite.record(
            lite.event(**plain, output_tokens=tokens),
            lite.event(tenant_id="birch", output_tokens=1_000_000),
        )
        lite.clock.advance(days=1)
        lite.rate()
    lite.clock.advance(days=40)
    assert len(invoice_run.run(lite.database, lite.clock, current=False).finalised) == 2
    found = focus(lite)
    assert {row["BillingAccountId"] for row in found} == {"acme", "birch"}
    bulk = [row for row in found if row["SkuId"] == "bulk/output"]
    costs = {
        (row["ChargePeriodStart"].day, row["SkuPriceId"]): row["EffectiveCost"] for row in bulk
    }
    assert costs == {
        (1, "bulk/output/volume-1"): 1_800_000_000_000,
        (2, "bulk/output/volume-1"): -1_800_000_000_000,  # 900,000 tokens are priced again
        (2, "bulk/output/volume-2"): 1_100_000_000_000,
    }
    assert sum(row["BilledCost"] for row in bulk) == 1_100_000_000_000


@pytest.mark.parametrize("by", ["discount", "price"])
def test_list_cost_is_at_the_list_price(lite: Deployment, by: str) -> None:
    """0.60 a million on the list; a fifth less, or 0.30, for this tenant."""
    if by == "discount":
        own = lite.price({"output": "0.60"}, tenant_id="acme", discount_percent="20")
    else:
        own = lite.price({"output": "0.30"}, tenant_id="acme")
    lite.record(
        lite.event(price_version=own.id, input_tokens=0, cached_tokens=0, output_tokens=1_000_000)
    )
    lite.rate()
    lite.clock.advance(days=40)
    invoice_run.run(lite.database, lite.clock, current=False)
    (row,) = [row for row in focus(lite) if row["SkuMeter"] == "Output Tokens"]
    paid = (480 if by == "discount" else 300) * 10**9  # picounits for a million tokens
    assert (row["ListUnitPrice"], row["ListCost"]) == (600_000_000_000, 600_000_000_000)
    assert (row["ContractedUnitPrice"], row["ContractedCost"]) == (paid, paid)
    assert row["EffectiveCost"] == paid


def test_what_the_list_does_not_charge_has_no_list_cost(lite: Deployment) -> None:
    """The tenant's own price charges requests, too."""
    lite.price({"output": "0.60"}, model="plain")
    own = lite.price({"output": "0.60", "request": "0.01"}, model="plain", tenant_id="acme")
    lite.record(lite.event(model="plain", price_version=own.id, output_tokens=1_000_000))
    lite.rate()
    lite.clock.advance(days=40)
    invoice_run.run(lite.database, lite.clock, current=False)
    costs = {row["SkuMeter"]: (row["ListCost"], row["EffectiveCost"]) for row in focus(lite)}
    assert costs["Requests"] == (0, 10_000_000_000)
    assert costs["Output Tokens"] == (600_000_000_000, 600_000_000_000)


def test_the_list_cost_of_a_tiered_price_is_before_the_discount(lite: Deployment) -> None:
    rule = {"scheme": "graduated", "tiers": TIERS}
    lite.price({"output": rule}, model="bulk")
    own = lite.price({"output": rule}, model="bulk", tenant_id="acme", discount_percent="25")
    lite.record(
        lite.event(
            model="bulk",
            price_version=own.id,
            input_tokens=0,
            cached_tokens=0,
            output_tokens=1_500_000,
        )
    )
    lite.rate()
    lite.clock.advance(days=40)
    invoice_run.run(lite.database, lite.clock, current=False)
    first, second = [row for row in focus(lite) if row["SkuMeter"] == "Output Tokens"]
    assert (first["ListUnitPrice"], first["ListCost"]) == (2 * PICO, 2 * PICO)
    assert (second["ListUnitPrice"], second["ListCost"]) == (PICO, PICO // 2)
    assert first["EffectiveCost"] + second["EffectiveCost"] == 1_875_000_000_000


def test_focus_rules_that_a_validator_checks(busy: Deployment) -> None:
    """A SkuPriceId belongs to one SkuId; a draft's InvoiceId is provisional; quantities are
    decimals in every format."""
    found = focus(busy)
    skus = defaultdict(set)
    for row in found:
        assert row["InvoiceId"]
        if row["SkuPriceId"] is not None:
            skus[row["SkuPriceId"]].add(row["SkuId"])
    assert len(skus) > 1 and all(len(each) == 1 for each in skus.values())
    assert any(row["InvoiceId"] for row in found if row["x_InvoiceStatus"] == "draft")
    with busy.database.read() as session:
        data = b"".join(
            chunks_of(session, export_of("focus", "1.2"), Format.CSV, None, YEAR)
        ).decode()
    written = [row["PricingQuantity"] for row in csv.DictReader(data.splitlines())]
    assert any(written) and all("." in each for each in written if each)
