"""What the operator of a simulated deployment does: prices, plans, taxes, credit, corrections, top-ups.

An act whose answer is lost may have happened: `learn` reads from the tables which did.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from typing import Any

from benchmarks.simulation.faults import Faults
from billing.accounts.accounts import ensure_account
from billing.adjustments import organisation_links
from billing.ledger import credits
from billing.payments import commands, top_ups
from billing.pricing import prices
from billing.rating import rerating
from billing.subscriptions import add_ons, subscriptions
from billing.subscriptions.tables import Plan
from billing.taxes import tax_rates
from core.clock import FakeClock
from core.database import Database
from core.money import Money, units_of
from core.tenants.models import Tenant
from tests.billing.simulation.books import Happened, Move, Price, stored_outcomes
from tests.billing.simulation.organisations import Link
from tests.billing.simulation.rows import Books

ZONES = {"acme": "UTC", "bolt": "America/New_York", "corp": "Asia/Kolkata"}
REGIONS = {"acme": "DE", "bolt": "US-NY"}  # corp is nowhere that taxes
TENANTS = tuple(ZONES)
_AMOUNTS = ("base_fee", "included_usage", "minimum_commitment")
PLANS = {"small": ("9", "0", "0"), "large": ("49", "20", "0"), "committed": ("0", "0.5", "30")}
ADD_ONS = {"support": "6.20", "capacity": "0.000000000007"}
_RULES: tuple[Any, ...] = (
    "0.60",
    {"scheme": "package", "price": "0.01", "size": 300, "free": 100},
    {
        "scheme": "graduated",
        "tiers": [{"up_to": 500, "price": "2"}, {"up_to": None, "price": "1", "flat": "1"}],
    },
    {
        "scheme": "volume",
        "tiers": [{"up_to": 1000, "price": "2"}, {"up_to": None, "price": "1"}],
    },
)
_OFTEN = (
    ("grant", 3),
    ("set_price", 3),
    ("rerate", 3),
    ("subscribe", 2),
    ("change_tax", 1),
    ("top_up", 3),
    ("link", 2),
    ("unlink", 1),
    ("hold_add_on", 2),
)


@dataclass
class Operator:
    database: Database
    clock: FakeClock
    faults: Faults
    happened: Happened
    witness: Books
    settle: Callable[[], None]  # waits for rating workers
    drafts: dict[datetime, Price] = field(default_factory=dict)  # by start

    def open_business(self) -> None:
        self.faults.healed = True
        now = self.clock.now()
        with self.database.transaction() as session:
            first = prices.ensure_default_prices(session, self.clock, "demo")
            assert first.effective_from is not None
            for tenant_id, zone in ZONES.items():
                names = dict.fromkeys(("id", "name", "display_name"), tenant_id)
                session.add(Tenant(**names, created_at=now))
                session.flush()
                account = ensure_account(session, tenant_id, now)
                account.collection, account.timezone = "fake", zone
                account.tax_region = REGIONS.get(tenant_id, "")
            top_ups.configure(session, "corp", Money(units_of("1")), Money(units_of("5")))
            for name, amounts in PLANS.items():
                units = dict(zip(_AMOUNTS, map(units_of, amounts), strict=True))
                session.add(Plan(id=name, name=name, currency="USD", created_at=now, **units))
            for name, fee in ADD_ONS.items():
                add_ons.create(session, now, name, units_of(fee), currency="USD")
                self.happened.fees[name] = units_of(fee)
        since = first.effective_from
        self.drafts[since] = Price(prices.DEFAULT_TERMS, Fraction(0), "", since)
        self.faults.healed = False

    def act(self) -> None:
        names = [name for name, weight in _OFTEN for _ in range(weight)]
        getattr(self, self.faults.chance.choice(names))()

    def learn(self) -> None:
        """Prices and tax rates that are in the tables by now."""
        for version, since in self.witness.execute("select id, effective_from from price_versions"):
            self.happened.prices[version] = self.drafts[_moment(since)]
        rows = self.witness.execute(
            "select region, effective_from, rate_ppm from tax_rates order by effective_from"
        ).fetchall()
        for tenant_id, region in REGIONS.items():
            self.happened.rates[tenant_id] = [(_moment(r[1]), r[2]) for r in rows if r[0] == region]

    def grant(self) -> None:
        chance, now = self.faults.chance, self.clock.now()
        reference = f"campaign {chance.randint(0, 12)}"  # asked for more than once
        with self.database.transaction() as session:
            credits.grant(
                session,
                tenant_id=TENANTS[sum(map(ord, reference)) % 3],
                kind=chance.choice(["promo", "prepaid"]),
                money=Money(chance.randint(1, 10**10)),
                reference=reference,
                at=now,
                priority=chance.randint(0, 2),
                expires_at=now + timedelta(days=15) if chance.random() < 0.5 else None,
            )

    def set_price(self) -> None:
        chance = self.faults.chance
        self.clock.advance(seconds=1)
        now, tenant_id = self.clock.now(), chance.choice(["", *TENANTS])
        written = {"input": "0.15", "cached_input": "0.05", "output": chance.choice(_RULES)}
        written |= chance.choice([{}, {"request": "0.001", "adapter": "0.0005", "waived": "0.1"}])
        written |= {"gpu_second": "0.0008", "moderation": "0.0001"}
        written |= {"audio_second": "0.0001", "image": "0.04", "character": chance.choice(_RULES)}
        percent = chance.choice(["0", "12.5"])
        self.drafts[now] = Price(written, Fraction(percent) / 100, tenant_id, now)
        with self.database.transaction() as session:
            draft = prices.PriceDraft(
                "demo", written, now, tenant_id=tenant_id, discount_percent=percent
            )
            prices.save(session, self.clock, draft)

    def rerate(self) -> None:
        """Somebody found that a version was wrong; it is asked for twice, or in part, too."""
        self.settle()
        self.learn()
        chance, now = self.faults.chance, self.clock.now()
        (posted,) = self.witness.execute("select count(*) from rerates").fetchone()
        used = self.witness.execute("select distinct price_version from charges").fetchall()
        known = sorted(self.happened.prices)
        if not used or len(known) < 2:
            return
        wrong = chance.choice(sorted(row[0] for row in used))
        right = chance.choice([each for each in known if each != wrong])
        since = now - timedelta(days=chance.choice([20, 400, 400]))
        tenant_id = chance.choice(["", *TENANTS])
        rated = stored_outcomes(self.witness, rated=True)
        try:
            with self.database.transaction() as session:
                wanted = rerating.Request(wrong, right, since, now, tenant_id)
                rerating.post_all(session, self.clock, wanted)
        finally:
            if self.witness.execute("select count(*) from rerates").fetchone() != (posted,):
                self.happened.rerated(Move(wrong, right, since, now, tenant_id), rated)

    def subscribe(self) -> None:
        chance = self.faults.chance
        self.clock.advance(seconds=1)
        with self.database.transaction() as session:
            plan = chance.choice(list(PLANS))
            subscriptions.subscribe(session, chance.choice(TENANTS), plan, self.clock.now())

    def link(self) -> None:
        """One tenant comes below another, which may be below a third; or its mark-up changes."""
        chance = self.faults.chance
        child, parent = chance.sample(TENANTS, 2)
        draft = organisation_links.LinkDraft(
            child, parent, chance.choice(["parent", "self"]), chance.choice(["0", "12.5", "3.3333"])
        )
        with self._learning_links(child), self.database.transaction() as session:
            organisation_links.set_parent(session, self.clock, draft)

    def unlink(self) -> None:
        child = self.faults.chance.choice(TENANTS)
        with self._learning_links(child), self.database.transaction() as session:
            organisation_links.remove_parent(session, child)

    @contextmanager
    def _learning_links(self, child: str) -> Iterator[None]:
        self.clock.advance(seconds=1)
        try:
            yield
        finally:
            found = self.witness.execute(
                "select parent_id, pays, markup_ppm from organisation_links where tenant_id = ?",
                (child,),
            ).fetchone()
            link = Link(*found) if found else None
            self.happened.links[child].append((self.clock.now(), link))

    def hold_add_on(self) -> None:
        chance = self.faults.chance
        self.clock.advance(seconds=1)
        now, tenant_id, name = self.clock.now(), chance.choice(TENANTS), chance.choice([*ADD_ONS])
        try:
            with self.database.transaction() as session:
                add_ons.set_quantity(session, tenant_id, name, chance.randint(0, 3), now)
        finally:
            found = self.witness.execute(
                "select quantity from add_on_holdings h join add_ons a on a.id = h.add_on_id"
                " where h.tenant_id = ? and a.name = ? and h.ends_at is null",
                (tenant_id, name),
            ).fetchone()
            self.happened.add_ons[(tenant_id, name)].append((now, found[0] if found else 0))

    def change_tax(self) -> None:
        chance = self.faults.chance
        self.clock.advance(seconds=1)
        with self.database.transaction() as session:
            region, ppm = chance.choice(list(REGIONS.values())), chance.choice([190_000, 88_750])
            tax_rates.add_rate(session, region, "tax", ppm, self.clock.now())

    def top_up(self) -> None:
        now = self.clock.now()
        with self.database.transaction() as session:
            for payment in top_ups.due(session, "fake", now):
                commands.charge(session, payment, now)


def _moment(stored: str) -> datetime:
    return datetime.fromisoformat(stored).replace(tzinfo=UTC)
