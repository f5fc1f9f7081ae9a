"""A tenant's subscriptions, invoices and payments on a fake clock, and amounts as fractions of it."""

from datetime import UTC, datetime, timedelta
from fractions import Fraction
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from billing.accounts.tables import BillingPeriod
from billing.audit import reconcile
from billing.invoicing import credit_notes, invoice_run, invoices, open_amounts, recognition
from billing.invoicing.tables import Invoice
from billing.invoicing.views import invoice_json
from billing.ledger import ledger
from billing.payments import settlement
from billing.subscriptions.tables import Plan, Subscription
from core.money import units_of
from tests.billing.conftest import Deployment

AMOUNTS = ("base_fee", "seat_fee", "included_usage", "minimum_commitment")
GRACE = timedelta(hours=25)


def moment(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def dollars(minor: int) -> Fraction:
    return Fraction(minor, 100)


class Life:
    """Plans and acts by name; `run` bills all periods that are due, and audits."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self.price = deployment.price({"output": "10"}, tenant_id="acme")

    @property
    def now(self) -> datetime:
        return self.deployment.clock.now()

    def at(self, when: str | datetime) -> "Life":
        self.deployment.clock.set(moment(when) if isinstance(when, str) else when)
        return self

    def change(self) -> Any:
        return self.deployment.database.transaction()

    def read(self) -> Any:
        return self.deployment.database.read()

    def plan(self, name: str, **fields: Any) -> None:
        written = {k: units_of(v) if k in AMOUNTS else v for k, v in fields.items()}
        plain = {"id": name, "name": name, "currency": "USD", "created_at": self.now}
        with self.change() as session:
            session.add(Plan(**(plain | written)))

    def use(self, amount: int, when: str | datetime | None = None) -> None:
        """Usage of whole dollars."""
        at = self.now if when is None else moment(when) if isinstance(when, str) else when
        tokens = {"input_tokens": 0, "cached_tokens": 0, "waived_tokens": 0}
        made = self.deployment.event(
            price_version=self.price.id,
            occurred_at=at,
            finished_at=at,
            output_tokens=amount * 100_000,
            **tokens,
        )
        self.deployment.record(made)
        self.deployment.rate()

    def run(
        self, when: str | datetime | None = None, *, audit: bool = True
    ) -> list[dict[str, Any]]:
        """The invoices that became final."""
        if when is not None:
            self.at(when)
        made = self.deployment
        result = invoice_run.run(made.database, made.clock)
        assert not result.failed, result.failed
        if not audit:
            return []
        with self.change() as session:
            recognition.recognise(session, self.now)
        with self.read() as session:
            report = reconcile.audit(session)
            assert report.clean, report.differences
            return [invoice_json(session, invoices.get(session, one)) for one in result.finalised]

    def invoice(self, session: Session, number: str = "") -> Invoice:
        """The latest final one without a number."""
        if number:
            return invoices.get(session, number)
        rows = select(Invoice).where(Invoice.number.is_not(None)).order_by(Invoice.number.desc())
        return session.scalars(rows).first()  # type: ignore[return-value]

    def void(self, number: str = "") -> None:
        with self.change() as session:
            settlement.void(session, self.invoice(session, number).id, self.now, "wrong")

    def write_off(self, number: str = "") -> None:
        with self.change() as session:
            settlement.write_off(session, self.invoice(session, number).id, self.now)

    def credit(self, net_minor: int | None = None, number: str = "") -> None:
        with self.change() as session:
            row = self.invoice(session, number)
            net = row.subtotal_minor - row.promo_minor if net_minor is None else net_minor
            reference = f"note {row.id} {self.now:%H%M%S%f}"
            credit_notes.issue(
                session,
                invoice_id=row.id,
                net_minor=net,
                reason="x",
                reference=reference,
                at=self.now,
            )

    def pay(self, minor: int | None = None, number: str = "") -> str:
        with self.change() as session:
            row = self.invoice(session, number)
            payment = settlement.begin_payment(
                session,
                tenant_id="acme",
                invoice_id=row.id,
                amount_minor=open_amounts.open_minor(row) if minor is None else minor,
                currency="USD",
                provider="manual",
                reference=f"{row.id} {self.now:%Y%m%d%H%M%S%f}",
                at=self.now,
            )
            settlement.succeed(session, payment, self.now)
            return payment.id

    def balance(self, kind: str) -> Fraction:
        with self.read() as session:
            units = ledger.balance(session, "acme", ledger.AccountKind(kind), "USD")
        return Fraction(units, 10**12)

    def subscriptions(self) -> list[tuple[str, str, str, int]]:
        with self.read() as session:
            rows = session.scalars(select(Subscription).order_by(Subscription.starts_at))
            return [
                (
                    row.plan_id,
                    f"{row.starts_at:%Y-%m-%d}",
                    f"{row.ends_at:%Y-%m-%d}" if row.ends_at else "",
                    row.seats,
                )
                for row in rows
            ]

    def periods(self) -> list[tuple[datetime, datetime]]:
        with self.read() as session:
            rows = session.scalars(select(BillingPeriod).order_by(BillingPeriod.starts_at))
            return [(row.starts_at, row.ends_at) for row in rows]


def shown(documents: list[dict[str, Any]]) -> list[list[tuple[str, str]]]:
    """Kind and amount of each line of each invoice."""
    return [[(e["kind"], e["billed"]["text"]) for e in each["lines"]] for each in documents]
