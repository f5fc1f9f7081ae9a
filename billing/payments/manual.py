"""Payments that people book by hand: bank transfers, cheques. Nothing is collected from here."""

from datetime import datetime

from sqlalchemy.orm import Session

from billing import settlement
from billing.models import Payment, Refund


class ManualPayments:
    name = "manual"

    def collect(self, session: Session, payment: Payment, at: datetime) -> None:
        """The payment stays pending until somebody books it."""

    def refund(
        self, session: Session, payment: Payment, amount_minor: int, reference: str, at: datetime
    ) -> Refund | None:
        return settlement.refund(session, payment, amount_minor, reference, at)
