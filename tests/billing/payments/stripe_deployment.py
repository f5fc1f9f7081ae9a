"""Stripe as the provider: the product's fake over HTTP, whose events a test sends or withholds."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import func, select

from billing.accounts.accounts import lock_account
from billing.audit import reconcile
from billing.invoicing import invoice_run, invoices
from billing.invoicing.tables import Invoice
from billing.ledger import ledger
from billing.ledger.ledger import AccountKind
from billing.payments import inbox, push
from billing.payments.fake_stripe.customers import leave_card
from billing.payments.fake_stripe.server import FakeStripe
from billing.payments.fake_stripe.state import StripeState
from billing.payments.fake_stripe.webhooks import signed
from billing.payments.stripe.provider import StripePayments
from billing.payments.tables import Payment, PaymentCommand, PaymentWebhook
from tests.billing.conftest import Deployment

SECRET = "whsec_test"


@dataclass
class Till:
    deployment: Deployment
    stripe: FakeStripe
    provider: StripePayments
    told: int = field(default=0)  # events that were brought so far

    def push(self) -> push.Pushed:
        return push.push(self.deployment.database, self.deployment.clock, self.provider)

    def settle(self, rounds: int = 20) -> None:
        """Push, bring every event and apply, until nothing waits; time passes by the pauses."""
        for _ in range(rounds):
            pushed, brought, applied = self.push(), self.bring(), self.apply()
            if pushed.done or brought or applied.done:
                continue
            if not self.waiting():
                return
            self.deployment.clock.advance(hours=1)
        raise AssertionError("payments do not come to rest")

    def waiting(self) -> int:
        """Commands and events that are neither done nor put aside."""
        command, event = PaymentCommand, PaymentWebhook
        with self.deployment.database.read() as session:
            told = select(func.count()).select_from(command)
            heard = select(func.count()).select_from(event)
            return (
                session.scalar(told.where(command.done_at.is_(None), command.failed.is_(False)))
                or 0
            ) + (session.scalar(heard.where(event.done_at.is_(None), event.parked.is_(None))) or 0)

    def bring(self, events: list[dict[str, Any]] | None = None) -> int:
        """The new events into the inbox, or those that are given."""
        chosen = self.stripe.books.events[self.told :] if events is None else events
        if events is None:
            self.told = len(self.stripe.books.events)
        new = 0
        for each in chosen:
            event = self.provider.event(*signed(each, SECRET))
            with self.deployment.database.transaction() as session:
                new += inbox.receive(session, "stripe", event, self.deployment.clock.now())
        return new

    def apply(self) -> inbox.Applied:
        return inbox.apply(self.deployment.database, self.deployment.clock, self.provider)

    def customer(self, tenant_id: str = "acme") -> str:
        return push.customer_of(
            self.deployment.database, self.deployment.clock, self.provider, tenant_id
        )

    def leave_card(self, last4: str = "4242", tenant_id: str = "acme") -> None:
        leave_card(self.stripe.books, self.customer(tenant_id), last4)

    def collect_by_stripe(self, tenant_id: str = "acme") -> None:
        with self.deployment.database.transaction() as session:
            lock_account(session, tenant_id).collection = "stripe"

    def invoice(self, dollars: int = 12, tenant_id: str = "acme") -> Invoice:
        """Usage of a month at 0.60 a million tokens, invoiced and final."""
        tokens = dollars * 1_000_000 * 10 // 6
        used = self.deployment.event(
            tenant_id=tenant_id, output_tokens=tokens, input_tokens=0, cached_tokens=0
        )
        self.deployment.record(used)
        self.deployment.clock.advance(days=40)
        result = invoice_run.run(self.deployment.database, self.deployment.clock, [tenant_id])
        assert not result.failed
        (made,) = result.finalised
        return self.read(made)

    def read(self, invoice_id: str) -> Invoice:
        with self.deployment.database.read() as session:
            return invoices.get(session, invoice_id)

    def audited(self) -> None:
        with self.deployment.database.read() as session:
            report = reconcile.audit(session)
        assert report.clean, report.differences

    def cash(self) -> int:
        with self.deployment.database.read() as session:
            return ledger.balance(session, "acme", AccountKind.CASH, "USD")

    def payments(self) -> list[Payment]:
        with self.deployment.database.read() as session:
            return list(session.scalars(select(Payment).order_by(Payment.id)))

    def parked(self) -> list[str]:
        with self.deployment.database.read() as session:
            query = select(PaymentWebhook.parked).where(PaymentWebhook.parked.is_not(None))
            return [str(each) for each in session.scalars(query)]


@contextmanager
def open_till(deployment: Deployment, books: StripeState | None = None) -> Iterator[Till]:
    """With Stripe's books as they were left, or new ones."""
    with FakeStripe(books=books) as stripe:
        stripe.books.clock = deployment.clock
        made = StripePayments(stripe.api_key, api_base=stripe.url, webhook_secret=SECRET)
        yield Till(deployment, stripe, made, told=len(stripe.books.events))
