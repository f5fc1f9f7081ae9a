"""Keys and values in 8 bits: bits by a plain formula, answers by `transformers` over a rounding cache."""

import random
from bisect import bisect_left
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from engine.backends.layers.quantised_kv import QuantizedKvPool
from engine.cache.prefix import PrefixHasher
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.loop import Engine
from engine.models.registry import model_spec
from engine.runners.cpu.runner import load_runner
from tests.engine.checkpoints import (
    VOCAB,
    adapted_reference,
    reference,
    save_adapter,
    save_checkpoint,
)
from tests.engine.helpers import Collected, ask
from tests.engine.speculation.test_speculation import guess_from

KINDS = ["int8", "fp8"]


# The formula: a scale in bfloat16, not below the largest value's, and the nearest code.
E4M3 = sorted(
    [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)]
    + [m * 2.0**-9 for m in range(8)]
)


def scale_of(values: np.ndarray, kind: str) -> float:
    exact = np.float32(np.abs(values).max()) / np.float32({"int8": 127, "fp8": 448}[kind])
    bits = int(np.float32(max(exact, 2.0**-64)).view(np.uint32))
    return float(np.uint32((bits + 0xFFFF) >> 16 << 16).view(np.float32))


def rounded(values: np.ndarray, kind: str) -> np.ndarray:
    """One head's values as they are read again, value by value."""
    scale = scale_of(values, kind)
    found = []
    for value in values:
        x = float(np.float32(value) * (np.float32(1) / np.float32(scale)))
        if kind == "int8":
            code = float(round(x))
        else:
            above = bisect_left(E4M3, abs(x))
            near = range(max(above - 1, 0), min(above + 1, len(E4M3)))
            nearest = min(near, key=lambda n: (abs(E4M3[n] - abs(x)), n % 2))
            code = E4M3[nearest] if x >= 0 else -E4M3[nearest]
        found.append(scale * code)
    return np.array(found, dtype=np.float32)


def rounded_heads(heads: torch.Tensor, kind: str) -> torch.Tensor:
    flat = heads.detach().float().reshape(-1, heads.shape[-1]).numpy()
    return torch.from_numpy(np.stack([rounded(row, kind) for row in flat])).view(heads.shape)


def pool_of(kind: str, dtype: torch.dtype = torch.float32, dim: int = 20) -> QuantizedKvPool:
    raw = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32,
        "hidden_size": 4 * dim,
        "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    return QuantizedKvPool(model_spec(raw), 6, 4, dtype, kind)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read_is_what_the_formula_gives(level: str, kind: str, dtype: torch.dtype) -> None:
    pool = pool_of(kind, dtype)
    random = torch.Generator().manual_seed(4)
    values = torch.randn(5, 4, 20, generator=random) * torch.logspace(-12, 6, 4)[None, :, None]
    values[0, 0] = 0.0
    values[1, 1, 3:] = 0.0  # a scale of one value
    values[2, 2] *= 1e-30
    values[3] = torch.linspace(-448, 448, 80).view(4, 20)  # ties and subnormal codes
    values[4] = torch.arange(80).view(4, 20) / 512
    wide = torch.zeros(5, 2, 4, 20, dtype=dtype)  # rows that do not follow each other
    wide[:, 1] = values.to(dtype)
    positions = torch.tensor([0, 3, 9, 13, 22])  # of blocks of 4
    block, place = positions // 4, positions % 4
    slots = (block[:, None] * 2 * 4 + torch.arange(4)) * 4 + place[:, None]  # 2 layers of 4 heads
    pool.write(1, slots, wide[:, 1])
    rows = (block[:, None] * 2 * 4 + torch.arange(4)).ravel()
    got = pool.gather(1, rows).view(5, 4, 4, 20)[torch.arange(5), :, place]
    expected = rounded_heads(wide[:, 1], kind).to(dtype)
    assert torch.equal(got, expected)
    assert not pool.gather(0, rows).any()
    pool.clear(int(block[4]), int(place[4]))
    assert not pool.gather(1, rows[-4:]).any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_that_is_not_finite_stays_so(level: str, kind: str) -> None:
    pool = pool_of(kind)
    values = torch.ones(2, 4, 20)
    values[0, 1, 5], values[1, 2, 0] = float("nan"), float("inf")
    slots = torch.arange(4) * 4 + torch.tensor([[0], [1]])
    pool.write(0, slots, values)
    got = pool.gather(0, torch.arange(4)).view(4, 4, 20)
    assert got[1, 0].isnan().all() and got[2, 1].isnan().all()
    assert got[0, :2].isfinite().all() and got[1, 1].isfinite().all()


