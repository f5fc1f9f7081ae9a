"""Blocks that come back from a tier: the tokens and counts of an engine that never lost them.

The fake model's tokens are computed from the content of the blocks, so a wrong block is a wrong token.
"""

import errno
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.loop import Engine
from engine.protocol import GenerateRequest
from engine.runners.fake import FakeRunner
from engine.tiers import transfers
from engine.tiers.memory import MemoryTier
from engine.tiers.sealing import with_checksum
from tests.conftest import REDIS, need_redis
from tests.contracts.redis_keys import forget, new_prefix
from tests.engine.helpers import Collected, ask, make_config, reference

PROMPT = [n * 7 % 900 for n in range(61)]  # 15 blocks of 4 and one token


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text("5a" * 32)
    return path


@pytest.fixture
def disk(tmp_path: Path, key_file: Path) -> dict[str, object]:
    return {"tier_disk": str(tmp_path / "tier"), "tier_key_file": str(key_file)}


def engine_of(**changes: object) -> Engine:
    config: EngineConfig = make_config(**({"tier_wait_s": 20.0} | changes))
    return Engine(config, FakeRunner(config))


def run(engine: Engine, *requests: GenerateRequest) -> Collected:
    """Until all have ended and all copies are stored."""
    found = Collected()
    for request in requests:
        engine.submit(request, "g")
    until = time.monotonic() + 30
    while engine.busy or engine.tiers.busy:
        assert time.monotonic() < until
        if not engine.step():
            time.sleep(0.001)
        found.take(engine)
    engine.poll()
    engine.check_integrity()
    for request in requests:
        for choice in range(request.sampling.n):
            got = found.tokens[request.request_id, choice]
            assert got == reference(request, choice, len(got))
    return found


def restarted(engine: Engine, **changes: object) -> Engine:
    engine.close()
    return engine_of(**changes)


def test_a_restarted_engine_is_warm_from_disk(disk: dict[str, object]) -> None:
    first = engine_of(**disk)
    assert run(first, ask("a", PROMPT, 8)).receipts["a"].cached == 0
    again = restarted(first, **disk)
    receipt = run(again, ask("b", PROMPT, 8)).receipts["b"]
    assert (receipt.prompt, receipt.cached, receipt.computed) == (61, 60, 1)
    assert again.metrics.counters["tier_tokens"] == 60
    # The answer's blocks are there too, and what is stored already is not stored again.
    longer = run(again, ask("c", PROMPT + reference(ask("a", PROMPT), 0, 8), 4)).receipts["c"]
    assert longer.cached == 68
    assert again.metrics.tier_blocks["disk", "stored"] <= 2
    assert "tier_blocks_total{tier=" in again.metrics_text()
    again.close()


def test_memory_keeps_what_the_pool_evicts() -> None:
    engine = engine_of(num_blocks=24, tier_ram_bytes=1 << 20)
    run(engine, ask("a", PROMPT, 2))
    for number in range(4):
        run(engine, ask(f"x{number}", [number, *PROMPT[:50]], 2))
    assert engine.pool.find(engine_keys(engine)) is None
    assert run(engine, ask("b", PROMPT, 2)).receipts["b"].cached == 60
    engine.close()


def engine_keys(engine: Engine) -> bytes:
    """The key of the last whole block of PROMPT."""
    seq = engine.scheduler.new_sequence(_request(ask("k", PROMPT)), 0)
    engine.scheduler.keys.extend(seq, 15)
    return seq.keys[14]


def _request(inputs: GenerateRequest):  # type: ignore[no-untyped-def]
    from engine.scheduling.sequence import Request

    return Request(inputs, "g", 0.0, 4096)


