"""The port to whoever moves the money. Providers act on payments that billing has begun; what came
of them is booked by `billing.settlement`, once, however often it is reported.
"""

from datetime import datetime
from typing import Protocol

from sqlalchemy.orm import Session

from billing.models import Payment, Refund


class PaymentProvider(Protocol):
    @property
    def name(self) -> str:
        """Stands in `payments.provider`: manual, fake, stripe."""
        ...

    def collect(self, session: Session, payment: Payment, at: datetime) -> None:
        """Set out to collect a pending payment. Asking twice for the same one collects once."""
        ...

    def refund(
        self, session: Session, payment: Payment, amount_minor: int, reference: str, at: datetime
    ) -> Refund | None:
        """Give back part of a payment, once per reference; None while it is on its way."""
        ...
