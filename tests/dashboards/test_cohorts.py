"""Cohorts against a count by hand of the same invoices, on both databases, and their page."""

import random
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta

import httpx
import pytest

from billing.invoicing.tables import Invoice
from billing.reports import cohorts
from core.clock import FakeClock
from core.database import Database
from core.ids import new_id
from dashboards.heat_map import heat_map
from tests.dashboards.browser_client import browser, with_role
from tests.gateway.deployment import Deployment, running_deployment

NOW = datetime(2026, 11, 20, 12, tzinfo=UTC)
PAGE = "/dashboard/operator/cohorts"


def invoice(tenant: str, at: datetime, total: int, tax: int = 0, **changes: object) -> Invoice:
    made = Invoice(
        id=new_id("inv"),
        tenant_id=tenant,
        seller_id="slr_1",
        period_id=new_id("per"),
        status="final",
        currency="USD",
        period_start=at - timedelta(days=30),
        period_end=at,
        timezone="UTC",
        total_minor=total,
        tax_minor=tax,
        drafted_at=at,
        final_at=at,
    )
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def month_after(name: str, count: int) -> str:
    year, month = (int(part) for part in name.split("-"))
    whole = year * 12 + month - 1 + count
    return f"{whole // 12}-{whole % 12 + 1:02d}"


def by_hand(invoices: list[Invoice], currency: str) -> dict[str, list[tuple[int, int] | None]]:
    """Month -> (customers, billed) by months after the first invoice, as a person would count them."""
    of: dict[str, dict[str, int]] = {}
    for each in invoices:
        if each.currency == currency and each.status in ("final", "paid", "uncollectible"):
            assert each.final_at is not None
            own, name = of.setdefault(each.tenant_id, {}), f"{each.final_at:%Y-%m}"
            own[name] = own.get(name, 0) + each.total_minor - each.tax_minor
    billed = {
        tenant: {m: sum_ for m, sum_ in own.items() if sum_ > 0} for tenant, own in of.items()
    }
    firsts = {tenant: min(own) for tenant, own in billed.items() if own}
    found: dict[str, list[tuple[int, int] | None]] = {}
    for cohort in sorted(set(firsts.values())):
        if cohort < "2025-12":
            continue
        tenants = [tenant for tenant, first in firsts.items() if first == cohort]
        row: list[tuple[int, int] | None] = []
        for age in range(12):
            name = month_after(cohort, age)
            amounts = [billed[tenant].get(name, 0) for tenant in tenants]
            row.append((sum(a > 0 for a in amounts), sum(amounts)) if name <= "2026-11" else None)
        found[cohort] = row
    return found


@pytest.mark.parametrize("seed", range(4))
def test_they_are_what_a_count_by_hand_finds(database: Database, seed: int) -> None:
    chance = random.Random(seed)
    made = []
    for number in range(40):
        start = chance.randint(0, 500)
        for _ in range(chance.randint(1, 14)):
            at = NOW - timedelta(days=chance.randint(0, start), hours=chance.randint(0, 23))
            total = chance.choice([0, 100, 5_000, 123_456])
            status = chance.choice(["final", "paid", "paid", "void", "draft", "uncollectible"])
            currency = chance.choice(["USD", "USD", "EUR"])
            changes = {"status": status, "currency": currency}
            if status == "draft":
                changes["final_at"] = None  # type: ignore[assignment]
            made.append(invoice(f"org_{number}", at, total, total // 6, **changes))
    with database.transaction() as session:
        wanted = {currency: by_hand(made, currency) for currency in ("USD", "EUR")}
        session.add_all(made)
    with database.read() as session:
        for currency, rows in wanted.items():
            found = cohorts.read(session, currency, NOW)
            pairs = {
                each.month: [
                    None if a is None or b is None else (a, b)
                    for a, b in zip(each.customers, each.billed, strict=True)
                ]
                for each in found
            }
            assert pairs == rows
        assert set(cohorts.currencies(session)) == {"USD", "EUR"}


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with running_deployment(tmp_path_factory.mktemp("cohorts"), clock=FakeClock(NOW)) as made:
        yield made


def test_page_and_file_say_the_same_and_an_empty_one_what_is_next(
    deployment: Deployment, operator: httpx.Client
) -> None:
    empty = operator.get(PAGE).text
    assert "No final invoices yet" in empty and "Open invoices" in empty
    with deployment.services.database.transaction() as session:
        for tenant, months in (("a", (9, 10, 11)), ("b", (9, 11)), ("c", (10,))):
            for month in months:
                session.add(invoice(tenant, datetime(2026, month, 3, tzinfo=UTC), 1_190, 190))
    page = operator.get(PAGE).text
    assert "2026-09, +1: 50 %" in page and "2026-09, +2: 100 %" in page
    assert "2026-10, +1: 0 %" in page and "2026-10, +2:" not in page
    assert "60.00 USD" in page, "six invoices before tax"
    lines = operator.get(f"{PAGE}?format=csv").text.splitlines()
    assert [line.split(",")[:4] for line in lines[1:]] == [
        ["2026-09", "2", "1", "2"],
        ["2026-10", "1", "0", ""],
    ]
    assert operator.get(f"{PAGE}?currency=XYZ").status_code == 400
    with closing(browser(deployment, with_role(deployment, "owner"))) as owner:
        assert owner.get(PAGE).status_code == 403


def test_a_heat_map_has_a_cell_for_each_value_and_none_for_a_missing_one() -> None:
    drawn = heat_map("Title <b>", [("2026-10", [1.0, 0.5]), ("2026-11", [1.0, None])], ["+0", "+1"])
    assert drawn.count("<rect") == 3 and 'class="q9"' in drawn and 'class="q4"' in drawn
    assert "2026-10, +1: 50 %" in drawn and "Title &lt;b&gt;" in drawn
