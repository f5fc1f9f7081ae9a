"""What a step costs the host does not grow with the context: bytecodes are counted, and the elements
of tables and histories that operations in C go through. No time is measured."""

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from benchmarks.step_cost import engine_of
from engine.cache import prefix
from engine.cache.blocks import BlockPool
from engine.config import EngineConfig
from engine.loop import Engine
from engine.scheduling import sequence_keys
from tests.engine.helpers import ask

SHORT, LONG = 1024, 128 * 1024


class Count:
    def __init__(self) -> None:
        self.operations = 0

    def of(self, work: Callable[[], object]) -> int:
        """Bytecodes executed by `work`, and elements of counted lists that it goes through."""
        before = self.operations

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            frame.f_trace_opcodes = True
            frame.f_trace_lines = False
            self.operations += event == "opcode"
            return trace

        kept = sys.gettrace()
        sys.settrace(trace)
        try:
            work()
        finally:
            sys.settrace(kept)
        return self.operations - before


def counted(count: Count, values: list[Any]) -> list[Any]:
    class Counted(list[Any]):
        def __getitem__(self, key: Any) -> Any:
            found = list.__getitem__(self, key)
            count.operations += len(found) if isinstance(key, slice) else 1
            return found

        def __iter__(self) -> Iterator[Any]:
            count.operations += len(self)
            return list.__iter__(self)

        def __eq__(self, other: object) -> bool:
            count.operations += len(self)
            return list.__eq__(self, other)

        def __contains__(self, value: object) -> bool:
            count.operations += len(self)
            return list.__contains__(self, value)

    return Counted(values)


def make_engine(**changes: object) -> Engine:
    fields = {
        "model": "fake", "num_blocks": 20_000, "max_batch_tokens": 4 * LONG, "max_running": 8,
        "step_s": 0.0, "max_context": 4 * LONG,
    }  # fmt: skip
    return engine_of(EngineConfig(**(fields | changes)))  # type: ignore[arg-type]


def count_sequences(engine: Engine, count: Count) -> None:
    for request in engine.requests.values():
        for seq in request.sequences:
            seq.blocks = counted(count, seq.blocks)
            seq.history = counted(count, seq.history)
            seq.keys = counted(count, seq.keys)


def run(engine: Engine, steps: int) -> None:
    for _ in range(steps):
        engine.step()
        engine.take_outboxes()


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_decoding(prefix_cache: bool) -> None:
    found = []
    for context in (SHORT, LONG):
        engine, count = make_engine(prefix_cache=prefix_cache), Count()
        engine.submit(ask("r", [7] * context, 100), "g")
        run(engine, 30)  # reads the prompt for repeats, over some steps
        count_sequences(engine, count)
        found.append(count.of(lambda engine=engine: run(engine, 20)))
    assert found[1] <= found[0] * 1.03


def test_chunks_of_a_prompt() -> None:
    engine, count = make_engine(max_batch_tokens=512), Count()
    engine.submit(ask("r", list(range(900)) * 146, 4), "g")
    run(engine, 3)
    count_sequences(engine, count)
    early = count.of(lambda: run(engine, 4))
    run(engine, 230)
    late = count.of(lambda: run(engine, 4))
    assert engine.requests["r"].sequences[0].computed > 110_000
    assert late <= early * 1.02


def test_arrivals_are_hashed_as_far_as_they_are_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a bounded number of keys a step while others run."""
    hashed = [0]
    key = prefix.next_key

    def noted(*args: Any) -> bytes:
        hashed[0] += 1
        return key(*args)

    monkeypatch.setattr(prefix, "next_key", noted)
    engine = make_engine()
    engine.submit(ask("other", [9] * 40, 1000), "g")
    run(engine, 3)
    hashed[0] = 0
    engine.submit(ask("new", list(range(900)) * 146, 1), "g")
    assert not hashed[0]
    engine.step()  # launches the new prompt, and collects the other's step
    assert engine.requests["new"].sequences[0].in_flight
    assert hashed[0] <= 2
    while "new" in engine.requests:
        run(engine, 1)
    engine.submit(ask("again", list(range(900)) * 146, 1), "g")
    most = 0
    for _ in range(40):
        hashed[0] = 0
        run(engine, 1)
        most = max(most, hashed[0])
    assert "again" not in engine.requests
    assert most <= sequence_keys.HASHES + 8


def test_a_cached_prompt_that_does_not_fit_waits_for_little() -> None:
    found = []
    for context in (SHORT, LONG):
        engine, count = make_engine(num_blocks=context // 16 + 40, max_running=4), Count()
        prompt = [7] * context
        engine.submit(ask("first", prompt, 1), "g")
        run(engine, 4)
        engine.submit(ask("other", [9] * 500, 60), "g")
        run(engine, 2)
        engine.submit(ask("again", [*prompt, *[8] * 400], 1), "g")
        run(engine, 18)  # hashes the prompt over some steps
        assert engine.scheduler.waiting.size == 1
        count_sequences(engine, count)
        found.append(count.of(lambda engine=engine: run(engine, 8)))
    assert found[1] <= found[0] * 1.25  # bisections


def test_bisected_look_ups_find_what_walking_finds() -> None:
    pool = BlockPool(64, 4)
    keys = [bytes([n]) for n in range(30)]
    blocks = pool.allocate(30, "t") or []
    for n, block in enumerate(blocks):
        pool.cache(block, keys[n], "t", keys[n - 1] if n else None)
    for limit in (0, 1, 7, 30):
        assert pool.hits(keys, limit) == limit
        assert pool.hits([*keys[:limit], b"other"], 40) == limit
    pool.release(reversed(blocks))
    pool._idle.remove(blocks[12])
    pool._forget(blocks[12])
    pool._free.append(blocks[12])
    assert pool.hits(keys, 30) == 12
    assert pool.free_blocks == 64
    assert pool.cached_blocks("t") == 12
    pool.check_integrity([])
