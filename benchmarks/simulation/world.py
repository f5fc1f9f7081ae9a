"""One run: a seed's worth of actions and faults, invariants after every step, then everything heals
and the books must be complete and right.
"""

import logging
import random
import shutil
import sqlite3
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import func, select

from benchmarks.simulation.faults import Crash, Faults, FaultyDatabase, Wire
from benchmarks.simulation.gateway import Books, Engine, Gateway
from benchmarks.simulation.payment_provider import Bank
from billing import (
    credits,
    expiry,
    invoice_run,
    prices,
    rating,
    reconcile,
    rerating,
    subscriptions,
    usage,
)
from billing.accounts import ensure_account
from billing.models import Charge, Plan, PriceVersionRow, UsageEventRow
from core.clock import FakeClock
from core.errors import TollhouseError
from core.ids import use_sources
from core.money import Money, units_of
from engine.protocol import Receipt

TENANTS = ("acme", "bolt", "corp")
INVARIANTS = {
    "the ledger sums to zero": "select coalesce(sum(units), 0) from ledger_entries",
    "no wallet is negative": "select count(*) from ledger_accounts"
    " where kind in ('prepaid', 'promo') and balance > 0",
    "balances are sums": "select count(*) from ledger_accounts a where balance <>"
    " (select coalesce(sum(units), 0) from ledger_entries where account_id = a.id)",
    "no charge without its event": "select count(*) from charges c"
    " left join usage_events e using (request_id) where e.request_id is null",
    "rated batches are charged whole": "select count(*) from usage_events e"
    " join usage_batches b on b.id = e.batch_id left join charges c using (request_id)"
    " where (b.rated_at is null) <> (c.request_id is null)",
    "numbers have no gap": "select count(*) from (select seller_id from invoices"
    " where number is not null group by seller_id having count(*) <> max(number))",
    "no grant is overdrawn": "select count(*) from credit_grants"
    " where remaining < 0 or remaining > granted",
}


# One statement for all, since it runs after every step of every seed.
_ALL = "select " + ", ".join(f"({query})" for query in INVARIANTS.values())
PLANS = (("small", "9", "0"), ("large", "49", "20"))  # name, base fee, included usage

# What happens in a step, and how often among the others.
ACTIONS = (
    ("_serve", 10),
    ("_ship", 5),
    ("_work", 6),
    ("_beat", 3),
    ("_wait", 3),
    ("_month_ends", 2),
    ("_grant", 2),
    ("_set_price", 2),
    ("_rerate", 2),
    ("_subscribe", 1),
    ("_leave_card", 1),
    ("_tell_bank", 3),
    ("_hear_bank", 3),
    ("_take_back", 2),
    ("_kill", 1),
)
BANKING = (
    ("_wait", 1),
    ("_leave_card", 2),
    ("_tell_bank", 5),
    ("_hear_bank", 5),
    ("_take_back", 4),
)


class Broken(AssertionError):
    """An invariant does not hold; the message names the seed and the step."""


@dataclass
class Stage:
    """A folder and a database that worlds are played on, one after the other: compiled statements
    are kept from one to the next.
    """

    folder: Path
    template: Path  # a migrated SQLite file
    database: FaultyDatabase = field(init=False)

    def __post_init__(self) -> None:
        self.database = FaultyDatabase(f"sqlite:///{self.folder / 'books.db'}")

    def clear(self) -> sqlite3.Connection:
        """A new world's database; returns a connection that no fault strikes."""
        self.database.close()
        for stale in self.folder.glob("*.db*"):
            stale.unlink()
        shutil.copy(self.template, self.folder / "books.db")
        return sqlite3.connect(self.folder / "books.db", isolation_level=None)


