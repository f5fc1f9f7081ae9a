import json

import pytest

from benchmarks import prompt_order


def test_order_turns_misses_into_hits(capsys: pytest.CaptureFixture[str]) -> None:
    prompt_order.main(["--agents", "1", "--calls", "6", "--tools", "3"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    found = lines[0]["settings"]
    # Three tools are in the same order in one call of six, by chance.
    assert found["off"]["share"] < 0.3 < found["safe"]["share"] < found["full"]["share"]
    assert found["full"]["share"] > 0.6
