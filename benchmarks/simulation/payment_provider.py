"""The payment provider, its customers and their banks, over a network that loses calls and answers,
and brings events late, twice and in any order.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from sqlalchemy import func, select

from benchmarks.simulation.faults import Crash, Faults
from billing.invoicing import credit_notes, invoices, open_amounts
from billing.invoicing.tables import Invoice
from billing.payments import commands, compare, dunning, inbox, push, settlement
from billing.payments.base import ProviderEvent, Refused, TryLater
from billing.payments.fake import FakePayments
from billing.payments.provider_snapshot import ALL_TIME, fetch
from billing.payments.tables import Payment, PaymentCommand, PaymentWebhook
from core.clock import FakeClock
from core.database import Database

_CALLS = (
    "open_customer",
    "methods",
    "send_invoice",
    "collect_invoice",
    "lower_invoice",
    "close_invoice",
    "charge",
    "refund",
    "invoice",
    "payment",
    "refund_state",
    "dispute",
)


class FarProvider(FakePayments):
    """The provider as our process sees it."""

    def attach(self, faults: Faults) -> None:
        for name in _CALLS:
            setattr(self, name, partial(self._called, faults, getattr(self, name)))

    def _called(self, faults: Faults, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if faults.strike("provider does not answer", 0.06):
            raise TryLater("no answer")
        made = call(*args, **options)
        if faults.strike("answer of the provider lost", 0.06):
            raise TryLater("the answer was lost")
        if faults.strike("process dies with the answer", 0.03):
            raise Crash
        return made


@dataclass
class Bank:
    database: Database
    clock: FakeClock
    faults: Faults
    tenants: tuple[str, ...]
    provider: FarProvider = field(init=False)

    def __post_init__(self) -> None:
        self.provider = FarProvider(self.clock)
        self.provider.attach(self.faults)

    def leave_card(self) -> None:
        """A customer types a card in, good or bad."""
        chance = self.faults.chance
        tenant = chance.choice(self.tenants)
        with suppress(TryLater):
            customer = push.customer_of(self.database, self.clock, self.provider, tenant)
            self.provider.leave_card(customer, chance.choice(["4242", "4242", "0341"]))

    def emit(self) -> None:
        """Outbox, then dunning, as the schedule has them."""
        push.push(self.database, self.clock, self.provider)
        dunning.run(self.database, self.clock, self.provider)

    def bring(self) -> None:
        """Some events come: any, perhaps again."""
        chance = self.faults.chance
        for _ in range(chance.randint(1, 4)):
            if self.provider.events:
                self._receive(chance.choice(self.provider.events))

    def hear(self) -> None:
        if inbox.apply(self.database, self.clock, self.provider).done:
            dunning.settle(self.database, self.clock)

    def refund(self) -> None:
        payment = self._some_payment()
        if payment is None:
            return
        chance = self.faults.chance
        amount = chance.randint(1, max(1, payment.amount_minor // 2))
        reference = f"refund {chance.randint(0, 9)} of {payment.id}"  # asked for more than once
        with self.database.transaction() as session:
            commands.request_refund(session, payment.id, amount, reference, self.clock.now())

    def credit(self) -> None:
        """Part of an invoice is taken back."""
        invoice = self._some_invoice(invoices.FINAL, invoices.PAID)
        if invoice is None:
            return
        chance = self.faults.chance
        with self.database.transaction() as session:
            credit_notes.issue(
                session,
                invoice_id=invoice.id,
                net_minor=chance.randint(1, max(1, invoice.subtotal_minor)),
                reason="goodwill",
                reference=f"note {chance.randint(0, 3)} of {invoice.id}",
                at=self.clock.now(),
            )

    def void(self) -> None:
        """An invoice was wrong as a whole."""
        invoice = self._some_invoice(invoices.FINAL, invoices.PAID)
        if invoice is not None and self.faults.chance.random() < 0.3:
            with self.database.transaction() as session:
                settlement.void(session, invoice.id, self.clock.now(), "wrong")

    def wire(self) -> None:
        """A customer pays by another way, perhaps what the card pays at the same time."""
        invoice = self._some_invoice(invoices.FINAL)
        if invoice is None or open_amounts.open_minor(invoice) <= 0:
            return
        now, left = self.clock.now(), open_amounts.open_minor(invoice)
        with self.database.transaction() as session:
            made = settlement.begin_payment(
                session,
                tenant_id=invoice.tenant_id,
                invoice_id=invoice.id,
                amount_minor=self.faults.chance.choice([left, max(1, left // 2)]),
                currency=invoice.currency,
                provider="manual",
                reference=f"wire {self.faults.chance.randint(0, 3)} for {invoice.id}",
                at=now,
            )
            settlement.succeed(session, made, now)

    def dispute(self) -> None:
        """A customer's bank takes money back, or decides."""
        chance = self.faults.chance
        pending = self.provider.open_disputes()
        if pending and chance.random() < 0.6:
            with suppress(TryLater):
                self.provider.close_dispute(chance.choice(pending), chance.choice(["won", "lost"]))
            return
        payment = self._some_payment()
        if payment is not None and payment.external_id is not None:
            with suppress(Refused, TryLater):  # disputed before, or all of it went back
                self.provider.open_dispute(payment.external_id)

    def rest(self) -> str:
        """Healed: everything is told and heard. What is wrong then, or nothing."""
        heard = 0
        for _ in range(100):
            pushed = push.push(self.database, self.clock, self.provider)
            events = self.provider.events[heard:]
            heard += len(events)
            new = self._receive_all(events)
            applied = inbox.apply(self.database, self.clock, self.provider)
            dunning.settle(self.database, self.clock)
            if pushed.refused or applied.parked:
                return f"{pushed.refused} commands were refused, {applied.parked} events parked"
            if pushed.done or new or applied.done:
                continue
            if not self._waiting():
                break
            self.clock.advance(hours=1)
        else:
            return "the payments do not come to rest"
        theirs = fetch(self.database, self.provider, self.clock.now(), ALL_TIME)
        with self.database.read() as session:
            found = compare.differences(session, theirs)
            return "; ".join(each.message for each in found)

    def _waiting(self) -> int:
        with self.database.read() as session:
            told = select(func.count()).select_from(PaymentCommand)
            heard = select(func.count()).select_from(PaymentWebhook)
            return (session.scalar(told.where(PaymentCommand.done_at.is_(None))) or 0) + (
                session.scalar(heard.where(PaymentWebhook.done_at.is_(None))) or 0
            )

    def _receive_all(self, events: list[ProviderEvent]) -> int:
        with self.database.transaction() as session:
            now = self.clock.now()
            return sum(inbox.receive(session, self.provider.name, each, now) for each in events)

    def _receive(self, event: ProviderEvent) -> bool:
        if self.faults.strike("event lost"):
            return False
        with self.database.transaction() as session:
            return inbox.receive(session, self.provider.name, event, self.clock.now())

    def _some_invoice(self, *states: str) -> Invoice | None:
        with self.database.read() as session:
            rows = session.scalars(
                select(Invoice).where(Invoice.status.in_(states)).order_by(Invoice.number)
            ).all()
        return self.faults.chance.choice(rows) if rows else None

    def _some_payment(self) -> Payment | None:
        with self.database.read() as session:
            rows = session.scalars(
                select(Payment)
                .where(Payment.status == settlement.SUCCEEDED)
                .order_by(Payment.created_at, Payment.id)
            ).all()
        return self.faults.chance.choice(rows) if rows else None
