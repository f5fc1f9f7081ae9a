"""A plain family takes fewer than 60 lines, as the example in docs/contributor.md shows."""

import re
from pathlib import Path

from engine.models.registry import FAMILIES

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "engine" / "models" / "families" / "granite.py"
MOST_LINES = 60


def test_the_example_is_the_familys_file() -> None:
    text = (ROOT / "docs" / "contributor.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python listing\n(.*?)```", text, re.DOTALL)
    assert EXAMPLE.read_text(encoding="utf-8") in blocks


def test_a_plain_family_with_its_entries_is_short() -> None:
    name = EXAMPLE.stem
    lines = len(EXAMPLE.read_text(encoding="utf-8").splitlines())
    registry = (ROOT / "engine" / "models" / "registry.py").read_text(encoding="utf-8")
    lines += sum(name in line for line in registry.splitlines())
    parity = (ROOT / "tests" / "engine" / "models" / "test_family_parity.py").read_text(
        encoding="utf-8"
    )
    case = re.search(rf'^    "{name}": \(.*?^    \),\n', parity, re.DOTALL | re.MULTILINE)
    assert case is not None
    assert lines + len(case[0].splitlines()) < MOST_LINES


def test_every_family_is_short() -> None:
    for family in FAMILIES.values():
        source = Path(str(family.__file__)).read_text(encoding="utf-8")
        assert len(source.splitlines()) < MOST_LINES, family.__name__


def test_the_table_lists_every_family() -> None:
    text = (ROOT / "docs/engine/models.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `(\w+For\w+)` \|", text, re.MULTILINE))
    assert listed == set(FAMILIES)
