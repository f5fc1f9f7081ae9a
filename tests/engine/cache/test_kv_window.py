"""Layers that see the first positions and the last ones alone, and hold no blocks of those between.

The reference is `transformers` with the mask written out. A sequence is computed without a cache there.
"""

import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import ConfigError, RequestError
from engine.loop import Engine
from engine.protocol import Receipt
from engine.runners.cpu.runner import load_runner
from engine.runners.fake import FakeRunner
from tests.engine.checkpoints import (
    VOCAB,
    adapted_reference,
    reference,
    save_adapter,
    save_checkpoint,
)
from tests.engine.driver import LogitDriver
from tests.engine.helpers import Collected, ask, run_until_idle
from tests.engine.models.test_family_parity import CASES
from tests.engine.speculation.test_draft_model import always

PROTECTS = ("engine/cache", "engine/scheduling")

WINDOW, SINKS, BLOCK = 21, 6, 4


def _mask(count: int, window: int, sinks: int) -> torch.Tensor:
    query, key = torch.arange(count)[:, None], torch.arange(count)
    seen = (key <= query) & ((key > query - window) | (key < sinks))
    return torch.zeros(count, count).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]


@torch.no_grad()
def masked_logits(model: Any, ids: list[int], window: int = WINDOW, sinks: int = SINKS) -> Any:
    """[len(ids), vocab]. Layers with a window of their own keep it."""
    mask: Any = _mask(len(ids), window, sinks)
    config = model.config
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        own = _mask(len(ids), config.sliding_window, 0)
        mask = {"full_attention": mask, "sliding_attention": own}
    return model(torch.tensor([ids]), attention_mask=mask, use_cache=False).logits[0].float()


def masked_greedy(model: Any, prompt: list[int], count: int, **sight: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(masked_logits(model, ids, **sight)[-1].argmax()))
    return ids[len(prompt) :]


def random_ids(count: int, seed: int) -> list[int]:
    return torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def make_engine(checkpoint: Path, **changes: object) -> Engine:
    fields: dict[str, Any] = {
        "model": str(checkpoint), "num_blocks": 64, "block_size": BLOCK, "dtype": "float32",
        "threads": 1, "max_batch_tokens": 16, "max_running": 4, "device": "cpu",
        "kv_window": WINDOW, "kv_sinks": SINKS,
    }  # fmt: skip
    config = EngineConfig(**(fields | changes))
    return Engine(config, load_runner(config))


def run(engine: Engine) -> tuple[Collected, int]:
    """What came out, and the most blocks that a sequence held after a step."""
    found, most = Collected(), 0
    while engine.busy:
        engine.step()
        found.take(engine)
        engine.check_integrity()
        most = max([most, *(len(seq.held_blocks) for seq in engine.scheduler.running)])
    return found, most


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    return save_checkpoint(folder, num_hidden_layers=2, max_position_embeddings=1024)


SIGHTS = [(WINDOW, SINKS), (33, 0), (1, 1), (16, 32), (40, 4), (500, 4)]


