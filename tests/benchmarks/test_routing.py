import json

import pytest

from benchmarks import routing


def test_the_router_finds_prefixes_and_adapters_that_blind_policies_miss(
    capsys: pytest.CaptureFixture[str],
) -> None:
    routing.main(["--seconds", "6", "--rate", "30", "--replicas", "4", "--tenants", "24"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["benchmark"] for line in lines] == [
        "routing.hit_rate",
        "routing.first_token_p99",
    ] * 2
    hits = [line for line in lines if line["benchmark"] == "routing.hit_rate"]
    assert all(line["score"] > 1.2 for line in hits)
    found = lines[0]["settings"]
    assert found["ours"]["adapter_loads"] < found["round robin"]["adapter_loads"]
    assert found["ours"]["busiest_share"] < 0.5, "no replica gets everything"
