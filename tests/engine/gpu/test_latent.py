"""Latent attention: its kernels against plain torch, and DeepSeek V2 and V3 whole through the GPU's
runner against `transformers` and PEFT."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.backends.gpu.attention_reference import AttentionStep, paged_attention_reference
from engine.backends.gpu.mixed import Mix, MixLimits
from engine.backends.gpu.pointwise_reference import RotaryStep
from engine.backends.layers.norm import RmsNorm
from engine.config import EngineConfig
from engine.loop import Engine
from engine.model_spec import AttentionShape
from engine.runners.cpu.runner import load_runner
from tests.engine.adapters.test_inner_adapters import ATTENTION
from tests.engine.checkpoints import (
    VOCAB,
    adapted_reference,
    reference,
    reference_greedy,
    reference_logits,
    save_adapter,
)
from tests.engine.driver import greedy
from tests.engine.gpu.device import DEVICE, close
from tests.engine.helpers import ask, run_until_idle
from tests.engine.models.test_experts import save_checkpoint, some_ids

pytest.importorskip("triton")
from engine.backends.gpu import attention_launch
from engine.backends.gpu.latent.launch import Rows, by_head, place_latent
from engine.backends.gpu.latent.reference import by_head_reference, place_latent_reference
from tests.engine.gpu.formats.device_driver import (
    SETTINGS,
    assert_answers,
    device_driver,
    likely,
    stand_in,
)
from tests.engine.gpu.test_attention import make_step as attention_step
from tests.engine.gpu.test_attention import random_codes
from tests.engine.gpu.test_lora import make_site, make_step

PROTECTS = ("engine/backends/gpu", "engine/runners/gpu")
CODES = [torch.int8, torch.float8_e4m3fn]
PROMPTS = [some_ids(33), some_ids(5)]
CASES = ["deepseek-v2", "deepseek-v3"]


def attended(
    queries: list[int],
    contexts: list[int],
    heads: int = 4,
    latent: int = 32,
    *,
    rotated: int = 16,
    dtype: torch.dtype = torch.float32,
    shape: AttentionShape = AttentionShape(0.2),
    splits: int = 1,
    codes: torch.dtype | None = None,
    mixed: bool = False,
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(len(queries))
    step, blocks = attention_step(queries, contexts, 16, generator)
    layout = (blocks, 1, 16, latent + rotated)
    cache, scales = torch.randn(layout, generator=generator).to(DEVICE, dtype), None
    if codes is not None:
        cache, scales = random_codes(layout, codes, generator)
    q = torch.randn(sum(queries), heads, latent + rotated, generator=generator).to(DEVICE, dtype)
    want = paged_attention_reference(q, cache, step, shape, scales, rotated=rotated)
    if mixed:
        counts = torch.tensor([step.decodes, len(queries), splits], dtype=torch.int32)
        limits = MixLimits(splits=8, programs=12, combined=3, chunks=4)
        fields = (step.tables, step.table_rows, step.seq_lens, step.cu_q, 0)
        step, splits = AttentionStep(*fields, Mix(counts.to(DEVICE), limits)), limits.splits
    got = attention_launch.paged_attention(
        q, cache, step, shape, scales=scales, rotated=rotated, out=q[..., :latent], splits=splits
    )
    return got, want


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(("heads", "latent", "rotated"), [(4, 32, 16), (20, 26, 10), (96, 64, 64)])
def test_attention(heads: int, latent: int, rotated: int, splits: int) -> None:
    close(*attended([1, 1, 1], [140, 0, 300], heads, latent, rotated=rotated, splits=splits))
    if splits == 1:
        close(*attended([1, 1, 19, 40], [30, 2, 5, 0], heads, latent, rotated=rotated))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_attention_in_halves(dtype: torch.dtype) -> None:
    close(*attended([1, 1, 37], [140, 3, 20], dtype=dtype))
    close(*attended([1, 1], [300, 3], dtype=dtype, splits=2))


@pytest.mark.parametrize("codes", CODES)
def test_attention_over_codes(codes: torch.dtype) -> None:
    close(*attended([1, 1, 37], [140, 3, 20], codes=codes))
    close(*attended([1, 1], [300, 3], codes=codes, splits=4))


@pytest.mark.parametrize("first", [0, 6])
def test_attention_behind_a_window(first: int) -> None:
    shape = AttentionShape(0.2, window=40, first=first)
    close(*attended([1, 37, 9], [70, 0, 51], shape=shape))
    close(*attended([1, 1], [300, 2], shape=shape, splits=4))


def test_attention_of_any_mix_of_a_graph() -> None:
    close(*attended([1, 1, 1, 20], [140, 0, 300, 5], splits=4, mixed=True))
    close(*attended([1, 40], [400, 12], heads=20, splits=1, mixed=True))


@pytest.mark.parametrize("codes", [None, *CODES])
@pytest.mark.parametrize(
    ("heads", "plain", "latent", "rotated"), [(4, 12, 26, 10), (20, 16, 64, 16)]
)
def test_placing(
    heads: int, plain: int, latent: int, rotated: int, codes: torch.dtype | None
) -> None:
    """Queries and keys; a token without a slot is not stored."""
    torch.manual_seed(2)
    tokens, width = 7, latent + rotated
    q, keys = torch.randn(tokens, heads, plain + rotated), torch.randn(tokens, width)
    keys[3, 5] = float("nan")
    slots = torch.randperm(64)[:tokens].int()
    slots[2] = -1
    step = RotaryStep(torch.randint(0, 50, (tokens,)).int().to(DEVICE), slots.to(DEVICE))
    table, norm = (
        torch.randn(50, rotated, device=DEVICE),
        RmsNorm(torch.rand(latent).to(DEVICE), 1e-6),
    )
    found = []
    for function in (place_latent, place_latent_reference):
        cache, scales = torch.ones(4, 1, 16, width, device=DEVICE), None
        if codes is not None:
            rows = torch.zeros(4, 1, 16 * (width + 2), dtype=torch.uint8, device=DEVICE)
            cache = rows[..., : 16 * width].unflatten(-1, (16, width)).view(codes)
            scales = rows[..., 16 * width :].view(torch.bfloat16)
        out = torch.ones(tokens, heads, width, device=DEVICE)
        function(out, q.to(DEVICE), keys.to(DEVICE), step, table, norm, kv=cache, scales=scales)
        found.append((out, cache, scales))
    close(found[0][0], found[1][0])
    if codes is None:
        torch.testing.assert_close(found[0][1], found[1][1], equal_nan=True)
        return
    scale = [each[2].float().nan_to_num(-1.0) for each in found]
    torch.testing.assert_close(scale[0], scale[1], rtol=0.01, atol=0)
    wide = [each[1].float() * s[..., None] for each, s in zip(found, scale, strict=True)]
    torch.testing.assert_close(wide[0], wide[1], rtol=0.13, atol=0.05)
    assert not found[0][2].reshape(-1)[int(slots[3])].isfinite()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_rows", [16, 64])
def test_adapters_by_head(chunk_rows: int, dtype: torch.dtype) -> None:
    """Both ways: rows of B by head, then of A; and the reverse."""
    heads, plain, value, latent, rank = 3, 20, 28, 90, 40
    site, arena = make_site([[rank], [0], [3]], [heads * (plain + value)], latent, dtype)
    step = make_step([-1, 0, 2, 0, 1, *[0] * 20], chunk_rows, rank, padding=2)
    torch.manual_seed(1)
    x, y = (torch.randn(25, heads, n).to(DEVICE, dtype) for n in (plain, latent + 7))
    sides = {"inner": Rows(1, by_head=plain + value), "outer": Rows(0)}
    for _ in range(2):
        part = y[..., : (sides["outer"].by_head and value) or latent]
        expected = part.clone()
        by_head_reference(expected, x, arena, site, step, **sides)
        before = part.clone()
        by_head(part, x, arena, site, step, **sides)
        close(part, expected)
        assert torch.equal(part[[0, 4]], before[[0, 4]]) and not torch.equal(part[2], before[2])
        x, y = (torch.randn(25, heads, n).to(DEVICE, dtype) for n in (latent, value))
        sides = {"inner": Rows(0), "outer": Rows(1, plain, plain + value)}


@pytest.mark.parametrize(
    ("case", "chunk"),
    [pytest.param("deepseek-v2", 11, marks=pytest.mark.proof), ("deepseek-v3", 0)],
)
def test_logits(case: str, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in chunks, mixed steps, and decoding over split keys."""
    checkpoint = save_checkpoint(tmp_path, case, num_hidden_layers=2)
    model = reference(checkpoint)
    with stand_in(monkeypatch):
        driver = device_driver(checkpoint)
        assert_answers(driver, model, PROMPTS, 3, chunk=chunk)
        assert driver.runner.block_bytes == 2 * 16 * (26 + 10) * 4


