"""Models with quantised weights against `transformers` and `peft` with the same rounding done to them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.backends.compiled import linear
from engine.backends.layers.quantise import quantize
from engine.backends.layers.quantised_linear import QuantizedLinear
from engine.config import EngineConfig
from engine.errors import CheckpointError, ConfigError
from engine.models.load import load_model
from tests.engine.checkpoints import (
    VOCAB,
    reference,
    reference_logits,
    save_checkpoint,
)
from tests.engine.driver import Driver, LogitDriver
from tests.engine.gguf_files import f32, random_blocks, size_of, vocabulary, write_gguf
from tests.engine.models.test_family_parity import CASES
from tests.engine.models.test_gguf_weights import _quantised_llama
from tests.engine.quantization.agreement import assert_adapter_agrees, some_ids

needs_kernel = pytest.mark.skipif(
    linear.kernel is None,
    reason="the compiled products are absent: pip install -e . with a C compiler",
)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """To 255 steps in groups of 32, the last of which may be short."""
    parts = []
    for part in x.split(32, -1):
        scale = part.abs().amax(-1, keepdim=True) / 127
        parts.append(torch.where(scale > 0, (part / scale).round() * scale, part))
    return torch.cat(parts, -1)


def round_inputs(module: torch.nn.Module) -> None:
    module.register_forward_pre_hook(lambda _, given: (rounded(given[0]), *given[1:]))


def in_int8(model: Any) -> Any:
    """The model with its matrices and the inputs of its products rounded."""
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
                parts = []
                for part in module.weight.split(32, -1):
                    scale = (part.abs().amax(-1, keepdim=True) / 127).half().float()
                    parts.append((part / scale).round().clamp(-127, 127) * scale)
                if name != "lm_head" or not model.config.tie_word_embeddings:
                    module.weight.copy_(torch.cat(parts, -1))
            if isinstance(module, torch.nn.Linear):
                round_inputs(module)
    return model


@needs_kernel
def test_every_gguf_block_type_is_computed_from_its_codes(tmp_path: Path) -> None:
    file = tmp_path / "mixed.gguf"
    model = _quantised_llama(file)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":  # which is stored in floats
            round_inputs(module)
    driver = LogitDriver(file, dtype="float32")
    ids = some_ids(40)
    expected = reference_logits(model, ids)
    found = driver.logits(driver.sequence(ids), 40)
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=0)
    for block in driver.runner._model.decoder.blocks:
        assert isinstance(block.o.linear, QuantizedLinear)


@needs_kernel
def test_codes_take_the_room_that_the_file_takes(tmp_path: Path) -> None:
    shape, metadata = (512, 256), _one_layer()
    tensors = [f32(f"{name}.weight", torch.ones(256))
               for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm")]  # fmt: skip
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        size = {"ffn_gate": shape, "ffn_up": shape, "ffn_down": shape[::-1]}.get(name, (256, 256))
        raw = random_blocks("Q4_1", size_of("Q4_1", size), 1)
        tensors.append((f"blk.0.{name}.weight", size, "Q4_1", raw))
    raw = random_blocks("Q8_0", size_of("Q8_0", (VOCAB, 256)), 2)
    tensors.append(("token_embd.weight", (VOCAB, 256), "Q8_0", raw))
    file = write_gguf(tmp_path / "small.gguf", metadata, tensors)
    served = load_model(EngineConfig(model=str(file))).bytes
    stored = sum(len(raw) for _, _, _, raw in tensors)
    assert stored * 0.95 < served < stored * 1.05
    assert load_model(EngineConfig(model=str(file), quantization="none")).bytes > 2.5 * stored


def _one_layer() -> dict[str, Any]:
    return {
        "general.architecture": "llama", "llama.block_count": 1, "llama.context_length": 128,
        "llama.embedding_length": 256, "llama.feed_forward_length": 512,
        "llama.attention.head_count": 4, "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": 64,
    } | vocabulary(VOCAB)  # fmt: skip


@pytest.mark.parametrize(
    "case", ["llama-mha-biased", "qwen2", "qwen3", "gemma2", "mistral", "phi3"]
)
@pytest.mark.parametrize("compiled", [True, False])
def test_int8_of_a_family(
    case: str, compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(linear, "kernel", None)
    family, changes = CASES[case]
    checkpoint = save_checkpoint(tmp_path, family, **changes)
    ids = some_ids(60)
    plain = reference_logits(reference(checkpoint), ids)
    expected = reference_logits(in_int8(reference(checkpoint)), ids)
    driver = LogitDriver(checkpoint, dtype="float32", quantization="int8")
    sequence, beside = driver.sequence(ids), driver.sequence(some_ids(70))
    found = torch.cat([
        driver.logits(sequence, 40, (beside, 30)),
        driver.logits(sequence, 1, (beside, 1)),
        driver.logits(sequence, 19),
    ])  # fmt: skip
    error, of_rounding = (found - expected).abs().mean(), (expected - plain).abs().mean()
    assert error < of_rounding / 4, "nearer to its own reference than to the float model"


@pytest.mark.parametrize("compiled", [True, False])
def test_an_adapter_on_an_int8_base(
    compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(linear, "kernel", None)
    base = save_checkpoint(tmp_path / "base")
    model = in_int8(reference(base))
    assert_adapter_agrees(base, base, model, tmp_path, quantization="int8")


@needs_kernel
@pytest.mark.parametrize("to", ["int8", "int4"])
def test_answers_do_not_depend_on_the_batch(to: str, tmp_path: Path) -> None:
    base = save_checkpoint(tmp_path / "base")
    alone = []
    prompts = [some_ids(20 + 7 * n)[n:] for n in range(6)]
    for prompt in prompts:
        driver = Driver(base, quantization=to, dtype="float32")
        sequence = driver.sequence(prompt)
        driver.run([sequence], count=10)
        alone.append(sequence.output)
    driver = Driver(base, quantization=to, dtype="float32")
    sequences = [driver.sequence(prompt) for prompt in prompts]
    driver.run(sequences, chunk=5, count=10)
    assert [sequence.output for sequence in sequences] == alone


def test_int4_is_nearer_than_plain_rounding() -> None:
    weight = torch.randn(200, 96, generator=torch.Generator().manual_seed(1)) * 0.02
    groups = weight.view(200, 3, 32)
    low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    scale = (high - low) / 15
    plain = (((groups - low) / scale).round() * scale + low).view_as(weight)
    found = quantize(weight, "int4").dense()
    assert (found - weight).norm() < (plain - weight).norm()
    assert np.isclose(quantize(weight, "int8").dense(), weight, atol=4e-4).all()


@pytest.mark.parametrize("to", ["int8", "int4"])
def test_groups_of_zeros_and_of_one_value_keep_their_values(to: str) -> None:
    weight = torch.zeros(3, 70)
    weight[1] = 0.25
    weight[2] = -0.5
    torch.testing.assert_close(quantize(weight, to).dense(), weight, rtol=2e-3, atol=0)


def test_the_setting_is_part_of_the_digest_and_is_checked(tmp_path: Path) -> None:
    base = save_checkpoint(tmp_path / "base")
    digests = {
        to: load_model(EngineConfig(model=str(base), quantization=to)).digest
        for to in ("auto", "none", "int8", "int4")
    }
    assert len(set(digests.values())) == 4
    with pytest.raises(
        ConfigError, match="quantization is 'int3': use one of auto, none, int8, int4"
    ):
        EngineConfig(model=str(base), quantization="int3")


def test_a_quantised_file_is_not_quantised_again(tmp_path: Path) -> None:
    file = tmp_path / "mixed.gguf"
    _quantised_llama(file)
    with pytest.raises(ConfigError, match=r"is stored as Q.*leave it at auto"):
        load_model(EngineConfig(model=str(file), quantization="int8"))


@needs_kernel
def test_a_scale_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    metadata = _one_layer()
    raw = bytearray(random_blocks("Q8_0", size_of("Q8_0", (VOCAB, 256)), 2))
    raw[34 * 5 : 34 * 5 + 2] = b"\x00\x7e"  # NaN in half floats
    tensors = [("token_embd.weight", (VOCAB, 256), "Q8_0", bytes(raw))]
    file = write_gguf(tmp_path / "poisoned.gguf", metadata, tensors)
    with pytest.raises(CheckpointError, match=r"token_embd\.weight holds scales that are NaN"):
        load_model(EngineConfig(model=str(file)))


def test_int4_is_exact_but_for_its_codes() -> None:
    """Scales and minima are what float16 holds, and each value has the nearest of its group's codes."""
    torch.manual_seed(4)
    weight = torch.cat((torch.randn(48, 128) * 0.05, torch.rand(16, 128) + 5))
    found = quantize(weight, "int4")
    assert found.minima is not None
    assert torch.equal(found.minima, found.minima.half().float())
    assert torch.equal(found.scales, found.scales.half().float())
    levels = torch.arange(16) * found.scales[:, :, None] + found.minima[:, :, None]
    groups = weight.reshape(64, 4, 32)
    nearest = (groups[:, :, :, None] - levels[:, :, None]).abs().amin(-1)
    off = (found.dense() - weight).abs().reshape(64, 4, 32)
    torch.testing.assert_close(off, nearest, atol=1e-6, rtol=0)
    by_zero_points = quantize(weight, "int4", zero_points=True)
    assert (off.square().mean() / (by_zero_points.dense() - weight).square().mean()).item() < 0.9
