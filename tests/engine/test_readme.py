import re
from pathlib import Path

from tests.engine.readme import README, with_tables


def test_the_tables_are_what_the_code_says() -> None:
    text = README.read_text()
    assert with_tables(text) == text, "stale: run `python -m tests.engine.readme`"


def test_every_file_that_the_page_names_is_there() -> None:
    root = README.parents[1]
    for name in set(re.findall(r"`([\w/]+\.py)`", README.read_text())):
        places = [root / "engine" / name, root / "tests" / "engine" / Path(name).name]
        assert any(place.exists() for place in places), f"{name} is not there"
