"""Every setting, metric and command stands in the documentation, as the code has it."""

import pytest

from tests.rules.reference import DOCS, PAGES


@pytest.mark.parametrize("page", sorted(PAGES))
def test_a_reference_page_is_what_the_code_says(page: str) -> None:
    written = (DOCS / page).read_text() if (DOCS / page).exists() else ""
    assert written == PAGES[page](), "stale: run `python -m tests.rules.reference`"
