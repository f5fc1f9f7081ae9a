"""llama.cpp's own server behind the whole gateway: what it reports of its usage is what we charge."""

from pathlib import Path

import pytest

from benchmarks import second_engine

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not second_engine.is_made(),
        reason="llama.cpp's server is not at hand: `python -m benchmarks.second_engine` makes it once "
        "(in TOLLHOUSE_BENCH_HOME, ~/.cache/tollhouse-bench)",
    ),
]


def test_its_usage_is_our_ledger_streamed_and_whole(tmp_path: Path) -> None:
    with (
        second_engine.llama_server() as server,
        second_engine.gateway_to(server, tmp_path) as gateway,
    ):
        alone = second_engine.ask(server, "/v1/chat/completions", second_engine.PROMPTS[0])
        assert alone.text and alone.output > 0 < alone.input
        found = second_engine.compare(server, gateway)
        assert gateway.audit()["clean"]
    assert found.answers == 2 * len(second_engine.PROMPTS) * len(second_engine.ROUTES)
    assert (found.texts, found.usages, found.events) == (0, 0, 0)
