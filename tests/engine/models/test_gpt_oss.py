"""gpt-oss: experts in MXFP4, OpenAI's own configuration, batches, and what is refused.

`test_family_parity.py` compares logits, greedy tokens and adapters with `transformers`.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from engine.config import EngineConfig
from engine.errors import CheckpointError
from engine.models.load import load_model
from engine.models.registry import model_spec
from tests.engine.checkpoints import reference, reference_logits, save_checkpoint
from tests.engine.driver import LogitDriver, alone_and_together
from tests.engine.models.test_experts import some_ids
from tests.engine.models.test_family_parity import CASES
from tests.engine.models.test_gemma3 import rewrite

_SIZES = {"hidden_size": 64, "intermediate_size": 96}  # blocks of 32
_MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
_EXPERTS = "model.layers.1.mlp.experts"


def in_mxfp4(checkpoint: Path, folder: Path) -> Path:
    """The checkpoint with random blocks for its experts; the given one gets what `transformers` reads
    from them."""
    path = checkpoint / "model.safetensors"
    dense, packed = load_file(path), load_file(path)
    random = torch.Generator().manual_seed(5)
    for name in [each for each in dense if each.endswith(("gate_up_proj", "down_proj"))]:
        count, width, out = dense[name].shape
        shape = count, out, width // 32
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=random)
        scales = torch.randint(121, 125, shape, dtype=torch.uint8, generator=random)
        del packed[name]
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        dense[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    folder.mkdir()
    save_file(packed, folder / "model.safetensors", {"format": "pt"})
    save_file(dense, path, {"format": "pt"})
    (folder / "config.json").write_text((checkpoint / "config.json").read_text())
    rewrite(folder, quantization_config=_MXFP4)
    return folder


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    dense = save_checkpoint(tmp_path / "dense", "GptOss", **(CASES["gpt-oss"][1] | _SIZES))
    return dense, in_mxfp4(dense, tmp_path / "mxfp4")


def test_experts_in_mxfp4_are_those_of_transformers(pair: tuple[Path, Path]) -> None:
    dense, packed = pair
    ids = some_ids(40)
    expected = reference_logits(reference(dense), ids)
    driver = LogitDriver(packed, dtype="float32")
    found = driver.logits(driver.sequence(ids), 40, (driver.sequence(some_ids(30)), 30))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    rounded = LogitDriver(packed, dtype="float32", quantization="int8")
    near = rounded.logits(rounded.sequence(ids), 40)
    assert 0 < (near - expected).abs().mean() < 0.1 * expected.std()


def test_a_byte_is_two_values_and_a_scale_is_a_power_of_two(pair: tuple[Path, Path]) -> None:
    """By the table of the format: 0x7 is 6, 0x9 is -0.5; a scale of 126 is 2 ** -1."""
    path = pair[1] / "model.safetensors"
    tensors = load_file(path)
    blocks, scales = (
        tensors[f"{_EXPERTS}.down_proj_blocks"],
        tensors[f"{_EXPERTS}.down_proj_scales"],
    )
    blocks[3, 5, 2, 4], scales[3, 5, 2] = 0x97, 126
    save_file(tensors, path, {"format": "pt"})
    model = load_model(EngineConfig(model=str(pair[1]), dtype="float32"))
    mixture = model.decoder.blocks[1].mixture
    assert mixture is not None
    down = mixture._experts[3].down
    first = 2 * 32 + 4 * 2
    for column, value in ((first, 3.0), (first + 1, -0.25)):
        x = torch.zeros(1, 96)
        bias = down(x)
        x[0, column] = 1.0
        assert (down(x) - bias)[0, 5].item() == pytest.approx(value, abs=1e-6)


def test_answers_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path, "GptOss", **CASES["gpt-oss"][1])
    prompts = [some_ids(9 + 7 * n)[n:] for n in range(5)]
    alone, together = alone_and_together(checkpoint, prompts)
    assert together == alone


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_sinks_with_keys_and_values_in_8_bits(tmp_path: Path, kv_dtype: str) -> None:
    checkpoint = save_checkpoint(tmp_path, "GptOss", **CASES["gpt-oss"][1])
    ids = some_ids(40)
    expected = reference_logits(reference(checkpoint), ids)
    driver = LogitDriver(checkpoint, dtype="float32", kv_dtype=kv_dtype)
    found = driver.logits(driver.sequence(ids), 40)
    assert 0 < (found - expected).abs().mean() < 0.1 * expected.std()


def test_openais_own_configuration() -> None:
    """The fields of openai/gpt-oss-20b."""
    spec = model_spec(
        {
            "architectures": ["GptOssForCausalLM"], "attention_bias": True, "eos_token_id": 200002,
            "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "intermediate_size": 2880,
            "layer_types": ["sliding_attention", "full_attention"] * 12, "num_hidden_layers": 24,
            "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64,
            "num_experts_per_tok": 4, "num_key_value_heads": 8, "num_local_experts": 32,
            "quantization_config": _MXFP4, "rms_norm_eps": 1e-05, "rope_theta": 150000,
            "rope_scaling": {
                "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn",
                "original_max_position_embeddings": 4096, "truncate": False,
            },
            "sliding_window": 128, "swiglu_limit": 7.0, "vocab_size": 201088,
        }
    )  # fmt: skip
    assert spec.windows[:2] == (128, None) and spec.sinks and spec.context == 131072
    assert spec.experts is not None and spec.experts.clamp == (1.702, 7.0)
    assert (spec.rope.kind, spec.rope.theta) == ("yarn", 150000.0)


def broken(folder: Path, changes: dict[str, torch.Tensor | None]) -> str:
    path = folder / "model.safetensors"
    tensors = load_file(path) | changes
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, path, {"format": "pt"})
    with pytest.raises(CheckpointError) as caught:
        load_model(EngineConfig(model=str(folder)))
    return caught.value.message


def bytes_of(*shape: int) -> torch.Tensor:
    return torch.full(shape, 124, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"down_proj_scales": None}, "down_proj_scales is missing"),
        ({"down_proj_scales": bytes_of(7, 64, 2)}, "its scales [7, 64, 2]"),
        ({"down_proj_blocks": bytes_of(7, 64, 3, 15)}, "has shape [7, 64, 3, 15]"),
        (
            {"down_proj_blocks": bytes_of(6, 64, 3, 16), "down_proj_scales": bytes_of(6, 64, 3)},
            "has 6 experts, the configuration asks for 7",
        ),
        ({"gate_up_proj_scales": bytes_of(7, 192, 2) | 255}, "holds NaN or infinite values"),
        ({"gate_up_proj_blocks": None}, "experts.0.gate_proj.weight is missing"),
    ],
)
def test_blocks_that_do_not_fit_are_refused(
    pair: tuple[Path, Path], changes: dict[str, Any], told: str
) -> None:
    message = broken(pair[1], {f"{_EXPERTS}.{name}": each for name, each in changes.items()})
    assert told in message and "model.layers.1.mlp.experts" in message
