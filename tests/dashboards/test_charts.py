"""Charts: well-formed, accessible, safe to embed, and true to their numbers."""

import re
import xml.etree.ElementTree as ET
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from billing.usage.day_range import Range
from dashboards.charts import PLOT_H, TOP, Series, blocks, lines, meter, stacked_bars
from dashboards.pages.costs import amount_axis, forecast
from dashboards.scales import axis_for, grouped, short

values = st.integers(0, 10**12)


def _svg(text: str) -> ET.Element:
    return ET.fromstring(f"<div>{text}</div>")


@given(st.lists(st.tuples(values, values), min_size=1, max_size=40))
def test_the_bars_are_as_high_as_their_numbers(rows: list[tuple[int, int]]) -> None:
    names = [f"d{i}" for i in range(len(rows))]
    series = [Series("in", [a for a, _ in rows]), Series("out", [b for _, b in rows])]
    drawn = _svg(stacked_bars("Tokens", names, series))
    top = axis_for(max(a + b for a, b in rows)).top
    height = sum(
        float(r.get("height", 0)) for r in drawn.iter("rect") if r.find("title") is not None
    )
    assert height == pytest.approx(sum(a + b for a, b in rows) / top * PLOT_H, abs=len(rows) * 0.2)


@given(st.floats(1e-9, 1e15))
def test_an_axis_reaches_its_highest_value_and_not_far_past(highest: float) -> None:
    axis = axis_for(highest)
    assert axis.ticks[0] == 0
    assert axis.top >= highest * 0.999999
    assert axis.ticks[-2] < highest * 1.000001
    assert 2 <= len(axis.ticks) <= 6


def test_names_cannot_break_out() -> None:
    evil = '"><script>alert(1)</script>'
    for text in (
        stacked_bars(evil, [evil], [Series(evil, [1])]),
        lines(evil, [evil], [Series(evil, [1])]),
    ):
        assert "<script" not in text
        assert "style=" not in text
        _svg(text)


def test_a_chart_says_what_it_is_without_being_seen() -> None:
    drawn = _svg(lines("Spend", ["Mon", "Tue"], [Series("a", [1, 2]), Series("b", [0, 0])]))
    svg = drawn.find("svg")
    assert svg is not None
    assert svg.get("role") == "img"
    assert "Spend" in (svg.get("aria-label") or "")
    assert drawn.find("ul") is not None


def test_nothing_to_show_is_still_a_chart() -> None:
    for text in (stacked_bars("Empty", [], []), lines("Empty", [], [])):
        drawn = _svg(text).find("svg")
        assert drawn is not None and "Empty" in (drawn.get("aria-label") or "")


def test_a_series_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="a has"):
        stacked_bars("x", ["p", "q"], [Series("a", [1])])


signed = st.integers(-(10**12), 10**12)


@given(st.lists(st.tuples(signed, signed), min_size=1, max_size=12))
def test_a_refund_is_drawn_below_zero_as_deep_as_it_is(rows: list[tuple[int, int]]) -> None:
    names = [f"d{i}" for i in range(len(rows))]
    series = [Series("in", [a for a, _ in rows]), Series("out", [b for _, b in rows])]
    drawn = _svg(stacked_bars("Spend", names, series))
    highest = max(sum(v for v in row if v > 0) for row in rows)
    lowest = min(sum(v for v in row if v < 0) for row in rows)
    axis = axis_for(highest, lowest)
    assert axis.low <= lowest <= highest <= axis.top and 0 in axis.ticks
    unit = PLOT_H / (axis.top - axis.low)
    zero = TOP + axis.top * unit
    bars = [r for r in drawn.iter("rect") if r.find("title") is not None]
    above = sum(float(r.get("height", 0)) for r in bars if float(r.get("y", 0)) < zero - 0.06)
    total = sum(float(r.get("height", 0)) for r in bars)
    slack = len(rows) * 0.5
    assert above == pytest.approx(sum(v for row in rows for v in row if v > 0) * unit, abs=slack)
    assert total == pytest.approx(sum(abs(v) for row in rows for v in row) * unit, abs=slack)
    _svg(lines("Spend", names, series))


def test_a_chart_of_nothing_says_zero_and_no_fraction() -> None:
    for drawn in (
        stacked_bars("Spend", ["a"], [Series("s", [0])], amount_axis),
        lines("Spend", ["a"], [Series("s", [0])], amount_axis),
    ):
        ticks = [each.text for each in _svg(drawn).iter("text") if each.get("class") == "tick"]
        assert ticks == ["0"]


def test_a_single_series_is_named_unless_the_title_does() -> None:
    one = [Series("ann-client", [1])]
    for drawn in (stacked_bars("Requests", ["a"], one), lines("Requests", ["a"], one)):
        assert "ann-client</li>" in drawn
    assert "<li>" not in lines("Spend, cumulative", ["a"], [Series("spend", [1])])


def test_a_correction_is_not_extrapolated() -> None:
    """0.04 used and 0.60 given back on the second of thirty days."""
    now = datetime(2026, 11, 3, tzinfo=UTC)
    cents = 10**10
    found = forecast(-56 * cents, -60 * cents, Range.month_of(now, "UTC"), now)
    assert found == 4 * cents * 15 - 60 * cents


def test_a_meter_never_runs_over() -> None:
    for used, limit, state in ((1, 10, "under"), (9, 10, "near"), (30, 10, "over"), (0, 0, "over")):
        drawn = _svg(meter("Requests", used, limit))
        svg = drawn.find("svg")
        assert svg is not None and state in (svg.get("class") or "")
        assert max(float(r.get("width", 0)) for r in drawn.iter("rect")) <= 200


def test_numbers_read_well() -> None:
    assert short(1_234_567) == "1.23 M"
    assert short(950) == "950"
    assert [short(each) for each in (0.00005, 0.0, 2.5)] == ["0.00005", "0", "2.5"]
    assert grouped(1234567) == "1\u202f234\u202f567"


def test_blocks_show_the_hits_first_and_stay_few() -> None:
    few = blocks("Cache", 3, 5)
    assert re.findall(r'rect class="(\w+)"', few) == ["hit"] * 3 + ["new"] * 2
    many = re.findall(r'rect class="(\w+)"', blocks("Cache", 250, 1000))
    assert len(many) == 112  # nine blocks to a cell
    assert many == ["hit"] * 27 + ["part"] + ["new"] * 84
    assert 'aria-label="&lt;b&gt;"' in blocks("<b>", 0, 1)
