"""A year of one customer to the last cent: trial, yearly plan in advance with a commitment, usage
beyond it, bank transfers, a refund, a change of the tax rate, late usage, a cancellation, what is
left in the wallet, and the year reported in euros at the rates of its days.

The sheet, by hand (net, tax, total in dollars; usage is 10 dollars per million output tokens):

| invoice | net | tax | total |
|---|---|---|---|
| January: usage 10, first year 1200 ahead | 1210.00 | 19 % 229.90 | 1439.90 |
| February: usage 500 | 500.00 | 95.00 | 595.00 |
| March: usage 1000; later 100 credited | 1000.00 | 190.00 | 1190.00 |
| July: usage 2000 at 21 %, late usage of June 100 at 19 % | 2100.00 | 420 + 19 | 2539.00 |
| September: cancelled on October 1, 123 of 365 days return | -404.38 | -76.83 | -481.21 |
| October: usage 200, from the wallet | 200.00 | 42.00 | 242.00 |

Of the commitment of 3000 a year 242 of 365 days are owed: 1989.04. 3600 were used, so nothing is missing.
Cash: 1439.90 + 595 + 1190 - 119 + 2539 = 5644.90.
Tax: 229.90 + 95 + 190 - 19 + 439 - 76.83 + 42 = 900.07.
Wallet: 481.21 - 242 = 239.21.
Revenue: 5644.90 - 900.07 - 239.21 = 4505.62, of which 0.0036 is rounding, because
1200 * 242 / 365 = 795.616438356164.

The same in euros, by hand. One euro in dollars is 1.25 on January 20 and 30, February 10, March 13,
June 30, July 20 and October 5; 1.19 on March 3 and April 17; 1.12 on April 2; 1.10 on August 3; 1.20 on
October 2; 1.21 on November 3; 1.30 on December 30. A day without a rate has that of the days before it.

Billed: 1439.90 / 1.25 + 595 / 1.19 + 1190 / 1.12 + 2539 / 1.10 - 481.21 / 1.20 + 242 / 1.21
= 1151.92 + 500 + 1062.50 + 2308.1818 - 401.0083 + 200 = 4821.5935.
Collected: 1151.92 + 500 + 1062.50 + 2308.1818 = 5022.6018. Credited and refunded: 119 / 1.19 = 100.
Used: (10 + 500 + 1000 + 100 + 2000 + 200) / 1.25 = 3048. Left in the wallet: 239.21 / 1.30.
"""

from datetime import UTC, date, datetime
from typing import Any

import pytest

from billing.accounts.accounts import ensure_account
from billing.audit import reconcile
from billing.invoicing import credit_notes, invoice_run, invoices, recognition
from billing.invoicing.views import invoice_json
from billing.ledger import journal, ledger
from billing.ledger.ledger import AccountKind
from billing.payments import settlement
from billing.payments.tables import Payment
from billing.pricing import exchange_rates
from billing.pricing.exchange_rates import Converter, RateDraft
from billing.reports import revenue
from billing.subscriptions import subscriptions
from billing.subscriptions.tables import Plan
from billing.taxes import tax_rates
from billing.usage.day_range import Range
from core.clock import FakeClock
from core.database import Database
from core.events import UsageEvent
from core.money import decimal_of, units_of
from tests.billing.conftest import START, Deployment, deployment_of

SHEET = {
    "TH-000001": ("1210.00", "229.90", "1439.90"),
    "TH-000002": ("500.00", "95.00", "595.00"),
    "TH-000003": ("1000.00", "190.00", "1190.00"),
    "TH-000004": ("2100.00", "439.00", "2539.00"),
    "TH-000005": ("-404.38", "-76.83", "-481.21"),
    "TH-000006": ("200.00", "42.00", "242.00"),
}
DOLLARS_OF_A_EURO = {
    "1.25": ("01-20", "01-30", "02-10", "03-13", "06-30", "07-20", "10-05"),
    "1.19": ("03-03", "04-17"),
    "1.12": ("04-02",),
    "1.10": ("08-03",),
    "1.20": ("10-02",),
    "1.21": ("11-03",),
    "1.30": ("12-30",),
}


