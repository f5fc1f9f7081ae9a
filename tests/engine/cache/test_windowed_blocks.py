"""Layers with a window keep their part of a block for the window alone, others theirs for all of it.
Parts lie in slots of their own, as on a CPU, or in pages beside the blocks, as on a GPU.

The fake runner holds what either kind writes, and stops where a row sees another content in a part. On
models the reference is `transformers`.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.parts import Windowed, windowed_layers
from engine.cache.windowed import PagedPool, WindowedPool
from engine.config import EngineConfig
from engine.errors import RequestError
from engine.loop import Engine
from engine.model_spec import Sight
from engine.runners.cpu.runner import load_runner
from engine.runners.fake import FakeRunner
from tests.engine.checkpoints import (
    VOCAB,
    adapted_reference,
    reference,
    reference_greedy,
    save_adapter,
    save_checkpoint,
)
from tests.engine.helpers import Collected, ask
from tests.engine.helpers import reference as worked_out
from tests.engine.models.test_family_parity import CASES
from tests.engine.speculation.test_draft_model import always

PROTECTS = ("engine/cache", "engine/scheduling")

BLOCK = 4


def layout(
    blocks: int, window: int, rest: int = 1, part: int = 5, *, pages: bool = False
) -> Windowed:
    """With `pages` each of `rest` layers."""
    if pages:
        return Windowed(Sight(window), frozenset(range(part)), 1, blocks, rest)
    return Windowed(Sight(window), frozenset(range(part)), rest, blocks)


def fake(config: EngineConfig, windowed: Windowed, **changes: Any) -> Engine:
    return Engine(config, FakeRunner(config, windowed=windowed, context_length=4000, **changes))


def run(engine: Engine, steps: int = 20000, found: Collected | None = None) -> Collected:
    found = found or Collected()
    for _ in range(steps):
        if not engine.busy:
            break
        engine.step()
        found.take(engine)
        engine.check_integrity()
    assert not engine.busy
    return found


def ideal_units(lengths: list[int], window: int, rest: int, part: int, step: int) -> int:
    """Units of memory that sequences of these lengths need at least, and a block more of each part: the
    window does not begin with a block, and what a step writes is given back after it."""
    units = 0
    for length in lengths:
        seen = min(length, window + step)
        units += -(-length // BLOCK) * rest + (-(-seen // BLOCK) + 1) * part
    return units


@settings(max_examples=30)
@given(
    lengths=st.lists(st.integers(1, 160), min_size=1, max_size=5),
    window=st.integers(1, 60),
    layers=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    outputs=st.integers(1, 40),
    choices=st.integers(1, 2),
    pages=st.booleans(),
)
def test_sequences_hold_what_they_see(
    lengths: list[int],
    window: int,
    layers: tuple[int, int],
    outputs: int,
    choices: int,
    pages: bool,
) -> None:
    config = EngineConfig(model="fake", num_blocks=400, block_size=BLOCK, max_batch_tokens=16,
                          max_running=10, prefix_cache=False, step_s=0.0)  # fmt: skip
    windowed = layout(400, window, *layers, pages=pages)
    rest, part = windowed.rest, windowed.part
    engine = fake(config, windowed)
    for number, length in enumerate(lengths):
        prompt = [number + 1] * length
        engine.submit(ask(f"r{number}", prompt, outputs, n=choices), "g")
    pool, both = engine.pool, rest + part
    while engine.busy:
        engine.step()
        engine.take_outboxes()
        engine.check_integrity()
        running = engine.scheduler.running
        # A prompt's blocks are taken at once, their parts as they are written.
        units = sum(len(s.held_blocks) * rest + len(s.held_parts) * part for s in running)
        assert units >= 400 * both - pool._units - both, "what is shared counts once"  # type: ignore[attr-defined]
        for seq in running:
            most = ideal_units([seq.computed or 1], window, 0, 1, 0)
            assert len(seq.held_parts) <= most + 1
            assert len(seq.held_blocks) <= -(-(len(seq.history) + 1) // BLOCK)
    assert pool.free_blocks == 400


@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(n, marks=pytest.mark.proof) for n in range(3, 12))]
)
def test_answers_do_not_depend_on_memory(seed: int) -> None:
    """Prompts that share prefixes, choices, priorities, floors, preemptions, in both loops."""
    dice = random.Random(seed)
    blocks, window = dice.choice([16, 24, 40]), dice.choice([1, 6, 21, 40])
    config = EngineConfig(
        model="fake", num_blocks=blocks, block_size=BLOCK, max_batch_tokens=24, max_running=6,
        overlap=seed % 2 == 0, cache_floor_blocks=dice.choice([0, 2]),
        cache_cap_blocks=dice.choice([None, 8]), prefix_cache=seed % 5 > 0,
    )  # fmt: skip
    windowed = layout(blocks, window, dice.choice([1, 2]), dice.choice([2, 5]),
                      pages=seed // 2 % 2 == 0)  # fmt: skip
    engine = fake(config, windowed, overlapped=True)
    asked, found = [], Collected()
    for number in range(40):
        prompt = [dice.randrange(1, 3)] * dice.randrange(1, 20) + [7] * dice.randrange(1, 60)
        kind = {"n": dice.randrange(1, 4), "priority": dice.choice([0, 0, 1])}
        asked.append(ask(f"r{number}", prompt, dice.randrange(1, 50),
                         namespace=f"t{number % 3}", **kind))  # fmt: skip
        try:
            engine.submit(asked[-1], "g")
        except RequestError as error:
            assert "KV memory holds" in str(error)
            asked.pop()
        for _ in range(dice.randrange(12)):
            engine.step()
            found.take(engine)
            engine.check_integrity()
    run(engine, found=found)
    for each in asked:
        for choice in range(each.sampling.n):
            mine = found.tokens[each.request_id, choice]
            assert mine and mine == worked_out(each, choice, len(mine))
    assert engine.pool.free_blocks == engine.pool.available("t0", True) == blocks


def make_engine(checkpoint: Path, **changes: object) -> Engine:
    fields: dict[str, Any] = {
        "model": str(checkpoint), "num_blocks": 40, "block_size": BLOCK, "dtype": "float32",
        "threads": 1, "max_batch_tokens": 24, "max_running": 4, "device": "cpu", "step_s": 0.0,
    }  # fmt: skip
    config = EngineConfig(**(fields | changes))
    return Engine(config, load_runner(config))


def random_ids(count: int, seed: int) -> list[int]:
    return torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module", params=["gemma3", "gpt-oss", "gemma2", "command-r7b", "gemma3n"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, changes = CASES[request.param]
    changes = changes | {"max_position_embeddings": 1024}
    return save_checkpoint(tmp_path_factory.mktemp(request.param), family, **changes)


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.proof), True])
def test_greedy_tokens_in_a_mixed_batch(checkpoint: Path, overlap: bool) -> None:
    """Chunks, prompts beyond the window, a common prefix, preemption."""
    engine = make_engine(checkpoint, overlap=overlap, num_blocks=44)
    assert isinstance(engine.pool, WindowedPool)
    common = random_ids(50, 1)
    prompts = [[*common, *random_ids(count, count)] for count in (3, 40, 61, 1)] + [
        random_ids(9, 2)
    ]
    for number, prompt in enumerate(prompts):
        engine.submit(ask(f"r{number}", prompt, 15, priority=int(number == 4)), "g")
        engine.step()
    found, model = run(engine), reference(checkpoint)
    for number, prompt in enumerate(prompts):
        assert found.tokens[f"r{number}", 0] == reference_greedy(model, prompt, 15)


def test_a_prefix_is_found_where_its_window_is_cached(checkpoint: Path) -> None:
    engine, model = make_engine(checkpoint, num_blocks=80), reference(checkpoint)
    prompt = random_ids(83, 3)
    for name, asked, cached in (
        ("cold", prompt, 0),
        ("longer", [*prompt, 7, 9], 80),
        ("shorter", [*prompt[:61], 5], 60),
    ):
        engine.submit(ask(name, asked, 9), "g")
        found = run(engine)
        assert found.tokens[name, 0] == reference_greedy(model, asked, 9)
        assert found.receipts[name].cached == cached


@pytest.mark.parametrize("pages", [False, True])
def test_evicted_windows_are_computed_and_cached_again(pages: bool) -> None:
    windowed = layout(30, 16, 1, 5, pages=pages)
    config = EngineConfig(model="fake", num_blocks=30, block_size=BLOCK, max_batch_tokens=16,
                          max_running=4)  # fmt: skip
    engine, first, other = fake(config, windowed), [3] * 65, [4] * 100
    cached = []
    for number, prompt in enumerate((first, first, other, first, first)):
        asked = ask(f"r{number}", prompt, 3)
        engine.submit(asked, "g")
        found = run(engine)
        assert found.tokens[f"r{number}", 0] == worked_out(asked, 0, 3)
        cached.append(found.receipts[f"r{number}"].cached)
        if prompt is other:  # took the memory of the first prompt's window
            kept = engine.pool.hits(engine_keys(engine, first), 16)
            assert kept > 0 and engine.pool.with_window(engine_keys(engine, first), kept) < kept
    assert cached[1] == cached[4] == 64 and cached[3] < 64


def engine_keys(engine: Engine, prompt: list[int]) -> list[bytes]:
    keys: list[bytes] = []
    engine.scheduler.keys._hasher.extend(keys, prompt, "acme", None, 0)
    return keys


def test_memory_goes_back_and_forth_between_the_parts() -> None:
    """Long sequences need blocks without parts, short ones with. The memory of both stays within the
    budget: what is free and was written is given back before the other kind grows."""
    windowed = layout(24, 8, 1, 2)
    pool, dice = WindowedPool(windowed, BLOCK), random.Random(1)
    held: list[list[int]] = []
    written: set[tuple[str, int]] = set()
    for _ in range(3000):
        if held and dice.random() < 0.5:
            pool.release(held.pop(dice.randrange(len(held))))
        else:
            found = pool.allocate(dice.randrange(1, 9), "t", bare=dice.random() < 0.6)
            held += [found] if found else []
        for kind, numbers in zip(("slot", "block"), windowed.cold, strict=True):
            written -= {(kind, number) for number in numbers}
            numbers.clear()
        for block in (b for each in held for b in each):
            written |= {("block", block), ("slot", windowed.slots[block])} - {("slot", -1)}
        used = sum(windowed.rest if kind == "block" else windowed.part for kind, _ in written)
        assert used <= 24 * 3
        pool.check_integrity([b for each in held for b in each])
        pool.check_parts([b for each in held for b in each if windowed.slots[b] >= 0])


def test_pages_go_back_and_forth_between_blocks_and_parts() -> None:
    """Whatever is held, cached or evicted, each page has one use."""
    windowed = layout(24, 8, 2, 5, pages=True)
    pool, dice = PagedPool(windowed, BLOCK, floor=2), random.Random(1)
    assert (windowed.part, windowed.numbers, pool.free_blocks) == (3, 96, 24)
    held: list[tuple[list[int], list[int]]] = []  # blocks, and those whose parts are held
    for number in range(1500):
        if held and dice.random() < 0.5:
            pool.release_table(*held.pop(dice.randrange(len(held))))
        elif found := pool.allocate(dice.randrange(1, 7), f"t{number % 2}", bare=True):
            few = found[: dice.randrange(len(found) + 1)]
            held.append((found, few if pool.add_parts(few, "t0") else []))
            if dice.random() < 0.6:
                keys = [b"%d.%d" % (number, n) for n in range(len(found))]
                for n, block in enumerate(found):
                    pool.cache(block, keys[n], "t0", keys[n - 1] if n else None)
        assert windowed.cold == ([], [])
        pool.check_integrity([block for blocks, _ in held for block in blocks])
        pool.check_parts([block for _, parts in held for block in parts])
    for blocks, parts in held:
        pool.release_table(blocks, parts)
    assert pool.free_blocks == 24


@pytest.mark.parametrize(
    ("rest", "part", "page", "pages"),
    [(5, 29, 5, 6), (4, 22, 4, 6), (10, 52, 11, 5), (12, 12, 12, 1), (12, 13, 13, 1), (1, 4, 1, 4)],
)
def test_layers_in_a_page(rest: int, part: int, page: int, pages: int) -> None:
    """Of Gemma 3 4B, 1B and 27B, of gpt-oss, where few are lost, and of small models."""
    spec = SpecOf(tuple([8] * part + [None] * rest))
    found = windowed_layers(spec, 10, in_pages=True)  # type: ignore[arg-type]
    assert found is not None and (found.page, found.part) == (page, pages)
    places = found.places(rest + part)
    assert sorted(set(places)) == sorted(places) and max(at for _, at in places) < page
    assert {piece for piece, _ in places[:part]} == set(range(1, 1 + pages))
    assert {piece for piece, _ in places[part:]} == {0}


def test_pages_that_would_waste_much_are_not_made() -> None:
    spec = SpecOf((8, None, None, None))
    assert windowed_layers(spec, 10) is not None  # type: ignore[arg-type]
    assert windowed_layers(spec, 10, in_pages=True) is None  # type: ignore[arg-type]


class SpecOf:
    """Of a model whose layers have these windows."""

    def __init__(self, windows: tuple[int | None, ...]) -> None:
        self.windows, self.cached_layers, self.kv_sight = windows, len(windows), Sight()


def test_a_prompt_longer_than_whole_blocks_would_hold(checkpoint: Path) -> None:
    engine = make_engine(checkpoint, num_blocks=24)
    prompt = random_ids(130, 9)
    assert len(prompt) > 24 * BLOCK
    try:
        engine.submit(ask("r", prompt, 6), "g")
    except RequestError:
        assert engine.pool.windowed is not None
        assert engine.pool.windowed.longest(24, BLOCK) <= len(prompt)
        return
    assert run(engine).tokens["r", 0] == reference_greedy(reference(checkpoint), prompt, 6)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_keys_in_8_bits_are_the_same_with_parts_or_without(
    kind: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, answers = [random_ids(n, n) for n in (70, 31, 95)], []
    for _ in range(2):
        engine = make_engine(checkpoint, kv_dtype=kind, num_blocks=90)
        for number, prompt in enumerate(prompts):
            engine.submit(ask(f"r{number}", prompt, 20), "g")
        answers.append(run(engine).tokens)
        monkeypatch.setattr("engine.runners.model_runner.windowed_layers", lambda *_: None)
    assert answers[0] == answers[1]
    assert not isinstance(engine.pool, WindowedPool)


def test_adapters_and_guesses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family, changes = CASES["gemma3"]
    checkpoint = save_checkpoint(tmp_path / "m", family, **changes)
    always(monkeypatch)
    adapter = save_adapter(checkpoint, tmp_path / "a", 4, 1)
    engine = make_engine(checkpoint, num_blocks=90, draft_model=str(checkpoint))
    digest = engine.load_adapter(str(adapter)).digest
    prompt = random_ids(60, 4)
    engine.submit(ask("changed", prompt, 30, adapter=digest), "g")
    engine.submit(ask("plain", prompt, 30), "g")
    found = run(engine)
    changed = adapted_reference(checkpoint, adapter)
    assert found.tokens["changed", 0] == reference_greedy(changed, prompt, 30)
    assert found.tokens["plain", 0] == reference_greedy(reference(checkpoint), prompt, 30)
    assert (
        engine.metrics.counters["drafted_tokens"] > engine.metrics.counters["rejected_tokens"] > 0
    )


def test_a_batch_invariant_engine(tmp_path: Path) -> None:
    family, changes = CASES["gemma3"]
    checkpoint = save_checkpoint(tmp_path, family, **changes)
    prompts = [random_ids(n, n) for n in (70, 31, 95)]
    engine = make_engine(checkpoint, batch_invariant=True, num_blocks=60)
    for number, prompt in enumerate(prompts):
        engine.submit(ask(f"r{number}", prompt, 12), "g")
    found, model = run(engine), reference(checkpoint)
    for number, prompt in enumerate(prompts):
        assert found.tokens[f"r{number}", 0] == reference_greedy(model, prompt, 12)


@pytest.mark.parametrize("pages", [False, True])
def test_copies_outside_the_pool_hold_parts_too(pages: bool) -> None:
    windowed = layout(30, 16, 1, 3, pages=pages)
    config = EngineConfig(model="fake", num_blocks=30, block_size=BLOCK, max_batch_tokens=16,
                          max_running=4, tier_ram_bytes=1 << 20, tier_wait_s=20.0)  # fmt: skip
    engine, first, other = fake(config, windowed), [3] * 65, [4] * 110
    cached = []
    for number, prompt in enumerate((first, other, first, first)):
        asked = ask(f"r{number}", prompt, 3)
        engine.submit(asked, "g")
        found = Collected()
        while engine.busy or engine.tiers.busy:
            engine.step()
            found.take(engine)
        engine.check_integrity()
        assert found.tokens[f"r{number}", 0] == worked_out(asked, 0, 3)
        cached.append(found.receipts[f"r{number}"].cached)
    assert cached == [0, 0, 64, 64]
    engine.close()


def test_which_models_have_parts(tmp_path: Path) -> None:
    from engine.models.checkpoint import open_checkpoint
    from engine.models.registry import model_spec

    shapes = {}
    for name in ("gemma3", "gpt-oss", "llama", "mistral", "deepseek-v2", "qwen2-windows"):
        family, changes = CASES[name]
        path = save_checkpoint(tmp_path / name, family, **changes)
        found = windowed_layers(model_spec(open_checkpoint(path).config), 8)
        shapes[name] = None if found is None else (found.rest, found.part, found.sight.window)
    assert shapes["llama"] is shapes["mistral"] is shapes["deepseek-v2"] is None
    assert shapes["gemma3"] == (1, 4, 18)
    assert shapes["gpt-oss"] is not None and shapes["qwen2-windows"] is not None
