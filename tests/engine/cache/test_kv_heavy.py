"""Answers that see the first positions, the last ones, and the blocks of the prompt that its last queries
gave most attention to.

The reference is `transformers`: its own attention weights choose the blocks, and the mask is written out.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.loop import Engine
from engine.runners.fake import FakeRunner
from tests.engine.cache.test_kv_window import make_engine, random_ids, run
from tests.engine.checkpoints import (
    adapted_reference,
    reference,
    reference_greedy,
    save_adapter,
    save_checkpoint,
)
from tests.engine.helpers import Collected, ask
from tests.engine.models.test_family_parity import CASES
from tests.engine.quantization.test_kv import RoundingCache
from tests.engine.speculation.test_speculation import guess_from

BLOCK, WINDOW, SINKS, HEAVY, OBSERVED = 4, 21, 6, 12, 64


@torch.no_grad()
def heavy_blocks(model: Any, prompt: list[int], count: int = HEAVY // BLOCK) -> list[int]:
    """By the weights of all layers but the last, of all heads, from the last 64 queries."""
    model.set_attn_implementation("eager")
    layers = model(torch.tensor([prompt]), output_attentions=True, use_cache=False).attentions
    given = sum(each[0, :, -OBSERVED:].double().sum((0, 1)) for each in layers[:-1])
    first, end = -(-SINKS // BLOCK), max(0, len(prompt) - WINDOW + 1) // BLOCK
    sums = {n: float(given[n * BLOCK : (n + 1) * BLOCK].sum()) for n in range(first, end)}
    return sorted(sorted(sums, key=lambda n: -sums[n])[:count])


def mask_of(count: int, prompt: int, heavy: list[int]) -> torch.Tensor:
    query, key = torch.arange(count)[:, None], torch.arange(count)
    stays = torch.isin(key // BLOCK, torch.tensor(heavy, dtype=torch.int64))
    seen = (query < prompt) | (key > query - WINDOW) | (key < SINKS) | stays
    hidden = ~(seen & (key <= query))
    return torch.zeros(count, count).masked_fill(hidden, torch.finfo(torch.float32).min)[None, None]


@torch.no_grad()
def expected(
    model: Any, prompt: list[int], count: int, heavy: list[int] | None = None
) -> list[int]:
    heavy = heavy_blocks(model, prompt) if heavy is None else heavy
    ids = list(prompt)
    for _ in range(count):
        mask = mask_of(len(ids), len(prompt), heavy)
        logits = model(torch.tensor([ids]), attention_mask=mask, use_cache=False).logits
        ids.append(int(logits[0, -1].argmax()))
    return ids[len(prompt) :]


def heavy_engine(checkpoint: Path, **changes: object) -> Engine:
    return make_engine(checkpoint, **({"kv_heavy": HEAVY} | changes))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    return save_checkpoint(folder, num_hidden_layers=3, max_position_embeddings=1024)


@pytest.mark.parametrize(("tokens", "overlap"), [(7, False), (16, True), (200, False)])
def test_answers_are_those_of_the_mask(llama: Path, tokens: int, overlap: bool) -> None:
    """Beside each other, however the prompts are cut, with a receipt that says what was dropped; also in
    a loop that launches a step before it has read the last one."""
    engine = heavy_engine(llama, max_batch_tokens=tokens, num_blocks=100, overlap=overlap)
    prompts = [random_ids(count, count) for count in (5, 38, 90, 131)]
    for number, prompt in enumerate(prompts):
        engine.submit(ask(f"r{number}", prompt, 30, namespace=f"t{number}"), "g")
    found, _ = run(engine)
    model = reference(llama)
    for number, prompt in enumerate(prompts):
        heavy = heavy_blocks(model, prompt)
        assert len(heavy) == [0, 2, 3, 3][number]
        assert found.tokens[f"r{number}", 0] == expected(model, prompt, 30), len(prompt)
        unseen = len(prompt) + 30 - 1 - WINDOW - SINKS - BLOCK * len(heavy)
        assert found.receipts[f"r{number}"].dropped == max(0, unseen)
    assert engine.pool.free_blocks == engine.pool.num_blocks
    # The choice matters: the first blocks in their place answer otherwise.
    others = [expected(model, prompt, 30, [2, 3, 4]) for prompt in prompts[2:]]
    assert others != [found.tokens[f"r{number}", 0] for number in (2, 3)]


@pytest.mark.parametrize("case", ["qwen3", "deepseek-v2", "granite", "olmo2"])
def test_other_families(case: str, tmp_path: Path) -> None:
    family, changes = CASES[case]
    checkpoint = save_checkpoint(tmp_path, family, **changes)
    engine, prompt = heavy_engine(checkpoint), random_ids(97, 2)
    engine.submit(ask("r", prompt, 12), "g")
    assert run(engine)[0].tokens["r", 0] == expected(reference(checkpoint), prompt, 12)


@pytest.mark.parametrize("case", ["bloom", "falcon-alibi", "llama-dynamic"])
def test_where_nothing_is_unseen_an_answer_is_that_of_the_whole(case: str, tmp_path: Path) -> None:
    """Scores that fall with the distance read each key's own position."""
    family, changes = CASES[case]
    checkpoint = save_checkpoint(tmp_path, family, **changes)
    engine, prompt = heavy_engine(checkpoint, kv_window=90), random_ids(61, 2)
    engine.submit(ask("r", prompt, 12), "g")
    found = run(engine)[0]
    assert found.tokens["r", 0] == reference_greedy(reference(checkpoint), prompt, 12)
    assert found.receipts["r"].dropped == 0


