"""A drawn month of business with Stripe's fake, marks and receipts, whose database is restored to a
drawn point while the world outside went on. What must hold is computed from Stripe's books and from the
test's own notes of the usage."""

import random
import shutil
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

from sqlalchemy import func, select

from billing import tasks
from billing import tasks as payment_tasks
from billing.audit import reconcile
from billing.invoicing.tables import Invoice
from billing.ledger import ledger
from billing.ledger.ledger import AccountKind
from billing.ledger.tables import LedgerEntry
from billing.payments import commands, settlement, top_ups
from billing.payments.base import InvoiceState, PaymentProvider, Record, Window
from billing.payments.fake_stripe import payments as fake_payments
from billing.payments.stripe.provider import StripePayments
from billing.payments.tables import DunningCase, Payment, PaymentCommand
from billing.recovery import marks
from billing.recovery.places import FOLDER
from billing.recovery.recovery import Recover, Report
from billing.restores import restores
from core.clock import FakeClock
from core.database import Database
from core.errors import Conflict
from core.events import UsageEvent
from core.money import Money, units_of_minor
from core.queue import TaskContext
from core.settings import Settings
from core.tenants import keys
from core.tenants.models import ApiKey, AuditEntry, Project
from core.tenants.scope import scope_of_operator
from tests.billing.conftest import Deployment, deployment_of
from tests.billing.payments.stripe_deployment import Till, open_till
from tests.migrated import migrated_file

TENANTS = ("acme", "birch", "cedar")
CENT = units_of_minor(1, "USD")


