"""The benchmark of experts runs on a tiny model, and its greedy tokens are those of `transformers`."""

import json

import pytest

from benchmarks import experts


def test_it_compares_equal_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert experts.main(["--quick", "--threads", "1"]) == 0
    (line,) = [json.loads(each) for each in capsys.readouterr().out.splitlines()]
    assert line["settings"]["equal_tokens"] == 1.0
    assert line["peer"] == "transformers" and (line["at_least"], line["aim"]) == (3.0, 6.0)
    assert line["value"] > 0 and line["peer_value"] > 0
