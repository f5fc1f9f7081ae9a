"""The PaymentProvider for Stripe."""

from collections.abc import Iterator

from billing.payments.base import (
    Attempt,
    BankInstructions,
    Bill,
    Charge,
    Customer,
    DisputeState,
    InvoiceState,
    Method,
    PaymentState,
    ProviderEvent,
    Record,
    RefundState,
    Transfer,
    UsageReport,
    Window,
)
from billing.payments.stripe import (
    customers,
    invoices,
    meters,
    payments,
    records,
    transfers,
    webhooks,
)
from billing.payments.stripe.client import ask, make_client


class StripePayments:
    name = "stripe"
    collects = True

    def __init__(
        self,
        api_key: str,
        *,
        api_base: str = "",
        webhook_secret: str = "",
        smart_retries: bool = False,
    ) -> None:
        """`smart_retries` lets Stripe retry declined cards; otherwise dunning retries them."""
        self._client = make_client(api_key, api_base)
        self._secret = webhook_secret
        self._smart = smart_retries

    def open_customer(self, customer: Customer, attempt: Attempt) -> str:
        return customers.open_customer(self._client, customer, attempt)

    def setup_link(
        self, customer_id: str, return_url: str, methods: tuple[str, ...] = ("card",)
    ) -> str:
        return customers.setup_link(self._client, customer_id, return_url, methods)

    def portal_link(self, customer_id: str, return_url: str) -> str:
        return customers.portal_link(self._client, customer_id, return_url)

    def bank_instructions(self, customer_id: str, transfer: Transfer) -> BankInstructions:
        return transfers.instructions(self._client, customer_id, transfer)

    def methods(self, customer_id: str, *, newest: bool = False) -> list[Method]:
        return customers.methods(self._client, customer_id, newest)

    def send_invoice(self, customer_id: str, bill: Bill, attempt: Attempt) -> InvoiceState:
        return invoices.send(self._client, customer_id, bill, attempt, advance=self._smart)

    def collect_invoice(self, external_id: str, attempt: Attempt) -> InvoiceState:
        return invoices.collect(self._client, external_id, attempt)

    def lower_invoice(
        self, external_id: str, amount_minor: int, reason: str, attempt: Attempt
    ) -> InvoiceState:
        return invoices.lower(self._client, external_id, amount_minor, reason, attempt)

    def close_invoice(self, external_id: str, how: str, attempt: Attempt) -> InvoiceState:
        return invoices.close(self._client, external_id, how, attempt)

    def charge(self, customer_id: str, charge: Charge, attempt: Attempt) -> PaymentState:
        return payments.charge(self._client, customer_id, charge, attempt)

    def refund(
        self, payment_external_id: str, amount_minor: int, reference: str, attempt: Attempt
    ) -> RefundState:
        return payments.refund(self._client, payment_external_id, amount_minor, reference, attempt)

    def report_usage(self, report: UsageReport) -> None:
        meters.report(self._client, report)

    def invoice(self, external_id: str) -> InvoiceState:
        return invoices.state(self._client, external_id)

    def payment(self, external_id: str) -> PaymentState:
        found = ask(lambda: self._client.v1.payment_intents.retrieve(external_id))
        return payments.payment_state(found)

    def refund_state(self, external_id: str) -> RefundState:
        return payments.refund_state(ask(lambda: self._client.v1.refunds.retrieve(external_id)))

    def dispute(self, external_id: str) -> DisputeState:
        return payments.dispute_state(ask(lambda: self._client.v1.disputes.retrieve(external_id)))

    def event(self, body: bytes, signature: str | None) -> ProviderEvent:
        return webhooks.event(body, signature, self._secret)

    def customers(self, window: Window) -> Iterator[tuple[str, str]]:
        return customers.made_within(self._client, window)

    def records(self, window: Window) -> Iterator[Record]:
        return records.records(self._client, window)