@dataclass
class Drill:
    folder: Path
    random: random.Random
    refunds: random.Random  # of its own, so that the rest of a history does not change with them
    till: Till
    settings: Settings
    points: list[Path] = field(default_factory=list)
    sent: list[UsageEvent] = field(default_factory=list)  # what the gateways metered
    unreceipted: set[str] = field(default_factory=set)  # ids of requests without a receipt
    revoked: set[str] = field(default_factory=set)
    by_hand: int = 0  # minor units that were posted by hand

    @property
    def deployment(self) -> Deployment:
        return self.till.deployment

    @property
    def context(self) -> TaskContext:
        services: dict[type, object] = {PaymentProvider: self.till.provider}
        return TaskContext(self.settings, self.deployment.database, self.deployment.clock, services)

    def tick(self) -> None:
        """Every task that touches money, in a drawn order; Stripe's events come or are late."""
        work: list[Callable[[], Any]] = [
            lambda: tasks.rate_events(self.context),
            lambda: payment_tasks.top_up(self.context),
            lambda: tasks.run_invoices(self.context),
            lambda: payment_tasks.push_payments(self.context),
            lambda: payment_tasks.push_payments(self.context),
            lambda: payment_tasks.remind_and_suspend(self.context),
            lambda: tasks.mark_position(self.context),
        ]
        self.random.shuffle(work)
        for each in work:
            each()
        if self.random.random() < 0.8:
            self.till.bring()
            payment_tasks.apply_webhooks(self.context)

    def day(self) -> None:
        for tenant in TENANTS:
            for _ in range(self.random.randint(0, 2)):
                self.use(tenant)
        if self.random.random() < 0.15:
            self.revoke()
        if self.random.random() < 0.1:
            self.pay_by_hand()
        if self.refunds.random() < 0.3:
            self.refund()
        self.tick()
        self.copy()
        self.deployment.clock.advance(hours=self.random.randint(20, 80))

    def use(self, tenant: str) -> None:
        tokens = self.random.randint(1, 40) * 100_000
        event = self.deployment.event(
            tenant_id=tenant, output_tokens=tokens, input_tokens=0, cached_tokens=0
        )
        if self.random.random() < 0.1:
            self.unreceipted.add(event.request_id)
        self.sent.append(event)
        self.deployment.record(event)

    def revoke(self) -> None:
        with self.deployment.database.transaction() as session:
            live = session.scalars(select(ApiKey.id).where(ApiKey.revoked_at.is_(None))).all()
            if live:
                chosen = self.random.choice(sorted(live))
                owner = session.get_one(ApiKey, chosen).tenant_id
                scope = scope_of_operator(owner)
                keys.revoke(session, scope, self.deployment.clock, chosen)
                self.revoked.add(chosen)

    def pay_by_hand(self) -> None:
        """A wire for an open invoice, or into the wallet."""
        self.by_hand += 500
        now = self.deployment.clock.now()
        with self.deployment.database.transaction() as session:
            made = settlement.begin_payment(
                session,
                tenant_id=self.random.choice(TENANTS),
                invoice_id=None,
                amount_minor=500,
                currency="USD",
                provider="manual",
                reference=f"wire {self.by_hand}",
                at=now,
            )
            settlement.succeed(session, made, now)

    def refund(self) -> None:
        """A part of a payment, asked here or at Stripe."""
        with self.deployment.database.transaction() as session:
            paid = select(Payment).where(
                Payment.provider == "stripe", Payment.status == "succeeded"
            )
            left = [
                each
                for each in session.scalars(paid.order_by(Payment.created_at, Payment.id))
                if each.amount_minor - each.refunded_minor > 1
            ]
            if not left:
                return
            payment = self.refunds.choice(left)
            cents = self.refunds.randint(1, (payment.amount_minor - payment.refunded_minor) // 2)
            if self.refunds.random() < 0.5:
                form = {"payment_intent": payment.external_id, "amount": str(cents)}
                fake_payments.create_refund(self.till.stripe.books, form)
                return
            now, reference = self.deployment.clock.now(), f"goodwill {self.refunds.random()}"
            with suppress(Conflict):  # its credit is used
                commands.request_refund(session, payment.id, cents, reference, now)

    def copy(self) -> None:
        path = self.folder / f"point-{len(self.points)}.db"
        with closing(sqlite3.connect(self._path)) as live, closing(sqlite3.connect(path)) as kept:
            live.backup(kept)
        self.points.append(path)

    def restore(self, point: int) -> None:
        self.deployment.database.close()
        for suffix in ("", "-wal", "-shm"):
            Path(f"{self._path}{suffix}").unlink(missing_ok=True)
        shutil.copy(self.points[point], self._path)
        self.deployment.database = Database(f"sqlite:///{self._path}")

    def lose_acts(self) -> None:
        """The files that say what was done are lost, too, but for the latest mark."""
        shutil.rmtree(self.settings.data_dir / FOLDER / marks.ACTS, ignore_errors=True)
        self.revoked.clear()  # nobody can know of them

    def recover(self) -> Report:
        """As the command does: first what the receipts have."""
        self.deployment.record(*(e for e in self.sent if e.request_id not in self.unreceipted))
        return Recover(
            self.deployment.database,
            self.settings,
            self.deployment.clock,
            self.till.provider,
        ).run()

    def end(self) -> None:
        """Go on past the end of the next month, until nothing waits."""
        for days in (20, 20, 1, 1):
            self.deployment.clock.advance(days=days)
            self.tick()
        self.till.settle()
        tasks.audit(self.context)  # which posts what no event told of

    def done(self) -> tuple[Any, ...]:
        """What grows with every act that the world outside knows of."""
        with self.deployment.database.read() as session:
            highest = (LedgerEntry.id, AuditEntry.id, PaymentCommand.id, Invoice.number)
            return tuple(session.scalar(select(func.max(each))) for each in highest)

    def behind(self) -> bool:
        with self.deployment.database.read() as session:
            return restores.open_recovery(session) is not None

    @property
    def _path(self) -> str:
        return str(self.folder / "live.db")

    # What Stripe has.

    def at_stripe(self, kind: str) -> list[dict[str, Any]]:
        return list(self.till.stripe.books.objects.get(kind, {}).values())

    def taken(self) -> dict[str, int]:
        """Minor units that each tenant's card was charged, less what was refunded."""
        owner = {
            each["id"]: each["metadata"].get("tollhouse_tenant", "")
            for each in self.at_stripe("customer")
        }
        found: dict[str, int] = defaultdict(int)
        for each in self.at_stripe("payment_intent"):
            if each["status"] == "succeeded":
                found[owner[each["customer"]]] += each["amount_received"]
        of_intent = {
            each["id"]: owner[each["customer"]] for each in self.at_stripe("payment_intent")
        }
        for each in self.at_stripe("refund"):
            if each["status"] == "succeeded":
                found[of_intent[each["payment_intent"]]] -= each["amount"]
        return found

    def check(self) -> None:
        """Nobody pays twice, and no number is given twice; the books have all money that was taken."""
        invoices = [each for each in self.at_stripe("invoice") if each["status"] != "draft"]
        labels = Counter(each["number"] for each in invoices)
        assert all(count == 1 for count in labels.values()), labels
        periods = Counter(
            (each["metadata"]["tollhouse_tenant"], each["metadata"]["tollhouse_period"])
            for each in invoices
        )
        assert all(count == 1 for count in periods.values()), periods
        customers = Counter(
            each["metadata"].get("tollhouse_tenant") for each in self.at_stripe("customer")
        )
        assert all(count == 1 for count in customers.values()), customers
        with self.deployment.database.read() as session:
            ours = {each.label: each for each in session.scalars(select(Invoice))}
            for each in invoices:
                known = ours.get(each["number"])
                assert known is not None, each["number"]
                assert known.tenant_id == each["metadata"]["tollhouse_tenant"]
                assert known.external_id == each["id"]
            for tenant, minor in self.taken().items():
                hand = session.scalars(
                    select(Payment.amount_minor).where(
                        Payment.tenant_id == tenant, Payment.provider == "manual"
                    )
                )
                cash = ledger.balance(session, tenant, AccountKind.CASH, "USD")
                assert cash == (minor + sum(hand)) * CENT, tenant

    def check_reminded(self) -> None:
        """Nobody is reminded of an invoice that Stripe holds as paid in full."""
        paid = {
            each["metadata"]["tollhouse_invoice"]: int(each["total"])
            for each in self.at_stripe("invoice")
            if each["status"] == "paid"
        }
        with self.deployment.database.read() as session:
            rows = session.execute(
                select(DunningCase.invoice_id, Invoice.due_minor).join(
                    Invoice, Invoice.id == DunningCase.invoice_id
                )
            )
            reminded = [name for name, due in rows if due <= paid.get(name, -1)]
        assert reminded == []

    def check_owed(self) -> None:
        """The invoices at Stripe are over no more than what was metered, but for a cent of rounding
        each: nothing is invoiced twice."""
        metered: dict[str, int] = defaultdict(int)
        for each in self.sent:
            metered[each.tenant_id] += each.output_tokens * 60  # millionths of a cent
        for tenant in TENANTS:
            totals = [
                int(each["total"])
                for each in self.at_stripe("invoice")
                if each["metadata"]["tollhouse_tenant"] == tenant
            ]
            assert sum(totals) * 10**6 <= metered[tenant] + len(totals) * 10**6, tenant

    def named(self) -> set[tuple[str, str]]:
        """Checks and kinds of the differences that the audit names."""
        with self.deployment.database.snapshot() as session:
            report = reconcile.audit(session)
        return {(each.check, each.kind) for each in report.differences}


def refused_keys(drill: Drill) -> bool:
    """Every key that was revoked, and that the database knows, is refused."""
    now = drill.deployment.clock.now() + timedelta(seconds=1)
    with drill.deployment.database.read() as session:
        known = [session.get(ApiKey, each) for each in drill.revoked]
        return all(each.revoked_at and each.revoked_at <= now for each in known if each)


@contextmanager
def open_drill(folder: Path, seed: int) -> Iterator[Drill]:
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(migrated_file(), folder / "live.db")
    clock = FakeClock()
    made = deployment_of(Database(f"sqlite:///{folder / 'live.db'}"), clock)
    for tenant in TENANTS[1:]:
        made.tenant(tenant)
    with open_till(made) as till:
        settings = Settings(data_dir=folder / "data")
        drill = Drill(folder, random.Random(seed), random.Random(f"refunds {seed}"), till, settings)
        for tenant in TENANTS:
            till.collect_by_stripe(tenant)
            till.leave_card(tenant_id=tenant)
        with made.database.transaction() as session:
            money = Money(units_of_minor(300, "USD")), Money(units_of_minor(900, "USD"))
            top_ups.configure(session, "cedar", *money)
            for tenant in TENANTS:
                session.add(
                    Project(id=f"p{tenant}", tenant_id=tenant, name="p", created_at=clock.now())
                )
                session.flush()
                for _ in range(3):
                    keys.issue(
                        session, scope_of_operator(tenant), clock, project_id=f"p{tenant}", name="k"
                    )
        tasks.mark_position(drill.context)
        yield drill
        drill.deployment.database.close()


def play(folder: Path, seed: int) -> set[tuple[str, str]]:
    """One history with one restore, or a second one after it. Returns what the audit names."""
    with open_drill(folder, seed) as drill:
        for _ in range(drill.random.randint(8, 18)):
            drill.day()
        _lose(drill)
        if drill.random.random() < 0.3:
            for _ in range(4):
                drill.day()
            _lose(drill)
        drill.end()
        drill.check()
        drill.check_owed()
        drill.check_reminded()
        return drill.named()


def _lose(drill: Drill) -> None:
    if drill.random.random() < 0.7:
        drill.till.stripe.forget_keys()
    present = drill.done()
    drill.restore(drill.random.randrange(len(drill.points) - 1))
    if drill.done() == present:
        return  # nothing happened since that point
    if drill.random.random() < 0.3:
        drill.lose_acts()
    before = len(drill.at_stripe("payment_intent")), len(drill.at_stripe("invoice"))
    drill.tick()
    assert drill.behind()
    assert tasks.run_invoices(drill.context) == {"final": 0, "failed": 0}
    drill.tick()
    assert before == (len(drill.at_stripe("payment_intent")), len(drill.at_stripe("invoice")))
    drill.recover()
    assert not drill.behind()
    assert refused_keys(drill)


def without_invoices() -> Any:
    """A seeded fault: what the provider says of its invoices is not read."""
    plain = StripePayments.records

    def _records(self: StripePayments, window: Window) -> Iterator[Record]:
        return (each for each in plain(self, window) if not isinstance(each, InvoiceState))

    return mock.patch.object(StripePayments, "records", _records)
