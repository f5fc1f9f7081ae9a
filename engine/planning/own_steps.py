"""Step times of a running engine, from the table that it keeps of its own steps.

    step = a + b·rows + c·positions + d·tokens + e·tokens·before

fitted to the means of the table's cells, each weighed by its time. No part is negative.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.errors import ConfigError
from engine.planning.simulation import StepSeconds

_LINE = re.compile(r"tollhouse_engine_step_cell_(\w+?)_total\{([^}]*)\} (\S+)")
_GAUGE = re.compile(r"^tollhouse_engine_(kv_usage|blocks_free)\{[^}]*\} (\S+)", re.MULTILINE)
_NAMES = ("steps", "seconds", "rows", "positions", "tokens", "before")
_FEWEST = 3  # cells: below that nothing is known of how a step grows
_ROUNDS = 400


@dataclass(frozen=True, slots=True)
class Cell:
    """Means of a step: sequences that decode, positions before them in all, prompt tokens, and positions
    before these; `weight` is the seconds that the cell stands for."""

    seconds: float
    rows: float
    positions: float
    tokens: float
    before: float
    weight: float


@dataclass(frozen=True, slots=True)
class OwnSteps:
    """Fitted seconds: of a step, a row, a position, a prompt token, and a position before that."""

    factors: tuple[float, float, float, float, float]
    steps: int
    error: float  # mean share by which a cell's mean is missed, weighed by time
    blocks: int  # of the engine's pool; 0: not known

    def seconds(self) -> StepSeconds:
        fixed, row, position, token, pair = self.factors

        def _seconds(rows: float, context: float, tokens: float, before: float) -> float:
            later = rows * (row + context * position)
            return fixed + later + tokens * (token + pair * (before + tokens / 2))

        return _seconds


def read(metrics: str) -> OwnSteps:
    """From the text of an engine's `/metrics`. Raises ConfigError where it tells too little."""
    sums: dict[str, dict[str, float]] = {}
    for name, labels, value in _LINE.findall(metrics):
        sums.setdefault(labels, {})[name] = float(value)
    cells = []
    steps = 0
    for each in sums.values():
        if set(_NAMES) <= set(each) and each["steps"] > 0 and each["seconds"] > 0:
            mean = {name: each[name] / each["steps"] for name in _NAMES}
            steps += int(each["steps"])
            cells.append(
                Cell(mean["seconds"], mean["rows"], mean["positions"], mean["tokens"], mean["before"],
                     each["seconds"])
            )  # fmt: skip
    if len(cells) < _FEWEST:
        raise ConfigError(
            f"the engine's table has {len(cells)} kinds of step, and a plan needs {_FEWEST}: send it "
            "requests of several lengths, several at once, and ask again"
        )
    gauges = {name: float(value) for name, value in _GAUGE.findall(metrics)}
    free = 1 - gauges.get("kv_usage", 0.0)
    blocks = round(gauges.get("blocks_free", 0.0) / free) if free > 0 else 0
    return fitted(cells, steps, blocks)


def fitted(cells: Sequence[Cell], steps: int, blocks: int = 0) -> OwnSteps:
    table = np.array(
        [[1, c.rows, c.positions, c.tokens, c.tokens * (c.before + c.tokens / 2)] for c in cells]
    )
    wanted = np.array([each.seconds for each in cells])
    weights = np.sqrt(np.array([each.weight for each in cells])) / wanted
    scale = np.maximum(np.abs(table).max(0), 1e-30)
    rows, right = table / scale * weights[:, None], wanted * weights
    solved = np.zeros(table.shape[1])
    # Coordinate descent for least squares without negative parts (Franc, Hlaváč, Navara 2005).
    products, target = rows.T @ rows, rows.T @ right
    for _ in range(_ROUNDS):
        for place in range(len(solved)):
            if products[place, place] > 0:
                slope = products[place] @ solved - target[place]
                solved[place] = max(0.0, solved[place] - slope / products[place, place])
    factors = solved / scale
    missed = np.abs(table @ factors / wanted - 1)
    weight = np.array([each.weight for each in cells])
    error = float((missed * weight).sum() / weight.sum())
    fixed, row, position, token, pair = (float(each) for each in factors)
    return OwnSteps((fixed, row, position, token, pair), steps, error, blocks)
