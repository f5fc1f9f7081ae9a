"""A provider that answers as a test says."""

from typing import Any

from billing.payments.base import (
    Attempt,
    Charge,
    Customer,
    InvoiceState,
    PaymentState,
    RefundState,
    Status,
    UsageReport,
)
from billing.payments.fake import FakePayments
from core.clock import FakeClock


class Scripted(FakePayments):
    """Raises what is planned, and notes every attempt."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(clock, name="stripe")
        self.plan: list[Exception] = []
        self.asked: list[Any] = []

    def _next(self, *asked: Any) -> None:
        self.asked.append(asked)
        if self.plan:
            raise self.plan.pop(0)

    def report_usage(self, report: UsageReport) -> None:
        self._next("usage", report)

    def charge(self, customer_id: str, charge: Charge, attempt: Attempt) -> PaymentState:
        self._next("charge", customer_id, charge, attempt.key, attempt.again)
        return super().charge(customer_id, charge, attempt)

    def refund(
        self, payment_external_id: str, amount_minor: int, reference: str, attempt: Attempt
    ) -> RefundState:
        self._next("refund", payment_external_id, amount_minor, reference, attempt.again)
        return RefundState(
            "re_1", payment_external_id, Status.SUCCEEDED, amount_minor, "USD", reference
        )

    def open_customer(self, customer: Customer, attempt: Attempt) -> str:
        self._next("customer", customer, attempt.key)
        return f"cus-{customer.tenant_id}"

    def invoice(self, external_id: str) -> InvoiceState:
        self._next("invoice", external_id)
        return InvoiceState(external_id, "", "open", "USD", 1, 1)

    def payment(self, external_id: str) -> PaymentState:
        self._next("payment", external_id)
        return PaymentState(external_id, Status.SUCCEEDED, 500, "USD")
