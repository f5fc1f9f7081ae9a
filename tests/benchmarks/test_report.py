import json

import pytest

from benchmarks.report import figure, median_pair, processor_times, score, stolen_since


def test_a_figure_is_one_json_line_with_the_agreed_fields(
    capsys: pytest.CaptureFixture[str],
) -> None:
    figure("x", 150.0, "tok/s", True, "peer", 100.0, at_least=1.2, aim=2.0, settings={"n": 3})
    line = capsys.readouterr().out
    assert line.count("\n") == 1
    found = json.loads(line)
    assert list(found) == [
        "benchmark",
        "value",
        "unit",
        "higher_is_better",
        "peer",
        "peer_value",
        "score",
        "at_least",
        "aim",
        "machine",
        "settings",
    ]
    assert found["score"] == 1.5
    assert found["machine"]["cores"] >= 1


@pytest.mark.parametrize(
    ("value", "peer_value", "higher", "expected"),
    [(10, 5, True, 2.0), (10, 5, False, 0.5), (10, None, True, None), (0, 3, False, None)],
)
def test_the_score_says_how_many_times_better(
    value: float, peer_value: float | None, higher: bool, expected: float | None
) -> None:
    assert score(value, peer_value, higher) == expected


def test_a_pair_is_that_of_the_round_with_the_median_ratio() -> None:
    assert median_pair([10, 40, 9], [10, 10, 10]) == (10, 10)
    assert median_pair([10, None, 30, 8], [5, 7, None, 8]) == (10, 5)
    assert median_pair([3, None, 1, 2], []) == (2, None)
    assert median_pair([None], [1.0]) is None


def test_what_the_host_took_is_a_percentage() -> None:
    assert 0 <= stolen_since(processor_times()) <= 100
