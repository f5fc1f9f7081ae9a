"""One run: a seed's worth of actions and faults, invariants after every step, then everything heals
and the books must be complete and right.
"""

import logging
import random
import shutil
import sqlite3
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.simulation.engine import Engine
from benchmarks.simulation.faults import Crash, Faults, FaultyDatabase, Wire
from benchmarks.simulation.gateway import Gateway, Killed, Site
from benchmarks.simulation.operator_acts import TENANTS, ZONES, Operator
from benchmarks.simulation.payment_provider import Bank
from billing import expiry, invoice_run, rating, reconcile, usage
from core.clock import FakeClock
from core.errors import TollhouseError
from core.ids import use_sources
from tests.billing.simulated_books import Happened, problems

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
# What happens in a step, and how often among the others.
ACTIONS = (
    ("_serve", 10),
    ("_ship", 5),
    ("_recover", 4),
    ("_work", 6),
    ("_beat", 3),
    ("_wait", 3),
    ("_month_ends", 2),
    ("_operate", 10),
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
        self.spools = self.folder / "spool"
        self.database = FaultyDatabase(f"sqlite:///{self.folder / 'books.db'}")

    def clear(self) -> sqlite3.Connection:
        """A new world's database; returns a connection that no fault strikes."""
        self.database.close()
        for stale in self.folder.glob("*.db*"):
            stale.unlink()
        shutil.rmtree(self.spools, ignore_errors=True)
        self.spools.mkdir()
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
        self.happened = Happened(ZONES)
        self.witness = self.stage.clear()
        self.database = self.stage.database
        self.database.faults = self.faults
        site = Site(
            self.stage.spools,
            self.database,
            clock,
            self.faults,
            Engine(self.faults, clock, self.happened),
            self.happened,
        )
        self.gateways = [Gateway(site, name) for name in ("left", "right")]
        self.broker = Wire(self.faults)
        self.bank = Bank(self.database, clock, self.faults, TENANTS)
        self.operator = Operator(self.database, clock, self.faults, self.happened, self.witness)
        self.operator.open_business()
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

    def _step(self, number: int, actions: tuple[tuple[str, int], ...]) -> None:
        chance = self.faults.chance
        name = chance.choice([name for name, weight in actions for _ in range(weight)])
        self.log.append(f"{number} {name}")
        gateway = chance.choice(self.gateways)
        try:
            getattr(self, name)(gateway)
        except (Crash, Killed):
            self.log.append("  crashed")
            gateway.die()
        except TollhouseError as error:
            self.log.append(f"  {error}")
        self._check(f"step {number} {name}")

    def _serve(self, gateway: Gateway) -> None:
        for _ in range(self.faults.chance.randint(1, 4)):
            gateway.serve(self.faults.chance.choice(TENANTS))

    def _ship(self, gateway: Gateway) -> None:
        gateway.ship()

    def _recover(self, gateway: Gateway) -> None:
        gateway.recover()

    def _beat(self, _: Gateway) -> None:
        for kind in ("rate", "invoices", "expire", "release"):
            if self.faults.chance.random() < 0.6:
                self.broker.send(kind)

    def _work(self, _: Gateway) -> None:
        message = self.broker.take()
        if message is None:
            return
        if message[0] == "rate":
            most = self.faults.chance.choice([1, 20_000])  # two workers take turns
            with self.database.transaction() as session:
                rating.rate(session, self.clock, most_events=most)
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

    def _operate(self, _: Gateway) -> None:
        for gateway in self.gateways:
            gateway.book = None
        self.operator.act()

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
            gateway.start()  # before any looks for files without an owner
        for _ in range(20):
            for gateway in self.gateways:
                gateway.recover()
                gateway.ship()
            self.clock.advance(seconds=2)
            if all(gateway.rests() for gateway in self.gateways):
                break
        else:
            self._broken("the spools do not come to rest", "the end")
        self.clock.advance(days=62)
        with self.database.transaction() as session:
            usage.release(session, self.clock)
        result = invoice_run.run(self.database, self.clock)
        if result.failed:
            self._broken(f"invoices failed: {result.failed}", "the end")
        self.faults.healed = False

    def _heal(self) -> None:
        """No fault any more: the bank comes to rest, and all is compared with what happened."""
        self.faults.healed = True
        wrong = self.bank.rest()
        if wrong:
            self._broken(f"the bank: {wrong}", "the end")
        self._check("the end")
        self.operator.learn()
        found = list(problems(self.witness, self.happened))
        if found:
            self._broken("; ".join(found[:5]), "the end")
        with self.database.read() as session:
            report = reconcile.audit(session)
        if not report.clean or report.pending or report.parked:
            self._broken(f"the audit finds what is not wrong: {report.as_json()}", "the end")

    def _broken(self, what: str, where: str) -> None:
        story = "\n".join(self.log[-30:])
        raise Broken(f"seed {self.seed}, {where}: {what}\n{story}")