@pytest.mark.parametrize(
    ("case", "sight"),
    [
        pytest.param(case, sight, marks=() if plain or sight == SIGHTS[0] else pytest.mark.proof)
        for case in ("llama", "gemma2", "gpt-oss", "deepseek-v2", "command-r7b")
        for sight in SIGHTS
        for plain in (case == "llama",)
    ],
)
def test_logits_are_those_of_the_mask(case: str, sight: tuple[int, int], tmp_path: Path) -> None:
    family, changes = CASES[case]
    checkpoint = save_checkpoint(tmp_path, family, **changes)
    window, sinks = sight
    ids = random_ids(93, len(case) + window)
    expected = masked_logits(reference(checkpoint), ids, window, sinks)
    driver = LogitDriver(checkpoint, dtype="float32", kv_window=window, kv_sinks=sinks)
    sequence, beside = driver.sequence(ids), driver.sequence(random_ids(110, 5))
    parts = [
        driver.logits(sequence, 21, (beside, 30)),
        driver.logits(sequence, 1, (beside, 1)),
        driver.logits(sequence, 3, (beside, 37)),
        driver.logits(sequence, 66, (beside, 1)),
        driver.logits(sequence, 1, (beside, 1)),
        driver.logits(sequence, 1, (beside, 2)),
    ]
    torch.testing.assert_close(torch.cat(parts), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_long_answer_holds_few_blocks_beside_others(llama: Path, overlap: bool) -> None:
    engine = make_engine(llama, num_blocks=30, overlap=overlap)
    prompts = [random_ids(count, count) for count in (5, 70, 131)]
    for number, prompt in enumerate(prompts):
        engine.submit(ask(f"r{number}", prompt, 150 - 20 * number, namespace=f"t{number}"), "g")
    found, most = run(engine)
    model = reference(llama)
    for number, prompt in enumerate(prompts):
        count = 150 - 20 * number
        assert found.tokens[f"r{number}", 0] == masked_greedy(model, prompt, count)
        dropped = len(prompt) + count - 1 - WINDOW - SINKS
        assert found.receipts[f"r{number}"].dropped == dropped
    # The first positions, the window, and what a step of 16 tokens computes.
    assert most <= -(-SINKS // BLOCK) + -(-(WINDOW + 16) // BLOCK) + 1
    assert engine.pool.free_blocks == engine.pool.num_blocks


def test_a_prompt_and_an_answer_that_are_longer_than_the_pool(llama: Path) -> None:
    engine = make_engine(llama, num_blocks=14)
    prompt = random_ids(201, 9)
    for name in ("first", "again"):
        engine.submit(ask(name, prompt, 40, n=2 if name == "again" else 1), "g")
        found, _ = run(engine)
        expected = masked_greedy(reference(llama), prompt, 40)
        assert found.tokens[name, 0] == expected
    assert found.tokens["again", 1] == expected
    assert found.receipts["again"].dropped == 201 + 40 - 1 - WINDOW - SINKS


def test_a_prefix_in_the_cache_gives_the_same_answer(llama: Path) -> None:
    engine = make_engine(llama)
    prompt = random_ids(83, 3)
    engine.submit(ask("cold", prompt, 20), "g")
    cold, _ = run(engine)
    engine.submit(ask("warm", [*prompt, 7, 9], 20), "g")
    warm, _ = run(engine)
    assert warm.receipts["warm"].cached == 80
    model = reference(llama)
    assert cold.tokens["cold", 0] == masked_greedy(model, prompt, 20)
    assert warm.tokens["warm", 0] == masked_greedy(model, [*prompt, 7, 9], 20)


def test_adapters_and_keys_in_8_bits(llama: Path, tmp_path: Path) -> None:
    adapter = save_adapter(llama, tmp_path / "a", 4, 1)
    engine = make_engine(llama)
    digest = engine.load_adapter(str(adapter)).digest
    prompt = random_ids(60, 4)
    engine.submit(ask("changed", prompt, 30, adapter=digest), "g")
    engine.submit(ask("plain", prompt, 30), "g")
    found, _ = run(engine)
    assert found.tokens["changed", 0] == masked_greedy(
        adapted_reference(llama, adapter), prompt, 30
    )
    assert found.tokens["plain", 0] == masked_greedy(reference(llama), prompt, 30)
    rounded = make_engine(llama, kv_dtype="int8", num_blocks=14)
    rounded.submit(ask("r", prompt, 60), "g")
    assert run(rounded)[0].receipts["r"].generated == 60


def test_guesses_change_no_answer(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft model sees everything, so that some of its guesses are wrong."""
    always(monkeypatch)
    prompt = random_ids(11, 1) * 6
    engine = make_engine(llama, draft_model=str(llama))
    engine.submit(ask("r", prompt, 90), "g")
    found, _ = run(engine)
    counters = engine.metrics.counters
    assert counters["drafted_tokens"] > counters["rejected_tokens"] > 0
    assert found.tokens["r", 0] == masked_greedy(reference(llama), prompt, 90)


def test_a_prompt_that_is_seen_whole_drops_nothing(llama: Path) -> None:
    engine = make_engine(llama, kv_window=60)
    engine.submit(ask("fits", random_ids(30, 1), 37), "g")
    engine.submit(ask("one", random_ids(30, 1), 38), "g")
    found, _ = run(engine)
    assert [found.receipts[name].dropped for name in ("fits", "one")] == [0, 1]
    assert Receipt.__dataclass_fields__["dropped"].default == 0


def test_another_window_never_finds_the_blocks(llama: Path) -> None:
    kinds: list[dict[str, Any]] = [{}, {"kv_window": 22}, {"kv_sinks": 5}, {"kv_window": None}]
    names = [make_engine(llama, **each).info.dtype for each in kinds]
    assert len(set(names)) == 4
    assert names[-1] == "float32"


def test_blocks_between_are_freed_in_any_order_of_steps() -> None:
    config = EngineConfig(
        model="fake", num_blocks=40, block_size=BLOCK, max_batch_tokens=24, max_running=6,
        kv_window=WINDOW, kv_sinks=SINKS,
    )  # fmt: skip
    engine = Engine(config, FakeRunner(config, context_length=4000))
    for number in range(12):
        prompt = [number % 3 + 1] * (13 + 31 * number)
        asked = ask(f"r{number}", prompt, 20 + 9 * number, n=1 + number % 3, namespace="t")
        engine.submit(asked, "g")
    found = run_until_idle(engine)
    assert len(found.receipts) == 12
    assert engine.pool.free_blocks == engine.pool.num_blocks


@pytest.mark.parametrize("seed", range(4))
def test_no_block_is_lost_in_a_storm_of_long_prompts(seed: int) -> None:
    """Prompts longer than the pool, choices, priorities and preemptions, in both loops."""
    dice = random.Random(seed)
    config = EngineConfig(
        model="fake", num_blocks=dice.choice([16, 20, 30]), block_size=BLOCK, max_batch_tokens=24,
        max_running=6, kv_window=WINDOW, kv_sinks=3 * (seed % 3), overlap=seed % 2 == 0,
    )  # fmt: skip
    engine = Engine(config, FakeRunner(config, overlapped=True))
    for number in range(30):
        prompt = [dice.randrange(1, 3)] * dice.randrange(1, 300)
        kind = {"n": dice.randrange(1, 4), "priority": dice.choice([0, 0, 1])}
        engine.submit(ask(f"r{number}", prompt, dice.randrange(1, 60), **kind), "g")
    found = Collected()
    for _ in range(9000):
        engine.step()
        found.take(engine)
        engine.check_integrity()
        if not engine.busy:
            break
    assert len(found.receipts) == 30 and engine.metrics.counters["preemptions"]
    assert engine.pool.free_blocks == engine.pool.num_blocks


@pytest.mark.parametrize("blocks", [14, 64])
def test_copies_outside_the_pool_are_found_by_what_fits(llama: Path, blocks: int) -> None:
    engine = make_engine(llama, num_blocks=blocks, tier_ram_bytes=1 << 26)
    prompt, cached = random_ids(201, 9), []
    expected = masked_greedy(reference(llama), prompt, 12)
    for name in ("first", "again"):
        engine.submit(ask(name, prompt, 12), "g")
        found, deadline = Collected(), time.monotonic() + 60
        while engine.busy and time.monotonic() < deadline:
            if not engine.step():
                time.sleep(0.001)
            found.take(engine)
        assert found.tokens[name, 0] == expected
        cached.append(found.receipts[name].cached)
    assert cached[0] == 0 < cached[1] <= min(200, blocks * BLOCK)
    engine.close()


def test_refusals(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kv_window is 0: it must be above 0, or left out"):
        make_engine(llama, kv_window=0)
    with pytest.raises(ConfigError, match="kv_sinks is -1: it must not be negative"):
        make_engine(llama, kv_sinks=-1)
    with pytest.raises(ConfigError, match=r"batch_invariant is not served with kv_sinks \(6\)"):
        make_engine(llama, batch_invariant=True)
    mistral = save_checkpoint(tmp_path, "Mistral", sliding_window=20, num_hidden_layers=1)
    with pytest.raises(ConfigError, match="every layer has a window of its own: leave it out"):
        make_engine(mistral)
    with pytest.raises(RequestError, match="the prompt has 90 tokens"):
        small = make_engine(llama, num_blocks=8)  # of fewer blocks than the window needs
        small.submit(ask("r", [5] * 90, 4), "g")