def test_engines_share_a_tier_in_redis(key_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_redis()
    prefix = new_prefix()
    monkeypatch.setattr("engine.tiers.redis_tier.RedisTier.__init__.__defaults__", (prefix,))
    settings = {"tier_remote": REDIS, "tier_key_file": str(key_file)}
    first, second = engine_of(**settings), engine_of(**settings, tier_ram_bytes=1 << 20)
    run(first, ask("a", PROMPT, 4))
    found = run(second, ask("b", PROMPT, 4), ask("c", [*PROMPT[:30], 1, 2, 3], 4))
    assert found.receipts["b"].cached == 60
    assert found.receipts["c"].cached == 28
    assert second.metrics.tier_blocks["ram", "stored"] >= 15  # faster tiers get a copy
    assert run(second, ask("d", PROMPT, 4, namespace="globex")).receipts["d"].cached == 0
    first.close()
    second.close()
    forget(prefix)


def test_tenants_and_adapters_do_not_meet(disk: dict[str, object], tmp_path: Path) -> None:
    public = tuple(PROMPT[:8])
    first = engine_of(**disk, public_prefixes=(public,))
    run(first, ask("a", PROMPT, 4))
    again = restarted(first, **disk, public_prefixes=(public,))
    found = run(again, ask("b", PROMPT, 4, namespace="globex"), ask("c", PROMPT, 4))
    assert found.receipts["b"].cached == 8  # what the operator declared public
    assert found.receipts["c"].cached == 60
    again.close()


def files(disk: dict[str, object]) -> list[Path]:
    return sorted(path for path in Path(str(disk["tier_disk"])).rglob("*") if path.is_file())


def flip(paths: list[Path]) -> None:
    for path in paths:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)


def cut(paths: list[Path]) -> None:
    for number, path in enumerate(paths):
        path.write_bytes(path.read_bytes()[: 5 * number % 50])


def swap(paths: list[Path]) -> None:
    contents = [path.read_bytes() for path in paths]
    for path, data in zip(paths, contents[1:] + contents[:1], strict=True):
        path.write_bytes(data)


@pytest.mark.parametrize("spoil", [flip, cut, swap])
def test_other_bytes_are_computed_and_said(
    spoil: Callable[[list[Path]], None], disk: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    first = engine_of(**disk)
    run(first, ask("a", PROMPT, 8))
    first.close()
    spoil(files(disk))
    again = engine_of(**disk)
    with caplog.at_level(logging.WARNING):
        assert run(again, ask("b", PROMPT, 8)).receipts["b"].cached == 0
    assert sum("tier disk: wrong bytes" in line for line in caplog.messages) == 1
    assert again.metrics.tier_blocks["disk", "wrong"] == 1
    again.close()


def test_blocks_are_unreadable_with_another_key(disk: dict[str, object], key_file: Path) -> None:
    first = engine_of(**disk)
    run(first, ask("a", PROMPT, 8))
    stored = b"".join(path.read_bytes() for path in files(disk))
    plain = b"".join(first._runner.read_blocks(list(range(16)))())
    assert not any(plain[n : n + 16] in stored for n in range(0, len(plain), 16))
    first.close()
    key_file.write_text("5b" * 32)
    assert run(engine_of(**disk), ask("b", PROMPT, 8)).receipts["b"].cached == 0


class Troubled(MemoryTier):
    """A tier whose reads and writes go wrong."""

    def __init__(self) -> None:
        super().__init__(1 << 20, 60.0)
        self.go = threading.Event()
        self.go.set()
        self.error: OSError | None = None

    def read(self, names: list[str]) -> list[bytes]:
        self.go.wait(20)
        if self.error is not None:
            raise self.error
        return super().read(names)

    def write(self, name: str, data: bytes) -> list[str]:
        if self.error is not None:
            raise self.error
        return super().write(name, data)


@pytest.fixture
def troubled(monkeypatch: pytest.MonkeyPatch) -> Troubled:
    tier = Troubled()
    monkeypatch.setattr("engine.tiers.open.MemoryTier", lambda *_: tier)
    return tier


def test_a_slow_tier_is_not_waited_for(
    troubled: Troubled, caplog: pytest.LogCaptureFixture
) -> None:
    first = engine_of(tier_ram_bytes=1)
    run(first, ask("a", PROMPT, 8))
    again = restarted(first, tier_ram_bytes=1, tier_wait_s=0.2)
    troubled.go.clear()
    began = time.monotonic()
    for number in range(3):  # only the first waits
        again.submit(ask(f"b{number}", [*PROMPT, number], 8), "g")
    found = Collected()
    while again.busy:
        time.sleep(0 if again.step() else 0.001)
        found.take(again)
    assert time.monotonic() - began < 5
    assert found.receipts["b0"].cached == 0
    assert again.metrics.counters["tier_timeouts"] >= 1
    assert any("the tiers took longer than 0.2 s" in line for line in caplog.messages)
    troubled.go.set()
    for number in range(3):
        answer = reference(ask("r", [*PROMPT, number]), 0, 8)
        assert found.tokens[f"b{number}", 0] == answer
    again.check_integrity()
    again.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.ECONNREFUSED])
