import json

import pytest

from benchmarks import pages
from dashboards.navigation import SECTIONS


def test_every_section_is_a_figure_beside_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    pages.report({page: [10.0, 20.0, 250.0 if page == "/" else 30.0] for page in pages.PAGES}, 1000)
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {section.path for section in SECTIONS} <= {each["settings"]["page"] for each in found}
    slowest = found[-1]
    assert slowest["settings"]["page"] == "/" and slowest["value"] == 250
    assert slowest["score"] == 0.4 and slowest["peer_value"] == 100


def test_p95_is_near_the_end_of_what_was_measured() -> None:
    assert pages.p95([float(n) for n in range(1, 101)]) == 96
