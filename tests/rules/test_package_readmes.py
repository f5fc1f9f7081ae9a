"""The pages of each package name files and tests that are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*/README.md"), *ROOT.glob("docs/*/*.md")])
WRITTEN = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))


def test_the_packages_with_invariants_have_a_page() -> None:
    assert {"gateway", "engine", "billing", "moderation"} <= {page.parent.name for page in PAGES}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_test_that_it_names_is_there(page: Path) -> None:
    named = re.findall(r"`(test_\w+)`", page.read_text())
    assert not [name for name in named if f"def {name}(" not in WRITTEN]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_that_it_names_is_there(page: Path) -> None:
    named = set(re.findall(r"`([\w/]+/|[\w/]+\.py)`", page.read_text()))
    package = page.parent.name  # of docs/engine/x.md, too
    places = (ROOT, ROOT / package, ROOT / "tests" / package)
    assert not sorted(
        name for name in named if not any((place / name).exists() for place in places)
    )
