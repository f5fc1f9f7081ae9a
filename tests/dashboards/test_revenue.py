"""The operator's money: each figure from its own rows, exact, by currency, outstanding by age."""

import re
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import httpx
import pytest

from billing.accounts.accounts import ensure_account
from billing.invoicing.tables import CreditNote, Invoice
from billing.ledger import credits
from billing.ledger.tables import LedgerAccount
from billing.payments.tables import Payment, Refund
from billing.reports import revenue
from billing.usage.day_range import Range
from core.database import Database
from core.ids import new_id
from core.money import Money, units_of
from dashboards.pages.operator.margin import _share_of
from tests.dashboards.browser_client import browser
from tests.gateway.deployment import running_deployment
from tests.migrated import migrated

NOW = datetime(2026, 11, 20, 12, tzinfo=UTC)
MONTH = Range(date(2026, 11, 1), date(2026, 11, 20))


def invoice(
    number: int, due: int, final: datetime, late_days: int, currency: str = "USD"
) -> Invoice:
    return Invoice(
        id=new_id("inv"),
        tenant_id=f"org_{number}",
        seller_id="house",
        period_id=f"per_{number}",
        number=number,
        label=f"TH-{number}",
        status="final",
        currency=currency,
        period_start=final - timedelta(days=30),
        period_end=final,
        timezone="UTC",
        total_minor=due,
        due_minor=due,
        drafted_at=final,
        final_at=final,
        due_at=NOW - timedelta(days=late_days),
    )


def payment(of: Invoice | None, amount: int, status: str, currency: str = "USD") -> Payment:
    return Payment(
        id=new_id("pay"),
        tenant_id="org_1",
        invoice_id=of.id if of else None,
        provider="manual",
        reference=new_id("ref"),
        currency=currency,
        amount_minor=amount,
        status=status,
        created_at=NOW,
        settled_at=NOW if status == "succeeded" else None,
    )


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    made = migrated(f"sqlite:///{tmp_path / 'deployment.db'}")
    yield made
    made.close()


def test_every_figure_is_its_rows_sum_by_currency(database: Database) -> None:
    first, second = (
        invoice(1, 5_000, NOW, -10),
        invoice(2, 700, NOW - timedelta(days=60), 40, "EUR"),
    )
    with database.transaction() as session:
        session.add_all(
            [first, second, payment(first, 3_000, "succeeded"), payment(None, 99, "failed")]
        )
        first.paid_minor = 3_000
        session.flush()
        session.add(
            Refund(
                id="ref_1",
                payment_id="pay",
                tenant_id="org_1",
                provider="manual",
                reference="r",
                currency="USD",
                amount_minor=250,
                status="succeeded",
                created_at=NOW,
            )
        )
        session.add(
            CreditNote(
                id="cn_1",
                invoice_id=first.id,
                tenant_id="org_1",
                seller_id="house",
                number=1,
                label="CN-1",
                currency="USD",
                net_minor=100,
                tax_minor=19,
                outcome="due",
                reason="goodwill",
                reference="cn",
                transaction_id="txn",
                issued_at=NOW,
            )
        )
        session.add(
            LedgerAccount(tenant_id="org_1", kind="prepaid", currency="USD", balance=-12 * 10**12)
        )
    with database.read() as session:
        dollars, euros = revenue.read(session, MONTH)
    assert (dollars.billed, dollars.collected, dollars.outstanding) == (5_000, 3_000, 2_000)
    assert (dollars.refunded, dollars.credited, dollars.failed) == (250, 119, 99)
    assert dollars.deferred == 12 * 10**12
    assert (euros.currency, euros.billed, euros.outstanding) == ("EUR", 0, 700)


@pytest.mark.parametrize(
    ("late", "age"),
    [(-5, "not due"), (1, "1–30"), (29, "1–30"), (30, "31–60"), (60, "61–90"), (400, "over 90")],
)
def test_an_open_amount_is_as_old_as_its_date(database: Database, late: int, age: str) -> None:
    with database.transaction() as session:
        session.add(invoice(1, 100, NOW, late))
    with database.read() as session:
        (debtor,) = revenue.outstanding(session, NOW)
    assert debtor.by_age[age] == 100 == debtor.total


def test_the_months_of_the_chart_have_no_gap(database: Database) -> None:
    with database.transaction() as session:
        session.add_all([invoice(1, 5_000, NOW, -10), payment(None, 42, "succeeded")])
    with database.read() as session:
        months = revenue.by_month(session, "USD", NOW, 14)
    assert next(iter(months)) == "2025-10" and len(months) == 14
    assert months["2026-11"] == [5_000, 42]
    assert sum(map(sum, months.values())) == 5_042


def test_the_margin_is_reckoned_with_the_operator_s_own_rate(tmp_path: Path) -> None:
    with running_deployment(tmp_path) as deployment:
        client: httpx.Client = browser(deployment, deployment.services.operator_token)
        with closing(client):
            page = client.get("/dashboard/operator/margin?gpus=4&rate=1.50")
            assert page.status_code == 200 and "4 GPUs" in page.text
            for wrong in ("gpus=0", "rate=free", "gpus=-1", "rate=NaN"):
                assert client.get(f"/dashboard/operator/margin?{wrong}").status_code == 400, wrong


def test_the_ledger_shows_balances_and_finds_transactions(tmp_path: Path) -> None:
    with running_deployment(tmp_path) as deployment:
        client: httpx.Client = browser(deployment, deployment.services.operator_token)
        with closing(client):
            with deployment.services.database.transaction() as session:
                ensure_account(session, "org_1", NOW)
                credits.grant(
                    session,
                    tenant_id="org_1",
                    kind="promo",
                    money=Money(units_of("12.34")),
                    reference="welcome",
                    at=NOW,
                )
            page = client.get("/dashboard/operator/ledger")
            assert page.status_code == 200 and "Trial balance" in page.text
            assert "promotion" in page.text and "12.34" in page.text
            found = client.get("/dashboard/operator/ledger?q=grant%3A")
            assert "Transactions with grant:" in found.text and "grant:welcome" in found.text
            missing = client.get("/dashboard/operator/ledger?q=nothing+of+the+kind")
            assert "No transaction matches." in missing.text


def test_the_margin_of_a_new_installation_counts_no_time_before_it(tmp_path: Path) -> None:
    with running_deployment(tmp_path) as deployment:
        began = deployment.services.clock.now()
        with closing(browser(deployment, deployment.services.operator_token)) as client:
            page = client.get("/dashboard/operator/margin?gpus=1&rate=3600").text
        found = re.search(r"Cost of capacity</abbr></dt><dd>([\d,.]+) USD", page)
        assert found is not None, page
        age_s = (deployment.services.clock.now() - began).total_seconds()
        assert float(found[1].replace(",", "")) <= age_s + 300, "one dollar a second"


@pytest.mark.parametrize(
    ("profit", "revenue", "shown"),
    [(5, 10, "50.0 %"), (-10, 10, "-100.0 %"), (-20_233_859, 100, "below −999 %")],
)
def test_a_margin_without_revenue_to_speak_of_is_not_a_number(
    profit: int, revenue: int, shown: str
) -> None:
    assert _share_of(profit, revenue) == shown
