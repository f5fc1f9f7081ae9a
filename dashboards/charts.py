"""Accessible SVG charts: stacked bars, lines and meters. Each page repeats the numbers in a table.

Series differ by hatch or dash as well as by colour. Without inline styles and scripts, the charts work
under a strict Content-Security-Policy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from dashboards.scales import Axis, Label, Number, axis_for, short

WIDTH, HEIGHT = 720, 240
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 12, 34
PLOT_W, PLOT_H = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
_WIDEST = 56.0  # of a bar
STYLES = 8  # series classes in the stylesheet; further series are combined as "Other"


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    values: Sequence[Number]


def stacked_bars(
    title: str,
    labels: Sequence[str],
    series: Sequence[Series],
    label: Label = short,
    value: Label | None = None,
) -> str:
    """One bar per label with the series stacked: up from zero, and credits and refunds down from it.
    `label` writes the axis, `value` what the pointer shows, with its unit."""
    _check(labels, series)
    said = value or label
    columns = [[each.values[i] for each in series] for i in range(len(labels))]
    highest = max((sum(v for v in column if v > 0) for column in columns), default=0)
    lowest = min((sum(v for v in column if v < 0) for column in columns), default=0)
    axis = axis_for(highest, lowest)
    zero = TOP + PLOT_H - axis.position(0, PLOT_H)
    slot = PLOT_W / max(len(labels), 1)
    bar = min(_WIDEST, max(1.0, slot * 0.72))
    marks: list[str] = []
    for index, name in enumerate(labels):
        x = LEFT + index * slot + (slot - bar) / 2
        up = down = zero
        for number, each in enumerate(series):
            height = abs(axis.position(each.values[index], PLOT_H) - axis.position(0, PLOT_H))
            if height <= 0:
                continue
            rises = each.values[index] > 0
            up, down = (up - height, down) if rises else (up, down + height)
            edge = up if rises else down - height
            label_text = f"{name}, {each.name}: {said(each.values[index])}"
            marks.append(
                f'<rect class="s{number % STYLES}" x="{x:.1f}" y="{edge:.1f}" width="{bar:.1f}" '
                f'height="{height:.1f}"><title>{escape(label_text)}</title></rect>'
            )
    return _frame(title, series, axis, labels, label, marks)


def lines(
    title: str,
    labels: Sequence[str],
    series: Sequence[Series],
    label: Label = short,
    value: Label | None = None,
) -> str:
    """One line per series, with a dot at each value."""
    _check(labels, series)
    said = value or label
    every = [v for each in series for v in each.values]
    axis = axis_for(max(every, default=0), min(every, default=0))
    step = PLOT_W / max(len(labels), 1)
    marks: list[str] = []
    for number, each in enumerate(series):
        points = [
            (LEFT + (i + 0.5) * step, TOP + PLOT_H - axis.position(number_at, PLOT_H))
            for i, number_at in enumerate(each.values)
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        marks.append(f'<polyline class="l{number % STYLES}" points="{path}"/>')
        for (x, y), name, number_at in zip(points, labels, each.values, strict=True):
            label_text = f"{name}, {each.name}: {said(number_at)}"
            marks.append(
                f'<circle class="s{number % STYLES}" cx="{x:.1f}" cy="{y:.1f}" r="2.5">'
                f"<title>{escape(label_text)}</title></circle>"
            )
    return _frame(title, series, axis, labels, label, marks)


def meter(title: str, used: Number, limit: Number) -> str:
    """The used share of a limit. At or above the limit the bar is full and marked."""
    share = 0.0 if limit <= 0 else min(1.0, float(used) / float(limit))
    state = "over" if used >= limit else "near" if share >= 0.8 else "under"
    label_text = f"{title}: {short(used)} of {short(limit)}"
    return (
        f'<svg class="meter {state}" viewBox="0 0 200 10" role="img" aria-label="{escape(label_text)}" '
        'preserveAspectRatio="none"><rect class="track" width="200" height="10" rx="3"/>'
        f'<rect class="fill" width="{200 * share:.1f}" height="10" rx="3"/></svg>'
    )


def timeline(title: str, steps: Sequence[tuple[str, int]]) -> str:
    """Consecutive steps in milliseconds as one bar, as wide as they are long."""
    whole = sum(ms for _, ms in steps) or 1
    x, marks = 0.0, []
    for number, (name, ms) in enumerate(steps):
        width = ms / whole * WIDTH
        marks.append(
            f'<rect class="s{number % STYLES}" x="{x:.1f}" width="{width:.1f}" height="24">'
            f"<title>{escape(f'{name}: {ms} ms')}</title></rect>"
        )
        x += width
    said = ", ".join(f"{name} {ms} ms" for name, ms in steps)
    return (
        f'<svg class="timeline" viewBox="0 0 {WIDTH} 24" role="img" preserveAspectRatio="none" '
        f'aria-label="{escape(f"{title}: {said}")}">{"".join(marks)}</svg>'
        f"{legend([Series(f'{name}, {ms} ms', []) for name, ms in steps])}"
    )


def blocks(title: str, hits: int, total: int) -> str:
    """A prompt's blocks in order, the leading `hits` filled; long prompts have several to a cell."""
    each = -(-total // _CELLS) or 1
    count = -(-total // each)
    width = WIDTH / max(1, count)
    cells = "".join(
        f'<rect class="{"hit" if (cell + 1) * each <= hits else "part" if cell * each < hits else "new"}"'
        f' x="{cell * width:.1f}" width="{max(1.0, width - 1.5):.1f}" height="14" rx="1.5"/>'
        for cell in range(count)
    )
    return (
        f'<svg class="blocks" viewBox="0 0 {WIDTH} 14" role="img" preserveAspectRatio="none" '
        f'aria-label="{escape(title)}">{cells}</svg>'
    )


_CELLS = 120


def legend(series: Sequence[Series]) -> str:
    items = "".join(
        f'<li><svg class="key" viewBox="0 0 14 14" aria-hidden="true">'
        f'<rect class="s{number % STYLES}" width="14" height="14"/></svg>{escape(each.name)}</li>'
        for number, each in enumerate(series)
    )
    return f'<ul class="legend">{items}</ul>'


def _frame(
    title: str,
    series: Sequence[Series],
    axis: Axis,
    labels: Sequence[str],
    label: Label,
    marks: Sequence[str],
) -> str:
    described = (
        f"{title}. {len(labels)} points from {labels[0]} to {labels[-1]}." if labels else title
    )
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'preserveAspectRatio="xMinYMid meet" '
        f'aria-label="{escape(described)} The table below shows the numbers.">'
        f"{_grid(axis, label)}{''.join(marks)}{_names(labels)}</svg>"
        f"{'' if _said(title, series) else legend(series)}"
    )


def _said(title: str, series: Sequence[Series]) -> bool:
    """Whether the title names the only series already, as "Spend" does "spend"."""
    return not series or (len(series) == 1 and series[0].name.lower() in title.lower())


def _grid(axis: Axis, label: Label) -> str:
    rows = []
    for tick in axis.ticks:
        y = TOP + PLOT_H - axis.position(tick, PLOT_H)
        rows.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        rows.append(
            f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}">{escape(label(tick))}</text>'
        )
    return "".join(rows)


