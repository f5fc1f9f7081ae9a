"""The life of an adapter: the registry against a runner that can refuse, and files that change."""

import dataclasses
from concurrent.futures import Future
from pathlib import Path

import pytest

from engine.adapters.adapter import Adapter, AdapterStatus
from engine.errors import AdapterError, IntegrityError
from engine.loop import Engine
from engine.protocol import AdapterState
from tests.engine.helpers import (
    ask,
    make_config,
    make_engine,
    run_alone,
    run_until_idle,
    write_adapter,
)


def load(engine: Engine, folder: Path, *names: str) -> list[str]:
    found = [write_adapter(folder, name) for name in names]
    for path, _ in found:
        engine.load_adapter(path)
    return [digest for _, digest in found]


def test_only_the_drawn_moves_are_possible() -> None:
    adapter = Adapter("ab" * 32, "path", 8, 100, 1)
    with pytest.raises(IntegrityError, match="absent -> resident"):
        adapter.transition_to(AdapterStatus.RESIDENT)
    for status in (
        AdapterStatus.HOST,
        AdapterStatus.LOADING,
        AdapterStatus.RESIDENT,
        AdapterStatus.DRAINING,
        AdapterStatus.HOST,
    ):
        adapter.transition_to(status)
    adapter.transition_to(AdapterStatus.ABSENT)


def test_a_handle_of_an_earlier_generation_stops_the_step(tmp_path: Path) -> None:
    engine = make_engine(make_config(max_adapter_slots=1))
    one, two = load(engine, tmp_path, "one", "two")
    engine.submit(ask("r", [1, 2, 3], max_tokens=20, adapter=one), "g")
    engine.step()
    seq = engine.scheduler.running[0]
    assert seq.handle is not None
    seq.handle = dataclasses.replace(seq.handle, digest=two)
    with pytest.raises(IntegrityError, match="no longer holds"):
        engine.step()


def test_the_least_recently_used_idle_adapter_leaves(tmp_path: Path) -> None:
    engine = make_engine(make_config(max_adapter_slots=2))
    a, b, c = load(engine, tmp_path, "a", "b", "c")
    for number, digest in enumerate([a, b, a, c]):
        engine.submit(ask(f"r{number}", [1, 2], adapter=digest), "g")
        run_until_idle(engine)
    places = {s.digest: s.state for s in engine.adapters.states()}
    assert places == {a: "resident", b: "host", c: "resident"}


def test_what_leaves_host_memory_is_read_again_when_needed(tmp_path: Path) -> None:
    engine = make_engine(make_config(max_adapter_slots=1, host_adapter_bytes=600))
    digests = load(engine, tmp_path, *"abcdefgh")
    absent = [s.digest for s in engine.adapters.states() if s.state == "absent"]
    assert len(absent) >= 5
    for number, digest in enumerate(digests):
        one = ask(f"r{number}", [1, 2, 3], adapter=digest)
        engine.submit(one, "g")
        found = run_until_idle(engine)
        path = str(tmp_path / "abcdefgh"[number])
        assert found.tokens[f"r{number}", 0] == run_alone(one, path)[0]


def test_weights_are_read_while_their_request_waits_for_a_slot(tmp_path: Path) -> None:
    engine = make_engine(make_config(max_adapter_slots=1, host_adapter_bytes=600))
    absent, busy, idle = load(engine, tmp_path, *"abc")
    engine.submit(ask("busy", [1, 2], max_tokens=20, adapter=busy), "g")
    engine.step()
    engine.submit(ask("queued", [1, 2], adapter=absent), "g")
    for _ in range(3):
        engine.step()
    places = {s.digest: s.state for s in engine.adapters.states()}
    assert places == {absent: "host", busy: "resident", idle: "absent"}


def test_weights_that_others_wait_for_are_not_dropped_to_read_ahead(tmp_path: Path) -> None:
    engine = make_engine(make_config(max_adapter_slots=1, host_adapter_bytes=600))
    absent, busy, waited_for = load(engine, tmp_path, *"abc")
    for name, digest in (("busy", busy), ("next", waited_for), ("queued", absent)):
        engine.submit(ask(name, [1, 2], max_tokens=20, adapter=digest), "g")
    for _ in range(5):
        engine.step()
    places = {s.digest: s.state for s in engine.adapters.states()}
    assert places == {absent: "absent", busy: "resident", waited_for: "host"}
    found = run_until_idle(engine)
    assert {r.finish_reason for r in found.receipts.values()} == {"length"}


def test_a_file_that_changed_meanwhile_is_not_served(tmp_path: Path) -> None:
    engine = make_engine(make_config(max_adapter_slots=1, host_adapter_bytes=300))
    first, second = load(engine, tmp_path, "first", "second")
    assert engine.adapters.known[first].status is AdapterStatus.ABSENT
    (tmp_path / "first" / "adapter_model.safetensors").write_bytes(b"other weights" * 9)
    engine.submit(ask("r", [1, 2], adapter=first), "g")
    engine.submit(ask("s", [1, 2], adapter=second), "g")
    found = run_until_idle(engine)
    assert found.receipts["r"].finish_reason == "error"
    assert "other weights" in found.receipts["r"].message
    assert found.receipts["s"].finish_reason == "length"


