"""The port to whoever moves the money, and what is said across it.

A provider is a network away and knows no session: nothing waits for it inside a transaction. What it
must be told stands in the outbox (`billing.payments.commands`), and what it says of an invoice, a
payment, a refund or a dispute is its present state, so that events may come twice, late or in any
order. Amounts are whole minor units.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Protocol


class TryLater(Exception):
    """It did not answer, or not now; what became of the call is not known. `after_s` if it said."""

    def __init__(self, message: str, after_s: float | None = None) -> None:
        super().__init__(message)
        self.after_s = after_s


class Refused(Exception):
    """It will never take this as it stands: a person must look."""


class Gone(Refused):
    """It knows no such object."""


@dataclass(slots=True)
class Attempt:
    """One try at a command: its idempotency key, and the steps that earlier tries have done."""

    key: str
    again: bool = False  # an earlier try may have got through: look before doing
    progress: dict[str, Any] = field(default_factory=dict)
    save: Callable[[dict[str, Any]], None] = lambda progress: None

    def keep(self, step: str, value: Any) -> None:
        """Remember a step before the next one is begun."""
        self.progress[step] = value
        self.save(self.progress)

    def key_of(self, step: str) -> str:
        """The same for every try, until an answer that says nothing was kept under it for good."""
        turn = self.progress.get(f"turn:{step}", 0)
        return f"{self.key}:{step}" + (f":{turn}" if turn else "")

    def turn(self, step: str) -> None:
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


@dataclass(frozen=True, slots=True)
class Charge:
    """Money to take now from the method that the customer left: a top-up."""

    payment_id: str
    tenant_id: str
    currency: str
    amount_minor: int
    description: str


class Status(StrEnum):
    PENDING = "pending"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class PaymentState:
    external_id: str
    status: Status
    amount_minor: int
    currency: str
    failure: str = ""
    payment_id: str = ""  # ours, if it is a charge that we asked for
    at: datetime | None = None


@dataclass(frozen=True, slots=True)
class InvoiceState:
    external_id: str
    invoice_id: str  # ours; empty if it is none of ours
    status: str  # draft | open | paid | void | uncollectible
    currency: str
    total_minor: int
    remaining_minor: int
    payments: tuple[PaymentState, ...] = ()
    page: str = ""  # where the customer can pay it
    at: datetime | None = None


@dataclass(frozen=True, slots=True)
class RefundState:
    external_id: str
    payment_external_id: str
    status: Status
    amount_minor: int
    currency: str
    reference: str = ""  # ours; empty if somebody made it at the provider
    failure: str = ""
    at: datetime | None = None


@dataclass(frozen=True, slots=True)
class DisputeState:
    external_id: str
    payment_external_id: str
    status: str  # open | won | lost, or the provider's word for one in which no money moved
    amount_minor: int
    currency: str
    withdrawn: bool  # the money is gone for now, or for good
    at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Method:
    external_id: str
    label: str  # "Visa 4242"
    is_default: bool


@dataclass(frozen=True, slots=True)
class UsageReport:
    """Usage that the provider prices itself; `identifier` is the same whenever it is sent."""

    identifier: str
    meter: str
    customer_id: str
    value: int
    at: datetime


@dataclass(frozen=True, slots=True)
class ProviderEvent:
    """A verified message: what it is about, not what it claims, since it may be late."""

    id: str
    type: str
    kind: str  # invoice | payment | refund | dispute | customer | method | nothing | unknown
    subject_id: str
    occurred_at: datetime
    payload: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Window:
    """Half open, of the time at which a record was made at the provider."""

    since: datetime
    until: datetime

    def holds(self, at: datetime | None) -> bool:
        return at is None or self.since <= at < self.until


Record = InvoiceState | PaymentState | RefundState | DisputeState


class PaymentProvider(Protocol):
    @property
    def name(self) -> str:
        """Stands in `payments.provider`: manual, fake, stripe."""
        ...

    @property
    def collects(self) -> bool:
        """False: people collect, and book what came by hand."""
        ...

    def open_customer(self, customer: Customer, attempt: Attempt) -> str:
        """Its id for the tenant; asked twice it is the same."""
        ...

    def setup_link(self, customer_id: str, return_url: str) -> str:
        """A page on which the customer leaves a payment method."""
        ...

    def methods(self, customer_id: str, *, newest: bool = False) -> list[Method]:
        """What the customer left. The newest is made the default where there is none, or where it
        was left a moment ago."""
        ...

    def send_invoice(self, customer_id: str, bill: Bill, attempt: Attempt) -> InvoiceState:
        """Put it there with its lines and make it final, once."""
        ...

    def collect_invoice(self, external_id: str, attempt: Attempt) -> InvoiceState:
        """Try to be paid now. A refused card is a failed payment of the state, not an error."""
        ...

    def lower_invoice(
        self, external_id: str, amount_minor: int, reason: str, attempt: Attempt
    ) -> InvoiceState:
        """Less of an open invoice is still to be paid there; of a paid one nothing changes."""
        ...

    def close_invoice(self, external_id: str, how: str, attempt: Attempt) -> InvoiceState:
        """`how` is void, uncollectible or paid_elsewhere. One that is closed stays as it is."""
        ...

    def charge(self, customer_id: str, charge: Charge, attempt: Attempt) -> PaymentState: ...

    def refund(
        self, payment_external_id: str, amount_minor: int, reference: str, attempt: Attempt
    ) -> RefundState: ...

    def report_usage(self, report: UsageReport) -> None:
        """Once an identifier, however often."""
        ...

    def invoice(self, external_id: str) -> InvoiceState: ...

    def payment(self, external_id: str) -> PaymentState: ...

    def refund_state(self, external_id: str) -> RefundState: ...

    def dispute(self, external_id: str) -> DisputeState: ...

    def event(self, body: bytes, signature: str | None) -> ProviderEvent:
        """Refused where the signature is not of the shared secret, or the body is no event."""
        ...

    def records(self, window: Window) -> Iterator[Record]:
        """Everything of ours that it has, to be compared with the ledger."""
        ...
