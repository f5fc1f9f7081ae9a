"""SECURITY.md and README.md name tests for what they claim, and every test that they name is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECURITY_TESTS = ROOT / "tests" / "gateway" / "security"
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


@pytest.mark.parametrize(("page", "least"), [("SECURITY.md", 30), ("README.md", 9)])
def test_every_test_that_a_page_names_is_there(page: str, least: int) -> None:
    named = NAMED.findall((ROOT / page).read_text())
    assert len(named) >= least
    for file, name in named:
        source = (ROOT / file).read_text() if (ROOT / file).exists() else ""
        assert re.search(rf"def {name}\(", source), f"{file}::{name} is not there"


def test_every_cure_and_every_rule_has_its_test() -> None:
    page = (ROOT / "SECURITY.md").read_text()
    named = NAMED.findall(page)
    suite = {f"tests/gateway/security/{f.name}" for f in SECURITY_TESTS.glob("test_*.py")}
    assert suite <= {file for file, _ in named}, "each file of the suite is on the page"
    rows = [line for line in page.splitlines() if line.startswith("| ") and "`" in line]
    rules = re.split(
        r"^- ", page.partition("## Security rules")[2].partition("\n## ")[0], flags=re.M
    )
    supply = re.split(
        r"^- ", page.partition("### Supply chain")[2].partition("\n## ")[0], flags=re.M
    )
    assert len(rules) > 5 and len(supply) > 3
    assert [each for each in (*rows, *rules[1:], *supply[1:]) if not NAMED.search(each)] == []
