"""An in-memory payment provider for demos, tests and the simulation."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TypeVar

from billing.payments.base import (
    Attempt,
    BankInstructions,
    Bill,
    Charge,
    Customer,
    DisputeState,
    Gone,
    InvoiceState,
    Method,
    Origin,
    PaymentState,
    ProviderEvent,
    Record,
    RefundState,
    Refused,
    Status,
    Transfer,
    UsageReport,
    Window,
)
from core.clock import Clock, SystemClock

Found = TypeVar("Found")

GOOD = "4242"
REFUSED = ("0341", "9995", "0069")
DEBIT = "3000"  # the account of a direct debit


@dataclass
class FakePayments:
    """`leave_card`, `open_dispute` and `close_dispute` act as customers and their banks."""

    clock: Clock = field(default_factory=SystemClock)
    events: list[ProviderEvent] = field(default_factory=list)
    name: str = "fake"
    collects: bool = True
    usage: dict[str, UsageReport] = field(default_factory=dict)
    _customers: dict[str, str] = field(default_factory=dict)  # tenant -> id
    _cards: dict[str, str] = field(default_factory=dict)  # customer -> last four digits
    _owner: dict[str, str] = field(default_factory=dict)  # invoice -> customer
    _invoices: dict[str, InvoiceState] = field(default_factory=dict)
    _payments: dict[str, PaymentState] = field(default_factory=dict)
    _refunds: dict[str, RefundState] = field(default_factory=dict)
    _disputes: dict[str, DisputeState] = field(default_factory=dict)
    _done: dict[str, str] = field(default_factory=dict)  # idempotency key -> id of its object

    def open_customer(self, customer: Customer, attempt: Attempt) -> str:
        return self._customers.setdefault(customer.tenant_id, f"customer-{customer.tenant_id}")

    def setup_link(
        self, customer_id: str, return_url: str, methods: tuple[str, ...] = ("card",)
    ) -> str:
        return f"https://pay.invalid/{customer_id}?return={return_url}"

    def portal_link(self, customer_id: str, return_url: str) -> str:
        return f"https://pay.invalid/portal/{customer_id}?return={return_url}"

    def bank_instructions(self, customer_id: str, transfer: Transfer) -> BankInstructions:
        return BankInstructions(transfer.currency, (("Account", f"fake-{customer_id}"),))

    def leave_debit(self, customer_id: str) -> None:
        """A direct debit, whose payments stay pending until `settle_debit`."""
        self.leave_card(customer_id, DEBIT)

    def settle_debit(self, payment_external_id: str, failure: str = "") -> None:
        """The bank answers: the debit succeeded, or failed with this reason."""
        known = self.payment(payment_external_id)
        status = Status.FAILED if failure else Status.SUCCEEDED
        done = replace(known, status=status, failure=failure, in_process=False)
        self._payments[payment_external_id] = done
        for each in self._invoices.values():
            if any(paid.external_id == payment_external_id for paid in each.payments):
                left = each.remaining_minor if failure else 0
                state = replace(
                    each,
                    payments=(done,),
                    status="open" if failure else "paid",
                    remaining_minor=left,
                )
                self._put(state, "invoice.payment_failed" if failure else "invoice.paid")
                break
        self._emit(
            "payment.failed" if failure else "payment.succeeded", "payment", known.external_id
        )

    def leave_card(self, customer_id: str, last4: str = GOOD) -> None:
        self._cards[customer_id] = last4
        self._emit("card.left", "method", customer_id)

    def customers(self, window: Window) -> Iterator[tuple[str, str]]:
        return iter(self._customers.items())

    def methods(self, customer_id: str, *, newest: bool = False) -> list[Method]:
        last4 = self._cards.get(customer_id)
        return [] if last4 is None else [Method(f"{customer_id}-{last4}", f"Fake {last4}", True)]

    def send_invoice(self, customer_id: str, bill: Bill, attempt: Attempt) -> InvoiceState:
        name = f"in-{bill.invoice_id}"
        if name not in self._invoices:
            if sum(line.amount_minor for line in bill.lines) != bill.due_minor:
                raise Refused(f"The lines of {bill.label} do not sum to {bill.due_minor}.")
            self._owner[name] = customer_id
            self._invoices[name] = InvoiceState(
                name,
                bill.invoice_id,
                "open",
                bill.currency,
                bill.due_minor,
                bill.due_minor,
                page=f"https://pay.invalid/{name}",
                at=self.clock.now(),
                origin=Origin(bill.tenant_id, customer_id, bill.label, bill.period_start),
            )
        return self._invoices[name]

    def collect_invoice(self, external_id: str, attempt: Attempt) -> InvoiceState:
        found = self.invoice(external_id)
        if found.status != "open" or attempt.key in self._done:
            return found
        self._done[attempt.key] = external_id
        last4 = self._cards.get(self._owner[external_id])
        if last4 is None:
            return found
        name = f"pay-{external_id}"
        paid = self._take(name, last4, found.remaining_minor, found.currency)
        if paid.status is Status.PENDING:
            return self._put(replace(found, payments=(paid,)), "payment.processing")
        good = paid.status is Status.SUCCEEDED
        found = replace(
            found,
            payments=(paid,),
            status="paid" if good else "open",
            remaining_minor=0 if good else found.remaining_minor,
        )
        return self._put(found, "invoice.paid" if good else "invoice.payment_failed")

    def lower_invoice(
        self, external_id: str, amount_minor: int, reason: str, attempt: Attempt
    ) -> InvoiceState:
        found = self.invoice(external_id)
        if found.status != "open" or attempt.key in self._done:
            return found
        self._done[attempt.key] = external_id
        left = max(0, found.remaining_minor - amount_minor)
        lowered = replace(found, remaining_minor=left, status="open" if left else "paid")
        return self._put(lowered, "invoice.lowered")

    def close_invoice(self, external_id: str, how: str, attempt: Attempt) -> InvoiceState:
        found = self.invoice(external_id)
        if found.status not in ("open", "uncollectible") or found.status == how:
            return found
        status = "paid" if how == "paid_elsewhere" else how
        return self._put(replace(found, status=status, remaining_minor=0), f"invoice.{how}")

    def charge(self, customer_id: str, charge: Charge, attempt: Attempt) -> PaymentState:
        name = f"pay-{charge.payment_id}"
        if name in self._payments:
            return self._payments[name]
        last4 = self._cards.get(customer_id)
        if last4 is None:
            why = "There is no payment method to charge."
            return PaymentState(
                "", Status.FAILED, charge.amount_minor, charge.currency, why, charge.payment_id
            )
        made = self._take(name, last4, charge.amount_minor, charge.currency, charge.payment_id)
        self._payments[name] = replace(made, origin=Origin(charge.tenant_id, customer_id))
        return self._payments[name]

    def refund(
        self, payment_external_id: str, amount_minor: int, reference: str, attempt: Attempt
    ) -> RefundState:
        name = f"refund-{reference}"
        if name in self._refunds:
            return self._refunds[name]
        paid = self.payment(payment_external_id)
        left = paid.amount_minor - self._gone(payment_external_id)
        if paid.status is not Status.SUCCEEDED or not 0 < amount_minor <= left:
            raise Refused(
                f"Payment {payment_external_id} has {left} left to refund, not {amount_minor}."
            )
        made = RefundState(
            name, payment_external_id, Status.SUCCEEDED, amount_minor, paid.currency, reference
        )
        self._refunds[name] = replace(made, at=self.clock.now())
        self._emit("refund.made", "refund", name)
        return self._refunds[name]

    def report_usage(self, report: UsageReport) -> None:
        self.usage.setdefault(report.identifier, report)

    def open_dispute(self, payment_external_id: str) -> str:
        paid = self.payment(payment_external_id)
        name = f"dispute-{payment_external_id}"
        left = paid.amount_minor - self._gone(payment_external_id)
        if name in self._disputes or left <= 0:
            raise Refused(f"Payment {payment_external_id} has nothing left to dispute.")
        self._disputes[name] = DisputeState(
            name, payment_external_id, "open", left, paid.currency, True, self.clock.now()
        )
        self._emit("dispute.opened", "dispute", name)
        return name

    def close_dispute(self, name: str, status: str) -> None:
        """`status` is won or lost."""
        self._disputes[name] = replace(
            self.dispute(name), status=status, withdrawn=status == "lost"
        )
        self._emit("dispute.closed", "dispute", name)

    def open_disputes(self) -> list[str]:
        return [each.external_id for each in self._disputes.values() if each.status == "open"]

    def invoice(self, external_id: str) -> InvoiceState:
        return _known(self._invoices, external_id)

    def payment(self, external_id: str) -> PaymentState:
        return _known(self._payments, external_id)

    def refund_state(self, external_id: str) -> RefundState:
        return _known(self._refunds, external_id)

    def dispute(self, external_id: str) -> DisputeState:
        return _known(self._disputes, external_id)

    def event(self, body: bytes, signature: str | None) -> ProviderEvent:
        """`body` is `{"id": …}` with the id of one of `events`; the signature is `fake`."""
        if signature != "fake":
            raise Refused("The signature is wrong.")
        try:
            name = json.loads(body)["id"]
        except (ValueError, KeyError, TypeError):
            raise Refused("The body is not a known event.") from None
        found = [each for each in self.events if each.id == name]
        if not found:
            raise Refused("The body is not a known event.")
        return found[0]

    def records(self, window: Window) -> Iterator[Record]:
        kinds: tuple[Iterable[Record], ...] = (
            self._invoices.values(),
            self._payments.values(),
            self._refunds.values(),
            self._disputes.values(),
        )
        return (each for kind in kinds for each in kind if window.holds(each.at))

    def _gone(self, payment_external_id: str) -> int:
        """Minor units of a payment that are refunded or withdrawn by a dispute."""
        refunds = sum(
            each.amount_minor
            for each in self._refunds.values()
            if each.payment_external_id == payment_external_id and each.status != Status.FAILED
        )
        disputed = self._disputes.get(f"dispute-{payment_external_id}")
        return refunds + (disputed.amount_minor if disputed and disputed.withdrawn else 0)

    def _take(
        self, name: str, last4: str, amount_minor: int, currency: str, payment_id: str = ""
    ) -> PaymentState:
        refused, waits = last4 in REFUSED, last4 == DEBIT
        made = PaymentState(
            name,
            Status.PENDING if waits else Status.FAILED if refused else Status.SUCCEEDED,
            amount_minor,
            currency,
            "Your card was declined." if refused else "",
            payment_id,
            waits,
            self.clock.now(),
        )
        self._payments[name] = made
        if waits:
            self._emit("payment.processing", "payment", name)
            return made
        self._emit("payment.failed" if refused else "payment.succeeded", "payment", name)
        return made

    def _put(self, state: InvoiceState, event: str) -> InvoiceState:
        self._invoices[state.external_id] = state
        self._emit(event, "invoice", state.external_id)
        return state

    def _emit(self, type_: str, kind: str, name: str) -> None:
        event = ProviderEvent(
            f"event-{len(self.events) + 1}", type_, kind, name, self.clock.now(), {"about": name}
        )
        self.events.append(event)


def _known(kept: dict[str, Found], name: str) -> Found:
    if name not in kept:
        raise Gone(f"There is no object {name!r}.")
    return kept[name]
