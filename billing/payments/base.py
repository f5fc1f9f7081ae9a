"""The payment provider port and its records.

A provider is called over the network, never inside a transaction. Requests to it are queued in the
outbox (`billing.payments.commands`). Its answers are the current state of an invoice, payment, refund
or dispute, so events may arrive twice, late or out of order. Amounts are whole minor units.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Protocol


class TryLater(Exception):
    """The provider did not answer or asks to retry; the call may have taken effect. `after_s` is its
    Retry-After, if any.
    """

    def __init__(self, message: str, after_s: float | None = None) -> None:
        super().__init__(message)
        self.after_s = after_s


class Refused(Exception):
    """The provider rejects the request permanently: a person must look at it."""


class Gone(Refused):
    """The provider has no such object."""


@dataclass(slots=True)
class Attempt:
    """One attempt at a command: its idempotency key and the steps done by earlier attempts."""

    key: str
    again: bool = False  # an earlier attempt may have taken effect: look before acting
    progress: dict[str, Any] = field(default_factory=dict)
    save: Callable[[dict[str, Any]], None] = lambda progress: None

    def keep(self, step: str, value: Any) -> None:
        """Save the result of a step before the next one starts."""
        self.progress[step] = value
        self.save(self.progress)

    def key_of(self, step: str) -> str:
        """The idempotency key of a step: constant until `turn` advances it."""
        turn = self.progress.get(f"turn:{step}", 0)
        return f"{self.key}:{step}" + (f":{turn}" if turn else "")

    def turn(self, step: str) -> None:
        """Use a new key from now on: the provider stored a 5xx answer under the old one."""
        self.keep(f"turn:{step}", self.progress.get(f"turn:{step}", 0) + 1)


@dataclass(frozen=True, slots=True)
class Customer:
    tenant_id: str
    name: str
    email: str = ""


@dataclass(frozen=True, slots=True)
class BillLine:
    position: int
    description: str
    amount_minor: int
    starts_at: datetime
    ends_at: datetime


@dataclass(frozen=True, slots=True)
class Bill:
    """A final invoice; its lines add up to `due_minor`."""

    invoice_id: str
    label: str
    tenant_id: str
    currency: str
    due_minor: int
    lines: tuple[BillLine, ...]
    methods: tuple[str, ...] = ()  # of `payments.methods`; empty: as the provider chooses
    transfer: "Transfer | None" = None  # if the customer may pay it by bank transfer
    days_to_pay: int = 0
    period_start: datetime | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Charge:
    """A charge of the customer's saved payment method: a top-up."""

    payment_id: str
    tenant_id: str
    currency: str
    amount_minor: int
    description: str
    methods: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Transfer:
    """A bank transfer to a virtual account of the customer; `country` is where it is opened."""

    currency: str
    country: str


@dataclass(frozen=True, slots=True)
class BankInstructions:
    """What a customer needs to transfer money: rows such as ("IBAN", "DE…")."""

    currency: str
    rows: tuple[tuple[str, str], ...]


class Status(StrEnum):
    PENDING = "pending"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Origin:
    """What a record at the provider says of its origin here; empty where it does not."""

    tenant_id: str = ""
    customer_id: str = ""  # at the provider
    label: str = ""  # the number of an invoice
    period_start: datetime | None = None  # of an invoice


@dataclass(frozen=True, slots=True)
class PaymentState:
    external_id: str
    status: Status
    amount_minor: int
    currency: str
    failure: str = ""
    payment_id: str = ""  # our id, if we requested the charge
    in_process: bool = False  # the bank answers in some days
    at: datetime | None = None
    origin: Origin = field(default=Origin(), compare=False)


@dataclass(frozen=True, slots=True)
class InvoiceState:
    external_id: str
    invoice_id: str  # our id; empty if it is not our invoice
    status: str  # draft | open | paid | void | uncollectible
    currency: str
    total_minor: int
    remaining_minor: int
    payments: tuple[PaymentState, ...] = ()
    page: str = ""  # where the customer can pay it
    at: datetime | None = None
    origin: Origin = field(default=Origin(), compare=False)


