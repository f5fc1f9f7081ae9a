import time
from pathlib import Path

import pytest

from engine import receipts as module
from engine.errors import ConfigError
from engine.protocol import FinishReason, Receipt
from engine.receipts import Receipts, read_receipts


def receipt(name: str) -> Receipt:
    return Receipt(
        request_id=name,
        namespace="t",
        adapter=None,
        prompt=5,
        cached=0,
        computed=5,
        unprocessed=0,
        generated=3,
        delivered=3,
        recomputed=0,
        discarded=0,
        finish_reason=FinishReason.STOP,
        queue_s=0.1,
        prefill_s=0.2,
        decode_s=0.3,
    )


def test_the_file_brings_back_what_was_not_acknowledged(tmp_path: Path) -> None:
    path = str(tmp_path / "deep" / "receipts")
    first = Receipts(10, path)
    for name in "abc":
        first.add("g", receipt(name))
    first.acknowledge(["b", "never"], "g")
    # No close: the process is killed.
    second = Receipts(10, path)
    assert second.of("g") == [receipt("a"), receipt("c")]
    second.acknowledge(["a", "c"], "g")
    second.close()
    assert Path(path).read_bytes().count(b"\n") == 3
    third = Receipts(10, path)
    assert len(third) == 0
    third.close()
    assert Path(path).read_bytes() == b""
    first.close()


def test_a_torn_last_line_loses_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "receipts"
    first = Receipts(10, str(path))
    first.add("g", receipt("a"))
    first.add("g", receipt("b"))
    first.close()
    path.write_bytes(path.read_bytes()[:-20])
    second = Receipts(10, str(path))
    assert second.find("a", "g") == receipt("a")
    assert second.find("b", "g") is None
    second.close()


def test_memory_is_bounded_and_what_is_given_up_is_counted() -> None:
    receipts = Receipts(2)
    for name in "abc":
        receipts.add("g", receipt(name))
    assert [r.request_id for r in receipts.of("g")] == ["b", "c"]
    assert receipts.lost == 1


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("x")
    with pytest.raises(ConfigError, match="receipts_file"):
        Receipts(2, str(blocked / "receipts"))


def test_acknowledged_receipts_stay_readable_for_some_days(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "receipts"
    first = Receipts(10, str(path), kept_days=7)
    first.add("g", receipt("a"))
    first.acknowledge(["a"], "g")
    first.close()
    for _ in range(2):  # a start keeps it, and the next one too
        again = Receipts(10, str(path), kept_days=7)
        assert len(again) == 0 and again.find("a", "g") is None
        again.close()
        assert [each.request_id for each in read_receipts(path)] == ["a"]
    week = time.time() + 8 * 86_400
    monkeypatch.setattr(time, "time", lambda: week)
    Receipts(10, str(path), kept_days=7).close()
    assert list(read_receipts(path)) == []


def test_only_a_gateway_that_was_given_a_receipt_acknowledges_it() -> None:
    receipts = Receipts(10)
    receipts.add("g", receipt("a"))
    receipts.acknowledge(["a"], "other")
    assert receipts.of("g") == [receipt("a")]
    # A gateway that recovers the requests of one that died has looked them up.
    assert receipts.find("a", "other") == receipt("a")
    receipts.acknowledge(["a"], "third")
    assert "a" in receipts
    receipts.acknowledge(["a"], "other")
    assert "a" not in receipts


@pytest.mark.parametrize("kept_days", [0, 7])
def test_the_file_does_not_grow_with_what_was_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept_days: float
) -> None:
    """Beyond the days that it is to be kept."""
    monkeypatch.setattr(module, "_SLACK_LINES", 20)
    now = [time.time()]
    monkeypatch.setattr(time, "time", lambda: now[0])
    path = tmp_path / "receipts"
    receipts = Receipts(10, str(path), kept_days)
    receipts.add("g", receipt("kept"))
    for number in range(200):
        now[0] += 86_400
        receipts.add("g", receipt(f"r{number}"))
        receipts.acknowledge([f"r{number}"], "g")
        assert path.read_bytes().count(b"\n") < 50
        # At least the last days are there, and what is not acknowledged.
        found = [each.request_id for each in read_receipts(path)]
        assert {f"r{n}" for n in range(max(0, number - 5), number + 1)} <= {*found} or not kept_days
        assert len(found) == len({*found})
    receipts.add("g", receipt("last"))
    # No close: the process is killed.
    assert Receipts(10, str(path)).of("g") == [receipt("kept"), receipt("last")]
    receipts.close()
