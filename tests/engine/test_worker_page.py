from tests.engine.worker_page import PAGE, with_tables


def test_the_tables_are_what_the_code_says() -> None:
    text = PAGE.read_text()
    assert with_tables(text) == text, "stale: run `python -m tests.engine.worker_page`"
