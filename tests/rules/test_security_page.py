"""SECURITY.md names a test for each cure, and every test that it names is there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECURITY_TESTS = ROOT / "tests" / "gateway" / "security"
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def test_every_cure_has_its_test() -> None:
    page = (ROOT / "SECURITY.md").read_text()
    named = NAMED.findall(page)
    assert len(named) >= 30
    for file, name in named:
        source = (ROOT / file).read_text() if (ROOT / file).exists() else ""
        assert re.search(rf"def {name}\(", source), f"{file}::{name} is not there"
    suite = {f"tests/gateway/security/{f.name}" for f in SECURITY_TESTS.glob("test_*.py")}
    assert suite <= {file for file, _ in named}, "each file of the suite is on the page"
    rows = [line for line in page.splitlines() if line.startswith("| ") and "`" in line]
    assert [line for line in rows if not NAMED.search(line)] == []
