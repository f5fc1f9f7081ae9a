"""A process that runs for months keeps no table that grows with what it has ever seen."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine import loop, metrics
from engine.adapters import reader as adapter_reader
from tests.engine.checkpoints import save_adapter, save_checkpoint
from tests.engine.driver import Driver
from tests.engine.helpers import Collected, ask, make_config, make_engine, write_adapter


def tables(root: Any) -> Iterator[tuple[str, int]]:
    """Every container that the object reaches through its attributes, with its length."""
    seen: set[int] = set()
    left = [("", root)]
    while left:
        name, value = left.pop()
        if id(value) in seen or isinstance(value, str | bytes | int | float | type(sys)):
            continue
        seen.add(id(value))
        if isinstance(value, dict | list | set | tuple):
            yield name, len(value)
            values = value.values() if isinstance(value, dict) else value
            left += [(name + "[]", each) for each in list(values)[:50]]
        names = [*getattr(value, "__dict__", ()), *getattr(type(value), "__slots__", ())]
        if type(value).__module__.startswith("engine"):
            left += [(f"{name}.{n}", getattr(value, n, None)) for n in names]


def test_requests_and_adapters_that_are_gone_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "_SLACK_DEADLINES", 20)
    monkeypatch.setattr(metrics, "_REMOVED_ADAPTERS", 20)
    engine = make_engine(make_config(host_adapter_bytes=1000))
    found = Collected()
    sizes = []
    for number in range(300):
        path, digest = write_adapter(tmp_path, f"a{number}")
        engine.load_adapter(path)
        for adapter in (digest, None):
            name = f"r{number}{adapter}"
            asked = ask(name, [number % 900 + 1] * 9, 2, adapter=adapter, deadline_s=1e6)
            engine.submit(asked, "g")
        while engine.busy:
            engine.step()
            found.take(engine)
        engine.receipts.acknowledge(list(found.receipts), "g")
        engine.unload_adapter(digest)
        engine.stats(changes_only=True)
        engine.metrics_text()
        if number in (99, 299):
            sizes.append(dict(sorted(tables(engine))))
    grown = {name: (sizes[0].get(name, 0), n) for name, n in sizes[1].items()
             if n > sizes[0].get(name, 0) + 5}  # fmt: skip
    assert not grown


def test_a_real_runner_forgets_an_adapter_that_was_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_reader, "_MOST_VERIFIED", 2)
    monkeypatch.setattr(adapter_reader, "_SETTLED_NS", -(1 << 60))
    checkpoint = save_checkpoint(tmp_path / "base", num_hidden_layers=1)
    runner = Driver(checkpoint).runner
    for number in range(4):
        state = runner.register_adapter(
            str(save_adapter(checkpoint, tmp_path / f"a{number}", 2, number))
        )
        assert runner.adapter_host_bytes(state.digest) > 0
        runner.drop_adapter(state.digest)
    assert not runner.adapters._copies
    assert not runner.adapters._blocks_needed
    assert len(runner.adapters._reader.verified) <= 2


def test_copies_are_counted_by_what_they_hold(tmp_path: Path) -> None:
    """Not by the size of the file, which may store another type."""
    checkpoint = save_checkpoint(tmp_path / "base", num_hidden_layers=1)
    runner = Driver(checkpoint, dtype="float32").runner
    state = runner.register_adapter(str(save_adapter(checkpoint, tmp_path / "a", 4, 0)))
    copy = runner.adapters._copies[state.digest]
    held = sum(t.numel() * 4 for pair in copy.matrices.values() for t in pair)
    assert runner.adapter_host_bytes(state.digest) == held
