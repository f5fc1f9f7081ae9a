"""One run: a seed's worth of actions and faults, invariants after every step, then everything heals
and the books must be complete and right.
"""

import logging
import random
from dataclasses import dataclass, field
from functools import partial

from sqlalchemy.exc import SQLAlchemyError

from benchmarks.simulation.bank_statements import Statements
from benchmarks.simulation.engine import Engine
from benchmarks.simulation.faults import Crash, Faults, Wire, WorkerFailed
from benchmarks.simulation.gateway import Gateway, Killed, Site
from benchmarks.simulation.operator_acts import TENANTS, ZONES, Operator
from benchmarks.simulation.payment_provider import Bank
from benchmarks.simulation.stage import Stage
from billing.audit import reconcile
from billing.invoicing import invoice_run
from billing.ledger import expiry
from billing.usage import usage
from core.clock import FakeClock
from core.errors import TollhouseError
from core.ids import use_sources
from tests.billing.simulation.books import Happened, problems

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
    " where number is not null group by seller_id having count(*) <> max(number)) gaps",
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
    ("_bank_statement", 3),
    ("_kill", 1),
)
BANKING = (
    ("_wait", 1),
    ("_leave_card", 2),
    ("_tell_bank", 5),
    ("_hear_bank", 5),
    ("_take_back", 4),
    ("_bank_statement", 4),
)


class Broken(AssertionError):
    """An invariant does not hold; the message names the seed and the step."""


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
        self.statements = Statements(self.database, clock, self.faults, TENANTS)
        self.happened.transfers = self.statements.transfers
        self.operator = Operator(
            self.database,
            clock,
            self.faults,
            self.happened,
            self.witness,
            settle=partial(self.stage.join, clock),
        )
        try:
            self.stage.time_passed(clock)
            self.operator.open_business()
            for number in range(self.steps):
                self._step(number, ACTIONS)
            self._bill_all()
            for number in range(self.steps, self.steps + self.steps // 3):
                self._step(number, BANKING)
            self._heal()
        except (SQLAlchemyError, WorkerFailed) as error:
            self._broken(f"no fault explains {error}", self.log[-1])
        finally:
            self.witness.close()
            for gateway in self.gateways:
                gateway.die()
        return dict(self.faults.seen)

    def _step(self, number: int, actions: tuple[tuple[str, int], ...]) -> None:
        chance = self.faults.chance
        weighted = (*actions, ("_rate", self.stage.rates_more))
        name = chance.choice([name for name, weight in weighted for _ in range(weight)])
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

    def _work(self, gateway: Gateway) -> None:
        message = self.broker.take()
        if message is None:
            return
        if message[0] == "rate":
            self._rate(gateway)
        elif message[0] == "invoices":
            self.stage.rate_beside(self.clock)
            invoice_run.run(self.database, self.clock, current=False)
        elif message[0] == "expire":
            with self.database.transaction() as session:
                expiry.expire(session, self.clock.now())
        else:
            with self.database.transaction() as session:
                usage.release(session, self.clock)
        self.broker.acknowledge(message)

    def _rate(self, _: Gateway) -> None:
        most = self.faults.chance.choice([1, 20_000])  # two workers take turns
        self.stage.rate(self.clock, self.faults, most)

    def _wait(self, _: Gateway) -> None:
        self._leap(hours=self.faults.chance.choice([1, 2, 5, 24, 24 * 4, 24 * 20]))

    def _leap(self, **units: float) -> None:
        """No worker rates with the clock of long ago."""
        self.stage.join(self.clock)
        self.clock.advance(**units)
        self.stage.time_passed(self.clock)

    def _month_ends(self, _: Gateway) -> None:
        """Invoices become final while spools and the broker may still hold what belongs on them."""
        self._leap(days=self.faults.chance.choice([20, 33, 62]))
        self.stage.rate_beside(self.clock)
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
        acts = [bank.refund, bank.dispute, bank.credit, bank.wire, bank.void]
        self.faults.chance.choice(acts)()

    def _bank_statement(self, _: Gateway) -> None:
        self.statements.act()

    def _check(self, where: str) -> None:
        (row,) = self.witness.execute(_ALL).fetchall()
        for name, found in zip(INVARIANTS, row, strict=True):
            if found:
                self._broken(f"{name}: {found}", where)

    def _bill_all(self) -> None:
        """Ship, rate and invoice everything without a fault; the bank's are still to come."""
        self.stage.join(self.clock)
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
        self._leap(days=62)
        with self.database.transaction() as session:
            usage.release(session, self.clock)
        self.stage.rate_beside(self.clock)
        result = invoice_run.run(self.database, self.clock)
        if result.failed:
            self._broken(f"invoices failed: {result.failed}", "the end")
        self.faults.healed = False

    def _heal(self) -> None:
        """No fault any more: the bank comes to rest, and all is compared with what happened."""
        self.stage.join(self.clock)
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
