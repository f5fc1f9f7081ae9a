"""Measured points, as a CSV file with the columns of AIConfigurator's samples, against the formulas.

A row that the formulas cannot describe is left out with its reason: prefill and decode on devices of
their own, an unknown model, more ranks than heads, more requests than the cache holds, a time below what
reading the weights alone takes (several tokens a step), or a series that is not one setting.
"""

import csv
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from engine.errors import ConfigError
from engine.planning.closed_loop import times
from engine.planning.devices import device
from engine.planning.known_models import known_shape
from engine.planning.memory import memory_of
from engine.planning.model_shape import ModelShape
from engine.planning.precision import Precision, precision
from engine.planning.step_times import Layout, Serving

_NEEDED = (
    "model_path", "system", "backend", "precision", "mode", "isl", "osl", "batch_size", "tp_size",
    "silicon_ttft_ms", "silicon_tpot_ms",
)  # fmt: skip
_CONCURRENCY = re.compile(r"silicon_concurrency=(\d+)")
_STORED = {"": "bf16", "bf16": "bf16", "fp8": "fp8", "fp4": "fp4", "int4": "int4"}
_FASTEST = 0.95  # of the time to read the weights: what is below made more than a token a step
_FALL = 0.8  # a step with more sequences is never so much shorter


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement; times in seconds."""

    model: str
    serving: Serving
    series: tuple[object, ...]  # what all but the concurrency was
    concurrency: int
    prompt: int
    output: int
    ttft: float
    tpot: float

    @property
    def room(self) -> float:
        """Sequences that the cache holds."""
        return memory_of(self.serving, self.prompt + self.output).sequences


def read(path: Path) -> tuple[list[Point], Counter[str]]:
    """The points that can be judged, and how many rows were left out, by reason. Raises ConfigError for a
    file that is no such table."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path} cannot be read as CSV: {error}") from None
    if not rows:
        raise ConfigError(f"{path} has no rows: it needs a header and one row a measurement")
    missing = [name for name in _NEEDED if name not in rows[0]]
    if missing:
        raise ConfigError(f"{path} lacks the columns {', '.join(missing)}")
    found: list[Point] = []
    left: Counter[str] = Counter()
    for number, row in enumerate(rows, 2):
        try:
            point = _point(row)
        except _LeftOut as reason:
            left[str(reason)] += 1
        except ValueError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from None
        else:
            found.append(point)
    broken = _broken(found)
    left["a series whose times fall with load"] += sum(each.series in broken for each in found)
    return [each for each in found if each.series not in broken], +left


class _LeftOut(Exception):
    """A row is no case of the formulas."""


def _point(row: Mapping[str, str]) -> Point:
    if row["mode"] != "agg":
        raise _LeftOut("prefill and decode on devices of their own")
    shape = known_shape(row["model_path"])
    if shape is None:
        raise _LeftOut(f"unknown model {row['model_path']}")
    try:
        chip = device(row["system"])
    except ConfigError:
        raise _LeftOut(f"unknown device {row['system']}") from None
    layout = _layout(row)
    if shape.query_heads % layout.tensor:
        raise _LeftOut("tensor parallelism that does not divide the heads")
    held = _precision(row["precision"], shape)
    kv = 1.0 if held.name in ("fp8", "fp4") else 2.0
    said = _CONCURRENCY.search(row.get("silicon_data_source") or "")
    concurrency = int(said.group(1)) if said else _whole(row, "batch_size") * layout.data
    point = Point(
        model=shape.name,
        serving=Serving(shape, held, kv, chip, layout, row["backend"]),
        series=(
            shape.name,
            held.name,
            chip.name,
            row["backend"],
            row.get("backend_version"),
            layout,
            row["isl"],
            row["osl"],
        ),
        concurrency=concurrency,
        prompt=_whole(row, "isl"),
        output=_whole(row, "osl"),
        ttft=_seconds(row, "silicon_ttft_ms"),
        tpot=_seconds(row, "silicon_tpot_ms"),
    )
    if point.room < concurrency:
        raise _LeftOut("more requests than the cache holds")
    terms = point.serving.decode_terms(concurrency, point.prompt + point.output / 2)
    if point.tpot < _FASTEST * (terms["weights"] + terms["experts"] + terms["cache"]):
        raise _LeftOut("faster than the weights can be read")
    return point


def _precision(name: str, shape: ModelShape) -> Precision:
    if shape.stored == "mxfp4":
        return precision("mxfp4")
    if name == "int4" and shape.stored == "int4-experts":
        return precision("int4-experts")
    if name not in _STORED:
        raise _LeftOut(f"unknown precision {name}")
    return precision(_STORED[name])


def _layout(row: Mapping[str, str]) -> Layout:
    """The ranks. Some sources write n × n where two axes share the same n devices."""
    tensor, data, pipeline = (
        _whole(row, name, 1) for name in ("tp_size", "attention_dp_size", "pp_size")
    )
    split, whole = (_whole(row, name, 1) for name in ("moe_tp_size", "moe_ep_size"))
    if split > 1 and split == whole and tensor * data == split * whole:
        devices, attention = split, data > 1
    elif tensor > 1 and data > 1:
        devices, attention = max(tensor, data), True
    else:
        devices, attention = tensor * data, data > 1
    return Layout(
        tensor=1 if attention else devices,
        data=devices if attention else 1,
        pipeline=pipeline,
        expert=min(whole, devices),
    )


def _whole(row: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = (row.get(name) or "").strip()
    if text in ("", "0", "0.0") and default is not None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value >= 1 or value != int(value):
        raise ValueError(f"{name} is {text!r}: it must be a whole number of 1 or more")
    return int(value)


def _seconds(row: Mapping[str, str], name: str) -> float:
    text = (row.get(name) or "").strip()
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(f"{name} is {text!r}: it must be milliseconds above 0")
    return value / 1000


def _broken(points: Iterable[Point]) -> set[tuple[object, ...]]:
    """Series in which the same server is clearly faster with more to do."""
    series: dict[tuple[object, ...], dict[int, list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for each in points:
        series[each.series][each.concurrency].append(each.tpot)
    found = set()
    for name, loads in series.items():
        steps = [median(loads[load]) for load in sorted(loads)]
        if any(after < _FALL * before for before, after in pairwise(steps)):
            found.add(name)
    return found


def judge(points: Sequence[Point]) -> dict[str, dict[str, Any]]:
    """Of dense models and of mixtures: the mean absolute error as a share of what was measured (MAPE;
    0.1 is 10 %), its median, and how many points there were."""
    found: dict[str, dict[str, Any]] = {}
    for kind in ("dense", "moe"):
        of_kind = [each for each in points if each.serving.kind == kind]
        errors = [_errors(each) for each in of_kind]
        found[kind] = {
            "tpot_mape": _rounded(fmean, [tpot for tpot, _ in errors]),
            "ttft_mape": _rounded(fmean, [ttft for _, ttft in errors]),
            "tpot_median": _rounded(median, [tpot for tpot, _ in errors]),
            "ttft_median": _rounded(median, [ttft for _, ttft in errors]),
            "points": len(of_kind),
        }
    return found


def _rounded(of: Any, values: list[float]) -> float | None:
    return round(float(of(values)), 4) if values else None


def _errors(point: Point) -> tuple[float, float]:
    found = times(point.serving, point.concurrency, point.prompt, point.output)
    return abs(found.tpot / point.tpot - 1), abs(found.ttft / point.ttft - 1)