def test_a_device_that_refuses_an_adapter_ends_only_its_requests(tmp_path: Path) -> None:
    engine = make_engine()
    bad, good = load(engine, tmp_path, "bad", "good")
    plain = engine._runner.load_adapter

    def picky(handle: object, blocks: list[int]) -> None:
        if handle.digest == bad:
            raise RuntimeError("out of memory")
        plain(handle, blocks)

    engine._runner.load_adapter = picky
    for number, digest in enumerate([bad, good, None]):
        engine.submit(ask(f"r{number}", [1, 2], adapter=digest), "g")
    found = run_until_idle(engine)
    assert found.receipts["r0"].finish_reason == "error"
    assert "out of memory" in found.receipts["r0"].message
    assert found.receipts["r1"].finish_reason == found.receipts["r2"].finish_reason == "length"


def test_a_slow_read_holds_up_nobody_else(tmp_path: Path) -> None:
    pending: list[tuple[Future[AdapterState], object]] = []

    def later(work: object) -> Future[AdapterState]:
        future: Future[AdapterState] = Future()
        pending.append((future, work))
        return future

    engine = make_engine(make_config(max_adapter_slots=1, host_adapter_bytes=300))
    engine.adapters.host._submit = later
    first, second = load(engine, tmp_path, "first", "second")
    engine.submit(ask("slow", [1, 2], adapter=first), "g")
    engine.submit(ask("base", [1, 2]), "g")
    engine.submit(ask("other", [1, 2], adapter=second), "g")
    for _ in range(20):
        engine.step()
    outboxes = engine.take_outboxes()
    ended = {r.request_id for box in outboxes.values() for r in box.receipts}
    assert ended == {"base", "other"}
    future, work = pending[0]
    future.set_result(work())
    found = run_until_idle(engine)
    assert found.receipts["slow"].finish_reason == "length"


def test_thousands_of_registered_adapters_cost_a_step_nothing(tmp_path: Path) -> None:
    engine = make_engine(make_config(max_adapter_slots=2, host_adapter_bytes=20_000))
    digests = load(engine, tmp_path, *[f"a{i}" for i in range(1500)])
    for number, digest in enumerate(digests[::100]):
        engine.submit(ask(f"r{number}", [1, 2, 3], adapter=digest), "g")
    found = run_until_idle(engine)
    assert len(found.receipts) == 15
    assert len(engine.adapters.states()) == 1500


def test_an_adapter_that_cannot_be_served_is_refused_at_once(tmp_path: Path) -> None:
    engine = make_engine(make_config(max_lora_rank=16, num_blocks=3))
    path, _ = write_adapter(tmp_path, "wide", rank=64)
    with pytest.raises(AdapterError, match="rank 64, max_lora_rank is 16"):
        engine.load_adapter(path)
    path, _ = write_adapter(tmp_path, "big", rank=16)
    with pytest.raises(AdapterError, match="needs 4 of 3 blocks"):
        engine.load_adapter(path)
    without = make_engine(make_config(enable_lora=False))
    with pytest.raises(AdapterError, match="without adapters"):
        without.load_adapter(path)
    assert not engine._runner._host


def test_reloading_an_unloaded_adapter_serves_it_again(tmp_path: Path) -> None:
    engine = make_engine()
    path, digest = write_adapter(tmp_path, "one")
    engine.load_adapter(path)
    one = ask("r", [1, 2, 3], max_tokens=9, adapter=digest)
    engine.submit(one, "g")
    engine.step()
    engine.unload_adapter(digest)
    engine.load_adapter(path)
    engine.submit(ask("again", [1, 2, 3], max_tokens=9, adapter=digest), "g")
    found = run_until_idle(engine)
    assert found.tokens["r", 0] == found.tokens["again", 0] == run_alone(one, path)[0]
    assert digest in engine.adapters.known


def test_a_heartbeat_tells_what_changed_and_what_is_gone(tmp_path: Path) -> None:
    engine = make_engine(make_config(max_adapter_slots=1))
    a, b = load(engine, tmp_path, "a", "b")
    told: dict[str, str] = {}

    def _beat() -> set[str]:
        changed = engine.stats(changes_only=True).adapters
        told.update({state.digest: state.state for state in changed})
        return {state.digest for state in changed}

    assert _beat() == {a, b}
    assert _beat() == set(), "nothing is said twice"
    engine.submit(ask("r", [1, 2], adapter=a), "g")
    run_until_idle(engine)
    assert _beat() == {a}
    engine.unload_adapter(b)
    assert _beat() == {b}
    assert told == {a: "resident", b: "gone"}
    whole = {state.digest: state.state for state in engine.stats().adapters}
    assert whole == {a: "resident"}, "a welcome still lists all"