@dataclass(frozen=True, slots=True)
class RefundState:
    external_id: str
    payment_external_id: str
    status: Status
    amount_minor: int
    currency: str
    reference: str = ""  # our reference; empty if created at the provider
    failure: str = ""
    at: datetime | None = None


@dataclass(frozen=True, slots=True)
class DisputeState:
    external_id: str
    payment_external_id: str
    status: str  # open | won | lost, or the provider's status if no money moved
    amount_minor: int
    currency: str
    withdrawn: bool  # the bank has withdrawn the money
    at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Method:
    external_id: str
    label: str  # "Visa 4242"
    is_default: bool


@dataclass(frozen=True, slots=True)
class UsageReport:
    """Usage that the provider prices; `identifier` is the same for every delivery."""

    identifier: str
    meter: str
    customer_id: str
    value: int
    at: datetime


@dataclass(frozen=True, slots=True)
class ProviderEvent:
    """A verified event. It names its object only: its own data may be out of date."""

    id: str
    type: str
    kind: str  # invoice | payment | refund | dispute | customer | method | nothing | unknown
    subject_id: str
    occurred_at: datetime
    payload: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Window:
    """Half-open range of a record's creation time at the provider."""

    since: datetime
    until: datetime

    def holds(self, at: datetime | None) -> bool:
        return at is None or self.since <= at < self.until


Record = InvoiceState | PaymentState | RefundState | DisputeState


class PaymentProvider(Protocol):
    @property
    def name(self) -> str:
        """The value of `payments.provider`: manual, fake or stripe."""
        ...

    @property
    def collects(self) -> bool:
        """False if payments are collected and posted by hand."""
        ...

    def open_customer(self, customer: Customer, attempt: Attempt) -> str:
        """Create the tenant's customer and return its id; idempotent."""
        ...

    def setup_link(
        self, customer_id: str, return_url: str, methods: tuple[str, ...] = ("card",)
    ) -> str:
        """URL of a page on which the customer saves one of these payment methods."""
        ...

    def portal_link(self, customer_id: str, return_url: str) -> str:
        """URL of the provider's page for payment methods and past invoices."""
        ...

    def bank_instructions(self, customer_id: str, transfer: Transfer) -> BankInstructions:
        """The customer's virtual account, opened at the first call."""
        ...

    def methods(self, customer_id: str, *, newest: bool = False) -> list[Method]:
        """The customer's saved methods. The newest becomes the default if there is none, or if
        `newest` is set."""
        ...

    def send_invoice(self, customer_id: str, bill: Bill, attempt: Attempt) -> InvoiceState:
        """Create the invoice with its lines and finalize it, once."""
        ...

    def collect_invoice(self, external_id: str, attempt: Attempt) -> InvoiceState:
        """Attempt to collect now. A declined card is a failed payment in the state, not an error."""
        ...

    def lower_invoice(
        self, external_id: str, amount_minor: int, reason: str, attempt: Attempt
    ) -> InvoiceState:
        """Reduce the open amount; a paid invoice is unchanged."""
        ...

    def close_invoice(self, external_id: str, how: str, attempt: Attempt) -> InvoiceState:
        """`how` is void, uncollectible or paid_elsewhere. A closed invoice is unchanged."""
        ...

    def charge(self, customer_id: str, charge: Charge, attempt: Attempt) -> PaymentState: ...

    def refund(
        self, payment_external_id: str, amount_minor: int, reference: str, attempt: Attempt
    ) -> RefundState: ...

    def report_usage(self, report: UsageReport) -> None:
        """Report usage, once per identifier."""
        ...

    def invoice(self, external_id: str) -> InvoiceState: ...

    def payment(self, external_id: str) -> PaymentState: ...

    def refund_state(self, external_id: str) -> RefundState: ...

    def dispute(self, external_id: str) -> DisputeState: ...

    def event(self, body: bytes, signature: str | None) -> ProviderEvent:
        """Verify and parse an event. Raises Refused for a wrong signature or body."""
        ...

    def customers(self, window: Window) -> Iterator[tuple[str, str]]:
        """Tenants and their customer ids, of customers created within the window."""
        ...

    def records(self, window: Window) -> Iterator[Record]:
        """All of our records created within the window, for reconciliation."""
        ...
