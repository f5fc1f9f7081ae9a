"""A drawn year of two currencies with everything that becomes a row of FOCUS: fees, seats, add-ons,
tiers, packages, free units, discounts, commitments, promotions, late events, re-ratings, credit notes,
voids, organisations, time zones and names that change."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from random import Random
from typing import Any

from sqlalchemy import select, update

from billing.accounts.accounts import DEFAULT_SELLER_ID
from billing.accounts.tables import BillingAccount, Seller
from billing.adjustments.organisation_links import LinkDraft, set_parent
from billing.invoicing import credit_notes, void_reversals
from billing.invoicing.tables import CreditNote, Invoice
from billing.ledger import credits
from billing.payments import settlement
from billing.rating import rerating
from billing.subscriptions import add_ons
from billing.subscriptions.subscriptions import create_plan, subscribe
from billing.taxes.tax_rates import add_rate
from core.events import UsageKind
from core.money import Money, units_of, units_of_minor
from core.tenants.models import Project, Tenant
from tests.billing.conftest import START, Deployment

GRADUATED = {
    "scheme": "graduated",
    "free": 20_000,
    "tiers": [
        {"up_to": 200_000, "price": "2.00"},
        {"up_to": 500_000, "price": "1.50", "flat": "0.25"},
        {"price": "1.00"},
    ],
}
VOLUME = {
    "scheme": "volume",
    "tiers": [
        {"up_to": 300_000, "price": "3.00"},
        {"up_to": 900_000, "price": "2.00"},
        {"price": "1.00"},
    ],
}
PACKAGE = {"scheme": "package", "size": 50, "price": "0.35"}
TENANTS = {"acme": "USD", "birch": "EUR", "cedar": "USD", "dogwood": "USD", "elm": "USD"}
METERS = {
    "Input Tokens": lambda e: e.input_tokens - e.cached_tokens,
    "Cached Input Tokens": lambda e: e.cached_tokens,
    "Output Tokens": lambda e: e.output_tokens,
    "Waived Output Tokens": lambda e: e.waived_tokens,
}


@dataclass
class Year:
    """`used` counts units by tenant, day, key and meter; `taken_back` are the voids, by the number of
    their document and the invoice, with the sign of their rows."""

    deployment: Deployment
    draw: Random
    versions: dict[str, Any] = field(default_factory=dict)
    used: dict[tuple[str, str, str, str], int] = field(default_factory=lambda: defaultdict(int))
    taken_back: list[tuple[str, str, int]] = field(default_factory=list)

    def days(self, count: int = 365) -> Iterator[datetime]:
        """Plays the year; the caller looks at the books after each day."""
        self._begin()
        for number in range(count):
            if number % 2 == 0:
                self._use(number)
            self._act(number)
            self.deployment.clock.advance(days=1)
            yield self.deployment.clock.now()

    def _begin(self) -> None:
        made = self.deployment
        for name, currency in TENANTS.items():
            if name != "acme":
                made.tenant(name, currency=currency)
        with made.database.transaction() as session:
            session.execute(
                update(BillingAccount)
                .where(BillingAccount.tenant_id == "birch")
                .values(timezone="Europe/Berlin", anchor_day=15, tax_region="DE")
            )
            for name in TENANTS:
                session.add(
                    Project(id=f"p-{name}", tenant_id=name, name="Search", created_at=START)
                )
            plan = {"currency": "USD", "base_fee": units_of("99.99"), "seat_fee": units_of("7.77")}
            plan |= {"included_usage": units_of("0.40"), "minimum_commitment": units_of("140")}
            create_plan(session, START, {"name": "pro", **plan})
            create_plan(session, START, {"name": "team", **plan, "in_advance": True})
            yearly = {"base_fee": units_of("1200"), "minimum_commitment": units_of("60")}
            yearly |= {"interval": "year", "currency": "EUR"}
            create_plan(session, START, {"name": "annual", **yearly})
            session.get_one(Seller, DEFAULT_SELLER_ID).tax_region = "DE"
            subscribe(session, "acme", "pro", START, 3, {"base_fee": units_of("89.5")})
            subscribe(session, "birch", "annual", START)
            add_ons.create(session, START, "support", units_of("40"), currency="USD")
            add_ons.set_quantity(session, "acme", "support", 2, START + timedelta(days=3))
            for child, pays, percent in (("cedar", "parent", "12.5"), ("dogwood", "self", "5")):
                set_parent(session, made.clock, LinkDraft(child, "elm", pays, percent))
            credits.grant(
                session,
                tenant_id="acme",
                kind=credits.PROMO,
                money=Money(units_of("3.21"), "USD"),
                reference="welcome",
                at=START,
            )
        rates = {"input": "0.50", "cached_input": "0.05", "waived": "0.10"}
        self.versions = {
            "USD": made.price({**rates, "output": GRADUATED, "request": PACKAGE}, model="demo3"),
            "EUR": made.price({**rates, "output": VOLUME}, model="demo3", currency="EUR"),
            "own": made.price(
                {**rates, "output": GRADUATED},
                model="demo3",
                tenant_id="elm",
                discount_percent="12.5",
            ),
            "tier": made.price({"input": "0.30", "output": "1.20"}, model="demo3@priority"),
            "right": made.price({**rates, "output": "1.25", "request": "0.001"}, model="corrected"),
            "adapter": made.price(
                {"input": "0.60", "output": "2.50"}, model="demo3", adapter="pirate"
            ),
            "media": made.price({"audio_second": "0.0001", "image": "0.04"}, model="media"),
        }

    def _version(self, tenant: str) -> Any:
        if tenant in ("birch", "elm"):
            return self.versions["EUR" if tenant == "birch" else "own"]
        return self.draw.choice([self.versions["USD"]] * 3 + [self.versions["tier"]])

    def _use(self, number: int) -> None:
        made, draw = self.deployment, self.draw
        events = []
        for tenant in TENANTS:
            for _ in range(draw.randrange(3)):
                adapter = "pirate" if tenant == "acme" and draw.random() < 0.3 else None
                version = self.versions["adapter"] if adapter else self._version(tenant)
                late = draw.random() < 0.06 and tenant != "elm"
                at = made.clock.now() - timedelta(days=draw.randrange(40) if late else 0)
                at = max(at, START)
                whole = draw.randrange(1, 30_000)
                event = made.event(
                    tenant_id=tenant,
                    project_id=f"p-{tenant}",
                    key_id=f"key{draw.randrange(2)}",
                    model="demo3",
                    adapter=adapter,
                    price_version=version.id,
                    occurred_at=at,
                    finished_at=at,
                    input_tokens=whole,
                    cached_tokens=draw.randrange(whole),
                    output_tokens=draw.randrange(80_000),
                    waived_tokens=draw.choice((0, 0, 17)),
                )
                events.append(event)
                for meter, count in METERS.items():
                    self.used[(tenant, f"{at:%Y-%m-%d}", event.key_id, meter)] += count(event)
        if number % 9 == 0:
            none = dict.fromkeys(
                ("input_tokens", "cached_tokens", "output_tokens", "waived_tokens"), 0
            )
            media = {"model": "media", "price_version": self.versions["media"].id, **none}
            events.append(made.event(kind=UsageKind.IMAGE, units=3, project_id="p-acme", **media))
        made.record(*events)
        made.rate()

    def _act(self, number: int) -> None:
        """Business of this day. Each of them is one that a customer of ours had."""
        made = self.deployment
        now = made.clock.now()
        with made.database.transaction() as session:
            if number == 10:
                add_rate(session, "DE", "VAT", 190_000, START)
            if number == 45:
                subscribe(session, "acme", "pro", now, 5)
            if number == 100:
                add_ons.set_quantity(session, "acme", "support", 0, now)
                subscribe(session, "acme", "team", now, 4)
            if number == 150:
                session.get_one(Seller, DEFAULT_SELLER_ID).name = "Renamed Seller GmbH"
                session.get_one(Tenant, "acme").display_name = "Acme Renamed"
                session.get_one(Project, "p-acme").name = "Renamed Search"
            if number in (80, 200, 290):
                self._note(session, now, number)
            if number in (110, 260):
                self._void(session, now)
        if number == 95:
            self._restore()
        if number in (85, 130, 131):
            self._rerate(number)
        if number == 60:
            self.versions["USD"] = made.price(
                {"input": "0.55", "cached_input": "0.05", "output": GRADUATED, "request": PACKAGE},
                model="demo3",
                effective_from=now,
            )

    def _final(self, session: Any, tenant: str) -> Invoice | None:
        query = select(Invoice).where(
            Invoice.tenant_id == tenant, Invoice.status.in_(("final", "paid"))
        )
        return session.scalars(query.order_by(Invoice.period_start.desc())).first()

    def _note(self, session: Any, now: datetime, number: int) -> None:
        invoice = self._final(session, "acme" if number < 250 else "birch")
        if invoice is None:
            return
        left = invoice.subtotal_minor - invoice.promo_minor
        credit_notes.issue(
            session,
            invoice_id=invoice.id,
            net_minor=max(1, left // 3),
            reason="an outage",
            reference=f"ticket {number}",
            at=now,
        )

    def _void(self, session: Any, now: datetime) -> None:
        invoice = self._final(session, "birch")
        if invoice is not None and not invoice.credited_minor:
            settlement.void(session, invoice.id, now, "wrong customer")
            self.taken_back.append((f"{invoice.label}-VOID", invoice.id, -1))

    def _restore(self) -> None:
        """A void that is taken back two days later."""
        made = self.deployment
        with made.database.transaction() as session:
            invoice = self._final(session, "elm")
            if invoice is None:
                return
            settlement.void(session, invoice.id, made.clock.now(), "a mistake")
            void_reversals.undo_void(
                session, invoice.id, made.clock.now() + timedelta(hours=2), "it was right"
            )
            self.taken_back.append((f"{invoice.label}-VOID", invoice.id, -1))
            self.taken_back.append((f"{invoice.label}-RESTORED", invoice.id, 1))

    def _rerate(self, number: int) -> None:
        """The priority tier was sold too dear: of a closed month, and again of the running one."""
        made = self.deployment
        days = (START + timedelta(days=31), START + timedelta(days=59))
        if number > 100:
            days = (START + timedelta(days=120), START + timedelta(days=128))
        wrong, right = self.versions["tier"], self.versions["right"]
        wanted = rerating.Request(wrong.id, right.id, *days, reason=f"re-rated on day {number}")
        with made.database.transaction() as session:
            rerating.post_all(session, made.clock, wanted)

    def books(self) -> dict[str, int]:
        """Picounits by document, as the tables of invoices and notes have them."""
        found: dict[str, int] = {}
        with self.deployment.database.read() as session:
            for row in session.scalars(select(Invoice)):
                found[row.label or row.id] = units_of_minor(row.total_minor, row.currency)
            for number, invoice_id, sign in self.taken_back:
                row = session.get_one(Invoice, invoice_id)
                found[number] = sign * units_of_minor(row.total_minor, row.currency)
            for note in session.scalars(select(CreditNote)):
                gross = note.net_minor + note.tax_minor
                found[note.label] = -units_of_minor(gross, note.currency)
        return found


def end_of(year: int) -> datetime:
    return datetime(year + 1, 1, 1, tzinfo=START.tzinfo)
