"""The planner against measured points: `python -m benchmarks.planner DIR`, with `measured.csv` in DIR.

Each model's points are predicted by factors that were fitted without any point of that model, and the
shipped factors, which were fitted to all of them, are judged with them. `--fit` writes new ones.
"""

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import lsq_linear

from benchmarks.report import figure, progress
from engine.planning import measured, step_times
from engine.planning.measured import Point
from engine.planning.step_times import SERVERS

Floats = NDArray[np.float64]
_ROUNDS = 20
_EVEN = 0.05  # relative errors below this are weighed alike: a mean, not a sum of squares
_TIED = 3.0  # how strongly servers are held together
# Factors that physics bounds: nothing is read faster than the bandwidth.
_BOUNDS = {
    "weights": (1.0, 4.0), "experts": (0.9, 3.0), "cache": (1.0, 2.5), "scores": (1.0, 3.0),
    "products_bf16": (1.05, math.inf), "products_fp8": (1.05, math.inf), "products_fp4": (1.05, math.inf),
}  # fmt: skip
_BY_SERVER = ("layers",)
_STEP = ("weights", "experts", "cache", "sync", "link", "layers", "rows", "index", "spread")
_CHUNK = ("products_bf16", "products_fp8", "products_fp4", "scores", "prompt_link", "prompt_layers")
_FIRST = ("first_own", "first_others", "first_step", "first_fixed")
# Of what is multiplied in a decode step, which the points hardly show: 60 % of the peak.
_PRODUCTS = 1 / 0.6


def step_terms(point: Point) -> dict[str, float]:
    """Of the time of an output token."""
    serving, rows = point.serving, float(point.concurrency)
    found = serving.decode_terms(rows, point.prompt + point.output / 2)
    del found["products"]
    share = rows / point.output
    chunk = {name: each * share for name, each in serving.prompt_terms(point.prompt).items()}
    return found | chunk


def first_terms(point: Point, factors: Mapping[str, float]) -> dict[str, float]:
    """Of the time to the first token."""
    serving = point.serving
    own = sum(serving.prompt_terms(point.prompt).values())
    terms = serving.decode_terms(point.concurrency, point.prompt + point.output / 2)
    step = step_times.total({name: each * factors.get(name, 0) for name, each in terms.items()})
    return {
        "first_own": own,
        "first_others": own * point.concurrency,
        "first_step": step,
        "first_fixed": 1e-3,
    }


def fit(points: Sequence[Point]) -> dict[str, Any]:
    """Factors by name, or by name and server, in the form of `factors.json`."""
    found = _solve(
        [step_terms(each) for each in points], points, [each.tpot for each in points],
        (*_STEP, *_CHUNK), _BY_SERVER,
    )  # fmt: skip
    found["products"] = round(_PRODUCTS, 4)
    flat = [_flat(found, each.serving.server) for each in points]
    first = [first_terms(each, own) for each, own in zip(points, flat, strict=True)]
    return found | _solve(first, points, [each.ttft for each in points], _FIRST, _FIRST)


def _flat(found: Mapping[str, Any], server: str) -> dict[str, float]:
    return {
        name: value.get(server, fmean(value.values())) if isinstance(value, dict) else value
        for name, value in found.items()
    }


def _solve(
    terms: Sequence[Mapping[str, float]],
    points: Sequence[Point],
    seconds: Sequence[float],
    names: Sequence[str],
    by_server: Sequence[str],
) -> dict[str, Any]:
    """Least absolute relative errors, by least squares that are weighed again and again."""
    columns = [
        (name, server) for name in names for server in (SERVERS if name in by_server else ("",))
    ]
    table = np.array(
        [
            [
                term.get(name, 0.0) * (server in ("", point.serving.server))
                for name, server in columns
            ]
            for term, point in zip(terms, points, strict=True)
        ]
    )
    wanted = np.array(seconds)
    ties = _ties(columns, table / wanted[:, None], len(points))
    bounds = [_BOUNDS.get(name, (0.0, math.inf)) for name, _ in columns]
    low, high = (np.array([pair[side] for pair in bounds]) for side in (0, 1))
    weights = 1 / wanted
    solved = np.zeros(len(columns))
    for _ in range(_ROUNDS):
        rows = np.vstack([table * weights[:, None], ties])
        right = np.concatenate([wanted * weights, np.zeros(len(ties))])
        solved = lsq_linear(rows, right, (low, high)).x
        off = np.abs(table @ solved - wanted) / wanted
        weights = 1 / wanted / np.sqrt(np.maximum(off, _EVEN))
    found: dict[str, Any] = {}
    for (name, server), value in zip(columns, solved.tolist(), strict=True):
        if server:
            found.setdefault(name, {})[server] = round(value, 4)
        else:
            found[name] = round(value, 4)
    return found


