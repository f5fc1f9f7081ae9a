from pathlib import Path

import pytest

from engine.errors import ConfigError
from engine.protocol import FinishReason, Receipt
from engine.receipts import Receipts


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
    first.acknowledge(["b", "never"])
    # No close: the process is killed.
    second = Receipts(10, path)
    assert second.of("g") == [receipt("a"), receipt("c")]
    second.acknowledge(["a", "c"])
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
    assert second.find("a") == receipt("a")
    assert second.find("b") is None
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
