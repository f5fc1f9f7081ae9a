"""The documentation builds as a site without a warning, and loads nothing from other hosts."""

import re
import subprocess
import sys

from tests.rules.imports import ROOT

_LOADED = re.compile(r'<(?:script|link|img)[^>]+(?:src|href)="(https?://[^"]+)"')


def test_the_site_is_whole_and_loads_nothing_from_elsewhere() -> None:
    made = subprocess.run(
        [sys.executable, ".ci/site.py"], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert made.returncode == 0, made.stdout + made.stderr
    site = ROOT / "build/site"
    assert "<h1" in (first := (site / "index.html").read_text()) and "make serve" in first
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    loaded = {url for page in pages for url in _LOADED.findall(page.read_text())}
    assert not {url for url in loaded if "tollhouse" not in url}
    assert "idempotency" in (site / "search/search_index.json").read_text().lower()
