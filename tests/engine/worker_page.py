"""The tables of docs/engine/worker.md, made from the code. Run as a module to write them."""

import re
from dataclasses import MISSING, fields
from pathlib import Path

from engine import config as config_module
from engine.config import EngineConfig
from engine.metrics import COUNTERS, GAUGES, HISTOGRAMS

PAGE = Path(__file__).parents[2] / "docs/engine/worker.md"


def settings_table() -> list[str]:
    """A row for each setting; the meaning is the comment beside the field."""
    source = Path(config_module.__file__).read_text()
    rows = []
    for field in fields(EngineConfig):
        found = re.search(rf"^    {field.name}: [^#\n]*(?:# (.*))?$", source, re.MULTILINE)
        meaning = (found.group(1) if found else None) or field.name.replace("_", " ")
        default = "" if field.default is MISSING else f"`{field.default}`"
        rows.append(f"| `{field.name}` | {default} | {meaning[0].upper()}{meaning[1:]} |")
    return rows


def metrics_table() -> list[str]:
    rows = []
    for kind, table in (("counter", COUNTERS), ("gauge", GAUGES)):
        rows += [_row(name, kind, about, alias) for name, (about, alias) in table.items()]
    rows += [_row(n, "histogram", about, alias) for n, (about, _, alias) in HISTOGRAMS.items()]
    return rows


def _row(name: str, kind: str, about: str, alias: str | None) -> str:
    return f"| `{name}` | {kind} | {about} | {f'`{alias}`' if alias else ''} |"


def with_tables(text: str) -> str:
    """The page with its two generated tables renewed."""
    text = _renewed(text, "| setting | default | meaning |", settings_table(), keep=0)
    return _renewed(text, "| name | kind | meaning | alias |", metrics_table(), keep=7)


def _renewed(text: str, head: str, rows: list[str], keep: int) -> str:
    lines = text.splitlines()
    start = lines.index(head) + 2
    end = start
    while end < len(lines) and lines[end].startswith("|"):
        end += 1
    return "\n".join([*lines[:start], *rows, *lines[end - keep :]]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
