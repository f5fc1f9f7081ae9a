"""Any order, repetition, delay and interleaving of events, prices, corrections, credit, plans and
invoice runs comes to what one gets by hand.
"""

import shutil
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import func, select

from billing.audit import reconcile
from billing.invoicing import invoice_run
from billing.invoicing.tables import Invoice, InvoiceLine
from billing.ledger import credits, expiry
from billing.ledger.tables import CreditGrant, CreditUse
from billing.pricing import prices
from billing.rating import rerating
from billing.subscriptions import subscriptions
from billing.subscriptions.tables import Plan
from billing.usage import rollups, usage
from core.clock import FakeClock
from core.database import Database
from core.money import Money
from tests.billing.conftest import Deployment, deployment_of
from tests.billing.pricing.test_pricing import rules
from tests.billing.simulation.reference import ByHand

TENANTS = ("acme", "bolt")
PLANS = (
    {"base_fee": 10 * 10**12, "seat_fee": 10**12, "included_seats": 1},
    {"base_fee": 29 * 10**12 + 1, "seat_fee": 3 * 10**12, "included_seats": 0},
)
tenants = st.sampled_from(TENANTS)
counts = st.integers(0, 60)
steps = st.one_of(
    st.tuples(st.just("use"), tenants, counts, counts, counts, st.integers(0, 9), st.booleans()),
    st.tuples(st.just("replay"), st.integers(0, 50)),
    st.tuples(st.just("hold back"), st.integers(0, 3)),
    st.tuples(st.just("deliver")),
    st.tuples(st.just("rate")),
    st.tuples(st.just("wait"), st.integers(1, 40 * 24)),
    st.tuples(st.just("price"), rules(), st.integers(0, 3)),
    st.tuples(st.just("correct"), st.integers(0, 3), st.integers(0, 3)),
    st.tuples(st.just("credit"), tenants, st.integers(1, 10**9), st.booleans()),
    st.tuples(st.just("expire")),
    st.tuples(st.just("plan"), tenants, st.integers(0, 1), st.integers(0, 4)),
    st.tuples(st.just("invoice")),
)