def test_a_tier_that_is_full_or_gone_is_left_out(
    troubled: Troubled, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    first = engine_of(tier_ram_bytes=1)
    run(first, ask("a", PROMPT, 8))
    again = restarted(first, tier_ram_bytes=1)
    troubled.error = OSError(code, "trouble")
    for number in range(3):
        assert run(again, ask(f"b{number}", [5, number, *PROMPT], 8)).receipts
    assert run(again, ask("c", PROMPT, 8)).receipts["c"].cached == 0
    said = [line for line in caplog.messages if "left out for 5 s" in line]
    assert len(said) == 1 and "trouble" in said[0]
    again.close()


def test_data_of_another_size_is_not_entered(troubled: Troubled) -> None:
    first = engine_of(tier_ram_bytes=1)
    run(first, ask("a", PROMPT, 8))
    again = restarted(first, tier_ram_bytes=1)
    short = troubled.names()[0]
    troubled.write(short, with_checksum("", short, b"short"))
    assert run(again, ask("b", PROMPT, 8)).receipts["b"].cached in range(0, 60, 4)
    again.close()


def test_reads_of_many_parts(disk: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """More than one read is needed, and a small pool holds only a part beside others."""
    monkeypatch.setattr(transfers, "READ_BYTES", 3 * 32)
    first = engine_of(**disk)
    run(first, ask("a", PROMPT, 8), ask("b", PROMPT[30:] + PROMPT, 8))
    again = restarted(first, **disk, num_blocks=40)
    found = run(again, ask("a", PROMPT, 8), ask("b", PROMPT[30:] + PROMPT, 8))
    assert found.receipts["a"].cached == 60
    assert found.receipts["b"].cached in range(0, 92, 4)
    again.close()


def test_an_aborted_request_leaves_nothing_behind(troubled: Troubled) -> None:
    first = engine_of(tier_ram_bytes=1)
    run(first, ask("a", PROMPT, 8))
    again = restarted(first, tier_ram_bytes=1)
    troubled.go.clear()
    again.submit(ask("b", PROMPT, 8), "g")
    again.step()
    assert again.abort("b")
    troubled.go.set()
    again.take_outboxes()
    run(again)
    assert not again.tiers.busy and again.pool.free_blocks == again.pool.num_blocks
    again.close()


def test_the_queue_of_writes_is_bounded(
    troubled: Troubled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "QUEUE_BYTES", 4 * 32)
    engine = engine_of(tier_ram_bytes=1)
    for number in range(6):
        run(engine, ask(f"a{number}", [number, *PROMPT], 4))
        assert sum(size for size, _ in engine.tiers._writes) <= 4 * 32
    again = restarted(engine, tier_ram_bytes=1)
    assert run(again, ask("b", [0, *PROMPT], 4)).receipts["b"].cached == 60
    again.close()


def test_settings_are_refused_by_name(tmp_path: Path, key_file: Path) -> None:
    with pytest.raises(ConfigError, match="need tier_key_file"):
        engine_of(tier_disk=str(tmp_path / "t"))
    key_file.write_text("abc")
    with pytest.raises(ConfigError, match="is not hex: write one with: openssl rand -hex 32"):
        engine_of(tier_disk=str(tmp_path / "t"), tier_key_file=str(key_file))
    key_file.write_text("abcd")
    with pytest.raises(ConfigError, match="has 2 bytes, not 32"):
        engine_of(tier_disk=str(tmp_path / "t"), tier_key_file=str(key_file))
    with pytest.raises(ConfigError, match=r"tier_key_file .*: No such file"):
        engine_of(tier_disk=str(tmp_path / "t"), tier_key_file=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="tier_ttl_s is 0"):
        engine_of(tier_ttl_s=0)


def test_routers_hear_what_the_tiers_hold(disk: dict[str, object]) -> None:
    first = engine_of(**disk)
    first.pool.events = []
    run(first, ask("a", PROMPT, 8))
    events = first.take_events()
    stored = {key for each in events if each.tier == "disk" for key in each.hashes}
    in_pool = {key for each in events if not each.tier for key in each.hashes}
    assert stored == in_pool and len(stored) == 17
    again = restarted(first, **disk)
    assert [(e.kind, e.tier, set(e.hashes)) for e in again.tiers.residency()] == [
        ("stored", "disk", stored)
    ]
    again.close()
