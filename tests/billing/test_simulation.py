"""Gateways, spools, shipper, rating, ledger, invoices and payments on a fake clock, with faults that
a seed decides. `benchmarks/simulate.py` runs many more seeds.
"""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.simulate import run_seeds
from benchmarks.simulation.world import Broken, Stage, World
from billing import usage
from billing.payments import posting

STEPS = 24
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_no_seed_breaks_an_invariant(first: int, migrated_sqlite: Path) -> None:
    found = run_seeds(range(first, first + 50), migrated_sqlite, STEPS)
    assert [problem for _, problem in found if problem] == []
    assert sum(sum(faults.values()) for faults, _ in found) > 100, "hardly a fault struck"


def test_a_planted_fault_is_found_and_replays_exactly(
    tmp_path: Path, migrated_sqlite: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = usage._store

    def _loses_the_last(session: Any, rows: list[Any], now: Any) -> int:
        return store(session, rows[:-1] if len(rows) > 4 else rows, now)

    monkeypatch.setattr(usage, "_store", _loses_the_last)
    stage = Stage(tmp_path, migrated_sqlite)
    said = []
    for _ in range(2):
        with pytest.raises(Broken, match=r"seed 3, .*lost") as caught:
            World(3, stage, STEPS).run()
        said.append(str(caught.value))
    stage.database.close()
    assert said[0] == said[1]


def test_a_payment_that_is_not_booked_is_found(
    migrated_sqlite: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(posting, "_settle", lambda *_: None)
    found = run_seeds(range(12), migrated_sqlite, STEPS)
    assert any("is not in the ledger" in problem for _, problem in found)