class Story:
    def __init__(self, deployment: Deployment) -> None:
        self.deployment, self.by_hand = deployment, ByHand()
        self.began = deployment.clock.now()
        self.seen: list[Any] = []
        self.held: list[Any] = []
        self.number = 0
        self.version = deployment.version
        self.by_hand.prices[deployment.version.id] = (prices.DEFAULT_TERMS, Fraction(0))
        deployment.tenant("bolt")
        with deployment.database.transaction() as session:
            for number, plan in enumerate(PLANS):
                session.add(
                    Plan(
                        id=f"plan{number}",
                        name=f"plan{number}",
                        currency="USD",
                        created_at=deployment.clock.now(),
                        **plan,
                    )
                )

    def step(self, kind: str, *given: Any) -> None:
        getattr(self, f"_{kind.replace(' ', '_')}")(*given)

    def _use(
        self, tenant: str, cached: int, fresh: int, output: int, waived: int, lora: bool
    ) -> None:
        event = self.deployment.event(
            tenant_id=tenant,
            price_version=self.version.id,
            input_tokens=cached + fresh,
            cached_tokens=cached,
            output_tokens=output,
            waived_tokens=waived,
            adapter="lora" if lora else None,
            status=503 if waived == 9 else 200,
        )
        self.by_hand.saw(event)
        self.seen.append(event)
        self.deployment.record(event)

    def _replay(self, index: int) -> None:
        if self.seen:
            assert self.deployment.record(self.seen[index % len(self.seen)]) == 0

    def _hold_back(self, waived: int) -> None:
        event = self.deployment.event(price_version=self.version.id, waived_tokens=waived)
        self.by_hand.saw(event)
        self.held.append(event)

    def _deliver(self) -> None:
        held, self.held = self.held, []
        assert self.deployment.record(*reversed(held), *held) == len(held)
        self.seen += held

    def _rate(self) -> None:
        self.deployment.rate()

    def _wait(self, hours: int) -> None:
        self.deployment.clock.advance(hours=hours)

    def _price(self, rule: Any, component: int) -> None:
        name = ("input", "output", "request", "waived")[component]
        written = {**prices.DEFAULT_TERMS, name: rule}
        self.deployment.clock.advance(seconds=1)
        self.version = self.deployment.price(written, discount_percent="7.5")
        self.by_hand.prices[self.version.id] = (written, Fraction("0.075"))

    def _correct(self, wrong: int, right: int) -> None:
        """All usage so far of one version at the prices of another. Twice changes nothing more."""
        versions = list(self.by_hand.prices)
        slip, meant = (versions[each % len(versions)] for each in (wrong, right))
        self.deployment.rate()
        until = self.deployment.clock.now() + timedelta(seconds=1)
        wanted = rerating.Request(slip, meant, self.began, until)
        with self.deployment.database.transaction() as session:
            rerating.post_all(session, self.deployment.clock, wanted)
            assert rerating.post_all(session, self.deployment.clock, wanted) == []
        self.by_hand.correct(slip, meant, [event.request_id for event in self.seen])

    def _credit(self, tenant: str, units: int, gift: bool) -> None:
        self.number += 1
        now = self.deployment.clock.now()
        with self.deployment.database.transaction() as session:
            credits.grant(
                session,
                tenant_id=tenant,
                kind="promo" if gift else "prepaid",
                money=Money(units),
                reference=f"grant {self.number}",
                at=now,
                priority=self.number % 3,
                expires_at=now + timedelta(days=20) if gift else None,
            )

    def _expire(self) -> None:
        with self.deployment.database.transaction() as session:
            expiry.expire(session, self.deployment.clock.now())

    def _plan(self, tenant: str, number: int, seats: int) -> None:
        self.deployment.clock.advance(seconds=1)
        now = self.deployment.clock.now()
        with self.deployment.database.transaction() as session:
            subscriptions.subscribe(session, tenant, f"plan{number}", now, seats)
        self.by_hand.plans[tenant].append((now, PLANS[number], seats))

    def _invoice(self) -> None:
        invoice_run.run(self.deployment.database, self.deployment.clock)

    def end(self) -> None:
        """Deliver, wait until everything is final, and compare."""
        self._deliver()
        self.deployment.clock.advance(days=70)
        self._invoice()
        with self.deployment.database.read() as session:
            report = reconcile.audit(session)
            assert report.clean, report.differences
            assert usage.parked(session) == []
            hours = rollups.stored(session, rollups.HOURLY)
            assert hours == rollups.recompute(session)
            for tenant in TENANTS:
                self._compare(session, tenant)
            granted, left = session.execute(
                select(func.sum(CreditGrant.granted), func.sum(CreditGrant.remaining))
            ).one()
            used = session.scalar(select(func.sum(CreditUse.units)))
            assert (granted or 0) == (left or 0) + (used or 0)

    def _compare(self, session: Any, tenant: str) -> None:
        kinds = ("usage", "late_usage", "adjustment", "base_fee", "seats", "rounding")
        billed = dict.fromkeys(kinds, 0)
        parts = 0
        last = None
        rows = session.execute(
            select(InvoiceLine, Invoice)
            .join(Invoice, Invoice.id == InvoiceLine.invoice_id)
            .where(Invoice.tenant_id == tenant)
        )
        drafts = 0
        for line, invoice in rows:
            if line.kind in ("usage", "late_usage", "adjustment"):
                billed[line.kind] += line.exact
            elif invoice.status != "draft":
                billed[line.kind] += line.exact
                parts += 1
            drafts += invoice.status == "draft"
            last = max(last or invoice.period_end, invoice.period_end)
        assert billed["usage"] + billed["late_usage"] == self.by_hand.usage(tenant)
        assert billed["adjustment"] == self.by_hand.corrections(tenant)
        if self.by_hand.plans[tenant]:
            final_end = session.scalar(
                select(func.max(Invoice.period_end)).where(
                    Invoice.tenant_id == tenant, Invoice.status != "draft"
                )
            )
            expected = self.by_hand.fees(tenant, final_end)
            assert abs(billed["base_fee"] + billed["seats"] - expected) <= parts


@settings(
    max_examples=20,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(story=st.lists(steps, max_size=30))
def test_any_interleaving_comes_to_what_one_gets_by_hand(
    story: list[Any], migrated_sqlite: Path, tmp_path: Path
) -> None:
    path = tmp_path / "tollhouse.db"
    for stale in tmp_path.glob("tollhouse.db*"):
        stale.unlink()
    shutil.copy(migrated_sqlite, path)
    database = Database(f"sqlite:///{path}")
    try:
        told = Story(deployment_of(database, FakeClock()))
        for kind, *given_ in story:
            told.step(kind, *given_)
        told.end()
    finally:
        database.close()


def test_a_long_story_on_both_databases(deployment: Deployment) -> None:
    told = Story(deployment)
    for day in range(40):
        told.step("use", TENANTS[day % 2], day, 2 * day, 3 * day, day % 10, day % 3 == 0)
        if day % 5 == 0:
            told.step("hold back", day % 4)
            told.step("credit", TENANTS[day % 2], 10**7 * (day + 1), day % 2 == 0)
        if day % 7 == 0:
            told.step("plan", TENANTS[day % 2], day % 2, day % 5)
        if day % 11 == 3:
            told.step("deliver")
            told.step("price", {"scheme": "package", "price": "0.50", "size": 25, "free": 10}, 1)
        if day % 4 == 0:
            told.step("rate")
        if day % 16 == 9:
            told.step("correct", 0, day % 3)
        if day % 13 == 12:
            told.step("invoice")
        told.step("replay", day * 7)
        told.step("wait", 37)
    told.end()


def test_the_numbers_by_hand_are_worth_something(lite: Deployment) -> None:
    told = Story(lite)
    told.step("use", "acme", 1, 2, 3, 0, False)
    del told.by_hand.events[told.seen[0].request_id]
    with pytest.raises(AssertionError):
        told.end()