class RoundingCache(transformers.DynamicCache):
    """Keeps what the formula makes of keys and values."""

    kind = "int8"

    def update(self, keys: torch.Tensor, values: torch.Tensor, *rest: Any, **named: Any) -> Any:
        kept = rounded_heads(keys, self.kind), rounded_heads(values, self.kind)
        return super().update(*kept, *rest, **named)


def greedy_over(model: Any, kind: str, prompt: list[int], count: int) -> list[int]:
    cache = RoundingCache(config=model.config)
    cache.kind = kind
    ids = list(prompt)
    with torch.no_grad():
        step = torch.tensor([ids])
        for _ in range(count):
            logits = model(input_ids=step, past_key_values=cache, use_cache=True).logits[0, -1]
            ids.append(int(logits.argmax()))
            step = torch.tensor([[ids[-1]]])
    return ids[len(prompt) :]


def engine_of(checkpoint: Path, **changes: object) -> Engine:
    fields = {
        "model": str(checkpoint), "num_blocks": 96, "threads": 1, "block_size": 4,
        "dtype": "float32", "max_batch_tokens": 16, "max_running": 8, "device": "cpu",
    }  # fmt: skip
    config = EngineConfig(**(fields | changes))  # type: ignore[arg-type]
    return Engine(config, load_runner(config))


def run(engine: Engine) -> Collected:
    found = Collected()
    while engine.busy:
        engine.step()
        found.take(engine)
        engine.check_integrity()
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
def test_answers_with_prefix_cache_and_copies(tmp_path: Path, family: str, kind: str) -> None:
    """Chunks, decoding together, cached prefixes and choices that copy their last block."""
    changes = {"sliding_window": 12, "head_dim": 16} if family == "Gemma2" else {}
    checkpoint = save_checkpoint(tmp_path, family, **changes)
    draw = torch.Generator().manual_seed(6)
    prompts = [torch.randint(3, VOCAB, (n,), generator=draw).tolist() for n in (5, 30, 19)]
    prompts.append(prompts[1][:22] + prompts[0])
    engine = engine_of(checkpoint, kv_dtype=kind)
    engine.submit(ask("first", prompts[1], 8), "g")
    found = run(engine)
    for number, prompt in enumerate(prompts):
        engine.submit(ask(f"r{number}", prompt, 12, n=2), "g")
    more = run(engine)
    model = reference(checkpoint)
    for number, prompt in enumerate(prompts):
        expected = greedy_over(model, kind, prompt, 12)
        assert more.tokens[f"r{number}", 0] == more.tokens[f"r{number}", 1] == expected
    assert found.tokens["first", 0] == greedy_over(model, kind, prompts[1], 8)
    assert more.receipts["r1"].cached == 28 and more.receipts["r3"].cached == 20


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_and_speculation(tmp_path: Path, kind: str) -> None:
    """Guesses, of which some are wrong: what they stored is written again."""
    checkpoint = save_checkpoint(tmp_path / "base")
    folder = save_adapter(checkpoint, tmp_path / "adapter", 4, 3)
    engine = engine_of(checkpoint, kv_dtype=kind)
    state = engine.load_adapter(str(folder))
    prompt = [9, 8, 7, 6, 5, 4] * 5
    answers = {
        None: greedy_over(reference(checkpoint), kind, prompt, 24),
        state.digest: greedy_over(adapted_reference(checkpoint, folder), kind, prompt, 24),
    }
    guess_from(engine, lambda seq: answers[seq.request.inputs.adapter], random.Random(2))
    for adapter in answers:
        engine.submit(ask(f"{adapter}", prompt, 24, adapter=adapter), "g")
    found = run(engine)
    assert {a: found.tokens[f"{a}", 0] for a in answers} == answers
    counters = engine.metrics.counters
    assert counters["drafted_tokens"] > counters["rejected_tokens"] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_gigabyte_holds_more_sequences(tmp_path: Path, kind: str) -> None:
    checkpoint = save_checkpoint(tmp_path, head_dim=64)
    counts = {
        each: engine_of(checkpoint, kv_dtype=each, dtype="bfloat16", num_blocks=None,
                        kv_memory_bytes=8 << 20).pool.num_blocks
        for each in ("auto", kind)
    }  # fmt: skip
    assert counts[kind] / counts["auto"] >= 1.9


def test_keys_are_those_of_the_type(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path)
    kinds = ("auto", "int8", "fp8")
    infos = [engine_of(checkpoint, kv_dtype=kind).info for kind in kinds]
    assert [info.dtype for info in infos] == ["float32", "float32/int8", "float32/fp8"]
    roots = {PrefixHasher(i.base_digest, i.dtype, 4).root("acme", None) for i in infos}
    assert len(roots) == 3


def test_another_type_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="kv_dtype is 'int4': use one of auto, int8, fp8"):
        EngineConfig(model="x", kv_dtype="int4")