@dataclass
class World:
    seed: int
    stage: Stage
    steps: int = 50
    log: list[str] = field(default_factory=list)

    def run(self) -> dict[str, int]:
        """Raises Broken; returns how often each fault struck."""
        quiet = logging.getLogger("tollhouse")
        level, quiet.level = quiet.level, logging.CRITICAL
        chance = random.Random(self.seed)
        clock = FakeClock()

        def _millis() -> int:
            return int(clock.now().timestamp() * 1000)

        try:
            with use_sources(_millis, random.Random(self.seed + 1).randbytes):
                return self._live(chance, clock)
        finally:
            quiet.level = level

    def _live(self, chance: random.Random, clock: FakeClock) -> dict[str, int]:
        self.clock = clock
        self.faults = Faults(chance, rate=chance.choice([0.02, 0.1, 0.25]))
        self.truth: dict[str, Receipt] = {}
        self.witness = self.stage.clear()
        self.database = self.stage.database
        self.database.faults = self.faults
        engine = Engine()
        self.gateways = [
            Gateway(
                self.stage.folder / f"spool{number}.db",
                self.database,
                clock,
                self.faults,
                engine,
                self.truth,
            )
            for number in range(2)
        ]
        self.books = Books(self.database, clock, self.faults)
        self.broker = Wire(self.faults)
        self.bank = Bank(self.database, clock, self.faults, TENANTS)
        self._create_deployment()
        try:
            for number in range(self.steps):
                self._step(number, ACTIONS)
            self._bill_all()
            for number in range(self.steps, self.steps + self.steps // 3):
                self._step(number, BANKING)
            self._heal()
        finally:
            self.witness.close()
            for gateway in self.gateways:
                gateway.die()
        return dict(self.faults.seen)

    def _create_deployment(self) -> None:
        self.faults.healed = True
        with self.database.transaction() as session:
            prices.ensure_default_prices(session, self.clock, "demo")
            for tenant_id in TENANTS:
                ensure_account(session, tenant_id, self.clock.now()).collection = "fake"
            for name, fee, included in PLANS:
                units = {"base_fee": units_of(fee), "included_usage": units_of(included)}
                now = self.clock.now()
                session.add(Plan(id=name, name=name, currency="USD", created_at=now, **units))
        for gateway in self.gateways:
            gateway.start()
        self.faults.healed = False

    def _step(self, number: int, actions: tuple[tuple[str, int], ...]) -> None:
        chance = self.faults.chance
        name = chance.choice([name for name, weight in actions for _ in range(weight)])
        self.log.append(f"{number} {name}")
        gateway = chance.choice(self.gateways)
        try:
            getattr(self, name)(gateway)
        except Crash:
            self.log.append("  crashed")
            gateway.die()
        except TollhouseError as error:
            self.log.append(f"  {error}")
        self._check(f"step {number} {name}")

    def _serve(self, gateway: Gateway) -> None:
        gateway.start()
        for _ in range(self.faults.chance.randint(1, 4)):
            gateway.serve(self.faults.chance.choice(TENANTS))

    def _ship(self, gateway: Gateway) -> None:
        gateway.start()
        gateway.ship(self.books)

    def _beat(self, _: Gateway) -> None:
        for kind in ("rate", "invoices", "expire", "release"):
            if self.faults.chance.random() < 0.6:
                self.broker.send(kind)

    def _work(self, _: Gateway) -> None:
        message = self.broker.take()
        if message is None:
            return
        if message[0] == "rate":
            with self.database.transaction() as session:
                rating.rate(session, self.clock)
        elif message[0] == "invoices":
            invoice_run.run(self.database, self.clock, current=False)
        elif message[0] == "expire":
            with self.database.transaction() as session:
                expiry.expire(session, self.clock.now())
        else:
            with self.database.transaction() as session:
                usage.release(session, self.clock)
        self.broker.acknowledge(message)

    def _wait(self, _: Gateway) -> None:
        self.clock.advance(hours=self.faults.chance.choice([1, 2, 5, 24, 24 * 4, 24 * 20]))

    def _month_ends(self, _: Gateway) -> None:
        """Invoices become final while spools and the broker may still hold what belongs on them."""
        self.clock.advance(days=self.faults.chance.choice([20, 33, 62]))
        invoice_run.run(self.database, self.clock, current=False)

    def _kill(self, gateway: Gateway) -> None:
        gateway.die()

    def _grant(self, _: Gateway) -> None:
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

    def _set_price(self, _: Gateway) -> None:
        chance = self.faults.chance
        self.clock.advance(seconds=1)
        rules: list[Any] = [
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
        ]
        written = {"input": "0.15", "cached_input": "0.05", "output": chance.choice(rules)}
        draft = prices.PriceDraft(
            "demo",
            written,
            self.clock.now(),
            tenant_id=chance.choice(["", *TENANTS]),
            discount_percent=chance.choice(["0", "12.5"]),
        )
        for gateway in self.gateways:
            gateway.book = None
        with self.database.transaction() as session:
            prices.save(session, self.clock, draft)

    def _rerate(self, _: Gateway) -> None:
        """Somebody found that a version was wrong; it is asked for twice, or in part, too."""
        chance, now = self.faults.chance, self.clock.now()
        with self.database.read() as session:
            used = session.scalars(select(Charge.price_version).distinct()).all()
            known = session.scalars(select(PriceVersionRow.id)).all()
        if not used or len(known) < 2:
            return
        wrong = chance.choice(sorted(used))
        right = chance.choice(sorted(set(known) - {wrong}))
        wanted = rerating.Request(
            wrong,
            right,
            now - timedelta(days=chance.choice([20, 400, 400])),
            now,
            chance.choice(["", *TENANTS]),
        )
        with self.database.transaction() as session:
            rerating.post_all(session, self.clock, wanted)

    def _subscribe(self, _: Gateway) -> None:
        chance = self.faults.chance
        self.clock.advance(seconds=1)
        with self.database.transaction() as session:
            subscriptions.subscribe(
                session, chance.choice(TENANTS), chance.choice(PLANS)[0], self.clock.now()
            )

    def _leave_card(self, _: Gateway) -> None:
        self.bank.leave_card()

    def _tell_bank(self, _: Gateway) -> None:
        self.bank.emit()

    def _hear_bank(self, _: Gateway) -> None:
        self.bank.bring()
        self.bank.hear()

    def _take_back(self, _: Gateway) -> None:
        bank = self.bank
        self.faults.chance.choice([bank.refund, bank.dispute, bank.credit, bank.wire])()

    def _check(self, where: str) -> None:
        (row,) = self.witness.execute(_ALL).fetchall()
        for name, found in zip(INVARIANTS, row, strict=True):
            if found:
                self._broken(f"{name}: {found}", where)

    def _bill_all(self) -> None:
        """Ship, rate and invoice everything without a fault; the bank's are still to come."""
        self.faults.healed = True
        for gateway in self.gateways:
            gateway.start()
            gateway.ship(self.books)
        self.clock.advance(days=62)
        with self.database.transaction() as session:
            usage.release(session, self.clock)
        result = invoice_run.run(self.database, self.clock)
        if result.failed:
            self._broken(f"invoices failed: {result.failed}", "the end")
        self.faults.healed = False

    def _heal(self) -> None:
        """No fault any more: the bank comes to rest, and all is compared with the truth."""
        self.faults.healed = True
        wrong = self.bank.rest()
        if wrong:
            self._broken(f"the bank: {wrong}", "the end")
        self._check("the end")
        with self.database.read() as session:
            report = reconcile.audit(session)
            if not report.clean or report.pending or report.parked:
                self._broken(f"the audit: {report.as_json()}", "the end")
            rows = session.execute(
                select(
                    UsageEventRow.request_id,
                    UsageEventRow.input_tokens,
                    UsageEventRow.cached_tokens,
                    UsageEventRow.output_tokens,
                    UsageEventRow.waived_tokens,
                )
            )
            there = {row[0]: tuple(row[1:]) for row in rows}
            charged = session.scalar(select(func.count()).select_from(Charge))
        expected = {
            name: (each.prompt, each.cached, each.delivered, each.generated - each.delivered)
            for name, each in self.truth.items()
        }
        if there != expected or charged != len(expected):
            self._broken(
                f"lost {sorted(expected.keys() - there.keys())}, "
                f"invented {sorted(there.keys() - expected.keys())}, "
                f"changed {[k for k in expected if there.get(k, expected[k]) != expected[k]]}",
                "the end",
            )

    def _broken(self, what: str, where: str) -> None:
        story = "\n".join(self.log[-30:])
        raise Broken(f"seed {self.seed}, {where}: {what}\n{story}")
