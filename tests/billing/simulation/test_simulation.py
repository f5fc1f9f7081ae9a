"""Gateways, spools, shipper, rating, ledger, invoices and payments on a fake clock, with faults that
a seed decides. `benchmarks/simulate.py` runs many more seeds.
"""

import re
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import text

from benchmarks.simulate import Place, run_seeds
from benchmarks.simulation import world
from benchmarks.simulation.faults import WorkerFailed
from benchmarks.simulation.rating_processes import RATED, Order, RatingProcess
from benchmarks.simulation.stage import SqliteStage, Stage
from benchmarks.simulation.world import Broken, World
from billing import periods
from billing.accounts import accounts
from billing.bank import wires
from billing.invoicing import child_invoices, fee_lines, invoice_lines
from billing.payments import posting
from billing.pricing import pricing
from billing.rating import tiers
from billing.subscriptions import subscriptions
from billing.taxes import tax_rates
from billing.usage import usage
from core.database import Database
from core.events import UsageKind
from gateway.metering import meter, recovery
from tests.conftest import POSTGRES

STEPS = 24
pytestmark = pytest.mark.proof


@pytest.mark.parametrize("first", range(0, 40, 20))
def test_no_seed_breaks_an_invariant(first: int, migrated_sqlite: Path) -> None:
    found = run_seeds(range(first, first + 20), Place(str(migrated_sqlite)), STEPS)
    assert [problem for _, problem in found if problem] == []
    assert sum(sum(faults.values()) for faults, _ in found) > 40, "hardly a fault struck"


def test_no_seed_breaks_an_invariant_on_postgresql_with_two_rating_processes(
    migrated_postgres: str,
) -> None:
    found = run_seeds(range(20, 22), Place(migrated_postgres, POSTGRES, workers=2), STEPS)
    assert [problem for _, problem in found if problem] == []
    assert all(faults for faults, _ in found), "no fault struck"


def test_a_rating_process_that_dies_by_itself_is_no_fault_of_the_seed(
    postgres_database: Database,
) -> None:
    """Whatever a worker raises is told, and a death that nobody asked for is none of the faults."""
    process = RatingProcess(postgres_database.url)
    process.begin(Order(datetime(2026, 1, 1, tzinfo=UTC), 1, seed=0, faulty=False))
    assert process.finish() == RATED
    with postgres_database.transaction() as session:
        session.execute(text("drop table rating_shards cascade"))
        session.execute(
            text("insert into usage_batches (recorded_at, events, shard) values (now(), 0, 0)")
        )
    process.begin(Order(datetime(2026, 1, 1, tzinfo=UTC), 1, seed=0, faulty=False))
    with pytest.raises(WorkerFailed, match="rating_shards"):
        process.finish()
    process.end()


