"""An accessible SVG heat map: rows by columns, each cell with its share as a number and as a shade."""

from collections.abc import Sequence
from html import escape

WIDTH, ROW, HEAD, LEFT = 720, 30, 30, 116  # room for the larger text of a phone
SHADES = 9


def heat_map(
    title: str,
    rows: Sequence[tuple[str, Sequence[float | None]]],
    columns: Sequence[str],
) -> str:
    """Values are shares from 0 to 1, shown in percent; a missing one is an empty place."""
    width = (WIDTH - LEFT) / max(1, len(columns))
    height = HEAD + ROW * len(rows)
    marks = [
        f'<text class="name" x="{LEFT + (index + 0.5) * width:.1f}" y="21">{escape(name)}</text>'
        for index, name in enumerate(columns)
    ]
    for line, (name, values) in enumerate(rows):
        top = HEAD + line * ROW
        marks.append(f'<text class="row" x="0" y="{top + 20}">{escape(name)}</text>')
        for index, value in enumerate(values):
            if value is not None:
                label = f"{name}, {columns[index]}: {100 * value:.0f} %"
                marks.append(_cell(LEFT + index * width, top, width, value, label))
    return (
        f'<svg class="heat" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{escape(title)}. The table below shows the numbers.">{"".join(marks)}</svg>'
    )


def _cell(left: float, top: int, width: float, value: float, label: str) -> str:
    shade = min(SHADES, max(0, round(value * SHADES)))
    return (
        f'<g class="q{shade}"><title>{escape(label)}</title>'
        f'<rect x="{left + 1:.1f}" y="{top + 1}" width="{width - 2:.1f}" height="{ROW - 2}" rx="3"/>'
        f'<text x="{left + width / 2:.1f}" y="{top + 20}">{100 * value:.0f}</text></g>'
    )