class Story:
    def __init__(self, database: Database) -> None:
        self.deployment: Deployment = deployment_of(database, FakeClock(START))
        self.version = self.deployment.price({"output": "10"}, tenant_id="acme")
        self.shown: dict[str, tuple[str, str, str]] = {}
        now = START
        with database.transaction() as session:
            ensure_account(session, "acme", now).tax_region = "DE"
            tax_rates.add_rate(session, "DE", "VAT", 190_000, now)
            tax_rates.add_rate(session, "DE", "VAT", 210_000, datetime(2026, 7, 1, tzinfo=UTC))
            session.add(
                Plan(
                    id="scale",
                    name="scale",
                    currency="USD",
                    base_fee=units_of("1200"),
                    minimum_commitment=units_of("3000"),
                    interval="year",
                    in_advance=True,
                    trial_days=31,
                    created_at=now,
                )
            )
            session.flush()
            subscriptions.subscribe(session, "acme", "scale", now)

    def on(self, month: int, day: int, year: int = 2026) -> datetime:
        """The hourly tasks run, and the books are audited."""
        self.deployment.clock.set(datetime(year, month, day, tzinfo=UTC))
        now = self.deployment.clock.now()
        result = invoice_run.run(self.deployment.database, self.deployment.clock)
        assert not result.failed
        with self.deployment.database.transaction() as session:
            recognition.recognise(session, now)
        with self.deployment.database.read() as session:
            for each in result.finalised:
                document = invoice_json(session, invoices.get(session, each))
                figures = ("subtotal", "tax", "total")
                self.shown[document["number"]] = tuple(document[name]["text"] for name in figures)
            report = reconcile.audit(session)
            assert report.clean, report.differences
        return now

    def event(self, millions: int) -> UsageEvent:
        return self.deployment.event(
            price_version=self.version.id,
            input_tokens=0,
            cached_tokens=0,
            output_tokens=millions * 1_000_000,
            waived_tokens=0,
        )

    def use(self, month: int, day: int, millions: int) -> None:
        self.on(month, day)
        self.deployment.record(self.event(millions))

    def wire(self, number: str, minor: int) -> Payment:
        """A bank transfer, booked twice by mistake."""
        now = self.deployment.clock.now()
        with self.deployment.database.transaction() as session:
            invoice = invoices.get(session, number)
            for _ in range(2):
                payment = settlement.begin_payment(
                    session,
                    tenant_id="acme",
                    invoice_id=invoice.id,
                    amount_minor=minor,
                    currency="USD",
                    provider="manual",
                    reference=f"wire of {minor} for {number}",
                    at=now,
                )
                settlement.succeed(session, payment, now)
            return payment

    def balance(self, kind: AccountKind) -> str:
        """What the account holds, liabilities and income positive."""
        sign = 1 if kind in (AccountKind.CASH, AccountKind.RECEIVABLE) else -1
        with self.deployment.database.read() as session:
            return decimal_of(sign * ledger.balance(session, "acme", kind, "USD"))

    def status(self, number: str) -> tuple[str, str]:
        with self.deployment.database.read() as session:
            document: dict[str, Any] = invoice_json(session, invoices.get(session, number))
        return document["status"], document["open"]["text"]


@pytest.fixture
def story(database: Database) -> Story:
    return Story(database)


