import errno
import os
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


def refusing(monkeypatch: pytest.MonkeyPatch, room: list[int]) -> None:
    """The disk takes so many more bytes, as of a write that does not fit whole."""
    plain = os.write

    def _write(file: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = plain(file, data[: room[0]])
        room[0] -= taken
        return taken

    monkeypatch.setattr(os, "write", _write)


def test_a_full_disk_ends_nothing_and_gets_what_it_refused_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, room = tmp_path / "receipts", [10**9]
    refusing(monkeypatch, room)
    receipts = Receipts(10, str(path))
    receipts.add("g", receipt("a"))
    room[0] = 30  # of the next line, which must not be torn
    receipts.add("g", receipt("b"))
    room[0] = 0
    receipts.add("g", receipt("c"))
    receipts.acknowledge(["a"], "g")
    assert receipts.unwritten == 3
    assert receipts.of("g") == [receipt("b"), receipt("c")], "they are given all the same"
    assert list(read_receipts(path)) == [receipt("a")]
    room[0] = 10**9
    monkeypatch.setattr(time, "monotonic", lambda: float("inf"))
    receipts.retry()
    assert receipts.unwritten == 0
    # No close: the process is killed.
    assert Receipts(10, str(path)).of("g") == [receipt("b"), receipt("c")]
    assert b"\n\n" not in path.read_bytes() and len(list(read_receipts(path))) == 2
    receipts.close()


def test_an_engine_starts_on_a_full_disk_with_the_file_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, room = tmp_path / "receipts", [10**9]
    first = Receipts(10, str(path))
    first.add("g", receipt("a"))
    first.add("g", receipt("b"))
    first.close()
    path.write_bytes(path.read_bytes()[:-20])  # it was killed
    refusing(monkeypatch, room)
    room[0] = 50
    second = Receipts(10, str(path))
    assert second.of("g") == [receipt("a")] and not (tmp_path / "receipts.new").exists()
    room[0] = 10**9
    second.add("g", receipt("c"))
    second.close()
    assert Receipts(10, str(path)).of("g") == [receipt("a"), receipt("c")]


def test_a_file_that_cannot_be_rewritten_stays_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SLACK_LINES", 4)
    path, room = tmp_path / "receipts", [10**9]
    refusing(monkeypatch, room)
    receipts = Receipts(100, str(path))

    def _no_replacing(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(os, "replace", _no_replacing)
        for number in range(12):
            receipts.add("g", receipt(f"r{number}"))
    assert Receipts(100, str(path)).of("g") == [receipt(f"r{number}") for number in range(12)]
    receipts.close()
