import json

import pytest

from benchmarks import fairness


def test_a_flood_hardly_touches_the_quiet_and_fairness_costs_no_throughput(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fairness.main(["--seconds", "5"])
    first, throughput = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["score"] > 5
    assert throughput["score"] >= throughput["at_least"] == 0.97