def test_an_answer_holds_few_blocks(llama: Path) -> None:
    engine = heavy_engine(llama, num_blocks=60)
    engine.submit(ask("r", random_ids(131, 1), 100), "g")
    held, found = [], Collected()
    while engine.busy:
        engine.step()
        found.take(engine)
        engine.check_integrity()
        held += [len(seq.held_blocks) for seq in engine.scheduler.running if seq.output_len > 1]
    parts = -(-SINKS // BLOCK) + HEAVY // BLOCK + -(-WINDOW // BLOCK)
    assert max(held) <= parts + 2


def test_choices_and_cached_prompts(llama: Path) -> None:
    """Prompts are shared, as far as their last queries are computed; answers, which did not see all,
    never are."""
    engine, prompt = heavy_engine(llama, num_blocks=120), random_ids(130, 3)
    engine.submit(ask("cold", prompt, 40, n=3), "g")
    cold, _ = run(engine)
    answer = expected(reference(llama), prompt, 40)
    assert [cold.tokens["cold", n] for n in range(3)] == [answer] * 3
    engine.submit(ask("warm", prompt, 40), "g")
    warm, _ = run(engine)
    assert warm.tokens["warm", 0] == answer
    assert warm.receipts["warm"].cached == (130 - OBSERVED) // BLOCK * BLOCK
    longer = prompt + answer + random_ids(OBSERVED, 4)
    engine.submit(ask("next", longer, 8), "g")
    again, _ = run(engine)
    assert again.receipts["next"].cached == 130 // BLOCK * BLOCK
    assert again.tokens["next", 0] == expected(reference(llama), longer, 8)


def test_a_preempted_answer_goes_on_as_it_began(llama: Path) -> None:
    engine, prompts = heavy_engine(llama, num_blocks=44), [random_ids(n, n) for n in (90, 93)]
    for number, prompt in enumerate(prompts):
        engine.submit(ask(f"r{number}", prompt, 40), "g")
    found = Collected()
    while engine.busy:
        engine.step()
        found.take(engine)
        engine.check_integrity()
        answering = [seq for seq in engine.scheduler.running if seq.output_len in (11, 25)]
        if answering and engine.metrics.counters["preemptions"] < 3:
            engine.scheduler._preempt(answering[0])
    assert engine.metrics.counters["preemptions"] >= 2
    for number, prompt in enumerate(prompts):
        assert found.tokens[f"r{number}", 0] == expected(reference(llama), prompt, 40)


def test_adapters_and_guesses(llama: Path, tmp_path: Path) -> None:
    adapter = save_adapter(llama, tmp_path / "a", 4, 1)
    engine = heavy_engine(llama, speculation="off")
    digest, prompt = engine.load_adapter(str(adapter)).digest, random_ids(88, 5)
    answers = {
        None: expected(reference(llama), prompt, 30),
        digest: expected(adapted_reference(llama, adapter), prompt, 30),
    }
    guess_from(engine, lambda seq: answers[seq.request.inputs.adapter], random.Random(1), 0.3)
    for each in answers:
        engine.submit(ask(f"{each}", prompt, 30, adapter=each), "g")
    found, _ = run(engine)
    assert {each: found.tokens[f"{each}", 0] for each in answers} == answers
    counters = engine.metrics.counters
    assert counters["drafted_tokens"] > counters["rejected_tokens"] > 0


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_keys_and_values_in_8_bits(llama: Path, kind: str) -> None:
    class Rounding(RoundingCache):
        pass

    Rounding.kind = kind
    engine, prompt = heavy_engine(llama, kv_dtype=kind, kv_window=120), random_ids(90, 6)
    engine.submit(ask("all", prompt, 20), "g")
    found, _ = run(engine)
    model = reference(llama)
    cache, ids = Rounding(config=model.config), list(prompt)
    step = torch.tensor([ids])
    for _ in range(20):
        with torch.no_grad():
            out = model(step, past_key_values=cache, use_cache=True)
        ids.append(int(out.logits[0, -1].argmax()))
        step = torch.tensor([[ids[-1]]])
    assert found.tokens["all", 0] == ids[len(prompt) :]
    fewer = heavy_engine(llama, kv_dtype=kind)
    fewer.submit(ask("few", prompt, 40), "g")
    receipt = run(fewer)[0].receipts["few"]
    assert receipt.generated == 40 and receipt.dropped == 90 + 39 - WINDOW - SINKS - HEAVY


@pytest.mark.parametrize("seed", range(3))
def test_no_block_is_lost_in_a_storm(seed: int) -> None:
    dice = random.Random(seed)
    config = EngineConfig(
        model="fake", num_blocks=dice.choice([60, 90]), block_size=BLOCK, max_batch_tokens=24,
        max_running=6, kv_window=WINDOW, kv_sinks=3 * seed, kv_heavy=HEAVY,
    )  # fmt: skip
    engine = Engine(config, FakeRunner(config))
    for number in range(30):
        prompt = [dice.randrange(1, 3)] * dice.randrange(1, 150)
        kind = {"n": dice.randrange(1, 4), "priority": dice.choice([0, 0, 1])}
        engine.submit(ask(f"r{number}", prompt, dice.randrange(1, 60), **kind), "g")
    found = Collected()
    for _ in range(9000):
        engine.step()
        found.take(engine)
        engine.check_integrity()
        if not engine.busy:
            break
    assert len(found.receipts) == 30 and any(each.dropped for each in found.receipts.values())
    assert engine.pool.free_blocks == engine.pool.num_blocks


def test_an_aborted_prompt_dropped_nothing(llama: Path) -> None:
    engine = heavy_engine(llama, max_batch_tokens=16)
    engine.submit(ask("r", random_ids(120, 7), 9), "g")
    for _ in range(4):
        engine.step()
    engine.abort("r", "g")
    assert run(engine)[0].receipts["r"].dropped == 0


def test_refusals(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv_heavy is set \(12\), and kv_window is not"):
        heavy_engine(llama, kv_window=None)
    with pytest.raises(ConfigError, match="a block has 4 positions: raise it"):
        heavy_engine(llama, kv_heavy=3)
    with pytest.raises(ConfigError, match="so is batch_invariant: leave one of them out"):
        heavy_engine(llama, kv_sinks=0, batch_invariant=True)
    gemma = save_checkpoint(tmp_path, "Gemma2", head_dim=16, sliding_window=8)
    with pytest.raises(ConfigError, match="kv_heavy is not served with layers that have a window"):
        heavy_engine(gemma)
