from tests.engine.readme import README, with_tables


def test_the_tables_are_what_the_code_says() -> None:
    text = README.read_text()
    assert with_tables(text) == text, "stale: run `python -m tests.engine.readme`"