def test_a_year_agrees_with_the_sheet_to_the_last_cent(story: Story) -> None:
    story.use(1, 20, 1)
    story.on(2, 3)
    assert story.balance(AccountKind.DEFERRED) == "1200"  # the year begins on February 1
    story.wire("TH-000001", 143_990)
    assert story.status("TH-000001") == ("paid", "0.00")
    story.use(2, 10, 50)
    story.on(3, 3)
    story.wire("TH-000002", 59_500)
    story.use(3, 15, 100)
    story.on(4, 3)
    story.wire("TH-000003", 100_000)
    assert story.status("TH-000003") == ("final", "190.00")
    rest = story.wire("TH-000003", 19_000)
    assert story.status("TH-000003") == ("paid", "0.00")
    _refund(story, rest)

    story.on(6, 30)
    late = story.event(10)  # arrives after the invoice of June
    story.on(7, 1)
    # February to June are 150 of 365 days: 493.150684931506(84…) is earned.
    assert story.balance(AccountKind.DEFERRED) == "706.849315068494"
    story.on(7, 3)
    story.deployment.record(late)
    story.use(7, 20, 200)
    story.on(8, 3)
    story.wire("TH-000004", 253_900)

    now = story.on(10, 1)
    with story.deployment.database.transaction() as session:
        subscriptions.cancel(session, "acme", now)
    story.on(10, 3)
    assert story.balance(AccountKind.PREPAID) == "481.21"
    assert story.status("TH-000005") == ("paid", "0.00")
    story.use(10, 5, 20)
    story.on(11, 3)
    assert story.status("TH-000006") == ("paid", "0.00")
    story.on(2, 2, 2027)

    assert story.shown == SHEET
    assert {kind.value: story.balance(kind) for kind in AccountKind} == {
        "cash": "5644.9",
        "receivable": "0",
        "prepaid": "239.21",
        "promo": "0",
        "deferred": "0",
        "tax": "900.07",
        "revenue": "4505.616438356164",
        "rounding": "0.003561643836",
        "promotion": "0",
        "bad_debt": "0",
    }
    _compare_the_journals(story)
    _compare_the_report_in_euros(story)


def _compare_the_report_in_euros(story: Story) -> None:
    drafts = [
        RateDraft(f"2026-{day}", "EUR", "USD", rate)
        for rate, days in DOLLARS_OF_A_EURO.items()
        for day in days
    ]
    year = Range(date(2026, 1, 1), date(2026, 12, 31))
    with story.deployment.database.transaction() as session:
        books = journal.trial_balance(session)
        exchange_rates.record(session, story.deployment.clock, drafts, "ann")
        euros = Converter.load(session, "EUR", year.first, year.last)
        found = revenue.read_in(session, year, euros)
        assert journal.trial_balance(session) == books
    assert (found.billed, found.collected) == (482_159, 502_260)
    assert (found.credited, found.refunded) == (10_000, 10_000)
    assert (found.outstanding, found.used) == (0, units_of("3048"))
    assert found.deferred == units_of("184.007692307692")


def _refund(story: Story, payment: Payment) -> None:
    """100 of March's usage were poor: credited and sent back, 119 with tax."""
    now = story.on(4, 20)
    with story.deployment.database.transaction() as session:
        note = credit_notes.issue(
            session,
            invoice_id=invoices.get(session, "TH-000003").id,
            net_minor=10_000,
            reason="poor answers",
            reference="ticket 7",
            at=now,
            refund=True,
        )
        assert (note.net_minor, note.tax_minor) == (10_000, 1_900)
        settlement.refund(session, session.get_one(Payment, payment.id), 11_900, "ticket 7", now)
    assert story.status("TH-000003") == ("paid", "0.00")


def _compare_the_journals(story: Story) -> None:
    """Every month's journal sums to zero, and the months together are the books in cents."""
    totals: dict[str, int] = {}
    months = [f"2026-{month:02}" for month in range(1, 13)] + ["2027-01", "2027-02"]
    with story.deployment.database.read() as session:
        for month in months:
            lines = journal.journal(session, month).splitlines()[1:]
            cents = {}
            for line in lines:
                _, account, _, _, debit, credit, *_ = line.split(",")
                cents[account] = int((debit or f"-{credit}").replace(".", ""))
            assert sum(cents.values()) == 0, month
            for account, minor in cents.items():
                totals[account] = totals.get(account, 0) + minor
    assert (totals["cash"], totals["tax"], totals["prepaid"]) == (564_490, -90_007, -23_921)
    assert totals["revenue"] + totals.get("rounding", 0) + totals["deferred"] == -450_562