def test_steps_of_few_rows_are_not_fused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without experts, too: the fused products know nothing of a latent vector."""
    checkpoint = save_checkpoint(
        tmp_path, "deepseek-v3", num_hidden_layers=1, first_k_dense_replace=1
    )
    with stand_in(monkeypatch):
        forward = device_driver(checkpoint).runner._forward
    assert not forward.fusable
    assert all(block.mixture is None for block in forward._decoder.blocks)


@pytest.mark.parametrize(
    "case", ["deepseek-v2", pytest.param("deepseek-v3", marks=pytest.mark.proof)]
)
def test_adapters(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each projection, beside a row without one, and in graphs."""
    checkpoint = save_checkpoint(tmp_path / "base", case, num_hidden_layers=2)
    kinds: list[Any] = [
        (3, ATTENTION, {"rank_pattern": {"kv_b_proj": 5}}),
        (2, ["kv_b_proj"], {"use_rslora": True}),
    ]
    adapters = [
        save_adapter(checkpoint, tmp_path / str(n), rank, n, targets, **changes)
        for n, (rank, targets, changes) in enumerate(kinds)
    ]
    models = [reference(checkpoint), *(adapted_reference(checkpoint, each) for each in adapters)]
    with stand_in(monkeypatch):
        driver = device_driver(checkpoint, blocks=300)
        handles = [None, *(driver.adapter(each, slot) for slot, each in enumerate(adapters))]
        asked = greedy(logprobs=VOCAB)
        sequences = [driver.sequence(PROMPTS[1], asked, each) for each in handles]
        driver.run(sequences, chunk=3, count=2)
        assert len(driver.runner._graphs._graphs) == 2
    found = [likely(sequence) for sequence in sequences]
    for model, sequence, ours in zip(models, sequences, found, strict=True):
        logits = reference_logits(model, sequence.history[:-1])[len(PROMPTS[1]) - 1 :]
        torch.testing.assert_close(ours, logits.log_softmax(-1), atol=3e-4, rtol=0)
    for n, ours in enumerate(found):
        assert all((ours[0] - other[0]).abs().max() > 0.01 for other in found[:n])


def test_a_prefix_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the whole engine: the second prompt has latent vectors that the first one left, and its own."""
    checkpoint = save_checkpoint(tmp_path, "deepseek-v3", num_hidden_layers=2)
    first, model = some_ids(37), reference(checkpoint)
    second = first[:25] + some_ids(9)
    config = EngineConfig(
        model=str(checkpoint), num_blocks=40, block_size=8, speculation="off", enable_lora=False,
        **{name: SETTINGS[name] for name in ("device", "dtype", "max_batch_tokens", "max_running")},
    )  # fmt: skip
    with stand_in(monkeypatch):
        engine = Engine(config, load_runner(config))
        for name, prompt in (("first", first), ("second", second), ("again", first)):
            engine.submit(ask(name, prompt, 4), "g")
            found = run_until_idle(engine)
            expected = reference_greedy(model, prompt, 4)
            assert found.tokens[name, 0] == expected
            cached = {"first": 0, "second": 24, "again": 32}[name]
            assert found.receipts[name].cached == cached
        engine.check_integrity()
