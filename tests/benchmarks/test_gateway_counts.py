"""What the benchmark of a request's work counts: the same in every run, and by hand."""

import pytest

from benchmarks.gateway_counts import ROOT, instructions_in, main
from benchmarks.gateway_load.in_process import _is_whole

DUMP = "version: 1\nevents: Ir\nfn=(1) main\n16 400\ncalls=1 50\n16 400\n\ntotals: 918000\n"


def test_instructions_are_the_totals_of_a_dump() -> None:
    assert instructions_in(DUMP) == 918_000
    with pytest.raises(ValueError, match="no totals"):
        instructions_in("version: 1\n")


def test_an_answer_is_whole_when_all_of_it_came() -> None:
    length = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nserver: x"
    assert _is_whole(length, b"12345") and not _is_whole(length, b"1234")
    assert not _is_whole(b"HTTP/1.1 200 OK\r\nserver: x", b"12345")
    chunked = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked"
    assert _is_whole(chunked, b"1\r\na\r\n0\r\n\r\n") and not _is_whole(chunked, b"1\r\na\r\n")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_same_work_is_counted_the_same_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import gateway_counts

    monkeypatch.setattr(gateway_counts.shutil, "which", lambda _name: None)  # without valgrind
    first, second = [gateway_counts.counted("bare", ["known"], 32, ROOT) for _ in range(2)]
    assert first["known"]["python_calls"] > 100 and first["known"]["bytecodes"] > 1_000
    for unit, count in first["known"].items():
        assert second["known"][unit] == pytest.approx(count, rel=0.02)


def test_an_unknown_work_is_refused() -> None:
    with pytest.raises(SystemExit):
        main(["--works", "known,strange"])
