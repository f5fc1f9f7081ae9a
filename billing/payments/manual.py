"""Payments posted by hand: bank transfers, cheques. Collects nothing itself."""

from collections.abc import Iterator
from dataclasses import replace

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

BY_HAND = "Payments are posted by hand: use `tollhouse invoice pay`."


class ManualPayments:
    """Keeps sent invoices in memory until the process ends."""

    name = "manual"
    collects = False

    def __init__(self) -> None:
        self._invoices: dict[str, InvoiceState] = {}

    def open_customer(self, customer: Customer, attempt: Attempt) -> str:
        return customer.tenant_id

    def setup_link(
        self, customer_id: str, return_url: str, methods: tuple[str, ...] = ("card",)
    ) -> str:
        raise Refused(BY_HAND)

    def portal_link(self, customer_id: str, return_url: str) -> str:
        raise Refused(BY_HAND)

    def bank_instructions(self, customer_id: str, transfer: Transfer) -> BankInstructions:
        raise Refused("There is no virtual account: the invoice states the bank details.")

    def customers(self, window: Window) -> Iterator[tuple[str, str]]:
        return iter(())

    def methods(self, customer_id: str, *, newest: bool = False) -> list[Method]:
        return []

    def send_invoice(self, customer_id: str, bill: Bill, attempt: Attempt) -> InvoiceState:
        made = InvoiceState(
            bill.invoice_id, bill.invoice_id, "open", bill.currency, bill.due_minor, bill.due_minor
        )
        return self._invoices.setdefault(bill.invoice_id, made)

    def collect_invoice(self, external_id: str, attempt: Attempt) -> InvoiceState:
        return self.invoice(external_id)

    def lower_invoice(
        self, external_id: str, amount_minor: int, reason: str, attempt: Attempt
    ) -> InvoiceState:
        known = self.invoice(external_id)
        if known.status == "open" and not attempt.progress.get("lowered"):
            left = max(0, known.remaining_minor - amount_minor)
            known = replace(known, remaining_minor=left, status="open" if left else "paid")
            self._invoices[external_id] = known
            attempt.keep("lowered", True)
        return known

    def close_invoice(self, external_id: str, how: str, attempt: Attempt) -> InvoiceState:
        known = self.invoice(external_id)
        if known.status == "open":
            status = "paid" if how == "paid_elsewhere" else how
            known = self._invoices[external_id] = replace(known, status=status, remaining_minor=0)
        return known

    def charge(self, customer_id: str, charge: Charge, attempt: Attempt) -> PaymentState:
        """Pending until it is posted by hand."""
        return PaymentState(
            charge.payment_id,
            Status.PENDING,
            charge.amount_minor,
            charge.currency,
            payment_id=charge.payment_id,
        )

    def refund(
        self, payment_external_id: str, amount_minor: int, reference: str, attempt: Attempt
    ) -> RefundState:
        """Succeeds at once: the money is returned by hand."""
        return RefundState(
            reference, payment_external_id, Status.SUCCEEDED, amount_minor, "", reference
        )

    def report_usage(self, report: UsageReport) -> None:
        """Nothing to report: the invoice lists the usage."""

    def invoice(self, external_id: str) -> InvoiceState:
        if external_id not in self._invoices:
            raise Gone(f"Invoice {external_id} was not sent.")
        return self._invoices[external_id]

    def payment(self, external_id: str) -> PaymentState:
        raise Gone(BY_HAND)

    def refund_state(self, external_id: str) -> RefundState:
        raise Gone(BY_HAND)

    def dispute(self, external_id: str) -> DisputeState:
        raise Gone(BY_HAND)

    def event(self, body: bytes, signature: str | None) -> ProviderEvent:
        raise Refused("No payment provider is set up: set TOLLHOUSE_STRIPE_API_KEY.")

    def records(self, window: Window) -> Iterator[Record]:
        return iter(())
