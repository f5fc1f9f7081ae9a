"""The benchmark of the batch-invariant mode runs on a tiny model."""

import json

import pytest

from benchmarks import batch_invariant
from engine.backends.compiled.linear import has_kernel


@pytest.mark.skipif(
    not has_kernel(), reason="engine.backends.compiled was built without a C compiler"
)
def test_it_compares_the_mode_with_the_engine_without_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert batch_invariant.main(["--quick", "--threads", "1"]) == 0
    lines = [json.loads(each) for each in capsys.readouterr().out.splitlines()]
    assert len(lines) == 3
    assert all(line["value"] > 0 and line["peer"] == "without it" for line in lines)