def _ties(columns: Sequence[tuple[str, str]], shares: Floats, points: int) -> Floats:
    """Rows that hold the factors of servers to their mean, by what they weigh in the times."""
    found = []
    for wanted in dict.fromkeys(name for name, server in columns if server):
        places = [place for place, (name, _) in enumerate(columns) if name == wanted]
        weight = float(np.median(shares[:, places].sum(1))) * math.sqrt(_TIED * points)
        for own in places:
            row = np.zeros(len(columns))
            row[places] = -1 / len(places)
            row[own] += 1
            found.append(row * weight)
    return np.array(found).reshape(-1, len(columns))


def errors(points: Sequence[Point], found: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Relative errors of the time of an output token and of the first."""
    result = []
    for each in points:
        factors = _flat(found, each.serving.server)
        step = sum(factors.get(name, 0.0) * value for name, value in step_terms(each).items())
        first = first_terms(each, factors)
        begun = sum(factors[name] * value for name, value in first.items())
        result.append((abs(step / each.tpot - 1), abs(begun / each.ttft - 1)))
    return result


def by_model(points: Sequence[Point]) -> dict[str, list[tuple[float, float]]]:
    """Errors of each model's points by factors that were fitted to the others."""
    found = {}
    for model in sorted({_family(each) for each in points}):
        rest = [each for each in points if _family(each) != model]
        found[model] = errors([each for each in points if _family(each) == model], fit(rest))
        progress(f"  {model}: {fmean(step for step, _ in found[model]):.3f}")
    return found


def _family(point: Point) -> str:
    """DeepSeek's R1 and V3 are one model with other weights."""
    return "deepseek" if point.model.startswith("deepseek") else point.model


_BARS = {("dense", "tpot"): (0.15, 0.09), ("moe", "tpot"): (0.25, 0.15)}
_FIRST_BAR = (0.35, 0.20)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--fit", action="store_true", help="write new factors to ship")
    options = parser.parse_args(argv)
    points, left = measured.read(options.directory / "measured.csv")
    progress(f"{len(points)} points; left out: {dict(left)}")
    if options.fit:
        _write(points)
    shipped = measured.judge(points)
    for kind in ("dense", "moe"):
        of_kind = [each for each in points if each.serving.kind == kind]
        apart = by_model(of_kind)
        for place, what in enumerate(("tpot", "ttft")):
            values = [pair[place] for each in apart.values() for pair in each]
            at_least, aim = _BARS[kind, what] if what == "tpot" else _FIRST_BAR
            settings = {
                "split": "each model by factors fitted to the others",
                "points": len(of_kind),
                "median": round(median(values), 4),
                "by_model": {
                    model: round(fmean(pair[place] for pair in each), 4)
                    for model, each in apart.items()
                },
                "left_out": dict(left),
                "shipped_factors": shipped[kind][f"{what}_mape"],
            }
            figure(
                f"planner.{kind}_{what}_mape", fmean(values), "share", False,
                at_least=at_least, aim=aim, settings=settings,
            )  # fmt: skip


def _write(points: Sequence[Point]) -> None:
    found: dict[str, Any] = {
        "fit": {
            "date": datetime.now(UTC).date().isoformat(),
            "points": len(points),
            "models": sorted({_family(each) for each in points}),
            "devices": sorted({each.serving.device.name for each in points}),
        }
    }
    for kind in ("dense", "moe"):
        found[kind] = fit([each for each in points if each.serving.kind == kind])
    path = Path(step_times.__file__).with_name("factors.json")
    path.write_text(json.dumps(found, indent=1) + "\n")
    progress(f"wrote {path.name}")


if __name__ == "__main__":
    main()