def _names(labels: Sequence[str]) -> str:
    """At most eight evenly spaced labels under the axis, so that they do not overlap."""
    every = -(-len(labels) // 8) or 1
    step = PLOT_W / max(len(labels), 1)
    shown = list(enumerate(labels))[::every]
    return "".join(
        f'<text class="name{" odd" if place % 2 else ""}" x="{LEFT + (i + 0.5) * step:.1f}" '
        f'y="{HEIGHT - 6}">{escape(name)}</text>'
        for place, (i, name) in enumerate(shown)
    )


def _check(labels: Sequence[str], series: Sequence[Series]) -> None:
    for each in series:
        if len(each.values) != len(labels):
            raise ValueError(f"{each.name} has {len(each.values)} values for {len(labels)} labels")


def _hatch(number: int, path: str) -> str:
    return (
        f'<pattern id="h{number}" class="h{number}" width="8" height="8" '
        f'patternUnits="userSpaceOnUse"><rect width="8" height="8"/><path d="{path}"/></pattern>'
    )


# Included once per page, before the first chart: the hatches that the stylesheet refers to.
PATTERNS = (
    '<svg class="patterns" width="0" height="0" aria-hidden="true"><defs>'
    + "".join(
        _hatch(number, path)
        for number, path in enumerate(
            (
                "",
                "M0 8 8 0M-2 2 2-2M6 10 10 6",
                "M0 4H8",
                "M4 0V8",
                "M0 0 8 8M-2 6 2 10M6-2 10 2",
                "M0 4H8M4 0V8",
                "M2 2h2v2h-2z",
                "M0 0 8 8M0 8 8 0",
            )
        )
    )
    + "</defs></svg>"
)
