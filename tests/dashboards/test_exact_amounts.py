"""Columns named "exact" have every picounit, on the page and in the file; a float would lose some."""

import csv
import re
from fractions import Fraction
from html import unescape
from io import StringIO

import httpx
import pytest

from billing.accounts.accounts import ensure_account
from billing.ledger import credits
from core.money import Money
from dashboards.formats import exact
from tests.dashboards.billed import bill_a_fee, whole_invoice
from tests.gateway.deployment import Deployment

GRANTED = 98_765_432_109_876_543  # above 2**53, and odd in its last digit
WRITTEN = "98765.432109876543"
FEE = 100_123_456_789_012


@pytest.fixture(scope="module")
def deployment(deployment: Deployment) -> Deployment:
    bill_a_fee(deployment, FEE)
    services = deployment.services
    with services.database.transaction() as session:
        now = services.clock.now()
        ensure_account(session, deployment.tenant_id, now)
        credits.grant(
            session,
            tenant_id=deployment.tenant_id,
            kind="prepaid",
            money=Money(GRANTED, "USD"),
            reference="wire",
            at=now,
        )
    return deployment


def cells(page: str) -> list[str]:
    return [unescape(each) for each in re.findall(r'<td class="num[^"]*"[^>]*>([^<]+)<', page)]


def test_a_ledger_account_has_every_digit(deployment: Deployment, operator: httpx.Client) -> None:
    assert float(WRITTEN) * 10**12 != GRANTED, "a float cannot hold it"
    path = "/dashboard/operator/ledger/cash"
    shown = [each.replace("\u202f", "").replace(",", "") for each in cells(operator.get(path).text)]
    assert f"{WRITTEN} USD" in shown, shown
    rows = list(csv.DictReader(StringIO(operator.get(f"{path}?format=csv").text)))
    assert [Fraction(row["Debit (USD)"]) for row in rows] == [Fraction(GRANTED, 10**12)]


@pytest.mark.parametrize(
    ("units", "currency", "shown"),
    [
        (38_500_000_000_000, "USD", "38.50"),
        (900_000_000_000_000, "USD", "900.00"),
        (-900_000_000_000_000, "JPY", "-900"),
        (1, "USD", "0.000000000001"),
        (-1_234_500_000_000_001, "EUR", "-1\u202f234.500000000001"),
    ],
)
def test_no_digit_is_dropped_and_cents_are_written(units: int, currency: str, shown: str) -> None:
    assert exact(units, currency) == shown


def test_a_line_of_an_invoice_is_exact_and_its_amount_rounded_once(
    deployment: Deployment, owner: httpx.Client
) -> None:
    path = f"/dashboard/invoices/{whole_invoice(deployment).id}"
    shown = cells(owner.get(path).text)
    assert "100.123456789012 USD" in shown and "100.12 USD" in shown, shown
