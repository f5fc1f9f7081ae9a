"""An engine's table of its own steps, and step times that are fitted to it."""

import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.loop import Engine
from engine.planning.own_steps import read
from engine.planning.simulation import Load, Simulation, measured
from engine.scheduling.step_table import MOST_CELLS, StepTable

FACTORS = (0.004, 2e-4, 3e-8, 5e-5, 0.0)


def _seconds(rows: float, context: float, tokens: float, before: float) -> float:
    fixed, row, position, token, _ = FACTORS
    return fixed + rows * (row + context * position) + token * tokens


def _config() -> EngineConfig:
    return EngineConfig(
        model="fake", num_blocks=800, max_running=32, max_batch_tokens=512, prefix_cache=False,
        speculation="off", max_waiting=10_000, max_waiting_per_tenant=10_000, enable_lora=False,
    )  # fmt: skip


def _engine_after(load: Load) -> Engine:
    simulation = Simulation(_config(), _seconds, leaps=False)
    simulation.run(load)
    return simulation.engine


def test_the_table_has_every_step_and_its_time() -> None:
    simulation = Simulation(_config(), _seconds, leaps=False)
    receipts = simulation.run(Load(rate=10, requests=40, prompt=60, output=20))
    cells = simulation.engine.step_table.cells.values()
    assert sum(cell.steps for cell in cells) == simulation.steps
    assert sum(cell.tokens for cell in cells) == sum(each.prompt for each in receipts)
    assert sum(cell.rows for cell in cells) == sum(each.generated - 1 for each in receipts)


def test_factors_are_found_again_from_the_metrics_page() -> None:
    engine = _engine_after(Load(rate=12, requests=150, prompt=200, output=40))
    own = read(engine.metrics_text())
    assert own.error < 0.05
    assert own.blocks == pytest.approx(800, abs=1)
    again = own.seconds()
    for rows, context, tokens in ((8, 200, 0), (1, 100, 0), (8, 200, 200), (0, 0, 300)):
        assert again(rows, context, tokens, 0) == pytest.approx(
            _seconds(rows, context, tokens, 0), rel=0.15
        )


def test_another_load_is_predicted() -> None:
    own = read(_engine_after(Load(rate=12, requests=150, prompt=200, output=40)).metrics_text())
    load = Load(rate=20, requests=150, prompt=120, output=60, seed=7)
    found = []
    for seconds in (_seconds, own.seconds()):
        simulation = Simulation(_config(), seconds)
        found.append(measured(simulation.run(load), simulation.clock.now))
    real, planned = found
    assert planned.tpot_mean == pytest.approx(real.tpot_mean, rel=0.07)
    assert planned.ttft_mean == pytest.approx(real.ttft_mean, rel=0.15)
    assert planned.output_rate == pytest.approx(real.output_rate, rel=0.07)


def test_an_engine_that_served_nothing_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match="send it requests"):
        read(Engine(_config(), Simulation(_config(), _seconds).engine._runner).metrics_text())


def test_the_table_is_bounded() -> None:
    table = StepTable()
    table.cells = {(number, 0, 0): object() for number in range(100, 100 + MOST_CELLS)}  # type: ignore[misc]
    table.record([], 1.0)
    assert len(table.cells) == MOST_CELLS