def test_a_planted_fault_is_found_and_replays_exactly(
    tmp_path: Path, migrated_sqlite: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = usage._store

    def _loses_the_last(session: Any, rows: list[Any], now: Any) -> int:
        return store(session, rows[:-1] if len(rows) > 4 else rows, now)

    monkeypatch.setattr(usage, "_store", _loses_the_last)
    stage = SqliteStage(tmp_path, migrated_sqlite)
    seed, said = _first_broken(stage, "lost")
    with pytest.raises(Broken) as caught:
        World(seed, stage, STEPS).run()
    stage.close()
    assert str(caught.value) == said


def _first_broken(stage: Stage, words: str, first: int = 0) -> tuple[int, str]:
    for seed in range(first, first + 60):
        try:
            World(seed, stage, STEPS).run()
        except Broken as error:
            if re.search(words, str(error)):
                return seed, str(error)
    pytest.fail(f"no seed of 60 says {words!r}")


def _acknowledged_at_once(self: Any, receipt: Any) -> None:
    """Before the record is durable, so that a crash in between finds no receipt."""
    self._acknowledge(*self.opened.engine_request_ids)


async def _settles_as_zero(self: Any, opened: Any, counts_left: Any) -> Any:
    return recovery.event_of_receipt(opened, None, self._clock.now()), []


def _tiers_of_each_version_alone(component: Any, used: Any) -> int:
    return sum(version.part(component, 0, quantity, quantity) for version, quantity in used)


def _rates_of_today(self: Any, region: str, at: Any) -> Any:
    return _rates_in_force(self, region, at.replace(year=at.year + 5))


def _rounded_down(units: int, currency: str) -> tuple[int, int]:
    minor = 10**10
    return units // minor, units % minor


def _whole_fees(self: Any, units: int) -> int:
    return units


def _months_in_utc(at: Any, anchor_day: int, timezone: str) -> Any:
    return _period_around(at, anchor_day, "UTC")


def _without_lines(*_: Any) -> list[Any]:
    return []


def _forgotten(*_: Any) -> None:
    return None


def _one_unit(held: Any, add_ons: Any) -> Any:
    return [
        term if not term.holding else replace(term, fees=(term.fees[0]._replace(units=1),))
        for term in _terms(held, add_ons)
    ]


def _booked_twice(session: Any, line: Any, clerk: Any) -> None:
    _book(session, line, clerk)
    _book(session, line, clerk)


_rates_in_force = tax_rates.RateTable._in_force
_period_around = periods.period_around
_terms, _book = fee_lines.terms, wires._book
# Each breaks one rule of the product; the words are of what the reference says.
FAULTS = {
    "receipt forgotten too early": (
        meter.Meter,
        "_release",
        _acknowledged_at_once,
        "lost|not one of",
    ),
    "recovery without receipts": (recovery.Recovery, "_settled", _settles_as_zero, "not one of"),
    "tiers by version": (tiers, "total_of", _tiers_of_each_version_alone, "by hand"),
    "tax of another time": (tax_rates.RateTable, "_in_force", _rates_of_today, "by hand"),
    "rounded down": (invoice_lines, "round_to_minor", _rounded_down, "is rounded to"),
    "no proration": (subscriptions.Segment, "share", _whole_fees, "by hand"),
    "no time zones": (accounts, "period_around", _months_in_utc, "by hand"),
    "images without a price": (pricing, "UNIT_OF", {UsageKind.AUDIO: "audio_second"}, "usage in"),
    "no mark-up": (child_invoices, "markup_lines", _without_lines, "the mark-up is"),
    "the parent pays nothing": (child_invoices, "transfer_lines", _without_lines, "to the parent"),
    "passed on twice": (child_invoices, "mark_billed", _forgotten, "of children"),
    "one unit of an add-on": (fee_lines, "terms", _one_unit, "add-ons are"),
    "a wire booked twice": (wires, "_book", _booked_twice, "Transfer.* is .2, 0. in 1 lines"),
    "a wire not booked": (wires, "_book", _forgotten, "Transfer.* is .0, 0. in 1 lines"),
}
# Faults that few seeds reach: a seed a little before the first of them.
FIRST = {
    "receipt forgotten too early": 155,
    "no time zones": 420,
    "one unit of an add-on": 48,
    "a wire not booked": 24,
    "images without a price": 20,
    "a wire booked twice": 14,
    "tax of another time": 10,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_reference_finds_each_broken_rule(
    fault: str, tmp_path: Path, migrated_sqlite: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, broken, words = FAULTS[fault]
    monkeypatch.setattr(owner, name, broken)
    monkeypatch.setattr(world.reconcile, "audit", _says_clean)
    stage = SqliteStage(tmp_path, migrated_sqlite)
    _first_broken(stage, words, FIRST.get(fault, 0))
    stage.close()


def _says_clean(session: Any) -> Any:
    return SimpleNamespace(clean=True, pending=0, parked=0)


def test_a_payment_that_is_not_booked_is_found(
    migrated_sqlite: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(posting, "_settle", lambda *_: None)
    found = run_seeds(range(12), Place(str(migrated_sqlite)), STEPS)
    assert any("is not in the ledger" in problem for _, problem in found)
